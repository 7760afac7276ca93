"""Kimi Delta Attention: gated delta-rule linear attention with one decay per key channel.

Per head, with a float32 state S [K, V]: `S = diag(exp(g_t)) S`, `u = v_t - S^T k_t`, `S += beta_t k_t u^T`,
`o_t = S^T q_t`. This package holds gate, normalization of q and k, and the recurrence; projections, convolution and
output norm are the layer's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from k3tool.kernels.dispatch import twin

__all__ = ["kda", "kda_decode"]


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


def kda_decode(
    x: Tensor,
    conv_weight: Tensor,
    history: Tensor,
    f: Tensor,
    b: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    gate: Tensor,
    norm_weight: Tensor,
    *,
    lower_bound: float | None,
    eps: float,
) -> Tensor:
    """One token of the whole layer between its projections: convolution, recurrence, gated norm -> [B, H, D] in x.dtype.

    x: [B, 3 H D], the projections q, k, v. conv_weight: [W, 3 H D] float32. history: [B, W - 1, 3 H D] in x.dtype,
    moved on by one token. f, gate: [B, H, D]; b: [B, H]; a_log: [H], dt_bias: [H, D], norm_weight: [D], float32. state:
    [B, H, D, D] float32, contiguous, updated in place. Equals `causal_conv`, `kda` and `gated_rms_norm` in turn, their
    roundings to x.dtype included. Raises ValueError.
    """
    batch, heads, dim, _ = state.shape
    width = 3 * heads * dim
    shapes = {
        "x": (x, (batch, width)),
        "conv_weight": (conv_weight, (conv_weight.shape[0], width)),
        "history": (history, (batch, conv_weight.shape[0] - 1, width)),
        "f": (f, (batch, heads, dim)),
        "b": (b, (batch, heads)),
        "a_log": (a_log, (heads,)),
        "dt_bias": (dt_bias, (heads, dim)),
        "state": (state, (batch, heads, dim, dim)),
        "gate": (gate, (batch, heads, dim)),
        "norm_weight": (norm_weight, (dim,)),
    }
    for name, (tensor, shape) in shapes.items():
        if tensor.shape != shape:
            raise ValueError(f"{name} must be {shape}, found {tuple(tensor.shape)}")
    if state.dtype != torch.float32 or not state.is_contiguous() or history.dtype != x.dtype:
        raise ValueError("state must be contiguous float32, and history in the dtype of x")
    run = twin("kda", "kda_decode", x)
    return run(
        x, conv_weight, history, f, b, a_log, dt_bias, state, gate, norm_weight, lower_bound=lower_bound, eps=eps
    )
