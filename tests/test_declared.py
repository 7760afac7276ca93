"""What a quantization_config declares, as the libraries that write such sections mean it, and what it leaves open."""

from __future__ import annotations

from typing import Any

import pytest

from k3tool import release
from k3tool.config import K3Config
from k3tool.declared import Declared
from k3tool.names import parse_name
from k3tool.synthetic import tiny_config
from k3tool.transform.quantize_config import Storage

EXPERT, LATENT = "block_sparse_moe.experts.0.w1", "block_sparse_moe.routed_expert_down_proj"
SHARED, QUERY, ROUTER = "block_sparse_moe.shared_experts.up_proj", "self_attn.q_proj", "block_sparse_moe.gate"
FP8 = {"num_bits": 8, "type": "float", "strategy": "channel"}


def declared(section: Any, **beside: Any) -> Declared:
    document = tiny_config(num_layers=3)
    document["text_config"]["quantization_config"] = section
    return Declared(K3Config.from_dict({**document, **beside}))


def stored(found: Declared, module: str, layer: int = 1) -> Storage | None:
    name = parse_name(f"language_model.model.layers.{layer}.{module}.weight")
    assert name is not None
    return found.storage(name)


def test_the_release_stores_its_experts_alone_in_mxfp4():
    found = Declared(release.config())
    assert found.leaves_others_open and not found.open
    assert stored(found, EXPERT) == Storage("mxfp4")
    assert [stored(found, module) for module in (LATENT, SHARED, QUERY, ROUTER)] == [None] * 4


def test_groups_name_their_modules_and_what_is_ignored_stays_plain():
    found = declared(
        {
            "quant_method": "compressed-tensors",
            "config_groups": {
                "group_0": {"targets": ["Linear"], "weights": FP8, "format": "float-quantized"},
                "group_1": {
                    "targets": [r"re:.*layers\.1\.mlp\.experts\.\d+\.w\d"],
                    "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 64},
                    "format": "pack-quantized",
                },
            },
            "ignore": [r"re:.*mlp\.gate$", "q_proj", "lm_head"],
        }
    )
    assert not found.leaves_others_open and not found.open
    assert stored(found, EXPERT) == Storage("int4", 64) and stored(found, EXPERT, 2) == Storage("fp8-channel")
    assert stored(found, LATENT) == stored(found, SHARED) == Storage("fp8-channel")
    assert stored(found, QUERY) is stored(found, ROUTER) is None
    assert found.storage(parse_name("language_model.lm_head.weight")) is None  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("section", "expert", "query"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ["self_attn"]},
         Storage("fp8-block"), None),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "exclude_modules": ["*self_attn*"]},
         Storage("nvfp4-modelopt"), None),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4",
          "llm_int8_skip_modules": ["mlp", "lm_head"]}, Storage("nf4"), Storage("nf4")),
        ({"config_groups": {"FP8_DYNAMIC": ["Linear"]}, "ignore": ["re:.*gate$"]},
         Storage("fp8-channel"), Storage("fp8-channel")),
        ({"format": "mxfp4-pack-quantized"}, Storage("mxfp4"), None),
    ],
    ids=["fp8", "modelopt", "bitsandbytes", "preset", "format alone"],
)  # fmt: skip
def test_every_library_has_its_way_to_say_it(section: dict[str, Any], expert: Storage, query: Storage | None):
    found = declared(section)
    assert not found.open and stored(found, EXPERT) == expert and stored(found, QUERY) == query


@pytest.mark.parametrize(
    ("section", "says"),
    [
        ({"quant_method": "gptq", "bits": 4}, "quant_method 'gptq'"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "load_in_8bit"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_use_double_quant": True}, "double"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quant_algo 'W4A8_AWQ'"),
        ({"quant_method": "fp8"}, "weight_block_size None"),
        ({"config_groups": {"a": [1, 2]}}, "group 'a'"),
        ({"config_groups": {"a": {"weights": {**FP8, "strategy": "tensor"}, "targets": ["Linear"]}}}, "group 'a'"),
        ({"config_groups": {"a": {"weights": {"num_bits": 4, "type": "int", "strategy": "channel", "symmetric": False}}}},
         "group 'a'"),
        ({"config_groups": {"a": None}}, "group 'a'"),
        ({"format": "mxfp4-pack-quantized", "ignore": ["re:(", None]}, "pattern 're:('"),
    ],
)  # fmt: skip
def test_what_is_not_understood_is_told(section: dict[str, Any], says: str):
    assert says in declared(section).open[0]


def test_what_one_section_cannot_say_stands_beside_it():
    beside = {"modules": {r"re:.*routed_expert_down_proj$": "nf4", r"re:.*q_proj$": "of-tomorrow"}}
    found = declared({"format": "nvfp4-pack-quantized"}, k3tool_quantization=beside)
    assert stored(found, LATENT) == Storage("nf4") and stored(found, QUERY) is None
    assert "scheme 'of-tomorrow'" in found.open[0]


def test_a_pattern_that_would_take_forever_is_not_tried():
    found = declared({"format": "mxfp4-pack-quantized", "ignore": ["re:(.*)*$x", "re:" + ".*a" * 50, "re:(a|aa)+$"]})
    assert stored(found, EXPERT) and len(found.open) == 3
