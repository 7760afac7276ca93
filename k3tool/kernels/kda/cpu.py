"""KDA as compiled CPU code: the recurrence itself, a head per chunk.

On a processor the chunked form saves no arithmetic: a column of the state depends on no other column, so a few columns
stay in the first-level cache (or in registers) while all tokens pass. Each number of the state is read and written
once per token: the pass that updates it also sums what this token reads and what the next one is going to predict.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from llvmlite import ir
from torch import Tensor

from k3tool.kernels.conv.cpu import emit_channels
from k3tool.kernels.cpu import pool, target
from k3tool.kernels.cpu.emit import F32, Emitter, Value, Variable, vector
from k3tool.kernels.cpu.numeric import exp, sigmoid
from k3tool.kernels.cpu.rows import (
    SIZES,
    Job,
    Sums,
    arguments,
    float_argument,
    float_bits,
    load,
    name_of,
    over,
    root,
    share,
    splat,
    store,
    to_float,
)
from k3tool.kernels.cpu.scratch import Scratch
from k3tool.kernels.kda import reference
from k3tool.kernels.norm.cpu import inverse_rms

TOKENS = 64  # that pass together: what is prepared for them stays cached
VECTORS = 2  # columns of the state that stay in registers, in vectors
_TABLES = ("decay", "write", "query", "predict")  # prepared per token, [TOKENS + 1][K] float32 each
_HEAD = (
    "a_log",
    "dt_bias",
    "state",
    "heads",
    "key_dim",
    "value_dim",
    "tokens",
    "lower_bound",
    "bounded",
    "scratch",
    "scratch_bytes",
    "f",
    "f_step",
    "b",
    "b_step",
)
_PREFILL = (*_HEAD, "q", "q_step", "k", "k_step", "v", "v_step", "out", "out_step")
_DECODE = (*_HEAD, "x", "x_step", "weight", "history", "channels", "gate", "norm_weight", "eps", "out")


@dataclass(frozen=True)
class _Frame:
    """One function being written, for one head. `qkv`: addresses of its first token's q, k, v and their steps.
    `single`: there is exactly one token."""

    e: Emitter
    dtype: str
    lanes: int
    a: dict[str, Value]
    head: Value
    thread_scratch: Value
    qkv: tuple[tuple[Value, Value], ...]
    out: tuple[Value, Value]
    single: bool

    def table(self, name: str, token: Value) -> Value:
        """Address of what was prepared for a token."""
        place = _TABLES.index(name) * (TOKENS + 1)
        return self.thread_scratch + (token + place) * self.a["key_dim"] * 4

    @property
    def columns(self) -> Value:
        """Address of the state's columns while many tokens pass."""
        return self.thread_scratch + self.a["key_dim"] * (4 * len(_TABLES) * (TOKENS + 1))


def scratch_size(key_dim: int, lanes: int) -> int:
    return 4 * key_dim * (len(_TABLES) * (TOKENS + 1) + VECTORS * lanes)


def _prepare(f: _Frame, token: Value) -> None:
    """The tables of one token: exp(g), beta k, scaled q, and exp(g) k, from normalized q and k."""
    e, a, size = f.e, f.a, SIZES[f.dtype]
    q, k = (start + token * step for start, step in f.qkv[:2])
    dim = a["key_dim"]
    squares = [Sums(e, f.lanes) for _ in range(2)]

    def add(index: Value, wide: int) -> None:
        for start, sums in zip((q, k), squares, strict=True):
            value = load(e, f.dtype, start + index * size, wide)
            sums.add_product(value, value, wide)

    over(e, dim, f.lanes, add)
    one = e.number(1.0, F32)
    q_scale, k_scale = (one / root(e, sums.total() + reference.L2_EPS) for sums in squares)
    q_scale = q_scale / root(e, to_float(e, dim))
    beta = sigmoid(e, load(e, f.dtype, a["b"] + token * a["b_step"] + f.head * size, 1))
    rate = exp(e, e.load(F32, a["a_log"] + f.head * 4))
    logits = a["f"] + token * a["f_step"]
    bias = a["dt_bias"] + f.head * dim * 4
    bound = float_argument(e, a["lower_bound"])
    bounded = a["bounded"] > 0

    def write(index: Value, wide: int) -> None:
        # Without a bound `f` holds log decays already, as float32.
        place = f.head * dim + index
        g = e.variable(e.number(0.0, vector(F32, wide) if wide > 1 else F32))
        with e.when(bounded):
            z = load(e, f.dtype, logits + place * size, wide) + load(e, "float32", bias + index * 4, wide)
            g.set(splat(e, bound, wide) * sigmoid(e, z * splat(e, rate, wide)))
        with e.otherwise(bounded):
            g.set(load(e, "float32", logits + place * 4, wide))
        decay = exp(e, g.get())
        key = load(e, f.dtype, k + index * size, wide) * splat(e, k_scale, wide)
        query = load(e, f.dtype, q + index * size, wide) * splat(e, q_scale, wide)
        for name, value in (
            ("decay", decay),
            ("write", key * splat(e, beta, wide)),
            ("query", query),
            ("predict", key * decay),
        ):
            e.store(value, f.table(name, token) + index * 4)

    over(e, dim, f.lanes, write)


