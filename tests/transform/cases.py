"""Random small checkpoints in memory, and a dumb load-everything splitter to compare with.

The splitter below is written apart from `k3tool.transform.split`: whole tensors as numpy arrays, sliced by rules that
are spelled out here a second time.
"""

from __future__ import annotations

import json
import struct
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st

from k3tool.catalog import Entry, catalog
from k3tool.checkpoint.header import build_header
from k3tool.checkpoint.index import build_index
from k3tool.checkpoint.source import Source
from k3tool.config import K3Config
from k3tool.errors import CheckpointCorrupt, CheckpointMissing
from k3tool.execute import Report
from k3tool.layout import Layout, problems
from k3tool.lockstep import lockstep
from k3tool.reshard import Prepared, closing_files
from k3tool.synthetic import tiny_config
from k3tool.worker import StepRunner

MAX_RANKS = 16


class MemorySource:
    """Files in a dictionary; behaves like a remote source (no local paths) and counts its reads."""

    def __init__(self, files: dict[str, bytes], label: str = "memory") -> None:
        self.contents = files
        self.label = label
        self.requests: list[tuple[str, int, int]] = []

    def files(self) -> dict[str, int]:
        return {name: len(data) for name, data in self.contents.items()}

    def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        if name not in self.contents:
            raise CheckpointMissing(f"no {name}", hint="")
        data = self.contents[name][offset : None if length is None else offset + length]
        self.requests.append((name, offset, len(data)))
        return data

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        data = self.read(name, offset, len(buffer))
        if len(data) != len(buffer):
            raise CheckpointCorrupt(f"{name} is truncated", hint="")
        buffer[:] = data

    def local_path(self, name: str) -> Path | None:
        return None


def carry_out_in_memory(prepared: Prepared, *, buffer_bytes: int = 1 << 12) -> dict[str, bytes]:
    """Every file that the job writes, made by the engine's own step runner without touching a disk."""
    runner = StepRunner(
        prepared.opened.form.tensors, buffer_bytes=buffer_bytes, stop=threading.Event(), advanced=lambda _: None
    )
    written: dict[str, bytes] = {}
    wanted = {job.path for job in prepared.wanted}
    for batch in prepared.plan.batches():
        jobs = [job for job in batch if job.path in wanted]
        sinks = [_Sink() for _ in jobs]
        for members in lockstep(jobs):
            numbers = [number for number, _ in members]
            runner.run([sinks[n] for n in numbers], [step for _, step in members], [[] for _ in members])
        for job, sink in zip(jobs, sinks, strict=True):
            head, header = build_header((o.name, o.dtype, o.shape) for o in job.outputs())
            written[job.path] = head + bytes(sink.data)
            assert len(written[job.path]) == header.file_size
            assert len(sink.data) == job.data_bytes
    for small in closing_files(prepared, Report()):
        written[small.path] = small.data if isinstance(small.data, bytes) else b"".join(small.data())
    return written


class _Sink:
    def __init__(self) -> None:
        self.data = bytearray()

    def write(self, data: Any) -> None:
        self.data += data


def tensors_of(files: dict[str, bytes], folder: str = "") -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """name -> (dtype, shape, bytes) of a checkpoint in memory, through its index."""
    prefix = f"{folder}/" if folder else ""
    index = json.loads(files[prefix + "model.safetensors.index.json"])
    found: dict[str, tuple[str, tuple[int, ...], bytes]] = {}
    total = 0
    for shard in sorted(set(index["weight_map"].values())):
        data = files[prefix + shard]
        (length,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + length])
        header.pop("__metadata__", None)
        for name, entry in header.items():
            assert index["weight_map"][name] == shard and name not in found
            start, end = entry["data_offsets"]
            found[name] = (entry["dtype"], tuple(entry["shape"]), data[8 + length + start : 8 + length + end])
            total += end - start
    assert set(found) == set(index["weight_map"])
    assert index["metadata"]["total_size"] == total
    return found


