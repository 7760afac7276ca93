"""Smaller checkpoints by byte ranges: valid, renumbered, the same bytes, and said to be what they are."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from k3tool.checkpoint.ledger import LEDGER_FOLDER
from k3tool.checkpoint.manifest import load_manifest
from k3tool.checkpoint.reader import Checkpoint
from k3tool.checkpoint.source import LocalSource
from k3tool.config import K3Config
from k3tool.errors import CheckFailed, RemoteError, UnsupportedError, UsageError
from k3tool.fetch import fetch
from k3tool.fetch.index_scan import Unusual, scan
from k3tool.fetch.shrink import Choice, shrink_config
from k3tool.fetch.target import Segment, Target, literal
from k3tool.hub import RetryPolicy
from k3tool.inspection import inspect
from k3tool.names import parse_name
from k3tool.standin import Fault, StandIn, serve
from k3tool.synthetic import tiny_config, write_checkpoint
from k3tool.verify import verify
from tests.fetch.conftest import REPO, Recorder, contents, size_of


def tensors(folder: Path) -> dict[str, bytes]:
    checkpoint = Checkpoint(LocalSource(folder))
    return {name: checkpoint.read(name) for name in checkpoint.index.weight_map}


def expected_tensors(folder: Path, layers: list[int] | None, vision: bool) -> dict[str, bytes]:
    """What the smaller checkpoint must hold, by the plain way: all names, renamed or dropped."""
    kept: dict[str, bytes] = {}
    for name, data in tensors(folder).items():
        parsed = parse_name(name)
        assert parsed is not None
        if parsed.layer is None:
            if vision or not name.startswith(("vision_tower", "mm_projector")):
                kept[name] = data
        elif layers is None:
            kept[name] = data
        elif parsed.layer in layers:
            kept[name.replace(f"layers.{parsed.layer}.", f"layers.{layers.index(parsed.layer)}.")] = data
    return kept


def is_valid(folder: Path) -> None:
    assert verify(folder, depth="bytes").problems == []
    report = inspect(Checkpoint(LocalSource(folder)))
    assert report.conformance.ok and report.missing_files == []
    assert Checkpoint(LocalSource(folder)).index.total_size == report.total_size


@pytest.mark.parametrize(
    ("spec", "layers", "text_only"),
    [("0-3", [0, 1, 2, 3], False), ("0", [0], True), ("2,5-7", [2, 5, 6, 7], False), ("3", [3], True), ("0-7", list(range(8)), False)],
)  # fmt: skip
def test_chosen_layers(hub: StandIn, checkpoint: Path, tmp_path: Path, spec: str, layers: list[int], text_only: bool):
    result = fetch(REPO, tmp_path / "out", layers=spec, text_only=text_only)
    is_valid(tmp_path / "out")
    assert tensors(tmp_path / "out") == expected_tensors(checkpoint, layers, vision=not text_only)
    before = K3Config.from_file(checkpoint / "config.json")
    after = K3Config.from_file(tmp_path / "out" / "config.json")
    assert after.layer_kinds == tuple(before.layer_kinds[layer] for layer in layers)
    assert [after.is_moe(n) for n in range(len(layers))] == [before.is_moe(layer) for layer in layers]
    assert (after.vision is None) == text_only
    if text_only and spec == "0":
        assert result.bytes_fetched < size_of(checkpoint) / 2
    manifest = load_manifest(tmp_path / "out")
    assert manifest is not None and manifest.extra["layers"] == spec and manifest.source == REPO


def test_a_range_has_no_published_digest_and_that_is_said(hub: StandIn, tmp_path: Path):
    result = fetch(REPO, tmp_path / "out", layers="0,2")
    proven = {file.name: file.proven for file in result.files}
    assert proven["model-00001-of-000005.safetensors"] == "sha256"  # layer 0 stays layer 0: the published file itself
    assert proven["model-00002-of-000005.safetensors"] == ""  # layer 2 is renamed
    assert set(result.unproven) == {"config.json", "model-00002-of-000005.safetensors", "model.safetensors.index.json"}
    assert result.verified == ["sha256", "headers", "sizes"]
    again = fetch(REPO, tmp_path / "out", layers="0,2")
    assert {file.status for file in again.files} == {"kept"}


def test_ranges_are_merged(hub: StandIn, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Two of the three tensors of a row, not one request each: a whole layer of hundreds of tensors is one range."""
    monkeypatch.setattr("k3tool.hub.SMALL_FILE", 0)  # as if these shards were large
    fetch(REPO, tmp_path / "out", layers="5", text_only=True)
    digest = next(f.sha256 for f in hub.repos[REPO].files.values() if f.name.startswith("model-00006"))
    asked = [r.headers["range"] for r in hub.requests if r.method == "GET" and digest in r.path]
    header = int.from_bytes((checkpoint / "model-00006-of-000011.safetensors").read_bytes()[:8], "little")
    assert len(asked) == 2 and asked[1] == f"bytes={8 + header}-145415"  # the header, then all the data


