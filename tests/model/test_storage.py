"""Quantized checkpoints on a CPU: held as codes and scales, run as the numbers that those stand for, in float32 exactly."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from k3tool import formats
from k3tool.checkpoint.reader import Checkpoint
from k3tool.errors import CheckpointCorrupt
from k3tool.events import SILENT
from k3tool.generate import Session
from k3tool.kernels.linear import StackedMatrix, StoredMatrix
from k3tool.kernels.moe import DenseExperts, PackedExperts, ScaledExperts
from k3tool.model import storage as storage_module
from k3tool.model.experts import load_experts
from k3tool.model.load import load_model, prepare_model
from k3tool.model.weights import Weights
from k3tool.names import parse_name
from k3tool.quantize import quantize
from k3tool.synthetic import tiny_config, write_checkpoint
from tests.model.edit import edit_checkpoint

SCHEMES = ("int4", "int8", "fp8-channel", "fp8-block", "nf4", "fp4", "nvfp4", "mxfp4")
PREFIX = "language_model.model.layers.1.block_sparse_moe.experts"
CPU = torch.device("cpu")
IDS = [3, 4, 5, 250, 7, 7, 31, 100]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A three-layer checkpoint of matrices by the 128, under every scheme in every component that can be quantized."""
    plain = tmp_path_factory.mktemp("plain")
    wide = {
        "hidden_size": 128, "moe_intermediate_size": 128, "latent_size": 128, "num_experts": 4, "experts_per_token": 2,
        "kda_heads": 4, "kda_head_dim": 32, "mla_heads": 4, "q_lora_rank": 128, "kv_lora_rank": 128, "block_size": 2,
    }  # fmt: skip
    write_checkpoint(plain, tiny_config(num_layers=3, vocab_size=320, vision=False, **wide), seed=2)
    made = {"plain": plain}
    for scheme in SCHEMES:
        made[scheme] = tmp_path_factory.mktemp(scheme) / "out"
        wanted = {"experts": scheme, "latent": scheme, "shared": scheme}
        if scheme != "fp8-block":  # attention has narrow matrices
            wanted["attention"] = scheme
        quantize(plain, made[scheme], **{k: v for k, v in wanted.items() if (k, v) != ("experts", "mxfp4")})
    return made


