"""Weights stored as they are: bfloat16, float16 or float32, one tensor `weight`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from k3tool.formats.base import Match, corrupt
from k3tool.formats.codes import f32_to_bf16, to_f32

_NAMES = {"BF16": "bf16", "F16": "f16", "F32": "f32"}


def match(parts: Mapping[str, Any], shape: tuple[int, ...] | None) -> Match | None:
    if set(parts) == {"weight"} and parts["weight"].dtype in _NAMES:
        return Match(_NAMES[parts["weight"].dtype])
    return None


def logical_shape(parts: Mapping[str, Any], **_: Any) -> tuple[int, ...]:
    return tuple(parts["weight"].shape)


def shape_problem(shape: tuple[int, ...], **_: Any) -> str:
    return ""


def stored_tensors(shape: tuple[int, ...], *, stored: str, **_: Any) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {"weight": (stored, tuple(shape))}


def dequantize(parts: Mapping[str, NDArray], shape: tuple[int, ...], *, stored: str) -> NDArray[np.float32]:
    weight = parts["weight"]
    if weight.shape != shape:
        raise corrupt(f"weight is {list(weight.shape)}, not {list(shape)}")
    return to_f32(weight)


def quantize(values: NDArray[np.float32], *, stored: str, **_: Any) -> dict[str, NDArray]:
    """Rounded to nearest, ties to even."""
    if stored == "BF16":
        return {"weight": f32_to_bf16(values)}
    return {"weight": values.astype(np.float16 if stored == "F16" else np.float32)}
