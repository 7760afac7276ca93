"""Error compensation against GPTQ as the textbook has it, column by column with the inverse; no row is ever worse."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3tool import formats
from k3tool.errors import CheckpointCorrupt
from k3tool.formats import compensate as module
from k3tool.formats.codes import E2M1, E4M3, f32_to_bf16
from k3tool.formats.compensate import DAMPING, compensate, factorize
from k3tool.formats.convert import Converted, Stored, Target, convert
from k3tool.formats.measure import Weighted, compare
from k3tool.transform.quantize import COMPENSATED
from tests.formats.cases import bits, same_parts

CODES = {"int4": np.arange(-8.0, 8), "int8": np.arange(-128.0, 128), "fp8": E4M3[np.isfinite(E4M3)], "fp4": E2M1}


def gram_of(columns: int, seed: int = 0, tokens: int | None = None) -> np.ndarray:
    """Of correlated inputs, some of them much larger than others."""
    rng = np.random.default_rng(seed)
    rank = max(1, columns // 4)
    mixed = rng.standard_normal((tokens or 4 * columns, rank)) @ rng.standard_normal((rank, columns)) / np.sqrt(rank)
    inputs = (mixed + 0.5 * rng.standard_normal(mixed.shape)) * np.exp(0.7 * rng.standard_normal(columns))
    return (inputs.T @ inputs / len(inputs)).astype(np.float32)


def strips_of(gram: np.ndarray, rows: int = 100) -> Callable[[], Iterator[tuple[slice, np.ndarray]]]:
    return lambda: ((slice(i, min(i + rows, len(gram))), gram[i : i + rows]) for i in range(0, len(gram), rows))


def source_of(rows: int, gram: np.ndarray, seed: int = 1) -> Stored:
    values = (np.random.default_rng(seed).standard_normal((rows, len(gram))) * 0.02).astype(np.float32)
    return Stored("the module", "bf16", {"weight": f32_to_bf16(values)}, values.shape, np.diagonal(gram).copy())


def values_of(source: Stored, scheme: str, parts: dict[str, np.ndarray]) -> np.ndarray:
    return formats.dequantize(scheme, parts, source.shape).astype(np.float64)


def objective(source: Stored, gram: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Of each row, in float64."""
    lost = values_of(source, "bf16", source.parts) - values
    return ((lost @ gram.astype(np.float64)) * lost).sum(1)


def textbook(weights: np.ndarray, gram: np.ndarray, nearest: Callable[[np.ndarray, int], np.ndarray]) -> np.ndarray:
    """GPTQ without blocks and without Cholesky: after each column the rest moves to its optimum, and the inverse shrinks."""
    damped = gram.astype(np.float64)
    damped[np.diag_indices(len(gram))] += DAMPING * damped.diagonal().mean()
    order = np.argsort(gram.diagonal(), kind="stable")[::-1]
    inverse = np.linalg.inv(damped[order][:, order])
    left, made = weights[:, order].copy(), np.empty_like(weights)
    for i, column in enumerate(order):
        found = nearest(left[:, i], int(column))
        made[:, column] = found
        error = (left[:, i] - found) / inverse[i, i]
        left[:, i + 1 :] -= np.outer(error, inverse[i, i + 1 :])
        inverse[i + 1 :, i + 1 :] -= np.outer(inverse[i + 1 :, i], inverse[i, i + 1 :]) / inverse[i, i]
    return made


def steps_of(scheme: str, parts: dict[str, np.ndarray], shape: tuple[int, ...]) -> np.ndarray:
    """What code 1 stands for in each place, found by decoding a matrix of ones with these scales."""
    ones = {name: array.copy() for name, array in parts.items()}
    filler = {"int4": 0x99, "int8": 0x81, "fp8-channel": 0x38, "fp8-block": 0x38}.get(scheme, 0x22)
    name = "weight_packed" if "weight_packed" in parts else "weight"
    ones[name].view(np.uint8)[...] = filler
    return formats.dequantize(scheme, ones, shape)


def run(source: Stored, gram: np.ndarray, scheme: str, group_size: int | None = None) -> tuple[Converted, Weighted]:
    return compensate(source, Target(scheme, group_size), strips_of(gram))


@pytest.mark.parametrize("scheme", COMPENSATED)
def test_codes_are_those_of_the_textbook(scheme: str) -> None:
    gram = gram_of(384)
    source = source_of(128, gram)
    made, weighted = run(source, gram, scheme)
    steps = steps_of(scheme, made.parts, source.shape)
    table = CODES[scheme if scheme.startswith("int") else "fp8" if scheme.startswith("fp8") else "fp4"]

    def nearest(wanted: np.ndarray, column: int) -> np.ndarray:
        choices = table.astype(np.float32)[None, :] * steps[:, column, None]
        return choices[np.arange(len(wanted)), np.abs(choices - wanted[:, None]).argmin(1)]

    expected = textbook(values_of(source, "bf16", source.parts), gram, nearest)
    assert weighted.outputs is not None and weighted.outputs.rows_kept == 0
    assert np.array_equal(values_of(source, scheme, made.parts), expected)


