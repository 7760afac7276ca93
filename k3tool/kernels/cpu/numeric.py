"""Vector arithmetic that processors do not have: bfloat16, transposition, exponentials.

Everything takes and gives float32 vectors of any width. exp follows Cephes `expf` (range reduction by ln 2 in two
steps, polynomial of degree 6) and tanh Cephes `tanhf`; both stay within 3 units in the last place.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from llvmlite import ir

from k3tool.kernels.cpu.emit import F32, I16, I32, Emitter, Value, vector

_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4
_EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
_EXP_LOW, _EXP_HIGH = -87.3, 88.3
_TANH = (-5.70498872745e-3, 2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1)
_ROUNDING = 12582912.0  # 1.5 * 2^23: adding it leaves the nearest integer in the low mantissa bits


def _like(value: Value, element: ir.Type) -> ir.Type:
    return vector(element, value.lanes) if isinstance(value.type, ir.VectorType) else element


def bits_of(e: Emitter, value: Value) -> Value:
    return e.convert(value, _like(value, I32), "bitcast")


def float_of(e: Emitter, bits: Value) -> Value:
    return e.convert(bits, _like(bits, F32), "bitcast")


def from_bfloat16(e: Emitter, halves: Value) -> Value:
    """16-bit integers holding bfloat16 -> float32."""
    return float_of(e, e.convert(halves, _like(halves, I32), "zext") << 16)


def from_float16(e: Emitter, halves: Value) -> Value:
    """16-bit integers holding float16 -> float32, for processors without an instruction for it."""
    bits = e.convert(halves, _like(halves, I32), "zext")
    size, sign = bits & 0x7FFF, (bits & 0x8000) << 16
    finite = bits_of(e, float_of(e, size << 13) * 2.0**112)
    return float_of(e, e.select(size < 0x7C00, finite, (size << 13) | 0x7F800000) | sign)


def _rounded_bits(e: Emitter, value: Value) -> Value:
    bits = bits_of(e, value)
    nearest = bits + ((bits >> 16) & 1) + 0x7FFF
    return e.select(value.equals(value), nearest, e.number(0x7FC00000, bits.type))


def round_bfloat16(e: Emitter, value: Value) -> Value:
    """The nearest bfloat16, ties to even, as float32."""
    return float_of(e, _rounded_bits(e, value) & -0x10000)


def to_bfloat16(e: Emitter, value: Value) -> Value:
    """The nearest bfloat16, ties to even, as 16-bit integers."""
    return e.convert(_rounded_bits(e, value) >> 16, _like(value, I16), "trunc")


def exp(e: Emitter, x: Value) -> Value:
    """e^x; below -87.3, where results are denormal, 0; above 88.3, just short of the largest float32, infinity."""
    too_small, too_large = x < _EXP_LOW, x > _EXP_HIGH
    outside = e.select(too_large, e.number(math.inf, x.type), e.number(0.0, x.type))
    x = e.select(too_small, e.number(_EXP_LOW, x.type), e.select(too_large, e.number(_EXP_HIGH, x.type), x))
    shifted = e.fma(x, e.number(1.44269504088896341, x.type), e.number(_ROUNDING, x.type))
    whole = shifted - _ROUNDING
    x = e.fma(whole, e.number(-_LN2_HIGH, x.type), x)
    x = e.fma(whole, e.number(-_LN2_LOW, x.type), x)
    series = e.number(_EXP[0], x.type)
    for coefficient in _EXP[1:]:
        series = e.fma(series, x, e.number(coefficient, x.type))
    value = e.fma(series, x * x, x + 1.0)
    power = float_of(e, (bits_of(e, shifted) << 23) + (127 << 23))
    return e.select(too_small | too_large, outside, value * power)


def sigmoid(e: Emitter, x: Value) -> Value:
    one = e.number(1.0, x.type)
    return one / (exp(e, 0.0 - x) + one)


def tanh(e: Emitter, x: Value) -> Value:
    """Where no lane is beyond 0.625 in size, which is the rule in a gated MLP, the polynomial alone is computed."""
    size = float_of(e, bits_of(e, x) & 0x7FFFFFFF)
    square = x * x
    series = e.number(_TANH[0], x.type)
    for coefficient in _TANH[1:]:
        series = e.fma(series, square, e.number(coefficient, x.type))
    result = e.variable(e.fma(series * square, x, x))
    is_small = size < 0.625
    with e.otherwise(e.everywhere(is_small)):
        sign = bits_of(e, x) & -0x80000000
        one = e.number(1.0, x.type)
        large = one - e.number(2.0, x.type) / (exp(e, size + size) + one)
        result.set(e.select(is_small, result.get(), float_of(e, bits_of(e, large) | sign)))
    return result.get()


def transpose(e: Emitter, rows: Sequence[Value]) -> list[Value]:
    """n vectors of n lanes (n a power of two) -> the n columns."""
    columns, count, distance = list(rows), len(rows), 1
    while distance < count:
        low = [lane + (count - distance if lane & distance else 0) for lane in range(count)]
        high = [lane + (count if lane & distance else distance) for lane in range(count)]
        for first in range(count):
            if not first & distance:
                one, other = columns[first], columns[first + distance]
                columns[first] = e.shuffle(one, other, low)
                columns[first + distance] = e.shuffle(one, other, high)
        distance *= 2
    return columns
