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

from k3tool.checkpoint.address import parse_repository
from k3tool.checkpoint.origin import again
from k3tool.commands import command
from k3tool.disk import disk_errors, refusal
from k3tool.errors import CheckpointCorrupt, CheckpointMissing, K3Error
from k3tool.events import aside, warn_once

_STREWN = frozenset((".DS_Store", "Thumbs.db", "desktop.ini"))


def is_strewn(name: str) -> bool:
    """Whether a file is what desktops leave in folders (`._model.safetensors` beside every file on a Mac's disk): it
    counts as nothing."""
    base = name.rpartition("/")[2]
    return base in _STREWN or base.startswith("._")


_LIKE_REPOSITORY = re.compile(r"\w[\w.-]{0,95}/\w[\w.-]{0,95}", re.ASCII)


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
            raise CheckpointMissing(f"{root} {kind}", hint=_another_folder(str(root)))

    def files(self) -> dict[str, int]:
        with disk_errors(self.root, "list"), os.scandir(self.root) as entries:
            return {
                entry.name: entry.stat().st_size
                for entry in sorted(entries, key=lambda e: e.name)
                if entry.is_file() and not is_strewn(entry.name) and self._can_be_named(entry.name)
            }

    def _can_be_named(self, name: str) -> bool:
        """Whether an index or a manifest can hold this name: a file system takes bytes that are no text."""
        if text_of(name) == name:
            return True
        warn_once(f"{text_of(self.root / name)} is left out: its name is not in UTF-8", name)
        return False

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


def text_of(path: str | Path) -> str:
    """A path as JSON and UTF-8 can hold it: bytes that are no text become `\\xe9` and the like."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def _another_folder(text: str) -> str:
    hint = "name a folder that holds a checkpoint"
    if not _LIKE_REPOSITORY.fullmatch(text) or Path(text).exists() or Path(text).parent.is_dir():
        return hint
    return f"{hint}; if a repository is meant, bring it first: {command('fetch', text, '--local-dir', Path(Path(text).name))}"


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
    """A local folder where one exists, else a repository of the Hub as `address.parse_repository` reads it; while
    HF_HUB_OFFLINE is set, what the Hub client's cache holds of it.

    Raises CheckpointMissing for a path that does not exist, or a folder that hides a repository and holds nothing;
    UsageError for text that is neither.
    """
    said = str(text)
    if "://" not in said and Path(text).exists():
        _check_not_hiding(said)
        return LocalSource(text)
    address = parse_repository(said)
    if address is None:
        raise CheckpointMissing(
            f"{text} does not exist", hint="name a checkpoint folder or a repository (org/name[@revision])"
        )
    from k3tool.hub import HubSource
    from k3tool.hub.cache import cached_snapshot
    from k3tool.hub.remote import endpoint_of, is_offline

    if is_offline():
        snapshot = cached_snapshot(*address)
        if snapshot is not None:
            local = LocalSource(snapshot)
            local.label = f"{address.repo}@{address.revision}" if address.revision else address.repo
            return local
    is_path = "://" not in said and address.repo in said.split("@")[0]
    if is_path:
        aside(f"there is no folder {said} here; asking the Hub ({endpoint_of()})")
    return HubSource(*address, meant_path=said if is_path else None)


def _check_not_hiding(text: str) -> None:
    """A folder of a repository's name that holds no checkpoint is said to be one, and that the repository is hidden."""
    if os.path.isabs(text) or "@" in text or not os.path.isdir(text):
        return
    address = parse_repository(text)
    if address is None:
        return
    with disk_errors(text, "list"):
        names = os.listdir(text)
    if not any(name.endswith((".json", ".safetensors", ".gguf")) or name.startswith("rank-") for name in names):
        holds = "is empty" if not names else "holds no checkpoint"
        raise CheckpointMissing(
            f"the folder {text} here {holds}; it was taken, and not the repository of that name",
            hint=f"name another folder, or write hf://{text} for the repository on the Hub",
        )


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
