"""The command line from its first moment to its exit code: the only place where an exception becomes text and a number.

The parser and the commands are imported by `run`, when signals are already taken.
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Sequence

from k3tool.cli import signals, streams
from k3tool.cli.output import begin, print_failure
from k3tool.commands import command as line
from k3tool.disk import GOES_ON, STARTS_OVER, refusal
from k3tool.errors import (
    EXIT_BUG,
    EXIT_INTERRUPTED,
    CapacityError,
    Interrupted,
    K3Error,
    RemoteError,
    UsageError,
    is_interrupt,
)

EXIT_CODES = (
    "Exit codes: 0 done; 1 a check failed; 2 usage; 3 partly done, the same command resumes; 10 checkpoint missing or "
    "incomplete; 11 checkpoint corrupt; 12 not enough disk or memory; 13 network or Hub; 14 not supported here; "
    "70 a bug in k3tool; 130 interrupted, 143 by SIGTERM, the same command resumes."
)
COMMANDS = ("fetch", "verify", "inspect", "plan", "reshard", "quantize", "run", "demo")
EXIT_BROKEN_PIPE = 141
SAME_COMMAND = "run the same command again"
# What that does; `run` says itself what is lost.
AGAIN = {
    **dict.fromkeys(("fetch", "verify", "reshard", "quantize"), GOES_ON),
    **dict.fromkeys(("run", "demo"), STARTS_OVER),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line and leave the process with the documented exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    signals.install(lambda number: _last_words(arguments, number))
    try:
        streams.prepare()
        code = run(arguments)
    except streams.OutputLost as error:
        code = _fail(arguments, error)
    except KeyboardInterrupt:
        code = _fail(arguments, _interrupted(arguments))
    signals.finish()
    if is_interrupt(code):  # not to wait for threads that nobody stopped
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, streams.OutputLost):
                stream.flush()
        os._exit(code)
    sys.exit(code)


def run(arguments: list[str]) -> int:
    """Run one command line in this process and return its exit code. Never raises, except for `SystemExit` of none."""
    begin()
    try:
        return _run(arguments)
    except KeyboardInterrupt:  # at a moment when something else was being told
        return _fail(arguments, _interrupted(arguments))


def _run(arguments: list[str]) -> int:
    if not arguments:
        _run(["--help"])
        return UsageError.exit_code
    parser_error: tuple[type[Exception], ...] = ()
    abort: tuple[type[Exception], ...] = ()
    try:
        from k3tool.cli.registry import ABORT, PARSER_ERROR, app

        parser_error, abort = (PARSER_ERROR,), (ABORT,)
        result = app(args=list(arguments), prog_name="k3tool", standalone_mode=False, obj=arguments)
        if result == EXIT_INTERRUPTED:  # Typer answers an interrupt itself
            return _fail(arguments, _interrupted(arguments))
        if sys.stdout is not None:
            sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except K3Error as error:
        return _fail(arguments, error)
    except parser_error as error:
        return _fail(arguments, _usage(arguments, error))
    except SystemExit as error:  # how the parser puts a broken pipe
        found = streams.lost(error)
        if found is None:
            raise
        return _reader_left() if isinstance(found, BrokenPipeError) else _fail(arguments, found)
    except BrokenPipeError:
        return _reader_left()
    except abort:
        return _fail(arguments, _interrupted(arguments))
    except Exception as error:
        refused = _refused_by_surroundings(error)
        if refused is not None:
            return _fail(arguments, refused.with_traceback(error.__traceback__))
        traceback.print_exc()
        return _fail(arguments, _Bug(f"{type(error).__name__}: {error}"))


def _reader_left() -> int:
    streams.silence()
    return EXIT_BROKEN_PIPE


def _interrupted(arguments: list[str], number: int | None = None) -> Interrupted:
    return Interrupted(AGAIN.get(_command_of(arguments), SAME_COMMAND), number or signals.received())


def _last_words(arguments: list[str], number: int) -> None:
    """What is told by a process that cannot end in good order. Of ranks that run together rank 0 speaks."""
    from k3tool.launch import is_first

    if _command_of(arguments) != "run" or is_first(os.environ):
        print_failure(_command_of(arguments), _interrupted(arguments, number), as_json="--json" in arguments)


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
    return UsageError(message.strip().rstrip("."), hint=line(*([name] if name in COMMANDS else []), "--help"))


def _command_of(arguments: list[str]) -> str:
    """The command as typed, known or not; empty where only options stand."""
    return next((argument for argument in arguments if not argument.startswith("-")), "")


def _fail(arguments: list[str], error: K3Error) -> int:
    if os.environ.get("K3TOOL_DEBUG") == "1" and error.__traceback__ is not None:
        traceback.print_exception(error)
    if error.told:
        return error.exit_code
    command = _command_of(arguments)
    if command == "run":
        from k3tool.parallel.world import give_way

        give_way(os.environ)
    if isinstance(error, streams.OutputLost):
        streams.silence()
    as_json = "--json" in arguments
    try:
        print_failure(command, error, as_json=as_json)
    except BrokenPipeError:
        streams.silence()
    except streams.OutputLost as lost:
        streams.silence()
        for each in (error, lost):
            print_failure(command, each, as_json=False)
        return lost.exit_code if as_json else error.exit_code
    return error.exit_code
