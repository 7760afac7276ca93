"""Routed experts in Triton: grouped products on weights as they are stored, the activation fused between.

Tokens are sorted by expert; a program takes up to BLOCK_M tokens of one expert and some rows of its matrices. Few tokens
(decode) skip the sorting: every visit is a program of its own, bound by the memory that its weights take. Results of a
token's experts are summed in float32 in ascending order of expert, so a run repeats bit for bit.
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
    dot_type,
    gated,
    gpu,
    on_hip,
    power_of_two,
    precision,
    rounded,
)
from k3tool.kernels.moe.experts import Experts
from k3tool.kernels.moe.storage import Stored, stored
from k3tool.kernels.moe.tiles import add_product
from k3tool.kernels.tuning import Options

DIRECT_VISITS = 128  # up to so many (token, expert) pairs, sorting costs more than reading some weights twice
DIRECT_ROWS = 16  # rows of a tile of matrix units; all but one are padding when every visit is on its own


@triton.jit
def _visits(order, experts, starts, counts, block, BLOCK_M: tl.constexpr, IS_DIRECT: tl.constexpr):
    """(expert, number of visits, their sorted positions [BLOCK_M], themselves [BLOCK_M]) of a block of visits."""
    i = tl.arange(0, BLOCK_M)
    expert = tl.load(experts + block).to(tl.int64)
    if IS_DIRECT:
        number = block * 0 + 1
        position = block.to(tl.int64) + i
        visit = position
    else:
        number = tl.load(counts + block)
        position = tl.load(starts + block).to(tl.int64) + i
        visit = tl.load(order + position, i < number, 0).to(tl.int64)
    return expert, number, position, visit


@triton.jit
def gate_up_kernel(
    x, order, experts, starts, counts, w1, w1_scale, w1_global, w3, w3_scale, w3_global, hidden,
    x_t, x_half, top_k, inner, width, row_codes, row_scales, expert_scales, beta, linear_beta,
    FORMAT: tl.constexpr, GROUP: tl.constexpr, SCALE_ROWS: tl.constexpr, NIBBLES: tl.constexpr, HAS_GLOBAL: tl.constexpr,
    SITU: tl.constexpr, IS_DIRECT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr, HAS_PTX: tl.constexpr, IS_EVEN: tl.constexpr,
):  # fmt: skip
    """Programs (block of hidden units, block of visits): hidden [visits, inner] = act(x w1^T, x w3^T), sorted.

    width: of x, the columns of w1 and w3. With NIBBLES, x and hidden hold their even columns, then their odd ones.
    """
    block = tl.program_id(1)
    expert, number, position, visit = _visits(order, experts, starts, counts, block, BLOCK_M, IS_DIRECT)
    if number > 0:
        here = tl.arange(0, BLOCK_M) < number
        n = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
        WIDE: tl.constexpr = BLOCK_K // 2 if NIBBLES else BLOCK_K
        matrix = expert * inner * row_codes
        at_scale = expert * expert_scales
        source = x + (visit // top_k)[:, None] * x_t
        gate = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k0 in range(0, width, BLOCK_K):
            j = (k0 // 2 if NIBBLES else k0) + tl.arange(0, WIDE)[None, :]
            inside = here[:, None] & (j < row_codes) if not IS_EVEN else here[:, None]
            even = tl.load(source + j, inside, 0.0).to(DOT)
            odd = tl.load(source + x_half + j, inside, 0.0).to(DOT) if NIBBLES else even
            gate = add_product(
                gate, even, odd, w1 + matrix, w1_scale + at_scale, n, k0, inner, row_codes, row_scales, SCALE_ROWS, FORMAT,
                GROUP, BLOCK_N, BLOCK_K, DOT, PRECISION, HAS_PTX, IS_EVEN,
            )  # fmt: skip
            up = add_product(
                up, even, odd, w3 + matrix, w3_scale + at_scale, n, k0, inner, row_codes, row_scales, SCALE_ROWS, FORMAT,
                GROUP, BLOCK_N, BLOCK_K, DOT, PRECISION, HAS_PTX, IS_EVEN,
            )  # fmt: skip
        if HAS_GLOBAL:
            gate = gate / tl.load(w1_global + expert)
            up = up / tl.load(w3_global + expert)
        TYPE: tl.constexpr = hidden.dtype.element_ty
        result = cast(gated(rounded(gate, TYPE), rounded(up, TYPE), SITU, beta, linear_beta), TYPE)
        column = n % 2 * (inner // 2) + n // 2 if NIBBLES else n
        tl.store(hidden + position[:, None] * inner + column[None, :], result, here[:, None] & (n < inner)[None, :])


@triton.jit
def down_kernel(
    hidden, order, experts, starts, counts, w2, w2_scale, w2_global, out, half, inner, width, row_codes, row_scales,
    expert_scales, FORMAT: tl.constexpr, GROUP: tl.constexpr, SCALE_ROWS: tl.constexpr, NIBBLES: tl.constexpr,
    HAS_GLOBAL: tl.constexpr, IS_DIRECT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr, HAS_PTX: tl.constexpr, IS_EVEN: tl.constexpr,
):  # fmt: skip
    """Programs (block of columns, block of visits): out [visits, width] = hidden w2^T, in the order of the visits."""
    block = tl.program_id(1)
    expert, number, position, visit = _visits(order, experts, starts, counts, block, BLOCK_M, IS_DIRECT)
    if number > 0:
        here = tl.arange(0, BLOCK_M) < number
        n = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
        WIDE: tl.constexpr = BLOCK_K // 2 if NIBBLES else BLOCK_K
        source = hidden + position[:, None] * inner
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k0 in range(0, inner, BLOCK_K):
            j = (k0 // 2 if NIBBLES else k0) + tl.arange(0, WIDE)[None, :]
            inside = here[:, None] & (j < row_codes) if not IS_EVEN else here[:, None]
            even = tl.load(source + j, inside, 0.0).to(DOT)
            odd = tl.load(source + half + j, inside, 0.0).to(DOT) if NIBBLES else even
            total = add_product(
                total, even, odd, w2 + expert * width * row_codes, w2_scale + expert * expert_scales, n, k0, width, row_codes,
                row_scales, SCALE_ROWS, FORMAT, GROUP, BLOCK_N, BLOCK_K, DOT, PRECISION, HAS_PTX, IS_EVEN,
            )  # fmt: skip
        if HAS_GLOBAL:
            total = total / tl.load(w2_global + expert)
        known = here[:, None] & (n < width)[None, :]
        tl.store(out + visit[:, None] * width + n[None, :], cast(total, out.dtype.element_ty), known)


@triton.jit
def sum_kernel(y, weights, out, tokens, width, TOP_K: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """Programs (tokens, block of columns): out [T, width] float32 = sum over k of y [T, TOP_K, width] * weights."""
    token = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    here = (token < tokens) & (column < width)
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for k in range(TOP_K):
        visit = token * TOP_K + k
        value = tl.load(y + visit * width + column, here, 0.0).to(tl.float32)
        total += value * tl.load(weights + visit, token < tokens, 0.0)
    tl.store(out + token * width + column, total, here)


@triton.jit
def gated_kernel(
    gate, up, out, rows, size, gate_stride, up_stride, beta, linear_beta,
    SITU: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Programs (rows, block of columns): out [rows, size]. Rows come first: a grid is only long in its first dimension."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    here = (row < rows) & (column < size)
    g = tl.load(gate + row * gate_stride + column, here, 0.0).to(tl.float32)
    u = tl.load(up + row * up_stride + column, here, 0.0).to(tl.float32)
    tl.store(out + row * size + column, cast(gated(g, u, SITU, beta, linear_beta), out.dtype.element_ty), here)


class Blocks(NamedTuple):
    """Blocks of visits, more than there may be: order [visits] maps sorted positions to visits; per block its expert,
    its first sorted position and how many of them it holds (0: unused)."""

    order: Tensor
    experts: Tensor
    starts: Tensor
    counts: Tensor


def blocks_of(visited: Tensor, num_experts: int, size: int) -> Blocks:
    """Group visits [P] (expert ids) by expert into blocks of `size`; nothing is read back from the device."""
    ordered, order = torch.sort(visited, stable=True)
    ends = torch.searchsorted(ordered, torch.arange(num_experts + 1, device=visited.device))
    firsts = torch.zeros_like(ends)
    torch.cumsum((ends.diff() + (size - 1)) // size, 0, out=firsts[1:])
    slots = torch.arange(min(visited.shape[0], num_experts) + visited.shape[0] // size, device=visited.device)
    experts = torch.searchsorted(firsts[1:], slots, right=True).clamp_(max=num_experts - 1)
    starts = ends[experts] + (slots - firsts[experts]) * size
    counts = (ends[experts + 1] - starts).clamp_(0, size)
    return Blocks(order.to(torch.int32), experts.to(torch.int32), starts.to(torch.int32), counts.to(torch.int32))


def experts_forward(
    x: Tensor, experts: Experts, ids: Tensor, weights: Tensor, activation: str, beta: float, linear_beta: float
) -> Tensor:
    """x [T, D], ids [T, K], weights [T, K] -> [T, D] float32. See the public twin."""
    held = stored(experts)
    tokens, top_k = ids.shape
    width, inner, visits = held.width, held.inner, tokens * top_k
    out = torch.empty((tokens, width), dtype=torch.float32, device=x.device)
    if not visits:
        return out.zero_()
    ids, places = torch.sort(ids, dim=1, stable=True)  # so that sums ascend
    is_direct = visits <= DIRECT_VISITS
    block_m = DIRECT_ROWS if is_direct else rows_of(visits, held.num_experts, x.dtype)
    if is_direct:
        flat = ids.flatten()
        blocks = Blocks(flat, flat, flat, flat)
        number = visits
    else:
        blocks = blocks_of(ids.flatten(), held.num_experts, block_m)
        number = blocks.experts.shape[0]
    x = dense_last(x)
    if held.nibbles:  # even columns first, so that tiles of both kinds of nibbles meet whole lines of x
        x = x.unflatten(1, (-1, 2)).transpose(1, 2).contiguous().flatten(1)
    hidden = torch.empty((visits, inner), dtype=x.dtype, device=x.device)
    y = torch.empty((visits, width), dtype=x.dtype, device=x.device)
    shared = {
        **held.constants, "IS_DIRECT": is_direct, "BLOCK_M": block_m, "DOT": dot_type(x.dtype), "PRECISION": precision(),
        "HAS_PTX": not IS_INTERPRETED and not on_hip(),
    }  # fmt: skip

    def gate_up(options: Options) -> None:
        gate_up_kernel[(triton.cdiv(inner, options["BLOCK_N"]), number)](
            x, *blocks, *held.w1, *held.w3, hidden, x.stride(0), width // 2, top_k, inner, width, *held.row("w1"), beta,
            linear_beta, SITU=activation == "situ", IS_EVEN=_fits(inner, width, options), **shared, **options,
        )  # fmt: skip

    def down(options: Options) -> None:
        down_kernel[(triton.cdiv(width, options["BLOCK_N"]), number)](
            hidden, *blocks, *held.w2, y, inner // 2, inner, width, *held.row("w2"),
            IS_EVEN=_fits(width, inner, options), **shared, **options,
        )  # fmt: skip

    shape = (held.constants["FORMAT"].value, held.constants["GROUP"], x.dtype, inner, width, tuning.bucket(visits))
    candidates = experts_options(held, block_m, is_direct, x.dtype)
    tuning.run("moe.gate_up", shape, candidates, gate_up)
    tuning.run("moe.down", shape, candidates, down)
    block = min(4096 if IS_INTERPRETED else 512, power_of_two(width))
    rows = min(64, power_of_two(tokens, 1)) if IS_INTERPRETED else 1
    sum_kernel[(triton.cdiv(tokens, rows), triton.cdiv(width, block))](
        y, weights.gather(1, places), out, tokens, width, TOP_K=top_k, BLOCK=block, ROWS=rows, num_warps=4
    )
    return out


def _fits(rows: int, columns: int, options: dict) -> bool:
    """Do blocks of rows and columns cover a matrix exactly?"""
    return rows % options["BLOCK_N"] == 0 and columns % options["BLOCK_K"] == 0


def rows_of(visits: int, num_experts: int, dtype: torch.dtype) -> int:
    """Visits of an expert that one program takes: what an expert may expect, within what registers hold."""
    if IS_INTERPRETED:
        return 64
    each = visits / num_experts
    most = 64 if dtype == torch.float32 or on_hip() else 128
    return min(most, 128 if each > 48 else 64 if each > 16 else 16)


def experts_options(held: Stored, block_m: int, is_direct: bool, dtype: torch.dtype) -> list[Options]:
    """Configurations of the two products, within the columns that share one scale of the sums."""
    if IS_INTERPRETED:
        sizes = [(128, 128, 4, 1)]
    elif dtype == torch.float32:
        sizes = [(64, 32, 4, 1)]
    elif on_hip():
        sizes = [(64, 128, 4, 1), (32, 128, 4, 2)] if is_direct else [(64, 64, 4, 1), (128, 64, 8, 1)]
    elif is_direct or block_m == 16:
        sizes = [(64, 128, 4, 3), (32, 256, 4, 3), (64, 256, 8, 3), (32, 128, 4, 4)]
    elif block_m == 64:
        sizes = [(64, 64, 4, 3), (128, 64, 8, 3)]
    else:
        sizes = [(64, 64, 8, 3), (128, 64, 8, 2), (64, 128, 8, 2)]
    if 0 < held.block_columns < 64 and block_m == 128 and not on_hip():  # scales meet sums often: more registers
        sizes = [(32, 32, 8, 2), (64, 32, 8, 2)]
    elif gpu() == "sm_80" and block_m == 128:
        sizes = [(32, 64, 8, 3), (64, 32, 8, 3)]
    found: list[Options] = []
    for n, k, warps, stages in sizes:
        options = {"BLOCK_N": n, "BLOCK_K": min(k, held.block_columns or k), "num_warps": warps, "num_stages": stages}
        if options not in found:
            found.append(options)
    return found


def gated_activation(gate: Tensor, up: Tensor, activation: str, beta: float, linear_beta: float) -> Tensor:
    """gate, up [..., I] -> [..., I] in their dtype. See the public twin."""
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    if out.numel():
        size = gate.shape[-1]
        gates, ups = (dense_last(x.reshape(-1, size)) for x in (gate, up))
        block = min(4096 if IS_INTERPRETED else 1024, power_of_two(size))
        rows = min(16, power_of_two(gates.shape[0], 1)) if IS_INTERPRETED else 1
        gated_kernel[(triton.cdiv(gates.shape[0], rows), triton.cdiv(size, block))](
            gates, ups, out, gates.shape[0], size, gates.stride(0), ups.stride(0), beta, linear_beta,
            SITU=activation == "situ", BLOCK=block, ROWS=rows, num_warps=4,
        )  # fmt: skip
    return out
