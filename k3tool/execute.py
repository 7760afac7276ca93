"""Carries a plan out: workers write the files, a ledger remembers them, the index and configuration come last.

Whatever happens, a final name never holds partial data, and the same command continues where the last one stopped.
What a file holds is the plan's business, where bytes come from the source's, how one file is written the worker's.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from k3tool.checkpoint.ledger import Ledger, job_id
from k3tool.checkpoint.manifest import FileRecord, Manifest, load_manifest
from k3tool.checkpoint.ranges import OPEN_FILES
from k3tool.checkpoint.source import Source
from k3tool.checkpoint.table import Tensors
from k3tool.checkpoint.writer import AtomicFile
from k3tool.destination import check_space, clear, clearable_bytes, guard, is_of
from k3tool.disk import make_folder
from k3tool.errors import CapacityError, K3Error, PartlyDone, UsageError, tell
from k3tool.events import SILENT, Progress
from k3tool.lockstep import limit
from k3tool.memory import peak_bytes, resident_memory
from k3tool.parts import Part, await_others, parts_left, shares
from k3tool.plan import FileJob, Plan
from k3tool.proofs import differing
from k3tool.reclaim import Reclaimer
from k3tool.units import format_bytes
from k3tool.worker import Finished, Stopped, Worker, run_threads

BUFFER_BYTES = 2 << 20
SPARE_FILES = 64  # open beside those of the workers: the ledger, sockets, libraries
LEAST_BUFFER_BYTES = 256 << 10
REMOTE_WINDOW_BYTES = 32 << 20
INTERPRETER_BYTES = 64 << 20  # what Python and numpy themselves hold, where it cannot be measured
WORKER_BYTES = 2 << 20  # its stack, its descriptors, what the allocator keeps for it
SPARE_BYTES = 8 << 20  # what one run holds more than the next


@dataclass(frozen=True)
class SmallFile:
    """A file written after the shards: the index, the configuration. `path` is relative to DEST."""

    path: str
    data: bytes | Callable[[], Iterable[bytes]]


@dataclass(frozen=True)
class Options:
    """How a plan is carried out; none of it changes what is written.

    max_workers: threads; None takes one per core. max_memory: bytes of resident memory the whole process is held to.
    part: this process's share of the files. finalize: write no file of the plan, only what comes after them.
    summarize: turns what a file's transforms measured into the JSON that is kept with the file.
    reclaimer: frees source shards as their readers become durable. load: asked before memory is bounded: brings in all that
    the transforms use, so that it counts, and returns the bytes that will be held until the end beside steps and buffers.
    """

    max_workers: int | None = None
    max_memory: int | None = None
    overwrite: bool = False
    part: Part | None = None
    finalize: bool = False
    progress: Progress = SILENT
    summarize: Callable[[list[Any]], Any] = list
    reclaimer: Reclaimer | None = None
    load: Callable[[], int] | None = None


@dataclass
class Report:
    """files: every finished file of the job, manifest: of the manifest itself. share: the files of the plan that this
    process was to see to. kept: those that an earlier run had finished. notes: per file what `summarize` made.
    complete: nothing of the job is missing. missing: its files that are; parts_left: the parts (from 1) that they belong
    to. Bytes and seconds are of this run."""

    files: dict[str, FileRecord] = field(default_factory=dict)
    manifest: FileRecord | None = None
    share: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    notes: dict[str, Any] = field(default_factory=dict)
    complete: bool = False
    missing: list[str] = field(default_factory=list)
    parts_left: list[int] = field(default_factory=list)
    bytes_read: int = 0
    bytes_written: int = 0
    seconds: float = 0.0
    workers: int = 0

    @property
    def peak_memory_bytes(self) -> int:
        return peak_bytes()

    @property
    def is_closed(self) -> bool:
        """Whether this process wrote what comes last: the index, the configuration, the manifest."""
        return self.manifest is not None

    @property
    def written(self) -> list[str]:
        """The files of this process's share that are finished."""
        return [path for path in self.share if path in self.files]


