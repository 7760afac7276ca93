"""A reader of GGUF files for the tests, written from the format's description alone."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
BLOCKS = {0: ("F32", 1, 4), 1: ("F16", 1, 2), 8: ("Q8_0", 32, 34), 30: ("BF16", 1, 2), 39: ("MXFP4", 32, 17)}


class Stored(NamedTuple):
    """shape: outermost first. raw: the bytes, one row of `shape[-1]` values after the other."""

    kind: str
    shape: tuple[int, ...]
    raw: np.ndarray


class Read:
    """keys: name to value. types: name to (type number, item type number or None). tensors: in file order."""

    def __init__(self, path: Path) -> None:
        self.data = path.read_bytes()
        self.at = 0
        assert self.take(4) == b"GGUF"
        version, tensors, keys = self.scalars("<IQQ")
        assert version == 3
        self.keys: dict[str, Any] = {}
        self.types: dict[str, tuple[int, int | None]] = {}
        for _ in range(keys):
            name = self.text()
            kind = self.scalars("<I")[0]
            self.types[name] = (kind, struct.unpack_from("<I", self.data, self.at)[0] if kind == 9 else None)
            assert name not in self.keys
            self.keys[name] = self.value(kind)
        infos = [self.info() for _ in range(tensors)]
        start = -(-self.at // 32) * 32
        assert not any(self.data[self.at : start])
        self.tensors: dict[str, Stored] = {}
        end = start
        for name, shape, number, offset in infos:
            kind, block, size = BLOCKS[number]
            length = int(np.prod(shape)) // block * size
            assert offset % 32 == 0 and start + offset == -(-end // 32) * 32 and name not in self.tensors
            assert not any(self.data[end : start + offset])
            end = start + offset + length
            self.tensors[name] = Stored(kind, shape, np.frombuffer(self.data, np.uint8, length, start + offset))
        assert len(self.data) == -(-end // 32) * 32 and not any(self.data[end:])

    def take(self, length: int) -> bytes:
        self.at += length
        assert self.at <= len(self.data)
        return self.data[self.at - length : self.at]

    def scalars(self, layout: str) -> tuple[Any, ...]:
        return struct.unpack(layout, self.take(struct.calcsize(layout)))

    def text(self) -> str:
        return self.take(self.scalars("<Q")[0]).decode()

    def value(self, kind: int) -> Any:
        if kind == 8:
            return self.text()
        if kind == 9:
            item, count = self.scalars("<IQ")
            return [self.value(item) for _ in range(count)]
        return self.scalars(SCALARS[kind])[0]

    def info(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self.text()
        shape = self.scalars(f"<{self.scalars('<I')[0]}Q")
        return name, shape[::-1], *self.scalars("<IQ")
