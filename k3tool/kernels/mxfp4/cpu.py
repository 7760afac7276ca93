"""FP4 decoding and the product with one vector as compiled CPU code."""

from __future__ import annotations

import ctypes
import threading
from contextlib import nullcontext
from functools import cache

import torch
from llvmlite import ir
from torch import Tensor

from k3tool.kernels.cpu import pool, product, target
from k3tool.kernels.cpu.emit import I64, Emitter, Value
from k3tool.kernels.cpu.formats import Fp4, RowAddress
from k3tool.kernels.cpu.numeric import to_bfloat16
from k3tool.kernels.mxfp4 import reference

_FIELDS = ("packed", "scales", "table", "out", "rows", "columns", "bfloat16")
SIZES = {"float32": 4, "bfloat16": 2}
VALUES_AT_ONCE = 1 << 16  # of a chunk


def _emit_decode(module: ir.Module, format_: Fp4) -> None:
    """Chunks are ranges of rows."""
    e = Emitter(module, "decode", 4)
    a = {name: e.load(I64, e.params[0] + 8 * index) for index, name in enumerate(_FIELDS)}
    _, chunk, chunks, _ = e.params
    row_bytes = format_.weight_bytes(a["columns"]), format_.scale_bytes(a["columns"])
    whole = a["columns"] // format_.block * format_.block
    all_rows = RowAddress(a["packed"], a["scales"], a["table"])
    is_bfloat16 = a["bfloat16"] > 0
    for dtype, case in (("float32", e.otherwise(is_bfloat16)), ("bfloat16", e.when(is_bfloat16))):
        with case, e.loop(a["rows"] * chunk // chunks, a["rows"] * (chunk + 1) // chunks) as row:
            at = all_rows.shifted(row * row_bytes[0], row * row_bytes[1])
            out = a["out"] + row * a["columns"] * SIZES[dtype]
            with e.loop(0, whole, format_.block) as first:
                here = at.shifted(format_.weight_bytes(first), format_.scale_bytes(first))
                _decode_block(e, format_, here, dtype, out + first * SIZES[dtype], None)
            with e.when(whole < a["columns"]):
                tail = product.complete_tail(e, format_, at, whole, a["columns"])
                _decode_block(e, format_, tail, dtype, out + whole * SIZES[dtype], a["columns"] - whole)
    e.finish()


def _decode_block(e: Emitter, format_: Fp4, at: RowAddress, dtype: str, out: Value, columns: Value | None) -> None:
    """One block of a row, or the first `columns` of it, to `out`."""
    for number, values in enumerate(format_.in_order(e, format_.vectors(e, at))):
        with nullcontext() if columns is None else e.when(columns > 16 * number):
            for part, value in enumerate(values):
                column = 16 * number + part * value.lanes
                e.store(to_bfloat16(e, value) if dtype == "bfloat16" else value, out + column * SIZES[dtype])


class _Compiled:
    def __init__(self, group_size: int) -> None:
        module = ir.Module(name=f"k3tool.mxfp4.{group_size}")
        _emit_decode(module, Fp4(group_size, target.host()))
        self._library = target.Library(module, target.host())
        self.decode = self._library.address("decode")
        self.arguments = (ctypes.c_int64 * len(_FIELDS))()
        self.lock = threading.Lock()


@cache
def _compiled(group_size: int) -> _Compiled:
    return _Compiled(group_size)


@cache
def _table(dtype: torch.dtype) -> Tensor:
    """[256] float32: what each scale byte stands for."""
    return reference.scale_values(torch.arange(256, dtype=torch.uint8).view(dtype))


def decode_values(
    packed: Tensor, scale: Tensor, dtype: torch.dtype, *, global_scale: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """packed [..., N/2], scale [..., N/group_size] -> [..., N] in dtype. See the public twin."""
    columns = 2 * packed.shape[-1]
    group = columns // scale.shape[-1]
    if group not in (16, 32):
        return reference.decode_values(packed, scale, dtype, global_scale=global_scale, out=out)
    packed, scale = packed.contiguous(), scale.contiguous()
    out = torch.empty((*packed.shape[:-1], columns), dtype=dtype) if out is None else out
    table = _table(scale.dtype) if global_scale is None else _table(scale.dtype) / global_scale.float()
    rows, compiled, workers = packed.numel() // packed.shape[-1], _compiled(group), pool.shared()
    with compiled.lock:
        compiled.arguments[:] = (
            packed.data_ptr(), scale.data_ptr(), table.data_ptr(), out.data_ptr(), rows, columns,
            dtype == torch.bfloat16,
        )  # fmt: skip
        chunks = max(1, min(rows, out.numel() // VALUES_AT_ONCE, 8 * workers.threads))
        workers.run(compiled.decode, ctypes.addressof(compiled.arguments), chunks)
    return out
