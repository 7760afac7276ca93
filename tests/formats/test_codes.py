"""Number codes against the definitions of their standards and against torch's own casts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from k3tool.formats import codes
from tests.formats.cases import bits


def test_e2m1_has_the_values_of_the_standard() -> None:
    assert codes.E2M1.tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
    assert np.signbit(codes.E2M1[8])


def test_e8m0_is_a_power_of_two_with_its_reserved_codes() -> None:
    for byte in range(255):
        assert codes.E8M0[byte] == np.ldexp(np.float64(1), byte - 127), byte
    assert codes.E8M0[0] == np.float32(2.0**-127)
    assert np.isnan(codes.E8M0[255])


def test_e4m3_table_agrees_with_torch() -> None:
    torch = pytest.importorskip("torch")
    reference = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    assert np.array_equal(codes.E4M3, reference, equal_nan=True)
    assert codes.E4M3[0x7E] == 448 and np.isnan(codes.E4M3[0x7F]) and np.isnan(codes.E4M3[0xFF])
    assert np.signbit(codes.E4M3[0x80])


@pytest.mark.parametrize(
    ("value", "code"),
    [(0.25, 0), (0.75, 2), (1.25, 2), (1.75, 4), (2.5, 4), (3.5, 6), (5.0, 6), (7.0, 7), (1e30, 7), (0.0, 0)],
)
def test_e2m1_ties_go_to_the_even_code(value: float, code: int) -> None:
    both = np.array([value, -value], np.float32)
    assert codes.round_e2m1(both).tolist() == [code, code | 8]


def test_every_e2m1_value_is_its_own_code_and_neighbours_round_to_it() -> None:
    assert codes.round_e2m1(codes.E2M1).tolist() == list(range(16))
    for bound, below in zip(codes.E2M1_BOUNDS, range(7), strict=True):
        assert codes.round_e2m1(np.nextafter(bound, np.float32(0)))[()] == below
        assert codes.round_e2m1(np.nextafter(bound, np.float32(9)))[()] == below + 1


def test_every_e4m3_value_is_its_own_code() -> None:
    finite = ~np.isnan(codes.E4M3)
    assert np.array_equal(codes.round_e4m3(codes.E4M3[finite]), np.arange(256)[finite])
    assert codes.round_e4m3(np.array([np.nan, np.inf, -1e9], np.float32)).tolist() == [0x7F, 0x7E, 0xFE]


def test_e4m3_rounds_as_torch_does_between_all_neighbours() -> None:
    torch = pytest.importorskip("torch")
    table = codes.E4M3[:127]
    ties = (table[1:] + table[:-1]) / np.float32(2)
    around = np.concatenate([ties, np.nextafter(ties, np.float32(1e9)), np.nextafter(ties, np.float32(0)), -ties])
    reference = torch.from_numpy(around.copy()).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    assert np.array_equal(codes.round_e4m3(around), reference)


@given(arrays(np.float32, 64, elements=st.floats(width=32, allow_nan=False)))
def test_e4m3_rounds_as_torch_does(values: np.ndarray) -> None:
    torch = pytest.importorskip("torch")
    clamped = torch.from_numpy(values.copy()).clamp(-448, 448)
    assert np.array_equal(codes.round_e4m3(values), clamped.to(torch.float8_e4m3fn).view(torch.uint8).numpy())


@given(arrays(np.float32, 64, elements=st.floats(width=32)))
def test_bf16_rounds_as_torch_does(values: np.ndarray) -> None:
    torch = pytest.importorskip("torch")
    ours = codes.bf16_to_f32(codes.f32_to_bf16(values))
    reference = torch.from_numpy(values.copy()).bfloat16().float().numpy()
    assert np.array_equal(ours, reference, equal_nan=True)
    assert np.array_equal(np.signbit(ours[~np.isnan(values)]), np.signbit(reference[~np.isnan(values)]))


@given(arrays(np.uint8, (3, 16)))
def test_nibbles_pack_and_unpack(packed: np.ndarray) -> None:
    unpacked = codes.unpack_nibbles(packed)
    assert unpacked[0, 0] == packed[0, 0] & 15 and unpacked[0, 1] == packed[0, 0] >> 4
    assert np.array_equal(codes.pack_nibbles(unpacked), packed)


def test_views_keep_bits() -> None:
    data = bytes(range(8))
    assert np.array_equal(bits(codes.view(data, "BF16", (2, 2))), np.frombuffer(data, np.uint8))
    assert codes.view(data, "I32", (2,)).tolist() == [0x03020100, 0x07060504]
