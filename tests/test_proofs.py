"""What verify remembers: it continues, it notices every change, and with --full it trusts nothing."""

from __future__ import annotations

import ctypes
import hashlib
import json
import mmap
import os
import sys
import threading
from pathlib import Path

import numpy
import pytest

from k3tool.checkpoint.manifest import FileRecord, Manifest
from k3tool.errors import CheckpointCorrupt
from k3tool.proofs import PROOFS_NAME, ProofBook, Readers, choose_sample
from k3tool.verify import BytesOptions, verify
from tests.helpers import copy_checkpoint, k3tool

SHARD = "model-00003-of-000011.safetensors"


@pytest.fixture
def copy(mini: Path, tmp_path: Path) -> Path:
    folder = copy_checkpoint(mini, tmp_path / "copy")
    files = {
        path.name: FileRecord(path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest())
        for path in folder.iterdir()
    }
    Manifest("fetch", "test", files=files).write(folder)
    return folder


def _read(folder: Path, **options: object) -> set[str]:
    """Names of the files that this check did read."""
    before = {name: proof.when for name, proof in ProofBook(folder).proofs.items()}
    report = verify(folder, depth="bytes", options=BytesOptions(**options))  # type: ignore[arg-type]
    assert report.ok
    return {name for name, proof in ProofBook(folder).proofs.items() if before.get(name) != proof.when}


def test_second_check_reads_nothing_and_full_reads_all(copy: Path):
    first = _read(copy)
    assert len(first) == 13
    report = verify(copy, depth="bytes")
    assert report.proven_earlier == 13 and all(file.status == "ok" for file in report.files)
    assert report.bytes_read < 200_000  # headers only
    assert _read(copy, full=True) == first


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    with open(path, "r+b") as file:
        file.write(data)


def test_change_with_the_old_time_stamp_is_noticed(copy: Path):
    _read(copy)
    status = (copy / SHARD).stat()
    _flip(copy / SHARD)
    os.utime(copy / SHARD, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert (copy / SHARD).stat().st_mtime_ns == status.st_mtime_ns
    report = verify(copy, depth="bytes")
    assert [file.name for file in report.files if file.status == "corrupt"] == [SHARD]
    assert ProofBook(copy).valid(SHARD) is None


def test_a_forged_memory_does_not_help_with_full(copy: Path):
    _read(copy)
    _flip(copy / SHARD)
    status = (copy / SHARD).stat()
    book = ProofBook(copy)
    old = book.proofs[SHARD]
    forged = {**vars(old), "size": status.st_size, "mtime_ns": status.st_mtime_ns, "ctime_ns": status.st_ctime_ns}
    with open(copy / PROOFS_NAME, "a") as file:
        file.write("\n" + json.dumps(forged))
    assert verify(copy, depth="bytes").ok
    assert not verify(copy, depth="bytes", options=BytesOptions(full=True)).ok


def test_interrupted_check_goes_on(copy: Path):
    files = sorted(path.name for path in copy.glob("*.safetensors"))
    readers = Readers(copy, files, workers=1, task="x")
    book = ProofBook(copy)
    for _ in range(4):
        _, proof = next(readers)
        assert not isinstance(proof, OSError)
        book.add(proof)
    readers.close()
    with open(copy / PROOFS_NAME, "a") as file:
        file.write('\n{"name": "torn')
    assert len(_read(copy)) == 13 - 4


def test_samples_go_round(copy: Path):
    sizes = {path.name: path.stat().st_size for path in copy.glob("*.safetensors")}
    seen: list[set[str]] = []
    for _ in range(4):
        now = _read(copy, sample=0.2)
        assert now and sum(sizes.get(name, 0) for name in now) >= 0.19 * sum(sizes.values())
        assert not any(now & before for before in seen)
        seen.append(now)
    report = verify(copy, depth="bytes", options=BytesOptions(sample=0.01))
    assert report.ok and report.proven_earlier


def test_first_sample_says_what_it_left_out(copy: Path, capsys):
    ran = k3tool(capsys, "verify", copy, "--depth", "bytes", "--sample", "5%", "--json")
    assert ran.code == 0 and ran.json["unproven"] > 0
    assert {file["problem"] for file in ran.json["files"] if file["status"] == "unknown"} == {"not in this sample"}
    assert "were not in this sample" in ran.err


def test_choice_prefers_what_was_never_proven(tmp_path: Path):
    book = ProofBook(tmp_path)
    assert choose_sample({"a": 10, "b": 10, "c": 10}, 0.5, book) == ["a", "b"]
    assert choose_sample({"a": 10}, 0.01, book) == ["a"]


def test_unreadable_file_is_reported(copy: Path):
    results = dict(Readers(copy, ["gone", SHARD], workers=2, task="x"))
    assert isinstance(results["gone"], FileNotFoundError) and not isinstance(results[SHARD], OSError)


def _cached(path: Path) -> float:
    """The share of a file's pages that are in memory, asked in a way that brings none in."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        pages = numpy.frombuffer(mapped, numpy.uint8)
        held = numpy.zeros(-(-pages.size // mmap.PAGESIZE), numpy.uint8)
        asked = ctypes.CDLL(None).mincore(
            ctypes.c_void_p(pages.ctypes.data), ctypes.c_size_t(pages.size), ctypes.c_void_p(held.ctypes.data)
        )
        del pages
        assert asked == 0
        return float((held & 1).mean())


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="pages are given back by advice that others lack")
@pytest.mark.parametrize("cold", [True, False])
def test_the_cache_is_left_as_it_was_found(tmp_path: Path, cold: bool):
    path = tmp_path / "shard"
    content = os.urandom(40 << 20)
    path.write_bytes(content)
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        if cold:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if cold and _cached(path) > 0.1:
        pytest.skip("this file system keeps files in memory as it likes")
    ((_, proof),) = Readers(tmp_path, ["shard"], workers=1, task="x")
    assert not isinstance(proof, OSError) and proof.sha256 == hashlib.sha256(content).hexdigest()
    assert _cached(path) < 0.3 if cold else _cached(path) > 0.9


def test_a_broken_index_stops_the_readers(copy: Path):
    (copy / "model.safetensors.index.json").write_text("{")
    with pytest.raises(CheckpointCorrupt):
        verify(copy, depth="bytes", options=BytesOptions(full=True))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("verify")]


@pytest.mark.parametrize("arguments", [["--sample", "0%"], ["--sample", "200%"], ["--sample", "x"], ["--full"]])
def test_wrong_inputs(copy: Path, capsys, arguments):
    depth = ["--depth", "bytes"] if arguments != ["--full"] else []
    ran = k3tool(capsys, "verify", copy, *arguments, *depth)
    assert ran.code == 2 and "hint: " in ran.err
