"""Every Triton twin at the shapes of the released model: inputs, the call, and what it must cost at least.

One list serves ahead-of-time compilation (tensors without storage), the comparison with the torch twins on a GPU, and
the benchmark. A floor counts each input read once and each output written once, and the operations of the matrix
products; `moved` adds what this implementation writes and reads between its kernels.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from k3tool.kernels.moe.experts import DenseExperts, PackedExperts
from k3tool.kernels.moe.scaled import ScaledExperts

HIDDEN, HEADS, DIM = 7168, 96, 128
LATENT, SHARED, QUERY = 512, 64, 192
EXPERTS, TOP_K, WIDTH, INNER = 896, 16, 3584, 3072
PROMPT = 4096
"""Tokens of a prefill case: one block of a long prompt."""
CONTEXT = 32768
"""Tokens in the cache of a decode case."""


class Draw:
    """Inputs on one device: random there, or without storage on `meta`."""

    def __init__(self, device: torch.device, dtype: torch.dtype, num_experts: int = EXPERTS, seed: int = 0) -> None:
        self.device, self.dtype, self.num_experts = device, dtype, num_experts
        self.generator = None if device.type == "meta" else torch.Generator(device).manual_seed(seed)
        self._experts: dict[str, Any] = {}

    def normal(self, *shape: int, dtype: torch.dtype | None = None, scale: float = 1.0) -> Tensor:
        dtype = dtype or self.dtype
        if self.device.type == "meta":
            return torch.empty(shape, dtype=dtype, device=self.device)
        return (torch.randn(shape, device=self.device, generator=self.generator) * scale).to(dtype)

    def floats(self, *shape: int, scale: float = 1.0) -> Tensor:
        return self.normal(*shape, dtype=torch.float32, scale=scale)

    def bytes(self, *shape: int, low: int = 0, high: int = 256) -> Tensor:
        if self.device.type == "meta":
            return torch.empty(shape, dtype=torch.uint8, device=self.device)
        return torch.randint(low, high, shape, dtype=torch.uint8, device=self.device, generator=self.generator)

    def routes(self, tokens: int) -> tuple[Tensor, Tensor]:
        """Distinct experts and weights of each token."""
        if self.device.type == "meta":
            ids = torch.empty((tokens, TOP_K), dtype=torch.int64, device=self.device)
        else:
            order = torch.rand(tokens, self.num_experts, device=self.device, generator=self.generator).argsort(1)
            ids = order[:, :TOP_K].contiguous()
        return ids, self.floats(tokens, TOP_K).abs() / TOP_K

    def experts(self, kind: str) -> Any:
        """Random experts in the storage `kind`, drawn once, of magnitudes that keep activations moderate."""
        if kind not in self._experts:
            self._experts[kind] = self._draw_experts(kind)
        return self._experts[kind]

    def _draw_experts(self, kind: str) -> Any:
        held: dict[str, Tensor] = {}
        for name, rows, columns in (("w1", INNER, WIDTH), ("w3", INNER, WIDTH), ("w2", WIDTH, INNER)):
            shape = (self.num_experts, rows)
            if kind == "bfloat16":
                held[name] = self.normal(*shape, columns, dtype=torch.bfloat16, scale=columns**-0.5)
            elif kind == "mxfp4":
                held[f"{name}_packed"] = self.bytes(*shape, columns // 2)
                held[f"{name}_scale"] = self.bytes(*shape, columns // 32, low=118, high=122)
            elif kind == "nvfp4":
                held[f"{name}_packed"] = self.bytes(*shape, columns // 2)
                held[f"{name}_scale"] = self.bytes(*shape, columns // 16, low=40, high=64).view(torch.float8_e4m3fn)
                held[f"{name}_global"] = self.floats(self.num_experts).abs() + 100.0
            elif kind == "fp8":
                held[f"{name}_codes"] = self.bytes(*shape, columns, high=120)
                held[f"{name}_scale"] = self.floats(self.num_experts, rows // 128, columns // 128, scale=1e-4)
            else:
                held[f"{name}_codes"] = self.bytes(*shape, columns // 2 if kind == "int4" else columns)
                held[f"{name}_scale"] = self.normal(*shape, columns // 32, dtype=torch.bfloat16, scale=2e-3)
        if kind == "bfloat16":
            return DenseExperts(**held)
        if kind in ("mxfp4", "nvfp4"):
            return PackedExperts(**held, group_size=32 if kind == "mxfp4" else 16)
        return ScaledExperts(kind, **held, group_size=128 if kind == "fp8" else 32)


@dataclass(frozen=True)
class Case:
    """One call of a kernel. Inputs named in `in_place` are also outputs. Bytes and operations are those of one call.

    bound: what limits it at best, "memory" or "matrix". target: the fraction of that limit to reach, None: no goal.
    """

    name: str
    kernel: str
    function: str
    make: Callable[[Draw], dict[str, Any]]
    floor_bytes: float
    moved_bytes: float
    operations: float = 0.0
    in_place: tuple[str, ...] = ()
    bound: str = "memory"
    target: float | None = None

    def twin(self, which: str) -> Callable[..., Any]:
        """The function itself, of `kernel` or `reference`."""
        return getattr(importlib.import_module(f"k3tool.kernels.{self.kernel}.{which}"), self.function)


STORED_BITS = {"mxfp4": 4.25, "nvfp4": 4.5, "fp8": 8 + 32 / 128**2, "int8": 8.5, "int4": 4.5, "bfloat16": 16.0}
"""Bits of a stored expert weight, its share of scales included."""


def _kda(tokens: int, sequences: int = 0) -> Case:
    def make(draw: Draw) -> dict[str, Any]:
        lead = (tokens,) if sequences else (1, tokens)
        qkv = draw.normal(*lead, 3, HEADS, DIM)
        q, k, v = qkv.unbind(-3)
        inputs = {
            "q": q,
            "k": k,
            "v": v,
            "f": draw.normal(*lead, HEADS, DIM),
            "b": draw.normal(*lead, HEADS),
            "a_log": draw.floats(HEADS, scale=0.5),
            "dt_bias": draw.floats(HEADS, DIM) - 4.0,
            "state": draw.floats(max(1, sequences), HEADS, DIM, DIM, scale=0.1),
            "lower_bound": -5.0,
        }
        if sequences:
            ends = torch.arange(sequences + 1, device=draw.device) * (tokens // sequences)
            inputs["offsets"] = ends
        return inputs

    head = tokens * HEADS
    outer = head * (5 * DIM * 2 + 2) + 2 * max(1, sequences) * HEADS * DIM * DIM * 4
    # Read again: k, f and b; written and read between kernels: w, q_in, k_out, u, the two squares of a chunk.
    between = head * (2 * DIM * 2 + 2) + 2 * head * (4 * DIM * 2 + 64 * 2 + 64 * 4)
    chunk = 2 * 64 * DIM * (6 * 64 + 2 * 64 + 3 * DIM + 64) + 10 * 64**3
    name = f"kda prefill, {tokens} tokens" + (f" in {sequences} sequences" if sequences else "")
    return Case(
        name, "kda", "kda_packed" if sequences else "kda", make, outer, outer + between, head / 64 * chunk, ("state",)
    )


def _kda_decode(batch: int) -> Case:
    def make(draw: Draw) -> dict[str, Any]:
        return {
            "x": draw.normal(batch, 3 * HEADS * DIM),
            "conv_weight": draw.floats(4, 3 * HEADS * DIM, scale=0.5),
            "history": draw.normal(batch, 3, 3 * HEADS * DIM),
            "f": draw.normal(batch, HEADS, DIM),
            "b": draw.normal(batch, HEADS),
            "a_log": draw.floats(HEADS, scale=0.5),
            "dt_bias": draw.floats(HEADS, DIM) - 4.0,
            "state": draw.floats(batch, HEADS, DIM, DIM, scale=0.1),
            "gate": draw.normal(batch, HEADS, DIM),
            "norm_weight": draw.floats(DIM),
            "lower_bound": -5.0,
            "eps": 1e-5,
        }

    width = HEADS * DIM
    moved = batch * (2 * width * DIM * 4 + width * 2 * (3 + 18 + 3)) + 4 * width * (3 * 4 + 1)
    return Case(
        f"kda decode, batch {batch}", "kda", "kda_decode", make, moved, moved, 0.0, ("state", "history"), target=0.7
    )


def _mla(tokens: int, keys: int, batch: int = 1) -> Case:
    def make(draw: Draw) -> dict[str, Any]:
        return {
            "q": draw.normal(batch, tokens, HEADS, QUERY),
            "cache": draw.normal(batch, keys, LATENT + SHARED),
            "kv_b": draw.normal(HEADS, 2 * DIM, LATENT, scale=LATENT**-0.5),
            "key_dim": DIM,
        }

    cache, weights = batch * keys * (LATENT + SHARED) * 2, HEADS * 2 * DIM * LATENT * 2
    ends = batch * tokens * HEADS * (QUERY + DIM) * 2
    if tokens > 16:
        pairs = keys * HEADS * 2 * DIM * 2
        scores = tokens * (keys - tokens / 2) * HEADS
        operations = 2 * scores * (QUERY + DIM) + 2 * keys * HEADS * 2 * DIM * LATENT
        return Case(
            f"mla prefill, {tokens} tokens on {keys}", "mla", "mla", make, cache + weights + ends,
            cache + weights + ends + 2 * pairs, operations, bound="matrix",
        )  # fmt: skip
    operations = 2 * batch * tokens * keys * HEADS * (2 * LATENT + SHARED)
    between = 2 * batch * tokens * HEADS * LATENT * (2 + 4 * 44)
    name = f"mla decode, batch {batch}, {keys} cached"
    floor = cache + weights + ends
    return Case(name, "mla", "mla", make, floor, floor + between, operations, target=0.6)


def _experts(tokens: int, kind: str) -> Case:
    def make(draw: Draw) -> dict[str, Any]:
        ids, weights = draw.routes(tokens)
        return {
            "x": draw.normal(tokens, WIDTH),
            "experts": draw.experts(kind),
            "ids": ids,
            "weights": weights,
            "activation": "situ",
            "beta": 4.0,
            "linear_beta": 25.0,
        }

    visits = tokens * TOP_K
    visited = EXPERTS * (1 - (1 - TOP_K / EXPERTS) ** tokens)
    floor = visited * 3 * WIDTH * INNER * STORED_BITS[kind] / 8 + tokens * WIDTH * (2 + 4) + visits * 12
    between = 2 * visits * (INNER + WIDTH) * 2
    is_decode = tokens <= 64
    return Case(
        f"experts {kind}, {tokens} tokens", "moe", "experts_forward", make, floor, floor + between,
        2 * visits * 3 * WIDTH * INNER, bound="memory" if is_decode else "matrix",
        target=(0.7 if is_decode else 0.4) if kind == "mxfp4" else None,
    )  # fmt: skip


def _mix(tokens: int) -> Case:
    def make(draw: Draw) -> dict[str, Any]:
        return {"values": draw.normal(9, tokens, HIDDEN), "query": draw.floats(HIDDEN, scale=0.02), "eps": 1e-5}

    moved = tokens * 10 * HIDDEN * 2 + HIDDEN * 4
    return Case(f"attn_res mix, {tokens} tokens", "attn_res", "mix_blocks", make, moved, moved)


def _norm(tokens: int) -> Case:
    def make(draw: Draw) -> dict[str, Any]:
        return {"x": draw.normal(tokens, HIDDEN), "weight": draw.floats(HIDDEN), "eps": 1e-5}

    moved = 2 * tokens * HIDDEN * 2 + HIDDEN * 4
    return Case(f"rms_norm, {tokens} tokens", "norm", "rms_norm", make, moved, moved)


def _gated_norm(tokens: int) -> Case:
    def make(draw: Draw) -> dict[str, Any]:
        gate = draw.normal(tokens, HEADS * DIM + 224)[:, : HEADS * DIM].unflatten(1, (HEADS, DIM))
        return {"x": draw.normal(tokens, HEADS, DIM), "gate": gate, "weight": draw.floats(DIM), "eps": 1e-5}

    moved = 3 * tokens * HEADS * DIM * 2
    return Case(f"gated_rms_norm, {tokens} tokens", "norm", "gated_rms_norm", make, moved, moved)


def _conv(tokens: int) -> Case:
    def make(draw: Draw) -> dict[str, Any]:
        width = 3 * HEADS * DIM
        history = draw.normal(1, 3, width)
        return {"x": draw.normal(1, tokens, width), "weight": draw.floats(4, width, scale=0.5), "history": history}

    moved = 3 * HEADS * DIM * (2 * 2 * tokens + 4 * 4 + 2 * 3 * 2)
    return Case(f"short convolution, {tokens} tokens", "conv", "causal_conv", make, moved, moved, 0.0, ("history",))


def _router(tokens: int) -> Case:
    def make(draw: Draw) -> dict[str, Any]:
        return {
            "logits": draw.floats(tokens, EXPERTS),
            "bias": draw.floats(EXPERTS, scale=0.1),
            "top_k": TOP_K,
            "activation": "sigmoid",
            "renormalize": True,
            "scaling_factor": 1.0,
            "num_groups": 1,
            "topk_groups": 1,
        }

    moved = tokens * (EXPERTS * 4 + TOP_K * 12) + EXPERTS * 4
    return Case(f"router, {tokens} tokens", "router", "select_experts", make, moved, moved)


def _router_product(tokens: int) -> Case:
    def make(draw: Draw) -> dict[str, Any]:
        x = draw.normal(tokens, HIDDEN).float()
        return {"x": x, "weight": draw.normal(EXPERTS, HIDDEN, dtype=torch.bfloat16, scale=HIDDEN**-0.5)}

    moved = tokens * (HIDDEN + EXPERTS) * 4 + EXPERTS * HIDDEN * 2
    operations = 2 * tokens * HIDDEN * EXPERTS
    bound = "memory" if tokens <= 16 else "matrix"
    return Case(
        f"float32 x bfloat16 product, {tokens} tokens", "linear", "linear", make, moved, moved, operations, bound=bound
    )


def _gated(tokens: int) -> Case:
    def make(draw: Draw) -> dict[str, Any]:
        gate, up = draw.normal(tokens, 2 * 2 * INNER).chunk(2, dim=-1)
        return {"gate": gate, "up": up, "activation": "situ", "beta": 4.0, "linear_beta": 25.0}

    moved = 3 * tokens * 2 * INNER * 2
    return Case(f"SiTU gating, {tokens} tokens", "moe", "gated_activation", make, moved, moved)


def _decode_values() -> Case:
    def make(draw: Draw) -> dict[str, Any]:
        scale = draw.bytes(INNER, WIDTH // 32, low=118, high=122)
        return {"packed": draw.bytes(INNER, WIDTH // 2), "scale": scale, "dtype": draw.dtype}

    moved = INNER * WIDTH * (4.25 / 8 + 2)
    return Case("FP4 decoding of one matrix", "mxfp4", "decode_values", make, moved, moved)


def all_cases() -> list[Case]:
    """In the order of the documentation's table."""
    return [
        _kda(PROMPT),
        _kda(PROMPT, 16),
        _kda_decode(1),
        _kda_decode(32),
        _conv(PROMPT),
        _mla(PROMPT, PROMPT),
        _mla(PROMPT, CONTEXT),
        _mla(1, CONTEXT),
        _mla(1, CONTEXT, 8),
        _mix(1),
        _mix(PROMPT),
        *(_experts(1, kind) for kind in STORED_BITS),
        _experts(64, "mxfp4"),
        *(_experts(PROMPT, kind) for kind in STORED_BITS),
        _norm(1),
        _norm(PROMPT),
        _gated_norm(PROMPT),
        _router(1),
        _router(PROMPT),
        _router_product(1),
        _router_product(PROMPT),
        _gated(PROMPT),
        _decode_values(),
    ]
