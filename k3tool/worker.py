"""One worker's loop: the files of one batch, each written front to back once, from bounded reused buffers.

Ranges that are whole go through one buffer (read, hash, write); strided ranges are read as whole rows in blocks and
cut in memory, once for all files of the batch that want a cut of the same tensor. No more than the buffers, the inputs
and outputs of one transform, and the inputs of the next, is ever held.
"""

from __future__ import annotations

import hashlib
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy

from k3tool.checkpoint.header import build_header
from k3tool.checkpoint.ranges import Range, Reader
from k3tool.checkpoint.table import Tensors
from k3tool.checkpoint.writer import AtomicFile
from k3tool.disk import make_folder
from k3tool.plan import Compute, Copy, FileJob, Literal, Region, Step, Zeros
from k3tool.transform.base import AHEAD_BYTES, Blocks

COPY_BYTES = 512 << 10  # read, hashed and written while it is in the processor's cache
LOCAL_GAP = 32 << 10  # between wanted rows of a local file: nearer than this, reading through is cheaper than seeking


class Stopped(Exception):
    """Another worker failed or the user interrupted; what was in flight is dropped."""


class Sink(Protocol):
    """Takes the bytes of one output in order."""

    def write(self, data: Any) -> object: ...


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

    def spans(self, steps: Iterator[Step]) -> Iterator[Range]:
        """The file ranges from which each region comes, first to last byte, in order."""
        for step in steps:
            for region in step.needs:
                place = self._tensors.locate(region.tensor)
                blocks = region.blocks
                start = place.offset + blocks.offset
                yield place.shard, start, start + max(0, blocks.rows - 1) * blocks.pitch + blocks.width

    def run(self, sinks: Sequence[Sink], steps: Sequence[Step], measured: Sequence[list[Any]]) -> None:
        """One step for each sink. Steps that cut the same tensor read it once."""
        for members in _shared(steps):
            first = steps[members[0]]
            if len(members) > 1:
                self._scatter([(sinks[index], steps[index].needs[0]) for index in members])
            elif isinstance(first, Copy):
                self._copy(sinks[members[0]], first)
            else:
                self._compute(sinks[members[0]], first, measured[members[0]])

    def _put(self, sink: Sink, data: Any) -> None:
        if self._stop.is_set():
            raise Stopped
        sink.write(data)
        self._advanced(len(data))

    # Copies

    def _copy(self, sink: Sink, step: Copy) -> None:
        rows = [step.rows(member) for member in step.members]
        if len(step.members) == 1 or rows[0].rows == 1:
            for member in step.members:
                self._copy_member(sink, member, step)
        else:
            self._interleave(sink, step, rows)

    def _copy_member(self, sink: Sink, member: Region | Zeros | Literal, step: Copy) -> None:
        if isinstance(member, Literal):
            self._put(sink, member.data)
        elif isinstance(member, Zeros):
            self._zeros(sink, step.rows(member).width)
        elif member.blocks.rows == 1:
            place = self._tensors.locate(member.tensor)
            self._copy_range(sink, place.shard, place.offset + member.blocks.offset, member.blocks.width)
        else:
            self._scatter([(sink, member)])

    def _copy_range(self, sink: Sink, shard: str, offset: int, length: int) -> None:
        buffer = memoryview(self._in)[:COPY_BYTES]
        while length:
            block = buffer[: min(length, len(buffer))]
            self._reader.read_into(shard, offset, block)
            self._put(sink, block)
            offset, length = offset + len(block), length - len(block)

    def _zeros(self, sink: Sink, length: int) -> None:
        while length:
            block = bytes(min(length, len(self._in)))
            self._put(sink, block)
            length -= len(block)

    def _scatter(self, wanted: Sequence[tuple[Sink, Region]]) -> None:
        """Cuts of one tensor's rows, or the same range, into several files; the tensor is read once, in row blocks."""
        region = wanted[0][1]
        place = self._tensors.locate(region.tensor)
        cuts = [cut.blocks for _, cut in wanted]
        if cuts[0].rows == 1:  # the same plain range for all
            self._fan_out([sink for sink, _ in wanted], place.shard, place.offset + cuts[0].offset, cuts[0].width)
            return
        first = min(cut.offset for cut in cuts)
        span = max(cut.offset + cut.width for cut in cuts) - first  # bytes of a row that someone wants
        pitch, rows = cuts[0].pitch, cuts[0].rows
        by_row = span > len(self._in) or (pitch - span > LOCAL_GAP and self._reader.is_local)
        if by_row:
            self._scatter_rows([sink for sink, _ in wanted], place.shard, place.offset, cuts)
            return
        done = 0
        while done < rows:
            some = max(1, min(rows - done, (len(self._in) - span) // pitch + 1))
            block = memoryview(self._in)[: (some - 1) * pitch + span]
            self._reader.read_into(place.shard, place.offset + first + done * pitch, block)
            for (sink, _), cut in zip(wanted, cuts, strict=True):
                self._put(sink, self._cut(block, cut.offset - first, cut.width, pitch, some))
            done += some

    def _cut(self, block: memoryview, offset: int, width: int, pitch: int, rows: int) -> memoryview:
        source = numpy.frombuffer(block, dtype=numpy.uint8)
        view = numpy.lib.stride_tricks.as_strided(source[offset:], (rows, width), (pitch, 1), writeable=False)
        out = numpy.frombuffer(self._out, dtype=numpy.uint8, count=rows * width)
        numpy.copyto(out.reshape(rows, width), view)
        return memoryview(self._out)[: rows * width]

    def _fan_out(self, sinks: Sequence[Sink], shard: str, offset: int, length: int) -> None:
        buffer = memoryview(self._in)[:COPY_BYTES]
        while length:
            block = buffer[: min(length, len(buffer))]
            self._reader.read_into(shard, offset, block)
            for sink in sinks:
                self._put(sink, block)
            offset, length = offset + len(block), length - len(block)

    def _scatter_rows(self, sinks: Sequence[Sink], shard: str, base: int, cuts: Sequence[Blocks]) -> None:
        """Row by row, for rows so wide or so far apart that a block of them would be mostly waste."""
        for row in range(cuts[0].rows):
            for sink, cut in zip(sinks, cuts, strict=True):
                self._copy_range(sink, shard, base + cut.offset + row * cut.pitch, cut.width)

    def _interleave(self, sink: Sink, step: Copy, members: Sequence[Blocks]) -> None:
        """Several members side by side in every row of the output: whole row blocks, assembled in memory."""
        width = sum(member.width for member in members)
        rows = members[0].rows if width else 0
        if width > len(self._out):
            for row in range(rows):
                for member, blocks in zip(step.members, members, strict=True):
                    self._member_row(sink, member, blocks, row)
            return
        done = 0
        while done < rows:
            some = min(rows - done, len(self._out) // width)
            out = numpy.frombuffer(self._out, dtype=numpy.uint8, count=some * width).reshape(some, width)
            column = 0
            for member, blocks in zip(step.members, members, strict=True):
                self._fill(out[:, column : column + blocks.width], member, blocks, done)
                column += blocks.width
            self._put(sink, memoryview(self._out)[: some * width])
            done += some

    def _member_row(self, sink: Sink, member: Region | Zeros | Literal, blocks: Blocks, row: int) -> None:
        if isinstance(member, Region):
            place = self._tensors.locate(member.tensor)
            self._copy_range(sink, place.shard, place.offset + blocks.offset + row * blocks.pitch, blocks.width)
        else:
            self._zeros(sink, blocks.width)

    def _fill(self, out: Any, member: Region | Zeros | Literal, blocks: Blocks, row: int) -> None:
        if not isinstance(member, Region):
            out[...] = 0
            return
        place = self._tensors.locate(member.tensor)
        rows, width = out.shape
        done = 0
        while done < rows:
            some = max(1, min(rows - done, (len(self._in) - width) // blocks.pitch + 1))
            block = memoryview(self._in)[: (some - 1) * blocks.pitch + width]
            start = place.offset + blocks.offset + (row + done) * blocks.pitch
            self._reader.read_into(place.shard, start, block)
            source = numpy.frombuffer(block, dtype=numpy.uint8)
            view = numpy.lib.stride_tricks.as_strided(source, (some, width), (blocks.pitch, 1), writeable=False)
            out[done : done + some] = view
            done += some

    # Transforms

    def _compute(self, sink: Sink, step: Compute, measured: list[Any]) -> None:
        inputs = self._ahead.take(step)
        if isinstance(self.following, Compute) and self.following.input_bytes <= AHEAD_BYTES:
            self._ahead.start(self.following)
        applied = step.transform.apply(inputs)
        for output, data in zip(step.outputs, applied.outputs, strict=True):
            view = memoryview(data).cast("B")
            assert len(view) == output.nbytes, f"{output.name}: {len(view)} bytes made, {output.nbytes} declared"
            self._put(sink, view)
        if applied.measured is not None:
            measured.append(applied.measured)

    def _inputs(self, regions: Sequence[Region], room: Any) -> list[Any]:
        starts = [0, *itertools.accumulate(_aligned(region.nbytes) for region in regions)]
        arrays = [room[start : start + region.nbytes] for region, start in zip(regions, starts, strict=False)]
        for region, array in zip(regions, arrays, strict=True):
            self._whole(region, array)
        return arrays

    def _whole(self, region: Region, array: Any) -> None:
        blocks = region.blocks
        if blocks.rows > 1:
            self._fill(array.reshape(blocks.rows, blocks.width), region, blocks, 0)
            return
        place = self._tensors.locate(region.tensor)
        self._reader.read_into(place.shard, place.offset + blocks.offset, memoryview(array))


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
    """Writes one batch of files at a time into `dest`."""

    def __init__(
        self,
        tensors: Tensors,
        dest: Path,
        *,
        buffer_bytes: int,
        stop: threading.Event,
        advanced: Callable[[int], None],
    ) -> None:
        super().__init__(tensors, buffer_bytes=buffer_bytes, stop=stop, advanced=advanced)
        self._dest = dest

    def write(self, jobs: Sequence[FileJob]) -> list[Finished]:
        """Write the files of one batch. On any error their partial files are removed and nothing has its final name.

        Raises CapacityError for a full disk, CheckpointMissing and CheckpointCorrupt for a source that is short.
        """
        files: list[AtomicFile] = []
        measured: list[list[Any]] = [[] for _ in jobs]
        self._reader.expect(self.spans(step for steps in _in_step(jobs) for step in steps))
        with ExitStack() as stack:
            for job in jobs:
                path = self._dest / job.path
                make_folder(path.parent)
                files.append(stack.enter_context(AtomicFile(path)))
                files[-1].write(head_of(job))
            for steps, following in _with_next(_in_step(jobs)):
                self.following = following[0] if following and len(following) == 1 else None
                self.run(files, steps, measured)
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


def _in_step(jobs: Sequence[FileJob]) -> Iterator[tuple[Step, ...]]:
    return zip(*(job.steps for job in jobs), strict=True)


def _with_next(steps: Iterator[tuple[Step, ...]]) -> Iterator[tuple[tuple[Step, ...], tuple[Step, ...] | None]]:
    held = next(steps, None)
    while held is not None:
        following = next(steps, None)
        yield held, following
        held = following


def head_of(job: FileJob) -> bytes:
    """The first bytes of a file, before its tensors."""
    if job.head is not None:
        return job.head
    return build_header(((o.name, o.dtype, o.shape) for o in job.outputs()), job.metadata)[0]


def _shared(steps: Sequence[Step]) -> Iterator[list[int]]:
    """Indices of steps that are to be done in one reading: cuts of the same rows, or the very same range."""
    if len(steps) == 1:
        yield [0]
        return
    groups: dict[Any, list[int]] = {}
    for index, step in enumerate(steps):
        key: Any = index
        if isinstance(step, Copy) and len(step.members) == 1 and isinstance(step.members[0], Region):
            region = step.members[0]
            blocks = region.blocks
            if blocks.rows == 1:
                key = (region.tensor, blocks)
            else:
                key = (region.tensor, blocks.pitch, blocks.rows)
        groups.setdefault(key, []).append(index)
    yield from groups.values()


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