def tensors(value: object) -> Iterator[torch.Tensor]:
    """Every tensor that a model holds, once."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors(item)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from tensors(getattr(value, field.name))


def held_bytes(model: object) -> int:
    return sum({tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors(model)}.values())  # fmt: skip


def decoded_parts(folder: Path) -> dict[str, torch.Tensor]:
    """Every quantized module of a checkpoint as float32."""
    checkpoint = Checkpoint.open(folder)
    modules: dict[str, dict[str, str]] = {}
    for name in checkpoint.located:
        parsed = parse_name(name)
        if parsed is not None and parsed.part.startswith("weight"):
            modules.setdefault(parsed.module_path, {})[parsed.part] = name
    found = {}
    for module, parts in modules.items():
        specs = {part: checkpoint.located[name].spec for part, name in parts.items()}
        if set(parts) == {"weight"}:
            continue
        arrays = {part: formats.view(checkpoint.read(parts[part]), s.dtype, s.shape) for part, s in specs.items()}
        shape = tuple(arrays["weight_shape"].tolist()) if "weight_shape" in arrays else None
        scheme = formats.detect(specs, shape=shape)
        shape = shape or formats.logical_shape(scheme, specs)
        if shape is None:
            state = next(part for part in parts if "quant_state" in part)
            shape = tuple(formats.bnb.read_state(arrays[state])["shape"])
        found[module] = torch.from_numpy(formats.dequantize(scheme, arrays, shape).copy())
    return found


def decoded(folder: Path, to: Path) -> Path:
    """The same checkpoint with every quantized module as float32."""
    values = decoded_parts(folder)
    shutil.copytree(folder, to)

    def change(held: dict[str, torch.Tensor]) -> None:
        for name in list(held):
            parsed = parse_name(name)
            if parsed is not None and parsed.module_path in values and parsed.part.startswith("weight"):
                del held[name]
        held.update({f"{module}.weight": value for module, value in values.items()})

    edit_checkpoint(to, change)
    return to


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


def everything(session: Session) -> torch.Tensor:
    """Logits of a prompt, and of steps of which all but the first are played back."""
    rows = [session.prefill(IDS, all_logits=True)]
    return torch.cat(rows + [session.decode(token)[None] for token in (77, 3, 9)])


@pytest.mark.parametrize("scheme", SCHEMES)
def test_memory_holds_what_the_files_hold(folders: dict[str, Path], scheme: str) -> None:
    """Counted in bytes: at most 7 % more than the stored tensors (scales by row), and kv_b in the dtype of the run."""
    model = load_model(Checkpoint.open(folders[scheme]), device=CPU, dtype=torch.bfloat16)
    checkpoint = Checkpoint.open(folders[scheme])
    stored = sum(place.spec.nbytes for place in checkpoint.located.values())
    small = sum(place.spec.nbytes for name, place in checkpoint.located.items() if place.spec.nbytes < 16384 and "weight_" not in name)  # fmt: skip
    kv_b = next(layer.self_attn.kv_b_proj for layer in model.layers if hasattr(layer.self_attn, "kv_b_proj"))
    assert held_bytes(model) < 1.07 * stored + kv_b.nbytes + 2 * small  # vectors are float32
    plain = load_model(Checkpoint.open(folders["plain"]), device=CPU, dtype=torch.bfloat16)
    experts, codes = model.layers[1].mlp.experts, 4 if scheme in ("int4", "nf4", "fp4", "nvfp4", "mxfp4") else 8
    assert isinstance(experts, PackedExperts if scheme in ("nvfp4", "mxfp4") else ScaledExperts)
    numbers = 4 * 3 * 128 * 128
    assert numbers * codes / 8 < experts.nbytes < numbers * codes / 8 * 1.26
    assert isinstance(plain.layers[1].mlp.routed_expert_up_proj, torch.Tensor)
    up = model.layers[1].mlp.routed_expert_up_proj
    assert isinstance(up, StoredMatrix) and up.nbytes < 1.26 * 128 * 128 * codes / 8
    assert isinstance(model.layers[1].mlp.in_proj, StackedMatrix)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_float32_runs_compute_with_the_numbers_behind_the_codes(
    folders: dict[str, Path], tmp_path: Path, scheme: str
) -> None:
    """Against the same checkpoint decoded to float32 before: nothing is rounded on the way. A weight rounded to bfloat16 would
    show as 1e-3."""
    path = decoded(folders[scheme], tmp_path / "decoded")
    expected = everything(Session.open(path, device="cpu", dtype="float32", backend="reference"))
    for backend in ("auto", "reference"):
        found = everything(Session.open(folders[scheme], device="cpu", dtype="float32", backend=backend))
        assert relative(found, expected) < 2e-5  # sums in another order, amplified by three layers
    session = Session.open(folders[scheme], device="cpu", dtype="float32")
    everything(session)
    step = session.cache.recorded
    assert step is None or step.problem == ""  # decode steps are played back as with plain weights


@pytest.mark.parametrize("scheme", ("int4", "fp8-block", "nf4", "nvfp4"))
def test_bfloat16_runs_stay_near(folders: dict[str, Path], scheme: str) -> None:
    expected = everything(Session.open(folders[scheme], device="cpu", dtype="float32"))
    found = everything(Session.open(folders[scheme], device="cpu", dtype="bfloat16"))
    assert relative(found, expected) < 0.15  # activations of bfloat16, and a token that may visit another expert
    assert all(check.ok for check in Session.open(folders[scheme], device="cpu", dtype="bfloat16").check(IDS))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_experts_that_stream_are_held_as_the_others(folders: dict[str, Path], scheme: str) -> None:
    whole = Session.open(folders[scheme], device="cpu", dtype="float32")
    prepared = prepare_model(Checkpoint.open(folders[scheme]), device=CPU, dtype=torch.float32)
    session = Session.open(folders[scheme], device="cpu", dtype="float32")
    streamed = dataclasses.replace(prepared, slots=2).read()
    experts, resident = streamed.layers[1].mlp.experts, whole.model.layers[1].mlp.experts
    assert experts.nbytes * 2 == resident.nbytes
    session.model = streamed
    assert relative(everything(session), everything(whole)) < 2e-5


def declared(folder: Path) -> tuple[Weights, object]:
    checkpoint = Checkpoint.open(folder)
    weights = Weights(checkpoint, checkpoint.located, CPU, SILENT, torch.float32)
    return weights, load_experts(weights, checkpoint.config, PREFIX, range(4))


@pytest.mark.parametrize("scheme", ("int4", "int8", "fp8-channel", "fp8-block"))
def test_a_gpu_keeps_the_scales_of_blocks(folders: dict[str, Path], scheme: str, monkeypatch) -> None:
    """The stored form that Triton kernels take, on a device that only pretends; values are those of the CPU's form."""
    real = storage_module.storage_of
    monkeypatch.setattr("k3tool.model.weights.storage_of", lambda *a, gpu: real(*a, gpu=True))
    weights, experts = declared(folders[scheme])
    weights.fill()
    assert isinstance(experts, ScaledExperts) and experts.scale_rows == (128 if scheme == "fp8-block" else 1)
    values = decoded_parts(folders[scheme])
    for name in ("w1", "w3", "w2"):
        for expert in range(4):
            assert torch.equal(experts.matrix(name, expert), values[f"{PREFIX}.{expert}.{name}"])


