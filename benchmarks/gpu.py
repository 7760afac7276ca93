"""Every Triton kernel on the GPU at hand: is it right, how fast is it against its floor, and what does a model make of it?

    python benchmarks/gpu.py [--json FILE] [--seconds N] [--only TEXT] [--no-model]

Needs this repository, torch and triton (what k3tool itself needs to run; nothing is downloaded, nothing compiled by hand).
A case counts only where its results agree with the torch twin in the same run. Times are of kernels in a CUDA graph, the
median over replays, with enough different inputs that they do not come from the cache. What does not fit in the time is
left out and said so.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import triton
from gpu_model import run_model
from gpu_others import other_implementations

from k3tool.kernels import lang
from k3tool.kernels.cases import Case, Draw, all_cases

BOUNDS = {torch.float32: 1e-4, torch.bfloat16: 1.5e-2}
"""Norm of the difference over the norm of the reference. float32 sums in another order, on three TF32 products each;
bfloat16 operands of matrix units, rounded several times in a row."""
CHECK_EXPERTS = 64  # the reference decodes every visited expert
CACHED_BYTES = 512 << 20  # inputs of timed calls together, several times any second-level cache
MOST_SETS = 64
DEVICE = "cuda"


@dataclass
class Machine:
    """The card and its two ceilings, measured here."""

    name: str
    generation: str
    memory_bytes: int
    date: str
    torch: str
    triton: str
    copy_bytes_per_second: float = 0.0
    matmul_per_second: float = 0.0


@dataclass
class Result:
    """One case. floor_ms: the larger of bytes over copy bandwidth and operations over the matmul rate."""

    case: str
    errors: dict[str, float] = field(default_factory=dict)
    ok: bool = False
    ms: float | None = None
    floor_ms: float | None = None
    bytes_per_second: float | None = None
    operations_per_second: float | None = None
    fraction: float | None = None
    bound: str = ""
    target: float | None = None
    note: str = ""


def describe() -> Machine:
    properties = torch.cuda.get_device_properties(0)
    machine = Machine(
        properties.name,
        lang.gpu(),
        properties.total_memory,
        str(datetime.date.today()),
        torch.__version__,
        triton.__version__,
    )
    machine.copy_bytes_per_second = copy_rate(2 << 30)
    machine.matmul_per_second = matmul_rate(8192)
    return machine


def copy_rate(size: int) -> float:
    """Bytes read and written a second."""
    source = torch.empty(size, dtype=torch.uint8, device=DEVICE).random_()
    target = torch.empty_like(source)
    return 2 * size / (milliseconds([lambda: target.copy_(source)]) / 1e3)


def matmul_rate(size: int) -> float:
    """Operations a second of a square bfloat16 product of random numbers."""
    a, b = (torch.randn(size, size, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / (milliseconds([lambda: a @ b]) / 1e3)


def milliseconds(calls: list[Any], seconds: float = 0.25) -> float:
    """Median time of one of `calls`, which take turns, captured as a graph where that is possible."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
        replay = graph.replay
    except RuntimeError:
        torch.cuda.synchronize()

        def replay() -> None:
            for call in calls:
                call()

    times: list[float] = []
    begun = time.perf_counter()
    while len(times) < 5 or (time.perf_counter() - begun < seconds and len(times) < 200):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / len(calls))
    return sorted(times)[len(times) // 2]


def check(case: Case, dtype: torch.dtype) -> float:
    """Largest relative error over all outputs of a case against the torch twin on the same inputs."""
    draw = Draw(torch.device(DEVICE), dtype, CHECK_EXPERTS, seed=1)
    inputs = case.make(draw)
    twin = {**inputs, **{name: inputs[name].clone() for name in case.in_place}}
    found = outputs(case, case.twin("kernel")(**inputs), inputs)
    expected = outputs(case, case.twin("reference")(**twin), twin)
    return max(relative(a, b) for a, b in zip(found, expected, strict=True))


def outputs(case: Case, result: Any, inputs: dict[str, Any]) -> list[torch.Tensor]:
    if isinstance(result, tuple):  # routing: the order of the experts is free
        ids, weights = result
        result = weights.new_zeros(inputs["logits"].shape).scatter_add_(1, ids, weights)
    return [result, *(inputs[name] for name in case.in_place)]


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    size = expected.double().norm().item()
    error = (found.double() - expected.double()).norm().item() / (size or 1.0)
    return error if error == error else float("inf")


def measure(case: Case, machine: Machine, result: Result) -> None:
    """Time a case in bfloat16 on several sets of inputs, and compare with its floor."""
    draw = Draw(torch.device(DEVICE), torch.bfloat16)
    number = max(2, min(MOST_SETS, int(CACHED_BYTES // case.floor_bytes) + 1))
    sets = [case.make(draw) for _ in range(number)]
    function = case.twin("kernel")
    result.ms = milliseconds([lambda inputs=inputs: function(**inputs) for inputs in sets])
    of_memory = case.floor_bytes / machine.copy_bytes_per_second * 1e3
    of_matrices = case.operations / machine.matmul_per_second * 1e3
    result.floor_ms = max(of_memory, of_matrices)
    result.bytes_per_second = case.floor_bytes / (result.ms / 1e3)
    result.operations_per_second = case.operations / (result.ms / 1e3)
    result.fraction = (of_memory if case.bound == "memory" else of_matrices) / result.ms


def run(options: argparse.Namespace) -> dict[str, Any]:
    deadline = time.monotonic() + options.seconds
    machine = describe()
    print(
        f"{machine.date}: {machine.name} ({machine.generation}), torch {machine.torch}, triton {machine.triton}; copy "
        f"{machine.copy_bytes_per_second / 1e12:.2f} TB/s, bfloat16 matmul {machine.matmul_per_second / 1e12:.0f} TFLOP/s",
        flush=True,
    )
    cases = [case for case in all_cases() if options.only in case.name]
    results = [Result(case.name, bound=case.bound, target=case.target) for case in cases]
    for case, result in zip(cases, results, strict=True):
        attempt(
            case, result, deadline, "bfloat16", lambda case=case, result=result: judged(case, result, torch.bfloat16)
        )
        if result.ok:
            attempt(case, result, deadline, "time", lambda case=case, result=result: measure(case, machine, result))
        print(line(result), flush=True)
    document: dict[str, Any] = {"machine": asdict(machine), "others": [], "model": None}
    if time.monotonic() < deadline:
        document["others"] = other_implementations(milliseconds, options.only)
    if not options.no_model and time.monotonic() < deadline - 45:
        document["model"] = run_model(deadline)
    seen: set[str] = set()
    for case, result in zip(cases, results, strict=True):  # once per kernel: the arithmetic is that of bfloat16
        if (case.kernel, case.function) not in seen and time.monotonic() < deadline:
            seen.add((case.kernel, case.function))
            attempt(
                case, result, deadline, "float32", lambda case=case, result=result: judged(case, result, torch.float32)
            )
    document["cases"] = [asdict(result) for result in results]
    document["ok"] = all(result.ok for result in results)
    report(document, results)
    return document


def judged(case: Case, result: Result, dtype: torch.dtype) -> None:
    error = check(case, dtype)
    result.errors[str(dtype).removeprefix("torch.")] = error
    result.ok = all(found <= BOUNDS[getattr(torch, name)] for name, found in result.errors.items())


def attempt(case: Case, result: Result, deadline: float, what: str, action: Any) -> None:
    """Do it if there is time; a failure is noted, and the other cases go on."""
    if time.monotonic() > deadline:
        result.note += f" no time for {what};"
        return
    try:
        action()
        torch.cuda.synchronize()
    except Exception as error:  # one broken kernel must not hide the others
        result.ok = False
        result.note += f" {what}: {type(error).__name__}: {str(error)[:300]};"
    gc.collect()
    torch.cuda.empty_cache()


def line(result: Result) -> str:
    errors = " ".join(f"{name} {error:.1e}" for name, error in result.errors.items())
    text = f"{result.case:44s} {'ok ' if result.ok else 'BAD'} {errors:34s}"
    if result.ms is not None and result.floor_ms is not None and result.fraction is not None:
        text += f" {result.ms:9.4f} ms, floor {result.floor_ms:9.4f}, {result.fraction:5.0%} of {result.bound}"
        if result.target:
            text += f" (goal {result.target:.0%}{'' if result.fraction >= result.target else ', missed'})"
    return text + result.note


def report(document: dict[str, Any], results: list[Result]) -> None:
    print("\ncase | error bf16 | error fp32 | ms | floor ms | of the ceiling | goal")
    print("--- | --- | --- | --- | --- | --- | ---")
    for result in results:
        numbers = [result.errors.get("bfloat16"), result.errors.get("float32")]
        cells = [result.case, *("" if n is None else f"{n:.1e}" for n in numbers)]
        cells += ["" if n is None else f"{n:.4f}" for n in (result.ms, result.floor_ms)]
        cells.append("" if result.fraction is None else f"{result.fraction:.0%} {result.bound}")
        cells.append("" if result.target is None else f"{result.target:.0%}")
        print(" | ".join(cells) + ("" if result.ok else " | WRONG" + result.note))
    for other in document["others"]:
        print(f"{other['name']}: {other['text']}")
    if document["model"]:
        print(document["model"]["text"])
    print("all kernels agree with their references" if document["ok"] else "SOME KERNELS ARE WRONG OR DID NOT RUN")


def main() -> int:
    parser = argparse.ArgumentParser(description="Check and time every Triton kernel on the GPU at hand.")
    parser.add_argument("--json", type=Path, help="write everything to this file")
    parser.add_argument("--seconds", type=float, default=330.0, help="start nothing after this time")
    parser.add_argument("--only", default="", help="cases whose name holds this text")
    parser.add_argument("--no-model", action="store_true", help="leave out the synthetic model")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("error: no GPU is visible to torch", file=sys.stderr)
        return 14
    with torch.inference_mode():
        document = run(options)
    if options.json:
        options.json.write_text(json.dumps(document, indent=1))
    return 0 if document["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
