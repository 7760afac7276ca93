"""Attention Residuals in Triton: scores, softmax and weighted sum of a token in one pass over its rows.

A row is in registers when its score is known, so it is weighed at once, with a running softmax: every number is read
once. The norm of a row costs one more sum over registers and no memory, so it is computed where it is needed instead of
being kept.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3tool.kernels.lang import IS_INTERPRETED, cast, dense_last


@triton.jit
def mix_blocks_kernel(
    values, query, out, number, time, size, value_n, value_t, eps, BLOCK: tl.constexpr, ROWS: tl.constexpr
):
    """Programs over tokens: out [T, D] from values [N, T, D]."""
    t = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    here = (t < time) & (column < size)
    weights = tl.load(query + column, column < size, 0.0)
    peak = tl.full((ROWS,), float("-inf"), tl.float32)
    mass = tl.zeros((ROWS,), tl.float32)
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    row = values + t * value_t + column
    for _ in range(number):
        x = tl.load(row, here, 0.0).to(tl.float32)
        score = tl.sum(x * weights, axis=1) * tl.rsqrt(tl.sum(x * x, axis=1) / size + eps)
        higher = tl.maximum(peak, score)
        rescale, weight = tl.exp(peak - higher), tl.exp(score - higher)
        mass = mass * rescale + weight
        total = total * rescale[:, None] + x * weight[:, None]
        peak = higher
        row += value_n
    tl.store(out + t * size + column, cast(total / mass[:, None], out.dtype.element_ty), here)


def mix_blocks(values: Tensor, query: Tensor, eps: float) -> Tensor:
    """values [N, T, D], query [D] -> [T, D] in values.dtype. See the public twin."""
    values = dense_last(values)
    number, time, size = values.shape
    out = torch.empty((time, size), dtype=values.dtype, device=values.device)
    if out.numel():
        block = triton.next_power_of_2(size)
        rows = min(max(1, 16384 // block), triton.next_power_of_2(time)) if IS_INTERPRETED else max(1, 1024 // block)
        mix_blocks_kernel[(triton.cdiv(time, rows),)](
            values, query, out, number, time, size, values.stride(0), values.stride(1), eps,
            BLOCK=block, ROWS=rows, num_warps=8 if block >= 4096 else 4,
        )  # fmt: skip
    return out
