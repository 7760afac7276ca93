"""Ways in which networks and servers misbehave, as rules that the stand-in follows."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Literal

Kind = Literal[
    "status",  # answer with `status` (and `headers`) instead of the content
    "refuse",  # close the connection without an answer
    "drop",  # close it after `after` bytes of the body
    "stall",  # send nothing more after `after` bytes, and keep the connection open
    "drip",  # after `after` bytes, one byte every `seconds`
    "flip",  # change one bit of the byte at file offset `after`
    "ignore_range",  # answer 200 with the whole file
    "wrong_content_range",  # answer 206 for a range that was not asked for
    "short",  # claim and send fewer bytes than the file has
    "wrong_commit",  # answer with another X-Repo-Commit
    "raw",  # send the bytes `raw`, then `again` for ever, every `seconds`; without `again` close the connection
]
Stage = Literal["api", "resolve", "data"]


@dataclass
class Fault:
    """One rule. `match`: glob over file names (or the route's path for the api stage). `times`: None is for ever."""

    kind: Kind
    match: str = "*"
    stage: Stage = "data"
    times: int | None = 1
    after: int = 0
    status: int = 500
    headers: dict[str, str] = field(default_factory=dict)
    seconds: float = 1.0
    method: str | None = None  # only GET or only HEAD
    raw: bytes = b""
    again: bytes = b""


def answer(
    body: bytes = b"", *headers: str, status: str = "200 OK", json: bool = True, length: int | None = -1
) -> bytes:
    """An answer as it travels. length: what `Content-Length` says; None leaves it out, -1 is the truth."""
    lines = [f"HTTP/1.1 {status}", *headers]
    if json:
        lines.append("Content-Type: application/json")
    if length is not None:
        lines.append(f"Content-Length: {len(body) if length == -1 else length}")
    return "\r\n".join([*lines, "Connection: close", "", ""]).encode("latin-1") + body


class Faults:
    """The rules in force; the first that fits is used up once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rules: list[Fault] = []

    def add(self, fault: Fault) -> None:
        with self._lock:
            self._rules.append(fault)

    def clear(self) -> None:
        with self._lock:
            self._rules.clear()

    def take(self, stage: Stage, name: str, method: str) -> Fault | None:
        with self._lock:
            for rule in self._rules:
                fits = rule.stage == stage and rule.method in (None, method) and fnmatchcase(name, rule.match)
                if fits and (rule.times is None or rule.times > 0):
                    if rule.times is not None:
                        rule.times -= 1
                    return rule
        return None
