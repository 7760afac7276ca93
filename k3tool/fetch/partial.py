"""The unfinished bytes of one file: appended to, made durable now and then, and given their final name when right.

The partial's length says how much of the file is there. After a restart of the machine only what was marked as durable
is believed, because a power cut may have left the rest as zeros.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from urllib.parse import quote

from k3tool.checkpoint.ledger import Ledger, boot_id
from k3tool.checkpoint.writer import PARTIAL_SUFFIX, fsync_folder, sync_file
from k3tool.disk import UNSUPPORTED, disk_errors, make_folder, refusal, refuse_link
from k3tool.hub import RemoteFile

SYNC_BYTES = 64 << 20
READ_BLOCK = 1 << 20


def partial_path(state: Path, name: str) -> Path:
    """Where the partial of `name` (a path with forward slashes) lies, flat in the ledger's folder."""
    flat = quote(name, safe="")
    if len(flat) > 200:
        flat = hashlib.sha256(name.encode()).hexdigest()
    return state / (flat + PARTIAL_SUFFIX)


def trusted_length(path: Path, synced: tuple[int, str] | None) -> int:
    """How many bytes of a partial may be kept: all of them, or what was durable before this machine restarted."""
    try:
        length = path.stat().st_size
    except FileNotFoundError:
        return 0
    except OSError as error:
        raise refusal(error, path) from error
    durable, boot = synced or (0, "")
    return length if boot and boot == boot_id() else min(length, durable)


def was_brought(ledger: Ledger, name: str, size: int) -> bool:
    """Whether the file under its final name is what this job has written there, though its record did not come after."""
    durable, _ = ledger.synced.get(name, (-1, ""))
    return durable == size and not partial_path(ledger.state, name).exists()


class Digests:
    """SHA-256 of what passes, and the git blob SHA-1 beside it where that is what was published."""

    def __init__(self, size: int, expected: RemoteFile | None, *, enabled: bool = True) -> None:
        self.expected = expected
        self._sha256 = hashlib.sha256() if enabled else None
        needs_git = enabled and expected is not None and expected.sha256 is None and expected.git_sha1 is not None
        self._git = hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False) if needs_git else None

    def update(self, data: memoryview | bytes) -> None:
        if self._sha256 is not None:
            self._sha256.update(data)
        if self._git is not None:
            self._git.update(data)

    @property
    def sha256(self) -> str | None:
        return self._sha256.hexdigest() if self._sha256 is not None else None

    def mismatch(self) -> tuple[str, str, str] | None:
        """(kind, expected, found) where the published digest is another."""
        if self.expected is None or self._sha256 is None:
            return None
        if self.expected.sha256 is not None and self.sha256 != self.expected.sha256:
            return "sha256", self.expected.sha256, str(self.sha256)
        if self._git is not None and self._git.hexdigest() != self.expected.git_sha1:
            return "git sha1", str(self.expected.git_sha1), self._git.hexdigest()
        return None


class Partial:
    """One partial file of a ledger. Use as a context manager; leaving keeps it, `finish` and `discard` do not."""

    def __init__(self, ledger: Ledger, name: str) -> None:
        self.ledger = ledger
        self.name = name
        self.path = partial_path(ledger.state, name)
        self.position = 0
        self._durable = 0

    def __enter__(self) -> Partial:
        refuse_link(self.path)
        with disk_errors(self.path, "write"):
            fresh = not self.path.exists()
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o666)
        try:
            self.position = trusted_length(self.path, self.ledger.synced.get(self.name))
            with disk_errors(self.path, "write"):
                if os.fstat(self._file).st_size != self.position:
                    os.ftruncate(self._file, self.position)
            if fresh:
                fsync_folder(self.path.parent)
            # What is there is no more durable than before, but from here on it belongs to this boot.
            self._mark(min(self.position, self.ledger.synced.get(self.name, (0, ""))[0]))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def read(self, offset: int, length: int) -> bytes:
        """Raises CheckpointCorrupt where the disk fails."""
        with disk_errors(self.path):
            return os.pread(self._file, min(length, max(0, self.position - offset)), offset)

    def append(self, view: memoryview) -> None:
        """Raises CapacityError where the disk is full; what fitted is kept."""
        with disk_errors(self.ledger.folder / self.name, "write"):
            while len(view):
                written = os.pwrite(self._file, view, self.position)
                self.position += written
                view = view[written:]
        if self.position - self._durable >= SYNC_BYTES:
            self.sync()

    def sync(self) -> None:
        try:
            getattr(os, "fdatasync", os.fsync)(self._file)
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise refusal(error, self.ledger.folder / self.name, "write") from error
        self._mark(self.position)

    def _mark(self, durable: int) -> None:
        self._durable = durable
        self.ledger.mark(self.name, durable)

    def restart(self) -> None:
        """Throw away what is there and begin again."""
        with disk_errors(self.path, "write"):
            os.ftruncate(self._file, 0)
        self.position = 0
        self._mark(0)

    def discard(self) -> None:
        self.__exit__()
        with disk_errors(self.path, "remove"):
            self.path.unlink(missing_ok=True)

    def finish(self, target: Path) -> None:
        """Give the file its final name; durable when this returns. The ledger knows before that it is whole."""
        sync_file(self._file, target)
        self._mark(self.position)
        self.__exit__()
        make_folder(target.parent)
        with disk_errors(target, "write"):
            os.replace(self.path, target)
        fsync_folder(target.parent)
