"""Layers and what lies between them: embeddings, residual stream or Attention Residuals, final norm and head."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from k3tool.config import K3Config
from k3tool.kernels.attn_res import mix_blocks
from k3tool.kernels.dispatch import sole_threads
from k3tool.kernels.linear import linear
from k3tool.kernels.norm import rms_norm
from k3tool.model.attention import KdaAttention, MlaAttention
from k3tool.model.cache import Cache, KdaState, LatentCache
from k3tool.model.moe import GatedMlp, Observer, SparseMoe
from k3tool.model.streaming import StreamedExperts


@dataclass(frozen=True)
class DecoderLayer:
    """Norm weights are float32. `self_attention_res` and `mlp_res` are the products norm.weight * proj.weight, float32
    [hidden]; None in a model with a plain residual stream."""

    input_layernorm: Tensor
    post_attention_layernorm: Tensor
    self_attention_res: Tensor | None
    mlp_res: Tensor | None
    self_attn: KdaAttention | MlaAttention
    mlp: GatedMlp | SparseMoe

    def attend(self, x: Tensor, cache: KdaState | LatentCache, position: int) -> Tensor:
        if isinstance(self.self_attn, KdaAttention):
            assert isinstance(cache, KdaState)
            return self.self_attn.forward(x, cache)
        assert isinstance(cache, LatentCache)
        return self.self_attn.forward(x, cache, position)


class ResidualSums:
    """The running sum and, with Attention Residuals, the snapshots of finished blocks: [N, T, hidden].

    Slot `live` is the running sum of the current block, the slots before it are snapshots and never change again.
    A plain residual stream is the case of one slot that nothing mixes.
    """

    def __init__(self, x: Tensor, slots: int, eps: float) -> None:
        self.values = x.new_empty(slots, *x.shape)
        self.values[0] = x
        self.live = 0
        self.eps = eps
        self.fresh = False

    def read(self, query: Tensor | None) -> Tensor:
        """What the next half layer reads: a mix over all slots, or the running sum while it is the only one."""
        if query is None or self.live == 0:
            return self.values[self.live]
        return mix_blocks(self.values[: self.live + 1], query, self.eps)

    def start_block(self) -> None:
        """The running sum becomes a snapshot; the next `add` starts a new sum."""
        self.live += 1
        self.fresh = True

    def add(self, update: Tensor) -> None:
        if self.fresh:
            self.values[self.live] = update
            self.fresh = False
        else:
            self.values[self.live] += update


@dataclass(frozen=True)
class Model:
    """The text model. `dtype` is that of activations; matrices stay as stored."""

    config: K3Config
    dtype: torch.dtype
    device: torch.device
    embed_tokens: Tensor
    layers: tuple[DecoderLayer, ...]
    output_attn_res: Tensor | None
    norm: Tensor
    lm_head: Tensor

    @property
    def streamed_experts(self) -> list[StreamedExperts]:
        """Those of every layer, where experts are read while the model runs."""
        found = (layer.mlp.experts for layer in self.layers if isinstance(layer.mlp, SparseMoe))
        return [experts for experts in found if isinstance(experts, StreamedExperts)]

    def new_cache(self) -> Cache:
        return Cache(self.config, len(self.layers), self.device, self.dtype)

    @torch.inference_mode()
    def forward(self, ids: Tensor, cache: Cache, observe: Observer | None = None) -> Tensor:
        """ids [T] int64 that follow `cache` -> final hidden states [T, hidden], normalized. Advances the cache."""
        with sole_threads(self.device):
            return self._forward(ids, cache, observe)

    def _forward(self, ids: Tensor, cache: Cache, observe: Observer | None) -> Tensor:
        config, position = self.config, cache.position
        block = config.attn_res_block_size
        slots = 1 if block is None else 1 + -(-len(self.layers) // block)
        sums = ResidualSums(functional.embedding(ids, self.embed_tokens).to(self.dtype), slots, config.rms_norm_eps)
        for index, layer in enumerate(self.layers):
            x = sums.read(layer.self_attention_res)
            if block is not None and index % block == 0:
                sums.start_block()
            x = rms_norm(x, layer.input_layernorm, config.rms_norm_eps)
            sums.add(layer.attend(x, cache.layers[index], position))
            x = rms_norm(sums.read(layer.mlp_res), layer.post_attention_layernorm, config.rms_norm_eps)
            sums.add(layer.mlp.forward(x, index, observe))
            if observe is not None:
                observe("hidden", index, sums.values[sums.live])
        cache.advance(ids.shape[0])
        return rms_norm(sums.read(self.output_attn_res), self.norm, config.rms_norm_eps)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [T, hidden] -> [T, vocab] float32; the product itself is rounded to the model dtype."""
        with sole_threads(self.device):
            return linear(hidden, self.lm_head).float()
