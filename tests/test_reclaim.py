"""Giving up a source: whatever is done between two runs, no byte that exists once is cut, and the way on is told."""

from __future__ import annotations

import json
import os
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from k3tool.checkpoint.ledger import LEDGER_FOLDER
from k3tool.checkpoint.note import RECLAIMED_NAME, is_emptied, read_note
from k3tool.errors import CheckpointCorrupt, CheckpointMissing, K3Error, UsageError
from k3tool.execute import Options
from k3tool.reclaim import Reclaimer
from k3tool.reshard import Request, prepare, reclaimer_of, reshard
from k3tool.standin import serve
from k3tool.synthetic import tiny_config, write_checkpoint
from tests.helpers import k3tool

TP2 = Request(tp=2, max_shard_bytes=60_000)
WORDS = ["--tp", "2", "--max-shard-size", "60000"]


class Broken(Exception):
    pass


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("source") / "k3"
    document = tiny_config(num_layers=3, kda_heads=2, mla_heads=2, moe_intermediate_size=64, num_experts=8,
                           vocab_size=515, intermediate_size=64)  # fmt: skip
    write_checkpoint(folder, document, tokenizer=True)
    return folder


@pytest.fixture(scope="module")
def expected(source, tmp_path_factory) -> dict[str, bytes]:
    dest = tmp_path_factory.mktemp("unbroken") / "ranks"
    reshard(source, dest, TP2)
    return shards(dest)


