"""Signals that end the work: SIGTERM (preemption, `docker stop`, time limits) and SIGHUP as Ctrl-C does.

The first is raised in the main thread, so that everything is left in order. What comes right behind it is an echo:
launchers and terminals send twice. Later ones, and one that the main thread cannot take because it waits in compiled
code, end the process after its last words. Nothing here imports more than Python starts with.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

ENDING = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
)  # in this order of how often they come
ECHO_S = 2.0
DEAF_S = 6.0  # for the main thread to take a signal; `docker stop` kills after 10
WORDS_S = 1.0

LastWords = Callable[[int], None]


class Stop(KeyboardInterrupt):
    """A signal asks the process to end. `number` is its own."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


class _State:
    first: int | None = None
    when = 0.0
    taken = threading.Event()
    last_words: LastWords = staticmethod(lambda _: None)


def received() -> int:
    """The signal that ends this process; SIGINT where none has come."""
    return _State.first or signal.SIGINT


def install(last_words: LastWords) -> None:
    """From here on signals raise `Stop`, or end the process after `last_words`. One that was ignored at the start
    (nohup, a job in the background) stays so. As process 1 of a container only signals with a handler arrive."""
    _State.last_words = last_words
    ours = [number for number in ENDING if signal.getsignal(number) is not signal.SIG_IGN]
    for number in ours:
        signal.signal(number, _on_signal)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    threading.Thread(target=_watch, args=(reader, frozenset(ours)), name="signals", daemon=True).start()


def finish() -> None:
    """The work is over, and the exit code known: a signal during the last steps of Python changes nothing of it. From a
    thread that is not the main one, what that one does with a signal stays."""
    _State.taken.set()
    if threading.current_thread() is not threading.main_thread():
        return
    for number in ENDING:
        if signal.getsignal(number) is _on_signal:
            signal.signal(number, signal.SIG_IGN)


def _on_signal(number: int, _: FrameType | None) -> None:
    now = time.monotonic()
    if _State.first is None:
        _State.first, _State.when = number, now
        _State.taken.set()
        raise Stop(number)
    if now - _State.when > ECHO_S:
        _end(number)


def _watch(reader: int, ours: frozenset[int]) -> None:
    """Hears of a signal even while the main thread waits in compiled code, where Python's handlers are not called."""
    while True:
        try:
            numbers = os.read(reader, 64)
        except OSError:
            return
        if not numbers:
            return
        heard = [number for number in numbers if number in ours]
        if heard and not _State.taken.wait(DEAF_S):
            _end(heard[0])


def _end(number: int) -> None:
    def speak() -> None:
        with contextlib.suppress(Exception):
            _State.last_words(number)

    words = threading.Thread(target=speak, daemon=True)  # what it needs may be held by the thread that hangs
    words.start()
    words.join(WORDS_S)
    os._exit(128 + number)


__all__: list[Any] = ["ENDING", "Stop", "finish", "install", "received"]
