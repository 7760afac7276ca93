"""Advice is followed: every command in a `next:`, `hint:` or `cut it so:` line that a test makes k3tool print.

Each is parsed at once: it ends its line, begins with the program as this shell finds it, names only options that exist
and holds no placeholder. The first of its kind in each process is carried out too, then and there; the folders that it
names are afterwards as they were.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from k3tool.cli import app
from k3tool.commands import program

COMMANDS = ("inspect", "verify", "plan", "fetch", "reshard", "quantize", "run", "demo")
_ADVICE = re.compile(r"^\s*(next|hint|cut it so|try this|a part of the checkpoint|[^:]*; the rest of it comes with): ")
_CALL = re.compile(rf"(?:torchrun|\S*k3tool)\S* .*?\b({'|'.join(COMMANDS)})\b.*|\S*k3tool (--help|--version).*")
_PLACEHOLDER = re.compile(r"\.\.\.|<[^>]*>|\b[A-Z]+_DIR\b|\b(DIR|DEST|SOURCE|REPO|FILE|TEXT|NAME)\b")
_LARGEST = 64 << 20

_done: set[str] = set()
_inside = False


def follow(out: str, err: str) -> None:
    """Check the advice in what one command line printed. Raises AssertionError that names the line."""
    global _inside
    if _inside:
        return
    for line in [*out.splitlines(), *err.splitlines()]:
        words = words_of(line)
        if words is None:
            continue
        parse(line, words)
        kind = _kind(line, words)
        if kind in _done:
            continue
        _done.add(kind)
        _inside = True
        try:
            _carry_out(line, words)
        finally:
            _inside = False


def words_of(line: str) -> list[str] | None:
    """The words after the program's name, where a line of advice holds a command."""
    if not _ADVICE.match(line):
        return None
    called = f"{program()} "
    ranks = re.search(r"(\S*torchrun) --nproc-per-node \d+ -m k3tool (.*)", line)
    if ranks:
        return shlex.split(ranks[2])
    at = line.find(called)
    if at >= 0 and line[at - 1] == " ":
        return shlex.split(line[at + len(called) :])
    assert not re.search(rf"\bk3tool ({'|'.join(COMMANDS)})\b", line), (
        f"a shell here does not find k3tool as in: {line}"
    )
    return None


def parse(line: str, words: list[str]) -> None:
    """The words are a command line that k3tool takes; nothing is carried out."""
    import typer

    from k3tool.cli.registry import PARSER_ERROR
    from k3tool.cli.registry import app as registered

    assert words and (words[0] in COMMANDS or words[0].startswith("--")), f"no command follows in: {line}"
    assert not any(_PLACEHOLDER.fullmatch(word) for word in words), f"a placeholder cannot be pasted: {line}"
    if "--help" in words:
        return
    group = typer.main.get_command(registered)
    command = group.commands[words[0]]  # type: ignore[attr-defined]
    try:
        command.make_context(words[0], list(words[1:])).close()
    except PARSER_ERROR as error:
        raise AssertionError(f"{error.format_message()} in: {line}") from error


def _kind(line: str, words: list[str]) -> str:
    """Lines that differ in paths and numbers alone are of one kind."""
    options = [word for word in words if word.startswith("--")]
    return "|".join([line.split(":")[0].strip(), re.sub(r"\d+", "9", line.split(program())[0]), words[0], *options])


def _carry_out(line: str, words: list[str]) -> None:
    if "HF_ENDPOINT" not in os.environ and len(words) > 1 and re.fullmatch(r"[\w-]+/[\w.-]+(@\w+)?", words[1]):
        return  # the Hub itself: nothing of it is here
    if ", then: " in line:
        return  # people have something to do before
    out, err = io.StringIO(), io.StringIO()
    with _kept(words), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = app.run(words)
    told = f"{line}\nended with {code}:\n{out.getvalue()[-1500:]}{err.getvalue()[-1500:]}"
    if words[0] in ("verify", "inspect"):  # their work is to show what is wrong
        assert code in (0, 10, 11), told
    elif words[0] == "fetch":
        assert code in (0, 13), told  # the server of the test may be gone or meant to fail
    elif "--part" in words:
        assert code in (0, 3), told  # other parts may be left
    else:
        assert code == 0, told


@contextlib.contextmanager
def _kept(words: list[str]) -> Iterator[None]:
    """Every temporary folder that the words name, and the working folder, is afterwards as it was before."""
    base = Path(tempfile.gettempdir()).resolve()
    roots = set()
    for path in [Path.cwd(), *(Path(word.partition("=")[2] if word.startswith("--") else word) for word in words)]:
        parts = path.relative_to(base).parts if path.is_absolute() and path.is_relative_to(base) else ()
        if parts and parts[0].startswith("pytest-of-"):  # pytest-of-USER/pytest-N/(popen-gwN/)NAME/...
            roots.add(base.joinpath(*parts[: 4 if len(parts) > 2 and parts[2].startswith("popen-") else 3]))
    with tempfile.TemporaryDirectory(prefix="k3tool-hints-") as kept:
        copies = {root: Path(kept) / str(number) for number, root in enumerate(sorted(roots)) if root.is_dir()}
        for root, copy in copies.items():
            size = sum(path.lstat().st_size for path in root.rglob("*") if not path.is_dir())
            assert size <= _LARGEST, f"{root} is too large to try advice in"
            shutil.copytree(root, copy, symlinks=True, copy_function=_copy)
        try:
            yield
        finally:
            for root, copy in copies.items():
                _restore(copy, root)


def _restore(copy: Path, root: Path) -> None:
    for path in sorted(root.rglob("*"), reverse=True):
        if not os.path.lexists(copy / path.relative_to(root)):
            path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
    for path in sorted(copy.rglob("*")):
        there = root / path.relative_to(copy)
        if path.is_dir() and not path.is_symlink():
            there.mkdir(exist_ok=True)
        elif not _same(path, there):
            there.unlink(missing_ok=True)
            _copy(str(path), str(there))


def _same(path: Path, other: Path) -> bool:
    if not os.path.lexists(other):
        return False
    one, two = path.lstat(), other.lstat()
    return (one.st_size, one.st_mtime_ns, one.st_mode) == (two.st_size, two.st_mtime_ns, two.st_mode)


def _copy(source: str, target: str) -> None:
    with contextlib.suppress(OSError):  # sockets, unreadable files: what the state holds and no copy needs
        shutil.copy2(source, target, follow_symlinks=False)
