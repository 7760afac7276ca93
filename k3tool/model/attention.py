"""The two attention layers: KDA with its recurrent state, and gated MLA on the latent cache.

Projections that read the same input are one stacked matrix, so that a token costs few products. A TP rank has some of
the heads: every projection by head is cut, o_proj along its inputs, and what it gives is summed over the group. Formulas:
Kimi K3's modeling_kimi_linear.py, classes KimiDeltaAttention and KimiMLAAttention.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from k3tool.kernels.conv import causal_conv
from k3tool.kernels.elementwise import multiply_by_sigmoid
from k3tool.kernels.kda import kda, kda_decode
from k3tool.kernels.linear import Weight, linear
from k3tool.kernels.mla import mla, mla_within
from k3tool.kernels.norm import gated_rms_norm, rms_norm
from k3tool.model.cache import KdaState, LatentCache
from k3tool.model.divided import row_linear
from k3tool.parallel.groups import ALONE, Group

LATENT_NORM_EPS = 1e-6  # q_a_layernorm and kv_a_layernorm use this, whatever rms_norm_eps says


@dataclass(frozen=True)
class KdaAttention:
    """Kimi Delta Attention, H heads of width D.

    in_proj: rows of q_proj, k_proj, v_proj (H D each), then g_proj (H D) or g_a_proj (D), f_a_proj (D), b_proj (H).
    conv1d: [W, 3 H D] float32, the taps of q, k and v side by side. g_b_proj: only with the low-rank output gate.
    """

    heads: int
    head_dim: int
    lower_bound: float | None
    eps: float
    in_proj: Weight
    conv1d: Tensor
    f_b_proj: Weight
    A_log: Tensor  # [H] float32
    dt_bias: Tensor  # [H, D] float32
    g_b_proj: Weight | None
    o_norm: Tensor  # [D] float32
    o_proj: Weight
    tp: Group = ALONE

    def forward(self, x: Tensor, cache: KdaState) -> Tensor:
        """x [T, hidden], normalized -> [T, hidden]. Advances state and history of `cache` in place."""
        width, dim, heads = self.heads * self.head_dim, self.head_dim, self.heads
        gate_width = width if self.g_b_proj is None else dim
        qkv, gate, f, b = linear(x, self.in_proj).split([3 * width, gate_width, dim, heads], dim=-1)
        f = linear(f, self.f_b_proj).unflatten(-1, (heads, dim))  # [T, H, D]
        gate = (gate if self.g_b_proj is None else linear(gate, self.g_b_proj)).unflatten(-1, (heads, dim))
        if x.shape[0] == 1:
            out = kda_decode(
                qkv, self.conv1d, cache.history, f, b, self.A_log, self.dt_bias, cache.state, gate, self.o_norm,
                lower_bound=self.lower_bound, eps=self.eps,
            )  # fmt: skip
            return row_linear(out.flatten(1), self.o_proj, self.tp)
        q, k, v = causal_conv(qkv.unsqueeze(0), self.conv1d, cache.history).unflatten(-1, (3, heads, dim)).unbind(2)
        f, b = f.unsqueeze(0), b.unsqueeze(0)
        out = kda(q, k, v, f, b, self.A_log, self.dt_bias, cache.state, lower_bound=self.lower_bound).squeeze(0)
        out = gated_rms_norm(out, gate, self.o_norm, self.eps)
        return row_linear(out.flatten(1), self.o_proj, self.tp)


@dataclass(frozen=True)
class MlaAttention:
    """Gated multi-head latent attention without positions.

    in_proj: rows of q_a_proj (or q_proj without a query rank), kv_a_proj_with_mqa, and g_proj where there is an output
    gate. kv_b_proj: [H, N + V, C] as stored.
    """

    heads: int
    key_dim: int  # N, the dimensions that meet the latent
    query_width: int  # rows of q_a_proj, or of q_proj
    has_gate: bool
    in_proj: Weight
    q_a_layernorm: Tensor | None
    q_b_proj: Weight | None
    kv_a_layernorm: Tensor  # [C] float32
    kv_b_proj: Tensor
    o_proj: Weight
    tp: Group = ALONE

    def forward(self, x: Tensor, cache: LatentCache, position: int) -> Tensor:
        """x [T, hidden], normalized -> [T, hidden]. Appends T latents to `cache` behind `position`."""
        latent = self.kv_a_layernorm.shape[0]
        rows = linear(x, self.in_proj)
        q = rows[:, : self.query_width]
        if self.q_b_proj is not None and self.q_a_layernorm is not None:
            q = linear(rms_norm(q, self.q_a_layernorm, LATENT_NORM_EPS), self.q_b_proj)
        gate_width = self.heads * (self.kv_b_proj.shape[1] - self.key_dim) if self.has_gate else 0
        compressed = rows[:, self.query_width : rows.shape[1] - gate_width]
        normalized = rms_norm(compressed[:, :latent], self.kv_a_layernorm, LATENT_NORM_EPS)
        cached = cache.append(normalized.unsqueeze(0), compressed[:, latent:].unsqueeze(0), position)
        q = q.unflatten(-1, (self.heads, -1)).unsqueeze(0)
        if cache.visible is None:
            out = mla(q, cached, self.kv_b_proj, key_dim=self.key_dim)
        else:
            out = mla_within(q, cached, self.kv_b_proj, cache.visible, key_dim=self.key_dim)
        out = out.squeeze(0).flatten(1)
        if self.has_gate:
            out = multiply_by_sigmoid(out, rows[:, rows.shape[1] - gate_width :])
        return row_linear(out, self.o_proj, self.tp)
