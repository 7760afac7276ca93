"""The linear layer as compiled CPU code: weights are read as they are stored, never copied as a whole."""

from __future__ import annotations

from functools import cache

import torch
from llvmlite import ir
from torch import Tensor
from torch.nn import functional

from k3tool.kernels.cpu import pool, product, target
from k3tool.kernels.cpu.emit import Emitter, Value
from k3tool.kernels.cpu.formats import Format, Plain, RowAddress
from k3tool.kernels.cpu.product import BLOCK_ROWS, DEPTH, Tiling
from k3tool.kernels.cpu.rows import Job, arguments
from k3tool.kernels.cpu.scratch import Scratch
from k3tool.kernels.linear import reference

NATIVE_TOKENS = 32  # from so many on, a processor with bfloat16 matrix instructions wins through torch
# Float32 products this small cost little more than calling them. They are summed in float64: networks of many layers
# amplify what is rounded away, and small ones are compared digit by digit.
EXACT_TOKENS, EXACT_WEIGHTS = 256, 1 << 17
ROWS_AT_ONCE = 4  # of the dot-product kernel, where rows are longer than SHORT_ROW bytes
SHORT_ROW = 3072
FAR_AHEAD = 16384  # bytes asked for early with several rows at once
TOKENS_AT_ONCE = 256  # longer prompts pass in blocks of this many tokens, so that panels stay cached
# Fields of the argument block, in order.
_FIELDS = (
    "x", "weight", "out", "rows", "columns", "tokens", "bfloat16", "scratch", "scratch_bytes", "panel", "block_rows",
    "x_stride",
)  # fmt: skip


