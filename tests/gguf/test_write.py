"""From a checkpoint to GGUF files: values, splits, resuming, memory, refusals, the command line."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from k3tool import execute
from k3tool.checkpoint.manifest import load_manifest
from k3tool.checkpoint.reader import Checkpoint
from k3tool.errors import CapacityError, CheckFailed, CheckpointCorrupt, UnsupportedError, UsageError
from k3tool.gguf import write_gguf
from k3tool.gguf.container import BF16
from k3tool.gguf.write import GgufOptions, _file_stem, model_name, prepare
from k3tool.hub import HubSource
from k3tool.parts import Part
from k3tool.standin import serve
from k3tool.synthetic import tiny_config, write_checkpoint
from tests.helpers import copy_checkpoint, k3tool, k3tool_process

from .reader import Read

CODES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
SPLIT = 300_000


def files_of(folder: Path) -> dict[str, str]:
    """GGUF files by digest."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.glob("*.gguf"))}


def read_all(folder: Path) -> dict[str, Any]:
    """The tensors of every file of a folder."""
    return {name: tensor for path in sorted(folder.glob("*.gguf")) for name, tensor in Read(path).tensors.items()}


def values(tensor: Any) -> np.ndarray:
    """float32 values, decoded from the format's description."""
    kind, shape, raw = tensor
    if kind == "F32":
        return raw.view("<f4").reshape(shape)
    if kind == "F16":
        return raw.view("<f2").astype(np.float32).reshape(shape)
    if kind == "BF16":
        return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32).reshape(shape)
    if kind == "Q8_0":
        blocks = raw.reshape(-1, 34)
        step = np.ascontiguousarray(blocks[:, :2]).view("<f2").astype(np.float32)
        return (np.ascontiguousarray(blocks[:, 2:]).view(np.int8) * step).reshape(shape)
    blocks = raw.reshape(-1, 17)
    scale = np.ldexp(np.float32(1), blocks[:, :1].astype(np.int32) - 127)
    return (np.concatenate([CODES[blocks[:, 1:] & 15], CODES[blocks[:, 1:] >> 4]], axis=1) * scale).reshape(shape)


@pytest.fixture(scope="module")
def source(mini) -> dict[str, torch.Tensor]:
    weights: dict[str, torch.Tensor] = {}
    for path in mini.glob("model-*.safetensors"):
        weights.update(load_file(path))
    return {name.removeprefix("language_model."): tensor for name, tensor in weights.items()}


def expert(source: dict[str, torch.Tensor], name: str) -> np.ndarray:
    packed, scale = source[f"{name}.weight_packed"].numpy(), source[f"{name}.weight_scale"].numpy()
    codes = np.stack([CODES[packed & 15], CODES[packed >> 4]], axis=-1).reshape(packed.shape[0], -1)
    return codes * np.repeat(np.ldexp(np.float32(1), scale.astype(np.int32) - 127), 32, axis=1)


@pytest.fixture(scope="module")
def written(mini, tmp_path_factory) -> dict[str, dict[str, Any]]:
    """Tensors under every trunk type, and with every type of experts."""
    made = {}
    for trunk, experts in (("bf16", "keep"), ("f32", "f32"), ("f16", "bf16"), ("q8_0", "q8_0"), ("bf16", "f16")):
        folder = tmp_path_factory.mktemp("gguf")
        write_gguf(mini, folder, trunk=trunk, experts=experts, vocabulary="ids")
        made[f"{trunk} {experts}"] = read_all(folder)
    return made


