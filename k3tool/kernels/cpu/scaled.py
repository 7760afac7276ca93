"""Weight rows of codes whose scales multiply sums: FP8, 4- and 8-bit integers, and NF4 and FP4 of bitsandbytes.

A block is two vectors of numbers with one scale. 4-bit codes lie two to a byte, so one vector holds the even columns of the
block and one the odd ones; 8-bit codes keep their order.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass

from k3tool.kernels.cpu.emit import F32, I8, I16, I32, Emitter, Value, vector
from k3tool.kernels.cpu.formats import RowAddress, copy_completed, widen_float16
from k3tool.kernels.cpu.numeric import from_bfloat16
from k3tool.kernels.cpu.target import Target
from k3tool.kernels.linear.stored import BITS, BOOKS, HIGH_FIRST

_LOOKUPS = {
    "llvm.x86.avx512.pshuf.b.512": "llvm.x86.avx512.permvar.sf.512",
    "llvm.x86.avx2.pshuf.b": "llvm.x86.avx2.permps",
}
"""The intrinsic that picks float32 from a vector of them, where there is the one that picks bytes."""


@dataclass(frozen=True)
class Scaled:
    """kind: see `StoredMatrix`. group: columns that share a scale, a multiple of 32; 0: a row. scale: its dtype."""

    kind: str
    group: int
    scale: str
    target: Target

    @property
    def name(self) -> str:
        return f"{self.kind}_{self.group}_{self.scale}"

    @property
    def lanes(self) -> int:
        return self.target.float_lanes

    @property
    def block(self) -> int:
        return 2 * self.lanes

    @property
    def _nibbles(self) -> bool:
        return BITS[self.kind] == 4

    def columns(self) -> list[int]:
        if not self._nibbles:
            return list(range(self.block))
        return [*range(0, self.block, 2), *range(1, self.block, 2)]

    def weight_bytes(self, columns: Value) -> Value:
        return columns >> 1 if self._nibbles else columns * 1

    @property
    def _scale_size(self) -> int:
        return 2 if self.scale == "bfloat16" else 4

    def scale_bytes(self, columns: Value) -> Value:
        return columns // self.group * self._scale_size if self.group else columns * 0

    def row_scale_bytes(self, columns: Value) -> Value:
        groups = (columns + (self.group - 1)) // self.group if self.group else columns * 0 + 1
        return groups * self._scale_size

    def vectors(self, e: Emitter, at: RowAddress) -> list[tuple[Value, Value | None]]:
        scale = self._load_scale(e, at.scales)
        if self.kind == "fp8":
            scale = e.splat(scale * 256.0, self.lanes)
            return [(self._fp8(e, at.weights + self.lanes * half), scale) for half in range(2)]
        scale, wide = e.splat(scale, self.lanes), vector(I32, self.lanes)
        if not self._nibbles:
            places = [at.weights + self.lanes * half for half in range(2)]
            return [
                (self._number(e, e.convert(e.load(vector(I8, self.lanes), p), wide, "zext")), scale) for p in places
            ]
        codes = e.convert(e.load(vector(I8, self.lanes), at.weights), wide, "zext")
        low, high = self._number(e, codes & 15), self._number(e, codes >> 4)
        return [(number, scale) for number in ((high, low) if self.kind in HIGH_FIRST else (low, high))]

    def _load_scale(self, e: Emitter, address: Value) -> Value:
        return from_bfloat16(e, e.load(I16, address)) if self.scale == "bfloat16" else e.load(F32, address)

    def _fp8(self, e: Emitter, address: Value) -> Value:
        """E4M3 numbers times 2^-8: a float16 with the same sign, the same mantissa, and an exponent that counts from 15, not 7.

        That holds for the smallest ones as well, which processors widen from float16 without delay.
        """
        halves = e.convert(e.load(vector(I8, self.lanes), address), vector(I16, self.lanes), "sext") << 7
        return widen_float16(e, halves & 0xBF80)

    def _number(self, e: Emitter, codes: Value) -> Value:
        """What 32-bit codes stand for."""
        if self.kind in BOOKS:
            return self._look_up(e, codes)
        return e.convert(codes - (1 << (BITS[self.kind] - 1)), vector(F32, self.lanes), "sitofp")

    def _look_up(self, e: Emitter, codes: Value) -> Value:
        book, wide = BOOKS[self.kind], vector(F32, self.lanes)
        name = _LOOKUPS.get(self.target.byte_lookup or "")
        if name and self.lanes == 16:
            return e.intrinsic(name, wide, e.lanes(book, F32), codes)
        if name and self.lanes == 8:
            low, high = (e.intrinsic(name, wide, e.lanes(half, F32), codes) for half in (book[:8], book[8:]))
            return e.select(codes > 7, high, low)
        table = e.table(struct.unpack("<8q", struct.pack("<16f", *book)))
        result = e.number(0.0, wide)
        for lane in range(self.lanes):
            number = e.load(F32, table + e.convert(codes[lane], table.type, "zext") * 4)
            result = e.insert(result, number, lane)
        return result

    def place(self, e: Emitter, load: Callable[[int, int], Value], out: Value) -> None:
        halves = [load(0, self.lanes), load(self.lanes, self.lanes)]
        if self._nibbles:
            halves = [e.shuffle(*halves, range(first, self.block, 2)) for first in (0, 1)]
        for half, values in enumerate(halves):
            e.store(values, out + 4 * self.lanes * half)

    def in_order(self, e: Emitter, found: list[tuple[Value, Value | None]]) -> list[Value]:
        """The scaled numbers of a block in the order of columns, a vector at a time."""
        one, other = (value * scale for value, scale in found if scale is not None)
        if not self._nibbles:
            return [one, other]
        order = [lane for pair in zip(range(self.lanes), range(self.lanes, self.block), strict=True) for lane in pair]
        return [e.shuffle(one, other, half) for half in (order[: self.lanes], order[self.lanes :])]

    def copy_tail(self, e: Emitter, at: RowAddress, columns: Value) -> RowAddress:
        room = -(-self.block // 8) * 8
        scratch = copy_completed(e, at.weights, self.weight_bytes(columns), 1, room)
        return RowAddress(scratch, at.scales, at.scale_table)