def test_the_text_model_alone(hub: StandIn, checkpoint: Path, tmp_path: Path):
    result = fetch(REPO, tmp_path / "out", text_only=True)
    is_valid(tmp_path / "out")
    assert tensors(tmp_path / "out") == expected_tensors(checkpoint, None, vision=False)
    assert set(result.unproven) == {"config.json", "model.safetensors.index.json"}
    shards = {name for name in contents(tmp_path / "out") if name.startswith("model-")}
    assert shards == {f"model-{n:05d}-of-000011.safetensors" for n in range(1, 10)}
    assert all((tmp_path / "out" / name).read_bytes() == (checkpoint / name).read_bytes() for name in shards)


def test_shards_that_mix_layers_and_vision(checkpoint: Path, tmp_path: Path):
    """One file with everything: what is kept of it is cut out."""
    source = Checkpoint(LocalSource(checkpoint))
    names = list(source.index.weight_map)
    random.Random(5).shuffle(names)
    folder = tmp_path / "mixed"
    folder.mkdir()
    from k3tool.checkpoint.index import build_index
    from k3tool.checkpoint.writer import ShardWriter

    halves = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for shard, part in halves.items():
        specs = [source.locate(name).spec for name in part]
        with ShardWriter(folder / shard, [(s.name, s.dtype, s.shape) for s in specs]) as writer:
            for name in part:
                writer.append(source.read(name))
    weight_map = {name: shard for shard, part in halves.items() for name in part}
    (folder / "model.safetensors.index.json").write_bytes(build_index(weight_map, source.index.total_size or 0))
    (folder / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    with serve(folder, REPO) as hub:
        fetch(REPO, tmp_path / "layers", layers="1,6", text_only=True, endpoint=hub.endpoint)
        fetch(REPO, tmp_path / "text", text_only=True, endpoint=hub.endpoint)
        fetch(REPO, tmp_path / "whole", endpoint=hub.endpoint)
    is_valid(tmp_path / "layers")
    is_valid(tmp_path / "text")
    assert tensors(tmp_path / "layers") == expected_tensors(checkpoint, [1, 6], vision=False)
    assert tensors(tmp_path / "text") == expected_tensors(checkpoint, None, vision=False)
    assert contents(tmp_path / "whole") == contents(folder)


@pytest.mark.parametrize("cut", [10, 4_000, 60_001, 145_000])
def test_a_smaller_checkpoint_resumes(hub: StandIn, checkpoint: Path, tmp_path: Path, cut: int):
    """Cut off inside the new header (which comes from no server) or inside the ranges."""
    hub.faults.add(Fault("drop", match="model-00006*", after=cut, times=None))
    with pytest.raises(RemoteError):
        fetch(REPO, tmp_path / "out", layers="0,5", policy=RetryPolicy(patience_s=0.0), max_workers=1)
    hub.faults.clear()
    assert not (tmp_path / "out" / "model-00002-of-000005.safetensors").exists()
    fetch(REPO, tmp_path / "out", layers="0,5")
    is_valid(tmp_path / "out")
    assert tensors(tmp_path / "out") == expected_tensors(checkpoint, [0, 5], vision=True)
    assert not (tmp_path / "out" / LEDGER_FOLDER).exists()


def test_a_damaged_index_makes_no_smaller_checkpoint(hub: StandIn, tmp_path: Path):
    hub.faults.add(Fault("flip", match="model.safetensors.index.json", after=30, times=None))
    with pytest.raises(CheckFailed, match=r"model\.safetensors\.index\.json: git sha1 differs"):
        fetch(REPO, tmp_path / "out", layers="0")
    assert not (tmp_path / "out").exists()


def test_other_files_follow_include_and_exclude(hub: StandIn, checkpoint: Path, tmp_path: Path):
    (checkpoint / "tokenizer_config.json").write_text("{}")
    (checkpoint / "README.md").write_text("read me")
    hub.add(REPO, checkpoint)
    fetch(REPO, tmp_path / "out", layers="0", exclude=["*.md"])
    assert {"tokenizer_config.json", "config.json"} <= set(contents(tmp_path / "out"))
    assert "README.md" not in contents(tmp_path / "out")


def test_what_cannot_be(hub: StandIn, tmp_path: Path):
    with pytest.raises(UsageError, match="layer 8 does not exist") as refusal:
        fetch(REPO, tmp_path / "out", layers="0,8")
    assert refusal.value.hint == "layers are numbered from 0 to 7"
    with pytest.raises(UsageError, match="not a list of layers"):
        fetch(REPO, tmp_path / "out", layers="3-1")
    fetch(REPO, tmp_path / "out", layers="0")
    with pytest.raises(UsageError, match="holds layers 0 of org/mini, not layers 0-1"):
        fetch(REPO, tmp_path / "out", layers="0-1")
    with pytest.raises(UsageError, match="holds layers 0 of org/mini, not the whole model"):
        fetch(REPO, tmp_path / "out")


def test_overwriting_leaves_no_file_of_the_former_choice(hub: StandIn, checkpoint: Path, tmp_path: Path):
    fetch(REPO, tmp_path / "out", layers="0-3")
    fetch(REPO, tmp_path / "out", overwrite=True)
    assert contents(tmp_path / "out").keys() == contents(checkpoint).keys()
    assert verify(tmp_path / "out", depth="headers").problems == []


def test_dense_layers_only_where_they_can_be_said():
    document = tiny_config(num_layers=8)
    document["text_config"].update(first_k_dense_replace=1, moe_layer_freq=2)  # dense: 0 and the odd ones
    config = K3Config.from_dict(document)
    assert [config.is_moe(layer) for layer in range(4)] == [False, False, True, False]
    shrunk = shrink_config(document, config, Choice((0, 1, 2), vision=True))
    assert K3Config.from_dict(shrunk).moe_layers == (2,)
    with pytest.raises(UnsupportedError, match="layer 3 is dense and would follow a MoE layer") as refusal:
        shrink_config(document, config, Choice((2, 3, 5), vision=True))
    assert refusal.value.exit_code == 14


def test_layer_numbers_in_patterns_follow():
    document = tiny_config(num_layers=8)
    document["text_config"]["quantization_config"]["ignore"] = [
        "re:.*self_attn.*", "language_model.model.layers.3.mlp.up_proj", r"re:.*layers\.5\..*", "model.layers.1.x",
    ]  # fmt: skip
    config = K3Config.from_dict(document)
    shrunk = shrink_config(document, config, Choice((3, 5), vision=True))
    assert shrunk["text_config"]["quantization_config"]["ignore"] == [
        "re:.*self_attn.*", "language_model.model.layers.0.mlp.up_proj", r"re:.*layers\.1\..*",
    ]  # fmt: skip


def test_kimi_linear_without_vision(tmp_path: Path):
    text = tiny_config(vision=False, block_size=None)["text_config"]
    folder = tmp_path / "linear"
    folder.mkdir()
    write_checkpoint(folder, text)
    with serve(folder, REPO) as hub:
        fetch(REPO, tmp_path / "out", layers="0,4", endpoint=hub.endpoint)
    is_valid(tmp_path / "out")
    assert tensors(tmp_path / "out") == expected_tensors(folder, [0, 4], vision=True)


def test_layers_are_the_same_however_they_are_written(
    hub: StandIn, checkpoint: Path, tmp_path: Path, progress: Recorder
):
    fetch(REPO, tmp_path / "out", layers="0-1")
    for text in ("0,1", "1,0", " 0 - 1 ", "0-1,1"):
        again = fetch(REPO, tmp_path / "out", layers=text, reuse=[checkpoint], progress=progress)
        assert {file.status for file in again.files} == {"kept"}
    manifest = load_manifest(tmp_path / "out")
    assert manifest is not None and manifest.extra["layers"] == "0-1"
    assert sum("--reuse takes over whole files only" in text for text in progress.warnings) == 4
    with pytest.raises(UsageError, match="holds layers 0-1 of org/mini, not layers 0,2"):
        fetch(REPO, tmp_path / "out", layers="0,2")
    with pytest.raises(UsageError, match="does not exist"):
        fetch(REPO, tmp_path / "out", layers="0-999999999")


# -- parts --


def test_a_target_from_any_position():
    target = Target("x", (literal(b"0123456789"), Segment("a", 100, 130), Segment("b", 5, 25)))
    assert target.size == 60
    whole = "".join(_spell(segment) for segment in target.segments)
    for position in range(61):
        rest = "".join(_spell(segment) for segment in target.from_position(position))
        assert rest == whole[position:], position


def _spell(segment: Segment) -> str:
    """One character per byte, telling where it comes from."""
    if not segment.file:
        return segment.data.decode()
    return "".join(chr(0x1000 * ord(segment.file) + at) for at in range(segment.start, segment.stop))


def in_blocks(text: bytes, size: int) -> Iterator[bytes]:
    return (text[at : at + size] for at in range(0, len(text), size))


@pytest.mark.parametrize("size", [1, 7, 64, 100_000])
def test_the_index_is_read_the_same_in_any_blocks(checkpoint: Path, size: int):
    text = (checkpoint / "model.safetensors.index.json").read_bytes()
    found: dict[str, str] = {}
    metadata = scan(in_blocks(text, size), found.__setitem__)
    parsed = json.loads(text)
    assert found == parsed["weight_map"] and metadata == parsed["metadata"]


@pytest.mark.parametrize(
    "text",
    [
        b'{"weight_map": {"a": "x.safetensors"}, "more": {"b": "x.safetensors"}}',
        b'{"metadata": {"b": "x.safetensors"}, "weight_map": {"a": "x.safetensors"}}',
        b'{"weight_map": {"a\\u0041": "x.safetensors"}}',
        b'{"weight_map": {"a": "x.bin"}}',
        b'{"weight_map": {"a": "x.safetensors"}',
        b'[{"weight_map": {"a": "x.safetensors"}}]',
        b"",
    ],
)
def test_an_unusual_index_is_left_to_the_full_parser(text: bytes):
    with pytest.raises(Unusual):
        scan([text], lambda name, shard: None)


@pytest.mark.skipif(sys.platform != "linux", reason="peak memory of a process is read from /proc")
def test_the_released_index_in_little_memory(shared: Path):
    """497,220 names are checked against the configuration within 40 MB of the whole process."""
    code = """
import gzip, re, sys
from k3tool import release
from k3tool.config import K3Config
from k3tool.fetch.structure import Structure
folder = sys.argv[1]
def blocks():
    with gzip.open(folder + "/model.safetensors.index.json.gz") as file:
        while block := file.read(1 << 20):
            yield block
sizes = {name: record.size for name, record in release.shards().items()}
structure = Structure("k3", K3Config.from_file(folder + "/config.json"), blocks, sizes)
memory = re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1]
print(structure.index.names.count, len(structure.index.shards), structure.index.metadata["total_size"], memory)
"""
    command = [sys.executable, "-c", code, str(shared / "k3")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    names, shards, size, memory = map(int, done.stdout.split())
    assert (names, shards, size) == (497_220, 96, 1_560_860_324_864)
    assert memory < 40 * 1024
