"""What becomes what, in which steps, and what the new configuration says about it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from k3tool import formats
from k3tool.checkpoint.header import TensorSpec
from k3tool.checkpoint.reader import Checkpoint
from k3tool.checkpoint.source import open_source
from k3tool.errors import CheckFailed, CheckpointCorrupt, CheckpointMissing, UnsupportedError, UsageError
from k3tool.execute import Options
from k3tool.formats.nvfp4 import global_scale
from k3tool.names import parse_name
from k3tool.quantize import carry_out, prepare, quantize
from k3tool.readback import check_digests
from k3tool.reshard import Request, reshard
from k3tool.synthetic import tiny_config, write_checkpoint
from k3tool.transform import quantize_config
from k3tool.transform.forms import open_form
from k3tool.transform.quantize import QuantizedForm
from k3tool.transform.quantize_config import SECTION, Storage
from k3tool.transform.quantize_policy import Choice, Policy, Rule, make_policy, parse_recipe
from tests.helpers import copy_checkpoint

LAYER = "language_model.model.layers.3."
EXPERT = LAYER + "block_sparse_moe.experts.5.w1"
LATENT = LAYER + "block_sparse_moe.routed_expert_down_proj"


def read_values(folder: Path, module: str, shape: tuple[int, ...] | None = None) -> np.ndarray:
    """Decoded weight of one module of a checkpoint, by the plain functions."""
    checkpoint = Checkpoint.open(folder)
    specs: dict[str, TensorSpec] = {}
    for text in checkpoint.index.weight_map:
        if text.startswith(module + ".weight"):
            specs[text[len(module) + 1 :]] = checkpoint.locate(text).spec
    parts = {p: formats.view(checkpoint.read(f"{module}.{p}"), s.dtype, s.shape) for p, s in specs.items()}
    scheme = formats.detect(specs)
    return formats.dequantize(scheme, parts, shape or formats.logical_shape(scheme, specs))


def policy(**options: str) -> Policy:
    return make_policy(options)


# Policy and recipe


def name(text: str) -> Any:
    found = parse_name(text + ".weight")
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("module", "component"),
    [
        (EXPERT, "experts"),
        (LATENT, "latent"),
        (LAYER + "block_sparse_moe.routed_expert_up_proj", "latent"),
        (LAYER + "block_sparse_moe.routed_expert_norm", None),
        (LAYER + "block_sparse_moe.shared_experts.gate_proj", "shared"),
        (LAYER + "block_sparse_moe.gate", None),
        (LAYER + "self_attn.q_proj", "attention"),
        (LAYER + "self_attn.kv_a_proj_with_mqa", "attention"),
        (LAYER + "self_attn.b_proj", "attention"),
        (LAYER + "self_attn.o_norm", None),
        (LAYER + "self_attn.q_conv1d", None),
        (LAYER + "self_attention_res_proj", None),
        (LAYER + "mlp_res_proj", None),
        (LAYER + "mlp.gate_proj", None),
        (LAYER + "input_layernorm", None),
        ("language_model.lm_head", None),
        ("language_model.model.embed_tokens", None),
        ("vision_tower.encoder.blocks.0.wqkv", None),
        ("mm_projector.proj.0", None),
    ],
)
def test_options_reach_their_component_and_nothing_else(module: str, component: str | None) -> None:
    everything = policy(experts="int8", latent="int8", shared="int8", attention="int8")
    assert everything.choice(name(module)).scheme == ("int8" if component else "keep")
    if component:
        others = {c: "int8" for c in ("experts", "latent", "shared", "attention") if c != component}
        assert policy(**others).choice(name(module)).scheme == "keep"


def test_the_last_rule_that_covers_a_module_counts_and_options_go_over_the_recipe(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        'experts = "int8"\nlatent = "nf4"\n'
        '[[rule]]\nmatch = "re:.*self_attn\\\\.[qk]_proj"\nlayers = "2-4"\nscheme = "int4"\ngroup_size = 128\n'
        f'[[rule]]\nmatch = "{LAYER}self_attn.k_proj"\nscheme = "keep"\n'
    )
    chosen = make_policy({"experts": "nvfp4", "latent": None}, recipe)
    assert chosen.choice(name(EXPERT)) == Choice("nvfp4")
    assert chosen.choice(name(LATENT)) == Choice("nf4")
    assert chosen.choice(name(LAYER + "self_attn.q_proj")) == Choice("int4", 128)
    assert chosen.choice(name(LAYER + "self_attn.k_proj")) == Choice("keep")
    assert chosen.choice(name(LAYER.replace(".3.", ".5.") + "self_attn.q_proj")) == Choice("keep")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("experts = ", "not TOML"),
        ('experts = "fp7"', "unknown scheme 'fp7'"),
        ("experts = 4", "must be text"),
        ('expert = "int4"', "unknown key 'expert'"),
        ('[[rule]]\nscheme = "int4"', "match must be text"),
        ('[[rule]]\nmatch = "re:("\nscheme = "int4"', "is no pattern"),
        ('[[rule]]\nmatch = "x"\nscheme = "int4"\nlayer = 3', "unknown key 'layer'"),
        ('[[rule]]\nmatch = "x"\nscheme = "int4"\nlayers = "x"', "not a list of layers"),
        ('[[rule]]\nmatch = "x"\nscheme = "nf4"\ngroup_size = 64', "no choice of group_size"),
        ('latent = {scheme = "int4", group_size = -1}', "whole number"),
        ("rule = 3", "must be a table"),
    ],
)
def test_a_wrong_recipe_is_refused_with_what_is_wrong(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=re.escape(said)):
        parse_recipe(text.encode(), where="recipe.toml")


def test_a_recipe_that_is_not_there() -> None:
    with pytest.raises(CheckpointMissing, match=r"none\.toml"):
        make_policy({}, "none.toml")


# Plan


def test_a_plan_reads_no_weight_and_says_what_it_will_do(mini: Path, tmp_path: Path) -> None:
    """Every shard is cut to its header, as long as it was: reading a tensor would give zeros, so that nothing may."""
    copy = copy_checkpoint(mini, tmp_path / "copy")
    for shard in copy.glob("*.safetensors"):
        data = shard.read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        shard.write_bytes(data[:start] + bytes(len(data) - start))
    job = prepare(copy, policy(experts="nvfp4", latent="nf4")).as_json()
    assert job["components"] == {
        "routed_experts": {"from": "mxfp4", "scheme": "nvfp4", "tensors": 252},
        "latent": {"from": "bf16", "scheme": "nf4", "tensors": 14},
    }
    assert job["bytes_in"] == 1_147_856 and job["bytes_out"] == 1_117_700


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"attention": "fp8-block"}, UnsupportedError, r"self_attn\.b_proj: fp8-block cannot hold \[3, 64\]: 3 rows"),
        ({"attention": "int4"}, UnsupportedError, r"self_attn\.o_proj: int4 cannot hold \[64, 48\]: 48 columns"),
        ({"experts": "fp8-block"}, UnsupportedError, r"experts\.0\.w1: fp8-block cannot hold"),
        ({"experts": "int3"}, UsageError, "unknown scheme 'int3'"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_written(
    mini: Path, tmp_path: Path, options: dict[str, str], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        quantize(mini, tmp_path / "out", **options)  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()


def test_all_matrices_that_a_scheme_cannot_hold_are_named_at_once_with_one_that_holds_them(mini: Path) -> None:
    with pytest.raises(UnsupportedError) as refused:
        prepare(mini, policy(attention="fp8-block", experts="int4", shared="fp8-block"))
    for matrix in ("b_proj: fp8-block cannot hold [3, 64]: 3 rows are not", "nor kv_a_proj_with_mqa [40, 64]"):
        assert matrix in refused.value.message
    for matrix in ("nor gate_proj [", "nor down_proj ["):
        assert matrix in refused.value.message
    assert "experts.0" not in refused.value.message
    assert (
        refused.value.hint == "choose --attention fp8-channel and --shared fp8-channel, which holds every one of these"
    )
    chosen = policy(attention="fp8-channel", experts="int4", shared="fp8-channel")
    assert prepare(mini, chosen).as_json()["components"]["kda"]["scheme"] == "fp8-channel"
    with pytest.raises(UnsupportedError) as refused:
        prepare(mini, Policy({}, (Rule("re:.*o_proj", Choice("int4")),)))
    assert refused.value.hint == "choose the rule's scheme nvfp4, which holds every one of these"


def test_nf4_and_fp4_are_not_mixed_in_one_bitsandbytes_configuration(mini: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"experts.* would be nf4 and .*routed_expert_down_proj fp4"):
        quantize(mini, tmp_path / "out", experts="nf4", latent="fp4")
    assert not (tmp_path / "out").exists()


def test_rows_that_are_no_whole_blocks_of_bitsandbytes_are_said(mini: Path) -> None:
    said = [text for text in prepare(mini, policy(experts="nf4")).warnings if "no whole blocks of 64" in text]
    assert len(said) == 1 and "252 matrices" in said[0] and "experts.0.w1 [32, 32]" in said[0]
    assert not any("whole blocks" in text for text in prepare(mini, policy(experts="int4")).warnings)


@pytest.mark.parametrize("once", ["nvfp4", "nvfp4-modelopt", "int8", "int4", "fp8-channel", "nf4", "fp4"])
def test_experts_are_not_quantized_twice(mini: Path, tmp_path: Path, once: str) -> None:
    quantize(mini, tmp_path / "once", experts=once)
    for again in ("nvfp4", "int4", "mxfp4", once):
        with pytest.raises(UnsupportedError, match=rf"layers\.1\..*experts\.0\.w1 is stored as {once} already"):
            quantize(tmp_path / "once", tmp_path / "twice", experts=again)
    assert not (tmp_path / "twice").exists()
    assert quantize(tmp_path / "once", tmp_path / "decoded", experts="bf16").report.complete


@pytest.mark.parametrize(("scheme", "group"), [("int8", 0), ("int8", 16), ("int8", 32), ("int4", 0), ("int4", 16)])
def test_integers_are_told_apart_where_their_shapes_are_alike(
    mini: Path, tmp_path: Path, scheme: str, group: int
) -> None:
    """One scale a row, or groups of 16: the packed shape of 8 bits is that of 4 bits at twice the width."""
    chosen = Policy({"shared": Choice(scheme, group)})
    carry_out(prepare(mini, chosen), tmp_path / "out", options=Options())
    config = json.loads((tmp_path / "out" / "config.json").read_bytes())["text_config"]["quantization_config"]
    held = config["config_groups"]["group_1"]["weights"]
    assert held["num_bits"] == int(scheme[3:]) and held.get("group_size") == (group or None)
    module = f"{LAYER}block_sparse_moe.shared_experts.gate_proj"
    quantize(tmp_path / "out", tmp_path / "back", shared="bf16")
    before, after = read_values(mini, module), read_values(tmp_path / "back", module)
    assert before.shape == after.shape
    relative = np.sqrt(((after - before) ** 2).sum() / (before**2).sum())
    assert relative < (0.012 if scheme == "int8" else 0.14)


def test_a_group_that_does_not_divide_is_refused_with_the_tensor_named(mini: Path, tmp_path: Path) -> None:
    wide = Policy({"experts": Choice("int4", 128)})
    with pytest.raises(UnsupportedError, match=r"layers\.1\..*experts\.0\.w1: int4 cannot hold \[32, 32\]: 32 columns"):
        prepare(mini, wide)
    with pytest.raises(UnsupportedError, match=r"routed_expert_down_proj: int8 cannot hold \[32, 64\]: 64 columns"):
        prepare(mini, Policy({"latent": Choice("int8", 48)}))


def test_experts_of_a_layer_must_end_up_alike(mini: Path, tmp_path: Path) -> None:
    one = Policy({}, (Rule(EXPERT, Choice("nvfp4")),))
    with pytest.raises(UsageError, match=r"layer 3: .* would be stored differently"):
        prepare(mini, one)
    down = Policy({"experts": Choice("nvfp4")}, (Rule(r"re:.*experts\.\d+\.w2", Choice("int8")),))
    with pytest.raises(UsageError, match="would be stored differently"):
        prepare(mini, down)
    layers = Policy({}, (Rule(r"re:.*\.experts\..*", Choice("nvfp4"), frozenset({3, 4})),))
    assert prepare(mini, layers).as_json()["components"]["routed_experts"]["tensors"] == 72


def test_a_rule_that_covers_nothing_is_a_mistake(mini: Path) -> None:
    with pytest.raises(UsageError, match="covers no module"):
        prepare(mini, Policy({}, (Rule("re:.*q_projj", Choice("int8")),)))


def test_what_is_no_matrix_is_left_by_patterns_and_refused_by_name(mini: Path) -> None:
    opened = open_form(open_source(mini))
    wide = Policy({}, (Rule(r"re:.*layers\.0\.self_attn\.(q_conv1d|o_norm|q_proj)$", Choice("int8")),))
    changing = QuantizedForm(opened.form, opened.splitter, wide).changing
    assert list(changing) == ["language_model.model.layers.0.self_attn.q_proj"]
    named = Policy({}, (Rule("language_model.model.layers.0.self_attn.o_norm", Choice("int8")),))
    with pytest.raises(UnsupportedError, match="o_norm is no matrix"):
        QuantizedForm(opened.form, opened.splitter, named)


# Results


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    mini = Path(__file__).parent.parent / "golden" / "k3-mini-8"
    folder = tmp_path_factory.mktemp("exact") / "made"
    return folder, quantize(mini, folder, experts="nvfp4", latent="nf4")


def test_every_expert_keeps_its_values_and_every_other_tensor_its_bytes(mini: Path, exact: tuple[Path, Any]) -> None:
    folder, result = exact
    before, after = Checkpoint.open(mini), Checkpoint.open(folder)
    for text in before.index.weight_map:
        found = name(text.rpartition(".")[0])
        if found.expert is None and "routed_expert_" not in text:
            assert after.read(text) == before.read(text), text
    for layer in (1, 4, 7):
        for expert in (0, 5, 11):
            for matrix in ("w1", "w2", "w3"):
                module = f"language_model.model.layers.{layer}.block_sparse_moe.experts.{expert}.{matrix}"
                a, b = read_values(mini, module), read_values(folder, module)
                assert np.array_equal(a.view(np.uint32), b.view(np.uint32)), module
    component = result.components["routed_experts"]
    assert component["scheme"] == "nvfp4" and component["tensors"] == component["exact_tensors"] == 252
    assert component["relative_error"] == component["max_error"] == 0 and component["worst"] == []


def test_gate_and_up_of_an_expert_share_the_global_scale(exact: tuple[Path, Any]) -> None:
    checkpoint = Checkpoint.open(exact[0])
    for expert in range(12):
        owner = f"{LAYER}block_sparse_moe.experts.{expert}"
        scales = [checkpoint.read(f"{owner}.{matrix}.weight_global_scale") for matrix in ("w1", "w3")]
        assert scales[0] == scales[1]


def test_gate_and_up_of_the_shared_experts_and_the_dense_mlp_share_it_too(mini: Path, tmp_path: Path) -> None:
    chosen = Policy({"shared": Choice("nvfp4")}, (Rule(r"re:.*\.layers\.0\.mlp\..*", Choice("nvfp4")),))
    carry_out(prepare(mini, chosen), tmp_path / "out", options=Options())
    checkpoint = Checkpoint.open(tmp_path / "out")
    for owner in (f"{LAYER}block_sparse_moe.shared_experts", "language_model.model.layers.0.mlp"):
        gate, up, down = (
            np.frombuffer(checkpoint.read(f"{owner}.{matrix}_proj.weight_global_scale"), np.float32)[0]
            for matrix in ("gate", "up", "down")
        )
        amax = max(np.abs(read_values(mini, f"{owner}.{matrix}_proj")).max() for matrix in ("gate", "up"))
        assert gate == up == global_scale(float(amax)) and down != 0


KDA_FUSED = ("q_proj", "k_proj", "v_proj", "g_proj", "f_a_proj", "b_proj")
MLA_FUSED = ("q_a_proj", "kv_a_proj_with_mqa")


@pytest.mark.parametrize("size", [20_000, 64_000_000])
def test_what_engines_fuse_of_an_attention_shares_it_in_one_file(mini: Path, tmp_path: Path, size: int) -> None:
    request_ = Request(gpus=1, form="hf", max_shard_bytes=size)
    quantize(mini, tmp_path / "out", attention="nvfp4", request=request_)
    checkpoint = Checkpoint.open(tmp_path / "out")

    def scale(path: str) -> float:
        return float(np.frombuffer(checkpoint.read(path + ".weight_global_scale"), np.float32)[0])

    for layer, fused in ((2, KDA_FUSED), (3, MLA_FUSED)):
        owner = f"language_model.model.layers.{layer}.self_attn."
        amax = max(float(np.abs(read_values(mini, owner + leaf)).max()) for leaf in fused)
        assert {scale(owner + leaf) for leaf in fused} == {float(global_scale(amax))}
        for leaf in ("o_proj", "g_proj") if layer == 3 else ("o_proj", "f_b_proj"):
            assert scale(owner + leaf) == global_scale(float(np.abs(read_values(mini, owner + leaf)).max())), leaf
        shards = {checkpoint.locate(f"{owner}{leaf}.weight_packed").shard for leaf in fused}
        assert len(shards) == 1


def test_the_report_measures_what_is_on_disk(mini: Path, exact: tuple[Path, Any]) -> None:
    folder, result = exact
    modules = [
        f"{LAYER.replace('.3.', f'.{n}.')}block_sparse_moe.routed_expert_{d}_proj"
        for n in range(1, 8)
        for d in ("up", "down")
    ]
    shapes = {module: read_values(mini, module).shape for module in modules}
    error = source = peak = 0.0
    by_module = {}
    for module in modules:
        a, b = read_values(mini, module).astype(np.float64), read_values(folder, module, shapes[module])
        by_module[module] = np.sqrt(((a - b) ** 2).sum() / (a**2).sum())
        error, source, peak = error + ((a - b) ** 2).sum(), source + (a**2).sum(), max(peak, np.abs(a - b).max())
    latent = result.components["latent"]
    assert latent["tensors"] == 14 and latent["exact_tensors"] == 0
    assert latent["relative_error"] == pytest.approx(np.sqrt(error / source), rel=1e-9)
    assert latent["max_error"] == pytest.approx(peak, rel=1e-6)
    assert latent["worst"] == sorted(by_module, key=lambda module: -by_module[module])[:5]
    written = json.loads((folder / "k3tool-quantization.json").read_bytes())
    assert written["components"]["latent"] == latent
    rows = {row[0]: row for row in written["tensors"]}
    assert len(rows) == 266 and written["columns"][0] == "name" and written["tensors"][0][0] == latent["worst"][0]
    assert np.sqrt(rows[modules[0]][6] / rows[modules[0]][4]) == pytest.approx(by_module[modules[0]], rel=1e-9)


def test_running_again_changes_nothing_and_reports_the_same(mini: Path, exact: tuple[Path, Any]) -> None:
    folder, result = exact
    before = {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.glob("*.safetensors")}
    again = quantize(mini, folder, experts="nvfp4", latent="nf4")
    assert again.components == result.components and len(again.report.kept) == len(before)
    assert {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.glob("*.safetensors")} == before
    with pytest.raises(UsageError, match="already holds something else"):
        quantize(mini, folder, experts="int8")


def test_a_written_checkpoint_opens_and_decodes_back(mini: Path, exact: tuple[Path, Any], tmp_path: Path) -> None:
    quantize(exact[0], tmp_path / "back", experts="bf16", latent="bf16", exact=False)
    assert np.array_equal(read_values(tmp_path / "back", EXPERT), read_values(mini, EXPERT))
    config = json.loads((tmp_path / "back" / "config.json").read_bytes())
    assert "quantization_config" not in config["text_config"] and SECTION not in config


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small checkpoint whose widths two tensor-parallel ranks can share."""
    folder = tmp_path_factory.mktemp("wide") / "made"
    config = tiny_config(
        num_layers=4, hidden_size=128, kda_heads=4, mla_heads=4, v_head_dim=32, intermediate_size=128, num_experts=4,
        moe_intermediate_size=128, latent_size=64, vision=False,
    )  # fmt: skip
    write_checkpoint(folder, config, seed=7)
    return folder


