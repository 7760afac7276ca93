"""What a disk or file system refuses, as an error with the path, the cause and what mends it.

    with disk_errors(path, "write"):
        os.fsync(descriptor)

An OSError knows a number and, often, no file: only the place of the call knows what was being done to which path.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from pathlib import Path
from types import TracebackType

from k3tool.errors import (
    CapacityError,
    CheckpointCorrupt,
    CheckpointMissing,
    K3Error,
    PartlyDone,
    UnsupportedError,
    UsageError,
)
from k3tool.events import warn_once

GOES_ON = "run the same command again: it goes on from here"
STARTS_OVER = "run the same command again: it starts over"
READING = ("read", "open", "list")


def _numbers(*names: str) -> frozenset[int]:
    """Error numbers by name; what this system does not have is left out."""
    return frozenset(getattr(errno, name) for name in names if hasattr(errno, name))


FULL = _numbers("ENOSPC", "EDQUOT", "EFBIG")
DENIED = _numbers("EACCES", "EPERM", "EROFS")
WRONG_PATH = _numbers("ENOTDIR", "EISDIR", "ENAMETOOLONG", "ELOOP", "EEXIST", "EILSEQ", "ENOTEMPTY", "ENOENT")
TOO_MANY_OPEN = _numbers("EMFILE", "ENFILE")
NO_MEMORY = _numbers("ENOMEM", "ENOBUFS")
IN_USE = _numbers("EBUSY", "ETXTBSY", "EAGAIN", "EDEADLK")
LOST = _numbers("ESTALE", "ETIMEDOUT", "EHOSTDOWN", "EHOSTUNREACH", "ENETDOWN", "ENETUNREACH", "ENETRESET", "ENOTCONN",
                "ESHUTDOWN", "ECONNRESET", "ECONNABORTED", "ECONNREFUSED", "ENOLINK", "ECOMM", "EPROTO",
                "EREMOTEIO", "ENONET")  # fmt: skip
# What the file system of a path cannot do at all.
UNSUPPORTED = _numbers("ENOSYS", "EOPNOTSUPP", "ENOTSUP", "EINVAL", "ENOLCK", "EXDEV", "EMLINK", "ESPIPE", "ENOTTY",
                       "EOVERFLOW", "ENOTBLK")  # fmt: skip


class disk_errors:
    """A block in which an OSError is about `path`: it leaves as `refusal` puts it, everything else unchanged.

    doing: the verb of the message, `read`, `write`, `remove`, ... ; what `READING` holds changes nothing on the disk.
    again: what running the same command again would do.
    """

    __slots__ = ("again", "doing", "path")

    def __init__(self, path: object, doing: str = "read", *, again: str = GOES_ON) -> None:
        self.path, self.doing, self.again = path, doing, again

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(value, OSError):
            raise refusal(value, self.path, self.doing, again=self.again) from value


def refusal(error: OSError, path: object, doing: str = "read", *, again: str = GOES_ON) -> K3Error:
    """What `error` says of `path`, which could not be read, written, ...; to be raised.

    CapacityError (12): no room, no descriptors or memory left, a disk that fails while it is written. CheckpointCorrupt
    (11): a disk that fails while it is read. CheckpointMissing (10): not there to be read. UsageError (2): permissions
    and paths. PartlyDone (3): in use. UnsupportedError (14): the file system cannot do it.
    """
    number, reading = error.errno, doing in READING
    because = error.strerror or str(error) or type(error).__name__
    cause = f"cannot {doing} {path}: {because}"
    details = {"path": str(path), "errno": errno.errorcode.get(number or 0, str(number))}
    if number in FULL:
        return CapacityError(f"no space left while writing {path}: {because}", hint=f"{_room(number)}, then {again}", **details)  # fmt: skip
    if number in DENIED:
        return UsageError(cause, hint=_permission(number, reading), **details)
    if number == errno.ENOENT and reading:
        return CheckpointMissing(
            cause, hint="put the file back, or name a folder that holds it: it is missing, or went meanwhile", **details
        )
    if number in WRONG_PATH:
        return UsageError(cause, hint=_other_path(number, path), **details)
    if number in TOO_MANY_OPEN:
        return CapacityError(
            cause,
            hint="raise the number of open files (ulimit -n 4096; ulimit -Hn is the most), then " + again,
            **details,
        )
    if number in NO_MEMORY:
        return CapacityError(cause, hint=f"free memory, or give fewer --max-workers, then {again}", **details)
    if number in IN_USE:
        return PartlyDone(cause, hint=f"let whatever uses it finish, then {again}", **details)
    if number in UNSUPPORTED:
        return UnsupportedError(
            cause, hint="this file system cannot do that: name a folder on another disk or mount", **details
        )
    what = "file server and the network to it" if number in LOST else "disk and its mount (dmesg tells more)"
    kind = CheckpointCorrupt if reading else CapacityError
    return kind(cause, hint=f"check the {what}, then {again}", **details)


def _room(number: int | None) -> str:
    if number == errno.EFBIG:
        return "raise the largest file size (ulimit -f unlimited), or use a file system that holds such files"
    return "free space" if number == errno.ENOSPC else "free space within your quota"


def _permission(number: int | None, reading: bool) -> str:
    verb = "read" if reading else "write to"
    if number == errno.EROFS:
        return "its file system is mounted read-only: name a folder on another one, or mount it for writing"
    return f"name what you may {verb}, or give yourself permission (chmod, chown; ls -ld shows who may)"


def _other_path(number: int | None, path: object) -> str:
    if number == errno.EISDIR:
        return "name a file: a folder is there"
    if number == errno.ENOTDIR:
        return "name another path: what should be a folder on the way is a file"
    if number == errno.ENAMETOOLONG:
        return "name a shorter path: this one is too long for the file system"
    if number == errno.EILSEQ:
        return "name a folder on another disk: this file system cannot hold a name with these characters"
    if number == errno.ELOOP:
        return "name another path: symbolic links on the way lead in a circle"
    if os.path.islink(str(path)) and not os.path.exists(str(path)):
        return f"name another path, or mount or make what this link leads to: {os.readlink(str(path))}"
    if number == errno.ENOENT:
        return "name a path whose parent folder exists and may be written to"
    return "name another path: something else has this name"


def free_bytes(folder: object) -> int | None:
    """Bytes that may still be written on the file system of `folder`. None, and a warning, where it does not say: some
    (FUSE, rclone) count 0 of 0 blocks."""
    with contextlib.suppress(OSError):
        usage = shutil.disk_usage(str(folder))
        if usage.total:
            return usage.free
    warn_once(
        f"the file system of {folder} does not say how much room it has; whether all fits is seen while it is written",
        "room",
    )
    return None


def refuse_link(path: object) -> None:
    """Raises UsageError where `path`, at which k3tool keeps a record of its own, is a symbolic link: whoever made the folder
    could have any file of the user's written through it."""
    if os.path.islink(str(path)):
        raise UsageError(
            f"{path} is a symbolic link to {os.readlink(str(path))}: no record of k3tool is kept through one",
            hint="remove the link, then run the same command again",
        )


