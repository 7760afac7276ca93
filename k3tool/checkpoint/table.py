"""All tensors of a checkpoint as a compact table: half a million names in about a hundred megabytes.

`Checkpoint` keeps parsed headers for interactive use; a job over the whole release wants only names, kinds and
offsets, in file order, which is the order that reads best.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple, Protocol

from k3tool.catalog import count
from k3tool.checkpoint.header import Header, TensorSpec, dtype_bits
from k3tool.checkpoint.origin import look, names_of
from k3tool.checkpoint.reader import Checkpoint, Located, check_headers, most_tensors, read_header
from k3tool.checkpoint.source import Source
from k3tool.checkpoint.strays import absent_shard
from k3tool.errors import CheckpointCorrupt, CheckpointMissing


class Kind(NamedTuple):
    """dtype as safetensors spells it, and shape."""

    dtype: str
    shape: tuple[int, ...]


class Tensors(Protocol):
    """Where named tensors are: what a plan's regions are resolved with. `Checkpoint` and `TensorTable` are both."""

    @property
    def source(self) -> Source: ...

    def locate(self, name: str) -> Located: ...


class TensorTable:
    """Names, kinds and places of one checkpoint's tensors. Iteration gives the names in file order."""

    def __init__(self, source: Source, files: Mapping[str, int]) -> None:
        self._source = source
        self.sizes = dict(files)
        self.shards: list[str] = []
        self._first: list[int] = []  # number of the first tensor of each shard
        self._data_starts: list[int] = []  # file offset of each shard's data section
        self._starts = array("q")  # file offset of each tensor
        self._kinds: list[Kind] = []
        self._numbers: dict[str, int] = {}
        self._intern: dict[Kind, Kind] = {}

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> TensorTable:
        """Reads every header. Raises CheckpointMissing, CheckpointCorrupt where index and shards disagree."""
        table = cls(checkpoint.source, checkpoint.files)
        weight_map = checkpoint.index.weight_map
        most = most_tensors(checkpoint.index)
        for shard in checkpoint.index.shards:
            table._add(shard, weight_map, most)
            check_headers(table.source.label, sum(table._data_starts))
        if len(table) != len(weight_map):
            name = next(name for name in weight_map if name not in table._numbers)
            raise CheckpointCorrupt(
                f"{weight_map[name]} does not hold tensor {name} that the index places there",
                hint=look(table.source.label),
            )
        return table

    @classmethod
    def of_files(cls, source: Source, names: Iterable[str]) -> TensorTable:
        """Of these files alone, by their headers, without an index. Raises CheckpointMissing, CheckpointCorrupt."""
        table = cls(source, source.files())
        for name in names:
            table._place(name, read_header(source, name, table.sizes))
        return table

    def _add(self, shard: str, weight_map: Mapping[str, str], most: int) -> None:
        if shard not in self.sizes:
            raise absent_shard(self._source, shard, self.sizes, set(weight_map.values()))
        header = read_header(self._source, shard, self.sizes, most=most)
        for spec in header.tensors:
            if weight_map.get(spec.name) != shard:
                raise CheckpointCorrupt(
                    f"{shard} holds tensor {spec.name} that the index does not place there",
                    hint=look(self._source.label),
                )
        self._place(shard, header)

    def _place(self, shard: str, header: Header) -> None:
        self.shards.append(shard)
        self._first.append(len(self._kinds))
        self._data_starts.append(header.data_start)
        for spec in header.tensors:
            kind = Kind(sys.intern(spec.dtype), spec.shape)
            self._numbers[spec.name] = len(self._kinds)
            self._kinds.append(self._intern.setdefault(kind, kind))
            self._starts.append(header.data_start + spec.start)

    @property
    def source(self) -> Source:
        return self._source

    def __len__(self) -> int:
        return len(self._numbers)

    def __iter__(self) -> Iterator[str]:
        return iter(self._numbers)

    def __contains__(self, name: object) -> bool:
        return name in self._numbers

    def kind(self, name: str) -> Kind:
        """Raises KeyError for an unknown name."""
        return self._kinds[self._numbers[name]]

    def items(self) -> Iterator[tuple[str, Kind]]:
        return zip(self._numbers, self._kinds, strict=True)

    def locate(self, name: str) -> Located:
        """Raises CheckpointMissing for a name that is not there."""
        number = self._numbers.get(name)
        if number is None:
            raise CheckpointMissing(f"{self._source.label} holds no tensor {name}", hint=names_of(self._source.label))
        kind = self._kinds[number]
        shard = bisect_right(self._first, number) - 1
        offset = self._starts[number]
        start = offset - self._data_starts[shard]
        end = start + count(kind.shape) * dtype_bits(kind.dtype) // 8
        return Located(TensorSpec(name, kind.dtype, kind.shape, start, end), self.shards[shard], offset)

    def data_start(self, shard: str) -> int:
        """File offset of a shard's data section: the length of its header."""
        return self._data_starts[self.shards.index(shard)]

    def digest(self) -> str:
        """SHA-256 over every name, kind and place and the file sizes: the identity of what a plan was made from."""
        digest = hashlib.sha256()
        for shard in self.shards:
            digest.update(f"{shard} {self.sizes[shard]}\n".encode())
        for (name, kind), start in zip(self.items(), self._starts, strict=True):
            digest.update(f"{name} {kind.dtype} {kind.shape} {start}\n".encode())
        return digest.hexdigest()
