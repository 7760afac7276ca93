"""What else can compute KDA and attention on the GPU at hand, where it is installed: fla-core, and torch's own attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from k3tool.kernels import kda, mla
from k3tool.kernels.cases import DIM, HEADS, PROMPT, QUERY, SHARED, Case, Draw, all_cases


def other_implementations(milliseconds: Callable[[list[Any]], float], only: str) -> list[dict[str, Any]]:
    """Time each beside ours on the same inputs."""
    found = []
    for name, compare in (("KDA prefill, fla-core", _fla), ("MLA prefill, torch attention", _torch_attention)):
        if only not in name:
            continue
        try:
            ours, theirs, error = compare(milliseconds)
            text = f"ours {ours:.3f} ms, theirs {theirs:.3f} ms ({theirs / ours:.2f} times ours), apart by {error:.1e}"
            found.append({"name": name, "ours_ms": ours, "theirs_ms": theirs, "error": error, "text": text})
        except ImportError as error:
            found.append({"name": name, "text": f"not installed ({error})"})
        except Exception as error:  # another project's kernel that fails is no failure of ours
            found.append({"name": name, "text": f"failed: {type(error).__name__}: {str(error)[:200]}"})
    return found


def _case(kernel: str) -> tuple[Case, dict[str, Any]]:
    case = next(case for case in all_cases() if case.kernel == kernel)
    return case, case.make(Draw(torch.device("cuda"), torch.bfloat16))


def _apart(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


def _fla(milliseconds: Callable[[list[Any]], float]) -> tuple[float, float, float]:
    from fla.ops.kda import chunk_kda

    _, inputs = _case("kda")
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
    found = kda.kda(**{**inputs, "state": inputs["state"].clone()})
    return (
        milliseconds([lambda: kda.kda(**inputs)]),
        milliseconds([lambda: chunk_kda(**theirs)]),
        _apart(found, expected),
    )


def _torch_attention(milliseconds: Callable[[list[Any]], float]) -> tuple[float, float, float]:
    """Keys and values expanded as in ours, then torch's causal attention with keys of 192 and values of 128."""
    _, inputs = _case("mla")
    q, cache, kv_b = inputs["q"], inputs["cache"], inputs["kv_b"]
    latent = cache.shape[2] - SHARED
    queries = q.transpose(1, 2)

    def attend() -> torch.Tensor:
        pairs = torch.nn.functional.linear(cache[..., :latent], kv_b.flatten(0, 1)).unflatten(-1, (HEADS, 2 * DIM))
        shared = cache[..., latent:].unsqueeze(2).expand(-1, -1, HEADS, -1)
        keys = torch.cat([pairs[..., :DIM], shared], dim=-1).transpose(1, 2)
        values = pairs[..., DIM:].transpose(1, 2)
        out = torch.nn.functional.scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=QUERY**-0.5)
        return out.transpose(1, 2)

    assert q.shape[1] == cache.shape[1] == PROMPT
    found = mla.mla(**inputs)
    return milliseconds([lambda: mla.mla(**inputs)]), milliseconds([attend]), _apart(found, attend())
