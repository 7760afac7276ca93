"""What every format module answers with when asked whether some parts are its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

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
    return CheckpointCorrupt(
        what,
        hint="hold the file's bytes against its digest (verify at depth bytes); where they are right, its publisher has to mend it",
    )


def least_squares(
    groups: NDArray[np.float32],
    weight: NDArray[np.float32] | None,
    candidates: Iterable[tuple[NDArray, NDArray[np.float32]]],
    decode: Callable[[NDArray[np.float32]], NDArray[np.float32]],
) -> tuple[NDArray, NDArray[np.float64]]:
    """For each group the candidate whose stored values are nearest, the first among equals.

    groups: [..., g] float32; weight: what a squared error counts in each place, broadcast to `groups` (None: one).
    candidates: (what is stored, step [...]) each; decode: group / step to the nearest representable, in float32.
    Returns (stored [...], sum of weighted squared errors [...]).
    """
    best: NDArray | None = None
    least: NDArray[np.float64] | None = None
    for stored, step in candidates:
        wide = step[..., None]
        difference = (groups - decode(groups / wide) * wide).astype(np.float64) ** 2
        error = (difference if weight is None else difference * weight).sum(axis=-1)
        if best is None or least is None:
            best, least = stored.copy(), error
        else:
            better = error < least
            best[better], least[better] = stored[better], error[better]
    assert best is not None and least is not None
    return best, least
