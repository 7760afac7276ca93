"""KDA in plain torch, on any device: the recurrent step and the chunked form.

Formulas: Kimi Linear (arXiv 2510.26692), chunked as in fla-org/flash-linear-attention's naive chunk form. Exponents
appear only as differences of cumulated log decays that are never positive where their result is used, so nothing
overflows however strong the decay is.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from k3tool.kernels.conv.reference import causal_conv
from k3tool.kernels.norm.reference import gated_rms_norm, l2_normalize

CHUNK = 64  # tokens whose mutual influence is solved as one triangular system
BLOCK = 16  # tokens that share one reference decay within a chunk
SAFE_EXPONENT = 80.0  # exp of this and products of its halves stay far inside float32
L2_EPS = 1e-6


def log_decay(f: Tensor, a_log: Tensor, dt_bias: Tensor, lower_bound: float | None) -> Tensor:
    """f [B, T, H, K], a_log [H], dt_bias [H, K] -> g [B, T, H, K] float32, never positive."""
    z = f.float() + dt_bias
    rate = a_log.exp().unsqueeze(-1)
    if lower_bound is None:
        return functional.softplus(z).mul_(-rate)
    return torch.sigmoid(z.mul_(rate)).mul_(lower_bound)


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
    """See the public twin."""
    g = log_decay(f, a_log, dt_bias, lower_bound)
    beta = torch.sigmoid(b.float())
    queries = l2_normalize(q, L2_EPS).mul_(q.shape[-1] ** -0.5)
    keys = l2_normalize(k, L2_EPS)
    if q.shape[1] == 1:
        return recurrent_step(queries, keys, v.float(), g, beta, state).to(v.dtype)
    floor = lower_bound if lower_bound is not None else float(g.amin())
    return chunked(queries, keys, v.float(), g, beta, state, floor).to(v.dtype)


def recurrent_step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    """One token: q, k, g [B, 1, H, K], v [B, 1, H, V], beta [B, 1, H], all float32 -> [B, 1, H, V].

    The state is read once for both S^T k and S^T q: with decay d, `o = (d q)^T S + beta <q, k> u` equals reading the
    updated state. Updates `state` in place.
    """
    q, k, v, beta = q[:, 0], k[:, 0], v[:, 0], beta[:, 0]  # [B, H, *]
    decay = g[:, 0].exp()
    probes = torch.stack([k * decay, q * decay], dim=2)  # [B, H, 2, K]
    seen = probes @ state  # [B, H, 2, V]
    update = (v - seen[:, :, 0]) * beta.unsqueeze(-1)
    state.mul_(decay.unsqueeze(-1)).addcmul_(k.unsqueeze(-1), update.unsqueeze(-2))
    return (seen[:, :, 1] + (q * k).sum(-1, keepdim=True) * update).unsqueeze(1)


def chunked(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, floor: float) -> Tensor:
    """T tokens: q, k, g [B, T, H, K], v [B, T, H, V], beta [B, T, H], all float32 -> [B, T, H, V].

    With G the decays cumulated within a chunk, `A_ij = beta_i <k_i exp(G_i - G_j), k_j>` for j < i and
    `(I + A) [W U] = beta [K exp(G), V]`, a chunk that meets state S does `V' = U - W S`,
    `O = (Q exp(G)) S + tril(<q_i exp(G_i - G_j), k_j>) V'` and `S = diag(exp(G_end)) S + (K exp(G_end - G))^T V'`.
    `floor` is a lower bound of g: it decides how the products near the diagonal are formed. Updates `state`.
    """
    batch, time, heads, key_dim = k.shape
    chunk = min(CHUNK, -(-time // BLOCK) * BLOCK)
    padding = -time % chunk  # padded tokens have k = 0, beta = 0 and g = 0: they change nothing
    q, k, v, g = (_by_chunk(tensor, padding, chunk) for tensor in (q, k, v, g))  # [B H, N, C, *]
    beta = _by_chunk(beta.unsqueeze(-1), padding, chunk)
    total = g.cumsum(-2)
    within_keys, within_queries = _decayed_products(q, k, total, floor)
    grown = total.exp()
    right = torch.cat([k * grown, v], dim=-1).mul_(beta)
    solved = torch.linalg.solve_triangular(within_keys.mul_(beta), right, upper=False, unitriangular=True)
    q_in = q * grown
    end = total[..., -1:, :]
    k_out = (k * (end - total).exp()).transpose(-1, -2)  # [B H, N, K, C]
    end_decay = end.exp().transpose(-1, -2)  # [B H, N, K, 1]
    carried = state.view(batch * heads, key_dim, -1)
    outputs = torch.empty_like(v)
    for index in range(v.shape[1]):
        fresh = torch.baddbmm(solved[:, index, :, key_dim:], solved[:, index, :, :key_dim], carried, alpha=-1)
        torch.baddbmm(q_in[:, index] @ carried, within_queries[:, index], fresh, out=outputs[:, index])
        carried.mul_(end_decay[:, index]).baddbmm_(k_out[:, index], fresh)
    return outputs.flatten(1, 2)[:, :time].unflatten(0, (batch, heads)).transpose(1, 2)


def _by_chunk(x: Tensor, padding: int, chunk: int) -> Tensor:
    """[B, T, H, D] -> [B H, N, C, D], contiguous, padded with zeros at the end of time."""
    x = functional.pad(x.transpose(1, 2), (0, 0, 0, padding)) if padding else x.transpose(1, 2)
    return x.flatten(0, 1).unflatten(1, (-1, chunk)).contiguous()


def _decayed_products(q: Tensor, k: Tensor, total: Tensor, floor: float) -> tuple[Tensor, Tensor]:
    """`<k_i exp(G_i - G_j), k_j>` for j < i and `<q_i exp(G_i - G_j), k_j>` for j <= i, zero elsewhere: [X, N, C, C].

    Blocks of 16 tokens below the diagonal split the difference at the end of the block before i, where both factors
    are at most one. Blocks on the diagonal split it at their middle where `floor` keeps both factors finite, else
    the differences are taken pair by pair.
    """
    *lead, chunk, _ = k.shape
    products = k.new_zeros(2, *lead, chunk, chunk)
    both = torch.stack([k, q])  # [2, X, N, C, K]
    for start in range(0, chunk, BLOCK):
        rows = slice(start, start + BLOCK)
        here = total[..., rows, :]
        if start:
            before = total[..., start - 1 : start, :]
            left = both[..., rows, :] * (here - before).exp()
            right = k[..., :start, :] * (before - total[..., :start, :]).exp()
            products[..., rows, :start] = left @ right.transpose(-1, -2)
        products[..., rows, rows] = _diagonal(both[..., rows, :], k[..., rows, :], here, floor)
    causal = torch.ones(chunk, chunk, dtype=torch.bool, device=k.device)
    products[0].masked_fill_(causal.triu(), 0.0)
    products[1].masked_fill_(causal.triu(1), 0.0)
    return products[0], products[1]


def _diagonal(both: Tensor, k: Tensor, total: Tensor, floor: float) -> Tensor:
    """The products of one block with itself, [2, X, N, 16, 16]; entries above the diagonal are not meant to be used."""
    if -floor * BLOCK <= SAFE_EXPONENT:
        middle = total[..., BLOCK // 2 - 1 : BLOCK // 2, :]
        left = both * (total - middle).exp()
        right = k * (middle - total).exp()
        return left @ right.transpose(-1, -2)
    columns = [
        (both * (total - total[..., j : j + 1, :]).clamp_(max=0.0).exp()) @ k[..., j, :].unsqueeze(-1)
        for j in range(BLOCK)
    ]
    return torch.cat(columns, dim=-1)


def kda_packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    f: Tensor,
    b: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    offsets: Tensor,
    *,
    lower_bound: float | None,
) -> Tensor:
    """See the public twin."""
    out = torch.empty_like(v)
    for index, (begin, end) in enumerate(pairwise(offsets.tolist())):
        if end > begin:
            tokens = (x[None, begin:end] for x in (q, k, v, f, b))
            own = state[index : index + 1]
            out[begin:end] = kda(*tokens, a_log, dt_bias, own, lower_bound=lower_bound)[0]
    return out


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
    """See the public twin."""
    _, heads, dim, _ = state.shape
    q, k, v = causal_conv(x.unsqueeze(1), conv_weight, history).unflatten(-1, (3, heads, dim)).unbind(2)
    out = kda(q, k, v, f.unsqueeze(1), b.unsqueeze(1), a_log, dt_bias, state, lower_bound=lower_bound).squeeze(1)
    return gated_rms_norm(out, gate, norm_weight, eps)
