"""The index: names that leave the folder, duplicates and wrong structures are refused."""

from __future__ import annotations

import json

import pytest

from k3tool.checkpoint.index import build_index, parse_index
from k3tool.errors import CheckpointCorrupt


def test_round_trip():
    index = parse_index(build_index({"b": "y.safetensors", "a": "x.safetensors"}, 12))
    assert dict(index.weight_map) == {"a": "x.safetensors", "b": "y.safetensors"}
    assert index.total_size == 12 and index.shards == ["x.safetensors", "y.safetensors"]


@pytest.mark.parametrize(
    "shard",
    ["../x.safetensors", "/etc/x.safetensors", "a/b.safetensors", "a\\b.safetensors", "", ".hidden.safetensors",
     "x.bin", "C:x.safetensors", "x\x00.safetensors", "x\n.safetensors", "y" * 300 + ".safetensors", "-x.safetensors"],
)  # fmt: skip
def test_names_that_are_no_plain_file_are_refused(shard: str):
    with pytest.raises(CheckpointCorrupt, match=r"not a plain \.safetensors file name"):
        parse_index(json.dumps({"weight_map": {"a": shard}}).encode())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"{", "not JSON"),
        (b"[]", "weight_map must map"),
        (b'{"weight_map": []}', "weight_map must map"),
        (b'{"weight_map": {"a": 1}}', "weight_map must map"),
        (b'{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}', "names 'a' twice"),
        (b'{"weight_map": {"a": "x.safetensors", "\\u0061": "y.safetensors"}}', "names 'a' twice"),
        (b'{"metadata": {"total_size": "big"}, "weight_map": {}}', "total_size must be a number"),
        (b'{"metadata": 3, "weight_map": {}}', "weight_map must map"),
    ],
)
def test_damage_is_named(text: bytes, message: str):
    with pytest.raises(CheckpointCorrupt, match=message):
        parse_index(text)
