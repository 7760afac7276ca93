"""NVFP4: E2M1 codes, one E4M3 scale per 16 columns, one float32 scale per tensor; two spellings.

compressed-tensors (`nvfp4-pack-quantized`): `weight_packed` U8, `weight_scale` F8_E4M3 [m, n / 16],
`weight_global_scale` F32 [1], a *divisor*: value = code * (scale / global).
ModelOpt: `weight` U8, `weight_scale`, `weight_scale_2` F32 scalar, a *multiplier*: value = code * (scale * scale_2).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from k3tool.formats.base import Match, corrupt, least_squares, require
from k3tool.formats.codes import E2M1, E2M1_PAIRS, E4M3, E4M3_MAX, pack_nibbles, round_e2m1, round_e4m3

GROUP = 16
SHIFTS = (0, 4, 5, 3, 2, 1, -1, -2)
"""Scale codes that the search tries, relative to the plain one (4 more is about half as large again: 4 in place of 6)."""
_PARTS = {
    "compressed-tensors": ("weight_packed", "weight_scale", "weight_global_scale"),
    "modelopt": ("weight", "weight_scale", "weight_scale_2"),
}


def match(parts: Mapping[str, Any], shape: tuple[int, ...] | None) -> Match | None:
    scale = parts.get("weight_scale")
    for name, naming in (("nvfp4", "compressed-tensors"), ("nvfp4-modelopt", "modelopt")):
        codes, _, overall = _PARTS[naming]
        packed = parts.get(codes)
        if packed is None or packed.dtype != "U8" or "weight.absmax" in parts:
            continue
        if (scale is None or scale.dtype != "F8_E4M3") and overall not in parts:
            continue
        missing = require(parts, "weight_scale", overall)
        if missing or scale is None:
            return Match(name, codes, missing=missing)
        if tuple(scale.shape) != (*packed.shape[:-1], packed.shape[-1] * 2 // GROUP) or packed.shape[-1] * 2 % GROUP:
            return Match(name, problem=f"{codes} {list(packed.shape)} and weight_scale {list(scale.shape)} do not fit")
        if tuple(parts[overall].shape) not in ((), (1,)) or parts[overall].dtype != "F32":
            found = f"{parts[overall].dtype} {list(parts[overall].shape)}"
            return Match(name, problem=f"{overall} must be one F32 value, found {found}")
        return Match(name)
    return None


def logical_shape(parts: Mapping[str, Any], *, naming: str) -> tuple[int, ...]:
    rows, half = parts[_PARTS[naming][0]].shape
    return rows, 2 * half


def shape_problem(shape: tuple[int, ...], **_: Any) -> str:
    if len(shape) != 2:
        return "it is not a matrix"
    return f"{shape[1]} columns are not whole groups of {GROUP}" if shape[1] % GROUP else ""


def stored_tensors(shape: tuple[int, ...], *, naming: str, **_: Any) -> dict[str, tuple[str, tuple[int, ...]]]:
    rows, columns = shape
    codes, scale, overall = _PARTS[naming]
    return {
        codes: ("U8", (rows, columns // 2)),
        scale: ("F8_E4M3", (rows, columns // GROUP)),
        overall: ("F32", (1,) if naming == "compressed-tensors" else ()),
    }


def dequantize(parts: Mapping[str, NDArray], shape: tuple[int, ...], *, naming: str) -> NDArray[np.float32]:
    """float32: the block scale is formed first (scale / global, or scale * scale_2), then multiplies the code."""
    rows, columns = shape
    names = _PARTS[naming]
    packed, scale, overall = (parts[name] for name in names)
    if packed.shape != (rows, columns // 2) or scale.shape != (rows, columns // GROUP):
        raise corrupt(f"{names[0]} {list(packed.shape)} and weight_scale {list(scale.shape)} do not fit {list(shape)}")
    factor = np.float32(overall.reshape(-1)[0])
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        step = _step(scale, factor) if naming == "compressed-tensors" else E4M3[scale] * factor
        values = E2M1_PAIRS[packed].reshape(rows, columns // GROUP, GROUP) * step[:, :, None]
    return values.reshape(rows, columns)


def _step(scale: NDArray[np.uint8], factor: np.float32) -> NDArray[np.float32]:
    """What one code unit of each block is worth, formed in float32."""
    return np.divide(E4M3[scale], factor, dtype=np.float32)


def global_scale(amax: float) -> np.float32:
    """The largest power of two that keeps the largest magnitude of a tensor within the largest code times scale.

    As a divisor (compressed-tensors) or its inverse (ModelOpt) it then stands for the same values, and E4M3 scales
    round as well under any power of two. Kept inside 2^-126 to 2^126.
    """
    if amax <= 0:
        return np.float32(1)
    exponent = math.floor(math.log2(E4M3_MAX * 6 / amax))
    return np.float32(math.ldexp(1.0, min(max(exponent, -126), 126)))


def quantize(
    values: NDArray[np.float32],
    *,
    naming: str,
    overall: np.float32 | None = None,
    search: bool = False,
    weight: NDArray[np.float32] | None = None,
    **_: Any,
) -> dict[str, NDArray]:
    """overall: a global scale shared with a partner (gate and up of one expert), as the divisor.

    search: try the neighbouring block scales too and keep the one with the least squared error, weighted by column.
    """
    rows, columns = values.shape
    factor = global_scale(float(np.abs(values).max(initial=0))) if overall is None else np.float32(overall)
    groups = values.reshape(rows, columns // GROUP, GROUP)
    scale = np.maximum(round_e4m3(np.abs(groups).max(axis=2) / np.float32(6) * factor), 1)
    if search:
        tried = [np.clip(scale.astype(np.int16) + shift, 1, 126).astype(np.uint8) for shift in SHIFTS]
        columns_weight = None if weight is None else weight.reshape(1, -1, GROUP)
        scale, _error = least_squares(
            groups, columns_weight, ((code, _step(code, factor)) for code in tried), lambda x: E2M1[round_e2m1(x)]
        )
    step = _step(scale, factor)
    codes = round_e2m1(groups / step[:, :, None])
    stored = factor if naming == "compressed-tensors" else np.float32(1) / factor
    return parts(naming, pack_nibbles(codes.reshape(rows, columns)), scale, stored)


def parts(naming: str, packed: NDArray[np.uint8], scale: NDArray[np.uint8], overall: np.float32) -> dict[str, NDArray]:
    """The stored tensors in the order of writing; `overall` as this naming stores it (divisor or multiplier)."""
    names = _PARTS[naming]
    shape = (1,) if naming == "compressed-tensors" else ()
    return {names[0]: packed, names[1]: scale, names[2]: np.full(shape, overall, np.float32)}
