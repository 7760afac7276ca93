"""What is already on this machine is verified and used; the official client and k3tool understand each other's work."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest

from k3tool.fetch import fetch
from k3tool.standin import StandIn
from k3tool.verify import verify
from tests.fetch.conftest import REPO, Recorder, contents, size_of

SHARD = "model-00003-of-000011.safetensors"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def client(*arguments: object, endpoint: str) -> subprocess.CompletedProcess[str]:
    """The official command line against the stand-in."""
    command = [sys.executable, "-m", "huggingface_hub.cli.hf", *map(str, arguments)]
    environment = {**os.environ, "HF_ENDPOINT": endpoint, "NO_COLOR": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)


def test_the_official_client_fetches_from_the_stand_in(hub: StandIn, checkpoint: Path, tmp_path: Path):
    folder = huggingface_hub.snapshot_download(REPO, local_dir=tmp_path / "out", endpoint=hub.endpoint)
    assert {n: d for n, d in contents(Path(folder)).items() if not n.startswith(".cache")} == contents(checkpoint)
    assert {request.role for request in hub.requests} == {"hub", "data"}


def test_the_official_client_verifies_what_k3tool_wrote(hub: StandIn, checkpoint: Path, tmp_path: Path):
    fetch(REPO, tmp_path / "out")
    done = client("cache", "verify", REPO, "--local-dir", tmp_path / "out", endpoint=hub.endpoint)
    assert done.returncode == 0, done.stderr
    assert f"checked: {len(contents(checkpoint))}" in done.stdout
    data = bytearray((tmp_path / "out" / SHARD).read_bytes())
    data[-1] ^= 1
    (tmp_path / "out" / SHARD).write_bytes(data)
    assert client("cache", "verify", REPO, "--local-dir", tmp_path / "out", endpoint=hub.endpoint).returncode == 1


def test_the_names_of_the_caches_blobs_are_digests(hub: StandIn, checkpoint: Path, cache: Path):
    snapshot = Path(huggingface_hub.snapshot_download(REPO, cache_dir=cache, endpoint=hub.endpoint))
    report = verify(snapshot, depth="bytes")
    assert report.ok and report.unproven == 0 and report.digests == "the names of the Hub cache's blobs"
    for name, expected in ((SHARD, "sha256 differs"), ("model.safetensors.index.json", "expected git sha1 ")):
        blob = (snapshot / name).resolve()
        whole = blob.read_bytes()
        blob.write_bytes(whole[:-2] + bytes([whole[-2] ^ 1]) + whole[-1:] if name == SHARD else whole + b" ")
        report = verify(snapshot, depth="bytes")
        assert not report.ok and expected in report.problems[0]
        assert [file.name for file in report.files if file.status == "corrupt"] == [name]
        blob.write_bytes(whole)
    assert verify(snapshot, depth="bytes").ok


def test_a_folder_of_the_official_client_is_kept(hub: StandIn, checkpoint: Path, tmp_path: Path):
    huggingface_hub.snapshot_download(REPO, local_dir=tmp_path / "out", endpoint=hub.endpoint)
    sent = hub.bytes_sent
    result = fetch(REPO, tmp_path / "out")
    assert {file.status for file in result.files} == {"kept"} and hub.bytes_sent == sent
    assert result.verified == ["git-sha1", "sha256", "headers"]


def test_a_file_that_the_official_client_accepted_damaged(hub: StandIn, checkpoint: Path, tmp_path: Path):
    huggingface_hub.snapshot_download(REPO, local_dir=tmp_path / "out", endpoint=hub.endpoint)
    path = tmp_path / "out" / SHARD
    stamp = path.stat()
    os.truncate(path, 100_000)
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    sent = hub.bytes_sent
    fetch(REPO, tmp_path / "out")
    assert path.read_bytes() == (checkpoint / SHARD).read_bytes()
    assert hub.bytes_sent - sent == 145_416


def test_the_hub_cache_is_used(hub: StandIn, checkpoint: Path, tmp_path: Path, cache: Path, progress: Recorder):
    huggingface_hub.snapshot_download(REPO, cache_dir=cache, endpoint=hub.endpoint)
    sent = hub.bytes_sent
    result = fetch(REPO, tmp_path / "out", progress=progress)
    assert hub.bytes_sent == sent and result.bytes_fetched == 0
    assert contents(tmp_path / "out") == contents(checkpoint)
    assert {file.status for file in result.files} == {"kept"}
    assert {file.origin for file in result.files} <= {"reflink", "hard link"}  # same file system: nothing is copied
    blobs = {path.stat().st_ino for path in cache.rglob("blobs/*")}
    if any(file.origin == "hard link" for file in result.files):
        assert (tmp_path / "out" / SHARD).stat().st_ino in blobs
    assert result.unproven == [] and "sha256" in result.verified


def test_a_damaged_cache_is_not_believed(
    hub: StandIn, checkpoint: Path, tmp_path: Path, cache: Path, progress: Recorder
):
    folder = Path(huggingface_hub.snapshot_download(REPO, cache_dir=cache, endpoint=hub.endpoint))
    blob = (folder / SHARD).resolve()
    data = bytearray(blob.read_bytes())
    data[77_000] ^= 4
    blob.write_bytes(data)
    result = fetch(REPO, tmp_path / "out", progress=progress)
    assert contents(tmp_path / "out") == contents(checkpoint)
    assert [file.name for file in result.files if file.status == "fetched"] == [SHARD]
    assert progress.warnings == [f"{blob} is damaged and not used"]
    assert blob.read_bytes() == data  # and it is not ours to mend


def test_a_named_folder_is_used(hub: StandIn, checkpoint: Path, tmp_path: Path):
    (tmp_path / "old").mkdir()
    for name in (SHARD, "config.json"):
        (tmp_path / "old" / name).write_bytes((checkpoint / name).read_bytes())
    result = fetch(REPO, tmp_path / "out", reuse=[tmp_path / "old"])
    assert [file.name for file in result.files if file.status == "kept"] == ["config.json", SHARD]
    assert contents(tmp_path / "out") == contents(checkpoint)
    assert hub.bytes_sent == size_of(checkpoint) - 145_416 - 4180


def test_across_file_systems_it_is_copied(
    hub: StandIn, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def other_device(*_: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr("os.link", other_device)
    monkeypatch.setattr("k3tool.fetch.reuse._reflink", lambda *_: False)
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / SHARD).write_bytes((checkpoint / SHARD).read_bytes())
    result = fetch(REPO, tmp_path / "out", reuse=[tmp_path / "old"])
    assert {file.name: file.origin for file in result.files}[SHARD] == "copy"
    assert contents(tmp_path / "out") == contents(checkpoint)
