"""Nothing gets its final name, and nothing is kept, before its bytes are proven."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import threading
from pathlib import Path

import pytest

from k3tool import release
from k3tool.checkpoint.ledger import LEDGER_FOLDER, Ledger
from k3tool.checkpoint.manifest import FileRecord, load_manifest
from k3tool.checkpoint.reader import Checkpoint
from k3tool.checkpoint.source import LocalSource
from k3tool.checkpoint.writer import ShardWriter
from k3tool.errors import (
    CapacityError,
    CheckFailed,
    CheckpointCorrupt,
    CheckpointMissing,
    RemoteError,
    UnsupportedError,
    UsageError,
)
from k3tool.fetch import fetch
from k3tool.fetch.session import check_release
from k3tool.hub import Listing, RemoteFile, RetryPolicy
from k3tool.standin import Fault, HubFile, StandIn, serve
from tests.fetch.conftest import REPO, FakeClock, Recorder, contents, size_of
from tests.helpers import raw_shard, read_shard_header

SHARD = "model-00003-of-000011.safetensors"


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_flipped_bit_is_fetched_once_more(hub: StandIn, checkpoint: Path, tmp_path: Path, progress: Recorder):
    hub.faults.add(Fault("flip", match=SHARD, after=120_000))
    result = fetch(REPO, tmp_path / "out", progress=progress)
    assert contents(tmp_path / "out") == contents(checkpoint)
    assert len(progress.warnings) == 1 and f"{SHARD}: sha256 differs" in progress.warnings[0]
    assert {file.name: file.attempts for file in result.files}[SHARD] == 2
    assert hub.bytes_sent - size_of(checkpoint) == (checkpoint / SHARD).stat().st_size


def test_a_file_that_stays_wrong_is_named_with_both_digests(hub: StandIn, checkpoint: Path, tmp_path: Path):
    hub.faults.add(Fault("flip", match=SHARD, after=120_000, times=None))
    with pytest.raises(CheckFailed) as failure:
        fetch(REPO, tmp_path / "out")
    good = (checkpoint / SHARD).read_bytes()
    bad = hashlib.sha256(good[:120_000] + bytes([good[120_000] ^ 1]) + good[120_001:]).hexdigest()
    assert failure.value.exit_code == 1
    assert (
        failure.value.message == f"{SHARD}: sha256 differs (expected {sha256(checkpoint / SHARD)}, found {bad}), twice"
    )
    assert not (tmp_path / "out" / SHARD).exists()
    assert not (tmp_path / "out" / "k3tool-manifest.json").exists()
    everything = contents(checkpoint)
    del everything[SHARD]
    assert {n: d for n, d in contents(tmp_path / "out").items() if not n.startswith(LEDGER_FOLDER)} == everything
    hub.faults.clear()
    sent = hub.bytes_sent
    fetch(REPO, tmp_path / "out")
    assert hub.bytes_sent - sent == len(good)
    assert contents(tmp_path / "out") == contents(checkpoint)


def test_small_files_are_proven_by_their_git_digest(hub: StandIn, tmp_path: Path):
    hub.faults.add(Fault("flip", match="config.json", after=3, times=None))
    with pytest.raises(
        CheckFailed, match=r"config\.json: git sha1 differs \(expected [0-9a-f]{40}, found [0-9a-f]{40}\)"
    ):
        fetch(REPO, tmp_path / "out")


def test_what_was_proven_is_said(hub: StandIn, checkpoint: Path, tmp_path: Path):
    result = fetch(REPO, tmp_path / "out")
    assert result.verified == ["git-sha1", "sha256", "headers"] and result.unproven == []
    proven = {file.name: file.proven for file in result.files}
    assert proven[SHARD] == "sha256" and proven["config.json"] == "git-sha1"
    manifest = load_manifest(tmp_path / "out")
    assert manifest is not None and manifest.source == REPO and manifest.revision == hub.repos[REPO].commit
    assert manifest.files == {
        name: FileRecord(len(data), hashlib.sha256(data).hexdigest()) for name, data in contents(checkpoint).items()
    }


def test_without_verification_nothing_is_claimed(hub: StandIn, tmp_path: Path):
    hub.faults.add(Fault("flip", match=SHARD, after=120_000, times=None))
    result = fetch(REPO, tmp_path / "out", verify=False)
    assert result.verified == ["headers", "sizes"]
    assert len(result.unproven) == len(result.files)
    manifest = load_manifest(tmp_path / "out")
    assert manifest is not None and set(manifest.extra["unproven"]) == set(result.unproven)
    again = fetch(REPO, tmp_path / "out", verify=False)
    assert {file.status for file in again.files} == {"kept"}
    hub.faults.clear()
    proven = fetch(REPO, tmp_path / "out")
    assert [file.name for file in proven.files if file.status == "fetched"] == [SHARD]
    assert "unproven" not in load_manifest(tmp_path / "out").extra  # type: ignore[union-attr]


def test_a_damaged_file_with_its_old_time_stamp_is_found(
    hub: StandIn, checkpoint: Path, tmp_path: Path, progress: Recorder
):
    fetch(REPO, tmp_path / "out")
    path = tmp_path / "out" / SHARD
    before = path.stat()
    data = bytearray(path.read_bytes())
    data[-1] ^= 0x80
    path.write_bytes(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    sent = hub.bytes_sent
    result = fetch(REPO, tmp_path / "out", progress=progress)
    assert [file.name for file in result.files if file.status != "kept"] == [SHARD]
    assert contents(tmp_path / "out") == contents(checkpoint)
    assert hub.bytes_sent - sent == len(data)
    assert progress.warnings[0].startswith(f"{SHARD} sha256 differs")


def test_a_truncated_file_is_replaced(hub: StandIn, checkpoint: Path, tmp_path: Path):
    fetch(REPO, tmp_path / "out")
    os.truncate(tmp_path / "out" / SHARD, 1000)
    fetch(REPO, tmp_path / "out", include=[SHARD])
    assert contents(tmp_path / "out") == contents(checkpoint)


def test_someone_elses_file_is_not_touched(hub: StandIn, checkpoint: Path, tmp_path: Path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text("mine")
    with pytest.raises(UsageError) as refusal:
        fetch(REPO, tmp_path / "out")
    assert refusal.value.message.endswith("is not what org/mini holds under that name: it has 4 bytes, expected 4180")
    assert "--overwrite" in refusal.value.hint
    assert (tmp_path / "out" / "config.json").read_text() == "mine"
    fetch(REPO, tmp_path / "out", overwrite=True)
    assert contents(tmp_path / "out") == contents(checkpoint)


def test_a_folder_of_another_repository_is_refused(hub: StandIn, checkpoint: Path, tmp_path: Path):
    fetch(REPO, tmp_path / "out")
    hub.add("org/other", {"config.json": HubFile("config.json", checkpoint / "config.json")})
    with pytest.raises(UsageError, match=r"holds org/mini \(fetch\), not a fetch of org/other"):
        fetch("org/other", tmp_path / "out")
    fetch("org/other", tmp_path / "out", overwrite=True)
    assert set(contents(tmp_path / "out")) == {"config.json"}


# -- structure --


def test_a_repository_of_another_model_is_found_after_kilobytes(hub: StandIn, checkpoint: Path, tmp_path: Path):
    (checkpoint / "config.json").write_text('{"model_type": "llama", "hidden_size": 64}')
    hub.add(REPO, checkpoint)
    with pytest.raises(CheckpointCorrupt, match=r"no linear_attn_config \(model_type 'llama'\)") as failure:
        fetch(REPO, tmp_path / "out")
    assert failure.value.exit_code == 11
    assert hub.bytes_sent < 200_000


def test_a_repository_without_configuration(hub: StandIn, checkpoint: Path, tmp_path: Path):
    (checkpoint / "config.json").unlink()
    hub.add(REPO, checkpoint)
    with pytest.raises(CheckpointMissing, match=r"org/mini has no config\.json"):
        fetch(REPO, tmp_path / "out")
    assert hub.bytes_sent <= (checkpoint / "model.safetensors.index.json").stat().st_size


def test_an_index_of_another_configuration(hub: StandIn, checkpoint: Path, tmp_path: Path):
    config = json.loads((checkpoint / "config.json").read_text())
    config["text_config"]["num_experts"] += 4
    (checkpoint / "config.json").write_text(json.dumps(config))
    hub.add(REPO, checkpoint)
    with pytest.raises(CheckpointCorrupt, match=r"the index lacks 168 of \d+ tensors that config\.json implies"):
        fetch(REPO, tmp_path / "out")


def test_an_index_that_names_an_absent_shard(hub: StandIn, checkpoint: Path, tmp_path: Path):
    (checkpoint / SHARD).unlink()
    hub.add(REPO, checkpoint)
    with pytest.raises(CheckpointCorrupt, match=f"the index names {SHARD}, which the repository lacks"):
        fetch(REPO, tmp_path / "out")


def test_a_shard_of_another_checkpoint_is_found_by_its_header(hub: StandIn, checkpoint: Path, tmp_path: Path):
    header = read_shard_header(checkpoint / SHARD)
    name = next(name for name in header if name.endswith("input_layernorm.weight"))
    header[name.replace("input", "output")] = header.pop(name)
    head = raw_shard(header)
    (checkpoint / SHARD).write_bytes(head + bytes(5_000_000 - len(head)))
    data = sum(end - start for start, end in (e["data_offsets"] for n, e in header.items() if n != "__metadata__"))
    (checkpoint / SHARD).write_bytes(raw_shard(header, bytes(data)))
    hub.add(REPO, checkpoint)
    with pytest.raises(
        CheckpointCorrupt, match=rf"org/mini/{SHARD} lacks 1 tensors that the index places there, such as {name}"
    ):
        fetch(REPO, tmp_path / "out")


def test_a_shape_that_the_configuration_does_not_have(hub: StandIn, checkpoint: Path, tmp_path: Path):
    header = read_shard_header(checkpoint / SHARD)
    name = next(name for name in header if name.endswith("q_proj.weight"))
    header[name]["shape"].reverse()
    data = sum(end - start for start, end in (e["data_offsets"] for n, e in header.items() if n != "__metadata__"))
    (checkpoint / SHARD).write_bytes(raw_shard(header, bytes(data)))
    hub.add(REPO, checkpoint)
    with pytest.raises(CheckpointCorrupt, match=rf"{SHARD}: tensor {name} does not fit config\.json \(expected BF16"):
        fetch(REPO, tmp_path / "out")


def test_a_large_shard_is_refused_before_it_is_there(checkpoint: Path, tmp_path: Path, clock: FakeClock):
    """The header alone decides: of 64 MB only the first block is received."""
    header = {"a.weight": {"dtype": "U8", "shape": [64 << 20], "data_offsets": [0, 64 << 20]}}
    (checkpoint / SHARD).write_bytes(raw_shard(header, bytes(64 << 20)))
    with serve(checkpoint, REPO) as hub:
        hub.rate = 20e6
        with pytest.raises(CheckpointCorrupt, match="lacks"):
            fetch(REPO, tmp_path / "out", endpoint=hub.endpoint, clock=clock)
        assert hub.bytes_sent < 16 << 20


def test_a_header_damaged_on_the_way_is_fetched_again(
    hub: StandIn, checkpoint: Path, tmp_path: Path, progress: Recorder
):
    hub.faults.add(Fault("flip", match=SHARD, after=12))
    fetch(REPO, tmp_path / "out", progress=progress)
    assert contents(tmp_path / "out") == contents(checkpoint)
    assert "fetching it once more" in progress.warnings[0]


def test_a_single_file_model(checkpoint: Path, tmp_path: Path):
    source = Checkpoint(LocalSource(checkpoint))
    folder = tmp_path / "single"
    folder.mkdir()
    specs = [source.locate(name).spec for name in source.index.weight_map]
    with ShardWriter(folder / "model.safetensors", [(s.name, s.dtype, s.shape) for s in specs]) as writer:
        for spec in specs:
            writer.append(source.read(spec.name))
    (folder / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    with serve(folder, REPO) as hub:
        fetch(REPO, tmp_path / "out", endpoint=hub.endpoint)
        assert contents(tmp_path / "out") == contents(folder)
        with pytest.raises(UnsupportedError, match=r"--layers and --text-only need one"):
            fetch(REPO, tmp_path / "no", endpoint=hub.endpoint, layers="0")


# -- the release --


def released(**changes: RemoteFile) -> Listing:
    known = {**release.shards(), **release.other_files()}
    files = {name: RemoteFile(record.size, record.sha256) for name, record in known.items()}
    return Listing(release.revisions()[0], {**files, **changes})


def test_the_built_in_table_agrees_with_the_hub():
    assert check_release(released(), "k3")
    assert not check_release(Listing("0" * 40, {}), "k3")


def test_a_hub_that_contradicts_the_built_in_table():
    name = "model-00095-of-000096.safetensors"
    record = release.shards()[name]
    with pytest.raises(CheckpointCorrupt) as failure:
        check_release(released(**{name: RemoteFile(record.size, "0" * 64)}), "k3")
    assert failure.value.exit_code == 11
    assert failure.value.message == (
        f"{name}: the Hub's file list and the built-in table of the release disagree "
        f"(built-in {record.size} bytes {record.sha256}, Hub {record.size} bytes {'0' * 64})"
    )
    with pytest.raises(CheckpointCorrupt, match=f"{record.size} bytes .* Hub 5 bytes"):
        check_release(released(**{name: RemoteFile(5, record.sha256)}), "k3")


# -- disk --


def test_too_little_space_is_found_before_the_start(hub: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage._replace(free=1_000_000))
    with pytest.raises(CapacityError) as failure:
        fetch(REPO, tmp_path / "out")
    assert failure.value.exit_code == 12
    assert "(1330410 bytes) still to fetch, 1 MB (1000000 bytes) free" in failure.value.message
    assert not (tmp_path / "out").exists() and hub.bytes_sent == 0


def test_what_is_there_needs_no_space(hub: StandIn, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    fetch(REPO, tmp_path / "out", exclude=[SHARD])
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage._replace(free=145_416))
    fetch(REPO, tmp_path / "out")
    assert contents(tmp_path / "out") == contents(checkpoint)


def test_a_wrong_file_makes_room_for_the_right_one(
    hub: StandIn, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    fetch(REPO, tmp_path / "out")
    os.truncate(tmp_path / "out" / SHARD, 145_000)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage._replace(free=416))
    fetch(REPO, tmp_path / "out")
    assert contents(tmp_path / "out") == contents(checkpoint)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_fills_up(
    hub: StandIn, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
):
    write, room, one_at_a_time = os.pwrite, [500_000], threading.Lock()

    def limited(descriptor: int, data: memoryview, offset: int) -> int:
        with one_at_a_time:
            if not room[0]:
                raise OSError(code, os.strerror(code))
            written = write(descriptor, data[: room[0]], offset)
            room[0] -= written
            return written

    with monkeypatch.context() as patch:
        patch.setattr("os.pwrite", limited)
        with pytest.raises(CapacityError) as failure:
            fetch(REPO, tmp_path / "out", max_workers=2)
    assert failure.value.exit_code == 12
    assert "no space left while writing" in failure.value.message
    assert "run the same command again" in failure.value.hint
    sent = hub.bytes_sent
    result = fetch(REPO, tmp_path / "out")
    assert contents(tmp_path / "out") == contents(checkpoint)
    assert size_of(checkpoint) - (hub.bytes_sent - sent) == 500_000
    assert any(file.status == "resumed" for file in result.files)


def test_a_folder_that_may_not_be_written(hub: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def denied(self: Ledger) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self.state))

    monkeypatch.setattr(Ledger, "__enter__", denied)
    with pytest.raises(UsageError, match=r"cannot use .*out/.k3tool: Permission denied") as refusal:
        fetch(REPO, tmp_path / "out")
    assert refusal.value.exit_code == 2


def test_a_file_in_place_of_the_folder(hub: StandIn, tmp_path: Path):
    (tmp_path / "out").write_text("")
    with pytest.raises(UsageError, match="is a file, not a folder"):
        fetch(REPO, tmp_path / "out")


def test_records_of_strangers_stay_where_they_are(hub: StandIn, checkpoint: Path, tmp_path: Path, progress: Recorder):
    mine = tmp_path / "thesis.txt"
    mine.write_text("mine")
    note = {"plan": "x", "dest": "/n", "shards": {"../thesis.txt": 4, str(mine): 4}, "complete": True}
    strange = ["k3tool-reclaimed.json", "k3tool-manifest.json", "k3tool.json", ".k3tool-proofs.jsonl",
               "k3tool-quantization.json", "x.k3partial", ".k3tool/job.json"]  # fmt: skip
    files = dict(hub.repos[REPO].files)
    for name in strange:
        files[name] = HubFile(name, json.dumps(note).encode())
    hub.add("org/strange", files)
    result = fetch("org/strange", tmp_path / "out", progress=progress)
    assert contents(tmp_path / "out") == contents(checkpoint)
    assert not {file.name for file in result.files} & set(strange)
    assert [text for text in progress.warnings if text.startswith("left out, as k3tool writes its own records: ")]
    assert Checkpoint(LocalSource(tmp_path / "out")).config.num_layers == 8  # whole without any of them
    manifest = load_manifest(tmp_path / "out")
    assert manifest is not None and set(manifest.files) == set(contents(checkpoint))
    with pytest.raises(UsageError, match="nothing of org/strange is left to fetch"):
        fetch("org/strange", tmp_path / "none", include=["k3tool*.json"])
    assert mine.read_text() == "mine"


@pytest.mark.parametrize("damage", ["config", "index", "header"])
def test_a_refused_repository_leaves_no_claim(hub: StandIn, checkpoint: Path, tmp_path: Path, damage: str):
    files = dict(hub.repos[REPO].files)
    if damage == "config":
        files["config.json"] = HubFile("config.json", b'{"model_type": "other"}')
    elif damage == "index":
        files["model.safetensors.index.json"] = HubFile("model.safetensors.index.json", b'{"weight_map": {}}')
    else:
        for name in [name for name in files if name.startswith("model-")]:
            files[name] = HubFile(name, b"\xff" * files[name].size)
    hub.add("org/wrong", files)
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "notes.txt").write_text("mine")
    for folder in ("out", "there"):
        with pytest.raises(CheckpointCorrupt):
            fetch("org/wrong", tmp_path / folder, max_workers=2)
    assert not (tmp_path / "out").exists()
    assert {path.name for path in (tmp_path / "there").iterdir()} == {"notes.txt"}
    fetch(REPO, tmp_path / "out")  # the right name, in the same folder
    assert contents(tmp_path / "out") == contents(checkpoint)


def test_a_refusal_takes_nothing_that_was_there(hub: StandIn, checkpoint: Path, tmp_path: Path):
    """What an earlier run had brought stays, whatever a later answer says."""
    hub.faults.add(Fault("drop", match="model-00003*", after=100_000, times=None))
    with pytest.raises(RemoteError):
        fetch(REPO, tmp_path / "out", policy=RetryPolicy(patience_s=0), max_workers=1)
    hub.faults.clear()
    before = contents(tmp_path / "out")
    files = dict(hub.repos[REPO].files)
    name = "model-00009-of-000011.safetensors"
    commit = hub.repos[REPO].commit
    hub.add(REPO, {**files, name: HubFile(name, b"\xff" * files[name].size)}, commit=commit)
    with pytest.raises(CheckpointCorrupt):
        fetch(REPO, tmp_path / "out", max_workers=1)
    after = contents(tmp_path / "out")
    assert {name for name in before if "/" not in name} <= set(after) and f"{LEDGER_FOLDER}/job.json" in after
    hub.add(REPO, files, commit=commit)
    fetch(REPO, tmp_path / "out")
    assert contents(tmp_path / "out") == contents(checkpoint)


def test_foreign_files_in_the_way_leave_no_claim(hub: StandIn, tmp_path: Path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text("{}")
    with pytest.raises(UsageError, match=r"config\.json is not what org/mini holds"):
        fetch(REPO, tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"config.json"}


def test_too_little_space_leaves_no_claim(hub: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(CapacityError):
        fetch(REPO, tmp_path / "out")
    assert not (tmp_path / "out").exists()
