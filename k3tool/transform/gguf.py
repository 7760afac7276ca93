"""What happens to values on their way into a GGUF file: re-pairing, change of type, and the products that llama.cpp
expects to find folded.

Re-pairing moves nibbles and changes no value. A change of type that can round is measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from k3tool.errors import CheckFailed, CheckpointCorrupt, UnsupportedError
from k3tool.formats.codes import E8M0_NAN, NUMPY_DTYPES, f32_to_bf16, to_f32
from k3tool.formats.measure import compare
from k3tool.gguf import blocks
from k3tool.transform.base import Applied

GROUP = blocks.GROUP
EXPONENTS = {"BF16": np.uint16(0x7F80), "F16": np.uint16(0x7C00), "F32": np.uint32(0x7F800000)}
"""The bits of the exponent: all are set in NaN and infinities alone."""
MXFP4_SOURCE = "MXFP4"
"""Stands for the pair (weight_packed, weight_scale) where a dtype is asked for."""


class Rounded(NamedTuple):
    """What a step reports: sums of `k3tool.formats.measure` over the values of one source tensor that it changed."""

    component: str
    tensor: str
    sums: list[float]


def _refuse_nan_scale(scale: NDArray[np.uint8], tensor: str) -> None:
    if (scale == E8M0_NAN).any():
        where = int(np.argmax(scale == E8M0_NAN))
        raise CheckpointCorrupt(
            f"{tensor}: scale {where} is the byte 255, which is no number (llama.cpp would read 2^128)",
            hint="hold the file's bytes against its digest (verify at depth bytes); where they are right, its publisher has to mend it",
            tensor=tensor,
        )


@dataclass(frozen=True)
class Repack:
    """One matrix of MXFP4, (packed, scale), to ggml's blocks: the same codes and scales in another order."""

    tensor: str

    def describe(self) -> str:
        return "re-pair MXFP4 for ggml"

    def apply(self, inputs: Sequence[Any]) -> Applied:
        from k3tool.gguf import compiled

        packed, scale = inputs
        _refuse_nan_scale(scale, self.tensor)
        out = np.empty((scale.size, blocks.MXFP4_BYTES), np.uint8)
        compiled.repack(packed.reshape(-1, GROUP // 2), scale, out)
        return Applied((out,))


@dataclass(frozen=True)
class Recode:
    """Rows of one matrix from the type `source` to the ggml type `target`.

    source: BF16, F16, F32, or MXFP4_SOURCE. turned: the rows, `columns` wide, become columns. exact: a value that does
    not survive is an error.
    """

    tensor: str
    component: str
    source: str
    target: str
    columns: int
    turned: bool = False
    exact: bool = False

    def describe(self) -> str:
        return f"{self.source} to {self.target}" + (", transposed" if self.turned else "")

    @property
    def can_round(self) -> bool:
        return can_round(self.source, self.target)

    def apply(self, inputs: Sequence[Any]) -> Applied:
        if self.source == self.target:  # bits are only moved
            self._check_bits(inputs[0])
            return Applied((np.ascontiguousarray(self._turned(inputs[0].view(NUMPY_DTYPES[self.source]))),))
        values = self._turned(self._values(inputs))
        if not np.isfinite(values).all():
            raise self._refuse("holds values that are not finite", CheckpointCorrupt)
        stored, after = self._encode(np.ascontiguousarray(values))
        if not self.can_round:
            return Applied((stored,))
        sums = compare(values.reshape(-1), after.reshape(-1))
        if self.exact and not sums.exact:
            raise self._refuse(f"{self.source} to {self.target} changes values (--exact)", CheckFailed)
        return Applied((stored,), Rounded(self.component, self.tensor, sums.as_json()))

    def _check_bits(self, raw: NDArray[np.uint8]) -> None:
        from k3tool.gguf import compiled

        mask = EXPONENTS[self.source]
        if compiled.not_finite(raw.reshape(-1).view(mask.dtype), mask):
            raise self._refuse("holds values that are not finite", CheckpointCorrupt)

    def _values(self, inputs: Sequence[Any]) -> NDArray[np.float32]:
        if self.source == MXFP4_SOURCE:
            packed, scale = inputs
            _refuse_nan_scale(scale, self.tensor)
            codes = blocks.repack(packed.reshape(-1, GROUP // 2), scale)
            return blocks.unpack_mxfp4(codes).reshape(-1, self.columns)
        return _plain(inputs[0], self.source)

    def _turned(self, values: NDArray) -> NDArray:
        return values.reshape(-1, self.columns).T if self.turned else values

    def _encode(self, values: NDArray[np.float32]) -> tuple[Any, NDArray[np.float32]]:
        """(bytes to store, the values that these bytes stand for)."""
        if self.target == "F32":
            return values, values
        if self.target == "BF16":
            bits = f32_to_bf16(values)
            return bits, to_f32(bits)
        if self.target == "F16":
            with np.errstate(over="ignore"):
                halves = values.astype("<f2")
            if not np.isfinite(halves).all():
                raise self._refuse(f"holds {np.abs(values).max():g}, beyond the range of F16", UnsupportedError)
            return halves, halves.astype(np.float32)
        return self._q8_0(values.reshape(-1))

    def _q8_0(self, values: NDArray[np.float32]) -> tuple[Any, NDArray[np.float32]]:
        from k3tool.gguf import compiled

        groups = values.size // GROUP
        steps, codes = np.empty(groups, np.float32), np.empty(values.size, np.int8)
        compiled.quantize_q8_0(values, steps, codes)
        with np.errstate(over="ignore"):
            halves = steps.astype("<f2")
        if not np.isfinite(halves).all():
            raise self._refuse(f"holds {np.abs(values).max():g}, beyond the range of Q8_0", UnsupportedError)
        out = np.empty((groups, blocks.Q8_0_BYTES), np.uint8)
        out[:, :2] = halves.view(np.uint8).reshape(groups, 2)
        out[:, 2:] = codes.view(np.uint8).reshape(groups, GROUP)
        return out, codes.reshape(groups, GROUP) * halves.astype(np.float32)[:, None]

    def _refuse(self, what: str, kind: type[CheckFailed | CheckpointCorrupt | UnsupportedError]) -> Exception:
        option = "--experts bf16" if self.component == "routed_experts" else "--trunk bf16"
        hint = f"choose {option}" + (", or leave --exact out" if kind is CheckFailed else "")
        if kind is CheckpointCorrupt:
            hint = "hold the file's bytes against its digest (verify at depth bytes); where they are right, its publisher has to mend it"
        return kind(f"{self.tensor}: {what}", hint=hint, tensor=self.tensor)


def load(transforms: Iterable[object]) -> None:
    """Bring in everything that these use: one of each kind is tried on a small matrix."""
    tried: set[str] = set()
    for transform in transforms:
        if not isinstance(transform, (Repack, Recode)) or transform.describe() in tried:
            continue
        tried.add(transform.describe())
        if isinstance(transform, Recode):
            transform = replace(transform, columns=GROUP, exact=False)
        dtype = MXFP4_SOURCE if isinstance(transform, Repack) else transform.source
        if dtype == MXFP4_SOURCE:
            transform.apply((np.zeros(GROUP * GROUP // 2, np.uint8), np.full(GROUP, 127, np.uint8)))
        else:
            transform.apply((np.zeros(GROUP * GROUP, NUMPY_DTYPES[dtype]).view(np.uint8),))


def can_round(source: str, target: str) -> bool:
    """Whether a change of type can change finite values at all: E2M1 times a power of two fits BF16 and F32 alike."""
    return source != target and not (target == "F32" or (source == MXFP4_SOURCE and target in ("BF16", "MXFP4")))


@dataclass(frozen=True)
class ScoreVector:
    """The two vectors of an AttnRes site, norm and projection, are only used as their product; in float32."""

    sources: tuple[str, str]

    def describe(self) -> str:
        return "product in float32"

    def apply(self, inputs: Sequence[Any]) -> Applied:
        norm, projection = (_plain(raw, dtype) for raw, dtype in zip(inputs, self.sources, strict=True))
        return Applied((norm * projection,))


@dataclass(frozen=True)
class DecayRate:
    """-exp(A_log), rounded once to float32."""

    source: str

    def describe(self) -> str:
        return "-exp in float32"

    def apply(self, inputs: Sequence[Any]) -> Applied:
        return Applied(((-np.exp(_plain(inputs[0], self.source).astype(np.float64))).astype("<f4"),))


def _plain(raw: NDArray[np.uint8], dtype: str) -> NDArray[np.float32]:
    return to_f32(raw.view(NUMPY_DTYPES[dtype]))
