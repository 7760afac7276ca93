"""Where bytes come from: a local folder or a repository on the Hub, as named files and byte ranges.

Plans, transforms and the engine know only this protocol; whether a range crosses a network is the source's business.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol, runtime_checkable

from k3tool.checkpoint.origin import again
from k3tool.disk import disk_errors, refusal
from k3tool.errors import CheckpointCorrupt, CheckpointMissing, K3Error, UsageError

_REPO = re.compile(
    r"(?:hf://)?(?P<repo>[\w][\w.-]{0,95}/[\w][\w.-]{0,95})(?:@(?P<revision>[\w][\w./-]{0,199}))?", re.ASCII
)


_STREWN = frozenset((".DS_Store", "Thumbs.db", "desktop.ini"))


def is_strewn(name: str) -> bool:
    """Whether a file is what desktops leave in folders (`._model.safetensors` beside every file on a Mac's disk): it
    counts as nothing."""
    base = name.rpartition("/")[2]
    return base in _STREWN or base.startswith("._")


@runtime_checkable
class Source(Protocol):
    """Named files of one checkpoint. Reads are exact: short data raises, nothing is padded."""

    label: str
    """What the user named: a path or `org/name@revision`."""

    def files(self) -> dict[str, int]:
        """File name (relative, with forward slashes) to size in bytes."""
        ...

    def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        """`length` bytes from `offset`; None reads to the end. Raises CheckpointMissing, CheckpointCorrupt."""
        ...

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from `offset`. Raises CheckpointMissing, CheckpointCorrupt."""
        ...

    def local_path(self, name: str) -> Path | None:
        """The file on this machine, for kernel-side copies; None where there is none."""
        ...


class LocalSource:
    """A folder. Files are opened per read, so that thousands of shards need no descriptors."""

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)
        self.label = str(root)
        if not self.root.is_dir():
            kind = "is a file, not a folder" if self.root.exists() else "does not exist"
            raise CheckpointMissing(f"{root} {kind}", hint="name a folder that holds a checkpoint")

    def files(self) -> dict[str, int]:
        with disk_errors(self.root, "list"), os.scandir(self.root) as entries:
            return {
                entry.name: entry.stat().st_size
                for entry in sorted(entries, key=lambda e: e.name)
                if entry.is_file() and not is_strewn(entry.name)
            }

    def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        try:
            with open(self.root / name, "rb", buffering=0) as file:
                size = os.fstat(file.fileno()).st_size
                buffer = bytearray(max(0, size - offset) if length is None else length)
        except OSError as error:
            raise unreadable(self.root / name, error) from error
        self.read_into(name, offset, memoryview(buffer))
        return bytes(buffer)

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        path = self.root / name
        try:
            with open(path, "rb", buffering=0) as file:
                read_exactly(file.fileno(), offset, buffer, where=str(path))
        except OSError as error:
            raise unreadable(path, error) from error

    def local_path(self, name: str) -> Path | None:
        return self.root / name


def read_exactly(descriptor: int, offset: int, buffer: memoryview, *, where: str, flags: int = 0) -> None:
    """Fill `buffer` by positional reads; `flags` as of preadv2. Raises CheckpointCorrupt where the file ends early."""
    done = 0
    while done < len(buffer):
        some = [buffer[done : done + (1 << 30)]]
        got = os.preadv(descriptor, some, offset + done, flags) if flags else os.preadv(descriptor, some, offset + done)
        if got == 0:
            raise CheckpointCorrupt(
                f"{where} is truncated: it ends at {offset + done}, needed up to {offset + len(buffer)}",
                hint=again(*os.path.split(where), overwrite=True),
            )
        done += got


def open_source(text: str | Path) -> Source:
    """A local folder where one exists, else a Hub repository `org/name[@revision]` or `hf://org/name[@revision]`; while
    HF_HUB_OFFLINE is set, what the Hub client's cache holds of it.

    Raises CheckpointMissing for a path that does not exist, UsageError for text that is neither.
    """
    if not str(text).startswith("hf://") and Path(text).exists():
        return LocalSource(text)
    match = _REPO.fullmatch(str(text))
    if match is None:
        raise CheckpointMissing(
            f"{text} does not exist", hint="name a checkpoint folder or a repository (org/name[@revision])"
        )
    if ".." in match["repo"] or ".." in (match["revision"] or ""):
        raise UsageError(f"not a repository: {text}", hint="write org/name or org/name@revision")
    from k3tool.hub import HubSource
    from k3tool.hub.cache import cached_snapshot
    from k3tool.hub.remote import is_offline

    snapshot = cached_snapshot(match["repo"], match["revision"]) if is_offline() else None
    if snapshot is not None:
        return LocalSource(snapshot)
    return HubSource(match["repo"], match["revision"])


@contextlib.contextmanager
def opened_source(text: str | Path | Source) -> Iterator[Source]:
    """`open_source` for the length of a block, its connections closed after it. A Source passes through, unclosed."""
    if not isinstance(text, (str, Path)):
        yield text
        return
    source = open_source(text)
    try:
        yield source
    finally:
        close = getattr(source, "close", None)
        if close is not None:
            close()


def unreadable(path: Path, error: OSError) -> K3Error:
    """Why a file of a checkpoint cannot be read: CheckpointMissing only where it is not there."""
    if error.errno != errno.ENOENT:
        return refusal(error, path)
    return CheckpointMissing(f"cannot read {path}: {error.strerror}", hint=again(path.parent, [path.name]))
