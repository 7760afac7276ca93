"""One token of KDA in Triton: the whole layer between its projections in one program per head.

Memory-bound: the state of a head (64 KiB at K = V = 128) is read once and written once; everything else is small.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3tool.kernels.kda.gates import gate
from k3tool.kernels.kda.reference import L2_EPS
from k3tool.kernels.lang import cast, dense_last, power_of_two, rounded, sigmoid, silu


@triton.jit
def _step(q, k, v, g, beta, home, known, q_scale, l2_eps):
    """q, k, g [K], v [V] float32 and the addresses [K, V] of the state, which is updated -> o [V].

    The state is read once for both S^T k and S^T q: see the torch twin's `recurrent_step`.
    """
    q = q * tl.rsqrt(tl.sum(q * q, axis=0) + l2_eps) * q_scale
    k = k * tl.rsqrt(tl.sum(k * k, axis=0) + l2_eps)
    decay = tl.exp(g)
    s = tl.load(home, known, 0.0) * decay[:, None]
    update = (v - tl.sum(s * k[:, None], axis=0)) * beta
    o = tl.sum(s * q[:, None], axis=0) + tl.sum(q * k, axis=0) * update
    tl.store(home, s + k[:, None] * update[None, :], known)
    return o


@triton.jit
def recurrent_kernel(
    q, k, v, f, b, a_log, dt_bias, state, out, q_b, q_h, k_b, k_h, v_b, v_h, f_b, f_h, b_b, b_h, heads, lower_bound,
    q_scale, l2_eps, K: tl.constexpr, V: tl.constexpr, PADDED_K: tl.constexpr, PADDED_V: tl.constexpr,
    IS_BOUNDED: tl.constexpr,
):  # fmt: skip
    """Programs (head, sequence): one token each."""
    head, sequence = tl.program_id(0), tl.program_id(1).to(tl.int64)
    key, column = tl.arange(0, PADDED_K), tl.arange(0, PADDED_V)
    qq = tl.load(q + sequence * q_b + head * q_h + key, key < K, 0.0).to(tl.float32)
    kk = tl.load(k + sequence * k_b + head * k_h + key, key < K, 0.0).to(tl.float32)
    vv = tl.load(v + sequence * v_b + head * v_h + column, column < V, 0.0).to(tl.float32)
    rate = tl.exp(tl.load(a_log + head))
    logits = f + sequence * f_b + head * f_h + key
    g = gate(logits, dt_bias + head * K + key, key < K, key < K, rate, lower_bound, IS_BOUNDED)
    beta = sigmoid(tl.load(b + sequence * b_b + head * b_h).to(tl.float32))
    place = sequence * heads + head
    home = state + (place * K + key[:, None]) * V + column[None, :]
    o = _step(qq, kk, vv, g, beta, home, (key < K)[:, None] & (column < V)[None, :], q_scale, l2_eps)
    tl.store(out + place * V + column, cast(o, out.dtype.element_ty), column < V)


@triton.jit
def _convolved(x, history, weight, channels, known, TAPS: tl.constexpr, TYPE: tl.constexpr):
    """silu(convolution) of one token, rounded to TYPE, from the addresses of its channels; the history moves on."""
    now = tl.load(x, known, 0.0)
    total = now.to(tl.float32) * tl.load(weight + (TAPS - 1) * channels, known, 0.0)
    for tap in tl.static_range(TAPS - 1):
        total += tl.load(history + tap * channels, known, 0.0).to(tl.float32) * tl.load(
            weight + tap * channels, known, 0.0
        )
    for tap in tl.static_range(TAPS - 1):
        # The barriers keep a row from being overwritten while another thread may still read it.
        moved = now if tap == TAPS - 2 else tl.load(history + (tap + 1) * channels, known, 0.0)
        tl.debug_barrier()
        tl.store(history + tap * channels, moved, known)
    return rounded(silu(total), TYPE)


@triton.jit
def decode_kernel(
    x, weight, history, f, b, a_log, dt_bias, state, output_gate, norm, out,
    x_b, f_b, b_b, b_h, gate_b, heads, lower_bound, q_scale, l2_eps, eps,
    D: tl.constexpr, PADDED: tl.constexpr, TAPS: tl.constexpr, IS_BOUNDED: tl.constexpr,
):  # fmt: skip
    """Programs (head, sequence): convolution, gate, recurrence, norm and output gate of one token.

    x [B, 3 H D] (q, k, v side by side), weight [TAPS, 3 H D], history [B, TAPS - 1, 3 H D] (moves on), f, output_gate
    [B, H D], b [B, H], state [B, H, D, D] float32 (updated), norm [D], out [B, H, D].
    """
    head, sequence = tl.program_id(0), tl.program_id(1).to(tl.int64)
    dim = tl.arange(0, PADDED)
    known = dim < D
    width = heads * D
    channels = 3 * width
    TYPE: tl.constexpr = x.dtype.element_ty
    at = head * D + dim
    rows = history + sequence * (TAPS - 1) * channels + at
    x += sequence * x_b + at
    qq = _convolved(x, rows, weight + at, channels, known, TAPS, TYPE)
    kk = _convolved(x + width, rows + width, weight + width + at, channels, known, TAPS, TYPE)
    vv = _convolved(x + 2 * width, rows + 2 * width, weight + 2 * width + at, channels, known, TAPS, TYPE)
    rate = tl.exp(tl.load(a_log + head))
    g = gate(f + sequence * f_b + at, dt_bias + at, known, known, rate, lower_bound, IS_BOUNDED)
    beta = sigmoid(tl.load(b + sequence * b_b + head * b_h).to(tl.float32))
    place = sequence * heads + head
    home = state + (place * D + dim[:, None]) * D + dim[None, :]
    o = rounded(_step(qq, kk, vv, g, beta, home, known[:, None] & known[None, :], q_scale, l2_eps), TYPE)
    o = o * tl.rsqrt(tl.sum(o * o, axis=0) / D + eps) * tl.load(norm + dim, known, 0.0)
    o = o * sigmoid(tl.load(output_gate + sequence * gate_b + at, known, 0.0).to(tl.float32))
    tl.store(out + place * D + dim, cast(o, TYPE), known)


def recurrent(
    q: Tensor, k: Tensor, v: Tensor, f: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, state: Tensor,
    lower_bound: float | None,
) -> Tensor:  # fmt: skip
    """One token of each sequence: q, k, f [B, 1, H, K], v [B, 1, H, V], b [B, 1, H] -> [B, 1, H, V]."""
    q, k, v, f, b = (dense_last(x.squeeze(1)) if x.dim() > 3 else x.squeeze(1) for x in (q, k, v, f, b))
    batch, heads, key_dim = q.shape
    value_dim = v.shape[2]
    out = torch.empty((batch, 1, heads, value_dim), dtype=v.dtype, device=v.device)
    if batch:
        recurrent_kernel[(heads, batch)](
            q, k, v, f, b, a_log, dt_bias, state, out, *(s for x in (q, k, v, f, b) for s in x.stride()[:2]),
            heads, lower_bound or 0.0, key_dim**-0.5, L2_EPS, K=key_dim, V=value_dim, PADDED_K=power_of_two(key_dim),
            PADDED_V=power_of_two(value_dim), IS_BOUNDED=lower_bound is not None, num_warps=8,
        )  # fmt: skip
    return out


def kda_decode(
    x: Tensor, conv_weight: Tensor, history: Tensor, f: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor,
    state: Tensor, gate: Tensor, norm_weight: Tensor, *, lower_bound: float | None, eps: float,
) -> Tensor:  # fmt: skip
    """See the public twin."""
    batch, heads, dim, _ = state.shape
    x, f, gate = dense_last(x), dense_last(f.flatten(1)), dense_last(gate.flatten(1))
    out = torch.empty((batch, heads, dim), dtype=x.dtype, device=x.device)
    if batch:
        decode_kernel[(heads, batch)](
            x, conv_weight, history, f, b, a_log, dt_bias, state, gate, norm_weight, out,
            x.stride(0), f.stride(0), *b.stride(), gate.stride(0), heads, lower_bound or 0.0, dim**-0.5, L2_EPS, eps,
            D=dim, PADDED=power_of_two(dim), TAPS=conv_weight.shape[0], IS_BOUNDED=lower_bound is not None, num_warps=8,
        )  # fmt: skip
    return out