def shards(folder: Path) -> dict[str, bytes]:
    """What a result consists of: tensors, indices, configurations."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and "k3tool-manifest" not in path.name and LEDGER_FOLDER not in path.parts
    }


def everything(*folders: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for folder in folders for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def begun(source, tmp_path, monkeypatch) -> tuple[Path, Path]:
    """(SOURCE, DEST) of a job that was broken off when three shards were freed and more files were written."""
    copy, dest = shutil.copytree(source, tmp_path / "a source"), tmp_path / "a result"
    free = Reclaimer._free

    def until(self: Reclaimer, shard: str) -> None:
        if len(self._freed) == 3:
            raise Broken
        free(self, shard)

    with monkeypatch.context() as patch, pytest.raises(Broken):
        patch.setattr(Reclaimer, "_free", until)
        reshard(copy, dest, TP2, options=Options(max_workers=1), reclaim=True)
    assert sum(is_emptied(path) for path in copy.glob("*.safetensors")) == 3
    return copy, dest


def only_copies(copy: Path, dest: Path) -> list[Path]:
    """Files of DEST that were read back before shards were freed."""
    note = read_note(copy)
    assert note is not None
    return [dest / name for name in note.files]


def touch(copy: Path, dest: Path) -> tuple[Path, Path]:
    for path in dest.rglob("*.safetensors"):
        os.utime(path, (1, 1))
    return copy, dest


def copy_away(copy: Path, dest: Path) -> tuple[Path, Path]:
    moved = shutil.copytree(dest, dest.with_name("on another disk"))
    shutil.rmtree(dest)
    return copy, moved


def copy_beside(copy: Path, dest: Path) -> tuple[Path, Path]:
    return copy, shutil.copytree(dest, dest.with_name("on another disk"))


def copy_files_alone(copy: Path, dest: Path) -> tuple[Path, Path]:
    copy, moved = copy_away(copy, dest)
    shutil.rmtree(moved / LEDGER_FOLDER)
    return copy, moved


def forget_note(copy: Path, dest: Path) -> tuple[Path, Path]:
    (copy / RECLAIMED_NAME).unlink()
    return copy, dest


def move_source(copy: Path, dest: Path) -> tuple[Path, Path]:
    return copy.rename(copy.with_name("moved")), dest


def through_links(copy: Path, dest: Path) -> tuple[Path, Path]:
    (copy.parent / "s").symlink_to(copy)
    (copy.parent / "d").symlink_to(dest)
    return copy.parent / "s", copy.parent / "d"


def spoil_what_can_be_made_again(copy: Path, dest: Path) -> tuple[Path, Path]:
    kept = set(only_copies(copy, dest))
    other = next(path for path in dest.rglob("*.safetensors") if path not in kept)
    other.write_bytes(bytes(other.stat().st_size))
    return copy, dest


@pytest.mark.parametrize(
    "between",
    [touch, copy_away, copy_beside, copy_files_alone, forget_note, move_source, through_links,
     spoil_what_can_be_made_again],
)  # fmt: skip
def test_it_goes_on_whatever_was_done_in_between(begun, expected, between):
    copy, dest = between(*begun)
    reshard(copy, dest, TP2, reclaim=True)
    assert shards(dest) == expected
    assert not list(copy.glob("*.safetensors"))


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def paste(capsys: pytest.CaptureFixture[str], hint: str):
    words = shlex.split(hint[hint.index("k3tool ") :])
    return k3tool(capsys, *words[1:])


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "was given up: 3 of its shards are freed"),
        (["--dry-run"], "was given up: 3 of its shards are freed"),
        (["--overwrite"], "was given up: 3 of its shards are freed"),
        (["--reclaim", "--overwrite"], "--overwrite would remove the only copy"),
        (["--reclaim", "--tp", 1, "--gpus", 1], "was given up: 3 of its shards are freed"),
        (["--reclaim", "--layout", "hf"], "was given up: 3 of its shards are freed"),
        (["--reclaim", "elsewhere"], "which holds tensors of its freed shards there, is not there"),
        (["--reclaim", "elsewhere", "--overwrite"], "--overwrite would remove the only copy"),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, list) else "",
)
def test_what_would_lose_it_is_refused_and_the_way_on_is_told(begun, expected, words, says, tmp_path, capsys):
    copy, dest = begun
    before = everything(copy, dest)
    target = tmp_path / "elsewhere" if "elsewhere" in words else dest
    options = [word for word in words if word != "elsewhere"]
    given = WORDS[2:] if "--tp" in options else WORDS
    ran = k3tool(capsys, "reshard", copy, target, *given, *options)
    assert ran.code in (2, 10) and says in ran.err, ran.err
    assert everything(copy, dest) == before and not (tmp_path / "elsewhere").exists()
    done = paste(capsys, ran.err)
    assert done.code == 0, done.err
    assert shards(dest) == expected


def test_other_commands_tell_the_way_on_too(begun, expected, tmp_path, capsys):
    copy, dest = begun
    before = everything(copy, dest)
    for words in (["verify", copy], ["inspect", copy], ["quantize", copy, tmp_path / "q", "--experts", "nvfp4"]):
        ran = k3tool(capsys, *words)
        if words[0] != "inspect":
            assert ran.code in (10, 11) and "--reclaim\n" in ran.err and "fetch" not in ran.err, ran.err
    assert everything(copy, dest) == before
    assert paste(capsys, ran.err).code == 0 and shards(dest) == expected


def test_no_other_command_takes_the_only_copy(begun, source, expected, capsys):
    copy, dest = begun
    before = everything(copy, dest)
    for words in (["reshard", source, dest, "--gpus", 1], ["quantize", source, dest, "--experts", "nvfp4"]):
        ran = k3tool(capsys, *words, "--overwrite")
        assert ran.code == 2 and "--overwrite would remove the only copy" in ran.err
        assert everything(copy, dest) == before
    assert paste(capsys, ran.err).code == 0 and shards(dest) == expected


@pytest.mark.parametrize("harm", [flip, Path.unlink])
def test_a_damaged_only_copy_is_named_with_what_brings_it_back(begun, expected, source, harm):
    copy, dest = begun
    path = only_copies(copy, dest)[0]
    backup = path.read_bytes()
    harm(path)
    before = everything(copy)
    with pytest.raises(CheckpointCorrupt, match="the only copy of tensors that") as caught:
        reshard(copy, dest, TP2, reclaim=True)
    assert everything(copy) == before and str(path) in caught.value.message
    lost = caught.value.details["shards"]
    assert lost and all(is_emptied(copy / name) for name in lost)
    path.write_bytes(backup) if harm is flip else [shutil.copy2(source / name, copy / name) for name in lost]
    reshard(copy, dest, TP2, reclaim=True)
    assert shards(dest) == expected and not list(copy.glob("*.safetensors"))


def test_a_copy_of_the_source_names_the_one_that_was_begun(begun, expected, capsys):
    copy, dest = begun
    other = shutil.copytree(copy, copy.with_name("a copy"))
    before = everything(copy, dest, other)
    ran = k3tool(capsys, "reshard", other, dest, *WORDS, "--reclaim")
    assert ran.code == 2 and f"is a copy of {copy}" in ran.err and everything(copy, dest, other) == before
    assert paste(capsys, ran.err).code == 0 and shards(dest) == expected


def test_a_source_that_was_edited_is_said_to_be(begun, expected):
    copy, dest = begun
    index = copy / "model.safetensors.index.json"
    text = index.read_bytes()
    last = sorted(copy.glob("*.safetensors"))[-1]
    renamed = last.rename(copy / "renamed.safetensors")
    index.write_bytes(text.replace(last.name.encode(), renamed.name.encode()))
    with pytest.raises(CheckpointCorrupt, match="have changed since 3 of its shards were freed"):
        reshard(copy, dest, TP2, reclaim=True)
    renamed.rename(last)
    index.write_bytes(text)
    reshard(copy, dest, TP2, reclaim=True)
    assert shards(dest) == expected


# Names that others use


def link_hard(folder: Path) -> Path:
    shard = sorted(folder.glob("*.safetensors"))[2]
    blob = folder.parent / "blob"
    os.link(shard, blob)
    return blob


def link_to(folder: Path) -> Path:
    shard = sorted(folder.glob("*.safetensors"))[2]
    blob = shard.rename(folder.parent / "blob")
    shard.symlink_to(blob)
    return blob


@pytest.mark.parametrize("link", [link_hard, link_to])
def test_shards_with_other_names_are_not_cut(source, expected, tmp_path, capsys, link: Callable[[Path], Path]):
    copy, dest = shutil.copytree(source, tmp_path / "a source"), tmp_path / "a result"
    blob = link(copy)
    before = everything(copy)
    ran = k3tool(capsys, "reshard", copy, dest, *WORDS, "--reclaim")
    assert ran.code == 2 and "link" in ran.err and not dest.exists()
    assert everything(copy) == before
    assert paste(capsys, ran.err).code == 0 and shards(dest) == expected and everything(copy) == before
    assert blob.stat().st_size > 10_000


def test_a_name_that_is_made_meanwhile_keeps_its_bytes(begun, expected, capsys):
    copy, dest = begun
    shard = next(path for path in sorted(copy.glob("*.safetensors")) if not is_emptied(path))
    os.link(shard, copy.parent / "blob")
    before = everything(copy, dest)
    ran = k3tool(capsys, "reshard", copy, dest, *WORDS, "--reclaim")
    assert ran.code == 2 and "2 names of one file" in ran.err and everything(copy, dest) == before
    (copy.parent / "blob").unlink()
    assert paste(capsys, ran.err).code == 0 and shards(dest) == expected


def test_two_that_free_one_source_at_once(source, tmp_path):
    copy = shutil.copytree(source, tmp_path / "k3")
    first = prepare(copy, TP2)
    held = reclaimer_of(first, tmp_path / "a", Options(), False).held()
    with held, pytest.raises(K3Error, match="is being given up by another process"):
        reshard(copy, tmp_path / "b", TP2, reclaim=True)
    reshard(copy, tmp_path / "b", TP2, reclaim=True)


# A result that was there before


def test_a_result_of_an_earlier_run_is_compared_before_its_source_goes(source, tmp_path):
    """Kept files are known by size alone: what differs from the source is written again, and what equals it is not."""
    copy, dest = shutil.copytree(source, tmp_path / "k3"), tmp_path / "out"
    reshard(copy, dest, TP2)
    shard = sorted(copy.glob("*.safetensors"))[3]
    flip(shard)  # the source was mended, say
    fresh = tmp_path / "fresh"
    reshard(copy, fresh, TP2)
    done = reshard(copy, dest, TP2, reclaim=True)
    assert shards(dest) == shards(fresh) and done.report.kept and done.report.bytes_written
    assert not list(copy.glob("*.safetensors"))


def test_afterwards_the_folder_says_where_its_tensors_are(source, expected, tmp_path, capsys):
    copy, dest = shutil.copytree(source, tmp_path / "a source"), tmp_path / "a result"
    assert k3tool(capsys, "reshard", copy, dest, *WORDS, "--reclaim").code == 0
    for words in (["--reclaim"], [], ["--reclaim", "--overwrite"]):
        ran = k3tool(capsys, "reshard", copy, dest, *WORDS, *words)
        assert ran.code == 10 and f"all of its tensors are in {dest}" in ran.err
        assert paste(capsys, ran.err).code == 0
    assert shards(dest) == expected
    shutil.copytree(source, copy, dirs_exist_ok=True)  # brought again: an ordinary source, whatever the note says
    assert k3tool(capsys, "reshard", copy, tmp_path / "again", *WORDS, "--reclaim").code == 0
    assert shards(tmp_path / "again") == expected


@pytest.mark.parametrize("complete", [False, True])
@pytest.mark.parametrize("name", ["../thesis.txt", "/absolute.txt", "sub/../../x.safetensors", "a shard"])
def test_a_note_alone_deletes_nothing(source, tmp_path, name, complete):
    """Whoever published a folder may have put a note into it: names outside are refused, whole shards stay whole."""
    copy = shutil.copytree(source, tmp_path / "k3")
    (tmp_path / "thesis.txt").write_text("years of work")
    name = sorted(path.name for path in copy.glob("*.safetensors"))[0] if name == "a shard" else name
    note = {"plan": prepare(copy, TP2).plan.id, "dest": str(tmp_path), "shards": {name: 1}, "complete": complete}
    before = everything(tmp_path)
    (copy / RECLAIMED_NAME).write_text(json.dumps(note))
    for options in ({}, {"reclaim": True, "dry_run": True}, {"reclaim": True, "dest": tmp_path / "out"}):
        if name.startswith("model-"):
            assert prepare(copy, TP2, **options).plan.id == note["plan"]
        else:
            with pytest.raises((CheckpointMissing, CheckpointCorrupt)):
                prepare(copy, TP2, **options)
    (copy / RECLAIMED_NAME).unlink()
    assert everything(tmp_path) == before


def test_a_complete_note_removes_headers_alone_and_only_beside_the_result(source, tmp_path):
    copy, dest = shutil.copytree(source, tmp_path / "k3"), tmp_path / "out"
    paths = sorted(copy.glob("*.safetensors"))
    heads = {path: path.read_bytes()[: 8 + int.from_bytes(path.read_bytes()[:8], "little")] for path in paths}
    paths[0].write_bytes(heads[paths[0]])
    (tmp_path / "head").write_bytes(heads[paths[1]])
    paths[1].unlink()
    paths[1].symlink_to(tmp_path / "head")
    note = {"plan": "x", "dest": str(dest), "shards": {path.name: 1 for path in paths}, "complete": True}
    (copy / RECLAIMED_NAME).write_text(json.dumps(note))
    before = everything(tmp_path)
    with pytest.raises(CheckpointMissing, match="was given up"):
        prepare(copy, TP2, reclaim=True)
    assert everything(tmp_path) == before  # there is no such result
    dest.mkdir()
    manifest = {"command": "reshard", "source": "", "revision": None, "plan": "x", "files": {}}
    (dest / "k3tool-manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointMissing, match="was given up"):
        prepare(copy, TP2, reclaim=True, dry_run=True)
    assert paths[0].exists()
    with pytest.raises(CheckpointMissing, match="was given up"):
        prepare(copy, TP2, reclaim=True)
    assert not paths[0].exists() and (tmp_path / "head").exists() and all(path.exists() for path in paths[1:])


def test_room_on_the_disk_of_the_source_is_none_on_another(source, tmp_path, monkeypatch):
    copy, dest = shutil.copytree(source, tmp_path / "k3"), tmp_path / "out"
    dest.mkdir()
    prepared = prepare(copy, TP2)
    reclaimer = reclaimer_of(prepared, dest, Options(), False)
    total = sum(job.size_estimate for job in prepared.plan.jobs)
    assert reclaimer.needed_bytes(prepared.plan.jobs) < total
    other = Path("/dev/shm") if os.path.isdir("/dev/shm") and os.stat("/dev/shm").st_dev != dest.stat().st_dev else None
    if other is not None:
        assert reclaimer_of(prepared, other, Options(), False).needed_bytes(prepared.plan.jobs) == total


def test_reclaim_of_the_hub_is_refused(source, tmp_path, monkeypatch):
    with serve(source, "org/mini") as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        with pytest.raises(UsageError, match="needs a local source"):
            reshard("org/mini", tmp_path / "out", TP2, reclaim=True)