def execute(
    plan: Plan,
    tensors: Tensors,
    dest: Path,
    *,
    closing: Callable[[Report], Iterable[SmallFile]],
    options: Options | None = None,
    only: Callable[[FileJob], bool] | None = None,
    manifest: Mapping[str, Any] | None = None,
    revision: str | None = None,
) -> Report:
    """Write every file of `plan` into `dest`, then what `closing` gives, in that order, then the manifest.

    only: the jobs that this command is about (the ranks that were asked for); others may follow on the same DEST.
    closing: called once, with every finished file known, when the last job is done; not called while other parts of
        the job are still at work. manifest: JSON kept in the manifest beside the file digests.

    A part that was asked for returns when its share is written, whether or not the job is complete by then; one that a
    launcher started waits for the others as long as one of them is at work.

    Raises UsageError (2) for a DEST that holds something else, another unfinished job, or lies in the source;
    PartlyDone (3) where another process is at work; CheckpointMissing and CheckpointCorrupt (10, 11) for a source
    that is short or changes meanwhile; CapacityError (12) for disk or memory, before writing where it can be known.
    """
    began = time.monotonic()
    options = options or Options()
    dest = Path(dest)
    wanted = plan.select(only) if only else plan.jobs
    goes_on = options.reclaimer is not None and options.reclaimer.goes_on
    guard(dest, tensors.source, plan, overwrite=options.overwrite, goes_on=goes_on)
    workers, buffer_bytes = allowance(wanted, tensors.source, options)
    keeps_others = only is not None and is_of(dest, plan)
    replaces = options.overwrite and dest.is_dir() and not keeps_others
    if replaces:  # before anything is removed
        needed = options.reclaimer.needed_bytes(wanted) if options.reclaimer else None
        check_space(dest, wanted, needed=needed, freed=clearable_bytes(dest))
    with Ledger(dest, plan.id, plan.command, overwrite=options.overwrite, part=_share(wanted, options, only)) as ledger:
        run = _Run(plan, wanted, tensors, dest, ledger, options, revision, dict(manifest or {}))
        try:
            if replaces:
                clear(dest)
            report = run.write(workers, buffer_bytes, is_room_known=replaces)
            run.close(report, closing)
        except BaseException as error:
            if isinstance(error, (K3Error, KeyboardInterrupt)):
                tell(error, run.so_far())
            run.leave_no_claim()
            raise
    if not report.complete and options.part and options.part.by:
        found = await_others(plan, wanted, dest)
        if found is not None:
            report.files, report.complete, report.missing, report.parts_left = found, True, [], []
    report.seconds = time.monotonic() - began
    return report


def _share(wanted: Sequence[FileJob], options: Options, only: Callable[[FileJob], bool] | None) -> str:
    """The name under which this process shares the ledger with others of the same job; empty: it is alone."""
    if options.part and options.overwrite:
        raise UsageError(
            "--overwrite cannot be shared by several processes", hint="remove DEST first, or run one process"
        )
    if options.part:
        return str(options.part)
    if only is None or options.overwrite or not wanted:
        return ""
    return job_id([job.path for job in wanted])


