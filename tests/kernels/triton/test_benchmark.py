"""The GPU benchmark's own logic: what it checks, counts, reports and lets fail, without a GPU."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from k3tool.kernels.cases import RELEASED, TINY, Case, Draw, all_cases
from k3tool.kernels.norm import kernel as norm_kernel
from k3tool.kernels.router import kernel as router_kernel

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
MACHINE = {
    "name": "a card", "generation": "sm_90", "date": "2026-01-01", "torch": "2", "triton": "3",
    "copy_bytes_per_second": 4e12, "matmul_per_second": 8e14,
}  # fmt: skip


@pytest.fixture
def fence() -> None:
    """What a benchmark allocates needs no fence."""


def small_case(name: str) -> Case:
    def make(draw: Draw):
        return {"x": draw.normal(3, 64), "weight": draw.floats(64), "eps": 1e-5}

    return Case(name, "norm", "rms_norm", make, 4000.0, 4000.0, target=0.7)


@pytest.fixture
def bench(monkeypatch):
    """The worker in this process, with one small case besides the tiny ones."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import gpu_worker

    cases = [small_case("small"), *all_cases(TINY)]
    monkeypatch.setattr(gpu_worker, "all_cases", lambda sizes: cases)
    bench = gpu_worker.Bench(torch.device("cpu"), TINY)
    monkeypatch.setattr(bench, "milliseconds", lambda calls: [call() for call in calls[:1]] and 0.002)
    return bench


def ask(bench, name="small", dtype="bfloat16"):
    with torch.inference_mode():
        return bench.answer({"do": "case", "name": name, "dtype": dtype, "machine": MACHINE})


def test_a_right_kernel_is_timed_against_its_floor(bench):
    answer = ask(bench)
    assert answer["ok"] and answer["errors"]["bfloat16"] < 1e-3
    assert answer["times"]["floor_ms"] == pytest.approx(4000 / 4e12 * 1e3)
    assert answer["times"]["fraction"] == pytest.approx(answer["times"]["floor_ms"] / 0.002)
    exact = ask(bench, dtype="float32")
    assert exact["ok"] and exact["errors"]["float32"] < 1e-6 and "times" not in exact


def test_a_wrong_or_failing_kernel_is_told_and_not_timed(bench, monkeypatch):
    sound = norm_kernel.rms_norm
    for factor in (1.1, float("nan")):
        monkeypatch.setattr(norm_kernel, "rms_norm", lambda x, weight, eps, by=factor: sound(x, weight, eps) * by)
        answer = ask(bench)
        assert not answer["ok"] and "times" not in answer
        json.loads(json.dumps(answer, allow_nan=False))

    def fail(**arguments):
        raise RuntimeError("an illegal memory access")

    monkeypatch.setattr(norm_kernel, "rms_norm", fail)
    answer = ask(bench)
    assert "illegal memory access" in answer["problem"] and answer["is_lost"] is False
    monkeypatch.setattr(bench, "is_alive", lambda: False)
    assert ask(bench)["is_lost"] is True
    monkeypatch.setattr(norm_kernel, "rms_norm", sound)

    def stop(case, machine):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(bench, "measure", stop)
    answer = ask(bench)
    assert answer["ok"] and "not timed" in answer["problem"] and "out of memory" in answer["problem"]


def test_a_tie_of_scores_is_no_error_but_a_worse_expert_is(bench, monkeypatch):
    name = next(case.name for case in all_cases(TINY) if case.kernel == "router")
    assert ask(bench, name, "float32")["ok"]
    sound = router_kernel.select_experts

    def worse(logits, **options):
        ids, weights = sound(logits=logits, **options)
        ids[0, 0] = next(i for i in range(TINY.experts) if i not in ids[0].tolist())
        return ids, weights

    monkeypatch.setattr(router_kernel, "select_experts", worse)
    assert not ask(bench, name, "float32")["ok"]


def test_other_implementations(bench):
    with torch.inference_mode():
        found = bench.answer({"do": "other", "name": "MLA prefill, torch attention"})
        assert found["error"] < 1e-2 and "ours" in found["text"]
        found = bench.answer({"do": "other", "name": "KDA prefill, fla-core"})
    text = found.get("text", "")
    assert found.get("problem") or "not installed" in text or "ours" in text  # the interpreter cannot run fla's kernels


STUB = """
import json, os, sys, time
machine = json.loads({machine!r})
times = {{"ms": 0.002, "floor_ms": 0.001, "fraction": 0.5}}
for text in sys.stdin:
    job = json.loads(text)
    name = job.get("name", "")
    answer = {{"ok": True, "errors": {{job.get("dtype"): 1e-3}}, "times": times, "text": "of " + name + str(os.getpid())}}
    if job["do"] == "machine":
        answer = machine
    elif name == "dies":
        print("an assertion in a kernel", flush=True)
        os._exit(134)
    elif name == "hangs":
        time.sleep(60)
    elif name == "lost":
        answer = {{"problem": "illegal address", "is_lost": True}}
    elif name == "wrong":
        answer = {{"ok": False, "errors": {{job["dtype"]: 0.5}}}}
    print("@@ " + json.dumps(answer), flush=True)
"""


