"""What a long job has finished, so that the same command continues and a different one is refused.

`DEST/.k3tool/` holds a lock naming the running process, `job.json` (id, command and the facts the job was begun with)
and `done.jsonl`: one line per finished file, and marks of how far unfinished ones are durable. The folder is removed
when the job completes.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from k3tool.checkpoint.manifest import FileRecord
from k3tool.checkpoint.writer import fsync_folder, sync_file, write_atomic
from k3tool.disk import disk_errors
from k3tool.errors import PartlyDone, UsageError

LEDGER_FOLDER = ".k3tool"
SHARED_PATIENCE_S = 2.0


@cache
def boot_id() -> str:
    """What changes when this machine restarts; empty where that is not known."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        command = ["sysctl", "-n", "kern.bootsessionuuid"]
        return subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout.strip()
    return ""


def job_id(description: Any) -> str:
    """A stable id of anything JSON can hold: two jobs are the same when their plans are."""
    return hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()[:32]


def read_marks(folder: Path) -> dict[str, tuple[int, str]]:
    """How far unfinished files of a job in `folder` are durable, without taking part in it: file to (bytes, boot id)."""
    ledger = Ledger(folder, "", "")
    ledger.reload()
    return ledger.synced


class Ledger:
    """The running record of one job in `folder`. Use as a context manager; holds an exclusive lock meanwhile.

    Raises PartlyDone (exit 3) where another process holds the folder, UsageError (exit 2) where an unfinished
    different job is there and `overwrite` is not set.

    facts: what a later run of the same job may compare itself with; after entering, those of the first run.
    part: one of several processes, perhaps on several machines, that share the job: each names a different part, keeps
        a journal of its own and sees the others' finished files; a process without a part excludes all others.
    done: finished files that are still as they were recorded. synced: file to (durable bytes, boot id).
    notes: what was recorded beside a finished file (JSON).
    """

    def __init__(
        self,
        folder: Path,
        identity: str,
        command: str,
        *,
        facts: Mapping[str, Any] | None = None,
        overwrite: bool = False,
        part: str = "",
    ) -> None:
        self.folder = folder
        self.state = folder / LEDGER_FOLDER
        self.identity = identity
        self.command = command
        self.facts: dict[str, Any] = dict(facts or {})
        self.overwrite = overwrite
        self.done: dict[str, FileRecord] = {}
        self.synced: dict[str, tuple[int, str]] = {}
        self.notes: dict[str, Any] = {}
        self.part = part
        self._locks: list[IO[str]] = []
        self._write_lock = threading.Lock()

    def __enter__(self) -> Ledger:
        self._acquire()
        try:
            if self.part:
                self._locks.append(self._locked(self.state / f"lock-{self.part}", fcntl.LOCK_EX))
                with self._locked(self.state / "job.lock", fcntl.LOCK_EX, wait=True):
                    self._check_job()
            else:
                self._check_job()
            self.reload()
            self._journal = open(self.state / self._journal_name, "ab", buffering=0)
            self._journal.write(b"\n")  # ends a line that was torn
        except BaseException:
            self._release()
            raise
        return self

    @property
    def _journal_name(self) -> str:
        return f"done-{self.part}.jsonl" if self.part else "done.jsonl"

    def _acquire(self) -> None:
        patience = time.monotonic() + SHARED_PATIENCE_S
        while True:
            self.state.mkdir(parents=True, exist_ok=True)
            try:
                lock = self._locked(self.state / "lock", fcntl.LOCK_SH if self.part else fcntl.LOCK_EX)
                if os.path.samestat(os.fstat(lock.fileno()), os.stat(self.state / "lock")):
                    break
                lock.close()
            except FileNotFoundError:
                pass  # the holder has just completed and removed the folder: begin a new one
            except PartlyDone:
                # Another part that is just completing holds it alone for a moment.
                if not self.part or time.monotonic() > patience:
                    raise
                time.sleep(0.05)
        self._locks.append(lock)

    def _locked(self, path: Path, kind: int, *, wait: bool = False) -> IO[str]:
        """The open lock file, saying who holds it. Raises PartlyDone where someone else does."""
        lock = open(path, "a+", encoding="utf-8")  # noqa: SIM115 - held until the job ends
        try:
            fcntl.flock(lock, kind if wait else kind | fcntl.LOCK_NB)
        except BlockingIOError:
            with lock:
                lock.seek(0)
                holder = lock.read(400).strip() or "another process"
            raise PartlyDone(
                f"{self.folder} is in use by {holder}", hint="wait for it, or stop it and run the same command again"
            ) from None
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        lock.seek(0)
        lock.truncate()
        lock.write(f"process {os.getpid()} on {socket.gethostname()} since {since}: {self.command}")
        lock.flush()
        return lock

    @contextlib.contextmanager
    def closing(self) -> Iterator[None]:
        """Only one process of a job at a time is in here, with every finished file known. Waits for its turn."""
        with self._locked(self.state / "closing.lock", fcntl.LOCK_EX, wait=True):
            self.reload()
            yield

    def _check_job(self) -> None:
        path = self.state / "job.json"
        if self.overwrite:
            for entry in self.state.iterdir():
                if not entry.name.endswith("lock"):
                    shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        if path.is_file():
            with contextlib.suppress(ValueError):
                job = json.loads(path.read_bytes())
                if job.get("id") != self.identity:
                    raise UsageError(
                        f"{self.folder} holds the unfinished work of another command: {job.get('command')}",
                        hint="finish that one, name another folder, or start over with --overwrite",
                    )
                self.facts = dict(job.get("facts") or {})
                return
        document = {"id": self.identity, "command": self.command, "facts": self.facts}
        write_atomic(path, json.dumps(document).encode())

    def reload(self) -> None:
        """Read what every process of the job has recorded so far."""
        for path in sorted(self.state.glob("done*.jsonl")):
            for line in path.read_bytes().splitlines():
                # a torn last line is work to do again
                with contextlib.suppress(ValueError, KeyError, TypeError, OSError):
                    self._read(json.loads(line))

    def _read(self, entry: Mapping[str, Any]) -> None:
        name = entry["file"]
        if "synced" in entry:
            self.synced[name] = (int(entry["synced"]), str(entry["boot"]))
            return
        self.done.pop(name, None)
        if entry["stamp"] is not None and entry["stamp"] == self._stamp(name):
            self.done[name] = FileRecord(entry["size"], entry["sha256"])
            self.notes[name] = entry.get("note")

    def _stamp(self, file: str) -> list[int] | None:
        """What changes when a finished file is written again: size, time and inode."""
        path = self.folder / file
        if not path.is_file():
            return None
        found = path.stat()
        return [found.st_size, found.st_mtime_ns, found.st_ino]

    def record(self, file: str, size: int, sha256: str, note: Any = None) -> None:
        """`file` (relative to the folder) has its final name. Durable when this returns. `note`: JSON kept with it."""
        entry = {"file": file, "size": size, "sha256": sha256, "stamp": self._stamp(file)}
        self._append(entry if note is None else {**entry, "note": note})
        sync_file(self._journal.fileno(), self.state / self._journal_name)
        self.done[file] = FileRecord(size, sha256)
        self.notes[file] = note

    def mark(self, file: str, durable_bytes: int) -> None:
        """The first `durable_bytes` of an unfinished `file` survive a power cut. The mark itself may be lost in one."""
        self._append({"file": file, "synced": durable_bytes, "boot": boot_id()})
        self.synced[file] = (durable_bytes, boot_id())

    def _append(self, entry: Mapping[str, Any]) -> None:
        with disk_errors(self.state / self._journal_name, "write"), self._write_lock:
            self._journal.write(json.dumps(entry).encode() + b"\n")

    def complete(self) -> None:
        """The job is whole: nothing of the ledger stays."""
        shutil.rmtree(self.state, ignore_errors=True)
        fsync_folder(self.folder)

    def complete_unless_shared(self) -> None:
        """This process's part is whole: the ledger goes, unless another process of the same job is still at work."""
        try:
            fcntl.flock(self._locks[0], fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        self.complete()

    def _release(self) -> None:
        for lock in reversed(self._locks):
            lock.close()
        self._locks.clear()

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._journal.close()
        self._release()
