"""What is known of one revision: its commit, and every file with its size and published digest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class RemoteFile:
    """Size and the digest that the Hub publishes: SHA-256 for large files, the git blob SHA-1 for small ones."""

    size: int
    sha256: str | None = None
    git_sha1: str | None = None

    @property
    def etag(self) -> str | None:
        return self.sha256 or self.git_sha1


@dataclass(frozen=True)
class Listing:
    """What a revision resolved to: the commit, and every file of it."""

    commit: str
    files: Mapping[str, RemoteFile]
