"""Routed experts: every token visits K of E gated MLPs, whose weights stay as the checkpoint stores them."""

from __future__ import annotations

import torch
from torch import Tensor

from k3tool.kernels.dispatch import twin
from k3tool.kernels.linear.stored import BOOKS
from k3tool.kernels.moe import reference
from k3tool.kernels.moe.experts import ACTIVATIONS, DenseExperts, Experts, PackedExperts
from k3tool.kernels.moe.scaled import ScaledExperts

__all__ = ["DenseExperts", "Experts", "PackedExperts", "ScaledExperts", "experts_forward", "gated_activation"]


def experts_forward(
    x: Tensor,
    experts: Experts,
    ids: Tensor,
    weights: Tensor,
    activation: str = "situ",
    beta: float = 4.0,
    linear_beta: float = 25.0,
) -> Tensor:
    """Weighted sum of the experts that each token was routed to.

    x: [T, D] float32 or bfloat16. ids: [T, K] int64 in 0..E-1. weights: [T, K] float32. Returns [T, D] float32.
    Per expert `y = act(x @ w1.T, x @ w3.T) @ w2.T`; products accumulate in float32, and their results and that of
    the activation are rounded to x.dtype as the model's reference code does. The sum over a token's experts is taken in
    float32 in ascending order of expert id, equal ids in order of position. `beta` and `linear_beta` are the caps of
    SiTU; "silu" has none. Raises ValueError.
    """
    if x.dim() != 2 or x.dtype not in (torch.float32, torch.bfloat16) or x.shape[1] != experts.hidden_size:
        raise ValueError(f"x {tuple(x.shape)} {x.dtype} does not fit experts of width {experts.hidden_size}")
    if ids.dim() != 2 or ids.shape != weights.shape or ids.shape[0] != x.shape[0]:
        raise ValueError(f"ids {tuple(ids.shape)}, weights {tuple(weights.shape)} and x {tuple(x.shape)} do not fit")
    if ids.dtype != torch.int64 or weights.dtype != torch.float32:
        raise ValueError(f"ids must be int64 and weights float32, found {ids.dtype} and {weights.dtype}")
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {ACTIVATIONS}, found {activation!r}")
    run = twin("moe", "experts_forward", x)
    if isinstance(experts, ScaledExperts) and not _takes(run.__module__, experts):
        run = reference.experts_forward
    return run(x, experts, ids, weights, activation, beta, linear_beta)


def _takes(module: str, experts: ScaledExperts) -> bool:
    """Compiled code wants a scale for every row; Triton knows no tables of codes."""
    if module.endswith(".cpu"):
        return experts.scale_rows == 1
    return not module.endswith(".kernel") or experts.kind not in BOOKS


def gated_activation(gate: Tensor, up: Tensor, activation: str, beta: float, linear_beta: float) -> Tensor:
    """SiTU or SiLU gating, computed in float32, rounded once: gate and up [..., I] -> [..., I] in their dtype."""
    if activation not in ACTIVATIONS or gate.shape != up.shape or gate.dtype != up.dtype:
        raise ValueError(f"no {activation!r} of {tuple(gate.shape)} {gate.dtype} and {tuple(up.shape)} {up.dtype}")
    return twin("moe", "gated_activation", gate)(gate, up, activation, beta, linear_beta)
