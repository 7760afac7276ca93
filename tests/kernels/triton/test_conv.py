"""The short convolution: Triton against the torch twin."""

from __future__ import annotations

import pytest
import torch

from k3tool.kernels.conv import kernel, reference
from tests.kernels.triton.fence import relative, strided, ulps


def inputs(batch, time, channels, taps=4, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, time, channels, generator=generator).to(dtype)
    weight = torch.randn(taps, channels, generator=generator)
    history = torch.randn(batch, taps - 1, channels, generator=generator).to(dtype)
    return x, weight, history


@pytest.mark.parametrize("time", [1, 2, 3, 4, 15, 16, 17, 63, 64, 65, 100, 129, 300])
def test_every_length_with_history(time, fence):
    x, weight, history = inputs(2, time, 40, seed=time)
    expected_history = history.clone()
    expected = reference.causal_conv(x, weight, expected_history)
    held = fence.copy(history)
    found = kernel.causal_conv(strided(x), weight, held)
    assert relative(found, expected) < 1e-6
    assert torch.equal(held, expected_history)


@pytest.mark.parametrize("taps,channels", [(1, 5), (2, 33), (5, 1030)])
def test_taps_and_odd_channels(taps, channels, fence):
    x, weight, history = inputs(1, 9, channels, taps)
    expected_history = history.clone()
    expected = reference.causal_conv(x, weight, expected_history)
    held = fence.copy(history)
    assert relative(kernel.causal_conv(x, weight, held), expected) < 1e-6
    assert torch.equal(held, expected_history)


def test_bfloat16(fence):
    x, weight, history = inputs(1, 50, 64, dtype=torch.bfloat16)
    expected_history = history.clone()
    expected = reference.causal_conv(x, weight, expected_history)
    held = fence.copy(history)
    # One unit: the float32 value may fall on the other side of a rounding boundary.
    assert ulps(kernel.causal_conv(x, weight, held), expected) <= 1
    assert torch.equal(held, expected_history)


def test_packed_sequences_do_not_see_each_other(fence):
    lengths = [3, 0, 1, 70, 2, 15, 16, 17, 63, 64, 65, 100, 0]
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    x, weight, _ = inputs(1, int(offsets[-1]), 24)
    x, history = x[0], inputs(len(lengths), 1, 24, seed=5)[2]
    expected_history = history.clone()
    expected = reference.causal_conv_packed(x, weight, expected_history, offsets)
    held = fence.copy(history)
    assert relative(kernel.causal_conv_packed(x, weight, held, offsets), expected) < 1e-6
    assert torch.equal(held, expected_history)
    assert torch.equal(held[1], history[1])
    alone = history[3:4].clone()
    assert torch.allclose(expected[4:74], reference.causal_conv(x[None, 4:74], weight, alone)[0], atol=1e-6)


def test_no_tokens(fence):
    x, weight, history = inputs(2, 0, 24)
    held = fence.copy(history)
    assert kernel.causal_conv(x, weight, held).shape == (2, 0, 24)
    assert torch.equal(held, history)


def test_a_cut_anywhere_changes_nothing(fence):
    x, weight, history = inputs(1, 40, 16)
    whole, held = kernel.causal_conv(x, weight, fence.copy(history)), fence.copy(history)
    pieces = [kernel.causal_conv(x[:, a:b], weight, held) for a, b in ((0, 1), (1, 3), (3, 39), (39, 40))]
    assert torch.equal(torch.cat(pieces, 1), whole)
