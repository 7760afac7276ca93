"""How much memory this process may still use, containers and limits respected, and how much it has used."""

from __future__ import annotations

import contextlib
import os
import resource
import sys
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def available_bytes() -> int:
    """The least of: memory the system could hand out, the room in every enclosing cgroup, the address space limit."""
    rooms = [_cgroup_v2_room(), _cgroup_v1_room(), _address_space_room(), _system_room()]
    return min(room for room in rooms if room is not None)


def resident_memory() -> int:
    """Resident bytes of this process now; 0 where the system does not say."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")
    return 0


def peak_bytes() -> int:
    """The largest resident size that this process has had.

    Linux counts the peak of whoever started this program into `ru_maxrss`; `VmHWM` is this program's own.
    """
    own = _fields(Path("/proc/self/status")).get("VmHWM:")
    if own is not None:
        return own * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _system_room() -> int:
    fields = _fields(Path("/proc/meminfo"))
    if "MemAvailable:" in fields:
        return fields["MemAvailable:"] * 1024
    import os

    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _cgroup_v2_room() -> int | None:
    """Limits apply at every level up to the root. Page cache that can be dropped counts as room."""
    group = _own_group("0::")
    if group is None:
        return None
    rooms = []
    folder = _CGROUP / group
    while folder == _CGROUP or _CGROUP in folder.parents:
        limit = _number(folder / "memory.max")
        used = _number(folder / "memory.current")
        if limit is not None and used is not None:
            droppable = _fields(folder / "memory.stat").get("inactive_file", 0)
            rooms.append(limit - max(0, used - droppable))
        folder = folder.parent
    return max(0, min(rooms)) if rooms else None


def _cgroup_v1_room() -> int | None:
    group = _own_group(":memory:")
    for folder in (_CGROUP / "memory" / (group or ""), _CGROUP / "memory"):
        limit = _number(folder / "memory.limit_in_bytes")
        used = _number(folder / "memory.usage_in_bytes")
        if limit is not None and used is not None and limit < 1 << 60:
            droppable = _fields(folder / "memory.stat").get("total_inactive_file", 0)
            return max(0, limit - max(0, used - droppable))
    return None


def _address_space_room() -> int | None:
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return None
    used = _fields(Path("/proc/self/status")).get("VmSize:", 0) * 1024
    return max(0, limit - used)


def _own_group(marker: str) -> str | None:
    """Path of this process's cgroup below the mount: the line of /proc/self/cgroup that holds `marker`."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            if marker in line:
                return line.split(":", 2)[2].lstrip("/")
    return None


def _number(path: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        return int(path.read_text())
    return None


def _fields(path: Path) -> dict[str, int]:
    """`name value ...` lines as a dictionary; lines that hold no number are left out."""
    found: dict[str, int] = {}
    with contextlib.suppress(OSError):
        for line in path.read_text().splitlines():
            words = line.split()
            if len(words) >= 2 and words[1].isdigit():
                found[words[0]] = int(words[1])
    return found
