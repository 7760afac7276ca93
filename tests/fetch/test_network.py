"""Networks and servers as they are: each way to misbehave, what becomes of the fetch, and what it says."""

from __future__ import annotations

import email.utils
import time
from pathlib import Path

import pytest

from k3tool.checkpoint.ledger import LEDGER_FOLDER
from k3tool.errors import CheckpointCorrupt, RemoteError
from k3tool.fetch import fetch
from k3tool.hub import RetryPolicy
from k3tool.standin import Fault, StandIn, serve
from tests.fetch.conftest import REPO, FakeClock, Recorder, contents, size_of

SHARD = "model-00003-of-000011.safetensors"
SIZE = 145_416


def fetched_whole(hub: StandIn, checkpoint: Path, folder: Path, **options: object) -> int:
    """Fetch, compare every byte, and return what came over the network beyond the size."""
    result = fetch(REPO, folder, **options)  # type: ignore[arg-type]
    assert contents(folder) == contents(checkpoint)
    assert not (folder / LEDGER_FOLDER).exists()
    assert result.bytes_fetched == hub.bytes_sent
    return hub.bytes_sent - size_of(checkpoint)


@pytest.mark.parametrize("after", [0, 1, 70_000])
def test_dropped_connections(hub: StandIn, checkpoint: Path, tmp_path: Path, clock: FakeClock, after: int):
    hub.faults.add(Fault("drop", match=SHARD, after=after, times=3))
    assert fetched_whole(hub, checkpoint, tmp_path / "out", clock=clock) == 0
    assert len(clock.slept) == (3 if after < 70_000 else 2)  # the third piece of 70,000 bytes is the last anyway


def test_a_connection_that_never_gets_far_is_given_up(hub: StandIn, tmp_path: Path, clock: FakeClock):
    hub.faults.add(Fault("drop", match=SHARD, after=1, times=None))
    with pytest.raises(RemoteError) as failure:
        fetch(REPO, tmp_path / "out", clock=clock)
    assert failure.value.exit_code == 13
    assert failure.value.message.startswith(f"org/mini {SHARD}: connection closed with ")
    assert "attempts in" in failure.value.message
    assert failure.value.hint == "run the same command again: it goes on from what is on disk"
    assert sum(clock.slept) < 600


def test_no_network_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: FakeClock, checkpoint: Path):
    with serve(checkpoint, REPO) as gone:
        address = gone.endpoint
    with pytest.raises(RemoteError) as failure:
        fetch(REPO, tmp_path / "out", endpoint=address, clock=clock)
    assert f"no answer from {address}" in failure.value.message
    assert "check the network and HF_ENDPOINT" in failure.value.hint
    assert 30 < sum(clock.slept) <= 60
    assert not (tmp_path / "out").exists()


def test_network_gone_for_a_while(hub: StandIn, checkpoint: Path, tmp_path: Path):
    class Returns(FakeClock):
        """The network comes back when someone has waited for it long enough."""

        def sleep(self, seconds: float) -> bool:
            stopped = super().sleep(seconds)
            if sum(self.slept) > 20:
                hub.come_back()
            return stopped

    class Leaves(Recorder):
        def item(self, text: str) -> None:
            if SHARD in text:
                hub.go_dark()

    clock = Returns()
    result = fetch(REPO, tmp_path / "out", clock=clock, progress=Leaves(), max_workers=2)
    assert contents(tmp_path / "out") == contents(checkpoint)
    assert sum(clock.slept) > 20 and result.bytes_fetched == size_of(checkpoint)


def test_a_stall_is_noticed(hub: StandIn, checkpoint: Path, tmp_path: Path, quick: RetryPolicy):
    hub.faults.add(Fault("stall", match=SHARD, after=50_000))
    assert fetched_whole(hub, checkpoint, tmp_path / "out", policy=quick) == 0


def test_a_trickle_is_a_stall(hub: StandIn, checkpoint: Path, tmp_path: Path, quick: RetryPolicy):
    hub.faults.add(Fault("drip", match=SHARD, after=50_000, seconds=0.01))
    result = fetch(REPO, tmp_path / "out", policy=quick)
    assert contents(tmp_path / "out") == contents(checkpoint)
    assert 0 <= hub.bytes_sent - result.bytes_fetched < 10  # what was on its way when the connection was given up
    requests = [r for r in hub.requests if r.role == "data" and r.headers["range"].endswith(f"-{SIZE - 1}")]
    assert any(r.sent < SIZE - 10_000 for r in requests)


