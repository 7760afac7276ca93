"""How the compiled loops of the formats are compiled: one decorator.

Loops are serial and release the interpreter lock, so that several tensors are worked on at once by threads.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from k3tool.disk import cache_folder

if os.path.expanduser("~").startswith("~"):  # without a home numba would make a folder of that name
    os.environ.setdefault("NUMBA_CACHE_DIR", str(cache_folder() / "numba"))

from numba import njit

REASSOCIATE = {"reassoc", "nsz"}  # lets sums run in vector lanes


def compiled(fastmath: Any = False) -> Callable[[Any], Any]:
    """njit with a cache on disk where there is a writable place for one.

    fastmath is always given: left out, a function takes it over from whichever caller is compiled first, and rounding
    by adding and subtracting a large number vanishes.
    """

    def decorate(function: Any) -> Any:
        try:
            return njit(nogil=True, cache=True, error_model="numpy", fastmath=fastmath)(function)
        except RuntimeError:
            return njit(nogil=True, error_model="numpy", fastmath=fastmath)(function)

    return decorate
