"""Latent attention: absorbed and expanded forms against expanded keys and values in float64."""

from __future__ import annotations

import math

import pytest
import torch

from k3tool.kernels.dispatch import use
from k3tool.kernels.mla import mla, reference


@pytest.fixture(params=["reference", "cpu"], autouse=True)
def backend(request):
    """Every test runs on the torch twins and on the code compiled for this processor."""
    with use(request.param):
        yield request.param


def naive(q, cache, kv_b, key_dim):
    """Every key and value expanded, one query after the other, in float64."""
    q, cache, kv_b = q.double(), cache.double(), kv_b.double()
    batch, time, heads, width = q.shape
    latent, total = kv_b.shape[2], cache.shape[1]
    out = torch.empty(batch, time, heads, kv_b.shape[1] - key_dim, dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            keys = torch.cat([cache[b, :, :latent] @ kv_b[h, :key_dim].t(), cache[b, :, latent:]], -1)
            values = cache[b, :, :latent] @ kv_b[h, key_dim:].t()
            for t in range(time):
                seen = total - time + t + 1
                p = torch.softmax(keys[:seen] @ q[b, t, h] / math.sqrt(width), -1)
                out[b, t, h] = p @ values[:seen]
    return out


def inputs(time, total, heads=3, nope=16, rope=8, value=12, latent=32, batch=1, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(batch, time, heads, nope + rope, generator=generator).to(dtype)
    cache = torch.randn(batch, total, latent + rope, generator=generator).to(dtype)
    kv_b = (torch.randn(heads, nope + value, latent, generator=generator) * 0.2).to(torch.bfloat16)
    return q, cache, kv_b, nope


def error(found, expected):
    return ((found.double() - expected).norm() / expected.norm()).item()


BOUND = 2e-6  # float32 sums over at most 200 tokens; measured 4e-7


@pytest.mark.parametrize("time,total", [(1, 1), (1, 77), (5, 5), (16, 40), (17, 17), (17, 200), (64, 64), (100, 163)])
def test_attention_equals_expanded_keys_and_values(time, total):
    q, cache, kv_b, nope = inputs(time, total)
    assert error(mla(q, cache, kv_b, key_dim=nope), naive(q, cache, kv_b, nope)) < BOUND


@pytest.mark.parametrize("form", [reference.absorbed, reference.expanded])
@pytest.mark.parametrize("rope,value,heads", [(0, 12, 1), (8, 5, 4), (3, 40, 2)])
def test_both_forms_on_odd_sizes(form, rope, value, heads):
    q, cache, kv_b, nope = inputs(9, 30, heads=heads, rope=rope, value=value, nope=7, latent=19)
    assert error(form(q[0], cache[0], kv_b, nope), naive(q, cache, kv_b, nope)[0]) < BOUND


@pytest.mark.parametrize("form", [reference.absorbed, reference.expanded])
def test_memory_is_bounded_by_blocks_of_keys(form, monkeypatch):
    """Many blocks, the last one short, give what one block gives."""
    q, cache, kv_b, nope = inputs(20, 1000)
    monkeypatch.setattr(reference, "BLOCK_SCORES", 20 * 3 * 67)
    sizes = []
    original = reference._causal
    monkeypatch.setattr(reference, "_causal", lambda s, offset: (sizes.append(s.shape[-1]), original(s, offset))[1])
    assert error(form(q[0], cache[0], kv_b, nope), naive(q, cache, kv_b, nope)[0]) < BOUND
    assert len(sizes) > 3
    assert max(sizes) < 1000


def test_large_scores_stay_finite():
    q, cache, kv_b, nope = inputs(20, 40)
    q, cache = q * 100, cache * 100
    expected = naive(q, cache, kv_b, nope)
    for form in (reference.absorbed, reference.expanded):
        found = form(q[0], cache[0], kv_b, nope)
        assert torch.isfinite(found).all()
        assert error(found, expected[0]) < 1e-2  # scores near 1e5 are known to 1e-2 in float32


def test_later_tokens_do_not_matter_and_batches_are_separate():
    q, cache, kv_b, nope = inputs(20, 30, batch=2)
    found = mla(q, cache, kv_b, key_dim=nope)
    changed = cache.clone()
    changed[0, 25:] = 1e4
    again = mla(q, changed, kv_b, key_dim=nope)
    assert torch.equal(found[0, :15], again[0, :15])
    assert not torch.equal(found[0, 15:], again[0, 15:])
    assert torch.equal(found[1], again[1])


@pytest.mark.parametrize("time", [1, 40])
def test_bfloat16(time):
    q, cache, kv_b, nope = inputs(time, 50, dtype=torch.bfloat16)
    found = mla(q, cache, kv_b, key_dim=nope)
    assert found.dtype == torch.bfloat16
    # The expanded form rounds keys and values to bfloat16 as the reference code does: 2^-9 each, and once at the end.
    assert error(found, naive(q, cache, kv_b, nope)) < 6e-3


def test_shapes_are_checked():
    q, cache, kv_b, nope = inputs(3, 5)
    with pytest.raises(ValueError, match="do not fit"):
        mla(q, cache, kv_b, key_dim=nope - 1)
    with pytest.raises(ValueError, match="does not fit"):
        mla(q, cache[:, :2], kv_b, key_dim=nope)
    with pytest.raises(ValueError, match="does not fit"):
        mla(q, cache.bfloat16(), kv_b, key_dim=nope)
