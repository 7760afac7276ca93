"""Commands as people can paste them: every word quoted for a shell, the program called so that this shell finds it.

A hint that holds a command ends with it (`get it again: k3tool fetch ...`), so that what stands from the program's name
to the end of the line works as pasted, in that state. Words after a command would become its arguments.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path


def command(*words: object) -> str:
    """`k3tool` with these words. Words of None are left out; a path that begins with a dash is written `./-x`.

    >>> command("verify", "my folder")
    "k3tool verify 'my folder'"
    """
    return f"{program()} {_join(words)}"


def torchrun(processes: int, *words: object) -> str:
    """`torchrun --nproc-per-node N -m k3tool` with these words."""
    return f"{_found('torchrun') or 'torchrun'} --nproc-per-node {processes} -m k3tool {_join(words)}"


def program() -> str:
    """How a shell in this folder calls the k3tool that is running: by name where PATH finds one, else by its path."""
    return _found("k3tool") or f"{shlex.quote(sys.executable or 'python3')} -m k3tool"


def _found(name: str) -> str:
    if shutil.which(name):
        return name
    script = Path(sys.executable).parent / name
    if not os.access(script, os.X_OK):
        return ""
    try:
        near = os.path.relpath(script)
    except (OSError, ValueError):  # the working folder is gone, or on another drive
        return shlex.quote(str(script))
    return shlex.quote(near if not near.startswith("..") else str(script))


def _join(words: tuple[object, ...]) -> str:
    return " ".join(_word(word) for word in words if word is not None)


def _word(word: object) -> str:
    text = str(word)
    if isinstance(word, Path) and text.startswith("-"):
        text = f"./{text}"
    return shlex.quote(text)
