"""How fast is `k3tool fetch` with digests, against `hf download` (without xet) and `curl` of the same files on loopback?

    python benchmarks/fetch.py [--size 4GiB] [--folder DIR] [--workers 8] [--repeat 3]

A checkpoint-shaped folder is served by the stand-in from a process of its own (bodies by sendfile). Every run starts
with an empty folder. Two times are told: until the command ends, and until everything is on disk (`sync` after it),
as only k3tool makes its files durable itself. The floor is what the slower of two parts needs: writing the bytes to
this disk, or SHA-256 with one core per worker.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from machine import GB, describe, peak_memory, random_file, sha256_rate, timed
from verify import REPO, make

from k3tool.checkpoint.manifest import MANIFEST_NAME
from k3tool.units import parse_size


def run(command: list[str], environment: dict[str, str], log: Path) -> tuple[float, float, float]:
    """Seconds until the command ended, seconds until its data is on disk, peak resident memory in MiB."""
    os.sync()
    begun = time.perf_counter()
    with open(log, "w+") as output:
        process = subprocess.Popen(command, env={**os.environ, **environment}, stdout=output, stderr=output)
        peak = 0.0
        while process.poll() is None:
            peak = max(peak, peak_memory(process.pid))
            time.sleep(0.02)
        seconds = time.perf_counter() - begun
        os.sync()
        durable = time.perf_counter() - begun
        if process.returncode:
            output.seek(0)
            raise SystemExit(f"{command} ended with {process.returncode}: {output.read()[-1000:]}")
    return seconds, durable, peak


def write_rate(folder: Path, size: int) -> float:
    """Bytes a second of writing one file, until it is on disk."""
    path = folder / "floor"

    def work() -> None:
        random_file(path, size)
        with open(path, "rb") as file:
            os.fsync(file.fileno())

    os.sync()
    rate = size / timed(work)
    path.unlink()
    return rate


def commands(endpoint: str, commit: str, names: list[str], target: Path, workers: int) -> dict[str, list[str]]:
    hf = str(Path(sys.executable).with_name("hf"))
    addresses = "\\n".join(f"{endpoint}/{REPO}/resolve/{commit}/{name} {target}/{name}" for name in names)
    curl = f"mkdir -p {target} && printf '{addresses}\\n' | xargs -P {workers} -n 2 sh -c 'curl -sSfL \"$0\" -o \"$1\"'"
    return {
        "k3tool fetch": [sys.executable, "-m", "k3tool", "fetch", REPO, "--local-dir", str(target), "-q", "--max-workers", str(workers)],
        "hf download": [hf, "download", REPO, "--local-dir", str(target), "--max-workers", str(workers), "--quiet"],
        "curl": ["sh", "-c", curl],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="4GiB")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    print(describe("k3tool", "huggingface_hub"))
    folder = Path(tempfile.mkdtemp(prefix="k3bench-", dir=options.folder))
    try:
        repository = folder / "repository"
        repository.mkdir()
        make(repository, parse_size(options.size))
        (repository / MANIFEST_NAME).unlink()
        measure(folder, repository, options.workers, options.repeat)
    finally:
        shutil.rmtree(folder)


def measure(folder: Path, repository: Path, workers: int, repeat: int) -> None:
    names = sorted(path.name for path in repository.iterdir())
    total = sum(path.stat().st_size for path in repository.iterdir())
    cores = min(workers, os.cpu_count() or 1)
    hashing, writing = sha256_rate(cores), max(write_rate(folder, min(total, 2 << 30)) for _ in range(2))
    floor = min(hashing, writing)
    print(f"{len(names)} files, {total / GB:.2f} GB, {workers} workers")
    print(f"floor: min(disk write {writing / GB:.2f} GB/s, SHA-256 of {cores} cores {hashing / GB:.2f} GB/s)")
    server = subprocess.Popen(
        [sys.executable, "-m", "k3tool.standin", str(repository), "--repo-id", REPO], stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout is not None
        endpoint = server.stdout.readline().strip().partition("=")[2]
        environment = {
            "HF_ENDPOINT": endpoint,
            "HF_HOME": str(folder / "hf"),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
        }
        target = folder / "target"
        best: dict[str, tuple[float, float, float]] = {}
        for _ in range(repeat):
            for name, command in commands(endpoint, "main", names, target, workers).items():
                shutil.rmtree(target, ignore_errors=True)
                seconds, durable, memory = run(command, environment, folder / "log")
                before = best.get(name, (1e9, 1e9, 0.0))
                best[name] = (min(before[0], seconds), min(before[1], durable), max(before[2], memory))
                _compare(repository, target, names)
    finally:
        server.terminate()
        server.wait()
    for name, (seconds, durable, memory) in best.items():
        print(
            f"{name:14} {total / seconds / GB:6.2f} GB/s  on disk {total / durable / GB:6.2f} GB/s, "
            f"{total / durable / floor:5.2f} of the floor  peak {memory:.0f} MiB"
        )
    ratio = best["hf download"][0] / best["k3tool fetch"][0]
    print(f"k3tool fetch is {ratio:.2f} times as fast as hf download, digests included")


def _compare(repository: Path, target: Path, names: list[str]) -> None:
    """A speed counts only where every file is there in full."""
    for name in names:
        if (target / name).stat().st_size != (repository / name).stat().st_size:
            raise SystemExit(f"{name} is incomplete")


if __name__ == "__main__":
    main()
