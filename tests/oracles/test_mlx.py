"""mlx-lm's kimi_k3, an implementation that nobody here wrote, on the same files: golden ones and ones k3tool wrote."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from k3tool.generate import Session
from k3tool.quantize import quantize
from k3tool.synthetic import tiny_config, write_checkpoint

pytestmark = [
    pytest.mark.oracle,
    pytest.mark.skipif(importlib.util.find_spec("mlx_lm") is None, reason="mlx-lm is not installed (extra: oracle)"),
]

# One process for all checkpoints: mlx compiles its CPU kernels on first use. Prefill of all tokens but the last few,
# which are fed one by one through its cache; float32 throughout.
SCRIPT = """
import sys
from pathlib import Path
import mlx.core as mx
import numpy as np
from mlx_lm.utils import load_model
from safetensors.numpy import save_file

target, ids, cut = Path(sys.argv[1]), [int(word) for word in sys.argv[2].split(",")], int(sys.argv[3])
found = {}
for folder in sys.argv[4:]:
    model, _ = load_model(Path(folder))
    model.set_dtype(mx.float32)
    cache = model.make_cache()
    rows = [np.array(model(mx.array([ids[:cut]]), cache)[0])]
    rows += [np.array(model(mx.array([[token]]), cache)[0]) for token in ids[cut:]]
    found[folder] = np.concatenate(rows)
save_file(found, target)
"""


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


def test_mlx_agrees_on_golden_and_written_checkpoints(mini, tmp_path):
    written = {
        "released structure": tiny_config(num_layers=8, vocab_size=512),
        "other sizes": tiny_config(
            num_layers=6, hidden_size=96, block_size=2, kda_heads=2, kda_head_dim=32, mla_heads=5, q_lora_rank=None,
            vocab_size=512, num_experts=20, experts_per_token=5, num_shared_experts=1, moe_intermediate_size=64,
            latent_size=64,
        ),
    }  # fmt: skip
    folders = [mini]
    for name, config in written.items():
        folders.append(tmp_path / name)
        write_checkpoint(tmp_path / name, config, seed=5)
    folders.append(tmp_path / "quantized")
    config = tiny_config(num_layers=8, vocab_size=512, vision=False)
    config["text_config"].pop("quantization_config")
    write_checkpoint(tmp_path / "plain", config, seed=6)
    done = quantize(tmp_path / "plain", tmp_path / "quantized", experts="mxfp4")
    assert done.components["routed_experts"]["exact_tensors"] == 0
    ids = [(11 * i * i + 3) % 256 for i in range(40)]
    target = tmp_path / "mlx.safetensors"
    arguments = [str(target), ",".join(map(str, ids)), "34", *map(str, folders)]
    done = subprocess.run([sys.executable, "-c", SCRIPT, *arguments], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    expected = load_file(target)
    for folder in folders:
        session = Session.open(folder, device="cpu", dtype="float32")
        rows = [session.prefill(ids[:34], all_logits=True)]
        rows += [session.decode(token)[None] for token in ids[34:]]
        found = torch.cat(rows)
        # Both round float32 in their own order and the network amplifies it; measured at most 4e-6.
        assert relative(found, expected[str(folder)]) < 3e-5
        assert torch.equal(found.argmax(-1), expected[str(folder)].argmax(-1))
