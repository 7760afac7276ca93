"""Other libraries on the same experts, from file to file, each in a process of its own; used by `quantize.py`.

As a program it is one such process, for any Python that has the library (it imports nothing of k3tool but for k3tool's
own row):

    python quantize_peers.py PEER SCHEME SOURCE DEST

and prints one JSON line with the seconds from the first byte read to the last one synced, imports left out.
compressed-tensors and bitsandbytes work matrix by matrix: decompress to bfloat16, then compress with scales from the
largest magnitude, as their own observers choose them. llm-compressor is its `model_free_ptq` with the dequantizer that
compressed-tensors offers for it.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

EXACT = ("nvfp4", "bf16", "int8", "fp8-block", "fp8-channel")
SHAPES = {"w1": (3072, 3584), "w2": (3584, 3072), "w3": (3072, 3584)}
CT_PRESETS = {
    "nvfp4": "NVFP4A16",
    "int8": "W8A16",
    "int4": "W4A16",
    "fp8-block": "FP8_BLOCK",
    "fp8-channel": "FP8_DYNAMIC",
}
ROWS = (
    *(("compressed-tensors", scheme) for scheme in ("nvfp4", "int8", "int4", "fp8-block", "fp8-channel", "bf16")),
    ("bitsandbytes", "nf4"),
    ("bitsandbytes", "fp4"),
    *(("llm-compressor", scheme) for scheme in ("nvfp4", "int4", "fp8-block", "fp8-channel")),
    *(("k3tool", s) for s in ("nvfp4", "int8", "int4", "fp8-block", "fp8-channel", "bf16", "nf4", "fp4")),
)  # fmt: skip


IMPORTS = {
    "compressed-tensors": ("compressed_tensors.compressors.base", "compressed_tensors.quantization.utils"),
    "bitsandbytes": ("compressed_tensors.compressors.base", "bitsandbytes.functional"),
    "llm-compressor": ("llmcompressor",),
    "k3tool": ("k3tool.quantize", "k3tool.formats.convert"),
}
"""What a process imports before its clock starts."""


@dataclass(frozen=True)
class Outcome:
    """A process that printed one JSON document: its wall time, and the document."""

    seconds: float
    document: dict[str, Any]

    @classmethod
    def of(cls, command: list[str]) -> Outcome:
        begun = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        seconds = time.perf_counter() - begun
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}\n{done.stderr[-2000:]}")
        text = done.stdout.strip()
        return cls(seconds, json.loads(text[text.rfind("\n{") + 1 :]))


# The table


def peers(source: Path, folder: Path, experts: int, llmcompressor: Path | None) -> None:
    """Every peer on the first `experts` experts of `source`, and k3tool on the same."""
    from machine import GB

    work = folder / "peers"
    size = _slice(source, work / "slice", experts)
    exact = dict(_decoded(work / "slice"))
    print(f"\n{3 * experts} expert matrices, {size / GB:.3f} GB of MXFP4, from file to file, imports not counted")
    print("library              scheme        GB/s   peak MB   relative error   weights changed")
    for peer, scheme in ROWS:
        python = llmcompressor if peer == "llm-compressor" else Path(sys.executable)
        if python is None:
            continue
        command = [str(python), __file__, peer, scheme, str(work / "slice"), str(work / "made")]
        try:
            outcome = Outcome.of(command)
        except RuntimeError as error:
            print(f"{peer:20s} {scheme:12s} failed: {str(error).strip().splitlines()[-1][:150]}", flush=True)
            continue
        relative, changed = _distance(exact, dict(_decoded(work / "made")))
        print(
            f"{peer:20s} {scheme:12s} {size / outcome.document['seconds'] / GB:6.3f}   {outcome.document['peak'] / 1e6:7.0f}   "
            f"{relative:14.5f}   {100 * changed:13.2f} %",
            flush=True,
        )
        shutil.rmtree(work / "made")
    shutil.rmtree(work)


def _slice(source: Path, target: Path, experts: int) -> int:
    """A whole checkpoint with the first experts of `source` only, all its layers' worth in few tensors."""
    from k3tool.synthetic import write_checkpoint

    config = json.loads((source / "config.json").read_bytes())
    config["text_config"]["num_experts"] = experts
    config["text_config"]["num_experts_per_token"] = min(experts, config["text_config"]["num_experts_per_token"])
    write_checkpoint(target, config)
    # Libraries look for the section at the top level; k3tool takes it from there as well.
    config["quantization_config"] = config["text_config"].pop("quantization_config")
    (target / "config.json").write_text(json.dumps(config))
    return sum(array.nbytes for name, array in _arrays(target) if ".experts." in name)


