"""The engine on real files: interrupted at any moment, short of room, disturbed from outside, shared by processes."""

from __future__ import annotations

import _thread
import errno
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from k3tool.checkpoint.ledger import LEDGER_FOLDER, Ledger
from k3tool.checkpoint.manifest import MANIFEST_NAME, FileRecord, load_manifest
from k3tool.checkpoint.note import read_note
from k3tool.checkpoint.reader import Checkpoint
from k3tool.checkpoint.source import LocalSource
from k3tool.checkpoint.table import TensorTable
from k3tool.errors import (
    CapacityError,
    CheckFailed,
    CheckpointCorrupt,
    CheckpointMissing,
    PartlyDone,
    UsageError,
)
from k3tool.execute import Options, SmallFile, allowance, execute
from k3tool.parts import Part
from k3tool.plan import Compute, Plan, TensorOut, carry, file_job, whole
from k3tool.reshard import Request, carry_out, prepare, read_back, reshard
from k3tool.synthetic import tiny_config, write_checkpoint
from k3tool.transform.base import Applied
from k3tool.units import parse_size

TP2 = Request(tp=2, ep=2, max_shard_bytes=60_000)


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("source") / "k3"
    document = tiny_config(num_layers=4, kda_heads=4, mla_heads=2, moe_intermediate_size=64, num_experts=8,
                           vocab_size=515, intermediate_size=64)  # fmt: skip
    write_checkpoint(folder, document, tokenizer=True)
    return folder


@pytest.fixture(scope="module")
def unbroken(source, tmp_path_factory) -> Path:
    dest = tmp_path_factory.mktemp("unbroken") / "ranks"
    reshard(source, dest, TP2)
    return dest


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder; manifests without what differs by the place of the source."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            data = path.read_bytes()
            if path.name == MANIFEST_NAME:
                document = json.loads(data)
                for key in ("source", "command", "plan"):
                    document.pop(key, None)
                document["files"] = {n: r for n, r in document["files"].items() if not n.endswith(MANIFEST_NAME)}
                data = json.dumps(document).encode()
            found[str(path.relative_to(folder))] = data
    return found


