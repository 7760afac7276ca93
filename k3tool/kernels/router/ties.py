"""Comparing two routings of the same logits: twins may order scores differently that differ by less than their rounding."""

from __future__ import annotations

import torch
from torch import Tensor

TIED = 4e-6
"""Scores that differ by no more count as equal: sigmoid or softmax and a bias, each float32, of values around one."""

Routing = tuple[Tensor, Tensor]


def same_where_tied(
    found: Routing, expected: Routing, logits: Tensor, bias: Tensor | None, activation: str
) -> tuple[Tensor, Tensor]:
    """Weights of both laid out over all experts [T, E] float32, the order of chosen experts being free.

    A token whose two choices hold the same scores within `TIED`, though not the same experts, counts as expected: which
    one of a tie is taken depends on the last bit.
    """
    dense = [weights.new_zeros(logits.shape).scatter_add_(1, ids, weights) for ids, weights in (found, expected)]
    logits = logits.float()
    scores = torch.sigmoid(logits) if activation == "sigmoid" else torch.softmax(logits, dim=-1)
    choice = scores if bias is None else scores + bias
    held = [choice.gather(1, ids).sort(dim=1).values for ids, _ in (found, expected)]
    distinct = found[0].sort(dim=1).values.diff(dim=1).ne(0).all(dim=1)
    differs = (found[0].sort(dim=1).values != expected[0].sort(dim=1).values).any(dim=1)
    tied = differs & distinct & ((held[0] - held[1]).abs() <= TIED).all(dim=1)
    return torch.where(tied[:, None], dense[1], dense[0]), dense[1]
