"""Jobs that several processes divide, as the command line takes and tells them: `--part I/N`, launchers, what is left."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from k3tool.commands import command
from k3tool.errors import PartlyDone
from k3tool.units import plural

if TYPE_CHECKING:
    from rich.console import Console

    from k3tool.cli.output import Output
    from k3tool.execute import Report
    from k3tool.parts import Part

PART_HELP = (
    "Do the I-th of N shares of the files (from 1); the last one to finish writes the index. Under torchrun, or in a step "
    "of srun with several tasks, each process does its own. 1/1: all of it, whatever started this."
)


def share_of(part: str | None, finalize: bool, output: Output) -> Part | None:
    """The share of this process, said on stderr. Raises UsageError."""
    from k3tool.launch import left_over
    from k3tool.parts import part_of

    if finalize:
        return None
    share = part_of(part, os.environ)
    if share is not None:
        by = f", started by {share.by}" if share.by else ""
        output.note(f"part {share.number + 1} of {share.count}{by}")
    elif part is None and (name := left_over(os.environ)):
        output.note(
            f"{name} is {os.environ[name]}, but no launcher started this process with others: it does all of the work"
        )
    return share


def check_whole(
    output: Output,
    report: Report,
    share: Part | None,
    document: dict[str, Any],
    human: Callable[[Console], None],
    *,
    dest: str,
    arguments: Sequence[str],
) -> None:
    """Raises PartlyDone (3) for a result of which files are missing, with the command that writes some of them.
    arguments: the command line."""
    if report.complete:
        return
    output.show(human)
    count = len(report.missing)
    where = f"{dest}: {plural(count, 'file')} {'are' if count > 1 else 'is'} not written yet"
    if share is not None and share.by:
        cause = f"{where}, and none of the other processes that {share.by} started is at work"
    else:
        left = report.parts_left
        others = ", ".join(map(str, left[:8])) + (", ..." if len(left) > 8 else "")
        cause = f"{where} ({'parts' if len(left) > 1 else 'part'} {others} of {share.count if share else 1})"
    raise PartlyDone(cause, hint=_next(report, share, arguments), missing=report.missing[:100]).with_document(document)


def _next(report: Report, share: Part | None, arguments: Sequence[str]) -> str:
    number = report.parts_left[0] if report.parts_left else 1
    words = _without_part(arguments)
    return f"write part {number}: {command(*words, '--part', f'{number}/{share.count if share else 1}')}"


def _without_part(arguments: Sequence[str]) -> list[str]:
    words: list[str] = []
    skip = False
    for word in arguments:
        if not skip and word != "--part" and not word.startswith("--part="):
            words.append(word)
        skip = word == "--part" and not skip
    return words
