"""Products of weight rows with activations: dot products for one token, register-blocked tiles for many.

One token (`row_dots`): memory-bound; a weight block is read, widened in registers and used once.
Many tokens: tokens lie in the lanes. Activations are packed once into panels [tile][column][tile lanes], and a block of
weight rows is widened into scratch that stays in the second-level cache. The inner loop broadcasts one weight for
each of `tile_rows` rows against `2 * lanes` tokens, the register blocking of Goto and van de Geijn,
"Anatomy of High-Performance Matrix Multiplication" (ACM TOMS 34, 2008). All sums are float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from llvmlite import ir

from k3tool.kernels.cpu.emit import F32, I16, I64, Emitter, Value, Variable, vector
from k3tool.kernels.cpu.formats import Format, RowAddress
from k3tool.kernels.cpu.numeric import from_bfloat16, to_bfloat16, transpose
from k3tool.kernels.cpu.target import Target

DEPTH = 256  # columns widened at a time: a panel tile of that depth stays in the first-level cache
NEAR_AHEAD = 1024  # bytes asked for early where rows are read one after the other
BLOCK_ROWS = 96  # weight rows widened at a time


@dataclass(frozen=True)
class Tiling:
    """Shape of the register tile: `rows` weight rows by `tokens` tokens."""

    lanes: int
    rows: int

    @property
    def tokens(self) -> int:
        return 2 * self.lanes

    def rows_for(self, vectors: int) -> int:
        """Weight rows of a tile with so many vectors of tokens: the sums always fill the registers."""
        return self.rows * 2 // vectors


def tiling(target: Target) -> Tiling:
    return Tiling(target.float_lanes, 12 if target.vector_registers >= 32 else 6)


def padded(columns: int, format_: Format) -> int:
    return -(-columns // format_.block) * format_.block


def balanced_rows(rows: int, threads: int) -> int:
    """Rows of a block, at most BLOCK_ROWS, such that every thread gets as many blocks."""
    blocks = threads * max(1, -(-rows // (threads * BLOCK_ROWS)))
    return max(1, -(-rows // blocks))


# One token


def row_dots(
    e: Emitter, format_: Format, x: Value, rows: Sequence[RowAddress], columns: Value, ahead: int
) -> list[Value]:
    """Dot products of rows with x: float32 in the format's order, zeros up to a whole block.

    Weights `ahead` bytes behind those at hand are asked for early: a row is too short for the processor to notice in
    time that it is read front to back.
    """
    zero = e.number(0.0, vector(F32, format_.lanes))
    sums = [[e.variable(zero), e.variable(zero)] for _ in rows]
    whole = columns // format_.block * format_.block
    with e.loop(0, whole, format_.block) as first:
        offsets = format_.weight_bytes(first), format_.scale_bytes(first)
        for at, pair in zip(rows, sums, strict=True):
            here = at.shifted(*offsets)
            e.prefetch(here.weights + ahead)
            _add_block(e, format_, here, x + first * 4, pair)
    with e.when(whole < columns):
        for at, pair in zip(rows, sums, strict=True):
            _add_block(e, format_, complete_tail(e, format_, at, whole, columns), x + whole * 4, pair)
    return [e.total(first.get() + second.get()) for first, second in sums]


def complete_tail(e: Emitter, format_: Format, at: RowAddress, whole: Value, columns: Value) -> RowAddress:
    """Columns `whole`..`columns` of a row, an incomplete block, completed with zeros in scratch memory."""
    tail = at.shifted(format_.weight_bytes(whole), format_.scale_bytes(whole))
    return format_.copy_tail(e, tail, columns - whole)


def _add_block(e: Emitter, format_: Format, at: RowAddress, x: Value, sums: list[Variable]) -> None:
    lanes = format_.lanes
    found = format_.vectors(e, at)
    xs = [e.load(vector(F32, lanes), x + 4 * lanes * index) for index in range(len(found))]
    if found[0][1] is None:
        for index, (weight, _) in enumerate(found):
            sums[index % 2].set(e.fma(weight, xs[index], sums[index % 2].get()))
        return
    # Sum within each scale first, in two chains, then apply the scale once.
    chains: dict[int, tuple[Value, list[Value | None]]] = {}
    for index, (weight, scale) in enumerate(found):
        assert scale is not None
        _, sides = chains.setdefault(id(scale), (scale, [None, None]))
        so_far = sides[index % 2]
        sides[index % 2] = weight * xs[index] if so_far is None else e.fma(weight, xs[index], so_far)
    for turn, (scale, (even, odd)) in enumerate(chains.values()):
        assert even is not None and odd is not None
        sums[turn % 2].set(e.fma(even + odd, scale, sums[turn % 2].get()))


# Many tokens


def emit_micro(module: ir.Module, tile: Tiling, vectors: int) -> ir.Function:
    """micro(weights, x, depth, c): c [rows][tokens] += weights [rows][DEPTH] @ x [depth][tokens]."""
    e = Emitter(module, f"micro{vectors}", 4)
    e.function.linkage = "internal"
    weights, x, depth, c = e.params
    wide, rows = vector(F32, tile.lanes), tile.rows_for(vectors)
    places = [[c + 4 * (tile.tokens * row + tile.lanes * v) for v in range(vectors)] for row in range(rows)]
    # From zero for every stretch of columns, not on top of c: shorter chains of additions round less.
    sums = [[e.variable(e.number(0.0, wide)) for _ in row] for row in places]
    with e.loop(0, depth) as k:
        xs = [e.load(wide, x + k * (4 * tile.tokens) + 4 * tile.lanes * v) for v in range(vectors)]
        for row in range(rows):
            weight = e.splat(e.load(F32, weights + k * 4 + 4 * DEPTH * row), tile.lanes)
            for v in range(vectors):
                sums[row][v].set(e.fma(weight, xs[v], sums[row][v].get()))
    for row_sums, row_places in zip(sums, places, strict=True):
        for total, place in zip(row_sums, row_places, strict=True):
            e.store(e.load(wide, place) + total.get(), place)
    e.finish()
    return e.function


def emit_micros(module: ir.Module, tile: Tiling) -> list[ir.Function]:
    """The inner loops for up to half a tile of tokens and for a whole tile."""
    return [emit_micro(module, tile, vectors) for vectors in (1, 2)]


def widen_rows(
    e: Emitter, format_: Format, at: RowAddress, row_bytes: tuple[Value, Value], rows: Value, span: tuple[Value, Value],
    columns: Value, out: Value,
) -> None:  # fmt: skip
    """Columns span[0]..span[1] of `rows` rows as float32, in the format's order, to out [rows][DEPTH]."""
    first, last = span
    lanes = format_.lanes
    whole = columns // format_.block * format_.block
    with e.loop(0, rows) as row:
        row_at = at.shifted(row * row_bytes[0], row * row_bytes[1])
        tail = complete_tail(e, format_, row_at, whole, columns)
        with e.loop(first, last, format_.block) as column:
            here = row_at.shifted(format_.weight_bytes(column), format_.scale_bytes(column))
            # The next stretch of this row is wanted when all other rows had their turn.
            e.prefetch(here.weights + format_.weight_bytes(e.number(DEPTH)))
            place = out + (row * DEPTH + column - first) * 4
            for index, (weight, scale) in enumerate(format_.vectors(e, here.where(e, column < whole, tail))):
                e.store(weight if scale is None else weight * scale, place + 4 * lanes * index)


