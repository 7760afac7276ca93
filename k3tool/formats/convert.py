"""From one storage to another, module by module: exact where the formats allow it, always measured.

Two ways. MXFP4 sources go through tables (`mx_tables`): a group of 32 codes becomes what a table row says. All else
is decoded to float32 a few rows at a time, quantized by a compiled kernel and measured in the same pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from k3tool.errors import CheckpointCorrupt, UnsupportedError
from k3tool.formats import bnb, check_shape, compiled, compiled_mx, dequantize, fp8, integer, mx_tables, mxfp4, nvfp4
from k3tool.formats.codes import E2M1_MAGNITUDES, E2M1_PAIRS, E8M0, E8M0_NAN
from k3tool.formats.measure import Measured
from k3tool.formats.mx_tables import Table

TILE_ROWS = 128
LEAST_BYTE, MOST_BYTE = 8, 246  # beyond these, scales or their inverses leave the range of normal numbers
FIRST_ROWS = 4
NARROW = 8  # binades that every target's scales can span
_FLOATS = ("bf16", "f16", "f32")
_EXACT_OF_MXFP4 = ("nvfp4", "nvfp4-modelopt", "int8", "fp8-block", "fp8-channel")


@dataclass(frozen=True)
class Target:
    """A scheme with its choices.

    group_size: values per scale of the integer schemes (None: 32, 0: one scale per row).
    dtype: of the model's unquantized weights, which bitsandbytes records.
    search: choose scales by least squares where the format leaves a choice; nf4 and fp4 always keep bitsandbytes'.
    """

    scheme: str
    group_size: int | None = None
    dtype: str = "BF16"
    search: bool = True

    def describe(self) -> str:
        group = "" if self.group_size is None else f" group {self.group_size}"
        return f"{self.scheme}{group}{' searched' if self.search else ''}"


class Stored(NamedTuple):
    """A module as it is stored: its name (for messages), scheme, parts as arrays, logical [out, in].

    weight: optional [in] float32, what a squared error counts in each column when scales are searched.
    """

    name: str
    scheme: str
    parts: dict[str, NDArray]
    shape: tuple[int, ...]
    weight: NDArray[np.float32] | None = None


class Converted(NamedTuple):
    parts: dict[str, NDArray]
    measured: Measured


def convert(sources: Sequence[Stored], target: Target) -> list[Converted]:
    """Store every module under `target`; modules given together share what the format shares (NVFP4's global scale).

    Parts come in the order of `formats.stored_tensors`, C-contiguous; unchanged bytes are the same arrays.
    Raises CheckpointCorrupt for NaN or infinite weights or scales, UnsupportedError for a shape that the target cannot
    hold or a value beyond its range; both name the module.
    """
    check(sources, target)
    sources = [settled(source) for source in recognized(sources, target)]
    if target.scheme.startswith("nvfp4"):
        naming = "modelopt" if target.scheme == "nvfp4-modelopt" else "compressed-tensors"
        if all(source.scheme == "mxfp4" for source in sources):
            return _mxfp4_to_nvfp4(sources, naming)
        return _to_nvfp4(sources, naming, target)
    return [_convert_one(source, target) for source in sources]


def check(sources: Sequence[Stored], target: Target) -> None:
    """Raises what `convert` raises before it looks at values."""
    for source in sources:
        check_shape(target.scheme, source.shape, group_size=target.group_size, where=source.name)
        if source.scheme == "mxfp4" and source.parts["weight_scale"].max(initial=0) == E8M0_NAN:
            raise not_finite(source.name, "a NaN scale (byte 255)")


def recognized(sources: Sequence[Stored], target: Target) -> Sequence[Stored]:
    """Plain modules all of whose values are those of MXFP4 groups, as MXFP4; the same modules where one is not.

    So bfloat16 that was decoded from MXFP4 goes by table as its origin would, and is as exact. Weights that never were
    MXFP4 are told by their first rows.
    """
    if target.scheme not in _EXACT_OF_MXFP4 or not all(source.scheme in _FLOATS for source in sources):
        return sources
    found = []
    for source in sources:
        parts = None if source.shape[1] % mxfp4.GROUP else _as_mxfp4(source)
        if parts is None:
            return sources
        found.append(source._replace(scheme="mxfp4", parts=parts))
    return found


def _as_mxfp4(source: Stored) -> dict[str, NDArray] | None:
    """The parts of MXFP4 that stand for exactly these values; None where there are none."""
    rows, columns = source.shape
    packed, scale = np.empty((rows, columns // 2), np.uint8), np.empty((rows, columns // mxfp4.GROUP), np.uint8)
    weight, shifts, sums = np.ones(columns, np.float32), np.array((0,)), np.zeros(4)
    for taken, tile in tiles(source):
        for rows in (slice(0, FIRST_ROWS), slice(FIRST_ROWS, None)):  # mostly, the first few tell
            made = packed[taken][rows], scale[taken][rows]
            compiled.quantize_mxfp4(tile[rows], weight, shifts, E8M0, *made, sums)
            if sums[2] != 0 or not math.isfinite(sums[0]):
                return None
    return {"weight_packed": packed, "weight_scale": scale}


def settled(source: Stored) -> Stored:
    """MXFP4 whose all-zero groups have a scale that is used elsewhere: theirs stands for nothing, but a byte far from the
    others would push values of other groups out of what the target's scales can span."""
    if source.scheme != "mxfp4":
        return source
    exponent = source.parts["weight_scale"]
    least, most = int(exponent.min(initial=254)), int(exponent.max(initial=0))
    if least >= LEAST_BYTE and most <= MOST_BYTE and most - least <= NARROW:
        return source
    words, flat = _groups(source)
    peak = np.empty(flat.size, np.uint8)
    compiled_mx.peaks(words, peak)
    used = flat[peak > 0]
    if used.size == flat.size:
        return source
    flat = np.where(peak > 0, flat, used.min() if used.size else np.uint8(127))
    return source._replace(parts={**source.parts, "weight_scale": flat.reshape(exponent.shape)})


def by_table(source: Stored, target: Target) -> bool:
    """Whether a module goes by table: codes are looked up, nothing is computed."""
    if source.scheme != "mxfp4":
        return False
    return target.scheme.startswith("nvfp4") or _table_way(source, target) is not None


def _convert_one(source: Stored, target: Target) -> Converted:
    if source.scheme == "mxfp4":
        way = _table_way(source, target)
        if way is not None:
            return way(source, target)
    return _QUANTIZE[target.scheme](source, target)


# MXFP4 by table.


def _groups(source: Stored) -> tuple[NDArray[np.uint64], NDArray[np.uint8]]:
    """Packed codes [groups, 2], eight bytes each, and scale bytes [groups], row-major."""
    packed = np.ascontiguousarray(source.parts["weight_packed"]).reshape(-1).view(np.uint64).reshape(-1, 2)
    return packed, np.ascontiguousarray(source.parts["weight_scale"]).reshape(-1)


def _table_way(source: Stored, target: Target) -> Callable[[Stored, Target], Converted] | None:
    exponent = source.parts["weight_scale"]
    normal = exponent.min(initial=127) >= LEAST_BYTE
    group = integer.DEFAULT_GROUP if target.group_size is None else target.group_size
    if target.scheme == "bf16":
        return _mxfp4_to_bf16
    if target.scheme == "int8" and group and mxfp4.GROUP % group == 0:
        return _mxfp4_to_int8
    if target.scheme == "int4" and group == mxfp4.GROUP and normal and source.weight is None:
        return _mxfp4_to_int4
    if target.scheme in ("fp8-block", "fp8-channel") and normal:
        return _mxfp4_to_fp8
    bounded = normal and exponent.max(initial=127) <= MOST_BYTE
    return _mxfp4_to_bnb if target.scheme in ("nf4", "fp4") and bounded else None


def _remap(
    source: Stored, index: NDArray[np.uint16], table: Table, counts: NDArray[np.uint8] | None = None
) -> tuple[NDArray, Measured]:
    """The bytes after, [groups, 16] of the table's type, and what changed. counts: from `_counts`, if known."""
    words, exponent = _groups(source)
    out = np.empty((exponent.size, 16), table.bytes.dtype)
    compiled_mx.remap(words, index, table.bytes.reshape(-1), out)
    values = mxfp4.GROUP * exponent.size
    if index.max(initial=0) < table.first_lossy:
        squares = compiled_mx.group_squares(words, exponent, mx_tables.SQUARES, mx_tables.SCALE_SQUARES)
        return out, Measured(values, squares, squares, 0.0, 0.0)
    first, last = int(exponent.min()), int(exponent.max())
    tallies = np.zeros((last - first + 1, len(table.bytes), 16), np.uint32)
    compiled_mx.tally(_counts(words) if counts is None else counts, index, exponent, first, tallies)
    return out, table.measure(values, tallies, first)


def _counts(words: NDArray[np.uint64]) -> NDArray[np.uint8]:
    """How often each code occurs in each group: [groups, 16]."""
    counts = np.empty(words.shape, np.uint64)
    compiled_mx.census(words, counts)
    return counts.view(np.uint8)


def _mxfp4_to_bf16(source: Stored, target: Target) -> Converted:
    _, exponent = _groups(source)
    first, last = int(exponent.min(initial=127)), int(exponent.max(initial=127))
    table = mx_tables.to_bf16(first, last)
    with np.errstate(invalid="ignore"):
        out, measured = _remap(source, exponent.astype(np.uint16) - first, table)
    if not math.isfinite(measured.error):
        raise UnsupportedError(
            f"{source.name}: scale byte {last} is beyond the range of bfloat16", hint="keep mxfp4 for this module"
        )
    return Converted({"weight": out.view(np.uint16).reshape(source.shape)}, measured)


def _mxfp4_to_int8(source: Stored, target: Target) -> Converted:
    _, exponent = _groups(source)
    out, measured = _remap(source, np.zeros(exponent.size, np.uint16), mx_tables.to_int8())
    rows, columns = source.shape
    half = mx_tables.INT8_SCALES[source.parts["weight_scale"]]
    scale = half.repeat(mxfp4.GROUP // (target.group_size or mxfp4.GROUP), axis=1)
    return Converted(integer_parts(out.view("<i4").reshape(rows, columns // 4), scale, source.shape), measured)


def _mxfp4_to_int4(source: Stored, target: Target) -> Converted:
    words, exponent = _groups(source)
    choices = mx_tables.to_int4(target.search)
    index = np.empty(exponent.size, np.uint16)
    counts = _counts(words)
    compiled_mx.choose(counts, choices.squares, index)
    out, measured = _remap(source, index, choices.table, counts)
    rows, columns = source.shape
    scale = np.empty(exponent.size, np.uint16)
    compiled_mx.scale_bf16(choices.scales, index, exponent, scale)
    packed = out.view("<i4").reshape(rows, columns // 8)
    return Converted(integer_parts(packed, scale.reshape(rows, -1), source.shape), measured)


def _mxfp4_to_fp8(source: Stored, target: Target) -> Converted:
    rows, columns = source.shape
    exponent = np.ascontiguousarray(source.parts["weight_scale"])
    down, across = (
        (1, columns // mxfp4.GROUP) if target.scheme == "fp8-channel" else (fp8.BLOCK, fp8.BLOCK // mxfp4.GROUP)
    )
    index = np.empty(exponent.shape, np.uint16)
    top = np.empty((rows // down, exponent.shape[1] // across), np.uint8)
    compiled_mx.fp8_index(exponent, down, across, mx_tables.FP8_STEPS, index, top)
    out, measured = _remap(source, index.reshape(-1), mx_tables.to_fp8())
    scale = np.ldexp(np.float32(1), top.astype(np.int32) - 127 - mx_tables.FP8_TOP).astype(np.float32)
    return Converted({"weight": out.view(np.uint8).reshape(source.shape), "weight_scale": scale}, measured)


def _mxfp4_to_bnb(source: Stored, target: Target) -> Converted:
    words, exponent = _groups(source)
    peak, index = np.empty(exponent.size, np.uint8), np.empty(exponent.size, np.uint16)
    absmax = np.empty(exponent.size // 2, np.float32)
    compiled_mx.peaks(words, peak)
    compiled_mx.bnb_index(peak, exponent, E2M1_MAGNITUDES, E8M0, mx_tables.BNB_STEPS, index, absmax)
    out, measured = _remap(source, index, mx_tables.to_bnb(target.scheme))
    return Converted(bnb.parts(target.scheme, out.reshape(-1, 1), absmax, source.shape, target.dtype), measured)


def _mxfp4_to_nvfp4(sources: Sequence[Stored], naming: str) -> list[Converted]:
    """Nibbles are copied; the scale 2^k of a group becomes twice 2^(k - m) in E4M3 beside one 2^m for all sources.

    m = (the largest k) - 8, so that everything is exact down to 17 binades below the largest scale. Lower groups get
    the least scale there is, and codes rounded to it.
    """
    top = max(int(source.parts["weight_scale"].max(initial=1)) for source in sources)
    if top - min(int(source.parts["weight_scale"].min(initial=254)) for source in sources) > 17:
        top = max(_top_in_use(source) for source in sources)  # the scale of an all-zero group does not matter
    m = max(top - 127 - mx_tables.NVFP4_MOST, -126)
    table = mx_tables.to_nvfp4()
    codes_of, rows_of = mx_tables.nvfp4_scales(m)
    results = []
    for source in sources:
        exponents = source.parts["weight_scale"]
        scale = np.empty((exponents.shape[0], 2 * exponents.shape[1]), np.uint8)
        compiled_mx.repeat_scale(np.ascontiguousarray(exponents).reshape(-1), codes_of, scale.reshape(-1))
        if rows_of[exponents.min(initial=254)]:
            out, measured = _remap(source, rows_of[exponents].reshape(-1), table)
            packed = out.reshape(source.parts["weight_packed"].shape)
        else:
            packed = source.parts["weight_packed"]
            words, exponent = _groups(source)
            squares = compiled_mx.group_squares(words, exponent, mx_tables.SQUARES, mx_tables.SCALE_SQUARES)
            measured = Measured(2 * packed.size, squares, squares, 0.0, 0.0)
        overall = np.ldexp(np.float32(1), -m if naming == "compressed-tensors" else m)
        results.append(Converted(nvfp4.parts(naming, packed, scale, np.float32(overall)), measured))
    return results


def _top_in_use(source: Stored) -> int:
    words, exponent = _groups(source)
    peak = np.empty(exponent.size, np.uint8)
    compiled_mx.peaks(words, peak)
    return int(exponent[peak > 0].max(initial=1))


# Everything else: tiles of float32.


def tiles(source: Stored) -> Iterator[tuple[slice, NDArray[np.float32]]]:
    """Rows and their values, TILE_ROWS at a time, in one reused buffer where the source allows it."""
    rows, columns = source.shape
    decode = _DECODE.get(source.scheme)
    whole = None if decode else dequantize(source.scheme, source.parts, source.shape)
    buffer = np.empty((min(TILE_ROWS, rows), columns), np.float32)
    for first in range(0, rows, TILE_ROWS):
        taken = slice(first, min(first + TILE_ROWS, rows))
        tile = buffer[: taken.stop - taken.start]
        if decode:
            decode(source.parts, taken, tile)
        else:
            assert whole is not None
            tile[:] = whole[taken]
        yield taken, tile


def _decode_mxfp4(parts: dict[str, NDArray], rows: slice, out: NDArray[np.float32]) -> None:
    compiled.decode_mxfp4(parts["weight_packed"][rows], parts["weight_scale"][rows], E2M1_PAIRS, E8M0, out)


def _decode_bf16(parts: dict[str, NDArray], rows: slice, out: NDArray[np.float32]) -> None:
    compiled.decode_bf16(parts["weight"][rows], out)


def _decode_float(parts: dict[str, NDArray], rows: slice, out: NDArray[np.float32]) -> None:
    out[:] = parts["weight"][rows]


_DECODE = {"mxfp4": _decode_mxfp4, "bf16": _decode_bf16, "f16": _decode_float, "f32": _decode_float}


def column_weight(source: Stored) -> NDArray[np.float32]:
    weight = source.weight
    return np.ones(source.shape[1], np.float32) if weight is None else np.ascontiguousarray(weight, np.float32)


def scale_factors(target: Target, factors: Sequence[np.float32]) -> NDArray[np.float32]:
    return np.array(factors if target.search else factors[:1], np.float32)


def _finish(source: Stored, parts: dict[str, NDArray], sums: NDArray[np.float64]) -> Converted:
    if not math.isfinite(sums[0]):
        raise not_finite(source.name, "NaN or infinity")
    return Converted(parts, Measured(math.prod(source.shape), *(float(value) for value in sums)))


def not_finite(name: str, what: str) -> CheckpointCorrupt:
    return CheckpointCorrupt(
        f"{name} holds {what}",
        hint="hold the file's bytes against its digest (verify at depth bytes); where they are right, its publisher has to mend it",
    )


def integer_parts(words: NDArray, scale: NDArray, shape: tuple[int, ...]) -> dict[str, NDArray]:
    return {"weight_packed": words, "weight_scale": scale, "weight_shape": np.array(shape, np.int64)}


def _to_mxfp4(source: Stored, target: Target) -> Converted:
    rows, columns = source.shape
    packed, scale = np.empty((rows, columns // 2), np.uint8), np.empty((rows, columns // 32), np.uint8)
    shifts, sums = np.array(mxfp4.SHIFTS if target.search else (0,)), np.zeros(4)
    for taken, tile in tiles(source):
        compiled.quantize_mxfp4(tile, column_weight(source), shifts, E8M0, packed[taken], scale[taken], sums)
    return _finish(source, {"weight_packed": packed, "weight_scale": scale}, sums)


def _to_integer(source: Stored, target: Target) -> Converted:
    bits = 8 if target.scheme == "int8" else 4
    rows, columns = source.shape
    stored = integer.stored_tensors(source.shape, group_size=target.group_size, dtype="BF16", bits=bits)
    raw, scale = np.empty((rows, columns * bits // 8), np.uint8), np.empty(stored["weight_scale"][1], np.uint16)
    factors, sums = scale_factors(target, integer.FACTORS[1 << (bits - 1)]), np.zeros(4)
    for taken, tile in tiles(source):
        compiled.quantize_integer(tile, column_weight(source), factors, bits, raw[taken], scale[taken], sums)
    return _finish(source, integer_parts(raw.view("<i4"), scale, source.shape), sums)


def _to_fp8(source: Stored, target: Target) -> Converted:
    rows, columns = source.shape
    down, across = (1, columns) if target.scheme == "fp8-channel" else (fp8.BLOCK, fp8.BLOCK)
    out, scale = np.empty((rows, columns), np.uint8), np.empty((rows // down, columns // across), np.float32)
    factors, sums, weight = scale_factors(target, fp8.FACTORS), np.zeros(4), column_weight(source)
    for taken, tile in tiles(source):
        for row in range(0, taken.stop - taken.start, down):
            first = taken.start + row
            block = tile[row : row + down]
            compiled.quantize_fp8(block, weight, factors, across, out[first : first + down], scale[first // down], sums)
    return _finish(source, {"weight": out, "weight_scale": scale}, sums)


def _to_bnb(source: Stored, target: Target) -> Converted:
    size, columns = math.prod(source.shape), source.shape[1]
    codes, absmax, sums = np.empty((size // 64, 32), np.uint8), np.empty(size // 64, np.float32), np.zeros(4)
    _, order = bnb.bounds(target.scheme)
    for taken, tile in tiles(source):
        blocks = slice(taken.start * columns // 64, taken.stop * columns // 64)
        args = (tile.reshape(-1, 64), target.scheme == "nf4", order, bnb.TABLES[target.scheme])
        compiled.quantize_bnb(*args, codes[blocks], absmax[blocks], sums)
    return _finish(source, bnb.parts(target.scheme, codes.reshape(-1, 1), absmax, source.shape, target.dtype), sums)


def _to_plain(source: Stored, target: Target) -> Converted:
    out, sums = np.empty(source.shape, np.uint16), np.zeros(4)
    for taken, tile in tiles(source):
        compiled.round_bf16(tile, out[taken], sums)
    return _finish(source, {"weight": out}, sums)


def _to_nvfp4(sources: Sequence[Stored], naming: str, target: Target) -> list[Converted]:
    amax = max(float(np.abs(tile).max(initial=0)) for source in sources for _, tile in tiles(source))
    if not math.isfinite(amax):
        raise not_finite(" and ".join(source.name for source in sources), "NaN or infinity")
    factor = nvfp4.global_scale(amax)
    shifts = np.array(nvfp4.SHIFTS if target.search else (0,))
    results = []
    for source in sources:
        rows, columns = source.shape
        packed, scale, sums = (
            np.empty((rows, columns // 2), np.uint8),
            np.empty((rows, columns // 16), np.uint8),
            np.zeros(4),
        )
        for taken, tile in tiles(source):
            compiled.quantize_nvfp4(tile, column_weight(source), shifts, factor, packed[taken], scale[taken], sums)
        overall = factor if naming == "compressed-tensors" else np.float32(1) / factor
        results.append(_finish(source, nvfp4.parts(naming, packed, scale, overall), sums))
    return results


_QUANTIZE: dict[str, Callable[[Stored, Target], Converted]] = {
    "bf16": _to_plain,
    "mxfp4": _to_mxfp4,
    "int8": _to_integer,
    "int4": _to_integer,
    "fp8-block": _to_fp8,
    "fp8-channel": _to_fp8,
    "nf4": _to_bnb,
    "fp4": _to_bnb,
}
