"""Sums, gates, conversions and stores: the compiled twins give the bits of the torch twins."""

from __future__ import annotations

import pytest
import torch

from k3tool.kernels.dispatch import use
from k3tool.kernels.elementwise import add, convert, multiply_by_sigmoid, put

SHAPES = [(0,), (1,), (7,), (3, 33), (2, 4096), (1, 20000)]
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def draw(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 8
    values.view(-1)[:1] = float("nan")
    return values.to(dtype)


@dtypes
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sums_conversions_and_stores_bit_for_bit(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, y = draw(shape, dtype, 1), draw(shape, dtype, 2)
    other = torch.bfloat16 if dtype == torch.float32 else torch.float32
    torch.testing.assert_close(add(x, y), x + y, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(convert(x, other), x.to(other), rtol=0, atol=0, equal_nan=True)
    assert convert(x, dtype) is x
    held = x.clone()
    assert add(held, y, held) is held
    torch.testing.assert_close(held, x + y, rtol=0, atol=0, equal_nan=True)
    around = torch.full((x.numel() + 2,), 5.0, dtype=dtype)
    put(x, around[1:-1].view(shape))
    torch.testing.assert_close(around[1:-1].view(shape), x, rtol=0, atol=0, equal_nan=True)
    assert around[0] == 5 and around[-1] == 5


@dtypes
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gate(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """In float32 within 4 steps; in bfloat16 the rounded sigmoid may fall on the other side of a tie: one step of it."""
    x, gate = draw(shape, dtype, 3), draw(shape, dtype, 4)
    step = 4 * 2.0**-23 if dtype == torch.float32 else 2.0**-7
    torch.testing.assert_close(multiply_by_sigmoid(x, gate), x * torch.sigmoid(gate), rtol=step, atol=0, equal_nan=True)
    if dtype == torch.bfloat16 and x.numel() > 1000:
        assert (multiply_by_sigmoid(x, gate) == x * torch.sigmoid(gate)).float().mean() > 0.99


@dtypes
def test_strided_tensors(dtype: torch.dtype) -> None:
    x, y = draw((6, 8), dtype, 5)[:, ::2], draw((4, 6), dtype, 6).t()
    for backend in ("auto", "reference"):
        with use(backend):
            torch.testing.assert_close(add(x, y), x + y, rtol=0, atol=0, equal_nan=True)
            target = torch.zeros(6, 8, dtype=dtype)
            put(x, target[:, 1::2])
            torch.testing.assert_close(target[:, 1::2], x, rtol=0, atol=0, equal_nan=True)
            assert target[:, ::2].eq(0).all()


def test_what_does_not_go_together_is_refused() -> None:
    for call in (
        lambda: add(torch.ones(2), torch.ones(3)),
        lambda: add(torch.ones(2), torch.ones(2), torch.ones(3)),
        lambda: multiply_by_sigmoid(torch.ones(2), torch.ones(2).bfloat16()),
        lambda: put(torch.ones(2), torch.ones(1)),
        lambda: convert(torch.ones(2), torch.int32),
    ):
        with pytest.raises(ValueError):
            call()
