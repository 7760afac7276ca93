"""What a run on a CPU takes beside its weights and states, so that a bound holds for the whole process.

Python and the libraries are measured when they are loaded; what is still to come (compiled kernels, activations, the latent
cache, logits that are kept) is counted from the configuration and the tokens, on the safe side.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from k3tool.config import K3Config
from k3tool.errors import CapacityError
from k3tool.memory import resident_memory
from k3tool.units import format_bytes

COMPILED_BYTES = 96_000_000  # kernels and their compiler, where nothing is kept from an earlier run
OTHER_BYTES = 32_000_000
SPARE_BYTES = 16_000_000  # what is held differs from run to run
PREFILL_NUMBERS = 1 << 25  # largest activation of a prefill block; longer prompts go block by block
PREFILL_TOKENS = 4096
ACTIVATIONS = (
    25  # times the widest row of a layer for each token of a block, float32: measured from 400 to 2,000 tokens
)


@dataclass(frozen=True)
class Bound:
    """process_bytes: of the whole process on a CPU; on a GPU, of weights and states there. tokens: prompt and what follows.

    keeps_logits: of all tokens, until the end. checks: whether kernels run beside their references.
    """

    process_bytes: int
    tokens: int
    keeps_logits: bool = False
    checks: bool = False

    def beside(self, config: K3Config, num_layers: int, dtype: torch.dtype) -> int:
        """Bytes that weights and states leave to everything else."""
        from k3tool.kernels import cpu

        later = COMPILED_BYTES if cpu.available() else OTHER_BYTES
        return resident_memory() + later + SPARE_BYTES + self.working_bytes(config, num_layers, dtype)

    def working_bytes(self, config: K3Config, num_layers: int, dtype: torch.dtype) -> int:
        rows = min(self.tokens, prefill_block(config))
        activations = 4 * ACTIVATIONS * rows * widest_row(config) * (2 if self.checks else 1)
        latents = config.layer_kinds[:num_layers].count("mla") * config.mla_cache_width * dtype.itemsize
        cache = 5 * latents * (self.tokens + 256) // 2  # it grows by half, and is copied then
        kept = 3 * self.tokens if self.keeps_logits else rows
        return activations + cache + 4 * kept * config.vocab_size


def widest_row(config: K3Config) -> int:
    """Numbers of the largest activation of a token."""
    return max(
        4 * config.kda_size,
        2 * config.intermediate_size,
        config.num_heads * (config.qk_nope_head_dim + config.v_head_dim),
        config.hidden_size * (2 + config.num_layers // (config.attn_res_block_size or config.num_layers)),
    )


def prefill_block(config: K3Config) -> int:
    """Tokens per prefill block: bounds the memory of activations, a multiple of the KDA chunk."""
    return max(256, min(PREFILL_TOKENS, PREFILL_NUMBERS // widest_row(config)) // 64 * 64)


def too_little(bound: Bound, least: int, beside: int, streams: bool) -> CapacityError:
    """least: bytes of weights and states that cannot be done without."""
    needed = -(-(least + beside + SPARE_BYTES) // 1_000_000)
    what = "with one expert of every layer resident" if streams else "all of which stay resident"
    return CapacityError(
        f"--memory {format_bytes(bound.process_bytes)} is too little: Python, libraries, kernels and activations take "
        f"{format_bytes(beside)}, weights and states {format_bytes(least)} ({what})",
        hint=f"give --memory {needed}MB or more, or run fewer layers (--layers N)",
        needed_bytes=needed * 1_000_000,
        least_bytes=least,
        beside_bytes=beside,
    )
