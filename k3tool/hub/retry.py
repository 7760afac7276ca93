"""When to try again: every wait of the network code is decided here, on a clock that tests replace.

A failure is either final (a K3Error) or `Transient`. Transient failures of one operation are waited out with growing,
jittered pauses until its patience is spent; any real progress forgives all of them.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from k3tool.errors import RemoteError
from k3tool.units import format_duration

PROGRESS_BYTES = 1 << 14
TELL_FROM = 4  # failures in a row: the first are common and soon over; then each time they have doubled
QUIET_S = 40.0  # no wait is longer than this without a word
RESUME_HINT = "run the same command again: it goes on from what is on disk"


class Transient(Exception):
    """A failure that may pass. `retry_after_s`: what the server asked for. `limit`: how often it may happen in a row.

    `stale_address`: the signed address was refused, a fresh one is needed. `ended`: the server closed the connection, which
    ends an answer of unknown length. `unreachable`: there was no connection at all.
    """

    def __init__(
        self,
        reason: str,
        *,
        retry_after_s: float | None = None,
        limit: int | None = None,
        stale_address: bool = False,
        hint: str = "",
        ended: bool = False,
        unreachable: bool = False,
    ) -> None:
        super().__init__(reason)
        self.reason = reason
        self.retry_after_s = retry_after_s
        self.limit = limit
        self.stale_address = stale_address
        self.hint = hint
        self.ended = ended
        self.unreachable = unreachable


class Clock(Protocol):
    def now(self) -> float: ...

    def sleep(self, seconds: float) -> bool:
        """Wait; True where the wait was cut short because everything is to stop."""
        ...


class SystemClock:
    """Monotonic time, and pauses that `stop` ends at once."""

    def __init__(self) -> None:
        self.stop = threading.Event()

    def now(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> bool:
        return self.stop.wait(seconds)


@dataclass(frozen=True)
class RetryPolicy:
    """first_s, longest_s: the first and the longest pause. patience_s: how long one operation may fail without progress.

    Without `patience_s`, an operation waits as long as the job has already run, at least `patience_low_s` and at most
    `patience_high_s`: a job that has just begun fails soon, one that ran for hours outlasts an hour without network.
    """

    first_s: float = 0.5
    longest_s: float = 30.0
    patience_s: float | None = None
    patience_low_s: float = 60.0
    patience_high_s: float = 3600.0
    stall_s: float = 30.0  # a connection that brings nothing for so long is given up
    word_s: float = 5.0  # and after so long it is said that it is waited for

    def patience(self, running_s: float) -> float:
        if self.patience_s is not None:
            return self.patience_s
        return min(max(running_s, self.patience_low_s), self.patience_high_s)

    def pause(self, failures: int, random_01: float) -> float:
        """Pause after the `failures`-th failure in a row (from 1): doubling, between half and the whole of it."""
        whole = min(self.longest_s, self.first_s * 2.0 ** min(failures - 1, 30))
        return whole * (0.5 + 0.5 * random_01)


@dataclass
class Retry:
    """The run of failures of one operation. Not shared between threads."""

    policy: RetryPolicy
    clock: Clock
    job_began: float
    failures: int = 0
    failing_since: float = 0.0
    tell: Callable[[str], object] = lambda _: None
    _progress: int = 0
    _told: float = 0.0
    _random: random.Random = field(default_factory=random.Random)

    def progressed(self, count: int) -> None:
        """`count` more bytes are safe. A few of them forgive nothing, or a server could hold the job for ever."""
        self._progress += count
        if self._progress >= PROGRESS_BYTES:
            self._progress = 0
            self.failures = 0

    def failed(self, error: Transient, what: str) -> None:
        """Wait for the next attempt. Raises RemoteError when `what` has failed for too long or too often."""
        now = self.clock.now()
        if self.failures == 0:
            self.failing_since = now
        self.failures += 1
        patience = self.policy.patience(self.failing_since - self.job_began)
        pause = self.policy.pause(self.failures, self._random.random())
        if error.retry_after_s is not None:
            pause = max(pause, error.retry_after_s)
            patience = max(patience, self.policy.patience_high_s if self.policy.patience_s is None else 0.0)
        failing_s = now - self.failing_since
        if error.limit is not None and self.failures >= error.limit:
            raise RemoteError(f"{what}: {error.reason}", hint=error.hint or RESUME_HINT, attempts=self.failures)
        if failing_s + pause > patience:
            waited = f" (asked to wait {format_duration(pause)})" if error.retry_after_s is not None else ""
            raise RemoteError(
                f"{what}: {error.reason}, after {self.failures} attempts in {format_duration(failing_s)}{waited}",
                hint=error.hint or RESUME_HINT,
                attempts=self.failures,
            )
        if self.failures == 1:
            self._told = now
        doubled = self.failures >= TELL_FROM and self.failures & (self.failures - 1) == 0
        if doubled or now + pause - self._told > QUIET_S:
            self._told = now
            left = format_duration(max(pause, patience - failing_s))
            often = f", {self.failures} times in a row" if self.failures > 1 else ""
            self.tell(f"{what}: {error.reason}{often}; again in {format_duration(pause)}, trying for {left} more")
        if self.clock.sleep(pause):
            raise Stopped


class Stopped(Exception):
    """The job is ending for another reason; this operation just leaves."""
