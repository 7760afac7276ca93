"""`k3tool verify` on what `reshard --layout ranks` wrote: each rank, and all of them as one checkpoint."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

import pytest

from k3tool.cli import app
from k3tool.synthetic import tiny_config, write_checkpoint
from k3tool.tokenizer import load_tokenizer
from tests.helpers import k3tool

RANK = "rank-00002-of-00004"
SHARD = "model-00001-of-000001.safetensors"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("ranks")
    config = tiny_config(num_layers=4, moe_intermediate_size=64, mla_heads=4, kda_heads=4, num_experts=4)
    write_checkpoint(root / "whole", config)
    assert (
        app.run(["reshard", str(root / "whole"), str(root / "ranks"), "--gpus", "4", "--tp", "2", "--pp", "2", "-q"])
        == 0
    )
    return root / "ranks"


@pytest.fixture
def ranks(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "ranks"))


@pytest.mark.parametrize("depth", ["names", "headers", "bytes"])
def test_sound(written: Path, capsys, depth):
    ran = k3tool(capsys, "verify", written, "--depth", depth, "--json")
    assert ran.code == 0 and ran.json["problems"] == [] and {file["status"] for file in ran.json["files"]} == {"ok"}
    assert f"{RANK}/{SHARD}" in {file["name"] for file in ran.json["files"]}
    assert k3tool(capsys, "verify", written / RANK, "--depth", depth).code == 0


def _swap(folder: Path) -> None:
    other = folder / "rank-00003-of-00004"
    (folder / RANK).rename(folder / "t")
    other.rename(folder / RANK)
    (folder / "t").rename(other)


DAMAGE = {
    "shard missing": (lambda d: (d / RANK / SHARD).unlink(), 10, "headers", f"{RANK}: {SHARD} is missing"),
    "rank missing": (lambda d: shutil.rmtree(d / RANK), 10, "names", f"{RANK} does not exist"),
    "shard truncated": (
        lambda d: (d / RANK / SHARD).write_bytes((d / RANK / SHARD).read_bytes()[:-9]), 11, "headers", "is truncated"),
    "ranks exchanged": (_swap, 11, "headers", "config.json says"),
    "byte flipped": (
        lambda d: (d / RANK / SHARD).write_bytes((d / RANK / SHARD).read_bytes()[:-1] + b"\xff"), 11, "bytes", "sha256 differs"),
}  # fmt: skip


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage(ranks: Path, capsys, kind):
    damage, code, depth, message = DAMAGE[kind]
    damage(ranks)
    ran = k3tool(capsys, "verify", ranks, "--depth", depth)
    assert ran.code == code and message in ran.err and "hint: write it again: " in ran.err and " reshard " in ran.err


def test_inspect_names_the_rank(written: Path, capsys):
    assert "every tensor that belongs to rank 2 of" in k3tool(capsys, "inspect", written / RANK).out


def test_inspect_describes_ranks_as_the_checkpoint_that_they_make_up(written: Path, capsys):
    whole = k3tool(capsys, "inspect", written.parent / "whole", "--json").json
    ranks = k3tool(capsys, "inspect", written, "--json").json
    for key in ("tensors", "total_size", "parameters", "components", "missing", "unexpected", "mismatched"):
        assert ranks[key] == whole[key], key
    assert f"{RANK}/{SHARD}" in {shard["name"] for shard in ranks["shards"]}
    assert "4 ranks, TP2 x EP1 x PP2 of kimi_k3" in k3tool(capsys, "inspect", written).out


def test_a_node_checks_its_own_ranks(ranks: Path, capsys):
    other = ranks / "rank-00000-of-00004"
    shutil.rmtree(other)
    (ranks / "k3tool-manifest.json").unlink()  # of all ranks: a node need not have it
    assert k3tool(capsys, "verify", ranks, "--depth", "bytes").code == 10
    ran = k3tool(capsys, "verify", ranks, "--depth", "bytes", "--rank", "2-3", "--json")
    named = {file["name"]: file["status"] for file in ran.json["files"]}
    assert ran.code == 0 and named[f"{RANK}/{SHARD}"] == "ok" and not any(other.name in name for name in named)
    (ranks / RANK / SHARD).write_bytes((ranks / RANK / SHARD).read_bytes()[:-1] + b"\xff")
    assert k3tool(capsys, "verify", ranks, "--depth", "bytes", "--rank", "3").code == 0
    assert k3tool(capsys, "verify", ranks, "--depth", "bytes", "--rank", "2").code == 11
    for arguments, message in (
        ([ranks, "--rank", "4"], "rank 4 does not exist"),
        ([ranks / RANK, "--rank", "0"], "is none"),
    ):
        ran = k3tool(capsys, "verify", *arguments)
        assert ran.code == 2 and message in ran.err


def test_a_rank_needs_no_other_for_its_tokenizer(tmp_path: Path, capsys):
    write_checkpoint(tmp_path / "whole", tiny_config(num_layers=2), tokenizer=True)
    (tmp_path / "whole" / "README.md").write_text("a model card")
    whole, ranks = tmp_path / "whole", tmp_path / "ranks"
    assert k3tool(capsys, "reshard", whole, ranks, "--gpus", "2", "--ep", "2", "-q").code == 0
    for rank in sorted(ranks.glob("rank-*")):
        for name in ("tiktoken.model", "tokenizer_config.json", "generation_config.json"):
            assert (rank / name).read_bytes() == (whole / name).read_bytes()
        assert not (rank / "README.md").exists() and (ranks / "README.md").exists()
    assert k3tool(capsys, "verify", ranks, "--depth", "bytes", "--json").json["unproven"] == 0
    for name in ("tiktoken.model", "tokenizer_config.json"):  # as on a node that copied its ranks alone
        (ranks / name).unlink()
    assert load_tokenizer(ranks).encode("ab") == load_tokenizer(whole).encode("ab")
    assert k3tool(capsys, "reshard", ranks, tmp_path / "back", "--gpus", "1", "--layout", "hf", "-q").code == 0


def test_every_file_of_a_rank_is_read_whoever_asks(ranks: Path, capsys):
    """Of all ranks, of one of them, and of its folder alone."""
    rank = ranks / RANK
    for path in sorted(
        path for path in rank.iterdir() if path.name != "k3tool-manifest.json" and path.suffix != ".jsonl"
    ):
        data = path.read_bytes()
        path.write_bytes(data[:-2] + bytes([data[-2] ^ 1]) + data[-1:])
        for arguments in ([ranks], [ranks, "--rank", "2"], [rank]):
            ran = k3tool(capsys, "verify", *arguments, "--depth", "bytes")
            assert ran.code == 11 and path.name in ran.err, (path, arguments)
        assert k3tool(capsys, "verify", ranks, "--rank", "0-1,3", "--depth", "bytes").code == 0
        path.write_bytes(data)
    manifest = rank / "k3tool-manifest.json"  # its own digest stands in the manifest of all
    manifest.write_bytes(manifest.read_bytes().replace(b"reshard", b"reshare", 1))
    for arguments in ([ranks], [ranks, "--rank", "2"]):
        ran = k3tool(capsys, "verify", *arguments, "--depth", "bytes")
        assert ran.code == 11 and f"{RANK}/{manifest.name}" in ran.err


@pytest.mark.parametrize("command", ["verify", "inspect", "reshard"])
def test_ranks_without_their_layout_file_are_told_what_writes_it(ranks: Path, capsys, command, tmp_path):
    """By their manifest the same command brings it; by that of a rank alone the ranks are written anew."""
    (ranks / "k3tool.json").unlink()
    more = [tmp_path / "joined", "--gpus", 1] if command == "reshard" else []
    for manifest, overwrites in ((ranks / "k3tool-manifest.json", False), (None, True)):
        if manifest is None:
            (ranks / "k3tool-manifest.json").unlink()
        ran = k3tool(capsys, command, ranks, *more)
        assert ran.code == 10 and "holds folders of ranks, such as rank-00000-of-00004, and no k3tool.json" in ran.err
        words = shlex.split(ran.err.splitlines()[-1].rpartition("k3tool ")[2])
        assert words[0] == "reshard" and words[2] == str(ranks) and ("--overwrite" in words) is overwrites
    assert app.run([*words, "-q"]) == 0 and k3tool(capsys, "verify", ranks, "--depth", "bytes").code == 0
