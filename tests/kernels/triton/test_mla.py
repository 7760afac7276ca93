"""Latent attention: Triton against the torch twin."""

from __future__ import annotations

import pytest
import torch

from k3tool.kernels.mla import kernel, reference
from tests.kernels.triton.fence import relative, strided, ulps


def inputs(time, keys, heads=3, n=32, r=16, v=24, latent=40, batch=1, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator).to(dtype)

    return draw(batch, time, heads, n + r), draw(batch, keys, latent + r), draw(heads, n + v, latent) / 6, n


def both(q, cache, kv_b, n):
    """(found, expected in float64)."""
    expected = reference.mla(q.double().float(), cache.float(), kv_b.float(), key_dim=n)
    return kernel.mla(q, cache, kv_b, key_dim=n), expected


# 2e-6: float32 sums over at most 130 keys and 56 dimensions, and exponentials of scores of a few units.
BOUND = 2e-6


@pytest.mark.parametrize("time", [17, 63, 64, 65, 100])
@pytest.mark.parametrize("before", [0, 1, 37])
def test_prefill(time, before):
    q, cache, kv_b, n = inputs(time, before + time, seed=time)
    found, expected = both(q, cache, kv_b, n)
    assert relative(found, expected) < BOUND


@pytest.mark.parametrize("time", [1, 2, 15, 16])
@pytest.mark.parametrize("before", [0, 1, 63, 64, 65, 300])
def test_decode(time, before):
    q, cache, kv_b, n = inputs(time, before + time, seed=time)
    found, expected = both(q, cache, kv_b, n)
    assert relative(found, expected) < BOUND


@pytest.mark.parametrize("time,keys", [(3, 130), (40, 70)])
def test_batches_views_and_mixed_dtypes(time, keys):
    q, cache, kv_b, n = inputs(time, keys, batch=2)
    wide = torch.full((2, keys + 9, 80), float("nan"))
    wide[:, :keys, :56] = cache
    found, expected = both(strided(q), wide[:, :keys, :56], kv_b.bfloat16(), n)
    assert relative(found, expected) < BOUND


@pytest.mark.parametrize("time", [4, 20])
def test_without_shared_dimensions_and_at_odd_sizes(time):
    found, expected = both(*inputs(time, 50, heads=2, n=19, r=0, v=7, latent=33))
    assert relative(found, expected) < BOUND
    found, expected = both(*inputs(time, 50, heads=1, n=5, r=3, v=70, latent=20))
    assert relative(found, expected) < BOUND


@pytest.mark.parametrize("time,keys", [(1, 200), (5, 70), (70, 70)])
def test_large_scores(time, keys):
    """Scores of thousands: one key takes all."""
    q, cache, kv_b, n = inputs(time, keys)
    found, expected = both(q * 300, cache * 20, kv_b, n)
    assert torch.isfinite(found).all()
    # 1e-4: a score of 5,000 is known to 5e-4, and its exponential as exactly.
    assert relative(found, expected) < 1e-4


@pytest.mark.parametrize("time", [30, 50])
def test_spans_of_a_long_cache(time, monkeypatch):
    """The running softmax is carried from span to span; the last spans lie beyond the first queries."""
    monkeypatch.setattr(kernel, "SPAN", 24)
    q, cache, kv_b, n = inputs(time, 75)
    found, expected = both(q, cache, kv_b, n)
    assert relative(found, expected) < BOUND


def test_splits_without_a_visible_key(monkeypatch):
    """The first of several new tokens does not see the last split at all."""
    monkeypatch.setattr(kernel, "split_count", lambda *a: 99)
    monkeypatch.setattr(kernel, "split_options", lambda *a, old=kernel.split_options: [{**old(*a)[0], "BLOCK_N": 16}])
    q, cache, kv_b, n = inputs(16, 17)
    found, expected = both(q, cache, kv_b, n)
    assert relative(found, expected) < BOUND


@pytest.mark.parametrize("time", [1, 40])
def test_bfloat16(time):
    q, cache, kv_b, n = inputs(time, 90, dtype=torch.bfloat16)
    expected = reference.mla(q, cache, kv_b, key_dim=n)
    # Two units: expanded keys and values are rounded in between, on either side of a boundary.
    assert ulps(kernel.mla(q, cache, kv_b, key_dim=n), expected) <= 2


def test_no_queries():
    q, cache, kv_b, n = inputs(0, 4)
    assert kernel.mla(q, cache, kv_b, key_dim=n).shape == (1, 0, 3, 24)


@pytest.mark.parametrize("time", [1, 3])
@pytest.mark.parametrize("visible", [3, 64, 65, 200])
def test_part_of_a_cache_with_room(time, visible):
    """What lies behind the visible tokens does not count, whatever it is."""
    q, cache, kv_b, n = inputs(time, 256)
    expected = reference.mla(q, cache[:, :visible], kv_b, key_dim=n)
    cache[:, visible:] = 1e30
    for count in (torch.tensor([visible]), torch.tensor([visible], dtype=torch.int32)):
        found = kernel.mla_within(q, cache, kv_b, count, key_dim=n)
        assert relative(found, expected) < BOUND
    assert torch.equal(reference.mla_within(q, cache, kv_b, count, key_dim=n), expected)
