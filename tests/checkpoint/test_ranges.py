"""Merging ranges into requests, and reading through the windows they make."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from k3tool.checkpoint.ranges import Reader, merge_ranges
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
