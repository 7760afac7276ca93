"""How fast is GGUF written from MXFP4 experts of the release's shape, against copying the same bytes, and in what memory?

    python benchmarks/write_gguf.py [--gigabytes 8] [--repeats 2] [--folder DIR] [--json FILE]

One MoE layer of true widths (experts 3072 x 3584, latent 3584) with as many experts as fill the size. In turns: a copy
of the shards with fsync, as k3tool writes; `k3tool quantize --format gguf`; the same with a Q8_0 trunk. Beside them the
peer's way, numpy re-pairing and the `gguf` package's writer, which holds the whole result (its first GiB only), and what
re-pairing alone takes. Peak memory is that of the process. Every expert block is compared with the source before a speed
is printed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from machine import GB, describe, sha256_rate, timed

from k3tool.checkpoint.reader import Checkpoint
from k3tool.gguf import blocks, compiled
from k3tool.synthetic import tiny_config, write_checkpoint

EXPERT_BYTES = 3 * 3072 * 3584 * 17 // 32
PEER_BYTES = 1 << 30
WRITE = """
import json, sys, time
from k3tool.gguf import write_gguf
from k3tool.memory import peak_bytes
begun = time.perf_counter()
write_gguf(sys.argv[1], sys.argv[2], trunk=sys.argv[3], max_shard_size=500_000_000)  # several files, several workers
print(json.dumps({"seconds": time.perf_counter() - begun, "peak_bytes": peak_bytes()}))
"""
PEER = """
import json, resource, sys, time
import gguf, numpy as np
from k3tool.checkpoint.reader import Checkpoint
from k3tool.gguf import blocks
source, target, experts = Checkpoint.open(sys.argv[1]), sys.argv[2], int(sys.argv[3])
begun = time.perf_counter()
writer = gguf.GGUFWriter(target, "kimi-k3")
for role, matrix in (("gate", "w1"), ("down", "w2"), ("up", "w3")):
    stack = []
    for e in range(experts):
        name = f"language_model.model.layers.1.block_sparse_moe.experts.{e}.{matrix}"
        packed = np.frombuffer(source.read(name + ".weight_packed"), np.uint8).reshape(-1, 16)
        rows = source.locate(name + ".weight_packed").spec.shape[0]
        scale = np.frombuffer(source.read(name + ".weight_scale"), np.uint8)
        stack.append(blocks.repack(packed, scale).reshape(rows, -1))
    writer.add_tensor(f"blk.1.ffn_{role}_exps.weight", np.stack(stack), raw_dtype=gguf.GGMLQuantizationType.MXFP4)
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()
peak = next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(json.dumps({"seconds": time.perf_counter() - begun, "peak_bytes": peak}))
"""


def copy(source: Path, target: Path) -> None:
    target.mkdir()
    for path in sorted(source.glob("*.safetensors")):
        shutil.copyfile(path, target / path.name)
        with open(target / path.name, "rb") as file:
            os.fsync(file.fileno())


def in_process(code: str, *arguments: object) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


def check(source: Path, written: Path, experts: int) -> int:
    """Every expert block of the file against the source's codes and scales. Returns how many matrices."""
    import gguf

    checkpoint = Checkpoint.open(source)
    found = {t.name: t for path in written.glob("*.gguf") for t in gguf.GGUFReader(path).tensors}
    for role, matrix in (("gate", "w1"), ("down", "w2"), ("up", "w3")):
        stacked = found[f"blk.1.ffn_{role}_exps.weight"].data
        for e in range(experts):
            name = f"language_model.model.layers.1.block_sparse_moe.experts.{e}.{matrix}"
            packed = np.frombuffer(checkpoint.read(name + ".weight_packed"), np.uint8).reshape(-1, 16)
            scale = np.frombuffer(checkpoint.read(name + ".weight_scale"), np.uint8)
            if not np.array_equal(np.asarray(stacked[e]).reshape(-1, 17), blocks.repack(packed, scale)):
                sys.exit(f"{name} differs from its source")
    return 3 * experts


