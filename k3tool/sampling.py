"""From logits to the next token, and what a prompt and sampling options must be. Torch is imported when a token is drawn."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from k3tool.config import K3Config
from k3tool.errors import CheckFailed, UsageError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

HIGHEST_SEED = (1 << 63) - 1
_SMALLEST = 1e-300  # temperatures below it are the same, and no number that processors take for 0


def sample(
    logits: Tensor,
    temperature: float = 0.0,
    top_p: float = 1.0,
    generator: torch.Generator | None = None,
    *,
    top_k: int | None = None,
) -> int:
    """A token id from float32 logits [vocab]: the largest at temperature 0, else drawn from the likeliest tokens.

    These are the `top_k` likeliest ones (None or 0: all), and of them the smallest set whose probabilities reach `top_p`
    of theirs: never fewer than one. Probabilities are float64, made of differences to the largest logit, so that
    temperatures near 0 are greedy and very high ones uniform. Raises CheckFailed where the logits are not numbers.
    """
    import torch

    best = logits.max(-1)
    if not math.isfinite(best.values.item()):
        raise CheckFailed(
            f"the largest logit is {best.values.item()}: the model's numbers overflowed",
            hint="try --dtype float32 or --backend reference, and verify the weights at depth bytes",
        )
    if temperature <= 0.0:
        return int(best.indices)
    scaled = logits.to("cpu", torch.float64)
    scaled = (scaled - scaled.max()) / max(temperature, _SMALLEST)
    if not top_k and top_p >= 1.0:
        return int(torch.multinomial(torch.softmax(scaled, -1), 1, generator=generator))
    ordered, ids = scaled.sort(descending=True, stable=True)
    ordered = torch.softmax(ordered[: min(top_k or len(ordered), len(ordered))], -1)
    before = ordered.cumsum(-1) - ordered
    count = max(1, int((before < top_p).sum()))
    return int(ids[torch.multinomial(ordered[:count], 1, generator=generator)])


def check_ids(config: K3Config, ids: Sequence[int]) -> None:
    """Raises UsageError for an empty prompt or an id outside the vocabulary."""
    if len(ids) == 0:
        raise UsageError("the prompt holds no token", hint="give at least one token id or some text")
    for id_ in ids:
        if not 0 <= id_ < config.vocab_size:
            raise UsageError(
                f"token id {id_} is outside the vocabulary of {config.vocab_size}",
                hint=f"ids run from 0 to {config.vocab_size - 1}",
            )


def check_sampling(
    max_new_tokens: int, temperature: float, top_p: float, *, top_k: int | None = None, seed: int | None = None
) -> None:
    """Raises UsageError for the first sampling option that is out of its range."""
    ranges = (
        ("max_new_tokens", max_new_tokens, max_new_tokens >= 0, "at least 0"),
        ("temperature", temperature, 0 <= temperature < math.inf, "0 (greedy) or a finite number above it"),
        ("top_p", top_p, 0 < top_p <= 1, "above 0 and at most 1 (all tokens)"),
        ("top_k", top_k, top_k is None or top_k >= 0, "a number of tokens, or 0 for all"),
        ("seed", seed, seed is None or 0 <= seed <= HIGHEST_SEED, f"from 0 to {HIGHEST_SEED}"),
    )
    for name, value, fits, expected in ranges:
        if not fits:
            raise UsageError(
                f"bad sampling option: {name} is {value}", hint=f"give {_option(name)} {expected}, or leave it out"
            )


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")
