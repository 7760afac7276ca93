"""Routed experts and FP4 decoding: Triton against the torch twins, in every storage."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from k3tool import formats
from k3tool.kernels.moe import DenseExperts, PackedExperts, kernel, reference
from k3tool.kernels.moe.scaled import ScaledExperts
from k3tool.kernels.mxfp4 import kernel as fp4_kernel
from k3tool.kernels.mxfp4 import reference as fp4_reference
from tests.kernels.triton.fence import relative, strided, ulps

SITU = ("situ", 4.0, 25.0)


def draw(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def make(kind, experts=5, width=64, inner=96, group=32):
    """Experts of one kind from random matrices, written by `k3tool.formats` where it has the format."""
    parts = {}
    for seed, (name, rows, columns) in enumerate((("w1", inner, width), ("w3", inner, width), ("w2", width, inner))):
        values = (draw(experts, rows, columns, seed=seed) / columns**0.5).numpy()
        if kind in ("bfloat16", "float32"):
            parts[name] = torch.from_numpy(values).to(getattr(torch, kind))
            continue
        scheme = {"fp8": "fp8-block" if group else "fp8-channel"}.get(kind, kind)
        each = [
            formats.quantize(scheme, matrix, group_size=group if kind.startswith("int") else None) for matrix in values
        ]
        stacked = {
            part: torch.from_numpy(np.stack([one[part] for one in each])) for part in each[0] if part != "weight_shape"
        }
        codes = stacked.get("weight_packed", stacked.get("weight")).view(torch.uint8)
        scale = stacked["weight_scale"]
        if kind in ("mxfp4", "nvfp4"):
            parts[f"{name}_packed"] = codes
            parts[f"{name}_scale"] = scale if kind == "mxfp4" else scale.view(torch.float8_e4m3fn)
            if kind == "nvfp4":
                parts[f"{name}_global"] = stacked["weight_global_scale"].flatten()
        else:
            parts[f"{name}_codes"] = codes
            parts[f"{name}_scale"] = scale.view(torch.bfloat16) if scale.dtype == torch.uint16 else scale
    if kind in ("bfloat16", "float32"):
        return DenseExperts(**parts)
    if kind in ("mxfp4", "nvfp4"):
        return PackedExperts(**parts, group_size=32 if kind == "mxfp4" else 16)
    return ScaledExperts(kind, **parts, group_size=128 if kind == "fp8" and group else group)


def route(tokens, experts, top_k, seed=0):
    generator = torch.Generator().manual_seed(seed)
    ids = (
        torch.stack([torch.randperm(experts, generator=generator)[:top_k] for _ in range(tokens)])
        if tokens
        else torch.zeros(0, top_k, dtype=torch.int64)
    )
    return ids, torch.rand(tokens, top_k, generator=generator)


KINDS = [
    ("mxfp4", 32),
    ("nvfp4", 16),
    ("bfloat16", 0),
    ("float32", 0),
    ("int4", 32),
    ("int4", 0),
    ("int8", 32),
    ("int8", 0),
    ("fp8", 0),
]


@pytest.mark.parametrize("tokens", [1, 30])
@pytest.mark.parametrize("kind,group", KINDS)
def test_every_storage(kind, group, tokens, monkeypatch):
    """One token visits its experts directly; 30 tokens are sorted by expert."""
    monkeypatch.setattr(kernel, "DIRECT_VISITS", 8)
    experts = make(kind, group=group)
    x, (ids, weights) = draw(tokens, 64), route(tokens, 5, 3)
    expected = reference.experts_forward(x, experts, ids, weights, *SITU)
    found = kernel.experts_forward(x, experts, ids, weights, *SITU)
    # 2e-6: two products over at most 96 columns with an activation between.
    assert relative(found, expected) < 2e-6


@pytest.mark.parametrize("tokens", [1, 20])
def test_fp8_in_blocks(tokens, monkeypatch):
    monkeypatch.setattr(kernel, "DIRECT_VISITS", 8)
    experts = make("fp8", experts=3, width=256, inner=128, group=128)
    x, (ids, weights) = draw(tokens, 256), route(tokens, 3, 2)
    expected = reference.experts_forward(x, experts, ids, weights, *SITU)
    assert relative(kernel.experts_forward(x, experts, ids, weights, *SITU), expected) < 2e-6


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 63, 64, 65, 100])
def test_numbers_of_tokens(tokens, monkeypatch):
    """Blocks of 16 visits of an expert: full, begun and absent ones."""
    monkeypatch.setattr(kernel, "DIRECT_VISITS", 4)
    monkeypatch.setattr(kernel, "rows_of", lambda *a: 16)
    experts = make("mxfp4", experts=4)
    x, (ids, weights) = draw(tokens, 64, seed=tokens), route(tokens, 4, 2, seed=tokens)
    expected = reference.experts_forward(x, experts, ids, weights, *SITU)
    assert relative(kernel.experts_forward(strided(x), experts, ids, weights, *SITU), expected) < 2e-6


@pytest.mark.parametrize("direct", [0, 1000])
def test_unbalanced_routing(direct, monkeypatch):
    """All to one expert, one expert twice for a token, experts without a visit; the sum ascends."""
    monkeypatch.setattr(kernel, "DIRECT_VISITS", direct)
    experts = make("mxfp4", experts=6)
    x = draw(9, 64)
    for ids in (torch.full((9, 2), 5), torch.zeros(9, 1, dtype=torch.int64), torch.tensor([[4, 1]]).expand(9, 2)):
        weights = torch.rand(ids.shape, generator=torch.Generator().manual_seed(1))
        expected = reference.experts_forward(x, experts, ids, weights, *SITU)
        assert relative(kernel.experts_forward(x, experts, ids, weights, *SITU), expected) < 2e-6


@pytest.mark.parametrize("width,inner", [(32, 32), (160, 224)])
@pytest.mark.parametrize("rows,options", [(64, {"BLOCK_N": 32, "BLOCK_K": 32}), (32, {"BLOCK_N": 64, "BLOCK_K": 64})])
def test_tiles_and_odd_widths(width, inner, rows, options, monkeypatch):
    monkeypatch.setattr(kernel, "DIRECT_VISITS", 8)
    monkeypatch.setattr(kernel, "rows_of", lambda *a: rows)
    monkeypatch.setattr(kernel, "experts_options", lambda *a: [options])
    experts = make("mxfp4", experts=3, width=width, inner=inner)
    x, (ids, weights) = draw(12, width), route(12, 3, 2)
    expected = reference.experts_forward(x, experts, ids, weights, *SITU)
    assert relative(kernel.experts_forward(x, experts, ids, weights, *SITU), expected) < 2e-6


@pytest.mark.parametrize("tokens", [1, 30])
def test_bfloat16_rounds_where_the_reference_rounds(tokens, monkeypatch):
    monkeypatch.setattr(kernel, "DIRECT_VISITS", 8)
    experts = make("mxfp4")
    x, (ids, weights) = draw(tokens, 64, dtype=torch.bfloat16), route(tokens, 5, 3)
    expected = reference.experts_forward(x, experts, ids, weights, *SITU)
    found = kernel.experts_forward(x, experts, ids, weights, *SITU)
    # Half a percent of the roundings may go the other way: 2^-9 each, of sums of three.
    assert relative(found, expected) < 2e-4
    assert found.dtype == torch.float32


def test_silu_and_large_activations():
    experts = make("bfloat16")
    x, (ids, weights) = draw(3, 64) * 100, route(3, 5, 3)
    for activation in (("silu", 4.0, 25.0), SITU, ("situ", 1.5, 3.0)):
        expected = reference.experts_forward(x, experts, ids, weights, *activation)
        assert relative(kernel.experts_forward(x, experts, ids, weights, *activation), expected) < 2e-6


def test_no_tokens():
    experts = make("mxfp4")
    ids, weights = route(0, 5, 3)
    assert kernel.experts_forward(draw(0, 64), experts, ids, weights, *SITU).shape == (0, 64)


@pytest.mark.parametrize("activation", ["situ", "silu"])
def test_gated_activation(activation):
    both = draw(33, 2 * 100) * 10
    gate, up = both.chunk(2, dim=-1)
    expected = reference.gated_activation(gate, up, activation, 4.0, 25.0)
    assert relative(kernel.gated_activation(gate, up, activation, 4.0, 25.0), expected) < 1e-6
    gate, up = both.bfloat16().chunk(2, dim=-1)
    expected = reference.gated_activation(gate, up, activation, 4.0, 25.0)
    assert ulps(kernel.gated_activation(gate, up, activation, 4.0, 25.0), expected) <= 1
    assert kernel.gated_activation(gate[:0], up[:0], activation, 4.0, 25.0).shape == (0, 100)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_codes_with_all_e8m0_scales(dtype):
    codes = torch.arange(16, dtype=torch.uint8)
    packed = (codes | (codes.flip(0) << 4)).expand(256, 16).contiguous()
    scale = torch.arange(256, dtype=torch.int32).to(torch.uint8).unsqueeze(1)
    expected = fp4_reference.decode_values(packed, scale, dtype)
    with np.errstate(over="ignore"):  # 6 * 2^127 is infinite, and the interpreter would warn of it
        found = fp4_kernel.decode_values(packed, scale, dtype)
    raw = {torch.float32: torch.int32, torch.bfloat16: torch.int16}[dtype]
    assert torch.equal(found[:255].view(raw), expected[:255].view(raw))
    assert found[255].isnan().all()


@pytest.mark.parametrize("shape", [(1, 16), (3, 5, 48), (0, 32)])
def test_nvfp4_decoding(shape):
    generator = torch.Generator().manual_seed(0)
    packed = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    scale = torch.randint(0, 256, (*shape[:-1], shape[-1] // 8), generator=generator, dtype=torch.uint8)
    scale = torch.where((scale & 127) == 127, 1, scale).view(torch.float8_e4m3fn)
    divisor = torch.tensor(3.7)
    for dtype in (torch.float32, torch.bfloat16):
        expected = fp4_reference.decode_values(packed, scale, dtype, global_scale=divisor)
        assert torch.equal(fp4_kernel.decode_values(packed, scale, dtype, global_scale=divisor), expected)


def test_scaled_experts_are_checked():
    experts = make("int4")
    with pytest.raises(ValueError, match="w1_scale"):
        ScaledExperts(
            "int4",
            experts.w1_codes,
            experts.w1_scale[:, :-1],
            experts.w3_codes,
            experts.w3_scale,
            experts.w2_codes,
            experts.w2_scale,
            32,
        )
    with pytest.raises(ValueError, match="kind"):
        ScaledExperts("int5", *[experts.w1_codes] * 6, 32)
    assert experts.nbytes == 5 * 64 * 96 * 3 // 2 + 5 * 64 * 96 * 3 // 32 * 2