@pytest.mark.parametrize(
    ("request_", "scheme"),
    [
        (Request(gpus=4, ep=4), "nvfp4"),
        (Request(gpus=4, ep=2, pp=2), "nvfp4"),
        (Request(gpus=2, tp=2), "nvfp4"),
        (Request(gpus=4, tp=2, ep=2), "int8"),
        (Request(gpus=2, tp=2), "fp8-channel"),
        (Request(gpus=2, tp=2), "int4"),
        (Request(gpus=2, tp=2), "nvfp4-modelopt"),
        (Request(gpus=2, tp=2), "attention"),
    ],
)
def test_one_pass_gives_what_two_passes_give(wide: Path, tmp_path: Path, request_: Request, scheme: str) -> None:
    """Quantize while resharding = reshard what was quantized, to the byte of every tensor of every rank."""
    schemes = {"experts": scheme, "shared": "int8", "latent": "nf4"}
    if scheme == "attention":
        schemes = {"attention": "nvfp4"}
    quantize(wide, tmp_path / "whole", **schemes)  # type: ignore[arg-type]
    reshard(tmp_path / "whole", tmp_path / "two", request_)
    quantize(wide, tmp_path / "one", request=request_, **schemes)  # type: ignore[arg-type]
    folders = sorted(path.name for path in (tmp_path / "two").iterdir() if path.is_dir())
    assert folders == sorted(path.name for path in (tmp_path / "one").iterdir() if path.is_dir())
    for folder in folders:
        one, two = Checkpoint.open(tmp_path / "one" / folder), Checkpoint.open(tmp_path / "two" / folder)
        assert set(one.index.weight_map) == set(two.index.weight_map)
        for text in one.index.weight_map:
            assert one.locate(text).spec.shape == two.locate(text).spec.shape, text
            assert one.read(text) == two.read(text), text
    reshard(tmp_path / "one", tmp_path / "joined", Request(gpus=1, form="hf"))
    joined, whole = Checkpoint.open(tmp_path / "joined"), Checkpoint.open(tmp_path / "whole")
    assert all(joined.read(text) == whole.read(text) for text in whole.index.weight_map)


