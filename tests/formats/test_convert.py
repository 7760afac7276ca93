"""Conversions: exact ones give the same values to the bit, the others what the readable form gives, and both say so."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3tool import formats
from k3tool.errors import CheckpointCorrupt, UnsupportedError
from k3tool.formats import nvfp4
from k3tool.formats.convert import Converted, Stored, Target, convert
from k3tool.formats.measure import compare
from tests.formats.cases import WRITTEN, bf16_parts, bits, gaussian, mxfp4_of, mxfp4_random, same_parts, specs

SHAPE = (256, 384)
EXACT = ("nvfp4", "nvfp4-modelopt", "bf16", "int8", "fp8-block", "fp8-channel")


def one(parts: dict, scheme: str, target: str, shape: tuple[int, int] = SHAPE, **options) -> Converted:
    weight = options.pop("weight", None)
    return convert([Stored("the module", scheme, parts, shape, weight)], Target(target, **options))[0]


def values_of(made: Converted, target: str, shape: tuple[int, int] = SHAPE) -> np.ndarray:
    assert specs(formats.stored_tensors(target, shape)).keys() == made.parts.keys()
    return formats.dequantize(target, made.parts, shape)


@pytest.mark.parametrize("target", EXACT)
@pytest.mark.parametrize("span", [(110, 123), (1, 14), (240, 248), (121, 121)])
def test_mxfp4_keeps_every_value(target: str, span: tuple[int, int]) -> None:
    """Released scales span 110 to 123; the other spans sit at the ends of the exponent range."""
    if target.startswith("fp8") and span == (1, 14):
        pytest.skip("their scales would leave the normal range of float32, so this way rounds")
    parts = mxfp4_random(*SHAPE, *span)
    source = formats.dequantize("mxfp4", parts, SHAPE)
    made = one(parts, "mxfp4", target)
    kept = values_of(made, target)
    assert made.measured.exact and np.array_equal(source, kept)
    if target != "int8":  # whole numbers have one zero only
        assert np.array_equal(bits(source), bits(kept))


@settings(max_examples=40, deadline=None)
@given(low=st.integers(1, 240), span=st.integers(0, 17), seed=st.integers(0, 2**32 - 1))
def test_mxfp4_to_nvfp4_is_exact_over_17_binades(low: int, span: int, seed: int) -> None:
    shape = (4, 64)
    parts = mxfp4_random(*shape, low, min(low + span, 252), seed)
    made = one(parts, "mxfp4", "nvfp4", shape)
    assert made.measured.exact
    assert made.parts["weight_packed"] is parts["weight_packed"]
    assert np.array_equal(bits(formats.dequantize("mxfp4", parts, shape)), bits(values_of(made, "nvfp4", shape)))


def test_w1_and_w3_share_the_global_scale_and_w2_has_its_own() -> None:
    w1, w3, w2 = (mxfp4_random(*SHAPE, low, low + 3, seed) for seed, low in enumerate((100, 112, 90)))
    pair = convert([Stored("w1", "mxfp4", w1, SHAPE), Stored("w3", "mxfp4", w3, SHAPE)], Target("nvfp4"))
    scales = [made.parts["weight_global_scale"].tolist() for made in pair]
    assert scales[0] == scales[1] == [2.0 ** (8 - (115 - 127))]
    for parts, made in zip((w1, w3), pair, strict=True):
        assert made.measured.exact
        assert np.array_equal(formats.dequantize("mxfp4", parts, SHAPE), values_of(made, "nvfp4"))
    assert one(w2, "mxfp4", "nvfp4").parts["weight_global_scale"].tolist() == [2.0 ** (8 - (93 - 127))]


def test_a_pair_that_spans_too_much_is_not_exact_but_as_near_as_can_be() -> None:
    parts = mxfp4_random(*SHAPE, 100, 120)
    made = one(parts, "mxfp4", "nvfp4")
    source, kept = formats.dequantize("mxfp4", parts, SHAPE), values_of(made, "nvfp4")
    assert not made.measured.exact
    high = parts["weight_scale"].repeat(32, axis=1) >= 103  # 17 binades below the largest scale and up
    assert np.array_equal(source[high], kept[high])
    step = 2.0 ** (103 - 127)
    assert np.abs(source - kept).max() <= step / 4  # half a step between the two least magnitudes, 0 and 0.5
    plain = formats.dequantize("nvfp4", formats.quantize("nvfp4", source), SHAPE)
    assert ((kept - source) ** 2).sum() < ((plain - source) ** 2).sum()


def test_the_scale_of_an_all_zero_group_does_not_cost_exactness() -> None:
    parts = mxfp4_random(*SHAPE, 110, 114)
    parts["weight_packed"][0, :32] = 0
    parts["weight_scale"][0, :2] = 250
    made = one(parts, "mxfp4", "nvfp4")
    assert made.measured.exact
    assert np.array_equal(formats.dequantize("mxfp4", parts, SHAPE), values_of(made, "nvfp4"))


@pytest.mark.parametrize(("target", "exact_span"), [("fp8-block", 14), ("fp8-channel", 14)])
def test_fp8_is_exact_as_far_as_the_spread_allows(target: str, exact_span: int) -> None:
    inside, outside = mxfp4_random(*SHAPE, 100, 100 + exact_span), mxfp4_random(*SHAPE, 100, 116)
    assert one(inside, "mxfp4", target).measured.exact
    made = one(outside, "mxfp4", target)
    assert not made.measured.exact
    source, kept = formats.dequantize("mxfp4", outside, SHAPE), values_of(made, target)
    assert made.measured.relative_error < 1e-3
    assert np.array_equal(compare(source, kept)[1:], made.measured[1:]) or np.allclose(
        compare(source, kept)[1:], made.measured[1:], rtol=1e-12
    )


@pytest.mark.parametrize("search", [False, True])
@pytest.mark.parametrize("target", WRITTEN)
@pytest.mark.parametrize("scheme", ["bf16", "f32", "f16"])
def test_floats_become_what_the_readable_form_makes_of_them(scheme: str, target: str, search: bool) -> None:
    values = gaussian(*SHAPE)
    parts = formats.quantize(scheme, values)
    source = formats.dequantize(scheme, parts, SHAPE)
    made = one(parts, scheme, target, search=search)
    twin = formats.quantize(target, source, search=search) if target not in ("nf4", "fp4", "bf16") else None
    assert same_parts(made.parts, twin or formats.quantize(target, source))
    assert np.allclose(compare(source, values_of(made, target))[1:], made.measured[1:], rtol=1e-9)


@pytest.mark.parametrize("group", [16, 32, 128, 0])
@pytest.mark.parametrize("target", ["int4", "int8"])
def test_integer_groups_are_the_readable_form_too(target: str, group: int) -> None:
    parts = bf16_parts(gaussian(*SHAPE))
    source = formats.dequantize("bf16", parts, SHAPE)
    made = one(parts, "bf16", target, group_size=group)
    assert same_parts(made.parts, formats.quantize(target, source, group_size=group, search=True))


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("span", [(110, 123), (60, 200), (1, 254)])
def test_mxfp4_by_table_is_the_direct_way_to_the_byte(kind: str, span: tuple[int, int]) -> None:
    parts = mxfp4_random(*SHAPE, *span)
    if span == (1, 254):
        parts["weight_scale"] = np.minimum(parts["weight_scale"], 251)  # finite in float32
    source = formats.dequantize("mxfp4", parts, SHAPE)
    made = one(parts, "mxfp4", kind)
    assert same_parts(made.parts, formats.quantize(kind, source))
    assert np.allclose(compare(source, values_of(made, kind))[1:], made.measured[1:], rtol=1e-9)


def test_plain_int4_by_table_is_the_direct_way_to_the_byte() -> None:
    parts = mxfp4_random(*SHAPE, 100, 130)
    source = formats.dequantize("mxfp4", parts, SHAPE)
    made, direct = one(parts, "mxfp4", "int4", search=False), formats.quantize("int4", source)
    busy = np.abs(source).reshape(256, -1, 32).max(axis=2) > 0  # the scale of an all-zero group is free
    assert np.array_equal(made.parts["weight_scale"][busy], direct["weight_scale"][busy])
    assert np.array_equal(made.parts["weight_packed"], direct["weight_packed"])


@pytest.mark.parametrize("origin", ["bf16", "mxfp4"])
@pytest.mark.parametrize(
    ("target", "group"),
    [(scheme, None) for scheme in ("mxfp4", "nvfp4", "fp8-block", "fp8-channel")]
    + list(product(("int4", "int8"), (32, 128, 0))),
)
def test_searched_scales_never_lose(origin: str, target: str, group: int | None) -> None:
    values = gaussian(*SHAPE)
    parts = bf16_parts(values) if origin == "bf16" else mxfp4_of(values)
    errors = [one(parts, origin, target, search=search, group_size=group).measured.error for search in (False, True)]
    assert errors[1] <= errors[0]


@pytest.mark.parametrize(
    ("origin", "target", "group", "gain"),
    [("bf16", "nvfp4", None, 0.10), ("bf16", "int4", 32, 0.06), ("bf16", "int4", 0, 0.08), ("mxfp4", "int4", 32, 0.12)],
)
def test_searched_scales_gain_what_is_claimed(origin: str, target: str, group: int | None, gain: float) -> None:
    """Share by which the relative error falls on normal weights; measured 14, 9, 18 and 18 percent."""
    values = (np.random.default_rng(5).standard_normal((256, 512)) * 0.02).astype(np.float32)
    parts = bf16_parts(values) if origin == "bf16" else mxfp4_of(values)
    plain, searched = (
        one(parts, origin, target, (256, 512), search=search, group_size=group).measured.relative_error
        for search in (False, True)
    )
    assert searched < (1 - gain) * plain


@pytest.mark.parametrize("target", ["mxfp4", "nvfp4", "fp8-channel", "int4"])
def test_weighted_columns_are_served_first(target: str) -> None:
    """With all weight on a few columns their error falls below that of the unweighted search."""
    weight = np.full(SHAPE[1], 1e-6, np.float32)
    weight[::16] = 1
    parts = bf16_parts(gaussian(*SHAPE, seed=3))
    source = formats.dequantize("bf16", parts, SHAPE)
    errors = []
    for given_weight in (None, weight):
        made = one(parts, "bf16", target, weight=given_weight)
        errors.append((((values_of(made, target) - source) ** 2) * weight).sum())
    twin = formats.quantize(target, source, search=True, weight=weight)
    assert errors[1] < errors[0]
    assert same_parts(one(parts, "bf16", target, weight=weight).parts, twin)


def test_unknown_nan_and_infinite_values_are_refused_with_the_name() -> None:
    values = gaussian(*SHAPE)
    for bad in (np.nan, np.inf, -np.inf):
        values[200, 7] = bad
        for target in WRITTEN:
            with pytest.raises(CheckpointCorrupt, match="the module"):
                one({"weight": values}, "f32", target)
    parts = mxfp4_random(*SHAPE, 110, 120)
    parts["weight_scale"][3, 3] = 255
    for target in WRITTEN:
        with pytest.raises(CheckpointCorrupt, match="the module"):
            one(parts, "mxfp4", target)


def test_a_scale_beyond_bfloat16_is_refused() -> None:
    parts = mxfp4_random(*SHAPE, 110, 254)
    with pytest.raises(UnsupportedError, match="the module: scale byte 254"):
        one(parts, "mxfp4", "bf16")


def test_a_shape_that_does_not_divide_is_refused_with_the_name() -> None:
    with pytest.raises(UnsupportedError, match="the module"):
        one(bf16_parts(gaussian(96, 256)), "bf16", "fp8-block", (96, 256))


def test_lossy_nvfp4_shares_its_global_scale_too() -> None:
    gate, up = gaussian(*SHAPE, seed=1), gaussian(*SHAPE, seed=2, scale=0.5)
    made = convert([Stored(n, "bf16", bf16_parts(v), SHAPE) for n, v in (("gate", gate), ("up", up))], Target("nvfp4"))
    factors = {float(item.parts["weight_global_scale"][0]) for item in made}
    amax = float(np.abs(formats.dequantize("bf16", bf16_parts(up), SHAPE)).max())
    assert factors == {float(nvfp4.global_scale(amax))}


@pytest.mark.parametrize("scheme", [s for s in WRITTEN if s != "bf16"])
def test_everything_can_be_decoded_to_bfloat16(scheme: str) -> None:
    stored = formats.quantize(scheme, gaussian(*SHAPE))
    made = one(stored, scheme, "bf16")
    assert same_parts(made.parts, formats.quantize("bf16", formats.dequantize(scheme, stored, SHAPE)))


@pytest.mark.parametrize("target", ["nvfp4", "nvfp4-modelopt", "int8", "fp8-block", "fp8-channel"])
@pytest.mark.parametrize("storage", ["bf16", "f32"])
def test_values_that_were_decoded_from_mxfp4_are_as_exact_as_their_origin(target: str, storage: str) -> None:
    """And one value that no group of MXFP4 holds makes it an ordinary matrix."""
    parts = mxfp4_random(*SHAPE, 110, 123)
    source = formats.dequantize("mxfp4", parts, SHAPE)
    plain = bf16_parts(source) if storage == "bf16" else {"weight": source}
    made = one(plain, storage, target)
    assert made.measured.exact and same_parts(made.parts, one(parts, "mxfp4", target).parts)
    spoiled = source.copy()
    spoiled[200, 7] = spoiled[200].max() * 1.03125
    assert not one({"weight": spoiled}, "f32", target).measured.exact


@pytest.mark.parametrize("target", EXACT)
@pytest.mark.parametrize("byte", [0, 7, 60, 200, 253, 254])
def test_whatever_the_scale_of_an_all_zero_group_says_nothing_is_lost(target: str, byte: int) -> None:
    parts = mxfp4_random(*SHAPE, 110, 123)
    parts["weight_packed"][5, 16:32] = 0x80
    parts["weight_scale"][5, 1] = 110
    source = formats.dequantize("mxfp4", parts, SHAPE)
    parts["weight_scale"][5, 1] = byte
    made = one(parts, "mxfp4", target)
    assert made.measured.exact and np.array_equal(source, values_of(made, target))
