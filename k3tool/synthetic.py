"""Checkpoints of random weights in the released layout, any size: for the demo, tests and benchmarks.

Weights are drawn so that the network behaves (0.02 standard deviation, realistic decays, expert scales within the
range seen in the release) and streamed shard by shard, so that memory holds one tensor at a time. Numpy only.
"""

from __future__ import annotations

import base64
import itertools
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from k3tool.catalog import Entry, catalog
from k3tool.checkpoint.index import INDEX_NAME, build_index
from k3tool.checkpoint.reader import CONFIG_NAME
from k3tool.checkpoint.writer import ShardWriter, write_atomic
from k3tool.config import K3Config
from k3tool.disk import make_folder
from k3tool.errors import UsageError
from k3tool.events import SILENT, Progress

WEIGHT_STD = 0.02
RESERVED_TOKENS = 256  # ids above the base vocabulary, as in the release
# Offsets into the reserved ids, and whether tokenizer_config.json calls the token special.
SPECIAL_TOKENS = {
    0: ("[BOS]", True),
    1: ("[EOS]", True),
    2: ("<|end_of_msg|>", True),
    3: ("<|open|>", False),
    4: ("<|close|>", False),
    5: ("<|sep|>", False),
    6: ("[start_header_id]", True),
    7: ("[end_header_id]", True),
    9: ("[EOT]", True),
    18: ("<|media_begin|>", True),
    19: ("<|media_content|>", True),
    20: ("<|media_end|>", True),
    21: ("<|media_pad|>", True),
    254: ("[UNK]", True),
    255: ("[PAD]", True),
}
_BPE_TEXT = (
    "the quick brown fox jumps over the lazy dog and then the other dog jumps over the fox. this is the text from "
    "which the little vocabulary of the demonstration is made: it holds the common pairs of letters and some words, "
    "so that a prompt in english becomes fewer tokens than bytes. attention, experts, layers, router and state. "
)


def tiny_config(
    *,
    num_layers: int = 8,
    hidden_size: int = 64,
    vocab_size: int = 1024,
    block_size: int | None = 3,
    kda_heads: int = 3,
    kda_head_dim: int = 32,
    mla_heads: int = 3,
    q_lora_rank: int | None = 32,
    kv_lora_rank: int = 32,
    qk_nope_head_dim: int = 16,
    qk_rope_head_dim: int = 8,
    v_head_dim: int = 16,
    intermediate_size: int = 96,
    num_experts: int = 12,
    experts_per_token: int = 3,
    num_shared_experts: int = 2,
    moe_intermediate_size: int = 32,
    latent_size: int | None = 32,
    vision: bool = True,
) -> dict[str, Any]:
    """A `config.json` with the release's structure and small widths. Every fourth layer and the last are MLA.

    `vocab_size` counts the 256 reserved ids at its end. The dictionary may be edited before it is written.
    """
    layers = range(1, num_layers + 1)
    full = [layer for layer in layers if layer % 4 == 0 or layer == num_layers]
    base = vocab_size - RESERVED_TOKENS
    tokens = {"bos_token_id": base, "eos_token_id": base + 2, "pad_token_id": base + 255}
    text: dict[str, Any] = {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "dtype": "bfloat16",
        **tokens,
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": mla_heads,
        "num_key_value_heads": mla_heads,
        "q_lora_rank": q_lora_rank,
        "kv_lora_rank": kv_lora_rank,
        "qk_nope_head_dim": qk_nope_head_dim,
        "qk_rope_head_dim": qk_rope_head_dim,
        "v_head_dim": v_head_dim,
        "mla_use_nope": True,
        "mla_use_output_gate": True,
        "hidden_act": "situ",
        "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0,
        "attn_res_block_size": block_size,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "num_experts": num_experts,
        "num_experts_per_token": experts_per_token,
        "num_shared_experts": num_shared_experts,
        "moe_intermediate_size": moe_intermediate_size,
        "routed_expert_hidden_size": latent_size,
        "latent_moe_use_norm": True,
        "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid",
        "topk_method": "noaux_tc",
        "use_grouped_topk": True,
        "num_expert_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
        "num_nextn_predict_layers": 0,
        "rms_norm_eps": 1e-05,
        "initializer_range": WEIGHT_STD,
        "max_position_embeddings": 1048576,
        "tie_word_embeddings": False,
        "use_cache": True,
        "linear_attn_config": {
            "num_heads": kda_heads,
            "head_dim": kda_head_dim,
            "short_conv_kernel_size": 4,
            "use_full_rank_gate": True,
            "gate_lower_bound": -5.0,
            "full_attn_layers": full,
            "kda_layers": [layer for layer in layers if layer not in full],
        },
        "quantization_config": mxfp4_quantization(),
    }
    document: dict[str, Any] = {
        "architectures": ["KimiK3ForConditionalGeneration"],
        "model_type": "kimi_k3",
        "dtype": "bfloat16",
        **tokens,
        "ignore_index": -100,
        "media_placeholder_token_id": base + 21,
        "text_config": text,
        "tie_word_embeddings": False,
    }
    if vision:
        document["vision_config"] = _tiny_vision(hidden_size)
    return document


