"""Standard output and error as they may be: full, closed, a terminal that is gone, of a narrow encoding.

What cannot be shown on stdout fails the command, once, as a full disk does; what cannot be shown on stderr is lost and
disturbs nothing.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from typing import Any

from k3tool.errors import CapacityError

SHOWN_NOWHERE = "send it where there is room (> FILE, | less), then run the same command again: what it wrote stays"


class OutputLost(CapacityError):
    """Standard output takes nothing more."""

    def __init__(self, because: str) -> None:
        super().__init__(f"cannot write standard output: {because}", hint=SHOWN_NOWHERE)


class _Text(io.TextIOWrapper):
    """A standard stream whose failures are told as such. Not done below the buffer: there a signal between a write and
    the buffer's knowing of it would show things twice."""

    def write(self, text: str) -> int:
        try:
            return super().write(text)
        except OSError as error:
            return self.failed(error, len(text))

    def flush(self) -> None:
        try:
            super().flush()
        except OSError as error:
            self.failed(error, 0)

    def failed(self, error: OSError, length: int) -> int:
        raise NotImplementedError


class _Out(_Text):
    def failed(self, error: OSError, length: int) -> int:
        if error.errno == errno.EPIPE:
            raise error
        raise OutputLost(error.strerror or str(error)) from error


class _Err(_Text):
    def failed(self, error: OSError, length: int) -> int:
        _to_nowhere(self.fileno())
        return length


def prepare() -> None:
    """Replace the standard streams of this process. Raises OutputLost where stdout is closed."""
    with contextlib.suppress(OSError):  # a file that is opened later must not become a standard stream
        while (free := os.open(os.devnull, os.O_RDWR)) <= 2:
            pass
        os.close(free)
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - for the rest of the process
    else:
        sys.stderr = _wrapped(_Err, sys.stderr, 2)
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - for the rest of the process
        raise OutputLost("it is closed")
    sys.stdout = _wrapped(_Out, sys.stdout, 1)


def keep_stdout() -> None:
    """From here on standard output shows what this process writes to `sys.stdout` and nothing else: what compiled
    libraries print goes to standard error. Does nothing where `prepare` has not been called."""
    if not isinstance(sys.stdout, _Out):
        return
    sys.stdout.flush()
    with contextlib.suppress(OSError):
        own = os.dup(1)
        os.dup2(2, 1)
        sys.stdout = _wrapped(_Out, sys.stdout, own)


def _wrapped(kind: type[_Text], stream: Any, descriptor: int) -> Any:
    """The same stream as a `kind`. A narrow encoding shows \\u4e2d rather than failing."""
    with contextlib.suppress(OSError):
        os.set_blocking(descriptor, True)
    return kind(
        io.BufferedWriter(io.FileIO(descriptor, "w", closefd=False)),
        encoding=stream.encoding,
        errors="backslashreplace",
        line_buffering=descriptor == 2 or stream.line_buffering,
    )


def _to_nowhere(descriptor: int) -> None:
    with contextlib.suppress(OSError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, descriptor)
        os.close(nowhere)


def silence() -> None:
    """Nothing that is still to be written to stdout arrives, and nothing fails for it."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        _to_nowhere(sys.stdout.fileno())


def lost(error: BaseException) -> OutputLost | BrokenPipeError | None:
    """Whether `error` comes from standard output: the parser makes a plain exit of a broken pipe."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, (OutputLost, BrokenPipeError)):
            return seen
        seen = seen.__cause__ or seen.__context__
    return None