def test_ranks_are_a_source_too(mini: Path, tmp_path: Path) -> None:
    reshard(mini, tmp_path / "ranks", Request(gpus=4, ep=4))
    quantize(tmp_path / "ranks", tmp_path / "from ranks", experts="nvfp4")
    quantize(mini, tmp_path / "direct", experts="nvfp4")
    one, two = Checkpoint.open(tmp_path / "from ranks"), Checkpoint.open(tmp_path / "direct")
    assert all(one.read(text) == two.read(text) for text in two.index.weight_map)


# Gates and bad input


def test_exact_fails_rather_than_change_a_value(mini: Path, tmp_path: Path) -> None:
    assert quantize(mini, tmp_path / "good", experts="int8", exact=True).report.complete
    with pytest.raises(CheckFailed, match=r"routed_expert_.*nf4 changes values"):
        quantize(mini, tmp_path / "bad", latent="nf4", exact=True)
    assert not (tmp_path / "bad" / "config.json").exists()
    assert not (tmp_path / "bad" / "model.safetensors.index.json").exists()


def test_a_bound_is_checked_before_the_index_is_written_and_a_wider_one_resumes(mini: Path, tmp_path: Path) -> None:
    job = prepare(mini, policy(latent="nf4"))
    with pytest.raises(CheckFailed, match=r"latent as nf4: relative error 0\.09068 is beyond --max-rel-error 0\.09"):
        carry_out(job, tmp_path / "out", max_rel_error=0.09, options=Options())
    assert not (tmp_path / "out" / "config.json").exists()
    done = carry_out(prepare(mini, policy(latent="nf4")), tmp_path / "out", max_rel_error=0.0907, options=Options())
    assert done.report.complete and done.report.bytes_read == 0 and done.components["latent"]["relative_error"] < 0.0907


