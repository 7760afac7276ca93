"""What all Triton twins share: how they compute on a GPU and how under Triton's interpreter, rounding, elementary functions.

The interpreter (`TRITON_INTERPRET=1`) runs kernels on the CPU, for tests: it cannot do arithmetic on bfloat16 and cuts
bfloat16 where a GPU rounds. So every kernel loads to float32, computes there, multiplies matrices in `dot_type`
(float32 under the interpreter), and rounds through `cast`.
"""

from __future__ import annotations

import os
from contextvars import ContextVar
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether the kernels of this process run under the interpreter: decided when this module is first imported."""

INTERPRETED = tl.constexpr(IS_INTERPRETED)

TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def dot_type(dtype: torch.dtype) -> tl.dtype:
    """In what matrix units multiply for a model of `dtype`."""
    return tl.float32 if IS_INTERPRETED else TYPES[dtype]


def dot_dtype(dtype: torch.dtype) -> torch.dtype:
    """The same as a torch dtype: that of intermediate results which are only ever multiplied again."""
    return torch.float32 if IS_INTERPRETED else dtype


TARGET: ContextVar[str | None] = ContextVar("TARGET", default=None)
"""A GPU generation for which launchers choose their constants instead of the one that is here: to compile for it."""


def gpu() -> str:
    """The generation of the GPU: sm_80, sm_90, sm_100, gfx942 or gfx950; "none" where there is none.

    Others count as the nearest of these whose shared memory they have.
    """
    return TARGET.get() or _present()


@cache
def _present() -> str:
    if not torch.cuda.is_available():
        return "none"
    if torch.version.hip:
        return (
            "gfx950"
            if "gfx950" in torch.cuda.get_device_properties(torch.cuda.current_device()).gcnArchName
            else "gfx942"
        )
    major, _ = torch.cuda.get_device_capability()
    return {9: "sm_90", 10: "sm_100"}.get(major, "sm_80")


def on_hip() -> bool:
    return gpu().startswith("gfx")


def precision() -> str:
    """How float32 matrices are multiplied: on tensor cores as three TF32 products (about 2^-21), elsewhere exactly."""
    return "ieee" if on_hip() else "tf32x3"


def power_of_two(size: int, least: int = 16) -> int:
    """The padded width of a tile that covers `size`; matrix units take no side below 16."""
    return max(least, triton.next_power_of_2(size))


def dense_last(x: Tensor) -> Tensor:
    """x with neighbouring elements in its last dimension (a copy only where they are not)."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


@triton.jit
def cast(x, dtype: tl.constexpr):
    """float32 to dtype, rounded to nearest even."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        y = tl.where(x == x, nearest, 0x7FC0).to(tl.uint16).to(dtype, bitcast=True)
    else:
        y = x.to(dtype)
    return y


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """float32 rounded to what dtype can hold, still as float32."""
    return cast(x, dtype).to(tl.float32)


@triton.jit
def sigmoid(x):
    e = tl.exp(-tl.abs(x))  # never overflows
    return tl.where(x < 0, e, 1.0) / (1.0 + e)


@triton.jit
def silu(x):
    return x * sigmoid(x)


@triton.jit
def softplus(x):
    """log(1 + exp(x)), accurate for small results too."""
    e = tl.exp(tl.minimum(x, 20.0))
    u = 1.0 + e
    # log(u) * e / (u - 1) takes back the rounding of 1 + e.
    return tl.where(x > 20.0, x, tl.where(u == 1.0, e, tl.log(u) * (e / tl.where(u == 1.0, 1.0, u - 1.0))))


@triton.jit
def tanh(x):
    """Within 2e-7 of tanh(x), relatively, for small x too: the odd series below 0.3, exponentials beyond."""
    s = x * x
    series = x * (
        1.0 + s * (-0.33333333 + s * (0.13333333 + s * (-0.053968254 + s * (0.021869488 - s * 0.0088632355))))
    )
    e = tl.exp(-2.0 * tl.abs(x))
    size = (1.0 - e) / (1.0 + e)
    return tl.where(s < 0.09, series, tl.where(x < 0, -size, size))


@triton.jit
def gated(gate, up, SITU: tl.constexpr, beta, linear_beta):
    """SiTU or SiLU gating in float32. Formula: see `k3tool.kernels.moe.reference`."""
    if SITU:
        of_beta, of_linear = 1.0 / beta, 1.0 / linear_beta
        out = beta * tanh(gate * of_beta) * sigmoid(gate) * (linear_beta * tanh(up * of_linear))
    else:
        out = silu(gate) * up
    return out
