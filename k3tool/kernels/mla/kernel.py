"""Latent attention in Triton: flash attention over expanded keys for prefill, absorbed and split over the cache for decode.

Prefill expands a span of the cache to keys and values once (a plain matrix product) and then attends block by block;
longer caches go span by span with the running softmax kept between spans, so memory is bounded. Decode moves the few
queries into the latent space instead, and every program reads a split of the cache once for many heads; the splits are
joined when the context is projected to values.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3tool.kernels import tuning
from k3tool.kernels.lang import (
    IS_INTERPRETED,
    cast,
    dense_last,
    dot_dtype,
    dot_type,
    gpu,
    power_of_two,
    precision,
)
from k3tool.kernels.linear.kernel import linear
from k3tool.kernels.mla.reference import ABSORBED_QUERIES
from k3tool.kernels.tuning import Options

SPAN = 16384  # tokens whose keys and values are expanded at once
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _attend(
    q, q_rope, pairs, shared, m, start, keys, offset, scale, peak, mass, total, pair_t, shared_t, MASKED: tl.constexpr,
    N: tl.constexpr, R: tl.constexpr, V: tl.constexpr, PADDED_N: tl.constexpr, PADDED_R: tl.constexpr,
    PADDED_V: tl.constexpr, BLOCK_N: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One block of keys into the running softmax. MASKED: some of its keys may be later than some query, or absent."""
    n = start + tl.arange(0, BLOCK_N)
    here = (n < keys)[:, None] if MASKED else (n >= 0)[:, None]
    dim, rope, value = tl.arange(0, PADDED_N)[None, :], tl.arange(0, PADDED_R)[None, :], tl.arange(0, PADDED_V)[None, :]
    rows = pairs + n.to(tl.int64)[:, None] * pair_t
    k = tl.load(rows + dim, here & (dim < N), 0.0).to(DOT)
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if R > 0:
        k_rope = tl.load(shared + n.to(tl.int64)[:, None] * shared_t + rope, here & (rope < R), 0.0).to(DOT)
        scores = tl.dot(q_rope, tl.trans(k_rope), scores, input_precision=PRECISION)
    scores *= scale
    if MASKED:
        scores = tl.where((n < keys)[None, :] & (n[None, :] <= m[:, None] + offset), scores, float("-inf"))
    higher = tl.maximum(peak, tl.max(scores, axis=1))
    base = tl.where(higher == float("-inf"), 0.0, higher)
    weights = tl.exp2(scores - base[:, None])
    rescale = tl.exp2(peak - base)
    mass = mass * rescale + tl.sum(weights, axis=1)
    v = tl.load(rows + N + value, here & (value < V), 0.0).to(DOT)
    total = tl.dot(weights.to(DOT), v, total * rescale[:, None], input_precision=PRECISION)
    return higher, mass, total


