"""Every Triton twin at the shapes of the released model: inputs, the call, and what it must cost at least.

One list serves ahead-of-time compilation (tensors without storage), the comparison with the torch twins on a GPU, and
the benchmark. A floor counts each input read once and each output written once, and the operations of the matrix
products; `moved` adds what this implementation writes and reads between its kernels.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from k3tool.kernels.moe.experts import DenseExperts, PackedExperts
from k3tool.kernels.moe.scaled import ScaledExperts


@dataclass(frozen=True)
class Sizes:
    """Those of the released model.

    prompt: tokens of a prefill case, in `sequences` where it is packed; context: tokens in the cache of a decode case;
    batch: sequences that are decoded together.
    """

    hidden: int = 7168
    heads: int = 96
    dim: int = 128
    latent: int = 512
    shared: int = 64
    experts: int = 896
    top_k: int = 16
    width: int = 3584
    inner: int = 3072
    prompt: int = 4096
    context: int = 32768
    batch: int = 32
    sequences: int = 16

    @property
    def query(self) -> int:
        return self.dim + self.shared


RELEASED = Sizes()
TINY = Sizes(
    hidden=96,
    heads=2,
    dim=32,
    latent=32,
    shared=16,
    experts=6,
    top_k=3,
    width=128,
    inner=64,
    prompt=70,
    context=100,
    batch=8,
    sequences=3,
)
"""Small enough for the interpreter."""


class Draw:
    """Inputs on one device: random there, or without storage on `meta`."""

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        *,
        sizes: Sizes = RELEASED,
        num_experts: int | None = None,
        seed: int = 0,
    ) -> None:
        self.device, self.dtype, self.sizes = device, dtype, sizes
        self.num_experts = num_experts or sizes.experts
        self.generator = None if device.type == "meta" else torch.Generator(device).manual_seed(seed)
        self._experts: dict[str, Any] = {}

    def normal(self, *shape: int, dtype: torch.dtype | None = None, scale: float = 1.0) -> Tensor:
        dtype = dtype or self.dtype
        if self.device.type == "meta":
            return torch.empty(shape, dtype=dtype, device=self.device)
        return torch.empty(shape, dtype=dtype, device=self.device).normal_(std=scale, generator=self.generator)

    def floats(self, *shape: int, scale: float = 1.0) -> Tensor:
        return self.normal(*shape, dtype=torch.float32, scale=scale)

    def bytes(self, *shape: int, low: int = 0, high: int = 256) -> Tensor:
        if self.device.type == "meta":
            return torch.empty(shape, dtype=torch.uint8, device=self.device)
        return torch.randint(low, high, shape, dtype=torch.uint8, device=self.device, generator=self.generator)

    def routes(self, tokens: int) -> tuple[Tensor, Tensor]:
        """Distinct experts and weights of each token."""
        if self.device.type == "meta":
            ids = torch.empty((tokens, self.sizes.top_k), dtype=torch.int64, device=self.device)
        else:
            order = torch.rand(tokens, self.num_experts, device=self.device, generator=self.generator).argsort(1)
            ids = order[:, : self.sizes.top_k].contiguous()
        return ids, self.floats(tokens, self.sizes.top_k).abs() / self.sizes.top_k

    def experts(self, kind: str) -> Any:
        """Random experts in the storage `kind`, drawn once, of magnitudes that keep activations moderate."""
        if kind not in self._experts:
            self._experts[kind] = self._draw_experts(kind)
        return self._experts[kind]

    def _draw_experts(self, kind: str) -> Any:
        held: dict[str, Tensor] = {}
        for name, rows, columns in (
            ("w1", self.sizes.inner, self.sizes.width),
            ("w3", self.sizes.inner, self.sizes.width),
            ("w2", self.sizes.width, self.sizes.inner),
        ):
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
                held[f"{name}_scale"] = self.floats(self.num_experts, -(-rows // 128), -(-columns // 128), scale=1e-4)
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


def _kda(s: Sizes, tokens: int, sequences: int = 0) -> Case:
    def make(draw: Draw) -> dict[str, Any]:
        lead = (tokens,) if sequences else (1, tokens)
        qkv = draw.normal(*lead, 3, s.heads, s.dim)
        q, k, v = qkv.unbind(-3)
        inputs = {
            "q": q,
            "k": k,
            "v": v,
            "f": draw.normal(*lead, s.heads, s.dim),
            "b": draw.normal(*lead, s.heads),
            "a_log": draw.floats(s.heads, scale=0.5),
            "dt_bias": draw.floats(s.heads, s.dim) - 4.0,
            "state": draw.floats(max(1, sequences), s.heads, s.dim, s.dim, scale=0.1),
            "lower_bound": -5.0,
        }
        if sequences:
            ends = torch.arange(sequences + 1, device=draw.device) * tokens // sequences
            inputs["offsets"] = ends
        return inputs

    head = tokens * s.heads
    outer = head * (5 * s.dim * 2 + 2) + 2 * max(1, sequences) * s.heads * s.dim * s.dim * 4
    # Read again: k, f and b; written and read between kernels: w, q_in, k_out, u, the two squares of a chunk.
    between = head * (2 * s.dim * 2 + 2) + 2 * head * (4 * s.dim * 2 + 64 * 2 + 64 * 4)
    chunk = 2 * 64 * s.dim * (6 * 64 + 2 * 64 + 3 * s.dim + 64) + 10 * 64**3
    name = f"kda prefill, {tokens} tokens" + (f" in {sequences} sequences" if sequences else "")
    return Case(
        name, "kda", "kda_packed" if sequences else "kda", make, outer, outer + between, head / 64 * chunk, ("state",)
    )


def _kda_decode(s: Sizes, batch: int) -> Case:
    def make(draw: Draw) -> dict[str, Any]:
        return {
            "x": draw.normal(batch, 3 * s.heads * s.dim),
            "conv_weight": draw.floats(4, 3 * s.heads * s.dim, scale=0.5),
            "history": draw.normal(batch, 3, 3 * s.heads * s.dim),
            "f": draw.normal(batch, s.heads, s.dim),
            "b": draw.normal(batch, s.heads),
            "a_log": draw.floats(s.heads, scale=0.5),
            "dt_bias": draw.floats(s.heads, s.dim) - 4.0,
            "state": draw.floats(batch, s.heads, s.dim, s.dim, scale=0.1),
            "gate": draw.normal(batch, s.heads, s.dim),
            "norm_weight": draw.floats(s.dim),
            "lower_bound": -5.0,
            "eps": 1e-5,
        }

    width = s.heads * s.dim
    moved = batch * (2 * width * s.dim * 4 + width * 2 * (3 + 18 + 3)) + 4 * width * (3 * 4 + 1)
    return Case(
        f"kda decode, batch {batch}", "kda", "kda_decode", make, moved, moved, 0.0, ("state", "history"), target=0.7
    )


def _kda_step(s: Sizes, batch: int) -> Case:
    """The recurrence alone, for layers whose convolution and norm run by themselves."""

    def make(draw: Draw) -> dict[str, Any]:
        inputs = _kda(s, batch).make(draw)
        state = draw.floats(batch, s.heads, s.dim, s.dim, scale=0.1)
        return {**{name: _as_batch(value) for name, value in inputs.items()}, "state": state}

    moved = batch * s.heads * (2 * s.dim * s.dim * 4 + 5 * s.dim * 2)
    return Case(f"kda step, batch {batch}", "kda", "kda", make, moved, moved, 0.0, ("state",))


def _as_batch(value: Any) -> Any:
    """[1, B, ...] as [B, 1, ...]."""
    return value.transpose(0, 1) if isinstance(value, Tensor) and value.dim() > 2 and value.shape[0] == 1 else value


def _mla_within(s: Sizes, keys: int) -> Case:
    """A decode step as it is captured: of the room for `keys` tokens, all but a few are taken."""

    def make(draw: Draw) -> dict[str, Any]:
        return {**_mla(s, 1, keys).make(draw), "visible": torch.full((1,), keys - 5, device=draw.device)}

    whole = _mla(s, 1, keys)
    return replace(whole, name=f"mla decode captured, {keys} cached", function="mla_within", make=make)


def _mla(s: Sizes, tokens: int, keys: int, batch: int = 1) -> Case:
    def make(draw: Draw) -> dict[str, Any]:
        return {
            "q": draw.normal(batch, tokens, s.heads, s.query),
            "cache": draw.normal(batch, keys, s.latent + s.shared),
            "kv_b": draw.normal(s.heads, 2 * s.dim, s.latent, scale=s.latent**-0.5),
            "key_dim": s.dim,
        }

    cache, weights = batch * keys * (s.latent + s.shared) * 2, s.heads * 2 * s.dim * s.latent * 2
    ends = batch * tokens * s.heads * (s.query + s.dim) * 2
    if tokens > 16:
        pairs = keys * s.heads * 2 * s.dim * 2
        scores = tokens * (keys - tokens / 2) * s.heads
        operations = 2 * scores * (s.query + s.dim) + 2 * keys * s.heads * 2 * s.dim * s.latent
        return Case(
            f"mla prefill, {tokens} tokens on {keys}", "mla", "mla", make, cache + weights + ends,
            cache + weights + ends + 2 * pairs, operations, bound="matrix",
        )  # fmt: skip
    operations = 2 * batch * tokens * keys * s.heads * (2 * s.latent + s.shared)
    between = 2 * batch * tokens * s.heads * s.latent * (2 + 4 * 44)
    name = f"mla decode, batch {batch}, {keys} cached"
    floor = cache + weights + ends
    return Case(name, "mla", "mla", make, floor, floor + between, operations, target=0.6)


def _experts(s: Sizes, tokens: int, kind: str) -> Case:
    def make(draw: Draw) -> dict[str, Any]:
        ids, weights = draw.routes(tokens)
        return {
            "x": draw.normal(tokens, s.width),
            "experts": draw.experts(kind),
            "ids": ids,
            "weights": weights,
            "activation": "situ",
            "beta": 4.0,
            "linear_beta": 25.0,
        }

    visits = tokens * s.top_k
    visited = s.experts * (1 - (1 - s.top_k / s.experts) ** tokens)
    floor = visited * 3 * s.width * s.inner * STORED_BITS[kind] / 8 + tokens * s.width * (2 + 4) + visits * 12
    between = 2 * visits * (s.inner + s.width) * 2
    is_decode = tokens <= 64
    return Case(
        f"experts {kind}, {tokens} tokens", "moe", "experts_forward", make, floor, floor + between,
        2 * visits * 3 * s.width * s.inner, bound="memory" if is_decode else "matrix",
        target=(0.7 if is_decode else 0.4) if kind == "mxfp4" else None,
    )  # fmt: skip


def _mix(s: Sizes, tokens: int) -> Case:
    def make(draw: Draw) -> dict[str, Any]:
        return {"values": draw.normal(9, tokens, s.hidden), "query": draw.floats(s.hidden, scale=0.02), "eps": 1e-5}

    moved = tokens * 10 * s.hidden * 2 + s.hidden * 4
    return Case(f"attn_res mix, {tokens} tokens", "attn_res", "mix_blocks", make, moved, moved)


def _norm(s: Sizes, tokens: int) -> Case:
    def make(draw: Draw) -> dict[str, Any]:
        return {"x": draw.normal(tokens, s.hidden), "weight": draw.floats(s.hidden), "eps": 1e-5}

    moved = 2 * tokens * s.hidden * 2 + s.hidden * 4
    return Case(f"rms_norm, {tokens} tokens", "norm", "rms_norm", make, moved, moved)


def _gated_norm(s: Sizes, tokens: int) -> Case:
    def make(draw: Draw) -> dict[str, Any]:
        gate = draw.normal(tokens, s.heads * s.dim + 224)[:, : s.heads * s.dim].unflatten(1, (s.heads, s.dim))
        return {"x": draw.normal(tokens, s.heads, s.dim), "gate": gate, "weight": draw.floats(s.dim), "eps": 1e-5}

    moved = 3 * tokens * s.heads * s.dim * 2
    return Case(f"gated_rms_norm, {tokens} tokens", "norm", "gated_rms_norm", make, moved, moved)


def _l2(s: Sizes, tokens: int) -> Case:
    def make(draw: Draw) -> dict[str, Any]:
        return {"x": draw.normal(tokens, s.heads, s.dim), "eps": 1e-6}

    moved = tokens * s.heads * s.dim * (2 + 4)
    return Case(f"l2_normalize, {tokens} tokens", "norm", "l2_normalize", make, moved, moved)


def _conv(s: Sizes, tokens: int, sequences: int = 0) -> Case:
    def make(draw: Draw) -> dict[str, Any]:
        width = 3 * s.heads * s.dim
        lead = (tokens,) if sequences else (1, tokens)
        inputs = {
            "x": draw.normal(*lead, width),
            "weight": draw.floats(4, width, scale=0.5),
            "history": draw.normal(max(1, sequences), 3, width),
        }
        if sequences:
            inputs["offsets"] = torch.arange(sequences + 1, device=draw.device) * tokens // sequences
        return inputs

    moved = 3 * s.heads * s.dim * (2 * 2 * tokens + 4 * 4 + 2 * 3 * 2 * max(1, sequences))
    name = f"short convolution, {tokens} tokens" + (f" in {sequences} sequences" if sequences else "")
    function = "causal_conv_packed" if sequences else "causal_conv"
    return Case(name, "conv", function, make, moved, moved, 0.0, ("history",))


def _router(s: Sizes, tokens: int) -> Case:
    def make(draw: Draw) -> dict[str, Any]:
        return {
            "logits": draw.floats(tokens, s.experts),
            "bias": draw.floats(s.experts, scale=0.1),
            "top_k": s.top_k,
            "activation": "sigmoid",
            "renormalize": True,
            "scaling_factor": 1.0,
            "num_groups": 1,
            "topk_groups": 1,
        }

    moved = tokens * (s.experts * 4 + s.top_k * 12) + s.experts * 4
    return Case(f"router, {tokens} tokens", "router", "select_experts", make, moved, moved)


def _router_product(s: Sizes, tokens: int) -> Case:
    def make(draw: Draw) -> dict[str, Any]:
        x = draw.normal(tokens, s.hidden).float()
        return {"x": x, "weight": draw.normal(s.experts, s.hidden, dtype=torch.bfloat16, scale=s.hidden**-0.5)}

    moved = tokens * (s.hidden + s.experts) * 4 + s.experts * s.hidden * 2
    operations = 2 * tokens * s.hidden * s.experts
    bound = "memory" if tokens <= 16 else "matrix"
    return Case(
        f"float32 x bfloat16 product, {tokens} tokens", "linear", "linear", make, moved, moved, operations, bound=bound
    )


def _gated(s: Sizes, tokens: int) -> Case:
    def make(draw: Draw) -> dict[str, Any]:
        gate, up = draw.normal(tokens, 2 * 2 * s.inner).chunk(2, dim=-1)
        return {"gate": gate, "up": up, "activation": "situ", "beta": 4.0, "linear_beta": 25.0}

    moved = 3 * tokens * 2 * s.inner * 2
    return Case(f"SiTU gating, {tokens} tokens", "moe", "gated_activation", make, moved, moved)


def _decode_values(s: Sizes) -> Case:
    def make(draw: Draw) -> dict[str, Any]:
        scale = draw.bytes(s.inner, s.width // 32, low=118, high=122)
        return {"packed": draw.bytes(s.inner, s.width // 2), "scale": scale, "dtype": draw.dtype}

    moved = s.inner * s.width * (4.25 / 8 + 2)
    return Case("FP4 decoding of one matrix", "mxfp4", "decode_values", make, moved, moved)


def all_cases(s: Sizes = RELEASED) -> list[Case]:
    """In the order of the documentation's table."""
    return [
        _kda(s, s.prompt),
        _kda(s, s.prompt, s.sequences),
        _kda_decode(s, 1),
        _kda_decode(s, s.batch),
        _kda_step(s, 4),
        _conv(s, s.prompt),
        _conv(s, s.prompt, s.sequences),
        _mla(s, s.prompt, s.prompt),
        _mla(s, s.prompt, s.context),
        _mla(s, 1, s.context),
        _mla(s, 1, s.context, s.batch // 4),
        _mla_within(s, s.context),
        _mix(s, 1),
        _mix(s, s.prompt),
        *(_experts(s, 1, kind) for kind in STORED_BITS),
        _experts(s, 64, "mxfp4"),
        *(_experts(s, s.prompt, kind) for kind in STORED_BITS),
        _norm(s, 1),
        _norm(s, s.prompt),
        _gated_norm(s, s.prompt),
        _l2(s, s.prompt),
        _router(s, 1),
        _router(s, s.prompt),
        _router_product(s, 1),
        _router_product(s, s.prompt),
        _gated(s, s.prompt),
        _decode_values(s),
    ]
