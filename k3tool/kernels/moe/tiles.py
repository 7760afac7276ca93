"""Tiles of expert weights in Triton: codes and scales as they are stored become numbers in registers.

FP4 codes times their group's scale are exact in bfloat16, so the scale is applied to the weights; the scale of a whole
NVFP4 matrix, and the scales of integers and FP8, are not, so they are applied to float32 sums. Two codes of a byte
belong to neighbouring columns: low and high nibbles make two tiles, which meet the even and the odd columns of x.
"""

from __future__ import annotations

import triton
import triton.language as tl

DENSE, MXFP4, NVFP4, INT4, INT8, FP8 = (tl.constexpr(number) for number in range(6))


@triton.jit
def e2m1(code):
    """float32 behind FP4 codes (int32 in 0..15), exactly."""
    bits = ((code & 7) << 22) | ((code & 8) << 28)
    # Exponent and mantissa of the code at those of a float32: 2^-126 times the number, subnormal for the code 0.5.
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37


@triton.jit
def e8m0(byte):
    """float32 behind E8M0 scale bytes (int32): 2^(byte - 127), NaN for 255."""
    bits = tl.where(byte == 0, 1 << 22, byte << 23)
    return tl.where(byte == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def e4m3(byte):
    """float32 behind E4M3 bytes (int32), NaN for 0x7f and 0xff."""
    bits = ((byte & 0x7F) << 20) | ((byte & 0x80) << 24)
    value = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36
    return tl.where((byte & 0x7F) == 0x7F, float("nan"), value)


@triton.jit
def whole(code):
    """float32 of integers in 0..255 (int32), without a slow conversion: the mantissa of 2^23 + code."""
    return (code | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0


@triton.jit
def fp4_scales(
    scales,
    n,
    k0,
    rows,
    columns,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """[BLOCK_N, BLOCK_K / 2] float32: the scale of every byte of a tile."""
    GROUPS: tl.constexpr = BLOCK_K // GROUP
    group = k0 // GROUP + tl.arange(0, GROUPS)
    per_row = columns // GROUP
    inside = (n < rows)[:, None] & (group < per_row)[None, :]
    byte = tl.load(scales + n[:, None] * per_row + group[None, :], inside, 0).to(tl.int32)
    scale = e8m0(byte) if FORMAT == MXFP4 else e4m3(byte)
    spread = tl.broadcast_to(scale[:, :, None], (BLOCK_N, GROUPS, GROUP // 2))
    return tl.reshape(spread, (BLOCK_N, BLOCK_K // 2))


@triton.jit
def add_product(
    total, even, odd, codes, scales, n, k0, rows, columns, SCALE_ROWS: tl.constexpr, FORMAT: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """total [M, BLOCK_N] += x W^T over columns k0 .. k0 + BLOCK_K of the rows n (int64) of a matrix [rows, columns].

    even, odd: x [M, BLOCK_K / 2] at the even and odd columns; for formats without nibbles `even` is x [M, BLOCK_K].
    GROUP: columns of one scale (0: a scale per row); SCALE_ROWS: rows of one scale (1 or 128).
    """
    if (FORMAT == MXFP4) | (FORMAT == NVFP4) | (FORMAT == INT4):
        j = k0 // 2 + tl.arange(0, BLOCK_K // 2)
        inside = (n < rows)[:, None] & (j < columns // 2)[None, :]
        byte = tl.load(codes + n[:, None] * (columns // 2) + j[None, :], inside, 0).to(tl.int32)
        if FORMAT == INT4:
            low, high = whole(byte & 15) - 8.0, whole(byte >> 4) - 8.0
            part = tl.dot(even, tl.trans(low.to(DOT)), input_precision=PRECISION)
            part = tl.dot(odd, tl.trans(high.to(DOT)), part, input_precision=PRECISION)
            total += part * _sum_scale(scales, n, k0, rows, columns, SCALE_ROWS, GROUP)[None, :]
        else:
            scale = fp4_scales(scales, n, k0, rows, columns, FORMAT, GROUP, BLOCK_N, BLOCK_K)
            low, high = e2m1(byte & 15) * scale, e2m1(byte >> 4) * scale
            total = tl.dot(even, tl.trans(low.to(DOT)), total, input_precision=PRECISION)
            total = tl.dot(odd, tl.trans(high.to(DOT)), total, input_precision=PRECISION)
    else:
        k = k0 + tl.arange(0, BLOCK_K)
        inside = (n < rows)[:, None] & (k < columns)[None, :]
        code = tl.load(codes + n[:, None] * columns + k[None, :], inside, 0)
        if FORMAT == DENSE:
            total = tl.dot(even, tl.trans(code.to(tl.float32).to(DOT)), total, input_precision=PRECISION)
        else:
            value = whole(code.to(tl.int32)) - 128.0 if FORMAT == INT8 else e4m3(code.to(tl.int32))
            part = tl.dot(even, tl.trans(value.to(DOT)), input_precision=PRECISION)
            total += part * _sum_scale(scales, n, k0, rows, columns, SCALE_ROWS, GROUP)[None, :]
    return total


@triton.jit
def _sum_scale(scales, n, k0, rows, columns, SCALE_ROWS: tl.constexpr, GROUP: tl.constexpr):
    """[BLOCK_N] float32: the one scale of each row in the columns of a block."""
    if GROUP == 0:
        at = n // SCALE_ROWS
    else:
        at = n // SCALE_ROWS * ((columns + GROUP - 1) // GROUP) + k0 // GROUP
    return tl.load(scales + at, n < rows, 0.0).to(tl.float32)
