"""Block formats of ggml in numpy: the readable form that `k3tool.gguf.compiled` is held to, and the decoders.

MXFP4, 17 bytes for 32 values: the E8M0 scale byte, then byte j (0..15) with value j in the low and value j + 16 in the
high nibble. Q8_0, 34 bytes for 32 values: float16 d, then 32 signed bytes; value = d * byte. Sources: `ggml-common.h`
(block_mxfp4, block_q8_0) and `quantize_row_q8_0_ref` of ggml-org/llama.cpp.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from k3tool.formats.codes import E2M1, E8M0, unpack_nibbles

GROUP = 32
Q8_0_BYTES = 34
MXFP4_BYTES = 17


def repack(packed: NDArray[np.uint8], scale: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """compressed-tensors MXFP4 (byte i holds values 2i and 2i + 1) to ggml blocks; no code and no scale changes.

    packed [groups, 16], scale [groups]; gives [groups, 17].
    """
    codes = unpack_nibbles(packed)  # [groups, 32]
    paired = codes[:, :16] | (codes[:, 16:] << np.uint8(4))
    return np.concatenate([scale[:, None], paired], axis=1)


def unpack_mxfp4(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    """[groups, 17] to the values, [groups, 32]."""
    codes = np.concatenate([blocks[:, 1:] & 15, blocks[:, 1:] >> 4], axis=1)
    with np.errstate(over="ignore"):
        return E2M1[codes] * E8M0[blocks[:, :1]]


def quantize_q8_0(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """[groups, 32] finite values to [groups, 34]: d = amax / 127 in float32, codes by rounding half away from zero."""
    peak = np.abs(values).max(axis=1, keepdims=True)
    step = peak / np.float32(127)
    tiny = step < np.float32(2.0**-126)  # no finite inverse, and zero as float16 in any case
    inverse = np.where(tiny, np.float32(0), np.float32(1) / np.where(tiny, np.float32(1), step))
    scaled = np.clip(np.abs(values * inverse), 0, 127)
    floor = np.floor(scaled)
    magnitude = floor + np.floor(2 * (scaled - floor))
    codes = np.copysign(magnitude, values).astype(np.int8).view(np.uint8)
    with np.errstate(over="ignore"):
        return np.concatenate([step.astype("<f2").view(np.uint8), codes], axis=1)


def dequantize_q8_0(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    """[groups, 34] to the values, [groups, 32]."""
    step = np.ascontiguousarray(blocks[:, :2]).view("<f2").astype(np.float32)
    return np.ascontiguousarray(blocks[:, 2:]).view(np.int8).astype(np.float32) * step
