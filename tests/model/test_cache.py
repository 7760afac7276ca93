"""What a sequence leaves behind: sizes, growth, independence of copies."""

from __future__ import annotations

import torch

from k3tool.config import K3Config
from k3tool.generate import Session
from k3tool.model.cache import Cache, LatentCache
from k3tool.synthetic import tiny_config, write_checkpoint

CPU = torch.device("cpu")


def test_sizes_of_the_released_model():
    """The figures of the release: 414 MiB of KDA state, 27,648 bytes of latent per token in bfloat16."""
    config = K3Config.from_dict(
        tiny_config(
            num_layers=93, hidden_size=7168, kda_heads=96, kda_head_dim=128, kv_lora_rank=512, qk_rope_head_dim=64
        )
    )
    cache = Cache(config, range(93), torch.device("meta"), torch.bfloat16)
    histories = 69 * 3 * 3 * 96 * 128 * 2
    assert cache.kda_state_bytes == 434_110_464 + histories
    assert cache.mla_cache_bytes == 0
    cache.advance(1000)
    assert cache.mla_cache_bytes == 1000 * 27_648


def test_latents_grow_by_half_and_keep_what_is_there():
    cache = LatentCache(3, CPU, torch.float32)
    moved, pointer, expected = 0, 0, []
    for position in range(5000):
        row = torch.full((1, 1, 3), float(position))
        expected.append(row)
        view = cache.append(row[..., :2], row[..., 2:], position)
        if view.data_ptr() != pointer:
            moved, pointer = moved + 1, view.data_ptr()
    assert torch.equal(view, torch.cat(expected, 1))
    assert moved <= 10  # 256 x 1.5^9 > 5000
    assert cache.buffer.shape[1] < 5000 * 1.6


def test_reserve_avoids_growth():
    cache = LatentCache(2, CPU, torch.float32)
    cache.reserve(700)
    pointer = cache.buffer.data_ptr()
    for position in range(700):
        cache.append(torch.ones(1, 1, 1), torch.ones(1, 1, 1), position)
    assert cache.buffer.data_ptr() == pointer


def test_copies_go_on_separately(tmp_path):
    write_checkpoint(tmp_path, tiny_config(num_layers=4), seed=2)
    session = Session.open(tmp_path, device="cpu", dtype="float32")
    session.prefill(range(10))
    kept = session.cache.clone()
    first = [session.decode(token) for token in (1, 2, 3)]
    session.cache = kept.clone()
    other = session.decode(7)
    session.cache = kept
    again = [session.decode(token) for token in (1, 2, 3)]
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(other, first[0])


def test_state_does_not_grow_and_latents_do(tmp_path):
    write_checkpoint(tmp_path, tiny_config(num_layers=4), seed=2)
    session = Session.open(tmp_path, device="cpu", dtype="bfloat16")
    session.prefill(range(10))
    before = session.memory()
    for token in range(5):
        session.decode(token)
    after = session.memory()
    assert after.kda_state_bytes == before.kda_state_bytes
    assert (before.mla_cache_bytes, after.mla_cache_bytes) == (10 * 40 * 2, 15 * 40 * 2)
