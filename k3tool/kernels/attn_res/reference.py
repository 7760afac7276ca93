"""Attention Residuals in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def mix_weights(values: Tensor, query: Tensor, eps: float) -> Tensor:
    """values [N, T, D] float32, query [D] -> softmax weights [N, T]; the norm applies to the keys only."""
    scores = (values @ query) * torch.rsqrt(values.square().mean(-1) + eps)
    return torch.softmax(scores, dim=0)


def mix_blocks(values: Tensor, query: Tensor, eps: float) -> Tensor:
    """values [N, T, D], query [D] -> [T, D] in values.dtype. See the public twin."""
    raw = values.float()
    weights = mix_weights(raw, query, eps)
    # [T, 1, N] @ [T, N, D]: one small product per token, nothing of size [N, T, D] is made.
    return (weights.t().unsqueeze(1) @ raw.transpose(0, 1)).squeeze(1).to(values.dtype)
