"""Reads a result back: every tensor that a rank stores against the source, every other byte against what was written.

The source side is read again from the source, once for all that hold a tensor. The result side is read by its own
headers, which must be those of the plan byte by byte: no byte of a file is left out.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from k3tool.checkpoint.manifest import MANIFEST_NAME, FileRecord
from k3tool.checkpoint.source import LocalSource
from k3tool.checkpoint.table import Tensors, TensorTable
from k3tool.disk import disk_errors, refusal
from k3tool.errors import CheckFailed
from k3tool.execute import LEAST_BUFFER_BYTES, Options, Report, allowance
from k3tool.layout import rank_folder
from k3tool.names import TensorName
from k3tool.plan import FileJob, Step, TensorOut, carry
from k3tool.proofs import Readers
from k3tool.transform.forms import SubSource, open_form
from k3tool.transform.reshard import Form, RankTensors, Resharder, in_order
from k3tool.units import plural
from k3tool.worker import StepDigester, Stopped, head_of, run_threads

CHUNK = 64
READERS = 4  # files hashed at once, where no other number is asked for
AGAIN = "remove what differs and run the same command again: it writes that anew; then check the disk and its memory"


@dataclass
class Readback:
    """files: proven whole, headers included. tensors: of the source, each compared with all that is stored of it.
    different: `FILE: TENSOR`, or a file. bytes_read: on both sides."""

    files: int = 0
    tensors: int = 0
    bytes_read: int = 0
    different: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def as_json(self) -> dict[str, Any]:
        return {
            "ok": not self.different,
            "files": self.files,
            "tensors": self.tensors,
            "different": self.different,
            "bytes_read": self.bytes_read,
            "seconds": round(self.seconds, 3),
        }


@dataclass(frozen=True)
class Compared:
    """One tensor of the source: steps that make each share of it from the source, and what is stored of it: the number
    of the share and a step that reads it from the result, for everyone that holds it."""

    name: str
    shares: tuple[Step, ...]
    stored: tuple[tuple[int, Step], ...]


def verify_written(
    resharder: Resharder,
    jobs: Sequence[FileJob],
    dest: Path,
    options: Options,
    *,
    by_rank: bool,
    files: Mapping[str, FileRecord],
) -> Readback:
    """Every byte of `jobs` and `files` in `dest`: tensors against the source, headers against the plan, other files
    against their digests. by_rank: every rank has a folder there.

    Raises CheckFailed (1) naming what differs, CheckpointMissing and CheckpointCorrupt for what cannot be read.
    """
    began = time.monotonic()
    report = Readback()
    _check_files(report, jobs, files, dest, options)
    if jobs:
        _compare(report, jobs, Stored(resharder, jobs, dest, by_rank=by_rank), options)
    report.seconds = time.monotonic() - began
    return report


def verify_joined(form: Form, dest: Path) -> None:
    """Whether the written ranks (or shards) are together the checkpoint `form`, by what they say of themselves.
    Raises CheckFailed; CheckpointMissing and CheckpointCorrupt for what contradicts itself."""
    result = open_form(LocalSource(dest)).form
    held = dict(result.items())
    for name, kind in form.items():
        found = held.pop(name, None)
        if found != kind:
            raise CheckFailed(
                f"{dest}: {name} joins to {found and [found.dtype, *found.shape]}, the source has "
                f"{[kind.dtype, *kind.shape]}",
                hint=AGAIN,
                different=[name],
            )
    if held:
        raise CheckFailed(f"{dest} holds {min(held)}, which the source does not", hint=AGAIN, different=sorted(held))


def check_digests(dest: Path, report: Report, options: Options) -> Readback:
    """Every file of a finished job against the digest of what was written into it; of a job that another process
    finishes the files of this one. Raises CheckFailed (1) naming those that differ."""
    began = time.monotonic()
    files = written_files(report) if report.is_closed else {name: report.files[name] for name in report.written}
    readback = Readback()
    _check_files(readback, (), files, dest, options)
    readback.seconds = time.monotonic() - began
    return readback


def written_files(
    report: Report, jobs: Sequence[FileJob] = (), folders: Sequence[str] | None = None
) -> dict[str, FileRecord]:
    """The records of a job's files, the manifest's among them, without those of `jobs`. folders: of the folders in DEST
    only these."""
    left_out = {job.path for job in jobs}
    found = {name: record for name, record in report.files.items() if name not in left_out}
    if report.manifest is not None:
        found[MANIFEST_NAME] = report.manifest
    if folders is None:
        return found
    return {name: record for name, record in found.items() if name.rpartition("/")[0] in ("", *folders)}


def _check_files(
    report: Readback, jobs: Sequence[FileJob], files: Mapping[str, FileRecord], dest: Path, options: Options
) -> None:
    """What is no tensor: headers, and whole files. Raises CheckFailed."""
    for job in jobs:
        head = head_of(job)
        with disk_errors(dest / job.path), open(dest / job.path, "rb") as file:
            same = file.read(len(head)) == head
            size = file.seek(0, os.SEEK_END)
        if not same:
            report.different.append(f"{job.path}: its header")
        elif size != len(head) + job.data_bytes:
            report.different.append(f"{job.path}: its size")
        report.bytes_read += len(head)
    workers = options.max_workers or min(READERS, os.cpu_count() or 1)
    options.progress.started("verify files", sum(record.size for record in files.values()))
    with closing(
        Readers(dest, list(files), workers=workers, task="verify files", progress=options.progress)
    ) as readers:
        for name, proof in readers:
            if isinstance(proof, OSError):
                raise refusal(proof, dest / name) from proof
            if proof.sha256 != files[name].sha256:
                report.different.append(name)
            report.bytes_read += proof.size
    options.progress.finished("verify files")
    report.files = len(jobs) + len(files)
    _refuse(report, "what was written", dest)


def _refuse(report: Readback, than: str, dest: Path) -> None:
    """Raises CheckFailed where something differs."""
    if report.different:
        report.different.sort()
        count = len(report.different)
        raise CheckFailed(
            f"{dest}: {report.different[0]} differs from {than}"
            + (f", and {plural(count - 1, 'more place')}" if count > 1 else ""),
            hint=AGAIN,
            different=report.different[:1000],
        )


class Stored:
    """What the files of some jobs hold of each tensor: those of every rank, or of one checkpoint (key 0)."""

    def __init__(self, resharder: Resharder, jobs: Sequence[FileJob], dest: Path, *, by_rank: bool) -> None:
        self.resharder, self.dest, self._by_rank = resharder, dest, by_rank
        layout = resharder.target
        folders = [rank_folder(rank, layout.ranks) for rank in range(layout.ranks)] if by_rank else [""]
        files: dict[str, list[str]] = {}
        for job in jobs:
            folder, _, name = job.path.rpartition("/")
            files.setdefault(folder, []).append(name)
        whole = LocalSource(dest)
        self.tables = {
            number: TensorTable.of_files(SubSource(whole, folder) if folder else whole, files[folder])
            for number, folder in enumerate(folders)
            if folder in files
        }
        self.tensors: Tensors = RankTensors(whole, folders, self.tables) if by_rank else self.tables[0]

    def compared(self) -> Iterator[Compared]:
        """Every tensor of which something is stored."""
        for text, name in in_order(self.resharder.form):
            holders = [(tp, number) for tp, number in self._holders(name) if text in self.tables.get(number, ())]
            if holders:
                yield self._one(text, name, holders)

    def _holders(self, name: TensorName) -> Iterator[tuple[int, int]]:
        """(TP rank, number of the table) of everyone that stores a tensor."""
        resharder, layout = self.resharder, self.resharder.target
        if not self._by_rank:
            yield 0, 0
            return
        for stage, owner in resharder.splitter.owners(name, resharder.rule(name), layout):
            for ep in range(layout.ep) if owner is None else (owner,):
                for tp in range(layout.tp):
                    yield tp, layout.rank_at(tp, ep, stage)

    def _one(self, text: str, name: TensorName, holders: Sequence[tuple[int, int]]) -> Compared:
        resharder = self.resharder
        kind = resharder.form.kind(text)
        output = resharder.output(text)
        if resharder.cuts(name, resharder.rule(name), kind)[1].axis is None:
            holders = [(0, number) for _, number in holders]  # whole on every TP rank
        shares = sorted({tp for tp, _ in holders})
        return Compared(
            text,
            tuple(resharder.step(text, tp) for tp in shares),
            tuple((shares.index(tp), self._reading(output, number)) for tp, number in holders),
        )

    def _reading(self, output: TensorOut, number: int) -> Step:
        name = f"{number}/{output.name}" if self._by_rank else output.name
        return carry(output.name, output.dtype, output.shape, source=name)

    def where(self, step: Step) -> str:
        """`FILE: TENSOR` of what a step reads."""
        (region,) = step.needs
        return f"{self.tensors.locate(region.tensor).shard}: {step.outputs[0].name}"


def _compare(report: Readback, jobs: Sequence[FileJob], stored: Stored, options: Options) -> None:
    """Every tensor of which something is stored, by as many threads as there are workers. Raises CheckFailed."""
    source = stored.resharder.form.tensors
    progress = options.progress
    progress.started("verify", sum(job.data_bytes for job in jobs))
    workers, room = allowance(jobs, source.source, options)
    room = max(room // 2, LEAST_BUFFER_BYTES)  # there are two sides
    stop = threading.Event()
    lock = threading.Lock()
    failures: list[BaseException] = []
    work = stored.compared()

    def chunk() -> list[Compared]:
        with lock:
            return list(islice(work, CHUNK))

    def advanced(amount: int) -> None:
        progress.advanced("verify", amount)

    def loop() -> None:
        made = StepDigester(source, buffer_bytes=room, stop=stop, advanced=lambda _: None)
        read = StepDigester(stored.tensors, buffer_bytes=room, stop=stop, advanced=advanced)
        try:
            while not stop.is_set() and (held := chunk()):
                for one in held:
                    expected = made.digests(one.shares)
                    wrong = [step for share, step in one.stored if read.digests([step]) != [expected[share]]]
                    with lock:
                        report.tensors += 1
                        report.different += [stored.where(step) for step in wrong]
        except Stopped:
            pass
        except BaseException as error:
            failures.append(error)
            stop.set()
        finally:
            with lock:
                report.bytes_read += made.read_bytes + read.read_bytes
            made.close()
            read.close()

    run_threads(loop, workers, stop)
    progress.finished("verify")
    if failures:
        raise failures[0]
    _refuse(report, "the source", stored.dest)