def test_a_server_that_only_stalls(hub: StandIn, tmp_path: Path, clock: FakeClock):
    hub.faults.add(Fault("stall", match=SHARD, after=0, times=None))
    policy = RetryPolicy(stall_s=0.05, patience_s=2.0)
    with pytest.raises(
        RemoteError, match=r"(no progress|no answer from 127\.0\.0\.1:\d+) for 0\.05 s, after \d+ attempts"
    ):
        fetch(REPO, tmp_path / "out", policy=policy, clock=clock)


@pytest.mark.parametrize("stage", ["api", "resolve", "data"])
def test_too_many_requests(hub: StandIn, checkpoint: Path, tmp_path: Path, clock: FakeClock, stage: str):
    match = "*" if stage == "api" else SHARD
    hub.faults.add(Fault("status", match=match, stage=stage, status=429, headers={"Retry-After": "77"}))  # type: ignore[arg-type]
    assert fetched_whole(hub, checkpoint, tmp_path / "out", clock=clock) == 0
    assert clock.slept == [77.0]


def test_retry_after_as_a_date(hub: StandIn, checkpoint: Path, tmp_path: Path, clock: FakeClock):
    date = email.utils.formatdate(time.time() + 200, usegmt=True)
    hub.faults.add(Fault("status", match=SHARD, status=503, headers={"Retry-After": date}))
    assert fetched_whole(hub, checkpoint, tmp_path / "out", clock=clock) == 0
    assert len(clock.slept) == 1 and 195 < clock.slept[0] <= 200


def test_a_wait_beyond_patience_is_told(hub: StandIn, tmp_path: Path, clock: FakeClock):
    hub.faults.add(Fault("status", match=SHARD, status=429, headers={"Retry-After": "86400"}))
    with pytest.raises(RemoteError, match=r"HTTP 429 .*\(asked to wait 24 h 00 min\)"):
        fetch(REPO, tmp_path / "out", clock=clock)
    assert clock.slept == []


@pytest.mark.parametrize(("stage", "status"), [("data", 500), ("data", 503), ("resolve", 502), ("api", 500)])
def test_server_errors_pass(hub: StandIn, checkpoint: Path, tmp_path: Path, clock: FakeClock, stage: str, status: int):
    match = "*" if stage == "api" else SHARD
    hub.faults.add(Fault("status", match=match, stage=stage, status=status, times=4))  # type: ignore[arg-type]
    assert fetched_whole(hub, checkpoint, tmp_path / "out", clock=clock) == 0
    assert len(clock.slept) == 4
    for pause, whole in zip(clock.slept, (0.5, 1.0, 2.0, 4.0), strict=True):
        assert whole / 2 <= pause <= whole


def test_server_errors_that_stay(hub: StandIn, tmp_path: Path, clock: FakeClock):
    hub.faults.add(Fault("status", match=SHARD, status=503, times=None))
    with pytest.raises(RemoteError) as failure:
        fetch(REPO, tmp_path / "out", clock=clock)
    assert failure.value.exit_code == 13
    assert f"org/mini {SHARD}: HTTP 503" in failure.value.message
    assert max(clock.slept) <= 30 and sum(clock.slept) <= 60


def test_expired_addresses(hub: StandIn, checkpoint: Path, tmp_path: Path, clock: FakeClock):
    class Expires(Recorder):
        def item(self, text: str) -> None:
            if "model-00001" in text:
                hub.expire_addresses()

    hub.faults.add(Fault("drop", match="model-*", after=60_000, times=6))
    fetch(REPO, tmp_path / "out", clock=clock, progress=Expires(), max_workers=3)
    hub.expire_addresses()
    assert contents(tmp_path / "out") == contents(checkpoint)
    assert hub.bytes_sent == size_of(checkpoint)


def test_an_expired_address_is_replaced_by_a_fresh_one(
    hub: StandIn, checkpoint: Path, tmp_path: Path, clock: FakeClock
):
    hub.faults.add(Fault("status", match=SHARD, status=403))
    assert fetched_whole(hub, checkpoint, tmp_path / "out", clock=clock) == 0
    asked = [r for r in hub.requests if r.method == "HEAD" and SHARD in r.path]
    assert len(asked) == 2


