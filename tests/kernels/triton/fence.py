"""Tensors between guard values, and how twins are compared."""

from __future__ import annotations

import torch
from torch import Tensor

GUARD = 128  # elements on either side
PATTERN = 0x5A  # every guard byte


class Fence:
    """Hands out tensors that lie between guard bytes."""

    def __init__(self, empty) -> None:
        self._empty = empty
        self._held: list[tuple[Tensor, int]] = []

    def empty(self, *shape, dtype: torch.dtype = torch.float32, device=None, **options) -> Tensor:
        """Like torch.empty: NaN where the dtype has one, else the largest value. No fence around what has no memory."""
        if torch.device(device or "cpu").type == "meta" or options:
            return self._empty(*shape, dtype=dtype, device=device, **options)
        sizes = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else shape
        count = 1
        for size in sizes:
            count *= size
        guard = GUARD * dtype.itemsize
        raw = self._empty(count * dtype.itemsize + 2 * guard, dtype=torch.uint8).fill_(PATTERN)
        self._held.append((raw, guard))
        inside = raw[guard : guard + count * dtype.itemsize].view(dtype).view(sizes)
        if dtype.is_floating_point and dtype.itemsize > 1:
            return inside.fill_(float("nan"))
        return inside if dtype.itemsize == 1 else inside.fill_(torch.iinfo(dtype).max)

    def copy(self, x: Tensor) -> Tensor:
        """A fenced copy of x."""
        return self.empty(x.shape, dtype=x.dtype).copy_(x)

    def check(self) -> None:
        for raw, guard in self._held:
            assert (raw[:guard] == PATTERN).all(), "written before the beginning"
            assert (raw[len(raw) - guard :] == PATTERN).all(), "written past the end"


def strided(x: Tensor) -> Tensor:
    """The same values as x, every second row of wider rows: a view that is contiguous in its last dimension only."""
    wide = torch.full((*x.shape[:-2], 2 * x.shape[-2], x.shape[-1] + 8), float("nan"), dtype=x.dtype)
    view = wide[..., ::2, 3 : 3 + x.shape[-1]]
    view.copy_(x)
    return view


def relative(found: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm of what was expected."""
    difference = (found.double() - expected.double()).norm()
    return (difference / expected.double().norm().clamp_min(1e-30)).item()


def ulps(found: Tensor, expected: Tensor) -> float:
    """Largest difference in units of the last place of bfloat16, at the magnitude of the expected value.

    Magnitudes below 1e-3 of the largest count as that.
    """
    assert found.dtype == expected.dtype == torch.bfloat16
    size = expected.float().abs()
    unit = size.clamp_min(1e-3 * size.max().item() + 1e-30).log2().floor().exp2() * 2**-7
    return ((found.float() - expected.float()).abs() / unit).max().item()
