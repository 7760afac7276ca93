"""The split table against the release, and storage schemes that a layout can or cannot divide."""

from __future__ import annotations

import json

import numpy as np
import pytest

from k3tool.catalog import catalog, expert_matrix_shapes, section_entries
from k3tool.checkpoint.table import Kind
from k3tool.config import K3Config
from k3tool.errors import CheckpointCorrupt, UnsupportedError
from k3tool.layout import Layout
from k3tool.names import parse_name
from k3tool.reshard import Request, prepare
from k3tool.synthetic import tiny_config
from k3tool.transform.split import TABLE, Splitter, parsed
from tests.transform import cases

LAYER = "language_model.model.layers."
PREFIX = LAYER + "1.block_sparse_moe.experts.0."


@pytest.fixture(scope="module")
def k3(shared) -> Splitter:
    return Splitter(K3Config.from_dict(json.loads((shared / "k3" / "config.json").read_bytes())))


def cut_shape(splitter: Splitter, name: str, dtype: str, shape: tuple[int, ...], tp: int) -> tuple[int, ...]:
    found = parsed(name)
    rule = splitter.rule(found)
    assert rule is not None
    return splitter.cut(found, rule, Kind(dtype, shape), tp).shape(shape)


@pytest.mark.parametrize(
    ("name", "shape", "tp8"),
    [
        ("0.self_attn.q_proj.weight", (12288, 7168), (1536, 7168)),
        ("0.self_attn.g_proj.weight", (12288, 7168), (1536, 7168)),
        ("0.self_attn.q_conv1d.weight", (12288, 1, 4), (1536, 1, 4)),
        ("0.self_attn.f_a_proj.weight", (128, 7168), (128, 7168)),
        ("0.self_attn.f_b_proj.weight", (12288, 128), (1536, 128)),
        ("0.self_attn.b_proj.weight", (96, 7168), (12, 7168)),
        ("0.self_attn.A_log", (128,), (128,)),
        ("0.self_attn.dt_bias", (12288,), (1536,)),
        ("0.self_attn.o_norm.weight", (128,), (128,)),
        ("0.self_attn.o_proj.weight", (7168, 12288), (7168, 1536)),
        ("3.self_attn.q_a_proj.weight", (1536, 7168), (1536, 7168)),
        ("3.self_attn.q_b_proj.weight", (18432, 1536), (2304, 1536)),
        ("3.self_attn.kv_a_proj_with_mqa.weight", (576, 7168), (576, 7168)),
        ("3.self_attn.kv_b_proj.weight", (24576, 512), (3072, 512)),
        ("3.self_attn.g_proj.weight", (12288, 7168), (1536, 7168)),
        ("3.self_attn.o_proj.weight", (7168, 12288), (7168, 1536)),
        ("0.mlp.gate_proj.weight", (33792, 7168), (4224, 7168)),
        ("0.mlp.down_proj.weight", (7168, 33792), (7168, 4224)),
        ("1.block_sparse_moe.gate.weight", (896, 7168), (896, 7168)),
        ("1.block_sparse_moe.gate.e_score_correction_bias", (896,), (896,)),
        ("1.block_sparse_moe.routed_expert_down_proj.weight", (3584, 7168), (3584, 7168)),
        ("1.block_sparse_moe.shared_experts.up_proj.weight", (6144, 7168), (768, 7168)),
        ("1.block_sparse_moe.shared_experts.down_proj.weight", (7168, 6144), (7168, 768)),
        ("1.block_sparse_moe.experts.7.w1.weight_packed", (3072, 1792), (384, 1792)),
        ("1.block_sparse_moe.experts.7.w1.weight_scale", (3072, 112), (384, 112)),
        ("1.block_sparse_moe.experts.7.w2.weight_packed", (3584, 1536), (3584, 192)),
        ("1.block_sparse_moe.experts.7.w2.weight_scale", (3584, 96), (3584, 12)),
        ("1.mlp_res_proj.weight", (1, 7168), (1, 7168)),
    ],
)
def test_what_tp8_stores_of_the_release(k3, name, shape, tp8):
    dtype = "U8" if "_packed" in name or "_scale" in name else "BF16"
    assert cut_shape(k3, LAYER + name, dtype, shape, 8) == tp8
    assert cut_shape(k3, LAYER + name, dtype, shape, 1) == shape


def test_vocabulary_and_decay_padding(k3):
    assert cut_shape(k3, "language_model.lm_head.weight", "BF16", (163840, 7168), 3) == (54614, 7168)
    name = parsed(LAYER + "0.self_attn.A_log")
    rule = k3.rule(name)
    windows = [k3.cut(name, rule, Kind("F32", (128,)), 8).window(rank) for rank in range(8)]
    assert windows == [(12 * rank, 12 * rank + 12) for rank in range(8)]
    assert k3.cut(name, rule, Kind("F32", (1, 1, 96, 1)), 8).shape((1, 1, 96, 1)) == (1, 1, 12, 1)
    with pytest.raises(CheckpointCorrupt, match="96 heads"):
        k3.cut(name, rule, Kind("F32", (100,)), 8)


