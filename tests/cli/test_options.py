"""What people type in place of a path: `~` in quotes and after `=`, in every command."""

from __future__ import annotations

import json
import os
from importlib import import_module
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from k3tool.cli import app as cli
from k3tool.cli import registry
from k3tool.cli.options import expand
from k3tool.errors import UsageError
from tests.helpers import copy_checkpoint, k3tool

# Metavars of what is no path; everything else that takes text is asked for one by the test below.
NO_PATH = {
    "NAME", "SCHEME", "N", "SIZE", "TYPE", "SPEC", "I/N", "GLOB", "REV", "TEXT", "REPO", "P", "T", "X", "TOKENS", "SHARE",
    "SECONDS", "PER_HOUR", '"1,2,3"',
}  # fmt: skip


@pytest.fixture
def home(mini: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "home"
    folder.mkdir()
    copy_checkpoint(mini, folder / "mini")
    monkeypatch.setenv("HOME", str(folder))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return folder


def test_every_path_of_every_command_begins_at_home(home: Path, capsys: pytest.CaptureFixture[str]):
    for arguments in (
        ("inspect", "~/mini"),
        ("verify", "~/mini"),
        ("plan", "~/mini/config.json", "--gpus=1", "--report=~/plan.html"),
        ("reshard", "~/mini", "~/ranks", "--max-shard-size", "200KB"),
        ("run", "~/mini", "--input-ids", "1", "--max-new-tokens", "1", "--logits-out=~/logits", "--save-activations", "~/acts"),
        ("quantize", "~/mini", "~/int8", "--latent", "int8", "--activations=~/acts", "--report", "~/int8.html"),
    ):  # fmt: skip
        ran = k3tool(capsys, *arguments)
        assert ran.code == 0, ran.err
    assert {"plan.html", "ranks", "logits", "acts", "int8", "int8.html"} <= set(os.listdir(home))
    assert not os.listdir()
    assert k3tool(capsys, "run", "~/mini", "--prompt-file=~/none").err.startswith(f"error: cannot read {home}/none")
    assert str(home / "none.toml") in k3tool(capsys, "quantize", "~/mini", "x", "--recipe=~/none.toml").err


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_no_command_takes_a_path_that_is_not_expanded(name: str):
    """What takes text and does not say that it is something else is marked as a path."""
    command = import_module(f"k3tool.cli.{name}").command
    hints = get_type_hints(command, include_extras=True)
    for parameter, hint in hints.items():
        if "str" in str(hint) or "Path" in str(hint):
            (declared,) = [part for part in get_args(hint) if hasattr(part, "metavar")]
            metavar = str(declared.metavar)
            assert metavar in NO_PATH or "|" in metavar or registry.is_path(hint), f"{name}: {parameter} ({metavar})"


def test_users_and_names(home: Path, tmp_path: Path):
    assert expand("~/a") == str(home / "a") and expand(Path("~/a")) == home / "a"
    assert expand(None) is None and expand("a/~") == "a/~" and expand("./~x") == "./~x"
    assert expand(["~/a", Path("b")]) == [str(home / "a"), Path("b")]
    assert expand("~root/x") == os.path.expanduser("~root/x") != "~root/x"
    with pytest.raises(UsageError, match="there is no user nobody-of-this-name"):
        expand("~nobody-of-this-name/x")
    Path("~strange").mkdir()
    assert expand("~strange") == "~strange"


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    with pytest.raises(UsageError, match="no home folder"):
        expand("~/x")


def test_what_desktops_leave_counts_as_nothing(mini: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    source, dest = copy_checkpoint(mini, tmp_path / "source"), tmp_path / "dest"
    dest.mkdir()
    strewn = (".DS_Store", "._.DS_Store", "._model-00001-of-000011.safetensors", "Thumbs.db", "desktop.ini")
    for folder in (source, dest):
        for name in strewn:
            (folder / name).write_bytes(b"\0\5\x16\7")
    ran = k3tool(capsys, "reshard", source, dest, "--max-shard-size", "200KB", "--verify", "--json")
    assert ran.code == 0, ran.err
    written = {path.name for path in dest.rglob("*") if path.parent != dest}
    assert not written & set(strewn)
    for folder in (source, dest):
        checked = k3tool(capsys, "verify", folder, "--json")
        assert checked.code == 0 and not {file["name"] for file in checked.json["files"]} & set(strewn)
    assert json.loads((dest / "k3tool-manifest.json").read_bytes())["files"].keys().isdisjoint(strewn)


def test_all_commands_are_looked_at():
    assert set(cli.COMMANDS) >= {"fetch", "verify", "inspect", "plan", "reshard", "quantize", "run", "demo"}
