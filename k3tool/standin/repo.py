"""What the stand-in serves: a repository as a commit and its files, with the digests the Hub would know.

A file is a path on disk, a few bytes, or only a size and a digest (to list what this machine cannot hold).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

BLOCK = 1 << 20
LFS_SUFFIXES = (".safetensors", ".bin", ".gguf", ".model", ".png")
LFS_LIMIT = 10 << 20  # the Hub keeps larger files outside git


class HubFile:
    """One file of a commit. `oid` is the git object id, which for a small file is a SHA-1 of its content."""

    def __init__(self, name: str, content: Path | bytes | None, *, size: int | None = None, sha256: str | None = None):
        self.name = name
        self.content = content
        if size is None:
            size = content.stat().st_size if isinstance(content, Path) else len(content or b"")
        self.size = size
        self._sha256 = sha256

    @property
    def is_lfs(self) -> bool:
        return self.name.endswith(LFS_SUFFIXES) or self.size > LFS_LIMIT

    @cached_property
    def sha256(self) -> str:
        return self._sha256 or self._digest(hashlib.sha256())

    @cached_property
    def oid(self) -> str:
        if self.is_lfs:  # of the pointer file that git holds in its place
            text = f"version https://git-lfs.github.com/spec/v1\noid sha256:{self.sha256}\nsize {self.size}\n"
            return hashlib.sha1(b"blob %d\0" % len(text) + text.encode(), usedforsecurity=False).hexdigest()
        return self._digest(hashlib.sha1(b"blob %d\0" % self.size, usedforsecurity=False))

    @property
    def etag(self) -> str:
        return self.sha256 if self.is_lfs else self.oid

    def blocks(self, start: int, stop: int, block: int = BLOCK) -> Iterator[bytes]:
        """Bytes [start, stop); zeros where only the size is known."""
        if isinstance(self.content, Path):
            with open(self.content, "rb", buffering=0) as file:
                file.seek(start)
                while start < stop and (data := file.read(min(block, stop - start))):
                    start += len(data)
                    yield data
            return
        while start < stop:
            end = min(start + block, stop)
            yield bytes(end - start) if self.content is None else self.content[start:end]
            start = end

    def _digest(self, digest: hashlib._Hash) -> str:
        for data in self.blocks(0, self.size):
            digest.update(data)
        return digest.hexdigest()

    def as_sibling(self) -> dict[str, object]:
        """The file as `GET /api/models/ID?blobs=true` lists it."""
        entry: dict[str, object] = {"rfilename": self.name, "size": self.size, "blobId": self.oid}
        if self.is_lfs:
            entry["lfs"] = {"sha256": self.sha256, "size": self.size, "pointerSize": 134}
        return entry

    def as_tree_entry(self) -> dict[str, object]:
        """The file as the tree and paths-info routes list it."""
        entry: dict[str, object] = {"type": "file", "path": self.name, "size": self.size, "oid": self.oid}
        if self.is_lfs:
            entry["lfs"] = {"oid": self.sha256, "size": self.size, "pointerSize": 134}
        return entry


@dataclass
class Repo:
    """One repository at one commit. `readers` are the tokens that may read a gated one."""

    repo_id: str
    files: dict[str, HubFile]
    commit: str
    gated: bool = False
    private: bool = False
    readers: set[str] = field(default_factory=set)
    refs: dict[str, str] = field(default_factory=dict)

    def knows(self, revision: str) -> bool:
        return revision in (self.commit, "main") or self.refs.get(revision) == self.commit


def read_folder(folder: Path) -> dict[str, HubFile]:
    """Every file below `folder`, except what the Hub client and k3tool keep there for themselves."""
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return {
        name: HubFile(name, folder / name) for name in names if not name.startswith((".cache/", ".git/", ".k3tool"))
    }


def commit_of(files: Mapping[str, HubFile]) -> str:
    """A commit id that depends on names and content alone, so that a restarted stand-in serves the same one."""
    digest = hashlib.sha1(usedforsecurity=False)
    for name, file in sorted(files.items()):
        digest.update(f"{name}\0{file.etag}\0{file.size}\n".encode())
    return digest.hexdigest()
