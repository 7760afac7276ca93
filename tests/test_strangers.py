"""Folders that a stranger filled: nothing in a record that k3tool reads back, or in its place, reaches a file of the user's."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest

from k3tool.checkpoint.ledger import LEDGER_FOLDER
from k3tool.checkpoint.manifest import MANIFEST_NAME, load_manifest
from k3tool.checkpoint.origin import again
from k3tool.checkpoint.own import is_own
from k3tool.execute import Options
from k3tool.reshard import Request, reshard
from k3tool.standin import HubFile, serve
from tests.helpers import copy_checkpoint, k3tool

REPO = "org/mini"
EP2 = Request(ep=2)
RECORDS = ["k3tool.json", "k3tool-manifest.json", "k3tool-reclaimed.json", "k3tool-quantization.json", "k3tool-gguf.json",
           ".k3tool-proofs.jsonl", ".k3tool-reclaim.lock", ".k3tool/job.json", ".k3tool/done.jsonl", ".k3tool/lock",
           ".k3tool/reclaimed.json", "x.k3partial", "activations.safetensors", "my.activations.safetensors"]  # fmt: skip


@pytest.fixture
def thesis(tmp_path: Path) -> Path:
    path = tmp_path / "home" / "thesis.txt"
    path.parent.mkdir()
    path.write_text("years of work\n")
    return path


def record(path: Path) -> dict[str, object]:
    return {"size": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}


def write_manifest(folder: Path, files: dict[str, object], **more: object) -> None:
    document = {"command": "reshard x", "source": "x", "revision": None, "files": files, **more}
    (folder / MANIFEST_NAME).write_text(json.dumps(document))


def test_records_are_never_fetched_wherever_they_lie(mini, tmp_path):
    strange = [f"{folder}{name}" for name in RECORDS for folder in ("", "sub/", "rank-00000-of-00002/", "A/b/")]
    strange += [name.upper() for name in RECORDS]
    assert all(map(is_own, strange))
    with serve(copy_checkpoint(mini, tmp_path / "hub"), REPO) as hub:
        hub.add("org/strange", {**hub.repos[REPO].files, **{n: HubFile(n, b"{}") for n in strange}})
        environment = pytest.MonkeyPatch()
        environment.setenv("HF_ENDPOINT", hub.endpoint)
        from k3tool.fetch import fetch

        result = fetch("org/strange", tmp_path / "out")
        environment.undo()
    held = {str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert held == {path.name for path in (tmp_path / "hub").iterdir()} | {MANIFEST_NAME}
    assert not {file.name for file in result.files} & set(strange)


@pytest.mark.parametrize(
    "name", [".k3tool", ".k3tool/lock", ".k3tool/done.jsonl", "rank-00000-of-00002/model-00001-of-000001.safetensors.k3partial",
             ".k3tool-proofs.jsonl", "k3tool-manifest.json", "k3tool.json"],
)  # fmt: skip
@pytest.mark.parametrize("options", [[], ["--overwrite"]], ids=["", "overwrite"])
def test_links_in_place_of_records_are_not_written_through(name, options, mini, thesis, tmp_path, capsys):
    dest = tmp_path / "out"
    link = dest / name
    link.parent.mkdir(parents=True)
    link.symlink_to(thesis.parent if name == ".k3tool" else thesis)
    ran = k3tool(capsys, "reshard", mini, dest, "--gpus", 2, "--ep", 2, *options)
    assert ran.code in (0, 2, 3), ran.err
    k3tool(capsys, "verify", dest, "--depth", "bytes")
    assert thesis.read_text() == "years of work\n" and os.listdir(thesis.parent) == ["thesis.txt"]
    if ran.code == 2 and "symbolic link" in ran.err:
        link.unlink()
        assert k3tool(capsys, "reshard", mini, dest, "--gpus", 2, "--ep", 2, "--overwrite").code == 0


@pytest.mark.parametrize("name", [".k3tool", ".k3tool/lock", ".k3tool/model-00001-of-000011.safetensors.k3partial"])
def test_links_in_place_of_records_of_a_fetch(name, mini, thesis, tmp_path, capsys, monkeypatch):
    link = tmp_path / "out" / name
    link.parent.mkdir(parents=True)
    link.symlink_to(thesis.parent if name == ".k3tool" else thesis)
    with serve(copy_checkpoint(mini, tmp_path / "hub"), REPO) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        for options in ([], ["--overwrite"]):
            k3tool(capsys, "fetch", REPO, "--local-dir", tmp_path / "out", *options)
    assert thesis.read_text() == "years of work\n" and os.listdir(thesis.parent) == ["thesis.txt"]


def test_verify_writes_no_proofs_through_a_link(mini, thesis, tmp_path, capsys):
    copy = copy_checkpoint(mini, tmp_path / "k3")
    write_manifest(copy, {path.name: record(path) for path in copy.glob("*.safetensors")})
    (copy / ".k3tool-proofs.jsonl").symlink_to(thesis)
    assert k3tool(capsys, "verify", copy, "--depth", "bytes").code == 0
    assert thesis.read_text() == "years of work\n"


def test_overwriting_removes_what_is_as_the_manifest_says_and_no_more(mini, thesis, tmp_path):
    dest = tmp_path / "out"
    (dest / "mine").mkdir(parents=True)
    shutil.copy(thesis, dest / "thesis.txt")
    (dest / "edited.json").write_text("{}")
    (dest / "mine" / "model.safetensors").write_bytes(bytes(100))
    (dest / "mine" / "x.k3partial").write_text("of another command")
    (dest / "made.json").write_text("{}")
    wrong = {"size": thesis.stat().st_size, "sha256": "0" * 64}
    write_manifest(dest, {"thesis.txt": wrong, "edited.json": {"size": 3, "sha256": "0" * 64},
                          "mine/model.safetensors": {"size": 100, "sha256": "0" * 64},
                          "made.json": record(dest / "made.json")})  # fmt: skip
    reshard(mini, dest, EP2, options=Options(overwrite=True))
    kept = ["thesis.txt", "edited.json", "mine/model.safetensors", "mine/x.k3partial"]
    assert all((dest / name).exists() for name in kept) and not (dest / "made.json").exists()


@pytest.mark.parametrize("name", ["../home/thesis.txt", "/absolute", "a/../../home/thesis.txt"])
def test_names_that_leave_the_folder_are_no_files_of_it(name, mini, thesis, tmp_path, capsys):
    name = str(thesis) if name == "/absolute" else name
    dest, fetched = tmp_path / "out", copy_checkpoint(mini, tmp_path / "fetched")
    reshard(mini, dest, EP2)
    plan = load_manifest(dest).extra["plan"]  # type: ignore[union-attr]
    for folder in (dest, fetched):
        write_manifest(folder, {name: record(thesis)}, plan=plan)
        ran = k3tool(capsys, "verify", folder, "--depth", "bytes")
        assert ran.code == 11 and "names below its folder" in ran.err
    assert k3tool(capsys, "reshard", mini, dest, "--gpus", 2, "--ep", 2, "--overwrite").code == 0
    assert thesis.exists()
    state = dest / LEDGER_FOLDER
    state.mkdir()
    found = thesis.stat()
    stamp = [found.st_size, found.st_mtime_ns, found.st_ino]
    (state / "done.jsonl").write_text(json.dumps({"file": name, **record(thesis), "stamp": stamp}))
    assert k3tool(capsys, "reshard", mini, dest, "--gpus", 2, "--ep", 2).code == 0
    assert thesis.exists() and name not in load_manifest(dest).files  # type: ignore[union-attr]


@pytest.mark.parametrize("options", ["--reclaim", "--overwrite", "--report /home/x", "--tp 1 --reclaim"])
def test_a_recorded_command_that_would_harm_is_no_hint(options, mini, tmp_path):
    copy = copy_checkpoint(mini, tmp_path / "k3")
    (copy / MANIFEST_NAME).write_text(
        json.dumps({"command": f"reshard {mini} {options}", "source": str(mini), "revision": None, "files": {}})
    )
    assert "k3tool " not in again(copy, ["config.json"])
    (copy / MANIFEST_NAME).unlink()
    (copy / LEDGER_FOLDER).mkdir()
    job = {"id": "x", "command": f"fetch org/name {options}", "facts": {}}
    (copy / LEDGER_FOLDER / "job.json").write_text(json.dumps(job))
    assert "k3tool " not in again(copy, ["config.json"])
