"""What mends a damaged checkpoint: the hint is a command that mends it when pasted, or prose that fits the cause."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from k3tool.checkpoint.manifest import load_manifest
from k3tool.cli import app
from k3tool.standin import StandIn, serve
from k3tool.synthetic import tiny_config, write_checkpoint
from tests.helpers import Ran, copy_checkpoint, k3tool

REPO = "org/mini"
SHARD = "model-00003-of-000011.safetensors"
SECOND = "model-00004-of-000011.safetensors"
INDEX = "model.safetensors.index.json"


@pytest.fixture
def copy(mini: Path, tmp_path: Path) -> Path:
    return copy_checkpoint(mini, tmp_path / "a copy")  # a path that must be quoted


@pytest.fixture(scope="module")
def hub(mini: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandIn]:
    with serve(copy_checkpoint(mini, tmp_path_factory.mktemp("hub") / "repository"), REPO) as stand_in:
        yield stand_in


def hint_of(ran: Ran) -> str:
    return next(line for line in ran.err.splitlines() if line.startswith("hint: "))


def run_hint(capsys: pytest.CaptureFixture[str], hint: str) -> Ran:
    """Paste what follows the program's name, which ends the line."""
    words = shlex.split(hint[hint.index("k3tool ") :])
    return k3tool(capsys, *words[1:])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


MADE: dict[str, Callable[[Path, Path], list[list[object]]]] = {
    "fetched": lambda hub, out: [["fetch", REPO, "--local-dir", out]],
    "fetched in part": lambda hub, out: [["fetch", REPO, "--local-dir", out, "--layers", "0-3"]],
    "text alone": lambda hub, out: [["fetch", REPO, "--local-dir", out, "--text-only"]],
    "grouped": lambda mini, out: [["reshard", mini, out, "--gpus", 2, "--layout", "hf", "--max-shard-size", "300KB"]],
    "ranks": lambda mini, out: [["reshard", mini, out, "--gpus", 2, "--ep", 2]],
    "quantized": lambda mini, out: [["quantize", mini, out, "--experts", "nvfp4"]],
    "gguf": lambda mini, out: [["quantize", mini, out, "--format", "gguf"]],
}


