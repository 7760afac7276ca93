"""The safetensors header: bytes to TensorSpec and back, refusing what is damaged or hostile.

File = 8 bytes little-endian header length, that many bytes of JSON, data. Offsets count from the data start and must
cover the data exactly: no hole, no overlap, nothing after the last tensor.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from k3tool.catalog import DTYPE_BITS, count
from k3tool.checkpoint.origin import again, damage, damaged
from k3tool.checkpoint.outside import parse_json, shown
from k3tool.errors import CheckpointCorrupt

MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
MAX_DIMENSIONS = 8
MAX_OFFSET = (1 << 63) - 1
_DTYPES = {**DTYPE_BITS, "C64": 64, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8}


def dtype_bits(dtype: str) -> int:
    """Bits of one element. Raises KeyError for a dtype that safetensors does not have."""
    return _DTYPES[dtype]


class TensorSpec(NamedTuple):
    """One tensor of a shard: dtype as safetensors spells it, shape, and [start, end) within the data section."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.start


class Header(NamedTuple):
    """A parsed header. `data_start` is the file offset of the data section; `tensors` are in file order."""

    tensors: list[TensorSpec]
    metadata: dict[str, str]
    data_start: int

    @property
    def file_size(self) -> int:
        return self.data_start + (self.tensors[-1].end if self.tensors else 0)


def header_length(prefix: bytes, file_size: int, *, where: str) -> int:
    """The JSON length from the first 8 bytes, checked against the file and the limit. Raises CheckpointCorrupt."""
    if len(prefix) < 8:
        raise _corrupt(where, f"{file_size} bytes is too short for a safetensors file")
    (length,) = struct.unpack("<Q", prefix[:8])
    if length > MAX_HEADER_BYTES:
        raise _corrupt(where, f"header length {length} is beyond the limit of {MAX_HEADER_BYTES}")
    if 8 + length > file_size:
        raise _corrupt(where, f"header length {length} is beyond the file of {file_size} bytes")
    return length


def parse_header(text: bytes, *, file_size: int | None, where: str) -> Header:
    """Check the JSON part of a header. `file_size` None: the length of the file is not known (a partial download).

    Raises CheckpointCorrupt naming `where`, the tensor, and the expected and found values.
    """
    document = _load(text, where)
    metadata = document.pop("__metadata__", None)
    metadata = {} if metadata is None else metadata
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _corrupt(where, "__metadata__ must map strings to strings")
    for name, entry in document.items():  # in place: a million entries need not be there twice
        document[name] = _spec(name, entry, where)
    tensors: list[TensorSpec] = list(document.values())
    tensors.sort(key=lambda spec: (spec.start, spec.end))
    position, before = 0, ""
    for spec in tensors:
        if spec.start != position:
            kind = "overlaps" if spec.start < position else "leaves a gap after"
            raise _corrupt(
                where,
                f"tensor {spec.name} at offset {spec.start} {kind} {before or 'the start'} which ends at {position}",
            )
        position, before = spec.end, spec.name
    header = Header(tensors, metadata, 8 + len(text))
    if file_size is not None and file_size != header.file_size:
        kind = "is truncated" if file_size < header.file_size else "has trailing bytes"
        raise CheckpointCorrupt(
            f"{where} {kind}: the header needs {header.file_size} bytes, the file has {file_size}",
            hint=again(*os.path.split(where), overwrite=True),
            expected=header.file_size,
            found=file_size,
        )
    return header


def _load(text: bytes, where: str) -> dict[str, Any]:
    document = parse_json(text, where=f"{where}: the header", fail=damage(where), unique_keys=False, bare=True)
    if not isinstance(document, dict):
        raise _corrupt(where, "the header is not a JSON object")
    # A repeated key vanishes in a dict. Quotes inside JSON strings are escaped, so these counts are exact; where they
    # do not agree the slow pass below decides.
    entries = len(document) - ("__metadata__" in document)
    if any(text.count(key) != entries for key in (b'"data_offsets"', b'"dtype"', b'"shape"')):
        parse_json(text, where=f"{where}: the header", fail=damage(where), bare=True)
    return document


def _spec(name: str, entry: Any, where: str) -> TensorSpec:
    try:
        dtype, shape, (start, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        bits = _DTYPES[dtype]
        elements = 1
        for size in shape:
            if type(size) is not int or not 0 <= size <= MAX_OFFSET:
                raise ValueError
            elements *= size
        if type(start) is not int or type(end) is not int or not isinstance(shape, list) or len(shape) > MAX_DIMENSIONS:
            raise ValueError
    except (KeyError, TypeError, ValueError):
        raise _explain(name, entry, where) from None
    if not 0 <= start <= end <= MAX_OFFSET or elements * bits != (end - start) * 8:
        raise _corrupt(
            where,
            f"tensor {name}: {dtype} {shape} needs {-(-elements * bits // 8)} bytes, "
            f"offsets [{shown(start)}, {shown(end)}) hold {shown(end - start)}",
        )
    return TensorSpec(name, dtype, tuple(shape), start, end)


def _explain(name: str, entry: Any, where: str) -> CheckpointCorrupt:
    if not isinstance(entry, dict):
        return _corrupt(where, f"tensor {name}: the entry is not an object")
    absent = [key for key in ("dtype", "shape", "data_offsets") if key not in entry]
    if absent:
        return _corrupt(where, f"tensor {name}: {absent[0]} is missing")
    if entry["dtype"] not in _DTYPES if isinstance(entry["dtype"], str) else True:
        return _corrupt(where, f"tensor {name}: unknown dtype {shown(entry['dtype'])}")
    return _corrupt(
        where, f"tensor {name}: bad shape {shown(entry['shape'])} or data_offsets {shown(entry['data_offsets'])}"
    )


def build_header(
    tensors: Iterable[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, Header]:
    """Header bytes for (name, dtype, shape) in the order in which their data will follow, and the parsed form.

    The JSON is padded with spaces so that the data starts on a multiple of 8 bytes.
    """
    document: dict[str, Any] = {"__metadata__": dict(metadata if metadata is not None else {"format": "pt"})}
    specs: list[TensorSpec] = []
    position = 0
    for name, dtype, shape in tensors:
        if name in document:
            raise ValueError(f"tensor {name} given twice")
        size = count(shape) * _DTYPES[dtype] // 8
        document[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, position + size]}
        specs.append(TensorSpec(name, dtype, tuple(shape), position, position + size))
        position += size
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text, Header(specs, document["__metadata__"], 8 + len(text))


def _corrupt(where: str, what: str) -> CheckpointCorrupt:
    return damaged(where, what)
