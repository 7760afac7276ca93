"""Number codes that the formats share, as tables and bit tricks in numpy: E2M1, E8M0, E4M3, bfloat16.

Bits travel in plain integer arrays: E2M1 pairs, E8M0 and E4M3 as uint8, bfloat16 as uint16. Sources: OCP Microscaling
Formats (MX) v1.0, sections 5.3 and 5.4; OCP 8-bit Floating Point (OFP8) v1.0, table 1.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

NUMPY_DTYPES: dict[str, np.dtype] = {
    "BF16": np.dtype("<u2"),
    "F8_E4M3": np.dtype("u1"),
    "F8_E8M0": np.dtype("u1"),
    "F16": np.dtype("<f2"),
    "F32": np.dtype("<f4"),
    "F64": np.dtype("<f8"),
    "U8": np.dtype("u1"),
    "I8": np.dtype("i1"),
    "I32": np.dtype("<i4"),
    "I64": np.dtype("<i8"),
}
"""safetensors dtype to the numpy dtype that carries its bits here."""

E2M1_MAGNITUDES = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
E2M1 = np.concatenate([E2M1_MAGNITUDES, -E2M1_MAGNITUDES])
"""Value of each 4-bit code: sign in bit 3, magnitude index below. Code 8 is -0."""

E2M1_BOUNDS = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], np.float32)
"""Midpoints between neighbouring magnitudes. A tie goes to the even code."""

E4M3_MAX = 448.0
E8M0_NAN = 255


def _e4m3_table() -> NDArray[np.float32]:
    codes = np.arange(256)
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    value = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    value[(codes & 127) == 127] = np.nan
    return np.where(codes & 128, -value, value).astype(np.float32)


E4M3 = _e4m3_table()
"""Value of each E4M3 byte; 0x7F and 0xFF are NaN, there is no infinity, the largest is 448."""

with np.errstate(over="ignore"):
    E8M0 = np.ldexp(np.float32(1), np.arange(256) - 127).astype(np.float32)
E8M0[E8M0_NAN] = np.nan
"""Value of each E8M0 byte: 2^(byte - 127), subnormal 2^-127 for 0, NaN for 255."""

E2M1_PAIRS = np.stack([E2M1[np.arange(256) & 15], E2M1[np.arange(256) >> 4]], axis=1)
"""Two values per packed byte, the low nibble first: [256, 2] float32."""


def view(data: bytes | bytearray | memoryview, dtype: str, shape: tuple[int, ...]) -> NDArray:
    """The bytes of a tensor as an array, without a copy. `dtype` as safetensors spells it."""
    return np.frombuffer(data, NUMPY_DTYPES[dtype]).reshape(shape)


def bf16_to_f32(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def f32_to_bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Nearest bfloat16, ties to even; overflow gives infinity, NaN stays a (quiet) NaN."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), ((bits >> 16) | 0x40).astype(np.uint16), rounded)


def to_f32(values: NDArray) -> NDArray[np.float32]:
    """Values of a plain tensor: uint16 holds bfloat16 bits, float16 and float32 are themselves."""
    return bf16_to_f32(values) if values.dtype == np.uint16 else np.ascontiguousarray(values, np.float32)


def round_e2m1(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Nearest E2M1 code, ties to the even code, saturating at 6; the sign bit is kept, on zero too."""
    magnitude = np.abs(values)
    above = np.searchsorted(E2M1_BOUNDS, magnitude, side="right").astype(np.uint8)  # a tie counts as above
    below = np.searchsorted(E2M1_BOUNDS, magnitude, side="left").astype(np.uint8)
    index = np.where(above & 1, below, above)
    return index | (np.signbit(values).astype(np.uint8) << np.uint8(3))


def pack_nibbles(codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """[..., n] codes to [..., n / 2] bytes, the even column in the low nibble."""
    return codes[..., 0::2] | (codes[..., 1::2] << np.uint8(4))


def unpack_nibbles(packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """[..., n / 2] bytes to [..., n] codes, the even column from the low nibble."""
    return np.stack([packed & np.uint8(15), packed >> np.uint8(4)], axis=-1).reshape(*packed.shape[:-1], -1)


def round_e4m3(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Nearest E4M3 byte, ties to even, saturating at 448. NaN gives 0x7F. Exact for every finite float32."""
    magnitude = np.minimum(np.abs(values, dtype=np.float32), np.float32(E4M3_MAX))
    # Adding 2^(e + 20) leaves 3 mantissa bits of a normal number, adding 2^14 leaves multiples of 2^-9.
    exponent = np.maximum((magnitude.view(np.uint32) >> 23).astype(np.int32), 121)
    anchor = ((exponent + 20) << 23).astype(np.uint32).view(np.float32)
    nan = np.isnan(magnitude)
    rounded = np.where(nan, np.float32(0), (np.where(nan, np.float32(0), magnitude) + anchor) - anchor)
    normal = (rounded.view(np.uint32) >> 20).astype(np.int32) - (120 << 3)
    subnormal = (rounded * np.float32(512)).astype(np.int32)
    code = np.where(rounded < np.float32(2.0**-6), subnormal, normal)
    code = np.where(nan, 127, code).astype(np.uint8)
    return code | (np.signbit(values).astype(np.uint8) << np.uint8(7))
