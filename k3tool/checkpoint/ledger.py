"""What a long job has finished, so that the same command continues and a different one is refused.

`DEST/.k3tool/` holds a lock naming the running process, `job.json` (id and command) and `done.jsonl`, one line per
finished file. The folder is removed when the job completes.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import socket
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from k3tool.checkpoint.manifest import FileRecord
from k3tool.checkpoint.writer import fsync_folder, write_atomic
from k3tool.errors import PartlyDone, UsageError

LEDGER_FOLDER = ".k3tool"


def job_id(description: Any) -> str:
    """A stable id of anything JSON can hold: two jobs are the same when their plans are."""
    return hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()[:32]


class Ledger:
    """The running record of one job in `folder`. Use as a context manager; holds an exclusive lock meanwhile.

    Raises PartlyDone (exit 3) where another process holds the folder, UsageError (exit 2) where an unfinished
    different job is there.
    """

    def __init__(self, folder: Path, identity: str, command: str) -> None:
        self.folder = folder
        self.state = folder / LEDGER_FOLDER
        self.identity = identity
        self.command = command
        self.done: dict[str, FileRecord] = {}

    def __enter__(self) -> Ledger:
        self.state.mkdir(parents=True, exist_ok=True)
        self._lock = open(self.state / "lock", "a+", encoding="utf-8")
        try:
            self._acquire()
            self._check_job()
            self._load()
            self._journal = open(self.state / "done.jsonl", "ab", buffering=0)
        except BaseException:
            self._lock.close()
            raise
        return self

    def _acquire(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.seek(0)
            holder = self._lock.read(400).strip() or "another process"
            raise PartlyDone(
                f"{self.folder} is in use by {holder}", hint="wait for it, or stop it and run the same command again"
            ) from None
        self._lock.seek(0)
        self._lock.truncate()
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        self._lock.write(f"process {os.getpid()} on {socket.gethostname()} since {since}: {self.command}")
        self._lock.flush()

    def _check_job(self) -> None:
        path = self.state / "job.json"
        if path.is_file():
            with contextlib.suppress(ValueError):
                job = json.loads(path.read_bytes())
                if job.get("id") != self.identity:
                    raise UsageError(
                        f"{self.folder} holds the unfinished work of another command: {job.get('command')}",
                        hint="finish that one, name another folder, or start over with --overwrite",
                    )
                return
        write_atomic(path, json.dumps({"id": self.identity, "command": self.command}).encode())

    def _load(self) -> None:
        path = self.state / "done.jsonl"
        if not path.is_file():
            return
        for line in path.read_bytes().splitlines():
            with contextlib.suppress(ValueError, KeyError, TypeError):  # a torn last line is work to do again
                entry = json.loads(line)
                target = self.folder / entry["file"]
                if target.is_file() and target.stat().st_size == entry["size"]:
                    self.done[entry["file"]] = FileRecord(entry["size"], entry["sha256"])

    def record(self, file: str, size: int, sha256: str) -> None:
        """`file` (relative to the folder) has its final name. Durable when this returns."""
        self._journal.write(json.dumps({"file": file, "size": size, "sha256": sha256}).encode() + b"\n")
        os.fsync(self._journal.fileno())
        self.done[file] = FileRecord(size, sha256)

    def complete(self) -> None:
        """The job is whole: nothing of the ledger stays."""
        shutil.rmtree(self.state, ignore_errors=True)
        fsync_folder(self.folder)

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._journal.close()
        self._lock.close()
