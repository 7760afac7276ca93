"""Is this the repository that its configuration claims? Answered from the first kilobytes of what arrives.

Configuration, then index, then each shard's header as soon as its bytes are there, long before its digest is known.
Holds fingerprints, not names: the released index has half a million.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping

from k3tool.catalog import Catalog, section_entries
from k3tool.checkpoint.header import Header, TensorSpec, header_length, parse_header
from k3tool.checkpoint.index import INDEX_NAME
from k3tool.config import K3Config
from k3tool.conform import conform
from k3tool.errors import CheckpointCorrupt
from k3tool.fetch.index_scan import Fingerprint, IndexDigest, digest_of, entries_of
from k3tool.garbage import collector_paused
from k3tool.names import parse_name

Blocks = Callable[[], Iterator[bytes]]
HINT = "this is not the repository you want, or its publisher has to mend it"


class Structure:
    """What the configuration and the index of one commit imply. Safe to ask from several threads."""

    def __init__(self, label: str, config: K3Config, index_blocks: Blocks | None, shards: Mapping[str, int]) -> None:
        """index_blocks: a fresh stream of the index text per call, None for a checkpoint without an index.
        shards: every tensor file of the commit with its size."""
        self.label = label
        self.config = config
        self.shards = shards
        self._blocks = index_blocks
        self._lock = threading.Lock()
        self.index: IndexDigest | None = None
        self.data_bytes: dict[str, int] = {}  # size of the data section of each header seen
        if index_blocks is not None:
            self.index = digest_of(index_blocks, f"{label}/{INDEX_NAME}")
            self._check_index()

    def _check_index(self) -> None:
        """Against the files of the commit, and against the names that the configuration implies."""
        assert self.index is not None and self._blocks is not None
        for shard in self.index.shards:
            if shard not in self.shards:
                raise CheckpointCorrupt(f"{self.label}: the index names {shard}, which the repository lacks", hint=HINT)
        implied = Fingerprint()
        for section in range(section_count(self.config)):
            for entry in section_entries(self.config, section):
                implied.add(entry.name)
        if implied == self.index.names:
            return
        with collector_paused():  # the slow way: name what differs, or find a storage scheme that explains it
            entries = [e for n in range(section_count(self.config)) for e in section_entries(self.config, n)]
            names = entries_of(self._blocks, f"{self.label}/{INDEX_NAME}", lambda name, shard: True)
            result = conform(self.config, Catalog(entries, []), dict.fromkeys(names))
        if result.missing:
            raise CheckpointCorrupt(
                f"{self.label}: the index lacks {len(result.missing)} of {len(entries)} tensors that config.json implies, "
                f"such as {result.missing[0]}",
                hint=HINT,
            )

    def check_header(self, shard: str, text: bytes, file_size: int) -> Header:
        """A shard's header against its file size, the index and the configuration. Raises CheckpointCorrupt."""
        with self._lock:  # one at a time keeps the memory of parsing small
            header = parse_header(text, file_size=file_size, where=f"{self.label}/{shard}")
            self.data_bytes[shard] = file_size - header.data_start
            self._against_index(shard, header.tensors)
            self._against_config(shard, header.tensors)
            return header

    def _against_index(self, shard: str, tensors: list[TensorSpec]) -> None:
        if self.index is None or self._blocks is None or shard not in self.index.shards:
            return  # a tensor file beside the checkpoint
        found = Fingerprint()
        for spec in tensors:
            found.add(spec.name)
        if found == self.index.shards[shard]:
            return
        placed = set(entries_of(self._blocks, f"{self.label}/{INDEX_NAME}", lambda name, where: where == shard))
        names = {spec.name for spec in tensors}
        for kind, odd in (("lacks", placed - names), ("holds", names - placed)):
            if odd:
                rest = "that the index places there" if kind == "lacks" else "that the index does not place there"
                raise CheckpointCorrupt(
                    f"{self.label}/{shard} {kind} {len(odd)} tensors {rest}, such as {min(odd)}", hint=HINT
                )
        raise CheckpointCorrupt(f"{self.label}: the index names a tensor of {shard} twice", hint=HINT)

    def _against_config(self, shard: str, tensors: list[TensorSpec]) -> None:
        """Shapes and dtypes of what is in this shard; what is elsewhere is not missed."""
        if self.index is not None and shard not in self.index.shards:
            return
        config = self.config
        layers = {parsed.layer for spec in tensors if (parsed := parse_name(spec.name)) and parsed.layer is not None}
        sections = [layer for layer in layers if layer < config.num_layers]
        sections += range(config.num_layers, section_count(config))
        names = {spec.name for spec in tensors}
        entries = [entry for section in sections for entry in section_entries(config, section)]
        with collector_paused():
            result = conform(config, Catalog(entries, []), {spec.name: spec for spec in tensors})
        if result.mismatched:
            name, problem = next(iter(result.mismatched.items()))
            raise CheckpointCorrupt(
                f"{self.label}/{shard}: tensor {name} does not fit config.json ({problem})", hint=HINT, tensor=name
            )
        if len(result.missing) == len(entries) and names:
            raise CheckpointCorrupt(
                f"{self.label}/{shard}: none of its {len(names)} tensors is implied by config.json, such as {min(names)}",
                hint=HINT,
            )


def section_count(config: K3Config) -> int:
    return config.num_layers + (3 if config.vision else 1)


def header_text(
    prefix: bytes, file_size: int, read: Callable[[int, int], bytes], available: int, where: str
) -> bytes | None:
    """The JSON of a header once `available` bytes hold all of it, else None. `read(offset, length)` gives file bytes."""
    if available < 8:
        return None
    length = header_length(prefix, file_size, where=where)
    return read(8, length) if available >= 8 + length else None