def test_what_no_kernel_takes_is_widened_to_the_dtype_of_the_run(folders: dict[str, Path], monkeypatch) -> None:
    monkeypatch.setattr("k3tool.model.experts.GROUP_SIZES", (0,))
    monkeypatch.setattr("k3tool.model.weights.Weights._storage", lambda self, matrix: None)
    values = decoded_parts(folders["int4"])
    for dtype in (torch.float32, torch.bfloat16):
        model = load_model(Checkpoint.open(folders["int4"]), device=CPU, dtype=dtype)
        experts = model.layers[1].mlp.experts
        assert isinstance(experts, DenseExperts) and experts.w1.dtype == dtype
        assert torch.equal(experts.w1[2], values[f"{PREFIX}.2.w1"].to(dtype))
        up = model.layers[1].mlp.routed_expert_up_proj
        assert torch.equal(up, values[f"{PREFIX.removesuffix('.experts')}.routed_expert_up_proj"].to(dtype))


def test_a_code_that_stands_for_nan_is_refused(folders: dict[str, Path]) -> None:
    weights, experts = declared(folders["fp8-channel"])
    weights._conversions.append(lambda: experts.w3_codes[2].view(-1)[5].fill_(0xFF))
    with pytest.raises(CheckpointCorrupt, match=r"experts\.2\.w3"):
        weights.fill()


@pytest.mark.parametrize(
    ("scheme", "module", "part", "says"),
    [
        ("fp8-channel", "routed_expert_up_proj", "weight", "stands for NaN"),
        ("mxfp4", "routed_expert_up_proj", "weight_scale", "255"),
        ("nf4", "routed_expert_up_proj", "weight.quant_map", "table of nf4"),
        ("nf4", "experts.1.w2", "weight.quant_map", "table of nf4"),
    ],
)
def test_damaged_codes_are_named(folders: dict[str, Path], tmp_path: Path, scheme, module, part, says) -> None:
    path = shutil.copytree(folders[scheme], tmp_path / "damaged")
    name = f"{PREFIX.removesuffix('.experts')}.{module}.{part}"
    edit_checkpoint(path, lambda held: held[name].view(torch.uint8).fill_(255))
    with pytest.raises(CheckpointCorrupt, match=says):
        Session.open(path, device="cpu")
