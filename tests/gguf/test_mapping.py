"""Names, shapes and keys of the architecture, for the released configuration and for every way in which one can differ."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest

from k3tool import release
from k3tool.catalog import catalog
from k3tool.checkpoint.table import Kind
from k3tool.config import K3Config
from k3tool.errors import CheckpointCorrupt, CheckpointMissing, UnsupportedError
from k3tool.gguf.container import BF16, F32, MXFP4, Q8_0
from k3tool.gguf.mapping import GgufTensor, Types, gguf_tensors
from k3tool.gguf.metadata import check_supported, model_keys
from k3tool.synthetic import tiny_config

# The release's widths, with few layers and experts, so that every step can be looked at.
_RELEASE = release.config()
SHORT = replace(_RELEASE, num_experts=16, layer_kinds=_RELEASE.layer_kinds[:5], vision=None)
TINY = K3Config.from_dict(tiny_config(num_layers=8, vocab_size=512))


class Table:
    """Stands for the headers of a checkpoint: names and kinds, no bytes."""

    def __init__(self, config: K3Config) -> None:
        self.kinds = {entry.name: Kind(entry.dtype, entry.shape) for entry in catalog(config).entries}
        self.source = SimpleNamespace(label="the source")

    def __contains__(self, name: object) -> bool:
        return name in self.kinds

    def __iter__(self) -> Iterator[str]:
        return iter(self.kinds)

    def __len__(self) -> int:
        return len(self.kinds)

    def kind(self, name: str) -> Kind:
        return self.kinds[name]


def mapped(config: K3Config, table: Table, types: Types | None = None) -> dict[str, GgufTensor]:
    tensors, _ = gguf_tensors(config, table, types or Types(BF16, None))  # type: ignore[arg-type]
    named = {tensor.info.name: tensor for tensor in tensors}
    assert len(named) == len(tensors)
    return named


@pytest.fixture(scope="module")
def released() -> dict[str, GgufTensor]:
    return mapped(release.config(), Table(release.config()))


def test_the_release_becomes_2573_tensors(released):
    assert len(released) == 4 + 93 * 5 + 69 * 13 + 24 * 8 + 3 + 92 * 11 == 2573
    assert sum(tensor.sources for tensor in released.values()) == 2573 - 3 * 92 + 3 * 92 * 896
    experts = [tensor.info for tensor in released.values() if tensor.component == "routed_experts"]
    assert {(info.kind.name, info.nbytes) for info in experts} == {("MXFP4", 896 * 3072 * 3584 // 32 * 17)}
    # the experts take exactly the bytes they have in the release: codes and scales
    assert sum(info.nbytes for info in experts) == 1_446_456_066_048


def test_shapes_of_the_release(released):
    shapes = {
        "token_embd.weight": (163840, 7168),
        "output_res_score.weight": (7168,),
        "blk.0.ffn_gate.weight": (33792, 7168),
        "blk.0.ssm_conv1d_q.weight": (1, 12288, 1, 4),
        "blk.0.ssm_a": (96,),
        "blk.0.ssm_dt.bias": (12288,),
        "blk.0.ssm_norm.weight": (128,),
        "blk.0.ssm_beta.weight": (96, 7168),
        "blk.0.ssm_f_b.weight": (12288, 128),
        "blk.3.attn_q_b.weight": (96 * 192, 1536),
        "blk.3.attn_kv_a_mqa.weight": (576, 7168),
        "blk.3.attn_k_b.weight": (96, 512, 128),
        "blk.3.attn_v_b.weight": (96, 128, 512),
        "blk.3.attn_gate.weight": (12288, 7168),
        "blk.92.exp_probs_b.bias": (896,),
        "blk.92.ffn_routed_down.weight": (3584, 7168),
        "blk.92.ffn_routed_up.weight": (7168, 3584),
        "blk.92.ffn_gate_shexp.weight": (6144, 7168),
        "blk.92.ffn_gate_exps.weight": (896, 3072, 3584),
        "blk.92.ffn_down_exps.weight": (896, 3584, 3072),
    }
    assert {name: released[name].info.shape for name in shapes} == shapes


def test_only_matrices_follow_the_trunk(released):
    """ggml has no element-wise operations on 16-bit vectors: those are float32, whatever the trunk is."""
    for tensor in released.values():
        name, kind = tensor.info.name, tensor.info.kind
        if tensor.component == "routed_experts":
            assert kind is MXFP4
        elif len(tensor.info.shape) == 1 or "conv1d" in name or "ffn_gate_inp" in name:
            assert kind is F32, name
        else:
            assert kind is BF16, name


@pytest.mark.parametrize("types", [Types(BF16, None), Types(F32, F32), Types(Q8_0, BF16)])
def test_steps_are_small_and_make_exactly_the_bytes(types):
    for tensor in mapped(SHORT, Table(SHORT), types).values():
        assert sum(output.nbytes for step in tensor.steps for output in step.outputs) == tensor.info.nbytes
        assert max(step.memory_bytes for step in tensor.steps) < 100 << 20


def test_experts_are_stacked_in_the_order_of_their_numbers():
    tensor = mapped(TINY, Table(TINY))["blk.2.ffn_down_exps.weight"]
    read = [[region.tensor for region in step.needs] for step in tensor.steps]
    prefix = "language_model.model.layers.2.block_sparse_moe.experts"
    assert read == [[f"{prefix}.{e}.w2.weight_packed", f"{prefix}.{e}.w2.weight_scale"] for e in range(12)]


def test_rows_that_are_no_whole_blocks_stay_bf16():
    named = mapped(TINY, Table(TINY), Types(Q8_0, None))
    assert named["blk.3.attn_k_b.weight"].info.kind is BF16  # rows of 16
    assert named["blk.3.attn_v_b.weight"].info.kind is Q8_0


# What cannot be written


def test_a_missing_tensor_is_named():
    for name in (
        "language_model.model.layers.3.self_attn.g_proj.weight",
        "language_model.model.layers.1.block_sparse_moe.routed_expert_norm.weight",
        "language_model.model.layers.1.block_sparse_moe.experts.7.w3.weight_scale",
        "language_model.model.layers.0.self_attention_res_proj.weight",
        "language_model.lm_head.weight",
    ):
        table = Table(TINY)
        del table.kinds[name]
        with pytest.raises(CheckpointMissing, match=name):
            mapped(TINY, table)


def test_a_tensor_that_has_no_place_is_named():
    table = Table(TINY)
    table.kinds["language_model.model.layers.1.self_attn.q_proj.bias"] = Kind("BF16", (96,))
    with pytest.raises(UnsupportedError, match=r"layers\.1\.self_attn\.q_proj\.bias has no place"):
        mapped(TINY, table)


def test_another_shape_is_named():
    table = Table(TINY)
    table.kinds["language_model.model.layers.1.self_attn.f_b_proj.weight"] = Kind("BF16", (96, 31))
    with pytest.raises(
        CheckpointCorrupt, match=r"f_b_proj\.weight is \[96, 31\], the configuration implies \[96, 32\]"
    ):
        mapped(TINY, table)


@pytest.mark.parametrize(
    ("module", "parts", "named"),
    [
        ("self_attn.q_proj", {"weight": ("F8_E4M3", (96, 64)), "weight_scale": ("F32", (96, 1))}, "q_proj is stored as fp8-channel"),
        ("self_attn.o_proj", {"weight_packed": ("I32", (64, 24)), "weight_scale": ("BF16", (64, 3))}, "o_proj is stored as weight_packed and"),
        ("block_sparse_moe.routed_expert_up_proj", {"weight": ("U8", (1024, 1)), "weight.absmax": ("U8", (32,))}, "up_proj is stored as weight and"),
        ("block_sparse_moe.experts.4.w1", {"weight": ("F8_E4M3", (32, 32)), "weight_scale": ("F32", (32, 1))}, r"experts\.4\.w1 is stored as fp8-channel"),
        ("block_sparse_moe.experts.4.w1", {"weight": ("BF16", (32, 32))}, r"experts\.4\.w1 is stored as bf16: .*all alike"),
    ],
)  # fmt: skip
def test_other_schemes_are_refused_by_name(module, parts, named):
    table = Table(TINY)
    path = f"language_model.model.layers.1.{module}"
    for name in [name for name in table.kinds if name.rsplit(".", 1)[0] == path]:
        del table.kinds[name]
    table.kinds.update({f"{path}.{part}": Kind(dtype, shape) for part, (dtype, shape) in parts.items()})
    with pytest.raises(UnsupportedError, match=named):
        mapped(TINY, table)


def test_nvfp4_experts_are_refused_by_name():
    document = tiny_config(num_layers=4, vocab_size=512)
    document["text_config"]["quantization_config"]["format"] = "nvfp4-pack-quantized"
    del document["text_config"]["quantization_config"]["config_groups"]
    config = K3Config.from_dict(document)
    assert config.expert_scheme == "nvfp4"
    with pytest.raises(UnsupportedError, match=r"experts\.0\.w1 is stored as nvfp4: GGUF takes") as refused:
        mapped(config, Table(config))
    assert refused.value.hint.startswith("decode it first: ") and refused.value.hint.endswith("--experts bf16")


def test_plain_experts_have_no_codes_to_keep():
    document = tiny_config(num_layers=4, vocab_size=512)
    del document["text_config"]["quantization_config"]
    config = K3Config.from_dict(document)
    assert mapped(config, Table(config))["blk.1.ffn_up_exps.weight"].info.kind is BF16
    assert mapped(config, Table(config), Types(BF16, Q8_0))["blk.1.ffn_up_exps.weight"].info.kind is Q8_0
    with pytest.raises(UnsupportedError, match=r"experts\.0\.w1 is BF16, not MXFP4"):
        mapped(config, Table(config), Types(BF16, MXFP4))


CHANGES = [
    ({"is_k3": False}, "model_type"),
    ({"num_experts": 1032}, "num_experts 1032 is beyond 1024"),
    ({"kda_num_heads": 2}, "num_attention_heads 3, KDA num_heads 2"),
    ({"gate_lower_bound": None}, "gate_lower_bound"),
    ({"full_rank_gate": False}, "use_full_rank_gate"),
    ({"q_lora_rank": None}, "q_lora_rank"),
    ({"mla_output_gate": False}, "mla_use_output_gate"),
    ({"latent_size": None}, "routed_expert_hidden_size"),
    ({"latent_norm": False}, "latent_moe_use_norm"),
    ({"num_shared_experts": 0}, "shared experts"),
    ({"moe_layer_freq": 2}, "moe_layer_freq"),
    ({"num_expert_groups": 2}, "num_expert_group"),
    ({"router_activation": "softmax"}, "softmax"),
    ({"router_bias": False}, "e_score_correction_bias"),
    ({"activation": "silu"}, "silu"),
    ({"situ_linear_beta": 0.0}, "activation_situ_linear_beta"),
    ({"attn_res_block_size": None}, "attn_res_block_size"),
    ({"tie_word_embeddings": True}, "tie_word_embeddings"),
]


@pytest.mark.parametrize(("change", "named"), CHANGES)
def test_what_no_key_can_say_is_refused(change, named):
    check_supported(TINY)
    with pytest.raises(UnsupportedError, match=f"kimi-k3 cannot hold this model: .*{named}"):
        check_supported(replace(TINY, **change))


def test_keys_of_the_release():
    keys = {name: value.value for name, value in model_keys(release.config(), "Kimi K3", "MXFP4", True)}
    kinds = {name: value.kind for name, value in model_keys(release.config(), "Kimi K3", "MXFP4", True)}
    assert keys["general.architecture"] == "kimi-k3" and keys["general.name"] == "Kimi K3"
    assert (keys["general.file_type"], keys["general.quantization_version"]) == (38, 2)
    heads = keys.pop("kimi-k3.attention.head_count_kv")
    assert len(heads) == 93 and sum(heads) == 24 and [i for i, head in enumerate(heads) if head][:2] == [3, 7]
    assert heads[-2:] == [1, 1]
    expected = {
        "block_count": 93, "context_length": 1048576, "embedding_length": 7168, "feed_forward_length": 33792,
        "vocab_size": 163840, "attention.head_count": 96, "attention.layer_norm_rms_epsilon": 1e-5,
        "attention.q_lora_rank": 1536, "attention.kv_lora_rank": 512, "attention.key_length": 576,
        "attention.value_length": 512, "attention.key_length_mla": 192, "attention.value_length_mla": 128,
        "rope.dimension_count": 64, "ssm.conv_kernel": 4, "kda.head_dim": 128, "kda.gate_lower_bound": -5.0,
        "expert_count": 896, "expert_used_count": 16, "expert_shared_count": 2, "expert_feed_forward_length": 3072,
        "expert_latent_length": 3584, "expert_gating_func": 2, "expert_weights_norm": True, "expert_weights_scale": 1.0,
        "leading_dense_block_count": 1, "attn_res.block_size": 12, "activation.situ_beta": 4.0,
        "activation.situ_linear_beta": 25.0,
    }  # fmt: skip
    assert {name[8:]: value for name, value in keys.items() if name.startswith("kimi-k3.")} == expected
    assert kinds["kimi-k3.expert_weights_norm"] == "bool" and kinds["kimi-k3.attention.head_count_kv"] == "i32"
    reals = {name[8:] for name, kind in kinds.items() if kind == "f32"}
    assert reals == {"attention.layer_norm_rms_epsilon", "kda.gate_lower_bound", "expert_weights_scale",
                     "activation.situ_beta", "activation.situ_linear_beta"}  # fmt: skip


def test_a_catalogue_of_names_is_used_up():
    """Every tensor of the text model goes somewhere: the mapping would have refused otherwise, and reads each once."""
    read: dict[str, int] = {}
    for tensor in mapped(SHORT, Table(SHORT)).values():
        for step in tensor.steps:
            for region in step.needs:
                read[region.tensor] = read.get(region.tensor, 0) + region.nbytes
    entries = catalog(SHORT).entries
    assert set(read) == {entry.name for entry in entries}
    short = {entry.name for entry in entries if read[entry.name] != entry.nbytes}
    assert short == {entry.name for entry in entries if entry.name.endswith(".A_log")}  # its padding stays behind
