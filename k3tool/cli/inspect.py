"""`k3tool inspect`: what a checkpoint holds, from its headers."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any

import typer

from k3tool.cli.options import JsonOption, QuietOption, SourceArgument
from k3tool.cli.output import Output, clean, table
from k3tool.errors import UsageError
from k3tool.units import format_bytes, format_count, format_ranges, plural

if TYPE_CHECKING:
    from rich.console import Console

    from k3tool.inspection import Inspection

SHOWN = 40
_EXPERT = re.compile(r"\.experts\.(\d{1,9})\.", re.ASCII)
_LAYER = re.compile(r"\.layers\.(\d{1,9})\.", re.ASCII)


def command(
    source: SourceArgument,
    tensors: Annotated[str | None, typer.Option("--tensors", metavar="GLOB", help="List tensors by name.")] = None,
    layer: Annotated[int | None, typer.Option("--layer", metavar="N", min=0, help="List one layer (from 0).")] = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Show what a checkpoint holds: sizes by component and shard, and what differs from its configuration.

    Reads headers only; of a Hub repository by byte ranges, never whole shards.
    """
    from k3tool.checkpoint.reader import Checkpoint
    from k3tool.inspection import inspect

    with Output("inspect", json=json, quiet=quiet) as output:
        checkpoint = Checkpoint.open(source)
        if layer is not None and layer >= checkpoint.config.num_layers:
            raise UsageError(
                f"layer {layer} does not exist",
                hint=f"layers are numbered from 0 to {checkpoint.config.num_layers - 1}",
            )
        report = inspect(checkpoint, pattern=tensors, layer=layer, progress=output.progress)
        output.result(report.as_json(), essential=report.total_size, human=lambda console: _show(console, report))
        if report.listed == []:
            output.note(
                f"warning: no tensor matches {tensors!r}: a GLOB is compared with whole names, so begin it with *"
                if tensors is not None
                else f"warning: layer {layer} holds no tensor"
            )


def _show(console: Console, report: Inspection) -> None:
    console.print(
        f"{clean(report.source)}: {f'{report.ranks} of ' if report.ranks else ''}{report.model_type}, {report.layers} layers, {report.tensors:,} tensors, "
        f"{format_count(report.parameters)} parameters, {format_bytes(report.total_size)} ({report.total_size:,} bytes)",
        markup=False,
    )
    if report.listed is not None:
        _show_tensors(console, report.listed)
        return
    rows = [
        (name, f"{part.tensors:,}", format_count(part.parameters), format_bytes(part.bytes),
         f"{100 * part.bytes / max(1, report.total_size):.1f}%")
        for name, part in report.components.items()
        if part.tensors
    ]  # fmt: skip
    console.print(table(("component", "tensors", "parameters", "size", "share"), rows))
    _show_shards(console, report)
    _show_differences(console, report)


def _show_tensors(console: Console, listed: list[dict[str, Any]]) -> None:
    """Layers and experts that are alike share a row, and what all names begin with is said once: 80 columns suffice."""
    names = [item["name"] for item in listed]
    prefix = _common_words(names) if len(names) > 1 else ""
    groups = fold_numbers(listed)
    skip = len(prefix) + 1 if prefix and all(name.startswith(prefix + ".") for name, _ in groups) else 0
    if skip:
        console.print(f"{clean(prefix)}.", markup=False)
    rows = [
        (
            name[skip:],
            f"{item['dtype'] or '?'} {item['shape'] or ''}",
            "?" if item["bytes"] is None else format_bytes(item["bytes"]),
        )
        for name, item in groups
    ]
    if rows:
        console.print(table(("tensor", "dtype and shape", "size each"), rows))
    shards = sorted({item["shard"] for item in listed if item["shard"]})
    where = f", in {clean(shards[0])}" if len(shards) == 1 else f", in {len(shards)} shards" if shards else ""
    console.print(f"{plural(len(listed), 'tensor')} listed{where}", markup=False)


def _common_words(names: list[str]) -> str:
    first, last = min(names).split("."), max(names).split(".")
    same = next((n for n, pair in enumerate(zip(first, last, strict=False)) if pair[0] != pair[1]), 0)
    return ".".join(first[:same])


def fold_numbers(listed: list[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    """(`layers.1-92.mlp.experts.0-895.w1.weight`, one of the tensors) for tensors that differ in these numbers alone."""
    rows = [(item["name"], (item["dtype"], str(item["shape"])), item) for item in listed]
    for number in (_EXPERT, _LAYER):
        held: dict[tuple[Any, ...], tuple[list[int], Any]] = {}
        for name, kind, item in rows:
            match = number.search(name)
            key = (name[: match.start(1)], name[match.end(1) :], kind) if match else (name, None, kind)
            held.setdefault(key, ([], item))[0].append(int(match[1]) if match else 0)
        rows = [
            (before if after is None else f"{before}{format_ranges(numbers)}{after}", kind, item)
            for (before, after, kind), (numbers, item) in held.items()
        ]
    return [(name, item) for name, _, item in rows]


def _show_shards(console: Console, report: Inspection) -> None:
    """Shards of the same size and tensor count share a row: the release has seven kinds."""
    kinds: dict[tuple[int | None, int], list[str]] = {}
    for shard in report.shards:
        kinds.setdefault((shard["bytes"], shard["tensors"]), []).append(shard["name"])
    rows = [
        (names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} like it", len(names), f"{tensors:,}",
         "absent" if size is None else format_bytes(size))
        for (size, tensors), names in kinds.items()
    ]  # fmt: skip
    console.print(table(("shard", "files", "tensors each", "size each"), rows[:SHOWN]))
    if len(rows) > SHOWN:
        console.print(f"... and {len(rows) - SHOWN} more kinds (--json has them all)", markup=False)


def _show_differences(console: Console, report: Inspection) -> None:
    if report.headers != "read":
        text = "the headers are absent: shapes and sizes are computed from config.json and the index"
        if report.headers == "partial":
            text = f"{plural(len(report.missing_files), 'shard')} absent: shapes and sizes there are computed from config.json"
        console.print(text, markup=False)
    found = report.conformance
    for word, names in (
        ("missing", found.missing),
        ("unexpected", found.unexpected),
        ("mismatched", list(found.mismatched)),
    ):
        if names:
            console.print(
                f"{word}: {plural(len(names), 'tensor')}, such as {clean(names[0])} {clean(found.mismatched.get(names[0], ''))}",
                markup=False,
            )
    if report.misplaced:
        console.print(
            f"index and headers disagree on {plural(len(report.misplaced), 'tensor')}, such as {clean(report.misplaced[0])}",
            markup=False,
        )
    if report.strays:
        console.print(
            f"the folder holds {plural(len(report.strays), '.safetensors file')} that the index does not name, such as "
            f"{clean(report.strays[0])}",
            markup=False,
        )
    if report.whole and report.headers != "read":
        console.print("every tensor that config.json implies is named; what the shards hold is not known", markup=False)
    elif report.whole:
        whose = f"belongs to {clean(report.rank)}" if report.rank else "config.json implies"
        console.print(f"every tensor that {whose} is named, and no other", markup=False)
