"""Which experts a token visits, and how much each counts."""

from __future__ import annotations

from torch import Tensor

from k3tool.kernels.dispatch import twin

__all__ = ["select_experts"]


def select_experts(
    logits: Tensor,
    bias: Tensor | None,
    top_k: int,
    *,
    activation: str = "sigmoid",
    renormalize: bool = True,
    scaling_factor: float = 1.0,
    num_groups: int = 1,
    topk_groups: int = 1,
) -> tuple[Tensor, Tensor]:
    """Expert ids [T, top_k] int64 and weights [T, top_k] float32 from router logits [T, E] float32.

    Scores are sigmoid or softmax of the logits. `bias` [E] float32 moves the selection only; weights are the unbiased
    scores of the selected experts, divided by their sum + 1e-20 where `renormalize`, times `scaling_factor`. With
    groups, the `topk_groups` groups with the largest sum of their two best biased scores are searched; experts
    outside them are never taken. The order of the ids is not specified. Raises ValueError.
    """
    experts = logits.shape[-1]
    if logits.dim() != 2 or not 1 <= top_k <= experts or experts % num_groups:
        raise ValueError(f"logits {tuple(logits.shape)} do not fit top {top_k} in {num_groups} groups")
    if top_k > topk_groups * (experts // num_groups):
        raise ValueError(f"{topk_groups} groups of {experts // num_groups} experts hold fewer than {top_k}")
    if activation not in ("sigmoid", "softmax"):
        raise ValueError(f"activation must be sigmoid or softmax, found {activation!r}")
    return twin("router", "select_experts", logits)(
        logits, bias, top_k, activation, renormalize, scaling_factor, num_groups, topk_groups
    )
