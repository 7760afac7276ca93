"""Weight rows as they lie in memory, turned into float32 vectors: bfloat16, float16, float32 and FP4 with scales.

A row is read in blocks. Within a block a format may hand out the columns in its own order, whichever costs
fewest instructions; activations are laid out in the same order, so that no weight is ever moved to its place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from llvmlite import ir

from k3tool.kernels.cpu import target
from k3tool.kernels.cpu.emit import F32, I8, I16, I32, I64, Emitter, Value, vector
from k3tool.kernels.cpu.numeric import float_of, from_bfloat16, from_float16, transpose
from k3tool.kernels.cpu.target import Target

# High and low byte of the bfloat16 behind each FP4 code.
_E2M1_BFLOAT16 = (0x0000, 0x3F00, 0x3F80, 0x3FC0, 0x4000, 0x4040, 0x4080, 0x40C0)
_CODES = (*_E2M1_BFLOAT16, *(bits | 0x8000 for bits in _E2M1_BFLOAT16))


@dataclass(frozen=True)
class RowAddress:
    """Where one row of weights begins, and its scales and the 256 numbers that scale bytes stand for."""

    weights: Value
    scales: Value
    scale_table: Value

    def where(self, e: Emitter, condition: Value, other: RowAddress) -> RowAddress:
        """This address where the condition holds, else the other one."""
        weights = e.select(condition, self.weights, other.weights)
        return RowAddress(weights, e.select(condition, self.scales, other.scales), self.scale_table)

    def shifted(self, weight_bytes: Value, scale_bytes: Value) -> RowAddress:
        return RowAddress(self.weights + weight_bytes, self.scales + scale_bytes, self.scale_table)


class Format(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def block(self) -> int:
        """Columns of a block."""
        ...

    @property
    def lanes(self) -> int:
        """Numbers in each vector handed out."""
        ...

    def columns(self) -> list[int]:
        """Column of the block behind each number handed out."""
        ...

    def weight_bytes(self, columns: Value) -> Value:
        """Bytes that so many columns take; `columns` is a multiple of the granule."""
        ...

    def scale_bytes(self, columns: Value) -> Value:
        """Bytes of scales before a column of a row; the column begins a block."""
        ...

    def row_scale_bytes(self, columns: Value) -> Value:
        """Bytes of the scales of a row of so many columns."""
        ...

    def vectors(self, e: Emitter, at: RowAddress) -> list[tuple[Value, Value | None]]:
        """One block as vectors of float32, each with the vector of scales that it still must be multiplied by."""
        ...

    def place(self, e: Emitter, load: Callable[[int, int], Value], out: Value) -> None:
        """A block of activations into this order: `load(column, lanes)` gives float32, `out` is the block's place."""
        ...

    def copy_tail(self, e: Emitter, at: RowAddress, columns: Value) -> RowAddress:
        """The last, incomplete block of a row, completed with zeros, in scratch memory."""
        ...


def copy_completed(e: Emitter, source: Value, bytes_: Value, step: int, room: int) -> Value:
    """`bytes_` bytes, a multiple of `step`, at any address, and zeros behind them."""
    scratch, unit = e.stack(room), vector(I8, step)
    for offset in range(0, room, 8):
        e.store(e.number(0), scratch + offset)
    with e.loop(0, bytes_, step) as offset:
        e.store(e.load(unit, source + offset), scratch + offset)
    return scratch


def widen_float16(e: Emitter, halves: Value) -> Value:
    """16-bit integers holding float16 -> float32."""
    if not target.host().widens_float16:
        return from_float16(e, halves)
    return e.convert(
        e.convert(halves, vector(ir.HalfType(), halves.lanes), "bitcast"), vector(F32, halves.lanes), "fpext"
    )


@dataclass(frozen=True)
class Plain:
    """bfloat16, float16 or float32 numbers in their natural order."""

    name: str
    bytes: int
    lanes: int

    @property
    def block(self) -> int:
        return 2 * self.lanes

    def columns(self) -> list[int]:
        return list(range(self.block))

    def weight_bytes(self, columns: Value) -> Value:
        return columns * self.bytes

    def scale_bytes(self, columns: Value) -> Value:
        return columns * 0

    def row_scale_bytes(self, columns: Value) -> Value:
        return columns * 0

    def vectors(self, e: Emitter, at: RowAddress) -> list[tuple[Value, Value | None]]:
        step = self.lanes * self.bytes
        return [(self._load(e, at.weights + step * index), None) for index in range(2)]

    def _load(self, e: Emitter, address: Value) -> Value:
        if self.name == "bfloat16":
            return from_bfloat16(e, e.load(vector(I16, self.lanes), address))
        if self.name == "float16":
            return widen_float16(e, e.load(vector(I16, self.lanes), address))
        return e.load(vector(F32, self.lanes), address)

    def place(self, e: Emitter, load: Callable[[int, int], Value], out: Value) -> None:
        for column in range(0, self.block, self.lanes):
            e.store(load(column, self.lanes), out + 4 * column)

    def copy_tail(self, e: Emitter, at: RowAddress, columns: Value) -> RowAddress:
        scratch = copy_completed(e, at.weights, self.weight_bytes(columns), self.bytes, self.block * self.bytes)
        return RowAddress(scratch, at.scales, at.scale_table)


