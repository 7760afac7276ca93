"""`run` on everything that `quantize` writes: exact schemes give the source's logits, the others a known distance."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from k3tool.generate import Session
from k3tool.quantize import quantize
from k3tool.synthetic import tiny_config, write_checkpoint

EXACT = ("nvfp4", "nvfp4-modelopt", "bf16", "int8", "fp8-channel")
GOLDEN_BOUND = 5e-5  # as for the source itself: float32 rounding that a random network amplifies
SAME_BOUND = 1e-5  # the source and an exact copy of it, by kernels for another format
# How far the hidden states move in the first layer with experts: about as far as the weights themselves, before other
# experts are chosen because of it. Measured once; a scheme that is read wrongly is far off.
ROUNDED: dict[tuple[str, str], float] = {
    ("experts", "int4"): 0.0807,
    ("experts", "nf4"): 0.0839,
    ("experts", "fp4"): 0.1001,
    ("latent", "nvfp4"): 0.0877,
    ("latent", "nvfp4-modelopt"): 0.0877,
    ("latent", "mxfp4"): 0.1190,
    ("latent", "int8"): 0.0060,
    ("latent", "int4"): 0.0918,
    ("latent", "fp8-channel"): 0.0231,
    ("latent", "nf4"): 0.1017,
    ("latent", "fp4"): 0.1331,
    ("shared", "nvfp4"): 0.0536,
    ("shared", "mxfp4"): 0.0736,
    ("shared", "int8"): 0.0035,
    ("shared", "int4"): 0.0580,
    ("shared", "fp8-channel"): 0.0149,
    ("shared", "nf4"): 0.0600,
    ("shared", "fp4"): 0.0811,
}


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


def logits_of(folder: Path, ids: list[int]) -> torch.Tensor:
    return Session.open(folder, device="cpu", dtype="float32").prefill(ids, all_logits=True)


def golden_of(folder: Path) -> tuple[list[int], torch.Tensor]:
    golden = load_file(folder / "golden.safetensors")
    return golden["input_ids"].tolist(), golden["logits"].float()


@pytest.fixture(scope="module")
def own(mini: Path) -> torch.Tensor:
    """Logits of the unquantized checkpoint by k3tool."""
    return logits_of(mini, golden_of(mini)[0])


@pytest.mark.parametrize("scheme", EXACT)
def test_exact_experts_give_the_logits_of_the_source(
    mini: Path, own: torch.Tensor, tmp_path: Path, scheme: str
) -> None:
    ids, expected = golden_of(mini)
    done = quantize(mini, tmp_path / "made", experts=scheme, exact=True).components["routed_experts"]
    assert done["exact_tensors"] == done["tensors"] == 252
    found = logits_of(tmp_path / "made", ids)
    assert relative(found, expected) < GOLDEN_BOUND and relative(found, own) < SAME_BOUND
    assert torch.equal(found.argmax(-1), expected.argmax(-1))


def after_first_experts(folder: Path, ids: list[int]) -> torch.Tensor:
    seen: dict[tuple[str, int], torch.Tensor] = {}
    session = Session.open(folder, device="cpu", dtype="float32")
    session.prefill(ids, observe=lambda what, layer, x: seen.update({(what, layer): x.clone()}))
    return seen["hidden", session.config.moe_layers[0]]


@pytest.fixture(scope="module")
def hidden(mini: Path) -> torch.Tensor:
    return after_first_experts(mini, golden_of(mini)[0])


@pytest.mark.parametrize(("component", "scheme"), list(ROUNDED))
def test_rounded_schemes_are_as_far_as_measured(
    mini: Path, hidden: torch.Tensor, tmp_path: Path, component: str, scheme: str
) -> None:
    quantize(mini, tmp_path / "made", **{component: scheme})  # type: ignore[arg-type]
    found = relative(after_first_experts(tmp_path / "made", golden_of(mini)[0]), hidden)
    assert found == pytest.approx(ROUNDED[component, scheme], rel=0.02)


@pytest.mark.parametrize("scheme", ["nvfp4", "int8", "fp8-channel"])
def test_larger_golden_checkpoint(shared: Path, tmp_path: Path, scheme: str) -> None:
    folder = shared / "golden" / "k3-tiny-14"
    ids, expected = golden_of(folder)
    quantize(folder, tmp_path / "made", experts=scheme, exact=True)
    found = logits_of(tmp_path / "made", ids)
    assert relative(found, expected) < GOLDEN_BOUND
    assert torch.equal(found.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("component", ["experts", "latent"])
def test_blocks_of_fp8_on_shapes_that_hold_them(tmp_path: Path, component: str) -> None:
    """Golden checkpoints are too narrow for blocks of 128 x 128."""
    config = tiny_config(
        num_layers=4, hidden_size=128, num_experts=4, moe_intermediate_size=128, latent_size=128, vision=False
    )
    write_checkpoint(tmp_path / "source", config, seed=3)
    done = quantize(tmp_path / "source", tmp_path / "made", **{component: "fp8-block"})  # type: ignore[arg-type]
    ids = list(range(7, 27))
    found = relative(logits_of(tmp_path / "made", ids), logits_of(tmp_path / "source", ids))
    entry = done.components["routed_experts" if component == "experts" else "latent"]
    if component == "experts":
        assert entry["exact_tensors"] == entry["tensors"] and found < SAME_BOUND
    else:
        assert entry["exact_tensors"] == 0 and SAME_BOUND < found < 0.05
