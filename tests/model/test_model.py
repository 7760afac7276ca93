"""The model against a float64 twin on random weights, over configurations unlike the released one."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from k3tool.generate import Session
from k3tool.synthetic import tiny_config, write_checkpoint
from tests.model.edit import edit_checkpoint
from tests.model.twin import Twin


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


def edited(config, text=None, linear=None, **top):
    config["text_config"].update(text or {})
    config["text_config"]["linear_attn_config"].update(linear or {})
    config.update(top)
    return config


def layered(config, full):
    """The same configuration with the MLA layers (from 1) at other places."""
    count = config["text_config"]["num_hidden_layers"]
    kda = [layer for layer in range(1, count + 1) if layer not in full]
    return edited(config, linear={"full_attn_layers": full, "kda_layers": kda})


CONFIGURATIONS = {
    "as released": lambda: tiny_config(num_layers=6, block_size=3),
    "block of 1": lambda: tiny_config(num_layers=5, block_size=1),
    "block of 2": lambda: tiny_config(num_layers=5, block_size=2),
    "block of 5, last one short": lambda: tiny_config(num_layers=7, block_size=5),
    "block longer than the model": lambda: tiny_config(num_layers=3, block_size=12),
    "plain residual stream": lambda: tiny_config(num_layers=4, block_size=None),
    "odd heads and widths": lambda: tiny_config(
        num_layers=4, hidden_size=56, kda_heads=5, kda_head_dim=12, mla_heads=7, kv_lora_rank=20, q_lora_rank=18,
        qk_nope_head_dim=10, qk_rope_head_dim=6, v_head_dim=14, intermediate_size=50,
    ),
    "one head each": lambda: tiny_config(num_layers=4, kda_heads=1, mla_heads=1),
    "more heads than head width": lambda: tiny_config(num_layers=2, kda_heads=9, kda_head_dim=8),
    "no query rank": lambda: tiny_config(num_layers=4, q_lora_rank=None),
    "no rope dimensions": lambda: tiny_config(num_layers=4, qk_rope_head_dim=0),
    "no output gate in MLA": lambda: edited(tiny_config(num_layers=4), {"mla_use_output_gate": False}),
    "no latent": lambda: tiny_config(num_layers=4, latent_size=None),
    "latent without norm": lambda: edited(tiny_config(num_layers=4), {"latent_moe_use_norm": False}),
    "one shared expert": lambda: tiny_config(num_layers=4, num_shared_experts=1),
    "no shared expert": lambda: tiny_config(num_layers=4, num_shared_experts=0),
    "no shared expert, no latent": lambda: tiny_config(num_layers=4, num_shared_experts=0, latent_size=None),
    "softmax router": lambda: edited(tiny_config(num_layers=4), {"moe_router_activation_func": "softmax"}),
    "no renormalization": lambda: edited(
        tiny_config(num_layers=4), {"moe_renormalize": False, "routed_scaling_factor": 0.7, "latent_moe_use_norm": False}
    ),
    "scaling factor": lambda: edited(
        tiny_config(num_layers=4, latent_size=None), {"routed_scaling_factor": 2.446}
    ),
    "grouped top-k": lambda: edited(tiny_config(num_layers=4), {"num_expert_group": 4, "topk_group": 2}),
    "one expert per token": lambda: tiny_config(num_layers=3, experts_per_token=1),
    "every expert": lambda: tiny_config(num_layers=3, num_experts=4, experts_per_token=4),
    "silu": lambda: edited(tiny_config(num_layers=4), {"hidden_act": "silu"}),
    "other caps": lambda: edited(
        tiny_config(num_layers=3), {"activation_situ_beta": 0.05, "activation_situ_linear_beta": 0.1}
    ),
    "softplus gate": lambda: edited(tiny_config(num_layers=4), linear={"gate_lower_bound": None}),
    "tight bound": lambda: edited(tiny_config(num_layers=4), linear={"gate_lower_bound": -0.5}),
    "loose bound": lambda: edited(tiny_config(num_layers=4), linear={"gate_lower_bound": -20.0}),
    "low-rank gate": lambda: edited(tiny_config(num_layers=4), linear={"use_full_rank_gate": False}),
    "two taps": lambda: edited(tiny_config(num_layers=3), linear={"short_conv_kernel_size": 2}),
    "one tap": lambda: edited(tiny_config(num_layers=3), linear={"short_conv_kernel_size": 1}),
    "MLA first, twice in a row": lambda: layered(tiny_config(num_layers=5), [1, 2, 5]),
    "only KDA": lambda: layered(tiny_config(num_layers=3), []),
    "only MLA": lambda: layered(tiny_config(num_layers=3), [1, 2, 3]),
    "two dense layers, experts in every second": lambda: edited(
        tiny_config(num_layers=6), {"first_k_dense_replace": 2, "moe_layer_freq": 2}
    ),
    "no experts at all": lambda: edited(tiny_config(num_layers=3), {"num_experts": 0}),
    "tied embeddings": lambda: edited(tiny_config(num_layers=3), {"tie_word_embeddings": True}, tie_word_embeddings=True),
    "other eps": lambda: edited(tiny_config(num_layers=3), {"rms_norm_eps": 0.03}),
}  # fmt: skip


def compare(folder: Path, ids: list[int], cut: int, bound: float) -> None:
    logits, sums, routed = Twin(folder)(ids)
    session = Session.open(folder, device="cpu", dtype="float32")
    seen: dict[tuple[str, int], list[torch.Tensor]] = {}

    def observe(what, layer, value):
        seen.setdefault((what, layer), []).append(value.clone())

    found = [session.prefill(ids[:cut], all_logits=True, observe=observe)]
    found += [session.decode(token, observe)[None] for token in ids[cut:]]
    for layer, expected in enumerate(sums):
        assert relative(torch.cat(seen["hidden", layer]), expected) < bound
    for layer, expected in routed.items():
        assert [set(row) for row in torch.cat(seen["router_ids", layer]).tolist()] == expected
    assert relative(torch.cat(found), logits) < bound


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_prefill_and_decode_equal_the_twin(name, tmp_path):
    write_checkpoint(tmp_path, CONFIGURATIONS[name](), seed=len(name))
    ids = random.Random(name).choices(range(1024), k=27)
    # 1e-5: float32 against float64 through at most 7 layers; measured 3e-6 at worst.
    compare(tmp_path, ids, 21, 1e-5)


@pytest.mark.parametrize("seed", range(6))
def test_random_configurations_equal_the_twin(seed, tmp_path):
    draw = random.Random(seed)
    layers = draw.randint(1, 6)
    experts = draw.randint(2, 20)
    config = tiny_config(
        num_layers=layers,
        hidden_size=draw.choice([24, 40, 64, 100]),
        block_size=draw.choice([None, 1, 2, 3, 5]),
        kda_heads=draw.randint(1, 6),
        kda_head_dim=draw.choice([4, 12, 16, 33]),
        mla_heads=draw.randint(1, 6),
        q_lora_rank=draw.choice([None, 8, 24]),
        kv_lora_rank=draw.choice([8, 17, 32]),
        qk_nope_head_dim=draw.choice([4, 8, 15]),
        qk_rope_head_dim=draw.choice([0, 2, 8]),
        v_head_dim=draw.choice([4, 16, 21]),
        intermediate_size=draw.choice([32, 77]),
        num_experts=experts,
        experts_per_token=draw.randint(1, min(experts, 6)),
        num_shared_experts=draw.randint(0, 3),
        moe_intermediate_size=draw.choice([32, 64]),
        latent_size=draw.choice([32, 96]),
    )
    text = {
        "moe_router_activation_func": draw.choice(["sigmoid", "softmax"]),
        "hidden_act": draw.choice(["situ", "silu"]),
    }
    edited(config, text, {"gate_lower_bound": draw.choice([None, -5.0]), "use_full_rank_gate": draw.random() < 0.5})
    layered(config, sorted(draw.sample(range(1, layers + 1), draw.randint(0, layers))))
    write_checkpoint(tmp_path, config, seed=seed)
    ids = draw.choices(range(1024), k=40)
    compare(tmp_path, ids, 37, 1e-5)


def test_the_twin_notices_a_difference(tmp_path):
    """The comparison is sharp: other weights, another order of tokens, or another cap are far beyond the bound."""
    write_checkpoint(tmp_path, tiny_config(num_layers=3), seed=1)
    ids = list(range(20))
    session = Session.open(tmp_path, device="cpu", dtype="float32")
    found = session.prefill(ids, all_logits=True)
    assert relative(found, Twin(tmp_path)(ids)[0]) < 1e-5
    swapped = [1, 0, *ids[2:]]
    assert relative(found[2:], Twin(tmp_path)(swapped)[0][2:]) > 1e-3
    twin = Twin(tmp_path)
    twin.c["activation_situ_beta"] = 3.9
    assert relative(found, twin(ids)[0]) > 1e-6


@pytest.mark.parametrize("site", ["q_a_proj", "kv_a_proj_with_mqa"])
def test_latent_norms_have_their_own_eps(site, tmp_path):
    """1e-6 whatever `rms_norm_eps` says: shown on latents so small that it decides their size."""
    write_checkpoint(tmp_path, layered(tiny_config(num_layers=2), [1, 2]), seed=4)

    def shrink(tensors):
        for name in [name for name in tensors if name.endswith(f"{site}.weight")]:
            tensors[name] = tensors[name] * 2.0**-7

    edit_checkpoint(tmp_path, shrink)
    ids = list(range(20))
    logits, _, _ = Twin(tmp_path)(ids)
    found = Session.open(tmp_path, device="cpu", dtype="float32").prefill(ids, all_logits=True)
    assert relative(found, logits) < 1e-5
