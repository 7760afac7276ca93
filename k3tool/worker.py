"""One worker's loop: the files of one batch, each written front to back once, from bounded reused buffers.

Ranges that are whole go through one buffer (read, hash, write); strided ranges are read as whole rows in blocks and
cut in memory. Whatever several files of the batch want, they get from one reading and one transform. No more than the
buffers, the inputs and outputs of one transform, and the inputs of the next, is ever held.
"""

from __future__ import annotations

import hashlib
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy

from k3tool.checkpoint.header import build_header
from k3tool.checkpoint.ranges import Range, Reader
from k3tool.checkpoint.table import Tensors
from k3tool.checkpoint.writer import AtomicFile
from k3tool.disk import make_folder
from k3tool.lockstep import Span, Work, is_woven, lockstep, ranges, spans, works
from k3tool.plan import Compute, Copy, FileJob, Literal, Region, Step, Zeros
from k3tool.transform.base import AHEAD_BYTES, Blocks

COPY_BYTES = 512 << 10  # read, hashed and written while it is in the processor's cache
LOCAL_GAP = 32 << 10  # between wanted rows of a local file: nearer than this, reading through is cheaper than seeking


class Stopped(Exception):
    """Another worker failed or the user interrupted; what was in flight is dropped."""


class Sink(Protocol):
    """Takes the bytes of one output in order."""

    def write(self, data: Any) -> object: ...


Sinks = Sequence[Sink]
Item = TypeVar("Item")


@dataclass
class Finished:
    """One output file under its final name."""

    path: str
    size: int
    sha256: str
    measured: list[Any] = field(default_factory=list)


