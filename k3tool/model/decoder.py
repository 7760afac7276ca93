"""Layers and what lies between them: embeddings, residual stream or Attention Residuals, final norm and head."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from k3tool.config import K3Config
from k3tool.kernels.attn_res import mix_blocks
from k3tool.kernels.dispatch import sole_threads
from k3tool.kernels.elementwise import add, convert, put
from k3tool.kernels.linear import Weight, linear
from k3tool.kernels.norm import rms_norm
from k3tool.model.attention import KdaAttention, MlaAttention
from k3tool.model.cache import Cache, KdaState, LatentCache
from k3tool.model.divided import embedding
from k3tool.model.moe import GatedMlp, Observer, SparseMoe
from k3tool.model.streaming import StreamedExperts
from k3tool.parallel.groups import SINGLE, Parallel
from k3tool.parallel.share import Share


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

    def __init__(self, held: Tensor, slots: int, eps: float) -> None:
        """held [n, T, hidden]: n - 1 snapshots and the running sum. slots: how many there will be, n included."""
        self.values = held.new_empty(slots, *held.shape[1:])
        put(held, self.values[: held.shape[0]])
        self.live = held.shape[0] - 1
        self.eps = eps
        self.fresh = False

    @property
    def held(self) -> Tensor:
        """What the next stage needs, to go on from here."""
        return self.values[: self.live + 1]

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
            put(update, self.values[self.live])
            self.fresh = False
        else:
            add(self.values[self.live], update, self.values[self.live])


@dataclass(frozen=True)
class Model:
    """The text model, or what one rank has of it. `dtype` is that of activations; matrices stay as stored.

    embed_tokens: None after the first stage; output_attn_res, norm and lm_head: None before the last. `layers` are those
    of `share.layers`.
    """

    share: Share
    dtype: torch.dtype
    device: torch.device
    embed_tokens: Weight | None
    layers: tuple[DecoderLayer, ...]
    output_attn_res: Tensor | None
    norm: Tensor | None
    lm_head: Weight | None
    parallel: Parallel = SINGLE

    @property
    def config(self) -> K3Config:
        """With the widths of this rank."""
        return self.share.config

    @property
    def streamed_experts(self) -> list[StreamedExperts]:
        """Those of every layer, where experts are read while the model runs."""
        found = (layer.mlp.experts for layer in self.layers if isinstance(layer.mlp, SparseMoe))
        return [experts for experts in found if isinstance(experts, StreamedExperts)]

    def new_cache(self) -> Cache:
        return Cache(self.config, self.share.layers, self.device, self.dtype)

    @torch.inference_mode()
    def forward(self, ids: Tensor, cache: Cache, observe: Observer | None = None) -> Tensor:
        """ids [T] int64 that follow `cache` -> final hidden states [T, hidden], normalized. Advances the cache.

        Ranks call it together. Before the last stage, what is returned is the running sum as it goes on from here.
        """
        with sole_threads(self.device):
            return self._forward(ids, cache, observe)

    def _forward(self, ids: Tensor, cache: Cache, observe: Observer | None) -> Tensor:
        sums = ResidualSums(self.enter(ids), self.slots, self.config.rms_norm_eps)
        return self.layers_and_norm(sums, cache, observe)

    def layers_and_norm(self, sums: ResidualSums, cache: Cache, observe: Observer | None = None) -> Tensor:
        """What `forward` does behind the embedding."""
        config, position = self.config, cache.position
        block = config.attn_res_block_size
        for index, layer, state in zip(self.share.layers, self.layers, cache.layers, strict=True):
            x = sums.read(layer.self_attention_res)
            if block is not None and index % block == 0:
                sums.start_block()
            x = rms_norm(x, layer.input_layernorm, config.rms_norm_eps)
            sums.add(layer.attend(x, state, position))
            x = rms_norm(sums.read(layer.mlp_res), layer.post_attention_layernorm, config.rms_norm_eps)
            sums.add(layer.mlp.forward(x, index, observe))
            if observe is not None:
                observe("hidden", index, sums.values[sums.live])
        cache.advance(sums.values.shape[1])
        if self.norm is None:
            self.parallel.send_on(sums.held)
            return sums.values[sums.live]
        return rms_norm(sums.read(self.output_attn_res), self.norm, config.rms_norm_eps)

    @property
    def slots(self) -> int:
        """Residual sums that there are behind the last layer: snapshots and the running sum."""
        return self._sums_at(self.share.layers.stop)

    def _sums_at(self, layer: int) -> int:
        block = self.config.attn_res_block_size
        return 1 if block is None else 1 + -(-layer // block)

    def enter(self, ids: Tensor) -> Tensor:
        """The token embeddings [1, T, hidden], or what the stage before has sent: its running sum and all snapshots."""
        share = self.share
        if self.embed_tokens is not None and share.is_first:
            return embedding(ids, self.embed_tokens, share.first_vocab, self.parallel.tp, self.dtype).unsqueeze(0)
        shape = (self._sums_at(share.layers.start), ids.shape[0], self.config.hidden_size)
        return self.parallel.receive_from_before(torch.empty(shape, dtype=self.dtype, device=self.device))

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """What `forward` gave, or rows of it, [T, hidden] -> [T, vocab] float32, on every rank.

        The product itself is rounded to the model dtype."""
        vocab = self.config.vocab_size
        if self.norm is None or self.lm_head is None:
            return self.parallel.from_last(hidden.new_empty(hidden.shape[0], vocab, dtype=torch.float32))
        with sole_threads(self.device):
            rows = convert(linear(hidden, self.lm_head), torch.float32)
        return self.parallel.from_last(self.parallel.tp.gather(rows)[:, :vocab])