@pytest.fixture
def run(monkeypatch, tmp_path):
    """The parent, with a worker that only pretends."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import gpu

    monkeypatch.setattr(gpu, "CASE_SECONDS", 1.5)
    stub = tmp_path / "stub.py"

    def run(names, machine=MACHINE, **changes):
        stub.write_text(STUB.format(machine=json.dumps(machine)))
        asked = {
            "seconds": 600.0,
            "only": "",
            "no_model": False,
            "tiny": True,
            "json": tmp_path / "out.json",
            **changes,
        }
        options = argparse.Namespace(**asked)
        run = gpu.Run(options, [small_case(name) for name in names], [sys.executable, str(stub)])
        try:
            return run.everything(), json.loads(options.json.read_text()) if options.json.exists() else None
        finally:
            run.worker.stop()

    return run


def test_a_case_that_takes_the_process_with_it_costs_its_own_row(run, capsys):
    code, document = run(["good", "dies", "hangs", "lost", "wrong", "last"])
    assert code == 1 and not document["ok"]
    rows = {row["case"]: row for row in document["cases"]}
    assert {name for name, row in rows.items() if row["ok"]} == {"good", "last"}
    assert "an assertion in a kernel" in rows["dies"]["note"]
    assert "no answer within" in rows["hangs"]["note"] and "illegal address" in rows["lost"]["note"]
    assert rows["last"]["ms"] == 0.002 and rows["wrong"]["errors"] == {"bfloat16": 0.5}
    out = capsys.readouterr().out
    assert "a card" in out and "missed" in out and "SOME KERNELS ARE WRONG" in out
    assert document["model"]["text"].startswith("of ") and len(document["others"]) == 2


def test_all_good(run, capsys):
    code, document = run(["one", "two"])
    assert code == 0 and document["ok"] and document["machine"] == MACHINE
    assert set(document["cases"][0]["errors"]) == {"bfloat16", "float32"}
    assert set(document["cases"][1]["errors"]) == {"bfloat16"}  # float32 once per kernel
    assert "all kernels agree" in capsys.readouterr().out


def test_no_time_left_is_said(run):
    code, document = run(["one"], seconds=1.0)
    assert code == 1 and "no time for bfloat16" in document["cases"][0]["note"]
    assert "no time" in document["model"]["text"]


def test_without_a_gpu_it_says_so(run, capsys):
    code, document = run(["one"], machine={"problem": "no GPU is visible to torch", "no_gpu": True})
    assert code == 14 and document is None and "no GPU" in capsys.readouterr().err


GUARD = """
import builtins, sys

allowed = set(sys.stdlib_module_names) | {"torch", "triton", "safetensors", "rich", "typer", "k3tool"}
allowed |= {"gpu", "gpu_worker", "gpu_model", "gpu_others", "fla"}
real = builtins.__import__


def guarded(name, globals=None, locals=None, fromlist=(), level=0):
    importer = (globals or {}).get("__name__", "")
    ours = importer.partition(".")[0] in ("k3tool", "__main__", "gpu", "gpu_worker", "gpu_model", "gpu_others")
    if level == 0 and ours and name.partition(".")[0] not in allowed:
        raise ModuleNotFoundError(f"{importer} imports {name}", name=name)
    return real(name, globals, locals, fromlist, level)


builtins.__import__ = guarded
"""


def test_the_whole_way_on_tiny_shapes_with_nothing_else_installed(tmp_path):
    """Processes, jobs, model and file, where k3tool may import only what such a machine has."""
    (tmp_path / "sitecustomize.py").write_text(GUARD)
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "gpu.py"), "--tiny", "--only", "mix", "--json", str(tmp_path / "out.json")],
        capture_output=True, text=True, timeout=600,
        env={**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads((tmp_path / "out.json").read_text())
    assert document["ok"] and len(document["cases"]) == 2
    assert all(row["ms"] > 0 and row["errors"]["bfloat16"] < 1e-2 for row in document["cases"])
    model = document["model"]
    assert model["layers"] == 3 and model["finite"] and model["decode_ms"] > 0
    assert model["checks"] and all(check["ok"] for check in model["checks"])
    assert "all kernels agree" in done.stdout


def test_cases_are_distinct_and_their_counts_plausible():
    for sizes in (RELEASED, TINY):
        cases = all_cases(sizes)
        assert len({case.name for case in cases}) == len(cases)
    for case in all_cases():
        assert case.moved_bytes >= case.floor_bytes > 0
        assert case.bound == "memory" or case.operations > 0
        inputs = case.make(Draw(torch.device("meta"), torch.bfloat16))
        assert all(name in inputs for name in case.in_place)
        held = sum(value.nbytes for value in inputs.values() if isinstance(value, torch.Tensor))
        if "experts" not in inputs:
            # All inputs are read once, states and histories also written; outputs are as large as inputs at most, but for
            # those of FP4 decoding and normalized bfloat16 in float32.
            most = 5 if case.kernel == "mxfp4" else 3.01 if case.function == "l2_normalize" else 2.1
            assert held * 0.98 <= case.floor_bytes <= held * most, case.name


def test_every_triton_twin_has_a_case():
    """What a kernel file offers and has a reference is compared on a GPU and compiled ahead of time."""
    import importlib

    from k3tool.kernels import dispatch

    expected = set()
    for kernel in dispatch.triton_kernels():
        module = importlib.import_module(f"k3tool.kernels.{kernel}.kernel")
        reference = importlib.import_module(f"k3tool.kernels.{kernel}.reference")
        own = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
        expected |= {(kernel, name) for name in own if callable(getattr(reference, name, None)) and "torch" not in name}
    held = {(case.kernel, case.function) for case in all_cases()}
    assert {pair for pair in expected if pair[1] not in ("Tensor", "cast")} == held
