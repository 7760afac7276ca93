"""What a long job has finished, so that the same command continues and a different one is refused.

`DEST/.k3tool/` holds a lock naming the running process, `job.json` (id, command and the facts the job was begun with)
and `done.jsonl`: one line per finished file, and marks of how far unfinished ones are durable. The folder is removed
when the job completes.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from k3tool.checkpoint.locks import HELD_SUFFIX, boot_id, is_alone, is_held, lock, unlock
from k3tool.checkpoint.manifest import FileRecord
from k3tool.checkpoint.outside import Fields, corrupt, parse_lines, parse_object, read_file
from k3tool.checkpoint.writer import fsync_folder, sync_file, write_atomic
from k3tool.disk import disk_errors, make_folder, refusal, refuse_link
from k3tool.errors import CheckpointCorrupt, K3Error, PartlyDone, UsageError

LEDGER_FOLDER = ".k3tool"
MAX_JOB_BYTES = 16 << 20
MAX_JOURNAL_BYTES = 512 << 20  # a line for each file, with what was measured of each of its tensors
_unknown = corrupt("start over with --overwrite, or name another folder: nothing says whose work is unfinished here")
SHARED_PATIENCE_S = 2.0
WHOLE_NAME = "whole"  # nothing of the job is missing


def job_id(description: Any) -> str:
    """A stable id of anything JSON can hold: two jobs are the same when their plans are."""
    return hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()[:32]


def read_marks(folder: Path) -> dict[str, tuple[int, str]]:
    """How far unfinished files of a job in `folder` are durable, without taking part in it: file to (bytes, boot id)."""
    ledger = Ledger(folder, "", "")
    ledger.reload()
    return ledger.synced


def is_at_work(folder: Path) -> bool:
    """Whether another process holds the ledger of `folder` now."""
    return is_held(folder / LEDGER_FOLDER / "lock")


class Ledger:
    """The running record of one job in `folder`. Use as a context manager; holds an exclusive lock meanwhile.

    Raises PartlyDone (exit 3) where another process holds the folder, UsageError (exit 2) where an unfinished
    different job is there and `overwrite` is not set.

    facts: what a later run of the same job may compare itself with; after entering, those of the first run.
    part: one of several processes, perhaps on several machines, that share the job: each names a different part, keeps
        a journal of its own and sees the others' finished files; a process without a part excludes all others.
    done: finished files that are still as they were recorded. synced: file to (durable bytes, boot id).
    notes: what was recorded beside a finished file (JSON).
    is_new: no earlier run of this job was recorded here.
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
        self.is_new = False
        self._locks: list[_Lock] = []
        self._made: list[Path] = []
        self._write_lock = threading.Lock()

    def __enter__(self) -> Ledger:
        try:
            self._acquire()
            if self.part:
                self._locks.append(self._locked(self.state / f"lock-{self.part}"))
                with self._locked(self.state / "job.lock", wait=True):
                    self._check_job()
            else:
                self._check_job()
            self.reload()
            refuse_link(self.state / self._journal_name)
            with disk_errors(self.state / self._journal_name, "write"):
                self._journal = open(self.state / self._journal_name, "ab", buffering=0)
                try:
                    self._journal.write(b"\n")  # ends a line that was torn
                except OSError:
                    self._journal.close()
                    raise
        except BaseException:
            if self._locks and self.state in self._made and not self.part:
                self.abandon()
            else:
                self._remove_made()
            self._release()
            raise
        return self

    @property
    def _journal_name(self) -> str:
        return f"done-{self.part}.jsonl" if self.part else "done.jsonl"

    def _acquire(self) -> None:
        patience = time.monotonic() + SHARED_PATIENCE_S
        refuse_link(self.state)
        while True:
            self._made += make_folder(self.folder)
            self._made += make_folder(self.state)
            try:
                taken = self._locked(self.state / "lock", shared=bool(self.part))
                if taken.is_in_place():
                    break
                taken.close()
            except FileNotFoundError as error:
                # The holder has just completed and removed the folder: begin a new one.
                if time.monotonic() > patience:
                    raise refusal(error, self.state / "lock", "write") from error
            except PartlyDone:
                # Another part that is just completing holds it alone for a moment.
                if not self.part or time.monotonic() > patience:
                    raise
                time.sleep(0.05)
        self._locks.append(taken)

    def _locked(self, path: Path, *, shared: bool = False, wait: bool = False) -> _Lock:
        """A held lock, whose file says who holds it. Raises PartlyDone where someone else does."""
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        text = f"process {os.getpid()} on {socket.gethostname()} since {since}: {self.command}"
        return _Lock(path, text, shared=shared, wait=wait)

    @contextlib.contextmanager
    def closing(self) -> Iterator[None]:
        """Only one process of a job at a time is in here, with every finished file known. Waits for its turn."""
        with self._locked(self.state / "closing.lock", wait=True):
            self.reload()
            yield

    def _check_job(self) -> None:
        path = self.state / "job.json"
        if self.overwrite:
            self._clear()
        if path.is_file():
            with disk_errors(path):
                text = read_file(path, MAX_JOB_BYTES, fail=_unknown)
            job = parse_object(text, where=str(path), fail=_unknown, own=True)
            identity, facts = job.text("id"), job.mapping("facts", {})
            if identity != self.identity:
                raise self._another(job.text("command", "")[:1000])
            self.facts = dict(facts)
            return
        document = {"id": self.identity, "command": self.command, "facts": self.facts}
        self.is_new = True
        write_atomic(path, json.dumps(document).encode())

    def _another(self, command: str) -> UsageError:
        if command == self.command:
            return UsageError(
                f"{self.folder} holds the unfinished work of this command from before its source or one of its options "
                f"changed: {command}",
                hint="name another folder, or start over with --overwrite",
            )
        return UsageError(
            f"{self.folder} holds the unfinished work of another command: {command}",
            hint="finish that one, name another folder, or start over with --overwrite",
        )

    def _clear(self) -> None:
        """Forget all of an earlier job but the locks, which are this process's own."""
        with disk_errors(self.state, "clear"):
            for entry in self.state.iterdir():
                if not entry.name.endswith(("lock", HELD_SUFFIX)):
                    shutil.rmtree(entry) if entry.is_dir() else entry.unlink()

    def reload(self) -> None:
        """Read what every process of the job has recorded so far."""
        for path in sorted(self.state.glob("done*.jsonl")):
            with disk_errors(path):
                text = read_file(path, MAX_JOURNAL_BYTES, fail=_unknown)
            for line in parse_lines(text):
                # a line that is torn or not ours is work to do again
                with contextlib.suppress(CheckpointCorrupt, ValueError, OSError):
                    self._read(Fields(line, str(path), _unknown))

    def _read(self, entry: Fields) -> None:
        name = entry.text("file")
        if "synced" in entry:
            self.synced[name] = (entry.integer("synced"), entry.text("boot"))
            return
        self.done.pop(name, None)
        record = FileRecord(entry.integer("size"), entry.text("sha256"))
        stamp = entry.items("stamp", None)
        if stamp is not None and stamp == self._stamp(name):
            self.done[name] = record
            self.notes[name] = entry.values.get("note")

    def _stamp(self, file: str) -> list[int] | None:
        """What changes when a finished file is written again: size, time and inode."""
        path = self.folder / file
        if not path.is_file():
            return None
        found = path.stat()
        return [found.st_size, found.st_mtime_ns, found.st_ino]

    def record(self, file: str, size: int, sha256: str, note: Any = None) -> None:
        """`file` (relative to the folder) has its final name. Durable when this returns. `note`: JSON kept with it."""
        with disk_errors(self.folder / file):
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

    def abandon(self) -> None:
        """The job has done nothing: no claim stays, nor a folder that was made for it alone."""
        shutil.rmtree(self.state, ignore_errors=True)
        self._remove_made()

    def _remove_made(self) -> None:
        """Folders that were made for this job alone, where they are empty."""
        for folder in sorted(self._made, key=lambda path: -len(path.parts)):
            with contextlib.suppress(OSError):
                folder.rmdir()

    def abandon_if_idle(self) -> bool:
        """Abandon the job where no process has finished a file of it, and no other is at work. Whether it was."""
        if not self.part:
            idle = not self.done
        else:
            with self.closing():
                idle = not self.done and self._locks[0].is_alone()
        if idle:
            self.abandon()
        return idle

    def complete(self) -> None:
        """The job is whole: nothing of the ledger stays. Raises what refuses that: it would look like unfinished work."""
        with disk_errors(self.state, "remove"):
            try:
                shutil.rmtree(self.state)
            except FileNotFoundError:
                pass  # another part of the job has done so
            except OSError as error:
                # On NFS the lock, still open, leaves a hidden name behind until this process ends.
                if error.errno not in (errno.ENOTEMPTY, errno.EBUSY) or (self.state / "job.json").exists():
                    raise
        fsync_folder(self.folder)

    def complete_with_the_last(self) -> None:
        """The job is whole: the ledger goes when the last of the processes that share it leaves."""
        with disk_errors(self.state / WHOLE_NAME, "write"):
            (self.state / WHOLE_NAME).touch()

    def _leave(self) -> None:
        """One after the other, so that the last one knows that it is: nobody else shares the lock then."""
        with self._locked(self.state / "closing.lock", wait=True):
            if (self.state / WHOLE_NAME).exists() and self._locks[0].is_alone():
                self.complete()
            self._release()

    def _release(self) -> None:
        for taken in reversed(self._locks):
            taken.close()
        self._locks.clear()

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):  # what counts of it is durable
            self._journal.close()
        try:
            if self.part:
                self._leave()
        except (OSError, K3Error):
            pass  # what the job has done stands, and the next run of it clears up
        finally:
            self._release()