@pytest.mark.parametrize("damage", [flip, Path.unlink])
@pytest.mark.parametrize("kind", MADE)
def test_the_hint_of_verify_mends(kind, damage, mini, hub, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
    out = tmp_path / "the result"
    source = copy_checkpoint(mini, tmp_path / "a source")
    for words in MADE[kind](source, out):
        if "gguf" in words and not (mini / "tiktoken.model").exists():
            write_checkpoint(source := tmp_path / "with tokenizer", tiny_config(num_layers=4), tokenizer=True)
            words[1] = source
        assert k3tool(capsys, *words, "-q").code == 0
    manifest = load_manifest(out)
    assert manifest is not None
    name = max(manifest.files, key=lambda name: manifest.files[name].size)
    damage(out / name)
    ran = k3tool(capsys, "verify", out, "--depth", "bytes")
    assert ran.code in (10, 11)
    mended = run_hint(capsys, hint_of(ran))
    assert mended.code == 0, (hint_of(ran), mended.err)
    assert k3tool(capsys, "verify", out, "--depth", "bytes", "--full").code == 0


RECIPE = 'latent = "fp8-channel"\n[[rule]]\nmatch = "re:.*experts.*"\nscheme = "int4"\ngroup_size = 32\n'
ASKED: dict[str, list[object]] = {
    "ranks": ["reshard", "a source", "the result", "--gpus", 2, "--ep", 2],
    "ranks, small files": ["reshard", "a source", "the result", "--ep", 2, "--max-shard-size", "200KB"],
    "one rank": ["reshard", "a source", "the result", "--gpus", 2, "--ep", 2, "--rank", 1],
    "grouped": ["reshard", "a source", "the result", "--ep", 2, "--layout", "hf"],
    "of the Hub": ["reshard", REPO, "the result", "--gpus", 2, "--ep", 2],
    "recipe": ["quantize", "a source", "the result", "--recipe", "my recipe.toml", "--ep", 2, "--scales", "plain"],
    "gguf": [
        "quantize",
        "a source",
        "the result",
        "--format",
        "gguf",
        "--max-shard-size",
        "1MB",
        "--vocabulary",
        "ids",
    ],
}


@pytest.mark.parametrize("kind", ASKED)
def test_what_wrote_a_damaged_file_writes_it_alone_again(kind, mini, hub, tmp_path, capsys, monkeypatch):
    """The hint is pasted in another folder; what reads as it was written stays as it is, of other ranks too."""
    monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
    monkeypatch.chdir(tmp_path)
    copy_checkpoint(mini, tmp_path / "a source")
    (tmp_path / "my recipe.toml").write_text(RECIPE)
    assert k3tool(capsys, *ASKED[kind], "-q").code == 0
    out = tmp_path / "the result"
    folders = sorted(out.glob("rank-*")) or [out]
    files = {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.suffix in (".safetensors", ".gguf")}
    before = {path: path.read_bytes() for path in files}
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    for folder in (folders[-1], out):
        damaged = next(path for path in files if folder in path.parents)
        flip(damaged)
        ran = k3tool(capsys, "verify", folder, "--depth", "bytes")
        assert ran.code == 11 and damaged.name in ran.err
        mended = run_hint(capsys, hint_of(ran))
        assert mended.code == 0, (hint_of(ran), mended.err)
        assert k3tool(capsys, "verify", folder, "--depth", "bytes", "--full").code == 0
        assert {path: path.read_bytes() for path in files} == before
        touched = [path for path in files if path.stat().st_mtime_ns != files[path]]
        assert damaged in touched and len(touched) <= 2
        files[damaged] = damaged.stat().st_mtime_ns


def test_what_a_folder_was_made_with_and_is_not_here_is_named(mini, tmp_path, capsys):
    source, out, recipe = copy_checkpoint(mini, tmp_path / "k3"), tmp_path / "out", tmp_path / "r.toml"
    recipe.write_text(RECIPE)
    assert k3tool(capsys, "quantize", source, out, "--recipe", recipe, "--ep", 2, "-q").code == 0
    rank = out / "rank-00001-of-00002"
    alone = shutil.copytree(rank, tmp_path / "a node" / rank.name)
    for folder in (rank, alone):
        flip(next(folder.glob("*.safetensors")))
    hint = hint_of(k3tool(capsys, "verify", alone, "--depth", "bytes"))
    assert "from the folder of ranks that this one was copied from" in hint and "k3tool " not in hint
    recipe.unlink()
    hint = hint_of(k3tool(capsys, "verify", rank, "--depth", "bytes"))
    assert f"with --recipe {recipe}, which is not here" in hint
    recipe.write_text(RECIPE)
    shutil.rmtree(source)
    hint = hint_of(k3tool(capsys, "verify", rank, "--depth", "bytes"))
    assert f"from {source}, which is not here" in hint


def test_one_rank_that_is_overwritten_leaves_the_others(mini, tmp_path, capsys):
    out = tmp_path / "out"
    assert k3tool(capsys, "reshard", mini, out, "--gpus", 2, "--ep", 2, "-q").code == 0
    stamps = {path: path.stat().st_mtime_ns for path in out.rglob("*.safetensors")}
    assert k3tool(capsys, "reshard", mini, out, "--gpus", 2, "--ep", 2, "--rank", 0, "--overwrite", "-q").code == 0
    changed = {path.parent.name for path in stamps if path.stat().st_mtime_ns != stamps[path]}
    assert changed == {"rank-00000-of-00002"}
    assert k3tool(capsys, "verify", out, "--depth", "bytes").code == 0


@pytest.mark.parametrize("name", ["config.json", INDEX])
def test_a_fetched_folder_without_its_configuration(name, hub, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
    out = tmp_path / "out"
    assert k3tool(capsys, "fetch", REPO, "--local-dir", out, "-q").code == 0
    (out / name).unlink()
    for command in (["verify", out], ["inspect", out]):
        ran = k3tool(capsys, *command)
        assert ran.code == 10 and f"--include {name} --local-dir {out}" in hint_of(ran)
    assert run_hint(capsys, hint_of(ran)).code == 0
    assert k3tool(capsys, "verify", out, "--depth", "bytes").code == 0


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:%s\nsize 117656\n" % (b"3f" * 32)
HTML = b"<!DOCTYPE html><html><head><title>Sign in to the Hub</title></head><body>...</body></html>"
CONTENTS = {
    "lfs": (LFS, "a Git LFS pointer (to sha256 3f3f3f", "git lfs pull"),
    "page": (HTML, "an HTML page ('Sign in to the Hub')", "from where this folder came from"),
    "json": (b'{"error": "Repository not found"}', "a server's answer ('Repository not found')", "came from"),
    "xml": (
        b"<?xml version='1.0'?><Error><Code>AccessDenied</Code><Message>Request has expired</Message></Error>",
        "an XML answer of a server ('AccessDenied: Request has expired')",
        "came from",
    ),
    "text": (b"Entry not found", "text ('Entry not found')", "came from"),
    "empty": (b"", "no byte", "came from"),
    "zeros": (bytes(100_000), "only zero bytes", "came from"),
    "gzip": (b"\x1f\x8b\x08" + bytes(50) + b"x", "gzip-compressed data", "gzip -d"),
}


@pytest.mark.parametrize("name", [SHARD, "config.json", INDEX])
@pytest.mark.parametrize("content", CONTENTS)
def test_what_stands_in_place_of_a_file_is_said(content, name, copy, capsys):
    data, said, remedy = CONTENTS[content]
    (copy / name).write_bytes(data)
    for command in (["verify", copy], ["inspect", copy]):
        ran = k3tool(capsys, *command)
        assert ran.code == 11 and said in ran.err and name in ran.err, ran.err
        assert remedy in hint_of(ran) and "fetch" not in hint_of(ran)


def test_a_checkout_without_its_content_names_the_command_of_git(copy, capsys):
    (copy / ".git").mkdir()
    (copy / SHARD).write_bytes(LFS)
    assert hint_of(k3tool(capsys, "verify", copy)).endswith(f"git -C '{copy}' lfs pull")


def test_the_cache_of_the_hub_client_is_mended_by_it(mini, tmp_path, capsys):
    snapshot = tmp_path / "models--org--mini" / "snapshots" / ("c" * 40)
    snapshot.parent.mkdir(parents=True)
    copy_checkpoint(mini, snapshot)
    (snapshot / SHARD).unlink()
    hint = hint_of(k3tool(capsys, "verify", snapshot))
    assert f"hf download org/mini {SHARD} --revision {'c' * 40} --cache-dir {tmp_path}" in hint


# -- one verdict for all commands --


def edit_index(folder: Path, change: Callable[[dict[str, str]], object]) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


def rewrite(path: Path, change: Callable[[dict[str, dict[str, object]]], None]) -> None:
    """Change entries of a shard's header that keep their sizes."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


def to_bfloat16(folder: Path) -> None:
    """The router's bias at half its size, as some trainers save it."""
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    name = next(name for name in weight_map if name.endswith("e_score_correction_bias"))
    path = folder / weight_map[name]
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header, body, out = json.loads(data[8 : 8 + length]), data[8 + length :], b""
    for key, entry in sorted(
        ((k, e) for k, e in header.items() if k != "__metadata__"), key=lambda item: item[1]["data_offsets"]
    ):
        first, last = entry["data_offsets"]
        values = body[first:last]
        if key == name:
            entry["dtype"], values = "BF16", b"".join(values[n + 2 : n + 4] for n in range(0, len(values), 4))
        entry["data_offsets"] = [len(out), len(out) + len(values)]
        out += values
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + out)
    index = json.loads((folder / INDEX).read_text())
    index["metadata"].pop("total_size", None)
    (folder / INDEX).write_text(json.dumps(index))


def fuse(folder: Path) -> None:
    def change(weight_map: dict[str, str]) -> None:
        for name in [name for name in weight_map if ".experts." in name]:
            weight_map[re.sub(r"experts\.\d+\..*", "experts.gate_up_proj", name)] = weight_map.pop(name)

    edit_index(folder, change)
    for path in folder.glob("model-*.safetensors"):
        rewrite(path, _fuse_header)


def _fuse_header(header: dict[str, dict[str, object]]) -> None:
    for name in [name for name in header if ".experts." in name]:
        entry = header.pop(name)
        fused = re.sub(r"experts\.\d+\..*", "experts.gate_up_proj", name)
        spans = [*entry["data_offsets"], *header.get(fused, {}).get("data_offsets", [])]  # type: ignore[misc]
        size = max(spans) - min(spans)
        header[fused] = {"dtype": "U8", "shape": [size], "data_offsets": [min(spans), max(spans)]}


def rename(old: str, new: str) -> Callable[[Path], object]:
    return lambda folder: (folder / old).rename(folder / new)


def dtype(old: str, new: str) -> Callable[[dict[str, dict[str, object]]], None]:
    def change(header: dict[str, dict[str, object]]) -> None:
        entry = next(e for k, e in header.items() if k.endswith("gate.weight") and e["dtype"] == old)
        entry["dtype"] = new

    return change


STATES: dict[str, tuple[Callable[[Path], object], str, str]] = {
    # name: (what is done, verdict, word of `verify`)
    "sound": (lambda d: None, "whole", ""),
    "router bias in bfloat16": (to_bfloat16, "whole", ""),
    "a matrix in float16": (lambda d: rewrite(d / SHARD, dtype("BF16", "F16")), "wrong", "expected BF16"),
    "shard absent": (lambda d: (d / SHARD).unlink(), "missing", f"{SHARD} is missing"),
    "shard truncated": (lambda d: (d / SHARD).write_bytes((d / SHARD).read_bytes()[:-9]), "wrong", "is truncated"),
    "pointer": (lambda d: (d / SHARD).write_bytes(LFS), "wrong", "Git LFS"),
    "all renamed": (
        lambda d: [p.rename(d / p.name.replace("-of-000011", "-of-00011")) for p in d.glob("model-0*.safetensors")],
        "missing", "11 .safetensors files that the index does not name"),
    "name in another case": (rename(SHARD, SHARD.upper()), "missing", f"it holds {SHARD.upper()}, in another case"),
    "one folder deeper": (
        lambda d: ((d / "shards").mkdir(), (d / SHARD).rename(d / "shards" / SHARD)), "missing", "its folder shards holds it"),
    "download not finished": (rename(SHARD, SHARD + ".incomplete"), "missing", ".incomplete is the unfinished download"),
    "index lacks a tensor": (
        lambda d: edit_index(d, lambda m: m.pop("language_model.model.norm.weight")), "wrong", "norm.weight is missing"),
    "index names one too many": (
        lambda d: edit_index(d, lambda m: m.update({"language_model.model.x.weight": SHARD})), "wrong", "x.weight"),
    "index of another revision": (
        lambda d: edit_index(d, lambda m: m.update({k: SECOND if v == SHARD else SHARD if v == SECOND else v for k, v in m.items()})),
        "wrong", "but the index places it in"),
    "experts fused": (fuse, "wrong", "stored fused"),
}  # fmt: skip


def verdict(ran: Ran) -> str:
    """The class of what a command said of a checkpoint; `inspect` says it in its document."""
    if ran.code == 0 and ran.json["command"] == "inspect":
        document = ran.json
        if document["missing_files"]:
            return "missing"
        odd = any(document[key] for key in ("missing", "unexpected", "mismatched", "misplaced"))
        return "wrong" if odd else "whole"
    return {0: "whole", 10: "missing", 11: "wrong"}.get(ran.code, f"exit {ran.code}")


@pytest.mark.parametrize("state", STATES)
def test_a_checkpoint_is_right_or_wrong_for_all_commands(state, copy, tmp_path, capsys):
    damage, expected, word = STATES[state]
    damage(copy)
    out = tmp_path / "out"
    commands: dict[str, list[object]] = {
        "verify": ["verify", copy],
        "inspect": ["inspect", copy],
        "plan": ["plan", copy, "--gpus", 1],
        "reshard": ["reshard", copy, out, "--gpus", 2, "--ep", 2, "--dry-run"],
        "quantize": ["quantize", copy, out, "--experts", "nvfp4", "--dry-run"],
        "run": ["run", copy, "--input-ids", "1,5", "--max-new-tokens", 1],
    }
    ran = {name: k3tool(capsys, *words, "--json") for name, words in commands.items()}
    found = {name: verdict(one) for name, one in ran.items()}
    if found["plan"] == "whole":  # it is about room: names and kinds, or the configuration where shards are absent
        found["plan"] = expected
    assert found == dict.fromkeys(commands, expected), {name: one.err for name, one in ran.items()}
    said = json.dumps(ran["verify"].json["problems"])
    assert word in said
    for one in ran.values():
        assert "k3tool fetch" not in one.err  # where it came from is not known: no advice to fetch 1.56 TB


def test_where_the_shards_were_renamed_the_names_are_told(copy, capsys):
    for path in copy.glob("model-0*.safetensors"):
        path.rename(copy / path.name.replace("-of-000011", "-of-00011"))
    ran = k3tool(capsys, "verify", copy)
    assert "hold 734 of the 734 tensors of the absent shards" in ran.err
    assert f"{SHARD.replace('-of-000011', '-of-00011')} holds what it places in" not in ran.err
    assert "model-00001-of-00011.safetensors holds what it places in model-00001-of-000011.safetensors" in hint_of(ran)
    ran = k3tool(capsys, "inspect", copy)
    assert ran.code == 0 and "11 .safetensors files that the index does not name" in ran.out
    assert "and no other" not in ran.out
    for arguments in (["run", copy, "--input-ids", "1"], ["reshard", copy, copy.parent / "out", "--gpus", 1]):
        ran = k3tool(capsys, *arguments)
        assert ran.code == 10 and "it holds 11 .safetensors files that the index does not name" in ran.err
        assert hint_of(ran).endswith(f"verify '{copy}'")


def test_stray_files_are_a_warning_and_twins_a_problem(copy, capsys):
    (copy / "other.safetensors").write_bytes(b"\2\0\0\0\0\0\0\0{}")
    ran = k3tool(capsys, "verify", copy, "--json")
    assert ran.code == 0 and "other.safetensors lie beside" in ran.json["warnings"][0] and "warning: " in ran.err
    shutil.copy(copy / SHARD, copy / "model-00003-of-000011 (1).safetensors")
    ran = k3tool(capsys, "verify", copy, "--json")
    assert ran.code == 11 and "(1).safetensors is not named by the index and holds 100 tensors" in ran.err
    assert hint_of(ran) == "hint: move model-00003-of-000011 (1).safetensors out of the folder"
    assert app.run(["run", str(copy), "--input-ids", "1", "--max-new-tokens", "1", "-q"]) == 0  # reads by the index


def test_inspect_says_whole_only_of_what_is(copy, capsys):
    assert "is named, and no other" in k3tool(capsys, "inspect", copy).out
    edit_index(
        copy, lambda names: names.pop("language_model.model.layers.1.block_sparse_moe.experts.3.w1.weight_packed")
    )
    ran = k3tool(capsys, "inspect", copy)
    assert ran.code == 0 and "and no other" not in ran.out and "missing: 1 tensor, such as" in ran.out
    document = k3tool(capsys, "inspect", copy, "--json").json
    assert document["misplaced"] == document["missing"] != []
