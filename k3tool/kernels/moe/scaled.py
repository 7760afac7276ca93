"""Routed experts in the storages whose scales multiply sums: FP8, 4- and 8-bit integers, NF4 and FP4 of bitsandbytes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from k3tool.kernels.linear.stored import BITS, numbers

FP8_BLOCK = 128
KINDS = ("fp8", "int4", "int8", "nf4", "fp4")
GROUP_SIZES = (0, 32, 64, 128)


@dataclass(frozen=True, eq=False)
class ScaledExperts:
    """E experts, D wide, with I hidden units; w1 is the gate, w3 the up and w2 the down projection. All contiguous.

    `*_codes` are uint8 as stored (see `k3tool.formats`): E4M3 bytes or integers + 128 [E, out, in], or two 4-bit codes to a
    byte [E, out, in/2]: integers + 8, the low nibble first, or NF4 and FP4, the high one first. `*_scale`
    [E, out / scale_rows, in / group_size] (rounded up), bfloat16 or float32; with group_size 0 one per row. FP8 by block has
    group_size 128, and unless said otherwise a scale for 128 rows.
    """

    kind: str
    w1_codes: Tensor
    w1_scale: Tensor
    w3_codes: Tensor
    w3_scale: Tensor
    w2_codes: Tensor
    w2_scale: Tensor
    group_size: int
    rows_per_scale: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS or self.w1_codes.dim() != 3:
            raise ValueError(f"kind must be one of {KINDS} with stacked codes, found {self.kind!r}")
        if self.group_size not in GROUP_SIZES or (self.kind == "fp8" and self.group_size not in (0, FP8_BLOCK)):
            raise ValueError(f"{self.kind} has no groups of {self.group_size}")
        wide, inner = self.hidden_size, self.intermediate_size
        for name, rows, columns in (("w1", inner, wide), ("w3", inner, wide), ("w2", wide, inner)):
            for part, shape in (
                ("codes", self._codes_shape(rows, columns)),
                ("scale", self._scale_shape(rows, columns)),
            ):
                found = getattr(self, f"{name}_{part}")
                if found.shape != shape or not found.is_contiguous():
                    raise ValueError(f"{name}_{part} must be contiguous {shape}, found {tuple(found.shape)}")
            codes, scale = getattr(self, f"{name}_codes"), getattr(self, f"{name}_scale")
            if codes.dtype != torch.uint8 or scale.dtype not in (torch.float32, torch.bfloat16):
                raise ValueError(f"{name} must be uint8 with float scales, found {codes.dtype} and {scale.dtype}")

    def _codes_shape(self, rows: int, columns: int) -> tuple[int, int, int]:
        return self.num_experts, rows, columns * BITS[self.kind] // 8

    def _scale_shape(self, rows: int, columns: int) -> tuple[int, int, int]:
        across = -(-columns // self.group_size) if self.group_size else 1
        if self.kind != "fp8" and self.group_size and columns % self.group_size:
            raise ValueError(f"{columns} columns are not whole groups of {self.group_size}")
        return self.num_experts, -(-rows // self.scale_rows), across

    @property
    def scale_rows(self) -> int:
        """Rows that share a scale."""
        if self.rows_per_scale is not None:
            return self.rows_per_scale
        return FP8_BLOCK if self.kind == "fp8" and self.group_size else 1

    @property
    def num_experts(self) -> int:
        return self.w1_codes.shape[0]

    @property
    def hidden_size(self) -> int:
        return self.w2_codes.shape[1]

    @property
    def intermediate_size(self) -> int:
        return self.w1_codes.shape[1]

    @property
    def nbytes(self) -> int:
        return sum(value.nbytes for value in vars(self).values() if isinstance(value, Tensor))

    def matrix(self, name: str, expert: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """One expert's w1, w3 ([I, D]) or w2 ([D, I]) as numbers, rounded once."""
        codes, scale = getattr(self, f"{name}_codes")[expert], getattr(self, f"{name}_scale")[expert]
        return numbers(self.kind, codes, scale, self.group_size, self.scale_rows).to(dtype)
