"""The same arithmetic as the format modules, compiled: one pass that quantizes a tile and sums up what it changed.

Each function here has its readable twin in numpy, and tests hold the two together bit for bit. Loops are serial and
release the interpreter lock, so that several tensors are worked on at once by threads. Arrays are C-contiguous;
`values` are float32 [rows, columns]; `sums` is float64 [4]: squares of the source, of the stored values, of their
difference, and the largest difference (see `measure.Measured`), added to what it holds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit

from k3tool.formats.bnb import bounds
from k3tool.formats.codes import E4M3

_E4M3 = E4M3.copy()
_NF4_BOUNDS = tuple(bounds("nf4")[0])
_FP4_BOUNDS = tuple(bounds("fp4")[0])
_REASSOCIATE = {"reassoc", "nsz"}  # lets sums run in vector lanes


def _compile(fastmath: Any = False) -> Callable[[Any], Any]:
    """njit with a cache on disk where there is a writable place for one.

    fastmath is always given: left out, a function takes it over from whichever caller is compiled first, and rounding
    by adding and subtracting a large number vanishes.
    """

    def decorate(function: Any) -> Any:
        try:
            return njit(nogil=True, cache=True, error_model="numpy", fastmath=fastmath)(function)
        except RuntimeError:
            return njit(nogil=True, error_model="numpy", fastmath=fastmath)(function)

    return decorate


# MXFP4 by table. `words` [groups, 2] uint64 are the 16 bytes of a group, read 8 at a time; `index` [groups] uint16 is
# the table row of each group, `exponent` [groups] its scale byte.


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


@_compile()
def remap(words, index, flat, out):
    """out[g, j] = flat[256 index[g] + byte j of the group]; flat of any unsigned type, out [groups, 16] alike."""
    for g in range(words.shape[0]):
        base = np.int64(index[g]) << 8
        for h in range(2):
            word = words[g, h]
            for k in range(8):
                out[g, 8 * h + k] = flat[base + np.int64(word & np.uint64(255))]
                word >>= np.uint64(8)


@_compile()
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


@_compile(fastmath={"reassoc", "nsz", "nnan"})
def remap_sums(counts, index, exponent, error, error_squares, stored_squares, weights, sums):
    """Adds what a remapping stored and changed: tables [rows, 16] float64, in units of the group's scale.

    counts: [groups, 16] uint8 from `census`. weights [256]: the square of each scale. sums[0] is `group_squares`.
    """
    all_stored, all_error, most = 0.0, 0.0, 0.0
    for g in range(counts.shape[0]):
        row = index[g]
        e, s, m = 0.0, 0.0, 0.0
        for code in range(16):
            count = np.float64(counts[g, code])
            e += count * error_squares[row, code]
            s += count * stored_squares[row, code]
            m = max(m, min(count, 1.0) * error[row, code])
        w = weights[exponent[g]]
        all_stored += s * w
        all_error += e * w
        most = max(most, m * m * w)
    sums[1] += all_stored
    sums[2] += all_error
    sums[3] = max(sums[3], np.sqrt(most))


@_compile(fastmath=_REASSOCIATE)
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


@_compile()
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


@_compile()
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


@_compile()
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


@_compile()
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


@_compile()
def scale_bf16(scales, index, exponent, out):
    """out[g] = scales[index[g]] times 2^(exponent[g] - 127), bfloat16 bits of normal numbers throughout."""
    for g in range(index.shape[0]):
        out[g] = np.uint16(np.int32(scales[index[g]]) + (np.int32(exponent[g]) - 127) * 128)


@_compile()
def repeat_scale(exponent, codes, out):
    """out[2 g] = out[2 g + 1] = codes[exponent[g]]: one scale per 32 columns becomes two per 16."""
    for g in range(exponent.shape[0]):
        code = codes[exponent[g]]
        out[2 * g] = code
        out[2 * g + 1] = code


# Decoding to float32 tiles.


@_compile()
def decode_mxfp4(packed, scale, pairs, scales, out):
    """packed [r, c / 2], scale bytes [r, c / 32], pairs [256, 2], scales [256] float32; out [r, c]."""
    for i in range(packed.shape[0]):
        for g in range(scale.shape[1]):
            step = scales[scale[i, g]]
            for j in range(16):
                byte = packed[i, g * 16 + j]
                out[i, g * 32 + 2 * j] = pairs[byte, 0] * step
                out[i, g * 32 + 2 * j + 1] = pairs[byte, 1] * step


@_compile()
def decode_bf16(bits, out):
    target = out.view(np.uint32)
    for i in range(bits.shape[0]):
        for j in range(bits.shape[1]):
            target[i, j] = np.uint32(bits[i, j]) << np.uint32(16)


# Small pieces, inlined into the loops below.


@_compile()
def _bits(x):
    return np.float32(x).view(np.uint32)


@_compile()
def _bf16_bits(x):
    bits = np.float32(x).view(np.uint32)
    return np.uint16((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))


@_compile()
def _from_bf16(bits):
    return np.uint32(np.uint32(bits) << np.uint32(16)).view(np.float32)


@_compile()
def _e2m1_code(x):
    a = abs(x)
    code = (
        np.uint32(a > np.float32(0.25))
        + np.uint32(a >= np.float32(0.75))
        + np.uint32(a > np.float32(1.25))
        + np.uint32(a >= np.float32(1.75))
        + np.uint32(a > np.float32(2.5))
        + np.uint32(a >= np.float32(3.5))
        + np.uint32(a > np.float32(5.0))
    )
    return np.uint8(code | ((_bits(x) >> np.uint32(31)) << np.uint32(3)))


@_compile()
def _e2m1_value(x):
    """Nearest E2M1 value of |x|, as a sum of steps that a vector unit can do."""
    a = abs(x)
    half = np.float32(0.5)
    return (
        half * np.float32(a > np.float32(0.25))
        + half * np.float32(a >= np.float32(0.75))
        + half * np.float32(a > np.float32(1.25))
        + half * np.float32(a >= np.float32(1.75))
        + np.float32(a > np.float32(2.5))
        + np.float32(a >= np.float32(3.5))
        + np.float32(2.0) * np.float32(a > np.float32(5.0))
    )


@_compile()
def _e4m3_value(x):
    """Nearest E4M3 value of |x|, saturating at 448."""
    a = min(abs(x), np.float32(448.0))
    exponent = max(_bits(a) >> np.uint32(23), np.uint32(121))
    anchor = np.uint32((exponent + np.uint32(20)) << np.uint32(23)).view(np.float32)
    return (a + anchor) - anchor


@_compile()
def _e4m3_code(x):
    value = _e4m3_value(x)
    normal = (_bits(value) >> np.uint32(20)) - np.uint32(960)
    subnormal = np.uint32(value * np.float32(512.0))
    code = subnormal if value < np.float32(0.015625) else normal
    return np.uint8(code | ((_bits(x) >> np.uint32(31)) << np.uint32(7)))


@_compile()
def _amax(v):
    most = np.float32(0)
    for j in range(v.shape[0]):
        most = max(most, abs(v[j]))
    return most


@_compile(fastmath=_REASSOCIATE)
def _e2m1_error(v, weight, step):
    error = 0.0
    for j in range(v.shape[0]):
        d = abs(v[j]) - _e2m1_value(v[j] / step) * step
        error += np.float64(d) * np.float64(d) * np.float64(weight[j])
    return error


@_compile(fastmath=_REASSOCIATE)
def _integer_error(v, weight, step, low, high):
    error = 0.0
    for j in range(v.shape[0]):
        d = v[j] - min(max(np.rint(v[j] / step), low), high) * step
        error += np.float64(d) * np.float64(d) * np.float64(weight[j])
    return error


@_compile(fastmath=_REASSOCIATE)
def _e4m3_error(v, weight, step):
    error = 0.0
    for j in range(v.shape[0]):
        d = abs(v[j]) - _e4m3_value(v[j] / step) * step
        error += np.float64(d) * np.float64(d) * np.float64(weight[j])
    return error


@_compile(fastmath=_REASSOCIATE)
def _add_sums(v, w, sums):
    source, stored, error, peak = 0.0, 0.0, 0.0, np.float32(0)
    for j in range(v.shape[0]):
        a, b = np.float64(v[j]), np.float64(w[j])
        source += a * a
        stored += b * b
        error += (a - b) * (a - b)
        peak = max(peak, abs(v[j] - w[j]))
    sums[0] += source
    sums[1] += stored
    sums[2] += error
    sums[3] = max(sums[3], np.float64(peak))


@_compile()
def _write_e2m1(v, step, packed, start, codes, kept):
    """Codes of one group into `packed` from byte `start`, the even one low; `kept` gets the stored values."""
    for j in range(v.shape[0]):
        codes[j] = _e2m1_code(v[j] / step)
    for j in range(v.shape[0]):
        kept[j] = np.copysign(_e2m1_value(v[j] / step) * step, v[j])
    for j in range(v.shape[0] // 2):
        packed[start + j] = codes[2 * j] | np.uint8(codes[2 * j + 1] << np.uint8(4))


@_compile()
def round_bf16(values, out, sums):
    kept = np.empty(values.shape[1], np.float32)
    for i in range(values.shape[0]):
        for j in range(values.shape[1]):
            out[i, j] = _bf16_bits(values[i, j])
        for j in range(values.shape[1]):
            kept[j] = _from_bf16(out[i, j])
        _add_sums(values[i], kept, sums)


# One tile of a matrix, format by format. `weight` [columns] float32 is what an error counts in each column.


@_compile()
def quantize_mxfp4(values, weight, shifts, scales, packed, scale, sums):
    kept, codes = np.empty(32, np.float32), np.empty(32, np.uint8)
    for i in range(values.shape[0]):
        for g in range(scale.shape[1]):
            v, w = values[i, g * 32 : g * 32 + 32], weight[g * 32 : g * 32 + 32]
            plain = np.int64((_bits(_amax(v)) + np.uint32(1 << 21)) >> np.uint32(23)) - 2
            plain = min(max(plain, 1), 254)
            best, least = plain, np.inf
            for shift in shifts:
                byte = min(max(plain + shift, 1), 254)
                if len(shifts) > 1:
                    error = _e2m1_error(v, w, scales[byte])
                    if error < least:
                        best, least = byte, error
            scale[i, g] = best
            _write_e2m1(v, scales[best], packed[i], g * 16, codes, kept)
            _add_sums(v, kept, sums)


@_compile()
def quantize_nvfp4(values, weight, shifts, factor, packed, scale, sums):
    kept, codes = np.empty(16, np.float32), np.empty(16, np.uint8)
    for i in range(values.shape[0]):
        for g in range(scale.shape[1]):
            v, w = values[i, g * 16 : g * 16 + 16], weight[g * 16 : g * 16 + 16]
            plain = np.int64(max(_e4m3_code(_amax(v) / np.float32(6.0) * factor), np.uint8(1)))
            best, least = plain, np.inf
            for shift in shifts:
                code = min(max(plain + shift, 1), 126)
                if len(shifts) > 1:
                    error = _e2m1_error(v, w, _E4M3[code] / factor)
                    if error < least:
                        best, least = code, error
            scale[i, g] = best
            _write_e2m1(v, _E4M3[best] / factor, packed[i], g * 8, codes, kept)
            _add_sums(v, kept, sums)


@_compile(fastmath=_REASSOCIATE)
def _fitted(v, weight, step, low, high):
    """The scale that fits the integers of `step` best: sum(w q v) / sum(w q q), or `step` where that is no scale."""
    above, below = 0.0, 0.0
    for j in range(v.shape[0]):
        q = np.float64(min(max(np.rint(v[j] / step), low), high))
        above += np.float64(weight[j]) * q * np.float64(v[j])
        below += np.float64(weight[j]) * q * q
    return np.float32(above / below) if below > 0 and above > 0 else step


@_compile()
def quantize_integer(values, weight, factors, bits, raw, scale, sums):
    """raw: [r, c * bits / 8] bytes of the packed words; scale: bfloat16 bits [r, groups]."""
    columns = values.shape[1]
    group = columns // scale.shape[1]
    low = np.float32(-(1 << (bits - 1)))
    high = -low - np.float32(1)
    half = np.float32(((1 << bits) - 1) / 2)
    kept = np.empty(group, np.float32)
    codes = np.empty(group, np.uint8)
    for i in range(values.shape[0]):
        for g in range(scale.shape[1]):
            v, w = values[i, g * group : (g + 1) * group], weight[g * group : (g + 1) * group]
            amax = _amax(v)
            plain = amax / half if amax > 0 else np.float32(1)
            best = _bf16_bits(plain)
            if len(factors) > 1:
                least = np.inf
                for factor in factors:
                    tried = _bf16_bits(plain * factor)
                    error = _integer_error(v, w, _from_bf16(tried), low, high)
                    if error < least:
                        best, least = tried, error
                tried = _bf16_bits(_fitted(v, w, _from_bf16(best), low, high))
                if _integer_error(v, w, _from_bf16(tried), low, high) < least:
                    best = tried
            scale[i, g] = best
            step = _from_bf16(best)
            for j in range(group):
                q = min(max(np.rint(v[j] / step), low), high)
                kept[j] = q * step
                codes[j] = np.uint8(np.int32(q - low))
            if bits == 8:
                raw[i, g * group : (g + 1) * group] = codes
            else:
                for j in range(group // 2):
                    raw[i, g * group // 2 + j] = codes[2 * j] | np.uint8(codes[2 * j + 1] << np.uint8(4))
            _add_sums(v, kept, sums)


@_compile()
def quantize_fp8(values, weight, factors, across, out, scale, sums):
    """One row of blocks: values [down, columns], blocks `across` wide, scale [columns / across]."""
    kept = np.empty(across, np.float32)
    for b in range(scale.shape[0]):
        amax = np.float32(0)
        for i in range(values.shape[0]):
            amax = max(amax, _amax(values[i, b * across : (b + 1) * across]))
        plain = amax / np.float32(448.0) if amax > 0 else np.float32(1)
        best, least = plain, np.inf
        for factor in factors:
            if len(factors) > 1:
                error = 0.0
                for i in range(values.shape[0]):
                    v = values[i, b * across : (b + 1) * across]
                    error += _e4m3_error(v, weight[b * across : (b + 1) * across], plain * factor)
                if error < least:
                    best, least = plain * factor, error
        scale[b] = best
        for i in range(values.shape[0]):
            v = values[i, b * across : (b + 1) * across]
            for j in range(across):
                out[i, b * across + j] = _e4m3_code(v[j] / best)
            for j in range(across):
                kept[j] = np.copysign(_e4m3_value(v[j] / best) * best, v[j])
            _add_sums(v, kept, sums)


@_compile()
def _above(x, limits):
    count = np.uint8(0)
    for limit in limits:
        count += np.uint8(limit < x)
    return count


@_compile()
def quantize_bnb(values, normal, order, table, out, absmax, sums):
    """values: [blocks, 64]; out: [blocks, 32], the first code in the high nibble. normal: NF4, else FP4."""
    kept = np.empty(64, np.float32)
    codes = np.empty(64, np.uint8)
    for b in range(values.shape[0]):
        v = values[b]
        amax = _amax(v)
        absmax[b] = amax
        inverse = np.float32(1) / max(amax, np.float32(1e-38))
        if normal:
            for j in range(64):
                codes[j] = _above(min(max(v[j] * inverse, np.float32(-1)), np.float32(1)), _NF4_BOUNDS)
        else:
            for j in range(64):
                codes[j] = _above(min(max(v[j] * inverse, np.float32(-1)), np.float32(1)), _FP4_BOUNDS)
            for j in range(64):
                codes[j] = order[codes[j]]
        for j in range(32):
            out[b, j] = np.uint8(codes[2 * j] << np.uint8(4)) | codes[2 * j + 1]
        for j in range(64):
            kept[j] = table[codes[j]] * amax
        _add_sums(v, kept, sums)
