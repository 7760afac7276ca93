"""One step of a quantization: modules that share what their format shares, from stored bytes to stored bytes.

What the step is made from and keeps is described by names, shapes and dtypes; numpy and the formats are imported when it
runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from k3tool import formats
from k3tool.activations import Activations
from k3tool.checkpoint.table import Kind
from k3tool.errors import CheckFailed
from k3tool.transform.base import Applied, TensorOut
from k3tool.transform.quantize_policy import Choice

SCRATCH_BYTES = 16 << 20  # tables and one tile of float32 rows
TALLIED, RECOGNIZED = (
    1.35,
    0.3,
)  # held beside MXFP4 while its codes are counted, and beside plain values that may be MXFP4
WEIGHING_BYTES = 32 << 20  # the same tile in float64, before and after


@dataclass(frozen=True, eq=False)
class Converting:
    """One kind of module that changes: as stored, and as it will be. All modules that are alike share one."""

    scheme: str
    shape: tuple[int, int]
    parts: tuple[tuple[str, Kind], ...]
    choice: Choice
    outputs: dict[str, Kind]


class Input(NamedTuple):
    """One stored part: its kind, the shapes of the regions that hold it, and the axis along which they join."""

    part: str
    kind: Kind
    shapes: tuple[tuple[int, ...], ...]
    axis: int


class Work(NamedTuple):
    """One module and what it is made from."""

    path: str
    converting: Converting
    inputs: tuple[Input, ...]


class PartCut(NamedTuple):
    """What a rank keeps of one part: [first, last) along axis, all of it without one. Of a `weight_shape`
    (is_shape), the extent of one of `last` equal shares."""

    is_shape: bool
    axis: int | None
    first: int
    last: int


class KeepParts(NamedTuple):
    """What a rank keeps of every part that a `Convert` has made, in order."""

    cuts: tuple[PartCut, ...]

    def take(self, made: Sequence[Any]) -> Iterator[Any]:
        return map(_kept, made, self.cuts)


@dataclass(frozen=True)
class Convert:
    """Modules that share what their format shares, from stored bytes to stored bytes.

    Measures each: [path, scheme before, scheme after, `Measured` as JSON, `Weighted` as JSON where there are
    activations]. exact: raises CheckFailed rather than change a value. calibrated: one module, whose errors are
    compensated. device: of torch, where the arithmetic runs; the bytes are the same.
    """

    works: tuple[Work, ...]
    dtype: str
    search: bool
    exact: bool
    activations: Activations | None = None
    calibrated: bool = False
    device: str | None = None

    def describe(self) -> str:
        said = f"{self.works[0].converting.scheme} to {self._target().describe()}"
        if self.activations is not None:
            said += f", {'compensated' if self.calibrated else 'weighted'} by {self.activations.sha256[:16]}"
        return said

    @property
    def working_bytes(self) -> int:
        held = SCRATCH_BYTES
        for work in self.works:
            stored = sum(TensorOut(part, kind.dtype, kind.shape).nbytes for part, kind in work.converting.parts)
            held += int(stored * (TALLIED if work.converting.scheme == "mxfp4" else RECOGNIZED))
        if self.calibrated:
            from k3tool.formats.compensate import working_bytes

            made = self.works[0].converting.outputs
            again = 2 * sum(TensorOut(part, kind.dtype, kind.shape).nbytes for part, kind in made.items())
            return held + again + working_bytes(self.works[0].converting.shape[1])
        return held if self.activations is None else held + WEIGHING_BYTES

    def load(self) -> None:
        """Bring in everything that `apply` uses."""
        from k3tool.formats.loading import load

        scheme = self.works[0].converting.scheme
        weighted = self.activations is not None
        load(scheme, self._target(), weighted=weighted, calibrated=self.calibrated, device=self.device)

    def _target(self) -> Any:
        from k3tool.formats.convert import Target

        choice = self.works[0].converting.choice
        return Target(choice.scheme, choice.group_size, self.dtype, self.search)

    def apply(self, inputs: Sequence[Any]) -> Applied:
        from k3tool.formats.convert import Stored

        remaining = iter(inputs)
        sources = [
            Stored(
                w.path,
                w.converting.scheme,
                {i.part: _assemble(i, remaining) for i in w.inputs},
                w.converting.shape,
                self.activations and self.activations.mean_square(w.path, w.converting.shape[1]),
            )
            for w in self.works
        ]
        outputs: list[Any] = []
        rows: list[list[Any]] = []
        for work, (made, weighted) in zip(self.works, self._converted(sources), strict=True):
            if self.exact and not made.measured.exact:
                raise CheckFailed(
                    f"{work.path}: {work.converting.choice.scheme} changes values "
                    f"(relative error {made.measured.relative_error:.3g}), and --exact was asked for",
                    hint="keep this component, choose a scheme that holds it, or leave --exact out",
                    tensor=work.path,
                )
            outputs.extend(made.parts[part] for part in work.converting.outputs)
            converting = work.converting
            row = [work.path, converting.scheme, converting.choice.scheme, *made.measured.as_json()]
            rows.append(row if weighted is None else [*row, weighted.as_json()])
        return Applied(outputs, rows)

    def _converted(self, sources: Sequence[Any]) -> list[tuple[Any, Any]]:
        """(Converted, Weighted or None) of each."""
        from k3tool.formats.compensate import MOST_HELD, STRIP_ROWS, compensate
        from k3tool.formats.convert import convert
        from k3tool.formats.weighing import weigh

        target = self._target()
        if self.calibrated and self.activations is not None:
            (source,) = sources
            known, where = self.activations, (source.name, source.shape[1])
            held = known.held(*where)
            if held is None:
                return [compensate(source, target, partial(known.gram, *where, STRIP_ROWS))]
            source = source._replace(weight=known.mean_square_without(*where, held))
            strips = partial(known.gram_without, *where, STRIP_ROWS, held)
            return [compensate(source, target, strips, held[:MOST_HELD])]
        if self.device is None:
            made = convert(sources, target)
        else:
            from k3tool.formats.device import convert_on

            made = convert_on(self.device, sources, target)
        if self.activations is None:
            return [(one, None) for one in made]
        return [(one, weigh(s, target.scheme, one.parts)) for s, one in zip(sources, made, strict=True)]


def _assemble(wanted: Input, inputs: Iterator[Any]) -> Any:
    import numpy as np

    views = [formats.view(memoryview(next(inputs)), wanted.kind.dtype, shape) for shape in wanted.shapes]
    return views[0] if len(views) == 1 else np.concatenate(views, axis=wanted.axis)


def _kept(array: Any, cut: PartCut) -> Any:
    """The bytes that a rank stores of one part."""
    import numpy as np

    if cut.is_shape and cut.axis is not None:
        array = array.copy()
        array[cut.axis] //= cut.last
    elif cut.axis is not None:
        array = array[cut.first : cut.last] if cut.axis == 0 else array[:, cut.first : cut.last]
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
