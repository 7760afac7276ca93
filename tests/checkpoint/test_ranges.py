"""Merging ranges into requests, and reading through the windows they make."""

from __future__ import annotations

import errno
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3tool.checkpoint import ranges
from k3tool.checkpoint.ranges import LEAST_UNCACHED, Reader, merge_ranges
from k3tool.checkpoint.source import LocalSource
from k3tool.errors import CheckpointCorrupt
from tests.transform.cases import MemorySource

RANGES = st.lists(
    st.tuples(st.sampled_from("ab"), st.integers(0, 200), st.integers(0, 60)).map(lambda r: (r[0], r[1], r[1] + r[2])),
    max_size=20,
)


@given(RANGES, st.integers(1, 80), st.integers(0, 30))
def test_windows_cover_every_range_in_order(ranges, window, gap):
    windows = list(merge_ranges(iter(ranges), window, gap))
    assert all(end - start <= window for _, start, end in windows)
    position = 0  # ranges are found in the windows from left to right, each perhaps over several windows
    for name, start, end in ranges:
        while start < end:
            while not (windows[position][0] == name and windows[position][1] <= start < windows[position][2]):
                position += 1
            start = windows[position][2]
    wanted = sum(end - start for _, start, end in ranges)
    fetched = sum(end - start for _, start, end in windows)
    assert fetched <= wanted + gap * max(0, len(ranges) - 1)


def test_neighbours_become_one_request():
    ranges = [("a", 0, 10), ("a", 12, 20), ("a", 50, 60), ("b", 60, 70), ("b", 65, 75)]
    assert list(merge_ranges(iter(ranges), 100, 5)) == [("a", 0, 20), ("a", 50, 60), ("b", 60, 75)]
    assert list(merge_ranges(iter(ranges), 15, 5)) == [("a", 0, 10), ("a", 12, 20), ("a", 50, 60), ("b", 60, 75)]
    assert list(merge_ranges(iter([("a", 0, 25)]), 10, 0)) == [("a", 0, 10), ("a", 10, 20), ("a", 20, 25)]


@given(RANGES, st.integers(1, 80), st.booleans())
def test_reading_announced_or_not_gives_the_bytes(ranges, window, announced):
    data = {"a": bytes(range(256)) * 2, "b": bytes(reversed(range(256))) * 2}
    source = MemorySource(data)
    reader = Reader(source, window)
    if announced:
        reader.expect(iter(ranges))
    for name, start, end in ranges:
        buffer = bytearray(end - start)
        reader.read_into(name, start, memoryview(buffer))
        assert bytes(buffer) == data[name][start:end]
    assert reader.read_bytes == sum(length for _, _, length in source.requests)
    reader.close()


def test_reads_past_the_page_cache_fall_back_where_there_is_no_such_thing(tmp_path, monkeypatch):
    """Large reads ask for it; a system that refuses is asked once, any other error is the caller's."""
    data = bytes(range(256)) * (3 * LEAST_UNCACHED // 256)
    (tmp_path / "a").write_bytes(data)
    asked: list[int] = []
    preadv = os.preadv
    number = errno.EOPNOTSUPP

    def refusing(descriptor, buffers, offset, flags=0):
        asked.append(flags)
        if flags:
            raise OSError(number, "no")
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", refusing)
    monkeypatch.setattr(ranges, "UNCACHED", 0x80)
    reader = Reader(LocalSource(tmp_path), 1)
    buffer = bytearray(len(data))
    for start in range(0, len(data), LEAST_UNCACHED):
        reader.read_into("a", start, memoryview(buffer)[start : start + LEAST_UNCACHED])
    reader.read_into("a", 0, memoryview(buffer)[:100])
    assert bytes(buffer) == data and asked == [0x80, 0, 0, 0, 0]
    reader.close()
    number = errno.EIO
    reader = Reader(LocalSource(tmp_path), 1)
    with pytest.raises(CheckpointCorrupt, match="no"):
        reader.read_into("a", 0, memoryview(buffer))
    reader.close()


def test_a_large_file_is_read_whole_again_and_again(tmp_path):
    """The real flag of this system, whatever it does with it."""
    data = os.urandom(LEAST_UNCACHED + 77)
    (tmp_path / "a").write_bytes(data)
    reader = Reader(LocalSource(tmp_path), 1)
    for _ in range(2):
        buffer = bytearray(len(data))
        reader.read_into("a", 0, memoryview(buffer))
        assert bytes(buffer) == data
    reader.close()
