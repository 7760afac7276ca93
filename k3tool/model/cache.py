"""What a sequence leaves behind: a constant-size state per KDA layer, a growing latent per MLA layer.

The position (tokens seen so far) is owned here and nowhere else: layers write behind it, `advance` moves it once per
forward pass. KDA states cannot be rewound; a snapshot (`clone`) is the only way back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from k3tool.config import K3Config
from k3tool.kernels.elementwise import put

if TYPE_CHECKING:
    from k3tool.model.graph import Captured
    from k3tool.model.replay import RecordedStep

FIRST_CAPACITY = 256  # tokens


@dataclass
class KdaState:
    """state: [1, H, K, V] float32. history: [1, W - 1, 3 H K], the last inputs of the q, k and v convolutions."""

    state: Tensor
    history: Tensor

    @property
    def nbytes(self) -> int:
        return self.state.nbytes + self.history.nbytes

    def clone(self) -> KdaState:
        return KdaState(self.state.clone(), self.history.clone())


class LatentCache:
    """Normalized latent and shared key dimensions of every token: [1, capacity, C + R], grown by half when full.

    visible: how many tokens count of what `append` returns, on the device; None: all of them.
    """

    visible: Tensor | None = None

    def __init__(self, width: int, device: torch.device, dtype: torch.dtype) -> None:
        self.buffer = torch.empty(1, 0, width, device=device, dtype=dtype)

    def reserve(self, tokens: int) -> None:
        """Room for `tokens` in all. Keeps what is there."""
        held = self.buffer.shape[1]
        if tokens > held:
            grown = self.buffer.new_empty(1, max(tokens, FIRST_CAPACITY, held + held // 2), self.buffer.shape[2])
            grown[:, :held] = self.buffer
            self.buffer = grown

    def append(self, latent: Tensor, shared: Tensor, position: int) -> Tensor:
        """Store latents [1, T, C] and shared key dimensions [1, T, R] side by side behind `position`.

        Returns all tokens so far, [1, position + T, C + R], a view."""
        end, width = position + latent.shape[1], latent.shape[2]
        self.reserve(end)
        growth = self.buffer.shape[2] * self.buffer.element_size()
        put(latent, self.buffer[:, position:end, :width], growth=growth)
        put(shared, self.buffer[:, position:end, width:], growth=growth)
        return self.buffer[:, :end]

    def clone(self) -> LatentCache:
        twin = LatentCache(self.buffer.shape[2], self.buffer.device, self.buffer.dtype)
        twin.buffer = self.buffer.clone()
        return twin


class Cache:
    """Everything one sequence needs to go on. `dtype` is the model's; KDA states are float32 in any case.

    recorded: the decode step as it was last written down for these tensors, see `k3tool.model.replay`.
    captured: the same as a CUDA graph, see `k3tool.model.graph`.
    """

    recorded: RecordedStep | None = None
    captured: Captured | None = None

    def __init__(self, config: K3Config, layers: Sequence[int], device: torch.device, dtype: torch.dtype) -> None:
        """layers: numbers of those that the cache is for."""
        self.position = 0
        self.layers: list[KdaState | LatentCache] = []
        heads, dim = config.kda_num_heads, config.kda_head_dim
        for layer in layers:
            if config.layer_kinds[layer] == "mla":
                self.layers.append(LatentCache(config.mla_cache_width, device, dtype))
                continue
            history = (1, config.conv_kernel_size - 1, 3 * config.kda_size)
            self.layers.append(
                KdaState(
                    torch.zeros(1, heads, dim, dim, device=device, dtype=torch.float32),
                    torch.zeros(history, device=device, dtype=dtype),
                )
            )

    def reserve(self, tokens: int) -> None:
        """Room for `tokens` in all, so that decoding does not have to grow."""
        for layer in self.layers:
            if isinstance(layer, LatentCache):
                layer.reserve(tokens)

    def places(self) -> tuple[int, ...]:
        """Addresses of all that is held: they change when a latent cache grows."""
        return tuple(
            tensor.data_ptr()
            for layer in self.layers
            for tensor in ((layer.state, layer.history) if isinstance(layer, KdaState) else (layer.buffer,))
        )

    def tensors(self) -> list[Tensor]:
        """All that is held of the tokens so far, layer by layer: views."""
        return [
            tensor
            for layer in self.layers
            for tensor in (
                (layer.state, layer.history) if isinstance(layer, KdaState) else (layer.buffer[:, : self.position],)
            )
        ]

    def has_room(self) -> bool:
        """Is there room for one more token?"""
        return all(layer.buffer.shape[1] > self.position for layer in self.layers if isinstance(layer, LatentCache))

    def advance(self, tokens: int) -> None:
        self.position += tokens

    def clone(self) -> Cache:
        """An independent copy: both may go on separately."""
        twin = object.__new__(Cache)
        twin.position = self.position
        twin.layers = [layer.clone() for layer in self.layers]
        return twin

    def sharing(self, latents: Callable[[LatentCache], LatentCache]) -> Cache:
        """A cache on the same memory, with `latents` in the place of latent caches."""
        twin = object.__new__(Cache)
        twin.position = self.position
        twin.layers = [latents(layer) if isinstance(layer, LatentCache) else layer for layer in self.layers]
        return twin

    @property
    def kda_state_bytes(self) -> int:
        """States and convolution histories: constant in the length of the sequence."""
        return sum(layer.nbytes for layer in self.layers if isinstance(layer, KdaState))

    @property
    def mla_cache_bytes(self) -> int:
        """Latents of the tokens seen so far (room reserved ahead is not counted)."""
        return sum(
            self.position * layer.buffer.shape[2] * layer.buffer.element_size()
            for layer in self.layers
            if isinstance(layer, LatentCache)
        )
