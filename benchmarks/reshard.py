"""How fast, and in how much memory, does `k3tool reshard` divide a checkpoint, against `cp` and a load-everything script?

The data has the release's expert shapes (3072 x 3584, MXFP4) and as many experts as the size asks for. Every result is
read back and compared with the source (`--verify`) in the same run; a speed is printed only after that.

    python benchmarks/reshard.py --size 8GiB --work DIR            speeds and the peer
    python benchmarks/reshard.py --memory 2GiB 16GiB --work DIR    peak memory at two sizes

Needs free space for twice the size, and root (or an idle page cache) for cold reads: caches are dropped where allowed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from k3tool.catalog import catalog
from k3tool.checkpoint.index import build_index
from k3tool.checkpoint.writer import ShardWriter
from k3tool.config import K3Config
from k3tool.synthetic import tiny_config
from k3tool.units import format_bytes, parse_size

EXPERT_BYTES = 17_547_264
LAYERS = 5  # the first is dense
RANKS = 8
JOBS = {"ep": ["--ep", "8"], "pp": ["--pp", "5"], "tp": ["--tp", "8"]}
GOALS = {"ep": 0.9, "pp": 0.9, "tp": 0.7}


def config_for(size: int) -> dict[str, Any]:
    """Expert shapes of the release, experts enough for `size` bytes (a multiple of 8 per layer), the rest narrow."""
    per_layer = -(-size // (EXPERT_BYTES * (LAYERS - 1)))
    return tiny_config(
        num_layers=LAYERS, hidden_size=512, vocab_size=4096, kda_heads=96, kda_head_dim=32, mla_heads=96,
        q_lora_rank=128, kv_lora_rank=128, qk_nope_head_dim=32, v_head_dim=32, intermediate_size=3072,
        num_experts=-(-per_layer // RANKS) * RANKS, experts_per_token=4, moe_intermediate_size=3072, latent_size=3584,
        vision=False,
    )  # fmt: skip


def write_source(folder: Path, size: int) -> int:
    """Random bytes in those shapes; returns the bytes of the shards."""
    document = config_for(size)
    config = K3Config.from_dict(document)
    layout = catalog(config)
    folder.mkdir(parents=True)
    tile = np.random.default_rng(0).integers(0, 256, 64 << 20, dtype=np.uint8)
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(layout.shards):
        entries = [entry for entry in layout.entries if entry.shard == number]
        with ShardWriter(folder / shard, [(e.name, e.dtype, e.shape) for e in entries]) as writer:
            for place, entry in enumerate(entries):
                start = (place * 7919) % (32 << 20)
                data = tile[start : start + entry.nbytes]
                if len(data) < entry.nbytes:
                    data = np.resize(tile, entry.nbytes)
                if entry.name.endswith("A_log"):
                    data = np.zeros(entry.nbytes, np.uint8)
                writer.append(memoryview(np.ascontiguousarray(data)))
                weight_map[entry.name] = shard
    (folder / "model.safetensors.index.json").write_bytes(build_index(weight_map, layout.total_size))
    (folder / "config.json").write_text(json.dumps(document))
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def settle() -> None:
    """Nothing dirty, nothing cached (the latter as far as this user may)."""
    os.sync()
    with contextlib.suppress(OSError):
        Path("/proc/sys/vm/drop_caches").write_text("3")
    time.sleep(1)


def run(command: list[str]) -> tuple[float, int, str]:
    """(seconds, peak resident bytes, stdout) of a process from cold caches; its data is on the disk at the end."""
    settle()
    began = time.monotonic()
    with tempfile.TemporaryFile("w+") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.DEVNULL)
        peak = 0
        while process.poll() is None:  # wait4 would count what this process held before the child became another
            peak = max(peak, peak_of(process.pid))
            time.sleep(0.02)
        os.sync()
        seconds = time.monotonic() - began
        out.seek(0)
        text = out.read()
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} left with {process.returncode}\n{text}")
    return seconds, peak, text


def peak_of(pid: int) -> int:
    """The most resident bytes of a running process so far; 0 where it has just ended."""
    with contextlib.suppress(OSError, IndexError, ValueError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0


def k3tool(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "k3tool", "reshard", *map(str, arguments), "--json"]


def bytes_below(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*.safetensors"))


def copy_once(source: Path, dest: Path) -> tuple[float, int]:
    """`cp` of the checkpoint: (bytes per second, peak memory)."""
    seconds, peak, _ = run(["cp", "-r", str(source), str(dest)])
    size = bytes_below(dest)
    shutil.rmtree(dest)
    return size / seconds, peak


def reshard_once(source: Path, dest: Path, options: list[str], *, verify: bool) -> tuple[float, int, dict[str, Any]]:
    """(bytes written per second, peak memory, document); read back against the source outside of the time."""
    seconds, peak, out = run(k3tool(source, dest, *options))
    rate = bytes_below(dest) / seconds
    if verify:
        _, _, checked = run(k3tool(source, dest, *options, "--verify"))
        assert json.loads(checked)["verified"]["ok"] and json.loads(checked)["bytes_written"] == 0
    shutil.rmtree(dest)
    return rate, peak, json.loads(out)


def peer(source: Path, dest: Path, ranks: int) -> None:
    """The usual conversion script: load everything, narrow every tensor for every rank, save every rank."""
    from safetensors.torch import safe_open, save_file

    columns, rows = ("w2.", "o_proj.", "down_proj."), ("w1.", "w3.", "gate_proj.", "up_proj.", "q_proj.", "k_proj.",
        "v_proj.", "g_proj.", "f_b_proj.", "b_proj.", "q_b_proj.", "kv_b_proj.", "conv1d.", "dt_bias", "lm_head.",
        "embed_tokens.")  # fmt: skip
    states: list[dict[str, Any]] = [{} for _ in range(ranks)]
    for shard in sorted(source.glob("*.safetensors")):
        with safe_open(shard, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dictionary
                tensor = file.get_tensor(name)
                dim = 1 if any(part in name for part in columns) else 0 if any(part in name for part in rows) else None
                if dim is not None and "routed_expert" in name:
                    dim = None
                for rank in range(ranks):
                    part = tensor
                    if dim is not None:
                        width = tensor.shape[dim] // ranks
                        part = tensor.narrow(dim, rank * width, width).contiguous()
                    states[rank][name] = part
    dest.mkdir()
    for rank, state in enumerate(states):
        save_file(state, dest / f"model{rank}-mp{ranks}.safetensors")


def peer_once(source: Path, dest: Path) -> tuple[float, int]:
    seconds, peak, _ = run([sys.executable, __file__, "--peer", str(source), str(dest), str(RANKS)])
    rate = bytes_below(dest) / seconds
    shutil.rmtree(dest)
    return rate, peak


def describe() -> dict[str, Any]:
    import safetensors
    import torch

    free = shutil.disk_usage("/").free
    return {
        "machine": platform.machine(), "cores": os.cpu_count(), "python": platform.python_version(),
        "kernel": platform.release(), "torch": torch.__version__, "safetensors": safetensors.__version__,
        "disk_free": free, "load": os.getloadavg()[0], "cold_reads": os.access("/proc/sys/vm/drop_caches", os.W_OK),
    }  # fmt: skip


def speeds(work: Path, size: int, rounds: int, with_peer: bool) -> dict[str, Any]:
    source, dest = work / "source", work / "dest"
    held = write_source(source, size)
    print(f"source: {format_bytes(held)} in {len(list(source.glob('*.safetensors')))} shards")
    rows: list[dict[str, Any]] = []
    for number in range(rounds):  # every round measures all of them, so that a slow minute hits all alike
        before, peak = copy_once(source, dest)
        rows.append({"round": number, "what": "cp", "rate": before, "ratio": 1.0, "peak": peak})
        for name, options in JOBS.items():
            rate, peak, _ = reshard_once(source, dest, options, verify=number == 0)
            after, _ = copy_once(source, dest)
            rows.append(
                {"round": number, "what": name, "rate": rate, "ratio": rate / ((before + after) / 2), "peak": peak}
            )
            before = after
        if with_peer and number == 0:
            rate, peak = peer_once(source, dest)
            rows.append(
                {"round": number, "what": "load everything", "rate": rate, "ratio": rate / before, "peak": peak}
            )
        for row in rows[-6:]:
            if row["round"] == number:
                print(f"  round {number}  {row['what']:16} {row['rate'] / 1e9:6.2f} GB/s  {row['ratio']:5.2f} of cp  "
                      f"peak {format_bytes(row['peak'])}")  # fmt: skip
    summary = {}
    for name in ("cp", *JOBS, "load everything"):
        mine = [row for row in rows if row["what"] == name]
        if mine:
            ratio = statistics.median(row["ratio"] for row in mine)
            rate = statistics.median(row["rate"] for row in mine)
            summary[name] = {"rate": rate, "ratio": ratio, "peak": max(row["peak"] for row in mine)}
            goal = f"  goal {GOALS[name]}: {'met' if ratio >= GOALS[name] else 'NOT met'}" if name in GOALS else ""
            print(
                f"{name:16} {rate / 1e9:6.2f} GB/s  {ratio:5.2f} of cp  peak {format_bytes(summary[name]['peak'])}{goal}"
            )
    shutil.rmtree(source)
    return {"source_bytes": held, "rows": rows, "summary": summary}


def memory(work: Path, sizes: list[int]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for size in sizes:
        source, dest = work / "source", work / "dest"
        held = write_source(source, size)
        for name, options in JOBS.items():
            rate, peak, document = reshard_once(source, dest, options, verify=False)
            found[f"{name} {held}"] = {"peak": peak, "reported": document["peak_memory_bytes"], "rate": rate}
            print(f"{name} of {format_bytes(held)}: peak {format_bytes(peak)} (limit 400 MB), {rate / 1e9:.2f} GB/s")
        shutil.rmtree(source)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="8GiB")
    parser.add_argument("--work", type=Path, required=True, help="an empty folder on the disk to measure")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-peer", action="store_true")
    parser.add_argument("--memory", nargs="+", metavar="SIZE", help="measure peak memory at these sizes instead")
    parser.add_argument("--json", type=Path, help="write everything measured into this file")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {"machine": describe()}
    print(json.dumps(result["machine"]))
    if options.memory:
        result["memory"] = memory(options.work, [parse_size(size) for size in options.memory])
    else:
        result["speeds"] = speeds(options.work, parse_size(options.size), options.rounds, not options.no_peer)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--peer"]:
        peer(Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]))
    else:
        main()
