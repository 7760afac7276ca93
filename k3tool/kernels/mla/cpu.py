"""Latent attention as compiled CPU code: the absorbed form of one query and head per chunk, straight from the cache.

The cached rows are read twice, in blocks that stay in the first-level cache: for the scores, and for their weighted sum.
Many queries take the expanded form of the torch twin, whose matrix products are the better use of a processor.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from llvmlite import ir
from torch import Tensor

from k3tool.kernels.cpu import pool, rows, target
from k3tool.kernels.cpu.emit import F32, Emitter, Value, vector
from k3tool.kernels.cpu.numeric import exp
from k3tool.kernels.cpu.rows import SIZES, Job, Sums, load, name_of, over, splat, store
from k3tool.kernels.cpu.scratch import Scratch
from k3tool.kernels.mla import reference

BLOCK = 32  # cached tokens whose scores are known at a time
ROWS = 4  # dot products that share the loads of their common factor
VECTORS = 4  # sums over rows that stay in registers
# q, cache and out: steps in bytes. nope + rope is the width of a query, latent + rope that of a cached row.
_FIELDS = (
    "q", "q_token", "q_head", "cache", "cache_step", "kv_b", "out", "heads", "tokens", "total", "nope", "rope",
    "latent", "value", "scale", "scratch", "scratch_bytes",
)  # fmt: skip


@dataclass(frozen=True)
class _Frame:
    """One query and head. Scratch: the query in the latent space [C + R], scores [BLOCK], context [C], float32."""

    e: Emitter
    dtype: str
    stored: str
    lanes: int
    a: dict[str, Value]
    head: Value
    query: Value
    scores: Value
    context: Value

    def weight(self, row: Value) -> Value:
        """Address of a row of this head's kv_b."""
        pairs = self.a["nope"] + self.a["value"]
        return self.a["kv_b"] + (self.head * pairs + row) * self.a["latent"] * SIZES[self.stored]

    def dots(self, dtype: str, starts: list[Value], x: Value, count: Value) -> list[Value]:
        """Dot products of rows in memory with float32 x."""
        sums = [Sums(self.e, self.lanes) for _ in starts]

        def add(index: Value, wide: int) -> None:
            factor = load(self.e, "float32", x + index * 4, wide)
            for start, sum_ in zip(starts, sums, strict=True):
                sum_.add_product(factor, load(self.e, dtype, start + index * SIZES[dtype], wide), wide)

        over(self.e, count, self.lanes, add)
        return [sum_.total() for sum_ in sums]

    def combine(self, dtype: str, start: Value, step: Value, weights: Value, count: Value, initial, finish) -> None:
        """`finish(column, wide, initial(column, wide) + sum_i weights[i] * row_i[column])` over latent columns."""
        e, lanes = self.e, self.lanes

        def some(column: Value, vectors: int, wide: int) -> None:
            sums = [e.variable(initial(column + n * wide, wide)) for n in range(vectors)]
            with e.loop(0, count) as index:
                weight = splat(e, e.load(F32, weights + index * 4), wide)
                row = start + index * step + column * SIZES[dtype]
                for n, sum_ in enumerate(sums):
                    value = load(e, dtype, row + n * wide * SIZES[dtype], wide)
                    sum_.set(e.fma(weight, value, sum_.get()))
            for n, sum_ in enumerate(sums):
                finish(column + n * wide, wide, sum_.get())

        block = VECTORS * lanes
        whole = self.a["latent"] // block * block
        with e.loop(0, whole, block) as column:
            some(column, VECTORS, lanes)
        over(e, self.a["latent"] - whole, lanes, lambda index, wide: some(whole + index, 1, wide))


def _absorb(f: _Frame, q: Value, scale: Value) -> None:
    """The query in the latent space, scaled: `Wk^T q_nope`, then q_rope."""
    e, a, size = f.e, f.a, SIZES[f.dtype]
    scaled = f.scores  # as much scratch as a query needs is kept there
    over(
        e, a["nope"] + a["rope"], f.lanes,
        lambda i, w: e.store(load(e, f.dtype, q + i * size, w) * splat(e, scale, w), scaled + i * 4),
    )  # fmt: skip
    f.combine(
        f.stored, f.weight(e.number(0)), a["latent"] * SIZES[f.stored], scaled, a["nope"],
        lambda column, wide: e.number(0.0, vector(F32, wide) if wide > 1 else F32),
        lambda column, wide, value: e.store(value, f.query + column * 4),
    )  # fmt: skip
    tail = f.query + a["latent"] * 4
    over(
        e, a["rope"], f.lanes,
        lambda i, w: e.store(load(e, "float32", scaled + (a["nope"] + i) * 4, w), tail + i * 4),
    )  # fmt: skip


