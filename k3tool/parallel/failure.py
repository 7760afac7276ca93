"""Failures as they travel between ranks: what happened, on which rank, and the error made of it on another. No torch.

Raising on one rank must end all of them with the same exit code and one message. What is sent is text and numbers;
nothing is ever unpickled.
"""

from __future__ import annotations

import json
from typing import NamedTuple

from k3tool.disk import STARTS_OVER
from k3tool.errors import EXIT_BUG, Interrupted, K3Error, RemoteError, is_interrupt


class RankLost(RemoteError):
    """Another rank does not answer: it ended, hangs, or cannot be reached. Rarely the cause, mostly the consequence."""


_CLASSES = {cls.__name__: cls for cls in (*K3Error.__subclasses__(), RankLost)}


class Failure(NamedTuple):
    """The first failure of a run, as its rank saw it."""

    rank: int
    code: int
    type: str
    message: str
    hint: str
    is_cause: bool

    @property
    def is_bug(self) -> bool:
        return self.code == EXIT_BUG

    @classmethod
    def of(cls, error: BaseException, rank: int) -> Failure:
        if isinstance(error, KeyboardInterrupt):
            error = Interrupted.of(error, STARTS_OVER)
        if isinstance(error, K3Error):
            is_cause = not isinstance(error, RankLost)
            return cls(rank, error.exit_code, type(error).__name__, error.message, error.hint, is_cause)
        if isinstance(error, SystemExit):
            return cls(rank, EXIT_BUG, "SystemExit", f"rank {rank} left with {error.code!r}", "", True)
        cause = f"this is a bug in k3tool: {type(error).__name__}: {error}"
        return cls(rank, EXIT_BUG, type(error).__name__, cause, "report it with the traceback above", True)

    @classmethod
    def lost(cls, rank: int, pid: int) -> Failure:
        """A rank whose process is gone and has not said why."""
        return cls(
            rank,
            RankLost.exit_code,
            RankLost.__name__,
            f"contact lost: its process {pid} ended without a word, as one that is killed",
            "ask that machine's kernel log (dmesg) whether memory ran out; run the same command again: it starts over",
            True,
        )

    def as_bytes(self) -> bytes:
        return json.dumps(self._asdict()).encode()

    @classmethod
    def parse(cls, text: bytes) -> Failure:
        return cls(**json.loads(text))

    def as_error(self, here: int) -> K3Error:
        """The same failure, to be raised on rank `here`: it says where it happened."""
        plain = here == self.rank or is_interrupt(self.code)
        error = K3Error.__new__(_CLASSES.get(self.type, K3Error))
        K3Error.__init__(
            error, self.message if plain else f"rank {self.rank}: {self.message}", hint=self.hint, rank=self.rank
        )
        error.exit_code = self.code
        return error
