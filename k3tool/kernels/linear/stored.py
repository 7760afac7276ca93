"""Weights as a checkpoint stores them, codes with scales; rows of several matrices as one; and their numbers in plain torch.

A kernel multiplies with them as they are. Where one has no use for codes, rows are widened, a bounded number at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from k3tool.kernels import mxfp4

BITS = {"e2m1": 4, "int4": 4, "nf4": 4, "fp4": 4, "int8": 8, "fp8": 8}
"""Kinds of codes, and their bits. e2m1: MXFP4 and NVFP4. nf4, fp4: of bitsandbytes. fp8: E4M3."""
HIGH_FIRST = ("nf4", "fp4")
"""Of two codes in a byte, the first column is the high one; the low one elsewhere."""
BOOKS = {
    "nf4": (
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
        -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
        0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ),
    "fp4": tuple(float(x / torch.tensor(12.0)) for x in torch.tensor(
        (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0, -0.0, -0.0625, -8.0, -12.0, -4.0, -6.0, -2.0, -3.0)
    )),
}  # fmt: skip
"""The numbers that codes of a kind stand for, where it has a table of them."""
WIDENED = 1 << 22  # numbers that are widened at a time


def numbers(kind: str, codes: Tensor, scale: Tensor, group_size: int, scale_rows: int = 1) -> Tensor:
    """float32 [out, in] of codes uint8 [out, in * bits / 8]: code times scale, rounded once. Not for e2m1.

    scale: [out / scale_rows, in / group_size], rounded up; with group_size 0 one per row.
    """
    if BITS[kind] == 4:
        halves = (codes >> 4, codes & 15) if kind in HIGH_FIRST else (codes & 15, codes >> 4)
        codes = torch.stack(halves, dim=-1).flatten(-2)
    if kind in BOOKS:
        values = torch.tensor(BOOKS[kind], device=codes.device)[codes.long()]
    elif kind == "fp8":
        values = codes.view(torch.float8_e4m3fn).float()
    else:
        values = codes.float() - (1 << (BITS[kind] - 1))
    rows, columns = values.shape
    down = scale.float().repeat_interleave(scale_rows, 0)[:rows]
    return values * down.repeat_interleave(group_size or columns, 1)[:, :columns]


@dataclass(frozen=True, eq=False)
class StoredMatrix:
    """[out, in] as codes, uint8 [out, in * bits / 8], and scales [out, in / group_size] (rounded up); all contiguous.

    Scales of e2m1: uint8 (E8M0) or float8_e4m3fn with a float32 `divisor` [1]. Of other kinds: float32 or bfloat16, and
    group_size 0 where there is one per row.
    """

    kind: str
    codes: Tensor
    scale: Tensor
    group_size: int
    divisor: Tensor | None = None

    def __post_init__(self) -> None:
        if self.kind not in BITS or self.codes.dim() != 2 or self.codes.dtype != torch.uint8:
            raise ValueError(f"codes of {self.kind!r} must be uint8 [out, bytes], found {tuple(self.codes.shape)}")
        rows, columns = self.shape
        groups = -(-columns // self.group_size) if self.group_size else 1
        if self.scale.shape != (rows, groups) or not (self.scale.is_contiguous() and self.codes.is_contiguous()):
            raise ValueError(f"scale must be contiguous {[rows, groups]}, found {tuple(self.scale.shape)}")
        is_float = self.scale.dtype in (torch.float32, torch.bfloat16)
        if is_float if self.kind == "e2m1" else (not is_float or self.group_size % 32):
            raise ValueError(f"{self.kind} takes no {self.scale.dtype} scales by {self.group_size}")

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1] * 8 // BITS[self.kind]

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scale.nbytes + (0 if self.divisor is None else self.divisor.nbytes)

    def rows(self, which: slice | Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Some rows as numbers [n, in], rounded once."""
        codes, scale = self.codes[which], self.scale[which]
        if self.kind == "e2m1":
            return mxfp4.decode_values(codes, scale, dtype, global_scale=self.divisor)
        return numbers(self.kind, codes, scale, self.group_size).to(dtype)

    def split(self) -> list[slice]:
        """All rows, a bounded number at a time."""
        step = max(1, WIDENED // self.shape[1])
        return [slice(first, first + step) for first in range(0, self.shape[0], step)]


@dataclass(frozen=True, eq=False)
class StackedMatrix:
    """The rows of several matrices with one input, each as it is."""

    parts: tuple[Tensor | StoredMatrix, ...]

    @property
    def shape(self) -> tuple[int, int]:
        return sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)


Weight = Tensor | StoredMatrix | StackedMatrix
"""What `linear` multiplies with."""
