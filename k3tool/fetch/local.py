"""A checkpoint folder on this machine as `fetch` reads repositories: for a smaller checkpoint of what is here already."""

from __future__ import annotations

import hashlib
import os
import threading
from contextlib import suppress
from pathlib import Path

from k3tool.checkpoint.manifest import FileRecord, load_manifest
from k3tool.checkpoint.own import is_own
from k3tool.checkpoint.source import LocalSource, read_exactly, text_of
from k3tool.disk import disk_errors
from k3tool.errors import CheckpointMissing, K3Error, UsageError
from k3tool.hub import Listing, RemoteFile, RetryPolicy, SystemClock
from k3tool.hub.retry import Retry

READ_BYTES = 8 << 20


def local_folder(text: str) -> Path | None:
    """The folder that a SOURCE of fetch means, None for a repository: what could be `org/name` is one, so that a folder
    of that name is written as `./org/name`. Raises CheckpointMissing for a path that is none."""
    path = Path(text).expanduser()
    if not text.startswith((".", "/", "~")) and not (path.is_dir() and text.count("/") != 1):
        return None
    if not path.is_dir():
        raise CheckpointMissing(f"{text} does not exist, or is no folder", hint="name a checkpoint folder")
    return path


class FolderSource(LocalSource):
    """What `HubSource` is for a repository. `repo` is the real path, and what stands for the commit changes with any
    file's name, size or time. Digests are those that the folder's own manifest knows."""

    def __init__(self, root: Path, dest: Path) -> None:
        """Raises UsageError where `dest` lies in the folder, or around it."""
        super().__init__(root)
        real = os.path.realpath(root)
        self.repo = text_of(real)
        self.clock = SystemClock()
        self.connections = _Counted()
        inner, outer = Path(os.path.realpath(dest)), Path(real)
        if inner == outer or outer in inner.parents or inner in outer.parents:
            raise UsageError(f"--local-dir {dest} and {root} overlap", hint="name a folder beside it")
        self.listing = self._list()

    def _list(self) -> Listing:
        known: dict[str, FileRecord] = {}
        with suppress(K3Error):
            manifest = load_manifest(self.root)
            known = manifest.files if manifest is not None else {}
        files: dict[str, RemoteFile] = {}
        digest = hashlib.sha1(usedforsecurity=False)
        for name, size in self.files().items():
            if name.startswith(".") or is_own(name):
                continue
            record = known.get(name)
            files[name] = RemoteFile(size, record.sha256 if record is not None and record.size == size else None)
            with disk_errors(self.root / name):
                digest.update(f"{name}\0{size}\0{(self.root / name).stat().st_mtime_ns}\n".encode("utf-8", "replace"))
        return Listing(digest.hexdigest(), files)

    @property
    def commit(self) -> str:
        return self.listing.commit

    def remote(self, name: str) -> RemoteFile:
        file = self.listing.files.get(name)
        if file is None:
            raise CheckpointMissing(f"{self.label} holds no {name}", hint="name a checkpoint folder that is whole")
        return file

    def small(self, name: str) -> None:
        """Nothing is kept of a local file."""

    def retry(self) -> Retry:
        return Retry(RetryPolicy(), self.clock, 0.0)

    def open(self, name: str, start: int, stop: int, *, skip_limit: int = 0) -> _Range:
        return _Range(self.root / name, start, stop, self.connections)

    def forget_address(self, name: str) -> None: ...

    def stop(self) -> None:
        self.clock.stop.set()

    def close(self) -> None: ...


class _Counted:
    """received: bytes read so far, by all threads."""

    def __init__(self) -> None:
        self.received = 0
        self._lock = threading.Lock()

    def add(self, count: int) -> None:
        with self._lock:
            self.received += count


class _Range:
    """Bytes [start, stop) of a file, front to back."""

    skipped = 0

    def __init__(self, path: Path, start: int, stop: int, counted: _Counted) -> None:
        self.path, self.position, self.stop = path, start, stop
        self._counted = counted
        with disk_errors(path, "open"):
            self._descriptor = os.open(path, os.O_RDONLY)

    def read_into(self, view: memoryview) -> int:
        """Some bytes, at least one. Raises CheckpointCorrupt where the file ends early."""
        wanted = view[: min(len(view), self.stop - self.position, READ_BYTES)]
        with disk_errors(self.path):
            read_exactly(self._descriptor, self.position, wanted, where=str(self.path))
        self.position += len(wanted)
        self._counted.add(len(wanted))
        return len(wanted)

    def close(self) -> None:
        os.close(self._descriptor)
