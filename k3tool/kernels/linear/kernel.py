"""The linear layer in Triton, for activations and weights of different dtypes; equal ones are torch's on a GPU.

What a vendor library does best stays there: a bfloat16 product on a GPU is one call of it. No library multiplies float32
activations with bfloat16 weights without first making a float32 copy of the weights; this kernel widens tiles of them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from k3tool.kernels.lang import IS_INTERPRETED, cast, dense_last, dot_type, power_of_two, precision


@triton.jit
def linear_kernel(
    x, weight, out, rows, columns, depth, x_stride, weight_stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Programs (column block, row block): out [rows, columns] = x [rows, depth] @ weight [columns, depth]^T."""
    m = (tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    n = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k0 in range(0, depth, BLOCK_K):
        k = k0 + tl.arange(0, BLOCK_K)[None, :]
        left = tl.load(x + m[:, None] * x_stride + k, (m < rows)[:, None] & (k < depth), 0.0)
        right = tl.load(weight + n[:, None] * weight_stride + k, (n < columns)[:, None] & (k < depth), 0.0)
        right = tl.trans(right.to(tl.float32).to(DOT))
        total = tl.dot(left.to(tl.float32).to(DOT), right, total, input_precision=PRECISION)
    known = (m < rows)[:, None] & (n < columns)[None, :]
    tl.store(out + m[:, None] * columns + n[None, :], cast(total, out.dtype.element_ty), known)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [..., in], weight [out, in] -> [..., out] in x.dtype. See the public twin."""
    if x.is_cuda and x.dtype == weight.dtype:
        return functional.linear(x, weight)
    return product(x, weight, x.dtype)


def product(x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """x [..., in], weight [out, in] -> [..., out] in dtype: sums in float32, rounded once."""
    rows = dense_last(x.reshape(-1, x.shape[-1]))
    weight = dense_last(weight)
    out = torch.empty((*x.shape[:-1], weight.shape[0]), dtype=dtype, device=x.device)
    if out.numel():
        options = linear_options(rows.shape[0], weight.shape[0], rows.shape[1])
        grid = (triton.cdiv(weight.shape[0], options["BLOCK_N"]), triton.cdiv(rows.shape[0], options["BLOCK_M"]))
        both = x.dtype if x.dtype == weight.dtype else torch.float32
        linear_kernel[grid](
            rows, weight, out, rows.shape[0], weight.shape[0], rows.shape[1], rows.stride(0), weight.stride(0),
            DOT=dot_type(both), PRECISION=precision(), **options,
        )  # fmt: skip
    return out


def linear_options(rows: int, columns: int, depth: int) -> dict:
    """Constants of `linear_kernel`: few rows read the weights once in many narrow programs."""
    if IS_INTERPRETED:
        sizes = (min(256, power_of_two(rows)), min(512, power_of_two(columns)), min(512, power_of_two(depth)))
        return {"BLOCK_M": sizes[0], "BLOCK_N": sizes[1], "BLOCK_K": sizes[2]}
    if rows <= 16:
        return {"BLOCK_M": 16, "BLOCK_N": 16, "BLOCK_K": 128, "num_warps": 4, "num_stages": 3}
    return {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 32, "num_warps": 4, "num_stages": 2}
