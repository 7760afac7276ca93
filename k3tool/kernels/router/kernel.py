"""Routing in Triton: scores of a token in registers, its experts taken one after the other.

A score and its expert are one integer (the score's bits in order, then the expert counted from the end), so that taking
the best is one maximum, ties go to the lower expert, and even scores that are no numbers leave ids within range.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3tool.kernels.lang import IS_INTERPRETED, dense_last, sigmoid


@triton.jit
def _ordered(score, position, END: tl.constexpr):
    """int64 that orders like the float32 score, then by falling position below END; at least 1."""
    bits = score.to(tl.int32, bitcast=True)
    # Floats order like their bits where positive, and the other way round where negative.
    rank = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64) + 0x80000001
    return rank * END + (END - 1 - position)


@triton.jit
def _within_best_groups(
    choice, column, taken, experts, GROUPS: tl.constexpr, KEPT: tl.constexpr, ROWS: tl.constexpr, PADDED: tl.constexpr
):
    """Which experts lie in the KEPT groups with the largest sum of their two best scores: [ROWS, experts]."""
    size = experts // GROUPS
    groups = tl.arange(0, PADDED)[None, :]
    sums = tl.full((ROWS, PADDED), float("-inf"), tl.float32)
    for group in tl.static_range(GROUPS):
        own = tl.where(taken & (column // size == group), choice, float("-inf"))
        first = tl.max(own, axis=1)
        at = tl.argmax(own, axis=1)
        second = tl.max(tl.where(column == at[:, None], float("-inf"), own), axis=1)
        sums = tl.where(groups == group, (first + tl.where(second == float("-inf"), 0.0, second))[:, None], sums)
    keys = tl.where(groups < GROUPS, _ordered(sums, groups, PADDED), 0)
    inside = column < 0
    for _ in tl.static_range(KEPT):
        best = tl.max(keys, axis=1)
        group = PADDED - 1 - (best % PADDED)
        inside = inside | (column // size == group[:, None])
        keys = tl.where(groups == group[:, None], 0, keys)
    return inside & taken


@triton.jit
def select_experts_kernel(
    logits, bias, ids, weights, rows, experts, logit_stride, scaling_factor,
    TOP_K: tl.constexpr, PADDED_K: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr,
    PADDED_GROUPS: tl.constexpr, KEPT: tl.constexpr, HAS_BIAS: tl.constexpr, IS_SIGMOID: tl.constexpr,
    RENORMALIZE: tl.constexpr,
):  # fmt: skip
    """Programs over tokens: ids [T, TOP_K] int64 and weights [T, TOP_K] float32."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    known = (row < rows) & (column < experts)
    logit = tl.load(logits + row * logit_stride + column, known, float("-inf"))
    if IS_SIGMOID:
        scores = sigmoid(logit)
    else:
        power = tl.exp(logit - tl.max(tl.where(row < rows, logit, 0.0), axis=1)[:, None])
        scores = power / tl.sum(tl.where(row < rows, power, 1.0), axis=1)[:, None]
    choice = scores
    if HAS_BIAS:
        choice = scores + tl.load(bias + column, column < experts, 0.0)
    taken = column < experts
    if KEPT < GROUPS:
        taken = _within_best_groups(choice, column, taken, experts, GROUPS, KEPT, ROWS, PADDED_GROUPS)
    keys = tl.where(taken, _ordered(choice, column, BLOCK), 0)
    slot = tl.arange(0, PADDED_K)[None, :]
    chosen = tl.zeros((ROWS, PADDED_K), tl.int64)
    weight = tl.zeros((ROWS, PADDED_K), tl.float32)
    for k in tl.static_range(TOP_K):
        expert = BLOCK - 1 - (tl.max(keys, axis=1) % BLOCK)
        is_it = column == expert[:, None]
        keys = tl.where(is_it, 0, keys)
        chosen = tl.where(slot == k, expert[:, None], chosen)
        weight = tl.where(slot == k, tl.sum(tl.where(is_it, scores, 0.0), axis=1)[:, None], weight)
    if RENORMALIZE:
        weight = weight / (tl.sum(weight, axis=1)[:, None] + 1e-20)
    out = row * TOP_K + slot
    tl.store(ids + out, chosen, (row < rows) & (slot < TOP_K))
    tl.store(weights + out, weight * scaling_factor, (row < rows) & (slot < TOP_K))


def select_experts(
    logits: Tensor, bias: Tensor | None, top_k: int, activation: str, renormalize: bool, scaling_factor: float,
    num_groups: int, topk_groups: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """logits [T, E] float32 -> ids [T, top_k] int64, weights [T, top_k] float32. See the public twin."""
    logits = dense_last(logits)
    rows, experts = logits.shape
    ids = torch.empty((rows, top_k), dtype=torch.int64, device=logits.device)
    weights = torch.empty((rows, top_k), dtype=torch.float32, device=logits.device)
    if rows:
        block = triton.next_power_of_2(experts)
        at_once = min(64, triton.next_power_of_2(rows)) if IS_INTERPRETED else 1
        select_experts_kernel[(triton.cdiv(rows, at_once),)](
            logits, logits if bias is None else bias, ids, weights, rows, experts, logits.stride(0), scaling_factor,
            TOP_K=top_k, PADDED_K=triton.next_power_of_2(top_k), BLOCK=block, ROWS=at_once, GROUPS=num_groups,
            PADDED_GROUPS=triton.next_power_of_2(num_groups), KEPT=topk_groups, HAS_BIAS=bias is not None,
            IS_SIGMOID=activation == "sigmoid", RENORMALIZE=renormalize and top_k > 1, num_warps=4 if block >= 512 else 1,
        )  # fmt: skip
    return ids, weights
