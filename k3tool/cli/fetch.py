"""`k3tool fetch`: a checkpoint from the Hub into a folder, proven while it arrives."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from k3tool.checkpoint.ledger import LEDGER_FOLDER
from k3tool.cli.options import DryRunOption, JsonOption, MemoryOption, OverwriteOption, QuietOption, WorkersOption
from k3tool.cli.output import Output, clean, table
from k3tool.commands import command as command_line
from k3tool.errors import K3Error, UsageError
from k3tool.units import format_bytes, format_duration, plural

if TYPE_CHECKING:
    from rich.console import Console

    from k3tool.fetch import FetchResult

SHOWN = 12


def command(
    repo: Annotated[
        str, typer.Argument(metavar="REPO", help="Hub repository org/name[@revision], or a folder (./name).")
    ] = "moonshotai/Kimi-K3",
    local_dir: Annotated[
        Path, typer.Option("--local-dir", metavar="DIR", help="Folder to write; running again goes on there.")
    ] = ...,  # type: ignore[assignment]  # Typer's way to say: required
    revision: Annotated[str | None, typer.Option("--revision", metavar="REV", help="Branch, tag or commit.")] = None,
    include: Annotated[list[str] | None, typer.Option("--include", metavar="GLOB", help="Only these files.")] = None,
    exclude: Annotated[list[str] | None, typer.Option("--exclude", metavar="GLOB", help="Not these files.")] = None,
    layers: Annotated[
        str | None,
        typer.Option(
            "--layers", metavar="SPEC", help="A smaller checkpoint of these layers (0-3,7), renumbered from 0."
        ),
    ] = None,
    text_only: Annotated[bool, typer.Option("--text-only", help="Leave out the vision tower.")] = False,
    reuse: Annotated[
        list[Path] | None,
        typer.Option(
            "--reuse", metavar="FOLDER", help="Take over what this folder holds already (the Hub cache always)."
        ),
    ] = None,
    max_workers: WorkersOption = None,
    max_memory: MemoryOption = None,
    no_verify: Annotated[bool, typer.Option("--no-verify", help="Compare sizes only, no digests.")] = False,
    patience: Annotated[
        float | None,
        typer.Option(
            "--patience",
            metavar="SECONDS",
            min=0,
            help="Give up after so long without progress (default: 1 min to 1 h).",
        ),
    ] = None,
    overwrite: OverwriteOption = False,
    dry_run: DryRunOption = False,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Fetch a checkpoint from the Hub, whole or in part, each file proven before it gets its name.

    A killed or interrupted fetch goes on where it was when the same command is run again. Finished files are compared
    with the digests that the Hub publishes, and for the release with the built-in ones.
    """
    from k3tool.checkpoint.address import NAMED, Address, parse_repository
    from k3tool.fetch import fetch
    from k3tool.fetch.local import local_folder
    from k3tool.hub import RetryPolicy

    with Output("fetch", json=json, quiet=quiet) as output:
        here = local_folder(repo)
        address = parse_repository(repo) if here is None else Address(repo, None)
        if address is None:
            raise UsageError(f"not a repository name: {repo}", hint=NAMED)
        if revision and address.revision and revision != address.revision:
            raise UsageError(
                f"--revision {revision} and {repo} name two revisions",
                hint=f"leave out one of {revision}, {address.revision}",
            )
        result = fetch(
            address.repo,
            local_dir,
            revision=revision or address.revision,
            include=include or (),
            exclude=exclude or (),
            layers=layers,
            text_only=text_only,
            max_workers=max_workers,
            max_memory=max_memory,
            verify=not no_verify,
            dry_run=dry_run,
            overwrite=overwrite,
            reuse=reuse or (),
            policy=RetryPolicy(patience_s=patience),
            progress=output.progress,
        )
        essential = result.bytes_needed if dry_run else local_dir
        show = _show_plan if dry_run else _show
        if not result.fits and json:
            raise _no_room(result, local_dir)
        output.result(result.as_json(), essential=essential, human=lambda console: show(console, result, local_dir))
        if not result.fits:
            raise _no_room(result, local_dir)


def _no_room(result: FetchResult, folder: Path) -> K3Error:
    """A dry run ends as the run would."""
    from k3tool.fetch.folder import too_little_space

    return too_little_space(folder, result.bytes_needed, result.bytes_free or 0).with_document(result.as_json())


def _commit(result: FetchResult) -> str:
    return "" if result.is_local else f" at commit {result.revision}"


def _show(console: Console, result: FetchResult, folder: Path) -> None:
    counts = {word: sum(file.status == word for file in result.files) for word in ("fetched", "resumed", "kept")}
    said = ", ".join(f"{number} {word}" for word, number in counts.items() if number)
    rate = result.bytes_fetched / result.seconds if result.seconds else 0.0
    console.print(
        f"{clean(result.repo)}{_commit(result)} in {clean(str(folder))}: {len(result.files)} files ({said}), "
        f"{format_bytes(result.bytes_total)}; {format_bytes(result.bytes_fetched)} "
        f"{'copied' if result.is_local else 'over the network'} in "
        f"{format_duration(result.seconds)} ({format_bytes(rate)}/s)",
        markup=False,
    )
    console.print(f"verified: {', '.join(result.verified) or 'nothing'}", markup=False)
    if result.unproven:
        names = ", ".join(result.unproven[:3]) + (", ..." if len(result.unproven) > 3 else "")
        console.print(f"no published digest proves {len(result.unproven)} of them: {clean(names)}", markup=False)
    if result.files_unfinished:
        console.print(
            f"unfinished and kept in {clean(str(folder / LEDGER_FOLDER))}: {plural(result.files_unfinished, 'file')} of an "
            f"earlier choice, {format_bytes(result.bytes_unfinished)}",
            markup=False,
        )
    again = ("fetch", result.repo, "--revision", result.revision, "--local-dir", folder)
    step = f"next: {command_line('verify', folder)}"
    if not result.is_whole:
        step = f"a part of the checkpoint; the rest of it comes with: {command_line(*again)}"
    console.print(clean(step), markup=False)


def _show_plan(console: Console, result: FetchResult, folder: Path) -> None:
    from k3tool.fetch import RATES

    rows = [(file.name, format_bytes(file.size), file.status) for file in result.files]
    console.print(table(("file", "size", "would be"), rows[:SHOWN]))
    if len(rows) > SHOWN:
        console.print(f"... and {len(rows) - SHOWN} more files (--json has them all)", markup=False)
    shards = [file for file in result.files if file.name.endswith(".safetensors")]
    console.print(
        f"{clean(result.repo)}{_commit(result)}: {len(shards)} shards of {sum(f.size for f in shards):,} bytes, "
        f"{len(result.files)} files of {result.bytes_total:,} bytes ({format_bytes(result.bytes_total)})",
        markup=False,
    )
    console.print(
        f"to fetch into {clean(str(folder))}: {result.bytes_needed:,} bytes ({format_bytes(result.bytes_needed)}), "
        f"free there: {_room(result.bytes_free)}{'' if result.fits else ' - NOT ENOUGH'}",
        markup=False,
    )
    times = [(f"{format_bytes(rate)}/s", format_duration(result.bytes_needed / rate)) for rate in RATES]
    console.print(table(("at", "takes"), times))


def _room(free: int | None) -> str:
    return "not said by the file system" if free is None else format_bytes(free)
