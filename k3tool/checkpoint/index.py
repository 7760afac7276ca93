"""`model.safetensors.index.json`: which shard holds which tensor, and nothing that leaves the folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from k3tool.checkpoint.origin import damage, damaged
from k3tool.checkpoint.outside import Fields, check_size, parse_json
from k3tool.errors import CheckpointCorrupt

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
MAX_INDEX_BYTES = 256 << 20  # the release's half a million names take 60 MB, as NF4 (six parts a matrix) 180 MB


@dataclass(frozen=True)
class Index:
    """weight_map: tensor name to shard file name. total_size: sum of tensor bytes as the file states it, or None."""

    weight_map: Mapping[str, str]
    total_size: int | None
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def shards(self) -> list[str]:
        return sorted(set(self.weight_map.values()))


def parse_index(text: bytes, *, where: str = INDEX_NAME) -> Index:
    """Raises CheckpointCorrupt for bad JSON, a wrong structure, duplicate names, or a shard name outside the folder."""
    check_size(where, len(text), MAX_INDEX_BYTES, fail=damage(where))
    document = parse_json(text, where=where, fail=damage(where), unique_keys=False)
    weight_map = document.get("weight_map") if isinstance(document, dict) else None
    metadata = (document.get("metadata") or {}) if isinstance(document, dict) else {}
    if not isinstance(weight_map, dict) or not isinstance(metadata, dict):
        raise _corrupt(where, "weight_map must map tensor names to shard names")
    if not all(type(shard) is str for shard in weight_map.values()):
        raise _corrupt(where, "weight_map must map tensor names to shard names")
    for shard in set(weight_map.values()):
        check_file_name(shard, where=where)
    # Every name of the map is followed by its shard: as many `.safetensors"` as names, or a name stood there twice.
    if text.count(b'.safetensors"') != len(weight_map):
        parse_json(text, where=where, fail=damage(where))
    total = Fields(metadata, where, damage(where)).number("total_size", None, low=0, high=1e18)
    return Index(weight_map, None if total is None else int(metadata["total_size"]), metadata)


def check_file_name(name: str, *, where: str) -> None:
    """A shard name must be a plain file name that stays in its folder. Raises CheckpointCorrupt."""
    if not is_shard_name(name):
        raise _corrupt(where, f"shard name {name!r} is not a plain .safetensors file name")


def is_shard_name(name: str) -> bool:
    """Whether this is a plain name of a .safetensors file, which stays in its folder."""
    return (
        0 < len(name) <= 255
        and not name.startswith((".", "-"))
        and not any(char in "/\\:" or ord(char) < 32 or ord(char) == 127 for char in name)
        and name.endswith(".safetensors")
    )


def build_index(weight_map: Mapping[str, str], total_size: int, **metadata: Any) -> bytes:
    document = {"metadata": {"total_size": total_size, **metadata}, "weight_map": dict(sorted(weight_map.items()))}
    return json.dumps(document, indent=2, ensure_ascii=False).encode() + b"\n"


def _corrupt(where: str, what: str) -> CheckpointCorrupt:
    return damaged(where, what)
