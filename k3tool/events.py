"""What long work says while it runs. The library emits, only `k3tool.cli` draws.

Every method may be called from worker threads. Amounts are bytes unless `unit` says otherwise.
"""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    def started(self, task: str, total: int, unit: str = "bytes") -> None:
        """A task with a known total begins. `task` names it for people: `fetch`, `verify`."""
        ...

    def advanced(self, task: str, amount: int) -> None: ...

    def finished(self, task: str) -> None: ...

    def item(self, text: str) -> None:
        """One line about one finished thing (a shard, a rank)."""
        ...

    def warn(self, text: str) -> None: ...


class Silent:
    """The default: nothing is said."""

    def started(self, task: str, total: int, unit: str = "bytes") -> None: ...

    def advanced(self, task: str, amount: int) -> None: ...

    def finished(self, task: str) -> None: ...

    def item(self, text: str) -> None: ...

    def warn(self, text: str) -> None: ...


SILENT: Progress = Silent()


class _Host:
    """Who hears what is said where no `Progress` was handed down."""

    def __init__(self) -> None:
        self.progress: Progress = SILENT
        self.said: set[str] = set()


_host = _Host()


def listen(progress: Progress) -> None:
    """From here on `progress` hears what `warn_once` and `aside` say."""
    _host.progress = progress
    _host.said.clear()


def warn_once(text: str, about: str) -> None:
    """A warning from deep inside, where no `Progress` is at hand: said once `about` the same for each listener."""
    if about not in _host.said:
        _host.said.add(about)
        _host.progress.warn(text)


def aside(text: str) -> None:
    """One line about what goes on now (a wait for a server), from where no `Progress` is at hand. Any thread."""
    _host.progress.item(text)