def damage(folder: Path, text: str, change: Any) -> None:
    """Rewrite the bytes of one tensor in place."""
    place = Checkpoint.open(folder).locate(text)
    with open(folder / place.shard, "r+b") as file:
        file.seek(place.offset)
        data = bytearray(file.read(place.spec.nbytes))
        change(data)
        file.seek(place.offset)
        file.write(data)


def test_nan_is_refused_with_the_tensor_named(mini: Path, tmp_path: Path) -> None:
    copy = copy_checkpoint(mini, tmp_path / "scale")
    damage(copy, EXPERT + ".weight_scale", lambda data: data.__setitem__(7, 255))
    with pytest.raises(CheckpointCorrupt, match=re.escape(EXPERT) + r" holds a NaN scale"):
        quantize(copy, tmp_path / "a", experts="nvfp4")
    copy = copy_checkpoint(mini, tmp_path / "value")
    damage(copy, LATENT + ".weight", lambda data: data.__setitem__(slice(10, 12), b"\x80\x7f"))
    with pytest.raises(CheckpointCorrupt, match=re.escape(LATENT) + " holds NaN or infinity"):
        quantize(copy, tmp_path / "b", latent="nf4")
    assert not (tmp_path / "b" / "config.json").exists()


@pytest.mark.parametrize(
    ("scheme", "part", "bad"),
    [
        ("nvfp4", "weight_scale", b"\x7f"),
        ("nvfp4", "weight_global_scale", np.float32(np.nan).tobytes()),
        ("nvfp4", "weight_global_scale", np.float32(0).tobytes()),
        ("nvfp4-modelopt", "weight_scale_2", np.float32(np.inf).tobytes()),
        ("fp8-channel", "weight_scale", np.float32(np.inf).tobytes()),
        ("fp8-channel", "weight", b"\x7f"),
        ("int8", "weight_scale", b"\x80\x7f"),
        ("int4", "weight_scale", b"\xc0\x7f"),
        ("nf4", "weight.absmax", np.float32(np.nan).tobytes()),
        ("fp4", "weight.absmax", np.float32(np.inf).tobytes()),
    ],
)
def test_scales_that_are_not_finite_are_refused_with_the_tensor_named(
    mini: Path, tmp_path: Path, scheme: str, part: str, bad: bytes
) -> None:
    quantize(mini, tmp_path / "once", experts=scheme)
    damage(tmp_path / "once", f"{EXPERT}.{part}", lambda data: data.__setitem__(slice(0, len(bad)), bad))
    with pytest.raises(CheckpointCorrupt, match=re.escape(EXPERT) + " holds NaN or infinity"):
        quantize(tmp_path / "once", tmp_path / "decoded", experts="bf16")
    assert not (tmp_path / "decoded" / "config.json").exists()


