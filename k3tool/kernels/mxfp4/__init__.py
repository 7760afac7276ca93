"""FP4 weights with one scale per group: MXFP4 (groups of 32, E8M0 scales) and NVFP4 (groups of 16, E4M3 scales).

Byte j of a packed row holds columns 2j (low nibble) and 2j + 1 (high nibble); a nibble is a sign bit and an index
into 0, 0.5, 1, 1.5, 2, 3, 4, 6. This package turns such rows into numbers. It neither packs (see `k3tool.formats`)
nor multiplies whole layers (see `k3tool.kernels.moe`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from k3tool.kernels.dispatch import twin

SCALE_DTYPES = (torch.uint8, torch.float8_e8m0fnu, torch.float8_e4m3fn)

__all__ = ["SCALE_DTYPES", "decode_values", "group_size_of"]


def group_size_of(packed: Tensor, scale: Tensor) -> int:
    """Columns that share one scale, from the shapes [..., N/2] and [..., N/group_size]. Raises ValueError."""
    columns, groups = 2 * packed.shape[-1], scale.shape[-1]
    if packed.shape[:-1] != scale.shape[:-1] or groups == 0 or columns % groups:
        raise ValueError(f"packed {tuple(packed.shape)} and scale {tuple(scale.shape)} do not belong together")
    return columns // groups


def decode_values(
    packed: Tensor,
    scale: Tensor,
    dtype: torch.dtype = torch.bfloat16,
    *,
    global_scale: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """The numbers that packed FP4 rows stand for.

    packed: [..., N/2] uint8. scale: [..., N/group_size], uint8 or float8_e8m0fnu (E8M0: byte 0 is 2^-127, byte 255
    is NaN) or float8_e4m3fn. global_scale: one float32 number, a divisor (`weight_global_scale` of NVFP4).
    Returns [..., N] in dtype (float32 or bfloat16); `out`, contiguous and of that shape and dtype, is filled instead
    when given. Exact with E8M0 scales from 1 to 254 - in float32 always, in bfloat16 down to its smallest denormal;
    with E4M3 scales the scale over its divisor and the product are rounded to float32, then to dtype. Raises ValueError.
    """
    group_size_of(packed, scale)
    if packed.dtype != torch.uint8 or scale.dtype not in SCALE_DTYPES:
        raise ValueError(f"packed must be uint8 and scale E8M0 or E4M3, found {packed.dtype} and {scale.dtype}")
    if dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"FP4 decodes to float32 or bfloat16, not {dtype}")
    shape = (*packed.shape[:-1], 2 * packed.shape[-1])
    if out is not None and (out.shape != shape or out.dtype != dtype or not out.is_contiguous()):
        raise ValueError(f"out must be contiguous {shape} {dtype}, found {tuple(out.shape)} {out.dtype}")
    return twin("mxfp4", "decode_values", packed)(packed, scale, dtype, global_scale=global_scale, out=out)
