"""A fetch that is cut off goes on where it was, fetches nothing twice and leaves nothing behind."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from k3tool.checkpoint import ledger as ledger_module
from k3tool.checkpoint.ledger import LEDGER_FOLDER, Ledger
from k3tool.checkpoint.manifest import load_manifest
from k3tool.errors import PartlyDone, RemoteError, UsageError
from k3tool.fetch import fetch
from k3tool.fetch.partial import partial_path
from k3tool.hub import RetryPolicy
from k3tool.standin import Fault, StandIn, serve
from k3tool.synthetic import tiny_config, write_checkpoint
from tests.fetch.conftest import REPO, FakeClock, Recorder, contents, size_of

MIB = 1 << 20
SHARD = "model-00002-of-000011.safetensors"
IMPATIENT = RetryPolicy(patience_s=0.0)


@pytest.fixture(scope="session")
def larger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """48 MB in 9 shards: enough to be killed in the middle of."""
    folder = tmp_path_factory.mktemp("larger") / "repository"
    folder.mkdir()
    config = tiny_config(
        num_layers=6, hidden_size=512, num_experts=6, moe_intermediate_size=608, latent_size=512, vocab_size=4096,
        intermediate_size=2048, kda_heads=4, kda_head_dim=64,
    )  # fmt: skip
    write_checkpoint(folder, config)
    return folder


class Runner:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def start(self) -> int:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())

    def wait(self) -> tuple[int, int]:
        """Exit code (negative: the signal) and peak resident memory in bytes."""
        assert self.process.stdout is not None
        code, memory = self.process.stdout.readline().split()
        return int(code), int(memory) * 1024


@contextmanager
def runner(hub: StandIn, folder: Path, workers: int) -> Iterator[Runner]:
    command = [
        sys.executable,
        str(Path(__file__).with_name("runner.py")),
        hub.endpoint,
        REPO,
        str(folder),
        str(workers),
    ]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield Runner(process)
        assert process.stdin is not None
        process.stdin.close()


def wait_until_sent(hub: StandIn, count: int) -> None:
    deadline = time.monotonic() + 20
    while hub.bytes_sent < count and time.monotonic() < deadline:
        time.sleep(0.002)


def test_fifty_kills_at_random_moments(larger: Path, tmp_path: Path):
    seed = int.from_bytes(os.urandom(4), "big")
    moments = random.Random(seed)
    workers, kills, gained = 4, 0, 0
    target = tmp_path / "out"
    with serve(larger, REPO, rate=2.2e6) as hub, runner(hub, target, workers) as run:
        for _ in range(50):
            sent = hub.bytes_sent
            child = run.start()
            if moments.random() < 0.3:  # anywhere from the first line on
                time.sleep(moments.uniform(0.0, 0.2))
            else:  # while bytes flow
                wait_until_sent(hub, sent + moments.randrange(1_600_000))
            os.kill(child, signal.SIGKILL)
            code, _ = run.wait()
            assert code == -signal.SIGKILL, f"ended with {code} before it was killed (seed {seed})"
            kills += 1
        before = hub.bytes_sent
        hub.rate = None
        run.start()
        code, memory = run.wait()
        assert code == 0
        gained = size_of(larger) - (hub.bytes_sent - before)
    assert contents(target) == contents(larger), f"seed {seed}"
    assert hub.bytes_sent - size_of(larger) <= kills * workers * MIB, f"seed {seed}"
    assert gained > 5e6  # the killed runs did move it forward
    assert memory < 200e6


def test_a_partial_is_continued_byte_for_byte(hub: StandIn, checkpoint: Path, tmp_path: Path, progress: Recorder):
    hub.faults.add(Fault("drop", match=SHARD, after=100_001, times=None))
    with pytest.raises(RemoteError) as failure:
        fetch(REPO, tmp_path / "out", policy=IMPATIENT, max_workers=1)
    assert failure.value.exit_code == 13 and "goes on from what is on disk" in failure.value.hint
    assert failure.value.document["bytes_fetched"] == hub.bytes_sent
    assert not (tmp_path / "out" / SHARD).exists()
    assert partial_path(tmp_path / "out" / LEDGER_FOLDER, SHARD).stat().st_size == 100_001
    hub.faults.clear()
    result = fetch(REPO, tmp_path / "out", progress=progress)
    assert {file.name: file.status for file in result.files}[SHARD] == "resumed"
    assert hub.bytes_sent == size_of(checkpoint) == result.bytes_total
    ranges = [r.headers["range"] for r in hub.requests if r.role == "data" and r.headers["range"] != "bytes=0-"]
    assert "bytes=100001-145415" in ranges
    assert contents(tmp_path / "out") == contents(checkpoint)
    assert progress.done["fetch"] == progress.totals["fetch"]


def test_the_part_on_disk_is_hashed_not_believed(hub: StandIn, checkpoint: Path, tmp_path: Path, progress: Recorder):
    hub.faults.add(Fault("drop", match=SHARD, after=100_000, times=None))
    with pytest.raises(RemoteError):
        fetch(REPO, tmp_path / "out", policy=IMPATIENT, max_workers=1)
    hub.faults.clear()
    partial = partial_path(tmp_path / "out" / LEDGER_FOLDER, SHARD)
    data = bytearray(partial.read_bytes())
    data[90_000] ^= 1
    partial.write_bytes(data)
    fetch(REPO, tmp_path / "out", progress=progress)
    assert contents(tmp_path / "out") == contents(checkpoint)
    assert len(progress.warnings) == 1 and f"{SHARD}: sha256 differs" in progress.warnings[0]


def test_after_a_power_cut_only_durable_bytes_count(
    hub: StandIn, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("k3tool.fetch.partial.SYNC_BYTES", 60_000)
    monkeypatch.setattr("k3tool.fetch.transfer.BLOCK", 30_000)
    monkeypatch.setattr("k3tool.fetch.transfer.FLUSH_S", 60.0)
    hub.faults.add(Fault("drop", match=SHARD, after=100_000, times=None))
    with pytest.raises(RemoteError):
        fetch(REPO, tmp_path / "out", policy=IMPATIENT, max_workers=1)
    marks = [
        json.loads(line) for line in (tmp_path / "out" / LEDGER_FOLDER / "done.jsonl").read_bytes().split(b"\n") if line
    ]
    assert [mark["synced"] for mark in marks if mark["file"] == SHARD and "synced" in mark] == [0, 60_000]
    partial = partial_path(tmp_path / "out" / LEDGER_FOLDER, SHARD)
    data = partial.read_bytes()
    assert len(data) == 100_000
    partial.write_bytes(data[:60_000] + bytes(40_000))  # what the cut left of the unsynced rest
    ledger_module.boot_id.cache_clear()
    monkeypatch.setattr("k3tool.fetch.partial.boot_id", lambda: "another boot")
    monkeypatch.setattr("k3tool.checkpoint.ledger.boot_id", lambda: "another boot")
    hub.faults.clear()
    sent = hub.bytes_sent
    result = fetch(REPO, tmp_path / "out")
    assert contents(tmp_path / "out") == contents(checkpoint)
    assert {file.name: file.attempts for file in result.files}[SHARD] == 1
    asked = [r.headers["range"] for r in hub.requests if r.headers.get("range", "").startswith("bytes=60000-")]
    assert asked == ["bytes=60000-145415"]
    assert hub.bytes_sent - sent == result.bytes_fetched


def test_finished_files_are_not_fetched_or_hashed_again(hub: StandIn, tmp_path: Path, progress: Recorder):
    hub.faults.add(Fault("status", match="model-00011*", status=500, times=None))
    with pytest.raises(RemoteError):
        fetch(REPO, tmp_path / "out", policy=IMPATIENT, max_workers=1)
    hub.faults.clear()
    result = fetch(REPO, tmp_path / "out", progress=progress)
    status = {file.name: file.status for file in result.files}
    assert status.pop("model-00011-of-000011.safetensors") == "fetched"
    assert set(status.values()) == {"kept"}
    assert progress.totals["check what is here"] == 0
    assert "sha256" in result.verified and result.unproven == []


def test_nothing_is_left_behind(hub: StandIn, checkpoint: Path, tmp_path: Path):
    fetch(REPO, tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {*contents(checkpoint), "k3tool-manifest.json"}


def test_a_second_fetch_says_who_holds_the_folder(hub: StandIn, tmp_path: Path):
    (tmp_path / "out").mkdir()
    with Ledger(tmp_path / "out", "x", "fetch org/other"), pytest.raises(PartlyDone) as refusal:
        fetch(REPO, tmp_path / "out")
    assert refusal.value.exit_code == 3
    assert f"in use by process {os.getpid()} on " in refusal.value.message
    assert "fetch org/other" in refusal.value.message


def test_another_commit_is_refused_with_both_named(hub: StandIn, checkpoint: Path, tmp_path: Path):
    first = hub.repos[REPO].commit
    hub.faults.add(Fault("drop", match=SHARD, after=1000, times=None))
    with pytest.raises(RemoteError):
        fetch(REPO, tmp_path / "out", policy=IMPATIENT, max_workers=1)
    hub.faults.clear()
    (checkpoint / "README.md").write_text("changed")
    second = hub.add(REPO, checkpoint).commit
    with pytest.raises(UsageError) as refusal:
        fetch(REPO, tmp_path / "out")
    assert first in refusal.value.message and second in refusal.value.message and first != second
    assert f"--revision {first}" in refusal.value.hint
    hub.repos[REPO].refs["main"] = second


def test_a_finished_folder_stays_with_its_commit(hub: StandIn, checkpoint: Path, tmp_path: Path):
    fetch(REPO, tmp_path / "out")
    first = load_manifest(tmp_path / "out")
    assert first is not None and first.revision == hub.repos[REPO].commit
    (checkpoint / "README.md").write_text("changed")
    second = hub.add(REPO, checkpoint).commit
    with pytest.raises(UsageError) as refusal:
        fetch(REPO, tmp_path / "out")
    assert str(first.revision) in refusal.value.message and second in refusal.value.message
    result = fetch(REPO, tmp_path / "out", overwrite=True)
    assert [file.name for file in result.files if file.status == "fetched"] == ["README.md"]
    after = load_manifest(tmp_path / "out")
    assert after is not None and after.revision == second


def test_an_unfinished_different_job_is_refused(hub: StandIn, tmp_path: Path, clock: FakeClock):
    hub.faults.add(Fault("refuse", match="model-*", times=None))
    with pytest.raises(RemoteError):
        fetch(REPO, tmp_path / "out", policy=IMPATIENT, clock=clock)
    hub.faults.clear()
    with pytest.raises(UsageError, match=r"unfinished work of another command: fetch org/mini$"):
        fetch(REPO, tmp_path / "out", layers="0-1")
    fetch(REPO, tmp_path / "out", include=["config.json"])  # another choice of files is the same job
    assert {path.name for path in (tmp_path / "out").iterdir()} >= {"config.json", "k3tool-manifest.json"}


def test_a_part_and_later_the_rest(hub: StandIn, checkpoint: Path, tmp_path: Path):
    fetch(REPO, tmp_path / "out", include=["model-00001*", "*.json"])
    result = fetch(REPO, tmp_path / "out")
    kept = {file.name for file in result.files if file.status == "kept"}
    assert kept == {"config.json", "model.safetensors.index.json", "model-00001-of-000011.safetensors"}
    manifest = load_manifest(tmp_path / "out")
    assert manifest is not None and set(manifest.files) == set(contents(checkpoint))
    assert hub.bytes_sent == size_of(checkpoint)


def killed_in_the_middle(larger: Path, target: Path, hub: StandIn) -> dict[str, int]:
    """A fetch of everything, killed while several shards are unfinished: their partials with their lengths."""
    with runner(hub, target, 4) as run:
        sent = hub.bytes_sent
        child = run.start()
        wait_until_sent(hub, sent + 9_000_000)
        os.kill(child, signal.SIGKILL)
        run.wait()
    return {path.name: path.stat().st_size for path in (target / LEDGER_FOLDER).glob("*.k3partial")}


def test_a_small_choice_keeps_what_a_big_one_had_begun(larger: Path, tmp_path: Path):
    target = tmp_path / "out"
    with serve(larger, REPO, rate=2.2e6) as hub:
        before = killed_in_the_middle(larger, target, hub)
        assert sum(before.values()) > 1_000_000
        hub.rate = None
        for include in (["config.json"], ["*.index.json", "config.json"], ["config.json"]):
            small = fetch(REPO, target, include=include, endpoint=hub.endpoint)
            kept = {path.name: path.stat().st_size for path in (target / LEDGER_FOLDER).glob("*.k3partial")}
            assert kept == before
            assert (small.files_unfinished, small.bytes_unfinished) == (len(before), sum(before.values()))
        with pytest.raises(UsageError, match="holds the whole model of org/mini, not layers 0-1"):
            fetch(REPO, target, layers="0-1", endpoint=hub.endpoint, overwrite=False)
        sent = hub.bytes_sent
        whole = fetch(REPO, target, endpoint=hub.endpoint)
        finished = sum(path.stat().st_size for path in target.glob("model-*"))
        assert hub.bytes_sent - sent <= finished - sum(before.values())
        assert sum(file.status == "resumed" for file in whole.files) == len(before)
        assert (whole.files_unfinished, whole.bytes_unfinished) == (0, 0)
    assert contents(target) == contents(larger)  # and nothing of the ledger is left


def test_an_empty_beginning_of_another_choice_is_not_kept(hub: StandIn, checkpoint: Path, tmp_path: Path):
    hub.faults.add(Fault("refuse", match=SHARD, times=None))
    with pytest.raises(RemoteError):
        fetch(REPO, tmp_path / "out", policy=IMPATIENT, max_workers=1)
    assert (tmp_path / "out" / LEDGER_FOLDER).is_dir()
    fetch(REPO, tmp_path / "out", include=["config.json"])
    assert not (tmp_path / "out" / LEDGER_FOLDER).exists()
