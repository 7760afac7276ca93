"""Hashing files in parallel, and remembering what was proven so that an interrupted check goes on where it stopped.

A proof names the file's size, modification time, change time, inode and digest, and when it was made. It counts only
while all of them still hold; the change time moves with any write, even where a tool sets the modification time back.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import mmap
import os
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from pathlib import Path

from k3tool.checkpoint.outside import Fields, corrupt, parse_lines, read_file
from k3tool.errors import CheckpointCorrupt
from k3tool.events import SILENT, Progress

PROOFS_NAME = ".k3tool-proofs.jsonl"
MAX_PROOFS_BYTES = 64 << 20
_unproven = corrupt("")
BLOCK_BYTES = 1 << 20
READERS = 4  # files read at once, where no other number is asked for
BEHIND_BYTES = 16 << 20


@dataclass(frozen=True)
class Proof:
    """A digest found by reading the whole file. Times in nanoseconds since the epoch; `when` in seconds."""

    name: str
    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int
    sha256: str
    when: float

    @classmethod
    def of(cls, name: str, status: os.stat_result, sha256: str) -> Proof:
        return cls(name, status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino, sha256, time.time())

    @classmethod
    def read(cls, entry: Fields) -> Proof:
        """Raises CheckpointCorrupt for what is no proof."""
        numbers = {key: entry.integer(key) for key in ("size", "mtime_ns", "ctime_ns", "inode")}
        when = entry.number("when", low=0, high=2**33)
        return cls(name=entry.text("name"), sha256=entry.text("sha256"), when=when, **numbers)

    def holds_for(self, status: os.stat_result) -> bool:
        found = (status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)
        return found == (self.size, self.mtime_ns, self.ctime_ns, self.inode)


class ProofBook:
    """The proofs of one folder, one line each; the last line of a file counts. A folder that cannot be written to
    has no memory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / PROOFS_NAME
        self.proofs: dict[str, Proof] = {}
        with contextlib.suppress(OSError, CheckpointCorrupt):
            for line in parse_lines(read_file(self.path, MAX_PROOFS_BYTES, fail=_unproven)):
                with contextlib.suppress(CheckpointCorrupt):  # a line that is torn or not ours proves nothing
                    proof = Proof.read(Fields(line, str(self.path), _unproven))
                    self.proofs[proof.name] = proof

    def valid(self, name: str) -> Proof | None:
        """The proof of a file that has not changed since, or None."""
        proof = self.proofs.get(name)
        with contextlib.suppress(OSError):
            if proof is not None and proof.holds_for((self.folder / name).stat()):
                return proof
        return None

    def add(self, proof: Proof) -> None:
        """Remember. Durable when this returns, where the folder can be written to."""
        self.proofs[proof.name] = proof
        if self.path.is_symlink():  # whoever made the folder would have a file of the user's written to
            return
        with contextlib.suppress(OSError), open(self.path, "ab", buffering=0) as file:
            file.write(b"\n" + json.dumps(asdict(proof)).encode())  # a line torn by a kill stays alone
            os.fsync(file.fileno())


def choose_sample(sizes: Mapping[str, int], share: float, book: ProofBook) -> list[str]:
    """File names that make up at least `share` (0..1) of the bytes: never proven ones first, then the oldest proofs."""
    order = sorted(sizes, key=lambda name: (book.proofs[name].when if name in book.proofs else 0.0, name))
    chosen: list[str] = []
    wanted = share * sum(sizes.values())
    for name in order:
        if sum(sizes[other] for other in chosen) >= wanted and chosen:
            break
        chosen.append(name)
    return chosen