def test_owners_in_the_release(k3):
    layout = Layout(2, 4, 4)

    def owners(name: str) -> list[tuple[int, int | None]]:
        found = parsed(name)
        return k3.owners(found, k3.rule(found), layout)

    assert owners("language_model.model.embed_tokens.weight") == [(0, None)]
    assert owners("vision_tower.encoder.blocks.0.wo.weight") == [(0, None)]
    assert owners("language_model.lm_head.weight") == [(3, None)]
    assert owners("language_model.model.output_attn_res_proj.weight") == [(3, None)]
    assert owners(LAYER + "23.mlp_res_norm.weight") == [(0, None)]
    assert owners(LAYER + "24.mlp_res_norm.weight") == [(1, None)]
    assert owners(LAYER + "92.block_sparse_moe.experts.224.w1.weight_packed") == [(3, 1)]


def test_every_tensor_of_the_release_has_a_rule(k3):
    for section in (0, 1, 3, 92, 93, 94, 95):
        for entry in section_entries(k3.config, section):
            name = parse_name(entry.name)
            assert name is not None and k3.rule(name) is not None, entry.name
    for name in ("model.mtp.weight", LAYER + "93.input_layernorm.weight", LAYER + "0.self_attn.rotary.weight"):
        assert k3.rule(parsed(name)) is None


def test_the_table_names_every_module_once_per_kind():
    for kind, modules in TABLE.items():
        assert all("." not in kind and module == module.strip() for module in modules)


# Storage schemes


def stored(document: dict, modules: dict[str, dict[str, tuple[str, tuple[int, ...]]]]) -> dict[str, bytes]:
    """A random checkpoint in which the modules whose name ends so are stored as these parts instead."""
    from k3tool.checkpoint.header import build_header
    from k3tool.checkpoint.index import build_index

    config = K3Config.from_dict(document)
    rng = np.random.default_rng(0)
    specs = []
    for entry in catalog(config).entries:
        module, _, part = entry.name.rpartition(".")
        end = next((end for end in modules if module.endswith(end)), None)
        if end is None:
            specs.append((entry.name, entry.dtype, entry.shape))
        elif part in ("weight", "weight_packed"):
            specs += [(f"{module}.{new}", *kind) for new, kind in modules[end].items()]
    head, header = build_header(specs)
    body = bytearray(rng.integers(0, 256, header.file_size - header.data_start, dtype=np.uint8).tobytes())
    for spec in header.tensors:
        if spec.name.endswith("A_log"):
            body[spec.start + 4 * config.kda_num_heads : spec.end] = bytes(spec.nbytes - 4 * config.kda_num_heads)
        if spec.name.endswith("weight_shape"):
            shape = (256, 512) if ".w2." in spec.name else (512, 256)
            body[spec.start : spec.end] = np.array(shape, np.int64).tobytes()
    files = {"model.safetensors": head + bytes(body), "config.json": json.dumps(document).encode()}
    files["model.safetensors.index.json"] = build_index(
        {spec.name: "model.safetensors" for spec in header.tensors}, len(body)
    )
    return files


def small(**more: object) -> dict:
    return tiny_config(num_layers=2, kda_heads=4, mla_heads=4, num_experts=2, experts_per_token=1, vision=False,
                       vocab_size=260, moe_intermediate_size=512, latent_size=256, **more)  # fmt: skip


def round_trip(files: dict[str, bytes], layout: Layout) -> dict[str, bytes]:
    ranks = cases.carry_out_in_memory(
        prepare(cases.as_source(files), Request(tp=layout.tp, ep=layout.ep, pp=layout.pp))
    )
    joined = cases.carry_out_in_memory(prepare(cases.as_source(ranks), Request(gpus=1, form="hf")))
    assert cases.tensors_of(joined) == cases.tensors_of(files)
    return ranks


