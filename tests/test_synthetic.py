"""Synthetic checkpoints: released layout, reproducible, any configuration."""

from __future__ import annotations

import base64
import copy
import hashlib

import pytest

from k3tool.catalog import catalog
from k3tool.checkpoint.reader import Checkpoint
from k3tool.config import K3Config
from k3tool.errors import UsageError
from k3tool.synthetic import bfloat16_bits, byte_pair_ranks, tiny_config, write_checkpoint


def digests(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def test_written_checkpoint_holds_exactly_the_catalogue(tmp_path):
    document = tiny_config(num_layers=5)
    write_checkpoint(tmp_path, document)
    checkpoint = Checkpoint.open(tmp_path)
    layout = catalog(K3Config.from_dict(document))
    found = {name: (place.spec.shape, place.spec.dtype, place.shard) for name, place in checkpoint.located.items()}
    assert found == {entry.name: (entry.shape, entry.dtype, layout.shards[entry.shard]) for entry in layout.entries}
    assert checkpoint.index.total_size == layout.total_size


def test_same_seed_same_bytes_other_seed_other_bytes(tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        write_checkpoint(tmp_path / name, tiny_config(num_layers=2), seed=seed, tokenizer=True)
    first, second, other = (digests(tmp_path / name) for name in "abc")
    assert first == second
    assert {name for name in first if first[name] != other[name]} == {n for n in first if n.startswith("model-")}


def test_expert_scales_and_a_log_tail_are_as_released(tmp_path):
    write_checkpoint(tmp_path, tiny_config(num_layers=2))
    checkpoint = Checkpoint.open(tmp_path)
    for name in checkpoint.located:
        if name.endswith("weight_scale"):
            assert all(110 <= byte <= 123 for byte in checkpoint.read(name))
        if name.endswith("A_log"):
            data = checkpoint.read(name)
            assert len(data) == 32 * 4
            assert data[3 * 4 :] == bytes(29 * 4)
            assert all(data[4 * h : 4 * h + 4] != bytes(4) for h in range(3))


def test_nvfp4_experts(tmp_path):
    document = tiny_config(num_layers=2)
    quantization = copy.deepcopy(document["text_config"]["quantization_config"])
    quantization["format"] = quantization["config_groups"]["group_0"]["format"] = "nvfp4-pack-quantized"
    document["text_config"]["quantization_config"] = quantization
    write_checkpoint(tmp_path, document)
    checkpoint = Checkpoint.open(tmp_path)
    scales = [name for name in checkpoint.located if name.endswith("weight_scale")]
    assert {checkpoint.located[name].spec.dtype for name in scales} == {"F8_E4M3"}
    assert set(checkpoint.read(scales[0])) <= {48, 56, 64, 72}  # powers of two


def test_tokenizer_files(tmp_path):
    write_checkpoint(tmp_path, tiny_config(num_layers=2, vocab_size=2048), tokenizer=True)
    lines = (tmp_path / "tiktoken.model").read_bytes().splitlines()
    tokens = [base64.b64decode(line.split()[0]) for line in lines]
    assert [int(line.split()[1]) for line in lines] == list(range(2048 - 256))
    assert len(set(tokens)) == len(tokens)
    with pytest.raises(UsageError, match="300"):
        write_checkpoint(tmp_path / "small", tiny_config(num_layers=1, vocab_size=300), tokenizer=True)


def test_merged_tokens_are_made_of_earlier_ones():
    ranks = byte_pair_ranks(400)
    for position, token in enumerate(ranks):
        if len(token) > 1 and token.isascii():
            earlier = set(ranks[:position])
            assert any(token[:cut] in earlier and token[cut:] in earlier for cut in range(1, len(token)))


def test_bfloat16_rounds_to_nearest_even():
    import numpy as np

    torch = pytest.importorskip("torch")
    values = np.random.default_rng(0).standard_normal(10_000).astype(np.float32)
    expected = torch.from_numpy(values).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    assert (bfloat16_bits(values) == expected).all()
