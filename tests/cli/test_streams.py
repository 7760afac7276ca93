"""Standard output that is full, closed or read no more; standard error that is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from k3tool.commands import command
from tests.helpers import k3tool_process


def shell(line: str) -> subprocess.CompletedProcess[str]:
    program = f"{sys.executable} -m k3tool"
    return subprocess.run(
        ["bash", "-c", line.replace("k3tool ", f"{program} ")], capture_output=True, text=True, timeout=120
    )


@pytest.mark.parametrize("options", ["", "--json", "--quiet"])
@pytest.mark.parametrize("where", ["> /dev/full", ">&-"])
def test_an_output_that_cannot_be_written_is_12(options: str, where: str, mini: Path):
    done = shell(f"k3tool inspect {mini} {options} {where}")
    assert done.returncode == 12 and "standard output" in done.stderr and done.stderr.count("\n") == 2


def test_nor_does_a_failure_hide_it(mini: Path):
    done = shell("k3tool inspect /no/such --json > /dev/full")
    assert done.returncode == 12 and "/no/such does not exist" in done.stderr and "standard output" in done.stderr
    assert shell("k3tool inspect /no/such > /dev/full").returncode == 10
    assert shell("k3tool --help > /dev/full").returncode == 12
    done = shell(f"k3tool run {mini} --input-ids 1 --max-new-tokens 2 > /dev/full")
    assert done.returncode == 12 and "Traceback" not in done.stderr


@pytest.mark.parametrize("command", ["inspect {} --tensors '*'", "plan k3 --gpus 16", "--help", "inspect --help"])
def test_a_reader_that_goes_away_is_141(command: str, mini: Path):
    done = shell(f"set -o pipefail; k3tool {command.format(mini)} | true")
    assert done.returncode == 141 and not done.stderr


@pytest.mark.parametrize("where", ["2> /dev/full", "2>&-"])
def test_what_cannot_be_said_disturbs_nothing(where: str, mini: Path, tmp_path: Path):
    done = shell(f"k3tool reshard {mini} {tmp_path}/out --max-shard-size 200KB --json {where}")
    assert done.returncode == 0 and json.loads(done.stdout)["ok"] is True


def test_the_name_typed_is_in_the_document():
    done = k3tool_process("fetsch", "--json")
    assert done.code == 2 and done.json["command"] == "fetsch" and done.json["error"]["hint"] == command("--help")
    assert k3tool_process("--nope", "--json").json["command"] == ""
