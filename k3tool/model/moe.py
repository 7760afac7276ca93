"""The feed-forward half of a layer: a dense gated MLP, or routed experts (in a latent space) beside shared ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from k3tool.config import K3Config
from k3tool.kernels.elementwise import add, convert
from k3tool.kernels.linear import Weight, linear
from k3tool.kernels.moe import Experts, experts_forward, gated_activation
from k3tool.kernels.norm import rms_norm
from k3tool.kernels.router import select_experts
from k3tool.model.divided import partial_linear, row_linear
from k3tool.model.streaming import StreamedExperts
from k3tool.parallel.groups import ALONE, SINGLE, Group, Parallel


class Observer(Protocol):
    """Sees intermediate values: `hidden` after each layer, `router_ids` and `router_weights` of each MoE layer."""

    def __call__(self, what: str, layer: int, value: Tensor) -> None: ...


@dataclass(frozen=True)
class GatedMlp:
    """`act(x Wg^T, x Wu^T) Wd^T`. gate_up_proj: rows of gate_proj, then of up_proj."""

    config: K3Config
    gate_up_proj: Weight  # [2 I, hidden]
    down_proj: Weight  # [hidden, I]
    tp: Group = ALONE

    def forward(self, x: Tensor, layer: int, observe: Observer | None) -> Tensor:
        """x [T, hidden] -> [T, hidden] in x.dtype."""
        return row_linear(activate(self.config, linear(x, self.gate_up_proj)), self.down_proj, self.tp)


@dataclass(frozen=True)
class SparseMoe:
    """K routed experts per token plus shared experts.

    in_proj: rows of routed_expert_down_proj, then shared gate_proj and up_proj; None where there is neither.
    routed_expert_norm: applied after the weighted sum. shared_down_proj: None without shared experts.

    On a rank of several, `experts` are those of the ids in `owned`, TP cuts them and the shared ones to some of their
    hidden units, and the sums are completed in the latent, before the norm; the matrices around it are whole.
    """

    config: K3Config
    gate: Weight  # [E, hidden]
    e_score_correction_bias: Tensor | None  # [E] float32
    experts: Experts | StreamedExperts
    in_proj: Weight | None
    routed_expert_norm: Tensor | None
    routed_expert_up_proj: Weight | None
    shared_down_proj: Weight | None
    owned: range
    parallel: Parallel = SINGLE

    def forward(self, x: Tensor, layer: int, observe: Observer | None) -> Tensor:
        """x [T, hidden] -> [T, hidden] in x.dtype. The router reads x in float32, at full width."""
        config = self.config
        ids, weights = select_experts(
            linear(convert(x, torch.float32), self.gate),
            self.e_score_correction_bias,
            config.experts_per_token,
            activation=config.router_activation,
            renormalize=config.renormalize,
            scaling_factor=config.routed_scaling_factor,
            num_groups=config.num_expert_groups,
            topk_groups=config.topk_groups,
        )
        if observe is not None:
            observe("router_ids", layer, ids)
            observe("router_weights", layer, weights)
        rows = x[:, :0] if self.in_proj is None else linear(x, self.in_proj)
        latent = config.latent_size or 0
        inputs = rows[:, :latent] if latent else x
        routed = self._routed(inputs, ids, weights)
        shared = None
        if self.shared_down_proj is not None:
            shared = partial_linear(activate(config, rows[:, latent:]), self.shared_down_proj, self.parallel.tp)
        routed, shared = self.parallel.add_experts(routed, shared)
        routed = convert(routed, x.dtype)
        if self.routed_expert_norm is not None:
            routed = rms_norm(routed, self.routed_expert_norm, config.rms_norm_eps)
        if self.routed_expert_up_proj is not None:
            routed = linear(routed, self.routed_expert_up_proj)
        return routed if shared is None else add(routed, convert(shared, x.dtype))

    def _routed(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """x [T, D], ids and weights [T, K] -> [T, D] float32: the weighted sum of those experts that are held here."""
        if len(self.owned) == self.config.num_experts:
            return self._visit(x, ids, weights)
        tokens, slots = torch.nonzero((ids >= self.owned.start) & (ids < self.owned.stop), as_tuple=True)
        own, weights = ids[tokens, slots] - self.owned.start, weights[tokens, slots]
        if x.shape[0] == 1 and len(own):
            return self._visit(x, own.unsqueeze(0), weights.unsqueeze(0))
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        if len(own):
            out.index_add_(0, tokens, self._visit(x[tokens], own.unsqueeze(1), weights.unsqueeze(1)))
        return out

    def _visit(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        options = (self.config.activation, self.config.situ_beta, self.config.situ_linear_beta)
        if isinstance(self.experts, StreamedExperts):
            return self.experts.forward(experts_forward, x, ids, weights, *options)
        return experts_forward(x, self.experts, ids, weights, *options)


def activate(config: K3Config, gate_up: Tensor) -> Tensor:
    """SiTU or SiLU gating of [T, 2 I] (gate, then up) -> [T, I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return gated_activation(gate, up, config.activation, config.situ_beta, config.situ_linear_beta)
