"""Files appear under their final name only when whole: temporary name, write, fsync, rename, fsync of the folder."""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from k3tool.checkpoint.header import Header, build_header
from k3tool.errors import CapacityError, PartlyDone

PARTIAL_SUFFIX = ".k3partial"
# Small enough to be hashed and written while it is in the processor's cache. Writes of 2 MiB and more make ext4 look for
# huge pages, which costs seven times the system time (Linux 6.18, measured).
WRITE_BYTES = 512 << 10
FLUSH_BYTES = 32 << 20
CLOEXEC = getattr(os, "O_CLOEXEC", 0)


def fsync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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
        self.partial = path.with_name(path.name + PARTIAL_SUFFIX)
        self.size = 0
        self.sha256 = ""
        self._flushed = 0
        self._hash = hashlib.sha256()

    def __enter__(self) -> AtomicFile:
        """Raises PartlyDone where another process is writing the same file."""
        while True:
            file = open(os.open(self.partial, os.O_RDWR | os.O_CREAT | CLOEXEC, 0o666), "r+b", buffering=0)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.samestat(os.fstat(file.fileno()), os.stat(self.partial)):
                    break
            except BlockingIOError:
                file.close()
                raise PartlyDone(
                    f"{self.path} is being written by another process",
                    hint="wait for it, or stop it and run the same command again",
                ) from None
            except FileNotFoundError:
                pass  # the other process has just finished it
            file.close()
        file.truncate(0)
        self._file = file
        return self

    def write(self, data: bytes | bytearray | memoryview) -> None:
        view = memoryview(data).cast("B")
        try:
            while len(view):
                block = view[:WRITE_BYTES]
                self._hash.update(block)
                self.size += len(block)
                view = view[len(block) :]
                while len(block):
                    block = block[self._file.write(block) :]
            if self.size - self._flushed >= FLUSH_BYTES:
                self._begin_flush()
        except OSError as error:
            raise no_space(self.path, error) from None

    def _begin_flush(self) -> None:
        """Ask the kernel to start writing what is new, without waiting, so that the disk is never idle and the sync at
        the end is short; and to give back the pages of what it has written since: finding new ones for a whole checkpoint
        took three times the system time (measured)."""
        if hasattr(os, "posix_fadvise"):
            start = max(0, self._flushed - 2 * FLUSH_BYTES)
            os.posix_fadvise(self._file.fileno(), start, self.size - start, os.POSIX_FADV_DONTNEED)
        self._flushed = self.size

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                os.fsync(self._file.fileno())
        except OSError as error:
            self._discard()
            raise no_space(self.path, error) from None
        if kind is not None:
            self._discard()
            return
        self._file.close()
        os.replace(self.partial, self.path)
        fsync_folder(self.path.parent)
        self.sha256 = self._hash.hexdigest()

    def _discard(self) -> None:
        self._file.close()
        self.partial.unlink(missing_ok=True)


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
        self._file.write(self._head)
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


def no_space(path: Path, error: OSError) -> CapacityError | OSError:
    """A full disk or quota as CapacityError (exit 12); any other error unchanged."""
    import errno

    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return CapacityError(
            f"no space left while writing {path}", hint="free space and run the same command again: it resumes"
        )
    return error


__all__ = ["PARTIAL_SUFFIX", "AtomicFile", "Header", "ShardWriter", "fsync_folder", "no_space", "write_atomic"]
