"""The torch form of every lossy format gives the bytes of the compiled kernels, on whatever device torch has."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from k3tool import formats
from k3tool.errors import CheckpointCorrupt, UnsupportedError
from k3tool.formats import convert as cpu
from k3tool.formats import device
from k3tool.formats.convert import Stored, Target, convert
from k3tool.formats.device import convert_on
from tests.formats.cases import WRITTEN, bf16_parts, gaussian, mxfp4_of, mxfp4_random, same_parts

SHAPE = (384, 256)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES)
def where(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    return request.param


def alike(where: str, sources: list[Stored], target: Target) -> None:
    """Bytes to the bit, sums up to their order."""
    for found, expected in zip(convert_on(where, sources, target), convert(sources, target), strict=True):
        assert same_parts(found.parts, expected.parts)
        assert found.measured == pytest.approx(expected.measured, rel=1e-12)


def stored(scheme: str, values: np.ndarray, weight: np.ndarray | None = None) -> Stored:
    return Stored("the module", scheme, formats.quantize(scheme, values), values.shape, weight)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("search", [False, True])
@pytest.mark.parametrize("scheme", ["bf16", "f16", "f32"])
@pytest.mark.parametrize("target", WRITTEN)
def test_bytes_are_those_of_the_compiled_kernels(
    where: str, target: str, scheme: str, search: bool, weighted: bool
) -> None:
    weight = np.random.default_rng(5).exponential(1, SHAPE[1]).astype(np.float32) if weighted else None
    alike(where, [stored(scheme, gaussian(*SHAPE), weight)], Target(target, search=search))


@pytest.mark.parametrize("group", [16, 32, 128, 0])
@pytest.mark.parametrize("target", ["int4", "int8"])
def test_integer_groups(where: str, target: str, group: int) -> None:
    alike(where, [stored("bf16", gaussian(*SHAPE))], Target(target, group))


def test_modules_that_share_a_global_scale(where: str) -> None:
    pair = [stored("bf16", gaussian(*SHAPE)), stored("bf16", gaussian(128, 256, seed=2, scale=3.0))]
    alike(where, pair, Target("nvfp4"))
    assert convert_on(where, pair, Target("nvfp4"))[0].parts["weight_global_scale"] == nvfp4_scale(pair)


def nvfp4_scale(sources: list[Stored]) -> np.ndarray:
    return convert(sources, Target("nvfp4"))[1].parts["weight_global_scale"]


@pytest.mark.parametrize("target", WRITTEN)
def test_many_batches(where: str, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "BATCH_VALUES", 1)
    alike(where, [stored("bf16", gaussian(*SHAPE))], Target(target))


@settings(max_examples=150, deadline=None)
@given(
    target=st.sampled_from([name for name in WRITTEN if name != "fp8-block"]), search=st.booleans(),
    seed=st.integers(0, 2**31), scale=st.floats(-60, 60), spread=st.floats(0, 8), whole=st.booleans(),
)  # fmt: skip
def test_any_values(target: str, search: bool, seed: int, scale: float, spread: float, whole: bool) -> None:
    """Far from 1, over many binades, and on coarse grids, where candidates tie."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((4, 128)) * 2.0 ** (scale + spread * rng.standard_normal((4, 128)))
    if whole:
        values = np.round(rng.standard_normal((4, 128)) * 4) * 2.0 ** round(scale)
    weight = rng.integers(0, 3, 128).astype(np.float32) if whole else None
    alike("cpu", [stored("f32", values.astype(np.float32), weight)], Target(target, search=search))


@pytest.mark.parametrize("target", WRITTEN)
def test_mxfp4_sources_go_by_table_or_are_computed_alike(where: str, target: str) -> None:
    weight = np.random.default_rng(5).exponential(1, 256).astype(np.float32)
    for parts in (mxfp4_of(gaussian(*SHAPE)), mxfp4_random(*SHAPE, 1, 20), mxfp4_random(*SHAPE, 110, 123)):
        alike(where, [Stored("the module", "mxfp4", parts, SHAPE, weight)], Target(target))
        if target in ("int4", "int8"):
            alike(where, [Stored("the module", "mxfp4", parts, SHAPE)], Target(target, 128))


@pytest.mark.parametrize("target", ["int4", "mxfp4", "nvfp4", "fp8-block", "fp8-channel"])
def test_rows_in_doubt_are_decided_by_the_compiled_kernel(
    where: str, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With everything in doubt the sums of the device do not matter at all: spoil the choice, and nothing changes."""
    monkeypatch.setattr(device, "_doubt", lambda terms: 10.0)
    offer = device._Choice.offer

    def spoiled(self: device._Choice, stored: torch.Tensor, error: torch.Tensor, terms: int) -> None:
        offer(self, stored, error, terms)
        self.best = stored

    monkeypatch.setattr(device._Choice, "offer", spoiled)
    alike(where, [stored("bf16", gaussian(*SHAPE))], Target(target))
    monkeypatch.setattr(device._Work, "_decide", lambda self, choice, *_: choice.best)
    with pytest.raises(AssertionError):
        alike(where, [stored("bf16", gaussian(*SHAPE))], Target(target))


def test_few_rows_are_in_doubt(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(device.convert, "recognized", lambda sources, target: sources)  # compiled, and no decision
    for name in ("quantize_integer", "quantize_mxfp4", "quantize_nvfp4", "quantize_fp8"):
        monkeypatch.setattr(device.compiled, name, lambda *_: asked.append(1))
    values = np.random.default_rng(1).standard_normal(SHAPE).astype(np.float32)
    for target in ("int4", "int8", "mxfp4", "nvfp4", "fp8-block", "fp8-channel"):
        convert_on("cpu", [stored("f32", values)], Target(target))
    assert not asked


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("target", WRITTEN)
def test_what_is_no_number_is_refused(where: str, target: str, bad: float) -> None:
    values = gaussian(*SHAPE)
    values[200, 77] = bad
    with np.errstate(invalid="ignore"), pytest.raises(CheckpointCorrupt, match="the module holds NaN or infinity"):
        convert_on(where, [Stored("the module", "f32", {"weight": values}, SHAPE)], Target(target))


def test_shapes_are_checked_as_always(where: str) -> None:
    with pytest.raises(UnsupportedError, match="the module: int4 cannot hold"):
        convert_on(where, [Stored("the module", "bf16", bf16_parts(gaussian(4, 136)), (4, 136))], Target("int4"))


def test_other_storage_is_decoded_on_the_cpu(where: str) -> None:
    alike(where, [stored("nf4", gaussian(*SHAPE))], Target("bf16"))


def test_a_device_that_is_not_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UnsupportedError, match="torch finds no GPU") as caught:
        device.check_device("cuda")
    assert "byte for byte" in caught.value.hint
    device.check_device("cpu")
    assert cpu.by_table(Stored("x", "mxfp4", mxfp4_random(32, 64, 100, 110), (32, 64)), Target("nvfp4"))
