"""Matrix products with weights as the checkpoint stores them."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

from k3tool.kernels import cpu as compiled
from k3tool.kernels.linear import reference

__all__ = ["linear"]

_ACTIVATIONS = (torch.float32, torch.bfloat16)
_WEIGHTS = (torch.bfloat16, torch.float32, torch.float16)
# From so many tokens on, a processor with bfloat16 matrix instructions wins through torch.
_NATIVE_TOKENS = 32


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [..., in] times weight [out, in] transposed -> [..., out] in x.dtype, accumulated in float32.

    x: float32 or bfloat16. weight: bfloat16, float32 or float16; never rounded to x.dtype. Raises ValueError.
    """
    if x.dtype not in _ACTIVATIONS or weight.dtype not in _WEIGHTS:
        raise ValueError(f"no product of {x.dtype} activations with {weight.dtype} weights")
    if weight.dim() != 2 or x.shape[-1] != weight.shape[1]:
        raise ValueError(f"x {tuple(x.shape)} does not fit weight {tuple(weight.shape)}")
    if not (x.is_cpu and weight.is_cpu and weight.is_contiguous() and x.numel() and compiled.available()):
        return reference.linear(x, weight)
    rows = x.reshape(-1, x.shape[-1])
    if x.dtype == weight.dtype == torch.bfloat16 and rows.shape[0] >= _NATIVE_TOKENS and _has_bfloat16_units():
        return functional.linear(x, weight)
    from k3tool.kernels.linear import cpu

    out = cpu.linear(rows.to(torch.float32).contiguous(), weight)
    return out.to(x.dtype).view(*x.shape[:-1], weight.shape[0])


@cache
def _has_bfloat16_units() -> bool:
    """Does torch multiply bfloat16 on this processor in hardware (AVX512-BF16 or AMX)?"""
    checks = (getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"))
    return any(check is not None and check() for check in checks)
