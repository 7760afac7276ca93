"""A synthetic Kimi K3 of true width with as many layers as the card holds: prefill and decode, end to end."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

PROMPT = 2048
STEPS = 32
ROOM = 10 << 30  # left for activations
LAYER_BYTES = 18 << 30  # more than any layer takes


def run_model(deadline: float) -> dict[str, Any] | None:
    """Build it, run a prompt and decode with and without a CUDA graph. None where numpy is absent (loading needs it)."""
    try:
        from k3tool import generate
    except ImportError as error:
        return {"text": f"no model: {error}"}
    model, seconds = build(torch.device("cuda"), deadline)
    layers = len(model.layers)
    cache = model.new_cache()
    ids = torch.randint(0, model.config.vocab_size, (PROMPT,)).tolist()
    generate.prefill(model, ids, cache)  # compiles
    found: dict[str, Any] = {"layers": layers, "prompt": PROMPT, "build_seconds": seconds}
    cache = model.new_cache()
    torch.cuda.synchronize()
    begun = time.perf_counter()
    logits = generate.prefill(model, ids, cache)
    torch.cuda.synchronize()
    found["prefill_ms"] = (time.perf_counter() - begun) * 1e3
    found["decode_ms"] = decode(model, cache, logits)
    found["weight_bytes_per_token"] = bytes_of_a_token(model)
    found["finite"] = bool(torch.isfinite(logits).all())
    found["text"] = (
        f"model of true width, {layers} layers: prefill of {PROMPT} tokens {found['prefill_ms']:.1f} ms "
        f"({PROMPT / found['prefill_ms'] * 1e3:,.0f} tokens/s), decode {found['decode_ms']:.3f} ms a token "
        f"({found['weight_bytes_per_token'] / found['decode_ms'] / 1e9:.2f} TB/s of weights), built in {seconds:.0f} s"
    )
    return found


def decode(model: Any, cache: Any, logits: Tensor) -> float:
    """Milliseconds of a greedy step, the first ones (ordinary, then captured) left out."""
    from k3tool.generate import decode_one_token

    cache.reserve(cache.position + STEPS + 8)
    begun = 0.0
    for step in range(STEPS + 8):
        if step == 8:
            torch.cuda.synchronize()
            begun = time.perf_counter()
        logits = decode_one_token(model, int(logits.argmax()), cache)
    torch.cuda.synchronize()
    return (time.perf_counter() - begun) / STEPS * 1e3


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


def build(device: torch.device, deadline: float) -> tuple[Any, float]:
    """The released architecture with random weights in the released storage, cut to the layers that fit."""
    from k3tool import release
    from k3tool.layout import Layout
    from k3tool.model.load import _build
    from k3tool.parallel.share import share_of

    begun = time.monotonic()
    config = release.config()
    free = torch.cuda.mem_get_info(device)[0]
    number = max(1, min(config.num_layers, int((free - ROOM) // LAYER_BYTES) + 1))  # layer 0 has no experts
    share = share_of(config, Layout(), Layout().place(0), number)
    model = _build(random_weights(device), share, torch.bfloat16)
    torch.cuda.synchronize()
    return model, time.monotonic() - begun


def random_weights(device: torch.device) -> Any:
    from k3tool.model.weights import PLAIN_SCHEMES, Matrix, Weights

    class RandomWeights(Weights):
        """Stands in for a checkpoint: what would be read is drawn on the device."""

        def __init__(self) -> None:
            self.device = device
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
