"""What is to be written: a file as a row of segments, each a byte range of a file on the Hub or bytes made here.

A whole file of the repository is one segment with a published digest. A file that `--layers` makes is a new header and
merged ranges, and no digest is published for it. Bytes made here are kept compressed, as there may be many headers.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from k3tool.checkpoint.header import build_header
from k3tool.checkpoint.reader import Located
from k3tool.hub import RemoteFile
from k3tool.plan import Copy, FileJob, Region


class Segment(NamedTuple):
    """Bytes [start, stop) of the remote file `file`; where that is empty, of the zlib stream `packed`."""

    file: str
    start: int
    stop: int
    packed: bytes = b""

    @property
    def size(self) -> int:
        return self.stop - self.start

    @property
    def data(self) -> bytes:
        return zlib.decompress(self.packed)[self.start : self.stop]


@dataclass(frozen=True)
class Target:
    """One file of the local folder. `expected`: its size and digest as published, None for a file made here."""

    name: str
    segments: tuple[Segment, ...]
    expected: RemoteFile | None = None

    @property
    def size(self) -> int:
        return sum(segment.size for segment in self.segments)

    @property
    def is_shard(self) -> bool:
        return self.name.endswith(".safetensors")

    def from_position(self, position: int) -> Iterator[Segment]:
        """What is still to be written behind the first `position` bytes."""
        for segment in self.segments:
            if position < segment.size:
                yield segment._replace(start=segment.start + position)
            position = max(0, position - segment.size)


def whole_file(name: str, file: RemoteFile, *, source: str | None = None) -> Target:
    """A file of the repository as it is, under `name`."""
    return Target(name, (Segment(source or name, 0, file.size),) if file.size else (), file)


def literal(data: bytes) -> Segment:
    return Segment("", 0, len(data), zlib.compress(data, 1))


class PackedText:
    """Text written bit by bit, held compressed."""

    def __init__(self) -> None:
        self._packer = zlib.compressobj(1)
        self._pieces: list[bytes] = []
        self._size = 0

    def add(self, text: str) -> None:
        data = text.encode()
        self._size += len(data)
        self._pieces.append(self._packer.compress(data))

    def segment(self) -> Segment:
        self._pieces.append(self._packer.flush())
        return Segment("", 0, self._size, b"".join(self._pieces))


def from_job(job: FileJob, locate: Callable[[str], Located]) -> Target:
    """A file of a plan whose steps only copy: its header, then its source ranges, neighbours merged into one."""
    copies = [step for step in job.steps if isinstance(step, Copy)]
    assert len(copies) == len(job.steps), "fetch carries bytes, it transforms none"
    head, _ = build_header([copy.output for copy in copies], job.metadata)
    segments = [literal(head)]
    for copy in copies:
        for member in copy.members:
            assert isinstance(member, Region), "a fetched tensor is made of source ranges alone"
            place = locate(member.tensor)
            blocks = member.blocks
            assert blocks.rows == 1, "a fetched tensor is whole"
            start = place.offset + blocks.offset
            last = segments[-1]
            if last.file == place.shard and last.stop == start:
                segments[-1] = last._replace(stop=start + blocks.width)
            elif blocks.width:
                segments.append(Segment(place.shard, start, start + blocks.width))
    return Target(job.path, tuple(segments))
