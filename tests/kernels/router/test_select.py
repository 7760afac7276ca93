"""The compiled router against the torch twin."""

from __future__ import annotations

import pytest
import torch

from k3tool.kernels import cpu as compiled
from k3tool.kernels.dispatch import use
from k3tool.kernels.router import select_experts

if not compiled.available():
    pytest.skip("compiled kernels are not available here", allow_module_level=True)


def both(logits: torch.Tensor, bias: torch.Tensor | None, top_k: int, **options: object) -> None:
    """The same experts, and their weights within a few float32 steps, in whatever order."""
    found = select_experts(logits, bias, top_k, **options)
    with use("reference"):
        wanted = select_experts(logits, bias, top_k, **options)
    assert found[0].dtype == torch.int64 and found[0].shape == (logits.shape[0], top_k)
    order, wanted_order = (ids.sort(-1) for ids in (found[0], wanted[0]))
    assert torch.equal(order.values, wanted_order.values)
    weights, wanted_weights = found[1].gather(1, order.indices), wanted[1].gather(1, wanted_order.indices)
    torch.testing.assert_close(weights, wanted_weights, rtol=2e-6, atol=1e-30)


@pytest.mark.parametrize("activation", ["sigmoid", "softmax"])
@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize(("experts", "top_k"), [(1, 1), (3, 3), (12, 3), (64, 8), (100, 1), (896, 16)])
def test_against_torch(activation: str, renormalize: bool, experts: int, top_k: int) -> None:
    draw = torch.Generator().manual_seed(experts)
    for tokens in (1, 5, 70):
        logits = torch.randn(tokens, experts, generator=draw) * 3
        bias = torch.randn(experts, generator=draw) * 0.3
        for b in (None, bias):
            both(logits, b, top_k, activation=activation, renormalize=renormalize, scaling_factor=2.5)


def test_bias_moves_the_selection_and_not_the_weight() -> None:
    ids, weights = select_experts(torch.zeros(1, 40), torch.arange(40.0), 2, renormalize=False)
    assert sorted(ids[0].tolist()) == [38, 39] and weights.tolist() == [[0.5, 0.5]]


def test_groups_empty_batches_and_strides() -> None:
    logits = torch.randn(6, 24, generator=torch.Generator().manual_seed(1))
    both(logits, torch.zeros(24), 4, num_groups=4, topk_groups=2)
    both(logits[:0], None, 4)
    both(logits[:, ::2], torch.randn(24)[::2], 3)


def test_large_logits_stay_numbers() -> None:
    both(torch.tensor([[1e4, -1e4, 90.0, -90.0, 0.0]]), None, 3)
    both(torch.tensor([[1e4, 9990.0, 9950.0, -90.0, 0.0]]), None, 3, activation="softmax")
