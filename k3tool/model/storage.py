"""How a quantized matrix is held in memory: the codes and scales that kernels take, and what makes them of stored parts.

Codes are the bytes of the file. Scales are too, except where a kernel needs one for every row: those of FP8 blocks of 128 rows
are repeated (3 % more memory), and those of bitsandbytes are decoded and laid out by row (6 %).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from k3tool.checkpoint.header import TensorSpec
from k3tool.errors import CheckpointCorrupt
from k3tool.kernels.linear.stored import BITS, BOOKS
from k3tool.kernels.moe.scaled import FP8_BLOCK

PLAIN_SCALES = {"F32": torch.float32, "BF16": torch.bfloat16}
_BITSANDBYTES_STATE = "weight.quant_state.bitsandbytes__"
_HINT = "hold the file's bytes against its digest (verify at depth bytes); where they are right, its publisher has to mend it"

Make = Callable[[Mapping[str, object]], object]
"""Numpy arrays by part -> the one to be held."""


class Piece(NamedTuple):
    """One tensor of a matrix as it is held: the bytes of one stored part, or what `make` makes of several."""

    field: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: tuple[str, ...]
    make: Make | None = None


class Storage(NamedTuple):
    """kind, group_size and scale_rows: see `StoredMatrix` and `ScaledExperts`."""

    kind: str
    group_size: int
    scale_rows: int
    pieces: tuple[Piece, ...]

    @property
    def columns(self) -> int:
        return self.pieces[0].shape[1] * 8 // BITS[self.kind]

    def alike(self, other: Storage | None) -> bool:
        """Can both lie in one stack?"""
        return other is not None and self._form() == other._form()

    def _form(self) -> tuple[object, ...]:
        return self[:3], [(piece.field, piece.shape, piece.dtype, piece.parts) for piece in self.pieces]


def storage_of(
    scheme: str, parts: Mapping[str, TensorSpec], shape: tuple[int, ...], *, gpu: bool = False
) -> Storage | None:
    """None for a scheme or a shape that no kernel takes as it is stored.

    gpu: as Triton kernels take them, with one scale for a block of rows. parts: all of a module, found to fit `shape`.
    """
    if len(shape) != 2:
        return None
    rows, columns = shape
    if scheme in ("int4", "int8"):
        found = _integers(int(scheme[3:]), parts, rows, columns)
    elif scheme in ("fp8-block", "fp8-channel"):
        found = _fp8(scheme, parts, rows, columns, gpu)
    elif scheme in BOOKS and not gpu:
        found = _bitsandbytes(scheme, parts, rows, columns)
    elif scheme in ("mxfp4", "nvfp4", "nvfp4-modelopt"):
        return _fp4(scheme, rows, columns)
    else:
        return None
    return found if found is not None and found.group_size % 32 == 0 else None


def _scale(part: str, spec: TensorSpec, shape: tuple[int, ...]) -> Piece:
    if spec.dtype in PLAIN_SCALES:
        return Piece("scale", shape, PLAIN_SCALES[spec.dtype], (part,))
    return Piece("scale", shape, torch.float32, (part,), lambda arrays: _floats(arrays[part]).reshape(shape))


def _floats(array):
    from k3tool.formats.codes import to_f32

    return to_f32(array)


def _integers(bits: int, parts: Mapping[str, TensorSpec], rows: int, columns: int) -> Storage | None:
    spec = parts["weight_scale"]
    groups = spec.shape[-1]
    if columns * bits % 32 or spec.shape != (rows, groups):
        return None
    codes = Piece("codes", (rows, columns * bits // 8), torch.uint8, ("weight_packed",))
    scale = _scale("weight_scale", spec, (rows, groups))
    return Storage(f"int{bits}", 0 if groups == 1 else columns // groups, 1, (codes, scale))


def _fp8(scheme: str, parts: Mapping[str, TensorSpec], rows: int, columns: int, gpu: bool) -> Storage:
    part = next(part for part in ("weight_scale", "weight_scale_inv") if part in parts)
    codes = Piece("codes", (rows, columns), torch.uint8, ("weight",))
    if scheme == "fp8-channel":
        return Storage("fp8", 0, 1, (codes, _scale(part, parts[part], (rows, 1))))
    blocks = (-(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK))
    if gpu:
        return Storage("fp8", FP8_BLOCK, FP8_BLOCK, (codes, _scale(part, parts[part], blocks)))
    spread = Piece(
        "scale", (rows, blocks[1]), torch.float32, (part,),
        lambda arrays: _floats(arrays[part]).reshape(blocks).repeat(FP8_BLOCK, 0)[:rows],
    )  # fmt: skip
    return Storage("fp8", FP8_BLOCK, 1, (codes, spread))


def _bitsandbytes(scheme: str, parts: Mapping[str, TensorSpec], rows: int, columns: int) -> Storage | None:
    """Blocks run across rows: a group is what the rows and the blocks divide into."""
    blocks = math.prod(parts["weight.absmax"].shape)
    if columns % 2 or not blocks or rows * columns % blocks:
        return None
    block = rows * columns // blocks
    group = math.gcd(block, columns)
    codes = Piece("codes", (rows, columns // 2), torch.uint8, ("weight",))
    others = tuple(part for part in parts if part != "weight")
    make = partial(_maxima_by_row, scheme=scheme, shape=(rows, columns), block=block, group=group)
    return Storage(
        scheme, group, 1, (codes, Piece("scale", (rows, columns // group), torch.float32, others, make))
    )  # fmt: skip


def _maxima_by_row(arrays, *, scheme: str, shape: tuple[int, int], block: int, group: int):
    """float32 [out, in / group] of what lies beside the codes. Raises CheckpointCorrupt where it does not fit them."""
    import numpy as np

    from k3tool.formats import bnb

    state = bnb.read_state(arrays[_BITSANDBYTES_STATE + scheme])
    if tuple(state["shape"]) != shape or int(state["blocksize"]) != block:
        raise CheckpointCorrupt(
            f"quant_state says {state['shape']} in blocks of {state['blocksize']}, expected {list(shape)} in blocks of {block}",
            hint=_HINT,
        )
    table = np.array(arrays["weight.quant_map"], np.float32)
    if not np.array_equal(table, np.array(BOOKS[scheme], np.float32)):
        raise CheckpointCorrupt(f"weight.quant_map is not the table of {scheme}", hint=_HINT)
    maxima = bnb.block_maxima(arrays, state)
    rows, columns = shape
    first = np.arange(rows)[:, None] * columns + np.arange(columns // group)[None] * group
    return maxima.reshape(-1)[first // block]


def _fp4(scheme: str, rows: int, columns: int) -> Storage | None:
    group, dtype = (32, torch.uint8) if scheme == "mxfp4" else (16, torch.float8_e4m3fn)
    if columns % group:
        return None
    codes = Piece(
        "codes", (rows, columns // 2), torch.uint8, ("weight" if scheme == "nvfp4-modelopt" else "weight_packed",)
    )
    scale = Piece("scale", (rows, columns // group), dtype, ("weight_scale",))
    pieces = (codes, scale)
    if scheme == "nvfp4":
        pieces += (Piece("divisor", (1,), torch.float32, ("weight_global_scale",)),)
    elif scheme == "nvfp4-modelopt":  # a multiplier
        pieces += (Piece("divisor", (1,), torch.float32, ("weight_scale_2",), _reciprocal),)
    return Storage("e2m1", group, 1, pieces)


def _reciprocal(arrays):
    return (1 / arrays["weight_scale_2"].reshape(1)).astype("float32")


def check_codes(kind: str, codes: Tensor, scale: Tensor, module: str) -> None:
    """Bytes that stand for NaN would spoil every token: E4M3 codes 0x7f and 0xff, E8M0 scales of 255.

    Raises CheckpointCorrupt naming the module.
    """
    if kind == "fp8" and bool(((codes & 0x7F) == 0x7F).any()):
        raise CheckpointCorrupt(f"{module}.weight holds a byte that stands for NaN", hint=_HINT)
    if kind == "e2m1" and scale.dtype == torch.uint8 and int(scale.max()) == 255:
        raise CheckpointCorrupt(f"{module}.weight_scale holds byte 255, which stands for NaN", hint=_HINT)
