"""Products with weights that stay codes and scales: the numbers behind them, in float32 exactly, whatever their storage."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from k3tool import formats
from k3tool.formats import bnb
from k3tool.kernels import cpu as compiled
from k3tool.kernels.dispatch import use
from k3tool.kernels.linear import StackedMatrix, StoredMatrix, linear
from k3tool.kernels.linear.stored import BITS, BOOKS

KINDS = [
    ("int4", 32, torch.bfloat16), ("int4", 0, torch.bfloat16), ("int4", 128, torch.float32), ("int8", 32, torch.bfloat16),
    ("int8", 0, torch.float32), ("fp8", 0, torch.float32), ("fp8", 0, torch.bfloat16), ("fp8", 128, torch.float32),
    ("nf4", 64, torch.float32), ("fp4", 64, torch.float32), ("e2m1", 32, None), ("e2m1", 16, None),
]  # fmt: skip


def stored(kind: str, rows: int, columns: int, group: int, dtype: torch.dtype | None) -> StoredMatrix:
    """Random codes, none of which is no number, and scales."""
    codes = torch.randint(0, 256, (rows, columns * BITS[kind] // 8), dtype=torch.uint8)
    if kind == "fp8":
        codes[(codes & 0x7F) == 0x7F] = 3
    groups = -(-columns // group) if group else 1
    if kind == "e2m1" and group == 32:
        return StoredMatrix(kind, codes, torch.randint(100, 140, (rows, groups)).to(torch.uint8), group)
    scale = torch.rand(rows, groups) + 0.1
    if kind == "e2m1":
        return StoredMatrix(kind, codes, scale.to(torch.float8_e4m3fn), group, torch.tensor([3.7]))
    return StoredMatrix(kind, codes, scale.to(dtype), group)


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


@pytest.mark.parametrize(("kind", "group", "dtype"), KINDS)
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_every_storage_and_shape_against_float64(kind, group, dtype, backend) -> None:
    torch.manual_seed(1)
    for rows, columns in ((97, 64), (33, 96), (200, 1024), (500, 72), (12, 320)):
        if group and columns % group and kind != "fp8":
            continue
        weight = stored(kind, rows, columns, group, dtype)
        whole = weight.rows(slice(None)).double()
        for tokens in (1, 2, 17, 70, 300):
            x = torch.randn(tokens, columns)
            with use(backend):
                # 1e-6: sums of float32 products; 4e-3: a result, and perhaps weights, rounded to bfloat16.
                assert error(linear(x, weight), x.double() @ whole.t()) < 1e-6
                narrow = x.bfloat16()
                assert error(linear(narrow, weight), narrow.double() @ whole.t()) < 4e-3


@pytest.mark.parametrize(("scheme", "kind"), [("int4", "int4"), ("int8", "int8"), ("fp8-channel", "fp8"), ("nf4", "nf4"), ("fp4", "fp4")])  # fmt: skip
def test_numbers_are_those_of_the_formats(scheme: str, kind: str) -> None:
    values = np.random.default_rng(3).standard_normal((40, 128)).astype(np.float32)
    parts = formats.quantize(scheme, values)
    codes = parts.get("weight_packed", parts.get("weight"))
    raw = torch.from_numpy(np.ascontiguousarray(codes).view(np.uint8).reshape(40, -1).copy())
    scale = parts["weight.absmax"].reshape(40, 2) if "weight.absmax" in parts else parts["weight_scale"]
    scale = torch.from_numpy(scale.copy())
    scale = scale.view(torch.bfloat16) if scale.dtype == torch.uint16 else scale
    group = 0 if scale.shape[1] == 1 else 128 // scale.shape[1]
    weight = StoredMatrix(kind, raw, scale, group)
    expected = torch.from_numpy(formats.dequantize(scheme, parts, (40, 128)))
    assert torch.equal(weight.rows(slice(None)), expected)
    assert torch.equal(weight.rows(torch.tensor([7, 7, 0])), expected[[7, 7, 0]])


def test_tables_are_those_of_the_format() -> None:
    assert BOOKS.keys() == bnb.TABLES.keys()
    for kind, table in bnb.TABLES.items():
        assert np.array_equal(np.array(BOOKS[kind], np.float32), table)


@pytest.mark.parametrize(("kind", "group", "dtype"), [kind for kind in KINDS if kind[0] != "e2m1"])
def test_every_code_is_decoded_exactly(kind, group, dtype) -> None:
    if not compiled.available():
        pytest.skip("compiled kernels are not available here")
    from k3tool.kernels.linear.cpu import decode

    weight = stored(kind, 300, 128, group, dtype)
    weight.codes[:256] = torch.arange(256, dtype=torch.uint8)[:, None]
    if kind == "fp8":
        weight.codes[[0x7F, 0xFF]] = 0
    for to in (torch.float32, torch.bfloat16):
        for some in (slice(None), slice(5, 90), slice(299, 300)):
            assert torch.equal(decode(weight, some, to), weight.rows(some, to))


@pytest.mark.parametrize("tokens", [1, 3, 40])
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_rows_of_several_matrices(tokens: int, backend: str) -> None:
    parts = (stored("int4", 40, 96, 32, torch.bfloat16), torch.randn(17, 96).bfloat16(), stored("fp8", 9, 96, 0, torch.float32), torch.randn(5, 96))  # fmt: skip
    stack = StackedMatrix(parts)
    assert stack.shape == (71, 96) and stack.nbytes == sum(part.nbytes for part in parts)
    x = torch.randn(tokens, 96)
    with use(backend):
        found = linear(x, stack)
        assert torch.equal(found, torch.cat([linear(x, part) for part in parts], -1))


def test_what_does_not_fit_is_refused() -> None:
    codes, scale = torch.zeros(4, 32, dtype=torch.uint8), torch.ones(4, 2)
    for kind, own, group in (("int4", scale, 16), ("int5", scale, 32), ("int4", scale.half(), 32), ("int4", scale[:3], 32), ("e2m1", scale, 32)):  # fmt: skip
        with pytest.raises(ValueError):
            StoredMatrix(kind, codes, own, group)
    weight = StoredMatrix("int4", codes, scale, 32)
    assert weight.shape == (4, 64) and weight.nbytes == 4 * 32 + 4 * 8
    with pytest.raises(ValueError, match="does not fit"):
        linear(torch.ones(1, 32), weight)
    with pytest.raises(ValueError, match="stored"):
        linear(torch.ones(1, 64, dtype=torch.float16), weight)
