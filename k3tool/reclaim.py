"""Giving up a source while it is resharded, so that one disk suffices.

A source shard is cut down to its header once every output file that needs it is durable and has been read back from
disk with the digest that was written. What is left says to every tool that it is truncated; a note beside it says where
its tensors went, and lets the same command go on. When all is done, the emptied shards are removed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from k3tool.checkpoint.index import check_file_name
from k3tool.checkpoint.manifest import FileRecord
from k3tool.checkpoint.outside import corrupt, parse_object, read_file
from k3tool.checkpoint.source import LocalSource
from k3tool.checkpoint.table import TensorTable
from k3tool.checkpoint.writer import fsync_folder, sync_file, write_atomic
from k3tool.disk import disk_errors
from k3tool.errors import CheckFailed, CheckpointMissing, UsageError
from k3tool.lockstep import neighbours
from k3tool.plan import FileJob, Plan
from k3tool.transform.reshard import RECLAIMED_NAME

READ_BYTES = 4 << 20
MAX_NOTE_BYTES = 16 << 20


@dataclass(frozen=True)
class Note:
    """plan, dest: the job that the source was given up to. shards: freed shards with their former sizes."""

    plan: str
    dest: str
    shards: dict[str, int]
    complete: bool = False


def read_note(root: Path) -> Note | None:
    """The note in a source folder, or None. Raises CheckpointCorrupt for one that k3tool did not write."""
    path = root / RECLAIMED_NAME
    if not path.is_file():
        return None
    fail = corrupt(f"verify the source by hand, then remove {path}")
    with disk_errors(path):
        text = read_file(path, MAX_NOTE_BYTES, fail=fail)
    note = parse_object(text, where=f"{path}: not a note of k3tool", fail=fail, own=True)
    freed = note.fields("shards")
    shards = {name: freed.integer(name) for name in freed.values}
    for name in shards:
        check_file_name(name, where=str(path))
    return Note(note.text("plan"), note.text("dest"), shards, note.flag("complete"))


class ReclaimedSource(LocalSource):
    """A folder some of whose shards are only headers now; their sizes are what they were."""

    def __init__(self, root: Path, note: Note) -> None:
        super().__init__(root)
        self._note = note

    def files(self) -> dict[str, int]:
        return {**super().files(), **self._note.shards}

    def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        """Of a freed shard no more than its header, whatever was asked for."""
        if name in self._note.shards and length is not None:
            with disk_errors(self.root / name):
                length = max(0, min(length, (self.root / name).stat().st_size - offset))
        return super().read(name, offset, length)


def refuse_reclaimed(root: Path) -> None:
    """Raises CheckpointMissing for a source that another job has begun to free."""
    note = read_note(root)
    if note is not None:
        raise CheckpointMissing(
            f"{root} was given up: {len(note.shards)} of its shards are freed, their tensors are in {note.dest}",
            hint=f"finish that job with the same command and --reclaim, then use {note.dest}",
        )


class Reclaimer:
    """Frees source shards as their readers become durable. Called by one worker at a time."""

    def __init__(self, plan: Plan, table: TensorTable, dest: Path) -> None:
        source = table.source
        root = source.local_path("")
        if root is None:
            raise UsageError(
                "--reclaim needs a local source", hint="leave --reclaim out: nothing on the Hub is deleted"
            )
        self._root, self._dest, self._plan = root, dest, plan
        self._headers = {shard: table.data_start(shard) for shard in table.shards}
        self._sizes = {shard: table.sizes[shard] for shard in table.shards}
        note = read_note(root)
        if note is not None and note.plan != plan.id:
            refuse_reclaimed(root)
        self._freed: dict[str, int] = dict(note.shards) if note else {}
        self._proven: set[str] = set()
        self._readers = readers(plan, table)
        if not os.access(root, os.W_OK):
            raise UsageError(f"--reclaim: {root} is read-only", hint="leave --reclaim out")

    def needed_bytes(self, jobs: Sequence[FileJob]) -> int:
        """The most that DEST needs at once beyond what the source gives up, one batch of files of margin for each worker."""
        waiting = {shard: set(paths) for shard, paths in self._readers.items() if shard not in self._freed}
        todo = {job.path for job in jobs}
        for paths in waiting.values():
            paths &= todo
        held = peak = 0
        by_path: dict[str, list[str]] = defaultdict(list)
        for shard, paths in waiting.items():
            for path in paths:
                by_path[path].append(shard)
        for job in jobs:
            held += job.size_estimate
            peak = max(peak, held)
            for shard in by_path[job.path]:
                waiting[shard].discard(job.path)
                if not waiting[shard]:
                    held -= self._sizes[shard] - self._headers[shard]
        together: dict[str, int] = defaultdict(int)  # files of a batch are there before the first of their shards goes
        for job in jobs:
            together[job.batch or job.path] += job.size_estimate
        return peak + 2 * max(together.values(), default=0)

    def durable(self, done: Mapping[str, FileRecord]) -> None:
        """Free every shard whose readers are all in `done`. Raises CheckFailed where one reads back differently."""
        for shard, paths in self._readers.items():
            if shard in self._freed or not all(path in done for path in paths):
                continue
            for path in sorted(paths - self._proven):
                self._prove(path, done[path])
            self._free(shard)

    def _prove(self, path: str, record: FileRecord) -> None:
        digest = hashlib.sha256()
        buffer = bytearray(READ_BYTES)
        view = memoryview(buffer)
        with disk_errors(self._dest / path), open(self._dest / path, "rb", buffering=0) as file:
            with contextlib.suppress(OSError, AttributeError):  # read the disk, not what was just written to memory
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            while got := file.readinto(view):
                digest.update(view[:got])
        if digest.hexdigest() != record.sha256:
            raise CheckFailed(
                f"{self._dest / path}: reads back as {digest.hexdigest()}, written as {record.sha256}",
                hint="its source is untouched: remove that file and run the same command again; check the disk",
            )
        self._proven.add(path)

    def _free(self, shard: str) -> None:
        self._freed[shard] = self._sizes[shard]
        self._write_note(complete=False)
        path = self._root / shard
        with disk_errors(path, "cut"), open(path, "r+b", buffering=0) as file:
            os.truncate(file.fileno(), self._headers[shard])
            sync_file(file.fileno(), path)

    def _write_note(self, *, complete: bool) -> None:
        document = {
            "plan": self._plan.id,
            "dest": str(self._dest.resolve()),
            "shards": self._freed,
            "complete": complete,
        }
        write_atomic(self._root / RECLAIMED_NAME, json.dumps(document, indent=1).encode() + b"\n")

    def finish(self) -> None:
        """The job is complete: remove what is left of the shards."""
        self._write_note(complete=True)
        finish_note(self._root)


def finish_note(root: Path) -> bool:
    """Remove the emptied shards of a source whose job is complete, and nothing that holds more than a header. Whether
    there was such a note."""
    note = read_note(root)
    if note is None or not note.complete:
        return False
    for shard in note.shards:
        if _is_emptied(root / shard):
            with disk_errors(root / shard, "remove"):
                (root / shard).unlink(missing_ok=True)
    with disk_errors(root / RECLAIMED_NAME, "remove"):
        (root / RECLAIMED_NAME).unlink()
    fsync_folder(root)
    return True


def _is_emptied(path: Path) -> bool:
    """Whether a file is a safetensors header and nothing after it."""
    if path.is_symlink() or not path.is_file():
        return False
    with disk_errors(path), open(path, "rb", buffering=0) as file:
        head = file.read(8)
    return len(head) == 8 and path.stat().st_size == 8 + int.from_bytes(head, "little")


def readers(plan: Plan, table: TensorTable) -> dict[str, set[str]]:
    """Source shard to the output files that need it. TP neighbours read the same tensors, so one speaks for all."""
    found: dict[str, set[str]] = {shard: set() for shard in table.shards}
    for batch in plan.batches():
        for alike in neighbours(batch):
            paths = {job.path for job in alike}
            for shard in set(_shards(alike[0], table)):
                found[shard] |= paths
    return found


def _shards(job: FileJob, table: TensorTable) -> Iterator[str]:
    for step in job.steps:
        for region in step.needs:
            yield table.locate(region.tensor).shard
