"""MXFP4 by table, compiled: the loops that `convert` runs over groups of 32 codes with the tables of `mx_tables`.

`words` [groups, 2] uint64 are the 16 bytes of a group, read 8 at a time; `index` [groups] uint16 is the table row of each
group, `exponent` [groups] its scale byte; `sums` float64 [4] as in `compiled`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from k3tool.formats.jit import REASSOCIATE, compiled


def _census() -> tuple[Any, Any]:
    """What each byte adds to two words of eight 8-bit counters, one counter per code."""
    low, high = np.zeros(256, np.uint64), np.zeros(256, np.uint64)
    for byte in range(256):
        for code in (byte & 15, byte >> 4):
            (high if code & 8 else low)[byte] += np.uint64(1) << np.uint64(8 * (code & 7))
    return low, high


_COUNT_LOW, _COUNT_HIGH = _census()
_MAGNITUDES = np.array([(1 << (byte & 7)) | (1 << ((byte >> 4) & 7)) for byte in range(256)], np.uint8)
_HIGHEST = np.array([max(bits, 1).bit_length() - 1 for bits in range(256)], np.uint8)


@compiled()
def remap(words, index, flat, out):
    """out[g, j] = flat[256 index[g] + byte j of the group]; flat of any unsigned type, out [groups, 16] alike."""
    for g in range(words.shape[0]):
        base = np.int64(index[g]) << 8
        for h in range(2):
            word = words[g, h]
            for k in range(8):
                out[g, 8 * h + k] = flat[base + np.int64(word & np.uint64(255))]
                word >>= np.uint64(8)


@compiled()
def census(words, counts):
    """counts [groups, 2] uint64: as bytes, how many of a group's 32 values have each of the 16 codes."""
    for g in range(words.shape[0]):
        low, high = np.uint64(0), np.uint64(0)
        for h in range(2):
            word = words[g, h]
            for _ in range(8):
                byte = np.int64(word & np.uint64(255))
                low += _COUNT_LOW[byte]
                high += _COUNT_HIGH[byte]
                word >>= np.uint64(8)
        counts[g, 0] = low
        counts[g, 1] = high


@compiled()
def tally(counts, index, exponent, first, tallies):
    """Adds up how often each code meets each table row and scale byte: tallies [bytes from `first`, rows, 16] uint32.

    counts: [groups, 16] uint8 from `census`. Whatever a table changes follows from these numbers.
    """
    for g in range(counts.shape[0]):
        byte, row = np.int64(exponent[g]) - first, np.int64(index[g])
        for code in range(16):
            tallies[byte, row, code] += np.uint32(counts[g, code])


@compiled(fastmath=REASSOCIATE)
def group_squares(words, exponent, squares, weights):
    """Sum of squares of MXFP4 values: squares [256] uint64 is four times that of a byte's two codes."""
    total = 0.0
    for g in range(words.shape[0]):
        whole = np.uint64(0)
        for h in range(2):
            word = words[g, h]
            for _ in range(8):
                whole += squares[np.int64(word & np.uint64(255))]
                word >>= np.uint64(8)
        total += np.float64(np.int32(whole)) * weights[exponent[g]]
    return total * 0.25


@compiled()
def peaks(words, out):
    """out[g]: the largest magnitude index (0..7) among the 32 codes of a group."""
    for g in range(words.shape[0]):
        held = np.uint8(0)
        for h in range(2):
            word = words[g, h]
            for _ in range(8):
                held |= _MAGNITUDES[np.int64(word & np.uint64(255))]
                word >>= np.uint64(8)
        out[g] = _HIGHEST[held]


@compiled()
def bnb_index(peak, exponent, magnitudes, scales, steps, index, absmax):
    """Table rows of `mx_tables.to_bnb` for every two groups that make a block of 64, and the block's maximum."""
    for b in range(absmax.shape[0]):
        top = 2 * b
        if magnitudes[peak[top + 1]] * scales[exponent[top + 1]] > magnitudes[peak[top]] * scales[exponent[top]]:
            top += 1
        absmax[b] = magnitudes[peak[top]] * scales[exponent[top]]
        for g in range(2 * b, 2 * b + 2):
            distance = np.int64(exponent[top]) - np.int64(exponent[g]) + 4
            index[g] = np.int64(peak[top]) * steps + min(max(distance, 0), steps - 1)


@compiled()
def fp8_index(exponent, down, across, steps, index, top):
    """Largest scale byte `top` of each block of `down` rows and `across` groups, and each group's distance to it."""
    for i in range(top.shape[0]):
        for b in range(top.shape[1]):
            most = np.uint8(0)
            for r in range(i * down, (i + 1) * down):
                for g in range(b * across, (b + 1) * across):
                    most = max(most, exponent[r, g])
            top[i, b] = most
            for r in range(i * down, (i + 1) * down):
                for g in range(b * across, (b + 1) * across):
                    index[r, g] = min(np.int64(most) - np.int64(exponent[r, g]), steps - 1)


@compiled()
def choose(counts, squares, out):
    """out[g]: row 8 * peak + c of the candidate c with the least error, the first among equals.

    counts: [groups, 16] uint8 from `census`. squares: [8, 9, 8] float64 by the group's largest magnitude: what one
    value of magnitude 1..7 adds to the squared error under each of 8 candidates (zero above the largest), then the
    largest magnitude itself with either sign.
    """
    for g in range(counts.shape[0]):
        peak = 7
        while peak > 0 and counts[g, peak] + counts[g, peak + 8] == 0:
            peak -= 1
        table = squares[peak]
        plus, minus = np.float64(counts[g, peak]), np.float64(counts[g, peak + 8])
        e0, e1 = plus * table[7, 0] + minus * table[8, 0], plus * table[7, 1] + minus * table[8, 1]
        e2, e3 = plus * table[7, 2] + minus * table[8, 2], plus * table[7, 3] + minus * table[8, 3]
        e4, e5 = plus * table[7, 4] + minus * table[8, 4], plus * table[7, 5] + minus * table[8, 5]
        e6, e7 = plus * table[7, 6] + minus * table[8, 6], plus * table[7, 7] + minus * table[8, 7]
        for m in range(6):
            count = np.float64(np.int32(counts[g, m + 1]) + np.int32(counts[g, m + 9]))
            e0 += count * table[m, 0]
            e1 += count * table[m, 1]
            e2 += count * table[m, 2]
            e3 += count * table[m, 3]
            e4 += count * table[m, 4]
            e5 += count * table[m, 5]
            e6 += count * table[m, 6]
            e7 += count * table[m, 7]
        best, least = 0, e0
        for c, error in enumerate((e1, e2, e3, e4, e5, e6, e7)):
            if error < least:
                best, least = c + 1, error
        out[g] = peak * 8 + best


@compiled()
def scale_bf16(scales, index, exponent, out):
    """out[g] = scales[index[g]] times 2^(exponent[g] - 127), bfloat16 bits of normal numbers throughout."""
    for g in range(index.shape[0]):
        out[g] = np.uint16(np.int32(scales[index[g]]) + (np.int32(exponent[g]) - 127) * 128)


@compiled()
def repeat_scale(exponent, codes, out):
    """out[2 g] = out[2 g + 1] = codes[exponent[g]]: one scale per 32 columns becomes two per 16."""
    for g in range(exponent.shape[0]):
        code = codes[exponent[g]]
        out[2 * g] = code
        out[2 * g + 1] = code
