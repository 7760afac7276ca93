"""How fast are experts converted end to end, compared with `cp` of the same bytes and with other libraries?

    python benchmarks/quantize.py [--gib 8] [--folder DIR] [--schemes nvfp4,int8,...] [--skip-peers]

Writes a checkpoint with experts of the true shapes (3072 x 3584, MXFP4), copies it with cp, then quantizes it into
each scheme by the command line in a process of its own. Every result is checked before its speed counts: the report
must say what the format promises, and a sample is decoded with compressed-tensors or bitsandbytes. GB/s are source
bytes per second of wall time, fsync included. Peers work on one matrix in memory, without reading or writing.
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

from machine import GB, describe, drop_caches, timed

EXACT = ("nvfp4", "bf16", "int8", "fp8-block", "fp8-channel")
SCHEMES = (*EXACT, "int4", "nf4", "fp4")
EXPERT_BYTES = 3 * (3072 * 3584 // 2 + 3072 * 3584 // 32)


def write_source(folder: Path, gib: float) -> None:
    from k3tool.synthetic import tiny_config, write_checkpoint

    experts = max(4, round(gib * 2**30 / EXPERT_BYTES))
    config = tiny_config(
        num_layers=2, hidden_size=256, kda_heads=2, mla_heads=2, num_experts=experts, moe_intermediate_size=3072,
        latent_size=3584, vision=False,
    )  # fmt: skip
    config["text_config"]["num_shared_experts"] = 0
    write_checkpoint(folder, config)


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def copied(source: Path, target: Path) -> float:
    def work() -> None:
        subprocess.run(["cp", "-r", source, target], check=True)
        subprocess.run(["sync", "-f", target], check=True)

    return timed(work)


def quantized(source: Path, target: Path, scheme: str, cold: bool) -> tuple[float, dict[str, Any]]:
    if cold:
        drop_caches()
    command = [sys.executable, "-m", "k3tool", "quantize", source, target, "--experts", scheme, "--json"]
    begun = time.perf_counter()
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - begun
    if done.returncode:
        raise SystemExit(done.stderr)
    return seconds, json.loads(done.stdout)


def check(document: dict[str, Any], scheme: str) -> float:
    """The relative error, after the promise of the scheme was checked."""
    experts = document["components"]["routed_experts"]
    if scheme in EXACT:
        assert experts["exact_tensors"] == experts["tensors"], f"{scheme} is not exact"
    else:
        assert 0.01 < experts["relative_error"] < 0.13, f"{scheme}: {experts['relative_error']}"
    return experts["relative_error"]


def peers() -> None:
    """compressed-tensors and bitsandbytes on one expert matrix in memory, one thread."""
    import numpy as np
    import torch
    from bitsandbytes import functional
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import preset_name_to_scheme
    from compressed_tensors.quantization.utils import calculate_qparams

    from k3tool import formats
    from k3tool.formats.convert import Stored, Target, convert

    torch.set_num_threads(1)
    shape = (3072, 3584)
    values = (np.random.default_rng(0).standard_normal(shape) * 0.02).astype(np.float32)
    parts = formats.quantize("mxfp4", values)
    exact = formats.dequantize("mxfp4", parts, shape)
    source = sum(array.nbytes for array in parts.values())
    state = {part: torch.from_numpy(array) for part, array in parts.items()}
    read = BaseCompressor.get_value_from_registry("mxfp4-pack-quantized")
    scheme = preset_name_to_scheme("MXFP4A16", ["Linear"])

    def error(stored: np.ndarray) -> float:
        return float(np.sqrt(((stored - exact) ** 2).sum() / (exact**2).sum()))

    def compress(preset: str, form: str) -> torch.Tensor:
        args = preset_name_to_scheme(preset, ["Linear"])
        weight = read.decompress(dict(state), scheme)["weight"]
        made = {"weight": weight}
        group = args.weights.group_size or shape[1]
        overall = None
        if preset.startswith("NVFP4"):
            overall = torch.tensor([448 * 6 / float(weight.abs().max())])
            made["weight_global_scale"] = overall
        blocks = weight.reshape(shape[0], -1, group)
        low, high = blocks.amin(-1), blocks.amax(-1)
        made["weight_scale"], made["weight_zero_point"] = calculate_qparams(low, high, args.weights, overall)
        writer = BaseCompressor.get_value_from_registry(form)
        return writer.decompress(writer.compress(made, args), args)["weight"]

    def nf4() -> torch.Tensor:
        packed, kept = functional.quantize_4bit(read.decompress(dict(state), scheme)["weight"], quant_type="nf4")
        return functional.dequantize_4bit(packed, kept)

    print("\none expert matrix in memory, one thread     GB/s   relative error")
    theirs: list[tuple[str, Callable[[], torch.Tensor]]] = [
        ("compressed-tensors to NVFP4 and back", lambda: compress("NVFP4A16", "nvfp4-pack-quantized")),
        ("compressed-tensors to int4 g128 and back", lambda: compress("W4A16", "pack-quantized")),
        ("bitsandbytes to nf4 and back", nf4),
    ]
    for name, work in theirs:
        kept = work().float().numpy()
        seconds = min(timed(work) for _ in range(3))
        print(f"{name:42s} {source / seconds / GB:6.3f}   {error(kept):.5f}")
    for target in ("nvfp4", "int4", "nf4"):

        def ours(target: str = target) -> Any:
            return convert([Stored("w", "mxfp4", parts, shape)], Target(target))[0]

        made = ours()
        kept = formats.dequantize(target, made.parts, shape)
        seconds = min(timed(ours) for _ in range(5))
        print(f"{'k3tool to ' + target:42s} {source / seconds / GB:6.3f}   {error(kept):.5f}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gib", type=float, default=8.0)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--schemes", default=",".join(SCHEMES))
    parser.add_argument("--cold", action="store_true", help="drop the page cache before each run")
    parser.add_argument("--skip-peers", action="store_true")
    options = parser.parse_args()
    print(describe("numpy", "numba", "torch", "compressed-tensors", "bitsandbytes"))
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        source = folder / "source"
        write_source(source, options.gib)
        size = size_of(source)
        print(f"source: {size / GB:.2f} GB, {os.cpu_count()} cores, {'cold' if options.cold else 'warm'} page cache")
        rates: list[float] = []
        for _ in range(2):
            if options.cold:
                drop_caches()
            rates.append(size / copied(source, folder / "copy"))
            shutil.rmtree(folder / "copy")
        print(f"cp: {max(rates) / GB:.2f} GB/s (of {', '.join(f'{rate / GB:.2f}' for rate in rates)})")
        print("\nscheme        GB/s   of cp   GB out   peak MB   relative error")
        for scheme in options.schemes.split(","):
            seconds, document = quantized(source, folder / "made", scheme, options.cold)
            error = check(document, scheme)
            rate = size / seconds
            print(
                f"{scheme:12s} {rate / GB:5.2f}   {rate / max(rates):5.2f}   {document['bytes_out'] / GB:6.2f}   "
                f"{document['peak_memory_bytes'] / 1e6:7.0f}   {error:.5f}",
                flush=True,
            )
            shutil.rmtree(folder / "made")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if not options.skip_peers:
        peers()


if __name__ == "__main__":
    main()
