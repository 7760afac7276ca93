"""What k3tool stores, decoded by the libraries whose formats these are; and what they store, decoded by k3tool."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from k3tool import formats
from k3tool.formats import codes
from k3tool.formats.convert import Stored, Target, convert
from tests.formats.cases import bf16_parts, gaussian, mxfp4_of, mxfp4_random
from tests.helpers import read_shard_header

pytestmark = pytest.mark.oracle
SHAPE = (256, 384)
GROUPS = {"int4": 32, "int8": 32}
CT = ("mxfp4", "nvfp4", "fp8-block", "fp8-channel", "int8", "int4")


@pytest.fixture(scope="module")
def torch():
    return pytest.importorskip("torch")


def tensors(torch, parts: dict[str, np.ndarray], stored: dict[str, tuple[str, tuple[int, ...]]]):
    """Parts as torch tensors of their stored dtypes."""
    views = {"BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn}
    made = {}
    for part, array in parts.items():
        tensor = torch.from_numpy(np.array(array))
        made[part] = tensor.view(views[stored[part][0]]) if stored[part][0] in views else tensor
    return made


def decompress(torch, scheme: str, parts, *, group_size: int | None = None, wide: bool = False) -> np.ndarray:
    """Values by compressed-tensors with the arguments that k3tool writes into config.json. wide: in float32."""
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    from k3tool.transform.quantize_config import Storage, _weights

    form, weights, activations = _weights(Storage(scheme, GROUPS.get(scheme, 0) if group_size is None else group_size))
    document = {"targets": ["Linear"], "weights": weights, "input_activations": activations, "format": form}
    args = QuantizationScheme.model_validate(json.loads(json.dumps(document)))
    state = tensors(torch, parts, formats.stored_tensors(scheme, SHAPE, group_size=group_size))
    if wide and state["weight_scale"].dtype == torch.bfloat16:
        state["weight_scale"] = state["weight_scale"].float()
    weight = BaseCompressor.get_value_from_registry(form).decompress(state, args)["weight"]
    return weight.float().numpy()


@pytest.mark.parametrize("origin", ["gaussian", "mxfp4 of gaussian", "random codes"])
@pytest.mark.parametrize("scheme", CT)
def test_compressed_tensors_decodes_what_is_claimed(torch, scheme: str, origin: str) -> None:
    """FP4 comes back in bfloat16: the value nearest to the claimed one. All else is compared in float32."""
    if origin == "gaussian":
        source = Stored("w", "bf16", bf16_parts(gaussian(*SHAPE)), SHAPE)
    else:
        parts = mxfp4_of(gaussian(*SHAPE)) if origin.startswith("mxfp4") else mxfp4_random(*SHAPE, 110, 123)
        source = Stored("w", "mxfp4", parts, SHAPE)
    stored = convert([source], Target(scheme))[0].parts if source.scheme != scheme else source.parts
    claimed = formats.dequantize(scheme, stored, SHAPE)
    theirs = decompress(torch, scheme, stored, wide=True)
    ours = codes.bf16_to_f32(codes.f32_to_bf16(claimed)) if "fp4" in scheme else claimed
    assert np.array_equal(ours.view(np.uint32), theirs.view(np.uint32))


@pytest.mark.parametrize("origin", ["bf16", "mxfp4"])
def test_compressed_tensors_takes_over_the_modelopt_spelling(torch, origin: str) -> None:
    """Their converter from ModelOpt's names and multiplier, then their decompression: the values that are claimed."""
    from compressed_tensors.entrypoints.convert import ModelOptNvfp4Converter

    source = bf16_parts(gaussian(*SHAPE)) if origin == "bf16" else mxfp4_random(*SHAPE, 110, 123)
    parts = convert([Stored("w", origin, source, SHAPE)], Target("nvfp4-modelopt"))[0].parts
    stored = tensors(torch, parts, formats.stored_tensors("nvfp4-modelopt", SHAPE))
    named = {f"layer.{part}": tensor for part, tensor in stored.items()}
    taken = ModelOptNvfp4Converter(targets=["re:layer"]).validate(named)
    names = ("weight_packed", "weight_scale", "weight_global_scale")
    assert set(taken) == {f"layer.{name}" for name in names}
    views = [taken[f"layer.{name}"] for name in names]
    again = {
        name: (tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor).numpy().reshape(shape)
        for name, tensor, shape in zip(names, views, (views[0].shape, views[1].shape, (1,)), strict=True)
    }
    claimed = formats.dequantize("nvfp4-modelopt", parts, SHAPE)
    theirs = decompress(torch, "nvfp4", again)
    assert np.array_equal(codes.bf16_to_f32(codes.f32_to_bf16(claimed)).view(np.uint32), theirs.view(np.uint32))


