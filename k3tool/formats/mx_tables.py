"""MXFP4 to other formats without arithmetic on weights: one table row per group, one look-up per byte of two codes.

All codes of a group share a power of two, so that what a group becomes depends only on a few small things (the scale
byte, its distance to a block's scale, the group's largest code). The tables are built by the plain functions of the
format modules on the 16 codes, hence carry their rounding; the pass over the weights only looks up.
Tables count errors in units of the group's own scale.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np
from numpy.typing import NDArray

from k3tool.formats import bnb
from k3tool.formats.codes import E2M1, E2M1_MAGNITUDES, E4M3, bf16_to_f32, f32_to_bf16, round_e2m1, round_e4m3
from k3tool.formats.measure import Measured

LOW, HIGH = np.arange(256) & 15, np.arange(256) >> 4
FP8_TOP, FP8_STEPS = 6, 24  # 6 x 2^6 is below 448; 24 binades lower every code rounds to zero
BNB_STEPS = 64  # distances between a group's scale and its block's maximum; further away every code is zero
NVFP4_LEAST, NVFP4_MOST, NVFP4_STEPS = -9, 8, 8  # E4M3 holds 2^-9 to 2^8; 7 binades lower every code rounds to zero

INT4_DIVISORS = {
    4.0: (7.877, 7.758, 8.0, 7.111, 7.642, 6.872, 7.262),
    6.0: (7.877, 6.12, 8.486, 7.245, 7.758, 8.0, 8.127),
}
"""largest magnitude / divisor is a scale that the search tries beside the plain one (/ 7.5). Picked greedily for the
least squared error over MXFP4 codes of normal, Laplace and t-distributed weights; more of them gain under 0.5%."""

_CODE_SQUARES = (2 * np.abs(E2M1)).astype(np.uint64) ** 2
SQUARES = _CODE_SQUARES[LOW] + _CODE_SQUARES[HIGH]
"""Four times the sum of squares of the two codes of each packed byte: [256] uint64."""

SCALE_SQUARES = np.ldexp(np.float64(1), 2 * (np.arange(256) - 127))
"""Square of each scale byte's value, float64."""


@dataclass(frozen=True)
class Table:
    """bytes: [rows, 256] what two packed codes become. stored: [rows, 16] float64, the value of each code after, in
    units of the group's scale."""

    bytes: NDArray
    stored: NDArray[np.float64]

    @cached_property
    def error(self) -> NDArray[np.float64]:
        """[rows, 16] absolute difference of each code."""
        return np.abs(self.stored - E2M1.astype(np.float64))

    @cached_property
    def first_lossy(self) -> int:
        """The first row in which some code changes its value; the number of rows where there is none."""
        lossy = (self.error > 0).any(axis=1)
        return int(np.argmax(lossy)) if np.any(lossy) else len(self.error)

    def measure(self, values: int, tallies: NDArray[np.uint32], first: int) -> Measured:
        """What a remapping changed, from how often each code met each row and scale byte (see `compiled_mx.tally`)."""
        scales = slice(first, first + len(tallies))
        by_row = np.einsum("brc,b->rc", tallies, SCALE_SQUARES[scales])
        source = float((by_row.sum(axis=0) * E2M1.astype(np.float64) ** 2).sum())
        largest = ((tallies > 0) * self.error).max(axis=(1, 2), initial=0.0)
        peak = float((largest * np.sqrt(SCALE_SQUARES[scales])).max())
        return Measured(
            values, source, float((by_row * self.stored**2).sum()), float((by_row * self.error**2).sum()), peak
        )


def _pairs(codes: NDArray, dtype: type, bits: int) -> NDArray:
    """[rows, 16] output codes to [rows, 256] pairs, the even column in the low bits."""
    wide = codes.astype(dtype)
    return wide[:, LOW] | (wide[:, HIGH] << dtype(bits))


@cache
def to_int8() -> Table:
    """One row: twice the code is a whole number of at most 12; the scale halves. Never lossy."""
    doubled = (E2M1 * 2).astype(np.int16)
    return Table(_pairs((doubled + 128)[None], np.uint16, 8), E2M1[None].astype(np.float64))


@cache
def to_fp8() -> Table:
    """Row d: the group's scale is 2^(FP8_TOP - d) times the block's scale."""
    factor = np.ldexp(np.float64(1), FP8_TOP - np.arange(FP8_STEPS))[:, None]
    codes = round_e4m3((E2M1.astype(np.float64) * factor).astype(np.float32))
    return Table(_pairs(codes, np.uint16, 8), E4M3[codes].astype(np.float64) / factor)


def to_bf16(first: int, last: int) -> Table:
    """Row b - first for scale byte b in first..last. A code that overflows becomes infinite."""
    scale = np.ldexp(np.float64(1), np.arange(first, last + 1) - 127)[:, None]
    with np.errstate(over="ignore", invalid="ignore"):
        bits = f32_to_bf16((E2M1.astype(np.float64) * scale).astype(np.float32))
        stored = bf16_to_f32(bits).astype(np.float64) / scale
    return Table(_pairs(bits, np.uint32, 16), stored)


