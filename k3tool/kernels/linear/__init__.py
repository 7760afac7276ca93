"""Matrix products with weights as the checkpoint stores them."""

from __future__ import annotations

import torch
from torch import Tensor

from k3tool.kernels.dispatch import twin
from k3tool.kernels.linear import reference
from k3tool.kernels.linear.stored import StackedMatrix, StoredMatrix, Weight

__all__ = ["StackedMatrix", "StoredMatrix", "Weight", "linear"]

_ACTIVATIONS = (torch.float32, torch.bfloat16)
_WEIGHTS = (torch.bfloat16, torch.float32, torch.float16)


def linear(x: Tensor, weight: Weight) -> Tensor:
    """x [..., in] times weight [out, in] transposed -> [..., out] in x.dtype, accumulated in float32.

    x: float32 or bfloat16. weight: bfloat16, float32 or float16, never rounded to x.dtype; or codes with scales, whose numbers
    are rounded only for many bfloat16 tokens on a processor that multiplies bfloat16. Raises ValueError.
    """
    is_plain = isinstance(weight, Tensor)
    if x.dtype not in _ACTIVATIONS or (is_plain and weight.dtype not in _WEIGHTS):
        raise ValueError(f"no product of {x.dtype} activations with {getattr(weight, 'dtype', 'stored')} weights")
    if len(weight.shape) != 2 or x.shape[-1] != weight.shape[1]:
        raise ValueError(f"x {tuple(x.shape)} does not fit weight {tuple(weight.shape)}")
    run = twin("linear", "linear", x)
    if not is_plain and run.__module__.endswith(".kernel"):  # that one knows plain matrices
        run = reference.linear
    return run(x, weight)