def test_reading_back_finds_a_flipped_byte_in_any_file(mini: Path, tmp_path: Path) -> None:
    request = Request(ep=2, max_shard_bytes=2**30)
    done = quantize(mini, tmp_path / "out", experts="nvfp4", request=request)
    files = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert check_digests(tmp_path / "out", done.report, Options()).files == len(files)
    for path in files:
        data = bytearray(path.read_bytes())
        data[-9] ^= 1
        path.write_bytes(data)
        with pytest.raises(
            CheckFailed, match=re.escape(f"{path.relative_to(tmp_path / 'out')} differs from what was written")
        ):
            check_digests(tmp_path / "out", done.report, Options())
        data[-9] ^= 1
        path.write_bytes(data)


# Configuration


def configured(mini: Path, **options: str) -> tuple[dict[str, Any], quantize_config.Section]:
    opened = open_form(open_source(mini))
    form = QuantizedForm(opened.form, opened.splitter, make_policy(options))
    section = quantize_config.section(quantize_config.summarize(form.items(), form.matrix_shape))
    return quantize_config.rewrite(opened.form.config.raw, section), section


def test_the_section_stays_where_it_was_and_all_else_is_untouched(mini: Path) -> None:
    before = json.loads((mini / "config.json").read_bytes())
    after, _ = configured(mini, experts="nvfp4")
    held = after["text_config"].pop("quantization_config")
    before["text_config"].pop("quantization_config")
    assert after == before and list(after["text_config"]) == list(before["text_config"])
    assert held["format"] == "nvfp4-pack-quantized" and held["config_groups"]["group_0"]["targets"] == ["Linear"]
    assert held["config_groups"]["group_0"]["weights"]["group_size"] == 16


