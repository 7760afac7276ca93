"""Sizes, counts and ranges as people write and read them."""

from __future__ import annotations

import pytest

from k3tool.errors import UsageError
from k3tool.units import format_bytes, parse_ranges, parse_size, plural


def test_one_and_many():
    assert [plural(n, "GPU") for n in (0, 1, 2)] == ["0 GPUs", "1 GPU", "2 GPUs"]
    assert plural(1500, "sequence") == "1,500 sequences" and plural(2, "copy", "copies") == "2 copies"


@pytest.mark.parametrize(("text", "nbytes"), [("5GB", 5 * 10**9), ("1.5 GiB", 3 * 2**29), ("12", 12)])
def test_sizes(text: str, nbytes: int):
    assert parse_size(text) == nbytes


@pytest.mark.parametrize(
    ("text", "says"), [("-5GB", "a size is positive: '-5GB'"), ("many", "not a size: 'many'"), ("5XB", "not a size")]
)
def test_what_is_no_size(text: str, says: str):
    with pytest.raises(UsageError) as caught:
        parse_size(text)
    assert says in caught.value.message


def test_ranges():
    assert parse_ranges("0-2, 7", what="layers", limit=8) == (0, 1, 2, 7)
    for text, says in (
        ("99", "layer 99 does not exist"),
        ("a", "not a list of layers: 'a'"),
        ("3-1", "not a list of layers"),
    ):
        with pytest.raises(UsageError) as caught:
            parse_ranges(text, what="layers", limit=8)
        assert says in caught.value.message


def test_sizes_read_back():
    assert [format_bytes(n) for n in (999, 1000, 1_560_860_324_864)] == ["999 B", "1 kB", "1.56 TB"]