def _arrays(folder: Path) -> Iterator[tuple[str, Any]]:
    """Every tensor of a checkpoint as raw bits, without torch."""
    from k3tool import formats
    from k3tool.checkpoint.reader import Checkpoint

    checkpoint = Checkpoint.open(folder)
    for name in checkpoint.index.weight_map:
        spec = checkpoint.locate(name).spec
        yield name, formats.view(checkpoint.read(name), spec.dtype, spec.shape)


def _decoded(folder: Path) -> Iterator[tuple[str, Any]]:
    """Values of every expert matrix by the plain functions of k3tool's formats."""
    from k3tool import formats
    from k3tool.checkpoint.reader import Checkpoint

    checkpoint = Checkpoint.open(folder)
    held: dict[str, dict[str, Any]] = {}
    for name in checkpoint.index.weight_map:
        path, mark, part = name.partition(".weight")
        if mark and ".experts." in path:
            held.setdefault(path, {})["weight" + part] = checkpoint.locate(name).spec
    for path, specs in sorted(held.items()):
        shape = SHAPES[path.rpartition(".")[2]]
        scheme = formats.detect(specs, where=path, shape=shape)
        parts = {p: formats.view(checkpoint.read(f"{path}.{p}"), s.dtype, s.shape) for p, s in specs.items()}
        yield path, formats.dequantize(scheme, parts, shape)


def _distance(exact: dict[str, Any], stored: dict[str, Any]) -> tuple[float, float]:
    import numpy as np

    assert exact.keys() == stored.keys(), "not the same modules"
    error = source = changed = count = 0.0
    for name, values in exact.items():
        error += float(((stored[name].astype(np.float64) - values) ** 2).sum())
        source += float((values.astype(np.float64) ** 2).sum())
        changed += float((stored[name] != values).sum())
        count += values.size
    return (error / source) ** 0.5, changed / count


# One peer, in its own process