def test_a_stale_copy_is_removed(mini: Path) -> None:
    raw = json.loads((mini / "config.json").read_bytes())
    raw["quantization_config"] = {"quant_method": "stale"}
    section = quantize_config.section({"lm_head": {None: Storage("bf16")}})
    assert "quantization_config" not in json.dumps(quantize_config.rewrite(raw, section))
    flat = {"model_type": "kimi_linear", "compression_config": {}}
    section = quantize_config.section({"block_sparse_moe.experts.w1": {1: Storage("mxfp4")}})
    rewritten = quantize_config.rewrite(flat, section)
    assert (
        rewritten["quantization_config"]["format"] == "mxfp4-pack-quantized" and "compression_config" not in rewritten
    )


def test_the_release_gets_the_ignore_list_that_it_lacks(mini: Path) -> None:
    """The published list does not name the latent projections, the router and the residual projections."""
    before = json.loads((mini / "config.json").read_bytes())["text_config"]["quantization_config"]
    after = configured(mini)[0]["text_config"]["quantization_config"]
    assert after["config_groups"] == before["config_groups"]
    assert set(before["ignore"]) <= set(after["ignore"])
    for module in ("block_sparse_moe.gate", "block_sparse_moe.routed_expert_up_proj", "mlp_res_proj", "mlp.gate"):
        path = f"language_model.model.layers.2.{module}"
        assert any(re.match(pattern[3:], path) for pattern in after["ignore"]), module
        assert not any(re.match(pattern[3:], path) for pattern in before["ignore"]), module
    assert not any(re.match(pattern[3:], EXPERT) for pattern in after["ignore"])


