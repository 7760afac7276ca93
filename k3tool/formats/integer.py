"""Symmetric 4- and 8-bit integers with bfloat16 scales per group or row; compressed-tensors `pack-quantized`.

`weight_packed` I32 [m, ceil(n * bits / 32)]: value + 2^(bits - 1), least significant bits first along the columns;
`weight_scale` BF16 [m, n / group] ([m, 1] for one scale per row); `weight_shape` I64 [2] = [m, n].
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from k3tool.formats.base import Match, ceil_div, corrupt, least_squares, require
from k3tool.formats.codes import bf16_to_f32, f32_to_bf16, to_f32

DEFAULT_GROUP = 32
FACTORS = {
    8: tuple(np.float32(f) for f in (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 1.05, 1.0714285)),
    128: tuple(np.float32(f) for f in (1.0, 0.99, 0.98, 1.01)),
}
"""Multiples of the plain scale that the search tries, by 2^(bits - 1); the plain one first, so that it never loses."""
_EXTRA = ("weight_zero_point", "weight_g_idx")


def match(parts: Mapping[str, Any], shape: tuple[int, ...] | None) -> Match | None:
    packed, scale = parts.get("weight_packed"), parts.get("weight_scale")
    if packed is None or packed.dtype != "I32" or any(name in parts for name in _EXTRA):
        return None
    missing = require(parts, "weight_scale", "weight_shape")
    if missing or scale is None:
        return Match("int4", "weight_packed", missing=missing)
    groups = scale.shape[-1]
    for bits in (4, 8):
        columns = packed.shape[1] * 32 // bits if shape is None else shape[1]
        fits = packed.shape == (scale.shape[0], ceil_div(columns * bits, 32))
        if fits and columns % groups == 0 and (shape is not None or columns // groups in (32, 128, columns)):
            return Match(f"int{bits}")
    return Match("int4", problem=f"weight_packed {list(packed.shape)} and weight_scale {list(scale.shape)} do not fit")


def logical_shape(parts: Mapping[str, Any], *, bits: int) -> tuple[int, ...]:
    rows, words = parts["weight_packed"].shape
    return rows, words * 32 // bits


def _group(columns: int, group_size: int | None) -> int:
    return columns if group_size == 0 else group_size or DEFAULT_GROUP


def shape_problem(shape: tuple[int, ...], *, group_size: int | None, bits: int, **_: Any) -> str:
    if len(shape) != 2:
        return "it is not a matrix"
    group = _group(shape[1], group_size)
    if shape[1] % group:
        return f"{shape[1]} columns are not whole groups of {group}"
    return f"{shape[1]} columns do not fill whole 32-bit words" if shape[1] * bits % 32 else ""


def stored_tensors(
    shape: tuple[int, ...], *, group_size: int | None, dtype: str, bits: int
) -> dict[str, tuple[str, tuple[int, ...]]]:
    rows, columns = shape
    return {
        "weight_packed": ("I32", (rows, ceil_div(columns * bits, 32))),
        "weight_scale": ("BF16", (rows, columns // _group(columns, group_size))),
        "weight_shape": ("I64", (2,)),
    }


def unpack(packed: NDArray[np.int32], columns: int, bits: int) -> NDArray[np.int8]:
    """[m, words] to [m, columns] signed integers."""
    raw = np.ascontiguousarray(packed).view(np.uint8)
    if bits == 4:
        raw = np.stack([raw & 15, raw >> 4], axis=-1).reshape(packed.shape[0], -1)
    return (raw[:, :columns].astype(np.int16) - (1 << (bits - 1))).astype(np.int8)


def pack(values: NDArray[np.int8], bits: int) -> NDArray[np.int32]:
    """[m, n] signed integers to [m, words]; n times bits must fill whole words."""
    raw = (values.astype(np.int16) + (1 << (bits - 1))).astype(np.uint8)
    if bits == 4:
        raw = raw[:, 0::2] | (raw[:, 1::2] << 4)
    return np.ascontiguousarray(raw).view("<i4")


def dequantize(parts: Mapping[str, NDArray], shape: tuple[int, ...], *, bits: int) -> NDArray[np.float32]:
    rows, columns = shape
    packed, scale = parts["weight_packed"], to_f32(parts["weight_scale"])
    if packed.shape != (rows, ceil_div(columns * bits, 32)) or scale.shape[0] != rows or columns % scale.shape[1]:
        raise corrupt(
            f"weight_packed {list(packed.shape)} and weight_scale {list(scale.shape)} do not fit {list(shape)}"
        )
    values = unpack(packed, columns, bits).astype(np.float32).reshape(rows, scale.shape[1], -1)
    return (values * scale[:, :, None]).reshape(rows, columns)


def quantize(
    values: NDArray[np.float32],
    *,
    group_size: int | None,
    bits: int,
    search: bool = False,
    weight: NDArray[np.float32] | None = None,
    **_: Any,
) -> dict[str, NDArray]:
    """scale = amax / ((2^bits - 1) / 2) as bfloat16, integers rounded half to even and clamped.

    search: also try smaller and larger scales, then the least-squares scale of the best integers, and keep the one
    with the least squared error, weighted by column.
    """
    rows, columns = values.shape
    groups = values.reshape(rows, -1, _group(columns, group_size))
    amax = np.abs(groups).max(axis=2)
    half = np.float32((2**bits - 1) / 2)
    plain = np.where(amax > 0, amax / half, np.float32(1)).astype(np.float32)
    low = -(1 << (bits - 1))
    scale = f32_to_bf16(plain)
    if search:
        scale = _search(groups, plain, low, None if weight is None else weight.reshape(1, groups.shape[1], -1))
    codes = _codes(groups, bf16_to_f32(scale), low).astype(np.int8).reshape(rows, columns)
    return {
        "weight_packed": pack(codes, bits),
        "weight_scale": scale,
        "weight_shape": np.array([rows, columns], np.int64),
    }


def _codes(groups: NDArray[np.float32], step: NDArray[np.float32], low: int) -> NDArray[np.float32]:
    return np.clip(np.rint(groups / step[..., None]), low, -low - 1)


def _search(
    groups: NDArray[np.float32], plain: NDArray[np.float32], low: int, weight: NDArray[np.float32] | None
) -> NDArray[np.uint16]:
    tried = [f32_to_bf16(plain * factor) for factor in FACTORS[-low]]

    def decode(x: NDArray[np.float32]) -> NDArray[np.float32]:
        return np.clip(np.rint(x), low, -low - 1)

    best, least = least_squares(groups, weight, ((bits, bf16_to_f32(bits)) for bits in tried), decode)
    codes = _codes(groups, bf16_to_f32(best), low).astype(np.float64)
    heavy = codes if weight is None else codes * weight
    square = (heavy * codes).sum(axis=-1)
    fitted = (heavy * groups).sum(axis=-1) / np.where(square > 0, square, 1)
    fitted_bits = f32_to_bf16(np.where(fitted > 0, fitted, bf16_to_f32(best)).astype(np.float32))
    _, error = least_squares(groups, weight, [(fitted_bits, bf16_to_f32(fitted_bits))], decode)
    return np.where(error < least, fitted_bits, best)
