"""The process in which `gpu.py` checks and times kernels: one job a line on stdin, one answer a line on stdout.

A job fails by itself: its answer then holds `problem`, and `is_lost` where the GPU's context went with it, so that this
process can do nothing more. Times are of kernels in a CUDA graph, the median over replays, with enough different inputs
that they do not come from the cache.
"""

from __future__ import annotations

import datetime
import gc
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import triton

from k3tool.kernels import lang
from k3tool.kernels.cases import RELEASED, TINY, Case, Draw, Sizes, all_cases
from k3tool.kernels.router.ties import same_where_tied

MARK = "@@ "
BOUNDS = {torch.float32: 1e-4, torch.bfloat16: 1.5e-2}
"""Norm of the difference over the norm of the reference. float32 sums in another order, on three TF32 products each;
bfloat16 operands of matrix units, rounded several times in a row."""
CHECK_EXPERTS = 64  # the reference decodes every visited expert
CACHED_BYTES = 512 << 20  # inputs of timed calls together, several times any second-level cache
MOST_SETS = 64
MOST_ERROR = sys.float_info.max  # stands for what is no number


class Bench:
    """Where work is done and at which sizes: the released ones on the GPU, tiny ones interpreted on the CPU."""

    def __init__(self, device: torch.device, sizes: Sizes) -> None:
        self.device, self.sizes = device, sizes
        self.is_gpu = device.type == "cuda"

    def synchronize(self) -> None:
        if self.is_gpu:
            torch.cuda.synchronize()

    def answer(self, job: dict[str, Any]) -> dict[str, Any]:
        """Do one job; whatever it raises becomes part of the answer."""
        try:
            found = getattr(self, job.pop("do"))(**job)
            self.synchronize()
        except Exception as error:
            found = {"problem": f"{type(error).__name__}: {str(error).strip()[:300]}", "is_lost": not self.is_alive()}
        gc.collect()
        if self.is_gpu and not found.get("is_lost"):
            torch.cuda.empty_cache()
        return found

    def is_alive(self) -> bool:
        """Does the context still work? After an illegal access nothing does."""
        try:
            self.synchronize()
            return bool((torch.ones(8, device=self.device) * 2).sum() == 16)
        except RuntimeError:
            return False

    def machine(self) -> dict[str, Any]:
        """The card and its two ceilings, measured here."""
        if self.is_gpu and not torch.cuda.is_available():
            return {"problem": "no GPU is visible to torch", "no_gpu": True}
        properties = torch.cuda.get_device_properties(0) if self.is_gpu else None
        return {
            "name": properties.name if properties else "no GPU: interpreted on the CPU",
            "generation": lang.gpu(),
            "memory_bytes": properties.total_memory if properties else 0,
            "date": str(datetime.date.today()),
            "torch": torch.__version__,
            "triton": triton.__version__,
            "copy_bytes_per_second": self.copy_rate(2 << 30 if self.is_gpu else 1 << 20),
            "matmul_per_second": self.matmul_rate(8192 if self.is_gpu else 128),
        }

    def copy_rate(self, size: int) -> float:
        """Bytes read and written a second."""
        source = torch.empty(size, dtype=torch.uint8, device=self.device).random_()
        target = torch.empty_like(source)
        return 2 * size / (self.milliseconds([lambda: target.copy_(source)]) / 1e3)

    def matmul_rate(self, size: int) -> float:
        """Operations a second of a square bfloat16 product of random numbers."""
        a, b = (torch.randn(size, size, device=self.device, dtype=torch.bfloat16) for _ in range(2))
        return 2 * size**3 / (self.milliseconds([lambda: a @ b]) / 1e3)

    def milliseconds(self, calls: list[Callable[[], Any]], seconds: float = 0.25) -> float:
        """Median time of one of `calls`, which take turns, captured as a graph where that is possible."""
        if not self.is_gpu:
            begun = time.perf_counter()
            calls[0]()
            return (time.perf_counter() - begun) * 1e3
        for call in calls[:2]:
            call()
        torch.cuda.synchronize()
        replay = _captured(calls) or (lambda: [call() for call in calls])
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

    def case(self, name: str, dtype: str, machine: dict[str, Any]) -> dict[str, Any]:
        """Compare with the torch twin; in bfloat16, if they agree, also time it."""
        case = next(case for case in all_cases(self.sizes) if case.name == name)
        kind = getattr(torch, dtype)
        error = self.check(case, kind)
        answer: dict[str, Any] = {"errors": {dtype: error}, "ok": error <= BOUNDS[kind]}
        if answer["ok"] and kind == torch.bfloat16:
            try:
                answer["times"] = self.measure(case, machine)
            except Exception as problem:  # that it is right is known
                text = f"{type(problem).__name__}: {str(problem).strip()[:300]}"
                answer |= {"problem": f"not timed, {text}", "is_lost": not self.is_alive()}
        return answer

    def check(self, case: Case, dtype: torch.dtype) -> float:
        """Largest relative error over all outputs of a case against the torch twin on the same inputs."""
        inputs = case.make(Draw(self.device, dtype, sizes=self.sizes, num_experts=self._checked_experts(), seed=1))
        twin = {**inputs, **{name: inputs[name].clone() for name in case.in_place}}
        expected = case.twin("reference")(**twin)
        found = case.twin("kernel")(**inputs)
        if isinstance(found, tuple):
            found, expected = same_where_tied(found, expected, inputs["logits"], inputs["bias"], inputs["activation"])
        pairs = [(found, expected), *((inputs[name], twin[name]) for name in case.in_place)]
        return max(relative(*pair) for pair in pairs)

    def _checked_experts(self) -> int:
        return min(CHECK_EXPERTS, self.sizes.experts)

    def measure(self, case: Case, machine: dict[str, Any]) -> dict[str, float]:
        """Time a case in bfloat16 on several sets of inputs, and compare with its floor: the larger of bytes over copy
        bandwidth and operations over the matmul rate."""
        gc.collect()
        if self.is_gpu:
            torch.cuda.empty_cache()  # of the comparison before
        draw = Draw(self.device, torch.bfloat16, sizes=self.sizes)
        number = max(2, min(MOST_SETS, int(CACHED_BYTES // case.floor_bytes) + 1)) if self.is_gpu else 2
        sets = [case.make(draw) for _ in range(number)]
        function = case.twin("kernel")
        ms = self.milliseconds([lambda inputs=inputs: function(**inputs) for inputs in sets])
        of_memory = case.floor_bytes / machine["copy_bytes_per_second"] * 1e3
        of_matrices = case.operations / machine["matmul_per_second"] * 1e3
        return {
            "ms": ms,
            "floor_ms": max(of_memory, of_matrices),
            "bytes_per_second": case.floor_bytes / (ms / 1e3),
            "operations_per_second": case.operations / (ms / 1e3),
            "fraction": (of_memory if case.bound == "memory" else of_matrices) / ms,
        }

    def other(self, name: str) -> dict[str, Any]:
        """Another implementation on the same inputs, where it is installed."""
        from gpu_others import compare

        return compare(name, self.device, self.sizes, self.milliseconds)

    def model(self, machine: dict[str, Any], seconds: float) -> dict[str, Any]:
        """A synthetic model end to end."""
        from gpu_model import run_model

        return run_model(self.device, machine, seconds)


def _captured(calls: list[Callable[[], Any]]) -> Callable[[], Any] | None:
    """The calls as one graph, or nothing where they cannot be captured."""
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            for call in calls:
                call()
    except RuntimeError:
        torch.cuda.synchronize()
        return None
    return graph.replay


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return MOST_ERROR
    size = expected.double().norm().item()
    error = (found.double() - expected.double()).norm().item() / (size or 1.0)
    return min(error, MOST_ERROR) if error == error else MOST_ERROR


def main() -> int:
    is_tiny = "--tiny" in sys.argv
    bench = Bench(torch.device("cpu" if is_tiny else "cuda"), TINY if is_tiny else RELEASED)
    for text in sys.stdin:
        with torch.inference_mode():
            answer = bench.answer(json.loads(text))
        print(MARK + json.dumps(answer), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
