"""The compiled linear layer against the torch twin and against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from k3tool.kernels import cpu as compiled
from k3tool.kernels.dispatch import use
from k3tool.kernels.linear import linear

needs_compiler = pytest.mark.skipif(not compiled.available(), reason="compiled kernels are not available here")
# (out, in): single row, in below and beside a block of 16, out beside a group of 4 and a block of rows, real shapes.
SHAPES = [(1, 1), (1, 32), (3, 7), (5, 96), (64, 64), (97, 33), (131, 1000), (300, 257)]
TOKENS = [1, 2, 3, 8, 9, 16, 17, 64, 300]  # one, half a tile, a tile, more than one pass of 256
EPS32, EPS16 = 2.0**-24, 2.0**-8  # half a unit in the last place


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_close(found: Tensor, x: Tensor, weight: Tensor) -> None:
    """Against float64: an n-term float32 sum in any order errs by at most n eps times the sum of magnitudes."""
    exact = x.double() @ weight.double().t()
    size = x.double().abs() @ weight.double().abs().t()
    bound = size * EPS32 * (x.shape[-1] + 1)
    if x.dtype == torch.bfloat16:
        bound = bound + exact.abs() * EPS16 + bound * EPS16
    assert ((found.double() - exact).abs() <= bound).all()


@needs_compiler
@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_shape_against_float64(weight_dtype: torch.dtype, dtype: torch.dtype) -> None:
    from k3tool.kernels.linear import cpu

    for rows, columns in SHAPES:
        weight = random(rows, columns, dtype=weight_dtype, seed=rows)
        for tokens in TOKENS:
            x = random(tokens, columns, dtype=dtype, seed=tokens)
            cpu._compiled(weight_dtype).scratch.poison()
            out = linear(x, weight)
            assert out.shape == (tokens, rows) and out.dtype == dtype
            assert_close(out, x, weight)


@needs_compiler
def test_reference_keeps_the_same_bound() -> None:
    weight, x = random(97, 300, dtype=torch.bfloat16), random(5, 300, dtype=torch.bfloat16)
    with use("reference"):
        assert_close(linear(x, weight), x, weight)


@needs_compiler
@pytest.mark.parametrize("tokens", [1, 20])
def test_only_the_tensor_at_hand_is_read_and_written(tokens: int) -> None:
    """NaN before and after the weights and the input never reach the result."""
    rows, columns = 6, 40
    held = torch.full((rows + 2, columns), float("nan"), dtype=torch.bfloat16)
    held[1:-1] = random(rows, columns)
    around = torch.full((tokens + 2, columns), float("nan"))
    around[1:-1] = random(tokens, columns, seed=1)
    assert_close(linear(around[1:-1], held[1:-1]), around[1:-1], held[1:-1])


@pytest.mark.parametrize("tokens", [0, 1, 6])
def test_views_and_leading_dimensions(tokens: int) -> None:
    """Strided inputs, a transposed weight and [B, T, in] give what their copies give, bit for bit."""
    weight = random(24, 48, dtype=torch.bfloat16)
    x = random(tokens, 96, seed=3)[:, ::2]
    assert torch.equal(linear(x, weight), linear(x.contiguous(), weight))
    wide = random(2, tokens, 48, seed=4)
    assert torch.equal(linear(wide, weight), linear(wide.flatten(0, 1), weight).view(2, tokens, 24))
    turned = random(48, 24, dtype=torch.bfloat16).t()
    torch.testing.assert_close(linear(x, turned), linear(x, turned.contiguous()), rtol=1e-5, atol=1e-5)


@needs_compiler
def test_the_result_does_not_depend_on_threads() -> None:
    """Rows are summed by one thread each, so the number of threads changes nothing."""
    from k3tool.kernels.cpu import pool
    from k3tool.kernels.linear import cpu

    weight, x = random(1000, 512, dtype=torch.bfloat16), random(40, 512)
    expected = [linear(x[:n], weight) for n in (1, 40)]
    workers = pool.Pool(3)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cpu.pool, "shared", lambda: workers)
            for _ in range(20):
                for n, want in zip((1, 40), expected, strict=True):
                    assert torch.equal(linear(x[:n], weight), want)
    finally:
        workers.close()


@needs_compiler
def test_infinities_and_not_a_number_pass_through() -> None:
    for tokens in (1, 3):
        x = torch.ones(tokens, 32)
        weight = torch.ones(3, 32, dtype=torch.bfloat16)
        weight[0, 5], weight[1, 7] = float("inf"), float("nan")
        for dtype in (torch.float32, torch.bfloat16):
            out = linear(x.to(dtype), weight)
            assert out[:, 0].eq(float("inf")).all() and out[:, 1].isnan().all() and out[:, 2].eq(32).all()


def test_large_sums_round_to_bfloat16_ties_to_even() -> None:
    weight = torch.tensor([[256.0, 1.0], [256.0, 3.0]], dtype=torch.bfloat16)  # 257 and 259 lie between two bfloat16
    out = linear(torch.ones(1, 2, dtype=torch.bfloat16), weight)
    assert out.tolist() == [[256.0, 260.0]]


@pytest.mark.parametrize(
    ("x", "weight"),
    [
        (torch.zeros(2, 3, dtype=torch.float64), torch.zeros(4, 3)),
        (torch.zeros(2, 3), torch.zeros(4, 3, dtype=torch.int32)),
        (torch.zeros(2, 3), torch.zeros(4, 5)),
        (torch.zeros(2, 3), torch.zeros(3)),
    ],
)
def test_what_does_not_fit_is_refused(x: Tensor, weight: Tensor) -> None:
    with pytest.raises(ValueError, match=r"weight"):
        linear(x, weight)