@pytest.mark.parametrize("axis_first", [True, False], ids=["block scales", "row scales"])
def test_fp8_experts_split_by_whole_blocks(axis_first):
    document = small()
    document["text_config"].pop("quantization_config")
    rows, columns = expert_matrix_shapes(K3Config.from_dict(document))["w2"]
    assert (rows, columns) == (256, 512)

    def parts(out: int, into: int) -> dict:
        scales = ("F32", (out // 128, into // 128)) if axis_first else ("F32", (out, 1))
        return {"weight": ("F8_E4M3", (out, into)), "weight_scale": scales}

    files = stored(document, {".w1": parts(512, 256), ".w2": parts(256, 512), ".w3": parts(512, 256)})
    ranks = round_trip(files, Layout(4, 1, 1))
    original, second = cases.tensors_of(files), cases.tensors_of(ranks, "rank-00001-of-00004")
    name = "language_model.model.layers.1.block_sparse_moe.experts.1.w2.weight"
    whole = np.frombuffer(original[name][2], np.uint8).reshape(256, 512)
    assert second[name][2] == whole[:, 128:256].tobytes()
    scale = np.frombuffer(original[name + "_scale"][2], np.float32).reshape(original[name + "_scale"][1])
    assert second[name + "_scale"][2] == (scale[:, 1:2] if axis_first else scale).tobytes()
    if axis_first:  # 512 / 8 = 64 columns are half a block
        document["text_config"]["linear_attn_config"]["num_heads"] = document["text_config"]["num_attention_heads"] = 8
        files = stored(document, {".w1": parts(512, 256), ".w2": parts(256, 512), ".w3": parts(512, 256)})
        with pytest.raises(UnsupportedError, match=r"TP 8 cannot divide .*experts\.0\.w1\.weight_scale: 512 rows"):
            prepare(cases.as_source(files), Request(tp=8))


def test_packed_integers_split_with_their_stored_shape():
    document = small()
    document["text_config"].pop("quantization_config")

    def parts(out: int, into: int) -> dict:
        return {"weight_packed": ("I32", (out, into // 8)), "weight_scale": ("BF16", (out, into // 32)),
                "weight_shape": ("I64", (2,))}  # fmt: skip

    files = stored(document, {".w1": parts(512, 256), ".w2": parts(256, 512), ".w3": parts(512, 256)})
    ranks = round_trip(files, Layout(4, 1, 1))
    third = cases.tensors_of(ranks, "rank-00002-of-00004")
    expert = "language_model.model.layers.1.block_sparse_moe.experts.0."
    assert third[expert + "w2.weight_packed"][1] == (256, 16) and third[expert + "w2.weight_scale"][1] == (256, 4)
    assert np.frombuffer(third[expert + "w2.weight_shape"][2], np.int64).tolist() == [256, 128]
    assert np.frombuffer(third[expert + "w1.weight_shape"][2], np.int64).tolist() == [128, 256]
    again = cases.carry_out_in_memory(prepare(cases.as_source(ranks), Request(tp=2)))
    direct = cases.carry_out_in_memory(prepare(cases.as_source(files), Request(tp=2)))
    for rank in range(2):
        folder = f"rank-0000{rank}-of-00002"
        assert cases.tensors_of(again, folder) == cases.tensors_of(direct, folder)


def test_a_block_that_is_not_full_is_never_cut():
    """192 columns in blocks of 128 are two scales, which look like groups of 96 but are not."""
    document = tiny_config(kda_heads=2, mla_heads=2, moe_intermediate_size=192)
    splitter = Splitter(K3Config.from_dict(document))
    name = PREFIX + "w2.weight_scale"
    assert cut_shape(splitter, name, "F32", (1, 2), 1) == (1, 2)
    with pytest.raises(UnsupportedError, match="192 columns in 2 stored units do not fall into 2 whole shares"):
        cut_shape(splitter, name, "F32", (1, 2), 2)
    assert cut_shape(splitter, name, "F32", (1, 1), 2) == (1, 1)  # one scale for all of them


def test_states_that_run_across_rows_are_refused_under_tp_but_not_under_ep():
    document = small()
    document["text_config"].pop("quantization_config")
    parts = {
        "weight": ("U8", (512 * 256 // 2, 1)),
        "weight.absmax": ("F32", (512 * 256 // 64,)),
        "weight.quant_map": ("F32", (16,)),
        "weight.quant_state.bitsandbytes__nf4": ("U8", (90,)),
    }
    files = stored(document, {".w1": parts, ".w2": parts, ".w3": parts})
    with pytest.raises(UnsupportedError, match=r"quantization states \(weight[\w.]*\) cover blocks that run") as caught:
        prepare(cases.as_source(files), Request(tp=2))
    assert caught.value.exit_code == 14 and "scales can be divided" in caught.value.hint
    round_trip(files, Layout(1, 2, 2))


def test_decay_padding_that_is_not_zero_stops_the_job():
    document = small()
    files = cases.write(document, 0, shards=1)
    name = next(name for name in files if name.startswith("model-"))
    data = bytearray(files[name])
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    entry = header["language_model.model.layers.0.self_attn.A_log"]
    data[8 + length + entry["data_offsets"][1] - 1] = 1
    files[name] = bytes(data)
    with pytest.raises(
        CheckpointCorrupt, match=r"layers\.0\.self_attn\.A_log: the entries from 4 to 32 pad it and must be zero"
    ):
        cases.carry_out_in_memory(prepare(cases.as_source(files), Request(tp=2)))
    round_trip(files, Layout(1, 2, 2))  # nothing is cut there: the bytes are carried as they are
