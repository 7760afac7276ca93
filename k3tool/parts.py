"""One job done by several processes: which share is whose, whether the others are still at work, and what is left.

Nothing but a request (`--part 2/4`) or a launcher (`k3tool.launch`) divides a job.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from k3tool.checkpoint.ledger import is_at_work
from k3tool.checkpoint.manifest import FileRecord, load_manifest
from k3tool.errors import CheckpointCorrupt, UsageError
from k3tool.events import aside
from k3tool.launch import launched
from k3tool.plan import FileJob, Plan
from k3tool.units import plural

GRACE_S = 30.0  # for processes of the same launch to begin
POLL_S = 0.2
T = TypeVar("T")


@dataclass(frozen=True)
class Part:
    """Share `number` (from 0) of `count`: the processes of one job, each with another number, divide its files.
    by: the launcher that started all of them together; empty: the share was asked for."""

    number: int
    count: int
    by: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        if not 0 <= self.number < self.count:
            raise UsageError(f"part {self.number + 1} of {self.count} does not exist", hint="write --part 1/4 to 4/4")

    def __str__(self) -> str:
        return f"{self.number + 1}-of-{self.count}"

    def of(self, batches: Sequence[T]) -> Sequence[T]:
        """The share of these."""
        return batches[self.number :: self.count]


def part_of(text: str | None, environment: Mapping[str, str]) -> Part | None:
    """The share of this process: `I/N` counted from 1, or that of a process which torchrun or srun started with others;
    None for a process alone (`1/1` says so). Raises UsageError."""
    if text is not None:
        number, slash, count = text.partition("/")
        if not (slash and number.isascii() and number.isdigit() and count.isascii() and count.isdigit()):
            raise UsageError(f"not a part: {text!r}", hint="write --part 1/4 to --part 4/4")
        return Part(int(number) - 1, int(count)) if int(count) != 1 or int(number) != 1 else None
    found = launched(environment)
    return None if found is None else Part(found.rank, found.size, found.by)


def shares(plan: Plan, wanted: Sequence[FileJob]) -> list[tuple[FileJob, ...]]:
    """What parts divide among them: batches, each with those of its files that are wanted."""
    paths = {job.path for job in wanted}
    kept = [tuple(job for job in batch if job.path in paths) for batch in plan.batches()]
    return [batch for batch in kept if batch]


def parts_left(batches: Sequence[tuple[FileJob, ...]], count: int, missing: Sequence[str]) -> list[int]:
    """Numbers, from 1, of the parts that have files to write still."""
    absent = set(missing)
    return sorted(
        {number % count + 1 for number, batch in enumerate(batches) if any(job.path in absent for job in batch)}
    )


def await_others(plan: Plan, wanted: Sequence[FileJob], dest: Path) -> dict[str, FileRecord] | None:
    """Wait until the processes that were started with this one have finished the job: all its files. None where it is
    not finished and nobody has been at work for `GRACE_S` seconds."""
    last, told = time.monotonic(), False
    while (found := _finished(plan, wanted, dest)) is None:
        now = time.monotonic()
        if is_at_work(dest):
            last = now
        elif now - last > GRACE_S:
            return None
        if not told:
            told = True
            aside(f"this share of {plural(len(wanted), 'file')} is written; waiting for the other processes")
        time.sleep(POLL_S)
    return found


def _finished(plan: Plan, wanted: Sequence[FileJob], dest: Path) -> dict[str, FileRecord] | None:
    with suppress(CheckpointCorrupt):
        manifest = load_manifest(dest)
        if manifest is None or manifest.extra.get("plan") != plan.id:
            return None
        paths = [job.path for job in wanted]
        if all(path in manifest.files and (dest / path).is_file() for path in paths):
            return dict(manifest.files)
    return None


__all__ = ["Part", "await_others", "part_of", "parts_left", "shares"]
