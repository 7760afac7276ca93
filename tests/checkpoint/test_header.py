"""Headers: what the safetensors library writes is read, what is damaged or hostile is refused by name."""

from __future__ import annotations

import contextlib
import json
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import save_file

from k3tool.checkpoint.header import MAX_HEADER_BYTES, build_header, header_length, parse_header
from k3tool.checkpoint.reader import read_header
from k3tool.checkpoint.source import LocalSource
from k3tool.checkpoint.writer import ShardWriter
from k3tool.errors import CheckpointCorrupt, K3Error
from tests.helpers import raw_shard


def _tensor(start: int, end: int, dtype: str = "U8", shape: list[int] | None = None) -> dict[str, object]:
    return {"dtype": dtype, "shape": [end - start] if shape is None else shape, "data_offsets": [start, end]}


def _read(folder: Path, data: bytes):
    (folder / "x.safetensors").write_bytes(data)
    return read_header(LocalSource(folder), "x.safetensors")


def test_reads_what_the_library_writes(tmp_path: Path):
    save_file(
        {
            "b": np.arange(6, dtype=np.float32).reshape(2, 3),
            "a": np.zeros((0, 4), np.int64),
            "c": np.array(7, np.uint8),
        },
        tmp_path / "x.safetensors",
        metadata={"format": "pt"},
    )
    header = read_header(LocalSource(tmp_path), "x.safetensors")
    assert {spec.name: (spec.dtype, spec.shape) for spec in header.tensors} == {
        "a": ("I64", (0, 4)), "b": ("F32", (2, 3)), "c": ("U8", ())
    }  # fmt: skip
    assert header.metadata == {"format": "pt"}


HOSTILE = {
    "shorter than its length field": (b"abc", "too short"),
    "header beyond the file": (raw_shard({}, length=1000), "header length 1000 is beyond the file of 10 bytes"),
    "header beyond the limit": (raw_shard({}, length=MAX_HEADER_BYTES + 1), "beyond the limit"),
    "length that overflows": (b"\xff" * 8, "beyond the limit"),
    "bad JSON": (raw_shard(b"{nope}"), "not JSON"),
    "not an object": (raw_shard(b"[1, 2]"), "not a JSON object"),
    "deep nesting": (raw_shard(b"[" * 200_000), "not JSON"),
    "bad UTF-8": (raw_shard(b'{"\xff": 1}'), "not JSON"),
    "duplicate name": (
        raw_shard(b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', b"x"),
        "names 'a' twice",
    ),
    "duplicate name, escaped": (
        raw_shard(b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"\\u0061":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', b"x"),
        "names 'a' twice",
    ),
    "duplicate key inside": (raw_shard(b'{"a":{"dtype":"U8","dtype":"I8","shape":[1],"data_offsets":[0,1]}}', b"x"), "names 'dtype' twice"),
    "overlap": (raw_shard({"a": _tensor(0, 8), "b": _tensor(4, 12)}, bytes(12)), "tensor b at offset 4 overlaps a which ends at 8"),
    "same place twice": (raw_shard({"a": _tensor(0, 8), "b": _tensor(0, 8)}, bytes(8)), "overlaps"),
    "gap": (raw_shard({"a": _tensor(0, 4), "b": _tensor(8, 12)}, bytes(12)), "tensor b at offset 8 leaves a gap after a"),
    "gap at the start": (raw_shard({"a": _tensor(4, 8)}, bytes(8)), "leaves a gap after the start"),
    "size not matching": (raw_shard({"a": _tensor(0, 8, "F32", [3])}, bytes(8)), r"a: F32 \[3\] needs 12 bytes, offsets \[0, 8\) hold 8"),
    "unknown dtype": (raw_shard({"a": _tensor(0, 8, "Q4_K")}, bytes(8)), "tensor a: unknown dtype 'Q4_K'"),
    "dtype that is a list": (raw_shard({"a": {**_tensor(0, 8), "dtype": []}}, bytes(8)), r"unknown dtype \[\]"),
    "negative offset": (raw_shard({"a": _tensor(-8, 0)}, bytes(8)), "tensor a"),
    "end before start": (raw_shard({"a": {"dtype": "U8", "shape": [0], "data_offsets": [4, 0]}}, bytes(8)), "tensor a"),
    "negative size": (raw_shard({"a": _tensor(0, 8, "U8", [-2, -4])}, bytes(8)), "bad shape"),
    "huge sizes": (raw_shard({"a": _tensor(0, 8, "U8", [2**62, 2**62])}, bytes(8)), "tensor a"),
    "float size": (raw_shard({"a": _tensor(0, 8, "U8", [8.0])}, bytes(8)), "bad shape"),
    "bool size": (raw_shard({"a": {"dtype": "U8", "shape": [True], "data_offsets": [0, 1]}}, bytes(1)), "bad shape"),
    "missing key": (raw_shard({"a": {"dtype": "U8", "shape": [8]}}, bytes(8)), "data_offsets is missing"),
    "entry that is no object": (raw_shard({"a": 7}), "not an object"),
    "trailing bytes": (raw_shard({"a": _tensor(0, 8)}, bytes(9)), "has trailing bytes: the header needs"),
    "truncated": (raw_shard({"a": _tensor(0, 8)}, bytes(7)), "is truncated: the header needs"),
    "metadata not text": (raw_shard({"__metadata__": {"a": 1}}), "__metadata__"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_refused(tmp_path: Path, name: str):
    data, message = HOSTILE[name]
    with pytest.raises(CheckpointCorrupt, match=message) as caught:
        _read(tmp_path, data)
    assert "x.safetensors" in caught.value.message and caught.value.hint


@given(st.binary(max_size=200))
def test_random_bytes_never_crash(data: bytes):
    try:
        length = header_length(data[:8], len(data), where="x")
        parse_header(data[8 : 8 + length], file_size=len(data), where="x")
    except K3Error:
        pass


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["a", "dtype", "shape", "data_offsets", "U8"]), inner, max_size=4),
    )
)  # fmt: skip
def test_random_json_never_crashes(document):
    with contextlib.suppress(K3Error):
        parse_header(json.dumps(document).encode(), file_size=None, where="x")


def test_written_headers_are_read_by_the_library(tmp_path: Path):
    tensors = [("b.weight", "BF16", (2, 3)), ("a.weight", "F32", (1,)), ("ü", "U8", (5,))]
    with ShardWriter(tmp_path / "x.safetensors", tensors) as writer:
        writer.append(bytes(range(12)))
        writer.append(struct.pack("<f", 1.5))
        writer.append(b"hello")
    with safe_open(tmp_path / "x.safetensors", "np") as opened:
        assert sorted(opened.keys()) == ["a.weight", "b.weight", "ü"]
        assert opened.get_tensor("a.weight")[0] == 1.5
        assert bytes(opened.get_tensor("ü")) == b"hello"
        assert opened.metadata() == {"format": "pt"}
    head, header = build_header(tensors)
    assert len(head) % 8 == 0 and header == read_header(LocalSource(tmp_path), "x.safetensors")
