"""What does each scheme do to the logits of the golden checkpoints?

    python benchmarks/golden_schemes.py CHECKPOINT... [--schemes nvfp4,...] [--components experts,latent,...]

Quantizes one component at a time, runs the result in float32 on the checkpoint's own prompt, and compares with the logits
stored beside it (`golden.safetensors`), which another implementation computed from the source. Prints a table as in
docs/quantize.md: norm of the difference of all logits over their norm, mean Kullback-Leibler divergence of the next
token in nats, and how often the most probable token is the same. The first row is the source itself. Golden weights are
random, so that the numbers say how far a scheme moves activations, not how well a trained model answers.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
from machine import describe
from safetensors.torch import load_file

from k3tool.errors import UnsupportedError
from k3tool.generate import Session
from k3tool.quantize import quantize

SCHEMES = ("nvfp4", "nvfp4-modelopt", "bf16", "int8", "fp8-channel", "fp8-block", "mxfp4", "int4", "nf4", "fp4")
COMPONENTS = ("experts", "latent", "shared", "attention")


def logits_of(folder: Path, ids: list[int]) -> torch.Tensor:
    """[tokens, vocabulary] float32."""
    return Session.open(folder, device="cpu", dtype="float32").prefill(ids, all_logits=True)


def compare(found: torch.Tensor, expected: torch.Tensor) -> tuple[float, float, float]:
    """(relative error, mean KL divergence in nats, share of equal most probable tokens)."""
    a, b = expected.double(), found.double()
    relative = float((b - a).norm() / a.norm())
    p, q = a.log_softmax(-1), b.log_softmax(-1)
    divergence = float((p.exp() * (p - q)).sum(-1).mean())
    return relative, max(divergence, 0.0), float((a.argmax(-1) == b.argmax(-1)).double().mean())


def row(folder: Path, ids: list[int], expected: torch.Tensor, **options: Any) -> tuple[str, tuple[float, float, float]]:
    """(how many of the matrices kept their values, the comparison). Raises UnsupportedError for a scheme that does not fit."""
    with tempfile.TemporaryDirectory() as scratch:
        done = quantize(folder, Path(scratch) / "made", **options)
        changed = [entry for entry in done.components.values() if entry["scheme"] != "keep"]
        exact = sum(entry["exact_tensors"] for entry in changed)
        total = sum(entry["tensors"] for entry in changed)
        return f"{exact} of {total}", compare(logits_of(Path(scratch) / "made", ids), expected)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("checkpoints", type=Path, nargs="+")
    parser.add_argument("--schemes", default=",".join(SCHEMES))
    parser.add_argument("--components", default=",".join(COMPONENTS))
    options = parser.parse_args()
    print(describe("torch", "numpy"))
    for folder in options.checkpoints:
        golden = load_file(folder / "golden.safetensors")
        ids = golden["input_ids"].tolist()
        expected = golden["logits"].float()
        print(f"\n{folder.name}, {len(ids)} tokens\n")
        print("| component | scheme | matrices unchanged | logits, relative error | KL, nats | same top token |")
        print("| --- | --- | --- | --- | --- | --- |")
        relative, divergence, same = compare(logits_of(folder, ids), expected)
        print(f"| the source | | | {relative:.1e} | {divergence:.1e} | {100 * same:.1f} % |", flush=True)
        for component in options.components.split(","):
            for scheme in options.schemes.split(","):
                try:
                    kept, (relative, divergence, same) = row(folder, ids, expected, **{component: scheme})
                except UnsupportedError as error:
                    print(f"| {component} | {scheme} | {error.message.partition(': ')[2]} | | | |", flush=True)
                    continue
                if kept == "0 of 0":
                    continue  # stored so already
                print(
                    f"| {component} | {scheme} | {kept} | {relative:.1e} | {divergence:.1e} | {100 * same:.1f} % |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
