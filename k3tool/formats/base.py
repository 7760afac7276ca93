"""What every format module answers with when asked whether some parts are its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from k3tool.errors import CheckpointCorrupt


class Match(NamedTuple):
    """A format recognizes its parts. `missing` names an absent part, `problem` says why the parts do not fit."""

    name: str
    found: str = ""
    missing: str = ""
    problem: str = ""


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def require(parts: Mapping[str, object], *names: str) -> str:
    """The first of `names` that is absent, or an empty string."""
    return next((name for name in names if name not in parts), "")


def corrupt(what: str) -> CheckpointCorrupt:
    return CheckpointCorrupt(what, hint="fetch the shard again, or ask its publisher")
