"""A file system that refuses: a call from one place, or it and all later ones, fails with a given errno.

Calls are those of this process on files below one folder, told apart by the lines of k3tool that make them. Used by
`tests/test_refusals.py` for a selection and by `tools/errno_walk.py` for all.
"""

from __future__ import annotations

import builtins
import contextlib
import errno
import fcntl
import hashlib
import io
import json
import mmap
import os
import re
import shutil
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import k3tool
from k3tool.cli import app

PACKAGE = os.path.dirname(os.path.abspath(k3tool.__file__)) + os.sep
DEPTH = 3


def _numbers(names: str) -> tuple[int, ...]:
    return tuple(getattr(errno, name) for name in names.split() if hasattr(errno, name))


GONE = "EIO ESTALE ENOTCONN "
READ = _numbers(GONE + "ENODATA EREMOTEIO ENXIO ENOMEM ETIMEDOUT EINVAL EOPNOTSUPP EISDIR EPERM")
WRITE = _numbers(GONE + "ENOSPC EDQUOT EFBIG EROFS ENXIO ETIMEDOUT EHOSTDOWN ENOMEM EPERM EINVAL")
PATHS = _numbers(GONE + "EACCES EPERM EROFS ENOTDIR ENAMETOOLONG ELOOP ENOMEM EBUSY ENOSPC EDQUOT EILSEQ")
KINDS: dict[str, tuple[int, ...]] = {
    "open": _numbers(GONE + "EACCES EPERM EROFS EMFILE ENFILE ENOMEM ENOSPC EDQUOT ENAMETOOLONG ELOOP EISDIR ETXTBSY "
                     "ENXIO ENOTDIR EOVERFLOW"),
    "read": READ,
    "write": WRITE,
    "close": _numbers("EIO EDQUOT ENOSPC ESTALE"),
    "fsync": _numbers(GONE + "ENOSPC EDQUOT EINVAL EROFS ENOSYS EOPNOTSUPP"),
    "replace": (*PATHS, *_numbers("EXDEV EEXIST EISDIR EINVAL ETXTBSY")),
    "link": (*PATHS, *_numbers("EXDEV EMLINK EEXIST EOPNOTSUPP ENOSYS")),
    "unlink": _numbers(GONE + "EACCES EPERM EROFS EBUSY ENOMEM ENOTEMPTY"),
    "mkdir": (*PATHS, *_numbers("EMLINK")),
    "list": _numbers(GONE + "EACCES EMFILE ENFILE ENOMEM ENOTDIR"),
    "stat": _numbers(GONE + "EACCES ENOMEM ELOOP ENAMETOOLONG EOVERFLOW"),
    "truncate": _numbers(GONE + "ENOSPC EFBIG EINVAL EPERM EROFS ETXTBSY"),
    "flock": _numbers(GONE + "ENOSYS ENOLCK EOPNOTSUPP EINVAL EINTR EBADF"),
    "advise": _numbers("EINVAL ENOSYS ESPIPE EOPNOTSUPP EBADF"),
    "allocate": _numbers(GONE + "ENOSPC EDQUOT EFBIG EINVAL ENOSYS EOPNOTSUPP"),
    "map": _numbers(GONE + "ENODEV ENOMEM EACCES EPERM EINVAL EAGAIN"),
    "room": _numbers(GONE + "ENOSYS EACCES"),
    "copy": _numbers(GONE + "ENOSPC EDQUOT EXDEV EINVAL ENOSYS EOPNOTSUPP"),
    "cwd": _numbers("ENOENT EACCES ESTALE"),
    "thread": _numbers("EAGAIN"),
}  # fmt: skip
# What belongs to the system's answer and not to the disk may end so.
CODES = {0, 1, 2, 3, 10, 11, 12, 14}

# Functions of `os`, by kind, whose first argument is a path or a descriptor.
OS_CALLS = {
    "open": ("open",),
    "read": ("preadv", "pread", "read"),
    "write": ("pwrite", "write"),
    "fsync": ("fsync", "fdatasync"),
    "replace": ("replace", "rename"),
    "link": ("link", "symlink"),
    "unlink": ("unlink", "remove", "rmdir"),
    "mkdir": ("mkdir",),
    "list": ("listdir", "scandir"),
    "stat": ("stat", "lstat", "fstat"),
    "truncate": ("truncate", "ftruncate"),
    "advise": ("posix_fadvise",),
    "allocate": ("posix_fallocate",),
    "room": ("statvfs",),
    "copy": ("sendfile", "copy_file_range"),
}


