"""Reading one tensor or slice at a time, and files that appear whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from k3tool.checkpoint.index import INDEX_NAME
from k3tool.checkpoint.ledger import LEDGER_FOLDER, Ledger, job_id
from k3tool.checkpoint.manifest import FileRecord, Manifest, load_manifest
from k3tool.checkpoint.reader import Checkpoint
from k3tool.checkpoint.source import open_source
from k3tool.checkpoint.writer import AtomicFile, ShardWriter, write_atomic
from k3tool.errors import CapacityError, CheckpointCorrupt, CheckpointMissing, PartlyDone, UsageError
from tests.helpers import copy_checkpoint


def test_every_tensor_equals_the_library(mini: Path):
    checkpoint = Checkpoint.open(mini)
    for shard in checkpoint.shards:
        with safe_open(mini / shard, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                expected = opened.get_tensor(name).contiguous().flatten().view(dtype=__import__("torch").uint8)
                assert checkpoint.read(name) == expected.numpy().tobytes()


def test_rows(mini: Path):
    checkpoint = Checkpoint.open(mini)
    name = "language_model.model.embed_tokens.weight"
    whole = checkpoint.read(name)
    assert checkpoint.read_rows(name, 10, 13) == whole[10 * 128 : 13 * 128]
    assert checkpoint.read_rows(name, 0, 256) == whole and checkpoint.read_rows(name, 5, 5) == b""
    with pytest.raises(ValueError, match="outside"):
        checkpoint.read_rows(name, 250, 257)


def test_absent_things_are_named(mini: Path, tmp_path: Path):
    with pytest.raises(CheckpointMissing, match="does not exist"):
        Checkpoint.open(tmp_path / "nowhere")
    with pytest.raises(CheckpointMissing, match=r"holds no config\.json"):
        _ = Checkpoint.open(tmp_path).config
    with pytest.raises(CheckpointMissing, match="holds no tensor x"):
        Checkpoint.open(mini).read("x")
    copy = copy_checkpoint(mini, tmp_path / "copy")
    (copy / "model-00002-of-000011.safetensors").unlink()
    with pytest.raises(CheckpointMissing, match="lacks model-00002-of-000011"):
        _ = Checkpoint.open(copy).located


def test_index_naming_an_absent_tensor(mini: Path, tmp_path: Path):
    copy = copy_checkpoint(mini, tmp_path / "copy")
    index = json.loads((copy / INDEX_NAME).read_text())
    index["weight_map"]["language_model.model.extra.weight"] = "model-00009-of-000011.safetensors"
    (copy / INDEX_NAME).write_text(json.dumps(index))
    checkpoint = Checkpoint.open(copy)
    with pytest.raises(CheckpointCorrupt, match=r"does not hold tensor language_model\.model\.extra\.weight"):
        _ = checkpoint.located
    with pytest.raises(CheckpointCorrupt, match="does not hold tensor"):
        checkpoint.locate("language_model.model.extra.weight")


def test_file_that_shrinks_while_reading(mini: Path, tmp_path: Path):
    copy = copy_checkpoint(mini, tmp_path / "copy")
    checkpoint = Checkpoint.open(copy)
    place = checkpoint.locate("language_model.lm_head.weight")
    os.truncate(copy / place.shard, place.offset + 100)
    with pytest.raises(CheckpointCorrupt, match="is truncated: it ends at"):
        checkpoint.read("language_model.lm_head.weight")


@pytest.mark.parametrize("text", ["org/../name", "org", "a/b/c", "hf://x", "org/name@../x", "org/na me"])
def test_neither_folder_nor_repository(text: str):
    with pytest.raises((CheckpointMissing, UsageError)):
        open_source(text)


def test_atomic_file(tmp_path: Path):
    path = tmp_path / "file"
    assert write_atomic(path, b"one") == hashlib.sha256(b"one").hexdigest()
    with pytest.raises(RuntimeError), AtomicFile(path) as file:
        file.write(b"two")
        raise RuntimeError
    assert path.read_bytes() == b"one" and [p.name for p in tmp_path.iterdir()] == ["file"]


def test_shard_writer_refuses_a_wrong_length(tmp_path: Path):
    with (
        pytest.raises(ValueError, match="declared"),
        ShardWriter(tmp_path / "x.safetensors", [("a", "U8", (4,))]) as writer,
    ):
        writer.append(b"abc")
    assert list(tmp_path.iterdir()) == []


def test_killed_writer_leaves_no_final_name(tmp_path: Path):
    code = (
        "import sys, time; from pathlib import Path; from k3tool.checkpoint.writer import AtomicFile\n"
        "with AtomicFile(Path(sys.argv[1])) as file:\n"
        "    file.write(b'x' * 1000); print('ready', flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "file")], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"ready\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert not (tmp_path / "file").exists()


def test_full_disk(tmp_path: Path):
    import resource

    code = (
        "import resource, signal, sys; from pathlib import Path; from k3tool.checkpoint.writer import AtomicFile\n"
        "from k3tool.errors import CapacityError\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "try:\n"
        "    with AtomicFile(Path(sys.argv[1])) as file:\n"
        "        file.write(b'x' * 2000)\n"
        "except CapacityError as error:\n"
        "    print(error.message); sys.exit(error.exit_code)"
    )
    assert resource.RLIMIT_FSIZE is not None
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "file")], capture_output=True, text=True)
    assert done.returncode == CapacityError.exit_code == 12 and "no space left while writing" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_manifest(tmp_path: Path):
    assert load_manifest(tmp_path) is None
    Manifest("fetch", "org/name", "abc", {"x": FileRecord(3, "0" * 64)}, {"note": 1}).write(tmp_path)
    found = load_manifest(tmp_path)
    assert found is not None and found.files == {"x": FileRecord(3, "0" * 64)}
    assert (found.command, found.source, found.revision, found.extra) == ("fetch", "org/name", "abc", {"note": 1})
    (tmp_path / "k3tool-manifest.json").write_text(
        '{"command": "x", "source": "y", "files": {"a": {"size": 1, "sha256": "z"}}}'
    )
    with pytest.raises(CheckpointCorrupt, match="not a manifest of k3tool"):
        load_manifest(tmp_path)


def test_ledger_continues_and_refuses(tmp_path: Path):
    one, two = job_id({"a": 1}), job_id({"a": 2})
    with Ledger(tmp_path, one, "reshard a") as ledger:
        write_atomic(tmp_path / "x", b"abc")
        ledger.record("x", 3, "0" * 64)
        ledger.record("gone", 3, "0" * 64)
        with pytest.raises(PartlyDone, match=r"in use by process \d+ on .*: reshard a"), Ledger(tmp_path, one, "again"):
            pass
    with open(tmp_path / LEDGER_FOLDER / "done.jsonl", "ab") as journal:
        journal.write(b'{"file": "torn')
    with (
        pytest.raises(UsageError, match="unfinished work of another command: reshard a"),
        Ledger(tmp_path, two, "reshard b"),
    ):
        pass
    with Ledger(tmp_path, one, "reshard a") as ledger:
        assert ledger.done == {"x": FileRecord(3, "0" * 64)}
        ledger.complete()
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_numpy_view_of_a_tensor(mini: Path):
    values = np.frombuffer(Checkpoint.open(mini).read("language_model.model.layers.0.self_attn.A_log"), "<f4")
    assert values.shape == (32,) and (values[3:] == 0).all() and (values[:3] != 0).all()
