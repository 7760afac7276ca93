"""Elementary functions and rounding that the twins share."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from k3tool.kernels import lang


@triton.jit
def apply_kernel(x, out, N: tl.constexpr, WHAT: tl.constexpr):
    i = tl.arange(0, N)
    v = tl.load(x + i)
    if WHAT == "tanh":
        v = lang.tanh(v)
    elif WHAT == "sigmoid":
        v = lang.sigmoid(v)
    elif WHAT == "softplus":
        v = lang.softplus(v)
    tl.store(out + i, lang.cast(v, out.dtype.element_ty))


def apply(what, x, dtype=torch.float32):
    out = torch.empty(x.shape, dtype=dtype)
    apply_kernel[(1,)](x, out, N=x.shape[0], WHAT=what)
    return out


def points():
    fine = torch.logspace(-12, 2.2, 2048)
    return torch.cat([fine, -fine])


def test_functions_are_exact_to_float32():
    x = points()
    double = x.double()
    # 5e-7: three to four float32 roundings.
    assert (apply("tanh", x).double() / torch.tanh(double) - 1).abs().max() < 5e-7
    assert (apply("sigmoid", x).double() / torch.sigmoid(double) - 1)[x > -80].abs().max() < 5e-7
    assert (apply("softplus", x).double() / torch.nn.functional.softplus(double, threshold=30) - 1)[
        x > -80
    ].abs().max() < 5e-7


def test_bfloat16_is_rounded_to_nearest_even():
    bits = torch.arange(0, 1 << 16, dtype=torch.int32)
    ties = (bits << 16 | 0x8000).view(torch.float32)
    x = torch.cat([ties[ties.isfinite()], torch.randn(1 << 12), torch.tensor([float("inf"), -float("inf")])])
    x = torch.cat([x, torch.zeros((1 << 17) - len(x))])
    assert torch.equal(apply("cast", x, torch.bfloat16).view(torch.int16), x.bfloat16().view(torch.int16))
    assert apply("cast", torch.full((16,), float("nan")), torch.bfloat16).isnan().all()