@st.composite
def documents(draw: st.DrawFn) -> dict[str, Any]:
    """A random `config.json` of either family with few, small tensors."""
    heads = draw(st.sampled_from([1, 2, 3, 4, 6, 8, 12]))
    scheme = draw(st.sampled_from(["mxfp4", "nvfp4", "bf16"]))
    document = tiny_config(
        num_layers=draw(st.integers(1, 4)),
        hidden_size=draw(st.sampled_from([16, 24])),
        vocab_size=draw(st.integers(257, 290)),
        block_size=draw(st.sampled_from([None, 2])),
        kda_heads=heads * draw(st.sampled_from([1, 2])),
        kda_head_dim=draw(st.sampled_from([4, 8])),
        mla_heads=heads,
        q_lora_rank=draw(st.sampled_from([None, 8])),
        kv_lora_rank=8,
        qk_nope_head_dim=4,
        qk_rope_head_dim=draw(st.sampled_from([0, 2])),
        v_head_dim=4,
        intermediate_size=heads * draw(st.integers(1, 3)),
        num_experts=draw(st.sampled_from([0, 4, 6])),
        experts_per_token=2,
        num_shared_experts=draw(st.sampled_from([0, 1, 2])),
        moe_intermediate_size=32 * heads if scheme != "bf16" else heads * draw(st.integers(1, 3)),
        latent_size=draw(st.sampled_from([None, 32])),
        vision=draw(st.booleans()),
    )
    text = document["text_config"]
    text["linear_attn_config"]["use_full_rank_gate"] = draw(st.booleans())
    text["tie_word_embeddings"] = document["tie_word_embeddings"] = draw(st.booleans())
    text["moe_layer_freq"] = draw(st.sampled_from([1, 2]))
    if text["num_experts"] == 0:
        text["num_experts_per_token"] = 0
    if text["routed_expert_hidden_size"] is None and scheme != "bf16":
        text["hidden_size"] = 32
        if "vision_config" in document:
            document["vision_config"]["text_hidden_size"] = 32
    if scheme == "bf16":
        text.pop("quantization_config")
    elif scheme == "nvfp4":
        text["quantization_config"] = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}
    if draw(st.booleans()):  # the flat form, as Kimi Linear has it
        flat = {**text, "model_type": "kimi_linear"}
        return flat
    return document


def write(document: dict[str, Any], seed: int, *, short_a_log: bool = False, shards: int = 3) -> dict[str, bytes]:
    """A checkpoint of random bytes in memory: tensors in random order in `shards` files. `A_log` is padded with zeros,
    or with `short_a_log` stored as [1, 1, heads, 1] without padding."""
    config = K3Config.from_dict(document)
    rng = np.random.default_rng(seed)
    entries = list(catalog(config).entries)
    if short_a_log:
        shape = (1, 1, config.kda_num_heads, 1) if not config.is_k3 else (config.kda_num_heads,)
        entries = [
            e._replace(shape=shape, nbytes=4 * config.kda_num_heads) if e.name.endswith("A_log") else e for e in entries
        ]
    rng.shuffle(entries)  # type: ignore[arg-type]
    files: dict[str, bytes] = {}
    weight_map: dict[str, str] = {}
    for number in range(shards):
        mine = [Entry(*entry) for entry in entries[number::shards]]
        name = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        head, _ = build_header((e.name, e.dtype, tuple(e.shape)) for e in mine)
        files[name] = head + b"".join(_bytes(entry, config, rng) for entry in mine)
        weight_map.update((e.name, name) for e in mine)
    files["model.safetensors.index.json"] = build_index(weight_map, sum(e.nbytes for e in entries))
    files["config.json"] = json.dumps(document).encode()
    files["tokenizer_config.json"] = b'{"kind": "carried along"}'
    return files


def _bytes(entry: Entry, config: K3Config, rng: np.random.Generator) -> bytes:
    data = rng.integers(0, 256, entry.nbytes, dtype=np.uint8)
    if entry.name.endswith("A_log"):
        data[4 * config.kda_num_heads :] = 0
    return data.tobytes()


