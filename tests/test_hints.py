"""What follows advice in the tests refuses advice that cannot be followed."""

from __future__ import annotations

import pytest

from k3tool.commands import command, torchrun
from tests import hints
from tests.helpers import k3tool, k3tool_process


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("hint: run k3tool verify x", "does not find k3tool"),
        (f"hint: use {command('verify', 'x', '--frobnicate')}", "--frobnicate"),
        (f"next: {command('verify', 'x')} and then look", "unexpected extra argument"),
        (f"cut it so: {command('reshard', 'SOURCE', 'x')}", "placeholder"),
        (f"hint: {command('reshard', 'x')}", "Missing argument"),
        (f"hint: {command('frobnicate')}", "no command follows"),
        (f"hint: {torchrun(2, 'run', 'x', '--nope')}", "--nope"),
    ],
)
def test_advice_that_cannot_be_pasted_is_refused(line, wrong):
    with pytest.raises(AssertionError, match=wrong):
        hints.follow("", line)


def test_advice_that_does_not_help_is_refused_and_leaves_no_trace(tmp_path, monkeypatch):
    (tmp_path / "kept").write_text("as it was")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hints, "_done", set())
    with pytest.raises(AssertionError, match="ended with 10"):
        hints.follow("", f"hint: try {command('reshard', tmp_path / 'nothing', tmp_path / 'new', '--gpus', 2)}")
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_what_a_followed_command_wrote_is_gone_again(mini, tmp_path, monkeypatch):
    monkeypatch.setattr(hints, "_done", set())
    (tmp_path / "out").mkdir()
    hints.follow("", f"hint: {command('reshard', mini, tmp_path / 'out', '--gpus', 2)}")
    assert not list((tmp_path / "out").iterdir())


def test_prose_is_no_command():
    hints.follow("", "hint: fetch less, or give --layers")
    hints.follow("", "warning: readable by k3tool alone")
    hints.follow("", "error: k3tool verify found something")


def test_a_shell_finds_the_program_of_a_usage_hint():
    assert f"hint: {command('verify', '--help')}" in k3tool_process("verify", "--nope").err


def test_commands_typed_wrong_are_answered_by_one_that_works(capsys):
    assert f"hint: {command('--help')}" in k3tool(capsys, "verfy").err
