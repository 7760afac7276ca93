"""The decay gate of KDA in Triton."""

from __future__ import annotations

import triton
import triton.language as tl

from k3tool.kernels.lang import sigmoid, softplus


@triton.jit
def gate(f, dt_bias, inside, known, rate, lower_bound, IS_BOUNDED: tl.constexpr):
    """Log decays, float32 and never positive, from the addresses of gate logits and their bias; zero outside.

    Formula: see `k3tool.kernels.kda.reference.log_decay`; `rate` is exp(a_log) of the head.
    """
    z = tl.load(f, inside, 0.0).to(tl.float32) + tl.load(dt_bias, known, 0.0)
    if IS_BOUNDED:
        g = lower_bound * sigmoid(z * rate)
    else:
        g = -rate * softplus(z)
    return tl.where(inside, g, 0.0)