def expected(source: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """Every tensor of k3-mini-8 in float32, composed anew: 8 layers, MLA at 3 and 7, 12 experts."""
    w = {name: tensor.float().numpy() for name, tensor in source.items() if tensor.is_floating_point()}
    made: dict[str, np.ndarray] = {
        "token_embd.weight": w["model.embed_tokens.weight"],
        "output.weight": w["lm_head.weight"],
        "output_norm.weight": w["model.norm.weight"],
        "output_res_score.weight": w["model.output_attn_res_norm.weight"] * w["model.output_attn_res_proj.weight"][0],
    }
    for layer in range(8):
        b, p = f"blk.{layer}.", f"model.layers.{layer}."
        a, m = p + "self_attn.", p + "block_sparse_moe."
        made[f"{b}attn_norm.weight"] = w[f"{p}input_layernorm.weight"]
        made[f"{b}ffn_norm.weight"] = w[f"{p}post_attention_layernorm.weight"]
        made[f"{b}attn_output.weight"] = w[f"{a}o_proj.weight"]
        for name, site in (("attn", "self_attention"), ("ffn", "mlp")):
            made[f"{b}{name}_res_score.weight"] = w[f"{p}{site}_res_norm.weight"] * w[f"{p}{site}_res_proj.weight"][0]
        if layer in (3, 7):
            heads, nope, value = 3, 16, 16
            kv_b = w[f"{a}kv_b_proj.weight"].reshape(heads, nope + value, -1)
            made |= {
                f"{b}attn_q_a.weight": w[f"{a}q_a_proj.weight"],
                f"{b}attn_q_a_norm.weight": w[f"{a}q_a_layernorm.weight"],
                f"{b}attn_q_b.weight": w[f"{a}q_b_proj.weight"],
                f"{b}attn_kv_a_mqa.weight": w[f"{a}kv_a_proj_with_mqa.weight"],
                f"{b}attn_kv_a_norm.weight": w[f"{a}kv_a_layernorm.weight"],
                f"{b}attn_k_b.weight": kv_b[:, :nope].transpose(0, 2, 1),
                f"{b}attn_v_b.weight": kv_b[:, nope:],
                f"{b}attn_gate.weight": w[f"{a}g_proj.weight"],
            }
        else:
            for stream in "qkv":
                made[f"{b}attn_{stream}.weight"] = w[f"{a}{stream}_proj.weight"]
                made[f"{b}ssm_conv1d_{stream}.weight"] = w[f"{a}{stream}_conv1d.weight"].reshape(1, 96, 1, 4)
            rate = np.exp(w[f"{a}A_log"][:3].astype(np.float64))
            made |= {
                f"{b}ssm_f_a.weight": w[f"{a}f_a_proj.weight"],
                f"{b}ssm_f_b.weight": w[f"{a}f_b_proj.weight"],
                f"{b}ssm_beta.weight": w[f"{a}b_proj.weight"],
                f"{b}ssm_g.weight": w[f"{a}g_proj.weight"],
                f"{b}ssm_a": (-rate).astype(np.float32),
                f"{b}ssm_dt.bias": w[f"{a}dt_bias"],
                f"{b}ssm_norm.weight": w[f"{a}o_norm.weight"],
            }
        if layer == 0:
            made |= {f"{b}ffn_{role}.weight": w[f"{p}mlp.{role}_proj.weight"] for role in ("gate", "up", "down")}
            continue
        made |= {f"{b}ffn_{r}_shexp.weight": w[f"{m}shared_experts.{r}_proj.weight"] for r in ("gate", "up", "down")}
        made |= {
            f"{b}ffn_gate_inp.weight": w[f"{m}gate.weight"],
            f"{b}exp_probs_b.bias": w[f"{m}gate.e_score_correction_bias"],
            f"{b}ffn_routed_down.weight": w[f"{m}routed_expert_down_proj.weight"],
            f"{b}ffn_routed_up.weight": w[f"{m}routed_expert_up_proj.weight"],
            f"{b}ffn_routed_norm.weight": w[f"{m}routed_expert_norm.weight"],
        }
        for role, matrix in (("gate", "w1"), ("down", "w2"), ("up", "w3")):
            stack = [expert(source, f"{m}experts.{e}.{matrix}") for e in range(12)]
            made[f"{b}ffn_{role}_exps.weight"] = np.stack(stack)
    return made


def test_every_value_of_every_tensor(source, written):
    """MXFP4 experts and a BF16 or F32 trunk hold the source's values bit for bit; names and shapes are exactly those."""
    wanted = expected(source)
    for tensors in (written["bf16 keep"], written["f32 f32"]):
        assert set(tensors) == set(wanted)
        for name, tensor in tensors.items():
            assert tensor.shape == wanted[name].shape, name
            assert np.array_equal(values(tensor), wanted[name]), name
    assert {t.kind for name, t in written["bf16 keep"].items() if "_exps" in name} == {"MXFP4"}
    assert {t.kind for t in written["f32 f32"].values()} == {"F32"}


def test_lossy_types_are_the_nearest_values(source, written):
    wanted = expected(source)
    halves = {name: value.astype(np.float16).astype(np.float32) for name, value in wanted.items()}
    for name, tensor in written["f16 bf16"].items():
        assert np.array_equal(values(tensor), halves[name] if tensor.kind == "F16" else wanted[name]), name
    for name, tensor in written["q8_0 q8_0"].items():
        groups = wanted[name].reshape(-1, 32) if tensor.kind == "Q8_0" else np.zeros((1, 32), np.float32)
        step = np.abs(groups).max(axis=1, keepdims=True) / np.float32(127)
        error = np.abs(values(tensor).reshape(groups.shape) - groups) if tensor.kind == "Q8_0" else np.zeros(1)
        # half a step, and what rounding the step to float16 moves the largest code by
        assert (error <= step * (0.5 + 127 * 2.0**-11) + 1e-12).all(), name
    assert {t.kind for name, t in written["bf16 f16"].items() if "_exps" in name} == {"F16"}


def test_the_code_bytes_are_moved_not_changed(source, written):
    tensor = written["bf16 keep"]["blk.5.ffn_up_exps.weight"]
    blocks = tensor.raw.reshape(12, 32, 1, 17)
    for e in range(12):
        name = f"model.layers.5.block_sparse_moe.experts.{e}.w3"
        scale, packed = source[f"{name}.weight_scale"].numpy(), source[f"{name}.weight_packed"].numpy()
        assert np.array_equal(blocks[e, :, :, 0], scale)
        codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(32, 32)
        assert np.array_equal(blocks[e, :, 0, 1:] & 15, codes[:, :16])
        assert np.array_equal(blocks[e, :, 0, 1:] >> 4, codes[:, 16:])


# Files


def test_split_files_hold_the_same_tensors(mini, tmp_path, written):
    result = write_gguf(mini, tmp_path / "x", max_shard_size=SPLIT, vocabulary="ids")
    names = [file["name"] for file in result.as_json()["files"]]
    assert names == [f"k3-mini-8-MXFP4-BF16-{number:05d}-of-00004.gguf" for number in range(1, 5)]
    assert sorted(path.name for path in (tmp_path / "x").glob("*.gguf")) == names
    parts = [Read(tmp_path / "x" / name) for name in names]
    total = sum(len(part.tensors) for part in parts)
    for number, part in enumerate(parts):
        split = {name: value for name, value in part.keys.items() if name.startswith("split.")}
        assert split == {"split.no": number, "split.count": 4, "split.tensors.count": total}
        assert [part.types[name][0] for name in split] == [2, 2, 5]
        assert number == 0 or set(part.keys) == set(split)
        assert sum(len(t.raw) for t in part.tensors.values()) <= SPLIT
    assert parts[0].keys["general.architecture"] == "kimi-k3" and len(parts[0].keys["tokenizer.ggml.tokens"]) == 256
    whole = written["bf16 keep"]
    together = read_all(tmp_path / "x")
    assert list(together) == list(whole)
    assert all(np.array_equal(together[name].raw, whole[name].raw) for name in whole)


def test_one_file_has_no_split_keys(mini, tmp_path):
    write_gguf(mini, tmp_path / "x", name="Kimi K3/tiny", vocabulary="none")
    read = Read(next((tmp_path / "x").glob("Kimi-K3-tiny-*-MXFP4-BF16.gguf")))
    assert not any(name.startswith("split.") for name in read.keys)
    assert read.keys["general.name"] == "Kimi K3/tiny" and read.keys["tokenizer.ggml.model"] == "none"
    assert read.keys["kimi-k3.vocab_size"] == 256 and "tokenizer.ggml.tokens" not in read.keys


def test_a_source_with_a_tokenizer(tmp_path):
    write_checkpoint(tmp_path / "source", tiny_config(num_layers=4, vocab_size=600), tokenizer=True)
    (tmp_path / "source" / "LICENSE").write_text("the licence")
    result = write_gguf(tmp_path / "source", tmp_path / "x")
    read = Read(next((tmp_path / "x").glob("*.gguf")))
    assert len(read.keys["tokenizer.ggml.tokens"]) == 600 and read.keys["tokenizer.ggml.eos_token_id"] == 346
    assert "<|end_of_msg|>" in read.keys["tokenizer.chat_template"]
    assert (tmp_path / "x" / "LICENSE").read_text() == "the licence"
    assert not result.prepared.warnings


def test_names_of_models(tmp_path, monkeypatch):
    (tmp_path / "模型 A").mkdir()
    monkeypatch.chdir(tmp_path / "模型 A")
    assert model_name(".") == "模型 A"
    stems = [_file_stem(name, BF16, GgufOptions()) for name in ("模型", "Kimi-K3", "Kimi K3", "Kimi+K3", "!!!", "???")]
    assert stems[:2] == ["模型-BF16", "Kimi-K3-BF16"] and len(set(stems)) == 6
    assert all(re.fullmatch(r"[\w.+-]+", stem) for stem in stems)
    assert len(_file_stem("模" * 300, BF16, GgufOptions()).encode()) < 200
    assert model_name("/data/Kimi-K3/") == "Kimi-K3" and model_name("moonshotai/Kimi-K3@main") == "Kimi-K3"


# Carrying it out


def test_the_result_in_json(mini, tmp_path):
    first = write_gguf(mini, tmp_path / "x", trunk="q8_0", verify=True).as_json()
    assert first["bytes_in"] > 1_000_000 and first["bytes_out"] == sum(f["bytes"] for f in first["files"])
    assert first["components"]["routed_experts"] == {
        "scheme": "mxfp4", "tensors": 252, "exact_tensors": 252, "relative_error": 0.0, "max_error": 0.0, "worst": [],
        "folded": 0, "bytes_by_type": {"mxfp4": 252 * 32 * 17},
    }  # fmt: skip
    kda = first["components"]["kda"]
    assert kda["scheme"] == "q8_0" and 0.004 < kda["relative_error"] < 0.007 and kda["exact_tensors"] < kda["tensors"]
    assert len(kda["worst"]) == 8 and all("self_attn" in name for name in kda["worst"])
    assert first["components"]["attn_res"]["folded"] == 17
    assert first["complete"] and first["files_kept"] == 0 and first["seconds"] >= 0
    # everything is there already: nothing is done again, and what was measured is still known
    again = write_gguf(mini, tmp_path / "x", trunk="q8_0").as_json()
    assert again["files_kept"] == 1 and again["bytes_written"] == 0 and again["components"] == first["components"]


def test_digests_are_recorded(mini, tmp_path):
    write_gguf(mini, tmp_path / "x", max_shard_size=SPLIT)
    manifest = load_manifest(tmp_path / "x")
    assert manifest is not None and manifest.command.startswith("quantize ") and "--format gguf" in manifest.command
    assert {name: r.sha256 for name, r in manifest.files.items() if name.endswith(".gguf")} == files_of(tmp_path / "x")
    assert not (tmp_path / "x" / ".k3tool").exists()


def test_read_back_finds_a_changed_byte(mini, tmp_path, monkeypatch):
    write_gguf(mini, tmp_path / "x")
    path = next((tmp_path / "x").glob("*.gguf"))
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    stamp = path.stat()
    path.write_bytes(data)
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    report = write_gguf(mini, tmp_path / "x", verify=True).report
    assert report.bytes_written == path.stat().st_size  # it was written again
    written = execute.write_small

    def spoiled(where: Path, content: Any) -> Any:
        if where.name == "k3tool-gguf.json":
            path.write_bytes(data)
        return written(where, content)

    monkeypatch.setattr(execute, "write_small", spoiled)
    with pytest.raises(CheckFailed, match=f"{path.name} differs from what was written"):
        write_gguf(mini, tmp_path / "x", verify=True)


def test_a_dry_run_writes_nothing(mini, tmp_path):
    document = write_gguf(mini, tmp_path / "x", max_shard_size=SPLIT, dry_run=True).as_json()
    assert not (tmp_path / "x").exists()
    assert [file["tensors"] for file in document["files"]] == [51, 69, 65, 33] and document["dry_run"]
    written = write_gguf(mini, tmp_path / "x", max_shard_size=SPLIT).as_json()
    assert written["plan"] == document["plan"] and written["files"] == document["files"]
    assert [f["bytes"] for f in document["files"]] == [
        p.stat().st_size for p in sorted((tmp_path / "x").glob("*.gguf"))
    ]


def test_another_command_on_the_same_folder_is_refused(mini, tmp_path):
    write_gguf(mini, tmp_path / "x")
    with pytest.raises(UsageError, match="already holds something else"):
        write_gguf(mini, tmp_path / "x", trunk="f16")
    write_gguf(mini, tmp_path / "x", trunk="f16", overwrite=True)
    assert list(files_of(tmp_path / "x")) == ["k3-mini-8-MXFP4-F16.gguf"]


@pytest.mark.parametrize("changed", ["vocabulary", "name", "trunk", "max_shard_size"])
def test_what_changes_the_result_changes_the_plan(mini, changed):
    one = prepare(mini, GgufOptions())
    options = {"vocabulary": "ids", "name": "other", "trunk": "f16", "max_shard_size": SPLIT}
    field = "max_file_bytes" if changed == "max_shard_size" else changed
    assert prepare(mini, GgufOptions(**{field: options[changed]})).plan.id != one.plan.id
    assert prepare(mini, GgufOptions()).plan.id == one.plan.id


def test_killed_at_any_moment_it_resumes_to_the_same_bytes(mini, tmp_path):
    reference = files_of_run(mini, tmp_path / "whole")
    arguments = ["quantize", mini, tmp_path / "x", "--format", "gguf", "--max-shard-size", SPLIT, "--vocabulary", "ids"]
    killed = 0
    for delay in (0.0, 0.1, 0.05):
        process = subprocess.Popen(
            [sys.executable, "-c", SLOW, *map(str, arguments), "--max-workers", "1"],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        assert process.stdout is not None
        process.stdout.readline()  # the first tensor is being written
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        killed += process.returncode == -signal.SIGKILL
        for path in (tmp_path / "x").glob("*.gguf"):  # a final name never holds partial data
            assert reference[path.name] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert killed == 3
    done = k3tool_process(*arguments)
    assert done.code == 0, done.err
    assert files_of(tmp_path / "x") == reference


SLOW = """
import sys, time
from k3tool.checkpoint import writer
write = writer.AtomicFile.write
said = []
def slow(self, data):
    if not said:
        said.append(print("writing", flush=True))
    time.sleep(0.0005)
    write(self, data)
writer.AtomicFile.write = slow
from k3tool.cli import app
app.main(sys.argv[1:])
"""


def files_of_run(source: Path, folder: Path) -> dict[str, str]:
    write_gguf(source, folder, max_shard_size=SPLIT, vocabulary="ids")
    return files_of(folder)


def test_parts_make_the_same_files(mini, tmp_path):
    reference = files_of_run(mini, tmp_path / "whole")
    for number in range(3):
        done = write_gguf(mini, tmp_path / "x", max_shard_size=SPLIT, vocabulary="ids", part=Part(number, 3)).as_json()
        assert done["complete"] == (number == 2)
    assert files_of(tmp_path / "x") == reference


MEASURE = """
import sys
import numpy as np
from k3tool.gguf import compiled, write_gguf
from k3tool.memory import peak_bytes
compiled.repack(np.zeros((1, 16), np.uint8), np.zeros(1, np.uint8), np.zeros((1, 17), np.uint8))  # compiled before
write_gguf(sys.argv[2], sys.argv[3], max_workers=1)
before = peak_bytes()
write_gguf(sys.argv[1], sys.argv[4], max_workers=1)
print(peak_bytes() - before)
"""


def test_memory_does_not_grow_with_the_stack_of_experts(mini, tmp_path):
    """A GGUF tensor of 98 MB, made of experts of 1.5 MB each: what is held more than for a tiny model is one expert."""
    config = tiny_config(
        num_layers=2, vocab_size=512, num_experts=64, experts_per_token=4, moe_intermediate_size=1024,
        latent_size=2816, vision=False,
    )  # fmt: skip
    write_checkpoint(tmp_path / "source", config)
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, tmp_path / "source", mini, tmp_path / "tiny", tmp_path / "x"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert max(t.raw.size for t in read_all(tmp_path / "x").values()) > 95_000_000
    assert int(done.stdout) < 20_000_000


def test_too_little_memory_is_found_before_writing(mini, tmp_path):
    with pytest.raises(CapacityError, match="--max-memory"):
        write_gguf(mini, tmp_path / "x", max_memory=10_000_000)
    assert not (tmp_path / "x").exists()


# Bad input


def edit_tensor(folder: Path, name: str, at: int, byte: int) -> None:
    """Change one byte of one tensor."""
    from k3tool.checkpoint.reader import Checkpoint

    place = Checkpoint.open(folder).locate(name)
    with open(folder / place.shard, "r+b") as file:
        file.seek(place.offset + at)
        file.write(bytes([byte]))


def test_a_nan_scale_stops_the_job_by_name(mini, tmp_path):
    folder = copy_checkpoint(mini, tmp_path / "source")
    name = "language_model.model.layers.4.block_sparse_moe.experts.3.w2"
    edit_tensor(folder, f"{name}.weight_scale", 5, 255)
    for experts in ("keep", "bf16"):
        with pytest.raises(CheckpointCorrupt, match=f"{name}: scale 5 is the byte 255"):
            write_gguf(folder, tmp_path / experts, experts=experts)
        assert not list((tmp_path / experts).glob("*.gguf"))


def test_exact_stops_before_anything_has_its_name(mini, tmp_path):
    write_gguf(mini, tmp_path / "fine", exact=True)
    with pytest.raises(CheckFailed, match=r"embed_tokens\.weight: BF16 to Q8_0 changes values"):
        write_gguf(mini, tmp_path / "x", trunk="q8_0", exact=True)
    assert not list((tmp_path / "x").glob("*.gguf"))


@pytest.mark.parametrize(
    ("options", "message"),
    [({"trunk": "mxfp4"}, "trunk type 'mxfp4'"), ({"experts": "nvfp4"}, "expert type 'nvfp4'"),
     ({"vocabulary": "all"}, "vocabulary 'all'")],
)  # fmt: skip
def test_unknown_types_are_refused(mini, tmp_path, options, message):
    with pytest.raises(UsageError, match=f"GGUF knows no {message}"):
        write_gguf(mini, tmp_path / "x", **options)


def test_a_flat_model_is_refused(tmp_path):
    document = tiny_config(num_layers=4, vocab_size=512, vision=False)["text_config"]
    write_checkpoint(tmp_path / "source", document)
    with pytest.raises(UnsupportedError, match="is not kimi_k3"):
        write_gguf(tmp_path / "source", tmp_path / "x")


def test_a_source_cut_for_ranks_is_refused_with_the_way_out(mini, tmp_path, capsys):
    assert k3tool(capsys, "reshard", mini, tmp_path / "ranks", "--gpus", 2, "--ep", 2).code == 0
    for folder in (tmp_path / "ranks", tmp_path / "ranks" / "rank-00000-of-00002"):
        ran = k3tool(capsys, "quantize", folder, tmp_path / "x", "--format", "gguf")
        assert ran.code == 2 and "is cut for ranks" in ran.err
        words = shlex.split(ran.err.split("hint: join it first: ")[1])
        assert words[words.index("reshard") :][1:3] == [str(tmp_path / "ranks"), str(tmp_path / "ranks-joined")]
    assert k3tool(capsys, *words[words.index("reshard") :]).code == 0
    assert k3tool(capsys, "quantize", tmp_path / "ranks-joined", tmp_path / "x", "--format", "gguf").code == 0


def test_what_gguf_does_not_take_is_decoded_by_the_hinted_command(mini, tmp_path, capsys):
    assert k3tool(capsys, "quantize", mini, tmp_path / "q", "--experts", "nvfp4", "--latent", "int8").code == 0
    refused = k3tool(capsys, "quantize", tmp_path / "q", tmp_path / "x", "--format", "gguf")
    assert refused.code == 14 and "routed_expert_down_proj is stored as int8: GGUF takes BF16" in refused.err
    words = shlex.split(refused.err.split("hint: decode it first: ")[1])
    assert words[-4:] == ["--experts", "bf16", "--latent", "bf16"]
    assert k3tool(capsys, *words[words.index("quantize") :]).code == 0
    assert k3tool(capsys, "quantize", tmp_path / "q-bf16", tmp_path / "x", "--format", "gguf").code == 0


@pytest.mark.parametrize("option", ["--experts", "--trunk"])
def test_exactness_is_refused_with_the_option_that_keeps_it(mini, tmp_path, capsys, option):
    ran = k3tool(capsys, "quantize", mini, tmp_path / "x", "--format", "gguf", option, "q8_0", "--exact")
    assert ran.code == 1 and f"hint: choose {option} bf16, or leave --exact out" in ran.err


# The command line


def test_the_command_in_all_its_forms(mini, tmp_path, capsys):
    line = ["quantize", mini, tmp_path / "x", "--format", "gguf", "--trunk", "q8_0", "--max-shard-size", "300kB"]
    dry = k3tool(capsys, *line, "--dry-run")
    assert dry.code == 0 and "-00003-of-00003.gguf" in dry.out and not (tmp_path / "x").exists()
    ran = k3tool(capsys, *line, "--json", "--verify")
    assert ran.code == 0 and ran.json["ok"] and ran.json["components"]["mla"]["scheme"] == "q8_0"
    assert ran.json["format"] == "gguf" and len(ran.json["files"]) == 3
    human = k3tool(capsys, *line)
    assert human.code == 0 and "routed_experts" in human.out and "3 files kept" in human.out
    assert "has no tokenizer" in human.err and "stay BF16" in human.err
    assert k3tool(capsys, *line, "-q").out.strip() == str(tmp_path / "x")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--trunk", "q8_0"], "--trunk does not go with --format safetensors"),
        (["--format", "gguf", "--scales", "search"], "--scales does not go with --format gguf"),
        (["--format", "gguf", "--latent", "int8"], "--latent does not go with --format gguf"),
        (["--format", "gguf", "--gpus", "2"], "--gpus does not go with --format gguf"),
        (["--format", "gguf", "--experts", "int4"], "GGUF knows no expert type 'int4'"),
        (["--format", "bin"], "unknown format 'bin'"),
    ],
)
def test_options_that_contradict(mini, tmp_path, capsys, options, message):
    ran = k3tool(capsys, "quantize", mini, tmp_path / "x", *options, "--json")
    assert ran.code == 2 and message in ran.json["error"]["message"]
    assert json.loads(ran.out)["error"]["code"] == 2 and not (tmp_path / "x").exists()


