"""A writable copy of the golden checkpoint behind a stand-in Hub, and a clock on which waiting takes no time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from k3tool.hub import RetryPolicy
from k3tool.standin import StandIn, serve
from tests.helpers import copy_checkpoint

REPO = "org/mini"


class FakeClock:
    """Time that passes only in `sleep`."""

    def __init__(self) -> None:
        self.stop = threading.Event()
        self.slept: list[float] = []
        self._now = 0.0
        self._lock = threading.Lock()

    def now(self) -> float:
        with self._lock:
            return self._now

    def sleep(self, seconds: float) -> bool:
        with self._lock:
            self._now += seconds
            self.slept.append(seconds)
        return self.stop.is_set()


class Recorder:
    """Progress that remembers."""

    def __init__(self) -> None:
        self.items: list[str] = []
        self.warnings: list[str] = []
        self.totals: dict[str, int] = {}
        self.done: dict[str, int] = {}
        self._lock = threading.Lock()

    def started(self, task: str, total: int, unit: str = "bytes") -> None:
        self.totals[task] = total
        self.done[task] = 0

    def advanced(self, task: str, amount: int) -> None:
        with self._lock:
            self.done[task] += amount

    def finished(self, task: str) -> None: ...

    def item(self, text: str) -> None:
        self.items.append(text)

    def warn(self, text: str) -> None:
        self.warnings.append(text)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def progress() -> Recorder:
    return Recorder()


@pytest.fixture
def quick() -> RetryPolicy:
    """Real waiting that ends soon."""
    return RetryPolicy(first_s=0.01, longest_s=0.02, patience_s=1.0, stall_s=0.2)


@pytest.fixture
def checkpoint(mini: Path, tmp_path: Path) -> Path:
    return copy_checkpoint(mini, tmp_path / "repository")


@pytest.fixture
def hub(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    with serve(checkpoint, REPO) as stand_in:
        monkeypatch.setenv("HF_ENDPOINT", stand_in.endpoint)
        yield stand_in


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, except what k3tool keeps beside the data."""
    files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    return {name: data for name, data in files.items() if name != "k3tool-manifest.json"}


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
