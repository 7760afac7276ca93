"""The block formats compiled: one pass over a matrix, the interpreter lock released. Twins of `k3tool.gguf.blocks`.

Tests hold each to its twin byte by byte. Arrays are C-contiguous.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

NORMAL = np.float32(2.0**-126)
"""A step below it has no finite inverse, and is zero as float16 in any case."""


def _compile(function: Callable[..., Any]) -> Callable[..., Any]:
    """njit, cached on disk where there is a writable place for it."""
    try:
        return njit(nogil=True, cache=True, error_model="numpy")(function)
    except RuntimeError:
        return njit(nogil=True, error_model="numpy")(function)


@intrinsic
def _pair_anew(_context: Any, source: Any, target: Any) -> Any:
    """Take 16 bytes at the address `source`, put the 16 bytes of a ggml block at `target`; neither need be aligned.

    Byte i of the source holds values 2i (low nibble) and 2i + 1, byte j of the target values j and j + 16. In vector
    code because the loop over bytes runs at a fifth of the speed.
    """

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        byte = ir.IntType(8)
        half, whole = ir.VectorType(byte, 8), ir.VectorType(byte, 16)

        def lanes(value: int) -> ir.Constant:
            return ir.Constant(half, [value] * 8)

        def pick(a: Any, b: Any, order: list[int]) -> Any:
            return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(ir.IntType(32), len(order)), order))

        packed = builder.load(builder.inttoptr(arguments[0], whole.as_pointer()))
        packed.align = 1
        first = pick(packed, packed, list(range(8)))  # values 0..15
        second = pick(packed, packed, list(range(8, 16)))  # values 16..31
        even = builder.or_(builder.and_(first, lanes(0x0F)), builder.shl(second, lanes(4)))
        odd = builder.or_(builder.lshr(first, lanes(4)), builder.and_(second, lanes(0xF0)))
        paired = pick(even, odd, [lane for i in range(8) for lane in (i, i + 8)])
        builder.store(paired, builder.inttoptr(arguments[1], whole.as_pointer())).align = 1
        return context.get_dummy_value()

    return types.void(types.intp, types.intp), generate


@_compile
def repack(packed: Any, scale: Any, out: Any) -> None:
    """packed [groups, 16], scale [groups], out [groups, 17], all uint8."""
    source, target = packed.ctypes.data, out.ctypes.data
    for g in range(scale.shape[0]):
        out[g, 0] = scale[g]
        _pair_anew(source + 16 * g, target + 17 * g + 1)  # pyright: ignore[reportCallIssue]


@_compile
def quantize_q8_0(values: Any, steps: Any, codes: Any) -> int:
    """values [n] float32, steps [n / 32] float32, codes [n] int8. The first group that is not finite, or -1.

    `steps` is d before it is rounded to float16: ggml divides by the unrounded one.
    """
    bits = values.view(np.uint32)
    for g in range(steps.shape[0]):
        most = np.uint32(0)
        for j in range(g * 32, g * 32 + 32):
            most = max(most, bits[j] & np.uint32(0x7FFFFFFF))
        if most >= np.uint32(0x7F800000):
            return g
        peak = np.float32(0)
        for j in range(g * 32, g * 32 + 32):
            peak = max(peak, abs(values[j]))
        step = peak / np.float32(127)
        inverse = np.float32(0) if step < NORMAL else np.float32(1) / step
        steps[g] = step
        for j in range(g * 32, g * 32 + 32):
            scaled = min(max(values[j] * inverse, np.float32(-127)), np.float32(127))
            whole = np.trunc(scaled)
            codes[j] = np.int8(whole + np.trunc(np.float32(2) * (scaled - whole)))
    return -1


__all__ = ["quantize_q8_0", "repack"]


@_compile
def not_finite(bits: Any, exponent: Any) -> int:
    """How many of `bits` (unsigned, one number each) have every bit of the mask `exponent` set: NaN and infinities."""
    found = 0
    for i in range(bits.size):
        found += (bits[i] & exponent) == exponent
    return found
