"""A folder as NVIDIA's ModelOpt writes NVFP4: scales of inputs beside the weights, and what it says of itself twice."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from k3tool.quantize import quantize
from tests.helpers import k3tool

OWN = ("k3tool-manifest.json", "k3tool-quantization.json", "README.md")


@pytest.fixture(scope="module")
def modelopt(mini: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Experts in NVFP4 by ModelOpt's names, each with an `input_scale`; `config.json` and `hf_quant_config.json` as
    ModelOpt 0.39 lays them out."""
    folder = tmp_path_factory.mktemp("modelopt") / "source"
    quantize(mini, folder, experts="nvfp4-modelopt")
    index = json.loads((folder / "model.safetensors.index.json").read_bytes())
    total = 0
    for shard in folder.glob("*.safetensors"):
        tensors = load_file(shard)
        for number, name in enumerate([name for name in tensors if name.endswith(".weight_scale_2")]):
            made = name.replace("weight_scale_2", "input_scale")
            tensors[made] = torch.tensor(0.01 + number / 1000)
            index["weight_map"][made] = shard.name
        total += sum(tensor.nbytes for tensor in tensors.values())
        save_file(tensors, shard, metadata={"format": "pt"})
    index["metadata"]["total_size"] = total
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    for name in OWN:
        (folder / name).unlink()
    document = json.loads((folder / "config.json").read_bytes())
    ignored = document["text_config"].pop("quantization_config")["ignore"]
    weights = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
    producer = {"name": "modelopt", "version": "0.39.0"}
    document["quantization_config"] = {
        "config_groups": {"group_0": {"input_activations": weights, "weights": weights, "targets": ["Linear"]}},
        "ignore": ignored,
        "quant_algo": "NVFP4",
        "producer": producer,
        "quant_method": "modelopt",
    }
    (folder / "config.json").write_text(json.dumps(document))
    said = {"quant_algo": "NVFP4", "kv_cache_quant_algo": None, "group_size": 16, "exclude_modules": ignored}
    (folder / "hf_quant_config.json").write_text(json.dumps({"producer": producer, "quantization": said}))
    return folder


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for shard in folder.glob("*.safetensors") for name, tensor in load_file(shard).items()}


def test_every_command_reads_it(modelopt: Path, mini: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = k3tool(capsys, "inspect", modelopt, "--json").json
    assert not shown["unexpected"] and not shown["missing"] and "other" not in shown["components"]
    for depth in ("names", "headers"):
        assert k3tool(capsys, "verify", modelopt, "--depth", depth).code == 0
    assert k3tool(capsys, "plan", modelopt, "--gpus", 2, "--ep", 2).code == 0
    prompt = ["--input-ids", "1,2,3", "--max-new-tokens", 4, "--dtype", "float32", "--json"]
    ran = [k3tool(capsys, "run", folder, *prompt) for folder in (mini, modelopt)]
    assert ran[0].json["token_ids"] == ran[1].json["token_ids"], "the values are those of MXFP4"
    assert k3tool(capsys, "fetch", modelopt, "--local-dir", tmp_path / "two", "--layers", "0-1").code == 0
    assert k3tool(capsys, "verify", tmp_path / "two").code == 0


def test_ranks_and_back_bit_for_bit(modelopt: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ranks, back = tmp_path / "ranks", tmp_path / "back"
    assert k3tool(capsys, "reshard", modelopt, ranks, "--gpus", 4, "--ep", 2, "--pp", 2, "--verify").code == 0
    assert k3tool(capsys, "reshard", ranks, back, "--gpus", 1, "--layout", "hf", "--verify").code == 0
    before, after = tensors_of(modelopt), tensors_of(back)
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    for name in ("config.json", "hf_quant_config.json"):
        assert (back / name).read_bytes() == (modelopt / name).read_bytes()


def test_scales_of_inputs_stay_with_what_stays(
    modelopt: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert k3tool(capsys, "quantize", modelopt, tmp_path / "q", "--latent", "int8").code == 0
    before, after = tensors_of(modelopt), tensors_of(tmp_path / "q")
    kept = [name for name in before if ".experts." in name]
    assert sum(name.endswith(".input_scale") for name in kept) == 252
    assert all(torch.equal(before[name], after[name]) for name in kept)
    assert json.loads((tmp_path / "q" / "hf_quant_config.json").read_bytes())["producer"]["version"] == "k3tool"


@pytest.mark.parametrize("layout", [[], ["--gpus", 2, "--ep", 2]])
def test_what_is_decoded_says_nothing_of_modelopt(
    modelopt: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], layout: list[object]
) -> None:
    out = tmp_path / "q"
    assert k3tool(capsys, "quantize", modelopt, out, "--experts", "bf16", *layout).code == 0
    assert not list(out.rglob("hf_quant_config.json"))
    for shard in out.rglob("*.safetensors"):
        assert not any(name.endswith("input_scale") for name in load_file(shard))
    assert "quantization_config" not in (out / "config.json").read_text()
    assert k3tool(capsys, "verify", out, "--depth", "bytes").code == 0
    shutil.rmtree(out)


def test_a_scale_of_inputs_that_is_none_is_refused(
    modelopt: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(modelopt, broken)
    shard = next(
        shard for shard in broken.glob("*.safetensors") if any("input_scale" in name for name in load_file(shard))
    )
    tensors = load_file(shard)
    name = next(name for name in tensors if name.endswith("input_scale"))
    tensors[name] = torch.zeros(7)
    save_file(tensors, shard, metadata={"format": "pt"})
    ran = k3tool(capsys, "reshard", broken, tmp_path / "out", "--gpus", 2, "--ep", 2)
    assert ran.code == 11 and name in ran.err
