"""transformers' kimi_linear on CPU: softplus gate, low-rank output gate, no query rank, plain experts, no AttnRes."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from k3tool.generate import Session
from k3tool.quantize import quantize
from k3tool.synthetic import write_checkpoint
from tests.model.edit import edit_checkpoint

pytestmark = [
    pytest.mark.oracle,
    pytest.mark.skipif(
        importlib.util.find_spec("transformers") is None, reason="transformers is not installed (extra: oracle)"
    ),
]

# Its kernels for a GPU are chosen at import where `fla` is present: hidden, so that the torch path runs.
SCRIPT = """
import sys
sys.modules["fla"] = None
import torch
from safetensors.torch import save_file
from transformers import KimiLinearForCausalLM

torch.set_num_threads(1)
target, ids, cut = sys.argv[1], [int(word) for word in sys.argv[2].split(",")], int(sys.argv[3])
found = {}
for folder in sys.argv[4:]:
    model, info = KimiLinearForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    with torch.no_grad():
        out = model(torch.tensor([ids[:cut]]), use_cache=True)
        rows = [out.logits[0]]
        for token in ids[cut:]:
            out = model(torch.tensor([[token]]), cache=out.cache, use_cache=True)
            rows.append(out.logits[0])
    found[folder] = torch.cat(rows).contiguous()
save_file(found, target)
"""


def kimi_linear_config() -> dict:
    """The flat structure of a Kimi Linear `config.json`, with small widths."""
    return {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "vocab_size": 300,
        "hidden_size": 72,
        "intermediate_size": 96,
        "num_hidden_layers": 6,
        "num_attention_heads": 5,
        "num_key_value_heads": 5,
        "head_dim": 72,
        "q_lora_rank": None,
        "kv_lora_rank": 24,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "mla_use_nope": True,
        "hidden_act": "silu",
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "num_experts": 10,
        "num_experts_per_token": 3,
        "num_shared_experts": 1,
        "moe_intermediate_size": 40,
        "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid",
        "use_grouped_topk": True,
        "num_expert_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 2.446,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0,
        "model_max_length": 1048576,
        "num_nextn_predict_layers": 0,
        "tie_word_embeddings": False,
        "linear_attn_config": {
            "full_attn_layers": [4, 6],
            "kda_layers": [1, 2, 3, 5],
            "head_dim": 16,
            "num_heads": 4,
            "short_conv_kernel_size": 4,
        },
    }


def as_released(tensors: dict[str, torch.Tensor]) -> None:
    """Kimi Linear stores A_log as [1, 1, heads, 1], without padding."""
    for name in [name for name in tensors if name.endswith("A_log")]:
        tensors[name] = tensors[name][:4].reshape(1, 1, 4, 1).contiguous()


def test_transformers_agrees_on_kimi_linear(tmp_path):
    folders = []
    for groups, topk_groups in ((1, 1), (5, 2)):
        config = {**kimi_linear_config(), "num_expert_group": groups, "topk_group": topk_groups}
        folders.append(tmp_path / f"{groups} groups")
        write_checkpoint(folders[-1], config, seed=9)
        edit_checkpoint(folders[-1], as_released)
    ids = [(7 * i * i + 5) % 300 for i in range(90)]
    target = tmp_path / "transformers.safetensors"
    arguments = [str(target), ",".join(map(str, ids)), "84", *map(str, folders)]
    done = subprocess.run([sys.executable, "-c", SCRIPT, *arguments], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    expected = load_file(target)
    for folder in folders:
        session = Session.open(folder, device="cpu", dtype="float32")
        assert session.config.gate_lower_bound is None
        rows = [session.prefill(ids[:84], all_logits=True), *(session.decode(token)[None] for token in ids[84:])]
        found, wanted = torch.cat(rows), expected[str(folder)]
        error = ((found.double() - wanted.double()).norm() / wanted.double().norm()).item()
        assert error < 1e-5  # float32 rounding in another order; measured 1e-6
        assert torch.equal(found.argmax(-1), wanted.argmax(-1))


QUANTIZED = """
import sys
sys.modules["fla"] = None
import torch
from transformers import KimiLinearForCausalLM

torch.set_num_threads(1)
ids = torch.arange(1, 9)[None]


def load(folder, dtype):
    model, info = KimiLinearForCausalLM.from_pretrained(folder, dtype=dtype, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    found = {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    weights = {}
    for name, module in found.items():
        if type(module).__name__ == "Linear4bit":  # before it runs: its CPU kernel packs the codes anew
            import bitsandbytes.functional as functional
            weights[name] = functional.dequantize_4bit(module.weight.data, module.weight.quant_state)
    quantized = len(weights) + sum(hasattr(module, "quantization_scheme") for module in found.values())
    with torch.no_grad():
        model(ids)  # compressed-tensors decompresses what it runs
    return {name: weights.get(name, module.weight) for name, module in found.items()}, quantized


for kind, quantized, decoded in zip(*[iter(sys.argv[1:])] * 3):
    dtype = torch.bfloat16 if kind == "nf4" else torch.float32
    made, count = load(quantized, dtype)
    expected, none = load(decoded, dtype)
    assert made.keys() == expected.keys() and none == 0
    for name, weight in expected.items():
        assert torch.equal(made[name].bfloat16(), weight.bfloat16()), name  # as the decoded one is stored
    print(kind, count)
"""


def test_transformers_loads_what_was_quantized(tmp_path):
    """Shared experts as NF4, attention as FP8: every matrix has the values that k3tool decodes, none is left out."""
    pytest.importorskip("accelerate")
    pytest.importorskip("bitsandbytes")
    pytest.importorskip("compressed_tensors")
    config = {**kimi_linear_config(), "hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 64}
    write_checkpoint(tmp_path / "source", {**config, "head_dim": 64}, seed=9)
    edit_checkpoint(tmp_path / "source", as_released)
    arguments = []
    for kind, component in (("nf4", "shared"), ("fp8-channel", "attention")):
        made, decoded = tmp_path / kind, tmp_path / f"{kind} decoded"
        quantize(tmp_path / "source", made, **{component: kind})
        quantize(made, decoded, **{component: "bf16"})
        arguments += [kind, str(made), str(decoded)]
    done = subprocess.run([sys.executable, "-c", QUANTIZED, *arguments], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    # gate, up and down of five layers; projections of four KDA layers and two MLA layers
    assert done.stdout.split() == ["nf4", "15", "fp8-channel", "44"]
