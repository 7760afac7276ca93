"""k3tool: fetch, verify, plan, reshard, quantize and run Kimi K3 checkpoints.

Importing this package loads neither torch nor numpy: the public names below are resolved on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_PUBLIC = {
    "Checkpoint": "k3tool.checkpoint.reader",
    "K3Config": "k3tool.config",
    "K3Error": "k3tool.errors",
    "open_source": "k3tool.checkpoint.source",
}

__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'k3tool' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
