"""`k3tool inspect`: what a checkpoint holds, from its headers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from k3tool.cli.options import JsonOption, QuietOption, SourceArgument
from k3tool.cli.output import Output, clean, table
from k3tool.errors import UsageError
from k3tool.units import format_bytes, format_count

if TYPE_CHECKING:
    from rich.console import Console

    from k3tool.inspection import Inspection

SHOWN = 40


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


def _show(console: Console, report: Inspection) -> None:
    console.print(
        f"{clean(report.source)}: {report.model_type}, {report.layers} layers, {report.tensors:,} tensors, "
        f"{format_count(report.parameters)} parameters, {format_bytes(report.total_size)} ({report.total_size:,} bytes)",
        markup=False,
    )
    if report.listed is not None:
        rows = [
            (item["name"], item["dtype"], item["shape"], format_bytes(item["bytes"]), item["shard"])
            for item in report.listed
        ]
        console.print(table(("tensor", "dtype", "shape", "size", "shard"), rows))
        console.print(f"{len(rows):,} tensors listed", markup=False)
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
            text = (
                f"{len(report.missing_files)} shards are absent: their shapes and sizes are computed from config.json"
            )
        console.print(text, markup=False)
    found = report.conformance
    for word, names in (
        ("missing", found.missing),
        ("unexpected", found.unexpected),
        ("mismatched", list(found.mismatched)),
    ):
        if names:
            console.print(
                f"{word}: {len(names):,} tensors, such as {clean(names[0])} {clean(found.mismatched.get(names[0], ''))}",
                markup=False,
            )
    if found.ok:
        whose = f"belongs to {clean(report.rank)}" if report.rank else "config.json implies"
        console.print(f"every tensor that {whose} is named, and no other", markup=False)
