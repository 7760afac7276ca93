"""Signals end every command in good order: one document, two lines, the documented code, nothing half-written."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from k3tool.cli import signals
from tests.helpers import copy_checkpoint

# A command line that tells when it is somewhere, and waits there for signals.
AT = """
import sys, time, threading
from k3tool.cli import app
from k3tool.checkpoint import reader, writer
def here(*_):
    print("here", file=sys.stderr, flush=True)
    while True:
        time.sleep(0.01)
def wait(owner, name):
    setattr(owner, name, here)
"""


@contextlib.contextmanager
def started(code: str, *arguments: object, **options: object) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", f"{AT}\n{code}\napp.main(sys.argv[1:])", *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options) as process:  # type: ignore[call-overload]
        try:
            yield process
        finally:
            process.kill()


def reached(process: subprocess.Popen[str]) -> None:
    assert process.stderr is not None
    for line in process.stderr:
        if line == "here\n":
            return
    raise AssertionError("it ended before")


@pytest.mark.parametrize(
    "number, code, said",
    [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated"), (signal.SIGHUP, 129, "gone")],
)
def test_every_signal_gives_document_lines_and_code(number: int, code: int, said: str, mini: Path):
    with started("wait(reader.Checkpoint, 'open')", "inspect", mini, "--json") as process:
        reached(process)
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    document = json.loads(out)
    assert process.returncode == code == document["error"]["code"] and document["ok"] is False
    assert err.startswith("error: ") and said in err and "run the same command again" in err and err.count("\n") == 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_work_is_left_in_order_and_goes_on(number: int, mini: Path, tmp_path: Path):
    slow = (
        "write, names = writer.AtomicFile.write, []\n"
        "def crawl(self, data):\n"
        "    names.append(self.path.name)\n"
        "    if names.count('model-00002-of-000006.safetensors') == 3:\n"
        "        print('here', file=sys.stderr, flush=True)\n"
        "    write(self, data)\n"
        "    if len(set(names) - {'job.json'}) > 1:\n"
        "        time.sleep(0.02)\n"
        "writer.AtomicFile.write = crawl"
    )
    dest = tmp_path / "out"
    command = ["reshard", mini, dest, "--max-shard-size", "200KB", "--max-workers", "1", "--json"]
    with started(slow, *command) as process:
        reached(process)
        process.send_signal(number)
        process.send_signal(number)  # launchers send twice
        out, err = process.communicate(timeout=60)
    document = json.loads(out)
    assert process.returncode == 128 + number and "Traceback" not in err
    assert (document["files_done"], document["files_left"]) == (1, 5)
    assert document["error"]["hint"] == "run the same command again: it goes on from here"
    assert not list(dest.rglob("*.k3partial"))
    with started("", *command) as process:
        out, _ = process.communicate(timeout=60)
    assert json.loads(out)["files_kept"] == 1


def test_a_signal_behind_the_first_is_an_echo_and_a_late_one_the_end(mini: Path):
    stuck = "signals = app.signals; signals.ECHO_S = 0.3\ndef late(*_):\n    try: here()\n    finally: here()\nreader.Checkpoint.open = late"
    with started(stuck, "inspect", mini, "--json") as process:
        reached(process)
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGTERM)
        reached(process)
        assert process.poll() is None
        time.sleep(0.5)
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=60)
    assert process.returncode == 143 and json.loads(out)["error"]["code"] == 143


def test_a_main_thread_in_compiled_code_does_not_hear_and_is_ended(mini: Path):
    deaf = (
        "import ctypes; app.signals.DEAF_S = 0.3\n"
        "def locked(*_):\n"
        "    mutex = ctypes.create_string_buffer(64)\n"
        "    ctypes.CDLL(None).pthread_mutex_lock(mutex)\n"
        "    print('here', file=sys.stderr, flush=True)\n"
        "    ctypes.CDLL(None).pthread_mutex_lock(mutex)\n"
        "reader.Checkpoint.open = locked"
    )
    with started(deaf, "inspect", mini, "--json") as process:
        reached(process)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 143 and json.loads(out)["error"]["code"] == 143 and err.startswith("error: terminated")


def test_what_was_ignored_at_the_start_stays_so(mini: Path):
    ignore = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN); wait(reader.Checkpoint, 'open')"
    with started(ignore, "inspect", mini) as process:
        reached(process)
        process.send_signal(signal.SIGHUP)
        time.sleep(0.2)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    assert process.returncode == 143


def test_as_process_1_of_a_container(mini: Path, tmp_path: Path):
    """Process 1 hears only signals that it has a handler for."""
    if subprocess.run(["unshare", "-Urpf", "true"], capture_output=True).returncode:
        pytest.skip("no process namespaces here")
    code = f"{AT}\nwait(reader.Checkpoint, 'open')\napp.main(sys.argv[1:])"
    command = ["unshare", "-Urpf", "--kill-child", sys.executable, "-c", code, "inspect", str(mini), "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        reached(process)
        (inner,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(inner), signal.SIGTERM)
        out, _ = process.communicate(timeout=60)
    assert json.loads(out)["error"]["code"] == 143


def test_a_signal_at_the_start_has_no_traceback(mini: Path):
    for moment in ("import k3tool.cli.registry as r", "import k3tool.cli.inspect as r", "import rich.console as r"):
        early = (
            "import builtins, os, signal\n"
            "real = builtins.__import__\n"
            f"name = {moment.split()[1]!r}\n"
            "def importing(*arguments, **options):\n"
            "    if arguments[0] == name and name not in sys.modules: os.kill(os.getpid(), signal.SIGINT)\n"
            "    return real(*arguments, **options)\n"
            "builtins.__import__ = importing"
        )
        with started(early, "inspect", mini) as process:
            _, err = process.communicate(timeout=60)
        assert process.returncode in (0, 130) and "Traceback" not in err, (moment, err)


def test_a_run_that_is_terminated_shows_its_tokens(mini: Path, tmp_path: Path):
    copy = copy_checkpoint(mini, tmp_path / "copy")
    config = json.loads((copy / "config.json").read_bytes())
    config["eos_token_id"] = config["text_config"]["eos_token_id"] = None
    (copy / "config.json").write_text(json.dumps(config))
    slow = "from k3tool.cli import run\ntoken = run.Printer.token\ndef one(self, number):\n    token(self, number)\n    here()\nrun.Printer.token = one"
    with started(slow, "run", copy, "--input-ids", "1", "--max-new-tokens", "9", "--json") as process:
        reached(process)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60)
    document = json.loads(out)
    assert process.returncode == 143 and len(document["token_ids"]) == 1
    assert err.endswith("hint: run the same command again: it starts over\n")


def test_signals_are_known_where_the_system_has_them():
    assert signals.ENDING[0] == signal.SIGINT and signals.received() == signal.SIGINT
