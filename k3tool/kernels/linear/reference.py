"""The linear layer in plain torch, on any device: the specification of the other twins."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [..., in], weight [out, in] -> [..., out] in x.dtype; products and sums in float32, one rounding at the end."""
    if x.is_cuda and x.dtype == weight.dtype:
        return functional.linear(x, weight)
    return functional.linear(x.to(torch.float32), weight.to(torch.float32)).to(x.dtype)
