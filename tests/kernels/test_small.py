"""Norms, the short convolution, Attention Residuals and the router against their formulas in float64."""

from __future__ import annotations

import pytest
import torch

from k3tool.config import K3Config
from k3tool.errors import UnsupportedError, UsageError
from k3tool.kernels import cpu as compiled
from k3tool.kernels import warm
from k3tool.kernels.attn_res import mix_blocks
from k3tool.kernels.conv import causal_conv
from k3tool.kernels.dispatch import choose_backend, choose_device, use
from k3tool.kernels.norm import gated_rms_norm, l2_normalize, rms_norm
from k3tool.kernels.router import select_experts
from k3tool.synthetic import tiny_config


@pytest.fixture(params=["reference", "cpu"], autouse=True)
def backend(request):
    """Every test runs on the torch twins and on the code compiled for this processor."""
    with use(request.param):
        yield request.param


def error(found, expected):
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


@pytest.mark.parametrize("shape", [(1, 1), (1, 63), (5, 100), (3, 4, 128), (0, 16)])
@pytest.mark.parametrize("eps", [1e-6, 1e-5, 0.1])
def test_rms_norm(shape, eps):
    x, weight = torch.randn(shape), torch.rand(shape[-1]) + 0.5
    d = x.double()
    expected = d / torch.sqrt((d * d).mean(-1, keepdim=True) + eps) * weight
    found = rms_norm(x, weight, eps)
    assert found.shape == x.shape
    assert x.numel() == 0 or error(found, expected) < 1e-6


def test_rms_norm_in_bfloat16_rounds_before_the_weight():
    x, weight = torch.randn(200, 64).bfloat16(), (torch.rand(64) + 0.5).bfloat16()
    normalized = (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-5)).bfloat16()
    assert torch.equal(rms_norm(x, weight.float(), 1e-5), normalized * weight)
    late = (normalized.float() * weight.float() * 1.0).bfloat16()
    assert torch.equal(late, normalized * weight)  # bfloat16 products are float32 products rounded once
    never = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-5) * weight.float()
    assert not torch.equal(rms_norm(x, weight.float(), 1e-5), never.bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gated_rms_norm_rounds_once(dtype):
    x, gate, weight = torch.randn(7, 3, 33).to(dtype), torch.randn(7, 3, 33).to(dtype), torch.rand(33) + 0.5
    d = x.double()
    expected = d / torch.sqrt((d * d).mean(-1, keepdim=True) + 1e-5) * weight * torch.sigmoid(gate.double())
    found = gated_rms_norm(x, gate, weight, 1e-5)
    assert found.dtype == dtype
    bound = 1e-6 if dtype == torch.float32 else 2**-9
    assert error(found, expected) < bound


def test_l2_norm_adds_eps_to_the_sum():
    x = torch.randn(4, 128) * 1e-3
    d = x.double()
    assert error(l2_normalize(x), d / torch.sqrt((d * d).sum(-1, keepdim=True) + 1e-6)) < 1e-6
    assert error(l2_normalize(x), d / torch.sqrt((d * d).mean(-1, keepdim=True) + 1e-6)) > 0.1
    assert torch.equal(l2_normalize(torch.zeros(2, 8)), torch.zeros(2, 8))


def naive_conv(x, weight, history):
    inputs = torch.cat([history, x], 1).double()
    width = weight.shape[0]
    rows = [sum(weight[j].double() * inputs[:, t + j] for j in range(width)) for t in range(x.shape[1])]
    y = torch.stack(rows, 1)
    return y / (1 + torch.exp(-y)), inputs[:, x.shape[1] :]


@pytest.mark.parametrize("width", [1, 2, 4, 7])
@pytest.mark.parametrize("time", [1, 2, 3, 50])
def test_convolution_and_history(width, time):
    x, weight, history = torch.randn(2, time, 11), torch.randn(width, 11), torch.randn(2, width - 1, 11)
    expected, last = naive_conv(x, weight, history)
    assert error(causal_conv(x, weight, history), expected) < 1e-6
    assert torch.equal(history.double(), last)


def test_convolution_in_pieces_equals_the_whole():
    x, weight = torch.randn(1, 30, 6).bfloat16(), torch.randn(4, 6)
    whole = causal_conv(x, weight, torch.zeros(1, 3, 6, dtype=torch.bfloat16))
    history = torch.zeros(1, 3, 6, dtype=torch.bfloat16)
    pieces = [causal_conv(x[:, a:b], weight, history) for a, b in ((0, 1), (1, 3), (3, 20), (20, 30))]
    assert error(torch.cat(pieces, 1), whole) < 1e-3  # one token sums in another order, then rounds to bfloat16
    assert torch.equal(history, x[:, -3:])


@pytest.mark.parametrize("count,time,width", [(1, 3, 16), (2, 1, 7), (9, 40, 64)])
def test_mixing_is_a_softmax_over_normalized_keys(count, time, width):
    values, query = torch.randn(count, time, width) * torch.rand(count, 1, 1) * 10, torch.randn(width)
    d = values.double()
    keys = d / torch.sqrt((d * d).mean(-1, keepdim=True) + 1e-5)
    weights = torch.softmax((keys * query.double()).sum(-1), 0)
    assert error(mix_blocks(values, query, 1e-5), (weights[..., None] * d).sum(0)) < 1e-6
    assert error(mix_blocks(values.flip(0), query, 1e-5), (weights[..., None] * d).sum(0)) < 1e-6


def test_mixing_in_bfloat16_rounds_once_and_survives_large_scores():
    values, query = torch.randn(5, 10, 32).bfloat16(), torch.randn(32) * 100
    found = mix_blocks(values, query, 1e-5)
    assert found.dtype == torch.bfloat16
    assert torch.isfinite(found).all()
    assert torch.equal(found, mix_blocks(values.float(), query, 1e-5).bfloat16())


def route(logits, bias, top_k, **options):
    ids, weights = select_experts(logits, bias, top_k, **options)
    return ids, weights


def test_the_bias_moves_the_selection_and_not_the_weights():
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]])
    ids, weights = route(logits, torch.tensor([5.0, 0.0, 0.0, 0.0]), 2)
    assert set(ids[0].tolist()) == {0, 3}
    scores = torch.sigmoid(logits[0])
    for id_, weight in zip(ids[0].tolist(), weights[0], strict=True):
        assert weight.item() == pytest.approx((scores[id_] / (scores[0] + scores[3])).item(), rel=1e-6)


