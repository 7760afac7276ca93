"""The bytes before the data, and what a head refuses to say."""

from __future__ import annotations

import pytest

from k3tool.gguf.container import (
    BF16,
    F32,
    MXFP4,
    Q8_0,
    TensorInfo,
    Value,
    aligned,
    build_head,
    f32,
    flag,
    i32,
    i32_list,
    text,
    text_list,
    u16,
    u32,
)

from .reader import Read


def test_a_head_byte_by_byte():
    """Composed by hand from the description of the format."""
    expected = (
        b"GGUF" + b"\3\0\0\0" + b"\2" + bytes(7) + b"\1" + bytes(7)  # version, two tensors, one key
        + b"\1" + bytes(7) + b"k" + b"\4\0\0\0" + b"\7\0\0\0"  # "k", type 4 (uint32), 7
        + b"\1" + bytes(7) + b"a" + b"\1\0\0\0" + b"\3" + bytes(7) + b"\0\0\0\0" + bytes(8)  # F32 [3] at 0
        + b"\1" + bytes(7) + b"b" + b"\2\0\0\0" + b"\x40" + bytes(7) + b"\5" + bytes(7) + b"\x27\0\0\0"
        + b"\x20" + bytes(7)  # MXFP4 [5, 64], dimensions innermost first, after 12 bytes padded to 32
    )  # fmt: skip
    expected += bytes(-len(expected) % 32)
    assert build_head([("k", u32(7))], [TensorInfo("a", F32, (3,)), TensorInfo("b", MXFP4, (5, 64))]) == expected


def test_every_type_of_value_reads_back(tmp_path):
    keys = {
        "short": (u16(65535), 65535),
        "word": (u32(2**32 - 1), 2**32 - 1),
        "signed": (i32(-5), -5),
        "real": (f32(-0.5), -0.5),
        "yes": (flag(True), True),
        "long": (Value("u64", 2**63), 2**63),
        "words": (text("größer, 大 \n"), "größer, 大 \n"),
        "empty": (text(""), ""),
        "kinds": (i32_list([1, 0, -1]), [1, 0, -1]),
        "none": (i32_list([]), []),
        "tokens": (text_list(["a", "Ġb", ""]), ["a", "Ġb", ""]),
    }
    path = tmp_path / "x.gguf"
    infos = [TensorInfo("t", BF16, (2, 3)), TensorInfo("q", Q8_0, (2, 32))]
    data = [bytes(range(12)), bytes(range(68))]
    padded = [part + bytes(aligned(len(part)) - len(part)) for part in data]
    path.write_bytes(build_head([(name, value) for name, (value, _) in keys.items()], infos) + b"".join(padded))
    read = Read(path)
    assert read.keys == {name: value for name, (_, value) in keys.items()}
    assert [tensor.raw.tobytes() for tensor in read.tensors.values()] == data
    assert [(tensor.kind, tensor.shape) for tensor in read.tensors.values()] == [("BF16", (2, 3)), ("Q8_0", (2, 32))]


@pytest.mark.parametrize(
    ("keys", "infos", "message"),
    [
        ([("k", u32(1)), ("k", u32(2))], [], "key k given twice"),
        ([], [TensorInfo("t", F32, (1,)), TensorInfo("t", F32, (1,))], "tensor t given twice"),
        ([], [TensorInfo("t" * 64, F32, (1,))], "longer than 63 bytes"),
        ([], [TensorInfo("t", F32, (1, 1, 1, 1, 1))], "5 dimensions"),
        ([], [TensorInfo("t", F32, ())], "0 dimensions"),
        ([], [TensorInfo("t", MXFP4, (2, 48))], "rows of 48 are not whole MXFP4 blocks"),
        ([("k", u32(-1))], [], "k: -1 is no u32"),
        ([("k", u32(2**32))], [], "k: 4294967296 is no u32"),
        ([("k", i32_list([2**31]))], [], "is no i32"),
    ],
)
def test_refusals(keys, infos, message):
    with pytest.raises(ValueError, match=message):
        build_head(keys, infos)


def test_a_name_of_63_bytes_is_written():
    assert b"t" * 63 in build_head([], [TensorInfo("t" * 63, F32, (1,))])
