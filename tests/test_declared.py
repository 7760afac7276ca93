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
        ({"quant_method": "aqlm", "bits": 2}, "quant_method 'aqlm'"),
        ({"quant_method": "gptq", "bits": 3}, "gptq of 3 bits"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "load_in_8bit"),
        ({"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "int3"}}}, "a weight of Quark"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_use_double_quant": True}, "double"),
        ({"quant_method": "modelopt", "quant_algo": "W2A8"}, "quant_algo 'W2A8'"),
        ({"config_groups": {"a": [1, 2]}}, "group 'a'"),
        ({"config_groups": {"a": {"weights": {"num_bits": 3, "type": "int"}, "targets": ["Linear"]}}}, "group 'a'"),
        ({"config_groups": {"a": None}}, "group 'a'"),
        ({"config_groups": {"a": {"weights": {"num_bits": 8.5, "type": "int"}, "targets": 3}}}, "group 'a'"),
        ({"format": "mxfp4-pack-quantized", "ignore": ["re:(", None]}, "pattern 're:('"),
    ],
)  # fmt: skip
def test_what_is_not_understood_is_told(section: dict[str, Any], says: str):
    assert says in declared(section).open[0]


@pytest.mark.parametrize(
    ("section", "expert", "query"),
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, Storage("int4", 128), Storage("int4", 128)),
        ({"quant_method": "awq", "w_bit": 8, "q_group_size": -1, "modules_to_not_convert": ["self_attn"]},
         Storage("int8"), None),
        ({"quant_method": "fp8"}, Storage("fp8-channel"), Storage("fp8-channel")),
        ({"quant_method": "fp8", "weight_block_size": [1, 128]}, Storage("fp8-block"), Storage("fp8-block")),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, Storage("int8"), Storage("int8")),
        ({"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, Storage("mxfp4"), None),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ", "exclude_modules": ["*self_attn*"]},
         Storage("int4", 128), None),
        ({"quant_method": "modelopt", "config_groups": {"group_0": {
            "weights": {"num_bits": 4, "type": "float", "group_size": 16}, "targets": ["Linear"]}},
          "ignore": ["*self_attn*", "*.gate"]}, Storage("nvfp4"), Storage("nvfp4")),
        ({"quant_method": "quark", "exclude": ["re:.*self_attn.*"],
          "global_quant_config": {"weight": {"dtype": "fp4", "qscheme": "per_group", "group_size": 32}}},
         Storage("mxfp4"), None),
        ({"quant_method": "quark", "global_quant_config": {"weight": [{"dtype": "fp8_e4m3", "qscheme": "per_tensor"}]},
          "layer_quant_config": {"*.q_proj": {"weight": {"dtype": "int4", "qscheme": "per_group", "group_size": 64}}}},
         Storage("fp8-channel"), Storage("int4", 64)),
        ({"config_groups": {"a": {"weights": {**FP8, "strategy": "tensor"}, "targets": ["Linear"]}}, "ignore": ["gate"]},
         Storage("fp8-channel"), Storage("fp8-channel")),
        ({"config_groups": {"a": {"weights": {"num_bits": 8, "type": "int", "strategy": "channel"},
                                  "format": "int-quantized", "targets": ["Linear"]}}}, Storage("int8"), None),
    ],
    ids=lambda value: str(value.get("quant_method", "compressed-tensors")) if isinstance(value, dict) else None,
)  # fmt: skip
def test_what_k3tool_does_not_write_is_counted_by_its_bits_and_that_is_told(
    section: dict[str, Any], expert: Storage, query: Storage | None
):
    found = declared(section)
    assert stored(found, EXPERT) == expert and stored(found, QUERY) == query and stored(found, ROUTER) is None
    assert found.open and all("is counted as" in line and "scales may differ" in line for line in found.open)


def test_layers_that_are_listed_one_by_one_are_looked_up():
    """As ModelOpt writes mixed precision: a name for each module, or for all below it; half a million of them at once."""
    experts = {
        f"model.layers.1.mlp.experts.{expert}.{matrix}": {"quant_algo": "NVFP4", "group_size": 16}
        for expert in range(100_000)
        for matrix in ("w1", "w2", "w3")
    }
    section = {
        "quant_method": "modelopt_mixed",
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": {**experts, "language_model.model.layers.1.self_attn": {"quant_algo": "FP8"},
                             "lm_head": {"quant_algo": "W2"}},
    }  # fmt: skip
    found = declared(section)
    assert stored(found, EXPERT) == Storage("nvfp4-modelopt") and stored(found, QUERY) == Storage("fp8-channel")
    assert stored(found, EXPERT, 2) is stored(found, SHARED) is None
    assert ["FP8" in found.open[0], "W2" in found.open[1]] == [True, True] and len(found.open) == 2


def test_long_lists_of_words_are_all_heeded():
    layers = [f"model.layers.{layer}.self_attn.q_proj" for layer in range(5000)]
    for section in (
        {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": layers},
        {"format": "nvfp4-pack-quantized", "ignore": [*layers, "re:.*gate$"]},
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "exclude_modules": layers},
    ):
        found = declared(section)
        assert not found.open and stored(found, QUERY, 2) is None and stored(found, EXPERT) is not None
    found = declared({"format": "nvfp4-pack-quantized", "ignore": [f"re:.*{n}$" for n in range(5000)]})
    assert 1 <= len(found.open) <= 20


def test_what_one_section_cannot_say_stands_beside_it():
    beside = {"modules": {r"re:.*routed_expert_down_proj$": "nf4", r"re:.*q_proj$": "of-tomorrow"}}
    found = declared({"format": "nvfp4-pack-quantized"}, k3tool_quantization=beside)
    assert stored(found, LATENT) == Storage("nf4") and stored(found, QUERY) is None
    assert "scheme 'of-tomorrow'" in found.open[0]


def test_targets_of_another_kind_name_nothing_and_a_whole_float_is_a_number():
    for targets in (3, True, {"Linear": 1}, "Linear", [3, None]):
        found = declared({"config_groups": {"a": {"targets": targets, "weights": {"num_bits": 4.0, "type": "int"}}}})
        assert stored(found, EXPERT) is None
    found = declared({"config_groups": {"a": {"targets": ["Linear"], "weights": {"num_bits": 4.0, "type": "int"}}}})
    assert stored(found, EXPERT) == Storage("int4")


@pytest.mark.parametrize(
    ("pattern", "query"),
    [
        ("re:.*q_proj$", True), ("re:.*self_attn.*", True), ("re:.*q_pro$", False), ("re:q_proj", False),
        ("re:language_model.*q_proj", True), ("re:.*lm_head|q_proj", False), ("re:.*(lm_head|q_proj)$", True),
        (r"re:.*layers\.(1|7)\..*q_\w+$", True), (r"re:model\.layers\.\d+\.self_attn\.[qkv]_proj", True),
    ],
)  # fmt: skip
def test_patterns_match_as_from_the_start_of_a_name(pattern: str, query: bool):
    found = declared({"config_groups": {"a": {"targets": ["Linear"], "weights": FP8, "format": "float-quantized"}},
                      "ignore": ["re:.*gate$", pattern]})  # fmt: skip
    assert not found.open and (stored(found, QUERY) is None) == query


def test_a_pattern_that_would_take_forever_is_not_tried():
    found = declared({"format": "mxfp4-pack-quantized", "ignore": ["re:(.*)*$x", "re:" + ".*a" * 50, "re:(a|aa)+$"]})
    assert stored(found, EXPERT) and len(found.open) == 3
