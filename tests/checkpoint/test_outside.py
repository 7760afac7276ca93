"""What comes from outside is refused in one sentence or is what its reader expects: never an error of Python."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from k3tool.checkpoint.outside import (
    MAX_DEPTH,
    Fields,
    corrupt,
    parse_json,
    parse_lines,
    parse_object,
    parse_toml,
    read_file,
    read_named,
    read_stream,
    shown,
)
from k3tool.checkpoint.source import LocalSource
from k3tool.errors import CheckpointCorrupt, RemoteError

FAIL = corrupt("write it again")


def parse(text: bytes, **options):
    return parse_json(text, where="some.json", fail=FAIL, **options)


def nested(levels: int) -> bytes:
    return b'{"a":' * levels + b"1" + b"}" * levels


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"", "it is empty"),
        (b"<html>", "Expecting value"),
        (b'{"a": NaN}', "NaN is no JSON number"),
        (b'{"a": -Infinity}', "-Infinity is no JSON number"),
        (b'{"a": 1e999}', "beyond any float"),
        (b'{"a": 0.' + b"1" * 100_000 + b"}", "beyond any float"),
        (b'{"a": ' + b"9" * 41 + b"}", "a number of 41 digits"),
        (b'{"a": ' + b"9" * 100_000 + b"}", "a number of 100000 digits"),
        (b'{"a": 1, "a": 2}', "names 'a' twice"),
        (b'{"x": [{"a": 1, "a": 1}]}', "names 'a' twice"),
        (b'{"a": "\\ud800"}', "half of a surrogate pair"),
        (b'{"\\uDFFF": 1}', "half of a surrogate pair"),
        (b'["\xff"]', "no UTF-8 at byte 2"),
        (b'["\xed\xa0\x80"]', "no UTF-8 at byte 2"),
        (b"\xef\xbb\xbf{}", "byte order mark"),
        ("{}".encode("utf-16"), "byte order mark"),
        (nested(MAX_DEPTH + 1), "nested too deep"),
        (nested(200_000), "nested too deep"),
        (b"[" * 1_000_000, "nested too deep"),
        (b'{"a": "\x00"}', "Invalid control character"),
        (b"{} {}", "Extra data"),
    ],
)
def test_what_is_no_json_is_refused_in_one_sentence(text: bytes, words: str):
    with pytest.raises(CheckpointCorrupt) as caught:
        parse(text)
    assert caught.value.message.startswith("some.json: ") and words in caught.value.message
    assert len(caught.value.message) < 300 and caught.value.hint == "write it again"


def test_what_is_json_arrives_as_it_is():
    assert parse(nested(MAX_DEPTH)) == json.loads(nested(MAX_DEPTH))
    assert parse(b'["\\ud83d\\ude00", 1e30, %d, null]' % 10**39) == ["\U0001f600", 1e30, 10**39, None]
    assert parse(b'{"a": 1, "a": 2}', unique_keys=False) == {"a": 2}


def test_the_caller_says_what_a_refusal_is():
    with pytest.raises(RemoteError, match=r"answer: expected a JSON object, found \[1, 2\]"):
        parse_object(b"[1, 2]", where="answer", fail=lambda text: RemoteError(text, hint="later"))


def test_bytes_are_bounded_before_they_are_read(tmp_path: Path):
    huge = tmp_path / "huge.json"
    with open(huge, "wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(CheckpointCorrupt, match=f"{1 << 40} bytes are beyond the limit of 100"):
        read_file(huge, 100, fail=FAIL)
    with pytest.raises(CheckpointCorrupt, match="beyond the limit of 100"):
        read_named(LocalSource(tmp_path), "huge.json", 100, fail=FAIL)
    asked: list[int] = []

    def endless(size: int) -> bytes:
        asked.append(size)
        return b"x" * min(size, 7)

    with pytest.raises(CheckpointCorrupt, match="answer: more than 100 bytes"):
        read_stream(endless, 100, where="answer", fail=FAIL)
    assert sum(min(size, 7) for size in asked) == 101
    assert read_stream(io.BytesIO(b"x" * 100).read, 100, where="answer", fail=FAIL) == b"x" * 100
    with pytest.raises(CheckpointCorrupt, match="/dev/zero: more than 1000 bytes"):
        read_file(Path("/dev/zero"), 1000, fail=FAIL)


def test_lines_that_are_torn_or_no_objects_are_passed_over():
    text = b'{"a": 1}\n{"a": \n[1]\nNaN\n' + nested(100_000) + b'\n\xff\n{"a": 2}\n'
    assert list(parse_lines(text)) == [{"a": 1}, {"a": 2}]


@pytest.mark.parametrize(
    "text",
    [
        b"x = " + b"[" * 100_000,
        b"x = " + b"[" * 65 + b"]" * 65,
        b"x = " + b"{a = " * 100_000,
        b".".join([b"a"] * 10_000) + b" = 1",
        b"[" + b".".join([b"a"] * 10_000) + b"]",
        b"x = " + b"9" * 10_000,
        b"\xff",
        b"x = 1\nx = 2",
    ],
)
def test_toml_is_bounded_too(text: bytes):
    with pytest.raises(CheckpointCorrupt, match="recipe: not TOML"):
        parse_toml(text, where="recipe", fail=FAIL)


@pytest.mark.parametrize(
    "value",
    [None, True, "x" * 10**6, 10**39, list(range(10**6)), {"k" * 10**6: {"a": [[[1]]]}}, json.loads(nested(64))],
)
def test_a_value_is_shown_in_few_words(value: object):
    assert len(shown(value)) < 220


OTHERS = [None, True, -1, 0.5, 2**70, "1", "", [1], ["a"], {}, {"a": 1}]
READ = {
    "integer": lambda fields: fields.integer("x"),
    "number": lambda fields: fields.number("x"),
    "text": lambda fields: fields.text("x"),
    "choice": lambda fields: fields.text("x", choices=("1", "2")),
    "flag": lambda fields: fields.flag("x"),
    "mapping": lambda fields: fields.mapping("x"),
    "items": lambda fields: fields.items("x"),
    "integers": lambda fields: fields.integers("x"),
    "fields": lambda fields: fields.fields("x").values,
}
FITTING: dict[str, list[object]] = {
    "integer": [],
    "number": [-1, 0.5, 2**70],
    "text": ["1", ""],
    "choice": ["1"],
    "flag": [True],
    "mapping": [{}, {"a": 1}],
    "items": [[1], ["a"]],
    "integers": [[1]],
    "fields": [{}, {"a": 1}],
}


@pytest.mark.parametrize("kind", READ)
def test_a_field_is_of_its_type_or_named(kind: str):
    for value in OTHERS:
        fields = Fields({"x": value}, "some.json", FAIL)
        if any(value == fitting and type(value) is type(fitting) for fitting in FITTING[kind]):
            assert READ[kind](fields) == value
            continue
        with pytest.raises(CheckpointCorrupt, match=r"some\.json: x must be .*, found "):
            READ[kind](fields)
    with pytest.raises(CheckpointCorrupt, match=r"some\.json: x must be .*, it is missing"):
        READ[kind](Fields({}, "some.json", FAIL))


def test_null_is_what_is_absent_where_there_is_a_default():
    for fields in (Fields({}, "f", FAIL), Fields({"x": None}, "f", FAIL)):
        assert "x" not in fields
        assert fields.integer("x", 3) == 3 and fields.number("x", None) is None and fields.flag("x", True) is True
        assert fields.text("x", "a") == "a" and fields.items("x", []) == [] and fields.fields("x", {}).values == {}


def test_bounds_and_ways_to_a_field_are_named():
    fields = Fields({"a": {"b": {"n": 9}}, "many": {"one": {"n": "x"}}}, "f.json", FAIL)
    with pytest.raises(CheckpointCorrupt, match=r"f\.json: a: b: n must be a whole number of at most 8, found 9"):
        fields.fields("a").fields("b").integer("n", high=8)
    with pytest.raises(CheckpointCorrupt, match=r"f\.json: many: one: n must be a number, found 'x'"):
        [entry.number("n") for _, entry in fields.each("many")]
