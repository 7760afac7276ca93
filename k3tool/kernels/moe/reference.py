"""Routed experts in plain torch, on any device: the specification of the other twins.

Formulas: Kimi K3's `modeling_kimi_linear.py`, classes KimiSparseMoeBlock and KimiMLP; SiTU as
`[beta * tanh(g / beta) * sigmoid(g)] * [linear_beta * tanh(u / linear_beta)]`, the sigmoid on the uncapped gate.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from k3tool.kernels.linear.reference import linear
from k3tool.kernels.moe.experts import Experts, check_ids


def gated_activation(gate: Tensor, up: Tensor, activation: str, beta: float, linear_beta: float) -> Tensor:
    """SiTU or SiLU gating of gate and up, computed in float32, returned in their dtype."""
    g, u = gate.float(), up.float()
    if activation == "silu":
        return (functional.silu(g) * u).to(gate.dtype)
    capped_gate = beta * torch.tanh(g / beta) * torch.sigmoid(g)
    return (capped_gate * (linear_beta * torch.tanh(u / linear_beta))).to(gate.dtype)


def experts_forward(
    x: Tensor,
    experts: Experts,
    ids: Tensor,
    weights: Tensor,
    activation: str,
    beta: float,
    linear_beta: float,
) -> Tensor:
    """x [T, D], ids [T, K], weights [T, K] -> [T, D] float32. See the public twin."""
    check_ids(ids, experts.num_experts)
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in ids.unique().tolist():
        tokens, slots = torch.nonzero(ids == expert, as_tuple=True)
        rows = x[tokens]
        gate = linear(rows, experts.matrix("w1", expert))
        up = linear(rows, experts.matrix("w3", expert))
        hidden = gated_activation(gate, up, activation, beta, linear_beta)
        y = linear(hidden, experts.matrix("w2", expert))
        out.index_add_(0, tokens, y.float() * weights[tokens, slots].unsqueeze(-1))
    return out
