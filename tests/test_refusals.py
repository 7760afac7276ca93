"""Disks and file systems that refuse: some of what `tools/errno_walk.py` tries in full."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from k3tool.checkpoint.writer import ShardWriter, fsync_folder, write_atomic
from k3tool.errors import CapacityError
from k3tool.standin import serve
from tests.helpers import copy_checkpoint
from tests.refusing import CODES, SCENARIOS, Bench, Call, Disk, run
from tools.errno_walk import cases_of

NAMES = {scenario.name: scenario for scenario in SCENARIOS}


@pytest.fixture(scope="module")
def bench(mini: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    folder = tmp_path_factory.mktemp("bench")
    with pytest.MonkeyPatch.context() as patch, serve(mini, "org/mini") as hub:
        patch.setenv("HF_ENDPOINT", hub.endpoint)
        patch.setenv("HF_HOME", str(folder / "work" / "hf"))
        yield Bench(mini, folder)


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("inspect", 3),
        ("verify", 3),
        ("verify bytes", 3),
        ("plan", 3),
        ("reshard", 3),
        ("quantize", 2),
        ("gguf", 2),
        ("fetch", 3),
        ("fetch layers", 3),
    ],
)
def test_a_refused_call_is_told_and_the_same_command_goes_on(bench: Bench, name: str, count: int) -> None:
    scenario = NAMES[name]
    _, calls = bench.expected(scenario)
    for call, number, way in random.Random(name).sample(list(cases_of(calls)), count):
        _, problem = bench.refuse(scenario, call, number, **way)
        assert not problem, f"{call} {way} {errno.errorcode[number]}: {problem}"


def _calls(bench: Bench, scenario: str, kind: str, place: str) -> list[Call]:
    """The calls of a kind that come from a file of k3tool, directly or one or two callers away."""
    _, calls = bench.expected(NAMES[scenario])
    found = [call for call in calls if call.kind == kind and any(place in frame for frame in call.where)]
    assert found, f"{scenario}: no {kind} comes from {place}"
    return found


def test_a_file_made_by_fetch_is_known_although_its_folder_was_not_synced(bench: Bench) -> None:
    for call in _calls(bench, "fetch layers", "fsync", "fetch/partial.py"):
        code, problem = bench.refuse(NAMES["fetch layers"], call, errno.EIO)
        assert (code, problem) == (12, "")


def test_a_file_that_has_its_name_but_no_record_keeps_the_claim_of_its_job(bench: Bench) -> None:
    named = _calls(bench, "quantize", "fsync", "worker.py")
    recorded = [
        call for call in _calls(bench, "quantize", "fsync", "checkpoint/ledger.py") if "execute.py" in call.where[2]
    ]
    for call in (named[0], recorded[0]):
        code, problem = bench.refuse(NAMES["quantize"], call, errno.EIO, sticky=True)
        assert (code, problem) == (12, ""), call


def test_what_cannot_be_removed_of_a_finished_job_is_told(bench: Bench) -> None:
    for call in _calls(bench, "reshard", "unlink", "checkpoint/ledger.py"):
        code, problem = bench.refuse(NAMES["reshard"], call, errno.EACCES, sticky=True)
        assert (code, problem) == (2, "")


def test_a_disk_that_fails_while_it_is_read_is_no_reason_to_fetch(bench: Bench) -> None:
    for scenario in ("verify", "verify bytes", "verify ranks"):
        for call in _calls(bench, scenario, "read", "checkpoint/" if scenario == "verify" else ""):
            bench.prepare(NAMES[scenario])
            with Disk(bench.work, call, errno.EIO, sticky=True).mounted() as disk:
                ran = run(NAMES[scenario].line(bench.work))
            if disk.refused and ran.code:
                assert "dmesg" in ran.err and "fetch" not in ran.err, f"{scenario}: {call}: {ran.err}"


def test_the_refusing_disk_refuses_one_call_of_one_place(tmp_path: Path) -> None:
    path = tmp_path / "a"
    with Disk(tmp_path).mounted() as disk:
        write_atomic(path, b"1")
    first = next(call for call in disk.calls() if call.kind == "write")
    with Disk(tmp_path, first, errno.ENOSPC).mounted() as disk:
        with pytest.raises(CapacityError, match="no space left"):
            write_atomic(path, b"2")
        assert disk.refused.startswith(str(path))
        write_atomic(path, b"3")
    with Disk(tmp_path, first, errno.EIO, gone=True).mounted():
        with pytest.raises(CapacityError, match=r"a: Input/output error"):
            write_atomic(path, b"4")
        with pytest.raises(CapacityError, match="sync"):
            fsync_folder(tmp_path)
    assert path.read_bytes() == b"3"


def test_names_that_are_no_text_stop_no_command(mini: Path, tmp_path: Path) -> None:
    strange = os.fsdecode(b"caf\xe9")
    source = tmp_path / strange
    try:
        copy_checkpoint(mini, source)
    except OSError:
        pytest.skip("this file system takes text alone")
    (source / f"{strange}.txt").write_text("notes")
    out = tmp_path / f"out {strange}"
    made = [
        ["plan", source, "--gpus", "1", "--report", tmp_path / f"{strange}.html"],
        ["reshard", source, out / "hf", "--layout", "hf"],
        ["quantize", source, out / "int8", "--latent", "int8", "--report", f"{out}.html"],
        ["quantize", source, out / "gguf", "--format", "gguf", "--vocabulary", "none"],
        ["fetch", source, "--local-dir", out / "layers", "--layers", "0-1"],
    ]
    for line in made:
        for _ in range(2):  # again: all is there
            ran = run([str(word) for word in line])
            assert ran.code == 0, ran.err
        assert "left out: its name is not in UTF-8" in ran.err or line[0] == "plan"
    for folder in ("hf", "int8", "layers"):
        ran = run(["verify", str(out / folder), "--depth", "bytes"])
        assert ran.code == 0, ran.err


def test_the_demo_tells_what_its_disk_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = subprocess.CompletedProcess(["k3tool"], 0, "", "")
    monkeypatch.setattr("k3tool.demo.subprocess.run", lambda *_, **__: done)  # its commands have their own tests
    line = ["demo", str(tmp_path / "demo"), "--json"]
    with Disk(tmp_path).mounted() as disk:
        assert run(line).code == 0
    found = [case for case in cases_of(disk.calls()) if case[0].kind in ("mkdir", "write", "replace", "fsync")]
    for call, number, way in random.Random(1).sample(found, 2):
        shutil.rmtree(tmp_path / "demo")
        with Disk(tmp_path, call, number, **way).mounted() as disk:
            ran = run(line)
        assert ran.code in CODES, ran.err
        assert ran.code == 0 or str(tmp_path) in json.loads(ran.out)["error"]["message"], f"{call}: {ran.out}"
        assert run(line).code == 0


def test_a_shard_whose_first_bytes_are_refused_leaves_nothing_open(tmp_path: Path) -> None:
    shard = ShardWriter(tmp_path / "a.safetensors", [("x", "U8", (1,))])
    with Disk(tmp_path).mounted() as disk, shard:
        shard.append(b"1")
    first = next(call for call in disk.calls() if call.kind == "write")
    (tmp_path / "a.safetensors").unlink()
    before = os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else []
    again = ShardWriter(tmp_path / "a.safetensors", [("x", "U8", (1,))])
    with Disk(tmp_path, first, errno.ENOSPC).mounted(), pytest.raises(CapacityError), again:
        pass
    assert not list(tmp_path.iterdir())
    assert not before or len(os.listdir("/proc/self/fd")) == len(before)
