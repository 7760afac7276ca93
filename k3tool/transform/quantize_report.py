"""What a quantization did, from the rows that its steps measured: by component, by layer, tensor by tensor."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from k3tool.checkpoint.outside import corrupt, parse_object, read_file, shown
from k3tool.errors import CheckpointCorrupt
from k3tool.formats.measure import Measured, Weighted, total, total_weighted
from k3tool.names import component_of, parse_name

REPORT_NAME = "k3tool-quantization.json"
MAX_REPORT_BYTES = 256 << 20
_fail = corrupt("what an earlier run recorded here cannot be read: start over with --overwrite")
WORST = 5


class Row(NamedTuple):
    """One module: path, component and layer, scheme before and after, what the change did.

    Compact form, in ledgers and report files: [path, before, after, values, source, stored, error, peak], the last
    four as in `Measured`; with activations, a list of what `Weighted` holds follows.
    """

    path: str
    component: str
    layer: int | None
    before: str
    after: str
    measured: Measured
    weighted: Weighted | None = None


COLUMNS = ("name", "from", "to", "values", "source_squares", "stored_squares", "error_squares", "max_error", "weighted")


def rows_of(compact: Iterable[Sequence[Any]]) -> list[Row]:
    """Rows from their compact form, each module once: ranks may share some."""
    found: dict[str, Row] = {}
    for row in compact:
        if not isinstance(row, (list, tuple)) or len(row) < 8 or not all(isinstance(text, str) for text in row[:3]):
            raise _fail(f"{shown(row)} is no row of a quantization")
        path, before, after, *sums = row
        if path not in found:
            name = parse_name(path + ".weight")
            layer = name.layer if name else None
            weighted = Weighted.from_json(sums[5]) if len(sums) > 5 else None
            found[path] = Row(path, component_of(name), layer, before, after, Measured.from_json(sums[:5]), weighted)
    return list(found.values())


def compact_rows(notes: Mapping[str, Any]) -> Iterator[Sequence[Any]]:
    """Compact rows from a ledger's notes: file to what its steps measured. Raises CheckpointCorrupt."""
    for steps in notes.values():
        for rows in steps or ():
            if not isinstance(steps, list) or not isinstance(rows, list):
                raise _fail(f"{shown(steps)} is not what the steps of a quantization measured")
            yield from rows


def earlier_rows(folder: Path, plan_id: str) -> list[Row]:
    """What an earlier run of the same job wrote down; empty where there is no such report."""
    try:
        text = read_file(folder / REPORT_NAME, MAX_REPORT_BYTES, fail=_fail)
        document = parse_object(text, where=REPORT_NAME, fail=_fail, own=True)
        return rows_of(document.items("tensors")) if document.text("plan") == plan_id else []
    except (OSError, CheckpointCorrupt):
        return []


def report_chunks(head: Mapping[str, Any], rows: Iterable[Row]) -> Iterator[bytes]:
    """The report file: `head`, then a line for each module, worst first."""
    opening = json.dumps({**head, "columns": COLUMNS}, indent=1, ensure_ascii=False)
    yield opening.removesuffix("\n}").encode(errors="replace")
    yield b',\n "tensors": ['
    ordered = sorted(rows, key=_worst_first)
    for number, row in enumerate(ordered):
        entry = [row.path, row.before, row.after, *row.measured.as_json()]
        line = json.dumps(entry + ([row.weighted.as_json()] if row.weighted else []), ensure_ascii=False)
        yield (",\n  " if number else "\n  ").encode() + line.encode(errors="replace")
    yield b"\n ]\n}\n"


def _worst_first(row: Row) -> tuple[float, str]:
    return -row.measured.relative_error, row.path


def by_component(rows: Iterable[Row], untouched: Mapping[str, int] | None = None) -> dict[str, dict[str, Any]]:
    """The report of `--json`. untouched: component to modules that were carried as they are."""
    grouped: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        grouped[row.component].append(row)
    left = dict(untouched or {})
    document = {name: _component(held, left.pop(name, 0)) for name, held in sorted(grouped.items())}
    for name, count in sorted(left.items()):
        document[name] = {
            "scheme": "keep",
            "tensors": count,
            "exact_tensors": count,
            "relative_error": 0.0,
            "max_error": 0.0,
            "worst": [],
        }
    return document


def _component(rows: list[Row], kept: int) -> dict[str, Any]:
    schemes: dict[str, int] = defaultdict(int)
    for row in rows:
        schemes[row.after] += 1
    if kept:
        schemes["keep"] += kept
    whole = total(row.measured for row in rows)
    changed = sorted((row for row in rows if not row.measured.exact), key=_worst_first)
    document: dict[str, Any] = {
        "scheme": next(iter(schemes)) if len(schemes) == 1 else "mixed",
        "tensors": len(rows) + kept,
        "exact_tensors": len(rows) - len(changed) + kept,
        "relative_error": finite(whole.relative_error),
        "max_error": finite(whole.peak),
        "sqnr_db": whole.sqnr_db,
        "cosine": finite(whole.cosine),
        "worst": [row.path for row in changed[:WORST]],
    }
    document.update(_weighted(rows))
    if len(schemes) > 1:
        document["schemes"] = dict(sorted(schemes.items()))
    return document


def _weighted(rows: Iterable[Row]) -> dict[str, Any]:
    """What is told of errors where inputs have energy; nothing without activations."""
    held = [row.weighted for row in rows if row.weighted]
    if not held:
        return {}
    whole = total_weighted(held)
    document: dict[str, Any] = {"weighted_error": finite(whole.relative_error)}
    if whole.outputs is not None:
        made = whole.outputs
        document["output_error"] = {
            "plain": finite(made.relative(made.plain)),
            "searched": finite(made.relative(made.searched)),
            "compensated": finite(made.relative(made.stored)),
            "rows": made.rows,
            "rows_kept": made.rows_kept,
            "tokens_kept_aside": made.held,
            "tensors": sum(1 for row in held if row.outputs),
            "tensors_kept": sum(1 for row in held if row.outputs and row.outputs.rows_kept == row.outputs.rows),
        }
    return document


def by_layer(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """Relative and largest error of each component in each layer, worst first."""
    grouped: dict[tuple[str, int | None], list[Row]] = defaultdict(list)
    for row in rows:
        grouped[row.component, row.layer].append(row)
    table = [
        {
            "component": component,
            "layer": layer,
            "tensors": len(held),
            "exact_tensors": sum(row.measured.exact for row in held),
            "relative_error": finite(total(row.measured for row in held).relative_error),
            "max_error": finite(max(row.measured.peak for row in held)),
            **_weighted(held),
        }
        for (component, layer), held in grouped.items()
    ]
    return sorted(
        table,
        key=lambda entry: (
            -entry["relative_error"],
            entry["component"],
            -1 if entry["layer"] is None else entry["layer"],
        ),
    )


def finite(value: float) -> float:
    """JSON has no infinity: the largest number stands for it."""
    return value if math.isfinite(value) else math.copysign(1.7976931348623157e308, value)
