"""One token at a time on a GPU: a decode step captured as a CUDA graph and launched as one.

A decode step at batch one is more than a thousand short kernels, and starting them one by one takes longer than they
run. Their shapes do not change from token to token; what does change lies on the device: the token, its position, and
how many cached tokens count. The first step on a cache runs as usual, the next one on the fixed memory without being
captured: nothing may be compiled, loaded or measured during a capture. A cache that grows is captured anew, the same way.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass

import torch
from torch import Tensor

from k3tool.model.cache import Cache, LatentCache
from k3tool.model.decoder import Model, ResidualSums
from k3tool.model.moe import Observer

log = logging.getLogger(__name__)

ORDINARY_STEPS = 1  # before the memory of a step is fixed: the shortest answers are not worth it


class Latents(LatentCache):
    """A latent cache with room left, as a captured step sees it: where to store and what to read lie on the device."""

    def __init__(self, buffer: Tensor, position: Tensor, visible: Tensor) -> None:
        """buffer: [1, capacity, C + R], shared with the cache that it stands for. position, visible: [1] integers."""
        self.buffer = buffer
        self.position = position
        self.visible = visible

    def append(self, latent: Tensor, shared: Tensor, position: int) -> Tensor:
        """Store one token behind the position on the device; returns the whole room, [1, capacity, C + R]."""
        self.buffer.index_copy_(1, self.position, torch.cat([latent, shared], dim=-1))
        return self.buffer


class Step:
    """A decode step on fixed memory. `run` does it; on a GPU `capture` makes a graph of that, which `play` repeats.

    has_run: all kernels of it are compiled, loaded and chosen, so that it may be captured.
    """

    def __init__(self, model: Model, cache: Cache) -> None:
        self.model = model
        self.places = cache.places()
        self.ids, self.position, self.visible = (
            torch.zeros(1, dtype=torch.int64, device=model.device) for _ in range(3)
        )
        self.cache = cache.sharing(lambda held: Latents(held.buffer, self.position, self.visible))
        self.has_run = False
        self.graph: torch.cuda.CUDAGraph | None = None
        self.logits: Tensor | None = None

    def fits(self, model: Model, cache: Cache) -> bool:
        return self.model is model and self.places == cache.places()

    def set(self, token: int, position: int) -> None:
        self.ids.fill_(token)
        self.position.fill_(position)
        self.visible.fill_(position + 1)

    def run(self, observe: Observer | None = None) -> Tensor:
        """Logits [1, vocab] of the token that was set; states and caches go on by it."""
        sums = ResidualSums(self.model.enter(self.ids), self.model.slots, self.model.config.rms_norm_eps)
        logits = self.model.logits(self.model.layers_and_norm(sums, self.cache, observe))
        self.has_run = True
        return logits

    def capture(self) -> None:
        """Write the kernels of `run` down without running them. Only after a `run`."""
        torch.cuda.synchronize(self.model.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.logits = self.run()
        self.graph = graph

    def play(self, token: int, position: int) -> Tensor:
        """Logits [vocab] float32."""
        assert self.graph is not None and self.logits is not None
        self.set(token, position)
        self.graph.replay()
        return self.logits[0].clone()


@dataclass
class Captured:
    """What a cache knows of its captured step: ordinary steps still to do before one, and why there will be none."""

    steps_before: int = ORDINARY_STEPS
    step: Step | None = None
    problem: str = ""


def captures(model: Model) -> bool:
    """Whether decode steps of this model are captured. `K3TOOL_GRAPH=0` says that they are not."""
    groups = (model.parallel.tp, model.parallel.experts, model.parallel.stages)
    alone = all(group.size == 1 for group in groups)
    return (
        alone and model.device.type == "cuda" and not model.streamed_experts and os.environ.get("K3TOOL_GRAPH") != "0"
    )


def is_fixed(cache: Cache) -> bool:
    """Whether the next step on a cache runs on the fixed memory of a graph, or as the graph."""
    held = cache.captured
    return held is not None and not held.steps_before and not held.problem


def is_captured(model: Model, cache: Cache) -> bool:
    """Whether the next step on a cache is the graph that was captured."""
    step = cache.captured.step if cache.captured is not None else None
    return step is not None and step.graph is not None and step.fits(model, cache) and cache.has_room()


@torch.inference_mode()
def decode_step(model: Model, token: int, cache: Cache) -> Tensor:
    """Feed one token; float32 logits [vocab] of what follows it. For a model that `captures`."""
    held = cache.captured = cache.captured or Captured()
    if not cache.has_room():
        cache.reserve(cache.position + 1)
    if held.step is not None and not held.step.fits(model, cache):
        held.step = None
    if held.steps_before or held.problem:
        held.steps_before = max(0, held.steps_before - 1)
        ids = torch.tensor([token], dtype=torch.int64, device=model.device)
        return model.logits(model.forward(ids, cache))[0]
    step = held.step = held.step or Step(model, cache)
    if not step.has_run:
        step.set(token, cache.position)
        logits = step.run()[0]
    else:
        if step.graph is None:
            try:
                step.capture()
            except RuntimeError as error:
                held.step, held.problem = None, str(error).splitlines()[0]
                log.warning("decode steps are not captured and run kernel by kernel: %s", held.problem)
                return decode_step(model, token, cache)
        logits = step.play(token, cache.position)
    cache.advance(1)
    return logits
