"""`k3tool fetch` as scripts and people meet it: documents, exit codes, messages."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import huggingface_hub
import pytest

from k3tool import release
from k3tool.checkpoint.manifest import load_manifest
from k3tool.standin import Fault, HubFile, StandIn, serve
from tests.fetch.conftest import contents, size_of
from tests.helpers import copy_checkpoint, k3tool, k3tool_process

REPO = "org/mini"
SHARD = "model-00003-of-000011.safetensors"


@pytest.fixture
def checkpoint(mini: Path, tmp_path: Path) -> Path:
    return copy_checkpoint(mini, tmp_path / "repository")


@pytest.fixture
def hub(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    with serve(checkpoint, REPO) as stand_in:
        monkeypatch.setenv("HF_ENDPOINT", stand_in.endpoint)
        yield stand_in


def test_the_document(hub: StandIn, checkpoint: Path, tmp_path: Path, capsys):
    ran = k3tool(capsys, "fetch", REPO, "--local-dir", tmp_path / "out", "--json")
    assert ran.code == 0
    document = ran.json
    assert document["ok"] is True and document["command"] == "fetch" and document["repo"] == REPO
    assert document["revision"] == hub.repos[REPO].commit
    files = {file["name"]: file for file in document["files"]}
    assert {name: file["bytes"] for name, file in files.items()} == {n: len(d) for n, d in contents(checkpoint).items()}
    assert {file["status"] for file in files.values()} == {"fetched"}
    assert document["bytes_fetched"] == document["bytes_total"] == size_of(checkpoint)
    assert document["seconds"] > 0 and document["verified"] == ["git-sha1", "sha256", "headers"]
    assert contents(tmp_path / "out") == contents(checkpoint)
    again = k3tool(capsys, "fetch", REPO, "--local-dir", tmp_path / "out", "--json").json
    assert {file["status"] for file in again["files"]} == {"kept"} and again["bytes_fetched"] == 0


def test_for_people(hub: StandIn, tmp_path: Path, capsys):
    ran = k3tool(capsys, "fetch", REPO, "--local-dir", tmp_path / "out")
    assert ran.code == 0
    assert f"{REPO} at commit {hub.repos[REPO].commit}" in ran.out and "13 files (13 fetched)" in ran.out
    assert "verified: git-sha1, sha256, headers" in ran.out
    assert sum(f"{SHARD} 145 kB" in line for line in ran.err.splitlines()) == 1  # one line per finished shard
    ran = k3tool(capsys, "fetch", REPO, "--local-dir", tmp_path / "out", "-q")
    assert (ran.out, ran.err) == (f"{tmp_path / 'out'}\n", "")


def test_revisions(hub: StandIn, tmp_path: Path, capsys):
    commit = hub.repos[REPO].commit
    for number, arguments in enumerate(([f"{REPO}@{commit}"], [REPO, "--revision", "main"], [f"hf://{REPO}"])):
        ran = k3tool(
            capsys, "fetch", *arguments, "--local-dir", tmp_path / str(number), "--include", "config.json", "--json"
        )
        assert ran.code == 0 and ran.json["revision"] == commit
        manifest = load_manifest(tmp_path / str(number))
        assert manifest is not None and manifest.revision == commit
    ran = k3tool(capsys, "fetch", f"{REPO}@v9", "--local-dir", tmp_path / "x", "--json")
    assert ran.code == 13 and ran.json["error"]["code"] == 13 and "no such revision" in ran.json["error"]["message"]


def test_choices(hub: StandIn, tmp_path: Path, capsys):
    ran = k3tool(
        capsys, "fetch", REPO, "--local-dir", tmp_path / "out",
        "--include", "*.json", "--include", "model-0000[12]*", "--exclude", "*index*", "--json",
    )  # fmt: skip
    assert [file["name"] for file in ran.json["files"]] == [
        "config.json", "model-00001-of-000011.safetensors", "model-00002-of-000011.safetensors",
    ]  # fmt: skip
    ran = k3tool(capsys, "fetch", REPO, "--local-dir", tmp_path / "no", "--include", "*.gguf")
    assert ran.code == 2
    assert "error: --include '*.gguf' matches no file of org/mini" in ran.err
    assert not (tmp_path / "no").exists()


def test_layers(hub: StandIn, tmp_path: Path, capsys):
    ran = k3tool(capsys, "fetch", REPO, "--local-dir", tmp_path / "out", "--layers", "0-2", "--text-only", "--json")
    assert ran.code == 0
    assert "model-00001-of-000004.safetensors" in {file["name"] for file in ran.json["files"]}
    assert "config.json" in ran.json["unproven"] and "sizes" in ran.json["verified"]
    assert k3tool(capsys, "verify", tmp_path / "out", "--depth", "bytes").code == 0
    assert k3tool(capsys, "fetch", REPO, "--local-dir", tmp_path / "x", "--layers", "8").code == 2
    assert k3tool(capsys, "fetch", REPO, "--local-dir", tmp_path / "x", "--layers", "").code == 2


def test_usage(hub: StandIn, tmp_path: Path, capsys):
    assert k3tool(capsys, "fetch", REPO).code == 2
    assert k3tool(capsys, "fetch", REPO, "--local-dir", tmp_path / "x", "--no-such-option").code == 2
    ran = k3tool(capsys, "fetch", "not a name", "--local-dir", tmp_path / "x", "--json")
    assert ran.code == 2 and "not a repository name" in ran.json["error"]["message"]
    ran = k3tool(capsys, "fetch", REPO, "--local-dir", tmp_path / "x", "--max-memory", "10MB")
    assert ran.code == 12 and "--max-memory 10MB" in ran.err
    assert hub.bytes_sent == 0


def test_failures_tell_what_was_done(hub: StandIn, checkpoint: Path, tmp_path: Path, capsys):
    hub.faults.add(Fault("flip", match=SHARD, after=120_000, times=None))
    ran = k3tool(capsys, "fetch", REPO, "--local-dir", tmp_path / "out", "--json")
    assert ran.code == 1
    document = ran.json
    assert document["ok"] is False and document["error"]["type"] == "CheckFailed"
    details = document["error"]["details"]
    assert details["file"] == SHARD and len(details["expected"]) == len(details["found"]) == 64
    assert len(document["files"]) == 12 and document["revision"] == hub.repos[REPO].commit
    assert ran.err.count(details["expected"]) >= 1


@pytest.mark.parametrize(
    ("fault", "code", "text"),
    [
        (Fault("status", stage="api", status=500, times=None), 13, "error: org/mini: HTTP 500 from http://127.0.0.1:"),
        (Fault("status", match=SHARD, status=503, times=None), 13, f"error: org/mini {SHARD}: HTTP 503"),
        (Fault("refuse", match=SHARD, times=None), 13, f"error: org/mini {SHARD}: connection to 127.0.0.1:"),
        (Fault("drop", match=SHARD, after=9, times=None), 13, f"error: org/mini {SHARD}: connection closed with"),
        (Fault("wrong_content_range", match=SHARD, times=None), 13, f"error: org/mini {SHARD}: wrong Content-Range"),
        (
            Fault("wrong_commit", match=SHARD, stage="resolve", times=None),
            11,
            "the Hub's answer contradicts its file list",
        ),
    ],
)
def test_exit_codes_of_a_bad_network(hub: StandIn, tmp_path: Path, capsys, fault: Fault, code: int, text: str):
    hub.faults.add(replace(fault))
    ran = k3tool(capsys, "fetch", REPO, "--local-dir", tmp_path / "out", "--patience", "0")
    assert ran.code == code and text in ran.err and "hint: " in ran.err
    hub.faults.clear()
    assert k3tool(capsys, "fetch", REPO, "--local-dir", tmp_path / "out").code == 0


def test_offline(hub: StandIn, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    ran = k3tool(capsys, "fetch", REPO, "--local-dir", tmp_path / "out")
    assert ran.code == 13 and "HF_HUB_OFFLINE is set" in ran.err and "unset HF_HUB_OFFLINE" in ran.err


def test_too_little_space(hub: StandIn, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage._replace(free=1000))
    ran = k3tool(capsys, "fetch", REPO, "--local-dir", tmp_path / "out", "--json")
    assert ran.code == 12 and ran.json["error"]["details"] == {"needed": 1_330_410, "free": 1000}


def released_files() -> dict[str, HubFile]:
    known = {**release.shards(), **release.other_files()}
    return {name: HubFile(name, None, size=record.size, sha256=record.sha256) for name, record in known.items()}


def room(monkeypatch: pytest.MonkeyPatch, folder: Path, free: int) -> None:
    usage = shutil.disk_usage(folder)
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage._replace(free=free))


def test_a_dry_run_that_does_not_fit_ends_as_the_run_would(hub: StandIn, tmp_path: Path, capsys, monkeypatch):
    room(monkeypatch, tmp_path, 1000)
    arguments = ("fetch", REPO, "--local-dir", tmp_path / "out", "--dry-run")
    ran = k3tool(capsys, *arguments, "--json")
    assert ran.code == 12 and ran.json["ok"] is False and ran.json["fits"] is False
    assert ran.json["error"]["details"] == {"needed": 1_330_410, "free": 1000} and len(ran.json["files"]) == 13
    ran = k3tool(capsys, *arguments)
    assert ran.code == 12 and "NOT ENOUGH" in ran.out and "error: " in ran.err and "1 kB (1000 bytes) free" in ran.err
    assert k3tool(capsys, *arguments, "-q").out == "1330410\n"
    assert not (tmp_path / "out").exists()


def last_command(text: str) -> list[str]:
    """The command that the last line ends with, as a shell reads it."""
    return shlex.split(text.rstrip().splitlines()[-1].partition("k3tool ")[2])


def test_what_comes_next_works(hub: StandIn, checkpoint: Path, tmp_path: Path, capsys):
    folder = tmp_path / "a folder"
    ran = k3tool(capsys, "fetch", REPO, "--local-dir", folder, "--include", "config.json")
    assert "a part of the checkpoint" in ran.out
    ran = k3tool(capsys, *last_command(ran.out))
    assert ran.code == 0 and contents(folder) == contents(checkpoint)
    ran = k3tool(capsys, "fetch", REPO, "--local-dir", folder, "--include", "config.json", "--exclude", "*.gguf")
    assert "--exclude '*.gguf' matches no file of org/mini" in ran.err
    assert k3tool(capsys, *last_command(ran.out)).code == 0  # all is there: it is verify


@pytest.mark.parametrize("name", ["notarepo", "a/b/c", "https://example.org/org/mini", "hf://mini"])
def test_what_is_no_repository_is_refused_at_once(hub: StandIn, tmp_path: Path, capsys, name: str):
    ran = k3tool(capsys, "fetch", name, "--local-dir", tmp_path / "out")
    assert ran.code == 2 and "org/name" in ran.err and hub.requests == []


def test_pasted_addresses(hub: StandIn, tmp_path: Path, capsys):
    commit = hub.repos[REPO].commit
    for number, text in enumerate(
        (
            f"https://huggingface.co/{REPO}",
            f"{hub.endpoint}/{REPO}/tree/main",
            f"{hub.endpoint}/{REPO}/blob/{commit}/config.json",
        )
    ):
        arguments = ("--local-dir", tmp_path / str(number), "--include", "config.json", "--json")
        ran = k3tool(capsys, "fetch", text, *arguments)
        assert ran.code == 0 and ran.json["revision"] == commit
        ran = k3tool(capsys, "inspect", text, "-q")
        assert ran.code == 0
    ran = k3tool(capsys, "fetch", f"{REPO}@main", "--revision", "other", "--local-dir", tmp_path / "x")
    assert ran.code == 2 and "two revisions" in ran.err


def test_offline_with_everything_in_the_cache(hub: StandIn, checkpoint: Path, tmp_path: Path, capsys, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    snapshot = Path(huggingface_hub.snapshot_download(REPO, cache_dir=tmp_path / "cache", endpoint=hub.endpoint))
    asked = len(hub.requests)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    ran = k3tool(capsys, "fetch", REPO, "--local-dir", tmp_path / "out", "--json")
    assert ran.code == 0 and ran.json["bytes_fetched"] == 0 and contents(tmp_path / "out") == contents(checkpoint)
    assert ran.json["verified"] == ["git-sha1", "sha256", "headers"]
    ran = k3tool(capsys, "inspect", REPO)
    assert ran.out.startswith(f"{REPO}: ") and str(tmp_path) not in ran.out
    (snapshot / SHARD).unlink()
    ran = k3tool(capsys, "fetch", REPO, "--local-dir", tmp_path / "two")
    assert ran.code == 10 and f"10 of 11 shards of {REPO}: {SHARD} is missing" in ran.err
    assert "unset HF_HUB_OFFLINE" in ran.err and len(hub.requests) == asked


def test_dry_run_of_the_release(tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch):
    room(monkeypatch, tmp_path, 10**13)
    with serve(released_files(), release.repo(), commit=release.revisions()[0]) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        ran = k3tool(capsys, "fetch", release.repo(), "--local-dir", tmp_path / "out", "--dry-run", "--json")
        document = ran.json
        assert ran.code == 0 and document["dry_run"] is True
        assert document["shards"] == 96 and document["bytes_shards"] == 1_560_936_091_448
        assert document["bytes_needed"] == document["bytes_total"] > document["bytes_shards"]
        assert document["fits"] is (document["bytes_free"] >= document["bytes_needed"])
        assert document["hours_at"]["1250000000"] == round(document["bytes_needed"] / 1.25e9 / 3600, 3)
        assert document["bytes_fetched"] == 0 and hub.bytes_sent == 0
        ran = k3tool(capsys, "fetch", "--local-dir", tmp_path / "out", "--dry-run")  # the release is the default
        assert "96 shards of 1,560,936,091,448 bytes" in ran.out
        assert "125 MB/s" in ran.out and "3 h 28 min" in ran.out
        ran = k3tool(capsys, "fetch", "--local-dir", tmp_path / "out", "--dry-run", "-q")
        assert ran.out == f"{document['bytes_needed']}\n"
    assert not (tmp_path / "out").exists()


def test_a_hub_that_contradicts_the_release(tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch):
    files = released_files()
    name = "model-00095-of-000096.safetensors"
    files[name] = HubFile(name, None, size=files[name].size, sha256="0" * 64)
    with serve(files, release.repo(), commit=release.revisions()[0]) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        ran = k3tool(capsys, "fetch", "--local-dir", tmp_path / "out", "--dry-run")
    assert ran.code == 11 and f"{name}: the Hub's file list and the built-in table of the release disagree" in ran.err


def test_dry_run_counts_what_is_there(hub: StandIn, checkpoint: Path, tmp_path: Path, capsys):
    k3tool(capsys, "fetch", REPO, "--local-dir", tmp_path / "out", "--exclude", SHARD)
    before = contents(tmp_path / "out")
    document = k3tool(capsys, "fetch", REPO, "--local-dir", tmp_path / "out", "--dry-run", "--json").json
    assert document["bytes_needed"] == 145_416
    assert [file["name"] for file in document["files"] if file["status"] == "fetched"] == [SHARD]
    assert contents(tmp_path / "out") == before


def _all_but_one(folder: Path, hub: StandIn) -> bool:
    return len(list(folder.glob("model-*"))) == 10 and any(request.sent == 100_000 for request in hub.requests)


def test_control_c_is_exit_130_and_resumes(checkpoint: Path, tmp_path: Path):
    with serve(checkpoint, REPO) as hub:
        hub.faults.add(Fault("stall", match=SHARD, after=100_000, times=None))
        command = [sys.executable, "-m", "k3tool", "fetch", REPO, "--local-dir", str(tmp_path / "out"), "--json"]
        environment = {**os.environ, "HF_ENDPOINT": hub.endpoint}
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        ) as run:
            deadline = time.monotonic() + 30
            while not _all_but_one(tmp_path / "out", hub) and time.monotonic() < deadline:
                time.sleep(0.02)
            run.send_signal(signal.SIGINT)
            out, err = run.communicate(timeout=20)
        assert run.returncode == 130, err
        assert json.loads(out)["error"]["code"] == 130 and "run the same command again" in err
        hub.faults.clear()
        ran = k3tool_process("fetch", REPO, "--local-dir", tmp_path / "out", "--json", HF_ENDPOINT=hub.endpoint)
        assert ran.code == 0, ran.err
        assert {file["name"]: file["status"] for file in ran.json["files"]}[SHARD] == "resumed"
        assert hub.bytes_sent == size_of(checkpoint)


def test_two_at_once(checkpoint: Path, tmp_path: Path):
    with serve(checkpoint, REPO) as hub:
        hub.faults.add(Fault("stall", match=SHARD, after=100_000))
        command = [sys.executable, "-m", "k3tool", "fetch", REPO, "--local-dir", str(tmp_path / "out")]
        environment = {**os.environ, "HF_ENDPOINT": hub.endpoint}
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment) as first:
            deadline = time.monotonic() + 30
            while not (tmp_path / "out" / "config.json").exists() and time.monotonic() < deadline:
                time.sleep(0.02)
            second = k3tool_process("fetch", REPO, "--local-dir", tmp_path / "out", HF_ENDPOINT=hub.endpoint)
            assert second.code == 3, second.err
            assert f"is in use by process {first.pid} on " in second.err
            hub.go_dark()  # breaks the stalled connection
            hub.come_back()
            assert first.wait(30) == 0
    assert contents(tmp_path / "out") == contents(checkpoint)
