"""Ranks of this machine as processes: which have ended, in every way in which that can be known."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from k3tool.parallel import peers
from k3tool.parallel.peers import Peers, this_process


@pytest.fixture
def sleeper():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def test_a_process_that_ends_is_seen(sleeper: subprocess.Popen[bytes]):
    own = this_process()
    found = Peers([own, {**own, "pid": sleeper.pid}, {**own, "machine": "another"}], 0)
    assert found.pids == {1: sleeper.pid} and found.ended() == []
    sleeper.kill()
    while not found.ended(10.0):
        pass
    assert found.ended() == [1]  # nobody has asked for its exit code, and it stays so
    found.close()


def test_one_that_has_ended_before(sleeper: subprocess.Popen[bytes]):
    sleeper.kill()
    sleeper.wait()
    assert Peers([{**this_process(), "pid": sleeper.pid}, this_process()], 1).ended(10.0) == [0]


def test_without_handles_ids_are_asked(sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch):
    def refused(_: int) -> int:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(os, "pidfd_open", refused, raising=False)
    own = this_process()
    found = Peers([{**own, "pid": sleeper.pid}, own, {**own, "pid": 1}], 1)  # of 1 there is no asking, except as root
    assert found.ended() == []
    sleeper.kill()
    sleeper.wait()
    assert found.ended() == [0]


def test_processes_that_see_each_other_are_of_one_machine(tmp_path, monkeypatch: pytest.MonkeyPatch):
    assert peers._machine() == peers._machine()
    monkeypatch.setattr(peers.socket, "gethostname", lambda: "host")
    assert peers._machine(tmp_path) == "host"
