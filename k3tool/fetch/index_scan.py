"""The index of a large checkpoint, read as it streams by: half a million names are never held at once.

The released index is 60 MB of text; parsed whole it costs several hundred megabytes. Here the text passes through a
pattern in blocks. A file that is written in any unusual way is left to the full parser.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from k3tool.checkpoint.index import check_file_name, parse_index
from k3tool.checkpoint.outside import decode_json

_PAIR = re.compile(rb'"([^"\\\x00-\x1f]+)"\s*:\s*"([^"\\\x00-\x1f]+\.safetensors)"')
_SPACE = re.compile(rb'("(?:[^"\\]|\\.)*")|\s+')  # white space outside of strings
_EMPTY_MAP = re.compile(rb'"weight_map":\{,*\}')
TAIL_LIMIT = 1 << 16


class Unusual(Exception):
    """Not the plain form of an index: let the full parser judge it."""


@dataclass
class Fingerprint:
    """How many names, and a sum over them that does not depend on their order (within this process)."""

    count: int = 0
    total: int = 0

    def add(self, name: str) -> None:
        self.count += 1
        self.total = (self.total + hash(name)) & 0xFFFF_FFFF_FFFF_FFFF


@dataclass
class IndexDigest:
    """What is kept of an index: the fingerprint of each shard's names and of all, and the metadata."""

    shards: dict[str, Fingerprint] = field(default_factory=dict)
    names: Fingerprint = field(default_factory=Fingerprint)
    metadata: dict[str, object] = field(default_factory=dict)

    def add(self, name: str, shard: str) -> None:
        found = self.shards.get(shard)
        if found is None:
            check_file_name(shard, where="the index")
            found = self.shards[shard] = Fingerprint()
        found.add(name)
        self.names.add(name)


def scan(blocks: Iterable[bytes], each: Callable[[str, str], None]) -> dict[str, object]:
    """Call `each(tensor, shard)` for every entry in file order and return the metadata. Raises Unusual."""
    rest = bytearray()
    pieces: list[bytes] = []
    entries = 0
    for block in blocks:
        rest += block
        done = 0
        for match in _PAIR.finditer(rest):
            pieces.append(bytes(rest[done : match.start()]).strip())
            each(match[1].decode(), match[2].decode())
            entries += 1
            done = match.end()
        del rest[:done]
        if len(rest) > TAIL_LIMIT:
            raise Unusual
        if len(pieces) > 4096:
            pieces = [b"".join(pieces)]
    pieces.append(bytes(rest))
    frame = b"".join(pieces)
    frame = _SPACE.sub(lambda match: match[1] or b"", frame)
    maps = _EMPTY_MAP.findall(frame)
    if len(maps) != 1 or maps[0].count(b",") != max(0, entries - 1):  # a pair stood elsewhere
        raise Unusual
    try:
        document = decode_json(_EMPTY_MAP.sub(b'"weight_map":{}', frame).decode())
    except (ValueError, RecursionError):
        raise Unusual from None
    metadata = (document.get("metadata") or {}) if isinstance(document, dict) else None
    if not isinstance(metadata, dict):
        raise Unusual
    return metadata


def scan_or_parse(blocks: Callable[[], Iterator[bytes]], where: str, each: Callable[[str, str], None]) -> None:
    """`scan`, or the full parser where the text is unusual: `each` may then hear of entries a second time.

    Raises CheckpointCorrupt for an index that is damaged.
    """
    try:
        scan(blocks(), each)
    except (Unusual, UnicodeDecodeError):
        for name, shard in parse_index(b"".join(blocks()), where=where).weight_map.items():
            each(name, shard)


def digest_of(blocks: Callable[[], Iterator[bytes]], where: str) -> IndexDigest:
    """The digest of an index whose text `blocks()` yields. Raises CheckpointCorrupt for one that is damaged."""
    digest = IndexDigest()
    try:
        digest.metadata = scan(blocks(), digest.add)
    except (Unusual, UnicodeDecodeError):
        index = parse_index(b"".join(blocks()), where=where)
        digest = IndexDigest(metadata=dict(index.metadata))
        for name, shard in index.weight_map.items():
            digest.add(name, shard)
    return digest


def entries_of(blocks: Callable[[], Iterator[bytes]], where: str, keep: Callable[[str, str], bool]) -> dict[str, str]:
    """Tensor name to shard for the entries that `keep` wants."""
    kept: dict[str, str] = {}

    def each(name: str, shard: str) -> None:
        if keep(name, shard):
            kept[name] = shard

    scan_or_parse(blocks, where, each)
    return kept
