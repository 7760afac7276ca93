"""What people and scripts see: one JSON document, one essential value, or a readable page; progress on stderr.

rich is imported only when something is drawn. Data goes to stdout, everything else to stderr.
"""

from __future__ import annotations

import json as json_module
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from k3tool.cli import signals
from k3tool.errors import K3Error
from k3tool.events import SILENT, Progress, listen
from k3tool.units import format_bytes, format_duration

if TYPE_CHECKING:
    from rich.console import Console

LINE_INTERVAL_S = 10.0


def clean(text: str) -> str:
    """Text from files and servers without control characters, so that it cannot move the cursor of a terminal."""
    return "".join(char if char.isprintable() or char in "\n\t" else _escaped(char) for char in text)


def _escaped(char: str) -> str:
    """A byte of a name that is not UTF-8 as that byte."""
    code = ord(char)
    return f"\\x{code - 0xDC00 if 0xDC80 <= code <= 0xDCFF else code:02x}"


_shown = threading.Event()


def begin() -> None:
    """A command line starts: its document is still to be printed."""
    _shown.clear()


def print_json(document: dict[str, Any]) -> None:
    """The one document of a command line: there is no second, whatever a signal interrupts."""
    if _shown.is_set():
        return
    _shown.set()
    narrow = (getattr(sys.stdout, "encoding", None) or "utf-8").lower().replace("-", "") != "utf8"
    sys.stdout.write(json_module.dumps(document, ensure_ascii=narrow, default=str) + "\n")


def print_failure(command: str, error: K3Error, *, as_json: bool) -> None:
    """The failure of a command, as the contract shapes it. Further keys travel in `error.document`."""
    if as_json:
        print_json({"ok": False, "command": command, "error": error.as_json(), **error.document})
    sys.stdout.flush()
    sys.stderr.write(f"error: {clean(error.message)}\n")
    if error.hint:
        sys.stderr.write(f"hint: {clean(error.hint)}\n")


class Output:
    """One command's way to speak. Use as a context manager, so that bars end before results are printed."""

    def __init__(self, command: str, *, json: bool = False, quiet: bool = False) -> None:
        self.command = command
        self.json = json
        self.quiet = quiet
        self.progress: Progress = SILENT if quiet else _Bars() if _interactive() else _Lines()
        listen(self.progress)

    def __enter__(self) -> Output:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        stop = getattr(self.progress, "stop", None)
        if stop:
            stop()

    def result(
        self,
        document: dict[str, Any],
        *,
        essential: object = "",
        human: Callable[[Console], None] | None = None,
    ) -> None:
        """Print the outcome: `document` for --json (with ok and command added), `essential` for --quiet, else `human`."""
        self.close()
        if self.json:
            print_json({"ok": True, "command": self.command, **document})
            sys.stdout.flush()
            signals.finish()  # what was said stands
        elif self.quiet:
            sys.stdout.write(f"{essential}\n")
        elif human is not None:
            human(stdout_console())

    def show(self, human: Callable[[Console], None]) -> None:
        """Something for people only, in the middle of a command."""
        if not self.json and not self.quiet:
            self.close()
            human(stdout_console())

    def note(self, text: str) -> None:
        """A remark on stderr: what to do next, how fast it was."""
        if not self.quiet:
            self.close()
            sys.stderr.write(clean(text) + "\n")


