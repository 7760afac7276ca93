"""FP4 decoding: every code with every scale, bit for bit, against tables and against packages written elsewhere."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

from k3tool.kernels import cpu as compiled
from k3tool.kernels.dispatch import use
from k3tool.kernels.mxfp4 import decode_values, group_size_of

MAGNITUDES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
needs_compiler = pytest.mark.skipif(not compiled.available(), reason="compiled kernels are not available here")
backends = pytest.mark.parametrize("backend", ["reference", pytest.param("auto", marks=needs_compiler)])


def every_code_and_scale(group: int) -> tuple[Tensor, Tensor]:
    """256 rows, one per scale byte; both nibbles of every byte take all 16 codes."""
    pairs = torch.tensor([low | high << 4 for low, high in itertools.product(range(16), repeat=2)], dtype=torch.uint8)
    return pairs.repeat(256, 1), torch.arange(256, dtype=torch.uint8).unsqueeze(1).repeat(1, 512 // group)


def bits(tensor: Tensor) -> Tensor:
    """As integers, so that -0 and +0 differ; every NaN is one and the same."""
    whole = torch.where(tensor.isnan(), torch.full_like(tensor, float("nan")), tensor)
    return whole.view(torch.int32 if tensor.dtype == torch.float32 else torch.int16)


@backends
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_all_codes_and_e8m0_scales(backend: str, dtype: torch.dtype) -> None:
    packed, scale = every_code_and_scale(32)
    table = [*MAGNITUDES, *(-m for m in MAGNITUDES)]
    codes = [code for byte in packed[0].tolist() for code in (byte & 15, byte >> 4)]
    exact = np.array([table[code] for code in codes]) * 2.0 ** (np.arange(256.0)[:, None] - 127)  # float64 holds all
    exact[255] = np.nan
    with np.errstate(over="ignore", invalid="ignore"):
        wanted = torch.from_numpy(exact.astype(np.float32)).to(dtype)
    with use(backend):
        assert torch.equal(bits(decode_values(packed, scale, dtype)), bits(wanted))
        as_scale = scale.view(torch.float8_e8m0fnu)
        assert torch.equal(bits(decode_values(packed, as_scale, dtype)), bits(wanted))


def test_released_bytes() -> None:
    """The first bytes of layer 1, expert 0, w1 of the released checkpoint and the values they stand for."""
    packed = torch.zeros(1, 16, dtype=torch.uint8)
    packed[0, :4] = torch.tensor([22, 185, 206, 35])
    wanted = [0.0625, 0.0078125, -0.0078125, -0.0234375, -0.0625, -0.03125, 0.0234375, 0.015625]
    assert decode_values(packed, torch.tensor([[121]], dtype=torch.uint8))[0, :8].tolist() == wanted


@pytest.mark.oracle
@backends
def test_compressed_tensors_agrees(backend: str) -> None:
    base = pytest.importorskip("compressed_tensors.compressors.mxfp4.base")
    from compressed_tensors.quantization import preset_name_to_scheme

    packed, scale = every_code_and_scale(32)
    packed, scale = packed[1:255], scale[1:255]  # it decodes byte 255 as infinity
    scheme = preset_name_to_scheme("MXFP4A16", ["Linear"])
    state = {"weight_packed": packed, "weight_scale": scale}
    theirs = base.MXFP4PackedCompressor.decompress(state, scheme)["weight"].float()
    with use(backend):
        ours = decode_values(packed, scale, torch.float32)
    inside = scale.repeat_interleave(32, dim=1) > 2  # below, its bfloat16 scale meets denormals
    assert torch.equal(bits(ours)[inside], bits(theirs)[inside])


@pytest.mark.oracle
@backends
def test_ml_dtypes_agrees(backend: str) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    packed, scale = every_code_and_scale(32)
    codes = np.stack([packed.numpy() & 15, packed.numpy() >> 4], -1).reshape(256, 512)
    values = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    with np.errstate(all="ignore"):
        scales = scale.numpy().view(ml_dtypes.float8_e8m0fnu).astype(np.float64).repeat(32, axis=1)
        theirs = torch.from_numpy((values * scales).astype(np.float32))
    with use(backend):
        assert torch.equal(bits(decode_values(packed, scale, torch.float32)), bits(theirs))


@backends
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_nvfp4_divides_by_the_global_scale(backend: str, dtype: torch.dtype) -> None:
    packed, scale = every_code_and_scale(16)
    scale = scale.view(torch.float8_e4m3fn)
    divisor = torch.tensor([3.7])
    factors = (scale.float() / divisor).repeat_interleave(16, dim=1)
    table = torch.tensor([*MAGNITUDES, *(-m for m in MAGNITUDES)])
    codes = torch.stack([packed & 15, packed >> 4], -1).flatten(1).long()
    with use(backend):
        found = decode_values(packed, scale, dtype, global_scale=divisor)
    assert torch.equal(bits(found), bits((table[codes] * factors).to(dtype)))


@needs_compiler
@pytest.mark.parametrize("group", [16, 32])
@pytest.mark.parametrize("columns", [32, 64, 96, 160, 288])
def test_any_width_and_leading_dimensions(group: int, columns: int) -> None:
    draw = torch.Generator().manual_seed(columns)
    packed = torch.randint(0, 256, (3, 5, columns // 2), generator=draw).to(torch.uint8)
    scale = torch.randint(100, 130, (3, 5, columns // group), generator=draw).to(torch.uint8)
    for dtype in (torch.float32, torch.bfloat16):
        with use("reference"):
            wanted = decode_values(packed, scale, dtype)
        out = torch.full(wanted.shape, float("nan"), dtype=dtype)
        assert decode_values(packed, scale, dtype, out=out) is out
        assert torch.equal(bits(out), bits(wanted))
        strided = torch.stack([packed, packed], -1)[..., 0]
        assert torch.equal(bits(decode_values(strided, scale, dtype)), bits(wanted))


@needs_compiler
def test_odd_widths_of_a_nibble_block() -> None:
    """Widths that are multiples of 16 only, as NVFP4 allows."""
    packed = torch.arange(7 * 24, dtype=torch.uint8).view(7, 24)
    scale = torch.arange(100, 121, dtype=torch.uint8).view(7, 3)
    assert group_size_of(packed, scale) == 16
    with use("reference"):
        wanted = decode_values(packed, scale, torch.float32)
    assert torch.equal(bits(decode_values(packed, scale, torch.float32)), bits(wanted))


def test_nothing_to_decode() -> None:
    empty = decode_values(torch.zeros(0, 16, dtype=torch.uint8), torch.zeros(0, 1, dtype=torch.uint8))
    assert empty.shape == (0, 32)


def test_what_does_not_fit_is_refused() -> None:
    packed, scale = torch.zeros(2, 16, dtype=torch.uint8), torch.zeros(2, 1, dtype=torch.uint8)
    for bad in (
        (packed.int(), scale, torch.float32),
        (packed, scale.int(), torch.float32),
        (packed, scale[:1], torch.float32),
        (packed, scale[:, :0], torch.float32),
        (packed, scale, torch.float16),
    ):
        with pytest.raises(ValueError):
            decode_values(*bad)
    with pytest.raises(ValueError, match="out"):
        decode_values(packed, scale, torch.float32, out=torch.zeros(2, 31))