class _Lock:
    """One locked file of a ledger, with the holder's words in it. Raises PartlyDone where another process holds it,
    FileNotFoundError where its folder went meanwhile."""

    def __init__(self, path: Path, text: str, *, shared: bool, wait: bool) -> None:
        self._path = path
        refuse_link(path)
        try:
            self._file = open(path, "a+", encoding="utf-8", errors="surrogateescape")  # noqa: SIM115 - held
        except FileNotFoundError:
            raise
        except OSError as error:
            raise refusal(error, path, "write") from error
        try:
            with disk_errors(path, "lock"):
                self._held = self._taken(shared, wait)
            with disk_errors(path, "write"):
                self._file.seek(0)
                self._file.truncate()
                self._file.write(text)
                self._file.flush()
        except BaseException:
            self.close()
            raise

    def _taken(self, shared: bool, wait: bool) -> Path | None:
        self._held = None
        try:
            return lock(self._file.fileno(), self._path, shared=shared, wait=wait)
        except BlockingIOError as error:
            self._file.seek(0)
            holder = self._file.read(400).strip() or "another process"
            gone = f"; if it runs no more, remove {error.filename}" if error.filename else ""
            raise PartlyDone(
                f"{self._path.parent.parent} is in use by {holder}",
                hint=f"wait for it, or stop it and run the same command again{gone}",
            ) from None

    def is_in_place(self) -> bool:
        """Whether the file still has its name: the former holder may have removed it. Raises FileNotFoundError."""
        try:
            return os.path.samestat(os.fstat(self._file.fileno()), os.stat(self._path))
        except OSError as error:
            self.close()
            if error.errno == errno.ENOENT:
                raise
            raise refusal(error, self._path) from error

    def is_alone(self) -> bool:
        with disk_errors(self._path, "lock"):
            return is_alone(self._file.fileno(), self._path, self._held)

    def close(self) -> None:
        unlock(self._held)
        with contextlib.suppress(OSError):
            self._file.close()

    def __enter__(self) -> _Lock:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
