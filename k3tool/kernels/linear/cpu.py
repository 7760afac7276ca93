"""The linear layer as compiled CPU code: weights are read as they are stored, never copied as a whole."""

from __future__ import annotations

import ctypes
from functools import cache

import torch
from llvmlite import ir
from torch import Tensor
from torch.nn import functional

from k3tool.kernels.cpu import pool, product, target
from k3tool.kernels.cpu.emit import I64, Emitter, Value
from k3tool.kernels.cpu.formats import Format, Plain, RowAddress
from k3tool.kernels.cpu.product import BLOCK_ROWS, DEPTH, Tiling
from k3tool.kernels.cpu.scratch import Scratch

ROWS_AT_ONCE = 4  # of the dot-product kernel: enough to share the loads of x, few enough for registers
TOKENS_AT_ONCE = 256  # longer prompts pass in blocks of this many tokens, so that panels stay cached
# Fields of the argument block, in order.
_FIELDS = ("x", "weight", "out", "rows", "columns", "tokens", "panel", "scratch", "scratch_bytes")


def _arguments(e: Emitter) -> dict[str, Value]:
    return {name: e.load(I64, e.params[0] + 8 * index) for index, name in enumerate(_FIELDS)}


def _emit_vector_product(module: ir.Module, format_: Format) -> None:
    """One token: chunks are ranges of rows, four at a time. x is padded with zeros to a whole block."""
    e = Emitter(module, "vector", 4)
    a = _arguments(e)
    _, chunk, chunks, _ = e.params
    row_bytes = format_.weight_bytes(a["columns"])

    def some(row: Value, count: int) -> None:
        zero = e.number(0)
        at = [RowAddress(a["weight"] + (row + i) * row_bytes, zero, zero) for i in range(count)]
        for i, value in enumerate(product.row_dots(e, format_, a["x"], at, a["columns"])):
            e.store(value, a["out"] + (row + i) * 4)

    groups = (a["rows"] + (ROWS_AT_ONCE - 1)) // ROWS_AT_ONCE
    first = groups * chunk // chunks * ROWS_AT_ONCE
    last = e.smaller(groups * (chunk + 1) // chunks * ROWS_AT_ONCE, a["rows"])
    whole = first + (last - first) // ROWS_AT_ONCE * ROWS_AT_ONCE
    with e.loop(first, whole, ROWS_AT_ONCE) as row:
        some(row, ROWS_AT_ONCE)
    with e.loop(whole, last) as row:
        some(row, 1)
    e.finish()


def _emit_pack(module: ir.Module, format_: Format, tile: Tiling) -> None:
    """x as panels, one tile of tokens a chunk."""
    e = Emitter(module, "pack", 4)
    a = _arguments(e)
    first, last_token = e.params[1] * tile.tokens, a["tokens"] - 1
    tokens = [e.smaller(first + lane, last_token) for lane in range(tile.tokens)]
    depth = (a["columns"] + (format_.block - 1)) // format_.block * format_.block
    product.pack_tile(e, format_, tile, a["x"], tokens, a["columns"], a["panel"] + first * depth * 4)
    e.finish()


def _emit_matrix_product(module: ir.Module, format_: Format, tile: Tiling, micros: list[ir.Function]) -> None:
    """Many tokens: chunks are blocks of rows."""
    block_product = product.emit_block_product(module, format_, tile, micros)
    e = Emitter(module, "matrix", 4)
    a = _arguments(e)
    _, chunk, _, thread = e.params
    first = chunk * BLOCK_ROWS
    rows = e.smaller(a["rows"] - first, e.number(BLOCK_ROWS))
    widened = a["scratch"] + thread * a["scratch_bytes"]
    c = widened + 4 * BLOCK_ROWS * DEPTH
    weight = a["weight"] + first * format_.weight_bytes(a["columns"])
    e.call(block_product, weight, 0, 0, rows, a["columns"], a["panel"], a["tokens"], c, widened)
    with e.loop(0, a["tokens"], tile.tokens) as token:
        c_tile = c + token * (4 * BLOCK_ROWS)
        present = e.smaller(a["tokens"] - token, e.number(tile.tokens))
        out = a["out"] + (token * a["rows"] + first) * 4
        product.unpack_tile(e, tile, c_tile, rows, present, out, a["rows"])
    e.finish()


_FORMATS = {torch.bfloat16: ("bfloat16", 2), torch.float16: ("float16", 2), torch.float32: ("float32", 4)}


class _Compiled:
    """Compiled functions for one weight dtype and the argument block they share, guarded by the scratch lock."""

    def __init__(self, dtype: torch.dtype) -> None:
        machine = target.host()
        self.tile = product.tiling(machine)
        format_ = Plain(*_FORMATS[dtype], machine.float_lanes)
        self.block = format_.block
        module = ir.Module(name=f"k3tool.linear.{format_.name}")
        _emit_pack(module, format_, self.tile)
        _emit_vector_product(module, format_)
        _emit_matrix_product(module, format_, self.tile, product.emit_micros(module, self.tile))
        library = self._library = target.Library(module, machine)
        self.pack, self.vector, self.matrix = (library.address(name) for name in ("pack", "vector", "matrix"))
        self.arguments = (ctypes.c_int64 * len(_FIELDS))()
        self.address = ctypes.addressof(self.arguments)
        self.scratch = Scratch()


@cache
def _compiled(dtype: torch.dtype) -> _Compiled:
    return _Compiled(dtype)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, in] float32, weight [out, in], both contiguous -> [T, out] float32. See the public twin."""
    compiled, workers = _compiled(weight.dtype), pool.shared()
    tokens, columns = x.shape
    rows = weight.shape[0]
    out = torch.empty((tokens, rows), dtype=torch.float32)
    with compiled.scratch.lock:
        for first in range(0, tokens, TOKENS_AT_ONCE):
            count = min(TOKENS_AT_ONCE, tokens - first)
            x_address = x.data_ptr() + 4 * first * columns
            compiled.arguments[:4] = x_address, weight.data_ptr(), out.data_ptr() + 4 * first * rows, rows
            compiled.arguments[4:6] = columns, count
            if count == 1:
                _vector_product(compiled, workers, x, rows, columns)
            else:
                _matrix_product(compiled, workers, rows, columns, count)
    return out


def _vector_product(compiled: _Compiled, workers: pool.Pool, x: Tensor, rows: int, columns: int) -> None:
    if columns % compiled.block:
        x = functional.pad(x[-1:], (0, compiled.block - columns % compiled.block))
        compiled.arguments[0] = x.data_ptr()
    workers.run(compiled.vector, compiled.address, _chunks(rows * columns, workers.threads))


def _matrix_product(compiled: _Compiled, workers: pool.Pool, rows: int, columns: int, tokens: int) -> None:
    depth = -(-columns // compiled.block) * compiled.block
    tiles = -(-tokens // compiled.tile.tokens)
    lanes = tiles * compiled.tile.tokens
    scratch_bytes = 4 * BLOCK_ROWS * (DEPTH + lanes)
    compiled.arguments[6:] = (
        compiled.scratch.address("panel", 4 * depth * lanes),
        compiled.scratch.address("scratch", scratch_bytes * workers.threads),
        scratch_bytes,
    )
    workers.run(compiled.pack, compiled.address, tiles)
    workers.run(compiled.matrix, compiled.address, -(-rows // BLOCK_ROWS))


def _chunks(weights: int, threads: int) -> int:
    """Chunks of a product with that many weights: one below 32k, else a few for each thread to even out."""
    return 1 if weights < 32768 or threads == 1 else min(4 * threads, weights // 16384)
