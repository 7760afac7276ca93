"""Weights and stored modules that the format tests share."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from k3tool import formats
from k3tool.formats.codes import f32_to_bf16

WRITTEN = ("bf16", "mxfp4", "nvfp4", "nvfp4-modelopt", "fp8-block", "fp8-channel", "int8", "int4", "nf4", "fp4")


class Spec(NamedTuple):
    dtype: str
    shape: tuple[int, ...]


def specs(stored: dict[str, tuple[str, tuple[int, ...]]]) -> dict[str, Spec]:
    return {part: Spec(dtype, tuple(shape)) for part, (dtype, shape) in stored.items()}


def bits(array: NDArray) -> NDArray[np.uint8]:
    """Bytes, for comparisons that tell -0 from 0 and one NaN from another."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def same_parts(one: dict[str, NDArray], other: dict[str, NDArray]) -> bool:
    return list(one) == list(other) and all(
        one[part].shape == other[part].shape and np.array_equal(bits(one[part]), bits(other[part])) for part in one
    )


def gaussian(rows: int, columns: int, seed: int = 0, scale: float = 0.02) -> NDArray[np.float32]:
    """Normal weights with an all-zero group, a -0, an outlier and a tiny row among them."""
    values = (np.random.default_rng(seed).standard_normal((rows, columns)) * scale).astype(np.float32)
    values[0, :128] = 0
    values[1, 3] = -0.0
    values[2, 5] = 17 * scale
    values[3] *= np.float32(1e-4)
    return values


def bf16_parts(values: NDArray[np.float32]) -> dict[str, NDArray]:
    return {"weight": f32_to_bf16(values)}


def mxfp4_random(rows: int, columns: int, low: int, high: int, seed: int = 0) -> dict[str, NDArray]:
    """Random codes (-0 included) under random scale bytes of low..high; the first groups are all zero and all -0."""
    rng = np.random.default_rng(seed)
    packed = rng.integers(0, 256, (rows, columns // 2), dtype=np.uint8)
    packed[0, :16], packed[0, 16:32] = 0, 0x88
    return {
        "weight_packed": packed,
        "weight_scale": rng.integers(low, high + 1, (rows, columns // 32)).astype(np.uint8),
    }


def mxfp4_of(values: NDArray[np.float32]) -> dict[str, NDArray]:
    return formats.quantize("mxfp4", values)