@pytest.mark.parametrize("scheme", COMPENSATED)
def test_what_it_says_is_true_and_scales_are_those_of_the_search(scheme: str) -> None:
    gram = gram_of(256, tokens=300)
    source = source_of(384, gram)
    made, weighted = run(source, gram, scheme)
    outputs = weighted.outputs
    assert outputs is not None
    plain = convert([source], Target(scheme, search=False))[0].parts
    searched = convert([source], Target(scheme))[0].parts
    expected = [
        objective(source, gram, values_of(source, scheme, parts)).sum() for parts in (plain, searched, made.parts)
    ]
    assert outputs[1:4] == pytest.approx(expected, rel=1e-6)
    assert outputs.source == pytest.approx(objective(source, gram, np.zeros(source.shape)).sum(), rel=1e-6)
    assert outputs.stored < 0.75 * outputs.searched < 0.75 * outputs.plain * (1 + 1e-9) and outputs.rows == 384
    codes = "weight_packed" if "weight_packed" in searched else "weight"
    assert list(made.parts) == list(searched)
    assert all(np.array_equal(bits(made.parts[name]), bits(searched[name])) for name in searched if name != codes)
    before = formats.dequantize("bf16", source.parts, source.shape)
    after = formats.dequantize(scheme, made.parts, source.shape)
    assert made.measured == pytest.approx(compare(before, after), rel=1e-9)
    lost = (before.astype(np.float64) - after) ** 2
    assert source.weight is not None
    assert weighted.error == pytest.approx((lost * source.weight).sum(), rel=1e-9)
    assert weighted.source == pytest.approx((before.astype(np.float64) ** 2 * source.weight).sum(), rel=1e-9)


@pytest.mark.parametrize("group", [32, 128, 0])
def test_groups_of_any_size(group: int) -> None:
    gram = gram_of(128)
    _, weighted = run(source_of(8, gram), gram, "int4", group_size=group)
    assert weighted.outputs is not None and weighted.outputs.stored < weighted.outputs.searched


@settings(max_examples=60, deadline=None)
@given(
    scheme=st.sampled_from([name for name in COMPENSATED if name != "fp8-block"]),
    rows=st.integers(1, 5), groups=st.integers(1, 5), tokens=st.integers(1, 200), seed=st.integers(0, 2**31),
    dead=st.booleans(),
)  # fmt: skip
def test_no_row_is_worse_than_its_nearest_values_under_the_same_scales(
    scheme: str, rows: int, groups: int, tokens: int, seed: int, dead: bool
) -> None:
    gram = gram_of(32 * groups, seed, tokens)
    if dead:
        gram[:, :7] = gram[:7] = 0
    source = source_of(rows, gram, seed)
    made, weighted = run(source, gram, scheme)
    searched = convert([source], Target(scheme))[0].parts
    before, after = (objective(source, gram, values_of(source, scheme, parts)) for parts in (searched, made.parts))
    # The Gram matrix is float32; forms that agree but for its rounding are not told apart.
    assert (after <= before + 1e-9 * objective(source, gram, np.zeros(source.shape))).all()
    assert weighted.outputs is not None and weighted.outputs.stored <= weighted.outputs.searched


def test_rows_that_lose_keep_what_the_search_gave(monkeypatch: pytest.MonkeyPatch) -> None:
    gram = gram_of(64)
    source = source_of(6, gram)
    sound = module.sweep

    def spoiled(
        values: np.ndarray, steps: np.ndarray, factor: np.ndarray, rounding: object, codes: np.ndarray
    ) -> np.ndarray:
        made = sound(values, steps, factor, rounding, codes)  # type: ignore[arg-type]
        made[:4], codes[:4] = 0, 0
        return made

    monkeypatch.setattr(module, "sweep", spoiled)
    made, weighted = run(source, gram, "int8")
    searched = convert([source], Target("int8"))[0].parts
    assert weighted.outputs is not None and (weighted.outputs.rows_kept, weighted.outputs.rows) == (4, 6)
    assert np.array_equal(made.parts["weight_packed"][:4], searched["weight_packed"][:4])
    assert not np.array_equal(made.parts["weight_packed"][4:], searched["weight_packed"][4:])


def test_inputs_that_are_always_zero_change_nothing() -> None:
    gram = np.zeros((64, 64), np.float32)
    source = source_of(4, gram)
    made, weighted = run(source, gram, "int4")
    assert same_parts(made.parts, convert([source], Target("int4"))[0].parts)
    assert weighted.outputs is not None and weighted.outputs.relative(weighted.outputs.stored) == 0.0


@pytest.mark.parametrize("n", [1, 127, 128, 129, 700])
def test_the_factor_is_that_of_the_damped_matrix_in_its_order(n: int) -> None:
    gram = gram_of(n)
    order = np.argsort(gram.diagonal(), kind="stable")
    found = np.tril(factorize(strips_of(gram), order, "x"))
    damped = gram.astype(np.float64) + DAMPING * gram.diagonal().astype(np.float64).mean() * np.eye(n)
    assert np.allclose(found, np.linalg.cholesky(damped[order][:, order]), rtol=1e-9, atol=1e-9 * np.abs(found).max())


def test_what_is_no_gram_matrix_is_refused() -> None:
    gram = gram_of(64)
    gram[3, 5] = gram[5, 3] = 100 * gram.max()
    with pytest.raises(CheckpointCorrupt, match="Gram matrix of the module is not positive semidefinite"):
        run(source_of(4, gram), gram, "int4")


def test_nan_is_refused_as_always() -> None:
    gram = gram_of(64)
    source = source_of(4, gram)
    source.parts["weight"][2, 3] = 0x7FC0
    with pytest.raises(CheckpointCorrupt, match="the module holds NaN or infinity"):
        run(source, gram, "int4")
