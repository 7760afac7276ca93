"""Attention Residuals: what a layer reads is a softmax mix over block snapshots and the running sum."""

from __future__ import annotations

from torch import Tensor

from k3tool.kernels.dispatch import twin

__all__ = ["mix_blocks"]


def mix_blocks(values: Tensor, query: Tensor, eps: float) -> Tensor:
    """Per token, `softmax_n(<values_n * rsqrt(mean(values_n^2) + eps), query>)` over n, applied to the raw values.

    values: [N, T, D] float32 or bfloat16: snapshots and the running sum, in any order. query: [D] float32, the
    product of the site's norm and projection weights. Computed in float32. Returns [T, D] in values.dtype.
    Raises ValueError. Formula: Attention Residuals as in Kimi K3's modeling_kimi_linear.py.
    """
    if values.dim() != 3 or values.shape[0] < 1 or query.shape != values.shape[2:]:
        raise ValueError(f"values {tuple(values.shape)} and query {tuple(query.shape)} do not fit")
    return twin("attn_res", "mix_blocks", values)(values, query, eps)