class StepRunner:
    """Buffers and a reader: makes the bytes of steps and hands them to sinks."""

    def __init__(
        self, tensors: Tensors, *, buffer_bytes: int, stop: threading.Event, advanced: Callable[[int], None]
    ) -> None:
        self._tensors = tensors
        self._reader = Reader(tensors.source, buffer_bytes)
        self._in = bytearray(buffer_bytes)
        self._out = bytearray(buffer_bytes)
        self.following: Step | None = None  # its inputs may be read while the one before it computes
        self._ahead = _Ahead(self._inputs)
        self._stop = stop
        self._advanced = advanced

    @property
    def read_bytes(self) -> int:
        """Source bytes read so far."""
        return self._reader.read_bytes

    def close(self) -> None:
        self._ahead.close()
        self._reader.close()

    def spans(self, works: Iterator[Work]) -> Iterator[Range]:
        """The file ranges that are read, first to last byte, in order."""
        for work in works:
            for tensor, start, stop in ranges(work):
                place = self._tensors.locate(tensor)
                yield place.shard, place.offset + start, place.offset + stop

    def run(self, sinks: Sequence[Sink], steps: Sequence[Step], measured: Sequence[list[Any]]) -> None:
        """One step of one place for each sink. What they share is read and made once, and measured for the first."""
        for work in works(steps):
            wanted = [(step, [sinks[number] for number in numbers]) for step, numbers in work.wanted]
            self._do(wanted, measured[work.wanted[0][1][0]])

    def _do(self, wanted: Sequence[tuple[Step, Sinks]], measured: list[Any]) -> None:
        first = wanted[0][0]
        if isinstance(first, Compute):
            self._compute(wanted, measured)
        elif is_woven(first):
            self._weave(wanted)
        else:
            for step, sinks in wanted:
                self._copy(sinks, step)

    def _put(self, sinks: Sinks, data: Any) -> None:
        """The same bytes into each."""
        for sink in sinks:
            if self._stop.is_set():
                raise Stopped
            sink.write(data)
            self._advanced(len(data))

    # Copies

    def _copy(self, sinks: Sinks, step: Copy) -> None:
        for member in step.members:
            if isinstance(member, Literal):
                self._put(sinks, member.data)
            elif isinstance(member, Zeros):
                self._zeros(sinks, step.rows(member).width)
            else:
                self._copy_range(sinks, member.tensor, member.blocks.offset, member.blocks.width)

    def _copy_range(self, sinks: Sinks, tensor: str, offset: int, length: int) -> None:
        place = self._tensors.locate(tensor)
        offset += place.offset
        buffer = memoryview(self._in)[:COPY_BYTES]
        while length:
            block = buffer[: min(length, len(buffer))]
            self._reader.read_into(place.shard, offset, block)
            self._put(sinks, block)
            offset, length = offset + len(block), length - len(block)

    def _zeros(self, sinks: Sinks, length: int) -> None:
        while length:
            block = bytes(min(length, len(self._in)))
            self._put(sinks, block)
            length -= len(block)

    def _weave(self, wanted: Sequence[tuple[Step, Sinks]]) -> None:
        """Outputs whose rows are cut from, or joined of, rows of source tensors: blocks of rows, each read once and
        assembled in memory for one output after the other."""
        outputs = [(step, [step.rows(member) for member in step.members], sinks) for step, sinks in wanted]
        count = outputs[0][1][0].rows
        width = max(sum(member.width for member in members) for _, members, _ in outputs)
        found = {
            tensor: _Rows(span, self._steps_over(span)) for tensor, span in spans(step for step, _ in wanted).items()
        }
        if width > len(self._out) or sum(rows.width for rows in found.values()) > len(self._in):
            self._row_by_row(outputs, count)
            return
        held = min(len(self._out) // max(1, width), _fitting(found.values(), len(self._in)))
        for first in range(0, count, held):
            some = min(held, count - first)
            self._read_rows(found, first, some)
            for step, members, sinks in outputs:
                self._put(sinks, self._assemble(step, members, found, some))

    def _steps_over(self, span: Span) -> bool:
        """Whether what lies between the wanted bytes of two rows is left out: where reading through it takes longer."""
        return self._reader.is_local and span.pitch - (span.stop - span.start) > LOCAL_GAP

    def _read_rows(self, found: Mapping[str, _Rows], first: int, some: int) -> None:
        """The next `some` rows of each tensor, one tensor after the other in the buffer."""
        at = 0
        for tensor, rows in found.items():
            place = self._tensors.locate(tensor)
            start = place.offset + rows.span.start + first * rows.span.pitch
            length = rows.bytes_of(some)
            rows.data = memoryview(self._in)[at : at + length]
            at += length
            if not rows.apart:
                self._reader.read_into(place.shard, start, rows.data)
                continue
            for row in range(some):
                piece = rows.data[row * rows.width : (row + 1) * rows.width]
                self._reader.read_into(place.shard, start + row * rows.span.pitch, piece)

    def _assemble(self, step: Any, members: Sequence[Blocks], found: Mapping[str, _Rows], some: int) -> memoryview:
        width = sum(member.width for member in members)
        out = numpy.frombuffer(self._out, dtype=numpy.uint8, count=some * width).reshape(some, width)
        column = 0
        for member, blocks in zip(step.members, members, strict=True):
            into = out[:, column : column + blocks.width]
            into[...] = found[member.tensor].cut(blocks, some) if isinstance(member, Region) else 0
            column += blocks.width
        return memoryview(self._out)[: some * width]

    def _row_by_row(self, outputs: Sequence[tuple[Any, Sequence[Blocks], Sinks]], count: int) -> None:
        """For rows so wide that not one fits into the buffer."""
        for row in range(count):
            for step, members, sinks in outputs:
                for member, blocks in zip(step.members, members, strict=True):
                    if isinstance(member, Region):
                        self._copy_range(sinks, member.tensor, blocks.offset + row * blocks.pitch, blocks.width)
                    else:
                        self._zeros(sinks, blocks.width)

    # Transforms

    def _compute(self, wanted: Sequence[tuple[Step, Sinks]], measured: list[Any]) -> None:
        first = wanted[0][0]
        assert isinstance(first, Compute)
        inputs = self._ahead.take(first)
        if isinstance(self.following, Compute) and self.following.input_bytes <= AHEAD_BYTES:
            self._ahead.start(self.following)
        applied = first.transform.apply(inputs)
        for step, sinks in wanted:
            assert isinstance(step, Compute)
            kept = applied.outputs if step.keep is None else step.keep.take(applied.outputs)
            for output, data in zip(step.outputs, kept, strict=True):
                view = memoryview(data).cast("B")
                assert len(view) == output.nbytes, f"{output.name}: {len(view)} bytes made, {output.nbytes} declared"
                self._put(sinks, view)
        if applied.measured is not None:
            measured.append(applied.measured)

    def _inputs(self, regions: Sequence[Region], room: Any) -> list[Any]:
        starts = [0, *itertools.accumulate(_aligned(region.nbytes) for region in regions)]
        arrays = [room[start : start + region.nbytes] for region, start in zip(regions, starts, strict=False)]
        for region, array in zip(regions, arrays, strict=True):
            self._whole(region, array)
        return arrays

    def _whole(self, region: Region, array: Any) -> None:
        """All of a region in memory, through no other buffer: another step may be at work in those."""
        blocks = region.blocks
        place = self._tensors.locate(region.tensor)
        for row in range(blocks.rows):
            piece = memoryview(array)[row * blocks.width : (row + 1) * blocks.width]
            self._reader.read_into(place.shard, place.offset + blocks.offset + row * blocks.pitch, piece)


@dataclass
class _Rows:
    """Wanted rows of one source tensor. apart: what lies between them is left out. data: those in memory."""

    span: Span
    apart: bool
    data: Any = b""

    @property
    def width(self) -> int:
        """Wanted bytes of one row, first to last."""
        return self.span.stop - self.span.start

    @property
    def pitch(self) -> int:
        """Bytes from one row in memory to the next."""
        return self.width if self.apart else self.span.pitch

    def bytes_of(self, rows: int) -> int:
        return (rows - 1) * self.pitch + self.width

    def cut(self, blocks: Blocks, rows: int) -> Any:
        """[rows, width] of the rows in memory."""
        source = numpy.frombuffer(self.data, dtype=numpy.uint8)[blocks.offset - self.span.start :]
        return numpy.lib.stride_tricks.as_strided(source, (rows, blocks.width), (self.pitch, 1), writeable=False)


def _fitting(found: Iterable[_Rows], room: int) -> int:
    """How many rows of all of them fit into `room` bytes, at least one."""
    held = list(found)
    return 1 + (room - sum(rows.width for rows in held)) // max(1, sum(rows.pitch for rows in held))


class _Ahead:
    """Reads the inputs of one computed step while those before it are worked on, into two buffers in turn: fresh memory
    for every step would cost more than the reading, and a disk that waits for arithmetic is idle half of the time."""

    def __init__(self, read: Callable[[Sequence[Region], Any], list[Any]]) -> None:
        self._read = read
        self._rooms = [numpy.empty(0, dtype=numpy.uint8), numpy.empty(0, dtype=numpy.uint8)]
        self._pool: ThreadPoolExecutor | None = None
        self._coming: tuple[Compute, Future[list[Any]]] | None = None

    def start(self, step: Compute) -> None:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="ahead")
        self._coming = step, self._pool.submit(self._read, step.needs, self._room(step.needs))

    def take(self, step: Compute) -> list[Any]:
        """The inputs of a step, one array for each region, good until the step after the next is started."""
        coming, self._coming = self._coming, None
        if coming is None:
            return self._read(step.needs, self._room(step.needs))
        assert coming[0] is step, "steps are taken in the order in which they were started"
        return coming[1].result()

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()

    def _room(self, regions: Sequence[Region]) -> Any:
        """The buffer that was used the longer ago, large enough; one of its own for what is large."""
        size = sum(_aligned(region.nbytes) for region in regions)
        if size > AHEAD_BYTES:
            return numpy.empty(size, dtype=numpy.uint8)
        self._rooms.reverse()
        if len(self._rooms[0]) < size:
            self._rooms[0] = numpy.empty(0, dtype=numpy.uint8)
            self._rooms[0] = numpy.empty(size, dtype=numpy.uint8)
        return self._rooms[0]


