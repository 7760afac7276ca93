"""One job by several processes: what divides it, who waits for whom, and what is said of a result that is not whole."""

from __future__ import annotations

import shlex
import threading
from pathlib import Path
from typing import Any

import pytest

from k3tool import parts
from k3tool.checkpoint.ledger import LEDGER_FOLDER, Ledger
from k3tool.checkpoint.locks import is_held
from k3tool.errors import UsageError
from k3tool.execute import Options
from k3tool.launch import SIZES, Launched, launched, left_over
from k3tool.parts import Part, part_of
from k3tool.reshard import Request, reshard
from tests.helpers import k3tool

TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "a"}
STEP = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "2",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_NTASKS": "16",
}
BATCH_SCRIPT = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0"}

ALONE = {
    "nothing": {},
    "a batch script": BATCH_SCRIPT,
    "the batch step by its number": {**STEP, "SLURM_STEP_ID": str(0xFFFFFFFB)},
    "an interactive step": {**STEP, "SLURM_STEP_ID": str(0xFFFFFFFA)},
    "a step of one task in a large job": {**STEP, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"},
    "a step that does not say how many": {k: v for k, v in STEP.items() if k != "SLURM_STEP_NUM_TASKS"},
    "a notebook": {"RANK": "0", "WORLD_SIZE": "4"},
    "a template of a cluster": {k: v for k, v in TORCHRUN.items() if k != "TORCHELASTIC_RUN_ID"},
    "torchrun for one process": {**TORCHRUN, "RANK": "0", "WORLD_SIZE": "1"},
    "torchrun for one process in a step of several": {**STEP, **TORCHRUN, "RANK": "0", "WORLD_SIZE": "1"},
    "a rank that cannot be": {**TORCHRUN, "RANK": "4"},
    "numbers that are none": {**TORCHRUN, "RANK": "one"},
    "mpirun": {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4", "PMI_RANK": "1", "PMI_SIZE": "4"},
}


def test_a_launcher_is_believed_and_what_is_left_over_is_not():
    assert launched(TORCHRUN) == Launched(1, 4, "torchrun")
    assert launched(STEP) == Launched(2, 8, "srun")
    assert launched({**STEP, **TORCHRUN}) == Launched(1, 4, "torchrun")
    for environment in ALONE.values():
        assert launched(environment) is None and part_of(None, environment) is None


def test_a_share_is_asked_for_or_comes_from_a_launch():
    assert part_of("2/4", {}) == part_of("2/4", TORCHRUN) == Part(1, 4)
    assert part_of("1/1", TORCHRUN) is None
    assert part_of(None, TORCHRUN) == Part(1, 4) and part_of(None, TORCHRUN).by == "torchrun"  # type: ignore[union-attr]
    for text in ("0/4", "5/4", "a/b", "3", "1/0", "2/1"):
        with pytest.raises(UsageError):
            part_of(text, {})


def test_what_was_left_over_is_named():
    for name in SIZES:
        assert left_over({name: "4"}) == name and left_over({name: "1"}) == left_over({name: "x"}) == ""
    assert left_over(STEP) == left_over(TORCHRUN) == ""


@pytest.fixture
def set_environment(monkeypatch: pytest.MonkeyPatch) -> Any:
    def set_(environment: dict[str, str]) -> None:
        for name in {name for each in [TORCHRUN, STEP, *ALONE.values()] for name in each}:
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)

    return set_


@pytest.mark.parametrize("command", ["reshard", "quantize", "gguf"])
@pytest.mark.parametrize("surroundings", ["a batch script", "a notebook", "mpirun"])
def test_a_process_alone_does_all_of_the_work(
    mini: Path, tmp_path: Path, capsys: Any, set_environment: Any, command: str, surroundings: str
):
    set_environment(ALONE[surroundings])
    out = tmp_path / "out"
    options = {
        "reshard": ["reshard", mini, out, "--layout", "hf", "--gpus", 1, "--max-shard-size", "200KB", "--verify"],
        "quantize": ["quantize", mini, out, "--experts", "int8", "--max-shard-size", "400KB", "--verify"],
        "gguf": ["quantize", mini, out, "--format", "gguf", "--max-shard-size", "600KB", "--verify"],
    }[command]
    ran = k3tool(capsys, *options, "--json")
    assert ran.code == 0 and ran.json["complete"] is True and ran.json["verified"]["files"] >= 4
    assert ran.err.count("no launcher started this process with others: it does all of the work") == 1
    assert not (out / LEDGER_FOLDER).exists()


def commands(mini: Path, out: Path) -> dict[str, list[object]]:
    return {
        "reshard": ["reshard", mini, out, "--layout", "hf", "--gpus", 1, "--max-shard-size", "200KB"],
        "quantize": ["quantize", mini, out, "--experts", "int8", "--max-shard-size", "400KB"],
        "gguf": ["quantize", mini, out, "--format", "gguf", "--max-shard-size", "300KB"],
    }


@pytest.mark.parametrize("command", ["reshard", "quantize", "gguf"])
def test_a_result_that_is_not_whole_says_so_and_how_it_becomes_whole(
    mini: Path, tmp_path: Path, capsys: Any, command: str
):
    line = commands(mini, tmp_path / "out")[command]
    ran = k3tool(capsys, *line, "--part", "1/3", "--verify", "--json")
    assert ran.code == 3 and ran.json["ok"] is ran.json["complete"] is False and ran.json["error"]["code"] == 3
    assert ran.json["verified"]["ok"] and ran.json["verified"]["files"] >= 1  # of what was written
    assert ran.json["error"]["details"]["missing"]
    assert "not written yet (parts 2, 3 of 3)" in ran.err
    quiet = k3tool(capsys, *line, "--part=1/3", "-q")
    assert quiet.code == 3 and quiet.out == "" and "hint: write part 2: " in quiet.err
    for _ in range(2):
        follow = shlex.split(ran.err.rstrip().rpartition("k3tool ")[2])
        ran = k3tool(capsys, *follow)
    assert ran.code == 0 and follow[-2:] == ["--part", "3/3"] and follow.count("--part") == 1
    assert k3tool(capsys, "verify", tmp_path / "out", "--depth", "bytes").code == 0


@pytest.mark.parametrize("launch", [TORCHRUN, STEP])
def test_a_launched_process_that_finds_itself_alone_fails(
    mini: Path, tmp_path: Path, capsys: Any, set_environment: Any, monkeypatch: Any, launch: dict[str, str]
):
    """Variables of a launch that has ended cannot be told from those of one that goes on; that nobody comes can."""
    monkeypatch.setattr(parts, "GRACE_S", 0.0)
    set_environment(launch)
    line = commands(mini, tmp_path / "out")["reshard"]
    ran = k3tool(capsys, *line)
    assert ran.code == 3 and "none of the other processes that" in ran.err and " --part 1/" in ran.err
    ran = k3tool(capsys, *line, "--part", "1/1")
    assert ran.code == 0 and (tmp_path / "out" / "config.json").exists()


def test_launched_processes_wait_for_each_other(mini: Path, tmp_path: Path):
    """All of them end well, and only when the result is whole."""
    request = Request(gpus=1, form="hf", max_shard_bytes=200_000)
    done: list[bool] = []

    def run(number: int) -> None:
        result = reshard(mini, tmp_path / "out", request, options=Options(part=Part(number, 3, "srun")), verify=True)
        done.append(result.report.complete and (tmp_path / "out" / "config.json").exists())

    threads = [threading.Thread(target=run, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert done == [True] * 3 and not (tmp_path / "out" / LEDGER_FOLDER).exists()


def test_the_last_process_to_leave_a_whole_job_takes_the_ledger_along(tmp_path: Path):
    first, second = (Ledger(tmp_path, "job", "x", part=f"{number}-of-2") for number in (1, 2))
    with first:
        with second:
            second.complete_with_the_last()
        assert (tmp_path / LEDGER_FOLDER).exists()
    assert not (tmp_path / LEDGER_FOLDER).exists()
    with first:  # not whole: what it did is remembered
        pass
    assert (tmp_path / LEDGER_FOLDER).exists()


def test_whether_a_lock_is_held_is_asked_without_touching_it(tmp_path: Path):
    assert not is_held(tmp_path / LEDGER_FOLDER / "lock")
    with Ledger(tmp_path, "job", "x", part="1-of-2"):
        assert is_held(tmp_path / LEDGER_FOLDER / "lock")
        with Ledger(tmp_path, "job", "x", part="2-of-2"):
            assert is_held(tmp_path / LEDGER_FOLDER / "lock")
    assert not is_held(tmp_path / LEDGER_FOLDER / "lock")
