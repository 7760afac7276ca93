"""The text of a commit's index, more than once for one download: from the folder, or kept compressed in memory."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

from k3tool.checkpoint.index import INDEX_NAME
from k3tool.disk import disk_errors
from k3tool.errors import CheckFailed
from k3tool.fetch.local import FolderSource
from k3tool.fetch.partial import Digests
from k3tool.hub import HubSource, RemoteFile

BLOCK = 1 << 20


def from_folder(folder: Path) -> Callable[[], Iterator[bytes]]:
    def blocks() -> Iterator[bytes]:
        with disk_errors(folder / INDEX_NAME), open(folder / INDEX_NAME, "rb") as file:
            while block := file.read(BLOCK):
                yield block

    return blocks


class RemoteIndex:
    """Calling it gives a fresh stream of the text. The first whole pass downloads, proves and keeps it."""

    def __init__(self, source: HubSource | FolderSource) -> None:
        self.source = source
        self._kept: list[bytes] = []

    def __call__(self) -> Iterator[bytes]:
        if self._kept:
            return map(zlib.decompress, self._kept)
        return self._download()

    def _download(self) -> Iterator[bytes]:
        size = self.source.remote(INDEX_NAME).size
        digests = Digests(size, self.source.remote(INDEX_NAME))
        kept: list[bytes] = []
        for offset in range(0, size, BLOCK):
            block = self.source.read(INDEX_NAME, offset, min(BLOCK, size - offset))
            digests.update(block)
            kept.append(zlib.compress(block, 1))
            yield block
        require(digests, INDEX_NAME)
        self._kept = kept


def read_proven(source: HubSource | FolderSource, name: str) -> bytes:
    """A small file whose digest is the published one. Raises CheckFailed."""
    expected: RemoteFile = source.remote(name)
    data = source.read(name)
    digests = Digests(expected.size, expected)
    digests.update(data)
    require(digests, name)
    return data


def require(digests: Digests, name: str) -> None:
    mismatch = digests.mismatch()
    if mismatch is not None:
        kind, expected, found = mismatch
        raise CheckFailed(
            f"{name}: {kind} differs (expected {expected}, found {found})",
            hint="run the same command again; if it stays, the server damages data",
            file=name,
            expected=expected,
            found=found,
        )