def repack_rate() -> float:
    """Source bytes a second of re-pairing one matrix in memory, one thread."""
    rng = np.random.default_rng(0)
    packed = rng.integers(0, 256, (3072 * 112, 16), dtype=np.uint8)
    scale, out = packed[:, 0].copy(), np.empty((3072 * 112, 17), np.uint8)
    compiled.repack(packed, scale, out)
    return (packed.nbytes + scale.nbytes) / min(timed(lambda: compiled.repack(packed, scale, out)) for _ in range(20))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=8)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="keep the checkpoint here and use it again; results go beside it")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    experts = min(1024, max(4, int(options.gigabytes * 2**30 / EXPERT_BYTES)))
    document = tiny_config(
        num_layers=2, hidden_size=1024, vocab_size=4096, kda_heads=8, kda_head_dim=128, mla_heads=8, num_experts=experts,
        experts_per_token=4, moe_intermediate_size=3072, latent_size=3584, intermediate_size=2048, vision=False,
        qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, kv_lora_rank=512, q_lora_rank=512,
    )  # fmt: skip
    print(describe("k3tool", "numpy", "numba", "gguf"))
    with tempfile.TemporaryDirectory(dir=options.folder.parent if options.folder else None) as scratch_name:
        scratch = Path(scratch_name)
        source = options.folder or scratch / "checkpoint"
        if not (source / "config.json").exists():
            write_checkpoint(source, document, seed=1)
        size = sum(path.stat().st_size for path in source.glob("*.safetensors"))
        print(f"{size / GB:.2f} GB: {experts} experts in one layer; {options.repeats} turns, the best counts")
        result = measure(source, scratch, size, experts, options.repeats)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1))


def measure(source: Path, scratch: Path, size: int, experts: int, repeats: int) -> dict[str, Any]:
    rows: dict[str, dict[str, float]] = {}

    def run(name: str, work: Callable[[Path], dict[str, Any]], nbytes: int) -> None:
        target = scratch / "out"
        begun = time.perf_counter()
        found = work(target)
        seconds = found.get("seconds", time.perf_counter() - begun)
        if name == "k3tool, trunk bf16" and name not in rows:
            print(
                f"check: {check(source, target, experts)} expert matrices hold the source's codes and scales, bit for bit"
            )
        kept = rows.setdefault(
            name, {"seconds": float("inf"), "bytes": nbytes, "peak_bytes": found.get("peak_bytes", 0)}
        )
        kept["seconds"] = min(kept["seconds"], seconds)
        shutil.rmtree(target) if target.is_dir() else target.unlink()

    few = min(experts, PEER_BYTES // EXPERT_BYTES)
    for _ in range(repeats):
        run("copy with fsync", lambda target: copy(source, target) or {}, size)
        run("k3tool, trunk bf16", lambda target: in_process(WRITE, source, target, "bf16"), size)
        run("k3tool, trunk q8_0", lambda target: in_process(WRITE, source, target, "q8_0"), size)
    run("numpy and gguf's writer", lambda target: in_process(PEER, source, target, few), few * EXPERT_BYTES)
    speed = {name: row["bytes"] / row["seconds"] for name, row in rows.items()}
    print(f"{'':<26}{'GB/s':>8}{'of copy':>10}{'peak MB':>10}")
    for name, row in rows.items():
        share = speed[name] / speed["copy with fsync"]
        peak = f"{row['peak_bytes'] / 1e6:10.0f}" if row["peak_bytes"] else ""
        print(f"{name:<26}{speed[name] / GB:8.2f}{share:10.2f}{peak}")
    digest, repack = sha256_rate(1, 256 << 20), repack_rate()
    print(
        f"in memory, one thread: re-pairing {repack / GB:.1f} GB/s, SHA-256 {digest / GB:.2f} GB/s (every file is hashed)"
    )
    return {"rows": rows, "repack_bytes_per_second": repack, "sha256_bytes_per_second": digest, "experts": experts}


if __name__ == "__main__":
    main()
