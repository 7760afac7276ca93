"""SiTU and SiLU gating against float64, over the whole range of float32."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from k3tool.kernels.dispatch import use
from k3tool.kernels.moe import gated_activation

BETA, LINEAR_BETA = 4.0, 25.0
# Each factor is within 3 units in the last place; five roundings follow.
RELATIVE = 16 * 2.0**-24
DENORMAL = 200 * 2.0**-149  # what is lost when a denormal is divided by a cap and multiplied by both
FLUSHED = 6e-39  # a sigmoid that small may become 0: it is denormal, or its exponential infinite


def exact(gate: Tensor, up: Tensor, activation: str, beta: float, linear_beta: float) -> Tensor:
    g, u = gate.double(), up.double()
    if activation == "silu":
        return g * torch.sigmoid(g) * u
    return beta * torch.tanh(g / beta) * torch.sigmoid(g) * linear_beta * torch.tanh(u / linear_beta)


def sweep() -> tuple[Tensor, Tensor]:
    """Every magnitude from denormal to infinite against ordinary partners, both signs."""
    sizes = 2.0 ** torch.arange(-140, 127, dtype=torch.float64)
    values = torch.cat([sizes, -sizes, torch.linspace(-100, 100, 4001, dtype=torch.float64), torch.zeros(1)]).float()
    partners = torch.tensor([0.3, -2.5, 17.0, -90.0])
    gate = torch.cat([values.repeat(4), partners.repeat_interleave(len(values))])
    up = torch.cat([partners.repeat_interleave(len(values)), values.repeat(4)])
    return gate, up


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("activation", ["situ", "silu"])
@pytest.mark.parametrize("caps", [(BETA, LINEAR_BETA), (1.7, 0.9)])
def test_against_float64(backend: str, activation: str, caps: tuple[float, float]) -> None:
    gate, up = sweep()
    wanted = exact(gate, up, activation, *caps)
    with use(backend):
        found = gated_activation(gate, up, activation, *caps)
    flushed = torch.where((gate < -87) & (gate > -104), FLUSHED * gate.abs().double() * up.abs().double(), DENORMAL)
    inside = wanted.abs() < 3e38
    assert ((found.double() - wanted).abs() <= wanted.abs() * RELATIVE + flushed)[inside].all()
    if activation == "situ":
        assert found.abs().max() <= caps[0] * caps[1] * (1 + RELATIVE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [0, 1, 3])
@pytest.mark.parametrize("width", [1, 7, 32, 100, 1025, 2049])
def test_views_of_one_product(dtype: torch.dtype, rows: int, width: int) -> None:
    """gate and up are halves of one tensor, as the model has them; bfloat16 is the float32 result rounded once."""
    both = torch.randn(rows, 2 * width, generator=torch.Generator().manual_seed(width)).to(dtype)
    gate, up = both.chunk(2, dim=-1)
    found = gated_activation(gate, up, "situ", BETA, LINEAR_BETA)
    assert found.dtype == dtype and found.shape == (rows, width)
    single = gated_activation(gate.float().contiguous(), up.float().contiguous(), "situ", BETA, LINEAR_BETA)
    assert torch.equal(found, single.to(dtype))


def test_not_a_number_stays_one() -> None:
    nan = torch.full((20,), float("nan"))
    for gate, up in ((nan, torch.ones(20)), (torch.ones(20), nan)):
        for activation in ("situ", "silu"):
            assert gated_activation(gate, up, activation, BETA, LINEAR_BETA).isnan().all()


def test_an_unknown_activation_is_refused() -> None:
    with pytest.raises(ValueError, match="gelu"):
        gated_activation(torch.ones(2), torch.ones(2), "gelu", BETA, LINEAR_BETA)
