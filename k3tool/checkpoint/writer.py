"""Files appear under their final name only when whole: temporary name, write, fsync, rename, fsync of the folder."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from k3tool.checkpoint.header import Header, build_header
from k3tool.checkpoint.locks import lock, unlock
from k3tool.disk import UNSUPPORTED, disk_errors, refusal, refuse_link
from k3tool.errors import PartlyDone

PARTIAL_SUFFIX = ".k3partial"
# Small enough to be hashed and written while it is in the processor's cache. Writes of 2 MiB and more make ext4 look for
# huge pages, which costs seven times the system time (Linux 6.18, measured).
WRITE_BYTES = 512 << 10
FLUSH_BYTES = 32 << 20
LONGEST_NAME = 255
CLOEXEC = getattr(os, "O_CLOEXEC", 0)


def fsync_folder(folder: Path) -> None:
    """Make new names in `folder` durable, where its file system can (FUSE and network ones often have no such call)."""
    with disk_errors(folder, "sync"):
        descriptor = os.open(folder, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise
        finally:
            os.close(descriptor)


def sync_file(descriptor: int, path: Path) -> None:
    """Make what was written to an open file durable, where its file system can. Raises CapacityError."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise refusal(error, path, "write") from error


def partial_of(path: Path) -> Path:
    """The temporary name beside `path`, short enough for the file system."""
    name = path.name + PARTIAL_SUFFIX
    if len(os.fsencode(name)) > LONGEST_NAME:
        name = f".{hashlib.sha256(os.fsencode(path.name)).hexdigest()}{PARTIAL_SUFFIX}"
    return path.with_name(name)


def write_atomic(path: Path, data: bytes) -> str:
    """Write a small file whole or not at all. Returns its SHA-256 (hex)."""
    with AtomicFile(path) as file:
        file.write(data)
    return file.sha256


class AtomicFile:
    """A file written front to back with its SHA-256 streaming along; leaving the block by an error removes it.

    >>> with AtomicFile(path) as file:
    ...     file.write(data)
    >>> file.sha256, file.size
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.partial = partial_of(path)
        self.size = 0
        self.sha256 = ""
        self._flushed = 0
        self._held: Path | None = None
        self._hash = hashlib.sha256()

    def __enter__(self) -> AtomicFile:
        """Raises PartlyDone where another process is writing the same file, UsageError where none can be made."""
        refuse_link(self.partial)
        with disk_errors(self.path, "write"):
            self._file = self._opened()
        return self

    def _opened(self) -> io.FileIO:
        """The partial file, empty and held by this process alone."""
        while True:
            file = io.FileIO(os.open(self.partial, os.O_RDWR | os.O_CREAT | CLOEXEC, 0o666), "r+")
            try:
                self._held = lock(file.fileno(), self.partial)
                if os.path.samestat(os.fstat(file.fileno()), os.stat(self.partial)):
                    file.truncate(0)
                    return file
            except BlockingIOError as error:
                file.close()
                gone = f"; if it runs no more, remove {error.filename}" if error.filename else ""
                raise PartlyDone(
                    f"{self.path} is being written by another process",
                    hint=f"wait for it, or stop it and run the same command again{gone}",
                ) from None
            except FileNotFoundError:
                pass  # the other process has just finished it
            except BaseException:
                unlock(self._held)
                file.close()
                raise
            unlock(self._held)
            file.close()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Raises CapacityError where the disk is full."""
        view = memoryview(data).cast("B")
        with disk_errors(self.path, "write"):
            while len(view):
                block = view[:WRITE_BYTES]
                self._hash.update(block)
                self.size += len(block)
                view = view[len(block) :]
                while len(block):
                    block = block[self._file.write(block) or 0 :]
        if self.size - self._flushed >= FLUSH_BYTES:
            self._begin_flush()

    def _begin_flush(self) -> None:
        """Ask the kernel to start writing what is new, without waiting, so that the disk is never idle and the sync at
        the end is short; and to give back the pages of what it has written since: finding new ones for a whole checkpoint
        took three times the system time (measured)."""
        if hasattr(os, "posix_fadvise"):
            start = max(0, self._flushed - 2 * FLUSH_BYTES)
            with contextlib.suppress(OSError):  # advice, no more
                os.posix_fadvise(self._file.fileno(), start, self.size - start, os.POSIX_FADV_DONTNEED)
        self._flushed = self.size

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._discard()
            return
        try:
            sync_file(self._file.fileno(), self.path)
            with disk_errors(self.path, "write"):
                self._file.close()
                os.replace(self.partial, self.path)
        except BaseException:
            self._discard()
            raise
        unlock(self._held)
        fsync_folder(self.path.parent)
        self.sha256 = self._hash.hexdigest()

    def _discard(self) -> None:
        with contextlib.suppress(OSError):  # what is leaving already says more
            self._file.close()
        with contextlib.suppress(OSError):
            self.partial.unlink(missing_ok=True)
        unlock(self._held)


class ShardWriter:
    """One safetensors file: declare the tensors in order, then append their bytes in that order.

    Raises ValueError on leaving where the bytes written are not exactly those declared.
    """

    def __init__(
        self,
        path: Path,
        tensors: Sequence[tuple[str, str, tuple[int, ...]]],
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        head, self.header = build_header(tensors, metadata)
        self._head = head
        self._file = AtomicFile(path)

    def __enter__(self) -> ShardWriter:
        self._file.__enter__()
        try:
            self._file.write(self._head)
        except BaseException as error:
            self._file.__exit__(type(error), error, error.__traceback__)
            raise
        return self

    def append(self, data: bytes | bytearray | memoryview) -> None:
        self._file.write(data)

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        short = kind is None and self._file.size != self.header.file_size
        self._file.__exit__(ValueError if short else kind, value, trace)
        if short:
            raise ValueError(f"{self._file.path}: wrote {self._file.size} bytes, declared {self.header.file_size}")

    @property
    def sha256(self) -> str:
        return self._file.sha256

    @property
    def size(self) -> int:
        return self._file.size


__all__ = ["PARTIAL_SUFFIX", "AtomicFile", "Header", "ShardWriter", "fsync_folder", "sync_file", "write_atomic"]
