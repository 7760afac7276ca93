"""The routed experts of one layer as stacked tensors: packed FP4 with scales, or plain matrices."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from k3tool.kernels import mxfp4
from k3tool.kernels.moe.scaled import ScaledExperts

ACTIVATIONS = ("situ", "silu")


def _check_stack(name: str, weight: Tensor, shape: tuple[int, ...]) -> None:
    if weight.shape != shape or not weight.is_contiguous():
        raise ValueError(f"{name} must be contiguous {shape}, found {tuple(weight.shape)}")


@dataclass(frozen=True, eq=False)
class PackedExperts:
    """E experts, D wide, with I hidden units, in MXFP4 or NVFP4.

    w1 is the gate, w3 the up and w2 the down projection. `*_packed` are uint8, `*_scale` uint8 (E8M0) or
    float8_e4m3fn, `*_global` float32 [E] divisors of NVFP4 or None. All contiguous.
    """

    w1_packed: Tensor  # [E, I, D/2]
    w1_scale: Tensor  # [E, I, D/group_size]
    w3_packed: Tensor  # [E, I, D/2]
    w3_scale: Tensor  # [E, I, D/group_size]
    w2_packed: Tensor  # [E, D, I/2]
    w2_scale: Tensor  # [E, D, I/group_size]
    group_size: int = 32
    w1_global: Tensor | None = None  # [E]
    w3_global: Tensor | None = None
    w2_global: Tensor | None = None

    def __post_init__(self) -> None:
        experts, inner, half = self.w1_packed.shape
        wide, group = 2 * half, self.group_size
        if group not in (16, 32) or wide % group or inner % group:
            raise ValueError(f"widths {wide} and {inner} do not fit groups of {group}")
        for name, rows, columns in (("w1", inner, wide), ("w3", inner, wide), ("w2", wide, inner)):
            packed, scale, divisor = (getattr(self, f"{name}_{part}") for part in ("packed", "scale", "global"))
            _check_stack(f"{name}_packed", packed, (experts, rows, columns // 2))
            _check_stack(f"{name}_scale", scale, (experts, rows, columns // group))
            if packed.dtype != torch.uint8 or scale.dtype not in mxfp4.SCALE_DTYPES:
                raise ValueError(f"{name} must be uint8 with E8M0 or E4M3 scales, found {packed.dtype}, {scale.dtype}")
            if divisor is not None and (divisor.shape != (experts,) or divisor.dtype != torch.float32):
                raise ValueError(f"{name}_global must be float32 [{experts}], found {tuple(divisor.shape)}")

    @property
    def num_experts(self) -> int:
        return self.w1_packed.shape[0]

    @property
    def hidden_size(self) -> int:
        return self.w2_packed.shape[1]

    @property
    def intermediate_size(self) -> int:
        return self.w1_packed.shape[1]

    @property
    def nbytes(self) -> int:
        return sum(value.nbytes for value in vars(self).values() if isinstance(value, Tensor))

    def matrix(self, name: str, expert: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """One expert's w1, w3 ([I, D]) or w2 ([D, I]) as numbers."""
        divisor = getattr(self, f"{name}_global")
        return mxfp4.decode_values(
            getattr(self, f"{name}_packed")[expert],
            getattr(self, f"{name}_scale")[expert],
            dtype,
            global_scale=None if divisor is None else divisor[expert],
        )


@dataclass(frozen=True, eq=False)
class DenseExperts:
    """E experts, D wide, with I hidden units, as plain bfloat16, float16 or float32 matrices. All contiguous."""

    w1: Tensor  # [E, I, D]
    w3: Tensor  # [E, I, D]
    w2: Tensor  # [E, D, I]

    def __post_init__(self) -> None:
        experts, inner, wide = self.w1.shape
        _check_stack("w1", self.w1, (experts, inner, wide))
        _check_stack("w3", self.w3, (experts, inner, wide))
        _check_stack("w2", self.w2, (experts, wide, inner))
        if {self.w1.dtype, self.w2.dtype, self.w3.dtype} - {torch.bfloat16, torch.float16, torch.float32}:
            raise ValueError(f"dense experts must be floating point, found {self.w1.dtype}")

    @property
    def num_experts(self) -> int:
        return self.w1.shape[0]

    @property
    def hidden_size(self) -> int:
        return self.w1.shape[2]

    @property
    def intermediate_size(self) -> int:
        return self.w1.shape[1]

    @property
    def nbytes(self) -> int:
        return self.w1.nbytes + self.w2.nbytes + self.w3.nbytes

    def matrix(self, name: str, expert: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """One expert's w1, w3 ([I, D]) or w2 ([D, I]) as numbers."""
        return getattr(self, name)[expert].to(dtype)


Experts = PackedExperts | DenseExperts | ScaledExperts


def check_ids(ids: Tensor, num_experts: int) -> None:
    """Raises ValueError for an id that no expert has."""
    if ids.numel():
        low, high = (int(bound) for bound in ids.aminmax())
        if low < 0 or high >= num_experts:
            raise ValueError(f"expert ids must lie in 0..{num_experts - 1}, found {low}..{high}")