def emit_block_product(module: ir.Module, format_: Format, tile: Tiling, micros: list[ir.Function]) -> ir.Function:
    """c = weight rows @ panel, for up to BLOCK_ROWS rows.

    Parameters: weights, scales, scale_table: the first row; rows; columns; panel [tiles][padded columns][tokens];
    tokens; c [tiles][BLOCK_ROWS][tokens per tile]; scratch [BLOCK_ROWS][DEPTH]. Rows of c beyond `rows`, up to a
    multiple of the tile, receive numbers without meaning.
    """
    e = Emitter(module, f"block_product_{format_.name}", 9)
    e.function.linkage = "internal"
    weights, scales, table, rows, columns, panel, tokens, c, scratch = e.params
    at = RowAddress(weights, scales, table)
    depth_all = whole_blocks(format_, columns)
    tiles = (tokens + (tile.tokens - 1)) // tile.tokens
    zero = e.number(0.0, vector(F32, tile.lanes))
    with e.loop(0, tiles * (BLOCK_ROWS * tile.tokens * 4), 4 * tile.lanes) as offset:
        e.store(zero, c + offset)
    row_bytes = (format_.weight_bytes(columns), format_.row_scale_bytes(columns))
    with e.loop(0, depth_all, DEPTH) as first:
        last = e.smaller(first + DEPTH, depth_all)
        widen_rows(e, format_, at, row_bytes, rows, (first, last), columns, scratch)
        with e.loop(0, tiles) as index:
            x = panel + (index * depth_all + first) * (4 * tile.tokens)
            c_tile = c + index * (BLOCK_ROWS * tile.tokens * 4)
            few = (tokens - index * tile.tokens) <= tile.lanes
            for vectors, micro in ((1, micros[0]), (2, micros[1])):
                case = e.when(few) if vectors == 1 else e.otherwise(few)
                with case, e.loop(0, rows, tile.rows_for(vectors)) as row:
                    e.call(micro, scratch + row * (4 * DEPTH), x, last - first, c_tile + row * (4 * tile.tokens))
    e.finish()
    return e.function


# Moving activations


@dataclass(frozen=True)
class Rows:
    """Rows of activations in memory: float32 or bfloat16, `stride` numbers from one row to the next."""

    base: Value
    stride: Value
    is_bfloat16: Value

    def load(self, e: Emitter, dtype: str, row: Value, column: Value, lanes: int) -> Value:
        index = row * self.stride + column
        if dtype == "bfloat16":
            return from_bfloat16(e, e.load(vector(I16, lanes), self.base + index * 2))
        return e.load(vector(F32, lanes), self.base + index * 4)


