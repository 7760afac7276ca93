"""The short causal convolution of KDA: depthwise, without bias, followed by SiLU."""

from __future__ import annotations

from torch import Tensor

from k3tool.kernels.dispatch import twin

__all__ = ["causal_conv"]


def causal_conv(x: Tensor, weight: Tensor, history: Tensor) -> Tensor:
    """`silu(sum_j weight[j] * u[t - W + 1 + j])` over the history followed by x, per channel.

    x: [B, T, C] float32 or bfloat16, T >= 1. weight: [W, C] float32, the last tap meets the current token (the
    checkpoint's [C, 1, W], transposed). history: [B, W - 1, C] in x.dtype, the inputs before x, oldest first; it is
    overwritten with the last W - 1 inputs. Returns [B, T, C] in x.dtype, computed in float32. Raises ValueError.
    """
    width, channels = weight.shape
    if x.dim() != 3 or x.shape[2] != channels or history.shape != (x.shape[0], width - 1, channels):
        raise ValueError(f"x {tuple(x.shape)}, weight {tuple(weight.shape)}, history {tuple(history.shape)} do not fit")
    if history.dtype != x.dtype:
        raise ValueError(f"history must be {x.dtype}, found {history.dtype}")
    return twin("conv", "causal_conv", x)(x, weight, history)
