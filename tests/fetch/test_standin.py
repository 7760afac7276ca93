"""The stand-in is true to life: the official client's own calls get the answers they expect."""

from __future__ import annotations

import subprocess
import sys
import urllib.request
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import HfApi, get_hf_file_metadata, hf_hub_download, hf_hub_url
from huggingface_hub.errors import (
    GatedRepoError,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from k3tool.standin import Fault, HubFile, StandIn, serve
from tests.fetch.conftest import REPO

SHARD = "model-00003-of-000011.safetensors"


def get(url: str, **headers: str) -> tuple[int, bytes, dict[str, str]]:
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=10) as answer:
        return answer.status, answer.read(), dict(answer.headers)


def test_model_info_and_tree_agree(hub: StandIn, checkpoint: Path):
    api = HfApi(endpoint=hub.endpoint)
    info = api.model_info(REPO, files_metadata=True)
    tree = {entry.path: entry for entry in api.list_repo_tree(REPO, recursive=True)}
    assert info.sha == hub.repos[REPO].commit and info.gated is False
    assert {s.rfilename for s in info.siblings or []} == set(tree) == {p.name for p in checkpoint.iterdir()}
    for sibling in info.siblings or []:
        entry = tree[sibling.rfilename]
        assert sibling.size == entry.size and sibling.blob_id == entry.blob_id
        assert (sibling.lfs is None) == (entry.lfs is None)
        assert sibling.lfs is None or sibling.lfs.sha256 == entry.lfs.sha256
    assert [p.path for p in api.get_paths_info(REPO, [SHARD, "none"])] == [SHARD]
    assert api.list_repo_refs(REPO).branches[0].target_commit == info.sha


def test_folders_of_the_tree(checkpoint: Path):
    (checkpoint / "assets" / "deep").mkdir(parents=True)
    (checkpoint / "assets" / "deep" / "logo.png").write_bytes(b"png")
    with serve(checkpoint, REPO) as hub:
        api = HfApi(endpoint=hub.endpoint)
        assert "assets" in {entry.path for entry in api.list_repo_tree(REPO)}
        assert [entry.path for entry in api.list_repo_tree(REPO, "assets")] == ["assets/deep"]
        assert [e.path for e in api.list_repo_tree(REPO, "assets", recursive=True)] == ["assets/deep/logo.png"]


def test_addresses(hub: StandIn, checkpoint: Path):
    found = get_hf_file_metadata(hf_hub_url(REPO, SHARD, endpoint=hub.endpoint))
    assert found.commit_hash == hub.repos[REPO].commit and found.size == 145_416
    assert found.etag == hub.repos[REPO].files[SHARD].sha256
    assert found.location.startswith(hub.data_endpoint) and "Signature=" in found.location
    small = get_hf_file_metadata(hf_hub_url(REPO, "config.json", endpoint=hub.endpoint))
    assert small.location.startswith(hub.endpoint) and small.etag == hub.repos[REPO].files["config.json"].oid


@pytest.mark.parametrize(
    ("asked", "start", "stop"),
    [
        ("bytes=0-9", 0, 10),
        ("bytes=100-", 100, 145_416),
        ("bytes=-5", 145_411, 145_416),
        ("bytes=9-999999", 9, 145_416),
    ],
)
def test_ranges(hub: StandIn, checkpoint: Path, asked: str, start: int, stop: int):
    status, body, headers = get(f"{hub.endpoint}/{REPO}/resolve/main/{SHARD}", Range=asked)
    assert status == 206 and body == (checkpoint / SHARD).read_bytes()[start:stop]
    assert headers["Content-Range"] == f"bytes {start}-{stop - 1}/145416"


def test_a_range_beyond_the_end(hub: StandIn):
    with pytest.raises(urllib.error.HTTPError) as refused:
        get(f"{hub.endpoint}/{REPO}/resolve/main/{SHARD}", Range="bytes=145416-")
    assert refused.value.code == 416 and refused.value.headers["Content-Range"] == "bytes */145416"
    refused.value.close()


def test_what_is_missing(hub: StandIn, tmp_path: Path):
    options = {"endpoint": hub.endpoint, "local_dir": tmp_path}
    with pytest.raises(RepositoryNotFoundError):
        HfApi(endpoint=hub.endpoint).model_info("org/none")
    with pytest.raises(RevisionNotFoundError):
        HfApi(endpoint=hub.endpoint).model_info(REPO, revision="v2")
    with pytest.raises(RemoteEntryNotFoundError):
        hf_hub_download(REPO, "none.txt", **options)
    hub.repos[REPO].gated = True
    with pytest.raises(GatedRepoError):
        hf_hub_download(REPO, "config.json", **options)


def test_the_official_client_resumes_a_drop_and_accepts_a_flip(hub: StandIn, checkpoint: Path, tmp_path: Path):
    """What the misbehaviour does to others: a dropped connection is mended, a flipped bit is not even noticed."""
    hub.faults.add(Fault("drop", match="model-00001*", after=50_000))
    hub.faults.add(Fault("flip", match=SHARD, after=77))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("time.sleep", lambda _: None)
        huggingface_hub.snapshot_download(REPO, local_dir=tmp_path / "out", endpoint=hub.endpoint)
    first = "model-00001-of-000011.safetensors"
    assert (tmp_path / "out" / first).read_bytes() == (checkpoint / first).read_bytes()
    assert (tmp_path / "out" / SHARD).read_bytes() != (checkpoint / SHARD).read_bytes()


def test_a_restarted_stand_in_serves_the_same_commit(checkpoint: Path):
    commits = set()
    for _ in range(2):
        with serve(checkpoint, REPO) as hub:
            commits.add(hub.repos[REPO].commit)
    assert len(commits) == 1


def test_files_known_by_size_alone():
    files = {"big.safetensors": HubFile("big.safetensors", None, size=1 << 40, sha256="a" * 64)}
    with serve(files, REPO) as hub:
        info = HfApi(endpoint=hub.endpoint).model_info(REPO, files_metadata=True)
        assert [(s.size, s.lfs.sha256) for s in info.siblings] == [(1 << 40, "a" * 64)]


def test_from_a_process_of_its_own(checkpoint: Path):
    command = [sys.executable, "-m", "k3tool.standin", str(checkpoint), "--repo-id", REPO]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        name, _, endpoint = process.stdout.readline().strip().partition("=")
        assert name == "HF_ENDPOINT"
        assert HfApi(endpoint=endpoint).model_info(REPO).sha
        process.terminate()
        assert process.wait(10) == 0
