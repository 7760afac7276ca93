"""Options that several commands share, declared once."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from k3tool.errors import UsageError
from k3tool.units import parse_size


class IsPath:
    """Marks text that may be a path: a leading `~` is the home folder, as in a `Path`."""


def expand(value: Any) -> Any:
    """A path, text or list of them with a leading `~` or `~user` expanded: shells leave it in quotes and after `=`.

    Raises UsageError where there is no such user or no home. A name that begins so is written `./~name`.
    """
    if isinstance(value, (list, tuple)):
        return [expand(item) for item in value]
    if not isinstance(value, (str, Path)) or not str(value).startswith("~"):
        return value
    found = os.path.expanduser(str(value))
    if found.startswith("~"):
        if os.path.lexists(found):
            return value
        user = found.partition("/")[0]
        raise UsageError(
            f"{value}: " + (f"there is no user {user[1:]}" if user != "~" else "this user has no home folder"),
            hint="write the path itself; a name that begins with ~ is written ./~name",
        )
    return type(value)(found)


SourceArgument = Annotated[
    str, typer.Argument(metavar="SOURCE", help="Checkpoint folder, or Hub repository org/name[@revision]."), IsPath
]
DestArgument = Annotated[str, typer.Argument(metavar="DEST", help="Folder to write."), IsPath]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout, also on failure.")]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="Print the essential value only.")]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Show the whole plan, write nothing.")]
OverwriteOption = Annotated[bool, typer.Option("--overwrite", help="Replace what DEST holds.")]
WorkersOption = Annotated[
    int | None, typer.Option("--max-workers", metavar="N", min=1, max=256, help="Files worked on at once.")
]
MemoryOption = Annotated[
    str | None, typer.Option("--max-memory", metavar="SIZE", help="Bound on resident memory, such as 2GiB.")
]


def check_output_file(path: Path) -> None:
    """Raises UsageError where a file cannot be written: known before the work whose result it is to hold."""
    folder = path.absolute().parent
    if (path.exists() and not path.is_file()) or not folder.is_dir():
        raise UsageError(f"cannot write {path}", hint="name a file in a folder that exists")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(f"cannot write {path}: no permission in {folder}", hint="name a file where you may write")


def check_page(path: Path, command: str, *, overwrite: bool) -> None:
    """Raises UsageError where a report cannot be written, and for a file that is no such report: a shard must not be
    lost so."""
    check_output_file(path)
    if overwrite or not path.exists():
        return
    try:
        with open(path, "rb") as file:
            start = file.read(4096)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}", hint="name another file") from None
    if start and page_mark(command).encode() not in start:
        raise UsageError(
            f"{path} holds something that is no report of k3tool {command}",
            hint="name another file, or add --overwrite to replace it",
        )


def page_mark(command: str) -> str:
    """What every page that `k3tool <command> --report` writes has in its head."""
    return f'<meta name="generator" content="k3tool {command}">'


LEAST_FILE_BYTES = 1000


def parse_file_size(text: str) -> int:
    """`--max-shard-size` in bytes. Raises UsageError for one that no file can keep to: tensors are never cut."""
    size = parse_size(text)
    if size < LEAST_FILE_BYTES:
        raise UsageError(
            f"--max-shard-size {text} is too small: tensors are never cut, so that each would get a file of its own",
            hint="write it with its unit, as 5GB",
        )
    return size
