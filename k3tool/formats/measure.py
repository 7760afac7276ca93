"""What a change of format did to a tensor: sums from which every reported number follows."""

from __future__ import annotations

import math
from collections.abc import Iterable
from numbers import Real
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from k3tool.checkpoint.outside import shown
from k3tool.errors import CheckpointCorrupt


def sums_of(row: Any, length: int) -> list[float]:
    """So many sums from a record on disk, none below zero. Raises CheckpointCorrupt."""
    if not isinstance(row, (list, tuple)) or len(row) != length:
        raise _no_sums(row)
    if not all(isinstance(value, Real) and not isinstance(value, bool) and not value < 0 for value in row):
        raise _no_sums(row)
    return [float(value) for value in row]


def count_of(value: float) -> int:
    """Raises CheckpointCorrupt for what is no count."""
    if not value < 1 << 63:
        raise _no_sums(value)
    return int(value)


def _no_sums(row: Any) -> CheckpointCorrupt:
    return CheckpointCorrupt(
        f"{shown(row)} is not what a conversion measured", hint="start the command over with --overwrite"
    )


class Measured(NamedTuple):
    """Sums in float64 over `values` weights: squares of the source, of the stored values, of their difference.

    `peak` is the largest magnitude of a difference. A change of sign of zero is no difference.
    """

    values: int
    source: float
    stored: float
    error: float
    peak: float

    @property
    def exact(self) -> bool:
        return self.peak == 0.0 and self.error == 0.0

    @property
    def relative_error(self) -> float:
        """RMS of the difference over RMS of the source; infinite where an all-zero source changed."""
        if self.error == 0.0:
            return 0.0
        return math.sqrt(self.error / self.source) if self.source > 0 else math.inf

    @property
    def sqnr_db(self) -> float | None:
        """Signal to quantization noise, 10 log10(source / error); None where nothing changed."""
        return 10 * math.log10(self.source / self.error) if self.error > 0 and self.source > 0 else None

    @property
    def cosine(self) -> float:
        """Cosine of the angle between source and stored values; 1 for two all-zero tensors."""
        if self.error == 0.0:
            return 1.0
        length = math.sqrt(self.source * self.stored)
        return (self.source + self.stored - self.error) / (2 * length) if length > 0 else 0.0

    def as_json(self) -> list[float]:
        """Compact form for ledgers; `from_json` reads it back without loss."""
        return [self.values, self.source, self.stored, self.error, self.peak]

    @classmethod
    def from_json(cls, row: Any) -> Measured:
        """Raises CheckpointCorrupt for what `as_json` did not make."""
        values, *sums = sums_of(row, 5)
        return cls(count_of(values), *sums)


class Outputs(NamedTuple):
    """What calibrated quantization did to the products x W^T of a matrix: means of squares over inputs x: `held` ones that
    were kept aside, or (held 0) the ones that errors were compensated for.

    source: of the products; the others of their difference with plain scales, with searched scales, and as stored,
    which in `rows_kept` of `rows` rows is rounded to nearest.
    """

    source: float
    plain: float
    searched: float
    stored: float
    rows_kept: int
    rows: int
    held: int = 0

    def relative(self, error: float) -> float:
        """RMS of a difference over RMS of the products; infinite where products of zeros changed."""
        if error == 0.0:
            return 0.0
        return math.sqrt(error / self.source) if self.source > 0 else math.inf


class Weighted(NamedTuple):
    """Sums over all weights of a tensor, each square times the mean square of the input that it meets.

    source: of the weights; error: of the difference. They stand for the energy of outputs where inputs do not correlate.
    """

    source: float
    error: float
    outputs: Outputs | None = None

    @property
    def relative_error(self) -> float:
        if self.error == 0.0:
            return 0.0
        return math.sqrt(self.error / self.source) if self.source > 0 else math.inf

    def as_json(self) -> list[Any]:
        return [self.source, self.error, *([list(self.outputs)] if self.outputs else [])]

    @classmethod
    def from_json(cls, row: Any) -> Weighted:
        """Raises CheckpointCorrupt for what `as_json` did not make."""
        if not isinstance(row, (list, tuple)) or len(row) not in (2, 3):
            raise _no_sums(row)
        made = None
        if len(row) == 3:
            counts = row[2][6:] if isinstance(row[2], (list, tuple)) else ()  # `held` is absent in older records
            *means, kept, rows, held = sums_of([*row[2], 0] if not counts else row[2], 7)
            made = Outputs(*means, count_of(kept), count_of(rows), count_of(held))
        return cls(*sums_of(row[:2], 2), made)


def total_weighted(rows: Iterable[Weighted]) -> Weighted:
    """Of several tensors; outputs of those that have them."""
    held = list(rows)
    outputs = [row.outputs for row in held if row.outputs]
    made = None
    if outputs:
        made = Outputs(
            math.fsum(o.source for o in outputs),
            math.fsum(o.plain for o in outputs),
            math.fsum(o.searched for o in outputs),
            math.fsum(o.stored for o in outputs),
            sum(o.rows_kept for o in outputs),
            sum(o.rows for o in outputs),
            min(o.held for o in outputs),
        )
    return Weighted(math.fsum(row.source for row in held), math.fsum(row.error for row in held), made)


def unchanged(values: int) -> Measured:
    """Nothing was changed, so that nothing had to be measured: the squares of the source are not known (0)."""
    return Measured(values, 0.0, 0.0, 0.0, 0.0)


def compare(source: NDArray[np.float32], stored: NDArray[np.float32]) -> Measured:
    """Measure by looking at both; the readable form of what the compiled kernels sum up as they go."""
    a, b = source.astype(np.float64), stored.astype(np.float64)
    difference = np.abs(a - b)
    return Measured(
        a.size,
        float((a * a).sum()),
        float((b * b).sum()),
        float((difference**2).sum()),
        float(difference.max(initial=0)),
    )


def total(rows: Iterable[Measured]) -> Measured:
    """Of several tensors, the same in whatever order they come."""
    held = list(rows)
    return Measured(
        sum(row.values for row in held),
        math.fsum(row.source for row in held),
        math.fsum(row.stored for row in held),
        math.fsum(row.error for row in held),
        max((row.peak for row in held), default=0.0),
    )