def allowance(jobs: Sequence[FileJob], source: Source, options: Options) -> tuple[int, int]:
    """(workers, bytes of one buffer) that keep within `max_memory`. Raises CapacityError where one worker does not."""
    batches = len({job.batch or job.path for job in jobs})
    workers = max(1, min(options.max_workers or os.cpu_count() or 1, batches))
    step_bytes = max((job.step_bytes for job in jobs), default=0)
    remote = source.local_path("") is None
    if options.max_memory is None:
        return workers, REMOTE_WINDOW_BYTES if remote else BUFFER_BYTES
    later = options.load() if options.load else 0
    free = options.max_memory - max(resident_memory(), INTERPRETER_BYTES) - later - SPARE_BYTES
    buffers = 3 if remote else 2
    wish = REMOTE_WINDOW_BYTES if remote else BUFFER_BYTES
    each = step_bytes + WORKER_BYTES
    while workers > 1 and workers * (each + buffers * LEAST_BUFFER_BYTES * 4) > free:
        workers -= 1
    buffer_bytes = min(wish, (free - workers * each) // (workers * buffers))
    if buffer_bytes < LEAST_BUFFER_BYTES:
        needed = options.max_memory - free + each + buffers * LEAST_BUFFER_BYTES
        needed = -(-(needed + SPARE_BYTES) // 1_000_000)  # what is held already differs from run to run
        raise CapacityError(
            f"--max-memory {format_bytes(options.max_memory)} is too little: one worker needs {needed} MB",
            hint=f"give --max-memory {needed}MB or more",
        )
    return workers, buffer_bytes


def open_files(workers: int, wanted: int) -> tuple[int, int]:
    """(workers, files that each may write at a time) where each would write `wanted`, within the limit of the process,
    which is raised as far as it may be. Fewer workers come before smaller batches: those would read again what their files
    share."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        each = OPEN_FILES + 1  # of the source, and a folder that is synced
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        needed = SPARE_FILES + workers * (wanted + each)
        if soft != resource.RLIM_INFINITY and soft < needed:
            top = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
            with contextlib.suppress(OSError, ValueError):
                resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, top), hard))
            room = resource.getrlimit(resource.RLIMIT_NOFILE)[0] - SPARE_FILES
            workers = max(1, min(workers, room // (wanted + each)))
            wanted = max(1, min(wanted, room // workers - each))
    return workers, wanted


class _Run:
    """One execution of a plan inside a held ledger."""

    def __init__(
        self,
        plan: Plan,
        wanted: Sequence[FileJob],
        tensors: Tensors,
        dest: Path,
        ledger: Ledger,
        options: Options,
        revision: str | None,
        manifest: dict[str, Any],
    ) -> None:
        self.plan, self.wanted, self.tensors, self.dest = plan, wanted, tensors, dest
        self.ledger, self.options, self.revision, self.manifest = ledger, options, revision, manifest
        self.earlier = self._earlier()
        if options.reclaimer:
            self.earlier = options.reclaimer.kept(self.earlier, ledger)
        self.stop = threading.Event()
        self.lock = threading.Lock()
        self.failures: list[BaseException] = []
        self.report = Report()

    def so_far(self) -> dict[str, object]:
        """What a run that ends early tells of itself: files of those asked for that are whole, and bytes of this run."""
        done = self.done()
        finished = sum(job.path in done for job in self.wanted)
        return {
            "files_done": finished,
            "files_left": len(self.wanted) - finished,
            "bytes_read": self.report.bytes_read,
            "bytes_written": self.report.bytes_written,
        }

    def leave_no_claim(self) -> None:
        """A run that fails before a file is finished leaves the folder as it was: it refuses no other command."""
        named = (job.path for job in self.wanted if job.path not in self.earlier)
        if any(os.path.lexists(self.dest / path) for path in named):  # it failed between its name and its record
            return
        if not self.ledger.abandon_if_idle():
            return
        folders = {folder for job in self.wanted for folder in Path(job.path).parents}
        for folder in sorted(folders - {Path()}, key=lambda path: -len(path.parts)):
            with contextlib.suppress(OSError):
                (self.dest / folder).rmdir()
        self.ledger.abandon()

    def _earlier(self) -> dict[str, FileRecord]:
        """Files of the same job that a completed command left here (other ranks, or this very command)."""
        if self.options.overwrite and not is_of(self.dest, self.plan):  # damaged, perhaps
            return {}
        found = load_manifest(self.dest)
        if found is None or found.extra.get("plan") != self.plan.id:
            return {}
        again = {job.path for job in self.wanted} if self.options.overwrite else ()
        return {
            name: record
            for name, record in found.files.items()
            if name not in again and (self.dest / name).is_file() and (self.dest / name).stat().st_size == record.size
        }

    def _drop_damaged(self, share: Sequence[FileJob]) -> None:
        """Of this process's share forget files of an earlier command that do not read as they were written: this writes
        them again."""
        kept = {job.path: self.earlier[job.path].sha256 for job in share if job.path in self.earlier}
        unsure = {name: sha256 for name, sha256 in kept.items() if name not in self.ledger.done}
        for name in differing(self.dest, unsure, workers=self.options.max_workers, progress=self.options.progress):
            self.options.progress.warn(f"{self.dest / name} does not read as it was written: it is written again")
            del self.earlier[name]

    def done(self) -> dict[str, FileRecord]:
        """Finished files of the job; a ledger names no others that count."""
        ours = {job.path for job in self.plan.jobs}
        return {**self.earlier, **{name: record for name, record in self.ledger.done.items() if name in ours}}

    def write(self, workers: int, buffer_bytes: int, *, is_room_known: bool = False) -> Report:
        share = [job for batch in self._share() for job in batch]
        if not self.options.reclaimer:  # it has read them
            self._drop_damaged(share)
        done = self.done()
        report = self.report
        report.share = [job.path for job in share]
        report.kept, report.workers = [job.path for job in self.wanted if job.path in done], workers
        if self.options.finalize:
            return report
        batches = self._batches(done)
        todo = [job for batch in batches for job in batch]
        if todo:
            reclaimer = self.options.reclaimer
            if not is_room_known:
                check_space(self.dest, todo, needed=reclaimer.needed_bytes(todo) if reclaimer else None)
            progress = self.options.progress
            task = self.plan.command.split()[0]
            progress.started(task, sum(job.data_bytes for job in todo))
            try:
                self._work(batches, min(workers, len(batches)), buffer_bytes, task, report)
            finally:
                progress.finished(task)
        return report

    def _batches(self, done: Mapping[str, FileRecord]) -> list[tuple[FileJob, ...]]:
        """This process's share of the batches, without what is done."""
        left = [tuple(job for job in batch if job.path not in done) for batch in self._share()]
        return [batch for batch in left if batch]

    def _share(self) -> Sequence[tuple[FileJob, ...]]:
        return (self.options.part or Part(0, 1)).of(shares(self.plan, self.wanted))

    def _work(
        self, batches: Sequence[tuple[FileJob, ...]], workers: int, buffer_bytes: int, task: str, report: Report
    ) -> None:
        todo: queue.SimpleQueue[tuple[FileJob, ...]] = queue.SimpleQueue()
        workers, most = open_files(workers, max(len(batch) for batch in batches))
        for batch in batches:
            for files in limit(batch, most):
                todo.put(files)

        def advanced(amount: int) -> None:
            self.options.progress.advanced(task, amount)

        def loop() -> None:
            worker = Worker(
                self.tensors,
                self.dest,
                buffer_bytes=buffer_bytes,
                stop=self.stop,
                advanced=advanced,
                bridge=len(self.wanted) < len(self.plan.jobs),
            )
            try:
                while not self.stop.is_set():
                    self._record(worker.write(todo.get_nowait()), report)
            except queue.Empty:
                pass
            except Stopped:
                pass
            except BaseException as error:
                self.failures.append(error)
                self.stop.set()
            finally:
                worker.close()
                with self.lock:
                    report.bytes_read += worker.read_bytes

        run_threads(loop, workers, self.stop)
        if self.failures:
            raise self.failures[0]

    def _record(self, finished: Sequence[Finished], report: Report) -> None:
        for file in finished:
            self.ledger.record(file.path, file.size, file.sha256, self.options.summarize(file.measured) or None)
            self.options.progress.item(f"{file.path}  {format_bytes(file.size)}")
        with self.lock:
            report.bytes_written += sum(file.size for file in finished)
            if self.options.reclaimer:
                self.options.reclaimer.durable(self.done())

    def close(self, report: Report, closing: Callable[[Report], Iterable[SmallFile]]) -> None:
        """The index, the configuration and the manifest, once nothing of what was asked for is missing."""
        with self.ledger.closing() if self.ledger.part else contextlib.nullcontext():
            self.earlier = self._earlier()
            report.files = self.done()
            report.notes = dict(self.ledger.notes)
            report.missing = [job.path for job in self.wanted if job.path not in report.files]
            report.complete = not report.missing
            if report.missing:
                part = self.options.part
                if self.options.finalize or not part:
                    self._refuse_to_close(report.missing)
                else:
                    report.parts_left = parts_left(shares(self.plan, self.wanted), part.count, report.missing)
                return
            if self.options.reclaimer:
                self.options.reclaimer.durable(report.files)
            for small in closing(report):
                report.files[small.path] = write_small(self.dest / small.path, small.data)
            manifest = Manifest(self.plan.command, source_name(self.tensors.source), self.revision, dict(report.files))
            manifest.extra.update(self.manifest, plan=self.plan.id)
            report.manifest = manifest.write(self.dest)
        if self.ledger.part:
            self.ledger.complete_with_the_last()
        else:
            self.ledger.complete()

    def _refuse_to_close(self, missing: Sequence[str]) -> None:
        raise PartlyDone(
            f"{self.dest}: {len(missing)} files are not written yet, the first is {missing[0]}",
            hint="run the parts that failed again; the last one to finish writes the index",
            missing=list(missing[:100]),
        )


def write_small(path: Path, data: bytes | Callable[[], Iterable[bytes]]) -> FileRecord:
    """Write a file whole or not at all, from bytes or from an iterable of them."""
    make_folder(path.parent)
    with AtomicFile(path) as file:
        chunks: Iterator[bytes] = iter((data,)) if isinstance(data, bytes) else iter(data())
        for chunk in chunks:
            file.write(chunk)
    return FileRecord(file.size, file.sha256)


def source_name(source: Source) -> str:
    """The source for a command that is run again, perhaps in another folder."""
    return os.path.abspath(source.label) if os.path.isdir(source.label) else source.label


def source_identity(source: Source, digest: str) -> dict[str, str]:
    """What names a source in a plan's description: where it is (of a Hub repository the commit), and the digest of
    what the plan was made from."""
    root = source.local_path("")
    former = getattr(source, "former_root", None)  # of a source that was moved while it was given up
    remote = f"{getattr(source, 'repo', source.label)} {getattr(source, 'commit', '')}"
    where = remote if root is None else former or os.path.realpath(root)
    return {"source": where, "digest": digest}
