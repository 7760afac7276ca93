"""Locks on files, also where the file system has none (Lustre, NFS and CIFS mounted without them, some FUSE).

There a file beside the locked one says which process on which machine holds it. One that was killed is noticed on its own
machine; of a process on another machine nobody can tell, and the user is asked.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import subprocess
import time
from functools import cache
from pathlib import Path

from k3tool.checkpoint.outside import decode_json
from k3tool.events import warn_once

NO_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL}
HELD_SUFFIX = ".held"
BEING_WRITTEN_S = 10.0  # a holder's file that is still empty after so long was left by a kill
_mine: set[Path] = set()


@cache
def boot_id() -> str:
    """What changes when this machine restarts; empty where that is not known."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        command = ["sysctl", "-n", "kern.bootsessionuuid"]
        return subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout.strip()
    return ""


def lock(descriptor: int, path: Path, *, shared: bool = False, wait: bool = False) -> Path | None:
    """Lock the open file `path`. None where closing it ends the lock; else a file for `unlock` to remove.

    Raises BlockingIOError where another process holds it; its `filename` is the file that says so where there is one.
    """
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
        return None
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        warn_once(
            f"the file system of {path.parent} has no locks ({error.strerror}): files that name this process stand in "
            "for them, so let one machine at a time write there",
            "locks",
        )
    return _hold(path, shared, wait)


def unlock(held: Path | None) -> None:
    """End a lock that a file stands for."""
    if held is not None:
        _mine.discard(held)
        with contextlib.suppress(OSError):
            held.unlink()


def is_held(path: Path) -> bool:
    """Whether another process holds a lock on `path`, shared or not. Nothing is waited for, and nothing stays."""
    try:
        descriptor = os.open(path, os.O_RDWR)
    except OSError:
        return False
    try:
        unlock(lock(descriptor, path))
        return False
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)


def is_alone(descriptor: int, path: Path, held: Path | None) -> bool:
    """Whether no other process shares the lock; then it is exclusive from here on."""
    if held is not None:
        return not any(other != held and _is_alive(other) for other in _shared_holders(path))
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _hold(path: Path, shared: bool, wait: bool) -> Path:
    alone = path.with_name(path.name + HELD_SUFFIX)
    mine = path.with_name(f"{alone.name}-{socket.gethostname()}-{os.getpid()}") if shared else alone
    while True:
        in_the_way = None if _create(mine) else mine
        if in_the_way is None:
            others = [alone] if shared else _shared_holders(path)
            in_the_way = next((other for other in others if _is_alive(other)), None)
            if in_the_way is None:
                return mine
            unlock(mine)
        elif not _is_alive(mine):
            mine.unlink(missing_ok=True)
            continue
        if not wait:
            raise BlockingIOError(errno.EWOULDBLOCK, os.strerror(errno.EWOULDBLOCK), str(in_the_way))
        time.sleep(0.05)


def _create(path: Path) -> bool:
    """Make the file that names this process; whether there was none."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    except FileExistsError:
        return False
    _mine.add(path)
    try:
        os.write(descriptor, json.dumps([socket.gethostname(), boot_id(), os.getpid(), _started(os.getpid())]).encode())
    except OSError:
        unlock(path)
        raise
    finally:
        os.close(descriptor)
    return True


def _shared_holders(path: Path) -> list[Path]:
    start = f"{path.name}{HELD_SUFFIX}-"
    return [path.with_name(name) for name in os.listdir(path.parent) if name.startswith(start)]


def _is_alive(path: Path) -> bool:
    """Whether the process that `path` names may still run: known on this machine, supposed on another."""
    if path in _mine:
        return True
    try:
        text, written = path.read_bytes(), path.stat().st_mtime
    except FileNotFoundError:
        return False
    try:
        host, boot, process, started = decode_json(text.decode(), own=True)
    except (ValueError, TypeError, RecursionError):
        return time.time() - written < BEING_WRITTEN_S
    if host != socket.gethostname():
        return True
    return boot == boot_id() and started == _started(process) != ""


def _started(process: object) -> str:
    """When a process of this machine began, in the kernel's ticks; empty where there is none."""
    with contextlib.suppress(OSError, IndexError, ValueError):
        return Path(f"/proc/{process}/stat").read_text(errors="replace").rsplit(")", 1)[1].split()[19]
    with contextlib.suppress(OSError, TypeError, ValueError, OverflowError):
        os.kill(int(str(process)), 0)
        return "running"
    return ""
