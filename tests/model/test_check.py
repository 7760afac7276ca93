"""`run --check`: it passes on sound kernels, and finds a kernel that is slightly wrong, in the right layer."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from k3tool.generate import Session
from k3tool.kernels import cpu as compiled
from k3tool.kernels import dispatch
from k3tool.kernels.dispatch import Backend
from k3tool.model import attention, decoder, graph, moe
from k3tool.model.cache import Cache
from k3tool.model.check import DECODE_STEP
from k3tool.model.compare import LEAST, compare, move, same_bits
from k3tool.model.decoder import Model
from tests.helpers import k3tool

if compiled.available():
    from k3tool.kernels.cpu.tape import Tape

needs_twins = pytest.mark.skipif(not compiled.available(), reason="no compiled kernels on this processor")
IDS = list(range(3, 40))


@pytest.fixture
def session(mini: Path) -> Session:
    return Session.open(mini, device="cpu", dtype="float32")


@needs_twins
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sound_kernels_pass_in_every_layer(mini: Path, dtype: str):
    session = Session.open(mini, device="cpu", dtype=dtype)
    before = [dict(vars(module)) for module in (attention, decoder, moe)]
    checks = session.check(IDS)
    assert [dict(vars(module)) for module in (attention, decoder, moe)] == before
    assert checks and all(item.ok for item in checks)
    by_kernel: dict[str, set[int | None]] = {}
    for item in checks:
        by_kernel.setdefault(item.kernel, set()).add(item.layer)
    assert by_kernel["linear"] == {*range(8), None}  # None: the head
    assert by_kernel["experts_forward"] == set(range(1, 8))
    assert by_kernel[DECODE_STEP] == {None}
    assert session.cache.position == 0  # the session's own sequence was not touched


def test_of_the_reference_there_is_nothing_to_compare(mini: Path, capsys):
    assert Session.open(mini, device="cpu", dtype="float32", backend="reference").check(IDS) == []
    ran = k3tool(capsys, "run", mini, "--input-ids", "1,2", "--max-new-tokens", 1, "--check", "--backend", "reference")
    assert ran.code == 0 and "is the reference: nothing was compared" in ran.err


@needs_twins
def test_a_wrong_kernel_is_found_where_it_is(session: Session, mini: Path, monkeypatch, capsys):
    from k3tool.kernels.moe import cpu

    sound: Callable[..., torch.Tensor] = cpu.experts_forward
    calls: list[int] = []

    def wrong(x: torch.Tensor, *arguments: object) -> torch.Tensor:
        calls.extend([1] * (len(x) == len(IDS)))  # compiling ahead calls it too, on other inputs
        return sound(x, *arguments) * (1.0001 if len(calls) == 3 else 1.0)

    monkeypatch.setattr(cpu, "experts_forward", wrong)
    dispatch._find.cache_clear()
    try:
        failed = [item for item in session.check(IDS) if not item.ok]
        assert [(item.layer, item.kernel) for item in failed] == [(3, "experts_forward")]
        assert failed[0].rms_error == pytest.approx(1e-4, rel=0.05)
        calls.clear()
        ids = ",".join(map(str, IDS))
        ran = k3tool(capsys, "run", mini, "--input-ids", ids, "--dtype", "float32", "--max-new-tokens", 1, "--check", "--json")  # fmt: skip
    finally:
        monkeypatch.undo()
        dispatch._find.cache_clear()
    assert ran.code == 1 and ran.json["ok"] is False
    assert "worst is experts_forward in layer 3" in ran.json["error"]["message"]
    bad = [item for item in ran.json["checks"] if not item["ok"]]
    assert [(item["layer"], item["kernel"]) for item in bad] == [(3, "experts_forward")]
    assert len(ran.json["token_ids"]) == 1


@needs_twins
def test_on_the_command_line(mini: Path, capsys):
    ran = k3tool(capsys, "run", mini, "--input-ids", "1 2 3", "--max-new-tokens", 1, "--check", "--json")
    fields = {"layer", "kernel", "max_error", "max_bound", "rms_error", "rms_bound", "ok"}
    assert ran.code == 0 and set(ran.json["checks"][0]) == fields
    human = k3tool(capsys, "run", mini, "--input-ids", "1 2 3", "--max-new-tokens", 1, "--check")
    assert f"{len(ran.json['checks'])} kernel checks passed" in human.err
    lines = [line.split() for line in human.err.splitlines()]
    assert ["kernel", "layers", "largest", "of", "RMS", "of"] in lines
    rows = {line[0]: line for line in lines if line and line[-1] == "ok"}
    assert set(rows) == {item["kernel"] for item in ran.json["checks"]}
    assert rows["linear"][1:4] == ["0-7", "and", "outside"] and rows["experts_forward"][1] == "1-7"


@needs_twins
def test_random_prompts_pass_in_bfloat16(mini: Path):
    """Sums that are rounded to float32 carry the rounding of the bfloat16 values that they are made of."""
    generator = torch.Generator().manual_seed(3)
    session = Session.open(mini, device="cpu", dtype="bfloat16")
    for length in (1, 7, 40, 63, 64, 97, 128, 130):
        ids = torch.randint(0, session.config.vocab_size, (length,), generator=generator).tolist()
        checks = session.check(ids)
        assert [item for item in checks if not item.ok] == []
        # Nor are they near: a sound kernel is about as far from what is exact as the reference is.
        assert max(item.difference.excess for item in checks) < 0.75


def spoil_scale(x: torch.Tensor) -> None:
    x.mul_(1.02)


def spoil_column(x: torch.Tensor) -> None:
    x[..., -1] = 0


def spoil_order(x: torch.Tensor) -> None:
    x.copy_(x.roll(1, -1).clone())


def spoil_number(x: torch.Tensor) -> None:
    x[torch.unravel_index(x.abs().argmax(), x.shape)] *= 0.9


TWINS = [
    ("attn_res", "mix_blocks"), ("conv", "causal_conv"), ("elementwise", "add"), ("elementwise", "multiply_by_sigmoid"),
    ("kda", "kda"), ("kda", "kda_decode"), ("linear", "linear"), ("mla", "mla"), ("moe", "experts_forward"),
    ("moe", "gated_activation"), ("norm", "gated_rms_norm"), ("norm", "rms_norm"), ("router", "select_experts"),
]  # fmt: skip


@needs_twins
@pytest.mark.parametrize(("kernel", "name"), TWINS)
def test_damages_of_relevant_size_are_found_in_bfloat16(mini: Path, monkeypatch, kernel: str, name: str):
    session = Session.open(mini, device="cpu", dtype="bfloat16", layers=5)
    module = importlib.import_module(f"k3tool.kernels.{kernel}.cpu")
    sound = getattr(module, name)
    for spoil in (spoil_scale, spoil_column, spoil_order, spoil_number):

        def wrong(*args: object, spoil: Callable[[torch.Tensor], None] = spoil, **kwargs: object) -> object:
            result = sound(*args, **kwargs)
            spoil(result[-1] if isinstance(result, tuple) else result)
            return result

        with monkeypatch.context() as patch:
            patch.setattr(module, name, wrong)
            dispatch._find.cache_clear()
            found = {item.kernel for item in session.check(IDS) if not item.ok}
        dispatch._find.cache_clear()
        assert name in found, spoil.__name__


@needs_twins
@pytest.mark.parametrize("what", ["logits", "state", "latents"])
def test_a_wrong_decode_step_is_found(mini: Path, monkeypatch, capsys, what: str):
    """What is played back is no kernel: it is compared as a whole, with the caches that it leaves."""
    play = Tape.play

    def wrong(self: Tape, position: int) -> None:
        play(self, position)
        step = held[-1].recorded
        if what == "logits":
            step.logits.neg_()
        elif what == "state":
            next(layer for layer in held[-1].layers if hasattr(layer, "state")).state[0, -1] *= 1.001
        else:
            next(layer for layer in held[-1].layers if hasattr(layer, "buffer")).buffer[0, position] = 0

    held: list[Cache] = []
    new_cache = Model.new_cache
    monkeypatch.setattr(Model, "new_cache", lambda self: (held.append(new_cache(self)), held[-1])[1])
    monkeypatch.setattr(Tape, "play", wrong)
    ids = "3,4,5,6"
    ran = k3tool(capsys, "run", mini, "--input-ids", ids, "--max-new-tokens", 1, "--check", "--json")
    assert ran.code == 1
    assert {item["kernel"] for item in ran.json["checks"] if not item["ok"]} == {DECODE_STEP}
    assert ran.json["error"]["hint"].endswith(f"run {mini} --input-ids {ids} --backend reference")


def test_a_captured_step_is_checked_against_its_kernels(session: Session, monkeypatch):
    """As on a GPU, with a capture that only notes itself and a replay that runs the step, rightly or not."""
    wrong = [False]
    monkeypatch.setattr(graph, "captures", lambda model: True)
    monkeypatch.setattr(graph.Step, "capture", lambda self: setattr(self, "graph", "a graph"))

    def play(self: graph.Step, token: int, position: int) -> torch.Tensor:
        self.set(token, position)
        return self.run()[0] * (1.5 if wrong[0] else 1.0)

    monkeypatch.setattr(graph.Step, "play", play)
    session.backend = Backend("reference", "no twin runs here: what is looked at is the step")
    (check,) = session.check(IDS)
    assert (check.kernel, check.layer, check.ok, check.max_error) == (DECODE_STEP, None, True, 0.0)
    wrong[0] = True
    (check,) = session.check(IDS)
    assert check.kernel == DECODE_STEP and not check.ok


def test_compare():
    expected = torch.tensor([3.0, -4.0, 0.0])
    same = compare(expected.clone(), expected)
    assert (same.max_error, same.rms_error, same.ok) == (0.0, 0.0, True)
    assert (same.max_bound, same.rms_bound) == LEAST
    found = compare(expected + torch.tensor([0.0, 0.004, 0.0]), expected)
    assert found.max_error == pytest.approx(1e-3, rel=1e-3) and found.rms_error == pytest.approx(8e-4, rel=1e-3)
    assert not found.ok and found.excess == pytest.approx(80, rel=1e-2)
    nan = compare(torch.tensor([3.0, float("nan"), 0.0]), expected)
    assert (nan.max_error, nan.ok) == (sys.float_info.max, False)
    assert not compare(expected[:2], expected).ok and not compare(expected.bfloat16(), expected).ok
    assert compare(torch.zeros(2), torch.zeros(2)).ok
    assert not compare(torch.full((2,), 1e-3), torch.zeros(2)).ok
    assert compare(expected[:0], expected[:0]).ok
    assert same_bits(expected, expected).ok and not same_bits(expected * (1 + 2.0**-23), expected).ok


def test_the_bound_is_what_rounding_does_to_these_inputs():
    """Sums that cancel keep the rounding of their terms: as much more is allowed, and no more than that."""
    moved = move(torch.ones(1000)) - 1
    assert set(moved.tolist()) == {2.0**-23, -(2.0**-23)}
    torch.manual_seed(0)
    half = torch.randn(64, 256)
    terms = torch.cat([half, -half], dim=1)  # sums that are all but nothing
    exact = terms.double().sum(1).float()
    summed = compare(exact, exact, exact, move(terms).sum(1))
    assert summed.ok and compare(exact + 1e-6, exact, exact, move(terms).sum(1)).ok
    assert not compare(exact + 1e-3, exact, exact, move(terms).sum(1)).ok
    half = torch.full((1000,), 1.0)
    off = half + 2.0**-9  # as far as bfloat16 rounds, where the reference rounds as much
    assert compare(off, half + 2.0**-9, half).ok
    assert compare(half - 2.0**-9, half + 2.0**-9, half).ok  # to the other side
    assert not compare(half + 2.0**-6, half + 2.0**-9, half).ok
    assert not compare(half + 2.0**-9, half, half).ok  # where nothing is rounded
