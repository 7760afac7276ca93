"""How fast are experts converted end to end, compared with `cp` of the same bytes and with other libraries?

    python benchmarks/quantize.py [--size 8GiB] [--folder DIR] [--keep] [--schemes nvfp4,int8,...] [--runs 1]
                                  [--peers N] [--llmcompressor PYTHON]

Writes a checkpoint with experts of the true shapes (3072 x 3584, MXFP4). Then, turn about, copies it with cp and
quantizes it by the command line in a process of its own, interpreter start included: the source out of the page cache
before each, fsync inside both; a scheme is compared with the mean of the copies before and after it. Every result is checked before its speed counts: the report must say what the format
promises. GB/s are source bytes per second of wall time; "moved" compares bytes read and written together, which is the
floor of a scheme that writes more than it reads; memory is the whole process's.

Peers convert the same bytes, N matrices of them, one after the other, from file to file: compressed-tensors
(decompress, then compress), bitsandbytes (the same and `quantize_4bit`) and, in a Python of its own, llm-compressor's
`model_free_ptq`. k3tool on exactly these matrices stands beside them.
--keep leaves the source in --folder for a later command.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from machine import GB, describe, forget
from quantize_peers import EXACT, Outcome, peers

SCHEMES = ("nvfp4", "int8", "fp8-block", "fp8-channel", "int4", "nf4", "fp4", "bf16", "mxfp4")
GOAL = {"nvfp4": 0.7}
EXPERT_BYTES = 3 * (3072 * 3584 // 2 + 3072 * 3584 // 32)


def write_source(folder: Path, size: int) -> None:
    from k3tool.synthetic import tiny_config, write_checkpoint

    experts = max(4, round(size / EXPERT_BYTES))
    config = tiny_config(
        num_layers=2, hidden_size=256, kda_heads=2, mla_heads=2, num_experts=experts, moe_intermediate_size=3072,
        latent_size=3584, vision=False,
    )  # fmt: skip
    config["text_config"]["num_shared_experts"] = 0
    write_checkpoint(folder, config)


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def copied(source: Path, target: Path) -> float:
    """Seconds of cp and of making it durable: every file and the folder, as k3tool does."""
    forget(source)
    begun = time.perf_counter()
    subprocess.run(["cp", "-r", source, target], check=True)
    subprocess.run(["sync", *sorted(target.iterdir()), target], check=True)
    seconds = time.perf_counter() - begun
    shutil.rmtree(target)
    return seconds


def quantized(source: Path, target: Path, scheme: str) -> Outcome:
    forget(source)
    command = [sys.executable, "-m", "k3tool", "quantize", source, target, "--experts", scheme, "--json"]
    return Outcome.of([str(word) for word in command])


def check(document: dict[str, Any], scheme: str) -> float:
    """The relative error, after the promise of the scheme was checked."""
    experts = document["components"]["routed_experts"]
    if scheme == "mxfp4":
        assert experts["scheme"] == "keep" and document["bytes_in"] == document["bytes_out"]
        return 0.0
    if scheme in EXACT:
        assert experts["exact_tensors"] == experts["tensors"], f"{scheme} is not exact"
    else:
        assert 0.01 < experts["relative_error"] < 0.13, f"{scheme}: {experts['relative_error']}"
    return experts["relative_error"]


@dataclass(frozen=True)
class Turn:
    """One quantization: seconds, seconds of the copies before and after it, bytes written, peak memory, error."""

    seconds: float
    copies: tuple[float, float]
    written: int
    peak: int
    error: float

    @property
    def share(self) -> float:
        return sum(self.copies) / 2 / self.seconds


def measure(source: Path, folder: Path, schemes: list[str], runs: int) -> None:
    size = size_of(source)
    print(f"source: {size / GB:.2f} GB, {'cold' if forget(source) else 'warm'} page cache")
    print("\nscheme        GB/s   cp GB/s   of cp   goal   moved, of cp   GB out   peak MB   relative error")
    before = copied(source, folder / "copy")
    for scheme in schemes:
        turns: list[Turn] = []
        for _ in range(runs):
            outcome = quantized(source, folder / "made", scheme)
            written = size_of(folder / "made")
            shutil.rmtree(folder / "made")
            after = copied(source, folder / "copy")
            document = outcome.document
            error, peak = check(document, scheme), document["peak_memory_bytes"]
            turns.append(Turn(outcome.seconds, (before, after), written, peak, error))
            before = after
        turn = sorted(turns, key=lambda turn: turn.share)[len(turns) // 2]
        print(
            f"{scheme:12s} {size / turn.seconds / GB:5.2f}   {2 * size / sum(turn.copies) / GB:7.2f}   {turn.share:5.2f}   "
            f"{GOAL.get(scheme, 0.4):4.1f}   {turn.share * (size + turn.written) / (2 * size):12.2f}   "
            f"{turn.written / GB:6.2f}   {turn.peak / 1e6:7.0f}   {turn.error:.5f}",
            flush=True,
        )


def main() -> None:
    from k3tool.units import parse_size

    parser = argparse.ArgumentParser()
    parser.add_argument("--size", default="8GiB")
    parser.add_argument(
        "--folder", type=Path, help="where to work; a source that an earlier command kept is used again"
    )
    parser.add_argument("--keep", action="store_true", help="leave the source in --folder")
    parser.add_argument("--schemes", default=",".join(SCHEMES), help="comma-separated; empty: none")
    parser.add_argument("--runs", type=int, default=1, help="of each scheme; the median share of cp counts")
    parser.add_argument("--peers", type=int, default=4, metavar="N", help="matrices that peers convert; 0: no peers")
    parser.add_argument("--llmcompressor", type=Path, metavar="PYTHON", help="interpreter that has llm-compressor")
    options = parser.parse_args()
    print(describe("numpy", "numba", "torch", "compressed-tensors", "bitsandbytes"))
    print(f"{os.cpu_count()} cores")
    folder = options.folder or Path(tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    source = folder / "source"
    try:
        if not (source / "config.json").is_file():
            write_source(source, parse_size(options.size))
        schemes = [scheme for scheme in options.schemes.split(",") if scheme]
        if schemes:
            measure(source, folder, schemes, options.runs)
        if options.peers:
            peers(source, folder, options.peers, options.llmcompressor)
    finally:
        for name in ("copy", "made", "peers") + (() if options.keep else ("source",)):
            shutil.rmtree(folder / name, ignore_errors=True)
        if options.folder is None:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
