"""What the compiled CPU kernels share: the code emitter, the compiler, worker threads and matrix building blocks.

Kernels are LLVM IR, compiled at first use for the processor at hand through llvmlite. Where llvmlite is missing or
cannot serve the machine, callers use the torch twins; `K3TOOL_MATMUL=torch` asks for that.
"""

from __future__ import annotations

import logging
import os
from functools import cache

log = logging.getLogger(__name__)

__all__ = ["available"]


@cache
def available() -> bool:
    """Can compiled kernels be used in this process? Decided once, and logged where the answer is no."""
    if os.environ.get("K3TOOL_MATMUL", "") == "torch":
        log.info("compiled CPU kernels are switched off by K3TOOL_MATMUL=torch; using torch")
        return False
    try:
        from k3tool.kernels.cpu import pool

        pool.shared()
    except Exception as error:  # llvmlite raises ImportError, OSError and RuntimeError, depending on the machine
        log.warning("compiled CPU kernels are not available here (%s); using torch, which is slower", error)
        return False
    return True