def final_shards(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.safetensors"))


def test_digests_and_sizes_are_those_of_the_files(unbroken):
    manifest = load_manifest(unbroken)
    assert manifest is not None and not (unbroken / LEDGER_FOLDER).exists()
    on_disk = {str(p.relative_to(unbroken)) for p in unbroken.rglob("*") if p.is_file()} - {MANIFEST_NAME}
    assert set(manifest.files) == on_disk
    for name, record in manifest.files.items():
        data = (unbroken / name).read_bytes()
        assert (record.size, record.sha256) == (len(data), hashlib.sha256(data).hexdigest())


def test_the_last_thing_is_the_manifest_and_config_comes_after_the_index(source, tmp_path, monkeypatch):
    order = []
    replace = os.replace
    monkeypatch.setattr(os, "replace", lambda a, b: (order.append(Path(b).name), replace(a, b))[1])
    reshard(source, tmp_path / "out", Request(gpus=1, form="hf", max_shard_bytes=60_000))
    shards = [name for name in order if name.endswith(".safetensors")]
    assert len(shards) > 3 and order[1 : 1 + len(shards)] == shards  # after the ledger's job.json
    assert order[-3:] == ["model.safetensors.index.json", "config.json", MANIFEST_NAME]


def test_running_again_keeps_everything(source, unbroken, tmp_path):
    dest = tmp_path / "out"
    reshard(source, dest, TP2)
    stamps = {path: path.stat().st_mtime_ns for path in final_shards(dest)}
    again = reshard(source, dest, TP2)
    assert again.report.bytes_written == again.report.bytes_read == 0
    assert len(again.report.kept) == len(stamps)
    assert stamps == {path: path.stat().st_mtime_ns for path in final_shards(dest)}
    assert contents(dest) == contents(unbroken)


def test_a_lost_file_is_made_again(source, unbroken, tmp_path):
    dest = tmp_path / "out"
    reshard(source, dest, TP2)
    lost = final_shards(dest)[3]
    lost.unlink()
    assert reshard(source, dest, TP2).report.bytes_written > 0
    assert contents(dest) == contents(unbroken)


@pytest.fixture
def run(tmp_path):
    """Runs a job in a process of its own and returns its exit code."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.killing"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        cwd=Path(__file__).parent.parent,
    )  # fmt: skip
    assert process.stdin and process.stdout

    def run(**job: object) -> int:
        process.stdin.write(json.dumps({"request": REQUEST, **job}, default=str) + "\n")
        process.stdin.flush()
        return int(process.stdout.readline())

    yield run
    process.stdin.close()
    process.wait()
    process.stdout.close()


REQUEST = {"tp": 2, "ep": 2, "max_shard_bytes": 60_000}


def count_events(run, tmp_path: Path, **job: object) -> int:
    count = tmp_path / "events"
    assert run(dest=tmp_path / "measured", count_to=count, **job) == 0
    return int(count.read_text())


def test_killed_at_50_random_moments(source, unbroken, tmp_path, run):
    rng = random.Random(4)
    expected = contents(unbroken)
    events = count_events(run, tmp_path, source=source)
    assert events > 500
    kills = starts = 0
    while kills < 50:
        dest = tmp_path / f"out{starts}"
        starts += 1
        # A few kills on the way to one whole result; what is left after each kill is either absent or right.
        while (code := run(source=source, dest=dest, kill_at=rng.randrange(1, events))) != 0:
            assert code == -signal.SIGKILL
            kills += 1
            for path in final_shards(dest):
                assert path.read_bytes() == expected[str(path.relative_to(dest))]
        assert contents(dest) == expected
        shutil.rmtree(dest)
    assert starts > 3


def test_quantizing_for_several_ranks_is_killed_and_resumed(source, tmp_path, run):
    """Files that share what was converted for all of them are finished one by one."""
    job = {"source": source, "schemes": {"experts": "nvfp4", "latent": "int8"}}
    events = count_events(run, tmp_path, **job)
    expected = contents(tmp_path / "measured")
    rng = random.Random(5)
    dest = tmp_path / "out"
    kills = 0
    while kills < 12:
        while (code := run(dest=dest, kill_at=rng.randrange(1, events), **job)) != 0:
            assert code == -signal.SIGKILL
            kills += 1
            for path in final_shards(dest):
                assert path.read_bytes() == expected[str(path.relative_to(dest))]
        assert contents(dest) == expected  # with the report: every module measured, none twice
        shutil.rmtree(dest)


def test_disk_full_while_writing(source, unbroken, tmp_path, run):
    dest = tmp_path / "out"
    assert run(source=source, dest=dest, file_limit=50_000) == 12
    assert not list(dest.rglob("*.k3partial")) and not list(dest.rglob("config.json"))
    for path in final_shards(dest):
        assert path.read_bytes() == (unbroken / path.relative_to(dest)).read_bytes()
    assert run(source=source, dest=dest) == 0
    assert contents(dest) == contents(unbroken)


def test_too_little_room_is_found_before_writing(source, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(total=1 << 40, free=100_000))
    with pytest.raises(CapacityError, match=r"2.2 MB to write and 2.2 MB to spare, 100 kB free on that disk") as caught:
        reshard(source, tmp_path / "out", TP2)
    assert caught.value.exit_code == 12 and caught.value.hint.startswith("free 4.35 MB more there, or name a folder")
    lacking = caught.value.details["needed"] - 100_000  # type: ignore[operator]
    assert lacking < 4_350_000
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(total=1 << 40, free=100_000 + 4_350_000))
    assert reshard(source, tmp_path / "out", TP2).report.complete  # what it said was enough


def test_overwrite_looks_for_room_before_it_removes_anything(source, unbroken, tmp_path, monkeypatch):
    """What it replaces counts as room; a file that has another name gives none back."""
    dest = tmp_path / "out"
    reshard(source, dest, TP2)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(total=1 << 40, free=100_000))
    with pytest.raises(CapacityError, match=r"100 kB free on that disk and 2\.\d+ MB to be replaced"):
        reshard(source, dest, Request(ep=8), options=Options(overwrite=True))
    assert contents(dest) == contents(unbroken) and not (dest / LEDGER_FOLDER).exists()
    for path in final_shards(dest):
        os.link(path, tmp_path / f"kept-{path.parent.name}-{path.name}")
    with pytest.raises(CapacityError) as caught:
        reshard(source, dest, Request(ep=8), options=Options(overwrite=True))
    assert "MB to be replaced" not in caught.value.message and contents(dest) == contents(unbroken)


def test_truncated_source(source, unbroken, tmp_path):
    copy = shutil.copytree(source, tmp_path / "k3")
    prepared = prepare(copy, TP2)
    shard = copy / "model-00002-of-000007.safetensors"
    whole_data = shard.read_bytes()
    shard.write_bytes(whole_data[:-5000])
    with pytest.raises(CheckpointCorrupt, match=r"model-00002-of-000007.safetensors is truncated") as caught:
        carry_out(prepared, tmp_path / "out", options=Options())
    assert caught.value.exit_code == 11 and not list((tmp_path / "out").rglob("*.k3partial"))
    with pytest.raises(CheckpointCorrupt):  # found at once the next time
        reshard(copy, tmp_path / "out", TP2)
    shard.write_bytes(whole_data)
    reshard(copy, tmp_path / "out", TP2)
    assert contents(tmp_path / "out") == contents(unbroken)


def test_a_source_that_changes_meanwhile_is_noticed(source, tmp_path):
    copy = shutil.copytree(source, tmp_path / "k3")
    shard = copy / "model-00001-of-000007.safetensors"

    class Disturb:
        def __getattr__(self, _):
            return lambda *_: None

        def advanced(self, *_):
            shard.touch()

    with pytest.raises(CheckpointCorrupt, match="changed while it was being read"):
        reshard(copy, tmp_path / "out", TP2, options=Options(progress=Disturb()))


def test_missing_shard_is_refused_before_writing(source, tmp_path):
    copy = shutil.copytree(source, tmp_path / "k3")
    (copy / "model-00003-of-000007.safetensors").unlink()
    with pytest.raises(CheckpointMissing, match=r"lacks model-00003-of-000007\.safetensors"):
        reshard(copy, tmp_path / "out", TP2)
    assert not (tmp_path / "out").exists()


def test_two_at_once(source, tmp_path):
    dest = tmp_path / "out"
    dest.mkdir()
    prepared = prepare(source, TP2)
    with (
        Ledger(dest, prepared.plan.id, "the first"),
        pytest.raises(PartlyDone, match=r"in use by process \d+") as caught,
    ):
        carry_out(prepared, dest, options=Options())
    assert caught.value.exit_code == 3
    carry_out(prepared, dest, options=Options())


class Broken(Exception):
    pass


def break_off(source: Path, dest: Path, request: Request, after: int = 2) -> None:
    """Run until `after` files are there, then stop by an error."""
    seen = []

    class Stop:
        def __getattr__(self, _):
            return lambda *_: None

        def item(self, text):
            seen.append(text)
            if len(seen) >= after:
                raise Broken

    with pytest.raises(Broken):
        reshard(source, dest, request, options=Options(max_workers=1, progress=Stop()))


def test_another_command_on_an_unfinished_folder(source, unbroken, tmp_path):
    dest = tmp_path / "out"
    break_off(source, dest, TP2)
    with pytest.raises(UsageError, match=r"unfinished work of another command: reshard .* --tp 2 --ep 2"):
        reshard(source, dest, Request(tp=2))
    done = reshard(source, dest, TP2)
    assert done.report.kept and contents(dest) == contents(unbroken)


def test_a_file_that_was_touched_since_is_made_again(source, unbroken, tmp_path):
    dest = tmp_path / "out"
    break_off(source, dest, TP2)
    first = final_shards(dest)[0]
    first.write_bytes(bytes(first.stat().st_size))
    reshard(source, dest, TP2)
    assert contents(dest) == contents(unbroken)


def test_something_else_in_the_destination(source, unbroken, tmp_path):
    dest = tmp_path / "out"
    dest.mkdir()
    (dest / "thesis.txt").write_text("mine")
    with pytest.raises(UsageError, match=r"already holds something else: thesis.txt") as caught:
        reshard(source, dest, TP2)
    assert caught.value.exit_code == 2
    reshard(source, dest, TP2, options=Options(overwrite=True))
    assert (dest / "thesis.txt").read_text() == "mine"
    (dest / "thesis.txt").unlink()
    assert contents(dest) == contents(unbroken)


def test_overwrite_removes_what_the_old_checkpoint_was_made_of(source, unbroken, tmp_path):
    dest = tmp_path / "out"
    reshard(source, dest, Request(gpus=1, form="hf", max_shard_bytes=50_000))
    with pytest.raises(UsageError, match="already holds something else"):
        reshard(source, dest, TP2)
    reshard(source, dest, TP2, options=Options(overwrite=True))
    assert contents(dest) == contents(unbroken)


def test_overwrite_never_leaves_the_folder(source, tmp_path):
    outside = tmp_path / "outside.txt"
    outside.write_text("stay")
    dest = tmp_path / "out"
    dest.mkdir()
    names = {str(outside): {"size": 4, "sha256": "0" * 64}, "../outside.txt": {"size": 4, "sha256": "0" * 64}}
    (dest / MANIFEST_NAME).write_text(json.dumps({"command": "", "source": "", "files": names}))
    reshard(source, dest, TP2, options=Options(overwrite=True))
    assert outside.read_text() == "stay"


def test_destination_in_around_or_at_the_source(source, tmp_path):
    for dest in (source, source / "below", source.parent):
        with pytest.raises(UsageError, match="overlap"):
            reshard(source, dest, TP2)
    link = tmp_path / "link"
    link.symlink_to(source)
    with pytest.raises(UsageError, match="overlap"):
        reshard(source, link / "ranks", TP2)
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(UsageError, match="is a file, not a folder"):
        reshard(source, file, TP2)


# Several processes


def test_parts_divide_the_files_and_the_last_writes_the_index(source, unbroken, tmp_path):
    dest = tmp_path / "out"
    for number in (2, 0):
        done = reshard(source, dest, TP2, options=Options(part=Part(number, 3)))
        assert not done.report.complete and not (dest / "config.json").exists()
    with pytest.raises(PartlyDone, match="files are not written yet"):
        reshard(source, dest, TP2, options=Options(finalize=True))
    done = reshard(source, dest, TP2, options=Options(part=Part(1, 3)))
    assert done.report.complete and contents(dest) == contents(unbroken)
    again = reshard(source, dest, TP2, options=Options(part=Part(0, 3)))
    assert again.report.complete and again.report.bytes_written == 0
    assert contents(dest) == contents(unbroken)


def test_parts_at_the_same_time(source, unbroken, tmp_path):
    dest = tmp_path / "out"
    results: list[bool] = []

    def run(number: int) -> None:
        results.append(reshard(source, dest, TP2, options=Options(part=Part(number, 4), max_workers=1)).report.complete)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4 and any(results)
    assert contents(dest) == contents(unbroken)


def test_the_same_part_twice_at_once_is_refused(source, tmp_path):
    dest = tmp_path / "out"
    dest.mkdir()
    prepared = prepare(source, TP2)
    with Ledger(dest, prepared.plan.id, "x", part="1-of-2"):
        with pytest.raises(PartlyDone):
            carry_out(prepared, dest, options=Options(part=Part(0, 2)))
        with pytest.raises(PartlyDone):
            carry_out(prepared, dest, options=Options())
        carry_out(prepared, dest, options=Options(part=Part(1, 2)))
    with pytest.raises(UsageError, match="cannot be shared"):
        carry_out(prepared, dest, options=Options(part=Part(0, 2), overwrite=True))


def test_finalize_after_the_last_writer_died(source, unbroken, tmp_path, monkeypatch):
    dest = tmp_path / "out"
    reshard(source, dest, TP2, options=Options(part=Part(0, 2)))
    monkeypatch.setattr("k3tool.reshard.closing_files", lambda *_: (_ for _ in ()).throw(Broken()))
    with pytest.raises(Broken):
        reshard(source, dest, TP2, options=Options(part=Part(1, 2)))
    monkeypatch.undo()
    done = reshard(source, dest, TP2, options=Options(finalize=True))
    assert done.report.complete and done.report.bytes_written == 0
    assert contents(dest) == contents(unbroken)


def test_ranks_one_by_one_make_the_whole(source, unbroken, tmp_path):
    dest = tmp_path / "out"
    for ranks in ((2,), (0, 3)):
        request = Request(tp=2, ep=2, max_shard_bytes=60_000, ranks=ranks)
        done = reshard(source, dest, request, verify=True)
        assert done.report.complete and done.readback is not None and done.readback.tensors
        assert [item["rank"] for item in done.as_json()["ranks"]] == list(ranks)
    assert not (dest / "rank-00001-of-00004").exists()
    with pytest.raises(CheckpointMissing, match="lacks rank 1"):
        prepare(dest, Request(gpus=1, form="hf"))
    done = reshard(source, dest, TP2)
    assert len(done.report.kept) == 3 * len(final_shards(dest / "rank-00000-of-00004"))
    assert {n: d for n, d in contents(dest).items() if n != MANIFEST_NAME} == {
        n: d for n, d in contents(unbroken).items() if n != MANIFEST_NAME
    }


def test_nodes_that_write_their_own_ranks_at_the_same_time(source, unbroken, tmp_path):
    dest = tmp_path / "out"
    failures: list[BaseException] = []

    def node(ranks: tuple[int, ...]) -> None:
        try:
            reshard(
                source, dest, Request(tp=2, ep=2, max_shard_bytes=60_000, ranks=ranks), options=Options(max_workers=1)
            )
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=node, args=(ranks,)) for ranks in ((0,), (1, 2), (3,))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures and not (dest / LEDGER_FOLDER).exists()
    found, expected = contents(dest), contents(unbroken)
    assert found.keys() == expected.keys()
    assert all(found[name] == expected[name] for name in found if name != MANIFEST_NAME)
    manifest = load_manifest(dest)
    assert manifest is not None and set(manifest.files) == found.keys() - {MANIFEST_NAME}


# Memory


def test_memory_is_bounded_by_the_buffers(tmp_path):
    source = tmp_path / "k3"
    document = tiny_config(num_layers=1, vocab_size=60_000, hidden_size=128, num_experts=0, experts_per_token=0,
                           intermediate_size=60_000, vision=False, kda_heads=2, mla_heads=2)  # fmt: skip
    write_checkpoint(source, document)
    prepared = prepare(source, Request(tp=2))
    assert max(job.data_bytes for job in prepared.plan.jobs) > 20_000_000
    tracemalloc.start()
    try:
        workers, buffer_bytes = allowance(prepared.plan.jobs, LocalSource(source), Options(max_workers=2))
        carry_out(prepared, tmp_path / "out", options=Options(max_workers=2))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < workers * 2 * buffer_bytes + 2_000_000


def test_memory_limit_lowers_buffers_and_workers_or_refuses(source, tmp_path):
    prepared = prepare(source, TP2)
    local = LocalSource(source)
    assert allowance(prepared.plan.jobs, local, Options(max_workers=4)) == (4, 2 << 20)
    assert allowance(prepared.plan.jobs, local, Options(max_workers=99))[0] == len(prepared.plan.batches())
    workers, buffer_bytes = allowance(prepared.plan.jobs, local, Options(max_workers=8, max_memory=10**10))
    assert (workers, buffer_bytes) == (8, 2 << 20)
    from k3tool.execute import INTERPRETER_BYTES, SPARE_BYTES, WORKER_BYTES
    from k3tool.memory import resident_memory

    held = max(resident_memory(), INTERPRETER_BYTES) + SPARE_BYTES
    room = 12 << 20
    workers, buffer_bytes = allowance(prepared.plan.jobs, local, Options(max_workers=8, max_memory=held + room))
    assert 1 <= workers < 8 and workers * (2 * buffer_bytes + WORKER_BYTES) <= room + (4 << 20)
    with pytest.raises(CapacityError, match="--max-memory 1 MB is too little") as refused:
        reshard(source, tmp_path / "out", TP2, options=Options(max_memory=1_000_000))
    figure = parse_size(refused.value.hint.split("--max-memory ")[1].split()[0])
    assert f"one worker needs {figure // 1_000_000} MB" in refused.value.message
    assert reshard(source, tmp_path / "out", TP2, options=Options(max_memory=figure)).report.complete


def test_what_is_loaded_later_counts(source):
    prepared = prepare(source, TP2)
    asked = []

    def load():
        asked.append(True)
        return 50 << 20

    def needed(options):
        with pytest.raises(CapacityError) as refused:
            allowance(prepared.plan.jobs, LocalSource(source), options)
        return parse_size(refused.value.hint.split("--max-memory ")[1].split()[0])

    without = needed(Options(max_memory=1))
    assert without + (49 << 20) < needed(Options(max_memory=1, load=load)) < without + (56 << 20)
    allowance(prepared.plan.jobs, LocalSource(source), Options(load=load))  # without a bound nothing is loaded ahead
    assert asked == [True]


# Transforms


class AddOne:
    def describe(self) -> str:
        return "add one"

    def apply(self, inputs):
        return Applied([(inputs[0] + 1).tobytes(), bytes([len(inputs)])], {"sum": int(inputs[0].sum(dtype=int))})


def adding_plan(table: TensorTable, names: list[str]) -> Plan:
    jobs = []
    for number, name in enumerate(names):
        kind = table.kind(name)
        outputs = (TensorOut(name, kind.dtype, kind.shape), TensorOut(name + ".count", "U8", (1,)))
        rows = whole(name, *kind)
        step = Compute(outputs, (rows, rows._replace(stop=1)), AddOne())
        jobs.append(file_job(f"sub/{number}.safetensors", [carry(name + ".same", *kind, source=name), step]))
    return Plan("add", tuple(jobs), {})


def test_transforms_and_what_they_measured_survive_a_resume(source, tmp_path):
    table = TensorTable.of(Checkpoint.open(source))
    names = [name for name, kind in table.items() if kind.dtype == "U8"][:4]
    plan = adding_plan(table, names)
    calls = []

    def closing(report):
        return [SmallFile("notes.json", json.dumps(report.notes, sort_keys=True).encode())]

    class Stop:
        def __getattr__(self, _):
            return lambda *_: None

        def item(self, text):
            calls.append(text)
            if len(calls) == 2:
                raise Broken

    with pytest.raises(Broken):
        execute(plan, table, tmp_path / "out", closing=closing, options=Options(max_workers=1, progress=Stop()))
    report = execute(plan, table, tmp_path / "out", closing=closing, options=Options(max_workers=1))
    assert len(report.kept) == 2
    original = Checkpoint.open(source)
    for number, name in enumerate(names):
        data = original.read(name)
        path = f"sub/{number}.safetensors"
        assert report.notes[path] == [{"sum": sum(data)}]
        written = (tmp_path / "out" / path).read_bytes()
        assert written.endswith(data + bytes((byte + 1) % 256 for byte in data) + b"\x02")
    assert json.loads((tmp_path / "out" / "notes.json").read_text()) == report.notes


class Slowly:
    """Gives its inputs back as they are, late enough for those of the next step to have been read."""

    def describe(self) -> str:
        return "slowly"

    def apply(self, inputs):
        time.sleep(0.02)
        return Applied(inputs)


def test_inputs_that_are_read_ahead_do_not_overwrite_those_at_work(source, tmp_path):
    table = TensorTable.of(Checkpoint.open(source))
    names = [name for name, kind in table.items() if kind.dtype == "U8"][:7]
    steps = [
        Compute((TensorOut(name, *table.kind(name)),), (whole(name, *table.kind(name)),), Slowly()) for name in names
    ]
    steps.insert(3, carry("between", *table.kind(names[0]), source=names[0]))
    plan = Plan("slow", (file_job("x.safetensors", steps),), {})
    execute(plan, table, tmp_path / "o", closing=lambda _: ())
    original = Checkpoint.open(source)
    order = [*names[:3], names[0], *names[3:]]
    assert (tmp_path / "o" / "x.safetensors").read_bytes().endswith(b"".join(original.read(name) for name in order))


def test_a_transform_that_lies_about_its_size_is_our_bug(source, tmp_path):
    table = TensorTable.of(Checkpoint.open(source))
    name = next(name for name, kind in table.items() if kind.dtype == "U8")
    kind = table.kind(name)
    step = Compute((TensorOut("x", "U8", (3,)), TensorOut("y", "U8", (1,))), (whole(name, *kind),), AddOne())
    with pytest.raises(AssertionError, match="bytes made, 3 declared"):
        execute(Plan("x", (file_job("x.safetensors", [step]),), {}), table, tmp_path / "o", closing=lambda _: ())
    assert not list((tmp_path / "o").glob("*"))[1:]  # only the ledger


def test_a_file_of_another_kind_begins_with_its_own_head(source, tmp_path):
    table = TensorTable.of(Checkpoint.open(source))
    name = next(iter(table))
    job = file_job("x.gguf", [carry(name, *table.kind(name))], head=b"GGUF....")
    execute(Plan("x", (job,), {}), table, tmp_path / "o", closing=lambda _: ())
    assert (tmp_path / "o" / "x.gguf").read_bytes() == b"GGUF...." + Checkpoint.open(source).read(name)


# Reading back


def flipped(path: Path, at: int) -> bytes:
    """Flips the lowest bit of one byte of a file; returns what the file held."""
    data = path.read_bytes()
    path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    return data


@pytest.mark.parametrize(
    "request_",
    [Request(tp=2, ep=2), Request(pp=2), Request(gpus=4, ep=4, form="hf"), Request(tp=2, ep=2, ranks=(1, 2))],
    ids=["TP2 x EP2", "PP2", "one checkpoint", "two ranks"],
)
def test_reading_back_finds_a_flipped_bit_in_any_file(source, tmp_path, request_):
    done = reshard(source, tmp_path / "out", request_, verify=True)
    files = sorted(path for path in (tmp_path / "out").rglob("*") if path.is_file())
    assert done.readback is not None and done.readback.files == len(files) and done.readback.different == []
    assert done.readback.tensors == len(Checkpoint.open(source).index.weight_map) or request_.ranks
    rng = random.Random(7)
    for path in files:
        size = path.stat().st_size
        places = {0, 8, size - 1, *(rng.randrange(size) for _ in range(2))}
        for at in places if path.suffix == ".safetensors" else (size - 2,):
            data = flipped(path, at)
            with pytest.raises(CheckFailed) as caught:
                read_back(done.prepared, done.report, tmp_path / "out", Options())
            name = str(path.relative_to(tmp_path / "out"))
            assert [text.partition(": ")[0] for text in caught.value.details["different"]] == [name], at  # type: ignore[attr-defined]
            path.write_bytes(data)
    read_back(done.prepared, done.report, tmp_path / "out", Options())


def test_what_every_rank_holds_is_read_back_from_each(source, tmp_path):
    done = reshard(source, tmp_path / "out", Request(tp=2, ep=2))
    held = {}
    for rank in range(4):
        folder = tmp_path / "out" / f"rank-{rank:05d}-of-00004"
        names = Checkpoint.open(folder).index.weight_map
        place = Checkpoint.open(folder).locate(next(name for name in names if name.endswith("gate.weight")))
        held[folder / place.shard] = place.offset
    assert len(held) == 4
    for path, offset in held.items():
        data = flipped(path, offset)
        with pytest.raises(
            CheckFailed, match=rf"{path.parent.name}/{path.name}: \S+gate.weight differs from the source$"
        ):
            read_back(done.prepared, done.report, tmp_path / "out", Options())
        path.write_bytes(data)
    for path, offset in held.items():  # all of them wrong in the same way are wrong too
        flipped(path, offset)
    with pytest.raises(CheckFailed) as caught:
        read_back(done.prepared, done.report, tmp_path / "out", Options())
    assert len(caught.value.details["different"]) == 4  # type: ignore[arg-type]


@pytest.mark.parametrize("change", [lambda data: data + b"\0", lambda data: data[:-1]], ids=["longer", "shorter"])
def test_reading_back_finds_a_file_of_another_length(source, tmp_path, change):
    done = reshard(source, tmp_path / "out", Request(tp=2))
    path = final_shards(tmp_path / "out")[-1]
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(CheckFailed, match=rf"{path.name}: its size differs"):
        read_back(done.prepared, done.report, tmp_path / "out", Options())


def test_reading_back_finds_a_layout_file_that_joins_otherwise(source, tmp_path, monkeypatch):
    """The digests say what was written; that it joins to the source is looked at by what the result says of itself."""
    done = reshard(source, tmp_path / "out", Request(tp=2))
    path = tmp_path / "out" / "k3tool.json"
    path.write_text(path.read_text().replace('"content"', '"stored"', 1))
    done.report.files["k3tool.json"] = FileRecord(0, hashlib.sha256(path.read_bytes()).hexdigest())
    with pytest.raises((CheckFailed, CheckpointCorrupt)):
        read_back(done.prepared, done.report, tmp_path / "out", Options())


# Giving up the source


def test_reclaim_frees_the_source_and_keeps_every_byte(source, unbroken, tmp_path):
    copy = shutil.copytree(source, tmp_path / "k3")
    held = []

    class Watch:
        def __getattr__(self, _):
            return lambda *_: None

        def item(self, _):
            held.append(sum(path.stat().st_size for path in copy.glob("*.safetensors")))

    reshard(copy, tmp_path / "out", TP2, options=Options(max_workers=1, progress=Watch()), reclaim=True)
    assert contents(tmp_path / "out") == contents(unbroken)
    assert held[-1] < held[0] and held == sorted(held, reverse=True) and len(set(held)) > 4
    assert not list(copy.glob("*.safetensors")) and not list(copy.glob("*.json.k3partial"))


def test_reclaim_killed_and_resumed(source, unbroken, tmp_path, run):
    rng = random.Random(5)
    expected = contents(unbroken)
    events = count_events(run, tmp_path, source=shutil.copytree(source, tmp_path / "measure"), reclaim=True)
    kills = 0
    for number in range(12):
        copy, dest = shutil.copytree(source, tmp_path / f"source{number}"), tmp_path / f"dest{number}"
        whole_shards = {path.name: path.stat().st_size for path in copy.glob("*.safetensors")}
        while (code := run(source=copy, dest=dest, reclaim=True, kill_at=rng.randrange(1, events))) == -signal.SIGKILL:
            kills += 1
            note = read_note(copy)
            if note is not None and note.freed(copy):
                with pytest.raises(CheckpointMissing, match="was given up"):
                    prepare(copy, TP2)
            else:  # nothing is touched before it is noted
                assert {path.name: path.stat().st_size for path in copy.glob("*.safetensors")} == whole_shards
        assert code in (0, 10)  # 10: killed among the last removals; the result was complete and nothing is left to do
        assert not list(copy.glob("*.safetensors")) and contents(dest) == expected
    assert kills > 20


def test_reclaim_proves_before_it_frees(source, tmp_path, monkeypatch):
    copy = shutil.copytree(source, tmp_path / "k3")

    class Spoil:
        def __getattr__(self, _):
            return lambda *_: None

        def item(self, text):
            path = tmp_path / "out" / text.split()[0]
            data = bytearray(path.read_bytes())
            data[-1] ^= 1
            path.write_bytes(data)

    before = contents(copy)
    with pytest.raises(CheckFailed, match="reads back as"):
        reshard(copy, tmp_path / "out", TP2, options=Options(max_workers=1, progress=Spoil()), reclaim=True)
    assert contents(copy) == before


def test_reclaim_needs_less_room_than_two_copies(source, tmp_path, monkeypatch):
    copy = shutil.copytree(source, tmp_path / "k3")
    request = Request(gpus=1, form="hf", max_shard_bytes=40_000)
    need = sum(job.size_estimate for job in prepare(copy, request).plan.jobs)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(total=1 << 40, free=int(1.5 * need)))
    with pytest.raises(CapacityError):
        reshard(copy, tmp_path / "a", request)
    reshard(copy, tmp_path / "b", request, reclaim=True)


def test_reclaim_contradictions(source, unbroken, tmp_path):
    def refused(match: str, request: Request = TP2, where: Path = source, **more: object) -> None:
        with pytest.raises(UsageError, match=match):
            reshard(where, tmp_path / "out", request, reclaim=True, **more)  # type: ignore[arg-type]

    refused("--verify needs the source", verify=True)
    refused("one process must write all", options=Options(part=Part(0, 2)))
    refused("one process must write all", request=Request(tp=2, ranks=(0,)))
    refused("not a folder of ranks", where=unbroken, request=Request(gpus=1, form="hf"))
    assert len(final_shards(source)) == 7


def test_an_interrupt_leaves_whole_files_and_resumes(source, unbroken, tmp_path):
    dest = tmp_path / "out"

    class Interrupt:
        sent = False

        def __getattr__(self, _):
            return lambda *_: None

        def item(self, _):
            if not Interrupt.sent:  # a second one would not wait for the workers to clean up
                Interrupt.sent = True
                _thread.interrupt_main()  # as Ctrl-C does: the main thread gets it while it waits for the workers

    with pytest.raises(KeyboardInterrupt):
        reshard(source, dest, TP2, options=Options(max_workers=2, progress=Interrupt()))
    assert not list(dest.rglob("*.k3partial")) and not list(dest.rglob("config.json"))
    assert all(path.read_bytes() == (unbroken / path.relative_to(dest)).read_bytes() for path in final_shards(dest))
    assert reshard(source, dest, TP2).report.kept
    assert contents(dest) == contents(unbroken)


# What a refused command leaves


def files_and_folders(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def refusals(source: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Callable[[Path], object]]:
    """Ways in which a job is refused after its plan was made, before or while its first file is written."""

    def small(_: object) -> SimpleNamespace:
        return SimpleNamespace(total=1 << 40, free=100_000)

    def without_room(run: Callable[[], object]) -> object:
        with monkeypatch.context() as patched:
            patched.setattr(shutil, "disk_usage", small)
            return run()

    def cut_meanwhile(dest: Path) -> object:
        copy = shutil.copytree(source, dest.parent.parent / "damaged")
        prepared = prepare(copy, TP2)
        for shard in copy.glob("*.safetensors"):
            os.truncate(shard, shard.stat().st_size - 100)
        return carry_out(prepared, dest, options=Options(max_workers=1))

    ranks = Request(tp=2, ep=2, ranks=(1,))
    return {
        "no room": lambda dest: without_room(lambda: reshard(source, dest, TP2)),
        "no room for one rank": lambda dest: without_room(lambda: reshard(source, dest, ranks)),
        "no room for a part": lambda dest: without_room(
            lambda: reshard(source, dest, TP2, options=Options(part=Part(0, 2)))
        ),
        "no room, overwriting": lambda dest: without_room(
            lambda: reshard(source, dest, TP2, options=Options(overwrite=True))
        ),
        "no memory": lambda dest: reshard(source, dest, TP2, options=Options(max_memory=1000)),
        "--overwrite of a part": lambda dest: reshard(
            source, dest, TP2, options=Options(part=Part(0, 2), overwrite=True)
        ),
        "a source that is cut meanwhile": cut_meanwhile,
        "nothing to finalize": lambda dest: reshard(source, dest, TP2, options=Options(finalize=True)),
    }


@pytest.mark.parametrize("why", refusals(Path(), pytest.MonkeyPatch()))
@pytest.mark.parametrize("there", [True, False], ids=["an empty folder", "no folder"])
def test_a_refused_command_leaves_the_folder_as_it_was(source, tmp_path, monkeypatch, why, there):
    """Whatever it was refused for, the right command follows on the same DEST."""
    above = tmp_path / "a"
    dest = above / "b" / "out"
    if there:
        dest.mkdir(parents=True)
    before = files_and_folders(tmp_path)
    with pytest.raises((CapacityError, UsageError, CheckpointCorrupt, PartlyDone)):
        refusals(source, monkeypatch)[why](dest)
    assert {name for name in files_and_folders(tmp_path) - before if not name.startswith("a/damaged")} <= {"a"}
    assert there or not dest.parent.exists() or not any(dest.parent.iterdir())
    assert reshard(source, dest, Request(pp=2)).report.complete


def test_a_job_that_has_finished_a_file_keeps_its_claim(source, tmp_path, monkeypatch):
    class Full:
        count = 0

        def __getattr__(self, _):
            return lambda *_: None

        def item(self, _):
            self.count += 1
            if self.count == 2:
                raise OSError(errno.ENOSPC, "full")

    with pytest.raises((CapacityError, OSError)):
        reshard(source, tmp_path / "out", TP2, options=Options(progress=Full(), max_workers=1))
    with pytest.raises(UsageError, match="holds the unfinished work of another command: reshard "):
        reshard(source, tmp_path / "out", Request(pp=2))
    assert reshard(source, tmp_path / "out", TP2).report.kept
