"""MXFP4: E2M1 codes, one E8M0 scale per 32 columns; names and packing of compressed-tensors `mxfp4-pack-quantized`.

`weight_packed` U8 [m, n / 2], the even column in the low nibble; `weight_scale` U8 [m, n / 32]. Released K3 experts.
Reserved codes (OCP MX v1.0): scale byte 0 is 2^-127, 255 is NaN.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from k3tool.formats.base import Match, corrupt, least_squares, require
from k3tool.formats.codes import E2M1, E2M1_PAIRS, E8M0, pack_nibbles, round_e2m1

GROUP = 32
SHIFTS = (0, 1, -1)
"""Scales that the search tries, relative to the plain one; the plain one first, so that it never loses."""


def match(parts: Mapping[str, Any], shape: tuple[int, ...] | None) -> Match | None:
    packed, scale = parts.get("weight_packed"), parts.get("weight_scale")
    if packed is None or packed.dtype != "U8" or (scale is not None and scale.dtype not in ("U8", "F8_E8M0")):
        return None
    missing = require(parts, "weight_scale")
    if missing or scale is None:
        return Match("mxfp4", "weight_packed", missing=missing)
    if tuple(scale.shape) != (*packed.shape[:-1], packed.shape[-1] * 2 // GROUP) or packed.shape[-1] * 2 % GROUP:
        return Match(
            "mxfp4", problem=f"weight_packed {list(packed.shape)} and weight_scale {list(scale.shape)} do not fit"
        )
    return Match("mxfp4")


def logical_shape(parts: Mapping[str, Any]) -> tuple[int, ...]:
    rows, half = parts["weight_packed"].shape
    return rows, 2 * half


def shape_problem(shape: tuple[int, ...], **_: Any) -> str:
    if len(shape) != 2:
        return "it is not a matrix"
    return f"{shape[1]} columns are not whole groups of {GROUP}" if shape[1] % GROUP else ""


def stored_tensors(shape: tuple[int, ...], **_: Any) -> dict[str, tuple[str, tuple[int, ...]]]:
    rows, columns = shape
    return {"weight_packed": ("U8", (rows, columns // 2)), "weight_scale": ("U8", (rows, columns // GROUP))}


def dequantize(parts: Mapping[str, NDArray], shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Exact in float32 except that a code times 2^126 or 2^127 may overflow to infinity."""
    rows, columns = shape
    packed, scale = parts["weight_packed"], parts["weight_scale"]
    if packed.shape != (rows, columns // 2) or scale.shape != (rows, columns // GROUP):
        raise corrupt(
            f"weight_packed {list(packed.shape)} and weight_scale {list(scale.shape)} do not fit {list(shape)}"
        )
    values = E2M1_PAIRS[packed].reshape(rows, columns // GROUP, GROUP)
    with np.errstate(over="ignore"):
        values *= E8M0[scale][:, :, None]
    return values.reshape(rows, columns)


def scale_bytes(amax: NDArray[np.float32]) -> NDArray[np.uint8]:
    """E8M0 byte for the largest magnitude of each group: amax / scale falls in [3.5, 7), zero gives 1.

    The rule of compressed-tensors (amax is rounded to a power of two after half a step of the FP4 mantissa is added),
    so that requantizing decoded values finds them again. Clamped to 1..254.
    """
    bits = np.ascontiguousarray(amax, np.float32).view(np.uint32).astype(np.int64)
    exponent = (bits + (1 << 21)) >> 23  # 1.75 and above count as the next power of two
    return np.clip(exponent - 2, 1, 254).astype(np.uint8)


def quantize(
    values: NDArray[np.float32], *, search: bool = False, weight: NDArray[np.float32] | None = None, **_: Any
) -> dict[str, NDArray]:
    """search: try the neighbouring scales too and keep the one with the least squared error, weighted by column."""
    rows, columns = values.shape
    groups = values.reshape(rows, columns // GROUP, GROUP)
    scale = scale_bytes(np.abs(groups).max(axis=2))
    if search:
        tried = [np.clip(scale.astype(np.int16) + shift, 1, 254).astype(np.uint8) for shift in SHIFTS]
        columns_weight = None if weight is None else weight.reshape(1, -1, GROUP)
        scale, _error = least_squares(
            groups, columns_weight, ((byte, E8M0[byte]) for byte in tried), lambda x: E2M1[round_e2m1(x)]
        )
    codes = round_e2m1(groups / E8M0[scale][:, :, None])
    return {"weight_packed": pack_nibbles(codes.reshape(rows, columns)), "weight_scale": scale}