def _pass_columns(f: _Frame, column: Value, vectors: int, lanes: int) -> None:
    """All tokens through `vectors` vectors of the state's columns from `column` on."""
    e, a = f.e, f.a
    home = a["state"] + (f.head * a["key_dim"] * a["value_dim"] + column) * 4
    home_step = a["value_dim"] * 4
    # For many tokens the columns move to dense memory: at home they lie a row of the state apart.
    place, step = (home, home_step) if f.single else (f.columns, e.number(4 * vectors * lanes))
    block = _Block(f, column, vectors, lanes, place, step)
    seen = block.first_prediction(home, home_step)
    with e.loop(0, e.number(1) if f.single else a["tokens"]) as token:
        block.token(token, seen)
    if not f.single:
        with e.loop(0, a["key_dim"]) as row:
            for n in block.each:
                e.store(e.load(block.wide, block.at(row, n)), home + row * home_step + 4 * lanes * n)


class _Block:
    """A few columns of one head's state: row r of them lies at place + r * step."""

    def __init__(self, f: _Frame, column: Value, vectors: int, lanes: int, place: Value, step: Value) -> None:
        self.f, self.column, self.lanes, self.place, self.step = f, column, lanes, place, step
        self.each = range(vectors)
        self.wide = vector(F32, lanes) if lanes > 1 else F32

    def at(self, row: Value, n: int) -> Value:
        return self.place + row * self.step + 4 * self.lanes * n

    def _sums(self) -> list[Variable]:
        return [self.f.e.variable(self.f.e.number(0.0, self.wide)) for _ in self.each]

    def first_prediction(self, home: Value, home_step: Value) -> list[Variable]:
        """What the state predicts for the first token; brings the columns from home on the way."""
        f, e = self.f, self.f.e
        seen = self._sums()
        with e.loop(0, f.a["key_dim"]) as row:
            predict = splat(e, e.load(F32, f.table("predict", e.number(0)) + row * 4), self.lanes)
            for n in self.each:
                value = e.load(self.wide, home + row * home_step + 4 * self.lanes * n)
                seen[n].set(e.fma(predict, value, seen[n].get()))
                if not f.single:
                    e.store(value, self.at(row, n))
        return seen

    def token(self, token: Value, seen: list[Variable]) -> None:
        """Update the columns, sum what the token reads, and what they predict for the next one."""
        f, e, size = self.f, self.f.e, SIZES[self.f.dtype]
        v, v_step = f.qkv[2]
        places = [(self.column + n * self.lanes) * size for n in self.each]
        update = [
            load(e, f.dtype, v + token * v_step + place, self.lanes) - seen[n].get() for n, place in enumerate(places)
        ]
        # Two sums each, for even and odd rows: one chain of additions would be slower than the memory.
        outs, nexts = ([self._sums(), self._sums()] for _ in range(2))
        tables = [f.table(name, token) for name in _TABLES[:3]]
        if not f.single:
            tables.append(f.table("predict", token + 1))

        def row_step(row: Value, turn: int) -> None:
            decay, write, query, *predict = (splat(e, e.load(F32, table + row * 4), self.lanes) for table in tables)
            for n in self.each:
                value = e.fma(write, update[n], decay * e.load(self.wide, self.at(row, n)))
                e.store(value, self.at(row, n))
                outs[turn][n].set(e.fma(query, value, outs[turn][n].get()))
                if predict:
                    nexts[turn][n].set(e.fma(predict[0], value, nexts[turn][n].get()))

        dim = f.a["key_dim"]
        whole = dim // 2 * 2
        with e.loop(0, whole, 2) as row:
            row_step(row, 0)
            row_step(row + 1, 1)
        with e.loop(whole, dim) as row:
            row_step(row, 0)
        for n, place in enumerate(places):
            store(e, f.dtype, outs[0][n].get() + outs[1][n].get(), f.out[0] + token * f.out[1] + place)
            seen[n].set(nexts[0][n].get() + nexts[1][n].get())