def _aligned(size: int) -> int:
    """Room for `size` bytes, in whole cache lines."""
    return -(-size // 64) * 64


class Worker(StepRunner):
    """Writes one batch of files at a time into `dest`. bridge: see `Reader.expect`."""

    def __init__(
        self,
        tensors: Tensors,
        dest: Path,
        *,
        buffer_bytes: int,
        stop: threading.Event,
        advanced: Callable[[int], None],
        bridge: bool = True,
    ) -> None:
        super().__init__(tensors, buffer_bytes=buffer_bytes, stop=stop, advanced=advanced)
        self._dest = dest
        self._bridge = bridge

    def write(self, jobs: Sequence[FileJob]) -> list[Finished]:
        """Write the files of one batch. On any error their partial files are removed and nothing has its final name.

        Raises CapacityError for a full disk, CheckpointMissing and CheckpointCorrupt for a source that is short.
        """
        files: list[AtomicFile] = []
        measured: list[list[Any]] = [[] for _ in jobs]
        coming = (work for steps in lockstep(jobs) for work in works([step for _, step in steps]))
        self._reader.expect(self.spans(coming), bridge=self._bridge)
        with ExitStack() as stack:
            for job in jobs:
                path = self._dest / job.path
                make_folder(path.parent)
                files.append(stack.enter_context(AtomicFile(path)))
                files[-1].write(head_of(job))
            for members, following in _with_next(lockstep(jobs)):
                self.following = following[0][1] if following else None
                numbers = [number for number, _ in members]
                steps = [step for _, step in members]
                self.run([files[n] for n in numbers], steps, [measured[n] for n in numbers])
            self._reader.check_unchanged()
        return [
            Finished(job.path, file.size, file.sha256, values)
            for job, file, values in zip(jobs, files, measured, strict=True)
        ]


class StepDigester(StepRunner):
    """Digests what steps would write, for comparing."""

    def digests(self, steps: Sequence[Step]) -> list[bytes]:
        """Of what each step makes; what they share is read once."""
        found = [_Digest() for _ in steps]
        self.run(found, steps, [[] for _ in steps])
        return [digest.value.digest() for digest in found]


class _Digest:
    def __init__(self) -> None:
        self.value = hashlib.sha256()

    def write(self, data: Any) -> None:
        self.value.update(data)


def _with_next(groups: Iterator[Item]) -> Iterator[tuple[Item, Item | None]]:
    held = next(groups, None)
    while held is not None:
        following = next(groups, None)
        yield held, following
        held = following


def head_of(job: FileJob) -> bytes:
    """The first bytes of a file, before its tensors."""
    if job.head is not None:
        return job.head
    return build_header(((o.name, o.dtype, o.shape) for o in job.outputs()), job.metadata)[0]


def run_threads(loop: Callable[[], None], count: int, stop: threading.Event) -> None:
    """Run `loop` in `count` threads to the end; an interrupt sets `stop` and waits for them."""
    ended: list[threading.Event] = []

    def run(mine: threading.Event) -> None:
        try:
            loop()
        finally:
            mine.set()

    try:
        for number in range(count):
            mine = threading.Event()
            ended.append(mine)
            try:
                threading.Thread(target=run, args=(mine,), name=f"worker-{number}", daemon=True).start()
            except RuntimeError:  # the system gives no more threads
                ended.pop()
                raise
        _wait(ended)
    except BaseException:
        stop.set()
        _wait(ended)
        raise


def _wait(ended: Sequence[threading.Event]) -> None:
    """Not by joining threads: a join that was interrupted takes its thread for ended (Python 3.10 to 3.12)."""
    for event in ended:
        event.wait()
