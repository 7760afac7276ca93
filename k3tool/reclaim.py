"""Giving up a source while it is resharded, so that one disk suffices.

A source shard is cut down to its header once every output file that needs it is durable and has been read back from
disk with the digest that was written. What is left says to every tool that it is truncated; a note beside it (see
`k3tool.checkpoint.note`) says where its tensors went, and lets the same command go on. When all is done, the emptied
shards are removed.

Whatever happened between two runs, a shard is freed only by what this run has read: files of DEST count as written
where an earlier run noted them before it freed a shard and they still read back so, where the ledger knows them by size,
time and inode, or where they are what the source's bytes make.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from k3tool.checkpoint.ledger import Ledger
from k3tool.checkpoint.locks import lock, unlock
from k3tool.checkpoint.manifest import FileRecord
from k3tool.checkpoint.note import Note, ReclaimedSource, given_up, read_note
from k3tool.checkpoint.origin import brought
from k3tool.checkpoint.table import TensorTable
from k3tool.checkpoint.writer import sync_file
from k3tool.commands import command
from k3tool.disk import disk_errors, refuse_link
from k3tool.errors import CheckFailed, CheckpointCorrupt, K3Error, PartlyDone, UsageError
from k3tool.lockstep import neighbours
from k3tool.plan import FileJob, Plan

READ_BYTES = 4 << 20
LOCK_NAME = ".k3tool-reclaim.lock"
NO_LINKS = getattr(os, "O_NOFOLLOW", 0)


class Reclaimer:
    """Frees source shards as their readers become durable. Called by one worker at a time.

    options: of the command, as they go on with it (`--layout ranks --tp 2 ...`). differing: which of
    these files in DEST are not what the source makes.
    """

    def __init__(
        self,
        plan: Plan,
        table: TensorTable,
        dest: Path,
        options: str,
        differing: Callable[[Sequence[FileJob]], set[str]],
        *,
        overwrite: bool = False,
    ) -> None:
        """Raises UsageError where freeing the source would harm something else or lose what exists once, CheckpointMissing
        and CheckpointCorrupt where the source was given up to another job or DEST lacks what was moved there."""
        source = table.source
        root = source.local_path("")
        if root is None:
            raise UsageError(
                "--reclaim needs a local source", hint="leave --reclaim out: nothing on the Hub is deleted"
            )
        self._root, self._dest, self._plan, self._differing = root, dest, plan, differing
        self._headers = {shard: table.data_start(shard) for shard in table.shards}
        self._sizes = {shard: table.sizes[shard] for shard in table.shards}
        self._readers = readers(plan, table)
        self._found = source.note if isinstance(source, ReclaimedSource) else None
        self._freed: dict[str, int] = dict(source.freed) if isinstance(source, ReclaimedSource) else {}
        self._note = Note(plan.id, os.path.realpath(root), os.path.realpath(dest), options)
        self._proven: dict[str, FileRecord] = {}
        if self._found is not None:
            self._check_found(self._found, overwrite)
        if not os.access(root, os.W_OK):
            raise UsageError(f"--reclaim: {root} is read-only", hint="leave --reclaim out")
        for shard in sorted(set(table.shards) - set(self._freed)):
            self._check_links(shard)

    # What an earlier run left

    def _check_found(self, found: Note, overwrite: bool) -> None:
        if found.plan != self._plan.id:
            raise self._another(found)
        if overwrite:
            raise UsageError(
                f"--overwrite would remove the only copy of what {self._root} gave up: {len(self._freed)} of its shards "
                f"are freed, their tensors are in {found.dest}",
                hint=f"without it, {found.go_on(self._root)}",
            )
        gone = [path for path in sorted(self._needed()) if not (self._dest / path).is_file()]
        if gone:
            raise self._lost(found, dict.fromkeys(gone, "is not there"))

    def _another(self, found: Note) -> K3Error:
        if found.options != self._note.options:
            return given_up(self._root, found)
        if found.source != self._note.source and os.path.isdir(found.source):
            return UsageError(
                f"{self._root} is a copy of {found.source}, which was given up: {len(self._freed)} shards are freed",
                hint=found.go_on(Path(found.source)),
            )
        return CheckpointCorrupt(
            f"{self._root}: its index, configuration or headers have changed since {len(self._freed)} of its shards were "
            f"freed for {found.dest}",
            hint="put back what was changed, then run the same command again: it goes on from here",
        )

    def _needed(self) -> set[str]:
        """Output files that hold tensors of freed shards."""
        return {path for shard in self._freed for path in self._readers[shard]}

    @property
    def goes_on(self) -> bool:
        """Whether an earlier run has freed a part of the source for this job, so that DEST holds its files."""
        return bool(self._freed)

    def _lost(self, found: Note, bad: Mapping[str, str]) -> K3Error:
        path, why = next(iter(bad.items()))
        elsewhere = os.path.realpath(self._dest) != os.path.realpath(found.dest) and os.path.isdir(found.dest)
        if elsewhere:
            return UsageError(
                f"{self._root} is being given up to {found.dest}; {self._dest / path}, which holds tensors of its freed "
                f"shards there, {why}",
                hint=found.go_on(self._root),
            )
        shards = sorted(shard for shard in self._freed if self._readers[shard] & set(bad))
        return CheckpointCorrupt(
            f"{self._dest / path} {why}; it is the only copy of tensors that {self._root} gave up"
            + (f", as are {len(bad) - 1} more files" if len(bad) > 1 else ""),
            hint=f"put back the files as they were, or these shards of the source: {', '.join(shards[:3])}"
            + (f" and {len(shards) - 3} more" if len(shards) > 3 else "")
            + f"; then run the same command again. For the shards, {brought(self._root, shards, overwrite=True)}",
            files=list(bad)[:1000],
            shards=shards,
        )

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """No other process frees the same source meanwhile. Raises PartlyDone where one does."""
        path = self._root / LOCK_NAME
        refuse_link(path)
        with disk_errors(path, "write"):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | NO_LINKS, 0o666)
        try:
            try:
                with disk_errors(path, "lock"):
                    held = lock(descriptor, path)
            except PartlyDone as error:
                raise PartlyDone(
                    f"{self._root} is being given up by another process", hint="wait for it, or stop it, and look again"
                ) from error
            try:
                now = read_note(self._root)
                if now is not None and now.freed(self._root) and now != self._found:
                    raise PartlyDone(
                        f"{self._root} was changed by another process meanwhile", hint="run the same command again"
                    )
                yield
            finally:
                with contextlib.suppress(OSError):
                    path.unlink()
                unlock(held)
        finally:
            os.close(descriptor)

    def kept(self, earlier: Mapping[str, FileRecord], ledger: Ledger) -> dict[str, FileRecord]:
        """Of the files that earlier runs left in DEST those that hold what they should; what is not among them is written
        again. Raises CheckpointCorrupt, UsageError where one of the others is the only copy of something."""
        found = self._found.files if self._found else {}
        bad: dict[str, str] = {}
        paths = {job.path for job in self._plan.jobs}
        for path, record in found.items():
            if path not in paths:
                continue
            if ledger.done.get(path) != record:
                digest = self._digest(path)
                if digest != record.sha256:
                    ledger.done.pop(path, None)
                    bad[path] = f"reads as {digest}, was written as {record.sha256}" if digest else "is not there"
                    continue
                ledger.record(path, record.size, record.sha256)
            self._proven[path] = record
        lost = {
            path: bad.get(path, "was never read back") for path in sorted(self._needed()) if path not in self._proven
        }
        if lost:
            assert self._found is not None
            raise self._lost(self._found, lost)
        remembered = set(self._proven) | set(ledger.done)
        others = [job for job in self._plan.jobs if job.path in earlier and job.path not in remembered]
        differing = self._differing(others)
        kept = {path: record for path, record in earlier.items() if path not in differing}
        if self._found is not None and self._found.dest != self._note.dest:
            self._write_note()
        return {**kept, **self._proven}

    # Freeing

    def needed_bytes(self, jobs: Sequence[FileJob]) -> int:
        """The most that DEST needs at once beyond what the source gives up, one batch of files of margin for each worker."""
        with disk_errors(self._dest):
            if self._root.stat().st_dev != self._dest.stat().st_dev:  # what is freed there is no room here
                return sum(job.size_estimate for job in jobs)
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
            if shard in self._freed or not paths or not all(path in done for path in paths):
                continue
            for path in sorted(paths):
                if self._proven.get(path) != done[path]:
                    self._prove(path, done[path])
            self._free(shard)

    def _digest(self, path: str) -> str:
        """SHA-256 of a file of DEST as the disk holds it; empty where there is none."""
        digest = hashlib.sha256()
        buffer = bytearray(READ_BYTES)
        view = memoryview(buffer)
        if not (self._dest / path).is_file():
            return ""
        with disk_errors(self._dest / path), open(self._dest / path, "rb", buffering=0) as file:
            with contextlib.suppress(OSError, AttributeError):  # read the disk, not what was just written to memory
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            while got := file.readinto(view):
                digest.update(view[:got])
        return digest.hexdigest()

    def _prove(self, path: str, record: FileRecord) -> None:
        digest = self._digest(path)
        if digest != record.sha256:
            raise CheckFailed(
                f"{self._dest / path}: reads back as {digest or 'nothing'}, written as {record.sha256}",
                hint="its source is untouched: remove that file and run the same command again; check the disk",
            )
        self._proven[path] = record

    def _free(self, shard: str) -> None:
        self._check_links(shard)
        self._freed[shard] = self._sizes[shard]
        self._write_note()
        path = self._root / shard
        with disk_errors(path, "cut"):
            descriptor = os.open(path, os.O_RDWR | NO_LINKS)
            try:
                os.truncate(descriptor, self._headers[shard])
                sync_file(descriptor, path)
            finally:
                os.close(descriptor)

    def _check_links(self, shard: str) -> None:
        """A shard that has another name, too, is not this folder's alone to cut. Raises UsageError."""
        path = self._root / shard
        with disk_errors(path):
            status = path.lstat()
        if path.is_symlink():
            what = f"{path} is a symbolic link to {os.readlink(path)}"
        elif status.st_nlink > 1:
            what = f"{path} is one of {status.st_nlink} names of one file (hard links)"
        else:
            return
        words = ["reshard", self._root, self._dest, *self._note.options.split()]
        if not self._freed:
            hint = f"leave --reclaim out: {command(*words)}"
        else:
            hint = f"give the folder a file of its own there, or remove the other names, then: {command(*words, '--reclaim')}"
        raise UsageError(f"--reclaim cuts shards, and {what}: what else uses it would lose it", hint=hint)

    def _write_note(self, *, complete: bool = False) -> None:
        self._note = replace(self._note, shards=dict(self._freed), files=dict(self._proven), complete=complete)
        self._note.write(self._root)

    def finish(self) -> None:
        """The job is complete: remove what is left of the shards. The note stays, and says where the tensors are."""
        self._write_note(complete=True)
        self._note.remove_emptied(self._root)


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
