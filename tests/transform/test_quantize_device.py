"""`quantize --device`: the same checkpoint, byte for byte, and a GPU that is not here is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from k3tool.errors import UnsupportedError
from k3tool.formats import device
from k3tool.quantize import prepare, quantize
from k3tool.transform.quantize_policy import make_policy
from tests.helpers import k3tool

CHOICES = (
    {"latent": "int4", "shared": "nvfp4"},
    {"latent": "nf4", "shared": "fp8-channel", "experts": "int4"},
    {"latent": "mxfp4", "shared": "int8", "experts": "nvfp4"},
)


def shards(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


@pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("choice", CHOICES, ids=lambda choice: "-".join(choice.values()))
def test_the_checkpoint_is_the_same(mini: Path, tmp_path: Path, choice: dict[str, str], where: str) -> None:
    if where == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    compiled = quantize(mini, tmp_path / "compiled", **choice)  # type: ignore[arg-type]
    made = quantize(mini, tmp_path / "made", device=where, **choice)  # type: ignore[arg-type]
    assert shards(tmp_path / "made") == shards(tmp_path / "compiled")
    for one, other in zip(made.rows, compiled.rows, strict=True):
        assert one[:5] == other[:5] and np.allclose(one.measured, other.measured, rtol=1e-12)
    again = quantize(mini, tmp_path / "made", **choice)  # type: ignore[arg-type]
    assert again.report.bytes_read == 0  # the device is no part of what the job is


def test_the_device_is_used(mini: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    sound = device.convert_on
    monkeypatch.setattr(device, "convert_on", lambda name, *rest: asked.append(name) or sound(name, *rest))
    quantize(mini, tmp_path / "q", latent="int4", device="cpu")
    assert asked == ["cpu"] * 14


def test_without_a_gpu(
    mini: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UnsupportedError, match="torch finds no GPU"):
        prepare(mini, make_policy({"latent": "int4"}), device="cuda")
    ran = k3tool(capsys, "quantize", mini, tmp_path / "q", "--latent", "int4", "--device", "cuda")
    assert ran.code == 14 and "torch finds no GPU on this machine" in ran.err and "leave --device out" in ran.err
    assert not (tmp_path / "q").exists()
    ran = k3tool(capsys, "quantize", mini, tmp_path / "q", "--format", "gguf", "--device", "cuda")
    assert ran.code == 2 and "--device cuda does not go with --format gguf" in ran.err
