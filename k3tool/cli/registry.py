"""Registration of the commands with the parser."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import typer

from k3tool import __version__
from k3tool.cli.app import AGAIN, COMMANDS, EXIT_CODES, SAME_COMMAND
from k3tool.cli.options import IsPath, expand
from k3tool.errors import Interrupted

app = typer.Typer(
    name="k3tool",
    help="Fetch, verify, plan, reshard, quantize and run Kimi K3 checkpoints.",
    epilog=EXIT_CODES,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"k3tool {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and stop.")
    ] = False,
) -> None:
    """Fetch, verify, plan, reshard, quantize and run Kimi K3 checkpoints."""


def _register(name: str) -> None:
    command: Callable[..., Any] = getattr(import_module(f"k3tool.cli.{name}"), "command")  # noqa: B009

    @cache
    def paths() -> frozenset[str]:
        """Parameters that are paths, or may be: those of type Path, alone or in a list, and what is marked so."""
        hints = get_type_hints(command, include_extras=True)
        return frozenset(name for name, hint in hints.items() if is_path(hint))

    @wraps(command)
    def told(*arguments: Any, **options: Any) -> None:
        """Typer makes a bare number of an interrupt: what it carries must be taken before."""
        try:
            command(*arguments, **{key: expand(value) if key in paths() else value for key, value in options.items()})
        except KeyboardInterrupt as error:
            raise Interrupted.of(error, AGAIN.get(name, SAME_COMMAND)) from error

    app.command(name, epilog=EXIT_CODES)(told)


def is_path(hint: Any) -> bool:
    """Whether a parameter of this type is a path, or text that may be one."""
    return hint in (Path, IsPath) or any(is_path(part) for part in get_args(hint))


for _name in COMMANDS:
    if find_spec(f"k3tool.cli.{_name}"):
        _register(_name)

# The class above BadParameter is the usage error of the parser that Typer brings; public names of Typer only.
PARSER_ERROR: type[Exception] = typer.BadParameter.__mro__[1]
ABORT: type[Exception] = typer.Abort
