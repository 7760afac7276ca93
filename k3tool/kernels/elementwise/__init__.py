"""What lies between the large operations: sums, gates, changes of dtype, storing into a place."""

from __future__ import annotations

import torch
from torch import Tensor

from k3tool.kernels.dispatch import twin

__all__ = ["add", "convert", "multiply_by_sigmoid", "put"]


def add(x: Tensor, y: Tensor, out: Tensor | None = None) -> Tensor:
    """x + y of one shape and dtype, rounded once; into `out`, which may be x or y, where given. Raises ValueError."""
    _same(x, y)
    if out is not None:
        _same(x, out)
    return twin("elementwise", "add", x)(x, y, out)


def multiply_by_sigmoid(x: Tensor, gate: Tensor) -> Tensor:
    """x * sigmoid(gate) of one shape and dtype; the sigmoid is rounded to that dtype first. Raises ValueError."""
    _same(x, gate)
    return twin("elementwise", "multiply_by_sigmoid", x)(x, gate)


def convert(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in float32 or bfloat16, itself where it has that dtype. Raises ValueError."""
    if x.dtype == dtype:
        return x
    if {x.dtype, dtype} - {torch.float32, torch.bfloat16}:
        raise ValueError(f"no way from {x.dtype} to {dtype}")
    return twin("elementwise", "convert", x)(x, dtype)


def put(x: Tensor, place: Tensor, *, growth: int = 0) -> None:
    """Copy x into `place`, of the same shape and dtype. Raises ValueError.

    growth: by how many bytes the place moves with every position in the sequence (see `kernels.cpu.tape`).
    """
    _same(x, place)
    twin("elementwise", "put", x)(x, place, growth=growth)


def _same(x: Tensor, y: Tensor) -> None:
    if x.shape != y.shape or x.dtype != y.dtype:
        raise ValueError(f"{tuple(x.shape)} {x.dtype} and {tuple(y.shape)} {y.dtype} do not go together")
