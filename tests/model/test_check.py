"""`run --check`: it passes on sound kernels, and finds a kernel that is slightly wrong, in the right layer."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from k3tool.generate import Session
from k3tool.kernels import cpu as compiled
from k3tool.kernels import dispatch
from k3tool.model import attention, decoder, moe
from k3tool.model.check import BOUNDS, compare
from tests.helpers import k3tool

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
    assert ran.code == 0 and {"layer", "kernel", "max_error", "rms_error", "ok"} == set(ran.json["checks"][0])
    human = k3tool(capsys, "run", mini, "--input-ids", "1 2 3", "--max-new-tokens", 1, "--check")
    assert f"{len(ran.json['checks'])} kernel checks passed" in human.err


def test_compare():
    expected = torch.tensor([3.0, -4.0, 0.0])
    assert compare(expected.clone(), expected) == (0.0, 0.0, True)
    largest, rms, ok = compare(expected + torch.tensor([0.0, 0.004, 0.0]), expected)
    assert largest == pytest.approx(1e-3, rel=1e-3) and rms == pytest.approx(8e-4, rel=1e-3) and not ok
    assert compare(torch.tensor([3.0, float("nan"), 0.0]), expected) == (sys.float_info.max, sys.float_info.max, False)
    assert not compare(expected[:2], expected)[2] and not compare(expected.bfloat16(), expected)[2]
    assert compare(torch.zeros(2), torch.zeros(2)) == (0.0, 0.0, True)
    assert compare(torch.full((2,), 1e-3), torch.zeros(2))[2] is False
    assert compare(expected[:0], expected[:0])[2]
    assert set(BOUNDS) == {torch.float32, torch.bfloat16}