def _emit_head(f: _Frame) -> None:
    """The recurrence of one head over at most TOKENS tokens."""
    e, dim = f.e, f.a["key_dim"]
    if f.single:
        _prepare(f, e.number(0))
    else:
        with e.loop(0, f.a["tokens"]) as token:
            _prepare(f, token)
        last = f.table("predict", f.a["tokens"])  # nothing is predicted for the token after the last
        over(e, dim, f.lanes, lambda i, w: e.store(e.number(0.0, vector(F32, w) if w > 1 else F32), last + i * 4))
    block = VECTORS * f.lanes
    whole = f.a["value_dim"] // block * block
    with e.loop(0, whole, block) as column:
        _pass_columns(f, column, VECTORS, f.lanes)
    over(e, f.a["value_dim"] - whole, f.lanes, lambda i, w: _pass_columns(f, whole + i, 1, w))


def _emit_prefill(module: ir.Module, dtype: str, lanes: int) -> None:
    e = Emitter(module, "prefill", 4)
    a, size = arguments(e, _PREFILL), SIZES[dtype]
    first, last = share(e, a["heads"])
    with e.loop(first, last) as head:
        widths = (a["key_dim"], a["key_dim"], a["value_dim"])
        qkv = tuple((a[s] + head * width * size, a[f"{s}_step"]) for s, width in zip("qkv", widths, strict=True))
        out = a["out"] + head * a["value_dim"] * size, a["out_step"]
        scratch = a["scratch"] + e.params[3] * a["scratch_bytes"]
        _emit_head(_Frame(e, dtype, lanes, a, head, scratch, qkv, out, False))
    e.finish()


def _emit_decode(module: ir.Module, dtype: str, lanes: int, taps: int) -> None:
    """One token from its projections to what o_proj reads; K = V."""
    e = Emitter(module, "decode", 4)
    a, size = arguments(e, _DECODE), SIZES[dtype]
    dim = a["key_dim"]
    first, last = share(e, a["heads"])
    with e.loop(first, last) as head:
        scratch = a["scratch"] + e.params[3] * a["scratch_bytes"]
        own = scratch + dim * (4 * (len(_TABLES) * (TOKENS + 1) + VECTORS * lanes))  # q, k, v and o of this head
        for stream in range(3):
            start = a["heads"] * dim * stream + head * dim
            place = own + dim * (stream * size)
            emit_channels(e, dtype, lanes, taps, a, (start, start + dim), place, e.number(0))
        zero, o = e.number(0), own + dim * (3 * size)
        qkv = tuple((own + dim * (stream * size), zero) for stream in range(3))
        _emit_head(_Frame(e, dtype, lanes, a, head, scratch, qkv, (o, zero), True))
        scale = inverse_rms(e, dtype, o, dim, float_argument(e, a["eps"]), lanes)

        def write(index: Value, wide: int, head: Value = head, o: Value = o, scale: Value = scale) -> None:
            place = (head * dim + index) * size
            value = load(e, dtype, o + index * size, wide) * splat(e, scale, wide)
            value = value * load(e, "float32", a["norm_weight"] + index * 4, wide)
            store(e, dtype, value * sigmoid(e, load(e, dtype, a["gate"] + place, wide)), a["out"] + place)

        over(e, dim, lanes, write)
    e.finish()


