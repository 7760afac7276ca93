"""Reads a result back and compares it with its source, tensor by tensor: the digests of both must be equal.

The source side is read again from the source; the result side is composed from the written files by what the result
says about itself (`k3tool.json`, index, headers), not by the plan that wrote them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from k3tool.checkpoint.reader import Located, read_header
from k3tool.checkpoint.source import LocalSource
from k3tool.checkpoint.table import Tensors
from k3tool.disk import disk_errors
from k3tool.errors import CheckFailed
from k3tool.execute import BUFFER_BYTES, Options, allowance
from k3tool.layout import Layout
from k3tool.plan import FileJob, Step, carry
from k3tool.transform.forms import Opened, open_form
from k3tool.transform.reshard import Resharder, in_order
from k3tool.worker import StepDigester, Stopped, run_threads

CHUNK = 64


@dataclass
class Readback:
    """tensors compared, bytes read on both sides, names that differ, seconds."""

    tensors: int = 0
    bytes_read: int = 0
    different: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def as_json(self) -> dict[str, Any]:
        return {
            "ok": not self.different,
            "tensors": self.tensors,
            "different": self.different,
            "bytes_read": self.bytes_read,
            "seconds": round(self.seconds, 3),
        }


@dataclass(frozen=True)
class Pair:
    """One tensor twice: a step that makes it from the source, one that makes it from the result."""

    name: str
    expected: Step
    found: Step


def verify_whole(opened: Opened, dest: Path, options: Options) -> Readback:
    """Every logical tensor of the source against the one joined from `dest`. Raises CheckFailed (exit 1)."""
    result = open_form(LocalSource(dest))
    source = Resharder(opened.form, opened.splitter, Layout())
    joined = Resharder(result.form, result.splitter, Layout())
    names = [name for name, _ in in_order(opened.form)]
    missing = set(names) ^ {name for name, _ in result.form.items()}
    if missing:
        raise CheckFailed(
            f"{dest} and {opened.source.label} do not hold the same tensors: {min(missing)}",
            hint="remove DEST and write it again",
            different=sorted(missing)[:1000],
        )

    def pairs() -> Iterator[Pair]:
        for name in names:
            yield Pair(name, source.step(name, 0), joined.step(name, 0))

    total = 2 * sum(source.output(name).nbytes for name in names)
    return _compare(pairs(), total, opened.form.tensors, result.form.tensors, dest, options)


def verify_ranks(resharder: Resharder, jobs: Sequence[FileJob], dest: Path, options: Options) -> Readback:
    """What some ranks store against what the source says they should. Raises CheckFailed (exit 1)."""
    table = _Written(dest, jobs)

    def pairs() -> Iterator[Pair]:
        for job in jobs:
            table.add(job)
            for step in job.steps:
                for output in step.outputs:
                    found = carry(output.name, output.dtype, output.shape, source=f"{job.path}/{output.name}")
                    yield Pair(output.name, step, found)

    total = 2 * sum(job.data_bytes for job in jobs)
    return _compare(pairs(), total, resharder.form.tensors, table, dest, options)


class _Written:
    """Tensors of written files, under `FILE/NAME`."""

    def __init__(self, dest: Path, jobs: Sequence[FileJob]) -> None:
        self.source = LocalSource(dest)
        with disk_errors(dest, "list"):
            self._sizes = {job.path: (dest / job.path).stat().st_size for job in jobs}
        self._places: dict[str, Located] = {}

    def add(self, job: FileJob) -> None:
        header = read_header(self.source, job.path, self._sizes)
        for spec in header.tensors:
            self._places[f"{job.path}/{spec.name}"] = Located(spec, job.path, header.data_start + spec.start)

    def locate(self, name: str) -> Located:
        return self._places[name]


def _compare(
    pairs: Iterator[Pair], total: int, source: Tensors, result: Tensors, dest: Path, options: Options
) -> Readback:
    began = time.monotonic()
    report = Readback()
    progress = options.progress
    progress.started("verify", total)
    workers, _ = allowance((), source.source, options)
    stop = threading.Event()
    lock = threading.Lock()
    failures: list[BaseException] = []

    def chunk() -> list[Pair]:
        with lock:
            return list(islice(pairs, CHUNK))

    def loop() -> None:
        def advanced(amount: int) -> None:
            progress.advanced("verify", amount)

        sides = [
            StepDigester(side, buffer_bytes=BUFFER_BYTES, stop=stop, advanced=advanced) for side in (source, result)
        ]
        try:
            while not stop.is_set() and (held := chunk()):
                for pair in held:
                    equal = sides[0].digest(pair.expected) == sides[1].digest(pair.found)
                    with lock:
                        report.tensors += 1
                        if not equal:
                            report.different.append(pair.name)
        except Stopped:
            pass
        except BaseException as error:
            failures.append(error)
            stop.set()
        finally:
            with lock:
                report.bytes_read += sum(side.read_bytes for side in sides)
            for side in sides:
                side.close()

    run_threads(loop, workers, stop)
    progress.finished("verify")
    if failures:
        raise failures[0]
    report.seconds = time.monotonic() - began
    if report.different:
        report.different.sort()
        raise CheckFailed(
            f"{dest}: {len(report.different)} tensors differ from the source, the first is {report.different[0]}",
            hint="remove DEST and write it again; if it happens again, check disk and memory",
            different=report.different[:1000],
        )
    return report
