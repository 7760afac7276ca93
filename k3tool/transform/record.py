"""`k3tool.json`: what a folder of ranks (or of shards grouped by owner) says about itself.

The layout, who holds which layers and experts, and for every role how its pieces become the original tensor again;
tensors that differ from their role are named one by one. Enough to join without knowing how k3tool splits.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from k3tool.config import K3Config
from k3tool.errors import CheckpointCorrupt
from k3tool.layout import MAX_RANKS, Layout, expert_block, padded_vocab, rank_folder, stages
from k3tool.transform.reshard import LAYOUT_NAME, Join

VERSION = 1
MAX_RECORD_BYTES = 256 << 20
_SPLITS = ("heads", "rows", "columns", "vocabulary", "replicated", "shape")


@dataclass(frozen=True)
class LayoutRecord:
    """form: `ranks` or `hf`. joins: by role. exceptions: by tensor name. owners (hf): rank to the files it needs."""

    form: str
    layout: Layout
    tensors: int
    total_size: int
    joins: Mapping[str, Join] = field(default_factory=dict)
    exceptions: Mapping[str, Join] = field(default_factory=dict)
    owners: Mapping[int, list[str]] = field(default_factory=dict)

    def as_bytes(self, config: K3Config) -> bytes:
        layout = self.layout
        document: dict[str, Any] = {
            "k3tool_layout": VERSION,
            "form": self.form,
            "layout": layout.as_json(),
            "ranks": layout.ranks,
            "stages": [[layers.start, layers.stop] for layers in stages(config.num_layers, layout.pp)],
            "expert_blocks": [
                [block.start, block.stop]
                for block in (expert_block(config.num_experts, layout.ep, ep_rank) for ep_rank in range(layout.ep))
            ],
            "tensors": self.tensors,
            "total_size": self.total_size,
        }
        if self.form == "ranks":
            padded = padded_vocab(config.vocab_size, layout.tp)
            document["folders"] = [rank_folder(rank, layout.ranks) for rank in range(layout.ranks)]
            document["vocabulary"] = {"size": config.vocab_size, "padded": padded}
            document["joins"] = {role: join._asdict() for role, join in sorted(self.joins.items())}
            document["exceptions"] = {name: join._asdict() for name, join in sorted(self.exceptions.items())}
        else:
            document["owners"] = {str(rank): files for rank, files in sorted(self.owners.items())}
        return json.dumps(document, indent=1, ensure_ascii=False).encode() + b"\n"


def parse_record(text: bytes, *, where: str = LAYOUT_NAME) -> LayoutRecord:
    """Raises CheckpointCorrupt for anything that k3tool did not write."""
    try:
        document = json.loads(text)
        if document["k3tool_layout"] != VERSION:
            raise ValueError(f"version {document['k3tool_layout']!r}, this k3tool reads {VERSION}")
        layout = Layout(**{key: _count(document["layout"][key]) for key in ("tp", "ep", "pp")})
        if document["form"] not in ("ranks", "hf") or layout.ranks > MAX_RANKS or document["ranks"] != layout.ranks:
            raise ValueError(f"form {document['form']!r}, {document['ranks']!r} ranks")
        return LayoutRecord(
            document["form"],
            layout,
            int(document["tensors"]),
            int(document["total_size"]),
            {str(role): _join(entry) for role, entry in document.get("joins", {}).items()},
            {str(name): _join(entry) for name, entry in document.get("exceptions", {}).items()},
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointCorrupt(
            f"{where}: not a layout that k3tool wrote ({error})", hint="write the ranks again from the checkpoint"
        ) from None


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_RANKS:
        raise ValueError(f"{value!r} is no number of ranks")
    return value


def _join(entry: Any) -> Join:
    axis, stored, content = entry["axis"], entry["stored"], entry["content"]
    if entry["split"] not in _SPLITS or axis not in (None, 0, 1, 2, 3, 4, 5, 6, 7):
        raise ValueError(f"split {entry['split']!r} along {axis!r}")
    if not (type(stored) is int and type(content) is int and 0 <= content <= stored <= 2**48):
        raise ValueError(f"extent {stored!r}, content {content!r}")
    return Join(entry["split"], axis, stored, content)
