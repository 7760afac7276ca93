"""The compiled functions behind `moe.cpu`, as LLVM code.

Few tokens: `gate_up` writes the activated hidden units of each of a token's experts, `down` sums the experts'
outputs. Many tokens, grouped by expert into items: `expand` does what `gate_up` does on tiles, and leaves the hidden
units as the panel that `contract`, the counterpart of `down`, multiplies.
"""

from __future__ import annotations

from dataclasses import dataclass

from llvmlite import ir

from k3tool.kernels.cpu import product
from k3tool.kernels.cpu.emit import F32, I64, Emitter, Value, vector
from k3tool.kernels.cpu.formats import Format, RowAddress
from k3tool.kernels.cpu.numeric import round_bfloat16, transpose
from k3tool.kernels.cpu.product import BLOCK_ROWS, DEPTH, Tiling
from k3tool.kernels.moe.activation import CAPS, gated

# Argument blocks of 64-bit integers. A layer: addresses of the stacked matrices, of their scales and of one float32
# factor per expert; of the 256 numbers behind scale bytes; width D and hidden units I.
LAYER = ("w1", "s1", "d1", "w3", "s3", "d3", "w2", "s2", "d2", "table", "wide", "inner")
# A call. One token: `experts` and `weights` are its slots as `order` leaves them, `ids` and `given` as the router did.
# Many: `weights` and `tokens` belong to the sorted slots of all tokens, `items` to runs of them.
CALL = (
    "layer", "x", "out", "count", "experts", "weights", "tokens", "items", "ids", "given", "num_experts", "round", "silu", "hidden",
    "splits", "block_rows", "scratch", "scratch_bytes", "panel_bytes", "c_bytes",
    "x_stride", *CAPS,
)  # fmt: skip
ITEM = ("expert", "start", "count", "hidden")


@dataclass(frozen=True)
class _Frame:
    """One function being written: its emitter, format, tile, and the fields of its argument blocks."""

    e: Emitter
    format: Format
    tile: Tiling
    call: dict[str, Value]
    layer: dict[str, Value]

    @property
    def lanes(self) -> int:
        return self.tile.lanes

    def matrix(self, which: str, expert: Value) -> tuple[RowAddress, tuple[Value, Value], Value]:
        """Address of an expert's w1, w3 or w2, the bytes of a row and of its scales, and the factor."""
        rows, columns = ("wide", "inner") if which == "2" else ("inner", "wide")
        row_bytes = self.format.weight_bytes(self.layer[columns]), self.format.row_scale_bytes(self.layer[columns])
        before = expert * self.layer[rows]
        at = RowAddress(self.layer[f"w{which}"], self.layer[f"s{which}"], self.layer["table"])
        factor = self.e.load(F32, self.layer[f"d{which}"] + expert * 4)
        return at.shifted(before * row_bytes[0], before * row_bytes[1]), row_bytes, factor

    def rounded(self, value: Value) -> Value:
        """Rounded to bfloat16 where activations are bfloat16."""
        result = self.e.variable(value)
        with self.e.when(self.call["round"] > 0):
            result.set(round_bfloat16(self.e, value))
        return result.get()

    def activated(self, gate: Value, up: Value) -> Value:
        """SiTU or SiLU gating of float32 vectors, rounded on the way in and out."""
        e = self.e
        gate, up = self.rounded(gate), self.rounded(up)
        return self.rounded(gated(e, gate, up, self.call["silu"] > 0, [self.call[cap] for cap in CAPS]))


def _frame(module: ir.Module, name: str, format_: Format, tile: Tiling) -> _Frame:
    e = Emitter(module, name, 4)
    call = {field: e.load(I64, e.params[0] + 8 * index) for index, field in enumerate(CALL)}
    layer = {field: e.load(I64, call["layer"] + 8 * index) for index, field in enumerate(LAYER)}
    return _Frame(e, format_, tile, call, layer)