def test_verify_compares_with_the_manifest(mini, tmp_path, capsys):
    write_gguf(mini, tmp_path / "x", max_shard_size=SPLIT)
    names = list(files_of(tmp_path / "x"))
    for depth in ("names", "headers", "bytes"):
        ran = k3tool(capsys, "verify", tmp_path / "x", "--depth", depth, "--json")
        assert ran.code == 0 and {"ok"} == {file["status"] for file in ran.json["files"]}
        assert set(names) < {file["name"] for file in ran.json["files"]}
    path = tmp_path / "x" / names[1]
    data = bytearray(path.read_bytes())
    data[1000] ^= 4
    path.write_bytes(data)
    assert k3tool(capsys, "verify", tmp_path / "x").code == 0  # found by its bytes alone
    ran = k3tool(capsys, "verify", tmp_path / "x", "--depth", "bytes")
    assert (
        ran.code == 11
        and f"{names[1]}: sha256 differs" in ran.err
        and "hint: write it again: " in ran.err
        and " quantize " in ran.err
    )
    path.write_bytes(data[:-32])
    assert k3tool(capsys, "verify", tmp_path / "x").code == 11
    path.unlink()
    ran = k3tool(capsys, "verify", tmp_path / "x", "--depth", "names")
    assert ran.code == 10 and f"{names[1]} is missing" in ran.err


