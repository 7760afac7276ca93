"""Latent attention in plain torch, on any device: absorbed for decode, expanded in blocks for prefill."""

from __future__ import annotations

import torch
from torch import Tensor

ABSORBED_QUERIES = 16  # up to this many queries the absorbed form does less work than expanding the cache
BLOCK_SCORES = 1 << 24  # scores held at once: bounds both forms


def mla(q: Tensor, cache: Tensor, kv_b: Tensor, *, key_dim: int) -> Tensor:
    """See the public twin."""
    attend = absorbed if q.shape[1] <= ABSORBED_QUERIES else expanded
    return torch.stack([attend(q[i], cache[i], kv_b, key_dim) for i in range(q.shape[0])])


def mla_within(q: Tensor, cache: Tensor, kv_b: Tensor, visible: Tensor, *, key_dim: int) -> Tensor:
    """See the public twin."""
    return mla(q, cache[:, : int(visible)], kv_b, key_dim=key_dim)


def absorbed(q: Tensor, cache: Tensor, kv_b: Tensor, key_dim: int) -> Tensor:
    """q [T, H, N + R], cache [t, C + R], kv_b [H, N + V, C] -> [T, H, V]: queries move into the latent space.

    `score = <Wk^T q_nope, c> + <q_rope, kr>`, `o = Wv (sum of p c)`.
    """
    time, heads, _ = q.shape
    latent = kv_b.shape[2]
    moved = q[..., :key_dim].transpose(0, 1).float() @ kv_b[:, :key_dim].float()  # [H, T, C]
    queries = torch.cat([moved, q[..., key_dim:].transpose(0, 1).float()], dim=-1)
    queries = queries.flatten(0, 1) * q.shape[-1] ** -0.5  # [H T, C + R]
    running = _Softmax(queries.shape[0], latent, queries)
    step = max(256, BLOCK_SCORES // queries.shape[0])
    for start in range(0, cache.shape[0], step):
        block = cache[start : start + step].float()
        scores = (queries @ block.t()).unflatten(0, (heads, time))
        scores = _causal(scores, cache.shape[0] - time - start).flatten(0, 1)
        running.add(scores, lambda weights, block=block: weights @ block[:, :latent])
    context = running.result().unflatten(0, (heads, time))  # [H, T, C]
    return (context @ kv_b[:, key_dim:].float().transpose(1, 2)).transpose(0, 1).to(q.dtype)


def expanded(q: Tensor, cache: Tensor, kv_b: Tensor, key_dim: int) -> Tensor:
    """The same by expanding keys and values of one block of tokens at a time, with a running softmax."""
    time, heads, _ = q.shape
    latent = kv_b.shape[2]
    queries = q.transpose(0, 1).float() * q.shape[-1] ** -0.5  # [H, T, N + R]
    running = _Softmax(heads * time, kv_b.shape[1] - key_dim, queries)
    weight = kv_b.flatten(0, 1).float()
    step = max(64, BLOCK_SCORES // (heads * time))
    for start in range(0, cache.shape[0], step):
        block = cache[start : start + step].float()
        pairs = (block[:, :latent] @ weight.t()).to(q.dtype).float().unflatten(1, (heads, -1)).transpose(0, 1)
        shared = block[:, latent:].expand(heads, -1, -1)
        scores = queries @ torch.cat([pairs[..., :key_dim], shared], dim=-1).transpose(1, 2)
        scores = _causal(scores, cache.shape[0] - time - start).flatten(0, 1)
        values = pairs[..., key_dim:]
        running.add(scores, lambda weights, values=values: (weights.unflatten(0, (heads, time)) @ values).flatten(0, 1))
    return running.result().unflatten(0, (heads, time)).transpose(0, 1).to(q.dtype)


def _causal(scores: Tensor, offset: int) -> Tensor:
    """scores [H, T, n] of a block whose first key is `offset` tokens before the first query: mask later keys."""
    time, keys = scores.shape[1:]
    if keys - 1 <= offset:
        return scores
    allowed = torch.ones(time, keys, dtype=torch.bool, device=scores.device).tril(offset)
    return scores.masked_fill_(~allowed, float("-inf"))


class _Softmax:
    """Softmax-weighted sum over keys that arrive in blocks: running maximum, denominator and sum per row."""

    def __init__(self, rows: int, width: int, like: Tensor) -> None:
        self.peak = like.new_full((rows, 1), float("-inf"))
        self.mass = like.new_zeros(rows, 1)
        self.total = like.new_zeros(rows, width)

    def add(self, scores: Tensor, weighted_sum) -> None:
        """scores [rows, n]; `weighted_sum` maps weights [rows, n] to [rows, width]. The first block reaches all rows."""
        peak = torch.maximum(self.peak, scores.amax(-1, keepdim=True))
        weights = scores.sub_(peak).exp_()
        rescale = (self.peak - peak).exp_()
        self.mass.mul_(rescale).add_(weights.sum(-1, keepdim=True))
        self.total.mul_(rescale).add_(weighted_sum(weights))
        self.peak = peak

    def result(self) -> Tensor:
        return self.total / self.mass
