"""Registration of the commands, and the only place where an exception becomes text and an exit code."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Annotated, Any

import typer

from k3tool import __version__
from k3tool.cli.output import print_failure
from k3tool.disk import refusal
from k3tool.errors import EXIT_BUG, EXIT_INTERRUPTED, CapacityError, Interrupted, K3Error, RemoteError, UsageError

EXIT_CODES = (
    "Exit codes: 0 done; 1 a check failed; 2 usage; 3 partly done, the same command resumes; 10 checkpoint missing or "
    "incomplete; 11 checkpoint corrupt; 12 not enough disk or memory; 13 network or Hub; 14 not supported here; "
    "70 a bug in k3tool; 130 interrupted, the same command resumes."
)
COMMANDS = ("fetch", "verify", "inspect", "plan", "reshard", "quantize", "run", "demo")
EXIT_BROKEN_PIPE = 141

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
    app.command(name, epilog=EXIT_CODES)(command)


for _name in COMMANDS:
    if find_spec(f"k3tool.cli.{_name}"):
        _register(_name)

# The class above BadParameter is the usage error of the parser that Typer brings; public names of Typer only.
_PARSER_ERROR: type[Exception] = typer.BadParameter.__mro__[1]


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line and leave the process with the documented exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a narrow encoding shows \u4e2d rather than failing
            stream.reconfigure(errors="backslashreplace")
    code = run(arguments)
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.flush()
    sys.exit(code)


def run(arguments: list[str]) -> int:
    """Run one command line in this process and return its exit code. Never raises, except for `SystemExit` of none."""
    if not arguments:
        run(["--help"])
        return UsageError.exit_code
    try:
        result = app(args=arguments, prog_name="k3tool", standalone_mode=False)
        if result == EXIT_INTERRUPTED:  # Typer answers an interrupt itself
            return _fail(arguments, Interrupted())
        return result if isinstance(result, int) else 0
    except K3Error as error:
        return _fail(arguments, error)
    except _PARSER_ERROR as error:
        return _fail(arguments, _usage(arguments, error))
    except (KeyboardInterrupt, typer.Abort):
        return _fail(arguments, Interrupted())
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except Exception as error:
        refused = _refused_by_surroundings(error)
        if refused is not None:
            return _fail(arguments, refused.with_traceback(error.__traceback__))
        traceback.print_exc()
        return _fail(arguments, _Bug(f"{type(error).__name__}: {error}"))


def _refused_by_surroundings(error: Exception) -> K3Error | None:
    """The last net: what the system refuses is no bug, even where the place of the call has not said what it was about.
    None for everything else."""
    if isinstance(error, ConnectionError):
        return RemoteError(
            f"the connection was lost: {error}", hint="check the network, then run the same command again"
        )
    if isinstance(error, OSError) and error.errno is not None:
        names = [str(name) for name in (error.filename, error.filename2) if name is not None]
        return refusal(error, " and ".join(names) or "a file", "use")
    if isinstance(error, MemoryError):
        return CapacityError(
            f"no memory left{f': {error}' if str(error) else ''}",
            hint="free memory, or bound what this takes (--max-memory, fewer --max-workers, run: --memory)",
        )
    if isinstance(error, RuntimeError) and "can't start new thread" in str(error):
        return CapacityError(
            "the system lets this process start no more threads",
            hint="give fewer --max-workers, or raise the number of processes (ulimit -u)",
        )
    return None


class _Bug(K3Error):
    exit_code = EXIT_BUG

    def __init__(self, cause: str) -> None:
        super().__init__(f"this is a bug in k3tool: {cause}", hint="report it with the traceback above")


def _usage(arguments: list[str], error: Exception) -> UsageError:
    message = error.format_message() if hasattr(error, "format_message") else str(error)  # type: ignore[attr-defined]
    name = _command_of(arguments)
    return UsageError(message.strip().rstrip("."), hint=f"k3tool {name} --help" if name else "k3tool --help")


def _command_of(arguments: list[str]) -> str:
    return next((argument for argument in arguments if argument in COMMANDS), "")


def _fail(arguments: list[str], error: K3Error) -> int:
    if os.environ.get("K3TOOL_DEBUG") == "1" and error.__traceback__ is not None:
        traceback.print_exception(error)
    if error.told:
        return error.exit_code
    command = _command_of(arguments)
    if command == "run":
        from k3tool.parallel.world import give_way

        give_way(os.environ)
    with contextlib.suppress(BrokenPipeError):
        print_failure(command, error, as_json="--json" in arguments)
    return error.exit_code