class Readers:
    """Files being hashed by several threads, from the moment this is made. Iterating gives each file's proof as soon as it
    is read, in the order of finishing; an unreadable file gives its error.

    Large files come first, so that no worker is left alone with one at the end. `close` stops the readers at their
    next block; what was not read gives nothing.
    """

    def __init__(
        self, folder: Path, names: Sequence[str], *, workers: int, task: str, progress: Progress = SILENT
    ) -> None:
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="verify")

        def work(name: str) -> tuple[str, Proof | OSError]:
            try:
                return name, _read(folder, name, task, progress, self._stop)
            except OSError as error:
                return name, error

        self._waiting = {self._pool.submit(work, name) for name in sorted(names, key=lambda n: -_size(folder / n))}
        self._done: set[Future[tuple[str, Proof | OSError]]] = set()

    def __iter__(self) -> Readers:
        return self

    def __next__(self) -> tuple[str, Proof | OSError]:
        try:
            while not self._done:
                if not self._waiting:
                    raise StopIteration
                self._done, self._waiting = wait(self._waiting, timeout=0.2, return_when=FIRST_COMPLETED)
            return self._done.pop().result()
        except BaseException:  # an interrupt too
            self.close()
            raise

    def close(self) -> None:
        self._stop.set()
        self._pool.shutdown(wait=True, cancel_futures=True)


def differing(
    folder: Path, digests: Mapping[str, str], *, workers: int | None = None, progress: Progress = SILENT
) -> list[str]:
    """Names of files whose SHA-256 is not the one given, or that cannot be read. What `verify` has read and what has not
    changed since is not read again."""
    book, task = ProofBook(folder), "check files"
    found = {name: proof.sha256 for name in digests if (proof := book.valid(name)) is not None}
    unread = [name for name in digests if name not in found]
    if unread:
        progress.started(task, sum(_size(folder / name) for name in unread))
        readers = Readers(folder, unread, workers=workers or READERS, task=task, progress=progress)
        with contextlib.closing(readers):
            found.update((name, "" if isinstance(read, OSError) else read.sha256) for name, read in readers)
        progress.finished(task)
    return [name for name in digests if found.get(name) != digests[name]]


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _read(folder: Path, name: str, task: str, progress: Progress, stop: threading.Event) -> Proof:
    """Hash one file. What was not cached before is not left in the cache: a checkpoint is larger than memory, and
    pages that are given back are at hand for the next read, which finding fresh ones is not (see the lab log)."""
    digest = hashlib.sha256()
    buffer = bytearray(BLOCK_BYTES)
    view = memoryview(buffer)
    done = kept = 0
    with open(folder / name, "rb", buffering=0) as file:
        descriptor = file.fileno()
        status = os.fstat(descriptor)
        cold = not _is_cached(descriptor, status.st_size)
        _advise(descriptor, 0, 0, "POSIX_FADV_SEQUENTIAL")
        while not stop.is_set():
            got = file.readinto(buffer)
            if not got:
                return Proof.of(name, status, digest.hexdigest())
            digest.update(view[:got])
            done += got
            if cold and (done - kept >= BEHIND_BYTES or done == status.st_size):
                _advise(descriptor, kept, done - kept, "POSIX_FADV_DONTNEED")
                kept = done
            progress.advanced(task, got)
    raise InterruptedError(f"{name}: stopped")


def _is_cached(descriptor: int, size: int) -> bool:
    """Whether the system holds a part of the file in memory, asked at three places (its header was read a moment ago)
    in a way that brings none in: a read that may not wait starts one all the same, and what it asked for can be there
    before it looks. Where that cannot be asked, True: what others may be using is left alone."""
    return any(_page_is_cached(descriptor, size * quarter // 4) for quarter in (1, 2, 3)) if size else True


def _page_is_cached(descriptor: int, offset: int) -> bool:
    """Whether the page at a byte offset of an open file is in memory; True where the system does not say."""
    start = offset - offset % mmap.ALLOCATIONGRANULARITY
    held = ctypes.c_ubyte(1)
    try:
        with mmap.mmap(descriptor, 1, access=mmap.ACCESS_COPY, offset=start) as mapped:
            address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
            refused = ctypes.CDLL(None).mincore(ctypes.c_void_p(address), ctypes.c_size_t(1), ctypes.byref(held))
    except (OSError, ValueError, AttributeError, TypeError, BufferError):
        return True
    return bool(refused or held.value & 1)


def _advise(descriptor: int, offset: int, length: int, advice: str) -> None:
    """Tell the kernel what a range of the file is needed for, where there is a way to."""
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):
            os.posix_fadvise(descriptor, offset, length, getattr(os, advice))
