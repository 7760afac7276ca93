"""Second moments of what matrices are multiplied with: the file between `run --save-activations` and `quantize`.

A safetensors file. `MODULE.input_mean_square` F32 [n]: the mean square of each input of a matrix [m, n], over all tokens
that were fed. `MODULE.input_gram` F32 [n, n], where it was asked for: the mean of x x^T. Routed experts of a layer share
one entry each for w1, w2 and w3 (`....block_sparse_moe.experts.w1`), over all visits of tokens to experts: with 896
experts a calibration text visits most of them a few times only, and what a few tokens say of one is noise.
`MODULE.input_held` F32 [h, n]: some of the inputs themselves, beside a Gram matrix, which counts them too: they can be taken
out of it, and then tell whether what was made for the others is good for these.

Nothing here imports torch. What a file says is checked before it is used.
"""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from k3tool.checkpoint.header import TensorSpec, header_length, parse_header
from k3tool.checkpoint.writer import ShardWriter
from k3tool.config import K3Config
from k3tool.disk import disk_errors, refusal
from k3tool.errors import CheckpointCorrupt, CheckpointMissing, UnsupportedError
from k3tool.names import parse_name

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

FORMAT, VERSION = "k3tool-activations", "1"
SQUARES, GRAM, HELD = ".input_mean_square", ".input_gram", ".input_held"
READ_BYTES = 8 << 20
AGAIN = "record it again, by run with --save-activations"
_OTHERS = ("raw", "quantization", "dtype", "vision")  # of a configuration: not what the text model computes
_DIAGONAL = 1e-3  # a Gram matrix and its mean squares are summed apart, in float32 and float64


def is_recorded(path: str) -> bool:
    """Whether a run records the inputs of a module: of those in layers, but not of embeddings, head and vision tower."""
    name = parse_name(path + ".weight")
    return name is not None and name.layer is not None


def entry_of(path: str) -> str:
    """The name under which the inputs of a module are recorded: its path, without the number of an expert."""
    name = parse_name(path + ".weight")
    return path if name is None else name._replace(expert=None).module_path


def fingerprint(config: K3Config) -> str:
    """Hex digest of everything that the text model's computation depends on but weights and their storage."""
    fields = {f.name: getattr(config, f.name) for f in dataclasses.fields(config) if f.name not in _OTHERS}
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


