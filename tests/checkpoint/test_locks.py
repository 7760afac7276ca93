"""Locks where the file system has them, and files that stand in for them where it has none."""

from __future__ import annotations

import errno
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from k3tool.checkpoint import locks
from k3tool.checkpoint.ledger import Ledger
from k3tool.checkpoint.writer import AtomicFile, write_atomic
from k3tool.errors import PartlyDone
from k3tool.events import Silent, listen


class Heard(Silent):
    def __init__(self) -> None:
        self.warnings: list[str] = []

    def warn(self, text: str) -> None:
        self.warnings.append(text)


@pytest.fixture(params=[errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL])
def lockless(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Heard:
    def flock(*_: object) -> None:
        raise OSError(request.param, os.strerror(request.param))

    monkeypatch.setattr("fcntl.flock", flock)
    heard = Heard()
    listen(heard)
    return heard


def other(folder: Path, name: str, *, host: str | None = None, process: int | None = None, boot: str | None = None):
    """What another process leaves in a folder that it holds."""
    number = os.getppid() if process is None else process
    (folder / name).write_text(
        json.dumps([host or socket.gethostname(), boot or locks.boot_id(), number, locks._started(number)])
    )


def test_a_job_without_locks_goes_on_warns_once_and_leaves_nothing(lockless: Heard, tmp_path: Path):
    with Ledger(tmp_path, "id", "reshard x") as ledger:
        write_atomic(tmp_path / "file", b"data")
        write_atomic(tmp_path / "more", b"data")
        ledger.record("file", 4, "0" * 64)
        with pytest.raises(PartlyDone, match="in use by process"), Ledger(tmp_path, "id", "reshard x"):
            pass
    with Ledger(tmp_path, "id", "reshard x") as ledger:
        assert "file" in ledger.done
        ledger.complete()
    assert sorted(os.listdir(tmp_path)) == ["file", "more"]
    assert len(lockless.warnings) == 1 and "no locks" in lockless.warnings[0]


def test_who_holds_a_folder_without_locks(lockless: Heard, tmp_path: Path):
    state = tmp_path / ".k3tool"
    state.mkdir()
    other(state, "lock.held")
    with pytest.raises(PartlyDone) as failure, Ledger(tmp_path, "id", "fetch x"):
        pass
    assert failure.value.hint.endswith(str(state / "lock.held"))
    other(state, "lock.held", host="elsewhere", process=1)
    with pytest.raises(PartlyDone), Ledger(tmp_path, "id", "fetch x"):
        pass
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    for left in ({"process": ended.pid}, {"boot": "an earlier one"}):
        other(state, "lock.held", **left)  # killed: nobody took it away
        with Ledger(tmp_path, "id", "fetch x"):
            pass
    assert not (state / "lock.held").exists()
    (state / "lock.held").write_text("")
    os.utime(state / "lock.held", (1, 1))
    with Ledger(tmp_path, "id", "fetch x"):
        pass


def test_parts_share_a_folder_without_locks(lockless: Heard, tmp_path: Path):
    with Ledger(tmp_path, "id", "reshard x", part="1-of-2") as first:
        with pytest.raises(PartlyDone), Ledger(tmp_path, "id", "reshard x"):
            pass
        with pytest.raises(PartlyDone), Ledger(tmp_path, "id", "reshard x", part="1-of-2"):
            pass
        other(first.state, "lock.held-elsewhere-7", host="elsewhere")
        first.complete_with_the_last()
    assert first.state.is_dir()
    with Ledger(tmp_path, "id", "reshard x", part="1-of-2") as first:
        (first.state / "lock.held-elsewhere-7").unlink()
        with first.closing():
            pass
    assert not list(tmp_path.iterdir())


def test_two_writers_of_one_file_without_locks(lockless: Heard, tmp_path: Path):
    with AtomicFile(tmp_path / "file") as file:
        file.write(b"x")
        with pytest.raises(PartlyDone), AtomicFile(tmp_path / "file"):
            pass
    assert os.listdir(tmp_path) == ["file"]
    with pytest.raises(ZeroDivisionError), AtomicFile(tmp_path / "other"):
        _ = 1 / 0
    assert os.listdir(tmp_path) == ["file"]


def test_a_lock_that_fails_otherwise_says_where(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    def flock(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr("fcntl.flock", flock)
    with pytest.raises(Exception, match=str(tmp_path)) as failure, Ledger(tmp_path, "id", "x"):
        pass
    assert getattr(failure.value, "exit_code", 70) == 12
