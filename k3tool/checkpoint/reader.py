"""A checkpoint as names, specs and bytes: opens what it is asked for and holds nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from k3tool.checkpoint.header import Header, TensorSpec, header_length, parse_header
from k3tool.checkpoint.index import INDEX_NAME, MAX_INDEX_BYTES, SINGLE_NAME, Index, parse_index
from k3tool.checkpoint.origin import RANK_FOLDER, again, damage, damaged, knows, look, names_of
from k3tool.checkpoint.outside import check_size, corrupt, read_named
from k3tool.checkpoint.source import Source, open_source
from k3tool.checkpoint.strays import absent_shard, folder_with, stray_shards
from k3tool.config import MAX_CONFIG_BYTES, K3Config
from k3tool.errors import CheckpointCorrupt, CheckpointMissing

CONFIG_NAME = "config.json"
MAX_HEADERS_BYTES = 512 << 20  # of one checkpoint; the release has 79 MB
HEADER_GUESS = 1 << 20  # one read gets the whole header of a released shard (0.82 MB)
LEAST_GUESS, GUESSED_SHARE = 32 << 10, 32  # of small shards no more than a share: the rest is fetched when it is needed


@dataclass(frozen=True)
class Located:
    """A tensor and where its bytes are: `offset` counts from the start of the file `shard`."""

    spec: TensorSpec
    shard: str
    offset: int


class Checkpoint:
    """One checkpoint of a Source. Headers are read once, on first use, and checked against the index."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self._headers: dict[str, Header] = {}
        self._header_bytes = 0

    @classmethod
    def open(cls, where: str | Path) -> Checkpoint:
        """A folder or a Hub repository. Raises CheckpointMissing where there is no configuration or no tensor file."""
        return cls(open_source(where))

    @cached_property
    def files(self) -> dict[str, int]:
        return self.source.files()

    @cached_property
    def config(self) -> K3Config:
        if CONFIG_NAME not in self.files:
            raise self._no_config()
        return K3Config.from_bytes(self._read_small(CONFIG_NAME, MAX_CONFIG_BYTES), where=self._where(CONFIG_NAME))

    @cached_property
    def index(self) -> Index:
        """The index file, or for a single-file model the one made from its header."""
        if INDEX_NAME in self.files:
            return parse_index(self._read_small(INDEX_NAME, MAX_INDEX_BYTES), where=self._where(INDEX_NAME))
        if SINGLE_NAME in self.files:
            tensors = self.header(SINGLE_NAME).tensors
            return Index({spec.name: SINGLE_NAME for spec in tensors}, sum(spec.nbytes for spec in tensors))
        raise self._no_index()

    def _no_config(self) -> CheckpointMissing:
        files, label = self.files, self.source.label
        other = next((name for name in files if name.lower() == CONFIG_NAME), "")
        what, hint = "", again(label, [CONFIG_NAME])
        if other:
            what, hint = f" ({other} is in another case)", f"rename {other} to {CONFIG_NAME}"
        elif deeper := folder_with(self.source, CONFIG_NAME):
            what, hint = f"; its folder {deeper} does", f"name {label}/{deeper}"
        elif not stray_shards(files, ()) and INDEX_NAME not in files and not knows(label):
            hint = "name the folder that holds config.json and the shards"
        return CheckpointMissing(f"{label} holds no {CONFIG_NAME}, so it is no checkpoint{what}", hint=hint)

    def _no_index(self) -> CheckpointMissing:
        files, label = self.files, self.source.label
        strays = stray_shards(files, ())
        what, hint = "", again(label, [INDEX_NAME])
        other = next((name for name in files if name.lower() == INDEX_NAME), "")
        if "k3tool.json" in files:
            hint = "its ranks are folders of their own: name one of them, or join them with `reshard --layout hf`"
        elif other:
            what, hint = f" ({other} is in another case)", f"rename {other} to {INDEX_NAME}"
        elif strays:
            what = (
                f"; it holds {len(strays)} .safetensors files, such as {strays[0]}, and nothing says what is in which"
            )
        elif deeper := folder_with(self.source, INDEX_NAME) or folder_with(self.source, SINGLE_NAME):
            if RANK_FOLDER.fullmatch(deeper):
                return CheckpointMissing(
                    f"{label} holds folders of ranks, such as {deeper}, and no k3tool.json, which says how they join",
                    hint=again(label, ["k3tool.json"])
                    if knows(label)
                    else again(f"{label}/{deeper}", ["k3tool.json"], overwrite=True),
                )
            what, hint = f"; its folder {deeper} does", f"name {label}/{deeper}, or move its files one folder up"
        return CheckpointMissing(f"{label} holds neither {INDEX_NAME} nor {SINGLE_NAME}{what}", hint=hint)

    def _where(self, name: str) -> str:
        return f"{self.source.label}/{name}"

    def _read_small(self, name: str, limit: int) -> bytes:
        """A whole file, refused before it is read where it is beyond `limit`."""
        return read_named(self.source, name, limit, fail=damage(self._where(name)), files=self.files)

    @property
    def shards(self) -> list[str]:
        return self.index.shards

    def header(self, shard: str) -> Header:
        """Header of one shard, checked against the length of the file. Raises CheckpointMissing, CheckpointCorrupt."""
        if shard not in self._headers:
            if shard not in self.files:
                raise absent_shard(self.source, shard, self.files, self.shards if shard != SINGLE_NAME else ())
            header = read_header(self.source, shard, self.files, most=self._most)
            self._header_bytes += header.data_start
            check_headers(self.source.label, self._header_bytes)
            self._headers[shard] = header
        return self._headers[shard]

    @property
    def _most(self) -> int | None:
        return most_tensors(self.index) if INDEX_NAME in self.files else None

    @cached_property
    def located(self) -> dict[str, Located]:
        """Every tensor of the index with its place; reads all headers. Raises where index and headers disagree."""
        table: dict[str, Located] = {}
        for shard in self.shards:
            header = self.header(shard)
            for spec in header.tensors:
                if self.index.weight_map.get(spec.name) == shard:
                    table[spec.name] = Located(spec, shard, header.data_start + spec.start)
        if len(table) != len(self.index.weight_map):
            name, shard = next((n, s) for n, s in self.index.weight_map.items() if n not in table)
            raise CheckpointCorrupt(
                f"{shard} does not hold tensor {name} that the index places there",
                hint=look(self.source.label),
            )
        return table

    def locate(self, name: str) -> Located:
        """Place of one tensor; reads one header. Raises CheckpointMissing for a name that is not in the index."""
        shard = self.index.weight_map.get(name)
        if shard is None:
            raise CheckpointMissing(f"{self.source.label} holds no tensor {name}", hint=names_of(self.source.label))
        header = self.header(shard)
        for spec in header.tensors:
            if spec.name == name:
                return Located(spec, shard, header.data_start + spec.start)
        raise CheckpointCorrupt(
            f"{shard} does not hold tensor {name} that the index places there",
            hint=look(self.source.label),
        )

    def read(self, name: str) -> bytes:
        """All bytes of one tensor, row-major, little-endian."""
        place = self.locate(name)
        return self.source.read(place.shard, place.offset, place.spec.nbytes)

    def read_rows(self, name: str, first: int, last: int) -> bytes:
        """Bytes of rows [first, last) along the leading dimension. Raises ValueError outside the shape."""
        place = self.locate(name)
        rows = place.spec.shape[0] if place.spec.shape else 0
        if not 0 <= first <= last <= rows:
            raise ValueError(f"rows [{first}, {last}) are outside {name} {place.spec.shape}")
        step = place.spec.nbytes // rows if rows else 0
        return self.source.read(place.shard, place.offset + first * step, (last - first) * step)


