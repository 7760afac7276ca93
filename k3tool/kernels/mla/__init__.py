"""Multi-head latent attention without positions, on the latent cache.

What is cached per token is the normalized latent c [C] and the key dimensions shared by all heads kr [R]; keys and
values of a head are `[Wk c, kr]` and `Wv c`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from k3tool.kernels.dispatch import twin

__all__ = ["mla", "mla_within"]


def mla(q: Tensor, cache: Tensor, kv_b: Tensor, *, key_dim: int) -> Tensor:
    """Causal attention of the last T tokens over all t cached ones -> [B, T, H, V] in q.dtype.

    q: [B, T, H, N + R], the first N = `key_dim` dimensions meet the latent. cache: [B, t, C + R] in q.dtype, the T new
    tokens included at its end. kv_b: [H, N + V, C] as stored (Wk rows, then Wv rows per head).
    Scores are scaled by (N + R)^-0.5; softmax and sums are float32. Few queries take the absorbed form (no key or
    value is ever expanded), many expand keys and values block by block: memory is bounded in both. Raises ValueError.
    """
    _check(q, cache, kv_b, key_dim)
    return twin("mla", "mla", q)(q, cache, kv_b, key_dim=key_dim)


def mla_within(q: Tensor, cache: Tensor, kv_b: Tensor, visible: Tensor, *, key_dim: int) -> Tensor:
    """`mla` on the first `visible` tokens of a cache with room for more: one integer [1] on the device of q.

    For up to 16 new tokens, which end at `visible`. No size depends on a number that the host must know, so the call
    can be captured once and repeated while the sequence grows. Raises ValueError.
    """
    _check(q, cache, kv_b, key_dim)
    if visible.shape != (1,) or visible.dtype not in (torch.int32, torch.int64) or q.shape[1] > 16:
        raise ValueError(
            f"visible must be one integer and the queries at most 16, found {tuple(visible.shape)}, {q.shape[1]}"
        )
    return twin("mla", "mla_within", q)(q, cache, kv_b, visible, key_dim=key_dim)


def _check(q: Tensor, cache: Tensor, kv_b: Tensor, key_dim: int) -> None:
    heads, rows, latent = kv_b.shape
    batch, time, q_heads, q_dim = q.shape
    if cache.dim() != 3 or cache.shape[0] != batch or cache.shape[1] < time or cache.dtype != q.dtype:
        raise ValueError(f"cache {tuple(cache.shape)} {cache.dtype} does not fit q {tuple(q.shape)} {q.dtype}")
    if q_heads != heads or not 0 < key_dim < rows or cache.shape[2] - latent != q_dim - key_dim:
        raise ValueError(f"q {tuple(q.shape)}, cache {tuple(cache.shape)}, kv_b {tuple(kv_b.shape)} do not fit")