class _Compiled:
    """The recurrence, or with the `taps` of a convolution the whole of one decode step, and its working memory."""

    def __init__(self, dtype: str, taps: int | None) -> None:
        machine = target.host()
        self.lanes, self.scratch = machine.float_lanes, Scratch()
        module = ir.Module(name=f"k3tool.kda.{dtype}.{taps or 'prefill'}")
        if taps is None:
            _emit_prefill(module, dtype, self.lanes)
            self.job = Job(target.Library(module, machine), "prefill", _PREFILL)
        else:
            _emit_decode(module, dtype, self.lanes, taps)
            self.job = Job(target.Library(module, machine), "decode", _DECODE)

    def working_memory(self, size: int) -> tuple[int, int]:
        """Address, and bytes of each thread. The caller holds the lock of `scratch`."""
        return self.scratch.address("threads", size * pool.shared().threads), size


@cache
def _compiled(dtype: str, taps: int | None = None) -> _Compiled:
    return _Compiled(dtype, taps)


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
    batch, time, heads, key_dim = q.shape
    out = torch.empty(v.shape, dtype=v.dtype)
    f = _logits(f, a_log, dt_bias, lower_bound, v.dtype)
    (q, k, v, f), b = (_token_rows(x) for x in (q, k, v, f)), _token_rows(b.to(v.dtype))
    compiled = _compiled(name_of(v.dtype))
    chunks = _chunks(heads, key_dim * v.shape[-1] * time)
    with compiled.scratch.lock:
        scratch = compiled.working_memory(scratch_size(key_dim, compiled.lanes))
        for index in range(batch if out.numel() else 0):
            for first in range(0, time, TOKENS):
                rows = [(x[index, first].data_ptr(), x.stride(1) * x.element_size()) for x in (f, b, q, k, v, out)]
                compiled.job.run(
                    chunks, a_log.data_ptr(), dt_bias.data_ptr(), state[index].data_ptr(), heads, key_dim,
                    v.shape[-1], min(TOKENS, time - first), float_bits(lower_bound or 0.0), lower_bound is not None,
                    *scratch, *(number for row in rows for number in row),
                )  # fmt: skip
    return out


def _logits(f: Tensor, a_log: Tensor, dt_bias: Tensor, lower_bound: float | None, dtype: torch.dtype) -> Tensor:
    """What the compiled code reads as f: the logits in `dtype`, or without a bound log decays in float32."""
    if lower_bound is None:
        return reference.log_decay(f, a_log, dt_bias, None)
    return f.to(dtype)


def _token_rows(x: Tensor) -> Tensor:
    """[B, T, ...] with everything of one token dense; a copy only where it is not."""
    dense = x[:1, :1].is_contiguous() if x.numel() else True
    return x if dense else x.contiguous()


def _chunks(heads: int, work: int) -> int:
    return 1 if pool.shared().threads == 1 or heads * work < 32768 else min(heads, pool.MAX_CHUNKS)


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
    batch, heads, dim, _ = state.shape
    out = torch.empty(batch, heads, dim, dtype=x.dtype)
    f = _logits(f, a_log, dt_bias, lower_bound, x.dtype)
    x, f, b, gate = (_sequence_rows(tensor) for tensor in (x, f, b.to(x.dtype), gate.to(x.dtype)))
    conv_weight, norm_weight = conv_weight.contiguous(), norm_weight.contiguous()
    own = history if history.is_contiguous() else history.contiguous()
    compiled = _compiled(name_of(x.dtype), conv_weight.shape[0])
    chunks = _chunks(heads, dim * dim)
    with compiled.scratch.lock:
        scratch = compiled.working_memory(scratch_size(dim, compiled.lanes) + 4 * dim * x.element_size())
        for index in range(batch):
            compiled.job.run(
                chunks, a_log.data_ptr(), dt_bias.data_ptr(), state[index].data_ptr(), heads, dim, dim, 1,
                float_bits(lower_bound or 0.0), lower_bound is not None, *scratch, f[index].data_ptr(), 0,
                b[index].data_ptr(), 0, x[index].data_ptr(), 0, conv_weight.data_ptr(), own[index].data_ptr(),
                conv_weight.shape[1], gate[index].data_ptr(), norm_weight.data_ptr(), float_bits(eps),
                out[index].data_ptr(),
            )  # fmt: skip
    if own is not history:
        history.copy_(own)
    return out


def _sequence_rows(x: Tensor) -> Tensor:
    """[B, ...] with everything of one sequence dense; a copy only where it is not."""
    return x if x[:1].is_contiguous() else x.contiguous()
