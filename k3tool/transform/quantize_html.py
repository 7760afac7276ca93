"""The report of a quantization as one HTML page: sizes, a heatmap of errors, their distribution, the worst tensors.

Everything is inside the page: no script, no font, no image from elsewhere. Numbers come from the same rows as JSON.
"""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from k3tool.errors import UsageError
from k3tool.formats.measure import Measured, total
from k3tool.names import parse_name
from k3tool.transform.quantize_report import Row
from k3tool.units import format_bytes, format_duration

MARK = '<meta name="generator" content="k3tool quantize">'  # a page with it may be replaced by a later one
BINS = 32
WORST_SHOWN = 25
CELL, LEFT, TOP = 14, 300, 26
_STYLE = """
body{font:14px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:1100px;padding:0 1rem;color:#1b1f24;background:#fff}
h1{font-size:1.4rem}h2{font-size:1.1rem;margin-top:2rem}table{border-collapse:collapse}
td,th{padding:.2rem .8rem;text-align:right;border-bottom:1px solid #d8dee4}td:first-child,th:first-child{text-align:left}
code{font-size:.9em;overflow-wrap:anywhere}svg text{font:11px system-ui,sans-serif;fill:currentColor}
.scroll{overflow-x:auto}
@media(prefers-color-scheme:dark){body{color:#e6edf3;background:#0d1117}td,th{border-color:#30363d}}
"""


def html_page(source: str, document: Mapping[str, Any], rows: Sequence[Row]) -> str:
    """document: `QuantizeResult.as_json()`. rows: one per converted module."""
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>",
        MARK,
        f"<title>Quantization of {escape(source)}</title><style>{_STYLE}</style>",
        f"<h1>Quantization of {escape(source)}</h1>",
        f"<p>{format_bytes(document['bytes_in'])} became {format_bytes(document['bytes_out'])} in "
        f"{format_duration(document['seconds'])}. Readable by: {escape(document['readers'])}.</p>",
        "<h2>Components</h2>",
        _components(document["components"]),
        *_outputs(document["components"]),
        "<h2>Relative error by module and layer</h2>",
        _heatmap(rows),
        "<h2>Distribution of relative errors</h2>",
        _histogram([row.measured.relative_error for row in rows if not row.measured.exact]),
        "<h2>Worst tensors</h2>",
        _worst(rows),
        "</html>\n",
    ]
    return "\n".join(parts)


def _table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    top = "".join(f"<th>{escape(text)}</th>" for text in head)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in line) + "</tr>" for line in lines)
    return f"<div class=scroll><table><tr>{top}</tr>{body}</table></div>"


def _components(components: Mapping[str, Mapping[str, Any]]) -> str:
    weighted = any("weighted_error" in entry for entry in components.values())
    lines = [
        (
            escape(name),
            escape(entry["scheme"]),
            f"{entry['tensors']:,}",
            f"{entry['exact_tensors']:,}",
            _error(entry["relative_error"]),
            *([_error(entry["weighted_error"]) if "weighted_error" in entry else ""] if weighted else ()),
            f"{entry['max_error']:.3g}",
            "" if entry.get("sqnr_db") is None else f"{entry['sqnr_db']:.1f} dB",
            "" if "cosine" not in entry else f"{entry['cosine']:.6f}",
        )
        for name, entry in components.items()
    ]
    numbers = ("relative error", *(["weighted error"] if weighted else ()), "max error", "SQNR", "cosine")
    head = ("component", "scheme", "tensors", "exact", *numbers)
    return _table(head, lines)


