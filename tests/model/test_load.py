"""Loading: what is stored stays as stored, other schemes run, and everything wrong is named before it is read."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from k3tool import formats
from k3tool.checkpoint.reader import Checkpoint
from k3tool.errors import CapacityError, CheckpointCorrupt, CheckpointMissing, UnsupportedError, UsageError
from k3tool.events import Silent
from k3tool.generate import Session
from k3tool.kernels.linear import StackedMatrix, StoredMatrix
from k3tool.kernels.moe import DenseExperts, PackedExperts, ScaledExperts
from k3tool.layout import Layout
from k3tool.model import load as loading
from k3tool.model.attention import KdaAttention, MlaAttention
from k3tool.parallel.share import share_of
from k3tool.synthetic import tiny_config, write_checkpoint
from tests.model.edit import edit_checkpoint
from tests.model.twin import Twin

IDS = [5, 900, 17, 3, 3, 256, 1023, 44, 8, 700, 31]
L1 = "language_model.model.layers.1"
CPU = torch.device("cpu")


def relative(found, expected):
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


@pytest.fixture
def folder(tmp_path):
    write_checkpoint(tmp_path, tiny_config(num_layers=4), seed=3)
    return tmp_path


def logits(folder, dtype="float32", **options):
    return Session.open(folder, device="cpu", dtype=dtype, **options).prefill(IDS, all_logits=True)


def load(folder, **options):
    return loading.load_model(Checkpoint.open(folder), device=CPU, dtype=torch.float32, **options)


def quantize(tensors, module, scheme, **options):
    """Store one plain linear layer under another scheme."""
    values = tensors.pop(f"{module}.weight").float().numpy()
    for part, array in formats.quantize(scheme, values, **options).items():
        stored = formats.stored_tensors(scheme, values.shape, **options)[part][0]
        raw = torch.from_numpy(np.array(array, order="C"))
        if stored == "BF16":
            raw = raw.view(torch.bfloat16)
        elif stored == "F8_E4M3":
            raw = raw.view(torch.float8_e4m3fn)
        tensors[f"{module}.{part}"] = raw.reshape(array.shape)


# What stays as it is


def test_matrices_stay_as_stored_and_vectors_become_float32(folder):
    model = load(folder)
    assert model.embed_tokens.dtype == model.lm_head.dtype == torch.bfloat16
    for layer in model.layers:
        assert layer.self_attn.in_proj.dtype == layer.self_attn.o_proj.dtype == torch.bfloat16
        assert layer.input_layernorm.dtype == torch.float32
        if isinstance(layer.self_attn, KdaAttention):
            assert layer.self_attn.A_log.shape == (3,)
            assert layer.self_attn.conv1d.shape == (4, 3 * 96)
        else:
            assert isinstance(layer.self_attn, MlaAttention)
    experts = model.layers[1].mlp.experts
    assert isinstance(experts, PackedExperts)
    assert experts.w1_packed.dtype == experts.w1_scale.dtype == torch.uint8


def test_stacked_rows_and_packed_experts_are_the_bytes_of_the_file(folder):
    checkpoint = Checkpoint.open(folder)
    model = load(folder)
    attention = model.layers[1].self_attn
    row = 0
    for name in ("q_proj", "k_proj", "v_proj", "g_proj", "f_a_proj", "b_proj"):
        data = checkpoint.read(f"{L1}.self_attn.{name}.weight")
        rows = len(data) // (2 * 64)
        assert attention.in_proj[row : row + rows].view(torch.uint8).numpy().tobytes() == data
        row += rows
    assert row == attention.in_proj.shape[0]
    experts = model.layers[1].mlp.experts
    for expert in range(12):
        for matrix in ("w1", "w2", "w3"):
            for part in ("packed", "scale"):
                data = checkpoint.read(f"{L1}.block_sparse_moe.experts.{expert}.{matrix}.weight_{part}")
                assert getattr(experts, f"{matrix}_{part}")[expert].numpy().tobytes() == data


def test_only_the_first_layers_are_read(folder):
    read = []

    class Watch(Silent):
        def started(self, task, total, unit="bytes"):
            read.append(total)

    whole, two = load(folder, progress=Watch()), load(folder, layers=2, progress=Watch())
    assert (len(whole.layers), len(two.layers)) == (4, 2)
    checkpoint = Checkpoint.open(folder)
    late = ("layers.2.", "layers.3.", "vision_tower", "mm_projector")
    expected = sum(p.spec.nbytes for n, p in checkpoint.located.items() if not any(word in n for word in late))
    assert read[1] == expected < read[0]
    (folder / "model-00004-of-000007.safetensors").unlink()  # layer 3 is not needed
    load(folder, layers=2)
    with pytest.raises(CheckpointMissing, match="model-00004"):
        load(folder)


def test_progress_counts_every_byte_once(folder):
    advanced, total = [], []

    class Watch(Silent):
        def started(self, task, total_, unit="bytes"):
            total.append(total_)

        def advanced(self, task, amount):
            advanced.append(amount)

    load(folder, progress=Watch())
    assert sum(advanced) == total[0]


# Other spellings and schemes


@pytest.mark.parametrize("shape", [(3,), (32,), (1, 1, 3, 1), (128,)])
def test_a_log_in_every_stored_shape(folder, shape):
    expected = logits(folder)

    def change(tensors):
        for name in [name for name in tensors if name.endswith("A_log")]:
            flat = torch.zeros(int(np.prod(shape)))
            flat[:3] = tensors[name][:3]
            tensors[name] = flat.reshape(shape)

    edit_checkpoint(folder, change)
    assert torch.equal(logits(folder), expected)


def test_a_log_with_a_tail_is_refused(folder):
    edit_checkpoint(folder, lambda tensors: tensors[f"{L1}.self_attn.A_log"][5:6].fill_(0.25))
    with pytest.raises(CheckpointCorrupt, match=r"layers\.1\.self_attn\.A_log: entry 5 .* found 0\.25"):
        logits(folder)


def test_convolutions_without_their_middle_one(folder):
    expected = logits(folder)

    def change(tensors):
        for name in [name for name in tensors if "conv1d" in name]:
            tensors[name] = tensors[name].squeeze(1).contiguous()

    edit_checkpoint(folder, change)
    assert torch.equal(logits(folder), expected)


def test_plain_matrices_in_another_dtype(folder):
    """float32 holds every bfloat16: the logits are the same, and q alone in float32 joins a stack exactly. float16 does
    not, and is refused as `verify` refuses it."""
    q = f"{L1}.self_attn.q_proj.weight"

    def coarse(tensors):
        tensors[q] = (tensors[q].float() * 256).round().div(256).bfloat16()

    edit_checkpoint(folder, coarse)
    expected = logits(folder)

    def store_as(dtype):
        edit_checkpoint(folder, lambda tensors: tensors.update({q: tensors[q].to(dtype)}))

    store_as(torch.float16)
    with pytest.raises(CheckpointCorrupt, match=r"q_proj.weight: expected BF16 \[.*found F16"):
        load(folder)
    store_as(torch.float32)
    assert load(folder).layers[1].self_attn.in_proj.dtype == torch.float32
    assert relative(logits(folder), expected) < 1e-6


@pytest.mark.parametrize(
    "scheme,bound",
    [("nf4", 0.2), ("fp4", 0.3), ("int8", 0.02), ("int4", 0.3), ("fp8-channel", 0.1), ("mxfp4", 0.4), ("nvfp4", 0.3)],
)
def test_latent_projections_in_other_schemes(folder, scheme, bound):
    """The weights in memory are what the format stands for, not rounded; the model still makes sense."""
    module = f"{L1}.block_sparse_moe.routed_expert_up_proj"
    original = load(folder).layers[1].mlp.routed_expert_up_proj.float()
    edit_checkpoint(folder, lambda tensors: quantize(tensors, module, scheme))
    checkpoint = Checkpoint.open(folder)
    parts = {
        name[len(module) + 1 :]: formats.view(checkpoint.read(name), place.spec.dtype, place.spec.shape)
        for name, place in checkpoint.located.items()
        if name.startswith(f"{module}.")
    }
    expected = torch.from_numpy(formats.dequantize(scheme, parts, (64, 32)))
    held = load(folder).layers[1].mlp.routed_expert_up_proj
    assert isinstance(held, StoredMatrix) and held.nbytes < 64 * 32 * 1.3
    found = held.rows(slice(None))
    assert torch.equal(found, expected)
    assert 0 < relative(found, original) < bound
    assert torch.isfinite(logits(folder)).all()


def test_a_quantized_projection_joins_a_stack(folder):
    edit_checkpoint(folder, lambda tensors: quantize(tensors, f"{L1}.block_sparse_moe.routed_expert_down_proj", "nf4"))
    stack = load(folder).layers[1].mlp.in_proj
    assert isinstance(stack, StackedMatrix) and stack.shape == (160, 64)
    assert isinstance(stack.parts[0], StoredMatrix) and stack.parts[0].shape == (32, 64)
    checkpoint = Checkpoint.open(folder)
    shared = checkpoint.read(f"{L1}.block_sparse_moe.shared_experts.gate_proj.weight")
    assert stack.parts[1].view(torch.uint8).numpy().tobytes() == shared


def experts_in(folder, scheme):
    """Rewrite all experts in another scheme; returns the logits of the same values as plain float32 experts."""
    decoded = {}

    def change(tensors):
        names = sorted({name.rsplit(".", 1)[0] for name in tensors if ".experts." in name})
        for module in names:
            packed, scale = tensors.pop(f"{module}.weight_packed"), tensors.pop(f"{module}.weight_scale")
            shape = (packed.shape[0], 2 * packed.shape[1])
            values = formats.dequantize(
                "mxfp4", {"weight_packed": packed.numpy(), "weight_scale": scale.numpy()}, shape
            )
            tensors[f"{module}.weight"] = torch.from_numpy(values)
            if scheme != "plain":
                quantize(tensors, module, scheme)
            decoded[module] = values

    edit_checkpoint(folder, change)


@pytest.mark.parametrize("scheme", ["plain", "nvfp4", "nvfp4-modelopt", "int8", "nf4"])
def test_experts_in_other_schemes(folder, scheme):
    expected = logits(folder)
    experts_in(folder, scheme)
    experts = load(folder).layers[1].mlp.experts
    kind = PackedExperts if scheme.startswith("nvfp4") else DenseExperts if scheme == "plain" else ScaledExperts
    assert isinstance(experts, kind)
    found = logits(folder)
    if scheme == "plain":
        assert relative(found, expected) < 1e-6
    else:
        assert relative(found, expected) < 0.2  # requantized weights: an error of several percent in each expert
    checkpoint = Checkpoint.open(folder)
    module = f"{L1}.block_sparse_moe.experts.7.w2"
    parts = {
        name[len(module) + 1 :]: formats.view(checkpoint.read(name), place.spec.dtype, place.spec.shape)
        for name, place in checkpoint.located.items()
        if name.startswith(f"{module}.")
    }
    stored = "f32" if scheme == "plain" else scheme
    values = torch.from_numpy(formats.dequantize(stored, parts, (32, 32)).copy())
    held = experts.matrix("w2", 7)
    assert relative(held, values) < 1e-7


def test_experts_of_one_layer_must_share_a_scheme(folder):
    def change(tensors):
        module = f"{L1}.block_sparse_moe.experts.4.w3"
        shape = tensors.pop(f"{module}.weight_packed").shape
        tensors.pop(f"{module}.weight_scale")
        tensors[f"{module}.weight"] = torch.zeros(shape[0], 2 * shape[1], dtype=torch.bfloat16)

    edit_checkpoint(folder, change)
    with pytest.raises(CheckpointCorrupt, match=r"experts\.4\.w3 is stored as bf16, .*experts\.0\.w1 as mxfp4"):
        logits(folder)


# What is wrong is named


def remove(name):
    return lambda tensors: tensors.pop(name)


def reshape(name, *shape):
    def change(tensors):
        tensors[name] = torch.zeros(shape, dtype=tensors[name].dtype)

    return change


def add(name, value):
    return lambda tensors: tensors.update({name: value})


@pytest.mark.parametrize(
    "change,kind,message",
    [
        (remove(f"{L1}.self_attn.q_proj.weight"), CheckpointMissing, r"layers\.1\.self_attn\.q_proj\.weight"),
        (remove(f"{L1}.input_layernorm.weight"), CheckpointMissing, r"layers\.1\.input_layernorm\.weight"),
        (
            remove(f"{L1}.block_sparse_moe.experts.7.w2.weight_scale"),
            CheckpointMissing,
            r"experts\.7\.w2.*weight_scale",
        ),
        (
            remove(f"{L1}.block_sparse_moe.experts.7.w2.weight_packed"),
            CheckpointMissing,
            r"holds no tensor .*experts\.7\.w2\.weight",
        ),
        (remove("language_model.lm_head.weight"), CheckpointMissing, r"lm_head\.weight"),
        (
            reshape(f"{L1}.self_attn.o_proj.weight", 64, 95),
            CheckpointCorrupt,
            r"o_proj\.weight.*\[64, 96\].*\[64, 95\]",
        ),
        (reshape(f"{L1}.mlp_res_proj.weight", 2, 64), CheckpointCorrupt, r"mlp_res_proj.*\[1, 64\].*\[2, 64\]"),
        (reshape(f"{L1}.self_attn.dt_bias", 95), CheckpointCorrupt, r"dt_bias.*\[96\].*\[95\]"),
        (reshape(f"{L1}.self_attn.A_log", 2), CheckpointCorrupt, r"A_log.*\[3\].*\[2\]"),
        (
            reshape(f"{L1}.block_sparse_moe.experts.3.w1.weight_packed", 32, 32),
            CheckpointCorrupt,
            r"experts\.3\.w1.*\[32, 32\].*\[32, 1\]",
        ),
        (add(f"{L1}.self_attn.q_proj.bias", torch.zeros(96)), CheckpointCorrupt, r"no tensor .*q_proj\.bias"),
        (add(f"{L1}.self_attn.q_a_proj.weight", torch.zeros(4, 4)), CheckpointCorrupt, r"no tensor .*q_a_proj\.weight"),
        (
            add(f"{L1}.self_attn.q_proj.weight_g_idx", torch.zeros(4)),
            UnsupportedError,
            r"q_proj: no known storage scheme",
        ),
        (
            lambda tensors: tensors[f"{L1}.block_sparse_moe.experts.9.w3.weight_scale"][3:4].fill_(255),
            CheckpointCorrupt,
            r"experts\.9\.w3\.weight_scale holds byte 255",
        ),
        (
            lambda tensors: tensors.update({f"{L1}.self_attn.dt_bias": torch.zeros(96, dtype=torch.int32)}),
            CheckpointCorrupt,
            r"dt_bias: expected BF16, F16 or F32, found I32",
        ),
    ],
)
def test_what_is_wrong_is_named(folder, change, kind, message):
    edit_checkpoint(folder, change)
    with pytest.raises(kind, match=message) as caught:
        logits(folder)
    assert caught.value.hint


def test_a_failed_start_leaves_no_thread_compiling(folder, monkeypatch):
    release, begun = threading.Event(), []

    def compile_slowly(config, dtype):
        begun.append(threading.Thread(target=release.wait, args=(30,), daemon=True))
        begun[0].start()
        threading.Timer(0.2, release.set).start()
        return begun[0]

    monkeypatch.setattr("k3tool.model.open.start_warming", compile_slowly)
    edit_checkpoint(folder, remove(f"{L1}.input_layernorm.weight"))
    with pytest.raises(CheckpointMissing):
        Session.open(folder, device="cpu")
    assert begun and not begun[0].is_alive()


def test_layers_beyond_the_model_are_refused(folder):
    for layers in (0, 5, -1):
        with pytest.raises(UsageError, match="4 layers"):
            load(folder, layers=layers)


def test_memory_is_checked_before_anything_is_read(folder, monkeypatch):
    monkeypatch.setattr(loading.Weights, "fill", lambda self: None if self.measuring else pytest.fail("read"))
    with pytest.raises(CapacityError, match="do not fit in 100 kB"):
        load(folder, memory_bytes=100_000)
    monkeypatch.setattr(loading, "available_bytes", lambda: 50_000)
    with pytest.raises(CapacityError, match=r"do not fit in 50 kB") as caught:
        load(folder)
    assert caught.value.details["needed_bytes"] > 50_000


def test_bytes_counted_are_bytes_held(folder):
    checkpoint = Checkpoint.open(folder)
    share = share_of(checkpoint.config, Layout(), Layout().place(0))
    located = loading._locate(checkpoint, share)
    measured = loading.Weights(checkpoint, located, CPU, None)
    loading._build(measured, share, torch.float32)
    matrices = sum(place.spec.nbytes for place in located.values() if len(place.spec.shape) > 1)
    assert matrices < measured.nbytes < matrices * 1.1  # vectors grow to float32


def test_the_loaded_model_computes_what_the_files_say(folder):
    assert relative(logits(folder), Twin(folder)(IDS)[0]) < 1e-5
