"""How far the result of a kernel may lie from the reference: a bound made of the arithmetic's own inputs.

The reference is calculated up to three times on the same inputs. `exact` is the reference with activations widened to
float32, where nothing is rounded on the way; `expected` is the reference itself, which rounds where activations of this
dtype round; `moved` is `exact` with every input moved by an unit in its last float32 place, which sums in another order do
to their terms. How far the last two are from the first is what rounding does to these inputs: to their magnitudes, with
their cancellations, over sums of their length. A sound kernel is about as far away, and one that is wrong is farther.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass

import torch
from torch import Tensor

STEPS_OF_ROUNDING = (4.0, 2.0)
"""How many times as far (largest, RMS) as the reference a kernel may lie, where activations are rounded: it rounds the
same values, some of them to the other side."""
STEPS_OF_SUMMING = (8.0, 4.0)
"""The same for the differences that moved inputs make: a kernel adds in another order, with other partial sums."""
LEAST = (1e-4, 1e-5)
"""Largest and RMS difference that is always allowed, relative to the largest and the RMS value: float32 results of
sums, exponentials and roots that are calculated in another way."""


@dataclass(frozen=True)
class Difference:
    """Largest and RMS difference and their bounds, relative to the largest and the RMS value of what is right."""

    max_error: float = 0.0
    max_bound: float = 0.0
    rms_error: float = 0.0
    rms_bound: float = 0.0

    @property
    def ok(self) -> bool:
        return self.max_error <= self.max_bound and self.rms_error <= self.rms_bound

    @property
    def excess(self) -> float:
        """The larger of the two errors as a multiple of its bound."""
        return max(_part_of(self.max_error, self.max_bound), _part_of(self.rms_error, self.rms_bound))

    def worst(self, other: Difference) -> Difference:
        """Of each kind of error, the one that comes closest to its bound, or goes farthest beyond."""
        largest = max((self, other), key=lambda one: _part_of(one.max_error, one.max_bound))
        rms = max((self, other), key=lambda one: _part_of(one.rms_error, one.rms_bound))
        return Difference(largest.max_error, largest.max_bound, rms.rms_error, rms.rms_bound)


UNLIKE = Difference(max_error=sys.float_info.max, rms_error=sys.float_info.max)
"""Of results that cannot be compared: another shape or dtype."""


def compare(found: Tensor, expected: Tensor, exact: Tensor | None = None, moved: Tensor | None = None) -> Difference:
    """found, expected: of one shape and dtype. exact, moved: the reference as above; without them `LEAST` is the bound.

    A number that is none is beyond every bound.
    """
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return UNLIKE
    if not expected.numel():
        return Difference()
    right = (expected if exact is None else exact).double()
    rounding, summing = (
        _sizes(expected.double() - right),
        (0.0, 0.0) if moved is None else _sizes(moved.double() - right),
    )
    scales, errors = _sizes(right), _sizes(found.double() - right)
    numbers: list[float] = []
    for kind, least in enumerate(LEAST):
        unit = scales[kind] if scales[kind] > 0 else 1.0
        allowed = STEPS_OF_ROUNDING[kind] * rounding[kind] + STEPS_OF_SUMMING[kind] * summing[kind]
        bound = least * bool(scales[kind]) + allowed / unit
        numbers += [_number(errors[kind] / unit, sys.float_info.max), _number(bound, 0.0)]
    return Difference(*numbers)


def same_bits(found: Tensor, expected: Tensor) -> Difference:
    """The difference of what must be equal to the bit."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return UNLIKE
    if torch.equal(found, expected):
        return Difference()
    far = compare(found, expected)
    return Difference(far.max_error or sys.float_info.min, 0.0, far.rms_error or sys.float_info.min, 0.0)


def move(x: Tensor) -> Tensor:
    """float32 x with every number moved by 2^-23 of itself, up or down as a fixed sequence says."""
    generator = torch.Generator().manual_seed(1)
    signs = torch.randint(0, 2, x.shape, generator=generator, dtype=torch.int8).to(x.device)
    return x * (1.0 + 2.0**-23 * (2 * signs - 1))


def _sizes(x: Tensor) -> tuple[float, float]:
    """Largest and RMS value of float64 x."""
    return float(x.abs().max()), float(x.square().mean().sqrt())


def _number(value: float, otherwise: float) -> float:
    return value if math.isfinite(value) else otherwise


def _part_of(error: float, bound: float) -> float:
    return error / bound if bound > 0 else math.inf if error > 0 else 0.0
