"""`k3tool-reclaimed.json`: what a source folder says of the job that it is given up to; its copy in DEST says the same.

A note deletes nothing and proves nothing by itself: what is freed is seen in the shards, and whoever published a folder
may have put a note into it. Whole shards are whole, whatever a note says of them.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from k3tool.checkpoint.index import is_shard_name
from k3tool.checkpoint.ledger import LEDGER_FOLDER
from k3tool.checkpoint.manifest import FileRecord, load_manifest
from k3tool.checkpoint.outside import Fields, corrupt, parse_object, read_file
from k3tool.checkpoint.source import LocalSource, Source
from k3tool.checkpoint.writer import fsync_folder, write_atomic
from k3tool.commands import command
from k3tool.disk import disk_errors
from k3tool.errors import CheckpointCorrupt, CheckpointMissing

RECLAIMED_NAME = "k3tool-reclaimed.json"
COPY_NAME = "reclaimed.json"  # in the ledger's folder of DEST
MAX_NOTE_BYTES = 256 << 20
_OPTIONS = re.compile(
    r"--layout (?:ranks|hf) --tp \d{1,6} --ep \d{1,6} --pp \d{1,6} --max-shard-size \d{1,18}", re.ASCII
)
_HEX = re.compile(r"[0-9a-f]{64}", re.ASCII)


@dataclass(frozen=True)
class Note:
    """plan, source, dest, options: the job that the folder is given up to, its folders as they were then, and its options
    as words. shards: freed shards with their former sizes. files: output files that were read back from DEST before a
    shard was freed. complete: nothing of the source is needed any more."""

    plan: str
    source: str
    dest: str
    options: str
    shards: Mapping[str, int] = field(default_factory=dict)
    files: Mapping[str, FileRecord] = field(default_factory=dict)
    complete: bool = False

    def write(self, root: Path) -> None:
        """Into the source and, while the job is unfinished, into DEST: either is enough to go on."""
        document = {
            "plan": self.plan,
            "source": self.source,
            "dest": self.dest,
            "options": self.options,
            "shards": dict(self.shards),
            "files": {name: {"size": record.size, "sha256": record.sha256} for name, record in self.files.items()},
            "complete": self.complete,
        }
        data = json.dumps(document, indent=1).encode() + b"\n"
        write_atomic(root / RECLAIMED_NAME, data)
        state = Path(self.dest) / LEDGER_FOLDER
        if state.is_dir():
            write_atomic(state / COPY_NAME, data)

    def freed(self, root: Path) -> list[str]:
        """The shards that are no more than a header now, or not there at all."""
        return sorted(name for name in self.shards if is_emptied(root / name) or not os.path.lexists(root / name))

    def remove_emptied(self, root: Path) -> None:
        """Remove what is left of the freed shards: files that hold no more than a header, in `root` itself."""
        for name in sorted(self.shards):
            if is_emptied(root / name):
                with disk_errors(root / name, "remove"):
                    (root / name).unlink(missing_ok=True)
        fsync_folder(root)

    def is_kept(self) -> bool:
        """Whether DEST, as it is named here, holds the whole result of the job."""
        try:
            manifest = load_manifest(Path(self.dest))
        except CheckpointCorrupt:
            return False
        return manifest is not None and manifest.extra.get("plan") == self.plan

    def go_on(self, root: Path) -> str:
        """What finishes the job, as a hint that ends with its command."""
        if not _OPTIONS.fullmatch(self.options):
            return f"finish that job with the command that began it, into {self.dest}"
        return f"finish that job: {command('reshard', root, Path(self.dest), *self.options.split(), '--reclaim')}"


def read_note(root: Path) -> Note | None:
    """The note in a source folder, or None. Raises CheckpointCorrupt for one that k3tool did not write."""
    return _read(root / RECLAIMED_NAME)


def read_copy(dest: Path) -> Note | None:
    """The note of the unfinished job in DEST, if that job frees its source. Raises CheckpointCorrupt."""
    return _read(dest / LEDGER_FOLDER / COPY_NAME)


def _read(path: Path) -> Note | None:
    if not path.is_file():
        return None
    fail = corrupt("remove that file, then run the same command again")
    with disk_errors(path):
        text = read_file(path, MAX_NOTE_BYTES, fail=fail)
    found = parse_object(text, where=f"{path}: not a note of k3tool", fail=fail, own=True)
    sizes = found.fields("shards")
    if not all(is_shard_name(name) for name in sizes.values):
        raise found.bad("shards", "plain names of .safetensors files")
    return Note(
        found.text("plan"),
        found.text("source", ""),
        found.text("dest"),
        found.text("options", ""),
        {name: sizes.integer(name) for name in sizes.values},
        {_inner(name, found): _record(entry) for name, entry in found.each("files", {})},
        found.flag("complete"),
    )


def _inner(name: str, found: Fields) -> str:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\0" in name or str(path) != name:
        raise found.bad("files", "names of files in DEST")
    return name


def _record(entry: Fields) -> FileRecord:
    sha256 = entry.text("sha256")
    if not _HEX.fullmatch(sha256):
        raise entry.bad("sha256", "64 hexadecimal digits")
    return FileRecord(entry.integer("size"), sha256)


def is_emptied(path: Path) -> bool:
    """Whether a file, not a link to one, is a safetensors header and nothing after it."""
    with disk_errors(path):
        try:
            if not stat.S_ISREG(path.lstat().st_mode):
                return False
        except FileNotFoundError:
            return False
        with open(path, "rb", buffering=0) as file:
            head = file.read(8)
            size = os.fstat(file.fileno()).st_size
    return len(head) == 8 and size == 8 + int.from_bytes(head, "little") > 8


def given_up(root: Path, note: Note) -> CheckpointMissing:
    """What to say of a folder whose tensors are elsewhere; to be raised."""
    if note.complete:
        there = f"use that: {command('verify', Path(note.dest))}" if note.is_kept() else "use that, or where it is now"
        return CheckpointMissing(f"{root} was given up: all of its tensors are in {note.dest}", hint=there)
    return CheckpointMissing(
        f"{root} was given up: {len(note.freed(root))} of its shards are freed, their tensors are in {note.dest}",
        hint=note.go_on(root),
    )


class ReclaimedSource(LocalSource):
    """A folder some of whose shards are only headers now; their sizes are what they were."""

    def __init__(self, root: Path, note: Note) -> None:
        super().__init__(root)
        self.note = note
        self.freed = {name: size for name, size in note.shards.items() if is_emptied(root / name)}

    @property
    def former_root(self) -> str | None:
        """Where the folder was when its job began, if it has been moved since: jobs are told apart by their sources."""
        return self.note.source if self.note.source and not os.path.exists(self.note.source) else None

    def files(self) -> dict[str, int]:
        return {**super().files(), **self.freed}

    def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        """Of a freed shard no more than its header, whatever was asked for."""
        if name in self.freed and length is not None:
            with disk_errors(self.root / name):
                length = max(0, min(length, (self.root / name).stat().st_size - offset))
        return super().read(name, offset, length)


def as_it_was(source: Source, dest: str | Path | None, *, reclaim: bool, dry_run: bool) -> Source:
    """The source; of one that was given up in part for `dest`, what its shards were. What is left of one that was given up
    whole is removed, with `reclaim` and not in a dry run.

    Raises CheckpointMissing where it was given up whole, or without `reclaim`. A note about whole shards says nothing."""
    root = source.local_path("")
    if root is None:
        return source
    note = read_note(root)
    if note is None and reclaim and dest is not None:
        note = read_copy(Path(dest))
        if note is not None and note.source != os.path.realpath(root):
            note = None
    if note is None or not note.freed(root):
        return source
    if note.complete and reclaim and not dry_run and note.is_kept():
        note.remove_emptied(root)
    if note.complete or not reclaim:
        raise given_up(root, note)
    return ReclaimedSource(root, note)
