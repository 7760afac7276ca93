"""How close is `k3tool verify --depth bytes` to the floor, min(cold read, SHA-256 of all cores)?

    python benchmarks/verify.py [--size 4GiB] [--folder DIR]

Writes a checkpoint-shaped folder (a real header per shard, random data), has the system forget its data before every run
(programs stay as warm as they were), and measures in one run: the floors, k3tool, `hf cache verify`, and `xargs -P` over `openssl sha256`.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from machine import GB, describe, forget, peak_memory, random_file, read_rate, sha256_rate

from k3tool.catalog import catalog
from k3tool.checkpoint.header import build_header
from k3tool.checkpoint.index import INDEX_NAME, build_index
from k3tool.checkpoint.manifest import FileRecord, Manifest
from k3tool.config import K3Config
from k3tool.standin import serve
from k3tool.synthetic import tiny_config
from k3tool.units import parse_size

REPO = "moonshotai/Kimi-K3"


def make(folder: Path, size: int) -> None:
    """A conforming checkpoint of about `size` bytes: experts of the release's shapes, no meaning."""
    import json

    experts = max(4, round(size / (8 * 3 * 3072 * 3584 * 17 / 32)))
    config = tiny_config(num_layers=9, hidden_size=256, num_experts=experts, experts_per_token=4,
                         moe_intermediate_size=3072, latent_size=3584)  # fmt: skip
    layout = catalog(K3Config.from_dict(config))
    weight_map = {entry.name: layout.shards[entry.shard] for entry in layout.entries}
    for number, name in enumerate(layout.shards):
        entries = [entry for entry in layout.entries if entry.shard == number]
        head, header = build_header((entry.name, entry.dtype, entry.shape) for entry in entries)
        random_file(folder / name, header.file_size)
        with open(folder / name, "r+b") as file:
            file.write(head)
    (folder / INDEX_NAME).write_bytes(build_index(weight_map, layout.total_size))
    (folder / "config.json").write_text(json.dumps(config))
    files = {}
    for path in sorted(folder.iterdir()):
        with open(path, "rb") as file:
            files[path.name] = FileRecord(path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest())
    Manifest("fetch", REPO, files=files).write(folder)


def run(command: list[str], folder: Path, environment: dict[str, str]) -> tuple[float, float]:
    """Seconds of wall time and MiB of peak resident memory of one cold run."""
    forget(folder)
    begun = time.perf_counter()
    with open(folder.with_suffix(".log"), "w+") as log:
        process = subprocess.Popen(command, cwd=folder, env={**os.environ, **environment}, stdout=log, stderr=log)
        peak = 0.0
        while process.poll() is None:
            peak = max(peak, peak_memory(process.pid))
            time.sleep(0.01)
        seconds = time.perf_counter() - begun
        log.seek(0)
        if process.returncode:
            raise SystemExit(f"{command} ended with {process.returncode}: {log.read()[-500:]}")
    return seconds, peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", default="4GiB")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    print(describe("k3tool", "huggingface_hub"))
    folder = Path(tempfile.mkdtemp(prefix="k3bench-", dir=options.folder))
    try:
        make(folder, parse_size(options.size))
        shards = sorted(folder.glob("*.safetensors"))
        total = sum(path.stat().st_size for path in shards)
        cold = forget(folder)
        print(
            f"{len(shards)} shards, {total / GB:.2f} GB, page cache {'without them before every run' if cold else 'WARM: this system cannot forget'}"
        )
        cores = os.cpu_count() or 1
        hashing = sha256_rate(cores)
        measure(folder, shards, total, cores, hashing, options.repeat)
    finally:
        shutil.rmtree(folder)


def measure(folder: Path, shards: list[Path], total: int, cores: int, hashing: float, repeat: int) -> None:
    names = [path.name for path in shards]
    peers = {
        "k3tool verify": [sys.executable, "-m", "k3tool", "verify", ".", "--depth", "bytes", "--full", "-q"],
        "hf cache verify": [str(Path(sys.executable).with_name("hf")), "cache", "verify", REPO, "--local-dir", "."],
        "xargs openssl": ["sh", "-c", f"printf '%s\\n' {' '.join(names)} | xargs -P {cores} -n 1 openssl sha256"],
    }
    best = dict.fromkeys(["cold read", *peers], 0.0)
    peak = dict.fromkeys(peers, 0.0)
    with serve(folder, REPO) as hub:
        environment = {"HF_ENDPOINT": hub.endpoint, "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HOME": str(folder / ".hf")}
        for _ in range(repeat):
            forget(folder)
            best["cold read"] = max(best["cold read"], read_rate(shards, cores + 2))
            for name, command in peers.items():
                seconds, memory = run(command, folder, environment)
                best[name], peak[name] = max(best[name], total / seconds), max(peak[name], memory)
    floor = min(best["cold read"], hashing)
    print(f"floor: min(cold read {best['cold read'] / GB:.2f} GB/s, SHA-256 of {cores} cores {hashing / GB:.2f} GB/s)")
    for name in peers:
        print(
            f"{name:16} {best[name] / GB:6.2f} GB/s  {best[name] / floor:5.2f} of the floor  peak {peak[name]:.0f} MiB"
        )


if __name__ == "__main__":
    main()
