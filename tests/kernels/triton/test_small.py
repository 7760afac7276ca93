"""Attention Residuals, routing and the linear layer: Triton against the torch twins."""

from __future__ import annotations

import pytest
import torch

from k3tool.kernels import attn_res, router
from k3tool.kernels.attn_res import kernel as mix_kernel
from k3tool.kernels.attn_res import reference as mix_reference
from k3tool.kernels.linear import kernel as linear_kernel
from k3tool.kernels.linear import reference as linear_reference
from k3tool.kernels.moe import kernel as moe_kernel
from k3tool.kernels.moe import reference as moe_reference
from k3tool.kernels.mxfp4 import kernel as fp4_kernel
from k3tool.kernels.mxfp4 import reference as fp4_reference
from k3tool.kernels.norm import kernel as norm_kernel
from k3tool.kernels.norm import reference as norm_reference
from k3tool.kernels.router import kernel as router_kernel
from k3tool.kernels.router import reference as router_reference
from tests.kernels.triton.fence import relative, strided, ulps

assert attn_res and router


def draw(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("number", [1, 2, 5, 9])
@pytest.mark.parametrize("time,size", [(1, 128), (17, 100), (5, 1000)])
def test_mix(number, time, size):
    values, query = draw(number, time, size), draw(size, seed=1)
    expected = mix_reference.mix_blocks(values, query, 1e-5)
    # 2e-6: scores are sums over the width, and their exponentials as exact.
    assert relative(mix_kernel.mix_blocks(values, query, 1e-5), expected) < 2e-6


def test_mix_of_extremes_and_views():
    values, query = draw(4, 6, 40), draw(40, seed=1)
    values[0] = 0
    values[1] *= 1e15
    values[2] *= 1e-15
    expected = mix_reference.mix_blocks(values, query * 30, 1e-5)
    found = mix_kernel.mix_blocks(strided(values), query * 30, 1e-5)
    # 2e-5: scores of up to 200.
    assert relative(found, expected) < 2e-5
    assert mix_kernel.mix_blocks(values[:, :0], query, 1e-5).shape == (0, 40)


def test_mix_in_bfloat16():
    values, query = draw(9, 20, 256, dtype=torch.bfloat16), draw(256, seed=1)
    expected = mix_reference.mix_blocks(values, query, 1e-5)
    assert ulps(mix_kernel.mix_blocks(values, query, 1e-5), expected) <= 1


OPTIONS = [
    {},
    {"activation": "softmax"},
    {"renormalize": False, "scaling_factor": 2.5},
    {"num_groups": 4, "topk_groups": 2},
    {"num_groups": 12, "topk_groups": 5, "activation": "softmax"},
    {"num_groups": 24, "topk_groups": 7},
]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("has_bias", [True, False])
def test_routing(options, has_bias):
    options = {
        "activation": "sigmoid",
        "renormalize": True,
        "scaling_factor": 1.0,
        "num_groups": 1,
        "topk_groups": 1,
        **options,
    }
    logits, bias = draw(70, 24) * 2, draw(24, seed=3) * 0.2 if has_bias else None
    ids, weights = router_kernel.select_experts(strided(logits), bias, 6, **options)
    expected_ids, expected_weights = router_reference.select_experts(logits, bias, 6, **options)
    assert ids.dtype == torch.int64
    dense = torch.zeros(70, 24).scatter(1, ids, weights)
    assert torch.equal(ids.sort(1).values, expected_ids.sort(1).values)
    assert relative(dense, torch.zeros(70, 24).scatter(1, expected_ids, expected_weights)) < 1e-6


@pytest.mark.parametrize("experts,top_k", [(1, 1), (5, 5), (33, 1), (896, 16)])
def test_routing_sizes(experts, top_k):
    logits = draw(3, experts)
    ids, weights = router_kernel.select_experts(logits, None, top_k, "sigmoid", True, 1.0, 1, 1)
    expected_ids, expected_weights = router_reference.select_experts(logits, None, top_k, "sigmoid", True, 1.0, 1, 1)
    assert torch.equal(ids.sort(1).values, expected_ids.sort(1).values)
    assert relative(weights.sort(1).values, expected_weights.sort(1).values) < 1e-6


def test_routing_of_equal_huge_and_broken_logits():
    logits = torch.zeros(5, 20)
    logits[1] = 200.0
    logits[2] = -200.0
    logits[3, 7] = float("nan")
    logits[4, 3:9] = -1e30
    ids, weights = router_kernel.select_experts(logits, None, 6, "sigmoid", True, 1.0, 1, 1)
    assert torch.equal(ids[0], torch.arange(6))  # the lowest of equals
    for row in ids:
        assert len(set(row.tolist())) == 6
        assert row.min().item() >= 0 and row.max().item() < 20
    assert torch.isfinite(weights[[0, 1, 2, 4]]).all()
    assert torch.equal(weights[1], torch.full((6,), weights[1, 0].item()))
    assert router_kernel.select_experts(logits[:0], None, 6, "sigmoid", True, 1.0, 1, 1)[0].shape == (0, 6)


@pytest.mark.parametrize("x_type,w_type", [("float32", "bfloat16"), ("float32", "float32"), ("bfloat16", "float16")])
@pytest.mark.parametrize("rows,columns,depth", [(1, 7, 33), (17, 100, 64), (300, 65, 530)])
def test_linear(x_type, w_type, rows, columns, depth):
    x, weight = (
        draw(rows, depth, dtype=getattr(torch, x_type)),
        draw(columns, depth, dtype=getattr(torch, w_type), seed=2),
    )
    expected = linear_reference.linear(x, weight)
    found = linear_kernel.linear(strided(x), weight)
    if x_type == "bfloat16":
        assert ulps(found, expected) <= 1
    else:
        assert relative(found, expected) < 1e-6


def test_linear_shapes():
    x, weight = draw(2, 3, 16), draw(5, 16, seed=2)
    assert relative(linear_kernel.linear(x, weight), linear_reference.linear(x, weight)) < 1e-6
    assert linear_kernel.linear(x[:0], weight).shape == (0, 3, 5)
    bfloat16 = linear_kernel.product(x.bfloat16(), weight.bfloat16(), torch.float32)
    assert relative(bfloat16, x.bfloat16().float() @ weight.bfloat16().float().t()) < 1e-6


@pytest.mark.parametrize("time", [0, 1, 15, 16, 17, 63, 64, 65, 100])
def test_every_number_of_tokens(time):
    """The kernels that take some rows at once: full blocks of rows, begun ones, and none; from views between NaN."""
    x, gate, weight = strided(draw(time, 40)), strided(draw(time, 40, seed=1)), draw(40, seed=2)
    pairs = [
        (norm_kernel.rms_norm(x, weight, 1e-5), norm_reference.rms_norm(x, weight, 1e-5)),
        (norm_kernel.gated_rms_norm(x, gate, weight, 1e-5), norm_reference.gated_rms_norm(x, gate, weight, 1e-5)),
        (norm_kernel.l2_normalize(x, 1e-6), norm_reference.l2_normalize(x, 1e-6)),
        (linear_kernel.linear(x, draw(24, 40).bfloat16()), linear_reference.linear(x, draw(24, 40).bfloat16())),
        [module.gated_activation(x, gate, "situ", 4.0, 25.0) for module in (moe_kernel, moe_reference)],
        [module.mix_blocks(strided(draw(3, time, 40)), weight, 1e-5) for module in (mix_kernel, mix_reference)],
    ]
    for found, expected in pairs:
        assert found.shape == expected.shape
        # 2e-6: sums over 40 columns.
        assert relative(found, expected) < 2e-6
    options = ("sigmoid", True, 1.0, 1, 1)
    ids, weights = router_kernel.select_experts(x, weight * 0.1, 5, *options)
    expected_ids, expected_weights = router_reference.select_experts(x, weight * 0.1, 5, *options)
    dense = [torch.zeros(time, 40).scatter(1, i, w) for i, w in ((ids, weights), (expected_ids, expected_weights))]
    assert relative(*dense) < 1e-6


@pytest.mark.parametrize("rows", [0, 1, 15, 16, 17, 63, 64, 65, 100])
def test_fp4_decoding_of_every_number_of_rows(rows, monkeypatch):
    monkeypatch.setattr(fp4_kernel, "BLOCK", 64)
    generator = torch.Generator().manual_seed(rows)
    packed = torch.randint(0, 256, (rows, 48), generator=generator, dtype=torch.uint8)
    scale = torch.randint(100, 140, (rows, 3), generator=generator, dtype=torch.uint8)
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(
            fp4_kernel.decode_values(packed, scale, dtype), fp4_reference.decode_values(packed, scale, dtype)
        )
