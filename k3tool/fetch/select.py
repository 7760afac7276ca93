"""Which files of a commit are wanted: globs as the Hub client reads them, and the text-only choice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from k3tool.checkpoint.manifest import MANIFEST_NAME
from k3tool.errors import UsageError
from k3tool.hub import RemoteFile
from k3tool.proofs import PROOFS_NAME

OWN_FILES = (MANIFEST_NAME, PROOFS_NAME)


def select(
    files: Mapping[str, RemoteFile], include: Sequence[str], exclude: Sequence[str], label: str
) -> dict[str, RemoteFile]:
    """Files that match an `include` glob (all without one) and no `exclude` glob. A glob ending in / is a folder.

    Raises UsageError for a glob that matches nothing: it is a misspelling more often than a wish.
    """
    for glob in include:
        if not any(_matches(name, glob) for name in files):
            raise UsageError(
                f"--include {glob!r} matches no file of {label}",
                hint=f"its {len(files)} files are like {', '.join(list(files)[:3])}",
            )
    wanted = {
        name: file
        for name, file in files.items()
        if name not in OWN_FILES  # of whoever uploaded them; this folder gets its own
        and (not include or any(_matches(name, glob) for glob in include))
        and not any(_matches(name, glob) for glob in exclude)
    }
    if not wanted:
        raise UsageError(f"nothing of {label} is left to fetch", hint="loosen --include and --exclude")
    return wanted


def _matches(name: str, glob: str) -> bool:
    return fnmatchcase(name, glob + "*" if glob.endswith("/") else glob)