def make_folder(path: object) -> list[Path]:
    """`path` as a folder, with its parents; one that exists is fine. Returns those that were not there, the innermost first.
    Raises UsageError, CapacityError."""
    with disk_errors(path, "make the folder"):
        missing: list[Path] = []
        here = Path(str(path))
        while not os.path.lexists(here):
            missing.append(here)
            here = here.parent
        os.makedirs(str(path), exist_ok=True)
        return missing


def cache_folder() -> Path:
    """Where k3tool keeps what only saves time: K3TOOL_CACHE, else `~/.cache/k3tool`, else, where this user has no home or
    may not write there, a temporary folder that is this user's alone. Where there is none either, a path that is none."""
    named = os.environ.get("K3TOOL_CACHE")
    if named:
        return Path(os.path.expanduser(named))
    home = os.path.expanduser("~")
    if not home.startswith("~") and os.access(home, os.W_OK | os.X_OK):
        return Path(home, ".cache", "k3tool")
    import tempfile

    user = os.getuid() if hasattr(os, "getuid") else 0
    with contextlib.suppress(OSError):
        folder = Path(tempfile.gettempdir(), f"k3tool-cache-{user}")
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        found = folder.lstat()
        if stat.S_ISDIR(found.st_mode) and found.st_uid == user and not found.st_mode & 0o022:
            return folder  # code is read from it: nobody else may put some there
    return Path(os.devnull, "k3tool")