def stdout_console() -> Console:
    from rich.console import Console

    return Console(highlight=False, soft_wrap=not sys.stdout.isatty(), width=None if sys.stdout.isatty() else 200)


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, title: str = "") -> Any:
    """A rich table: the first column to the left, numbers to the right; no markup is read from the cells."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    drawn = Table(box=box.SIMPLE_HEAD, title=title or None, title_justify="left", pad_edge=False)
    for number, column in enumerate(columns):
        drawn.add_column(Text(column), justify="left" if number == 0 else "right", no_wrap=number > 0, overflow="fold")
    for row in rows:
        drawn.add_row(*(Text(clean(str(cell))) for cell in row))
    return drawn


def _interactive() -> bool:
    disabled = os.environ.get("HF_HUB_DISABLE_PROGRESS_BARS", "").upper() in ("1", "ON", "YES", "TRUE")
    return sys.stderr.isatty() and not disabled and os.environ.get("TERM") != "dumb"


class _Lines:
    """Progress as plain lines: one per finished item, and one every ten seconds of a task that counts bytes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tasks: dict[str, tuple[int, int, float, float, str]] = {}

    def started(self, task: str, total: int, unit: str = "bytes") -> None:
        now = time.monotonic()
        with self._lock:
            self._tasks[task] = (0, total, now, now, unit)

    def advanced(self, task: str, amount: int) -> None:
        now = time.monotonic()
        with self._lock:
            if task not in self._tasks:
                return
            done, total, begun, said, unit = self._tasks[task]
            done += amount
            speak = now - said >= LINE_INTERVAL_S
            self._tasks[task] = (done, total, begun, now if speak else said, unit)
        if speak:
            self._write(describe(task, done, total, now - begun, unit))

    def finished(self, task: str) -> None:
        with self._lock:
            self._tasks.pop(task, None)

    def item(self, text: str) -> None:
        self._write(text)

    def warn(self, text: str) -> None:
        self._write(f"warning: {text}")

    def _write(self, text: str) -> None:
        sys.stderr.write(clean(text) + "\n")
        sys.stderr.flush()


def describe(task: str, done: int, total: int, seconds: float, unit: str) -> str:
    """`fetch: 12.3 GB of 1.56 TB (0.8%), 410 MB/s, 1 h 02 min left`."""
    show: Callable[[float], str] = format_bytes if unit == "bytes" else lambda n: f"{n:,.0f}"
    rate = done / seconds if seconds > 0 else 0.0
    text = f"{task}: {show(done)} of {show(total)} ({100 * done / total if total else 100:.1f}%), {show(rate)}/s"
    return text + (f", {format_duration((total - done) / rate)} left" if rate > 0 and total > done else "")


def _amount(done: int, total: int, seconds: float, unit: str) -> str:
    """Beside a bar: `12.3 GB/1.56 TB 410 MB/s`, or of what is no bytes `12/96 shards`."""
    if unit != "bytes":
        return f"{done:,}/{total:,} {unit}"
    rate = f" {format_bytes(done / seconds)}/s" if seconds > 0 and done > 0 else ""
    return f"{format_bytes(done)}/{format_bytes(total)}{rate}"


class _Bars:
    """Progress on a terminal: bars that count bytes (or shards), with rate and time left; items as lines above them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._live: Any = None
        self._ids: dict[str, Any] = {}
        self._tasks: dict[str, tuple[int, int, float, str]] = {}

    def _start(self) -> Any:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )

        if self._live is None:
            self._live = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.fields[amount]}"),
                TimeRemainingColumn(),
                console=Console(stderr=True, highlight=False),
                transient=True,
            )
            self._live.start()
        return self._live

    def started(self, task: str, total: int, unit: str = "bytes") -> None:
        with self._lock:
            live = self._start()
            if task in self._ids:
                live.remove_task(self._ids.pop(task))
            self._tasks[task] = (0, total, time.monotonic(), unit)
            self._ids[task] = live.add_task(task.replace("[", r"\["), total=total, amount=_amount(0, total, 0, unit))

    def advanced(self, task: str, amount: int) -> None:
        if self._live is not None and task in self._ids:
            with self._lock:
                if task not in self._ids:
                    return
                done, total, began, unit = self._tasks[task]
                self._tasks[task] = (done + amount, total, began, unit)
            text = _amount(done + amount, total, time.monotonic() - began, unit)
            self._live.update(self._ids[task], advance=amount, amount=text)

    def finished(self, task: str) -> None:
        with self._lock:
            if self._live is not None and task in self._ids:
                self._live.remove_task(self._ids.pop(task))
                if not self._ids:
                    self._stop()

    def item(self, text: str) -> None:
        if self._live is not None:
            self._live.console.print(clean(text), markup=False)
        else:
            sys.stderr.write(clean(text) + "\n")

    def warn(self, text: str) -> None:
        self.item(f"warning: {text}")

    def stop(self) -> None:
        with self._lock:
            self._stop()

    def _stop(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
            self._ids.clear()
