"""Configurations, good and bad: what is wrong is named with the value found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from k3tool import release
from k3tool.config import K3Config
from k3tool.errors import CheckpointCorrupt, CheckpointMissing


def test_release():
    config = release.config()
    assert config.num_layers == 93 and config.layer_kinds.count("kda") == 69
    assert [layer for layer, kind in enumerate(config.layer_kinds) if kind == "mla"] == [*range(3, 92, 4), 92]
    assert (config.kda_size, config.a_log_size, config.mla_cache_width) == (12288, 128, 576)
    assert (config.expert_size, config.shared_intermediate_size) == (3584, 6144)
    assert config.moe_layers == tuple(range(1, 93))
    assert config.eos_token_ids == (163586,) and config.expert_scheme == "mxfp4"
    assert config.gate_lower_bound == -5.0 and config.attn_res_block_size == 12


def test_kimi_linear_form():
    config = K3Config.from_dict(
        {
            "model_type": "kimi_linear", "vocab_size": 100, "hidden_size": 64, "num_hidden_layers": 2,
            "num_attention_heads": 2, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
            "v_head_dim": 8, "intermediate_size": 96, "rms_norm_eps": 1e-5, "q_lora_rank": None,
            "linear_attn_config": {"num_heads": 2, "head_dim": 16, "short_conv_kernel_size": 4,
                                   "kda_layers": [1], "full_attn_layers": [2]},
        }
    )  # fmt: skip
    assert not config.is_k3 and config.name_prefix == "" and config.layer_kinds == ("kda", "mla")
    assert config.gate_lower_bound is None and not config.full_rank_gate and not config.mla_output_gate
    assert config.attn_res_block_size is None and config.q_lora_rank is None and config.num_experts == 0
    assert config.expert_scheme == "bf16" and config.activation == "silu"


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("num_hidden_layers",), 9, "layer 9 .* is neither in kda_layers nor in full_attn_layers"),
        (("num_hidden_layers",), "8", "num_hidden_layers must be a whole number of at least 1, found '8'"),
        (("hidden_size",), None, "hidden_size must be a whole number of at least 1, found None"),
        (("hidden_size",), True, "hidden_size must be a whole number"),
        (("num_experts_per_token",), 99, "num_experts_per_token 99 does not fit num_experts 12"),
        (("hidden_act",), "relu", "hidden_act must be one of situ, silu, found 'relu'"),
        (("mla_use_nope",), False, "mla_use_nope must be true"),
        (("linear_attn_config", "kda_layers"), [1, 1, 2, 3, 5, 6, 7], "layer 1 is out of 1..8 or named twice"),
        (("linear_attn_config", "gate_lower_bound"), "x", "gate_lower_bound must be a number, found 'x'"),
        (("linear_attn_config",), None, "no linear_attn_config .model_type 'kimi_k3'."),
        (("dtype",), "int4", None),
    ],
)
def test_bad_values_are_named(mini: Path, path, value, message):
    document = json.loads((mini / "config.json").read_text())
    target = document["text_config"]
    for key in path[:-1]:
        target = target[key]
    target[path[-1]] = value
    if path == ("dtype",):
        document["dtype"], message = value, "dtype must be one of .*, found 'int4'"
    with pytest.raises(CheckpointCorrupt, match=message):
        K3Config.from_dict(document)


@pytest.mark.parametrize("text", [b"", b"[]", b"{", b'{"text_config": 3}', b"\xff\xfe", b"[" * 100_000])
def test_not_a_configuration(text: bytes):
    with pytest.raises(CheckpointCorrupt):
        K3Config.from_bytes(text)


def test_absent_file(tmp_path: Path):
    with pytest.raises(CheckpointMissing, match="cannot read"):
        K3Config.from_file(tmp_path / "config.json")
