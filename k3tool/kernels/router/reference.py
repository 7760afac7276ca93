"""Routing in plain torch. Formula: `KimiMoEGate` of Kimi K3's modeling_kimi_linear.py (noaux_tc)."""

from __future__ import annotations

import torch
from torch import Tensor


def select_experts(
    logits: Tensor,
    bias: Tensor | None,
    top_k: int,
    activation: str,
    renormalize: bool,
    scaling_factor: float,
    num_groups: int,
    topk_groups: int,
) -> tuple[Tensor, Tensor]:
    """logits [T, E] float32 -> ids [T, top_k] int64, weights [T, top_k] float32. See the public twin."""
    scores = torch.sigmoid(logits) if activation == "sigmoid" else torch.softmax(logits, -1)
    choice = scores if bias is None else scores + bias
    if topk_groups < num_groups:
        choice = _within_best_groups(choice, num_groups, topk_groups)
    ids = torch.topk(choice, top_k, dim=-1, sorted=False).indices
    weights = scores.gather(1, ids)
    if renormalize and top_k > 1:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return ids, weights if scaling_factor == 1.0 else weights * scaling_factor


def _within_best_groups(choice: Tensor, num_groups: int, topk_groups: int) -> Tensor:
    """Biased scores [T, E] with -inf outside each token's best groups."""
    grouped = choice.unflatten(-1, (num_groups, -1))
    best = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(-1)  # [T, groups]
    kept = torch.zeros_like(best, dtype=torch.bool).scatter_(1, best.topk(topk_groups, dim=-1).indices, True)
    return grouped.masked_fill(~kept.unsqueeze(-1), float("-inf")).flatten(-2)
