"""`k3tool reshard` from the outside: documents, exit codes, the Hub, launchers."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from k3tool.checkpoint.reader import Checkpoint
from k3tool.standin import serve
from k3tool.synthetic import tiny_config, write_checkpoint
from tests.helpers import copy_checkpoint, k3tool, k3tool_process


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("source") / "k3"
    document = tiny_config(num_layers=4, kda_heads=4, mla_heads=4, moe_intermediate_size=128, num_experts=16,
                           vocab_size=518, hidden_size=64, latent_size=64)  # fmt: skip
    write_checkpoint(folder, document, tokenizer=True)
    return folder


def tensors(folder: Path) -> dict[str, bytes]:
    checkpoint = Checkpoint.open(folder)
    return {name: checkpoint.read(name) for name in checkpoint.index.weight_map}


def test_ranks_and_back(source, tmp_path, capsys):
    ranks, joined = tmp_path / "ranks", tmp_path / "joined"
    ran = k3tool(capsys, "reshard", source, ranks, "--gpus", 8, "--tp", 2, "--pp", 2, "--verify", "--json")
    assert ran.code == 0 and ran.json["ok"] and ran.json["command"] == "reshard"
    assert ran.json["layout"] == {"tp": 2, "ep": 2, "pp": 2} and ran.json["verified"]["ok"] is True
    assert [item["rank"] for item in ran.json["ranks"]] == list(range(8))
    for item in ran.json["ranks"]:
        assert all((ranks / file).is_file() for file in item["files"])
        assert item["bytes"] == sum((ranks / file).stat().st_size for file in item["files"])
    assert {"bytes_read", "bytes_written", "seconds", "peak_memory_bytes", "reason"} <= set(ran.json)
    assert ran.json["bytes_read"] > 0 < ran.json["seconds"] and ran.json["peak_memory_bytes"] > 2**20
    assert sorted(path.name for path in (ranks / "rank-00003-of-00008").iterdir()) == [
        "config.json", "generation_config.json", "k3tool-manifest.json", "model-00001-of-000001.safetensors",
        "model.safetensors.index.json", "tiktoken.model", "tokenizer_config.json",
    ]  # fmt: skip
    ran = k3tool(capsys, "reshard", ranks, joined, "--gpus", 1, "--layout", "hf", "--json")
    assert ran.code == 0 and tensors(joined) == tensors(source)
    for name in ("config.json", "tiktoken.model", "tokenizer_config.json", "generation_config.json"):
        assert (joined / name).read_bytes() == (source / name).read_bytes()
    assert k3tool(capsys, "verify", joined, "--depth", "bytes").code == 0


def test_golden_checkpoint_for_every_scheme_of_division(mini, tmp_path, capsys):
    original = tensors(mini)
    for number, options in enumerate((["--ep", 4], ["--pp", 8], ["--ep", 3, "--pp", 2])):
        ranks, joined = tmp_path / f"r{number}", tmp_path / f"j{number}"
        assert k3tool(capsys, "reshard", mini, ranks, *options).code == 0
        assert k3tool(capsys, "reshard", ranks, joined, "--gpus", 1, "--layout", "hf").code == 0
        assert tensors(joined) == original
        assert not (joined / "golden.safetensors").exists()


def test_dry_run_writes_nothing_and_tells_all(source, tmp_path, capsys):
    ran = k3tool(capsys, "reshard", source, tmp_path / "out", "--gpus", 4, "--dry-run", "--json")
    assert ran.code == 0 and not (tmp_path / "out").exists()
    planned = ran.json
    done = k3tool(capsys, "reshard", source, tmp_path / "out", "--gpus", 4, "--json").json
    assert [r["files"] for r in planned["ranks"]] == [r["files"] for r in done["ranks"]]
    assert planned["bytes_written"] == pytest.approx(done["bytes_written"], rel=0.1)
    assert planned["tensors"] == len(Checkpoint.open(source).index.weight_map)
    human = k3tool(capsys, "reshard", source, tmp_path / "out", "--gpus", 4, "--dry-run")
    assert "TP4 x EP1 x PP1" in human.out and "to read" in human.out


@pytest.mark.parametrize("options", [["--tp", 4], ["--tp", 4, "--rank", 1], ["--tp", 2, "--ep", 2, "--rank", "0-2"],
                                     ["--ep", 4], ["--pp", 2]])  # fmt: skip
def test_the_plan_knows_what_will_be_read(source, tmp_path, capsys, options):
    planned = k3tool(capsys, "reshard", source, tmp_path / "out", *options, "--dry-run", "--json").json["bytes_read"]
    done = k3tool(capsys, "reshard", source, tmp_path / "out", *options, "--json").json["bytes_read"]
    assert planned == pytest.approx(done, rel=0.002)  # the padding of A_log and vocabulary is not read


def test_max_shard_size_and_quiet(source, tmp_path, capsys):
    out = tmp_path / "out"
    ran = k3tool(capsys, "reshard", source, out, "--gpus", 1, "--layout", "hf", "--max-shard-size", "200kB", "-q")
    assert ran.code == 0 and ran.out == f"{out}\n"
    sizes = [path.stat().st_size for path in out.glob("*.safetensors")]
    assert len(sizes) > 5 and sorted(sizes)[len(sizes) // 2] < 230_000
    assert tensors(out) == tensors(source)


@pytest.mark.parametrize(
    ("options", "code", "says"),
    [
        (["--tp", 3], 14, "TP 3 does not divide the KDA heads (4)"),
        (["--ep", 5], 14, "EP 5 does not divide the experts (16)"),
        (["--pp", 9], 14, "PP 9 has more stages than the model has layers (4)"),
        (["--tp", 8], 14, "TP 8"),
        (["--gpus", 8, "--tp", 3], 2, "TP3 does not make 8 GPUs"),
        (["--gpus", 4, "--rank", "4"], 2, "rank 4 does not exist"),
        (["--gpus", 4, "--rank", "x"], 2, "--rank: not a list of ranks: 'x'"),
        (["--gpus", 4, "--max-shard-size", "0"], 2, "--max-shard-size 0 is too small"),
        (["--gpus", 4, "--max-shard-size", "5"], 2, "--max-shard-size 5 is too small"),
        (["--gpus", 4, "--max-shard-size", "-5GB"], 2, "a size is positive"),
        (["--gpus", 4, "--layout", "gguf"], 2, "unknown layout 'gguf'"),
        (["--gpus", 4, "--layout", "hf", "--rank", "1"], 2, "--rank goes with --layout ranks"),
        (["--gpus", 4, "--part", "5/4"], 2, "part 5 of 4 does not exist"),
        (["--gpus", 4, "--max-shard-size", "big"], 2, "not a size"),
        (["--gpus", 4, "--max-memory", "1MB"], 12, "--max-memory 1 MB is too little"),
        (["--gpus", 4, "--nonsense"], 2, "No such option"),
    ],
)
def test_refusals(source, tmp_path, capsys, options, code, says):
    ran = k3tool(capsys, "reshard", source, tmp_path / "out", *options)
    assert ran.code == code and says in ran.err and "hint: " in ran.err and "Traceback" not in ran.err
    assert not list(tmp_path.rglob("*.safetensors"))
    ran = k3tool(capsys, "reshard", source, tmp_path / "out", *options, "--json")
    assert ran.code == code and ran.json["ok"] is False and ran.json["error"]["code"] == code


def test_sources_that_are_none(tmp_path, capsys, mini):
    assert k3tool(capsys, "reshard", tmp_path / "absent", tmp_path / "out", "--gpus", 2).code == 10
    (tmp_path / "empty").mkdir()
    assert k3tool(capsys, "reshard", tmp_path / "empty", tmp_path / "out", "--gpus", 2).code == 10
    damaged = copy_checkpoint(mini, tmp_path / "damaged")
    shard = damaged / "model-00002-of-000011.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    ran = k3tool(capsys, "reshard", damaged, tmp_path / "out", "--pp", 2)
    assert ran.code == 11 and "model-00002-of-000011.safetensors is truncated" in ran.err
    assert not (tmp_path / "out").exists()


def test_torchrun_like_processes_share_the_work(source, tmp_path):
    out = tmp_path / "out"
    processes = [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "k3tool",
                "reshard",
                str(source),
                str(out),
                "--tp",
                "2",
                "--max-shard-size",
                "300kB",
            ],
            env={**os.environ, "TORCHELASTIC_RUN_ID": "none", "RANK": str(rank), "WORLD_SIZE": "2"},
            stderr=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [process.communicate(timeout=300) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said
    assert {f"part {number} of 2, started by torchrun" for number in (1, 2)} <= {
        line for _, err in said for line in err.splitlines()
    }
    whole = k3tool_process("reshard", source, tmp_path / "whole", "--tp", 2, "--max-shard-size", "300kB")
    assert whole.code == 0
    for path in (tmp_path / "whole").rglob("*"):
        if path.is_file() and "manifest" not in path.name:
            assert path.read_bytes() == (out / path.relative_to(tmp_path / "whole")).read_bytes()


def test_finalize(source, tmp_path, capsys):
    out = tmp_path / "out"
    options = ["--tp", 2, "--max-shard-size", "300kB"]
    ran = k3tool(capsys, "reshard", source, out, *options, "--part", "1/2", "--json")
    assert ran.code == 3 and ran.json["ok"] is ran.json["complete"] is False
    ran = k3tool(capsys, "reshard", source, out, *options, "--finalize")
    assert ran.code == 3 and "files are not written yet" in ran.err
    assert k3tool(capsys, "reshard", source, out, *options, "--part", "2/2", "--json").json["complete"] is True
    assert k3tool(capsys, "reshard", source, out, *options, "--finalize").code == 0


def test_reclaim_on_the_command_line(source, tmp_path, capsys):
    copy = shutil.copytree(source, tmp_path / "k3")
    expected = tensors(copy)
    out = tmp_path / "out"
    assert k3tool(capsys, "reshard", copy, out, "--gpus", 1, "--layout", "hf", "--reclaim").code == 0
    assert tensors(out) == expected and not list(copy.glob("*.safetensors"))


# The Hub


@pytest.fixture(scope="module")
def large(tmp_path_factory) -> Path:
    """Experts are most of it, and no shard is small enough to be read whole."""
    folder = tmp_path_factory.mktemp("large") / "k3"
    document = tiny_config(num_layers=3, kda_heads=2, mla_heads=2, moe_intermediate_size=128, num_experts=64,
                           vocab_size=1024, hidden_size=128, latent_size=128, vision=False)  # fmt: skip
    write_checkpoint(folder, document)
    return folder


@pytest.fixture
def hub(large, monkeypatch):
    with serve(large, "org/k3") as stand_in:
        monkeypatch.setenv("HF_ENDPOINT", stand_in.endpoint)
        yield stand_in


def test_one_rank_from_the_hub_fetches_little_more_than_its_bytes(large, hub, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("k3tool.checkpoint.ranges.REMOTE_GAP", 4096)
    total = sum(path.stat().st_size for path in large.glob("*.safetensors"))
    assert k3tool(capsys, "reshard", large, tmp_path / "local", "--ep", 16).code == 0
    ran = k3tool(capsys, "reshard", "org/k3", tmp_path / "out", "--ep", 16, "--rank", 3, "--json")
    assert ran.code == 0, ran.err
    folder = "rank-00003-of-00016"
    for path in (tmp_path / "local" / folder).iterdir():
        if "manifest" not in path.name:
            assert path.read_bytes() == (tmp_path / "out" / folder / path.name).read_bytes(), path.name
    assert [item["rank"] for item in ran.json["ranks"]] == [3]
    held = ran.json["ranks"][0]["bytes"]
    assert held < 0.4 * total and ran.json["bytes_read"] < 1.1 * held
    gets = [request for request in hub.requests if request.sent > 0]
    data = [request for request in gets if "safetensors" in request.path and "index" not in request.path]
    assert len(data) < 40  # merged: the rank holds four times as many tensors
    manifest = json.loads((tmp_path / "out" / "k3tool-manifest.json").read_bytes())
    assert manifest["source"] == "org/k3" and len(manifest["revision"]) == 40
    ran = k3tool(capsys, "reshard", "org/k3", tmp_path / "out", "--ep", 16, "--rank", 3, "--verify", "--json")
    assert ran.code == 0 and ran.json["bytes_written"] == 0 and ran.json["verified"]["ok"]


def test_hub_failure_is_13(tmp_path, capsys, hub):
    ran = k3tool(capsys, "reshard", "org/absent", tmp_path / "out", "--ep", 16, "--rank", 3)
    assert ran.code == 13 and not (tmp_path / "out").exists()


def test_a_rank_folder_is_compared_with_what_the_rank_owns(source, tmp_path, capsys):
    out = tmp_path / "out"
    assert k3tool(capsys, "reshard", source, out, "--tp", 2, "--ep", 2, "--pp", 2).code == 0
    for folder in sorted(out.glob("rank-*")):
        assert k3tool(capsys, "verify", folder, "--depth", "bytes").code == 0, folder
        found = k3tool(capsys, "inspect", folder, "--json").json
        assert found["missing"] == found["unexpected"] == [] and found["tensors"] > 0
    said = k3tool(capsys, "inspect", out / "rank-00003-of-00008").out
    assert "every tensor that belongs to rank 3 of 8 is named, and no other" in said
    index = out / "rank-00003-of-00008" / "model.safetensors.index.json"
    document = json.loads(index.read_bytes())
    lost = next(name for name in document["weight_map"] if ".experts." in name)
    document["weight_map"].pop(lost)
    index.write_text(json.dumps(document))
    ran = k3tool(capsys, "verify", out / "rank-00003-of-00008", "--depth", "names")
    assert ran.code != 0 and lost in ran.out + ran.err
    config = out / "rank-00003-of-00008" / "config.json"
    config.write_bytes(config.read_bytes().replace(b'"tp": 2', b'"tp": 3'))
    ran = k3tool(capsys, "verify", out / "rank-00003-of-00008", "--depth", "names")
    assert ran.code == 11 and "ranks must be 12 for TP3 x EP2 x PP2, found 8" in ran.err