def test_what_no_engine_can_be_told_is_told_to_k3tool_and_the_user(mini: Path) -> None:
    document, section = configured(mini, experts="nvfp4", latent="nf4")
    assert section.readers.startswith("k3tool alone")
    assert set(document[SECTION]["modules"].values()) == {"nf4"}
    ignored = document["text_config"]["quantization_config"]["ignore"]
    assert all(any(re.match(p[3:], LATENT) for p in patterns) for patterns in (ignored, document[SECTION]["modules"]))


def test_bitsandbytes_alone_gets_its_own_section(mini: Path) -> None:
    document, section = configured(mini, experts="bf16", latent="nf4")
    held = document["text_config"]["quantization_config"]
    assert held["quant_method"] == "bitsandbytes" and held["bnb_4bit_quant_type"] == "nf4"
    assert "self_attn" in held["llm_int8_skip_modules"] and "experts" in held["llm_int8_skip_modules"]
    assert not {"routed_expert_up_proj", "block_sparse_moe", "model", "layers"} & set(held["llm_int8_skip_modules"])
    assert {r".*\.self_attn", r".*\.experts", r".*\.gate"} <= set(held["llm_int8_skip_modules"])
    assert "bitsandbytes" in section.readers and SECTION not in document


def test_layers_and_fused_names_are_told_apart(mini: Path) -> None:
    opened = open_form(open_source(mini))
    chosen = Policy(
        {"shared": Choice("int8")}, (Rule(r"re:.*\.routed_expert_\w+_proj", Choice("int4"), frozenset({2, 5})),)
    )
    form = QuantizedForm(opened.form, opened.splitter, chosen)
    section = quantize_config.section(quantize_config.summarize(form.items(), form.matrix_shape))
    assert section.config is not None and section.config["format"] == "mixed-precision"
    groups = list(section.config["config_groups"].values())[1:]

    def covered(bits: int, path: str) -> bool:
        """One group of this width, and of no other, targets the module."""
        widths = [g["weights"]["num_bits"] for g in groups if any(re.match(t[3:], path) for t in g["targets"])]
        return widths == [bits]

    layers = "model.layers.{}.block_sparse_moe."
    for layer in range(8):
        assert covered(4, layers.format(layer) + "routed_expert_up_proj") == (layer in (2, 5))
    for leaf in ("gate_proj", "up_proj", "down_proj", "gate_up_proj"):
        assert covered(8, layers.format(3) + "shared_experts." + leaf)
        assert covered(8, layers.format(3).replace("block_sparse_moe", "mlp") + "shared_experts." + leaf)


def test_fused_projections_of_different_schemes_are_warned_about(mini: Path) -> None:
    kept = tuple(Rule(rf"re:.*\.{leaf}$", Choice("keep")) for leaf in ("b_proj", "o_proj", "f_b_proj", "kv_b_proj"))
    job = prepare(mini, Policy({"attention": Choice("int8")}, (*kept, Rule(r"re:.*\.q_b_proj", Choice("keep")))))
    assert [text for text in job.warnings if "q_proj, k_proj, v_proj, g_proj, f_a_proj, b_proj" in text]
    assert not [text for text in job.warnings if "q_a_proj" in text]
    assert not prepare(mini, policy(shared="int8")).warnings


