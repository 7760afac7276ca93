"""The text model as GGUF, for llama.cpp: container, metadata, vocabulary, tensor mapping, and the job that writes them.

`write_gguf` does it all. Nothing here needs the `gguf` package; the tests read what is written with it.
"""

from __future__ import annotations

from typing import Any

__all__ = ["GgufResult", "write_gguf"]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from k3tool.gguf import write

        return getattr(write, name)
    raise AttributeError(f"module 'k3tool.gguf' has no attribute {name!r}")
