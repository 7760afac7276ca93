"""What a conversion did to the values: one entry for each component, from the plan and from what the steps measured."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from k3tool.checkpoint.outside import Fields, corrupt, parse_object, read_file
from k3tool.errors import CheckpointCorrupt
from k3tool.formats.measure import Measured, total
from k3tool.gguf.mapping import GgufTensor
from k3tool.transform.gguf import Rounded
from k3tool.transform.quantize_report import finite

REPORT_NAME = "k3tool-gguf.json"
MAX_REPORT_BYTES = 16 << 20
_fail = corrupt("what an earlier run recorded here cannot be read: start over with --overwrite")
WORST_SHOWN = 8


@dataclass
class Changes:
    """The tensors of one component that a change of type could round: how many of them it changed, sums over all of
    them, and the worst as (relative error, name)."""

    changed: int = 0
    sums: Measured = field(default_factory=lambda: total(()))
    worst: list[tuple[float, str]] = field(default_factory=list)

    def add(self, other: Changes) -> None:
        self.changed += other.changed
        self.sums = total((self.sums, other.sums))
        self.worst = sorted([*self.worst, *other.worst], key=lambda entry: (-entry[0], entry[1]))[:WORST_SHOWN]

    def as_json(self) -> dict[str, Any]:
        return {**vars(self), "sums": self.sums.as_json()}

    @classmethod
    def read(cls, row: Fields) -> Changes:
        """Raises CheckpointCorrupt for what `as_json` did not make."""
        worst = row.items("worst")
        for entry in worst:
            if not (
                isinstance(entry, (list, tuple))
                and len(entry) == 2
                and isinstance(entry[0], float)
                and isinstance(entry[1], str)
            ):
                raise row.bad("worst", "pairs of error and name")
        found = [(error, name) for error, name in worst]
        return cls(row.integer("changed"), Measured.from_json(row.values.get("sums")), found)


def summarize(measured: Iterable[Rounded]) -> dict[str, Any]:
    """The JSON kept with a finished file: component to `Changes`. A tensor's steps all belong to the same file."""
    rows: dict[tuple[str, str], list[Measured]] = {}
    for entry in measured:
        rows.setdefault((entry.component, entry.tensor), []).append(Measured.from_json(entry.sums))
    changes: dict[str, Changes] = {}
    for (component, tensor), parts in rows.items():
        sums = total(parts)
        worst = [] if sums.exact else [(sums.relative_error, tensor)]
        changes.setdefault(component, Changes()).add(Changes(int(not sums.exact), sums, worst))
    return {component: entry.as_json() for component, entry in changes.items()}


def merge(notes: Iterable[Mapping[str, Any] | None]) -> dict[str, Changes]:
    """What several files' notes say together."""
    merged: dict[str, Changes] = {}
    for note in notes:
        for component, row in Fields({"note": note}, "a finished file", _fail).each("note", {}):
            merged.setdefault(component, Changes()).add(Changes.read(row))
    return merged


def components(tensors: Sequence[GgufTensor], changes: Mapping[str, Changes]) -> dict[str, Any]:
    """Component to {scheme, tensors, exact_tensors, relative_error, max_error, worst}.

    tensors: source matrices and vectors, each expert's matrices singly. relative_error: RMS of the difference over RMS
    of the source, of those tensors that were rounded. folded: vectors that hold a product or a rate instead of the
    source's own values, as llama.cpp's graph expects; they count as exact.
    """
    held: dict[str, dict[str, Any]] = {}
    for tensor in tensors:
        entry = held.setdefault(tensor.component, {"types": {}, "tensors": 0, "folded": 0})
        entry["tensors"] += tensor.sources
        entry["folded"] += tensor.folded
        kind = tensor.info.kind.name.lower()
        entry["types"][kind] = entry["types"].get(kind, 0) + tensor.info.nbytes
    return {component: _component(entry, changes.get(component, Changes())) for component, entry in held.items()}


def _component(entry: Mapping[str, Any], changes: Changes) -> dict[str, Any]:
    types = entry["types"]
    return {
        "scheme": max(types, key=types.__getitem__),
        "tensors": entry["tensors"],
        "exact_tensors": entry["tensors"] - changes.changed,
        "relative_error": finite(changes.sums.relative_error),
        "max_error": changes.sums.peak,
        "worst": [name for _, name in changes.worst],
        "folded": entry["folded"],
        "bytes_by_type": types,
    }


def report_file(plan: str, changes: Mapping[str, Changes]) -> bytes:
    """What was measured, kept beside the files, so that a command that finds everything done can still tell."""
    document = {"plan": plan, "changes": {component: entry.as_json() for component, entry in changes.items()}}
    return json.dumps(document, indent=1).encode() + b"\n"


def earlier_report(dest: Path, plan: str) -> dict[str, Changes]:
    """What an earlier run of the same plan measured; empty where there is no such report."""
    try:
        text = read_file(dest / REPORT_NAME, MAX_REPORT_BYTES, fail=_fail)
        document = parse_object(text, where=REPORT_NAME, fail=_fail, own=True)
        if document.text("plan") != plan:
            return {}
        return {component: Changes.read(row) for component, row in document.each("changes")}
    except (OSError, CheckpointCorrupt):
        return {}
