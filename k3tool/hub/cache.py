"""The Hub client's own cache on this machine: where it is, and what of a repository it holds."""

from __future__ import annotations

import os
import re
from pathlib import Path

_COMMIT = re.compile(r"[0-9a-f]{40}", re.ASCII)


def hub_cache() -> Path:
    """The Hub client's cache as the environment places it now."""
    for name, below in (
        ("HF_HUB_CACHE", ""),
        ("HUGGINGFACE_HUB_CACHE", ""),
        ("HF_HOME", "hub"),
        ("XDG_CACHE_HOME", "huggingface/hub"),
    ):
        if os.environ.get(name):
            return Path(os.environ[name]).expanduser() / below
    return Path.home() / ".cache" / "huggingface" / "hub"


def cache_folder(repo: str) -> Path:
    return hub_cache() / f"models--{repo.replace('/', '--')}"


def cached_snapshot(repo: str, revision: str | None) -> Path | None:
    """The folder of a revision in the cache, or None: what there is to read while HF_HUB_OFFLINE is set."""
    folder = cache_folder(repo)
    wanted = revision or "main"
    if not _COMMIT.fullmatch(wanted):
        if ".." in wanted.split("/"):
            return None
        try:
            wanted = (folder / "refs" / wanted).read_text().strip()
        except OSError:
            return None
    snapshot = folder / "snapshots" / wanted
    return snapshot if _COMMIT.fullmatch(wanted) and snapshot.is_dir() else None
