"""`k3tool demo`: every command on a tiny checkpoint, with what it said."""

from __future__ import annotations

import shlex
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from k3tool import commands
from k3tool.cli.options import JsonOption, QuietOption
from k3tool.cli.output import Output, clean

SHOWN_LINES = 26


def command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to play in; it stays.")] = Path("k3-demo"),
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Take a tiny checkpoint in the released layout through every command, on this machine, without a network.

    Writes 93 layers in 96 shards with random weights (18 MB), serves them from a local stand-in of the Hub, and shows
    fetch, verify, inspect, plan, reshard, quantize and run. The folder, 90 MB in the end, is left for you to play with.
    """
    from k3tool.demo import Step, play

    begun = time.monotonic()
    steps: list[dict[str, object]] = []

    with Output("demo", json=json, quiet=quiet) as output:

        def announce(step: Step) -> None:
            if not json and not quiet:
                output.close()
                entered = "" if steps else f"\n$ cd {shlex.quote(str(folder))}"
                sys.stdout.write(f"{entered}\n# {step.why}\n$ {step.typed}\n")
                sys.stdout.flush()

        for outcome in play(folder, announce, output.progress):
            steps.append(
                {"command": outcome.step.typed, "exit_code": outcome.exit_code, "seconds": round(outcome.seconds, 2)}
            )
            if not json and not quiet:
                sys.stdout.write(_shortened(outcome.output) + f"({outcome.seconds:.1f} s)\n")
                sys.stdout.flush()
        document = {"folder": str(folder), "steps": steps, "seconds": round(time.monotonic() - begun, 2)}
        output.result(document, essential=folder)
    output.note(
        f"\nDone in {document['seconds']} s. {folder} holds the checkpoint, its ranks and its quantized form: "
        f"try this: {commands.command('inspect', folder / 'quantized')}"
    )


def _shortened(text: str) -> str:
    """The first and last lines of a long answer."""
    lines = [clean(line.rstrip()) for line in text.splitlines() if line.strip()]
    if len(lines) > SHOWN_LINES:
        half = SHOWN_LINES // 2
        lines = [*lines[:half], f"  ... {len(lines) - 2 * half} lines ...", *lines[-half:]]
    return "".join(f"{line}\n" for line in lines)