def test_a_storage_that_always_refuses(hub: StandIn, tmp_path: Path, clock: FakeClock):
    hub.faults.add(Fault("status", match=SHARD, status=403, times=None))
    with pytest.raises(RemoteError) as failure:
        fetch(REPO, tmp_path / "out", clock=clock)
    assert failure.value.message == f"org/mini {SHARD}: 127.0.0.1 refused the address (HTTP 403)"
    assert failure.value.hint.startswith("check the clock of this machine")


def test_a_server_that_ignores_range(
    hub: StandIn, checkpoint: Path, tmp_path: Path, clock: FakeClock, progress: Recorder
):
    hub.faults.add(Fault("drop", match=SHARD, after=100_000))
    hub.faults.add(Fault("ignore_range", match=SHARD, times=None))
    extra = fetched_whole(hub, checkpoint, tmp_path / "out", clock=clock, progress=progress)
    assert extra == 100_000
    assert progress.warnings == [f"{SHARD}: the server ignores Range, 100 kB came a second time"]


def test_a_wrong_content_range(hub: StandIn, checkpoint: Path, tmp_path: Path, clock: FakeClock):
    hub.faults.add(Fault("wrong_content_range", match=SHARD))
    fetch(REPO, tmp_path / "out", clock=clock)
    assert contents(tmp_path / "out") == contents(checkpoint)


def test_a_content_range_that_stays_wrong(hub: StandIn, tmp_path: Path, clock: FakeClock):
    hub.faults.add(Fault("wrong_content_range", match=SHARD, times=None))
    with pytest.raises(RemoteError) as failure:
        fetch(REPO, tmp_path / "out", clock=clock)
    assert failure.value.exit_code == 13
    assert failure.value.message == (
        f"org/mini {SHARD}: wrong Content-Range (expected 'bytes 0-145415/145416', found 'bytes 1-145416/145416')"
    )
    assert len(clock.slept) == 3


def test_a_file_shorter_than_listed(hub: StandIn, tmp_path: Path, clock: FakeClock):
    hub.faults.add(Fault("short", match=SHARD, after=1000, times=None))
    with pytest.raises(RemoteError, match=r"wrong Content-Range \(expected .*/145416', found 'bytes 0-999/1000'\)"):
        fetch(REPO, tmp_path / "out", clock=clock)


def test_an_answer_for_another_commit(hub: StandIn, tmp_path: Path):
    hub.faults.add(Fault("wrong_commit", match=SHARD, stage="resolve", times=None))
    with pytest.raises(CheckpointCorrupt) as failure:
        fetch(REPO, tmp_path / "out")
    assert failure.value.exit_code == 11
    assert f"commit: expected {hub.repos[REPO].commit}, found {'f' * 40}" in failure.value.message


def test_the_token_stays_with_the_hub(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with serve(checkpoint, REPO, private=True, readers={"hf_secret"}, tokens={"hf_secret"}) as hub:
        monkeypatch.setenv("HF_TOKEN", "hf_secret")
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint + "/")
        fetch(REPO, tmp_path / "out")
        assert contents(tmp_path / "out") == contents(checkpoint)
        with_token = {r.role for r in hub.requests if "hf_secret" in str(r.headers)}
        assert with_token == {"hub"}
        assert any(r.role == "data" for r in hub.requests)
        assert all("authorization" in r.headers for r in hub.requests if r.role == "hub" and r.method == "GET")


def test_an_interrupt_ends_stalled_transfers_at_once(hub: StandIn, checkpoint: Path, tmp_path: Path):
    class Interrupts(Recorder):
        def item(self, text: str) -> None:
            if "model-00011" in text:
                while sum(r.sent == 10_000 for r in hub.requests) < 4:
                    time.sleep(0.005)
                raise KeyboardInterrupt

    hub.faults.add(Fault("stall", match="model-0000[1-4]*", after=10_000, times=None))
    patient = RetryPolicy(stall_s=3600.0)  # a transfer that waits for its stall to be noticed would hang here
    with pytest.raises(KeyboardInterrupt):
        fetch(REPO, tmp_path / "out", progress=Interrupts(), max_workers=8, policy=patient)
    hub.faults.clear()
    sent = hub.bytes_sent
    result = fetch(REPO, tmp_path / "out")
    assert contents(tmp_path / "out") == contents(checkpoint)
    assert sum(file.status == "resumed" for file in result.files) >= 4  # a fifth may have been under way
    assert hub.bytes_sent - sent == result.bytes_fetched
