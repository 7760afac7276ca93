"""KDA in Triton: chunks of 64 tokens prepared in parallel, then scanned per sequence; one token in a step of its own.

The chunked form is that of the torch twin. What differs is how the decayed products `<x_i exp(G_i - G_j), k_j>` of a
chunk are formed without a positive exponent: level by level. On a level, blocks of 64 (then 32, ...) tokens are cut in
half, and the later half meets the earlier one with the decay split at the cut, where both factors are at most one: one
product of full tiles per level, of which the blocks are kept. Blocks of 16 are split in their middle instead where the
gate's bound keeps both factors finite (g >= -5: at most exp(40)); without a bound the levels go down to single tokens.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3tool.kernels import tuning
from k3tool.kernels.kda.gates import gate
from k3tool.kernels.kda.reference import BLOCK, CHUNK, L2_EPS, SAFE_EXPONENT
from k3tool.kernels.kda.step import kda_decode, recurrent
from k3tool.kernels.lang import (
    IS_INTERPRETED,
    cast,
    dense_last,
    dot_dtype,
    dot_type,
    gpu,
    on_hip,
    power_of_two,
    precision,
    sigmoid,
)
from k3tool.kernels.tuning import Options

__all__ = ["kda", "kda_decode", "kda_packed"]


@triton.jit
def _at_cut(total, SIZE: tl.constexpr, AT: tl.constexpr, C: tl.constexpr, BLOCK_K: tl.constexpr):
    """Row AT of each block of SIZE rows, in all rows of its block: [C, BLOCK_K]."""
    blocks = tl.reshape(total, (C // SIZE, SIZE, BLOCK_K))
    picked = (tl.arange(0, SIZE) == AT)[None, :, None]
    row = tl.sum(tl.where(picked, blocks, 0.0), axis=1)
    return tl.reshape(tl.broadcast_to(row[:, None, :], (C // SIZE, SIZE, BLOCK_K)), (C, BLOCK_K))


@triton.jit
def _products(
    q,
    k,
    total,
    SIZE: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    C: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Decayed products within blocks of SIZE tokens, zero elsewhere: ([C, C] of k with k, [C, C] of q with k).

    IS_SPLIT: only the later half of a block with its earlier half. Otherwise all pairs, split at the block's middle.
    """
    row = tl.arange(0, C)
    cut = _at_cut(total, SIZE, SIZE // 2 - 1, C, BLOCK_K)
    same = (row // SIZE)[:, None] == (row // SIZE)[None, :]
    if IS_SPLIT:
        later = ((row % SIZE) >= SIZE // 2)[:, None]
        left = tl.where(later, tl.exp(tl.minimum(total - cut, 0.0)), 0.0)
        right = tl.where(later, 0.0, tl.exp(tl.minimum(cut - total, 0.0)))
    else:
        left = tl.exp(total - cut)
        right = tl.exp(cut - total)
    keys = tl.trans((k * right).to(DOT))
    kk = tl.dot((k * left).to(DOT), keys, input_precision=PRECISION)
    qk = tl.dot((q * left).to(DOT), keys, input_precision=PRECISION)
    return tl.where(same, kk, 0.0), tl.where(same, qk, 0.0)


@triton.jit
def _inverse(blocks, rest, C: tl.constexpr, B: tl.constexpr, PRECISION: tl.constexpr):
    """(I + a)^-1 of a strictly lower triangular a, [C, C] float32.

    blocks [C / B, B, B] are those of a on its diagonal, rest [C, C] is a without them. Forward substitution within the
    blocks, all at once; then, with X the inverse of the block diagonal and N = -X rest, the whole is
    (I + N + N^2 + N^3) X, because N^4 = 0 for four blocks.
    """
    tl.static_assert(C // B <= 4)
    i = tl.arange(0, B)
    row = i[None, :, None]
    x = tl.where(row == i[None, None, :], 1.0, tl.zeros((C // B, B, B), tl.float32))
    for step in range(1, B):
        factors = tl.sum(tl.where(row == step, blocks, 0.0), axis=1)  # [C / B, B]: row `step` of each block
        change = tl.sum(factors[:, :, None] * x, axis=1)
        x = tl.where(row == step, x - change[:, None, :], x)
    at = tl.arange(0, C)
    spread = tl.where(i[:, None] == (at % B)[None, :], 1.0, 0.0)  # repeats B columns C / B times
    wide = tl.dot(tl.reshape(x, (C, B)), spread, input_precision=PRECISION)
    x = tl.where((at // B)[:, None] == (at // B)[None, :], wide, 0.0)
    n = -tl.dot(x, rest, input_precision=PRECISION)
    x += tl.dot(n, x, input_precision=PRECISION)
    return x + tl.dot(tl.dot(n, n, input_precision=PRECISION), x, input_precision=PRECISION)


@triton.jit
def products_kernel(
    q, k, f, b, a_log, dt_bias, starts, counts, norms, mutual, within, q_in, k_out, end_decay,
    q_t, q_h, k_t, k_h, f_t, f_h, b_t, b_h, heads, lower_bound, q_scale, l2_eps,
    K: tl.constexpr, BLOCK_K: tl.constexpr, C: tl.constexpr, B: tl.constexpr,
    IS_BOUNDED: tl.constexpr, IS_TAME: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Programs (head, chunk slot): what the tokens of a chunk have to do with each other.

    Out, per slot and head, zero behind the chunk's last token: mutual [C, C] float32 = beta_i <k_i exp(G_i - G_j), k_j>
    for j < i, within [C, C] the same of queries and keys for j <= i, without beta; q_in [C, K] = q exp(G),
    k_out [C, K] = k exp(G_end - G), end_decay [K] = exp(G_end) float32, norms [C] float32 = 1 / |k|.
    """
    slot, head = tl.program_id(1).to(tl.int64), tl.program_id(0)
    count = tl.load(counts + slot)
    if count > 0:
        row = tl.arange(0, C)
        here = row < count
        token = tl.load(starts + slot).to(tl.int64) + row
        place = slot * heads + head
        q_at = q + token[:, None] * q_t + head * q_h
        k_at = k + token[:, None] * k_t + head * k_h
        f_at = f + token[:, None] * f_t + head * f_h
        rate = tl.exp(tl.load(a_log + head))
        k_square = tl.zeros((C,), tl.float32)
        q_square = tl.zeros((C,), tl.float32)
        for k0 in range(0, K, BLOCK_K):
            column = k0 + tl.arange(0, BLOCK_K)[None, :]
            inside = here[:, None] & (column < K)
            kk = tl.load(k_at + column, inside, 0.0).to(tl.float32)
            qq = tl.load(q_at + column, inside, 0.0).to(tl.float32)
            k_square += tl.sum(kk * kk, axis=1)
            q_square += tl.sum(qq * qq, axis=1)
        k_norm = tl.rsqrt(k_square + l2_eps)
        q_norm = tl.rsqrt(q_square + l2_eps) * q_scale
        tl.store(norms + place * C + row, k_norm)
        a = tl.zeros((C, C), tl.float32)
        qk = tl.zeros((C, C), tl.float32)
        own = tl.zeros((C,), tl.float32)
        for k0 in range(0, K, BLOCK_K):
            column = k0 + tl.arange(0, BLOCK_K)[None, :]
            inside = here[:, None] & (column < K)
            kk = tl.load(k_at + column, inside, 0.0).to(tl.float32) * k_norm[:, None]
            qq = tl.load(q_at + column, inside, 0.0).to(tl.float32) * q_norm[:, None]
            g = gate(f_at + column, dt_bias + head * K + column, inside, column < K, rate, lower_bound, IS_BOUNDED)
            total = tl.cumsum(g, axis=0)
            end = tl.sum(g, axis=0)
            at = (place * C + row[:, None]) * K + column
            tl.store(q_in + at, cast(qq * tl.exp(total), q_in.dtype.element_ty), column < K)
            k_end = kk * tl.exp(tl.minimum(end[None, :] - total, 0.0))
            tl.store(k_out + at, cast(k_end, k_out.dtype.element_ty), column < K)
            last = k0 + tl.arange(0, BLOCK_K)
            tl.store(end_decay + place * K + last, tl.exp(end), last < K)
            for level in tl.static_range(2 if IS_TAME else 6):
                add_a, add_qk = _products(qq, kk, total, C >> level, True, C, BLOCK_K, DOT, PRECISION)
                a += add_a
                qk += add_qk
            if IS_TAME:
                add_a, add_qk = _products(qq, kk, total, B, False, C, BLOCK_K, DOT, PRECISION)
                a += tl.where(row[:, None] > row[None, :], add_a, 0.0)
                qk += tl.where(row[:, None] >= row[None, :], add_qk, 0.0)
            else:
                own += tl.sum(qq * kk, axis=1)
        if not IS_TAME:
            qk = tl.where(row[:, None] == row[None, :], own[:, None], qk)
        beta = sigmoid(tl.load(b + token * b_t + head * b_h, here, 0.0).to(tl.float32))
        square = (place * C + row[:, None]) * C + row[None, :]
        tl.store(within + square, cast(qk, within.dtype.element_ty))
        tl.store(mutual + square, a * tl.where(here, beta, 0.0)[:, None])


@triton.jit
def solve_kernel(
    k, v, f, b, a_log, dt_bias, starts, counts, norms, mutual, w, u,
    k_t, k_h, v_t, v_h, f_t, f_h, b_t, b_h, heads, lower_bound,
    K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, C: tl.constexpr, B: tl.constexpr,
    IS_BOUNDED: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr, SOLVE: tl.constexpr,
):  # fmt: skip
    """Programs (head, chunk slot): `(I + mutual) [w u] = beta [k exp(G), v]`.

    w [C, K] and u [C, V] per slot and head, zero behind the chunk's last token: given the state S that the chunk meets,
    its tokens write u - w S.
    """
    slot, head = tl.program_id(1).to(tl.int64), tl.program_id(0)
    count = tl.load(counts + slot)
    if count > 0:
        row = tl.arange(0, C)
        here = row < count
        token = tl.load(starts + slot).to(tl.int64) + row
        place = slot * heads + head
        k_at = k + token[:, None] * k_t + head * k_h
        f_at = f + token[:, None] * f_t + head * f_h
        v_at = v + token[:, None] * v_t + head * v_h
        block, i = tl.arange(0, C // B)[:, None, None], tl.arange(0, B)
        corner = (block * B + i[None, :, None]) * C + block * B + i[None, None, :]
        off_diagonal = (row // B)[:, None] != (row // B)[None, :]
        blocks = tl.load(mutual + place * C * C + corner)
        rest = tl.load(mutual + (place * C + row[:, None]) * C + row[None, :], off_diagonal, 0.0)
        beta = sigmoid(tl.load(b + token * b_t + head * b_h, here, 0.0).to(tl.float32))
        solve = (_inverse(blocks, rest, C, B, SOLVE) * tl.where(here, beta, 0.0)[None, :]).to(DOT)
        rate = tl.exp(tl.load(a_log + head))
        k_norm = tl.load(norms + place * C + row)
        for k0 in range(0, K, BLOCK_K):
            column = k0 + tl.arange(0, BLOCK_K)[None, :]
            inside = here[:, None] & (column < K)
            kk = tl.load(k_at + column, inside, 0.0).to(tl.float32) * k_norm[:, None]
            g = gate(f_at + column, dt_bias + head * K + column, inside, column < K, rate, lower_bound, IS_BOUNDED)
            value = tl.dot(solve, (kk * tl.exp(tl.cumsum(g, axis=0))).to(DOT), input_precision=PRECISION)
            tl.store(w + (place * C + row[:, None]) * K + column, cast(value, w.dtype.element_ty), column < K)
        for v0 in range(0, V, BLOCK_V):
            column = v0 + tl.arange(0, BLOCK_V)[None, :]
            vv = tl.load(v_at + column, here[:, None] & (column < V), 0.0).to(tl.float32)
            value = tl.dot(solve, vv.to(DOT), input_precision=PRECISION)
            tl.store(u + (place * C + row[:, None]) * V + column, cast(value, u.dtype.element_ty), column < V)


@triton.jit
def scan_kernel(
    w, u, q_in, k_out, within, end_decay, state, out, starts, counts, firsts, heads,
    K: tl.constexpr, V: tl.constexpr, PADDED_K: tl.constexpr, BLOCK_V: tl.constexpr, C: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Programs (value block, head, sequence): walk the chunks of a sequence with its state in registers.

    state [N, H, K, V] float32 is read, and written back at the end. out [T, H, V].
    """
    sequence, head = tl.program_id(2), tl.program_id(1)
    column = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    key, row = tl.arange(0, PADDED_K), tl.arange(0, C)
    known = (key < K)[:, None] & (column < V)[None, :]
    wide = (key < K)[None, :] & (row >= 0)[:, None]
    tall = (column < V)[None, :] & (row >= 0)[:, None]
    home = state + ((sequence.to(tl.int64) * heads + head) * K + key[:, None]) * V + column[None, :]
    s = tl.load(home, known, 0.0)
    first = tl.load(firsts + sequence).to(tl.int64)
    for chunk in range(tl.load(firsts + sequence + 1).to(tl.int32) - first.to(tl.int32)):
        slot = first + chunk
        place = slot * heads + head
        at_k = (place * C + row[:, None]) * K + key[None, :]
        at_v = (place * C + row[:, None]) * V + column[None, :]
        held = s.to(DOT)
        fresh = tl.load(u + at_v, tall, 0.0).to(tl.float32)
        fresh -= tl.dot(tl.load(w + at_k, wide, 0.0).to(DOT), held, input_precision=PRECISION)
        fresh = fresh.to(DOT)
        o = tl.dot(tl.load(q_in + at_k, wide, 0.0).to(DOT), held, input_precision=PRECISION)
        inner = tl.load(within + (place * C + row[:, None]) * C + row[None, :])
        o += tl.dot(inner.to(DOT), fresh, input_precision=PRECISION)
        token = (tl.load(starts + slot).to(tl.int64) + row)[:, None]
        written = tall & (row < tl.load(counts + slot))[:, None]
        tl.store(out + (token * heads + head) * V + column[None, :], cast(o, out.dtype.element_ty), written)
        decay = tl.load(end_decay + place * K + key, key < K, 0.0)
        k_end = tl.trans(tl.load(k_out + at_k, wide, 0.0)).to(DOT)
        s = s * decay[:, None] + tl.dot(k_end, fresh, input_precision=PRECISION)
    tl.store(home, s, known)


class Chunks(NamedTuple):
    """Slots for the chunks of packed sequences, more than there may be chunks, so that no length is read back.

    starts, counts: [slots] int32, the first token of a chunk and its tokens (0: an unused slot). firsts: [N + 1] int32,
    the first slot of each sequence.
    """

    starts: Tensor
    counts: Tensor
    firsts: Tensor


def chunks_of(offsets: Tensor, tokens: int) -> Chunks:
    """Cut sequences at `offsets` [N + 1] (device, integer) of `tokens` in all into chunks."""
    offsets = offsets.to(torch.int64)
    number = offsets.shape[0] - 1
    firsts = torch.zeros_like(offsets)
    torch.cumsum((offsets.diff() + (CHUNK - 1)) // CHUNK, 0, out=firsts[1:])
    slots = torch.arange(tokens // CHUNK + number, device=offsets.device)
    sequence = torch.searchsorted(firsts[1:], slots, right=True).clamp_(max=number - 1)
    starts = offsets[sequence] + (slots - firsts[sequence]) * CHUNK
    counts = (offsets[sequence + 1] - starts).clamp_(0, CHUNK)
    return Chunks(starts.to(torch.int32), counts.to(torch.int32), firsts.to(torch.int32))


@lru_cache(maxsize=64)
def even_chunks(batch: int, time: int, device: torch.device) -> Chunks:
    """The same for `batch` sequences of `time` tokens: all layers of a model share it."""
    return chunks_of(torch.arange(batch + 1, device=device) * time, batch * time)


def kda(
    q: Tensor, k: Tensor, v: Tensor, f: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, state: Tensor,
    *, lower_bound: float | None,
) -> Tensor:  # fmt: skip
    """See the public twin."""
    batch, time = q.shape[:2]
    if time == 1:
        return recurrent(q, k, v, f, b, a_log, dt_bias, state, lower_bound)
    if batch * time == 0:
        return v.new_empty(v.shape)
    flat = (x.flatten(0, 1) for x in (q, k, v, f, b))
    chunks = even_chunks(batch, time, q.device)
    return _chunked(*flat, a_log, dt_bias, state, chunks, lower_bound).unflatten(0, (batch, time))


def kda_packed(
    q: Tensor, k: Tensor, v: Tensor, f: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, state: Tensor,
    offsets: Tensor, *, lower_bound: float | None,
) -> Tensor:  # fmt: skip
    """See the public twin."""
    if q.shape[0] == 0 or state.shape[0] == 0:
        return v.new_empty(v.shape)
    return _chunked(q, k, v, f, b, a_log, dt_bias, state, chunks_of(offsets, q.shape[0]), lower_bound)


def _chunked(
    q: Tensor, k: Tensor, v: Tensor, f: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, state: Tensor,
    chunks: Chunks, lower_bound: float | None,
) -> Tensor:  # fmt: skip
    """Packed tokens: q, k, f [T, H, K], v [T, H, V], b [T, H] -> [T, H, V]."""
    q, k, v, f = (dense_last(x) for x in (q, k, v, f))
    tokens, heads, key_dim = q.shape
    value_dim, slots = v.shape[2], chunks.starts.shape[0]
    work = dot_dtype(v.dtype)

    def room(*sizes: int, dtype: torch.dtype = work) -> Tensor:
        return torch.empty((slots, heads, *sizes), dtype=dtype, device=q.device)

    w, q_in, k_out, u = (room(CHUNK, width) for width in (key_dim, key_dim, key_dim, value_dim))
    within, mutual = room(CHUNK, CHUNK), room(CHUNK, CHUNK, dtype=torch.float32)
    norms, end_decay = room(CHUNK, dtype=torch.float32), room(key_dim, dtype=torch.float32)
    bounded = {"lower_bound": lower_bound or 0.0, "IS_BOUNDED": lower_bound is not None}
    constants = {"C": CHUNK, "DOT": dot_type(v.dtype), "PRECISION": precision()}
    out = torch.empty((tokens, heads, value_dim), dtype=v.dtype, device=q.device)

    def products(options: Options) -> None:
        products_kernel[(heads, slots)](
            q, k, f, b, a_log, dt_bias, chunks.starts, chunks.counts, norms, mutual, within, q_in, k_out, end_decay,
            *(stride for x in (q, k, f, b) for stride in x.stride()[:2]), heads, q_scale=key_dim**-0.5, l2_eps=L2_EPS,
            K=key_dim, B=BLOCK, IS_TAME=is_tame(lower_bound), **bounded, **constants, **options,
        )  # fmt: skip

    def solve(options: Options) -> None:
        solve_kernel[(heads, slots)](
            k, v, f, b, a_log, dt_bias, chunks.starts, chunks.counts, norms, mutual, w, u,
            *(stride for x in (k, v, f, b) for stride in x.stride()[:2]), heads,
            K=key_dim, V=value_dim, B=BLOCK, **bounded, **constants, **options,
        )  # fmt: skip

    def scan(options: Options, state: Tensor = state) -> None:
        scan_kernel[(triton.cdiv(value_dim, options["BLOCK_V"]), heads, state.shape[0])](
            w,
            u,
            q_in,
            k_out,
            within,
            end_decay,
            state,
            out,
            *chunks,
            heads,
            K=key_dim,
            V=value_dim,
            **constants,
            **options,
        )

    shape = (key_dim, value_dim, v.dtype, heads, tuning.bucket(slots))
    tuning.run("kda.products", (*shape, lower_bound is not None), products_options(key_dim, v.dtype), products)
    tuning.run("kda.solve", shape, solve_options(key_dim, value_dim, v.dtype), solve)
    scans = scan_options(key_dim, value_dim, v.dtype)
    scan(tuning.best("kda.scan", (*shape, state.shape[0]), scans, lambda options: scan(options, state.clone())))
    return out


def is_tame(lower_bound: float | None) -> bool:
    """Does the bound of the gate keep both factors finite where a block of 16 tokens is split in its middle?"""
    return lower_bound is not None and -lower_bound * BLOCK <= SAFE_EXPONENT


def products_options(key_dim: int, dtype: torch.dtype) -> list[Options]:
    """Configurations of `products_kernel`."""
    sizes = [(32, 8), (64, 8)]
    if IS_INTERPRETED:
        sizes = [(256, 4)]
    elif gpu() == "sm_80" or dtype == torch.float32:
        sizes = [(16, 8)]
    return [{"BLOCK_K": min(k, power_of_two(key_dim)), "num_warps": warps, "num_stages": 1} for k, warps in sizes]


def solve_options(key_dim: int, value_dim: int, dtype: torch.dtype) -> list[Options]:
    """Configurations of `solve_kernel`. SOLVE: the inverse of a bfloat16 model is rounded to bfloat16 afterwards."""
    sizes = [(256, 4)] if IS_INTERPRETED else [(64, 4), (64, 8)] if dtype == torch.bfloat16 else [(32, 8)]
    return [
        {
            "BLOCK_K": min(widest, power_of_two(key_dim)),
            "BLOCK_V": min(widest, power_of_two(value_dim)),
            "SOLVE": "ieee" if on_hip() else "tf32" if dtype == torch.bfloat16 else "tf32x3",
            "num_warps": warps,
            "num_stages": 1,
        }
        for widest, warps in sizes
    ]


def scan_options(key_dim: int, value_dim: int, dtype: torch.dtype) -> list[Options]:
    """Configurations of `scan_kernel`: value blocks narrow enough for programs to fill a GPU."""
    sizes = [(32, 4, 2), (64, 4, 2), (32, 4, 1), (64, 8, 2)]
    if IS_INTERPRETED:
        sizes = [(256, 4, 1)]
    elif dtype == torch.float32:
        sizes = [(16, 8, 1)]
    elif gpu() not in ("sm_90", "sm_100"):
        sizes = [(32, 4, 1), (64, 4, 1)]
    return [
        {
            "PADDED_K": power_of_two(key_dim),
            "BLOCK_V": min(widest, power_of_two(value_dim)),
            "num_warps": warps,
            "num_stages": stages,
        }
        for widest, warps, stages in sizes
    ]
