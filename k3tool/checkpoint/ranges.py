"""Positional reads for one worker: local files through kept descriptors, remote files through merged windows.

A local file that becomes another while it is read is noticed. Of a remote source, ranges that are announced in order
and lie near each other become one request; no byte is requested twice in a row.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from k3tool.checkpoint.source import Source, read_exactly, unreadable
from k3tool.disk import TOO_MANY_OPEN, UNSUPPORTED, disk_errors
from k3tool.errors import CheckpointCorrupt

REMOTE_GAP = 1 << 20  # between wanted ranges of a remote file: nearer than this, one request is cheaper than two
OPEN_FILES = 16
# Linux's RWF_DONTCACHE (6.14): what a read brings into the page cache leaves it again, what was there stays. A source is
# larger than memory; finding new pages for all of it costs more than the reading (measured: half the speed, or less).
UNCACHED = 0x80 if sys.platform == "linux" else 0
LEAST_UNCACHED = 256 << 10  # shorter reads may share their pages with the next one

Range = tuple[str, int, int]  # file, first byte, byte after the last


class Reader:
    """Positional reads of one source for one worker: local files through kept descriptors, remote ones by windows."""

    def __init__(self, source: Source, buffer_bytes: int) -> None:
        self.source = source
        self.is_local = source.local_path("") is not None
        self.read_bytes = 0
        self._open: dict[str, int] = {}
        self._seen: dict[str, tuple[Path, os.stat_result]] = {}
        self._used: set[str] = set()
        self._windows: Iterator[Range] = iter(())
        self._window = ("", 0, memoryview(b""))
        self._buffer_bytes = buffer_bytes
        self._buffer: bytearray | None = None
        self._uncached = UNCACHED

    def expect(self, ranges: Iterator[Range], *, bridge: bool = True) -> None:
        """Announce the ranges that will be read, in order, so that remote ones can be merged into few requests.

        bridge: what little lies between two of them may be read with them, because nobody else is going to read it."""
        self._windows = merge_ranges(ranges, self._buffer_bytes, REMOTE_GAP if bridge else 0)
        self._window = ("", 0, memoryview(b""))

    def read_into(self, shard: str, offset: int, buffer: memoryview) -> None:
        """Fill `buffer`. Raises CheckpointMissing, CheckpointCorrupt (short data)."""
        if self.is_local:
            self._read_local(shard, offset, buffer)
            self.read_bytes += len(buffer)
            return
        while len(buffer):
            got = self._from_window(shard, offset, buffer)
            offset, buffer = offset + got, buffer[got:]

    def _read_local(self, shard: str, offset: int, buffer: memoryview) -> None:
        descriptor, where = self._descriptor(shard), f"{self.source.label}/{shard}"
        with disk_errors(where):
            if self._uncached and len(buffer) >= LEAST_UNCACHED:
                try:
                    return read_exactly(descriptor, offset, buffer, where=where, flags=self._uncached)
                except OSError as error:
                    if error.errno not in UNSUPPORTED:
                        raise
                    self._uncached = 0  # this kernel or this file system has no such thing
            read_exactly(descriptor, offset, buffer, where=where)

    def _descriptor(self, shard: str) -> int:
        descriptor = self._open.pop(shard, None)
        if descriptor is None:
            if len(self._open) >= OPEN_FILES:
                os.close(self._open.pop(next(iter(self._open))))
            path = self.source.local_path(shard)
            assert path is not None, "a source is local as a whole or not at all"
            try:
                descriptor = self._opened(path)
                self._seen.setdefault(shard, (path, os.fstat(descriptor)))
            except OSError as error:
                raise unreadable(path, error) from error
        self._open[shard] = descriptor
        self._used.add(shard)
        return descriptor

    def _opened(self, path: Path) -> int:
        try:
            return os.open(path, os.O_RDONLY)
        except OSError as error:
            if error.errno not in TOO_MANY_OPEN or not self._open:
                raise
        self.close()  # the kept descriptors are a convenience
        return os.open(path, os.O_RDONLY)

    def check_unchanged(self) -> None:
        """Raises CheckpointCorrupt where a local file read since the last call has become another meanwhile."""
        for shard in self._used:
            path, before = self._seen[shard]
            with disk_errors(path):
                now = path.stat()
            if (now.st_size, now.st_mtime_ns, now.st_ino) != (before.st_size, before.st_mtime_ns, before.st_ino):
                raise CheckpointCorrupt(
                    f"{path} changed while it was being read ({before.st_size} bytes, now {now.st_size})",
                    hint="let the source rest, then run the same command again",
                    shard=shard,
                )
        self._used.clear()

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


def merge_ranges(ranges: Iterable[Range], window_bytes: int, gap: int) -> Iterator[Range]:
    """Join consecutive (file, start, end) that follow each other within `gap` into windows of at most `window_bytes`.

    Every byte of every range is in a window, and windows come in the order of the ranges.
    """
    held: Range | None = None
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