@pytest.mark.parametrize(("scheme", "group"), list(product(("int4", "int8"), (16, 64, 128, 0))))
def test_compressed_tensors_decodes_other_groups(torch, scheme: str, group: int) -> None:
    made = convert([Stored("w", "bf16", bf16_parts(gaussian(*SHAPE)), SHAPE)], Target(scheme, group))[0]
    claimed = formats.dequantize(scheme, made.parts, SHAPE)
    theirs = decompress(torch, scheme, made.parts, group_size=group, wide=True)
    assert np.array_equal(claimed, theirs)
    rounded = decompress(torch, scheme, made.parts, group_size=group)  # as engines do, scales in bfloat16
    assert np.array_equal(codes.bf16_to_f32(codes.f32_to_bf16(claimed)), rounded)


def test_compressed_tensors_decodes_every_code_under_every_scale(torch) -> None:
    """Byte 255 is NaN by the standard; compressed-tensors makes infinity of it, and k3tool refuses it everywhere."""
    nibbles = np.arange(16, dtype=np.uint8)
    packed = np.tile(nibbles[0::2] | (nibbles[1::2] << 4), (255, 2))
    parts = {"weight_packed": packed, "weight_scale": np.arange(255, dtype=np.uint8)[:, None]}
    from compressed_tensors.compressors.mxfp4.base import MXFP4PackedCompressor
    from compressed_tensors.quantization import preset_name_to_scheme

    state = {part: torch.from_numpy(array) for part, array in parts.items()}
    scheme = preset_name_to_scheme("MXFP4A16", ["Linear"])
    theirs = MXFP4PackedCompressor.decompress(state, scheme)["weight"].float().numpy()
    ours = formats.dequantize("mxfp4", parts, (255, 32))
    assert np.array_equal(ours.view(np.uint32), theirs.view(np.uint32))


