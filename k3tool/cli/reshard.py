"""`k3tool reshard`: cut a checkpoint for any number of ranks, regroup its shards, or join ranks again."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from k3tool.cli.options import (
    DestArgument,
    DryRunOption,
    JsonOption,
    MemoryOption,
    OverwriteOption,
    QuietOption,
    SourceArgument,
    WorkersOption,
    parse_file_size,
)
from k3tool.cli.output import Output, clean, table
from k3tool.cli.parts import PART_HELP, check_whole, share_of
from k3tool.units import format_bytes, format_duration, parse_ranges, parse_size, plural

if TYPE_CHECKING:
    from rich.console import Console

    from k3tool.reshard import Prepared, Resharded

SHOWN_RANKS = 32
Count = typer.Option(metavar="N", min=1)


def command(
    context: typer.Context,
    source: SourceArgument,
    dest: DestArgument,
    gpus: Annotated[int | None, typer.Option("--gpus", metavar="N", min=1, help="Ranks in all: TP x EP x PP.")] = None,
    tp: Annotated[int | None, typer.Option("--tp", metavar="N", min=1, help="Tensor parallel ranks.")] = None,
    ep: Annotated[int | None, typer.Option("--ep", metavar="N", min=1, help="Expert parallel ranks.")] = None,
    pp: Annotated[int | None, typer.Option("--pp", metavar="N", min=1, help="Pipeline stages.")] = None,
    layout: Annotated[str, typer.Option("--layout", metavar="ranks|hf", help="A folder for each rank, or one checkpoint with shards grouped by owner.")] = "ranks",
    rank: Annotated[str | None, typer.Option("--rank", metavar="SPEC", help="Only these ranks, such as 0-3,7.")] = None,
    max_shard_size: Annotated[str, typer.Option("--max-shard-size", metavar="SIZE", help="Tensor bytes of a file at most; its header comes on top, and a tensor is never cut.")] = "5GB",
    verify: Annotated[bool, typer.Option("--verify", help="Read back every byte of every file: tensors against the source's.")] = False,
    part: Annotated[str | None, typer.Option("--part", metavar="I/N", help=PART_HELP)] = None,
    finalize: Annotated[bool, typer.Option("--finalize", help="Write no shard: only the index and configuration, if every file is there.")] = False,
    reclaim: Annotated[bool, typer.Option("--reclaim", help="DELETE the source along the way: free each source shard once its tensors are proven in DEST.")] = False,
    dry_run: DryRunOption = False,
    overwrite: OverwriteOption = False,
    max_workers: WorkersOption = None,
    max_memory: MemoryOption = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:  # fmt: skip
    """Cut SOURCE for any number of GPUs into DEST: TP splits heads and widths, EP deals out experts, PP layers.

    SOURCE may be a checkpoint, a Hub repository (only the ranges of --rank are fetched), or a folder of ranks that
    k3tool wrote: `reshard RANKS_DIR DEST --gpus 1 --layout hf` gives the original tensors back, bit for bit.
    """
    from k3tool.checkpoint.source import opened_source
    from k3tool.execute import Options
    from k3tool.reshard import Request, carry_out, prepare

    with Output("reshard", json=json, quiet=quiet) as output, opened_source(source) as opened:
        request = Request(
            gpus, tp, ep, pp, layout,
            parse_ranges(rank, what="ranks", option="--rank") if rank is not None else None,
            parse_file_size(max_shard_size),
        )  # fmt: skip
        prepared = prepare(opened, request, reclaim=reclaim, dest=dest, dry_run=dry_run)
        if dry_run:
            output.result(prepared.as_json(), essential=prepared.plan.id, human=lambda c: _show_plan(c, prepared))
            return
        share = share_of(part, finalize, output)
        options = Options(
            max_workers=max_workers,
            max_memory=parse_size(max_memory) if max_memory else None,
            overwrite=overwrite,
            part=share,
            finalize=finalize,
            progress=output.progress,
        )
        done = carry_out(prepared, Path(dest), options=options, verify=verify, reclaim=reclaim)
        human = partial(_show, done=done, dest=dest)
        check_whole(output, done.report, share, done.as_json(), human, dest=dest, arguments=context.obj)
        output.result(done.as_json(), essential=dest, human=human)


def _show_plan(console: Console, prepared: Prepared) -> None:
    document = prepared.as_json()
    console.print(f"{prepared.layout}: {prepared.reason}", markup=False)
    _show_ranks(console, document["ranks"])
    console.print(
        f"{document['tensors']:,} tensors; {format_bytes(document['bytes_read'])} to read, "
        f"{format_bytes(document['bytes_written'])} to write",
        markup=False,
    )


def _show(console: Console, done: Resharded, dest: str) -> None:
    report = done.report
    console.print(f"{done.prepared.layout}: {done.prepared.reason}", markup=False)
    _show_ranks(console, done.prepared.ranks_json(report.files))
    kept = f", {len(report.kept)} files kept from before" if report.kept else ""
    console.print(
        f"{clean(dest)}: read {format_bytes(report.bytes_read)}, wrote {format_bytes(report.bytes_written)}{kept} "
        f"in {format_duration(report.seconds)}, peak memory {format_bytes(report.peak_memory_bytes)}",
        markup=False,
    )
    if done.readback is not None:
        console.print(
            f"verified: {done.readback.tensors:,} tensors equal the source's wherever they are stored; every byte of "
            f"{plural(done.readback.files, 'file')} was read",
            markup=False,
        )


def _show_ranks(console: Console, ranks: list[dict]) -> None:
    rows = [(f"rank {item['rank']}", len(item["files"]), format_bytes(item["bytes"])) for item in ranks]
    console.print(table(("rank", "files", "size"), rows[:SHOWN_RANKS]))
    if len(rows) > SHOWN_RANKS:
        console.print(f"... and {len(rows) - SHOWN_RANKS} more ranks (--json has them all)", markup=False)