@triton.jit
def prefill_kernel(
    q, pairs, shared, out, peaks, masses, totals, q_t, q_h, pair_t, shared_t, time, keys, offset, heads, scale,
    N: tl.constexpr, R: tl.constexpr, V: tl.constexpr, PADDED_N: tl.constexpr, PADDED_R: tl.constexpr,
    PADDED_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, IS_FIRST: tl.constexpr, IS_LAST: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Programs (query block, head): queries [T, H, N + R] meet one span of keys; key n precedes query n - offset.

    pairs [span, H, N + V] (keys, then values), shared [span, R]. The running softmax (peaks, masses [T, H], totals
    [T, H, V]) is taken up unless IS_FIRST and left behind unless IS_LAST, which writes out [T, H, V].
    """
    head = tl.program_id(1)
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M  # the longest rows start first
    m = first + tl.arange(0, BLOCK_M)
    row = m.to(tl.int64)[:, None]
    dim, rope, value = tl.arange(0, PADDED_N)[None, :], tl.arange(0, PADDED_R)[None, :], tl.arange(0, PADDED_V)[None, :]
    known = (m < time)[:, None]
    source = q + row * q_t + head * q_h
    queries = tl.load(source + dim, known & (dim < N), 0.0).to(DOT)
    q_rope = tl.load(source + N + rope, known & (rope < R), 0.0).to(DOT)
    place = m.to(tl.int64) * heads + head
    if IS_FIRST:
        peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        mass = tl.zeros((BLOCK_M,), tl.float32)
        total = tl.zeros((BLOCK_M, PADDED_V), tl.float32)
    else:
        peak = tl.load(peaks + place, m < time, float("-inf"))
        mass = tl.load(masses + place, m < time, 0.0)
        total = tl.load(totals + place[:, None] * V + value, known & (value < V), 0.0)
    own = pairs + head * (N + V)
    visible = tl.minimum(keys, first + BLOCK_M + offset)  # keys that the block's last query may see
    whole = tl.maximum(tl.minimum(keys, first + offset + 1), 0) // BLOCK_N * BLOCK_N  # those that all its queries see
    for start in range(0, whole, BLOCK_N):
        peak, mass, total = _attend(
            queries, q_rope, own, shared, m, start, keys, offset, scale * LOG2E, peak, mass, total, pair_t, shared_t,
            False, N, R, V, PADDED_N, PADDED_R, PADDED_V, BLOCK_N, DOT, PRECISION,
        )  # fmt: skip
    for start in range(whole, visible, BLOCK_N):
        peak, mass, total = _attend(
            queries, q_rope, own, shared, m, start, keys, offset, scale * LOG2E, peak, mass, total, pair_t, shared_t,
            True, N, R, V, PADDED_N, PADDED_R, PADDED_V, BLOCK_N, DOT, PRECISION,
        )  # fmt: skip
    if IS_LAST:
        result = cast(total / mass[:, None], out.dtype.element_ty)
        tl.store(out + place[:, None] * V + value, result, known & (value < V))
    else:
        tl.store(peaks + place, peak, m < time)
        tl.store(masses + place, mass, m < time)
        tl.store(totals + place[:, None] * V + value, total, known & (value < V))


@triton.jit
def absorb_kernel(
    q, kv_b, moved, q_b, q_t, q_h, time, heads, rows, scale,
    N: tl.constexpr, V: tl.constexpr, C: tl.constexpr, PADDED_N: tl.constexpr, BLOCK_C: tl.constexpr,
    BLOCK_M: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Programs (latent block, head, row block): moved [B T, H, C] = scale * q_nope Wk, for rows b * T + t."""
    head = tl.program_id(1)
    m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    c = (tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C))[None, :]
    dim = tl.arange(0, PADDED_N)
    source = q + (m // time).to(tl.int64)[:, None] * q_b + (m % time)[:, None] * q_t + head * q_h
    left = tl.load(source + dim[None, :], (m < rows)[:, None] & (dim < N)[None, :], 0.0).to(DOT)
    weight = kv_b + (head.to(tl.int64) * (N + V) + dim[:, None]) * C + c
    right = tl.load(weight, (dim < N)[:, None] & (c < C), 0.0).to(tl.float32).to(DOT)
    result = tl.dot(left, right, input_precision=PRECISION) * scale
    at = (m.to(tl.int64)[:, None] * heads + head) * C + c
    tl.store(moved + at, cast(result, moved.dtype.element_ty), (m < rows)[:, None] & (c < C))


@triton.jit
def split_kernel(
    moved, q_rope, cache, totals, peaks, masses, visible, rope_b, rope_t, rope_h, cache_b, cache_t, time, keys, per_split,
    heads, scale, C: tl.constexpr, R: tl.constexpr, PADDED_C: tl.constexpr, PADDED_R: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, HAS_VISIBLE: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Programs (split, block of T x H query rows, sequence): attend to `per_split` cached tokens.

    Of `keys` tokens, or with HAS_VISIBLE of the number that lies at `visible`.

    totals [B, T H, splits, C], peaks and masses [B, T H, splits]: sums of weighted latents, not yet divided.
    """
    if HAS_VISIBLE:
        keys = tl.load(visible).to(tl.int32)
    split, sequence = tl.program_id(0), tl.program_id(2).to(tl.int64)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    rows = time * heads
    known = (m < rows)[:, None]
    token, head = m // heads, m % heads
    c, rope = tl.arange(0, PADDED_C)[None, :], tl.arange(0, PADDED_R)[None, :]
    place = sequence * rows + m
    queries = tl.load(moved + place[:, None] * C + c, known & (c < C), 0.0).to(DOT)
    source = q_rope + sequence * rope_b + token.to(tl.int64)[:, None] * rope_t + head[:, None] * rope_h
    ropes = tl.load(source + rope, known & (rope < R), 0.0)
    ropes = (ropes.to(tl.float32) * scale).to(DOT)
    peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    mass = tl.zeros((BLOCK_M,), tl.float32)
    total = tl.zeros((BLOCK_M, PADDED_C), tl.float32)
    end = tl.minimum((split + 1) * per_split, keys)
    for start in range(split * per_split, end, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        here = (n < end)[:, None]
        latents = cache + sequence * cache_b + n.to(tl.int64)[:, None] * cache_t
        latent = tl.load(latents + c, here & (c < C), 0.0).to(DOT)
        scores = tl.dot(queries, tl.trans(latent), input_precision=PRECISION)
        if R > 0:
            shared = tl.load(latents + C + rope, here & (rope < R), 0.0).to(DOT)
            scores = tl.dot(ropes, tl.trans(shared), scores, input_precision=PRECISION)
        scores *= LOG2E
        seen = (n < end)[None, :] & (n[None, :] <= (keys - time + token)[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, axis=1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores - base[:, None])
        rescale = tl.exp2(peak - base)
        mass = mass * rescale + tl.sum(weights, axis=1)
        total = tl.dot(weights.to(DOT), latent, total * rescale[:, None], input_precision=PRECISION)
        peak = higher
    at = place * tl.num_programs(0) + split
    tl.store(peaks + at, peak, m < rows)
    tl.store(masses + at, mass, m < rows)
    tl.store(totals + at[:, None] * C + c, total, known & (c < C))


@triton.jit
def join_kernel(
    totals, peaks, masses, kv_b, out, rows, heads, splits,
    N: tl.constexpr, V: tl.constexpr, C: tl.constexpr, PADDED_C: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Programs (value block, head, row block): out [B T, H, V] = context Wv^T, the context joined from its splits."""
    head = tl.program_id(1)
    m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    c = tl.arange(0, PADDED_C)[None, :]
    place = (m.to(tl.int64) * heads + head) * splits
    peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    mass = tl.zeros((BLOCK_M,), tl.float32)
    total = tl.zeros((BLOCK_M, PADDED_C), tl.float32)
    for split in range(splits):
        theirs = tl.load(peaks + place + split, m < rows, float("-inf"))
        higher = tl.maximum(peak, theirs)
        base = tl.where(higher == float("-inf"), 0.0, higher)
        mine, add = tl.exp2(peak - base), tl.exp2(theirs - base)
        mass = mass * mine + tl.load(masses + place + split, m < rows, 0.0) * add
        part = tl.load(totals + (place + split)[:, None] * C + c, (m < rows)[:, None] & (c < C), 0.0)
        total = total * mine[:, None] + part * add[:, None]
        peak = higher
    context = (total / tl.where(m < rows, mass, 1.0)[:, None]).to(DOT)
    v = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    weight = kv_b + (head.to(tl.int64) * (N + V) + N + v[:, None]) * C + c
    weight = tl.trans(tl.load(weight, (v < V)[:, None] & (c < C), 0.0).to(tl.float32).to(DOT))
    result = tl.dot(context, weight, input_precision=PRECISION)
    at = (m.to(tl.int64)[:, None] * heads + head) * V + v[None, :]
    tl.store(out + at, cast(result, out.dtype.element_ty), (m < rows)[:, None] & (v < V)[None, :])


def mla(q: Tensor, cache: Tensor, kv_b: Tensor, *, key_dim: int) -> Tensor:
    """See the public twin."""
    q, cache, kv_b = dense_last(q), dense_last(cache), kv_b.contiguous()
    out = torch.empty((*q.shape[:3], kv_b.shape[1] - key_dim), dtype=q.dtype, device=q.device)
    if out.numel() and q.shape[1] <= ABSORBED_QUERIES:
        _absorbed(q, cache, kv_b, out, key_dim, None)
    elif out.numel():
        for index in range(q.shape[0]):
            _expanded(q[index], cache[index], kv_b, out[index], key_dim)
    return out


def mla_within(q: Tensor, cache: Tensor, kv_b: Tensor, visible: Tensor, *, key_dim: int) -> Tensor:
    """See the public twin."""
    q, cache, kv_b = dense_last(q), dense_last(cache), kv_b.contiguous()
    out = torch.empty((*q.shape[:3], kv_b.shape[1] - key_dim), dtype=q.dtype, device=q.device)
    if out.numel():
        _absorbed(q, cache, kv_b, out, key_dim, visible)
    return out


def _expanded(q: Tensor, cache: Tensor, kv_b: Tensor, out: Tensor, key_dim: int) -> None:
    """q [T, H, N + R], cache [t, C + R] -> out [T, H, V]."""
    time, heads, q_dim = q.shape
    keys, latent, value_dim = cache.shape[0], kv_b.shape[2], out.shape[2]
    weight = kv_b.flatten(0, 1)
    spans = range(0, keys, SPAN)
    peaks = masses = totals = out
    if len(spans) > 1:
        peaks, masses = (torch.empty((time, heads), dtype=torch.float32, device=q.device) for _ in range(2))
        totals = torch.empty(out.shape, dtype=torch.float32, device=q.device)
    constants = {"N": key_dim, "R": q_dim - key_dim, "V": value_dim, "DOT": dot_type(q.dtype), "PRECISION": precision()}
    for start in spans:
        span = cache[start : start + SPAN]
        pairs = linear(span[:, :latent], weight)

        def launch(options: Options, start: int = start, span: Tensor = span, pairs: Tensor = pairs) -> None:
            prefill_kernel[(triton.cdiv(time, options["BLOCK_M"]), heads)](
                q, pairs, span[:, latent:], out, peaks, masses, totals, *q.stride()[:2], pairs.stride(0), span.stride(0),
                time, span.shape[0], keys - time - start, heads, q_dim**-0.5, IS_FIRST=start == 0,
                IS_LAST=start == spans[-1], **constants, **options,
            )  # fmt: skip

        options = prefill_options(key_dim, q_dim - key_dim, value_dim, q.dtype)
        if len(spans) > 1:  # the running softmax is changed in place
            launch(options[0])
        else:
            tuning.run("mla.prefill", (q_dim, value_dim, q.dtype, heads, tuning.bucket(time)), options, launch)


def _absorbed(q: Tensor, cache: Tensor, kv_b: Tensor, out: Tensor, key_dim: int, visible: Tensor | None) -> None:
    """q [B, T, H, N + R], cache [B, t, C + R] -> out [B, T, H, V]. visible: how many of the t tokens count, or all."""
    batch, time, heads, q_dim = q.shape
    keys, latent, value_dim, rope = cache.shape[1], kv_b.shape[2], out.shape[3], q_dim - key_dim
    rows, scale = batch * time, q_dim**-0.5
    shared = {"DOT": dot_type(q.dtype), "PRECISION": precision()}
    block_m = min(16, power_of_two(rows))
    moved = torch.empty((batch, time, heads, latent), dtype=dot_dtype(q.dtype), device=q.device)
    block = min(256 if IS_INTERPRETED else 64, power_of_two(latent))
    absorb_kernel[(triton.cdiv(latent, block), heads, triton.cdiv(rows, block_m))](
        q, kv_b, moved, *q.stride()[:3], time, heads, rows, scale, N=key_dim, V=value_dim, C=latent,
        PADDED_N=power_of_two(key_dim), BLOCK_C=block, BLOCK_M=block_m, num_warps=4, **shared,
    )  # fmt: skip
    parts: Parts | None = None

    def split(options: Options) -> None:
        nonlocal parts
        row_blocks = triton.cdiv(time * heads, options["BLOCK_M"])
        parts = Parts.plan(keys, batch, time * heads, latent, row_blocks * batch, options["BLOCK_N"], q.device)
        split_kernel[(parts.splits, row_blocks, batch)](
            moved, q[..., key_dim:], cache, *parts[:3], parts.peaks if visible is None else visible, *q.stride()[:3], *cache.stride()[:2], time, keys,
            parts.per_split, heads, scale, C=latent, R=rope, HAS_VISIBLE=visible is not None, **shared, **options,
        )  # fmt: skip

    options = split_options(latent, rope, time * heads, q.dtype)
    tuning.run("mla.split", (latent, rope, q.dtype, heads, rows, tuning.bucket(keys)), options, split)
    assert parts is not None
    block = min(256 if IS_INTERPRETED else 32, power_of_two(value_dim))
    join_kernel[(triton.cdiv(value_dim, block), heads, triton.cdiv(rows, block_m))](
        *parts[:3], kv_b, out, rows, heads, parts.splits, N=key_dim, V=value_dim, C=latent,
        PADDED_C=power_of_two(latent), BLOCK_V=block, BLOCK_M=block_m, num_warps=4, **shared,
    )  # fmt: skip


class Parts(NamedTuple):
    """What the programs of a split cache leave behind, and how it was split."""

    totals: Tensor
    peaks: Tensor
    masses: Tensor
    splits: int
    per_split: int

    @classmethod
    def plan(
        cls, keys: int, batch: int, rows: int, latent: int, programs: int, block: int, device: torch.device
    ) -> Parts:
        """Split `keys` into whole blocks, for `programs` programs beside each other."""
        wanted = split_count(keys, programs, block, device)
        per_split = triton.cdiv(triton.cdiv(keys, wanted), block) * block
        splits = triton.cdiv(keys, per_split)
        totals = torch.empty((batch, rows, splits, latent), dtype=torch.float32, device=device)
        peaks, masses = (torch.empty((batch, rows, splits), dtype=torch.float32, device=device) for _ in range(2))
        return cls(totals, peaks, masses, splits, per_split)


def split_count(keys: int, programs: int, block: int, device: torch.device) -> int:
    """Into how many splits the cache goes: enough programs for two on every multiprocessor, at least four blocks each."""
    units = 132
    if device.type == "cuda":
        units = torch.cuda.get_device_properties(device).multi_processor_count
    return max(1, min(triton.cdiv(2 * units, programs), triton.cdiv(keys, 4 * block)))


def prefill_options(key_dim: int, rope: int, value_dim: int, dtype: torch.dtype) -> list[Options]:
    """Configurations of `prefill_kernel` whose tiles fit the shared memory of the GPU."""
    sizes = {
        "sm_80": [(64, 64, 4, 2), (128, 32, 8, 2)],
        "sm_90": [(128, 64, 8, 2), (128, 128, 8, 2), (64, 64, 4, 2)],
        "sm_100": [(128, 64, 8, 2), (64, 64, 4, 2)],
        "gfx942": [(64, 32, 4, 1), (128, 32, 8, 1)],
        "gfx950": [(64, 64, 4, 1), (128, 64, 8, 1)],
    }.get(gpu(), [])
    if dtype == torch.float32 or not sizes:
        sizes = [(64, 32, 4, 1)]
    padded = {
        "PADDED_N": power_of_two(key_dim),
        "PADDED_R": power_of_two(max(rope, 1)),
        "PADDED_V": power_of_two(value_dim),
    }
    return [
        {**padded, "BLOCK_M": m, "BLOCK_N": n, "num_warps": warps, "num_stages": stages}
        for m, n, warps, stages in sizes
    ]


def split_options(latent: int, rope: int, rows: int, dtype: torch.dtype) -> list[Options]:
    """Configurations of `split_kernel`: many heads share what is read of the cache."""
    sizes = {
        "sm_80": [(32, 32, 8, 1), (32, 16, 8, 2)],
        "sm_90": [(64, 32, 8, 2), (64, 32, 8, 1), (32, 32, 4, 2)],
        "sm_100": [(64, 32, 8, 1), (32, 32, 4, 2)],
        "gfx942": [(32, 16, 8, 1)],
        "gfx950": [(32, 32, 8, 1), (32, 16, 8, 1)],
    }.get(gpu(), [])
    if IS_INTERPRETED:
        sizes = [(64, 64, 4, 1)]
    elif dtype == torch.float32 or not sizes:
        sizes = [(16, 16, 8, 1)]
    padded = {"PADDED_C": power_of_two(latent), "PADDED_R": power_of_two(max(rope, 1))}
    return [
        {**padded, "BLOCK_M": min(m, power_of_two(rows)), "BLOCK_N": n, "num_warps": warps, "num_stages": stages}
        for m, n, warps, stages in sizes
    ]
