"""Routing as compiled CPU code: scores, the best experts one after the other, weights. One token a chunk."""

from __future__ import annotations

from functools import cache

import torch
from llvmlite import ir
from torch import Tensor

from k3tool.kernels.cpu import pool, target
from k3tool.kernels.cpu.emit import F32, Emitter, Value, vector
from k3tool.kernels.cpu.numeric import exp, sigmoid
from k3tool.kernels.cpu.rows import Job, arguments, chunks_for, float_argument, float_bits, over, share
from k3tool.kernels.cpu.scratch import Scratch
from k3tool.kernels.router import reference

MOST_EXPERTS = 4096
_FIELDS = (
    "logits", "bias", "ids", "weights", "tokens", "experts", "top_k", "has_bias", "softmax", "renormalize", "factor",
    "scratch", "scratch_bytes",
)  # fmt: skip


def _emit(module: ir.Module, lanes: int) -> None:
    """Scratch of a thread: scores, then biased scores [experts], of which each expert taken becomes -infinity."""
    e = Emitter(module, "select", 4)
    a = arguments(e, _FIELDS)
    first, last = share(e, a["tokens"])
    scores = a["scratch"] + e.params[3] * a["scratch_bytes"]
    choice = scores + a["experts"] * 4
    with e.loop(first, last) as token:
        logits = a["logits"] + token * a["experts"] * 4
        _emit_scores(e, a, logits, scores, choice, lanes)
        ids, weights = a["ids"] + token * a["top_k"] * 8, a["weights"] + token * a["top_k"] * 4
        total = e.variable(e.number(0.0, F32))
        with e.loop(0, a["top_k"]) as slot:
            best = _emit_best(e, choice, a["experts"], lanes)
            e.store(e.number(float("-inf"), F32), choice + best * 4)
            score = e.load(F32, scores + best * 4)
            e.store(best, ids + slot * 8)
            e.store(score, weights + slot * 4)
            total.set(total.get() + score)
        alone = e.number(1.0, F32)
        divisor = e.select((a["renormalize"] > 0) & (a["top_k"] > 1), total.get() + 1e-20, alone)
        factor = float_argument(e, a["factor"])
        with e.loop(0, a["top_k"]) as slot:
            e.store(e.load(F32, weights + slot * 4) / divisor * factor, weights + slot * 4)
    e.finish()


def _emit_scores(e: Emitter, a: dict[str, Value], logits: Value, scores: Value, choice: Value, lanes: int) -> None:
    def wide_or_one(wide: int) -> ir.Type:
        return vector(F32, wide) if wide > 1 else F32

    is_softmax = a["softmax"] > 0
    with e.when(is_softmax):
        most = e.variable(e.number(float("-inf"), F32))
        with e.loop(0, a["experts"]) as index:
            value = e.load(F32, logits + index * 4)
            most.set(e.select(value > most.get(), value, most.get()))
        mass = e.variable(e.number(0.0, F32))
        with e.loop(0, a["experts"]) as index:
            value = exp(e, e.load(F32, logits + index * 4) - most.get())
            e.store(value, scores + index * 4)
            mass.set(mass.get() + value)
        with e.loop(0, a["experts"]) as index:
            e.store(e.load(F32, scores + index * 4) / mass.get(), scores + index * 4)
    with e.otherwise(is_softmax):

        def score(index: Value, wide: int) -> None:
            e.store(sigmoid(e, e.load(wide_or_one(wide), logits + index * 4)), scores + index * 4)

        over(e, a["experts"], lanes, score)

    def bias(index: Value, wide: int) -> None:
        biased = e.variable(e.load(wide_or_one(wide), scores + index * 4))
        with e.when(a["has_bias"] > 0):
            biased.set(biased.get() + e.load(wide_or_one(wide), a["bias"] + index * 4))
        e.store(biased.get(), choice + index * 4)

    over(e, a["experts"], lanes, bias)


def _emit_best(e: Emitter, choice: Value, experts: Value, lanes: int) -> Value:
    """The first expert with the largest choice. Scores that are not numbers lose; if all are, the first expert wins."""
    best, most = e.variable(e.number(0)), e.variable(e.number(float("-inf"), F32))
    with e.loop(0, experts) as index:
        value = e.load(F32, choice + index * 4)
        with e.when(value > most.get()):
            best.set(index)
            most.set(value)
    return best.get()


class _Compiled:
    def __init__(self) -> None:
        machine = target.host()
        module = ir.Module(name="k3tool.router")
        _emit(module, machine.float_lanes)
        self.job, self.scratch = Job(target.Library(module, machine), "select", _FIELDS), Scratch()


@cache
def _compiled() -> _Compiled:
    return _Compiled()


def select_experts(
    logits: Tensor,
    bias: Tensor | None,
    top_k: int,
    activation: str,
    renormalize: bool,
    scaling_factor: float,
    num_groups: int,
    topk_groups: int,
) -> tuple[Tensor, Tensor]:
    """logits [T, E] float32 -> ids [T, top_k] int64, weights [T, top_k] float32. See the public twin."""
    tokens, experts = logits.shape
    if topk_groups < num_groups or experts > MOST_EXPERTS or tokens == 0 or logits.dtype != torch.float32:
        return reference.select_experts(
            logits, bias, top_k, activation, renormalize, scaling_factor, num_groups, topk_groups
        )
    logits = logits.contiguous()
    bias = None if bias is None else bias.contiguous()
    ids, weights = torch.empty(tokens, top_k, dtype=torch.int64), torch.empty(tokens, top_k, dtype=torch.float32)
    compiled = _compiled()
    with compiled.scratch.lock:
        scratch = compiled.scratch.address("threads", 8 * experts * pool.shared().threads)
        compiled.job.run(
            chunks_for(tokens, top_k * experts), logits.data_ptr(), 0 if bias is None else bias.data_ptr(),
            ids.data_ptr(), weights.data_ptr(), tokens, experts, top_k, bias is not None, activation == "softmax",
            renormalize, float_bits(scaling_factor), scratch, 8 * experts,
        )  # fmt: skip
    return ids, weights
