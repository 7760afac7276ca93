"""The linear layer in plain torch, on any device: the specification of the other twins."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from k3tool.kernels.linear.stored import StackedMatrix, StoredMatrix, Weight


def linear(x: Tensor, weight: Weight) -> Tensor:
    """x [..., in], weight [out, in] -> [..., out] in x.dtype; products and sums in float32, one rounding at the end."""
    if isinstance(weight, StackedMatrix):
        return torch.cat([linear(x, part) for part in weight.parts], dim=-1)
    if isinstance(weight, StoredMatrix):
        wide = x.to(torch.float32)
        return torch.cat([functional.linear(wide, weight.rows(some)) for some in weight.split()], dim=-1).to(x.dtype)
    if x.is_cuda and x.dtype == weight.dtype:
        return functional.linear(x, weight)
    return functional.linear(x.to(torch.float32), weight.to(torch.float32)).to(x.dtype)
