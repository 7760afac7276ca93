"""Norms in Triton: a program normalizes some rows, each read once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3tool.kernels.lang import IS_INTERPRETED, cast, dense_last, rounded, sigmoid

ELEMENTS = 65536 if IS_INTERPRETED else 8192  # of one program


@triton.jit
def rms_norm_kernel(
    x, gate, weight, out, rows, inner, x_outer, x_inner, gate_outer, gate_inner, eps, size,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """out [rows, size]: `round(x / rms) * weight`, or with a gate `x / rms * weight * sigmoid(gate)` rounded once.

    Row r of x begins at `r // inner * x_outer + r % inner * x_inner`.
    """
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    here = (row < rows) & (column < size)
    h = tl.load(x + row // inner * x_outer + row % inner * x_inner + column, here, 0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(h * h, axis=1) / size + eps)
    w = tl.load(weight + column, column < size, 0.0)
    if GATED:
        g = tl.load(gate + row // inner * gate_outer + row % inner * gate_inner + column, here, 0.0).to(tl.float32)
        h = h * scale[:, None] * w * sigmoid(g)
    else:
        h = rounded(h * scale[:, None], x.dtype.element_ty) * w
    tl.store(out + row * size + column, cast(h, out.dtype.element_ty), here)


@triton.jit
def l2_normalize_kernel(x, out, rows, x_stride, eps, size, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    here = (row < rows) & (column < size)
    h = tl.load(x + row * x_stride + column, here, 0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(h * h, axis=1) + eps)
    tl.store(out + row * size + column, h * scale[:, None], here)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., D], weight [D] float32 -> x.dtype. See the public twin."""
    return _normalize(x, None, weight, eps)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x, gate [..., D], weight [D] float32 -> x.dtype. See the public twin."""
    return _normalize(x, gate, weight, eps)


def _normalize(x: Tensor, gate: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel():
        grouped = _grouped(x)
        gates = grouped if gate is None else _grouped(gate)
        rows, inner, size = grouped.shape[0] * grouped.shape[1], grouped.shape[1], grouped.shape[2]
        block, at_once, warps = _tile(rows, size)
        rms_norm_kernel[(triton.cdiv(rows, at_once),)](
            grouped, gates, weight, out, rows, inner, *grouped.stride()[:2], *gates.stride()[:2], eps, size,
            BLOCK=block, ROWS=at_once, GATED=gate is not None, num_warps=warps,
        )  # fmt: skip
    return out


def _grouped(x: Tensor) -> Tensor:
    """[..., D] as [outer, inner, D], such that heads cut out of wider rows need no copy."""
    inner = x.shape[-2] if x.dim() > 2 else 1
    return dense_last(x.reshape(-1, inner, x.shape[-1]))


def l2_normalize(x: Tensor, eps: float) -> Tensor:
    """x [..., D] -> float32. See the public twin."""
    rows = dense_last(x.reshape(-1, x.shape[-1]))
    out = torch.empty(rows.shape, dtype=torch.float32, device=x.device)
    if out.numel():
        block, at_once, warps = _tile(*rows.shape)
        l2_normalize_kernel[(triton.cdiv(rows.shape[0], at_once),)](
            rows, out, rows.shape[0], rows.stride(0), eps, rows.shape[1], BLOCK=block, ROWS=at_once, num_warps=warps
        )
    return out.view(x.shape)


def _tile(rows: int, size: int) -> tuple[int, int, int]:
    """Columns and rows of a program, and its warps."""
    block = triton.next_power_of_2(size)
    at_once = max(1, min(ELEMENTS // block, triton.next_power_of_2(rows)))
    if not IS_INTERPRETED:
        at_once = min(at_once, max(1, 1024 // block))
    return block, at_once, 8 if block >= 4096 else 4