def mxfp4_quantization() -> dict[str, Any]:
    """The `quantization_config` of the release, its incomplete ignore list included."""
    weights = {
        "num_bits": 4, "type": "float", "symmetric": True, "strategy": "group", "group_size": 32,
        "scale_dtype": "torch.uint8", "zp_dtype": None, "dynamic": False, "actorder": None,
        "block_structure": None, "observer": "minmax", "observer_kwargs": {},
    }  # fmt: skip
    group = {
        "format": "mxfp4-pack-quantized",
        "targets": ["Linear"],
        "input_activations": None,
        "output_activations": None,
        "weights": weights,
    }
    names = ("self_attn.*", "shared_experts.*", r"mlp\.(gate|up|gate_up|down)_proj.*", "lm_head.*", "vision_tower.*")
    return {
        "quant_method": "compressed-tensors",
        "format": "mxfp4-pack-quantized",
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "kv_cache_scheme": None,
        "config_groups": {"group_0": group},
        "ignore": [f"re:.*{name}" for name in (*names, "mm_projector.*")],
    }


def _tiny_vision(hidden_size: int) -> dict[str, Any]:
    return {
        "vt_num_hidden_layers": 2,
        "vt_hidden_size": 32,
        "vt_intermediate_size": 64,
        "vt_num_attention_heads": 4,
        "qkv_hidden_size": 48,
        "mm_hidden_size": 32,
        "text_hidden_size": hidden_size,
        "patch_size": 14,
        "init_pos_emb_height": 8,
        "init_pos_emb_width": 8,
        "init_pos_emb_time": 4,
        "merge_kernel_size": [2, 2],
        "merge_type": "sd2_tpool",
        "mm_projector_type": "patchmergerv2",
    }


def write_checkpoint(
    folder: Path,
    config: dict[str, Any],
    seed: int = 0,
    tokenizer: bool = False,
    progress: Progress = SILENT,
) -> None:
    """Write shards, index, `generation_config.json` and `config.json` (last) for `config` into `folder`.

    The same `config` and `seed` give the same bytes. `tokenizer` adds `tiktoken.model` and `tokenizer_config.json`
    for the vocabulary, whose last 256 ids are reserved. Raises UsageError where the vocabulary is too small for it.
    """
    parsed = K3Config.from_dict(config)
    layout = catalog(parsed)
    make_folder(folder)
    weight_map: dict[str, str] = {}
    progress.started("write", layout.total_size)
    for shard, entries in _by_shard(layout.entries):
        rng = np.random.default_rng([seed, shard])
        name = layout.shards[shard]
        with ShardWriter(folder / name, [(e.name, e.dtype, e.shape) for e in entries]) as writer:
            for entry in entries:
                writer.append(random_tensor(entry, parsed, rng))
                weight_map[entry.name] = name
                progress.advanced("write", entry.nbytes)
    if tokenizer:
        _write_tokenizer(folder, parsed.vocab_size - RESERVED_TOKENS)
    write_atomic(folder / INDEX_NAME, build_index(weight_map, layout.total_size))
    generation = {"max_length": parsed.max_positions, "eos_token_id": list(parsed.eos_token_ids)}
    write_atomic(folder / "generation_config.json", json.dumps(generation, indent=2).encode())
    write_atomic(folder / CONFIG_NAME, json.dumps(config, indent=2).encode() + b"\n")
    progress.finished("write")


def _by_shard(entries: list[Entry]) -> Iterator[tuple[int, list[Entry]]]:
    start = 0
    for stop in range(1, len(entries) + 1):
        if stop == len(entries) or entries[stop].shard != entries[start].shard:
            yield entries[start].shard, entries[start:stop]
            start = stop


