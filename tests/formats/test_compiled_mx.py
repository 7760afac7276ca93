"""The table loops against one-line numpy twins."""

from __future__ import annotations

import numpy as np
import pytest

from k3tool.formats import compiled_mx, mx_tables
from k3tool.formats.codes import E2M1, E2M1_MAGNITUDES, E8M0, unpack_nibbles
from tests.formats.cases import mxfp4_random


@pytest.fixture(scope="module")
def groups() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """words [groups, 2], bytes [groups, 16], codes [groups, 32], scale bytes [groups]; groups of every largest code."""
    parts = mxfp4_random(64, 256, 90, 140)
    packed = parts["weight_packed"].reshape(-1, 16)
    for peak in range(8):  # the first rows hold no magnitude above `peak`
        packed[8 * peak : 8 * peak + 8] = (packed[8 * peak : 8 * peak + 8] & 0x88) | min(peak, 7) * 0x11
    return packed.view(np.uint64), packed, unpack_nibbles(packed), parts["weight_scale"].reshape(-1)


def test_census_counts_every_code(groups) -> None:
    words, _, codes, _ = groups
    counts = np.empty(words.shape, np.uint64)
    compiled_mx.census(words, counts)
    expected = (codes[:, :, None] == np.arange(16)).sum(axis=1)
    assert np.array_equal(counts.view(np.uint8), expected) and counts.view(np.uint8).sum() == codes.size


def test_peaks_and_squares(groups) -> None:
    words, _, codes, exponent = groups
    found = np.empty(len(words), np.uint8)
    compiled_mx.peaks(words, found)
    assert np.array_equal(found, (codes & 7).max(axis=1)) and set(found) == set(range(8))
    values = E2M1[codes].astype(np.float64) * E8M0[exponent].astype(np.float64)[:, None]
    squares = compiled_mx.group_squares(words, exponent, mx_tables.SQUARES, mx_tables.SCALE_SQUARES)
    assert squares == pytest.approx((values**2).sum(), rel=1e-12)


@pytest.mark.parametrize(
    "table", [mx_tables.to_int8(), mx_tables.to_fp8(), mx_tables.to_bf16(90, 140), mx_tables.to_bnb("nf4")]
)
def test_remap_is_a_look_up(groups, table: mx_tables.Table) -> None:
    words, packed, codes, exponent = groups
    index = np.random.default_rng(1).integers(0, len(table.bytes), len(words)).astype(np.uint16)
    out = np.empty(packed.shape, table.bytes.dtype)
    compiled_mx.remap(words, index, table.bytes.reshape(-1), out)
    assert np.array_equal(out, table.bytes[index[:, None], packed])
    counts, first = np.empty(words.shape, np.uint64), int(exponent.min())
    compiled_mx.census(words, counts)
    tallies = np.zeros((int(exponent.max()) - first + 1, len(table.bytes), 16), np.uint32)
    compiled_mx.tally(counts.view(np.uint8), index, exponent, first, tallies)
    assert tallies.sum() == codes.size
    scale = E8M0[exponent].astype(np.float64)[:, None]
    source = E2M1[codes].astype(np.float64) * scale
    error, stored = table.error[index[:, None], codes] * scale, table.stored[index[:, None], codes] * scale
    expected = [codes.size, (source**2).sum(), (stored**2).sum(), (error**2).sum(), error.max()]
    assert np.allclose(table.measure(codes.size, tallies, first), expected, rtol=1e-12)


@pytest.mark.parametrize("search", [False, True])
def test_choose_takes_the_least_error(groups, search: bool) -> None:
    words, _, codes, _ = groups
    choices = mx_tables.to_int4(search)
    counts, found = np.empty(words.shape, np.uint64), np.empty(len(words), np.uint16)
    compiled_mx.census(words, counts)
    compiled_mx.choose(counts.view(np.uint8), choices.squares, found)
    peak = (codes & 7).max(axis=1)
    rows = 8 * peak[:, None].astype(np.int64) + np.arange(8)
    errors = (choices.table.error**2)[rows[:, :, None], codes[:, None, :]].sum(axis=2)
    assert np.array_equal(found // 8, peak)
    chosen = np.take_along_axis(errors, found[:, None].astype(np.int64) % 8, axis=1)[:, 0]
    assert np.allclose(chosen, errors.min(axis=1), rtol=1e-12, atol=0)
    if not search:
        assert not (found % 8).any()


def test_blocks_of_64_find_their_maximum(groups) -> None:
    words, _, codes, exponent = groups
    peak, index = np.empty(len(words), np.uint8), np.empty(len(words), np.uint16)
    absmax = np.empty(len(words) // 2, np.float32)
    compiled_mx.peaks(words, peak)
    compiled_mx.bnb_index(peak, exponent, E2M1_MAGNITUDES, E8M0, mx_tables.BNB_STEPS, index, absmax)
    values = np.abs(E2M1[codes] * E8M0[exponent][:, None]).reshape(-1, 64)
    assert np.array_equal(absmax, values.max(axis=1))
    held, distance = index // mx_tables.BNB_STEPS, index.astype(np.int64) % mx_tables.BNB_STEPS
    own = np.ldexp(E8M0[exponent], distance - 4)
    inside = (distance > 0) & (distance < mx_tables.BNB_STEPS - 1)
    assert inside.any() and np.array_equal((E2M1_MAGNITUDES[held] * own)[inside], absmax.repeat(2)[inside])


@pytest.mark.parametrize(("down", "across"), [(1, 8), (32, 4)])
def test_fp8_index_is_the_distance_to_the_block(groups, down: int, across: int) -> None:
    exponent = groups[3].reshape(64, 8)
    index, top = np.empty((64, 8), np.uint16), np.empty((64 // down, 8 // across), np.uint8)
    compiled_mx.fp8_index(exponent, down, across, mx_tables.FP8_STEPS, index, top)
    expected = exponent.reshape(64 // down, down, 8 // across, across).max(axis=(1, 3))
    spread = expected.repeat(down, 0).repeat(across, 1).astype(np.int64)
    assert np.array_equal(top, expected)
    assert np.array_equal(index, np.minimum(spread - exponent, mx_tables.FP8_STEPS - 1))


def test_scales_of_integers_and_of_nvfp4(groups) -> None:
    exponent = groups[3]
    choices = mx_tables.to_int4(True)
    index = np.random.default_rng(2).integers(0, 64, len(exponent)).astype(np.uint16)
    index[choices.scales[index] == 0] = 0
    out = np.empty(len(exponent), np.uint16)
    compiled_mx.scale_bf16(choices.scales, index, exponent, out)
    as_float = (out.astype(np.uint32) << 16).view(np.float32)
    units = (choices.scales[index].astype(np.uint32) << 16).view(np.float32)
    assert np.array_equal(as_float, units * E8M0[exponent])
    codes = np.arange(256, dtype=np.uint8)[::-1].copy()
    twice = np.empty(2 * len(exponent), np.uint8)
    compiled_mx.repeat_scale(exponent, codes, twice)
    assert np.array_equal(twice, codes[exponent].repeat(2))