def test_softmax_scores_scaling_and_no_renormalization():
    logits = torch.randn(6, 10)
    ids, weights = route(logits, None, 3, activation="softmax", renormalize=False, scaling_factor=2.5)
    expected = torch.softmax(logits.double(), -1)
    assert error(weights, 2.5 * expected.gather(1, ids)) < 1e-6
    assert torch.equal(ids.sort(-1).values, expected.topk(3).indices.sort(-1).values)


def test_only_the_best_groups_are_searched():
    # Groups of 3: sums of the two best are 0.9+0.1, 0.6+0.6, 0.8+0.5, 0.2+0.2.
    scores = torch.tensor([[0.9, 0.1, 0.1, 0.6, 0.6, 0.6, 0.8, 0.5, 0.1, 0.2, 0.2, 0.2]])
    ids, _ = route(torch.logit(scores), None, 4, num_groups=4, topk_groups=2)
    assert set(ids[0].tolist()) == {3, 4, 5, 6}
    ids, _ = route(torch.logit(scores), None, 2, num_groups=4, topk_groups=4)
    assert set(ids[0].tolist()) == {0, 6}


def test_experts_outside_the_groups_are_never_taken_even_with_negative_scores():
    bias = torch.tensor([-1.0] * 4 + [-1.1] * 4)
    ids, _ = route(torch.zeros(1, 8), bias, 4, num_groups=2, topk_groups=1)
    assert set(ids[0].tolist()) == {0, 1, 2, 3}


def test_one_expert_keeps_its_score():
    _, weights = route(torch.tensor([[0.0, 2.0]]), None, 1)
    assert weights.item() == pytest.approx(torch.sigmoid(torch.tensor(2.0)).item())


def test_router_options_are_checked():
    with pytest.raises(ValueError, match="top 5"):
        route(torch.zeros(1, 4), None, 5)
    with pytest.raises(ValueError, match="hold fewer"):
        route(torch.zeros(1, 8), None, 5, num_groups=2, topk_groups=1)


def test_backend_and_device_are_explicit(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    cpu = torch.device("cpu")
    assert choose_backend("reference", cpu).name == "reference"
    chosen = choose_backend("auto", cpu)
    assert (chosen.name, chosen.reason) == ("cpu", "compiled for this processor")
    assert choose_backend("cpu", cpu).name == "cpu"
    with pytest.raises(UnsupportedError, match="the device is cuda"):
        choose_backend("cpu", torch.device("cuda"))
    with monkeypatch.context() as patch:
        patch.setattr(compiled, "problem", lambda: "no compiler")
        fallen = choose_backend("auto", cpu)
        assert (fallen.name, fallen.reason) == ("reference", "plain torch: no compiler")
        with pytest.raises(UnsupportedError, match="cpu backend cannot run: no compiler"):
            choose_backend("cpu", cpu)
    with pytest.raises(UnsupportedError, match="cpu"):
        choose_backend("triton", cpu)
    with pytest.raises(UsageError, match="fast"):
        choose_backend("fast", cpu)
    for wrong in ("tpu", "meta", "cpu:x"):
        with pytest.raises(UsageError, match=wrong.split(":")[0]):
            choose_device(wrong)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_an_absent_gpu_is_refused():
    assert choose_device("auto").type == "cpu"
    for name in ("cuda", "cuda:1"):
        with pytest.raises(UnsupportedError, match="0 GPUs"):
            choose_device(name)


@pytest.mark.parametrize(
    "change", [{}, {"gate_lower_bound": None}, {"expert_scheme": "nvfp4"}, {"expert_scheme": "bf16"}]
)
def test_warming_calls_every_kernel(change, monkeypatch):
    """What is called on tiny inputs is what a model calls: every public kernel function but the router's."""
    config = K3Config.from_dict(tiny_config())
    for name, value in change.items():
        if name == "expert_scheme":
            monkeypatch.setattr(K3Config, name, value)
        else:
            object.__setattr__(config, name, value)
    called = set()
    for name in ("linear", "rms_norm", "mix_blocks", "gated_activation", "experts_forward", "mla", "causal_conv", "kda",
                 "kda_decode", "gated_rms_norm"):  # fmt: skip
        real = getattr(warm, name)
        monkeypatch.setattr(warm, name, lambda *a, _real=real, _name=name, **o: (called.add(_name), _real(*a, **o))[1])
    for dtype in (torch.float32, torch.bfloat16):
        called.clear()
        warm.warm_up(config, dtype)
        assert len(called) == 10
