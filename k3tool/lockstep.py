"""Files that are written together: which of their steps come at the same time, and what those share.

What several ranks hold (experts' neighbours under EP, cuts of one tensor under TP, tied embeddings under PP) has the same
place in the order of all tensors. A batch is walked through in that order, so that each tensor is read once for all
files that want it, and each transform applied once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from heapq import merge
from itertools import groupby, pairwise, repeat
from operator import itemgetter
from typing import Any, NamedTuple

from k3tool.plan import FileJob
from k3tool.transform.base import Compute, Copy, Region, Step

_PLACE = itemgetter(0)


def lockstep(jobs: Sequence[FileJob]) -> Iterator[list[tuple[int, Step]]]:
    """(number of the job, step) of everything in one place, place by place."""
    if len(jobs) == 1:
        for step in jobs[0].steps:
            yield [(0, step)]
        return
    streams = [zip(_places(job), repeat(number), job.steps, strict=False) for number, job in enumerate(jobs)]
    for _, run in groupby(merge(*streams, key=_PLACE), key=_PLACE):
        yield [(number, step) for _, number, step in run]


def _places(job: FileJob) -> Sequence[int]:
    return job.places if len(job.places) else range(len(job.steps))


def neighbours(jobs: Sequence[FileJob]) -> list[list[FileJob]]:
    """Files of one batch by the tensors that they are made of: those of one list hold shares of the same."""
    alike: dict[Any, list[FileJob]] = {}
    for job in jobs:
        alike.setdefault(tuple(job.places) or job.path, []).append(job)
    return list(alike.values())


def divide(jobs: Sequence[FileJob], count: int) -> list[tuple[FileJob, ...]]:
    """One batch as at most `count` smaller ones of about as many files, neighbours together. What files of different ones
    share is read once for each."""
    alike = neighbours(jobs)
    count = min(count, len(alike))
    cuts = [len(alike) * number // count for number in range(count + 1)]
    return [tuple(job for held in alike[low:high] for job in held) for low, high in pairwise(cuts)]


def limit(jobs: Sequence[FileJob], most: int) -> list[tuple[FileJob, ...]]:
    """One batch as several of at most `most` files."""
    found = divide(jobs, -(-len(jobs) // most))
    return [held[low : low + most] for held in found for low in range(0, len(held), most)]


class Work(NamedTuple):
    """Steps that are done in one reading: (step, numbers of those that want its outcome), each step once.

    One `Compute` for all of `wanted`, or copies that are woven from the same rows, or one copy.
    """

    wanted: list[tuple[Step, list[int]]]

    @property
    def transforms(self) -> bool:
        return isinstance(self.wanted[0][0], Compute)


def works(steps: Sequence[Step]) -> list[Work]:
    """What is to be done for some steps of one place, each named by its position in `steps`."""
    if len(steps) == 1:
        return [Work([(steps[0], [0])])]
    alike: dict[Step, list[int]] = {}
    for number, step in enumerate(steps):
        alike.setdefault(step, []).append(number)
    groups: dict[Any, Work] = {}
    for step, numbers in alike.items():
        groups.setdefault(_group(step, numbers[0]), Work([])).wanted.append((step, numbers))
    return list(groups.values())


def _group(step: Step, number: int) -> Any:
    if isinstance(step, Compute):
        return step.needs, step.transform
    return step.rows(step.members[0]).rows if is_woven(step) else ("alone", number)


def is_woven(step: Copy) -> bool:
    """Whether its bytes lie in many rows, of which it takes a part or which it joins."""
    if len(step.members) < 2:
        return bool(step.members) and isinstance(step.members[0], Region) and step.members[0].blocks.rows > 1
    return step.rows(step.members[0]).rows > 1


class Span(NamedTuple):
    """Bytes [start, stop) of every row of a source tensor, `rows` of them, one every `pitch` bytes."""

    start: int
    stop: int
    pitch: int
    rows: int


def spans(steps: Iterable[Step]) -> dict[str, Span]:
    """What is read of each source tensor for copies that are woven: all that lies between the first and the last wanted
    byte of a row."""
    found: dict[str, Span] = {}
    for step in steps:
        for region in step.needs:
            rows = region.rows
            had = found.get(region.tensor)
            start, stop = rows.offset, rows.offset + rows.width
            if had is not None:
                start, stop = min(start, had.start), max(stop, had.stop)
            found[region.tensor] = Span(start, stop, rows.pitch, rows.rows)
    return found


def ranges(work: Work) -> Iterator[tuple[str, int, int]]:
    """(source tensor, first byte, byte after the last) in the order in which they are read."""
    first = work.wanted[0][0]
    if isinstance(first, Copy) and is_woven(first):
        for tensor, span in spans(step for step, _ in work.wanted).items():
            yield tensor, span.start, (span.rows - 1) * span.pitch + span.stop
        return
    for step, _ in work.wanted[: 1 if work.transforms else None]:
        for region in step.needs:
            blocks = region.blocks
            yield region.tensor, blocks.offset, blocks.offset + max(0, blocks.rows - 1) * blocks.pitch + blocks.width


def reads_of(jobs: Sequence[FileJob]) -> int:
    """Source bytes that writing these files of one batch together reads.

    What has the same place is read once: whole where it is stored or converted whole, all rows where rows are cut, and of
    whole rows that are dealt out those of each share that is asked for."""
    if not jobs[0].batch:
        return sum(job.read_bytes for job in jobs)
    shares: dict[int, set[int]] = {}
    first: dict[int, tuple[FileJob, int]] = {}
    for job in jobs:
        for index, place in enumerate(_places(job)):
            shares.setdefault(place, set()).add(job.share)
            first.setdefault(place, (job, index))
    return sum(_read(job.steps[index].needs, len(shares[place])) for place, (job, index) in first.items())


def _read(needs: Iterable[Region], shares: int) -> int:
    total = 0
    for region in needs:
        blocks = region.blocks
        if blocks.rows > 1:
            total += (blocks.rows - 1) * blocks.pitch + (blocks.pitch if shares > 1 else blocks.width)
        else:
            whole = region._replace(start=0, stop=(region.shape or (1,))[region.axis]).nbytes
            total += min(whole, shares * blocks.width)
    return total
