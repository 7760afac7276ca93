"""One file from the Hub to its final name: resume, stream, digest, and once more where it arrived wrong."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from k3tool.checkpoint.ledger import Ledger
from k3tool.errors import CheckFailed, CheckpointCorrupt
from k3tool.events import Progress
from k3tool.fetch.local import FolderSource
from k3tool.fetch.partial import READ_BLOCK, Digests, Partial
from k3tool.fetch.structure import Structure, header_text
from k3tool.fetch.target import Segment, Target
from k3tool.hub import HubSource, Stopped, Transient
from k3tool.units import format_bytes

BLOCK = 1 << 20  # what is received before it is written: the most that a killed process has to fetch again per file
FLUSH_S = 0.05  # on a slow network, less than a block is written after this time
TASK = "fetch"


@dataclass
class Outcome:
    """What became of one file. status: fetched, resumed or kept. origin: hub, disk, or the cache it was taken from."""

    name: str
    size: int
    status: str
    sha256: str | None = None
    origin: str = "hub"
    proven: str = ""  # sha256, git-sha1, or empty where no digest is published or none was compared
    attempts: int = 1


@dataclass
class Job:
    """What all files of one run share."""

    source: HubSource | FolderSource
    folder: Path
    ledger: Ledger
    progress: Progress
    verify: bool = True
    structure: Structure | None = None
    stop: threading.Event = field(default_factory=threading.Event)


def fetch_target(job: Job, target: Target) -> Outcome:
    """Bring one file to its final name.

    Raises CheckFailed where it arrived wrong twice, CheckpointCorrupt where its header belongs to another checkpoint,
    RemoteError, CapacityError; Stopped where the job is ending for another reason.
    """
    began = time.monotonic()
    with Partial(job.ledger, target.name) as partial:
        resumed, received = partial.position > 0, 0
        for attempt in (1, 2):
            digests = Digests(target.size, target.expected, enabled=job.verify)
            try:
                received = _receive(job, target, partial, digests, attempt)
                problem = _digest_problem(job, target, digests)
            except CheckpointCorrupt as error:
                problem = error
            if problem is None:
                break
            if attempt == 2:
                partial.restart()
                raise problem
            job.progress.warn(f"{problem.message}; fetching it once more")
            _uncount(job, partial)
            partial.restart()
        partial.finish(job.folder / target.name)
    sha256 = digests.sha256
    if sha256 is not None:
        job.ledger.record(target.name, target.size, sha256)
    seconds = max(time.monotonic() - began, 1e-6)
    job.progress.item(f"{target.name} {format_bytes(target.size)} {format_bytes(received / seconds)}/s")
    return Outcome(
        target.name,
        target.size,
        "resumed" if resumed else "fetched",
        sha256,
        proven=proof(target, job.verify),
        attempts=attempt,
    )


def proof(target: Target, verify: bool) -> str:
    """Which published digest a file that passed was compared with."""
    if not verify or target.expected is None:
        return ""
    return "sha256" if target.expected.sha256 else "git-sha1" if target.expected.git_sha1 else ""


def _digest_problem(job: Job, target: Target, digests: Digests) -> CheckFailed | None:
    mismatch = digests.mismatch()
    if mismatch is None:
        return None
    kind, expected, found = mismatch
    return CheckFailed(
        f"{target.name}: {kind} differs (expected {expected}, found {found})",
        hint="run the same command again; if it stays, the server or this machine's memory or disk damages data",
        file=target.name,
        expected=expected,
        found=found,
    )


def _uncount(job: Job, partial: Partial) -> None:
    job.progress.advanced(TASK, -partial.position)


def _receive(job: Job, target: Target, partial: Partial, digests: Digests, attempt: int) -> int:
    """Append until the partial is whole; returns the bytes received. The header is checked when it is there."""
    if partial.position > target.size:
        partial.restart()
    check = _HeaderCheck(job, target, partial)
    _hash_existing(job, partial, digests)
    check()
    started = partial.position
    buffer = memoryview(bytearray(min(BLOCK, max(1, target.size - started))))
    for segment in target.from_position(started):
        known = segment.data if not segment.file else None if attempt > 1 else job.source.small(segment.file)
        if known is not None:
            data = memoryview(known)[segment.start : segment.stop] if segment.file else memoryview(known)
            _append(job, partial, digests, data, check)
        else:
            _stream(job, segment, partial, digests, buffer, check)
    return partial.position - started


def _hash_existing(job: Job, partial: Partial, digests: Digests) -> None:
    done = 0
    while done < partial.position:
        if job.stop.is_set():
            raise Stopped
        data = partial.read(done, READ_BLOCK)
        digests.update(data)
        done += len(data)
        job.progress.advanced(TASK, len(data))


def _stream(
    job: Job,
    segment: Segment,
    partial: Partial,
    digests: Digests,
    buffer: memoryview,
    check: Callable[[], None],
) -> None:
    retry = job.source.retry()
    start, flushed = segment.start, time.monotonic()
    while start < segment.stop:
        filled, body = 0, None
        try:
            body = job.source.open(segment.file, start, segment.stop, skip_limit=segment.stop)
            if body.skipped:
                job.progress.warn(
                    f"{segment.file}: the server ignores Range, {format_bytes(body.skipped)} came a second time"
                )
            while start < segment.stop:
                filled += body.read_into(buffer[filled : segment.stop - start])
                full = filled == len(buffer) or filled == segment.stop - start
                if full or time.monotonic() - flushed > FLUSH_S:
                    _append(job, partial, digests, buffer[:filled], check)
                    start += filled
                    retry.progressed(filled)
                    filled, flushed = 0, time.monotonic()
        except Transient as error:
            if filled:
                _append(job, partial, digests, buffer[:filled], check)
                start += filled
                retry.progressed(filled)
            if job.stop.is_set():
                raise Stopped from None
            if not error.stale_address:
                job.source.forget_address(segment.file)
            retry.failed(error, f"{job.source.label} {segment.file}")
        finally:
            if body is not None:
                body.close()


def _append(job: Job, partial: Partial, digests: Digests, view: memoryview, check: Callable[[], None]) -> None:
    """Write what has arrived, also when everything is to stop: it need not be fetched again."""
    partial.append(view)
    digests.update(view)
    job.progress.advanced(TASK, len(view))
    check()
    if job.stop.is_set():
        raise Stopped


class _HeaderCheck:
    """Compares the header with index and configuration once, as soon as all of it has arrived."""

    def __init__(self, job: Job, target: Target, partial: Partial) -> None:
        self.job, self.target, self.partial = job, target, partial
        self.pending = job.structure is not None and target.is_shard and target.expected is not None

    def __call__(self) -> None:
        if not self.pending or self.job.structure is None:
            return
        text = header_text(
            self.partial.read(0, 8), self.target.size, self.partial.read, self.partial.position, self.target.name
        )
        if text is not None:
            self.pending = False
            self.job.structure.check_header(self.target.name, text, self.target.size)
