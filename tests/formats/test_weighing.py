"""Errors weighted by column, on decoded rows: any rows of any scheme, and sums that are those of plain float64."""

from __future__ import annotations

import numpy as np
import pytest

from k3tool import formats
from k3tool.formats.convert import Stored, Target, convert
from k3tool.formats.measure import Outputs, Weighted, total_weighted
from k3tool.formats.weighing import decode_rows, weigh
from tests.formats.cases import WRITTEN, bf16_parts, gaussian

SHAPE = (384, 256)


@pytest.mark.parametrize("scheme", WRITTEN)
def test_rows_are_those_of_the_whole(scheme: str) -> None:
    parts = convert([Stored("x", "bf16", bf16_parts(gaussian(*SHAPE)), SHAPE)], Target(scheme))[0].parts
    whole = formats.dequantize(scheme, parts, SHAPE)
    for rows in (slice(0, 128), slice(128, 384), slice(256, 384), slice(0, 384)):
        assert np.array_equal(decode_rows(scheme, parts, SHAPE, rows), whole[rows])


@pytest.mark.parametrize("scheme", WRITTEN)
def test_sums(scheme: str) -> None:
    weight = np.random.default_rng(1).exponential(1, SHAPE[1]).astype(np.float32)
    source = Stored("x", "bf16", bf16_parts(gaussian(*SHAPE)), SHAPE, weight)
    parts = convert([source], Target(scheme))[0].parts
    before = formats.dequantize("bf16", source.parts, SHAPE).astype(np.float64)
    after = formats.dequantize(scheme, parts, SHAPE).astype(np.float64)
    found = weigh(source, scheme, parts)
    assert found.source == pytest.approx((before**2 * weight).sum(), rel=1e-12)
    assert found.error == pytest.approx(((before - after) ** 2 * weight).sum(), rel=1e-12)


def test_totals_and_the_way_through_json() -> None:
    rows = [Weighted(4.0, 1.0), Weighted(12.0, 0.0, Outputs(8.0, 4.0, 2.0, 0.5, 1, 3)), Weighted(0.0, 0.0)]
    assert [Weighted.from_json(row.as_json()) for row in rows] == rows
    whole = total_weighted([*rows, Weighted(0.0, 3.0, Outputs(0.0, 4.0, 2.0, 1.5, 2, 3))])
    assert whole == Weighted(16.0, 4.0, Outputs(8.0, 8.0, 4.0, 2.0, 3, 6))
    assert whole.relative_error == 0.5 and whole.outputs is not None and whole.outputs.relative(2.0) == 0.5
    assert rows[2].relative_error == 0.0 and Weighted(0.0, 1.0).relative_error == np.inf
