"""The GGUF container, version 3: typed metadata and tensor descriptions as the bytes that stand before the data.

Layout, little-endian: magic, version, number of tensors, number of keys; the keys, each `string, type, value`; the
tensors, each `name, number of dimensions, dimensions (innermost first), type, offset`; zeros up to the alignment; data.
Offsets count from there and are multiples of the alignment, 32 where no key says otherwise. Source: the format's own
description, `ggml-org/ggml:docs/gguf.md`, and `ggml.h` for the type numbers.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from k3tool.catalog import count

MAGIC = b"GGUF"
VERSION = 3
ALIGNMENT = 32
MAX_NAME_BYTES = 63
MAX_DIMENSIONS = 4


class GgmlType(NamedTuple):
    """A storage type: `block` values along a row take `nbytes` bytes. `number` is ggml's."""

    name: str
    number: int
    block: int
    nbytes: int


F32 = GgmlType("F32", 0, 1, 4)
F16 = GgmlType("F16", 1, 1, 2)
Q8_0 = GgmlType("Q8_0", 8, 32, 34)
BF16 = GgmlType("BF16", 30, 1, 2)
MXFP4 = GgmlType("MXFP4", 39, 32, 17)
TYPES = {kind.name: kind for kind in (F32, F16, Q8_0, BF16, MXFP4)}


class TensorInfo(NamedTuple):
    """shape: outermost dimension first, in values; rows are stored one after the other."""

    name: str
    kind: GgmlType
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return count(self.shape) // self.kind.block * self.kind.nbytes

    @property
    def padded(self) -> int:
        """Bytes up to where the next tensor begins."""
        return aligned(self.nbytes)


class Value(NamedTuple):
    """A metadata value: number, text, or with `item` a list of such. `kind` is one of the names in `_SCALARS`."""

    kind: str
    value: object
    is_list: bool = False


_SCALARS = {
    "u16": (2, "<H"),
    "u32": (4, "<I"),
    "i32": (5, "<i"),
    "f32": (6, "<f"),
    "bool": (7, "<?"),
    "u64": (10, "<Q"),
}
_STRING, _ARRAY = 8, 9


def u16(value: int) -> Value:
    return Value("u16", value)


def u32(value: int) -> Value:
    return Value("u32", value)


def i32(value: int) -> Value:
    return Value("i32", value)


def f32(value: float) -> Value:
    return Value("f32", value)


def flag(value: bool) -> Value:
    return Value("bool", value)


def text(value: str) -> Value:
    return Value("text", value)


def i32_list(values: Sequence[int]) -> Value:
    return Value("i32", values, is_list=True)


def text_list(values: Sequence[str]) -> Value:
    return Value("text", values, is_list=True)


def aligned(size: int) -> int:
    return size + -size % ALIGNMENT


def build_head(keys: Iterable[tuple[str, Value]], tensors: Iterable[TensorInfo]) -> bytes:
    """Everything before the data. The data of each tensor follows in order, each padded to the alignment with zeros.

    Raises ValueError for a name that is too long or given twice, more than four dimensions, rows that are not whole
    blocks, or a value that its type cannot hold.
    """
    pairs, infos = list(keys), list(tensors)
    _refuse_repeats([name for name, _ in pairs], "key")
    _refuse_repeats([info.name for info in infos], "tensor")
    parts = [MAGIC, struct.pack("<IQQ", VERSION, len(infos), len(pairs))]
    for name, value in pairs:
        parts += (_text(name), _value(name, value))
    offset = 0
    for info in infos:
        parts.append(_info(info, offset))
        offset += info.padded
    head = b"".join(parts)
    return head.ljust(aligned(len(head)), b"\0")


def _refuse_repeats(names: list[str], what: str) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ValueError(f"{what} {name} given twice")
        seen.add(name)


def _text(value: str) -> bytes:
    data = value.encode(errors="backslashreplace")
    return struct.pack("<Q", len(data)) + data


def _value(name: str, value: Value) -> bytes:
    try:
        if value.is_list:
            assert isinstance(value.value, Sequence)
            kind = _STRING if value.kind == "text" else _SCALARS[value.kind][0]
            items = b"".join(_item(value.kind, item) for item in value.value)
            return struct.pack("<IIQ", _ARRAY, kind, len(value.value)) + items
        kind = _STRING if value.kind == "text" else _SCALARS[value.kind][0]
        return struct.pack("<I", kind) + _item(value.kind, value.value)
    except (struct.error, OverflowError) as error:
        raise ValueError(f"{name}: {value.value!r} is no {value.kind} ({error})") from None


def _item(kind: str, item: object) -> bytes:
    return _text(str(item)) if kind == "text" else struct.pack(_SCALARS[kind][1], item)


def _info(info: TensorInfo, offset: int) -> bytes:
    name = info.name.encode()
    if len(name) > MAX_NAME_BYTES:
        raise ValueError(f"tensor name {info.name} is longer than {MAX_NAME_BYTES} bytes")
    if not 1 <= len(info.shape) <= MAX_DIMENSIONS:
        raise ValueError(f"{info.name}: {len(info.shape)} dimensions, GGUF holds 1 to {MAX_DIMENSIONS}")
    if info.shape[-1] % info.kind.block:
        raise ValueError(f"{info.name}: rows of {info.shape[-1]} are not whole {info.kind.name} blocks")
    dimensions = struct.pack(f"<I{len(info.shape)}Q", len(info.shape), *reversed(info.shape))
    return _text(info.name) + dimensions + struct.pack("<IQ", info.kind.number, offset)
