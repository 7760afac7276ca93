"""The decode step that a GPU captures, run here without capturing: it gives what ordinary steps give."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from k3tool.generate import Session
from k3tool.kernels.dispatch import use
from k3tool.model import graph, replay
from k3tool.model.cache import LatentCache
from k3tool.model.graph import Captured, Step


@pytest.fixture
def session(mini: Path) -> Session:
    session = Session.open(mini, device="cpu", dtype="float32")
    session.prefill(range(20))
    return session


def ordinary(session: Session, token: int, cache) -> torch.Tensor:
    return session.model.logits(session.model.forward(torch.tensor([token]), cache))[0]


def differing(a, b) -> float:
    return ((a - b).norm() / b.norm()).item()


@torch.inference_mode()
def test_the_step_on_fixed_memory_is_the_ordinary_one(session: Session) -> None:
    twin = session.cache.clone()
    session.cache.reserve(40)
    with use("reference"):
        step = Step(session.model, session.cache)
        for token in range(30, 36):
            assert step.fits(session.model, session.cache)
            step.set(token, session.cache.position)
            found = step.run()[0]
            session.cache.advance(1)
            # 1e-5: the same sums; attention reads them in blocks of another size.
            assert differing(found, ordinary(session, token, twin)) < 1e-5
    for held, other in zip(session.cache.layers, twin.layers, strict=True):
        if isinstance(held, LatentCache):
            assert differing(held.buffer[:, :26], other.buffer[:, :26]) < 1e-5
        else:
            assert differing(held.state, other.state) < 1e-5
    session.cache.reserve(5000)
    assert not step.fits(session.model, session.cache)


def test_steps_are_captured_after_ordinary_ones_and_again_when_the_cache_grows(session: Session, monkeypatch) -> None:
    """As on a GPU, with a capture that only notes itself and a replay that runs the step."""
    captures: list[Step] = []
    monkeypatch.setattr(graph, "captures", lambda model: True)

    def capture(self: Step) -> None:
        assert self.has_run  # nothing is left to compile or to measure
        captures.append(self)
        self.graph = "a graph"

    monkeypatch.setattr(Step, "capture", capture)

    def play(self: Step, token: int, position: int) -> torch.Tensor:
        self.set(token, position)
        return self.run()[0]

    monkeypatch.setattr(Step, "play", play)
    twin = session.cache.clone()
    counts = []
    with use("reference"):
        for token in range(30, 38):
            if token == 35:
                session.cache.reserve(3000)
            found = replay.decode_step(session.model, token, session.cache)
            with torch.inference_mode():
                assert differing(found, ordinary(session, token, twin)) < 1e-5
            counts.append(len(captures))
    assert counts == [0, 0, 1, 1, 1, 1, 2, 2]  # the step on a grown cache runs before it is captured
    assert session.cache.position == twin.position
    assert session.cache.clone().captured is None


def test_a_step_that_cannot_be_captured_runs_as_usual_and_says_so(session: Session, monkeypatch, caplog) -> None:
    monkeypatch.setattr(graph, "captures", lambda model: True)

    def fail(self: Step) -> None:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(Step, "capture", fail)
    twin = session.cache.clone()
    session.cache.captured = Captured(steps_before=0)
    with use("reference"), torch.inference_mode():
        for token in (5, 6, 7):
            found = replay.decode_step(session.model, token, session.cache)
            assert differing(found, ordinary(session, token, twin)) < 1e-5
    warnings = [record.message for record in caplog.records if "not captured" in record.message]
    assert len(warnings) == 1 and warnings[0].endswith("operation not permitted when stream is capturing")


def test_only_a_gpu_captures(session: Session) -> None:
    assert not graph.captures(session.model)
