"""The shape of the house: what imports what, what is public, and what must stay light."""

from __future__ import annotations

import ast
import errno
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import k3tool
from k3tool import errors
from k3tool.cli import app as cli

PACKAGE = Path(k3tool.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))
HEAVY = ("torch", "triton", "numba", "numpy", "transformers", "bitsandbytes", "huggingface_hub", "rich")
# Nothing in these may need torch, not even when it works.
BYTES_ONLY = ("checkpoint", "catalog.py", "config.py", "names.py", "inspection.py", "verify.py", "conform.py", "hub",
              "fetch", "plan.py", "execute.py", "layout.py", "sizing.py", "release.py", "standin")  # fmt: skip


def _imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


def _loaded(code: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; {code}; print(*sys.modules, file=sys.stderr)"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "COLUMNS": "80"},
    )
    return {name.split(".")[0] for name in done.stderr.split()}


def test_nothing_imports_the_command_line():
    for path in MODULES:
        if path.parent.name != "cli" and path.name != "__main__.py":
            assert not any(name.startswith("k3tool.cli") for name in _imports(path)), path


def test_only_the_command_line_draws():
    for path in MODULES:
        if path.parent.name != "cli":
            assert not any(name.split(".")[0] in ("rich", "typer") for name in _imports(path)), path


@pytest.mark.parametrize("part", BYTES_ONLY)
def test_bytes_need_no_torch(part: str):
    for path in MODULES:
        if path.relative_to(PACKAGE).as_posix().startswith(part):
            assert not any(name.split(".")[0] == "torch" for name in _imports(path)), path


def test_nothing_unpickles_or_evaluates():
    for path in MODULES:
        assert not {name.split(".")[0] for name in _imports(path)} & {"pickle", "marshal", "shelve", "dill"}, path
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in ("eval", "exec"), path
            if isinstance(node, ast.keyword):
                assert node.arg != "trust_remote_code", path


def test_import_and_help_are_light():
    assert not _loaded("import k3tool") & {*HEAVY, "typer"}
    assert not _loaded("from k3tool.cli import app; app.run(['--help'])") & {*HEAVY}
    for command in cli.COMMANDS:
        assert not _loaded(f"from k3tool.cli import app; app.run(['{command}', '--help'])") & {*HEAVY}, command


def test_public_names():
    assert sorted(k3tool.__all__) == ["Checkpoint", "K3Config", "K3Error", "__version__", "open_source"]
    for name in k3tool.__all__:
        assert getattr(k3tool, name) is not None
    with pytest.raises(AttributeError):
        _ = k3tool.no_such_name


def test_exit_codes_are_the_documented_ones():
    tree = {cls.__name__: cls.exit_code for cls in errors.K3Error.__subclasses__()}
    tree = {name: code for name, code in tree.items() if hasattr(errors, name)}
    assert tree == {
        "CheckFailed": 1, "UsageError": 2, "PartlyDone": 3, "CheckpointMissing": 10, "CheckpointCorrupt": 11,
        "CapacityError": 12, "RemoteError": 13, "UnsupportedError": 14, "Interrupted": 130,
    }  # fmt: skip
    for code in [*tree.values(), errors.EXIT_BUG, errors.EXIT_INTERRUPTED, 143]:
        assert re.search(rf"\b{code} ", cli.EXIT_CODES)


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_explains_itself(command: str, capsys):
    assert cli.run([command, "--help"]) == 0
    text = capsys.readouterr().out
    assert "Usage: k3tool " + command in text and "Exit codes:" in text and len(text) > 400


def test_version_and_usage(capsys):
    assert cli.run(["--version"]) == 0
    assert capsys.readouterr().out == f"k3tool {k3tool.__version__}\n"
    assert cli.run(["no-such-command"]) == 2
    assert "No such command" in capsys.readouterr().err


def test_a_bug_is_exit_70_with_a_traceback(capsys, monkeypatch):
    monkeypatch.setattr("k3tool.checkpoint.reader.Checkpoint.open", lambda _: 1 / 0)
    assert cli.run(["inspect", "x"]) == 70
    error = capsys.readouterr().err
    assert "Traceback" in error and "this is a bug in k3tool: ZeroDivisionError" in error


@pytest.mark.parametrize(
    "number, code",
    [
        (errno.EACCES, 2),
        (errno.EROFS, 2),
        (errno.ENOTDIR, 2),
        (errno.ENOENT, 2),
        (errno.EBUSY, 3),
        (errno.ENOSPC, 12),
        (errno.EDQUOT, 12),
        (errno.EMFILE, 12),
        (errno.ENOMEM, 12),
        (errno.EIO, 12),
        (errno.ENOSYS, 14),
    ],
)
def test_what_the_disk_refuses_is_no_bug(number: int, code: int, capsys, monkeypatch):
    def refuse(_: object) -> None:
        raise OSError(number, os.strerror(number), "/some/folder")

    monkeypatch.setattr("k3tool.checkpoint.reader.Checkpoint.open", refuse)
    assert cli.run(["inspect", "x", "--json"]) == code
    out, error = capsys.readouterr()
    assert f'"code": {code}' in out and "/some/folder" in error and os.strerror(number) in error
    assert "Traceback" not in error


@pytest.mark.parametrize(
    "error, code, said",
    [
        (MemoryError(), 12, "no memory left"),
        (RuntimeError("can't start new thread"), 12, "ulimit -u"),
        (ConnectionResetError(errno.ECONNRESET, "reset by peer"), 13, "reset by peer"),
    ],
)
def test_what_the_system_refuses_is_no_bug(error: Exception, code: int, said: str, capsys, monkeypatch):
    def refuse(_: object) -> None:
        raise error

    monkeypatch.setattr("k3tool.checkpoint.reader.Checkpoint.open", refuse)
    assert cli.run(["inspect", "x"]) == code
    shown = capsys.readouterr().err
    assert said in shown and "Traceback" not in shown


def test_a_file_that_cannot_be_written_is_refused_before_the_work(capsys, monkeypatch, tmp_path: Path, mini: Path):
    monkeypatch.setattr("os.access", lambda path, mode: str(path) != str(tmp_path))
    assert cli.run(["plan", "k3", "--gpus", "16", "--report", str(tmp_path / "plan.html")]) == 2
    assert f"no permission in {tmp_path}" in capsys.readouterr().err
    report = str(tmp_path / "q.html")
    assert cli.run(["quantize", str(mini), str(tmp_path / "q"), "--latent", "int8", "--report", report]) == 2
    assert f"no permission in {tmp_path}" in capsys.readouterr().err
    for option in ("--save-activations", "--logits-out"):
        assert cli.run(["run", str(mini), "--input-ids", "1", option, str(tmp_path / "x.safetensors")]) == 2
        assert f"no permission in {tmp_path}" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_interrupt_is_exit_130(capsys, monkeypatch):
    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("k3tool.checkpoint.reader.Checkpoint.open", interrupt)
    assert cli.run(["inspect", "x", "--json"]) == 130
    assert '"code": 130' in capsys.readouterr().out


def test_debug_shows_the_traceback(capsys, monkeypatch):
    monkeypatch.setenv("K3TOOL_DEBUG", "1")
    assert cli.run(["inspect", "/no/such/folder"]) == 10
    assert "Traceback" in capsys.readouterr().err


def test_files_are_short():
    for path in MODULES:
        assert len(path.read_text().splitlines()) <= 450, path