def emit_order(module: ir.Module, format_: Format, tile: Tiling) -> None:
    """order: one token's slots in ascending order of expert, equal ones as they came.

    An id that no expert has becomes expert 0 with a weight that is not a number: nothing is read out of bounds, and the
    result shows it.
    """
    frame = _frame(module, "order", format_, tile)
    e, call = frame.e, frame.call
    with e.loop(0, call["count"]) as slot:
        given = e.load(I64, call["ids"] + slot * 8)
        known = (given >= 0) & (given < call["num_experts"])
        expert = e.select(known, given, e.number(0))
        weight = e.select(known, e.load(F32, call["given"] + slot * 4), e.number(float("nan"), F32))
        place = e.variable(slot)
        with e.repeat() as leave:
            leave(place.get() < 1)
            before = place.get() - 1
            above = e.load(I64, call["experts"] + before * 8)
            leave(above <= expert)
            e.store(above, call["experts"] + place.get() * 8)
            e.store(e.load(F32, call["weights"] + before * 4), call["weights"] + place.get() * 4)
            place.set(before)
        e.store(expert, call["experts"] + place.get() * 8)
        e.store(weight, call["weights"] + place.get() * 4)
    e.finish()


def emit_gate_up(module: ir.Module, format_: Format, tile: Tiling) -> None:
    """gate_up: activated hidden units of one token's experts. Chunks are ranges of (slot, block of hidden
    units); each chunk widens x for itself."""
    frame = _frame(module, "gate_up", format_, tile)
    e, call, inner, unit = frame.e, frame.call, frame.layer["inner"], format_.block
    units = (inner + (unit - 1)) // unit
    total, (_, chunk, chunks, thread) = call["count"] * units, e.params
    x = call["scratch"] + thread * call["scratch_bytes"]
    product.pack_row(e, format_, call["x"], call["round"] > 0, frame.layer["wide"], x)
    results, places = e.stack(8 * unit), e.table(product.places_of(format_))
    zero = e.number(0.0, vector(F32, frame.lanes))
    with e.loop(total * chunk // chunks, total * (chunk + 1) // chunks) as index:
        slot = index // units
        first = (index - slot * units) * unit
        expert = e.load(I64, call["experts"] + slot * 8)
        for offset in range(0, 8 * unit, 4 * frame.lanes):
            e.store(zero, results + offset)
        one, row_bytes, one_factor = frame.matrix("1", expert)
        other, _, other_factor = frame.matrix("3", expert)
        # Gate, then up, through one copy of the loop, which halves the code.
        with e.loop(0, e.number(2)) as turn, e.loop(first, e.smaller(first + unit, inner)) as row:
            is_gate = turn.equals(0)
            at = one.where(e, is_gate, other).shifted(row * row_bytes[0], row * row_bytes[1])
            (value,) = product.row_dots(e, format_, x, [at], frame.layer["wide"], product.NEAR_AHEAD)
            value = value * e.select(is_gate, one_factor, other_factor)
            e.store(value, results + ((row - first) + turn * unit) * 4)
        hidden = call["hidden"] + (slot * units * unit + first) * 4
        with e.loop(0, e.number(unit), frame.lanes) as offset:
            gate, up = (e.load(vector(F32, frame.lanes), results + offset * 4 + 4 * unit * i) for i in range(2))
            values = frame.activated(gate, up)
            for lane in range(frame.lanes):
                e.store(values[lane], hidden + e.load(I64, places + (offset + lane) * 8) * 4)
    e.finish()


def emit_down(module: ir.Module, format_: Format, tile: Tiling) -> None:
    """down: the weighted sum of one token's experts. Chunks are ranges of output rows, experts in order of slot."""
    frame = _frame(module, "down", format_, tile)
    e, call, inner, unit = frame.e, frame.call, frame.layer["inner"], format_.block
    depth = (inner + (unit - 1)) // unit * unit
    _, chunk, chunks, _ = e.params
    first, last = (frame.layer["wide"] * part // chunks for part in (chunk, chunk + 1))
    with e.loop(first, last) as row:
        e.store(e.number(0.0, F32), call["out"] + row * 4)
    with e.loop(0, call["count"]) as slot:
        at, row_bytes, factor = frame.matrix("2", e.load(I64, call["experts"] + slot * 8))
        weight = e.load(F32, call["weights"] + slot * 4)
        hidden = call["hidden"] + slot * depth * 4
        with e.loop(first, last) as row:
            here = at.shifted(row * row_bytes[0], row * row_bytes[1])
            (value,) = product.row_dots(e, format_, hidden, [here], inner, product.NEAR_AHEAD)
            place = call["out"] + row * 4
            e.store(e.load(F32, place) + weight * frame.rounded(value * factor), place)
    e.finish()


def _item(frame: _Frame, index: Value) -> dict[str, Value]:
    at = frame.call["items"] + index * (8 * len(ITEM))
    return {field: frame.e.load(I64, at + 8 * offset) for offset, field in enumerate(ITEM)}


def emit_expand(module: ir.Module, format_: Format, tile: Tiling, block_product: ir.Function) -> None:
    """expand: hidden units of every item, as panels. A chunk is a range of the row blocks of one item."""
    frame = _frame(module, "expand", format_, tile)
    e, call, layer = frame.e, frame.call, frame.layer
    _, chunk, _, thread = e.params
    item_index = chunk // call["splits"]
    split = chunk - item_index * call["splits"]
    item = _item(frame, item_index)
    tiles = (item["count"] + (tile.tokens - 1)) // tile.tokens
    panel = call["scratch"] + thread * call["scratch_bytes"]
    widened = panel + call["panel_bytes"]
    c = [widened + 4 * BLOCK_ROWS * DEPTH + call["c_bytes"] * turn for turn in range(2)]
    depth = product.whole_blocks(format_, layer["wide"])
    with e.loop(0, tiles) as index:
        lanes = [e.smaller(index * tile.tokens + lane, item["count"] - 1) for lane in range(tile.tokens)]
        ids = [e.load(I64, call["tokens"] + (item["start"] + lane) * 8) for lane in lanes]
        place = panel + index * depth * (4 * tile.tokens)
        x = product.Rows(call["x"], call["x_stride"], call["round"] > 0)
        product.pack_tile(e, format_, tile, x, ids, layer["wide"], place)
    blocks = (layer["inner"] + call["block_rows"] - 1) // call["block_rows"]
    with e.loop(blocks * split // call["splits"], blocks * (split + 1) // call["splits"]) as block:
        first = block * call["block_rows"]
        rows = e.smaller(call["block_rows"], layer["inner"] - first)
        factors: list[Value] = []
        for which, result in zip("13", c, strict=True):
            at, row_bytes, factor = frame.matrix(which, item["expert"])
            at = at.shifted(first * row_bytes[0], first * row_bytes[1])
            e.call(block_product, at.weights, at.scales, at.scale_table, rows, layer["wide"], panel, item["count"],
                   result, widened)  # fmt: skip
            factors.append(e.splat(factor, frame.lanes))
        _activate_block(frame, c, factors, tiles, (first, rows), item["hidden"])
    with e.when(split.equals(call["splits"] - 1)):
        _clear_padding(frame, tiles, item["hidden"])
    e.finish()


def _activate_block(
    frame: _Frame, c: list[Value], factors: list[Value], tiles: Value, block: tuple[Value, Value], hidden: Value
) -> None:
    """Activated gate and up tiles of a row block into the panel of the down projection."""
    e, tile = frame.e, frame.tile
    first, rows = block
    wide = vector(F32, frame.lanes)
    depth = product.whole_blocks(frame.format, frame.layer["inner"])
    places = e.table(product.places_of(frame.format))
    with e.loop(0, tiles) as index, e.loop(0, rows) as row:
        place = product.place_of(e, frame.format, places, first + row)
        out = hidden + (index * depth + place) * (4 * tile.tokens)
        at = (index * BLOCK_ROWS + row) * (4 * tile.tokens)
        with e.loop(0, e.number(4 * tile.tokens), 4 * frame.lanes) as side:
            gate, up = (e.load(wide, c[turn] + at + side) * factors[turn] for turn in range(2))
            e.store(frame.activated(gate, up), out + side)


def _clear_padding(frame: _Frame, tiles: Value, hidden: Value) -> None:
    """Zeros where the last block of a panel goes beyond the hidden units."""
    e, tile, inner = frame.e, frame.tile, frame.layer["inner"]
    depth = product.whole_blocks(frame.format, inner)
    places = e.table(product.places_of(frame.format))
    with e.loop(0, tiles) as index, e.loop(inner, depth) as column:
        out = hidden + (index * depth + product.place_of(e, frame.format, places, column)) * (4 * tile.tokens)
        for side in range(0, tile.tokens, frame.lanes):
            e.store(e.number(0.0, vector(F32, frame.lanes)), out + 4 * side)


def emit_contract(module: ir.Module, format_: Format, tile: Tiling, block_product: ir.Function) -> None:
    """contract: adds every item's weighted output. A chunk is a block of output rows, items in ascending order."""
    frame = _frame(module, "contract", format_, tile)
    e, call, layer = frame.e, frame.call, frame.layer
    _, chunk, _, thread = e.params
    first = chunk * call["block_rows"]
    rows = e.smaller(call["block_rows"], layer["wide"] - first)
    widened = call["scratch"] + thread * call["scratch_bytes"] + call["panel_bytes"]
    c = widened + 4 * BLOCK_ROWS * DEPTH
    with e.loop(0, call["count"]) as index:
        item = _item(frame, index)
        at, row_bytes, factor = frame.matrix("2", item["expert"])
        at = at.shifted(first * row_bytes[0], first * row_bytes[1])
        e.call(block_product, at.weights, at.scales, at.scale_table, rows, layer["inner"], item["hidden"],
               item["count"], c, widened)  # fmt: skip
        with e.loop(0, item["count"], frame.lanes) as token:
            _add_tokens(frame, c, factor, item, token, (first, rows))
    e.finish()


def _add_tokens(
    frame: _Frame, c: Value, factor: Value, item: dict[str, Value], token: Value, block: tuple[Value, Value]
) -> None:
    """Weighted outputs of the tokens in one vector of a tile onto their rows of the result."""
    e, call, tile, lanes = frame.e, frame.call, frame.tile, frame.lanes
    first, rows = block
    index = token // tile.tokens
    corner = c + index * (BLOCK_ROWS * tile.tokens * 4) + (token - index * tile.tokens) * 4
    whole = rows // lanes * lanes

    def place(lane: Value) -> tuple[Value, Value]:
        """Where a lane's output goes, and its weight."""
        slot = item["start"] + token + lane
        row = e.load(I64, call["tokens"] + slot * 8)
        return call["out"] + (row * frame.layer["wide"] + first) * 4, e.load(F32, call["weights"] + slot * 4)

    present = e.smaller(item["count"] - token, e.number(lanes))
    with e.loop(0, whole, lanes) as row:
        at = corner + row * (4 * tile.tokens)
        square = [e.load(vector(F32, lanes), at + 4 * tile.tokens * i) * e.splat(factor, lanes) for i in range(lanes)]
        for lane, values in enumerate(transpose(e, [frame.rounded(values) for values in square])):
            with e.when(present > lane):
                out, weight = place(e.number(lane))
                e.store(e.load(values.type, out + row * 4) + values * e.splat(weight, lanes), out + row * 4)
    with e.loop(whole, rows) as row, e.loop(0, present) as lane:
        out, weight = place(lane)
        value = frame.rounded(e.load(F32, corner + row * (4 * tile.tokens) + lane * 4) * factor)
        e.store(e.load(F32, out + row * 4) + value * weight, out + row * 4)
