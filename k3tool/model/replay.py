"""One token at a time on a CPU: the first decode step is written down job by job, the others are played back.

A decode step is some hundred short jobs of compiled code, and Python between them takes as long as the jobs. What is
played back are the same jobs on the same memory, so the results are those of the ordinary step, bit for bit. Whatever
cannot be written down (a rank of several, experts that stream from disk, an operation without a compiled twin) takes
the ordinary step.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from k3tool.kernels.dispatch import runs_compiled, sole_threads
from k3tool.model import graph
from k3tool.model.cache import Cache
from k3tool.model.decoder import Model, ResidualSums

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RecordedStep:
    """A tape (None: `problem` says why there is none), where the embedding goes in, and where the logits come out."""

    model: Model
    places: tuple[int, ...]
    problem: str
    tape: Any = None
    entry: Tensor | None = None
    logits: Tensor | None = None

    def fits(self, model: Model, cache: Cache) -> bool:
        return self.model is model and self.places == cache.places()


@torch.inference_mode()
def decode_step(model: Model, token: int, cache: Cache) -> Tensor:
    """Feed one token; float32 logits [vocab] of what follows it. Ranks call it together."""
    if graph.captures(model):
        return graph.decode_step(model, token, cache)
    ids = torch.tensor([token], dtype=torch.int64, device=model.device)
    if not may_record(model):
        return model.logits(model.forward(ids, cache))[0]
    if not cache.has_room():
        cache.reserve(cache.position + 1)
    step = cache.recorded
    if step is None or not step.fits(model, cache):
        return _record(model, ids, cache)
    if step.tape is None:
        return model.logits(model.forward(ids, cache))[0]
    assert step.entry is not None and step.logits is not None
    step.entry.copy_(model.enter(ids))
    step.tape.play(cache.position)
    cache.advance(1)
    return step.logits[0].clone()


def plays(model: Model, cache: Cache) -> bool:
    """Whether the next decode step on a cache is played back, from a tape or as a captured graph."""
    if graph.captures(model):
        return graph.is_captured(model, cache)
    step = cache.recorded
    return (
        may_record(model)
        and cache.has_room()
        and step is not None
        and step.tape is not None
        and step.fits(model, cache)
    )


def may_record(model: Model) -> bool:
    """Whether decode steps of a model may be written down at all."""
    groups = (model.parallel.tp, model.parallel.experts, model.parallel.stages)
    alone = all(group.size == 1 for group in groups)
    return alone and runs_compiled(model.device) and not model.streamed_experts


def _record(model: Model, ids: Tensor, cache: Cache) -> Tensor:
    """The ordinary step, written down where that is possible."""
    from k3tool.kernels.cpu.tape import Recorder, Tape

    position, entry = cache.position, model.enter(ids)
    with sole_threads(model.device), Recorder() as recorder:
        sums = ResidualSums(entry, model.slots, model.config.rms_norm_eps)
        logits = model.logits(model.layers_and_norm(sums, cache))
    if recorder.problem:
        log.debug("decode steps are not played back: %s", recorder.problem)
        cache.recorded = RecordedStep(model, cache.places(), recorder.problem)
    else:
        cache.recorded = RecordedStep(model, cache.places(), "", Tape(recorder, position), entry, logits)
    return logits[0].clone()
