"""A smaller checkpoint of a folder on this machine: what the Hub would give, resumed, proven, and mended by its hint."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from k3tool.errors import CapacityError, CheckpointCorrupt, CheckpointMissing, UsageError
from k3tool.fetch import fetch, local
from k3tool.standin import StandIn
from tests.fetch.conftest import REPO, contents
from tests.fetch.test_shrink import is_valid
from tests.helpers import k3tool


@pytest.mark.parametrize(
    "choice", [{"layers": "0-3"}, {"layers": "2,5-7", "text_only": True}, {"text_only": True}, {}], ids=str
)
def test_a_folder_gives_what_its_repository_gives(hub: StandIn, checkpoint: Path, tmp_path: Path, choice):
    fetch(REPO, tmp_path / "remote", **choice)
    result = fetch(str(checkpoint), tmp_path / "local", **choice)
    assert contents(tmp_path / "local") == contents(tmp_path / "remote")
    is_valid(tmp_path / "local")
    assert result.is_local and result.bytes_fetched > 0
    again = fetch(str(checkpoint), tmp_path / "local", **choice)
    assert {file.status for file in again.files} == {"kept"} and again.bytes_fetched < result.bytes_fetched


def test_an_interrupted_copy_goes_on(checkpoint: Path, tmp_path: Path, monkeypatch):
    expected = fetch(str(checkpoint), tmp_path / "whole", layers="0-5")
    real, budget = local._Range.read_into, [300_000]

    def read_into(self: local._Range, view: memoryview) -> int:
        if budget[0] <= 0:
            raise CapacityError("no more")
        budget[0] -= len(view)
        return real(self, view)

    monkeypatch.setattr(local._Range, "read_into", read_into)
    with pytest.raises(CapacityError):
        fetch(str(checkpoint), tmp_path / "out", layers="0-5", max_workers=1)
    monkeypatch.setattr(local._Range, "read_into", real)
    result = fetch(str(checkpoint), tmp_path / "out", layers="0-5")
    assert {file.status for file in result.files} >= {"kept"} and result.bytes_fetched < expected.bytes_fetched
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_a_source_that_changed_is_not_mixed_in(checkpoint: Path, tmp_path: Path):
    fetch(str(checkpoint), tmp_path / "out", layers="0-1")
    os.utime(checkpoint / "config.json", ns=(1, 1))
    with pytest.raises(UsageError, match="another state of"):
        fetch(str(checkpoint), tmp_path / "out", layers="0-1")
    fetch(str(checkpoint), tmp_path / "out", layers="0-1", overwrite=True)


def test_a_truncated_source_is_named(checkpoint: Path, tmp_path: Path):
    shard = checkpoint / "model-00002-of-000011.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(CheckpointCorrupt, match=r"model-00002-of-000011\.safetensors is truncated"):
        fetch(str(checkpoint), tmp_path / "out", layers="0-3")


def test_the_hint_of_verify_names_the_folder_again(checkpoint: Path, tmp_path: Path, capsys):
    out = tmp_path / "out"
    assert k3tool(capsys, "fetch", checkpoint, "--local-dir", out, "--layers", "0-3", "-q").code == 0
    shard = next(iter(sorted(out.glob("*.safetensors"))))
    shard.unlink()
    ran = k3tool(capsys, "verify", out)
    assert ran.code == 10 and ran.err.splitlines()[-1].endswith(
        f" fetch {os.path.realpath(checkpoint)} --layers 0-3 --local-dir {out}"
    )


@pytest.mark.parametrize(
    "source, dest, options, error",
    [
        ("./nowhere", "out", {}, CheckpointMissing),
        ("{checkpoint}", "{checkpoint}/inside", {}, UsageError),
        ("{checkpoint}", "{checkpoint}", {}, UsageError),
        ("{checkpoint}", "out", {"revision": "main"}, UsageError),
    ],
)
def test_what_cannot_be(source, dest, options, error, checkpoint: Path, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error):
        fetch(source.format(checkpoint=checkpoint), dest.format(checkpoint=checkpoint), **options)


def test_a_folder_does_not_hide_the_repository_of_its_name(hub: StandIn, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / REPO).mkdir(parents=True)
    assert local.local_folder(REPO) is None and local.local_folder(f"./{REPO}") == Path(REPO)
    assert not fetch(REPO, tmp_path / REPO, include=["config.json"]).is_local
