"""What else can compute KDA and attention on the GPU at hand, where it is installed: fla-core, and torch's own attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from k3tool.kernels.cases import Draw, Sizes, all_cases
from k3tool.kernels.kda import kernel as kda_kernel
from k3tool.kernels.mla import kernel as mla_kernel

Milliseconds = Callable[[list[Callable[[], Any]]], float]


def compare(name: str, device: torch.device, sizes: Sizes, milliseconds: Milliseconds) -> dict[str, Any]:
    """Time it beside ours on the same inputs. What is not installed, or fails, is said in `text`."""
    kernel, function = {"KDA prefill, fla-core": ("kda", _fla), "MLA prefill, torch attention": ("mla", _attention)}[
        name
    ]
    case = next(case for case in all_cases(sizes) if case.kernel == kernel)
    try:
        ours, theirs, error = function(case.make(Draw(device, torch.bfloat16, sizes=sizes)), sizes, milliseconds)
    except ImportError as problem:
        return {"text": f"not installed ({problem})"}
    text = f"ours {ours:.3f} ms, theirs {theirs:.3f} ms ({theirs / ours:.2f} times ours), apart by {error:.1e}"
    return {"ours_ms": ours, "theirs_ms": theirs, "error": error, "text": text}


def _apart(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


def _fla(inputs: dict[str, Any], sizes: Sizes, milliseconds: Milliseconds) -> tuple[float, float, float]:
    from fla.ops.kda import chunk_kda

    theirs = {
        "q": inputs["q"].contiguous(),
        "k": inputs["k"].contiguous(),
        "v": inputs["v"].contiguous(),
        "g": inputs["f"],
        "beta": inputs["b"],
        "A_log": inputs["a_log"],
        "dt_bias": inputs["dt_bias"].flatten(),
        "initial_state": inputs["state"].clone(),
        "output_final_state": True,
        "use_qk_l2norm_in_kernel": True,
        "use_gate_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
        "safe_gate": True,
        "lower_bound": -5.0,
    }
    expected, _ = chunk_kda(**theirs)
    found = kda_kernel.kda(**{**inputs, "state": inputs["state"].clone()})
    return (
        milliseconds([lambda: kda_kernel.kda(**inputs)]),
        milliseconds([lambda: chunk_kda(**theirs)]),
        _apart(found, expected),
    )


def _attention(inputs: dict[str, Any], sizes: Sizes, milliseconds: Milliseconds) -> tuple[float, float, float]:
    """Keys and values expanded as in ours, then torch's causal attention with keys of 192 and values of 128."""
    q, cache, kv_b = inputs["q"], inputs["cache"], inputs["kv_b"]
    queries = q.transpose(1, 2)

    def attend() -> torch.Tensor:
        pairs = torch.nn.functional.linear(cache[..., : sizes.latent], kv_b.flatten(0, 1))
        pairs = pairs.unflatten(-1, (sizes.heads, 2 * sizes.dim))
        shared = cache[..., sizes.latent :].unsqueeze(2).expand(-1, -1, sizes.heads, -1)
        keys = torch.cat([pairs[..., : sizes.dim], shared], dim=-1).transpose(1, 2)
        values = pairs[..., sizes.dim :].transpose(1, 2)
        out = torch.nn.functional.scaled_dot_product_attention(
            queries, keys, values, is_causal=True, scale=sizes.query**-0.5
        )
        return out.transpose(1, 2)

    assert q.shape[1] == cache.shape[1]
    found = mla_kernel.mla(**inputs)
    return (
        milliseconds([lambda: mla_kernel.mla(**inputs)]),
        milliseconds([attend]),
        _apart(found, attend()),
    )
