"""Attention Residuals as compiled CPU code: the snapshots of a token are read twice and nothing is widened in memory."""

from __future__ import annotations

from functools import cache

import torch
from llvmlite import ir
from torch import Tensor

from k3tool.kernels.attn_res import reference
from k3tool.kernels.cpu import target
from k3tool.kernels.cpu.emit import F32, Emitter, Value, vector
from k3tool.kernels.cpu.numeric import exp
from k3tool.kernels.cpu.rows import (
    SIZES,
    Job,
    Sums,
    arguments,
    chunks_for,
    dense_rows,
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

MOST_VALUES = 512  # snapshots that the scratch for scores holds
_FIELDS = ("values", "value_step", "token_step", "query", "out", "count", "tokens", "width", "eps")


def _emit(module: ir.Module, dtype: str, lanes: int) -> None:
    e = Emitter(module, "mix", 4)
    a = arguments(e, _FIELDS)
    size = SIZES[dtype]
    scores = e.stack(4 * MOST_VALUES)
    first, last = share(e, a["tokens"])
    with e.loop(first, last) as token:
        values = a["values"] + token * a["token_step"]
        total = _emit_weights(e, a, dtype, values, scores, lanes)
        out = a["out"] + token * a["width"] * size

        def write(index: Value, wide: int, values: Value = values, out: Value = out, total: Value = total) -> None:
            zero = e.number(0.0, vector(F32, wide) if wide > 1 else F32)
            mixed = e.variable(zero)
            with e.loop(0, a["count"]) as n:
                weight = e.load(F32, scores + n * 4) / total
                value = load(e, dtype, values + n * a["value_step"] + index * size, wide)
                mixed.set(e.fma(value, splat(e, weight, wide), mixed.get()))
            store(e, dtype, mixed.get(), out + index * size)

        over(e, a["width"], lanes, write)
    e.finish()


def _emit_weights(e: Emitter, a: dict[str, Value], dtype: str, values: Value, scores: Value, lanes: int) -> Value:
    """Exponentials of one token's scores below their maximum, into `scores`; returns their sum."""
    size = SIZES[dtype]
    most = e.variable(e.number(float("-inf"), F32))
    with e.loop(0, a["count"]) as n:
        dot, square = Sums(e, lanes), Sums(e, lanes)
        row = values + n * a["value_step"]

        def add(index: Value, wide: int, row: Value = row, dot: Sums = dot, square: Sums = square) -> None:
            value = load(e, dtype, row + index * size, wide)
            dot.add_product(value, load(e, "float32", a["query"] + index * 4, wide), wide)
            square.add_product(value, value, wide)

        over(e, a["width"], lanes, add)
        score = dot.total() / root(e, square.total() / to_float(e, a["width"]) + float_argument(e, a["eps"]))
        e.store(score, scores + n * 4)
        most.set(e.select(score < most.get(), most.get(), score))
    total = e.variable(e.number(0.0, F32))
    with e.loop(0, a["count"]) as n:
        weight = exp(e, e.load(F32, scores + n * 4) - most.get())
        e.store(weight, scores + n * 4)
        total.set(total.get() + weight)
    return total.get()


@cache
def _job(dtype: str) -> Job:
    machine = target.host()
    module = ir.Module(name=f"k3tool.attn_res.{dtype}")
    _emit(module, dtype, machine.float_lanes)
    return Job(target.Library(module, machine), "mix", _FIELDS)


def mix_blocks(values: Tensor, query: Tensor, eps: float) -> Tensor:
    """values [N, T, D], query [D] -> [T, D] in values.dtype. See the public twin."""
    count, tokens, width = values.shape
    if count > MOST_VALUES or values.numel() == 0:
        return reference.mix_blocks(values, query, eps)
    values, query = dense_rows(values), dense_rows(query)
    out = torch.empty(tokens, width, dtype=values.dtype)
    size = values.element_size()
    _job(name_of(values.dtype)).run(
        chunks_for(tokens, count * width), values.data_ptr(), values.stride(0) * size, values.stride(1) * size,
        query.data_ptr(), out.data_ptr(), count, tokens, width, float_bits(eps),
    )  # fmt: skip
    return out
