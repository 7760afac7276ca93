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


# Four bytes become eight bfloat16 times their scales, two to a register. A code's sign goes to bit 15 and its exponent
# and mantissa to bits 8..6: 2^-126 times the number, which one product puts right before another applies the scale.
# Registers: $4 four bytes, $5 (like $6 to $8) the scale they share, twice; $0 and $1 the numbers of the low nibbles, $2 and
# $3 those of the high.
FP4_PTX = tl.constexpr(
    """{
    .reg .b32 one, two, lone, ltwo, a, b, c, d, large, zero;
    mov.b32 large, 0x7E807E80;
    mov.b32 zero, 0x80008000;
    prmt.b32 one, $4, 0, 0x1404;
    prmt.b32 two, $4, 0, 0x3424;
    shl.b32 lone, one, 4;
    shl.b32 ltwo, two, 4;
    shr.u32 a, lone, 6;
    shr.u32 b, ltwo, 6;
    shr.u32 c, one, 6;
    shr.u32 d, two, 6;
    and.b32 a, a, 0x01C001C0;
    and.b32 b, b, 0x01C001C0;
    and.b32 c, c, 0x01C001C0;
    and.b32 d, d, 0x01C001C0;
    lop3.b32 a, lone, 0x80008000, a, 0xEA;
    lop3.b32 b, ltwo, 0x80008000, b, 0xEA;
    lop3.b32 c, one, 0x80008000, c, 0xEA;
    lop3.b32 d, two, 0x80008000, d, 0xEA;
    fma.rn.bf16x2 a, a, large, zero;
    fma.rn.bf16x2 b, b, large, zero;
    fma.rn.bf16x2 c, c, large, zero;
    fma.rn.bf16x2 d, d, large, zero;
    fma.rn.bf16x2 $0, a, $5, zero;
    fma.rn.bf16x2 $1, b, $5, zero;
    fma.rn.bf16x2 $2, c, $5, zero;
    fma.rn.bf16x2 $3, d, $5, zero;
    }"""
)


@triton.jit
def fp4_tiles(byte, scale, DOT: tl.constexpr, HAS_PTX: tl.constexpr):
    """Bytes [N, J] and their scales (see `fp4_scales`) -> the numbers of low and high nibbles, in DOT."""
    if HAS_PTX:
        low, high = tl.inline_asm_elementwise(
            FP4_PTX, "=r,=r,=r,=r,r,r,r,r,r", [byte, scale], (tl.bfloat16, tl.bfloat16), True, 4
        )
    else:
        code = byte.to(tl.int32)
        low, high = e2m1(code & 15) * scale, e2m1(code >> 4) * scale
    return low.to(DOT), high.to(DOT)


@triton.jit
def fp4_scales(
    scales, n, k0, rows, row_scales, FORMAT: tl.constexpr, GROUP: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, IS_EVEN: tl.constexpr, HAS_PTX: tl.constexpr,
):  # fmt: skip
    """[BLOCK_N, BLOCK_K / 2]: the scale of every byte of a tile, as float32, or as two bfloat16 in an int32 for PTX."""
    GROUPS: tl.constexpr = BLOCK_K // GROUP
    group = k0 // GROUP + tl.arange(0, GROUPS)
    at = scales + n[:, None] * row_scales + group[None, :]
    if IS_EVEN:
        byte = tl.load(at).to(tl.int32)
    else:
        byte = tl.load(at, (n < rows)[:, None] & (group < row_scales)[None, :], 0).to(tl.int32)
    scale = e8m0(byte) if FORMAT == MXFP4 else e4m3(byte)
    if HAS_PTX:
        scale = (scale.to(tl.int32, bitcast=True) >> 16 & 0xFFFF) * 0x10001
    spread = tl.broadcast_to(scale[:, :, None], (BLOCK_N, GROUPS, GROUP // 2))
    return tl.reshape(spread, (BLOCK_N, BLOCK_K // 2))


@triton.jit
def _codes(codes, n, j, rows, row_codes, IS_EVEN: tl.constexpr):
    """Codes j of rows n, zero where there are none."""
    at = codes + n[:, None] * row_codes + j[None, :]
    if IS_EVEN:
        code = tl.load(at)
    else:
        code = tl.load(at, (n < rows)[:, None] & (j < row_codes)[None, :], 0)
    return code


@triton.jit
def add_product(
    total, even, odd, codes, scales, n, k0, rows, row_codes, row_scales, SCALE_ROWS: tl.constexpr, FORMAT: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
    HAS_PTX: tl.constexpr, IS_EVEN: tl.constexpr,
):  # fmt: skip
    """total [M, BLOCK_N] += x W^T over the columns k0 .. k0 + BLOCK_K of rows n (int64) of a matrix of `rows` rows.

    even, odd: x [M, BLOCK_K / 2] at the even and odd columns; for formats without nibbles `even` is x [M, BLOCK_K].
    row_codes, row_scales: stored codes (bytes, or elements of a plain matrix) and scales of a row.
    GROUP: columns of one scale (0: a scale per row); SCALE_ROWS: rows of one scale (1 or 128). IS_EVEN: blocks of rows and
    columns fit exactly.
    """
    if (FORMAT == MXFP4) | (FORMAT == NVFP4) | (FORMAT == INT4):
        j = k0 // 2 + tl.arange(0, BLOCK_K // 2)
        byte = _codes(codes, n, j, rows, row_codes, IS_EVEN)
        if FORMAT == INT4:
            code = byte.to(tl.int32)
            low, high = whole(code & 15) - 8.0, whole(code >> 4) - 8.0
            part = tl.dot(even, tl.trans(low.to(DOT)), input_precision=PRECISION)
            part = tl.dot(odd, tl.trans(high.to(DOT)), part, input_precision=PRECISION)
            total += part * _sum_scale(scales, n, k0, rows, row_scales, SCALE_ROWS, GROUP)[None, :]
        else:
            scale = fp4_scales(scales, n, k0, rows, row_scales, FORMAT, GROUP, BLOCK_N, BLOCK_K, IS_EVEN, HAS_PTX)
            low, high = fp4_tiles(byte, scale, DOT, HAS_PTX)
            total = tl.dot(even, tl.trans(low), total, input_precision=PRECISION)
            total = tl.dot(odd, tl.trans(high), total, input_precision=PRECISION)
    else:
        k = k0 + tl.arange(0, BLOCK_K)
        code = _codes(codes, n, k, rows, row_codes, IS_EVEN)
        if FORMAT == DENSE:
            total = tl.dot(even, tl.trans(code.to(tl.float32).to(DOT)), total, input_precision=PRECISION)
        else:
            value = whole(code.to(tl.int32)) - 128.0 if FORMAT == INT8 else e4m3(code.to(tl.int32))
            part = tl.dot(even, tl.trans(value.to(DOT)), input_precision=PRECISION)
            total += part * _sum_scale(scales, n, k0, rows, row_scales, SCALE_ROWS, GROUP)[None, :]
    return total


@triton.jit
def _sum_scale(scales, n, k0, rows, row_scales, SCALE_ROWS: tl.constexpr, GROUP: tl.constexpr):
    """[BLOCK_N] float32: the one scale of each row in the columns of a block."""
    at = n // SCALE_ROWS * row_scales
    if GROUP > 0:
        at += k0 // GROUP
    return tl.load(scales + at, n < rows, 0.0).to(tl.float32)
