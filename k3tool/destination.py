"""What may be written into a folder: nothing over other people's files, nothing into the source, nothing without room."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

from k3tool.checkpoint.index import INDEX_NAME, MAX_INDEX_BYTES, SINGLE_NAME, parse_index
from k3tool.checkpoint.ledger import LEDGER_FOLDER
from k3tool.checkpoint.manifest import MANIFEST_NAME, is_as_recorded, load_manifest
from k3tool.checkpoint.note import read_copy, read_note
from k3tool.checkpoint.origin import RANK_FOLDER
from k3tool.checkpoint.outside import corrupt, read_file
from k3tool.checkpoint.source import Source, is_strewn
from k3tool.checkpoint.writer import PARTIAL_SUFFIX
from k3tool.disk import disk_errors, free_bytes
from k3tool.errors import CapacityError, CheckpointCorrupt, UsageError
from k3tool.plan import FileJob, Plan
from k3tool.transform.reshard import LAYOUT_NAME
from k3tool.units import format_bytes

SPARE_BYTES = 64 << 20  # for the index, the configuration, the ledger and what a file system keeps for itself
_IGNORED = {"lost+found", LEDGER_FOLDER}


def guard(dest: Path, source: Source, plan: Plan, *, overwrite: bool, goes_on: bool = False) -> None:
    """Refuse a DEST that is no folder, is in or around the source, or holds something else. Raises UsageError.

    goes_on: it is known otherwise that the files in DEST are of this job."""
    if dest.exists() and not dest.is_dir():
        raise UsageError(f"{dest} is a file, not a folder", hint="name a folder for the result")
    root = source.local_path("")
    if root is not None:
        inner, outer = Path(os.path.realpath(dest)), Path(os.path.realpath(root))
        if inner == outer or outer in inner.parents or inner in outer.parents:
            raise UsageError(
                f"DEST {dest} and SOURCE {root} overlap",
                hint="name a folder beside the source; nothing is written into it",
            )
    if overwrite:
        _check_only_copy(dest)
    if overwrite or goes_on or not dest.is_dir():
        return
    with disk_errors(dest, "list"):
        held = sorted(name for name in os.listdir(dest) if name not in _IGNORED and not is_strewn(name))
    if not held or (dest / LEDGER_FOLDER).is_dir():  # the ledger itself refuses another job's unfinished work
        return
    if is_of(dest, plan):
        return
    raise UsageError(
        f"{dest} already holds something else: {', '.join(held[:3])}{', ...' if len(held) > 3 else ''}",
        hint="name an empty folder, or add --overwrite to replace what k3tool writes there",
    )


def is_of(dest: Path, plan: Plan) -> bool:
    """Whether DEST holds files that a command with this plan has finished."""
    with contextlib.suppress(CheckpointCorrupt):
        manifest = load_manifest(dest)
        return manifest is not None and manifest.extra.get("plan") == plan.id
    return False


def _check_only_copy(dest: Path) -> None:
    """Raises UsageError where an unfinished job has moved tensors of its source into DEST, so that they are nowhere else."""
    with contextlib.suppress(CheckpointCorrupt):
        copy = read_copy(dest)
        root = Path(copy.source) if copy else None
        note = read_note(root) if root and root.is_dir() else None
        if note is None or root is None or note.complete or os.path.realpath(note.dest) != os.path.realpath(dest):
            return
        if freed := note.freed(root):
            raise UsageError(
                f"--overwrite would remove the only copy of what {root} gave up: {len(freed)} of its shards are freed, "
                f"their tensors are in {dest}",
                hint=f"name another folder, or {note.go_on(root)}",
            )


def clear(dest: Path) -> None:
    """Remove what a checkpoint in `dest` consists of (index, its shards, what a manifest names), nothing else."""
    paths = _clearable(dest)
    for path in paths:
        with disk_errors(path, "remove"):
            path.unlink(missing_ok=True)
    for folder in {path.parent for path in paths} - {dest}:
        with contextlib.suppress(OSError):
            folder.rmdir()


def clearable_bytes(dest: Path) -> int:
    """Bytes that `clear` gives back to the disk: a file that has another name (a hard link) gives none."""
    found = (path.lstat() for path in _clearable(dest))
    return sum(status.st_size for status in found if status.st_nlink == 1)


def _clearable(dest: Path) -> list[Path]:
    """A manifest may be a stranger's: of what it names only what still is as it says there. Links go, not what they lead to."""
    names = {INDEX_NAME, SINGLE_NAME, MANIFEST_NAME, LAYOUT_NAME, "config.json"}
    with contextlib.suppress(OSError, CheckpointCorrupt):
        fail = corrupt("")
        names.update(parse_index(read_file(dest / INDEX_NAME, MAX_INDEX_BYTES, fail=fail), where=INDEX_NAME).shards)
    with contextlib.suppress(CheckpointCorrupt):
        manifest = load_manifest(dest)
        files = manifest.files if manifest else {}
        names.update(name for name, record in files.items() if is_as_recorded(dest, name, record))
    paths = {dest / name for name in names}
    partials = set(dest.glob(f"*{PARTIAL_SUFFIX}"))
    for folder in dest.glob("rank-*"):
        if RANK_FOLDER.fullmatch(folder.name) and not folder.is_symlink():
            partials.update(folder.glob(f"*{PARTIAL_SUFFIX}"))
    return sorted(path for path in paths | partials if path.is_file() or path.is_symlink())


def check_space(dest: Path, jobs: Sequence[FileJob], *, needed: int | None = None, freed: int = 0) -> None:
    """Raises CapacityError (exit 12) where `jobs` do not fit on the disk of `dest`.

    needed: bytes needed at once where the source is freed along the way; None: all that the jobs write. freed: bytes that
    are removed there before.
    """
    need = sum(job.size_estimate for job in jobs) if needed is None else needed
    free = free_bytes(dest)
    if free is None:
        return
    spare = min(SPARE_BYTES, need)
    lacking = need + spare - free - freed
    if lacking > 0:
        there = f"{format_bytes(free)} free on that disk"
        there += f" and {format_bytes(freed)} to be replaced" if freed else ""
        raise CapacityError(
            f"{dest}: {format_bytes(need)} to write and {format_bytes(spare)} to spare, {there}",
            hint=f"free {format_bytes(lacking * 1.01)} more there, or name a folder on another disk; nothing was written or removed",
            needed=need + spare,
            free=free,
        )
