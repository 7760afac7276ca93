"""A synthetic Kimi K3 of true width with as many layers as the card holds: prefill and decode, end to end."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from k3tool import release
from k3tool.config import K3Config
from k3tool.generate import decode_one_token, prefill
from k3tool.kernels import dispatch
from k3tool.layout import Layout
from k3tool.model.check import check_kernels
from k3tool.model.load import _build
from k3tool.parallel.share import share_of

STEPS, FIRST_STEPS = 32, 8  # the first ones run as usual, settle kernels and are captured; on a CPU 1 will do
ROOM = 10 << 30  # left for activations
LAYER_BYTES = 18 << 30  # more than any layer takes
CHECKED_TOKENS = 16


def run_model(device: torch.device, machine: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Build it, run a prompt, decode with a CUDA graph; then, while less than half of `seconds` is gone, decode kernel by
    kernel, and compare every kernel with its reference on the way."""
    begun = time.monotonic()
    with dispatch.use("triton"):
        model = build(device)
        found: dict[str, Any] = {"layers": len(model.layers), "build_seconds": time.monotonic() - begun}
        prompt = found["prompt"] = 2048 if device.type == "cuda" else 5
        ids = torch.randint(0, model.config.vocab_size, (prompt,)).tolist()
        prefill(model, ids, model.new_cache())  # compiles and chooses
        cache = model.new_cache()
        found["prefill_ms"], logits = timed(device, lambda: prefill(model, ids, cache))
        found["finite"] = bool(torch.isfinite(logits).all())
        found["decode_ms"] = decode(model, cache, logits)
        found["is_captured"] = cache.captured is not None and cache.captured.step is not None
        found["weight_bytes_per_token"] = bytes_of_a_token(model)
        rate = found["weight_bytes_per_token"] / found["decode_ms"] * 1e3
        found["text"] = (
            f"model of true width, {found['layers']} layers: prefill of {prompt} tokens {found['prefill_ms']:.1f} ms "
            f"({prompt / found['prefill_ms'] * 1e3:,.0f} tokens/s), decode {found['decode_ms']:.3f} ms a token "
            f"({'captured' if found['is_captured'] else 'kernel by kernel'}), {rate / 1e12:.2f} TB/s of weights, "
            f"{rate / machine['copy_bytes_per_second']:.0%} of the copy bandwidth; built in {found['build_seconds']:.0f} s"
        )
        if not found["finite"]:
            found["text"] += "; ITS LOGITS ARE NOT FINITE"
        if time.monotonic() - begun < seconds / 2:
            found["text"] += further(model, ids, found)
    return found


def further(model: Any, ids: list[int], found: dict[str, Any]) -> str:
    """What is known beyond: decoding without a graph, and every kernel beside its reference on live activations."""
    os.environ["K3TOOL_GRAPH"] = "0"
    cache = model.new_cache()
    found["uncaptured_decode_ms"] = decode(model, cache, prefill(model, ids[:64], cache))
    checks = check_kernels(model, ids[:CHECKED_TOKENS])
    found["checks"] = [check.as_json() for check in checks]
    wrong = sorted({check.kernel for check in checks if not check.ok})
    return (
        f"; kernel by kernel {found['uncaptured_decode_ms']:.3f} ms a token; {len(checks)} checks on live activations: "
        + (f"BEYOND THEIR BOUND {', '.join(wrong)}" if wrong else "all within their bounds")
    )


def timed(device: torch.device, action: Any) -> tuple[float, Any]:
    """Milliseconds, and what came of it."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    wait()
    begun = time.perf_counter()
    result = action()
    wait()
    return (time.perf_counter() - begun) * 1e3, result


def decode(model: Any, cache: Any, logits: Tensor) -> float:
    """Milliseconds of a greedy step, the first ones left out."""
    first, then = (FIRST_STEPS, STEPS) if model.device.type == "cuda" else (1, 1)
    cache.reserve(cache.position + first + then)

    def steps(number: int, logits: Tensor) -> Tensor:
        for _ in range(number):
            logits = decode_one_token(model, int(logits.argmax()), cache)
        return logits

    logits = steps(first, logits)
    return timed(model.device, lambda: steps(then, logits))[0] / then


def bytes_of_a_token(model: Any) -> float:
    """Weights that one token reads: everything but the embedding, of the routed experts those it visits."""
    total = model.lm_head.nbytes
    for layer in model.layers:
        parts = [*vars(layer.self_attn).values(), *vars(layer.mlp).values()]
        total += sum(part.nbytes for part in parts if isinstance(part, Tensor))
        experts = getattr(layer.mlp, "experts", None)
        if experts is not None:
            total += experts.nbytes * model.config.experts_per_token / model.config.num_experts
    return total


def build(device: torch.device) -> Any:
    """The released architecture with random weights in the released storage, cut to the layers that fit."""
    config = release.config()
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
        number = max(1, min(config.num_layers, int((free - ROOM) // LAYER_BYTES) + 1))  # layer 0 has no experts
    else:
        config, number = tiny(config), 3
    share = share_of(config, Layout(), Layout().place(0), number)
    model = _build(random_weights(device), share, torch.bfloat16)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return model


def tiny(config: K3Config) -> K3Config:
    """Small enough for the interpreter: one layer of each kind and mixes of two snapshots."""
    return replace(
        config, vocab_size=64, hidden_size=64, layer_kinds=("kda", "mla", "kda"), kda_num_heads=2, kda_head_dim=16,
        num_heads=2, q_lora_rank=32, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=16,
        intermediate_size=64, num_experts=4, experts_per_token=2, moe_intermediate_size=64, latent_size=32,
        attn_res_block_size=2,
    )  # fmt: skip


def random_weights(device: torch.device) -> Any:
    from k3tool.model.weights import PLAIN_SCHEMES, Matrix, Weights

    class RandomWeights(Weights):
        """Stands in for a checkpoint: what would be read is drawn on the device."""

        def __init__(self) -> None:
            self.device = device
            self.dtype = torch.bfloat16
            self.progress = object()  # not measuring
            self.nbytes = 0
            self.used = set()
            self.modules = {}
            self._checks = []

        def scheme(self, matrix: Matrix) -> str:
            return "mxfp4" if ".experts." in matrix.module and "shared" not in matrix.module else "bf16"

        def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
            result = torch.empty(shape, dtype=dtype, device=device)
            return result, result

        def raw(self, name: str, destination: Tensor | None) -> None:
            assert destination is not None
            if destination.dtype != torch.uint8:
                destination.normal_(std=destination.shape[-1] ** -0.5)
            elif name.endswith("weight_scale"):
                destination.random_(117, 121)
            else:
                destination.random_(0, 256)

        def vector(self, name: str, *shapes: tuple[int, ...]) -> Tensor:
            result, _ = self.allocate(shapes[0], torch.float32)
            if "norm" in name:
                return result.fill_(1.0)
            return result.normal_(mean=-4.0 if name.endswith("dt_bias") else 0.0, std=0.3)

        def fill(self) -> None:
            for action in self._checks:
                action()
            self._checks.clear()

        def _load(self, matrix: Matrix, destination: Tensor | None) -> None:
            assert self.scheme(matrix) in PLAIN_SCHEMES
            self.raw(f"{matrix.module}.weight", destination)

    return RandomWeights()