def legal_layouts(config: K3Config) -> list[Layout]:
    found = [
        Layout(tp, ep, pp)
        for tp in range(1, MAX_RANKS + 1)
        for ep in range(1, MAX_RANKS // tp + 1)
        for pp in range(1, MAX_RANKS // (tp * ep) + 1)
    ]
    return [layout for layout in found if not problems(config, layout)]


# The dumb splitter

BY_ROWS = ("q_proj", "k_proj", "v_proj", "g_proj", "g_b_proj", "f_b_proj", "b_proj", "q_b_proj", "kv_b_proj", "q_conv1d",
           "k_conv1d", "v_conv1d", "dt_bias", "w1", "w3", "gate_proj", "up_proj")  # fmt: skip
BY_COLUMNS = ("o_proj", "down_proj", "w2")


def expected_rank(
    tensors: dict[str, tuple[str, tuple[int, ...], bytes]], config: K3Config, layout: Layout, rank: int
) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """What one rank must store, by slicing whole arrays."""
    tp_rank = rank % layout.tp
    ep_rank = rank // layout.tp % layout.ep
    pp_rank = rank // layout.tp // layout.ep
    layers = np.array_split(np.arange(config.num_layers), layout.pp)[pp_rank]
    found = {}
    for name, (dtype, shape, data) in tensors.items():
        parts = name.removeprefix("language_model.").split(".")
        if name.startswith(("vision_tower", "mm_projector")):
            if pp_rank != 0:
                continue
        elif parts[1] == "layers":
            if int(parts[2]) not in layers:
                continue
            if (
                "experts" in parts
                and np.array_split(np.arange(config.num_experts), layout.ep)[ep_rank]
                .tolist()
                .count(int(parts[parts.index("experts") + 1]))
                == 0
            ):
                continue
        elif parts[1] == "embed_tokens":
            if pp_rank != 0 and not (config.tie_word_embeddings and pp_rank == layout.pp - 1):
                continue
        elif pp_rank != layout.pp - 1:
            continue
        found[name] = _slice(name, dtype, shape, data, config, layout.tp, tp_rank)
    return found


def _slice(
    name: str, dtype: str, shape: tuple[int, ...], data: bytes, config: K3Config, tp: int, tp_rank: int
) -> tuple[str, tuple[int, ...], bytes]:
    width = {"BF16": 2, "F16": 2, "F32": 4, "U8": 1, "F8_E4M3": 1, "I32": 4, "I64": 8}[dtype]
    array = np.frombuffer(data, np.dtype(f"V{width}")).reshape(shape)
    parts = name.split(".")
    module = parts[-1] if parts[-1] in ("A_log", "dt_bias") else parts[-2]
    if tp == 1 or parts[-1] in ("weight_global_scale",) or name.startswith(("vision_tower", "mm_projector")):
        pass
    elif module == "A_log":
        heads = config.kda_num_heads // tp
        axis = shape.index(max(shape))
        piece = array.reshape(-1)[tp_rank * heads : (tp_rank + 1) * heads]
        stored = heads if max(shape) == config.kda_num_heads else -(-heads // config.kda_head_dim) * config.kda_head_dim
        full = np.zeros(stored, array.dtype)
        full[:heads] = piece
        array = full.reshape([stored if index == axis else 1 for index in range(len(shape))])
    elif module in ("embed_tokens", "lm_head"):
        rows = -(-config.vocab_size // tp)
        full = np.zeros((rows * tp, shape[1]), array.dtype)
        full[: shape[0]] = array
        array = full[tp_rank * rows : (tp_rank + 1) * rows]
    elif module in BY_ROWS:
        array = np.split(array, tp, axis=0)[tp_rank]
    elif module in BY_COLUMNS:
        array = np.split(array, tp, axis=1)[tp_rank]
    return dtype, array.shape, array.tobytes()


def as_source(files: dict[str, bytes]) -> Source:
    return MemorySource(files)


__all__ = ["MemorySource", "as_source", "carry_out_in_memory", "documents", "expected_rank", "legal_layouts", "replace",
           "tensors_of", "write"]  # fmt: skip