class Activations:
    """A recorded file, opened by its header; numbers are read when they are asked for, from several threads at once.

    tokens: how many were fed.
    """

    def __init__(self, path: Path, specs: Mapping[str, TensorSpec], data_start: int, tokens: int, model: str) -> None:
        self.path = path
        self.tokens = tokens
        self.model = model
        self._specs = specs
        self._data_start = data_start
        with disk_errors(path):
            self._identity = _identity(os.stat(path))
        self._held: dict[str, NDArray[np.float32]] = {}

    @classmethod
    def open(cls, path: str | Path) -> Activations:
        """Raises CheckpointMissing, CheckpointCorrupt for what is no such file."""
        path = Path(path)
        try:
            with open(path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                length = header_length(file.read(8), size, where=str(path))
                header = parse_header(file.read(length), file_size=size, where=str(path))
        except OSError as error:
            if error.errno != errno.ENOENT:
                raise refusal(error, path) from error
            raise CheckpointMissing(f"cannot read activations {path}: {error.strerror}", hint=AGAIN) from None
        except CheckpointCorrupt as error:
            raise CheckpointCorrupt(error.message, hint=AGAIN) from None
        said = header.metadata
        if (said.get("format"), said.get("version")) != (FORMAT, VERSION):
            raise _corrupt(
                f"{path}: expected {FORMAT} of version {VERSION}, found {said.get('format', 'no format')!r:.80} "
                f"{said.get('version', '')!r:.20}"
            )
        tokens = said.get("tokens", "")
        if not (tokens.isascii() and tokens.isdecimal() and 0 < len(tokens) < 18 and int(tokens)):
            raise _corrupt(f"{path}: tokens must be a number above 0, found {tokens!r:.40}")
        for spec in header.tensors:
            square = len(spec.shape) == 2 and spec.shape[0] == spec.shape[1] and spec.name.endswith(GRAM)
            some = len(spec.shape) == 2 and 0 < spec.shape[0] < int(tokens) and spec.name.endswith(HELD)
            if spec.dtype != "F32" or not (square or some or (len(spec.shape) == 1 and spec.name.endswith(SQUARES))):
                raise _corrupt(f"{path}: {spec.name} {spec.dtype} {list(spec.shape)} is no second moment")
        specs = {spec.name: spec for spec in header.tensors}
        return cls(path, specs, header.data_start, int(tokens), said.get("model", ""))

    @cached_property
    def sha256(self) -> str:
        """Of the whole file: what is made with it depends on it."""
        digest = hashlib.sha256()
        with disk_errors(self.path), open(self.path, "rb", buffering=0) as file:
            while block := file.read(READ_BYTES):
                digest.update(block)
        return digest.hexdigest()

    def check_model(self, config: K3Config) -> None:
        """Raises UnsupportedError where the file was recorded on a model of another configuration."""
        if self.model != fingerprint(config):
            raise UnsupportedError(
                f"{self.path} was recorded on another model: configuration {self.model[:12]!r}, "
                f"the source has {fingerprint(config)[:12]!r}",
                hint="record it on this model, whole, by run with --save-activations",
            )

    def mean_square(self, module: str, columns: int) -> NDArray[np.float32]:
        """[columns] for the matrix of a module path. Raises UnsupportedError where it is not recorded or of another
        width, CheckpointCorrupt for what is no mean square; both name the tensor."""
        import numpy as np

        name = entry_of(module) + SQUARES
        if name not in self._held:
            spec = self._spec(name, (columns,))
            values = np.frombuffer(self._read(spec, 0, spec.nbytes), "<f4")
            if not np.isfinite(values).all() or values.min(initial=0) < 0:
                bad = int(np.flatnonzero(~(np.isfinite(values) & (values >= 0)))[0])
                raise _corrupt(f"{self.path}: {name} holds {values[bad]:g} at {bad}, which is no mean square")
            self._held[name] = values
        self._spec(name, (columns,))
        return self._held[name]

    def check_gram(self, module: str, columns: int) -> None:
        """Raises UnsupportedError where the Gram matrix of a module's inputs is not recorded, or of another width."""
        name = entry_of(module) + GRAM
        if name not in self._specs:
            raise UnsupportedError(
                f"{self.path} holds no {name}", hint="record it again, by run with --save-activations and --gram"
            )
        self._spec(name, (columns, columns))

    def gram(self, module: str, columns: int, rows: int) -> Iterator[tuple[slice, NDArray[np.float32]]]:
        """The Gram matrix [columns, columns] of a module's inputs, `rows` rows at a time.

        Raises what `check_gram` raises, and CheckpointCorrupt for a number that is none, or a diagonal that is not that
        of the mean squares."""
        import numpy as np

        self.check_gram(module, columns)
        spec, squares = self._specs[entry_of(module) + GRAM], self.mean_square(module, columns)
        for first in range(0, columns, rows):
            taken = slice(first, min(first + rows, columns))
            data = self._read(spec, 4 * columns * taken.start, 4 * columns * (taken.stop - taken.start))
            values = np.frombuffer(data, "<f4").reshape(-1, columns)
            diagonal = values[np.arange(len(values)), np.arange(taken.start, taken.stop)]
            apart = np.abs(diagonal - squares[taken]) > _DIAGONAL * squares[taken]
            if not np.isfinite(values).all() or apart.any():
                bad = first + int(np.flatnonzero(~np.isfinite(values).all(1) | apart)[0])
                raise _corrupt(f"{self.path}: {spec.name} has NaN, infinity or a wrong diagonal in row {bad}")
            yield taken, values

    def held(self, module: str, columns: int) -> NDArray[np.float32] | None:
        """[h, columns]: inputs that can be kept aside; None where the file has none. Raises UnsupportedError for another
        width, CheckpointCorrupt for a number that is none."""
        import numpy as np

        found = self._specs.get(entry_of(module) + HELD)
        if found is None:
            return None
        spec = self._spec(found.name, (found.shape[0], columns))
        values = np.frombuffer(self._read(spec, 0, spec.nbytes), "<f4").reshape(-1, columns)
        if not np.isfinite(values).all():
            raise _corrupt(f"{self.path}: {spec.name} has NaN or infinity")
        return values

    def gram_without(
        self, module: str, columns: int, rows: int, held: NDArray[np.float32]
    ) -> Iterator[tuple[slice, NDArray[np.float32]]]:
        """As `gram`, of the other tokens alone. held: what `held` gave."""
        others = self.tokens - len(held)
        for taken, values in self.gram(module, columns, rows):
            apart = held[:, taken].T.astype("f8") @ held
            yield taken, ((values.astype("f8") * self.tokens - apart) / others).astype("f4")

    def mean_square_without(self, module: str, columns: int, held: NDArray[np.float32]) -> NDArray[np.float32]:
        """As `mean_square`, of the other tokens alone."""
        apart = (held.astype("f8") ** 2).sum(0)
        squares = self.mean_square(module, columns).astype("f8") * self.tokens - apart
        return (squares.clip(0) / (self.tokens - len(held))).astype("f4")

    def holds_some(self) -> bool:
        """Whether inputs were recorded that can be kept aside."""
        return any(name.endswith(HELD) for name in self._specs)

    def _spec(self, name: str, shape: tuple[int, ...]) -> TensorSpec:
        spec = self._specs.get(name)
        if spec is None or spec.shape != shape:
            found = "it is not recorded" if spec is None else f"found {list(spec.shape)}"
            raise UnsupportedError(
                f"{self.path} does not match the model: {name} must be {list(shape)}, {found}",
                hint="record it on this model, with all layers that are to be quantized",
            )
        return spec

    def _read(self, spec: TensorSpec, offset: int, length: int) -> bytes:
        with disk_errors(self.path), open(self.path, "rb", buffering=0) as file:
            if _identity(os.fstat(file.fileno())) != self._identity:
                raise _corrupt(f"{self.path} has changed while it was in use")
            data = os.pread(file.fileno(), length, self._data_start + spec.start + offset)
        if len(data) != length:
            raise _corrupt(f"{self.path}: {spec.name} is truncated")
        return data


class Recorded(NamedTuple):
    """Moments of one entry to be written: `squares` [n] float32, in `gram` the bytes of [n, n] float32 row by row, in `held`
    those of some inputs [h, n] float32."""

    name: str
    width: int
    squares: bytes
    gram: Callable[[], Iterable[bytes]] | None = None
    held: bytes = b""


def write_activations(path: Path, entries: Iterable[Recorded], config: K3Config, tokens: int) -> None:
    """All entries as one file, written atomically."""
    entries = sorted(entries, key=lambda entry: entry.name)
    declared: list[tuple[str, str, tuple[int, ...]]] = [(e.name + SQUARES, "F32", (e.width,)) for e in entries]
    with_gram = [(entry, entry.gram) for entry in entries if entry.gram is not None]
    declared += [(entry.name + GRAM, "F32", (entry.width, entry.width)) for entry, _ in with_gram]
    with_held = [entry for entry in entries if entry.held]
    declared += [(e.name + HELD, "F32", (len(e.held) // (4 * e.width), e.width)) for e in with_held]
    metadata = {"format": FORMAT, "version": VERSION, "tokens": str(tokens), "model": fingerprint(config)}
    with ShardWriter(path, declared, metadata) as writer:
        for entry in entries:
            writer.append(entry.squares)
        for _, gram in with_gram:
            for block in gram():
                writer.append(block)
        for entry in with_held:
            writer.append(entry.held)


def gram_bytes(config: K3Config, layers: int, held: int = 0) -> int:
    """Of the latent projections of the first `layers` layers: float32 [n, n] for inputs of the hidden and the latent size,
    and `held` inputs themselves of each."""
    moe = sum(1 for layer in config.moe_layers if layer < layers)
    if not config.latent_size:
        return 0
    return moe * sum(4 * width * (width + held) for width in (config.hidden_size, config.latent_size))


def _identity(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_ino, status.st_size, status.st_mtime_ns


def _corrupt(what: str) -> CheckpointCorrupt:
    return CheckpointCorrupt(what, hint=AGAIN)