def _experts(source: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each expert matrix's tensors, opened as their own loaders do."""
    from safetensors import safe_open

    for shard in sorted(source.glob("*.safetensors")):
        with safe_open(shard, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                if ".experts." in name and name.endswith(".weight_packed"):
                    path = name.removesuffix(".weight_packed")
                    parts = ("weight_packed", "weight_scale")
                    yield path, {part: file.get_tensor(f"{path}.{part}") for part in parts}


def _matrix_by_matrix(source: Path, dest: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Decompress with compressed-tensors, change, save one file with its index, synced."""
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import preset_name_to_scheme
    from safetensors.torch import save_file

    reader = BaseCompressor.get_value_from_registry("mxfp4-pack-quantized")
    preset = preset_name_to_scheme("MXFP4A16", ["Linear"])
    made = {}
    for path, parts in _experts(source):
        for part, tensor in change(reader.decompress(parts, preset)).items():
            made[f"{path}.{part}"] = tensor
    dest.mkdir()
    save_file(made, dest / "model.safetensors")
    _index(dest, dict.fromkeys(made, "model.safetensors"))
    _sync(dest)


def _index(dest: Path, weight_map: dict[str, str]) -> None:
    document = {"metadata": {}, "weight_map": weight_map}
    (dest / "model.safetensors.index.json").write_text(json.dumps(document))


def _sync(dest: Path) -> None:
    for path in dest.iterdir():
        with open(path, "rb") as file:
            os.fsync(file.fileno())


def compressed_tensors(scheme: str, source: Path, dest: Path) -> None:
    import torch
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import QuantizationStrategy, preset_name_to_scheme
    from compressed_tensors.quantization.utils import calculate_qparams

    if scheme == "bf16":
        _matrix_by_matrix(source, dest, lambda state: {"weight": state["weight"]})
        return
    args = preset_name_to_scheme(CT_PRESETS[scheme], ["Linear"])
    if scheme in ("int8", "int4"):  # in groups of 32, as k3tool writes them
        args.weights.group_size, args.weights.strategy = 32, QuantizationStrategy.GROUP
    form = {"nvfp4": "nvfp4-pack-quantized", "int8": "pack-quantized", "int4": "pack-quantized"}
    writer = BaseCompressor.get_value_from_registry(form.get(scheme, "float-quantized"))

    def change(state: dict[str, Any]) -> dict[str, Any]:
        weight = state["weight"]
        rows, columns = weight.shape
        made: dict[str, Any] = {"weight": weight}
        if args.weights.block_structure:
            blocks = weight.reshape(rows // 128, 128, columns // 128, 128).transpose(1, 2).flatten(2)
        else:
            blocks = weight.reshape(rows, -1, args.weights.group_size or columns)
        overall = None
        if scheme == "nvfp4":
            overall = torch.tensor([448 * 6 / float(weight.abs().max())])
            made["weight_global_scale"] = overall
        qparams = calculate_qparams(blocks.amin(-1), blocks.amax(-1), args.weights, overall)
        made["weight_scale"], made["weight_zero_point"] = qparams
        return writer.compress(made, args)

    _matrix_by_matrix(source, dest, change)


def bitsandbytes(scheme: str, source: Path, dest: Path) -> None:
    from bitsandbytes import functional

    def change(state: dict[str, Any]) -> dict[str, Any]:
        packed, kept = functional.quantize_4bit(state["weight"], quant_type=scheme)
        return {"weight": packed} | {f"weight.{key}": value for key, value in kept.as_dict(packed=True).items()}

    _matrix_by_matrix(source, dest, change)


def llm_compressor(scheme: str, source: Path, dest: Path) -> None:
    from compressed_tensors.entrypoints.convert.converters.ct_dequantizer import CompressedTensorsDequantizer
    from llmcompressor import model_free_ptq

    ignore = [r"re:^(?!.*\.experts\.).*"]
    converter = CompressedTensorsDequantizer(str(source), ignore=ignore)
    model_free_ptq(
        str(source), str(dest), scheme=CT_PRESETS[scheme], ignore=ignore, max_workers=os.cpu_count() or 1,
        device="cpu", converter=converter,
    )  # fmt: skip
    _sync(dest)


def k3tool(scheme: str, source: Path, dest: Path) -> None:
    from k3tool.quantize import quantize

    quantize(source, dest, experts=scheme)


def main() -> None:
    peer, scheme, source, dest = sys.argv[1], sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4])
    for module in IMPORTS[peer]:
        importlib.import_module(module)
    if peer != "k3tool":
        importlib.import_module("torch").set_num_threads(os.cpu_count() or 1)
    workers = {
        "compressed-tensors": compressed_tensors,
        "bitsandbytes": bitsandbytes,
        "llm-compressor": llm_compressor,
        "k3tool": k3tool,
    }
    begun = time.perf_counter()
    workers[peer](scheme, source, dest)
    seconds = time.perf_counter() - begun
    print("\n" + json.dumps({"seconds": seconds, "peak": _peak_bytes()}))


def _peak_bytes() -> int:
    """Largest resident size of this program itself; the system's own counter includes whoever started it."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return int(fields["VmHWM"].split()[0]) * 1024


if __name__ == "__main__":
    main()