def test_a_repository_gives_the_same_files(mini, tmp_path):
    with serve(mini, repo_id="some/k3-mini-8") as hub:
        source = HubSource("some/k3-mini-8", endpoint=hub.endpoint, token=False)
        result = write_gguf(source, tmp_path / "x", vocabulary="ids", max_shard_size=SPLIT)
        source.close()
    assert files_of(tmp_path / "x") == files_of_run(mini, tmp_path / "local")
    assert result.as_json()["complete"]
    manifest = load_manifest(tmp_path / "x")
    assert manifest is not None and manifest.source == "some/k3-mini-8"


def test_what_llama_cpp_has_no_place_for_is_said(mini, tmp_path, capsys):
    ran = k3tool(capsys, "quantize", mini, tmp_path / "x", "--format", "gguf", "--json")
    held = ran.json["left_out"]["vision"]
    assert held["tensors"] > 0 and held["bytes"] > 0
    assert "left out: vision" in k3tool(capsys, "quantize", mini, tmp_path / "x", "--format", "gguf").out


@pytest.mark.parametrize("bits", [0x7F80, 0x7FC0, 0xFF80])
def test_a_trunk_that_is_not_finite_is_refused_where_its_bits_are_only_moved(mini, tmp_path, bits):
    copy_checkpoint(mini, tmp_path / "source")
    name = "language_model.model.layers.1.self_attn.q_proj.weight"
    place = Checkpoint.open(tmp_path / "source").locate(name)
    with open(tmp_path / "source" / place.shard, "r+b") as file:
        file.seek(place.offset + 6)
        file.write(bits.to_bytes(2, "little"))
    with pytest.raises(CheckpointCorrupt, match=r"q_proj\.weight: holds values that are not finite"):
        write_gguf(tmp_path / "source", tmp_path / "x")
