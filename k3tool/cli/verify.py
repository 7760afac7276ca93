"""`k3tool verify`: is this folder the checkpoint it claims to be?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from k3tool.cli.options import JsonOption, QuietOption, WorkersOption
from k3tool.cli.output import Output, clean, table
from k3tool.errors import UsageError
from k3tool.units import format_bytes, format_duration

if TYPE_CHECKING:
    from rich.console import Console

    from k3tool.verify import VerifyReport

SHOWN = 20


def command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Checkpoint folder.")],
    depth: Annotated[
        str,
        typer.Option("--depth", metavar="names|headers|bytes", help="How deep to look; each includes the one before."),
    ] = "headers",
    full: Annotated[bool, typer.Option("--full", help="Read every byte again, whatever was proven before.")] = False,
    sample: Annotated[
        str | None, typer.Option("--sample", metavar="SHARE", help="Read a share such as 5%; another one each time.")
    ] = None,
    rank: Annotated[
        str | None, typer.Option("--rank", metavar="SPEC", help="Of a folder of ranks only these (0-3,7).")
    ] = None,
    max_workers: WorkersOption = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Check names, headers or every byte of a checkpoint.

    names: index against files and configuration. headers: every header against index, configuration and file length.
    bytes: SHA-256 of every file against the digests known for it (the manifest of k3tool, the built-in table of the
    release, or the records of hf download). A file without a known digest is reported as unknown.
    """
    from k3tool.verify import DEPTHS, BytesOptions, verify

    if depth not in DEPTHS:
        raise UsageError(f"--depth {depth} does not exist", hint=f"write one of {', '.join(DEPTHS)}")
    if (full or sample) and depth != "bytes":
        raise UsageError("--full and --sample are about bytes", hint="add --depth bytes")
    options = BytesOptions(workers=max_workers or BytesOptions.workers, full=full, sample=_share(sample))
    with Output("verify", json=json, quiet=quiet) as output:
        report = verify(folder, depth=depth, options=options, ranks=rank, progress=output.progress)
        if not report.ok:
            output.show(lambda console: _show(console, report))
            raise report.error()
        output.result(report.as_json(), essential="ok", human=lambda console: _show(console, report))
        for warning in report.warnings:
            output.note(f"warning: {warning}")
        if report.unproven:
            reason = "were not in this sample" if sample else "have no known digest"
            output.note(
                f"warning: {report.unproven} of {len(report.files)} files {reason}, so their bytes are not proven"
            )
        if report.proven_earlier:
            output.note(
                f"{report.proven_earlier} files are unchanged since an earlier check read them (--full reads them again)"
            )


def _share(text: str | None) -> float | None:
    """`5%` or `0.05` as 0.05. Raises UsageError."""
    if text is None:
        return None
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise UsageError(f"--sample {text} is no share of the bytes", hint="write it as 5%")
    return share


def _show(console: Console, report: VerifyReport) -> None:
    counts = {
        status: sum(file.status == status for file in report.files)
        for status in ("ok", "missing", "corrupt", "unknown")
    }
    said = ", ".join(f"{number} {status}" for status, number in counts.items() if number)
    rate = (
        f", {format_bytes(report.bytes_read / report.seconds)}/s" if report.depth == "bytes" and report.seconds else ""
    )
    digests = f", digests from {report.digests}" if report.digests else ""
    console.print(
        f"{clean(report.source)}: {len(report.files)} files, {said} (depth {report.depth}{digests}; read "
        f"{format_bytes(report.bytes_read)} in {format_duration(report.seconds)}{rate})",
        markup=False,
    )
    bad = [(file.name, file.status, file.problem) for file in report.files if file.status in ("missing", "corrupt")]
    if bad:
        drawn = table(("file", "status", "problem"), bad[:SHOWN])
        drawn.columns[2].no_wrap, drawn.columns[2].justify = False, "left"
        console.print(drawn)
    told = {problem for _, _, problem in bad}
    others = [problem for problem in report.problems if problem not in told]
    for problem in others[:SHOWN]:
        console.print(f"- {clean(problem)}", markup=False)
    for warning in report.warnings if bad or others else ():  # else it is said on stderr
        console.print(f"- warning: {clean(warning)}", markup=False)
    left = max(0, len(bad) - SHOWN) + max(0, len(others) - SHOWN)
    if left:
        console.print(f"... and {left} more problems (--json has them all)", markup=False)
