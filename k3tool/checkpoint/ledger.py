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
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from k3tool.checkpoint.manifest import FileRecord
from k3tool.checkpoint.writer import fsync_folder, no_space, write_atomic
from k3tool.errors import PartlyDone, UsageError

LEDGER_FOLDER = ".k3tool"


def boot_id() -> str:
    """What changes when this machine restarts; empty where that is not known."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def job_id(description: Any) -> str:
    """A stable id of anything JSON can hold: two jobs are the same when their plans are."""
    return hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()[:32]


class Ledger:
    """The running record of one job in `folder`. Use as a context manager; holds an exclusive lock meanwhile.

    Raises PartlyDone (exit 3) where another process holds the folder, UsageError (exit 2) where an unfinished
    different job is there and `overwrite` is not set.

    facts: what a later run of the same job may compare itself with; after entering, those of the first run.
    done: finished files that are still as they were recorded. synced: file to (durable bytes, boot id).
    """

    def __init__(
        self,
        folder: Path,
        identity: str,
        command: str,
        *,
        facts: Mapping[str, Any] | None = None,
        overwrite: bool = False,
    ) -> None:
        self.folder = folder
        self.state = folder / LEDGER_FOLDER
        self.identity = identity
        self.command = command
        self.facts: dict[str, Any] = dict(facts or {})
        self.overwrite = overwrite
        self.done: dict[str, FileRecord] = {}
        self.synced: dict[str, tuple[int, str]] = {}
        self._write_lock = threading.Lock()

    def __enter__(self) -> Ledger:
        self._acquire()
        try:
            self._check_job()
            self._load()
            self._journal = open(self.state / "done.jsonl", "ab", buffering=0)
            self._journal.write(b"\n")  # ends a line that was torn
        except BaseException:
            self._lock.close()
            raise
        return self

    def _acquire(self) -> None:
        while True:
            self.state.mkdir(parents=True, exist_ok=True)
            self._lock = open(self.state / "lock", "a+", encoding="utf-8")
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.samestat(os.fstat(self._lock.fileno()), os.stat(self.state / "lock")):
                    break
            except BlockingIOError:
                self._refuse()
            except FileNotFoundError:
                pass  # the holder has just completed and removed the folder: begin a new one
            self._lock.close()
        self._lock.seek(0)
        self._lock.truncate()
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        self._lock.write(f"process {os.getpid()} on {socket.gethostname()} since {since}: {self.command}")
        self._lock.flush()

    def _refuse(self) -> NoReturn:
        with self._lock:
            self._lock.seek(0)
            holder = self._lock.read(400).strip() or "another process"
            raise PartlyDone(
                f"{self.folder} is in use by {holder}", hint="wait for it, or stop it and run the same command again"
            ) from None

    def _check_job(self) -> None:
        path = self.state / "job.json"
        if self.overwrite:
            for entry in self.state.iterdir():
                if entry.name != "lock":
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

    def _load(self) -> None:
        path = self.state / "done.jsonl"
        if not path.is_file():
            return
        for line in path.read_bytes().splitlines():
            with contextlib.suppress(ValueError, KeyError, TypeError, OSError):  # a torn last line is work to do again
                entry = json.loads(line)
                name = entry["file"]
                if "synced" in entry:
                    self.synced[name] = (int(entry["synced"]), str(entry["boot"]))
                    continue
                self.done.pop(name, None)
                if entry["stamp"] is not None and entry["stamp"] == self._stamp(name):
                    self.done[name] = FileRecord(entry["size"], entry["sha256"])

    def _stamp(self, file: str) -> list[int] | None:
        """What changes when a finished file is written again: size, time and inode."""
        path = self.folder / file
        if not path.is_file():
            return None
        found = path.stat()
        return [found.st_size, found.st_mtime_ns, found.st_ino]

    def record(self, file: str, size: int, sha256: str) -> None:
        """`file` (relative to the folder) has its final name. Durable when this returns."""
        self._append({"file": file, "size": size, "sha256": sha256, "stamp": self._stamp(file)})
        os.fsync(self._journal.fileno())
        self.done[file] = FileRecord(size, sha256)

    def mark(self, file: str, durable_bytes: int) -> None:
        """The first `durable_bytes` of an unfinished `file` survive a power cut. The mark itself may be lost in one."""
        self._append({"file": file, "synced": durable_bytes, "boot": boot_id()})
        self.synced[file] = (durable_bytes, boot_id())

    def _append(self, entry: Mapping[str, Any]) -> None:
        try:
            with self._write_lock:
                self._journal.write(json.dumps(entry).encode() + b"\n")
        except OSError as error:
            raise no_space(self.state / "done.jsonl", error) from None

    def complete(self) -> None:
        """The job is whole: nothing of the ledger stays."""
        shutil.rmtree(self.state, ignore_errors=True)
        fsync_folder(self.folder)

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._journal.close()
        self._lock.close()
