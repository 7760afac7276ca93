"""Files that k3tool keeps and reads back, with another value in every place: refused by path and field, or passed over."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from k3tool.checkpoint.ledger import LEDGER_FOLDER, Ledger
from k3tool.checkpoint.manifest import MANIFEST_NAME, load_manifest
from k3tool.checkpoint.note import RECLAIMED_NAME, read_note
from k3tool.errors import CheckpointCorrupt
from k3tool.formats.bnb import read_state
from k3tool.gguf.report import earlier_report
from k3tool.proofs import PROOFS_NAME, ProofBook
from k3tool.transform.quantize_report import earlier_rows
from k3tool.transform.record import parse_record

DIGEST = "0" * 64
OTHERS: list[Any] = [None, "7", "", -1, 1.5, 10**39, True, [], [1], {}, {"a": {}}, [[["x"]]]]
SUMS = [4, 1.0, 1.0, 0.0, 0.0]

MANIFEST = {"command": "reshard", "source": "s", "revision": None, "files": {"a": {"size": 1, "sha256": DIGEST}}}
NOTE = {"plan": "p", "dest": "d", "shards": {"a.safetensors": 1}, "complete": False}
LAYOUT = {"k3tool_layout": 1, "form": "ranks", "layout": {"tp": 2, "ep": 1, "pp": 1}, "ranks": 2, "tensors": 1,
          "total_size": 2, "joins": {"r": {"split": "rows", "axis": 0, "stored": 2, "content": 1}}}  # fmt: skip
DONE = {"file": "a", "size": 1, "sha256": DIGEST, "stamp": [1, 2, 3], "note": None}
PROOF = {"name": "a", "size": 1, "mtime_ns": 1, "ctime_ns": 1, "inode": 1, "sha256": DIGEST, "when": 1.0}
ROWS = {"plan": "p", "tensors": [["m", "mxfp4", "nvfp4", *SUMS]]}
GGUF = {"plan": "p", "changes": {"kda": {"changed": 1, "sums": SUMS, "worst": [[0.5, "t"]]}}}
STATE = {"shape": [2, 64], "blocksize": 64, "nested_blocksize": 256, "nested_offset": 0.5}


def altered(value: Any) -> Iterator[Any]:
    """The document with each of OTHERS, and nothing, in each place."""
    yield from OTHERS
    if isinstance(value, dict):
        for key in value:
            yield {name: inner for name, inner in value.items() if name != key}
            yield from ({**value, key: inner} for inner in altered(value[key]))
    elif isinstance(value, list):
        for place in range(len(value)):
            yield value[:place] + value[place + 1 :]
            yield from ([*value[:place], inner, *value[place + 1 :]] for inner in altered(value[place]))


def load_state(folder: Path) -> Any:
    import numpy as np

    return read_state(np.frombuffer((folder / "state").read_bytes(), np.uint8))


def load_layout(folder: Path) -> Any:
    path = folder / "k3tool.json"
    return parse_record(path.read_bytes(), where=str(path))


@pytest.mark.parametrize(
    ("document", "name", "load"),
    [
        (MANIFEST, MANIFEST_NAME, load_manifest),
        (NOTE, RECLAIMED_NAME, read_note),
        (LAYOUT, "k3tool.json", load_layout),
        (STATE, "state", load_state),
    ],
)
def test_a_record_that_is_not_what_was_written_is_refused_by_name(
    document: Any, name: str, load: Callable[[Path], Any], tmp_path: Path
):
    path = tmp_path / name
    path.write_text(json.dumps(document))
    assert load(tmp_path) is not None
    refused = 0
    for other in altered(document):
        path.write_text(json.dumps(other))
        try:
            load(tmp_path)
        except CheckpointCorrupt as error:
            assert (str(path) in error.message or load is load_state) and len(error.message) < 600, error.message
            refused += 1
    assert refused > 15 * len(document) / 2  # some places take several types


@pytest.mark.parametrize(
    ("document", "name", "load"),
    [
        (ROWS, "k3tool-quantization.json", lambda folder: earlier_rows(folder, "p")),
        (GGUF, "k3tool-gguf.json", lambda folder: earlier_report(folder, "p")),
        (PROOF, PROOFS_NAME, lambda folder: ProofBook(folder).proofs),
    ],
)
def test_what_an_earlier_run_measured_or_proved_counts_only_as_it_was_written(
    document: Any, name: str, load: Callable[[Path], Any], tmp_path: Path
):
    path = tmp_path / name
    path.write_text(json.dumps(document))
    assert load(tmp_path)
    passed_over = 0
    for other in altered(document):
        path.write_text(json.dumps(other))
        passed_over += not load(tmp_path)
    assert passed_over > 10


def test_a_line_of_the_ledger_that_is_not_ours_is_work_to_do_again(tmp_path: Path):
    for _ in range(2):
        with Ledger(tmp_path, "id", "reshard x") as ledger:
            assert not ledger.done
            journal = tmp_path / LEDGER_FOLDER / "done.jsonl"
            journal.write_text("\n".join(json.dumps(other) for other in altered(DONE)))


def test_a_job_that_cannot_be_read_is_nobodys_to_clear(tmp_path: Path):
    with Ledger(tmp_path, "id", "reshard x") as ledger:
        (tmp_path / "shard").write_bytes(b"x")
        ledger.record("shard", 1, DIGEST)
    job = tmp_path / LEDGER_FOLDER / "job.json"
    whole = job.read_bytes()
    unread = [b"", b"{", b"[]", b"\xff", b"[" * 100_000, b'{"id": 1}', b'{"id": "id", "facts": [1]}']
    for text in unread:
        job.write_bytes(text)
        with pytest.raises(CheckpointCorrupt, match=r"job\.json") as refused, Ledger(tmp_path, "id", "reshard x"):
            pass
        assert "--overwrite" in refused.value.hint
    job.write_bytes(whole)
    with Ledger(tmp_path, "id", "reshard x") as ledger:
        assert "shard" in ledger.done
    job.write_bytes(unread[0])
    with Ledger(tmp_path, "id", "reshard x", overwrite=True) as ledger:
        assert not ledger.done


def test_names_that_are_no_utf8_and_sums_without_a_bound_come_back(tmp_path: Path):
    name = "\udcff.txt"
    (tmp_path / MANIFEST_NAME).write_text(json.dumps({**MANIFEST, "files": {name: {"size": 1, "sha256": DIGEST}}}))
    found = load_manifest(tmp_path)
    assert found is not None and list(found.files) == [name]
    (tmp_path / MANIFEST_NAME).write_text(json.dumps({**MANIFEST, "source": "\ud800"}))
    with pytest.raises(CheckpointCorrupt, match="half of a surrogate pair"):
        load_manifest(tmp_path)
    row = ["m", "mxfp4", "nvfp4", 4, 1.0, float("inf"), float("inf"), 1.0]
    (tmp_path / "k3tool-quantization.json").write_text(json.dumps({"plan": "p", "tensors": [row]}))
    assert len(earlier_rows(tmp_path, "p")) == 1
