"""FP4 rows to numbers in Triton: a program decodes some bytes, each to the two columns it holds."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3tool.kernels.lang import IS_INTERPRETED, cast
from k3tool.kernels.moe.tiles import e2m1, e4m3, e8m0

BLOCK = 65536 if IS_INTERPRETED else 2048  # bytes of a program


@triton.jit
def decode_kernel(
    packed,
    scale,
    divisor,
    out,
    count,
    GROUP: tl.constexpr,
    IS_E4M3: tl.constexpr,
    HAS_DIVISOR: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out [2 count] from packed [count] bytes and a scale for every GROUP / 2 of them."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = i < count
    byte = tl.load(packed + i, here, 0).to(tl.int32)
    scale_byte = tl.load(scale + i // (GROUP // 2), here, 0).to(tl.int32)
    if IS_E4M3:
        factor = e4m3(scale_byte)
    else:
        factor = e8m0(scale_byte)
    if HAS_DIVISOR:
        factor = tl.div_rn(factor, tl.load(divisor))
    low = cast(e2m1(byte & 15) * factor, out.dtype.element_ty)
    high = cast(e2m1(byte >> 4) * factor, out.dtype.element_ty)
    tl.store(out + 2 * i, low, here)
    tl.store(out + 2 * i + 1, high, here)


def decode_values(
    packed: Tensor, scale: Tensor, dtype: torch.dtype, *, global_scale: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """packed [..., N/2], scale [..., N/group_size] -> [..., N] in dtype. See the public twin."""
    packed, scale = packed.contiguous(), scale.contiguous()
    if out is None:
        out = torch.empty((*packed.shape[:-1], 2 * packed.shape[-1]), dtype=dtype, device=packed.device)
    if packed.numel():
        decode_kernel[(triton.cdiv(packed.numel(), BLOCK),)](
            packed, scale.view(torch.uint8), scale if global_scale is None else global_scale.float(), out,
            packed.numel(), GROUP=2 * packed.shape[-1] // scale.shape[-1], IS_E4M3=scale.dtype == torch.float8_e4m3fn,
            HAS_DIVISOR=global_scale is not None, BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip
    return out
