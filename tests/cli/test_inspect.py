"""`k3tool inspect`: the golden checkpoint, the released index without shards, and wrong inputs."""

from __future__ import annotations

import gzip
import shutil
from pathlib import Path

import pytest

from k3tool.catalog import COMPONENTS
from tests.helpers import copy_checkpoint, k3tool


def test_json(mini: Path, capsys):
    ran = k3tool(capsys, "inspect", mini, "--json")
    document = ran.json
    assert ran.code == 0 and ran.err == ""
    assert document["ok"] and document["command"] == "inspect" and document["model_type"] == "kimi_k3"
    assert document["tensors"] == 734 and document["total_size"] == 1_147_856 and document["headers"] == "read"
    assert document["missing"] == document["unexpected"] == [] and set(document["components"]) == set(COMPONENTS)
    parts = document["components"].values()
    assert sum(part["bytes"] for part in parts) == 1_147_856 and sum(part["tensors"] for part in parts) == 734
    assert sum(part["parameters"] for part in parts) == document["parameters"]
    assert document["components"]["routed_experts"] == {"tensors": 504, "parameters": 258_048, "bytes": 137_088}
    assert document["shards"][0] == {"name": "model-00001-of-000011.safetensors", "bytes": 117_656, "tensors": 23}


def test_human_and_quiet(mini: Path, capsys):
    ran = k3tool(capsys, "inspect", mini)
    assert ran.code == 0 and "8 layers, 734 tensors" in ran.out and "routed_experts" in ran.out
    assert "model-00002-of-000011.safetensors and 4 like it" in ran.out
    assert k3tool(capsys, "inspect", mini, "-q").out == "1147856\n"


def test_listing(mini: Path, capsys):
    document = k3tool(capsys, "inspect", mini, "--tensors", "*experts.3.w1*", "--layer", 2, "--json").json
    assert [(item["name"], item["dtype"], item["shape"]) for item in document["listed"]] == [
        ("language_model.model.layers.2.block_sparse_moe.experts.3.w1.weight_packed", "U8", [32, 16]),
        ("language_model.model.layers.2.block_sparse_moe.experts.3.w1.weight_scale", "U8", [32, 1]),
    ]
    assert "2 tensors listed" in k3tool(capsys, "inspect", mini, "--tensors", "*experts.3.w1*", "--layer", 2).out


def test_released_index_without_shards(shared: Path, tmp_path: Path, capsys):
    shutil.copy(shared / "k3" / "config.json", tmp_path)
    text = gzip.decompress((shared / "k3" / "model.safetensors.index.json.gz").read_bytes())
    (tmp_path / "model.safetensors.index.json").write_bytes(text)
    document = k3tool(capsys, "inspect", tmp_path, "--json").json
    assert document["headers"] == "absent" and document["tensors"] == 497_220
    assert document["total_size"] == 1_560_860_324_864 and document["parameters"] == 2_779_931_837_184
    assert document["components"]["routed_experts"]["bytes"] == 1_446_456_066_048
    assert document["components"]["latent"] == {"tensors": 276, "parameters": 4_727_310_336, "bytes": 9_454_620_672}
    assert document["missing"] == document["unexpected"] == [] and len(document["missing_files"]) == 96
    assert document["shards"][1] == {"name": "model-00002-of-000096.safetensors", "bytes": None, "tensors": 5404}


def test_some_shards_absent(mini: Path, tmp_path: Path, capsys):
    copy = copy_checkpoint(mini, tmp_path / "copy")
    (copy / "model-00004-of-000011.safetensors").unlink()
    document = k3tool(capsys, "inspect", copy, "--json").json
    assert document["headers"] == "partial" and document["missing_files"] == ["model-00004-of-000011.safetensors"]
    assert document["total_size"] == 1_147_856


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["nowhere/at/all"], 10, "nowhere/at/all does not exist"),
        (["--layer", "8"], 2, "layer 8 does not exist"),
        (["--layer", "x"], 2, "Invalid value for '--layer'"),
        (["--nope"], 2, "No such option"),
    ],
)
def test_wrong_inputs(mini: Path, capsys, arguments, code, message):
    source = [] if "nowhere" in arguments[0] else [mini]
    ran = k3tool(capsys, "inspect", *source, *arguments)
    assert ran.code == code and message in ran.err and "hint: " in ran.err and ran.out == ""
    document = k3tool(capsys, "inspect", *source, *arguments, "--json").json
    assert not document["ok"] and document["error"]["code"] == code and message in document["error"]["message"]


def test_folder_that_is_no_checkpoint(tmp_path: Path, capsys):
    assert k3tool(capsys, "inspect", tmp_path).code == 10
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    ran = k3tool(capsys, "inspect", tmp_path)
    assert ran.code == 11 and "model_type 'llama'" in ran.err and "no Kimi K3 or Kimi Linear checkpoint" in ran.err


def test_terminal_escapes_in_names_are_shown_not_sent(mini: Path, tmp_path: Path, capsys):
    copy = copy_checkpoint(mini, tmp_path / "copy")
    index = copy / "model.safetensors.index.json"
    index.write_text(
        index.read_text().replace(
            '"weight_map": {', '"weight_map": {"\\u001b[31mred": "model-00001-of-000011.safetensors", '
        )
    )
    ran = k3tool(capsys, "inspect", copy)
    assert ran.code == 0 and "\x1b" not in ran.out and "\\x1b[31mred" in ran.out
