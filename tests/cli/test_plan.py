"""`k3tool plan` end to end: every kind of source, the contract's document, and every way to be refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from k3tool import release
from k3tool.standin import serve
from tests.helpers import copy_checkpoint, k3tool, k3tool_process


def test_json(capsys):
    ran = k3tool(capsys, "plan", "k3", "--gpus", 16, "--ep", 16, "--gpu-memory", "b300", "--gpu-price", "2.5", "--json")
    document = ran.json
    assert ran.code == 0 and document["ok"] is True and document["command"] == "plan"
    assert document["layout"] == {"tp": 1, "ep": 16, "pp": 1} and document["gpus"] == 16
    assert document["fits"] is True and document["gpu"] == "b300" and document["margin_bytes"] == 28_800_000_000
    assert "only possible layout" in document["reason"]
    # 113.5 GB of text model without experts, a sixteenth of the experts, and the vision tower.
    weights = 113_509_540_864 + 1_446_456_066_048 // 16 + 894_717_952
    assert [rank["rank"] for rank in document["ranks"]] == list(range(16))
    for rank in document["ranks"]:
        assert rank["weights_bytes"] == weights == sum(rank["components"].values())
        assert rank["kda_state_bytes"] == 434_110_464 and rank["conv_history_bytes"] == 15_261_696
        assert rank["mla_cache_bytes"] == 27_648 * 131_072
        parts = ("weights_bytes", "kda_state_bytes", "conv_history_bytes", "mla_cache_bytes", "activation_bytes")
        assert rank["total_bytes"] == sum(rank[part] for part in parts)
    assert document["price_per_hour"] == 40.0 and document["even_share_bytes"] == release.TOTAL_SIZE // 16
    assert {"tp": 8, "ep": 2, "pp": 1}.items() <= document["alternatives"][0].items()
    assert document["alternatives"][0]["price_per_hour"] == 40.0
    schemes = {item["scheme"]: item for item in document["effects"]["latent"]}
    assert schemes["nf4"]["weights_bytes"] < weights == schemes["keep"]["weights_bytes"]


def test_what_people_see(capsys):
    ran = k3tool(capsys, "plan", "k3", "--gpus", 16, "--gpu-memory", "h200")
    assert (
        ran.code == 0 and "TP8 x EP2 x PP1 on 16 GPUs" in ran.out and "fits: the largest rank needs 120 GB" in ran.out
    )
    assert (
        "0-15" in ran.out and "experts nf4: TP 8 cannot divide" in ran.out and "possible TP: 1, 2, 3, 4, 6" in ran.out
    )
    assert ran.err == "cut it so: k3tool reshard moonshotai/Kimi-K3 DEST --gpus 16 --tp 8 --ep 2 --pp 1\n"
    small = k3tool(capsys, "plan", "k3", "--gpus", 8, "--gpu-memory", "h200")
    assert small.code == 0 and small.err == "" and "DOES NOT FIT" in small.out and "TP8 x EP2 x PP1" in small.out
    quiet = k3tool(capsys, "plan", "k3", "--gpus", 8, "--gpu-memory", "h200", "-q")
    assert quiet.out == "TP8 x EP1 x PP1 does not fit\n" and quiet.err == ""
    assert k3tool(capsys, "plan", "k3", "--gpu-memory", "h200", "-q").out == "TP8 x EP2 x PP1 fits\n"


def test_every_kind_of_source_gives_the_same_bytes(mini: Path, tmp_path: Path, capsys, monkeypatch):
    def planned(source: object) -> tuple[object, str]:
        document = k3tool(capsys, "plan", source, "--gpus", 4, "--ep", 2, "--pp", 2, "--json").json
        return document["ranks"], document["origin"]

    ranks, origin = planned(mini)
    assert origin == "counted in the headers of 11 shards"
    assert planned(mini / "config.json") == (ranks, "computed from the configuration")
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_bytes((mini / "config.json").read_bytes())
    assert planned(bare) == (ranks, "computed from its config.json")
    partial = copy_checkpoint(mini, tmp_path / "partial")
    (partial / "model-00002-of-000011.safetensors").unlink()
    assert planned(partial) == (ranks, "computed from its config.json; 1 shards are absent")
    with serve(mini, "some/where") as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        assert planned("some/where") == (ranks, "computed from its config.json")
    # A folder of this name wins over the built-in release.
    monkeypatch.chdir(tmp_path)
    bare.rename(tmp_path / "k3")
    assert planned("k3")[0] == ranks


def test_other_storage_is_planned(capsys):
    def largest(*options: str) -> int:
        document = k3tool(capsys, "plan", "k3", "--gpus", 16, *options, "--json").json
        return max(rank["weights_bytes"] for rank in document["ranks"])

    assert largest("--experts", "nvfp4") > largest() > largest("--latent", "nf4")
    states = k3tool(capsys, "plan", "k3", "--gpus", 16, "--tp", 8, "--experts", "nf4", "--json")
    assert states.code == 14 and "TP 8 cannot divide" in states.json["error"]["message"]


@pytest.mark.parametrize(
    ("options", "code", "says"),
    [
        (("k3", "--gpus", "16", "--tp", "5", "--ep", "2"), 2, "does not make 16 GPUs"),
        (("k3",), 2, "neither GPUs nor their memory"),
        (("k3", "--gpus", "0"), 2, "gpus"),
        (("k3", "--gpus", "8", "--gpu-memory", "many"), 2, "unknown GPU memory 'many'"),
        (("k3", "--gpus", "8", "--context", "2000000"), 2, "2000000 tokens"),
        (("k3", "--gpus", "8", "--sequences", "0"), 2, "sequences"),
        (("k3", "--gpus", "8", "--experts", "int3"), 2, "unknown scheme 'int3'"),
        (("k3", "--gpus", "8", "--gpu-price", "-1"), 2, "price"),
        (("k3", "--gpus", "8", "--report", "/nowhere/at/all.html"), 2, "cannot write"),
        (("k3", "--gpus", "5", "--tp", "5"), 14, "TP 5 does not divide the KDA heads (96)"),
        (("k3", "--gpus", "9", "--ep", "9"), 14, "EP 9 does not divide the experts (896)"),
        (("k3", "--gpus", "94", "--pp", "94"), 14, "PP 94 has more stages than the model has layers (93)"),
        (("k3", "--gpus", "64", "--tp", "64"), 14, "TP 64 does not divide"),
        (("absent-folder", "--gpus", "8"), 10, "does not exist"),
    ],
)
def test_refusals(capsys, options: tuple[str, ...], code: int, says: str):
    ran = k3tool(capsys, "plan", *options)
    assert ran.code == code and ran.out == ""
    cause, hint = ran.err.splitlines()
    assert cause.startswith("error: ") and says in cause and hint.startswith("hint: ")
    failure = k3tool(capsys, "plan", *options, "--json").json
    assert failure["ok"] is False and failure["error"]["code"] == code


def test_impossible_layouts_name_the_nearest_possible(capsys):
    error = k3tool(capsys, "plan", "k3", "--gpus", 7, "--tp", 7, "--json").json["error"]
    assert "possible: TP" in error["hint"] and {"tp", "ep", "pp"} == set(error["details"]["nearest"][0])
    assert len(error["details"]["reasons"]) >= 2


def test_damaged_sources(mini: Path, tmp_path: Path, capsys):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert k3tool(capsys, "plan", tmp_path, "--gpus", 2).code == 11
    assert k3tool(capsys, "plan", tmp_path / "config.json", "--gpus", 2).code == 11
    copy = copy_checkpoint(mini, tmp_path / "copy")
    with open(copy / "model-00003-of-000011.safetensors", "r+b") as file:
        file.truncate(9000)
    ran = k3tool(capsys, "plan", copy, "--gpus", 2)
    assert ran.code == 11 and "model-00003-of-000011.safetensors" in ran.err


def test_report(tmp_path: Path, capsys):
    page = tmp_path / "plan.html"
    ran = k3tool(capsys, "plan", "k3", "--gpus", 16, "--report", page, "--json")
    assert ran.code == 0 and ran.json["report"] == str(page)
    text = page.read_text()
    assert text.startswith("<!doctype html>") and "rank 15" in text and "rank 16" not in text


def test_neither_torch_nor_the_network_is_needed():
    code = "import sys; from k3tool.cli import app; app.run(['plan', 'k3', '--gpus', '8', '--json']); " + (
        "assert not {'torch', 'huggingface_hub'} & set(sys.modules), sorted(sys.modules)"
    )
    import subprocess
    import sys

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["ok"] is True
    assert k3tool_process("plan", "--help").code == 0
