"""Files that k3tool keeps beside a checkpoint for itself: believed only where this machine wrote them.

What a stranger published under these names is hostile: it is never fetched, and nothing of a checkpoint is missing
without it.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

from k3tool.checkpoint.ledger import LEDGER_FOLDER
from k3tool.checkpoint.manifest import MANIFEST_NAME
from k3tool.checkpoint.writer import PARTIAL_SUFFIX

OWN_NAMES = (
    MANIFEST_NAME,
    "k3tool.json",  # how ranks join
    "k3tool-*.json",  # reclaim note, reports
    ".k3tool-*",  # proofs
    f"*{PARTIAL_SUFFIX}",
    "activations.safetensors",
    "*[.-]activations.safetensors",
)


def is_own(name: str) -> bool:
    """Whether a file (a path with forward slashes) has a name that k3tool uses for its own records.

    Capitals do not matter: on some file systems they name the same file.
    """
    folders, _, last = name.lower().rpartition("/")
    return LEDGER_FOLDER in folders.split("/") or any(fnmatchcase(last, glob) for glob in OWN_NAMES)
