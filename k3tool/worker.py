"""One worker's loop: the files of one batch, each written front to back once, from bounded reused buffers.

Ranges that are whole go through one buffer (read, hash, write); strided ranges are read as whole rows in blocks and
cut in memory, once for all files of the batch that want a cut of the same tensor. Of a remote source, neighbouring
ranges become one request. No more than the buffers, and the inputs and outputs of one transform, is ever held.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy

from k3tool.checkpoint.header import build_header
from k3tool.checkpoint.source import read_exactly
from k3tool.checkpoint.table import Tensors
from k3tool.checkpoint.writer import AtomicFile
from k3tool.errors import CheckpointCorrupt
from k3tool.plan import Compute, Copy, FileJob, Literal, Region, Step, Zeros
from k3tool.transform.base import Blocks

LOCAL_GAP = 32 << 10  # between wanted rows of a local file: nearer than this, reading through is cheaper than seeking
REMOTE_GAP = 1 << 20  # between wanted ranges of a remote file: nearer than this, one request is cheaper than two
OPEN_FILES = 16


class Stopped(Exception):
    """Another worker failed or the user interrupted; what was in flight is dropped."""


@dataclass
class Finished:
    """One output file under its final name."""

    path: str
    size: int
    sha256: str
    measured: list[Any] = field(default_factory=list)


class Reader:
    """Positional reads of one source for one worker: local files through kept descriptors, remote ones by windows."""

    def __init__(self, tensors: Tensors, buffer_bytes: int) -> None:
        self.tensors = tensors
        self.source = tensors.source
        self.read_bytes = 0
        self._open: dict[str, int] = {}
        self._seen: dict[str, tuple[Path, os.stat_result]] = {}
        self._windows: Iterator[tuple[str, int, int]] = iter(())
        self._window = ("", 0, memoryview(b""))
        self._buffer_bytes = buffer_bytes
        self._buffer: bytearray | None = None

    def expect(self, steps: Iterable[Step]) -> None:
        """Announce the steps of the next file, so that remote ranges can be merged into few requests."""
        self._windows = merge_ranges(self._spans(steps), self._buffer_bytes, REMOTE_GAP)
        self._window = ("", 0, memoryview(b""))

    def _spans(self, steps: Iterable[Step]) -> Iterator[tuple[str, int, int]]:
        for step in steps:
            for region in step.needs:
                place = self.tensors.locate(region.tensor)
                blocks = region.blocks
                start = place.offset + blocks.offset
                yield place.shard, start, start + (blocks.rows - 1) * blocks.pitch + blocks.width

    def read_into(self, shard: str, offset: int, buffer: memoryview) -> None:
        """Fill `buffer`. Raises CheckpointMissing, CheckpointCorrupt (short data)."""
        path = self.source.local_path(shard)
        if path is not None:
            read_exactly(self._descriptor(shard, path), offset, buffer, where=str(path))
            self.read_bytes += len(buffer)
            return
        while len(buffer):
            got = self._from_window(shard, offset, buffer)
            offset, buffer = offset + got, buffer[got:]

    def _descriptor(self, shard: str, path: Path) -> int:
        descriptor = self._open.pop(shard, None)
        if descriptor is None:
            if len(self._open) >= OPEN_FILES:
                os.close(self._open.pop(next(iter(self._open))))
            try:
                descriptor = os.open(path, os.O_RDONLY)
            except OSError:
                self.source.read(shard, 0, 0)  # says what is wrong in the source's own words
                raise
            self._seen.setdefault(shard, (path, os.fstat(descriptor)))
        self._open[shard] = descriptor
        return descriptor

    def check_unchanged(self) -> None:
        """Raises CheckpointCorrupt where a local file read since the last call has become another meanwhile."""
        for shard, (path, before) in self._seen.items():
            now = path.stat()
            if (now.st_size, now.st_mtime_ns, now.st_ino) != (before.st_size, before.st_mtime_ns, before.st_ino):
                raise CheckpointCorrupt(
                    f"{path} changed while it was being read ({before.st_size} bytes, now {now.st_size})",
                    hint="let the source rest, then run the same command again",
                    shard=shard,
                )
        self._seen = {shard: self._seen[shard] for shard in self._open}

    def _from_window(self, shard: str, offset: int, buffer: memoryview) -> int:
        name, start, data = self._window
        if name != shard or not start <= offset < start + len(data):
            self._fetch_window(shard, offset, len(buffer))
            name, start, data = self._window
        available = data[offset - start : offset - start + len(buffer)]
        buffer[: len(available)] = available
        return len(available)

    def _fetch_window(self, shard: str, offset: int, length: int) -> None:
        for name, start, end in self._windows:
            if name == shard and start <= offset < end:
                break
        else:  # not announced: read just that
            start, end = offset, offset + min(length, self._buffer_bytes)
        if self._buffer is None:
            self._buffer = bytearray(self._buffer_bytes)
        data = memoryview(self._buffer)[: end - start]
        self.source.read_into(shard, start, data)
        self.read_bytes += len(data)
        self._window = (shard, start, data)

    def close(self) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open.clear()


def merge_ranges(ranges: Iterable[tuple[str, int, int]], window_bytes: int, gap: int) -> Iterator[tuple[str, int, int]]:
    """Join consecutive (file, start, end) that follow each other within `gap` into windows of at most `window_bytes`.

    Every byte of every range is in a window, and windows come in the order of the ranges.
    """
    held: tuple[str, int, int] | None = None
    for name, start, end in ranges:
        if held and held[0] == name and held[1] <= start <= held[2] + gap and end <= held[1] + window_bytes:
            held = (name, held[1], max(held[2], end))
            continue
        if held:
            yield held
        while end - start > window_bytes:
            yield name, start, start + window_bytes
            start += window_bytes
        held = (name, start, end)
    if held:
        yield held


class Worker:
    """Buffers and a reader of its own; writes one batch of files at a time."""

    def __init__(
        self,
        tensors: Tensors,
        dest: Path,
        *,
        buffer_bytes: int,
        stop: threading.Event,
        advanced: Callable[[int], None],
    ) -> None:
        self.dest = dest
        self._reader = Reader(tensors, buffer_bytes)
        self._tensors = tensors
        self._in = bytearray(buffer_bytes)
        self._out = bytearray(buffer_bytes)
        self._stop = stop
        self._advanced = advanced

    @property
    def read_bytes(self) -> int:
        """Source bytes read so far."""
        return self._reader.read_bytes

    def close(self) -> None:
        self._reader.close()

    def write(self, jobs: Sequence[FileJob]) -> list[Finished]:
        """Write the files of one batch. On any error their partial files are removed and nothing has its final name.

        Raises CapacityError for a full disk, CheckpointMissing and CheckpointCorrupt for a source that is short.
        """
        files: list[AtomicFile] = []
        measured: list[list[Any]] = [[] for _ in jobs]
        self._reader.expect(step for steps in zip(*(job.steps for job in jobs), strict=True) for step in steps)
        with ExitStack() as stack:
            for job in jobs:
                path = self.dest / job.path
                path.parent.mkdir(parents=True, exist_ok=True)
                files.append(stack.enter_context(AtomicFile(path)))
                files[-1].write(self._head(job))
            for steps in zip(*(job.steps for job in jobs), strict=True):
                self._write_steps(files, steps, measured)
            self._reader.check_unchanged()
        return [
            Finished(job.path, file.size, file.sha256, values)
            for job, file, values in zip(jobs, files, measured, strict=True)
        ]

    def _head(self, job: FileJob) -> bytes:
        if job.head is not None:
            return job.head
        return build_header(((o.name, o.dtype, o.shape) for o in job.outputs()), job.metadata)[0]

    def _put(self, file: AtomicFile, data: Any) -> None:
        if self._stop.is_set():
            raise Stopped("stopped")
        file.write(data)
        self._advanced(len(data))

    def _write_steps(self, files: list[AtomicFile], steps: Sequence[Step], measured: list[list[Any]]) -> None:
        for members in _shared(steps):
            first = steps[members[0]]
            if len(members) > 1:
                assert isinstance(first, Copy)
                self._scatter([(files[index], steps[index].needs[0]) for index in members])
            elif isinstance(first, Copy):
                self._copy(files[members[0]], first)
            else:
                self._compute(files[members[0]], first, measured[members[0]])

    # Copies

    def _copy(self, file: AtomicFile, step: Copy) -> None:
        rows = [step.rows(member) for member in step.members]
        if len(step.members) == 1 or rows[0].rows == 1:
            for member in step.members:
                self._copy_member(file, member, step)
        else:
            self._interleave(file, step, rows)

    def _copy_member(self, file: AtomicFile, member: Region | Zeros | Literal, step: Copy) -> None:
        if isinstance(member, Literal):
            self._put(file, member.data)
        elif isinstance(member, Zeros):
            self._zeros(file, step.rows(member).width)
        elif member.blocks.rows == 1:
            place = self._tensors.locate(member.tensor)
            self._copy_range(file, place.shard, place.offset + member.blocks.offset, member.blocks.width)
        else:
            self._scatter([(file, member)])

    def _copy_range(self, file: AtomicFile, shard: str, offset: int, length: int) -> None:
        buffer = memoryview(self._in)
        while length:
            block = buffer[: min(length, len(buffer))]
            self._reader.read_into(shard, offset, block)
            self._put(file, block)
            offset, length = offset + len(block), length - len(block)

    def _zeros(self, file: AtomicFile, length: int) -> None:
        while length:
            block = bytes(min(length, len(self._in)))
            self._put(file, block)
            length -= len(block)

    def _scatter(self, wanted: Sequence[tuple[AtomicFile, Region]]) -> None:
        """Cuts of one tensor's rows, or the same range, into several files; the tensor is read once, in row blocks."""
        region = wanted[0][1]
        place = self._tensors.locate(region.tensor)
        cuts = [cut.blocks for _, cut in wanted]
        if cuts[0].rows == 1:  # the same plain range for all
            self._fan_out([file for file, _ in wanted], place.shard, place.offset + cuts[0].offset, cuts[0].width)
            return
        first = min(cut.offset for cut in cuts)
        span = max(cut.offset + cut.width for cut in cuts) - first  # bytes of a row that someone wants
        pitch, rows = cuts[0].pitch, cuts[0].rows
        by_row = span > len(self._in) or (pitch - span > LOCAL_GAP and self._reader.source.local_path("") is not None)
        if by_row:
            self._scatter_rows([file for file, _ in wanted], place.shard, place.offset, cuts)
            return
        done = 0
        while done < rows:
            some = max(1, min(rows - done, (len(self._in) - span) // pitch + 1))
            block = memoryview(self._in)[: (some - 1) * pitch + span]
            self._reader.read_into(place.shard, place.offset + first + done * pitch, block)
            for (file, _), cut in zip(wanted, cuts, strict=True):
                self._put(file, self._cut(block, cut.offset - first, cut.width, pitch, some))
            done += some

    def _cut(self, block: memoryview, offset: int, width: int, pitch: int, rows: int) -> memoryview:
        source = numpy.frombuffer(block, dtype=numpy.uint8)
        view = numpy.lib.stride_tricks.as_strided(source[offset:], (rows, width), (pitch, 1), writeable=False)
        out = numpy.frombuffer(self._out, dtype=numpy.uint8, count=rows * width)
        numpy.copyto(out.reshape(rows, width), view)
        return memoryview(self._out)[: rows * width]

    def _fan_out(self, files: Sequence[AtomicFile], shard: str, offset: int, length: int) -> None:
        buffer = memoryview(self._in)
        while length:
            block = buffer[: min(length, len(buffer))]
            self._reader.read_into(shard, offset, block)
            for file in files:
                self._put(file, block)
            offset, length = offset + len(block), length - len(block)

    def _scatter_rows(self, files: Sequence[AtomicFile], shard: str, base: int, cuts: Sequence[Blocks]) -> None:
        """Row by row, for rows so wide or so far apart that a block of them would be mostly waste."""
        for row in range(cuts[0].rows):
            for file, cut in zip(files, cuts, strict=True):
                self._copy_range(file, shard, base + cut.offset + row * cut.pitch, cut.width)

    def _interleave(self, file: AtomicFile, step: Copy, members: Sequence[Blocks]) -> None:
        """Several members side by side in every row of the output: whole row blocks, assembled in memory."""
        width = sum(member.width for member in members)
        rows = members[0].rows
        if width > len(self._out):
            for row in range(rows):
                for member, blocks in zip(step.members, members, strict=True):
                    self._member_row(file, member, blocks, row)
            return
        done = 0
        while done < rows:
            some = min(rows - done, len(self._out) // width)
            out = numpy.frombuffer(self._out, dtype=numpy.uint8, count=some * width).reshape(some, width)
            column = 0
            for member, blocks in zip(step.members, members, strict=True):
                self._fill(out[:, column : column + blocks.width], member, blocks, done)
                column += blocks.width
            self._put(file, memoryview(self._out)[: some * width])
            done += some

    def _member_row(self, file: AtomicFile, member: Region | Zeros | Literal, blocks: Blocks, row: int) -> None:
        if isinstance(member, Region):
            place = self._tensors.locate(member.tensor)
            self._copy_range(file, place.shard, place.offset + blocks.offset + row * blocks.pitch, blocks.width)
        else:
            self._zeros(file, blocks.width)

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

    def _compute(self, file: AtomicFile, step: Compute, measured: list[Any]) -> None:
        inputs = [self._whole(region) for region in step.needs]
        applied = step.transform.apply(inputs)
        del inputs
        for output, data in zip(step.outputs, applied.outputs, strict=True):
            view = memoryview(data).cast("B")
            assert len(view) == output.nbytes, f"{output.name}: {len(view)} bytes made, {output.nbytes} declared"
            self._put(file, view)
        if applied.measured is not None:
            measured.append(applied.measured)

    def _whole(self, region: Region) -> Any:
        blocks = region.blocks
        array = numpy.empty(blocks.rows * blocks.width, dtype=numpy.uint8)
        if blocks.rows == 1:
            place = self._tensors.locate(region.tensor)
            self._reader.read_into(place.shard, place.offset + blocks.offset, memoryview(array))  # pyright: ignore[reportArgumentType]
        else:
            self._fill(array.reshape(blocks.rows, blocks.width), region, blocks, 0)
        return array


def _shared(steps: Sequence[Step]) -> Iterator[list[int]]:
    """Indices of steps that are to be done in one reading: cuts of the same rows, or the very same range."""
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