def test_modelopt_writes_both_of_its_files(mini: Path, tmp_path: Path) -> None:
    quantize(mini, tmp_path / "out", experts="nvfp4-modelopt")
    document = json.loads((tmp_path / "out" / "hf_quant_config.json").read_bytes())
    config = json.loads((tmp_path / "out" / "config.json").read_bytes())["text_config"]["quantization_config"]
    assert document["quantization"]["quant_algo"] == config["quant_algo"] == "NVFP4"
    assert document["quantization"]["exclude_modules"] == config["ignore"]
    assert np.array_equal(read_values(tmp_path / "out", EXPERT), read_values(mini, EXPERT))


@pytest.mark.parametrize(("scheme", "bound"), [("mxfp4", 0.13), ("nvfp4", 0.1), ("nf4", 0.11), ("int8", 0.01)])
def test_plain_experts_of_the_flat_family(tmp_path: Path, scheme: str, bound: float) -> None:
    """Kimi Linear: flat configuration, bfloat16 experts, no latent. The section comes to the top level, where it is one."""
    config = tiny_config(num_layers=4, hidden_size=64, num_experts=4, latent_size=None, vision=False)["text_config"]
    config.pop("quantization_config")
    write_checkpoint(tmp_path / "plain", config)
    done = quantize(tmp_path / "plain", tmp_path / "made", experts=scheme)
    experts = done.components["routed_experts"]
    assert experts["exact_tensors"] == 0 and bound / 4 < experts["relative_error"] < bound
    section = json.loads((tmp_path / "made" / "config.json").read_bytes())["quantization_config"]
    assert section["quant_method"] == ("bitsandbytes" if scheme == "nf4" else "compressed-tensors")
    module = "model.layers.1.block_sparse_moe.experts.2.w1"
    before, after = read_values(tmp_path / "plain", module), read_values(tmp_path / "made", module, (32, 64))
    assert np.abs(before - after).max() <= experts["max_error"]
    if scheme == "nvfp4":
        checkpoint = Checkpoint.open(tmp_path / "made")
        scales = {checkpoint.read(f"{module[:-1]}{n}.weight_global_scale") for n in (1, 3)}
        assert len(scales) == 1


def test_the_card_says_what_was_done_and_keeps_licence_and_card_of_the_source(mini: Path, tmp_path: Path) -> None:
    copy = copy_checkpoint(mini, tmp_path / "copy")
    (copy / "README.md").write_text("---\nlicense: other\nlicense_name: kimi\nlibrary_name: x\n---\n# Kimi\n")
    (copy / "LICENSE").write_text("terms")
    quantize(copy, tmp_path / "made", experts="nvfp4", latent="int8")
    card = (tmp_path / "made" / "README.md").read_text()
    assert card.startswith("---\nlicense: other\nlicense_name: kimi\ntags:\n- int8\n- nvfp4\n---\n")
    assert "--experts nvfp4 --latent int8" in card and "| routed_experts | nvfp4 | 252 | 252 | 0.00000 | 0 |" in card
    assert (tmp_path / "made" / "README.source.md").read_text().endswith("# Kimi\n")
    assert (tmp_path / "made" / "LICENSE").read_text() == "terms"
    manifest = json.loads((tmp_path / "made" / "k3tool-manifest.json").read_bytes())
    assert {"README.md", "README.source.md", "LICENSE", "k3tool-quantization.json"} <= manifest["files"].keys()


def test_what_changes_nothing_or_grows_is_said(mini: Path, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "flat", tiny_config(num_layers=4, latent_size=None))
    said = prepare(tmp_path / "flat", policy(experts="nvfp4", latent="int8")).warnings
    assert [text for text in said if text.startswith("--latent int8 changes nothing")]
    assert [text for text in prepare(mini, policy()).warnings if text.startswith("nothing changes")]
    idle = Policy({"experts": Choice("nvfp4")}, (Rule(r"re:.*layernorm", Choice("int8")),))
    assert [text for text in prepare(mini, idle).warnings if "'re:.*layernorm' of the recipe changes nothing" in text]
    grown = prepare(mini, policy(experts="int8"))
    assert [text for text in grown.warnings if text.startswith("the result is larger")]
    assert not prepare(mini, policy(experts="nvfp4", latent="int8")).warnings


def test_every_row_of_the_page_has_a_cell_for_each_head(mini: Path, tmp_path: Path) -> None:
    quantize(mini, tmp_path / "out", shared="int4").write_html(tmp_path / "r.html")
    first = (tmp_path / "r.html").read_text().partition("<table>")[2].partition("</table>")[0]
    rows = first.split("<tr>")[1:]
    assert rows[0].count("<th>") == 8 and {row.count("<td>") for row in rows[1:]} == {8}
