"""Short convolution in plain torch: W shifted products, no padding tokens."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional


def causal_conv(x: Tensor, weight: Tensor, history: Tensor) -> Tensor:
    """x [B, T, C], weight [W, C], history [B, W - 1, C] (overwritten) -> [B, T, C]. See the public twin."""
    width, time = weight.shape[0], x.shape[1]
    inputs = torch.cat([history, x], dim=1)  # [B, W - 1 + T, C]
    history.copy_(inputs[:, time:])
    if time == 1:
        total = (inputs.float() * weight).sum(1, keepdim=True)
    else:
        total = inputs[:, :time].float() * weight[0]
        for tap in range(1, width):
            total.addcmul_(inputs[:, tap : tap + time].float(), weight[tap])
    return functional.silu(total, inplace=True).to(x.dtype)


def causal_conv_packed(x: Tensor, weight: Tensor, history: Tensor, offsets: Tensor) -> Tensor:
    """x [T, C], weight [W, C], history [N, W - 1, C] (overwritten), offsets [N + 1] -> [T, C]. See the public twin."""
    out = torch.empty_like(x)
    for index, (begin, end) in enumerate(pairwise(offsets.tolist())):
        if end > begin:
            out[begin:end] = causal_conv(x[None, begin:end], weight, history[index : index + 1])[0]
    return out