def _outputs(components: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What error compensation brought, where there was any."""
    held = {name: entry["output_error"] for name, entry in components.items() if "output_error" in entry}
    lines = [
        (
            escape(name),
            *(_error(error[key]) for key in ("plain", "searched", "compensated")),
            f"{error['rows_kept']:,} of {error['rows']:,}",
        )
        for name, error in held.items()
    ]
    head = ("component", "plain scales", "searched scales", "compensated", "rows that are rounded")
    aside = all(error["tokens_kept_aside"] for error in held.values())
    inputs = "inputs that were kept aside" if aside else "the inputs that errors were compensated for"
    said = f"RMS of the difference of outputs over RMS of outputs, on {inputs}."
    return ["<h2>Error of outputs</h2>", f"<p>{said}</p>", _table(head, lines)] if held else []


def _error(value: float) -> str:
    return "0 (exact)" if value == 0 else f"{value:.5f}"


def _heatmap(rows: Sequence[Row]) -> str:
    """Layers across, modules down; experts of a layer are one cell each for w1, w2 and w3."""
    cells: dict[tuple[str, int], list[Measured]] = defaultdict(list)
    for row in rows:
        name = parse_name(row.path + ".weight")
        if name is not None and name.layer is not None:
            cells[name.module, name.layer].append(row.measured)
    if not cells:
        return "<p>No layer was converted.</p>"
    modules = sorted({module for module, _ in cells})
    layers = sorted({layer for _, layer in cells})
    errors = {key: total(measured).relative_error for key, measured in cells.items()}
    most = max(errors.values()) or 1.0
    drawn = [
        f"<text x={LEFT - 6} y={TOP + CELL * row + 11} text-anchor=end>{escape(module)}</text>"
        for row, module in enumerate(modules)
    ]
    step = max(1, math.ceil(len(layers) / 24))
    drawn += [
        f"<text x={LEFT + CELL * column} y={TOP - 8}>{layer}</text>"
        for column, layer in enumerate(layers)
        if column % step == 0
    ]
    for (module, layer), error in errors.items():
        x, y = LEFT + CELL * layers.index(layer), TOP + CELL * modules.index(module)
        said = f"layer {layer} {module}: {_error(error)}, {len(cells[module, layer]):,} tensors"
        drawn.append(
            f"<rect x={x} y={y} width={CELL - 1} height={CELL - 1} fill='{_colour(error / most)}'>"
            f"<title>{escape(said)}</title></rect>"
        )
    width, height = LEFT + CELL * len(layers) + 10, TOP + CELL * len(modules) + 10
    legend = f"<p>Green is exact; from pale to dark red: up to {most:.4f}.</p>" if any(errors.values()) else ""
    return f"<div class=scroll><svg width={width} height={height} role=img>{''.join(drawn)}</svg></div>{legend}"


def _colour(share: float) -> str:
    return "#2da44e" if share == 0 else f"hsl(8 75% {88 - 53 * share:.0f}%)"


def _histogram(errors: Sequence[float]) -> str:
    if not errors:
        return "<p>No value changed.</p>"
    low, high = min(errors), max(errors)
    width = (high - low) / BINS or 1.0
    counts = [0] * BINS
    for error in errors:
        counts[min(int((error - low) / width), BINS - 1)] += 1
    most = max(counts)
    bars = "".join(
        f"<rect x={20 * number} y={120 - 110 * count / most:.1f} width=18 height={110 * count / most:.1f} fill=#cf6b4b>"
        f"<title>{low + number * width:.5f} to {low + (number + 1) * width:.5f}: {count:,} tensors</title></rect>"
        for number, count in enumerate(counts)
    )
    ends = f"<text x=0 y=136>{low:.5f}</text><text x={20 * BINS} y=136 text-anchor=end>{high:.5f}</text>"
    return f"<div class=scroll><svg width={20 * BINS + 4} height=142 role=img>{bars}{ends}</svg></div>"


def _worst(rows: Sequence[Row]) -> str:
    changed = sorted((row for row in rows if not row.measured.exact), key=lambda row: -row.measured.relative_error)
    if not changed:
        return "<p>Every converted tensor holds exactly the values it held.</p>"
    weighted = any(row.weighted for row in rows)
    lines = [
        (
            f"<code>{escape(row.path)}</code>",
            f"{escape(row.before)} to {escape(row.after)}",
            _error(row.measured.relative_error),
            *([_error(row.weighted.relative_error) if row.weighted else ""] if weighted else []),
            f"{row.measured.peak:.3g}",
            f"{row.measured.cosine:.6f}",
        )
        for row in changed[:WORST_SHOWN]
    ]
    head = ("tensor", "change", "relative error", *(["weighted error"] if weighted else []), "max error", "cosine")
    return _table(head, lines)


def name_inside(page: Path | None, dest: Path) -> str:
    """The name of a page in `dest` itself, where it is one of the result's files; empty where it lies elsewhere.
    Raises UsageError for a name in `dest` that does not end with .html."""
    place, folder = os.path.realpath(page or ""), os.path.realpath(dest)
    if page is None or not place.startswith(folder + os.sep):
        return ""
    if not place.endswith((".html", ".htm")):
        raise UsageError(f"--report {page} is in DEST", hint="name it so that it ends with .html, or put it elsewhere")
    return os.path.basename(place) if os.path.dirname(place) == folder else ""