def _attend(f: _Frame, visible: Value) -> Value:
    """Sums up the visible tokens' latents, weighted by exponentials below the largest score; returns their total."""
    e, a = f.e, f.a
    width = a["latent"] + a["rope"]
    over(
        e, a["latent"], f.lanes,
        lambda i, w: e.store(e.number(0.0, vector(F32, w) if w > 1 else F32), f.context + i * 4),
    )  # fmt: skip
    peak, mass = e.variable(e.number(float("-inf"), F32)), e.variable(e.number(0.0, F32))
    with e.loop(0, visible, BLOCK) as first:
        count = e.smaller(visible - first, e.number(BLOCK))
        start = a["cache"] + first * a["cache_step"]
        before = peak.get()

        def score(index: Value, rows_: int, start: Value = start) -> None:
            starts = [start + (index + n) * a["cache_step"] for n in range(rows_)]
            for n, value in enumerate(f.dots(f.dtype, starts, f.query, width)):
                e.store(value, f.scores + (index + n) * 4)
                peak.set(e.select(value < peak.get(), peak.get(), value))

        over(e, count, ROWS, score)
        rescale = exp(e, before - peak.get())
        mass.set(mass.get() * rescale)
        with e.loop(0, count) as index:
            weight = exp(e, e.load(F32, f.scores + index * 4) - peak.get())
            e.store(weight, f.scores + index * 4)
            mass.set(mass.get() + weight)
        f.combine(
            f.dtype, start, a["cache_step"], f.scores, count,
            lambda column, wide, rescale=rescale: load(e, "float32", f.context + column * 4, wide)
            * splat(e, rescale, wide),
            lambda column, wide, value: e.store(value, f.context + column * 4),
        )  # fmt: skip
    return mass.get()


def _emit(module: ir.Module, dtype: str, stored: str, lanes: int) -> None:
    e = Emitter(module, "absorbed", 4)
    a = rows.arguments(e, _FIELDS)
    first, last = rows.share(e, a["tokens"] * a["heads"])
    own = a["scratch"] + e.params[3] * a["scratch_bytes"]
    with e.loop(first, last) as index:
        token, head = index // a["heads"], index % a["heads"]
        scores = own + (a["latent"] + a["rope"]) * 4
        room = a["nope"] + a["rope"] + BLOCK
        f = _Frame(e, dtype, stored, lanes, a, head, own, scores, scores + room * 4)
        _absorb(f, a["q"] + token * a["q_token"] + head * a["q_head"], rows.float_argument(e, a["scale"]))
        mass = _attend(f, a["total"] - a["tokens"] + token + 1)
        out = a["out"] + index * a["value"] * SIZES[dtype]

        def project(row: Value, count: int, f: _Frame = f, mass: Value = mass, out: Value = out) -> None:
            starts = [f.weight(a["nope"] + row + n) for n in range(count)]
            for n, value in enumerate(f.dots(stored, starts, f.context, a["latent"])):
                store(e, dtype, value / mass, out + (row + n) * SIZES[dtype])

        over(e, a["value"], ROWS, project)
    e.finish()


class _Compiled:
    def __init__(self, dtype: str, stored: str) -> None:
        machine = target.host()
        module = ir.Module(name=f"k3tool.mla.{dtype}.{stored}")
        _emit(module, dtype, stored, machine.float_lanes)
        self.job = Job(target.Library(module, machine), "absorbed", _FIELDS)
        self.scratch = Scratch()


@cache
def _compiled(dtype: str, stored: str) -> _Compiled:
    return _Compiled(dtype, stored)


def mla(q: Tensor, cache: Tensor, kv_b: Tensor, *, key_dim: int) -> Tensor:
    """See the public twin."""
    batch, time, heads, width = q.shape
    if time > reference.ABSORBED_QUERIES or kv_b.dtype not in (torch.bfloat16, torch.float32) or q.numel() == 0:
        return reference.mla(q, cache, kv_b, key_dim=key_dim)
    pairs, latent = kv_b.shape[1:]
    q, cache, kv_b = rows.dense_rows(q), rows.dense_rows(cache), kv_b.contiguous()
    out = torch.empty(batch, time, heads, pairs - key_dim, dtype=q.dtype)
    size, total = q.element_size(), cache.shape[1]
    compiled = _compiled(name_of(q.dtype), name_of(kv_b.dtype))
    threads = pool.shared().threads
    work = pairs * latent + 2 * total * cache.shape[2]
    chunks = 1 if threads == 1 or time * heads * work < 65536 else min(time * heads, pool.MAX_CHUNKS)
    scratch_bytes = 4 * (2 * cache.shape[2] + width + BLOCK + 16)
    with compiled.scratch.lock:
        scratch = compiled.scratch.address("threads", scratch_bytes * threads)
        for index in range(batch):
            compiled.job.run(
                chunks, q[index].data_ptr(), q.stride(1) * size, q.stride(2) * size, cache[index].data_ptr(),
                cache.stride(1) * size, kv_b.data_ptr(), out[index].data_ptr(), heads, time, total, key_dim,
                width - key_dim, latent, pairs - key_dim, rows.float_bits(width**-0.5), scratch, scratch_bytes, total=1,
            )  # fmt: skip
    return out
