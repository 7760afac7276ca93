"""Norms in plain torch, on any device."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., D], weight [D] float32 -> x.dtype. See the public twin."""
    h = x.float()
    h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)
    return h.mul_(weight) if x.dtype == torch.float32 else (h.to(x.dtype) * weight).to(x.dtype)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x, gate [..., D], weight [D] float32 -> x.dtype. See the public twin."""
    h = x.float()
    h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)
    return (h * weight * torch.sigmoid(gate.float())).to(x.dtype)


def l2_normalize(x: Tensor, eps: float) -> Tensor:
    """x [..., D] -> float32. See the public twin."""
    h = x.float()
    return h * torch.rsqrt(h.square().sum(-1, keepdim=True) + eps)
