"""Matrix products with weights as the checkpoint stores them."""

from __future__ import annotations

import torch
from torch import Tensor

from k3tool.kernels.dispatch import twin

__all__ = ["linear"]

_ACTIVATIONS = (torch.float32, torch.bfloat16)
_WEIGHTS = (torch.bfloat16, torch.float32, torch.float16)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [..., in] times weight [out, in] transposed -> [..., out] in x.dtype, accumulated in float32.

    x: float32 or bfloat16. weight: bfloat16, float32 or float16; never rounded to x.dtype. Raises ValueError.
    """
    if x.dtype not in _ACTIVATIONS or weight.dtype not in _WEIGHTS:
        raise ValueError(f"no product of {x.dtype} activations with {weight.dtype} weights")
    if weight.dim() != 2 or x.shape[-1] != weight.shape[1]:
        raise ValueError(f"x {tuple(x.shape)} does not fit weight {tuple(weight.shape)}")
    return twin("linear", "linear", x)(x, weight)
