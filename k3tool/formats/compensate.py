"""Error compensation for one matrix: each column is rounded so that it makes up for what other columns have lost.

What counts is the mean of |x (W - Q)^T|^2 over inputs x: the sum over the rows d of W - Q of d H d^T, H = E[x^T x]. With
H = L L^T that is |d L|^2, whose entry at column c depends on d[c:] only. From the last column to the first, each weight
is therefore rounded from w + (sum over i > c of d[i] L[i, c]) / L[c, c], which would make the entry zero. This is GPTQ
(Frantar et al. 2022, arXiv:2210.17323, algorithm 1), written without the inverse of H: fixing columns and moving the rest
to their optimum gives the same numbers. Columns whose inputs have the most energy come first. Scales are those that the
search has chosen, and rows that do not gain keep what the search gave, so that no row is ever worse on these inputs. On
others it may be, where few inputs were seen: with some of them kept aside, a matrix that is worse on those than rounding is
rounded.

All sums are float64, in one fixed order of blocks. Memory: H once (8 n^2 bytes) and a few rows of the matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from k3tool.errors import CheckpointCorrupt
from k3tool.formats import fp8, integer
from k3tool.formats.codes import E2M1, E4M3, E8M0, bf16_to_f32, pack_nibbles, round_e2m1, round_e4m3
from k3tool.formats.convert import Converted, Stored, Target, convert, tiles
from k3tool.formats.measure import Outputs, Weighted, compare, total
from k3tool.formats.weighing import decode_rows, weigh

DAMPING = 0.01  # of the mean of the diagonal, added to it: inputs that were hardly seen must not steer the others
BLOCK = 128  # columns that are rounded before their errors are carried to the columns left
SLAB_ROWS = 256  # rows of the matrix that are worked on together; whole blocks of fp8-block
STRIP_ROWS = 512  # rows of H that are read together
_SLABS = 14  # arrays [SLAB_ROWS, n] in float64 that are alive at once, at most
HELD_AT_ONCE = 64  # inputs kept aside that are multiplied at once
MOST_HELD = 1024  # inputs kept aside that a matrix is tried on: the first of more

Strips = Callable[[], Iterable[tuple[slice, NDArray[np.float32]]]]
"""Reads H [n, n] from its first row to its last, some rows at a time."""


def working_bytes(columns: int) -> int:
    """Memory beside a matrix and what becomes of it, of which there are two more: as the search and as plain scales give it."""
    return 8 * columns**2 + 8 * columns * (_SLABS * SLAB_ROWS + 4 * STRIP_ROWS + HELD_AT_ONCE) + 8 * columns * MOST_HELD


class _Grid(NamedTuple):
    """Values that some rows may take. steps: float32 [rows, columns], what one unit of a code is worth.

    round: (targets float64 [r], steps [r]) to (codes uint8 or int8 [r], their values float32 [r]). pack: codes
    [r, columns] as they are stored in the part `name`.
    """

    name: str
    steps: NDArray[np.float32]
    round: Callable[[NDArray[np.float64], NDArray[np.float32]], tuple[NDArray, NDArray[np.float32]]]
    pack: Callable[[NDArray], NDArray]


def compensate(
    source: Stored, target: Target, strips: Strips, held: NDArray[np.float32] | None = None
) -> tuple[Converted, Weighted]:
    """`convert` of one module with its errors compensated. source: with its `weight`, the diagonal of H. target: any
    scheme with scales of its own (not bf16, nf4, fp4).

    held: inputs [h, n] that are not in H. What is told are then errors on those, and where compensation is worse there than
    rounding to searched or plain scales, the better of these is what is stored.

    Raises what `convert` raises, and CheckpointCorrupt where H is not positive semidefinite.
    """
    assert source.weight is not None
    plain = convert([source], replace(target, search=False))[0].parts
    parts = convert([source], target)[0].parts
    rounded = {name: array.copy() for name, array in parts.items()} if held is not None else {}
    weight = source.weight.astype(np.float64)
    order = np.argsort(weight, kind="stable")
    factor = factorize(strips, order, source.name)
    measured, sums, weighted, kept = [], np.zeros(4), np.zeros(2), 0
    for rows, values in _slabs(source):
        searched = decode_rows(target.scheme, parts, source.shape, rows)
        grid = _grid(target.scheme, parts, rows, source.shape)
        codes = np.empty(values.shape, np.uint8)
        moved = sweep(values.astype(np.float64)[:, order], grid.steps[:, order], factor, grid.round, codes)
        made = np.empty(values.shape, np.float32)
        made[:, order], codes[:, order] = moved, codes.copy()
        stacked = np.stack([values, decode_rows(target.scheme, plain, source.shape, rows), searched, made])
        errors = output_squares(stacked, strips)
        better = errors[3] < errors[2]
        if held is not None:
            errors = held_squares(stacked, held)
        parts[grid.name][rows][better] = grid.pack(codes)[better]
        stored = np.where(better[:, None], made, searched)
        kept += int(len(better) - better.sum())
        sums += *errors[:3].sum(axis=1), np.where(better, errors[3], errors[2]).sum()
        wide = values.astype(np.float64)
        weighted += np.square(wide).sum(0) @ weight, np.square(wide - stored).sum(0) @ weight
        measured.append(compare(values, stored))
    energy, plainly, by_search, as_stored = (float(value) for value in sums)
    aside = 0 if held is None else len(held)
    if held is not None and min(plainly, by_search) < as_stored:
        best = rounded if by_search <= plainly else plain
        outputs = Outputs(energy, plainly, by_search, min(plainly, by_search), source.shape[0], source.shape[0], aside)
        return _rounded(source, target, best, outputs)
    outputs = Outputs(energy, plainly, by_search, as_stored, kept, source.shape[0], aside)
    return Converted(parts, total(measured)), Weighted(float(weighted[0]), float(weighted[1]), outputs)


def _rounded(source: Stored, target: Target, parts: dict[str, NDArray], outputs: Outputs) -> tuple[Converted, Weighted]:
    """A module as it is without compensation, measured."""
    measured = [
        compare(values, decode_rows(target.scheme, parts, source.shape, rows)) for rows, values in _slabs(source)
    ]
    found = weigh(source, target.scheme, parts)
    return Converted(parts, total(measured)), Weighted(found.source, found.error, outputs)


def _slabs(source: Stored) -> Iterable[tuple[slice, NDArray[np.float32]]]:
    """SLAB_ROWS rows and their values at a time."""
    held: list[NDArray[np.float32]] = []
    first = 0
    for rows, tile in tiles(source):
        held.append(tile.copy())
        if rows.stop - first >= SLAB_ROWS or rows.stop == source.shape[0]:
            yield slice(first, rows.stop), np.concatenate(held)
            held, first = [], rows.stop


def factorize(strips: Strips, order: NDArray[np.intp], name: str) -> NDArray[np.float64]:
    """L [n, n] lower with L L^T = H + damping, rows and columns of H in `order`. What lies above L is of no meaning."""
    n = len(order)
    place = np.argsort(order, kind="stable")
    matrix = np.empty((n, n))
    for taken, values in strips():
        matrix[place[taken]] = values[:, order]
    diagonal = np.einsum("ii->i", matrix)
    diagonal += DAMPING * diagonal.mean() or 1.0
    try:
        _cholesky(matrix)
    except np.linalg.LinAlgError:
        raise CheckpointCorrupt(
            f"the Gram matrix of {name} is not positive semidefinite, so it is none",
            hint="record it again, by run with --save-activations and --gram",
        ) from None
    return matrix


def _cholesky(matrix: NDArray[np.float64]) -> None:
    """The lower triangle becomes its factor, in place, block by block. Raises LinAlgError."""
    n = len(matrix)
    for low in range(0, n, BLOCK):
        high = min(low + BLOCK, n)
        corner = np.linalg.cholesky(matrix[low:high, low:high])
        matrix[low:high, low:high] = corner
        column = matrix[high:, low:high]
        column[:] = column @ np.linalg.inv(corner).T
        for first in range(high, n, STRIP_ROWS):
            last = min(first + STRIP_ROWS, n)
            matrix[first:last, high:last] -= matrix[first:last, low:high] @ matrix[high:last, low:high].T


def sweep(
    values: NDArray[np.float64],
    steps: NDArray[np.float32],
    factor: NDArray[np.float64],
    rounding: Callable[[NDArray[np.float64], NDArray[np.float32]], tuple[NDArray, NDArray[np.float32]]],
    codes: NDArray,
) -> NDArray[np.float32]:
    """values, steps, codes: [rows, n], columns in the order of `factor`; the last is rounded first, see above.

    Fills `codes` and returns the values that they stand for.
    """
    n = values.shape[1]
    lost = np.empty(values.shape)
    made = np.empty(values.shape, np.float32)
    for high in range(n, 0, -BLOCK):
        low = max(0, high - BLOCK)
        carried = lost[:, high:] @ factor[high:, low:high]
        for c in range(high - 1, low - 1, -1):
            wanted = values[:, c] + carried[:, c - low] / factor[c, c]
            found, made[:, c] = rounding(wanted, steps[:, c])
            codes[:, c] = found.view(np.uint8)
            lost[:, c] = values[:, c] - made[:, c]
            carried[:, : c - low] += lost[:, c, None] * factor[c, low:c]
    return made


def output_squares(stacked: NDArray[np.float32], strips: Strips) -> NDArray[np.float64]:
    """stacked [k, rows, n]: W, then k - 1 forms of it. E|x w|^2 of each row, then of what each form lacks: [k, rows]."""
    wide = stacked.astype(np.float64)
    wide[1:] -= wide[0]
    flat = wide.reshape(-1, wide.shape[2])
    sums = np.zeros(len(flat))
    for taken, values in strips():
        sums += np.einsum("rc,rc->r", flat @ values.astype(np.float64).T, flat[:, taken])
    return np.maximum(sums, 0).reshape(wide.shape[:2])


def held_squares(stacked: NDArray[np.float32], held: NDArray[np.float32]) -> NDArray[np.float64]:
    """As `output_squares`, of inputs [h, n] themselves."""
    wide = stacked.astype(np.float64)
    wide[1:] -= wide[0]
    flat = wide.reshape(-1, wide.shape[2])
    sums = np.zeros(len(flat))
    for first in range(0, len(held), HELD_AT_ONCE):
        sums += np.square(flat @ held[first : first + HELD_AT_ONCE].T.astype(np.float64)).sum(1)
    return sums.reshape(wide.shape[:2]) / len(held)


# What each scheme can hold.


def _round_e2m1(wanted: NDArray[np.float64], step: NDArray[np.float32]) -> tuple[NDArray, NDArray[np.float32]]:
    codes = round_e2m1((wanted / step).astype(np.float32))
    return codes, E2M1[codes] * step


def _round_e4m3(wanted: NDArray[np.float64], step: NDArray[np.float32]) -> tuple[NDArray, NDArray[np.float32]]:
    codes = round_e4m3((wanted / step).astype(np.float32))
    return codes, E4M3[codes] * step


def _grid(scheme: str, parts: dict[str, NDArray], rows: slice, shape: tuple[int, ...]) -> _Grid:
    """The grid of a module that is stored under `scheme`, with its own scales."""
    columns = shape[1]
    scale = parts["weight_scale"]
    if scheme.startswith("fp8"):
        down = 1 if scheme == "fp8-channel" else fp8.BLOCK
        own = scale.repeat(down, axis=0)[rows]
        return _Grid("weight", own.repeat(columns // own.shape[1], axis=1), _round_e4m3, lambda codes: codes)
    own = scale[rows]
    if scheme in ("int4", "int8"):
        bits = 8 if scheme == "int8" else 4
        return _integer_grid(bits, bf16_to_f32(own).repeat(columns // own.shape[1], axis=1))
    if scheme == "mxfp4":
        step = E8M0[own]
    elif scheme == "nvfp4":
        step = np.divide(E4M3[own], np.float32(parts["weight_global_scale"][0]), dtype=np.float32)
    else:
        step = E4M3[own] * np.float32(parts["weight_scale_2"])
    name = "weight" if scheme == "nvfp4-modelopt" else "weight_packed"
    return _Grid(name, step.repeat(columns // step.shape[1], axis=1), _round_e2m1, pack_nibbles)


def _integer_grid(bits: int, steps: NDArray[np.float32]) -> _Grid:
    low = -(1 << (bits - 1))

    def rounding(wanted: NDArray[np.float64], step: NDArray[np.float32]) -> tuple[NDArray, NDArray[np.float32]]:
        whole = np.clip(np.rint(wanted / step), low, -low - 1)
        return whole.astype(np.int8), whole.astype(np.float32) * step

    return _Grid("weight_packed", steps, rounding, lambda codes: integer.pack(codes.view(np.int8), bits))