def random_tensor(entry: Entry, config: K3Config, rng: np.random.Generator) -> memoryview:
    """The bytes of one tensor of the catalogue: distribution by role, encoding by dtype."""
    part = entry.name.rsplit(".", 1)[1]
    if part == "weight_packed":
        codes = rng.integers(0, 256, entry.shape, dtype=np.uint8)
        group = 8 if config.expert_scheme == "nvfp4" else 16
        codes[:, ::group] |= 0x07  # every group tops out at code 6.0, as a quantizer would leave it
        return codes.data.cast("B")
    if part == "weight_scale":
        low, high, step = (48, 80, 8) if entry.dtype == "F8_E4M3" else (118, 122, 1)  # 2^-9..2^-5 after all factors
        return (rng.integers(0, (high - low) // step, entry.shape, dtype=np.uint8) * step + low).data.cast("B")
    if part == "weight_global_scale":
        return np.full(entry.shape, 256.0, np.float32).data.cast("B")
    if entry.dtype == "BF16" and len(entry.shape) > 1 and "_res_proj." not in entry.name:
        # Most of the bytes: drawn from a table of normal numbers, five times faster than drawing the numbers.
        return _normal_table()[rng.integers(0, 1 << 16, entry.shape, dtype=np.uint16)].data.cast("B")
    values = _values(entry, part, config, rng)
    return (values if entry.dtype == "F32" else bfloat16_bits(values)).data.cast("B")


def _values(entry: Entry, part: str, config: K3Config, rng: np.random.Generator) -> np.ndarray:
    """float32 values of an unquantized tensor."""
    if part == "A_log":  # one per head, spread as in the release, then zeros up to the stored length
        values = np.zeros(entry.shape, np.float32)
        values[: config.kda_num_heads] = rng.uniform(-0.5, 1.0, config.kda_num_heads)
        return values
    if part == "dt_bias":  # decays from almost none to about a half per token
        return rng.uniform(-6.0, -1.0, entry.shape).astype(np.float32)
    noise = rng.standard_normal(entry.shape, dtype=np.float32)
    if "_conv1d." in entry.name:
        noise *= 0.3
        noise[..., -1] += 1.0
        return noise
    if len(entry.shape) == 1 and part == "weight":  # every one-dimensional weight is a norm
        return 1.0 + 0.1 * noise
    return noise * np.float32(0.2)  # an AttnRes query


@cache
def _normal_table() -> np.ndarray:
    """65,536 normal numbers of standard deviation WEIGHT_STD as bfloat16 bits."""
    values = np.random.default_rng(0).standard_normal(1 << 16, dtype=np.float32)
    return bfloat16_bits(values * np.float32(WEIGHT_STD))


def bfloat16_bits(values: np.ndarray) -> np.ndarray:
    """float32 to bfloat16 bit patterns (uint16), rounding to nearest even. Finite values only."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + (((bits >> 16) & 1) + 0x7FFF)) >> 16).astype(np.uint16)


def byte_pair_ranks(size: int) -> list[bytes]:
    """The 256 bytes, then pairs merged greedily from a short text, then unused fillers: `size` distinct tokens."""
    ranks = [bytes([value]) for value in range(256)]
    pieces = [[bytes([value]) for value in word.encode()] for word in _BPE_TEXT.replace(" ", "\n ").split("\n")]
    while len(ranks) < size:
        counts: dict[tuple[bytes, bytes], int] = {}
        for piece in pieces:
            for pair in itertools.pairwise(piece):
                counts[pair] = counts.get(pair, 0) + 1
        if not counts:
            break
        best = max(counts, key=lambda pair: (counts[pair], pair))
        ranks.append(best[0] + best[1])
        pieces = [_merge(piece, best) for piece in pieces]
    known = set(ranks)
    fillers = (bytes([first, second]) for first in range(128, 256) for second in range(256))
    triples = (bytes([1, a, b]) + bytes([c]) for a in range(256) for b in range(256) for c in range(256))
    for source in (fillers, triples):
        for token in source:
            if len(ranks) >= size:
                return ranks
            if token not in known:
                ranks.append(token)
                known.add(token)
    return ranks


def _merge(piece: list[bytes], pair: tuple[bytes, bytes]) -> list[bytes]:
    merged: list[bytes] = []
    for token in piece:
        if merged and (merged[-1], token) == pair:
            merged[-1] += token
        else:
            merged.append(token)
    return merged


def _write_tokenizer(folder: Path, base: int) -> None:
    if base < 256:
        raise UsageError(
            f"vocab_size {base + RESERVED_TOKENS} has no room for a tokenizer", hint="use a vocab_size of at least 512"
        )
    lines = [base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(byte_pair_ranks(base))]
    write_atomic(folder / "tiktoken.model", b"".join(lines))
    added = {
        str(base + offset): {
            "content": content, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False,
            "special": special,
        }
        for offset, (content, special) in SPECIAL_TOKENS.items()
    }  # fmt: skip
    document = {
        "added_tokens_decoder": added,
        "additional_special_tokens": [content for content, special in SPECIAL_TOKENS.values() if special],
        "bos_token": "[BOS]",
        "clean_up_tokenization_spaces": False,
        "eos_token": "[EOS]",
        "model_max_length": 1000000000000000019884624838656,
        "pad_token": "[PAD]",
        "tokenizer_class": "TikTokenTokenizer",
        "unk_token": "[UNK]",
    }
    write_atomic(folder / "tokenizer_config.json", json.dumps(document, indent=2).encode())
