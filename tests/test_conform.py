"""Against the configuration: missing, unexpected, reshaped, retyped; other complete schemes are fine."""

from __future__ import annotations

from pathlib import Path

import pytest

from k3tool.catalog import catalog
from k3tool.checkpoint.header import TensorSpec
from k3tool.checkpoint.reader import Checkpoint
from k3tool.conform import Conformance, conform, foreign_float, fused_experts
from k3tool.formats import stored_tensors

EXPERT = "language_model.model.layers.1.block_sparse_moe.experts.5.w2"
LATENT = "language_model.model.layers.2.block_sparse_moe.routed_expert_down_proj"


@pytest.fixture
def found(mini: Path) -> dict[str, TensorSpec | None]:
    return {name: place.spec for name, place in Checkpoint.open(mini).located.items()}


def _conform(mini: Path, found: dict[str, TensorSpec | None]) -> Conformance:
    config = Checkpoint.open(mini).config
    return conform(config, catalog(config), found)


def _store(found: dict[str, TensorSpec | None], module: str, scheme: str, shape: tuple[int, int]) -> None:
    for name in [name for name in found if name.startswith(module + ".")]:
        del found[name]
    for part, (dtype, stored) in stored_tensors(scheme, shape).items():
        found[f"{module}.{part}"] = TensorSpec(f"{module}.{part}", dtype, tuple(stored), 0, 0)


def test_golden_conforms(mini, found):
    assert _conform(mini, found).ok
    assert _conform(mini, dict.fromkeys(found)).ok


@pytest.mark.parametrize("scheme", ["bf16", "nvfp4", "nvfp4-modelopt", "fp8-channel", "int8", "int4", "nf4", "fp4"])
def test_other_complete_schemes_conform(mini, found, scheme):
    _store(found, EXPERT, scheme, (32, 32))
    _store(found, LATENT, scheme, (32, 64))
    result = _conform(mini, found)
    assert result.ok, (result.missing, result.unexpected, result.mismatched)
    assert _conform(mini, dict.fromkeys(found)).ok


def test_incomplete_scheme(mini, found):
    _store(found, EXPERT, "nvfp4", (32, 32))
    del found[f"{EXPERT}.weight_scale"]
    result = _conform(mini, found)
    assert f"{EXPERT}.weight_scale" in result.missing and f"{EXPERT}.weight_global_scale" in result.unexpected


def test_wrong_logical_shape(mini, found):
    _store(found, EXPERT, "nvfp4", (32, 64))
    assert not _conform(mini, found).ok
    del found[f"{EXPERT}.weight_packed"]
    assert not _conform(mini, found).ok


def test_missing_and_foreign(mini, found):
    del found["language_model.model.layers.4.self_attn.A_log"]
    found["language_model.model.layers.4.self_attn.qq_proj.weight"] = TensorSpec("x", "BF16", (1,), 0, 2)
    found["no such name"] = TensorSpec("no such name", "BF16", (1,), 0, 2)
    result = _conform(mini, found)
    assert result.missing == ["language_model.model.layers.4.self_attn.A_log"]
    assert result.unexpected == ["language_model.model.layers.4.self_attn.qq_proj.weight", "no such name"]


@pytest.mark.parametrize(
    ("name", "dtype", "shape"),
    [
        ("language_model.lm_head.weight", "F16", (256, 64)),
        ("language_model.lm_head.weight", "BF16", (64, 256)),
        ("language_model.model.layers.1.block_sparse_moe.gate.e_score_correction_bias", "I32", (12,)),
        ("language_model.model.layers.0.self_attn.A_log", "F32", (4,)),
        ("language_model.model.layers.0.self_attn.q_conv1d.weight", "F32", (64, 6)),
        (f"{EXPERT}.weight_scale", "I8", (32, 1)),
    ],
)
def test_another_shape_or_dtype_is_named_with_both(mini, found, name, dtype, shape):
    expected = found[name]
    found[name] = TensorSpec(name, dtype, shape, 0, 0)
    result = _conform(mini, found)
    assert result.mismatched == {name: f"expected {expected.dtype} {list(expected.shape)}, found {dtype} {list(shape)}"}


@pytest.mark.parametrize(
    ("name", "dtype", "accepted"),
    [
        ("layers.1.block_sparse_moe.gate.e_score_correction_bias", "BF16", True),  # every value is a float32
        ("layers.1.block_sparse_moe.gate.e_score_correction_bias", "F16", True),
        ("layers.0.self_attn.dt_bias", "BF16", True),
        ("layers.1.block_sparse_moe.gate.weight", "F32", True),  # holds every bfloat16
        ("layers.1.block_sparse_moe.gate.weight", "F16", False),
        ("layers.1.block_sparse_moe.gate.weight", "F64", False),
    ],
)
def test_a_plain_tensor_in_another_float_type(mini, found, name, dtype, accepted):
    name = f"language_model.model.{name}"
    found[name] = found[name]._replace(dtype=dtype)
    config = Checkpoint.open(mini).config
    assert _conform(mini, found).ok == accepted
    if dtype == "F16":
        assert bool(foreign_float(config, [found[name]])) != accepted


@pytest.mark.parametrize(
    ("names", "first"),
    [
        (
            ["m.layers.1.mlp.experts.gate_up_proj", "m.layers.1.mlp.experts.down_proj"],
            "m.layers.1.mlp.experts.gate_up_proj",
        ),
        (["x.experts.0.w1.weight", "x.experts.w1_weight_packed"], "x.experts.w1_weight_packed"),
        (["x.experts.0.w1.weight", "x.shared_experts.gate_proj.weight"], ""),
    ],
)
def test_fused_experts_are_known_by_their_names(names, first):
    assert fused_experts(names) == first


@pytest.mark.parametrize("shape", [(3,), (1, 1, 3, 1), (32,)])
def test_other_spellings_of_a_log(mini, found, shape):
    name = "language_model.model.layers.0.self_attn.A_log"
    found[name] = TensorSpec(name, "F32", shape, 0, 0)
    assert _conform(mini, found).ok