@dataclass(frozen=True)
class Call:
    """The n-th call of a kind from one place: `where` holds the innermost frames of k3tool, as file:line, inner first."""

    kind: str
    where: tuple[str, ...]
    nth: int = 1

    def __str__(self) -> str:
        return f"{self.kind} at {' < '.join(self.where)}" + (f", {self.nth}" if self.nth > 1 else "")


class Disk:
    """Counts calls below `root` by place, and refuses `call`; with `sticky` it and all later ones of its kind.

    gone: instead, every call of any kind from `call` on is refused, as where a file server or a disk goes away.
    """

    def __init__(
        self, root: Path, call: Call | None = None, number: int = 0, *, sticky: bool = False, gone: bool = False
    ) -> None:
        self.root = os.path.realpath(root)
        self.call, self.number, self.sticky, self.gone = call, number, sticky, gone
        self.counts: Counter[tuple[str, tuple[str, ...]]] = Counter()
        self.refused = ""
        self._lock = threading.Lock()
        self._real = {name: getattr(os, name) for name in ("readlink", "getcwd")}

    def calls(self) -> list[Call]:
        """The first and the last call of every place."""
        with self._lock:
            counts = sorted(self.counts.items())
        return [Call(kind, where, nth) for (kind, where), count in counts for nth in sorted({1, count})]

    def _path_of(self, what: Any, folder: int | None = None) -> str:
        try:
            if isinstance(what, int):
                return str(self._real["readlink"](f"/proc/self/fd/{what}"))
            base = self._real["getcwd"]() if folder is None else self._path_of(folder)
            return os.path.normpath(os.path.join(base, os.fsdecode(what)))
        except (OSError, TypeError):
            return ""

    def check(self, kind: str, what: Any, folder: int | None = None) -> None:
        """Raises the errno where this is the call."""
        path = self._path_of(what, folder)
        if path.startswith(self.root):
            self.count(kind, path, OSError(self.number, os.strerror(self.number), *_named(what)))

    def count(self, kind: str, path: str, error: Exception) -> None:
        """One call of `kind` comes now; `error` is raised where it is the one."""
        where = _where()
        if not where:
            return
        with self._lock:
            self.counts[kind, where] += 1
            met = self.call is not None and Call(kind, where, self.counts[kind, where]) == self.call
            again = self.refused and (self.gone or (self.sticky and self.call is not None and kind == self.call.kind))
            if not met and not again:
                return
            self.refused = self.refused or path
        raise error

    @contextlib.contextmanager
    def mounted(self) -> Iterator[Disk]:
        restore: list[tuple[Any, str, Any]] = []

        def put(owner: Any, name: str, value: Any) -> None:
            restore.append((owner, name, getattr(owner, name)))
            setattr(owner, name, value)

        try:
            for kind, names in OS_CALLS.items():
                for name in names:
                    if hasattr(os, name):
                        put(os, name, self._checked(kind, getattr(os, name)))
            put(os, "getcwd", self._getcwd())
            put(fcntl, "flock", self._checked("flock", fcntl.flock))
            opened = self._open(builtins.open)
            put(builtins, "open", opened)
            put(io, "open", opened)
            put(io, "FileIO", self._raw())
            put(mmap, "mmap", self._map())
            put(threading.Thread, "start", self._start())
            yield self
        finally:
            for owner, name, value in reversed(restore):
                setattr(owner, name, value)

    def _checked(self, kind: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(what: Any = ".", *arguments: Any, **options: Any) -> Any:
            folder = options.get("dir_fd", options.get("src_dir_fd"))
            self.check(kind, what.fileno() if hasattr(what, "fileno") else what, folder)
            return real(what, *arguments, **options)

        return call

    def _getcwd(self) -> Callable[[], str]:
        def getcwd() -> str:
            self.count("cwd", ".", FileNotFoundError(self.number, os.strerror(self.number)))
            return str(self._real["getcwd"]())

        return getcwd

    def _start(self) -> Callable[[threading.Thread], None]:
        real = threading.Thread.start

        def start(thread: threading.Thread) -> None:
            self.count("thread", "a thread", RuntimeError("can't start new thread"))
            real(thread)

        return start

    def _map(self) -> type[mmap.mmap]:
        disk = self

        class Map(mmap.mmap):
            def __new__(cls, fileno: int, *arguments: Any, **options: Any) -> Any:
                disk.check("map", fileno)
                return super().__new__(cls, fileno, *arguments, **options)

        return Map

    def _raw(self) -> type[io.FileIO]:
        disk = self

        class Raw(io.FileIO):
            def write(self, data: Any) -> int:
                disk.check("write", self.fileno())
                return super().write(data)

            def readinto(self, buffer: Any) -> int | None:  # type: ignore[override]
                disk.check("read", self.fileno())
                return super().readinto(buffer)

            def read(self, size: int | None = -1) -> bytes | None:
                disk.check("read", self.fileno())
                return super().read(-1 if size is None else size)

            def readall(self) -> bytes | None:
                disk.check("read", self.fileno())
                return super().readall()

            def truncate(self, size: int | None = None) -> int:
                disk.check("truncate", self.fileno())
                return super().truncate(size)

            def close(self) -> None:
                if not self.closed and self.writable():
                    with contextlib.closing(super()):  # the descriptor goes, whatever close says
                        disk.check("close", self.fileno())
                super().close()

        return Raw

    def _open(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def opened(file: Any, mode: str = "r", buffering: int = -1, encoding: str | None = None,
                   errors: str | None = None, newline: str | None = None, *rest: Any, **options: Any) -> Any:  # fmt: skip
            if not self._path_of(file).startswith(self.root):
                return real(file, mode, buffering, encoding, errors, newline, *rest, **options)
            if not isinstance(file, int):
                self.check("open", file)
            raw: Any = io.FileIO(file, mode.replace("b", "").replace("t", ""), *rest, **options)
            if buffering == 0:
                return raw
            binary = (
                io.BufferedRandom(raw)
                if "+" in mode
                else io.BufferedReader(raw)
                if mode[0] == "r"
                else io.BufferedWriter(raw)
            )
            if "b" in mode:
                return binary
            return io.TextIOWrapper(binary, encoding, errors, newline)

        return opened


def _named(what: Any) -> list[str]:
    return [] if isinstance(what, int) else [os.fsdecode(what)]


def _where() -> tuple[str, ...]:
    """The innermost frames of k3tool that this call comes from; none for one of tests or of the stand-in Hub."""
    found: list[str] = []
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and len(found) < DEPTH:
        name = frame.f_code.co_filename
        if name.startswith(PACKAGE):
            short = name[len(PACKAGE) :]
            if short.startswith("standin"):
                return ()
            found.append(f"{short}:{frame.f_lineno}")
        frame = frame.f_back
    return tuple(found)


@dataclass(frozen=True)
class Ran:
    code: int
    out: str
    err: str


def run(arguments: list[str]) -> Ran:
    """A command line in this process, whose own size counts for nothing where a run is bounded."""
    out, err = io.StringIO(), io.StringIO()
    beside = mock.patch("k3tool.model.bound.Bound.beside", lambda self, *given: 0)
    with beside, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = app.run(arguments)
    return Ran(code, out.getvalue(), err.getvalue())


@dataclass(frozen=True)
class Scenario:
    """A command line on a folder `{}` that holds `needs`.

    timeless: what of its document is the same every time. cut: the command has been run once before, and its disk was
    full from that write on (`WHOLE`: it was not).
    """

    name: str
    arguments: tuple[str, ...]
    timeless: tuple[str, ...] = ()
    needs: tuple[str, ...] = ("source",)
    cut: int = 0

    def line(self, work: Path) -> list[str]:
        return [argument.replace("{}", str(work)) for argument in self.arguments] + ["--json"]


WHOLE = 1 << 30
RANKS = ("--gpus", "2", "--ep", "2", "--max-shard-size", "300KB")
SHORT = ("--input-ids", "1,2", "--max-new-tokens", "2")
SCENARIOS = (
    Scenario("inspect", ("inspect", "{}/source"), ("total_size", "tensors", "missing")),
    Scenario("inspect a repository", ("inspect", "org/mini"), ("total_size", "tensors", "missing"), ()),
    Scenario("verify", ("verify", "{}/source"), ("files", "problems")),
    Scenario("verify bytes", ("verify", "{}/written", "--depth", "bytes"), ("problems",), ("written",)),
    Scenario("verify ranks", ("verify", "{}/ranks", "--depth", "bytes"), ("problems",), ("ranks",)),
    Scenario("verify gguf", ("verify", "{}/gguf", "--depth", "bytes"), ("problems",), ("gguf",)),
    Scenario("plan", ("plan", "{}/source", "--gpus", "1", "--report", "{}/plan.html"), ("layout", "fits")),
    Scenario("reshard", ("reshard", "{}/source", "{}/out", *RANKS, "--verify")),
    Scenario("reshard goes on", ("reshard", "{}/source", "{}/out", *RANKS, "--verify"), cut=40),
    Scenario("reshard again", ("reshard", "{}/source", "{}/out", *RANKS), cut=WHOLE),
    Scenario("reshard over", ("reshard", "{}/source", "{}/written", "--layout", "hf", "--overwrite"), needs=("source", "written")),
    Scenario("join", ("reshard", "{}/ranks", "{}/out", "--layout", "hf", "--gpus", "1", "--verify"), needs=("ranks",)),
    Scenario("reclaim", ("reshard", "{}/source", "{}/out", "--layout", "hf", "--max-shard-size", "300KB", "--reclaim")),
    Scenario("quantize", ("quantize", "{}/source", "{}/out", "--latent", "int8", "--report", "{}/report.html", "--verify")),
    Scenario("quantize goes on", ("quantize", "{}/source", "{}/out", "--latent", "int8", "--verify"), cut=20),
    Scenario("quantize ranks", ("quantize", "{}/source", "{}/out", "--experts", "nvfp4", *RANKS)),
    Scenario("calibrated", ("quantize", "{}/source", "{}/out", "--latent", "int4", "--activations", "{}/seen/a.safetensors", "--calibrated"), needs=("source", "seen")),
    Scenario("recipe", ("quantize", "{}/source", "{}/out", "--recipe", "{}/seen/recipe.toml"), needs=("source", "seen")),
    Scenario("gguf", ("quantize", "{}/source", "{}/out", "--format", "gguf", "--vocabulary", "none")),
    Scenario("gguf goes on", ("quantize", "{}/source", "{}/out", "--format", "gguf", "--vocabulary", "none"), cut=30),
    Scenario("run", ("run", "{}/source", *SHORT, "--logits-out", "{}/logits"), ("token_ids",)),
    Scenario("run streamed", ("run", "{}/source", *SHORT, "--memory", "2MB", "--logits-out", "{}/logits"), ("token_ids",)),
    Scenario("record", ("run", "{}/source", *SHORT, "--save-activations", "{}/seen.safetensors", "--gram"), ("token_ids",)),
    Scenario("fetch", ("fetch", "org/mini", "--local-dir", "{}/out", "--max-workers", "2", "--patience", "5")),
    Scenario("fetch goes on", ("fetch", "org/mini", "--local-dir", "{}/out", "--max-workers", "2", "--patience", "5"), cut=9),
    Scenario("fetch again", ("fetch", "org/mini", "--local-dir", "{}/out", "--max-workers", "2", "--patience", "5"), cut=WHOLE),
    Scenario("fetch layers", ("fetch", "org/mini", "--local-dir", "{}/out", "--layers", "0-1", "--max-workers", "2"), needs=()),
    Scenario("fetch a folder", ("fetch", "{}/source", "--local-dir", "{}/out", "--max-workers", "2")),
    Scenario("fetch what is here", ("fetch", "org/mini", "--local-dir", "{}/out", "--reuse", "{}/source", "--max-workers", "2")),
)  # fmt: skip


class Bench:
    """Runs scenarios on a copy of `checkpoint` in `folder`; what they leave is compared with an undisturbed run."""

    def __init__(self, checkpoint: Path, folder: Path) -> None:
        self.kept, self.work = folder / "kept", folder / "work"
        source = self.kept / "source"
        shutil.copytree(checkpoint, source, ignore=shutil.ignore_patterns("golden.safetensors"))
        for path in [self.kept, *self.kept.rglob("*")]:
            path.chmod(path.stat().st_mode | 0o200)
        self._expected: dict[str, tuple[object, list[Call]]] = {}

    def _need(self, name: str) -> Path:
        """One of the folders that scenarios need, made when it is asked for the first time."""
        made = self.kept / name
        if made.exists():
            return made
        source = self.kept / "source"
        if name == "seen":
            made.mkdir()
            (made / "recipe.toml").write_text('latent = "int8"\n')
            line = ["run", source, *SHORT, "--save-activations", made / "a.safetensors", "--gram"]
        else:
            line = {
                "written": ["reshard", source, made, "--layout", "hf"],
                "ranks": ["reshard", source, made, *RANKS],
                "gguf": ["quantize", source, made, "--format", "gguf", "--vocabulary", "none"],
            }[name]
        ran = run([str(word) for word in line])
        assert ran.code == 0, ran.err
        return made

    def prepare(self, scenario: Scenario) -> None:
        shutil.rmtree(self.work, ignore_errors=True)
        self.work.mkdir()
        for name in scenario.needs:
            shutil.copytree(self._need(name), self.work / name)
        if scenario.cut:
            with _full_at(self.work, scenario.cut):
                cut = run(scenario.line(self.work))
            assert cut.code == (0 if scenario.cut == WHOLE else 12), cut.err

    def expected(self, scenario: Scenario) -> tuple[object, list[Call]]:
        """What is there afterwards, and the calls on the way: the first and the last from every place."""
        if scenario.name not in self._expected:
            self.prepare(scenario)
            warm = run(scenario.line(self.work))  # imports and compiled kernels are there from here on
            assert warm.code == 0, warm.err
            self.prepare(scenario)
            with Disk(self.work).mounted() as disk:
                ran = run(scenario.line(self.work))
            assert ran.code == 0, ran.err
            self._expected[scenario.name] = self._state(scenario, ran), disk.calls()
        return self._expected[scenario.name]

    def _state(self, scenario: Scenario, ran: Ran) -> object:
        document = json.loads(ran.out)
        said = {key: document.get(key) for key in scenario.timeless}
        digests: dict[str, str] = {}
        for path in sorted(self.work.rglob("*")):
            name = path.relative_to(self.work).as_posix()
            if path.is_file() and not name.endswith(("proofs.jsonl", "k3tool-reclaimed.json", ".lock")):
                digests[name] = hashlib.sha256(_timeless(path.read_bytes())).hexdigest()
        return said, digests

    def refuse(
        self, scenario: Scenario, call: Call, number: int, *, sticky: bool = False, gone: bool = False
    ) -> tuple[int | None, str]:
        """One disturbed run and the same command again on a sound disk.

        Returns the code of the first, None where the call did not come, and what is wrong, or nothing.
        """
        state, _ = self.expected(scenario)
        self.prepare(scenario)
        with Disk(self.work, call, number, sticky=sticky, gone=gone).mounted() as disk:
            first = run(scenario.line(self.work))
        if not disk.refused:
            return None, ""
        problem = self._complaint(first) or (self._difference(scenario, first, state) if first.code == 0 else "")
        if not problem and first.code:
            again = run(scenario.line(self.work))
            if again.code and "given up: all of its tensors are in" in again.err:
                found = self._difference(scenario, first, state, "out/")
                problem = f"given up, but {found}" if found else ""
            elif again.code:
                problem = f"the same command again: {again.code}: {again.err[-300:]}"
            else:
                found = self._difference(scenario, again, state)
                problem = f"the same command again: {found}" if found else ""
        if problem:
            problem += f" | {first.code} | refused {disk.refused} | {first.err[-500:]}"
        return first.code, problem

    def _complaint(self, ran: Ran) -> str:
        """What is wrong with how a failure was told."""
        if ran.code not in CODES or "Traceback" in ran.err:
            return "not as documented"
        if ran.code == 0:
            return ""
        error: Mapping[str, Any] = json.loads(ran.out).get("error", {})
        message = str(error.get("message", ""))
        if error.get("code") != ran.code:
            return f"another document: {ran.out[:200]}"
        if not any(
            name in message for name in (str(self.work), "thread", "current folder", "safetensors", "config.json")
        ):
            return "without a name"
        return "without a remedy" if not error.get("hint") else ""

    def _difference(self, scenario: Scenario, ran: Ran, expected: Any, below: str = "") -> str:
        found: Any = self._state(scenario, ran)
        if found == expected:
            return ""
        if not below and found[0] != expected[0]:
            return f"it says {found[0]}"[:300]
        names = {n for n in found[1].keys() | expected[1].keys() if found[1].get(n) != expected[1].get(n)}
        names = {name for name in names if name.startswith(below)}
        return f"these differ: {sorted(names)[:5]}" if names else ""


@contextlib.contextmanager
def _full_at(root: Path, count: int) -> Iterator[None]:
    """The disk is full from the `count`-th write below `root` on, wherever it comes from."""
    disk = Disk(root)
    left = count

    def check(kind: str, what: Any, folder: int | None = None) -> None:
        nonlocal left
        if kind == "write" and disk._path_of(what, folder).startswith(disk.root):
            left -= 1
            if left < 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    disk.check = check  # type: ignore[method-assign]
    with disk.mounted():
        yield


def _timeless(data: bytes) -> bytes:
    """A page or report without what another run measures anew."""
    return re.sub(
        rb'"(seconds|peak_memory_bytes|bytes_read|workers)": ?[0-9.]+|[0-9.]+ (s|min)\b|[0-9.]+ [kMG]?B\b', b"", data
    )
