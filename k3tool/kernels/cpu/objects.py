"""Compiled kernels kept between runs: object files in `K3TOOL_CACHE` or `~/.cache/k3tool`.

A file is named by the digest of everything that it was made from (code, processor, compiler) and begins with the digest of
its content, so a stale or damaged one is never used. A folder that cannot be written to costs the compilation, nothing
else. Machine code is only taken from files that belong to this user.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from pathlib import Path

from k3tool.disk import cache_folder

_DIGEST_BYTES = hashlib.sha256().digest_size


def key_of(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def load(key: str) -> bytes | None:
    """The object file of that key, if it is there and whole."""
    path = _path(key)
    try:
        with open(path, "rb") as file:
            if hasattr(os, "getuid") and os.fstat(file.fileno()).st_uid != os.getuid():
                return None
            content = file.read()
    except OSError:
        return None
    digest, code = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
    return code if hashlib.sha256(code).digest() == digest else None


def save(key: str, code: bytes) -> None:
    """Keep an object file where that is possible."""
    path = _path(key)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=".cpu-")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(hashlib.sha256(code).digest() + code)
            os.replace(name, path)
        except OSError:
            Path(name).unlink(missing_ok=True)


def _path(key: str) -> Path:
    return cache_folder() / f"cpu-{key}.o"
