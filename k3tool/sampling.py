"""From logits to the next token, and what a prompt and sampling options must be."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from k3tool.config import K3Config
from k3tool.errors import CheckFailed, UsageError


def sample(
    logits: Tensor, temperature: float = 0.0, top_p: float = 1.0, generator: torch.Generator | None = None
) -> int:
    """A token id from float32 logits [vocab]: the largest at temperature 0, else drawn from the nucleus of `top_p`.

    The nucleus is the smallest set of likeliest tokens whose probabilities reach `top_p`. Raises CheckFailed where
    the logits are not numbers.
    """
    best = logits.max(-1)
    if not math.isfinite(best.values.item()):
        raise CheckFailed(
            f"the largest logit is {best.values.item()}: the model's numbers overflowed",
            hint="try --dtype float32 or --backend reference, and verify the weights at depth bytes",
        )
    if temperature <= 0.0:
        return int(best.indices)
    probabilities = torch.softmax(logits.to("cpu", torch.float32) / temperature, -1)
    if top_p < 1.0:
        ordered, ids = probabilities.sort(descending=True)
        before = ordered.cumsum(-1) - ordered
        kept = ordered.masked_fill(before >= top_p, 0.0)
        return int(ids[torch.multinomial(kept, 1, generator=generator)])
    return int(torch.multinomial(probabilities, 1, generator=generator))


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


def check_sampling(max_new_tokens: int, temperature: float, top_p: float) -> None:
    """Raises UsageError for sampling options out of their ranges."""
    if max_new_tokens < 0 or not temperature >= 0 or not 0 < top_p <= 1:
        raise UsageError(
            f"bad sampling options: max_new_tokens {max_new_tokens}, temperature {temperature}, top_p {top_p}",
            hint="max_new_tokens and temperature are at least 0, top_p lies in (0, 1]",
        )
