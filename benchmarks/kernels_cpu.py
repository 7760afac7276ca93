"""How close do the compiled CPU kernels come to what memory and arithmetic allow?

    python benchmarks/kernels_cpu.py [--threads N] [--seconds 0.3] [--json FILE]

Checks each kernel against its torch twin first, then measures kernel and twin in turns on weights that do not fit in
cache, and prints both beside the floor: for one token the weight bytes over the measured read rate, for many the operations
over torch's float32 matrix rate. Shapes are those of the released model's experts and of a mid-size model.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from machine import GB, describe, timed
from torch import Tensor

from k3tool.kernels import cpu as compiled
from k3tool.kernels.cpu import pool
from k3tool.kernels.dispatch import use
from k3tool.kernels.linear import linear
from k3tool.kernels.moe import PackedExperts, experts_forward
from k3tool.kernels.mxfp4 import decode_values

COLD_BYTES = 96 << 20  # weights of one measurement: several times a last-level cache share


@dataclass
class Line:
    """One row of the table; rates in GB/s of stored weights or in GFLOP/s."""

    kernel: str
    unit: str
    compiled: float
    torch: float
    floor: float


def best(work: Callable[[], object], seconds: float) -> float:
    """Least seconds of repeated runs."""
    least, end = timed(work), time.perf_counter() + seconds
    while time.perf_counter() < end:
        least = min(least, timed(work))
    return least


def compare(found: Tensor, wanted: Tensor, name: str) -> None:
    error = ((found.double() - wanted.double()).norm() / wanted.double().norm()).item()
    if not error < 4e-3:  # of bfloat16 results that fall on the other side of a tie here and there
        raise SystemExit(f"{name}: differs from its twin by {error:.1e}")


def both(name: str, unit: str, amount: float, floor: float, work: Callable[[], Tensor], seconds: float) -> Line:
    """Check, then measure the compiled and the torch twin."""
    found = work()
    with use("reference"):
        compare(found, work(), name)
        slow = best(work, seconds)
    return Line(name, unit, amount / best(work, seconds) / GB, amount / slow / GB, floor / GB)


def packed_experts(experts: int, inner: int, wide: int) -> PackedExperts:
    def codes(*shape: int) -> Tensor:
        return torch.randint(0, 256, shape, dtype=torch.uint8)

    def scales(*shape: int) -> Tensor:
        return torch.randint(118, 123, shape, dtype=torch.uint8)

    return PackedExperts(
        codes(experts, inner, wide // 2), scales(experts, inner, wide // 32),
        codes(experts, inner, wide // 2), scales(experts, inner, wide // 32),
        codes(experts, wide, inner // 2), scales(experts, wide, inner // 32),
    )  # fmt: skip


def linear_lines(read: float, rate: float, seconds: float) -> list[Line]:
    lines = []
    for rows, columns in ((1024, 1024), (8192, 2048), (7168, 7168)):
        count = max(1, COLD_BYTES // (2 * rows * columns))
        weights = [torch.randn(rows, columns).bfloat16() for _ in range(count)]
        x = torch.randn(1, columns).bfloat16()
        name = f"linear 1 x {columns} -> {rows} bfloat16"
        amount = sum(weight.nbytes for weight in weights)
        lines.append(both(name, "GB/s", amount, read, lambda w=weights, x=x: [linear(x, m) for m in w][-1], seconds))
        for tokens in (16, 128, 512):
            x = torch.randn(tokens, columns).bfloat16()
            name = f"linear {tokens} x {columns} -> {rows} bfloat16"
            operations = 2.0 * tokens * rows * columns
            lines.append(both(name, "GFLOP/s", operations, rate, lambda w=weights, x=x: linear(x, w[0]), seconds))
    return lines


def expert_lines(read: float, rate: float, seconds: float) -> list[Line]:
    lines = []
    for experts, inner, wide, top_k in ((64, 512, 512, 8), (24, 1024, 1024, 16), (16, 3072, 3584, 8)):
        layer = packed_experts(experts, inner, wide)
        for tokens in (1, 128):
            x = torch.randn(tokens, wide).bfloat16()
            ids = torch.rand(tokens, experts).argsort(1)[:, :top_k].contiguous()
            weights = torch.rand(tokens, top_k)
            name = f"experts {tokens} x top {top_k} of {experts}, {wide} x {inner} MXFP4"
            work = lambda x=x, layer=layer, ids=ids, weights=weights: experts_forward(x, layer, ids, weights)  # noqa: E731
            if tokens == 1:
                lines.append(both(name, "GB/s", layer.nbytes * top_k / experts, read, work, seconds))
            else:
                lines.append(both(name, "GFLOP/s", 6.0 * tokens * top_k * inner * wide, rate, work, seconds))
    return lines


def decode_lines(read: float, seconds: float) -> list[Line]:
    packed = torch.randint(0, 256, (3072, 1792), dtype=torch.uint8)
    scale = torch.randint(118, 123, (3072, 112), dtype=torch.uint8)
    lines = []
    for dtype in (torch.bfloat16, torch.float32):
        out = torch.empty(3072, 3584, dtype=dtype)
        stored = packed.nbytes + scale.nbytes
        floor = read * stored / (stored + 2 * out.nbytes)  # written lines are read first
        name = f"decode 3072 x 3584 MXFP4 -> {str(dtype).removeprefix('torch.')}"
        work = lambda out=out, dtype=dtype: decode_values(packed, scale, dtype, out=out)  # noqa: E731
        lines.append(both(name, "GB/s", stored, floor, work, seconds))
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--seconds", type=float, default=0.3, help="of each measurement")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    if not compiled.available():
        raise SystemExit("compiled kernels are not available here")
    print(describe("k3tool", "torch", "llvmlite"))
    large, square = torch.ones(128 << 20), torch.ones(1024, 1024)
    read = large.nbytes / best(large.sum, 1.0)
    rate = 2 * 1024.0**3 / best(lambda: square @ square, 1.0)
    del large
    print(
        f"threads: {pool.shared().threads}; memory reads at {read / GB:.1f} GB/s, torch float32 products at {rate / GB:.0f} GFLOP/s"
    )
    torch.set_num_threads(1)  # as `run` does: torch's threads and the kernels' would fight
    lines = [
        *linear_lines(read, rate, options.seconds),
        *expert_lines(read, rate, options.seconds),
        *decode_lines(read, options.seconds),
    ]
    print(f"{'kernel':<52}{'unit':>9}{'compiled':>10}{'floor':>8}{'of it':>7}{'torch twin, 1 thread':>22}")
    for line in lines:
        print(
            f"{line.kernel:<52}{line.unit:>9}{line.compiled:10.1f}{line.floor:8.1f}{line.compiled / line.floor:7.0%}{line.torch:22.1f}"
        )
    if options.json:
        options.json.write_text(json.dumps([asdict(line) for line in lines], indent=1))


if __name__ == "__main__":
    main()
