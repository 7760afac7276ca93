"""The public release of Kimi K3 as built-in facts: sizes and SHA-256 of its files, and its configuration.

The weights are the same at every known revision, so that one table serves them all. The digests are the publisher's
(Git LFS object ids). Used to prove files without a network, and as the configuration `k3` of `k3tool plan`.
"""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Any

from k3tool.checkpoint.manifest import FileRecord
from k3tool.config import K3Config
from k3tool.names import shard_name

NAME = "k3"
TOTAL_SIZE = 1_560_860_324_864  # sum of tensor bytes
FILE_SIZE = 1_560_936_091_448  # sum of the 96 shard files


@cache
def _data() -> dict[str, Any]:
    return json.loads((files("k3tool") / "data" / "release.json").read_bytes())


def repo() -> str:
    return _data()["repo"]


def revisions() -> tuple[str, ...]:
    """The commits known to hold exactly these weights."""
    return tuple(_data()["revisions"])


@cache
def shards() -> dict[str, FileRecord]:
    """The 96 shard files: name to size and digest."""
    rows = _data()["shards"]
    return {shard_name(number, len(rows)): FileRecord(size, sha256) for number, (size, sha256) in enumerate(rows, 1)}


@cache
def other_files() -> dict[str, FileRecord]:
    """Configuration, index, tokenizer and code files whose digests were published."""
    return {name: FileRecord(size, sha256) for name, (size, sha256) in _data()["files"].items()}


def config_dict() -> dict[str, Any]:
    """The architecture part of the released `config.json`. A fresh copy each time."""
    return json.loads(json.dumps(_data()["config"]))


@cache
def config() -> K3Config:
    return K3Config.from_dict(config_dict(), where="the built-in configuration k3")


def same_architecture(other: K3Config) -> bool:
    """Whether a configuration describes the released model in everything that names and shapes depend on."""
    from dataclasses import fields

    ignored = {"raw", "quantization", "bos_token_id", "eos_token_ids", "pad_token_id", "media_token_id"}
    mine = config()
    return all(getattr(mine, f.name) == getattr(other, f.name) for f in fields(mine) if f.name not in ignored) and (
        mine.expert_scheme == other.expert_scheme
    )