def _emit_vector_product(module: ir.Module, format_: Format) -> None:
    """One token: chunks are ranges of rows, four at a time. Each chunk widens x for itself."""
    e = Emitter(module, "vector", 4)
    a = arguments(e, _FIELDS)
    _, chunk, chunks, thread = e.params
    row_bytes = format_.weight_bytes(a["columns"])
    is_bfloat16 = a["bfloat16"] > 0
    x = a["scratch"] + thread * a["scratch_bytes"]
    product.pack_row(e, format_, a["x"], is_bfloat16, a["columns"], x)

    def some(row: Value, count: int) -> None:
        zero = e.number(0)
        at = [RowAddress(a["weight"] + (row + i) * row_bytes, zero, zero) for i in range(count)]
        ahead = FAR_AHEAD if count > 1 else product.NEAR_AHEAD
        for i, value in enumerate(product.row_dots(e, format_, x, at, a["columns"], ahead)):
            product.store_activations(e, value, a["out"], row + i, is_bfloat16)

    groups = (a["rows"] + (ROWS_AT_ONCE - 1)) // ROWS_AT_ONCE
    first = groups * chunk // chunks * ROWS_AT_ONCE
    last = e.smaller(groups * (chunk + 1) // chunks * ROWS_AT_ONCE, a["rows"])
    several = first + (last - first) // ROWS_AT_ONCE * ROWS_AT_ONCE
    whole = e.select(row_bytes > SHORT_ROW, several, first)
    with e.loop(first, whole, ROWS_AT_ONCE) as row:
        some(row, ROWS_AT_ONCE)
    with e.loop(whole, last) as row:
        some(row, 1)
    e.finish()


def _emit_pack(module: ir.Module, format_: Format, tile: Tiling) -> None:
    """x as panels, one tile of tokens a chunk."""
    e = Emitter(module, "pack", 4)
    a = arguments(e, _FIELDS)
    first, last_token = e.params[1] * tile.tokens, a["tokens"] - 1
    tokens = [e.smaller(first + lane, last_token) for lane in range(tile.tokens)]
    depth = (a["columns"] + (format_.block - 1)) // format_.block * format_.block
    x = product.Rows(a["x"], a["x_stride"], a["bfloat16"] > 0)
    product.pack_tile(e, format_, tile, x, tokens, a["columns"], a["panel"] + first * depth * 4)
    e.finish()


def _emit_matrix_product(module: ir.Module, format_: Format, tile: Tiling, micros: list[ir.Function]) -> None:
    """Many tokens: chunks are blocks of rows."""
    block_product = product.emit_block_product(module, format_, tile, micros)
    e = Emitter(module, "matrix", 4)
    a = arguments(e, _FIELDS)
    _, chunk, _, thread = e.params
    first = chunk * a["block_rows"]
    rows = e.smaller(a["rows"] - first, a["block_rows"])
    widened = a["scratch"] + thread * a["scratch_bytes"]
    c = widened + 4 * BLOCK_ROWS * DEPTH
    weight = a["weight"] + first * format_.weight_bytes(a["columns"])
    e.call(block_product, weight, 0, 0, rows, a["columns"], a["panel"], a["tokens"], c, widened)
    with e.loop(0, a["tokens"], tile.tokens) as token:
        c_tile = c + token * (4 * BLOCK_ROWS)
        present = e.smaller(a["tokens"] - token, e.number(tile.tokens))
        at = token * a["rows"] + first
        product.unpack_tile(e, tile, c_tile, rows, present, a["out"], at, a["rows"], a["bfloat16"] > 0)
    e.finish()


_FORMATS = {torch.bfloat16: ("bfloat16", 2), torch.float16: ("float16", 2), torch.float32: ("float32", 4)}


class _Compiled:
    """Compiled functions for one weight dtype and their working memory."""

    def __init__(self, dtype: torch.dtype) -> None:
        machine = target.host()
        self.tile = product.tiling(machine)
        format_ = Plain(*_FORMATS[dtype], machine.float_lanes)
        self.block = format_.block
        module = ir.Module(name=f"k3tool.linear.{format_.name}")
        _emit_pack(module, format_, self.tile)
        _emit_vector_product(module, format_)
        _emit_matrix_product(module, format_, self.tile, product.emit_micros(module, self.tile))
        library = target.Library(module, machine)
        self.pack, self.vector, self.matrix = (Job(library, name, _FIELDS) for name in ("pack", "vector", "matrix"))
        self.scratch = Scratch()


@cache
def _compiled(dtype: torch.dtype) -> _Compiled:
    return _Compiled(dtype)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [..., in], weight [out, in] -> [..., out] in x.dtype. See the public twin."""
    rows, columns = weight.shape
    tokens = x.numel() // columns
    if tokens == 0 or rows == 0 or not weight.is_contiguous():
        return reference.linear(x, weight)
    if tokens >= NATIVE_TOKENS and x.dtype == weight.dtype == torch.bfloat16 and _has_bfloat16_units():
        return functional.linear(x, weight)
    if 1 < tokens <= EXACT_TOKENS and x.dtype == torch.float32 and weight.numel() <= EXACT_WEIGHTS:
        return functional.linear(x.double(), weight.double()).to(torch.float32)
    out = torch.empty((*x.shape[:-1], rows), dtype=x.dtype)
    compiled = _compiled(weight.dtype)
    with compiled.scratch.lock:
        if tokens == 1:
            _one_token(compiled, x.contiguous(), weight, out)
        else:
            x = x.reshape(tokens, columns)
            _many_tokens(compiled, x if x.stride(1) == 1 else x.contiguous(), weight, out)
    return out


@cache
def _has_bfloat16_units() -> bool:
    """Does torch multiply bfloat16 on this processor in hardware (AVX512-BF16 or AMX), and may it?"""
    if target.level() in target.LEVELS[:-1]:
        return False
    checks = (getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"))
    return any(check is not None and check() for check in checks)


def _one_token(compiled: _Compiled, x: Tensor, weight: Tensor, out: Tensor) -> None:
    workers = pool.shared()
    rows, columns = weight.shape
    row_bytes = 4 * (columns + compiled.block) // 64 * 64 + 64
    scratch = compiled.scratch.address("row", row_bytes * workers.threads)
    compiled.vector.run(
        _chunks(rows * columns, workers.threads), x.data_ptr(), weight.data_ptr(), out.data_ptr(), rows, columns, 1,
        x.dtype == torch.bfloat16, scratch, row_bytes, 0, 0, 0,
    )  # fmt: skip


def _chunks(weights: int, threads: int) -> int:
    """Chunks of a product with that many weights: one below 32k, else a few for each thread to even out."""
    return 1 if weights < 32768 or threads == 1 else min(4 * threads, weights // 16384)


def _many_tokens(compiled: _Compiled, x: Tensor, weight: Tensor, out: Tensor) -> None:
    workers, tokens = pool.shared(), x.shape[0]
    rows, columns = weight.shape
    depth = -(-columns // compiled.block) * compiled.block
    most = min(tokens, TOKENS_AT_ONCE)
    lanes = -(-most // compiled.tile.tokens) * compiled.tile.tokens
    scratch_bytes = 4 * BLOCK_ROWS * (DEPTH + lanes)
    scratch = compiled.scratch.address("scratch", scratch_bytes * workers.threads)
    panel = compiled.scratch.address("panel", 4 * depth * lanes)
    block_rows = product.balanced_rows(rows, workers.threads)
    for first in range(0, tokens, TOKENS_AT_ONCE):
        count = min(TOKENS_AT_ONCE, tokens - first)
        values = (
            x[first].data_ptr(), weight.data_ptr(), out.data_ptr() + out.element_size() * first * rows, rows, columns,
            count, x.dtype == torch.bfloat16, scratch, scratch_bytes, panel, block_rows, x.stride(0),
        )  # fmt: skip
        compiled.pack.run(-(-count // compiled.tile.tokens), *values)
        compiled.matrix.run(-(-rows // block_rows), *values)
