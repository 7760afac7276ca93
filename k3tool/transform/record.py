"""`k3tool.json`: what a folder of ranks (or of shards grouped by owner) says about itself.

The layout, who holds which layers and experts, and for every role how its pieces become the original tensor again;
tensors that differ from their role are named one by one. Enough to join without knowing how k3tool splits.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from k3tool.checkpoint.outside import Fields, corrupt, parse_object, read_named
from k3tool.checkpoint.source import Source
from k3tool.config import K3Config
from k3tool.layout import MAX_RANKS, Layout, expert_block, padded_vocab, rank_folder, stages
from k3tool.transform.reshard import LAYOUT_NAME, Join

VERSION = 1
MAX_RECORD_BYTES = 256 << 20
_fail = corrupt("write the ranks again from the checkpoint")
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


def read_record(source: Source) -> LayoutRecord:
    """Raises CheckpointCorrupt for anything that k3tool did not write."""
    text = read_named(source, LAYOUT_NAME, MAX_RECORD_BYTES, fail=_fail)
    return parse_record(text, where=f"{source.label}/{LAYOUT_NAME}")


def parse_record(text: bytes, *, where: str = LAYOUT_NAME) -> LayoutRecord:
    """Raises CheckpointCorrupt for anything that k3tool did not write."""
    where = f"{where}: not a layout that k3tool wrote"
    document = parse_object(text, where=where, fail=_fail)
    if document.integer("k3tool_layout") != VERSION:
        raise document.bad("k3tool_layout", f"{VERSION}, which this k3tool reads")
    section = document.fields("layout")
    layout = Layout(*(section.integer(key, low=1, high=MAX_RANKS) for key in ("tp", "ep", "pp")))
    if document.integer("ranks", low=1, high=MAX_RANKS) != layout.ranks:
        raise document.bad("ranks", f"{layout.ranks} for {layout}")
    return LayoutRecord(
        document.text("form", choices=("ranks", "hf")),
        layout,
        document.integer("tensors"),
        document.integer("total_size"),
        {role: _join(entry) for role, entry in document.each("joins", {})},
        {name: _join(entry) for name, entry in document.each("exceptions", {})},
    )


def _join(entry: Fields) -> Join:
    stored = entry.integer("stored", high=2**48)
    axis, content = entry.integer("axis", None, high=7), entry.integer("content", high=stored)
    return Join(entry.text("split", choices=_SPLITS), axis, stored, content)
