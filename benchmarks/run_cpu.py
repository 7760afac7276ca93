"""How fast does `k3tool run` prefill and decode on a CPU, against mlx-lm and llama.cpp on the same weights, and what limits it?

    python benchmarks/run_cpu.py [--shape deep|wide] [--repeats 3] [--threads N] [--without mlx] [--llama PYTHON]
                                 [--folder DIR] [--json FILE]

Writes one synthetic checkpoint, checks in float32 that k3tool and mlx-lm compute the same logits and the same greedy
tokens, then measures every engine in bfloat16, each in a process of its own, taking turns; the best of the repeats
counts. Beside the speeds stand the floors measured in the same run: bytes that a token must read over the memory
bandwidth, and operations over torch's float32 matrix rate. `--llama` names an interpreter that has xllamacpp.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from machine import GB, describe, timed

from k3tool.catalog import catalog
from k3tool.config import K3Config
from k3tool.synthetic import tiny_config, write_checkpoint

HERE = Path(__file__).parent
SHAPES: dict[str, dict[str, Any]] = {
    "deep": {
        "num_layers": 12, "hidden_size": 1024, "vocab_size": 16384, "block_size": 4, "kda_heads": 8, "mla_heads": 8,
        "q_lora_rank": 384, "kv_lora_rank": 256, "intermediate_size": 4096, "num_experts": 64, "experts_per_token": 8,
        "moe_intermediate_size": 512, "latent_size": 512,
    },
    "wide": {
        "num_layers": 4, "hidden_size": 2048, "vocab_size": 8192, "block_size": 4, "kda_heads": 16, "mla_heads": 16,
        "q_lora_rank": 512, "kv_lora_rank": 512, "intermediate_size": 5120, "num_experts": 24,
        "experts_per_token": 16, "moe_intermediate_size": 1024, "latent_size": 1024,
    },
}  # fmt: skip
COMMON: dict[str, Any] = {
    "kda_head_dim": 128, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "num_shared_experts": 2,
}  # fmt: skip
PROMPTS = (128, 512)
NEW_TOKENS = 32
CHECK_TOKENS, CHECK_CUT = 24, 16


@dataclass
class Engine:
    """A running engine and the best seconds of each measurement."""

    name: str
    process: subprocess.Popen[str]
    load_seconds: float = 0.0
    best: dict[str, float] = field(default_factory=dict)
    tokens: list[int] = field(default_factory=list)
    peak_bytes: int = 0

    @classmethod
    def start(cls, name: str, folder: Path, threads: int, dtype: str, python: str = sys.executable) -> Engine:
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "OPENBLAS_NUM_THREADS": str(threads)}
        command = [python, str(HERE / "engine.py"), name, str(folder), str(threads), dtype]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        )
        engine = cls(name, process)
        engine.load_seconds = engine._read()["load_seconds"]
        return engine

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None and self.process.stderr is not None
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"{self.name} ended: {self.process.stderr.read()[-2000:]}")
        return json.loads(line)

    def ask(self, **command: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        return self._read()

    def measure(self, what: str, **command: Any) -> dict[str, Any]:
        reply = self.ask(**command)
        self.best[what] = min(self.best.get(what, float("inf")), reply["seconds"])
        return reply

    def end(self) -> None:
        self.peak_bytes = self.ask(memory=True)["peak_bytes"]
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def check(folder: Path, ids: list[int], threads: int, scratch: Path) -> str:
    """Both in float32: relative difference of all logits, and greedy choices."""
    rows = {}
    for name in ("k3tool", "mlx"):
        engine = Engine.start(name, folder, threads, "float32")
        engine.ask(logits=ids[:CHECK_TOKENS], cut=CHECK_CUT, out=str(scratch / f"{name}.npy"))
        engine.end()
        rows[name] = np.load(scratch / f"{name}.npy").astype(np.float64)
    difference = np.linalg.norm(rows["k3tool"] - rows["mlx"]) / np.linalg.norm(rows["mlx"])
    same = int((rows["k3tool"].argmax(-1) == rows["mlx"].argmax(-1)).sum())
    if difference > 1e-3 or same != CHECK_TOKENS:  # deep random networks amplify float32 rounding a thousandfold
        sys.exit(
            f"the engines disagree: logits differ by {difference:.1e}, {same} of {CHECK_TOKENS} greedy tokens equal"
        )
    return (
        f"float32 logits of {CHECK_TOKENS} tokens differ by {difference:.1e}, greedy tokens equal {same}/{CHECK_TOKENS}"
    )


@dataclass(frozen=True)
class Floors:
    """What one token needs at least, and what this machine gives."""

    weight_bytes: int  # read for a decoded token: all matrices but the embedding table and experts not visited
    state_bytes: int  # KDA states, read and written
    operations: float  # multiplications and additions of a prompt token, without the head
    read_rate: float
    matrix_rate: float

    @property
    def decode_seconds(self) -> float:
        return (self.weight_bytes + self.state_bytes) / self.read_rate

    def prefill_seconds(self, tokens: int) -> float:
        return self.operations * tokens / self.matrix_rate


def floors(config: K3Config, threads: int) -> Floors:
    read = used = operations = 0
    for entry in catalog(config).entries:
        if ".experts." in entry.name:
            share = config.experts_per_token / config.num_experts
            # A packed byte holds two weights; scales take no part in the count.
            weights = 2 * entry.nbytes if entry.name.endswith("weight_packed") else 0
        else:
            share, weights = 1.0, 0 if len(entry.shape) < 2 else entry.nbytes // 2
        if "embed_tokens" in entry.name:
            continue
        read += entry.nbytes * share
        if "lm_head" not in entry.name:
            operations += 2 * weights * share
        used += entry.nbytes
    layers = sum(kind == "kda" for kind in config.layer_kinds)
    state = 2 * 4 * layers * config.kda_num_heads * config.kda_head_dim**2
    return Floors(int(read), state, operations, *machine_rates(threads))


def machine_rates(threads: int) -> tuple[float, float]:
    """Bytes a second of reading memory front to back, float32 operations a second of a torch matrix product."""
    import torch

    torch.set_num_threads(threads)
    large = torch.ones(128 << 20)
    read = large.nbytes / min(timed(large.sum) for _ in range(7))
    square = torch.ones(1024, 1024)
    return read, 2 * 1024**3 / min(timed(lambda: square @ square) for _ in range(15))


def measure(engines: list[Engine], ids: list[int], repeats: int, slow_repeats: int) -> None:
    for turn in range(repeats):
        for engine in engines:
            if engine.name == "mlx" and turn >= slow_repeats:
                continue
            prompts = PROMPTS[:1] if engine.name == "mlx" else PROMPTS  # the long one would take it minutes
            for tokens in sorted(prompts, reverse=True):
                engine.measure(f"prefill {tokens}", prefill=ids[:tokens])
            engine.tokens = engine.measure("decode", decode=NEW_TOKENS).get("tokens", [])
    for engine in engines:
        engine.end()


def _cell(value: float | None, unit: str = "") -> str:
    return f"{'-' if value is None else f'{value:.1f}{unit}':>20}"


def report(engines: list[Engine], config: K3Config, floor: Floors) -> dict[str, Any]:
    counts = {**{f"prefill {n}": n for n in PROMPTS}, "decode": NEW_TOKENS}
    print(f"{'engine':<10}{'load s':>8}" + "".join(f"{what + ' tok/s':>20}" for what in counts) + f"{'peak MB':>9}")
    for engine in engines:
        speeds = "".join(_cell(counts[what] / engine.best[what] if what in engine.best else None) for what in counts)
        print(f"{engine.name:<10}{engine.load_seconds:8.2f}{speeds}{engine.peak_bytes / 1e6:9.0f}")
    own = engines[0]
    for engine in engines[1:]:
        ratios = "".join(
            _cell(engine.best[what] / own.best[what] if what in engine.best else None, "x") for what in counts
        )
        print(f"{'k3tool over ' + engine.name:<18}{ratios}")
        if engine.tokens:
            same = next(
                (i for i, (a, b) in enumerate(zip(own.tokens, engine.tokens, strict=True)) if a != b), NEW_TOKENS
            )
            print(f"  bfloat16: the first {same} of {NEW_TOKENS} greedy tokens are those of {engine.name}")
    step = own.best["decode"] / NEW_TOKENS
    print(
        f"decode: a token reads {floor.weight_bytes / 1e6:.0f} MB of weights and moves {floor.state_bytes / 1e6:.0f} MB of "
        f"state; at {floor.read_rate / GB:.1f} GB/s read that is {1 / floor.decode_seconds:.0f} tok/s; "
        f"k3tool is at {floor.decode_seconds / step:.0%} of it"
    )
    for tokens in PROMPTS:
        least, took = floor.prefill_seconds(tokens), own.best[f"prefill {tokens}"]
        print(
            f"prefill {tokens}: {floor.operations / 1e9:.2f} GFLOP a token in products; at {floor.matrix_rate / GB:.0f} GFLOP/s "
            f"of torch's float32 product that is {tokens / least:.0f} tok/s; k3tool is at {least / took:.0%} of it"
        )
    return {
        "engines": {e.name: {"load_seconds": e.load_seconds, "peak_bytes": e.peak_bytes, "seconds": e.best} for e in engines},
        "floors": vars(floor),
        "hidden_size": config.hidden_size,
        "layers": config.num_layers,
    }  # fmt: skip


def gguf(folder: Path, scratch: Path) -> Path:
    """The same weights for llama.cpp, written by k3tool."""
    target = scratch / "gguf"
    command = [sys.executable, "-m", "k3tool", "quantize", str(folder), str(target), "--format", "gguf"]
    subprocess.run([*command, "--vocabulary", "ids", "--quiet"], check=True, capture_output=True)
    return target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="deep")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--slow-repeats", type=int, default=1, help="of mlx-lm, which takes minutes")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--without", nargs="*", default=[], choices=["mlx"])
    parser.add_argument("--llama", metavar="PYTHON", help="interpreter with xllamacpp")
    parser.add_argument("--folder", type=Path, help="keep the checkpoint here and use it again")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    document = tiny_config(**SHAPES[options.shape], **COMMON, vision=False)
    config = K3Config.from_dict(document)
    random.seed(0)
    ids = [random.randrange(config.vocab_size - 256) for _ in range(max(PROMPTS))]
    with tempfile.TemporaryDirectory() as scratch_name:
        scratch = Path(scratch_name)
        folder = options.folder or scratch / "checkpoint"
        if not (folder / "config.json").exists():
            write_checkpoint(folder, document, seed=1)
        print(describe("k3tool", "torch", "llvmlite", "mlx", "mlx-lm"))
        size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        print(f"{options.shape}: {size / 1e6:.0f} MB, {json.dumps({**SHAPES[options.shape], **COMMON})}")
        print(
            f"threads: {options.threads}; prompts of {PROMPTS} tokens; {NEW_TOKENS} decoded tokens; best of {options.repeats}"
        )
        floor = floors(config, options.threads)
        if "mlx" not in options.without:
            print("check:", check(folder, ids, options.threads, scratch))
        engines = [Engine.start("k3tool", folder, options.threads, "bfloat16")]
        if "mlx" not in options.without:
            engines.append(Engine.start("mlx", folder, options.threads, "bfloat16"))
        if options.llama:
            engines.append(Engine.start("llama", gguf(folder, scratch), options.threads, "bfloat16", options.llama))
        measure(engines, ids, options.repeats, options.slow_repeats)
        result = report(engines, config, floor)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
