"""What this machine already has: files in the folder, in the Hugging Face cache, in folders that the user names.

Nothing is believed for its name, size or time stamp: a candidate is used after its bytes have been hashed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal

from k3tool.checkpoint.manifest import Manifest
from k3tool.checkpoint.writer import fsync_folder, sync_file
from k3tool.disk import disk_errors, make_folder, refusal
from k3tool.fetch.partial import READ_BLOCK, Digests, partial_path
from k3tool.hub import RemoteFile
from k3tool.hub.cache import cache_folder, is_placed

_FICLONE = 0x40049409
How = Literal["reflink", "hard link", "copy"]


def candidates(repo: str, name: str, file: RemoteFile, folders: Sequence[Path]) -> Iterator[Path]:
    """Existing files of the right size that may hold `name`: cache blobs first (named by digest), then folders."""
    places = [folder / name for folder in folders]
    if file.etag and is_placed():
        places.insert(0, cache_folder(repo) / "blobs" / file.etag)
    for place in places:
        with contextlib.suppress(OSError):
            if place.is_file() and place.stat().st_size == file.size:
                yield place


def hash_file(path: Path, size: int, expected: RemoteFile | None, on_bytes: Callable[[int], None]) -> Digests:
    """Digests of a file's bytes. `on_bytes` hears of each block, and may raise to end it."""
    digests = Digests(size, expected)
    buffer = bytearray(READ_BLOCK)
    view = memoryview(buffer)
    with disk_errors(path), open(path, "rb", buffering=0) as file:
        while got := file.readinto(view):
            digests.update(view[:got])
            on_bytes(got)
    return digests


def adopt(source: Path, target: Path, state: Path, name: str) -> How:
    """Give `source` a second name in the folder without copying where the file system can. The source stays.

    A reflink shares blocks until one side is written; a hard link shares the file itself. Raises CapacityError.
    """
    make_folder(target.parent)
    source = source.resolve()
    passing = partial_path(state, name)
    how: How = "copy"
    try:
        passing.unlink(missing_ok=True)
        if _reflink(source, passing):
            how = "reflink"
        elif _hard_link(source, passing):
            how = "hard link"
        else:
            shutil.copyfile(source, passing)
        descriptor = os.open(passing, os.O_RDONLY)
        try:
            sync_file(descriptor, target)
        finally:
            os.close(descriptor)
        os.replace(passing, target)
    except OSError as error:
        with contextlib.suppress(OSError):
            passing.unlink(missing_ok=True)
        raise refusal(error, target, "write") from error
    fsync_folder(target.parent)
    return how


def _reflink(source: Path, target: Path) -> bool:
    if sys.platform != "linux":
        return False
    with open(source, "rb") as read, open(target, "wb") as write:
        try:
            fcntl.ioctl(write.fileno(), _FICLONE, read.fileno())
            return True
        except OSError:
            pass
    target.unlink()
    return False


def _hard_link(source: Path, target: Path) -> bool:
    try:
        os.link(source, target)
        return True
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        return False


def belongs(folder: Path, name: str, repo: str, manifest: Manifest | None) -> bool:
    """Whether a file in the folder is known to have come from this repository, so that a wrong one may be replaced."""
    if manifest is not None and manifest.source == repo and name in manifest.files:
        return True
    return (folder / ".cache" / "huggingface" / "download" / f"{name}.metadata").is_file()
