"""FP8 E4M3 weights with float scales, per 128 x 128 block or per row; compressed-tensors `float-quantized`.

`weight` F8_E4M3 [m, n]; `weight_scale` F32 [ceil(m / 128), ceil(n / 128)] (block) or [m, 1] (channel). Other writers
call it `weight_scale_inv` (DeepSeek) and store it in bfloat16: both are read. value = code * scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from k3tool.formats.base import Match, ceil_div, corrupt, least_squares
from k3tool.formats.codes import E4M3, E4M3_MAX, round_e4m3, to_f32

BLOCK = 128
FACTORS = tuple(np.float32(2 ** (step / 8)) for step in range(8))
"""Multiples of the plain scale that the search tries: one binade, after which the grid repeats."""
_SCALES = ("weight_scale", "weight_scale_inv")


def match(parts: Mapping[str, Any], shape: tuple[int, ...] | None) -> Match | None:
    weight = parts.get("weight")
    if weight is None or weight.dtype != "F8_E4M3" or len(weight.shape) != 2:
        return None
    name = next((name for name in _SCALES if name in parts), None)
    if name is None:
        return Match("fp8-channel", "weight", missing="weight_scale")
    rows, columns = weight.shape
    found = tuple(parts[name].shape)
    if parts[name].dtype not in ("F32", "BF16", "F16"):
        return None
    if name == "weight_scale" and found in ((rows, 1), (rows,)):
        return Match("fp8-channel")
    if found == (ceil_div(rows, BLOCK), ceil_div(columns, BLOCK)):
        return Match("fp8-block")
    return Match(
        "fp8-block", problem=f"{name} {list(found)} fits neither rows nor 128 x 128 blocks of {[rows, columns]}"
    )


def logical_shape(parts: Mapping[str, Any], **_: Any) -> tuple[int, ...]:
    return tuple(parts["weight"].shape)


def shape_problem(shape: tuple[int, ...], *, strategy: str, **_: Any) -> str:
    if len(shape) != 2:
        return "it is not a matrix"
    if strategy == "channel":
        return ""
    for size, name in zip(shape, ("rows", "columns"), strict=True):
        if size % BLOCK:
            return f"{size} {name} are not whole blocks of {BLOCK}"
    return ""


def stored_tensors(shape: tuple[int, ...], *, strategy: str, **_: Any) -> dict[str, tuple[str, tuple[int, ...]]]:
    rows, columns = shape
    scale = (rows, 1) if strategy == "channel" else (ceil_div(rows, BLOCK), ceil_div(columns, BLOCK))
    return {"weight": ("F8_E4M3", (rows, columns)), "weight_scale": ("F32", scale)}


def dequantize(parts: Mapping[str, NDArray], shape: tuple[int, ...], *, strategy: str) -> NDArray[np.float32]:
    rows, columns = shape
    weight = parts["weight"]
    scale = to_f32(parts["weight_scale"] if "weight_scale" in parts else parts["weight_scale_inv"])
    expected = (rows, 1) if strategy == "channel" else (ceil_div(rows, BLOCK), ceil_div(columns, BLOCK))
    if weight.shape != shape or scale.size != expected[0] * expected[1]:
        raise corrupt(f"weight {list(weight.shape)} and weight_scale {list(scale.shape)} do not fit {list(shape)}")
    scale = scale.reshape(expected)
    if strategy == "block":
        scale = scale.repeat(BLOCK, 0)[:rows].repeat(BLOCK, 1)[:, :columns]
    return E4M3[weight] * scale


def quantize(
    values: NDArray[np.float32],
    *,
    strategy: str,
    search: bool = False,
    weight: NDArray[np.float32] | None = None,
    **_: Any,
) -> dict[str, NDArray]:
    """The largest magnitude of a row or block maps to 448. An all-zero one gets scale 1.

    search: move the grid by fractions of a binade and keep the least squared error, weighted by column.
    """
    rows, columns = values.shape
    down, across = (1, columns) if strategy == "channel" else (BLOCK, BLOCK)
    blocks = values.reshape(rows // down, down, columns // across, across).transpose(0, 2, 1, 3)
    blocks = blocks.reshape(rows // down, columns // across, down * across)
    amax = np.abs(blocks).max(axis=2)
    scale = np.where(amax > 0, amax / np.float32(E4M3_MAX), np.float32(1)).astype(np.float32)
    if search:
        spread_weight = None if weight is None else np.tile(weight.reshape(1, -1, across), (1, 1, down))
        tried = [scale * factor for factor in FACTORS]
        scale, _error = least_squares(
            blocks, spread_weight, ((step, step) for step in tried), lambda x: E4M3[round_e4m3(x)]
        )
    spread = scale if strategy == "channel" else scale.repeat(BLOCK, 0).repeat(BLOCK, 1)
    return {"weight": round_e4m3(values / spread), "weight_scale": scale}
