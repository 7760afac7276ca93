"""The `gguf` package, the format's own reader, on files that k3tool wrote: every value against the source's, bit for bit."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from k3tool.gguf import blocks, write_gguf

pytestmark = [
    pytest.mark.oracle,
    pytest.mark.skipif(importlib.util.find_spec("gguf") is None, reason="gguf is not installed (extra: oracle)"),
]

CODES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def load(folder: Path) -> dict[str, torch.Tensor]:
    weights: dict[str, torch.Tensor] = {}
    for path in folder.glob("model-*.safetensors"):
        weights.update(load_file(path))
    return {name.removeprefix("language_model."): tensor for name, tensor in weights.items()}


def open_all(folder: Path) -> list[Any]:
    import gguf

    return [gguf.GGUFReader(path) for path in sorted(folder.glob("*.gguf"))]


def decoded(tensor: Any) -> np.ndarray:
    """Values in the shape that the file gives, outermost first."""
    import gguf

    data = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    return data.reshape([int(size) for size in reversed(tensor.shape)])


def experts_of(source: dict[str, torch.Tensor], layer: int, matrix: str, count: int) -> np.ndarray:
    stack = []
    for e in range(count):
        name = f"model.layers.{layer}.block_sparse_moe.experts.{e}.{matrix}"
        packed, scale = source[f"{name}.weight_packed"], source[f"{name}.weight_scale"]
        codes = torch.stack([CODES[(packed & 15).int()], CODES[(packed >> 4).int()]], -1).reshape(packed.shape[0], -1)
        stack.append((codes * torch.exp2(scale.float() - 127).repeat_interleave(32, dim=1)).numpy())
    return np.stack(stack)


@pytest.mark.parametrize("name", ["k3-mini-8", "k3-tiny-14", "k3-tiny-93"])
def test_experts_and_trunk_read_back_bit_for_bit(name, request, tmp_path):
    folder = (
        request.getfixturevalue("mini") if name == "k3-mini-8" else request.getfixturevalue("shared") / "golden" / name
    )
    source = load(folder)
    result = write_gguf(folder, tmp_path, max_shard_size=2_000_000)
    tensors = {tensor.name: tensor for reader in open_all(tmp_path) for tensor in reader.tensors}
    assert len(tensors) == len(result.prepared.tensors)
    layers = 1 + max(int(key.split(".")[1]) for key in tensors if key.startswith("blk."))
    plain = {
        "attn_output.weight": "self_attn.o_proj.weight", "attn_q_b.weight": "self_attn.q_b_proj.weight",
        "attn_gate.weight": "self_attn.g_proj.weight", "ssm_g.weight": "self_attn.g_proj.weight",
        "ssm_f_b.weight": "self_attn.f_b_proj.weight", "ssm_dt.bias": "self_attn.dt_bias",
        "ffn_routed_down.weight": "block_sparse_moe.routed_expert_down_proj.weight",
        "ffn_gate_inp.weight": "block_sparse_moe.gate.weight", "attn_norm.weight": "input_layernorm.weight",
        "ffn_down_shexp.weight": "block_sparse_moe.shared_experts.down_proj.weight",
    }  # fmt: skip
    seen = 0
    for layer in range(layers):
        for to, of in plain.items():
            if f"blk.{layer}.{to}" in tensors:
                wanted = source[f"model.layers.{layer}.{of}"].float().numpy()
                assert np.array_equal(decoded(tensors[f"blk.{layer}.{to}"]), wanted), (layer, to)
        for role, matrix in (("gate", "w1"), ("down", "w2"), ("up", "w3")):
            stacked = tensors.get(f"blk.{layer}.ffn_{role}_exps.weight")
            if stacked is None:
                continue
            values = decoded(stacked)
            wanted = experts_of(source, layer, matrix, values.shape[0])
            # the package, as llama.cpp, reads the code of -0 as 0, so values are compared, not signs of zero
            assert np.array_equal(values, wanted), (layer, matrix)
            seen += values.shape[0]
    assert seen == result.components["routed_experts"]["tensors"] > 200
    assert np.array_equal(decoded(tensors["output.weight"]), source["lm_head.weight"].float().numpy())


def test_keys_read_back_with_their_types(mini, tmp_path):
    import gguf

    write_gguf(mini, tmp_path, max_shard_size=300_000, vocabulary="ids")
    readers = open_all(tmp_path)
    fields = readers[0].fields
    assert fields["general.architecture"].contents() == "kimi-k3"
    assert fields["general.file_type"].contents() == gguf.LlamaFileType.MOSTLY_MXFP4_MOE
    assert fields["kimi-k3.expert_gating_func"].contents() == gguf.ExpertGatingFuncType.SIGMOID
    assert fields["kimi-k3.attention.head_count_kv"].contents() == [0, 0, 0, 1, 0, 0, 0, 1]
    types = gguf.GGUFValueType
    assert fields["kimi-k3.attention.head_count_kv"].types == [types.ARRAY, types.INT32]
    assert fields["kimi-k3.kda.gate_lower_bound"].types == [types.FLOAT32]
    assert fields["kimi-k3.expert_weights_norm"].types == [types.BOOL]
    assert fields["kimi-k3.block_count"].types == [types.UINT32]
    assert fields["tokenizer.ggml.tokens"].contents() == [f"t{token}" for token in range(256)]
    for number, reader in enumerate(readers):
        assert reader.fields["split.no"].types == [types.UINT16] and reader.fields["split.no"].contents() == number
        assert reader.fields["split.tensors.count"].types == [types.INT32]


def test_q8_0_is_the_packages_own(mini, tmp_path):
    """The same bytes as `gguf.quants.quantize` makes of the source's values, for every matrix."""
    import gguf

    source = load(mini)
    write_gguf(mini, tmp_path, trunk="q8_0", experts="q8_0")
    tensors = {tensor.name: tensor for reader in open_all(tmp_path) for tensor in reader.tensors}
    q8_0 = gguf.GGMLQuantizationType.Q8_0
    for to, of in (("token_embd.weight", "model.embed_tokens.weight"), ("blk.2.ffn_gate_shexp.weight", "model.layers.2.block_sparse_moe.shared_experts.gate_proj.weight")):  # fmt: skip
        wanted = gguf.quants.quantize(source[of].float().numpy(), q8_0)
        assert tensors[to].tensor_type == q8_0 and np.array_equal(tensors[to].data, wanted)
    wanted = gguf.quants.quantize(experts_of(source, 6, "w2", 12), q8_0)
    assert np.array_equal(tensors["blk.6.ffn_down_exps.weight"].data, wanted)


def test_blocks_against_the_packages_tables():
    """Every pair of codes in every place under every scale, and Q8_0 over many magnitudes."""
    import gguf

    packed = np.stack([np.roll(np.arange(256, dtype=np.uint8), shift)[:16] for shift in range(255)])
    repacked = blocks.repack(packed, np.arange(255, dtype=np.uint8))
    with np.errstate(over="ignore"):
        theirs = gguf.quants.dequantize(repacked, gguf.GGMLQuantizationType.MXFP4)
    assert np.array_equal(theirs, blocks.unpack_mxfp4(repacked))
    rng = np.random.default_rng(7)
    values = (rng.standard_normal((2000, 32)) * 2.0 ** rng.integers(-20, 12, (2000, 1))).astype(np.float32)
    q8_0 = gguf.GGMLQuantizationType.Q8_0
    stored = gguf.quants.quantize(values, q8_0)
    assert np.array_equal(stored, blocks.quantize_q8_0(values))
    assert np.array_equal(gguf.quants.dequantize(stored, q8_0), blocks.dequantize_q8_0(stored))
