"""`k3tool verify`: each kind of damage, and the depth that finds it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from k3tool.checkpoint.manifest import FileRecord, Manifest
from tests.helpers import copy_checkpoint, k3tool

SHARD = "model-00003-of-000011.safetensors"
INDEX = "model.safetensors.index.json"


@pytest.fixture
def copy(mini: Path, tmp_path: Path) -> Path:
    """A writable copy with a manifest of its digests."""
    folder = copy_checkpoint(mini, tmp_path / "copy")
    files = {
        path.name: FileRecord(path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest())
        for path in folder.iterdir()
    }
    Manifest("fetch", "test", files=files).write(folder)
    return folder


@pytest.mark.parametrize("depth", ["names", "headers", "bytes"])
def test_sound(copy: Path, capsys, depth):
    ran = k3tool(capsys, "verify", copy, "--depth", depth, "--json")
    assert ran.code == 0 and ran.json["ok"] and ran.json["depth"] == depth and ran.json["problems"] == []
    assert {file["status"] for file in ran.json["files"]} == {"ok"} and len(ran.json["files"]) == 13
    assert k3tool(capsys, "verify", copy, "--depth", depth, "-q").out == "ok\n"
    if depth == "bytes":
        assert ran.json["bytes_read"] > sum(path.stat().st_size for path in copy.glob("*.safetensors"))
        assert "the manifest of k3tool fetch" in k3tool(capsys, "verify", copy, "--depth", depth).out


def test_default_depth_is_headers(copy: Path, capsys):
    assert k3tool(capsys, "verify", copy, "--json").json["depth"] == "headers"


def _flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def _edit_index(folder: Path, change) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index)
    (folder / INDEX).write_text(json.dumps(index))


DAMAGE = {
    # kind: (what is done, exit code, word in the message, the first depth that finds it)
    "shard missing": (lambda d: (d / SHARD).unlink(), 10, f"{SHARD} is missing", "names"),
    "shard truncated": (lambda d: (d / SHARD).write_bytes((d / SHARD).read_bytes()[:-1000]), 11, "is truncated", "headers"),
    "shard empty": (lambda d: (d / SHARD).write_bytes(b""), 11, "holds no byte, not a safetensors file", "headers"),
    "trailing bytes": (lambda d: (d / SHARD).write_bytes((d / SHARD).read_bytes() + b"x"), 11, "trailing bytes", "headers"),
    "bit flipped in data": (lambda d: _flip(d / SHARD, -5), 11, "sha256 differs (expected ", "bytes"),
    "bit flipped in header length": (lambda d: _flip(d / SHARD, 7), 11, "header length", "headers"),
    "config byte changed": (lambda d: (d / "config.json").write_bytes((d / "config.json").read_bytes() + b"\n"), 11, "config.json: sha256", "bytes"),
    "dtype renamed": (
        lambda d: (d / SHARD).write_bytes((d / SHARD).read_bytes().replace(b'"BF16"', b'"F16" ', 1)), 11, "expected BF16", "headers"),
    "two shards exchanged": (
        lambda d: ((d / SHARD).rename(d / "t"), (d / "model-00002-of-000011.safetensors").rename(d / SHARD),
                   (d / "t").rename(d / "model-00002-of-000011.safetensors")), 11, "but the index places it in", "headers"),
    "index names a tensor too many": (
        lambda d: _edit_index(d, lambda i: i["weight_map"].update({"language_model.model.x.weight": SHARD})),
        11, "is not part of what the configuration implies", "names"),
    "index lacks a tensor": (
        lambda d: _edit_index(d, lambda i: i["weight_map"].pop("language_model.model.norm.weight")), 11, "norm.weight is missing", "names"),
    "index places a tensor elsewhere": (
        lambda d: _edit_index(d, lambda i: i["weight_map"].update({"language_model.model.norm.weight": SHARD})),
        11, "does not hold language_model.model.norm.weight", "headers"),
    "total size wrong": (lambda d: _edit_index(d, lambda i: i["metadata"].update(total_size=5)), 11, "total_size says 5", "headers"),
    "index leaves the folder": (
        lambda d: _edit_index(d, lambda i: i["weight_map"].update({"language_model.model.norm.weight": "../x.safetensors"})),
        11, "not a plain .safetensors file name", "names"),
}  # fmt: skip


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage(copy: Path, capsys, kind):
    damage, code, message, first_depth = DAMAGE[kind]
    damage(copy)
    depths = ["names", "headers", "bytes"]
    for depth in depths[: depths.index(first_depth)]:
        assert k3tool(capsys, "verify", copy, "--depth", depth).code == 0
    for depth in depths[depths.index(first_depth) :]:
        ran = k3tool(capsys, "verify", copy, "--depth", depth, "--json")
        assert ran.code == code and not ran.json["ok"] and ran.json["error"]["code"] == code
        everything = json.dumps(ran.json.get("problems", [])) + ran.json["error"]["message"]
        assert message in everything
        human = k3tool(capsys, "verify", copy, "--depth", depth)
        assert human.code == code and "error: " in human.err and "hint: " in human.err


def test_both_digests_are_named(copy: Path, capsys):
    before = hashlib.sha256((copy / SHARD).read_bytes()).hexdigest()
    _flip(copy / SHARD, -5)
    after = hashlib.sha256((copy / SHARD).read_bytes()).hexdigest()
    ran = k3tool(capsys, "verify", copy, "--depth", "bytes")
    assert f"{SHARD}: sha256 differs (expected {before}, found {after})" in ran.err


def test_right_size_wrong_content_is_never_ok(copy: Path, capsys):
    (copy / SHARD).write_bytes(bytes((copy / SHARD).stat().st_size))
    for depth in ("headers", "bytes"):
        assert k3tool(capsys, "verify", copy, "--depth", depth).code == 11


def test_without_digests_nothing_is_called_ok(mini: Path, capsys):
    ran = k3tool(capsys, "verify", mini, "--depth", "bytes", "--json")
    assert (
        ran.code == 0 and {file["status"] for file in ran.json["files"]} == {"unknown"} and ran.json["unproven"] == 13
    )
    assert "their bytes are not proven" in k3tool(capsys, "verify", mini, "--depth", "bytes").err.replace(
        "so its", "so their"
    )


def test_digests_left_by_the_official_client(copy: Path, capsys):
    digest = hashlib.sha256((copy / SHARD).read_bytes()).hexdigest()
    (copy / "k3tool-manifest.json").unlink()
    notes = copy / ".cache" / "huggingface" / "download"
    notes.mkdir(parents=True)
    (notes / f"{SHARD}.metadata").write_text(f"{'c' * 40}\n{digest}\n1700000000.0\n")
    document = k3tool(capsys, "verify", copy, "--depth", "bytes", "--json").json
    assert {file["name"]: file["status"] for file in document["files"]}[SHARD] == "ok" and document["unproven"] == 12
    _flip(copy / SHARD, -5)
    assert k3tool(capsys, "verify", copy, "--depth", "bytes").code == 11


@pytest.mark.parametrize(
    ("arguments", "code"),
    [(["nowhere"], 10), (["nowhere", "--depth", "all"], 2), ([], 2), (["nowhere", "--max-workers", "0"], 2)],
)
def test_wrong_inputs(tmp_path: Path, capsys, arguments, code):
    ran = k3tool(capsys, "verify", *arguments)
    assert ran.code == code and ran.err.startswith("error: ") and "\nhint: " in ran.err
