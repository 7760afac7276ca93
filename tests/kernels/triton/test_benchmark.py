"""The GPU benchmark's own logic, on small cases under the interpreter: what it checks, counts, reports and lets fail."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from k3tool.kernels.cases import Case, Draw, all_cases

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    sys.modules.pop("gpu", None)
    import gpu

    monkeypatch.setattr(gpu, "DEVICE", "cpu")
    machine = gpu.Machine("a card", "sm_90", 1 << 37, "2026-01-01", "2", "3", 4e12, 8e14)
    monkeypatch.setattr(gpu, "describe", lambda: machine)
    monkeypatch.setattr(gpu, "milliseconds", lambda calls, seconds=0.0: [call() for call in calls[:1]] and 0.002)
    monkeypatch.setattr(gpu, "other_implementations", lambda *a: [{"name": "theirs", "text": "not installed"}])
    monkeypatch.setattr(gpu, "MOST_SETS", 2)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return gpu


def small_case(name: str, factor: float = 1.0) -> Case:
    def make(draw: Draw):
        return {"x": draw.normal(3, 64) * factor, "weight": draw.floats(64), "eps": 1e-5}

    return Case(name, "norm", "rms_norm", make, 4000.0, 4000.0, target=0.7)


def options(gpu, monkeypatch, cases, **changes):
    monkeypatch.setattr(gpu, "all_cases", lambda: cases)
    return argparse.Namespace(**{"seconds": 600.0, "only": "", "no_model": True, **changes})


@torch.inference_mode()
def test_right_kernels_are_timed_against_their_floor(gpu, monkeypatch, capsys):
    document = gpu.run(options(gpu, monkeypatch, [small_case("one"), small_case("two")]))
    assert document["ok"]
    one = document["cases"][0]
    assert set(one["errors"]) == {"bfloat16", "float32"} and one["errors"]["float32"] < 1e-6
    assert one["floor_ms"] == pytest.approx(4000 / 4e12 * 1e3)
    assert one["fraction"] == pytest.approx(one["floor_ms"] / 0.002)
    assert set(document["cases"][1]["errors"]) == {"bfloat16"}  # float32 once per kernel
    out = capsys.readouterr().out
    assert "a card" in out and "missed" in out and "all kernels agree" in out and "theirs: not installed" in out
    json.dumps(document)


@torch.inference_mode()
def test_a_wrong_or_failing_kernel_is_told_and_not_timed(gpu, monkeypatch, capsys):
    from k3tool.kernels.norm import kernel

    sound = kernel.rms_norm
    monkeypatch.setattr(kernel, "rms_norm", lambda x, weight, eps: sound(x, weight, eps) * 1.1)
    document = gpu.run(options(gpu, monkeypatch, [small_case("one")]))
    assert not document["ok"] and document["cases"][0]["ms"] is None
    assert "SOME KERNELS ARE WRONG" in capsys.readouterr().out

    def fail(**arguments):
        raise RuntimeError("an illegal memory access")

    monkeypatch.setattr(kernel, "rms_norm", fail)
    document = gpu.run(options(gpu, monkeypatch, [small_case("one")]))
    assert not document["ok"] and "illegal memory access" in document["cases"][0]["note"]
    monkeypatch.setattr(kernel, "rms_norm", lambda x, weight, eps: sound(x, weight, eps) * float("nan"))
    assert not gpu.run(options(gpu, monkeypatch, [small_case("one")]))["ok"]


@torch.inference_mode()
def test_no_time_left_is_said(gpu, monkeypatch):
    document = gpu.run(options(gpu, monkeypatch, [small_case("one")], seconds=-1.0))
    assert not document["ok"] and "no time for bfloat16" in document["cases"][0]["note"]


def test_cases_are_distinct_and_their_counts_plausible():
    cases = all_cases()
    assert len({case.name for case in cases}) == len(cases)
    for case in cases:
        assert case.moved_bytes >= case.floor_bytes > 0
        assert case.bound == "memory" or case.operations > 0
        inputs = case.make(Draw(torch.device("meta"), torch.bfloat16))
        assert all(name in inputs for name in case.in_place)
        held = sum(value.nbytes for value in inputs.values() if isinstance(value, torch.Tensor))
        if "experts" not in inputs:
            # All inputs are read once, states and histories also written; outputs are as large as inputs at most, but for
            # those of FP4 decoding.
            assert held * 0.99 <= case.floor_bytes <= held * (5 if case.kernel == "mxfp4" else 2), case.name
    assert replace(cases[0], target=0.5).twin("reference") is not None
