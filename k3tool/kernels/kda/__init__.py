"""Kimi Delta Attention: gated delta-rule linear attention with one decay per key channel.

Per head, with a float32 state S [K, V]: `S = diag(exp(g_t)) S`, `u = v_t - S^T k_t`, `S += beta_t k_t u^T`,
`o_t = S^T q_t`. This package holds gate, normalization of q and k, and the recurrence; projections, convolution and
output norm are the layer's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from k3tool.kernels.dispatch import twin

__all__ = ["kda"]


def kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    f: Tensor,
    b: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    *,
    lower_bound: float | None,
) -> Tensor:
    """Outputs o [B, T, H, V] in v.dtype for T tokens that follow `state`, which is updated in place.

    q, k: [B, T, H, K] as the convolution leaves them: they are L2-normalized here (eps 1e-6 on the sum), q also
    scaled by K^-0.5. v: [B, T, H, V]. f: [B, T, H, K], the raw gate logits; b: [B, T, H], raw: beta is its sigmoid.
    a_log: [H] float32, dt_bias: [H, K] float32. state: [B, H, K, V] float32, contiguous.
    lower_bound: the gate is `lower_bound * sigmoid(exp(a_log) * (f + dt_bias))`, or with None the unbounded
    `-exp(a_log) * softplus(f + dt_bias)`.
    One token takes the recurrent step, more take the chunked form; both compute in float32. Raises ValueError.
    """
    batch, time, heads, key_dim = q.shape
    value_dim = v.shape[-1]
    shapes = {
        "k": (k, (batch, time, heads, key_dim)),
        "v": (v, (batch, time, heads, value_dim)),
        "f": (f, (batch, time, heads, key_dim)),
        "b": (b, (batch, time, heads)),
        "a_log": (a_log, (heads,)),
        "dt_bias": (dt_bias, (heads, key_dim)),
        "state": (state, (batch, heads, key_dim, value_dim)),
    }
    for name, (tensor, shape) in shapes.items():
        if tensor.shape != shape:
            raise ValueError(f"{name} must be {shape}, found {tuple(tensor.shape)}")
    if state.dtype != torch.float32 or not state.is_contiguous():
        raise ValueError("state must be contiguous float32")
    return twin("kda", "kda", q)(q, k, v, f, b, a_log, dt_bias, state, lower_bound=lower_bound)