def check_headers(label: str, total: int) -> None:
    """Refuse headers that together, so far, are more than any checkpoint has: they are held in memory."""
    fail = corrupt("a checkpoint has headers of about 160 bytes a tensor: name the publisher's own shards")
    check_size(f"{label}: the headers of its shards together", total, MAX_HEADERS_BYTES, fail=fail)


def most_tensors(index: Index) -> int:
    """How many tensors a shard may hold before its header is read for what they are."""
    return 2 * len(index.weight_map) + 10_000


def read_header(source: Source, shard: str, files: dict[str, int] | None = None, *, most: int | None = None) -> Header:
    """Read and check one header; one request for those of released shards. Raises CheckpointMissing, CheckpointCorrupt.

    most: more tensors than these are refused before the header is parsed.
    """
    files = source.files() if files is None else files
    size = files.get(shard)
    if size is None:
        raise absent_shard(source, shard, files)
    text = read_header_text(source, shard, size)
    where = f"{source.label}/{shard}"
    if most is not None and (held := text.count(b'"data_offsets"')) > most:
        raise damaged(where, f"its header names {held:,} tensors, many more than the index names in all")
    return parse_header(text, file_size=size, where=where)


def read_header_text(source: Source, shard: str, size: int) -> bytes:
    """The JSON of one header, unchecked but for its length. Raises CheckpointCorrupt."""
    guess = min(HEADER_GUESS, max(LEAST_GUESS, size // GUESSED_SHARE))
    first = source.read(shard, 0, min(size, guess))
    length = header_length(first, size, where=f"{source.label}/{shard}")
    text = first[8 : 8 + length]
    if len(text) < length:
        text += source.read(shard, len(first), 8 + length - len(first))
    return text