@cache
def to_nvfp4() -> Table:
    """Row d: the codes are kept where d is 0; else the block's scale is 2^d times the group's, the least there is."""
    factor = np.ldexp(np.float64(1), np.arange(NVFP4_STEPS))[:, None]
    codes = round_e2m1((E2M1.astype(np.float64) / factor).astype(np.float32))
    return Table(codes[:, LOW] | (codes[:, HIGH] << 4), E2M1[codes].astype(np.float64) * factor)


def nvfp4_scales(overall: int) -> tuple[NDArray[np.uint8], NDArray[np.uint16]]:
    """For each scale byte: the E4M3 code of its value over 2^overall, and the row of `to_nvfp4`. [256] each."""
    exponent = np.arange(256) - 127 - overall
    clamped = np.clip(exponent, NVFP4_LEAST, NVFP4_MOST)
    code = np.where(clamped >= -6, (clamped + 7) << 3, 1 << np.maximum(clamped + 9, 0))
    row = np.clip(NVFP4_LEAST - exponent, 0, NVFP4_STEPS - 1)
    return code.astype(np.uint8), row.astype(np.uint16)


@cache
def to_bnb(kind: str) -> Table:
    """Row peak * BNB_STEPS + d: the block's largest magnitude is E2M1[peak] at a scale 2^(d - 4) of the group's own.

    Scales are powers of two, so that x * (1 / absmax) rounds alike at every exponent.
    """
    middles, order = bnb.bounds(kind)
    codes = np.empty((8, BNB_STEPS, 16), np.uint8)
    stored = np.zeros((8, BNB_STEPS, 16), np.float64)
    for peak, magnitude in enumerate(E2M1_MAGNITUDES):
        inverse = np.float32(1) / np.maximum(magnitude, np.float32(1e-38))
        for d in range(BNB_STEPS):
            relative = np.ldexp(E2M1, 4 - d).astype(np.float32) if peak else E2M1 * np.float32(0)
            scaled = np.clip(relative * inverse, -1, 1).astype(np.float32)
            codes[peak, d] = order[np.searchsorted(middles, scaled, side="left")]
            stored[peak, d] = np.ldexp((bnb.TABLES[kind][codes[peak, d]] * magnitude).astype(np.float64), d - 4)
    flat = codes.reshape(-1, 16)
    return Table((flat[:, LOW] << 4) | flat[:, HIGH], stored.reshape(-1, 16))


@dataclass(frozen=True)
class Choices:
    """Scales that a group of largest magnitude `peak` may have: row 8 * peak + c of the table for candidate c.

    scales: [64] bfloat16 bits in units of the group's scale. squares: [8, 9, 8], see `compiled_mx.choose`.
    """

    table: Table
    scales: NDArray[np.uint16]
    squares: NDArray[np.float64]


@cache
def to_int4(search: bool) -> Choices:
    """Integers of -8..7: the plain scale peak / 7.5 first, then when searching the others that are worth trying.

    Up to a peak of 3 the scale 0.5 is exact. Only the largest magnitude can meet the end of the range, where the two
    signs differ.
    """
    rows: list[NDArray[np.float32]] = []
    for magnitude in E2M1_MAGNITUDES:
        plain = magnitude / np.float32(7.5) if magnitude else np.float32(1)
        others = [plain] * 7
        if search:
            divisors = INT4_DIVISORS.get(float(magnitude), ())
            others = [magnitude / np.float32(d) for d in divisors] or [np.float32(0.5)] * 7
        rows.append(np.array([plain, *others], np.float32))
    scales = f32_to_bf16(np.concatenate(rows))
    step = bf16_to_f32(scales)[:, None]
    codes = np.clip(np.rint(E2M1[None] / step), -8, 7).astype(np.int16)
    stored = codes.astype(np.float64) * step
    errors = ((stored - E2M1.astype(np.float64)) ** 2).reshape(8, 8, 16)  # [peak, candidate, code]
    squares = np.zeros((8, 9, 8))
    for peak in range(8):
        squares[peak, : max(peak - 1, 0)] = errors[peak, :, 1:peak].T
        squares[peak, 7], squares[peak, 8] = errors[peak, :, peak], errors[peak, :, peak + 8]
    shifted = (codes + 8).astype(np.uint8)
    return Choices(Table(shifted[:, LOW] | (shifted[:, HIGH] << 4), stored), scales, squares)


INT8_SCALES = f32_to_bf16(np.ldexp(np.float32(1), np.arange(256) - 128).astype(np.float32))
"""Half of each scale byte's value, bfloat16 bits: the scale of `to_int8`. [256]."""