@pytest.mark.parametrize(
    ("scheme", "preset"),
    list(zip(CT, ("MXFP4A16", "NVFP4A16", "FP8_BLOCK", "FP8_DYNAMIC", "W8A16", "W4A16"), strict=True)),
)
def test_k3tool_decodes_what_compressed_tensors_stores(torch, scheme: str, preset: str) -> None:
    """Compressed by their own compressor under their own scales; decoded by both."""
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import preset_name_to_scheme
    from compressed_tensors.quantization.utils import calculate_qparams

    args = preset_name_to_scheme(preset, ["Linear"])
    weights = args.weights
    values = torch.from_numpy(formats.dequantize("bf16", bf16_parts(gaussian(*SHAPE)), SHAPE)).bfloat16()
    group = weights.group_size or SHAPE[1]
    state = {"weight": values}
    if weights.block_structure:
        blocks = values.reshape(SHAPE[0] // 128, 128, SHAPE[1] // 128, 128).transpose(1, 2).flatten(2)
    else:
        blocks = values.reshape(SHAPE[0], -1, group)
    overall = None
    if scheme == "nvfp4":
        overall = torch.tensor([448 * 6 / float(values.abs().max())], dtype=torch.float32)
        state["weight_global_scale"] = overall
    scale, zero = calculate_qparams(blocks.amin(-1), blocks.amax(-1), weights, global_scale=overall)
    state |= {"weight_scale": scale, "weight_zero_point": zero}
    form = {"mxfp4": "mxfp4-pack-quantized", "nvfp4": "nvfp4-pack-quantized", "int4": "pack-quantized"}
    compressor = BaseCompressor.get_value_from_registry(
        form.get(scheme, "pack-quantized" if scheme == "int8" else "float-quantized")
    )
    stored = compressor.compress(state, args)
    theirs = compressor.decompress(dict(stored), args)["weight"].float().numpy()
    parts, found = {}, {}
    for part, tensor in stored.items():
        bits = {torch.bfloat16: torch.uint16, torch.float8_e4m3fn: torch.uint8}.get(tensor.dtype)
        parts[part] = (tensor.view(bits) if bits else tensor).numpy()
        found[part] = _spec(tensor)
    assert formats.detect(found, shape=SHAPE) == scheme
    ours = formats.dequantize(scheme, parts, SHAPE)
    assert np.array_equal(codes.bf16_to_f32(codes.f32_to_bf16(ours)), theirs)


def _spec(tensor):
    from tests.formats.cases import Spec

    names = {"bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3", "uint8": "U8", "int32": "I32", "float32": "F32"}
    return Spec(names.get(str(tensor.dtype).removeprefix("torch."), "I64"), tuple(tensor.shape))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_bitsandbytes_stores_the_same_bytes_and_reads_ours(torch, kind: str, dtype: str) -> None:
    functional = _bitsandbytes()
    weight = torch.from_numpy(gaussian(*SHAPE)).to(getattr(torch, dtype))
    scheme, name = {"bfloat16": ("bf16", "BF16"), "float16": ("f16", "F16"), "float32": ("f32", "F32")}[dtype]
    stored = weight.view(torch.uint16).numpy() if dtype == "bfloat16" else weight.numpy()
    parts = convert([Stored("w", scheme, {"weight": stored}, SHAPE)], Target(kind, dtype=name))[0].parts
    packed, state = functional.quantize_4bit(weight, quant_type=kind)
    theirs = {"weight": packed, **{f"weight.{key}": value for key, value in state.as_dict(packed=True).items()}}
    assert theirs.keys() == parts.keys()
    for part, tensor in theirs.items():
        assert np.array_equal(tensor.numpy().view(np.uint8), parts[part].view(np.uint8)), part
    assert _dequantized(torch, functional, parts, kind, dtype)


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_bitsandbytes_reads_experts_that_came_from_mxfp4(torch, kind: str) -> None:
    functional = _bitsandbytes()
    source = mxfp4_random(*SHAPE, 110, 123)
    parts = convert([Stored("w", "mxfp4", source, SHAPE)], Target(kind))[0].parts
    values = torch.from_numpy(formats.dequantize("mxfp4", source, SHAPE)).bfloat16()
    packed, state = functional.quantize_4bit(values, quant_type=kind)
    assert np.array_equal(packed.numpy(), parts["weight"])
    assert np.array_equal(state.absmax.numpy(), parts["weight.absmax"])
    assert _dequantized(torch, functional, parts, kind, "bfloat16")


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_k3tool_reads_quantized_statistics_of_bitsandbytes(torch, kind: str) -> None:
    functional = _bitsandbytes()
    weight = torch.from_numpy(gaussian(*SHAPE)).bfloat16()
    packed, state = functional.quantize_4bit(weight, quant_type=kind, compress_statistics=True)
    parts = {"weight": packed.numpy()}
    parts |= {f"weight.{key}": value.numpy() for key, value in state.as_dict(packed=True).items()}
    ours = codes.f32_to_bf16(formats.dequantize(kind, parts, SHAPE))
    theirs = functional.dequantize_4bit(packed, state)
    assert _same(torch, theirs, torch.from_numpy(ours).view(torch.bfloat16), kind)


def _bitsandbytes():
    pytest.importorskip("bitsandbytes")
    from bitsandbytes import functional

    return functional


def _dequantized(torch, functional, parts, kind: str, dtype: str) -> bool:
    """QuantState.from_dict and dequantize_4bit on our tensors give the claimed values, rounded to the recorded dtype."""
    state = {part: torch.from_numpy(np.array(array)) for part, array in parts.items()}
    packed = state.pop("weight")
    restored = functional.QuantState.from_dict(state, device=torch.device("cpu"))
    theirs = functional.dequantize_4bit(packed, restored)
    claimed = torch.from_numpy(formats.dequantize(kind, parts, SHAPE)).to(getattr(torch, dtype))
    return theirs.dtype == claimed.dtype and _same(torch, theirs, claimed, kind)


def _same(torch, theirs, claimed, kind: str) -> bool:
    """Bit for bit, but for the sign of zero in fp4: bitsandbytes reads code 8 as -0, and as +0 where it has AVX-512."""
    if kind == "fp4":
        theirs, claimed = theirs + 0.0, claimed + 0.0  # -0 + 0 is +0; every other value stays
    return torch.equal(theirs.view(torch.uint8), claimed.view(torch.uint8))


def test_ml_dtypes_has_the_same_code_tables() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    every = np.arange(256, dtype=np.uint8)
    assert np.array_equal(codes.E2M1, every[:16].view(ml_dtypes.float4_e2m1fn).astype(np.float32))
    assert np.array_equal(codes.E4M3, every.view(ml_dtypes.float8_e4m3fn).astype(np.float32), equal_nan=True)
    assert np.array_equal(codes.E8M0, every.view(ml_dtypes.float8_e8m0fnu).astype(np.float32), equal_nan=True)
    values = np.random.default_rng(0).uniform(-6.5, 6.5, 20000).astype(np.float32)
    theirs = np.clip(values, -6, 6).astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    assert np.array_equal(codes.round_e2m1(values), theirs)


def _modules(torch, names: list[str]):
    """A module tree with a Linear at every name, for compressed-tensors' own matching."""
    root = torch.nn.Module()
    for name in names:
        owner = root
        *path, leaf = name.split(".")
        for part in path:
            if not hasattr(owner, part):
                setattr(owner, part, torch.nn.Module())
            owner = getattr(owner, part)
        setattr(owner, leaf, torch.nn.Linear(1, 1, bias=False, device="meta"))
    return root


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"experts": "nvfp4"},
        {"experts": "int8", "latent": "fp8-channel"},
        {"experts": "nvfp4", "latent": "int4", "shared": "fp8-channel"},
        {"experts": "bf16", "attention": "fp8-channel"},
    ],
)
@pytest.mark.parametrize("spelling", ["released", "mlp", "bare"])
def test_compressed_tensors_understands_the_written_configuration(
    torch, mini: Path, tmp_path: Path, options: dict[str, str], spelling: str
) -> None:
    """Their matching gives each module the scheme that is on disk, and none to what is plain, in engines' spellings."""
    from compressed_tensors.quantization import QuantizationConfig
    from compressed_tensors.utils.match import match_named_modules, match_targets

    from k3tool.catalog import MatrixShapes
    from k3tool.config import K3Config
    from k3tool.names import parse_name
    from k3tool.quantize import quantize
    from k3tool.transform.quantize_config import _weights, summarize

    quantize(mini, tmp_path / "made", **options)
    document = json.loads((tmp_path / "made" / "config.json").read_bytes())
    config = QuantizationConfig.model_validate(document["text_config"]["quantization_config"])
    kinds = {}
    for shard in (tmp_path / "made").glob("*.safetensors"):
        for name, entry in read_shard_header(shard).items():
            if name != "__metadata__":
                kinds[name] = _Kind(entry["dtype"], tuple(entry["shape"]))
    summary = summarize(kinds.items(), MatrixShapes(K3Config.from_dict(document)))
    expected: dict[str, str | None] = {}
    for text in kinds:
        name = parse_name(text)
        if name is not None and name.module in summary:
            storage = summary[name.module][name.layer]
            plain = storage.scheme in ("bf16", "f32")
            path = name.module_path
            if spelling != "released":
                path = path.replace("block_sparse_moe", "mlp") if spelling == "mlp" else path
                path = path.removeprefix("language_model.") if spelling == "bare" else path
            expected[path] = None if plain else _weights(storage)[0]
    model = _modules(torch, list(expected))
    targets = {target: group for group in config.config_groups.values() for target in group.targets}
    found: dict[str, str | None] = dict.fromkeys(expected)
    for name, module in match_named_modules(model, targets, config.ignore):
        found[name] = targets[match_targets(name, module, targets)[0]].format
    wrong = {name: (found[name], expected[name]) for name in expected if found[name] != expected[name]}
    assert not wrong


class _Kind:
    def __init__(self, dtype: str, shape: tuple[int, ...]) -> None:
        self.dtype, self.shape = dtype, shape
