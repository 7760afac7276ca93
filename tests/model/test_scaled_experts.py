"""Experts in FP8 or integers, kept as they are stored: the values of decoded ones, and runs that agree."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from k3tool.checkpoint.reader import Checkpoint
from k3tool.errors import CheckpointCorrupt
from k3tool.events import SILENT
from k3tool.generate import Session
from k3tool.kernels.moe import DenseExperts, ScaledExperts
from k3tool.model import experts as experts_module
from k3tool.model.load import load_model, prepare_model
from k3tool.model.scaled_experts import load_scaled
from k3tool.model.weights import Weights
from k3tool.quantize import quantize
from k3tool.synthetic import tiny_config, write_checkpoint

SCHEMES = ("int4", "int8", "fp8-channel", "fp8-block")
PREFIX = "language_model.model.layers.1.block_sparse_moe.experts"
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A two-layer checkpoint whose expert matrices are 128 x 128, under every scheme."""
    plain = tmp_path_factory.mktemp("plain")
    wide = {"moe_intermediate_size": 128, "latent_size": 128, "num_experts": 4, "experts_per_token": 2}
    write_checkpoint(plain, tiny_config(num_layers=2, vocab_size=320, vision=False, **wide), seed=2)
    made = {}
    for scheme in SCHEMES:
        made[scheme] = tmp_path_factory.mktemp(scheme)
        quantize(plain, made[scheme] / "out", experts=scheme)
    return {scheme: folder / "out" for scheme, folder in made.items()}


def declared(folder: Path, scheme: str) -> tuple[Weights, ScaledExperts | None]:
    checkpoint = Checkpoint.open(folder)
    prepared = prepare_model(checkpoint, device=CPU, dtype=torch.float32)
    weights = Weights(checkpoint, prepared.located, CPU, SILENT)
    return weights, load_scaled(weights, prepared.share.config, PREFIX, range(4), scheme)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_values_are_those_of_decoded_experts(folders: dict[str, Path], scheme: str) -> None:
    weights, scaled = declared(folders[scheme], scheme)
    weights.fill()
    assert isinstance(scaled, ScaledExperts)
    dense = load_model(Checkpoint.open(folders[scheme]), device=CPU, dtype=torch.float32).layers[1].mlp.experts
    assert isinstance(dense, DenseExperts)
    for name in ("w1", "w3", "w2"):
        for expert in range(4):
            assert torch.equal(scaled.matrix(name, expert, torch.bfloat16), dense.matrix(name, expert, torch.bfloat16))
    assert scaled.nbytes < 0.6 * dense.nbytes


@pytest.mark.parametrize("scheme", ("int4", "fp8-block"))
def test_a_model_keeps_them_where_kernels_take_them(folders: dict[str, Path], scheme: str, monkeypatch) -> None:
    """Every tensor of the checkpoint still counts as used, and the run agrees with one on decoded experts."""
    expected = Session.open(folders[scheme], device="cpu", dtype="float32").prefill([3, 4, 5], all_logits=True)
    monkeypatch.setattr(experts_module, "keeps_stored", lambda device: True)
    session = Session.open(folders[scheme], device="cpu", dtype="float32")
    assert isinstance(session.model.layers[1].mlp.experts, ScaledExperts)
    found = session.prefill([3, 4, 5], all_logits=True)
    # 1e-2: decoded experts are rounded to bfloat16, kept ones are not.
    assert ((found - expected).norm() / expected.norm()).item() < 1e-2


def test_what_no_kernel_takes_is_decoded(folders: dict[str, Path], monkeypatch) -> None:
    monkeypatch.setattr("k3tool.model.scaled_experts.GROUP_SIZES", (0,))
    assert declared(folders["int4"], "int4")[1] is None
    monkeypatch.setattr(experts_module, "keeps_stored", lambda device: True)
    model = load_model(Checkpoint.open(folders["int4"]), device=CPU, dtype=torch.float32)
    assert isinstance(model.layers[1].mlp.experts, DenseExperts)


def test_a_code_that_stands_for_nan_is_refused(folders: dict[str, Path]) -> None:
    weights, scaled = declared(folders["fp8-channel"], "fp8-channel")
    assert scaled is not None
    weights._conversions.append(lambda: scaled.w3_codes[2].view(-1)[5].fill_(0xFF))
    with pytest.raises(CheckpointCorrupt, match=r"experts\.2\.w3"):
        weights.fill()
