"""RMS norms: the plain one, the gated one of KDA outputs, and the L2 norm of KDA queries and keys."""

from __future__ import annotations

from torch import Tensor

from k3tool.kernels.dispatch import twin

__all__ = ["gated_rms_norm", "l2_normalize", "rms_norm"]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., D] float32 or bfloat16, weight [D] float32 -> x.dtype. Raises ValueError.

    Statistics in float32; the normalized value is rounded to x.dtype before the weight is applied (KimiRMSNorm).
    """
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"weight {tuple(weight.shape)} does not fit x {tuple(x.shape)}")
    return twin("norm", "rms_norm", x)(x, weight, eps)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., D], gate of the same shape, weight [D] float32 -> x.dtype: `norm(x) * weight * sigmoid(gate)` in float32.

    One rounding at the end (FusedRMSNormGated with a sigmoid). Raises ValueError.
    """
    if weight.shape != x.shape[-1:] or gate.shape != x.shape:
        raise ValueError(f"x {tuple(x.shape)}, gate {tuple(gate.shape)}, weight {tuple(weight.shape)} do not fit")
    return twin("norm", "gated_rms_norm", x)(x, gate, weight, eps)


def l2_normalize(x: Tensor, eps: float = 1e-6) -> Tensor:
    """x [..., D] -> float32 `x / sqrt(sum(x^2) + eps)`: eps is added to the sum, not to the mean."""
    return twin("norm", "l2_normalize", x)(x, eps)
