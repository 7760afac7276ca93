"""How stacked experts reach the Triton kernels: pointers, formats and group sizes in one form for all schemes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from k3tool.kernels.moe import tiles
from k3tool.kernels.moe.experts import DenseExperts, Experts, PackedExperts
from k3tool.kernels.moe.scaled import ScaledExperts

_SCALED = {"int4": tiles.INT4, "int8": tiles.INT8, "fp8": tiles.FP8}


@dataclass(frozen=True)
class Stored:
    """w1, w3, w2: (codes, scales, global scales) each, with a stand-in where there is none.

    block_columns: columns that share one scale of the sums, so that a step takes no more (0: no such limit).
    """

    w1: tuple[Tensor, Tensor, Tensor]
    w3: tuple[Tensor, Tensor, Tensor]
    w2: tuple[Tensor, Tensor, Tensor]
    num_experts: int
    width: int
    inner: int
    nibbles: bool
    block_columns: int
    constants: dict[str, Any]

    def row(self, name: str) -> tuple[int, int, int]:
        """Codes of a row of a matrix, its scales, and the scales of the whole matrix of one expert."""
        codes, scales, _ = getattr(self, name)
        return codes.shape[2], scales.shape[2], scales.shape[1] * scales.shape[2]


def stored(experts: Experts) -> Stored:
    """Raises ValueError for a kind of experts that has no kernel."""
    if isinstance(experts, DenseExperts):
        matrices = {name: (getattr(experts, name),) * 3 for name in ("w1", "w3", "w2")}
        return _assemble(experts, matrices, tiles.DENSE, group=0, block=0)
    if isinstance(experts, PackedExperts):
        return _packed(experts)
    if isinstance(experts, ScaledExperts):
        matrices = {
            name: (getattr(experts, f"{name}_codes"), *(getattr(experts, f"{name}_scale"),) * 2)
            for name in ("w1", "w3", "w2")
        }
        group = experts.group_size
        block = min(group or 128, 128)
        return _assemble(experts, matrices, _SCALED[experts.kind], group, block, experts.scale_rows)
    raise ValueError(f"no Triton kernel for {type(experts).__name__}")


def _packed(experts: PackedExperts) -> Stored:
    matrices = {}
    for name in ("w1", "w3", "w2"):
        scale = getattr(experts, f"{name}_scale").view(torch.uint8)
        divisor = getattr(experts, f"{name}_global")
        matrices[name] = (getattr(experts, f"{name}_packed"), scale, scale if divisor is None else divisor)
    is_e4m3 = experts.w1_scale.dtype == torch.float8_e4m3fn
    return _assemble(
        experts, matrices, tiles.NVFP4 if is_e4m3 else tiles.MXFP4, experts.group_size, block=0,
        has_global=experts.w1_global is not None,
    )  # fmt: skip


def _assemble(
    experts: Any, matrices: dict[str, Any], format_: Any, group: int, block: int, scale_rows: int = 1,
    has_global: bool = False,
) -> Stored:  # fmt: skip
    nibbles = format_ in (tiles.MXFP4, tiles.NVFP4, tiles.INT4)
    constants = {
        "FORMAT": format_,
        "GROUP": group,
        "SCALE_ROWS": scale_rows,
        "NIBBLES": nibbles,
        "HAS_GLOBAL": has_global,
    }
    return Stored(
        matrices["w1"], matrices["w3"], matrices["w2"], experts.num_experts, experts.hidden_size,
        experts.intermediate_size, nibbles, block, constants,
    )  # fmt: skip
