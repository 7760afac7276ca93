"""Re-pairing and Q8_0: every code, every scale, the compiled form against the readable one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3tool.errors import CheckFailed, CheckpointCorrupt, UnsupportedError
from k3tool.formats import mxfp4
from k3tool.formats.measure import Measured
from k3tool.gguf import blocks, compiled
from k3tool.transform.gguf import MXFP4_SOURCE, DecayRate, Recode, Repack, ScoreVector, can_round

ALL_SCALES = np.arange(255, dtype=np.uint8)


def compiled_repack(packed: np.ndarray, scale: np.ndarray) -> np.ndarray:
    out = np.full((scale.size, 17), 0xEE, np.uint8)
    compiled.repack(packed, scale, out)
    return out


def test_one_block_by_hand():
    """Byte i of the source holds values 2i and 2i + 1; byte j of the block holds values j and j + 16."""
    codes = [(3 * j + 1) % 16 for j in range(32)]
    packed = np.array([codes[2 * i] | codes[2 * i + 1] << 4 for i in range(16)], np.uint8)
    expected = [200, *(codes[j] | codes[j + 16] << 4 for j in range(16))]
    assert blocks.repack(packed[None], np.array([200], np.uint8))[0].tolist() == expected
    assert compiled_repack(packed[None], np.array([200], np.uint8))[0].tolist() == expected


def test_every_byte_in_every_place_under_every_scale():
    packed = np.stack([np.roll(np.arange(256, dtype=np.uint8), shift)[:16] for shift in range(255)])
    once = blocks.repack(packed, ALL_SCALES)
    assert np.array_equal(compiled_repack(packed, ALL_SCALES), once)
    source = mxfp4.dequantize({"weight_packed": packed, "weight_scale": ALL_SCALES[:, None]}, (255, 32))
    assert np.array_equal(blocks.unpack_mxfp4(once).view(np.uint32), source.view(np.uint32))  # -0 included


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 70), st.integers(0, 2**32 - 1))
def test_compiled_repacking_is_the_readable_one(groups: int, seed: int):
    rng = np.random.default_rng(seed)
    packed = rng.integers(0, 256, (groups, 16), dtype=np.uint8)
    scale = rng.integers(0, 255, groups, dtype=np.uint8)
    assert np.array_equal(compiled_repack(packed, scale), blocks.repack(packed, scale))


def compiled_q8_0(values: np.ndarray) -> np.ndarray:
    steps, codes = np.empty(values.shape[0], np.float32), np.empty(values.size, np.int8)
    assert compiled.quantize_q8_0(values.reshape(-1), steps, codes) == -1
    with np.errstate(over="ignore"):
        halves = steps.astype("<f2").view(np.uint8).reshape(-1, 2)
    return np.concatenate([halves, codes.view(np.uint8).reshape(-1, 32)], axis=1)


def test_q8_0_rounds_half_away_from_zero():
    values = np.zeros((1, 32), np.float32)
    values[0, :6] = [127, 0.5, -0.5, 1.5, 2.5, -126.5]
    block = blocks.quantize_q8_0(values)
    assert block[0, :2].tobytes() == np.float16(1).tobytes()
    assert block[0, 2:8].view(np.int8).tolist() == [127, 1, -1, 2, 3, -127]
    assert np.array_equal(compiled_q8_0(values), block)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 40), st.integers(-40, 15), st.integers(0, 2**32 - 1))
def test_compiled_q8_0_is_the_readable_one(groups: int, exponent: int, seed: int):
    rng = np.random.default_rng(seed)
    values = (rng.standard_normal((groups, 32)) * 2.0**exponent).astype(np.float32)
    values[rng.random(values.shape) < 0.1] = 0
    assert np.array_equal(compiled_q8_0(values), blocks.quantize_q8_0(values))


def test_q8_0_of_nothing_and_of_almost_nothing():
    values = np.zeros((3, 32), np.float32)
    values[1, 3], values[2] = 1e-45, 1.2e-38
    for block in (blocks.quantize_q8_0(values), compiled_q8_0(values)):
        assert not blocks.dequantize_q8_0(block).any() and not np.isnan(blocks.dequantize_q8_0(block)).any()


def test_q8_0_names_the_group_that_is_not_finite():
    values = np.zeros((4, 32), np.float32)
    values[2, 31] = np.inf
    assert compiled.quantize_q8_0(values.reshape(-1), np.empty(4, np.float32), np.empty(128, np.int8)) == 2


# Transforms


def test_a_nan_scale_is_refused_by_name():
    packed, scale = np.zeros(64, np.uint8), np.array([1, 2, 255, 4], np.uint8)
    for transform in (Repack("layer.w1"), Recode("layer.w1", "routed_experts", MXFP4_SOURCE, "BF16", 32)):
        with pytest.raises(CheckpointCorrupt, match=r"layer\.w1: scale 2 is the byte 255"):
            transform.apply([packed, scale])


def raw(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8)


def bf16(values: np.ndarray) -> np.ndarray:
    return raw((values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16))


def test_what_cannot_round_is_not_measured():
    assert not can_round("BF16", "F32") and not can_round(MXFP4_SOURCE, "BF16") and not can_round("BF16", "BF16")
    assert can_round("BF16", "F16") and can_round("F32", "BF16") and can_round("BF16", "Q8_0")
    applied = Recode("w", "kda", "BF16", "F32", 4).apply([bf16(np.array([1.5, -0.0, 2, 3]))])
    assert applied.measured is None
    assert np.array_equal(
        np.asarray(applied.outputs[0]).view(np.uint32), raw(np.array([1.5, -0.0, 2, 3], "<f4")).view(np.uint32)
    )


@pytest.mark.parametrize("target", ["F16", "Q8_0", "BF16"])
def test_what_rounds_is_measured(target):
    rng = np.random.default_rng(1)
    values = rng.standard_normal(640).astype(np.float32)
    transform = Recode("w", "kda", "F32", target, 64)
    applied = transform.apply([raw(values)])
    data = np.asarray(applied.outputs[0]).view(np.uint8).reshape(-1)
    if target == "F16":
        stored = data.view("<f2").astype(np.float64)
    elif target == "BF16":
        stored = (data.view("<u2").astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    else:
        stored = blocks.dequantize_q8_0(data.reshape(-1, 34)).reshape(-1).astype(np.float64)
    sums = Measured.from_json(applied.measured.sums)
    error = np.abs(stored - values)
    assert sums.values == 640 and sums.peak == error.max() > 0
    assert sums.relative_error == pytest.approx(np.sqrt((error**2).sum() / (values.astype(np.float64) ** 2).sum()))
    with pytest.raises(CheckFailed, match=r"w: F32 to \w+ changes values"):
        Recode("w", "kda", "F32", target, 64, exact=True).apply([raw(values)])


def test_exact_passes_where_nothing_changes():
    values = np.array([1.0, -2.5, 0.0, 8.0], np.float32)
    applied = Recode("w", "kda", "F32", "F16", 4, exact=True).apply([raw(values)])
    assert Measured.from_json(applied.measured.sums).exact


@pytest.mark.parametrize("target", ["F16", "Q8_0"])
def test_values_beyond_the_range_of_the_target_are_refused(target):
    values = np.zeros(32, np.float32)
    values[5] = 1e30
    with pytest.raises(UnsupportedError, match=f"w: holds 1e\\+30, beyond the range of {target}"):
        Recode("w", "kda", "F32", target, 32).apply([raw(values)])


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_values_that_are_no_numbers_are_refused(bad):
    values = np.zeros(32, np.float32)
    values[5] = bad
    for target in ("F16", "Q8_0", "BF16"):
        with pytest.raises(CheckpointCorrupt, match="w: holds values that are not finite"):
            Recode("w", "kda", "F32", target, 32).apply([raw(values)])


@pytest.mark.parametrize(("source", "item"), [("BF16", "<u2"), ("F32", "<f4")])
def test_turning_moves_bits_only(source, item):
    rows = np.arange(12).astype(item).reshape(3, 4)
    applied = Recode("w", "mla", source, source, 4, turned=True).apply([raw(rows)])
    assert np.array_equal(np.asarray(applied.outputs[0]).view(item), rows.T)


def test_turning_with_a_change_of_type():
    rows = np.arange(12, dtype=np.float32).reshape(3, 4)
    applied = Recode("w", "mla", "BF16", "F32", 4, turned=True).apply([bf16(rows)])
    assert np.array_equal(np.asarray(applied.outputs[0]), rows.T)


def test_score_vectors_are_products_in_float32():
    norm, projection = np.array([1.5, -3.0], np.float32), np.array([0.1, 7.0], np.float32)
    (data,) = ScoreVector(("BF16", "F32")).apply([bf16(norm), raw(projection)]).outputs
    assert np.array_equal(data, norm * projection) and data.dtype == np.float32


def test_decay_rates_are_correctly_rounded():
    a_log = np.array([-0.5, 0.0, 1.0, 2.75], np.float32)
    (data,) = DecayRate("F32").apply([raw(a_log)]).outputs
    assert np.array_equal(data, np.array([-np.exp(np.float64(x)) for x in a_log]).astype(np.float32))
