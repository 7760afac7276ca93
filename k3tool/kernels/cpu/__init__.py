"""What the compiled CPU kernels share: the code emitter, the compiler, worker threads and matrix building blocks.

Kernels are LLVM IR, compiled at first use for the processor at hand through llvmlite. Where llvmlite is missing or
cannot serve the machine, callers use the torch twins.
"""

from __future__ import annotations

import logging
from functools import cache

from k3tool.errors import UsageError

log = logging.getLogger(__name__)

__all__ = ["available", "problem"]


def available() -> bool:
    """Can compiled kernels be used in this process?"""
    return not problem()


@cache
def problem() -> str:
    """Why compiled kernels cannot be used in this process, or nothing. Decided once, and logged where they cannot."""
    try:
        from k3tool.kernels.cpu import pool

        pool.shared()
    except UsageError:
        raise
    except Exception as error:  # llvmlite raises ImportError, OSError and RuntimeError, depending on the machine
        log.warning("compiled CPU kernels are not available here (%s); using torch, which is slower", error)
        return f"compiled CPU kernels are not available here ({error})"
    return ""
