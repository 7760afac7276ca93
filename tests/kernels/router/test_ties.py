"""Two routings of the same logits: a tie may go either way, anything else must agree."""

from __future__ import annotations

import torch

from k3tool.kernels.router.ties import same_where_tied


def routing(ids, weights):
    return torch.tensor(ids), torch.tensor(weights)


LOGITS = torch.tensor([[2.0, 1.0, 1.0 + 1e-6, -3.0]])


def agree(found, expected, logits=LOGITS, bias=None, activation="sigmoid"):
    one, other = same_where_tied(found, expected, logits, bias, activation)
    assert one.shape == other.shape == logits.shape
    return torch.equal(one, other)


def test_the_order_is_free_and_a_tie_may_go_either_way():
    expected = routing([[0, 2]], [[0.6, 0.4]])
    for activation in ("sigmoid", "softmax"):
        assert agree(routing([[2, 0]], [[0.4, 0.6]]), expected, activation=activation)
        assert agree(routing([[0, 1]], [[0.6, 0.4]]), expected, activation=activation)
    bias = torch.tensor([0.0, 0.0, 1e-6, 0.0])
    assert agree(routing([[0, 1]], [[0.6, 0.4]]), expected, bias=bias)


def test_what_is_no_tie_differs():
    expected = routing([[0, 2]], [[0.6, 0.4]])
    assert not agree(routing([[0, 3]], [[0.6, 0.4]]), expected)  # a worse expert
    assert not agree(routing([[0, 2]], [[0.4, 0.6]]), expected)  # weights of the wrong experts
    assert not agree(routing([[0, 1]], [[0.6, 0.4]]), expected, bias=torch.tensor([0.0, 0.0, 0.1, 0.0]))
    equal = torch.zeros(1, 4)
    assert not agree(routing([[0, 0]], [[0.6, 0.4]]), expected, logits=equal)  # one expert twice
    assert agree(routing([[3, 1]], [[0.6, 0.4]]), expected, logits=equal)
