"""The Hub client's own cache on this machine: where it is, what of a repository it holds, and what its names prove."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

from k3tool.checkpoint.index import INDEX_NAME, parse_index
from k3tool.checkpoint.manifest import FileRecord
from k3tool.disk import disk_errors
from k3tool.errors import CheckpointMissing, UsageError
from k3tool.hub.listing import Listing, RemoteFile

_COMMIT = re.compile(r"[0-9a-f]{40}", re.ASCII)
_SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)
GIT_LIMIT = 64 << 20  # the Hub keeps larger files outside git, under their SHA-256


def hub_cache() -> Path:
    """The Hub client's cache as the environment places it now."""
    for name, below in (
        ("HF_HUB_CACHE", ""),
        ("HUGGINGFACE_HUB_CACHE", ""),
        ("HF_HOME", "hub"),
        ("XDG_CACHE_HOME", "huggingface/hub"),
    ):
        if os.environ.get(name):
            return _home(Path(os.environ[name])) / below
    return _home(Path("~")) / ".cache" / "huggingface" / "hub"


def _home(path: Path) -> Path:
    """Raises UsageError where `~` is nobody's: a user without a home, as in some containers."""
    try:
        return path.expanduser()
    except RuntimeError:
        raise UsageError(
            "the Hub's cache cannot be found: this user has no home (HOME is not set)", hint="set HF_HOME to a folder"
        ) from None


def cache_folder(repo: str) -> Path:
    return hub_cache() / f"models--{repo.replace('/', '--')}"


def is_placed() -> bool:
    """Whether there is a place for the cache at all."""
    try:
        hub_cache()
    except UsageError:
        return False
    return True


def cached_snapshot(repo: str, revision: str | None) -> Path | None:
    """The folder of a revision in the cache, or None: what there is to read while HF_HUB_OFFLINE is set."""
    folder = cache_folder(repo)
    wanted = revision or "main"
    if not _COMMIT.fullmatch(wanted):
        if ".." in wanted.split("/"):
            return None
        try:
            wanted = (folder / "refs" / wanted).read_text().strip()
        except OSError:
            return None
    snapshot = folder / "snapshots" / wanted
    return snapshot if _COMMIT.fullmatch(wanted) and snapshot.is_dir() else None


def snapshot_files(snapshot: Path) -> dict[str, RemoteFile]:
    """The files of a snapshot, each with the digest that its blob is named by (sha256, or git's sha1 of a small file)."""
    found: dict[str, RemoteFile] = {}
    with disk_errors(snapshot, "list"):
        for folder, _, names in os.walk(snapshot):
            for name in sorted(names):
                path = Path(folder) / name
                if path.is_file():
                    found[path.relative_to(snapshot).as_posix()] = _of_blob(path)
    return found


def _of_blob(path: Path) -> RemoteFile:
    size = path.stat().st_size
    blob = Path(os.readlink(path)) if path.is_symlink() else Path()
    named = blob.name if blob.parent.name == "blobs" else ""
    return RemoteFile(size, named if _SHA256.fullmatch(named) else None, named if _COMMIT.fullmatch(named) else None)


def blob_digests(folder: Path) -> dict[str, FileRecord]:
    """Size and SHA-256 of the files of a folder that is a snapshot of the cache, as the names of its blobs give them.

    A small file's blob is named by git's digest: it is read here, and where it has that digest its SHA-256 is taken;
    else what stands in its place, `git sha1 ...`, is the digest of no file.
    """
    folder = Path(os.path.abspath(folder))
    found: dict[str, FileRecord] = {}
    for name, file in snapshot_files(folder).items() if (folder.parent.parent / "blobs").is_dir() else ():
        if file.sha256:
            found[name] = FileRecord(-1, file.sha256)
        elif file.git_sha1 and file.size <= GIT_LIMIT:
            with disk_errors(folder / name):
                data = (folder / name).read_bytes()
            digest = hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
            right = digest == file.git_sha1
            found[name] = FileRecord(-1, hashlib.sha256(data).hexdigest() if right else f"git sha1 {file.git_sha1}")
    return found


def list_snapshot(snapshot: Path, label: str) -> Listing:
    """A snapshot as the Hub would list it. Raises CheckpointMissing where it holds a part of a checkpoint only."""
    files = snapshot_files(snapshot)
    if INDEX_NAME in files:
        with disk_errors(snapshot / INDEX_NAME):
            text = (snapshot / INDEX_NAME).read_bytes()
        shards = set(parse_index(text, where=f"{label}/{INDEX_NAME}").weight_map.values())
        missing = sorted(shards - set(files))
        if missing:
            raise CheckpointMissing(
                f"the cache holds {len(shards) - len(missing)} of {len(shards)} shards of {label}: {missing[0]} is missing, and "
                "HF_HUB_OFFLINE is set",
                hint="unset HF_HUB_OFFLINE, then run the same command again",
            )
    return Listing(snapshot.name, files)
