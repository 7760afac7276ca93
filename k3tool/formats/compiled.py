"""The same arithmetic as the format modules, compiled: one pass that quantizes a tile and sums up what it changed.

Each function here has its readable twin in numpy, and tests hold the two together bit for bit. Loops are serial and
release the interpreter lock, so that several tensors are worked on at once by threads. Arrays are C-contiguous;
`values` are float32 [rows, columns]; `sums` is float64 [4]: squares of the source, of the stored values, of their
difference, and the largest difference (see `measure.Measured`), added to what it holds.
"""

from __future__ import annotations

import numpy as np

from k3tool.formats.bnb import bounds
from k3tool.formats.codes import E4M3
from k3tool.formats.jit import REASSOCIATE, compiled

_E4M3 = E4M3.copy()
_NF4_BOUNDS = tuple(bounds("nf4")[0])
_FP4_BOUNDS = tuple(bounds("fp4")[0])


# Decoding to float32 tiles.


@compiled()
def decode_mxfp4(packed, scale, pairs, scales, out):
    """packed [r, c / 2], scale bytes [r, c / 32], pairs [256, 2], scales [256] float32; out [r, c]."""
    for i in range(packed.shape[0]):
        for g in range(scale.shape[1]):
            step = scales[scale[i, g]]
            for j in range(16):
                byte = packed[i, g * 16 + j]
                out[i, g * 32 + 2 * j] = pairs[byte, 0] * step
                out[i, g * 32 + 2 * j + 1] = pairs[byte, 1] * step


@compiled()
def decode_bf16(bits, out):
    target = out.view(np.uint32)
    for i in range(bits.shape[0]):
        for j in range(bits.shape[1]):
            target[i, j] = np.uint32(bits[i, j]) << np.uint32(16)


# Small pieces, inlined into the loops below.


@compiled()
def _bits(x):
    return np.float32(x).view(np.uint32)


@compiled()
def _bf16_bits(x):
    bits = np.float32(x).view(np.uint32)
    return np.uint16((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))


@compiled()
def _from_bf16(bits):
    return np.uint32(np.uint32(bits) << np.uint32(16)).view(np.float32)


@compiled()
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


@compiled()
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


@compiled()
def _e4m3_value(x):
    """Nearest E4M3 value of |x|, saturating at 448."""
    a = min(abs(x), np.float32(448.0))
    exponent = max(_bits(a) >> np.uint32(23), np.uint32(121))
    anchor = np.uint32((exponent + np.uint32(20)) << np.uint32(23)).view(np.float32)
    return (a + anchor) - anchor


@compiled()
def _e4m3_code(x):
    value = _e4m3_value(x)
    normal = (_bits(value) >> np.uint32(20)) - np.uint32(960)
    subnormal = np.uint32(value * np.float32(512.0))
    code = subnormal if value < np.float32(0.015625) else normal
    return np.uint8(code | ((_bits(x) >> np.uint32(31)) << np.uint32(7)))


@compiled()
def _amax(v):
    most = np.float32(0)
    for j in range(v.shape[0]):
        most = max(most, abs(v[j]))
    return most


@compiled(fastmath=REASSOCIATE)
def _e2m1_error(v, weight, step):
    error = 0.0
    for j in range(v.shape[0]):
        d = abs(v[j]) - _e2m1_value(v[j] / step) * step
        error += np.float64(d) * np.float64(d) * np.float64(weight[j])
    return error


@compiled(fastmath=REASSOCIATE)
def _integer_error(v, weight, step, low, high):
    error = 0.0
    for j in range(v.shape[0]):
        d = v[j] - min(max(np.rint(v[j] / step), low), high) * step
        error += np.float64(d) * np.float64(d) * np.float64(weight[j])
    return error


@compiled(fastmath=REASSOCIATE)
def _e4m3_error(v, weight, step):
    error = 0.0
    for j in range(v.shape[0]):
        d = abs(v[j]) - _e4m3_value(v[j] / step) * step
        error += np.float64(d) * np.float64(d) * np.float64(weight[j])
    return error


@compiled(fastmath=REASSOCIATE)
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


@compiled()
def _write_e2m1(v, step, packed, start, codes, kept):
    """Codes of one group into `packed` from byte `start`, the even one low; `kept` gets the stored values."""
    for j in range(v.shape[0]):
        codes[j] = _e2m1_code(v[j] / step)
    for j in range(v.shape[0]):
        kept[j] = np.copysign(_e2m1_value(v[j] / step) * step, v[j])
    for j in range(v.shape[0] // 2):
        packed[start + j] = codes[2 * j] | np.uint8(codes[2 * j + 1] << np.uint8(4))


@compiled()
def round_bf16(values, out, sums):
    kept = np.empty(values.shape[1], np.float32)
    for i in range(values.shape[0]):
        for j in range(values.shape[1]):
            out[i, j] = _bf16_bits(values[i, j])
        for j in range(values.shape[1]):
            kept[j] = _from_bf16(out[i, j])
        _add_sums(values[i], kept, sums)


# One tile of a matrix, format by format. `weight` [columns] float32 is what an error counts in each column.


@compiled()
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


@compiled()
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


@compiled(fastmath=REASSOCIATE)
def _fitted(v, weight, step, low, high):
    """The scale that fits the integers of `step` best: sum(w q v) / sum(w q q), or `step` where that is no scale."""
    above, below = 0.0, 0.0
    for j in range(v.shape[0]):
        q = np.float64(min(max(np.rint(v[j] / step), low), high))
        above += np.float64(weight[j]) * q * np.float64(v[j])
        below += np.float64(weight[j]) * q * q
    return np.float32(above / below) if below > 0 and above > 0 else step


@compiled()
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


@compiled()
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


@compiled()
def _above(x, limits):
    count = np.uint8(0)
    for limit in limits:
        count += np.uint8(limit < x)
    return count


@compiled()
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
