"""Norms: Triton against the torch twin."""

from __future__ import annotations

import pytest
import torch

from k3tool.kernels.norm import kernel, reference
from tests.kernels.triton.fence import relative, strided, ulps

SHAPES = [(1, 7), (3, 128), (17, 100), (5, 3, 33), (2, 2, 3, 16), (64, 192)]


def draw(*shape, dtype=torch.float32, scale=1.0):
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))) * scale).to(dtype)


@pytest.mark.parametrize("shape", SHAPES)
def test_float32_equals_the_reference(shape):
    x, gate, weight = draw(*shape), draw(*shape, scale=3.0), draw(shape[-1])
    # 1e-6: a sum of at most 192 squares and a reciprocal root in float32.
    assert relative(kernel.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5)) < 1e-6
    assert (
        relative(kernel.gated_rms_norm(x, gate, weight, 1e-5), reference.gated_rms_norm(x, gate, weight, 1e-5)) < 1e-6
    )
    assert relative(kernel.l2_normalize(x, 1e-6), reference.l2_normalize(x, 1e-6)) < 1e-6


def test_bfloat16_rounds_where_the_reference_rounds():
    x, gate, weight = draw(40, 130, dtype=torch.bfloat16), draw(40, 130, dtype=torch.bfloat16), draw(130)
    # One unit: the float32 value may fall on the other side of a rounding boundary.
    assert ulps(kernel.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5)) <= 1
    found, expected = kernel.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5)
    assert (found != expected).float().mean() < 0.01
    assert ulps(kernel.gated_rms_norm(x, gate, weight, 1e-5), reference.gated_rms_norm(x, gate, weight, 1e-5)) <= 1


def test_views_are_read_in_place():
    x, gate, weight = draw(9, 4, 24), draw(9, 4, 24), draw(24)
    wide = torch.full((9, 200), float("nan"))
    wide[:, 50:146] = gate.flatten(1)
    heads = wide[:, 50:146].unflatten(1, (4, 24))
    expected = reference.gated_rms_norm(x, gate, weight, 1e-5)
    assert relative(kernel.gated_rms_norm(strided(x), heads, weight, 1e-5), expected) < 1e-6
    assert (
        relative(kernel.gated_rms_norm(x.transpose(0, 1), gate.transpose(0, 1), weight, 1e-5), expected.transpose(0, 1))
        < 1e-6
    )
    assert relative(kernel.rms_norm(x.mT.contiguous().mT, weight, 1e-5), reference.rms_norm(x, weight, 1e-5)) < 1e-6


def test_extremes():
    x = torch.stack([torch.zeros(16), torch.full((16,), 1e18), torch.full((16,), 1e-20), draw(16)])
    gate = torch.tensor([[-200.0], [200.0], [0.0], [90.0]]).expand(4, 16)
    weight = torch.ones(16)
    assert torch.equal(kernel.rms_norm(x, weight, 1e-5)[0], torch.zeros(16))
    assert relative(kernel.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5)) < 1e-6
    assert (
        relative(kernel.gated_rms_norm(x, gate, weight, 1e-5), reference.gated_rms_norm(x, gate, weight, 1e-5)) < 1e-6
    )


@pytest.mark.parametrize("shape", [(0, 16), (3, 0, 16)])
def test_no_rows(shape):
    assert kernel.rms_norm(torch.zeros(shape), torch.ones(16), 1e-5).shape == shape
    assert kernel.l2_normalize(torch.zeros(shape), 1e-6).shape == shape
