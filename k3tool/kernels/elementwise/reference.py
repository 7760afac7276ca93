"""Elementwise operations in plain torch, on any device."""

from __future__ import annotations

import torch
from torch import Tensor


def add(x: Tensor, y: Tensor, out: Tensor | None = None) -> Tensor:
    """See the public twin."""
    return torch.add(x, y, out=out)


def multiply_by_sigmoid(x: Tensor, gate: Tensor) -> Tensor:
    """See the public twin."""
    return x * torch.sigmoid(gate)


def convert(x: Tensor, dtype: torch.dtype) -> Tensor:
    """See the public twin."""
    return x.to(dtype)


def put(x: Tensor, place: Tensor, *, growth: int = 0) -> None:
    """See the public twin."""
    place.copy_(x)