def pack_tile(
    e: Emitter, format_: Format, tile: Tiling, x: Rows, token_ids: list[Value], columns: Value, panel: Value
) -> None:
    """Rows `token_ids` of x (one per lane of the tile) as float32 to panel [padded columns][tokens]."""
    for dtype, case in (("float32", e.otherwise(x.is_bfloat16)), ("bfloat16", e.when(x.is_bfloat16))):
        with case:
            _pack_columns(e, format_, tile, x, dtype, token_ids, columns, panel)
    places = e.table(places_of(format_))
    with e.loop(columns, whole_blocks(format_, columns)) as column:
        address = panel + place_of(e, format_, places, column) * (4 * tile.tokens)
        for side in range(0, tile.tokens, tile.lanes):
            e.store(e.number(0.0, vector(F32, tile.lanes)), address + 4 * side)


def _pack_columns(
    e: Emitter, format_: Format, tile: Tiling, x: Rows, dtype: str, token_ids: list[Value], columns: Value, panel: Value
) -> None:
    places = e.table(places_of(format_))
    lanes = tile.lanes
    whole = columns // lanes * lanes
    with e.loop(0, whole, lanes) as first:
        at = [panel + place_of(e, format_, places, first + offset) * (4 * tile.tokens) for offset in range(lanes)]
        for side in range(0, tile.tokens, lanes):
            rows = [x.load(e, dtype, token, first, lanes) for token in token_ids[side : side + lanes]]
            for address, values in zip(at, transpose(e, rows), strict=True):
                e.store(values, address + 4 * side)
    with e.loop(whole, columns) as column:
        address = panel + place_of(e, format_, places, column) * (4 * tile.tokens)
        for lane, token in enumerate(token_ids):
            e.store(x.load(e, dtype, token, column, 1), address + 4 * lane)


def store_activations(e: Emitter, value: Value, base: Value, index: Value, is_bfloat16: Value) -> None:
    """Float32 numbers to position `index` of a float32 or bfloat16 array."""
    with e.otherwise(is_bfloat16):
        e.store(value, base + index * 4)
    with e.when(is_bfloat16):
        e.store(to_bfloat16(e, value), base + index * 2)


def unpack_tile(
    e: Emitter, tile: Tiling, c: Value, rows: Value, tokens: Value, out: Value, at: Value, stride: Value, bf16: Value
) -> None:
    """c [rows][tokens per tile] to [tokens][stride] at position `at` of a float32 or bfloat16 array."""
    lanes = tile.lanes
    whole = rows // lanes * lanes
    with e.loop(0, tokens, lanes) as first:
        corner = at + first * stride
        present = tokens - first
        with e.loop(0, whole, lanes) as row:
            place = c + row * (4 * tile.tokens) + first * 4
            square = [e.load(vector(F32, lanes), place + 4 * tile.tokens * i) for i in range(lanes)]
            for lane, values in enumerate(transpose(e, square)):
                with e.when(present > lane):
                    store_activations(e, values, out, corner + stride * lane + row, bf16)
        with e.loop(whole, rows) as row, e.loop(0, e.smaller(present, e.number(lanes))) as lane:
            value = e.load(F32, c + row * (4 * tile.tokens) + (first + lane) * 4)
            store_activations(e, value, out, corner + stride * lane + row, bf16)


def pack_row(e: Emitter, format_: Format, x: Value, is_bfloat16: Value, columns: Value, out: Value) -> None:
    """One row of x, float32 or bfloat16, as float32 in the format's order, zeros up to a whole block."""
    whole = columns // format_.block * format_.block

    def from_float32(first: Value, offset: int, lanes: int) -> Value:
        return e.load(vector(F32, lanes), x + (first + offset) * 4)

    def from_halves(first: Value, offset: int, lanes: int) -> Value:
        return from_bfloat16(e, e.load(vector(I16, lanes), x + (first + offset) * 2))

    for case, load in ((e.otherwise(is_bfloat16), from_float32), (e.when(is_bfloat16), from_halves)):
        with case, e.loop(0, whole, format_.block) as first:
            format_.place(e, partial(load, first), out + first * 4)
    with e.when(whole < columns):
        tail = e.stack(4 * format_.block)
        for offset in range(0, 4 * format_.block, 8):
            e.store(e.number(0), tail + offset)
        with e.loop(whole, columns) as column:
            place = tail + (column - whole) * 4
            with e.otherwise(is_bfloat16):
                e.store(e.load(F32, x + column * 4), place)
            with e.when(is_bfloat16):
                e.store(from_bfloat16(e, e.load(I16, x + column * 2)), place)
        format_.place(e, lambda offset, lanes: e.load(vector(F32, lanes), tail + 4 * offset), out + whole * 4)


def whole_blocks(format_: Format, columns: Value) -> Value:
    return (columns + (format_.block - 1)) // format_.block * format_.block


def places_of(format_: Format) -> list[int]:
    """Place of each column of a block in the order in which the format hands columns out."""
    order = format_.columns()
    return [order.index(column) for column in range(format_.block)]


def place_of(e: Emitter, format_: Format, places: Value, column: Value) -> Value:
    within = column & (format_.block - 1)
    return column - within + e.load(I64, places + within * 8)