@dataclass(frozen=True)
class Fp4:
    """FP4 codes, two to a byte, with a scale byte per group of 16 or 32 columns.

    Every 128-bit lane takes 16 bytes. Two byte look-ups per nibble give the halves of a bfloat16, interleaving joins
    them, and a shift or a mask turns each half of a 32-bit lane into a float32. Column 2j is the low nibble of byte j.
    """

    group: int
    target: Target

    @property
    def name(self) -> str:
        return f"fp4_{self.group}"

    @property
    def lanes(self) -> int:
        return self.target.float_lanes

    @property
    def _quads(self) -> int:
        return self.lanes // 4

    @property
    def block(self) -> int:
        return 32 * self._quads

    def columns(self) -> list[int]:
        return [
            2 * (16 * quad + 8 * half + 2 * lane + part) + nibble
            for nibble in (0, 1)
            for half in (0, 1)
            for part in (0, 1)
            for quad in range(self._quads)
            for lane in range(4)
        ]

    def weight_bytes(self, columns: Value) -> Value:
        return columns >> 1

    def scale_bytes(self, columns: Value) -> Value:
        return columns >> (5 if self.group == 32 else 4)

    def row_scale_bytes(self, columns: Value) -> Value:
        return self.scale_bytes(columns)

    def vectors(self, e: Emitter, at: RowAddress) -> list[tuple[Value, Value | None]]:
        count, lanes = 16 * self._quads, self.lanes
        packed = e.load(vector(I8, count), at.weights)
        words = e.convert(e.convert(packed, vector(I16, count // 2), "bitcast") >> 4, packed.type, "bitcast")
        scales = self._scales(e, at)
        found: list[tuple[Value, Value | None]] = []
        for codes in (packed & 15, words & 15):
            low, high = self._look_up(e, codes)
            for half in (0, 1):
                order = [
                    lane
                    for quad in range(self._quads)
                    for byte in range(16 * quad + 8 * half, 16 * quad + 8 * half + 8)
                    for lane in (byte, count + byte)
                ]
                pairs = e.convert(e.shuffle(low, high, order), vector(I32, lanes), "bitcast")
                found.append((float_of(e, pairs << 16), scales[half]))
                found.append((float_of(e, pairs & -0x10000), scales[half]))
        return found

    def _look_up(self, e: Emitter, codes: Value) -> tuple[Value, Value]:
        """Low and high byte of the bfloat16 behind each code."""
        count = codes.lanes
        name = self.target.byte_lookup
        if name:
            tables = ([bits & 255 for bits in _CODES], [bits >> 8 for bits in _CODES])
            low, high = (e.intrinsic(name, codes.type, e.lanes(t * self._quads, I8), codes) for t in tables)
            return low, high
        # Magnitude m >= 2 is 0x3F00 + 64 m; codes 0 and 1 are 0x0000 and 0x3F00.
        wide = e.convert(codes, vector(I16, count), "zext")
        size = wide & 7
        zero, half = e.number(0, wide.type), e.number(0x3F00, wide.type)
        bits = e.select(size > 1, (size << 6) + half, e.select(size > 0, half, zero)) | ((wide & 8) << 12)
        return e.convert(bits, codes.type, "trunc"), e.convert(bits >> 8, codes.type, "trunc")

    def _scales(self, e: Emitter, at: RowAddress) -> list[Value]:
        """Scale vectors of the first and the second half of every 128-bit lane."""
        per_quad = 32 // self.group
        spread = [quad for quad in range(self._quads) for _ in range(4)]
        halves: list[Value] = []
        for half in range(per_quad):
            scales = Value(e, ir.Constant(vector(F32, self._quads), ir.Undefined))
            for quad in range(self._quads):
                byte = e.convert(e.load(I8, at.scales + (quad * per_quad + half)), I64, "zext")
                number = e.load(F32, at.scale_table + byte * 4)
                scales = Value(e, e.builder.insert_element(scales.ir, number.ir, ir.Constant(I32, quad)))
            halves.append(e.shuffle(scales, scales, spread))
        return halves * (2 // per_quad)

    def place(self, e: Emitter, load: Callable[[int, int], Value], out: Value) -> None:
        # Sixteen columns that share a quad and a half are a 4 x 4 transposition: their offset in a run of four
        # says part and nibble, the number of the run says the lane.
        for quad in range(self._quads):
            for half in (0, 1):
                first = 32 * quad + 16 * half
                runs = [load(first + 4 * run, 4) for run in range(4)]
                for offset, values in enumerate(transpose(e, runs)):
                    number = 4 * (offset & 1) + 2 * half + (offset >> 1)
                    e.store(values, out + 4 * (number * self.lanes + 4 * quad))

    def in_order(self, e: Emitter, found: list[tuple[Value, Value | None]]) -> list[list[Value]]:
        """The scaled numbers of a block in order, sixteen columns at a time: the way back from `place`."""
        vectors = [value * scale for value, scale in found if scale is not None]
        stretches: list[list[Value]] = []
        for quad in range(self._quads):
            four = range(4 * quad, 4 * quad + 4)
            for half in (0, 1):
                numbers = [4 * (offset & 1) + 2 * half + (offset >> 1) for offset in range(4)]
                runs = transpose(e, [e.shuffle(vectors[n], vectors[n], four) for n in numbers])
                while len(runs) > 1 and runs[0].lanes < self.lanes:
                    joined = range(2 * runs[0].lanes)
                    runs = [e.shuffle(runs[i], runs[i + 1], joined) for i in range(0, len(runs), 2)]
                stretches.append(runs)
        return stretches

    def copy_tail(self, e: Emitter, at: RowAddress, columns: Value) -> RowAddress:
        weights = copy_completed(e, at.weights, self.weight_bytes(columns), 8, self.block // 2)
        scales = copy_completed(e, at.scales, self.scale_bytes(columns), 1, 8 * -(-self.block // self.group // 8))
        return RowAddress(weights, scales, at.scale_table)
