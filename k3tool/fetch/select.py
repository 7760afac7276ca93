"""Which files of a commit are wanted: globs as the Hub client reads them, and the text-only choice."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase

from k3tool.checkpoint.own import is_own
from k3tool.errors import UsageError
from k3tool.hub import RemoteFile


def select(
    files: Mapping[str, RemoteFile],
    include: Sequence[str],
    exclude: Sequence[str],
    label: str,
    tell: Callable[[str], object] = lambda _: None,
) -> dict[str, RemoteFile]:
    """Files that match an `include` glob (all without one) and no `exclude` glob. A glob ending in / is a folder.

    Files that have names of k3tool's own records are left out, and `tell` hears of them and of an `exclude` glob that
    matches nothing. Raises UsageError for an `include` glob that matches nothing: a misspelling more often than a wish.
    """
    for glob in exclude:
        if not any(_matches(name, glob) for name in files):
            tell(f"--exclude {glob!r} matches no file of {label}")
    for glob in include:
        if not any(_matches(name, glob) for name in files):
            raise UsageError(
                f"--include {glob!r} matches no file of {label}",
                hint=f"its {len(files)} files are like {', '.join(list(files)[:3])}",
            )
    wanted = {
        name: file
        for name, file in files.items()
        if (not include or any(_matches(name, glob) for glob in include))
        and not any(_matches(name, glob) for glob in exclude)
    }
    own = [name for name in wanted if is_own(name)]  # of whoever uploaded them; this folder gets its own
    if own:
        named = ", ".join(own[:3]) + (", ..." if len(own) > 3 else "")
        tell(f"left out, as k3tool writes its own records: {named}")
    for name in own:
        del wanted[name]
    if not wanted:
        raise UsageError(f"nothing of {label} is left to fetch", hint="loosen --include and --exclude")
    return wanted


def _matches(name: str, glob: str) -> bool:
    return fnmatchcase(name, glob + "*" if glob.endswith("/") else glob)
