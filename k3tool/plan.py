"""The job plan: which files to write, and for each the steps that make it, front to back.

A plan is made from names, shapes and dtypes alone. It says what will be read and written and how much memory that
takes before a byte moves; `k3tool.execute` carries it out. Plans of half a million tensors stay small because a
file's steps may be built on demand (`LazySteps`) from a list that many files share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Generic, TypeVar, overload

from k3tool.checkpoint.ledger import job_id
from k3tool.transform.base import (
    Applied,
    Compute,
    Copy,
    Literal,
    Region,
    Step,
    TensorOut,
    Transform,
    Zeros,
    carry,
    whole,
)

Item = TypeVar("Item")
Label = TypeVar("Label")
HEADER_BYTES_PER_TENSOR = 200  # estimate of a safetensors header, for sizes in a plan


class LazySteps(Sequence[Step], Generic[Item]):
    """The steps `make(item)` of a shared list of items, built each time they are walked through."""

    def __init__(self, items: Sequence[Item], make: Callable[[Item], Step]) -> None:
        self._items = items
        self._make = make

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Step]:
        return map(self._make, self._items)

    @overload
    def __getitem__(self, index: int) -> Step: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Step]: ...
    def __getitem__(self, index: int | slice) -> Step | Sequence[Step]:
        if isinstance(index, slice):
            return LazySteps(self._items[index], self._make)
        return self._make(self._items[index])


@dataclass(frozen=True)
class FileJob:
    """One output file, written front to back once.

    path: relative to DEST, forward slashes.
    steps: in the order of the file's tensors; may be lazy, and is walked more than once.
    data_bytes, read_bytes, step_bytes: tensor bytes written; source bytes needed; the most memory that one step
        needs beside the copy buffers. `file_job` computes them.
    metadata: the `__metadata__` of the safetensors header.
    batch: jobs of the same non-empty batch are written together by one worker, in the order of `places`, so that what
        several of them want is read once.
    places: for each step of a batched job, where it stands among the steps of all jobs, ascending: equal places are the
        same tensors. share: which of the shares of divided tensors the file holds.
    head: the file's first bytes where it is no safetensors file (the steps' outputs follow without gaps).
    """

    path: str
    steps: Sequence[Step]
    data_bytes: int
    read_bytes: int
    step_bytes: int = 0
    metadata: Mapping[str, str] = field(default_factory=lambda: {"format": "pt"})
    batch: str = ""
    head: bytes | None = None
    places: Sequence[int] = ()
    share: int = 0

    def outputs(self) -> Iterator[TensorOut]:
        return (output for step in self.steps for output in step.outputs)

    @property
    def size_estimate(self) -> int:
        head = len(self.head) if self.head is not None else 8 + HEADER_BYTES_PER_TENSOR * len(self.steps)
        return head + self.data_bytes


def file_job(
    path: str,
    steps: Sequence[Step],
    *,
    metadata: Mapping[str, str] | None = None,
    batch: str = "",
    head: bytes | None = None,
) -> FileJob:
    """A FileJob with its sizes summed up from the steps."""
    written = read = memory = 0
    for step in steps:
        written += sum(output.nbytes for output in step.outputs)
        read += sum(region.nbytes for region in step.needs)
        memory = max(memory, step.memory_bytes)
    return FileJob(path, steps, written, read, memory, {"format": "pt"} if metadata is None else metadata, batch, head)


@dataclass(frozen=True)
class Plan:
    """What one command does. Two runs are the same job when their `id` is the same.

    jobs: in the order in which they are best done (source order).
    command: its first word, what is done, counts for the id; how the source and the options are spelled does not.
    description: JSON; everything that the result depends on beside the jobs: options, and the identity of the source
        (`k3tool.execute.source_identity`).
    """

    command: str
    jobs: tuple[FileJob, ...]
    description: Mapping[str, Any]

    @property
    def id(self) -> str:
        return job_id(
            [
                self.command.split(maxsplit=1)[0],
                dict(self.description),
                [[j.path, j.data_bytes, len(j.steps)] for j in self.jobs],
            ]
        )

    @property
    def data_bytes(self) -> int:
        return sum(job.data_bytes for job in self.jobs)

    @property
    def read_bytes(self) -> int:
        """Source bytes that the outputs need; what a batch shares counts for each of its files."""
        return sum(job.read_bytes for job in self.jobs)

    @property
    def step_bytes(self) -> int:
        return max((job.step_bytes for job in self.jobs), default=0)

    @property
    def write_bytes(self) -> int:
        """Estimate of the bytes on disk, headers included."""
        return sum(job.size_estimate for job in self.jobs)

    def batches(self) -> list[tuple[FileJob, ...]]:
        """The units of work: files written together, in order."""
        grouped: dict[str, list[FileJob]] = {}
        for number, job in enumerate(self.jobs):
            grouped.setdefault(job.batch or f"\0{number}", []).append(job)
        return [tuple(jobs) for jobs in grouped.values()]

    def select(self, keep: Callable[[FileJob], bool]) -> tuple[FileJob, ...]:
        return tuple(job for job in self.jobs if keep(job))

    def as_json(self) -> dict[str, Any]:
        """The whole plan without its steps, as `--dry-run --json` prints it."""
        return {
            "id": self.id,
            "files": [
                {"name": j.path, "tensors": sum(1 for _ in j.outputs()), "bytes": j.data_bytes} for j in self.jobs
            ],
            "bytes_read": self.read_bytes,
            "bytes_written": self.write_bytes,
            "step_memory_bytes": self.step_bytes,
        }


def pack(items: Iterable[tuple[Label, Item, int]], max_bytes: int) -> Iterator[tuple[Label, list[Item], int]]:
    """Cut (label, item, bytes) into files: (label, items, bytes), in order.

    Consecutive items with equal labels share files of at most `max_bytes`; one item larger than that is alone in its
    file. What must stay together is one item.
    """
    for label, group in groupby(items, key=lambda entry: entry[0]):
        held: list[Item] = []
        size = 0
        for _, item, nbytes in group:
            if held and size + nbytes > max_bytes:
                yield label, held, size
                held, size = [], 0
            held.append(item)
            size += nbytes
        if held:
            yield label, held, size


__all__ = [
    "Applied",
    "Compute",
    "Copy",
    "FileJob",
    "LazySteps",
    "Literal",
    "Plan",
    "Region",
    "Step",
    "TensorOut",
    "Transform",
    "Zeros",
    "carry",
    "file_job",
    "pack",
    "whole",
]
