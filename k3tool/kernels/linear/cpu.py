"""The linear layer as compiled CPU code: weights are read as they are stored, never copied as a whole."""

from __future__ import annotations

from functools import cache
from weakref import WeakKeyDictionary

import torch
from llvmlite import ir
from torch import Tensor
from torch.nn import functional

from k3tool.kernels.cpu import pool, product, tape, target
from k3tool.kernels.cpu.emit import F32, Emitter, Value
from k3tool.kernels.cpu.formats import Format, Fp4, Plain, RowAddress
from k3tool.kernels.cpu.product import BLOCK_ROWS, DEPTH, Tiling
from k3tool.kernels.cpu.rows import SIZES, Job, arguments, share, store
from k3tool.kernels.cpu.scaled import Scaled
from k3tool.kernels.cpu.scratch import Scratch
from k3tool.kernels.linear import reference
from k3tool.kernels.linear.stored import StackedMatrix, StoredMatrix, Weight
from k3tool.kernels.mxfp4 import reference as fp4

NATIVE_TOKENS = 32  # from so many on, a processor with bfloat16 matrix instructions wins through torch
# Float32 products this small cost little more than calling them. They are summed in float64: networks of many layers
# amplify what is rounded away, and small ones are compared digit by digit.
EXACT_TOKENS, EXACT_WEIGHTS = 256, 1 << 17
VALUES_AT_ONCE = 1 << 16  # decoded by a chunk
ROWS_AT_ONCE = 4  # of the dot-product kernel, where rows are longer than SHORT_ROW bytes
SHORT_ROW = 3072
FAR_AHEAD = 16384  # bytes asked for early with several rows at once
TOKENS_AT_ONCE = 256  # longer prompts pass in blocks of this many tokens, so that panels stay cached
# Fields of the argument block, in order.
_FIELDS = (
    "x", "weight", "out", "rows", "columns", "tokens", "bfloat16", "scratch", "scratch_bytes", "panel", "block_rows",
    "x_stride", "scales", "table",
)  # fmt: skip


def _emit_vector_product(module: ir.Module, format_: Format) -> None:
    """One token: chunks are ranges of rows, four at a time. Each chunk widens x for itself."""
    e = Emitter(module, "vector", 4)
    a = arguments(e, _FIELDS)
    _, chunk, chunks, thread = e.params
    row_bytes, row_scales = format_.weight_bytes(a["columns"]), format_.row_scale_bytes(a["columns"])
    all_rows = RowAddress(a["weight"], a["scales"], a["table"])
    is_bfloat16 = a["bfloat16"] > 0
    x = a["scratch"] + thread * a["scratch_bytes"]
    product.pack_row(e, format_, a["x"], is_bfloat16, a["columns"], x)

    def some(row: Value, count: int) -> None:
        at = [all_rows.shifted((row + i) * row_bytes, (row + i) * row_scales) for i in range(count)]
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
    scales = a["scales"] + first * format_.row_scale_bytes(a["columns"])
    e.call(block_product, weight, scales, a["table"], rows, a["columns"], a["panel"], a["tokens"], c, widened)
    with e.loop(0, a["tokens"], tile.tokens) as token:
        c_tile = c + token * (4 * BLOCK_ROWS)
        present = e.smaller(a["tokens"] - token, e.number(tile.tokens))
        at = token * a["rows"] + first
        product.unpack_tile(e, tile, c_tile, rows, present, a["out"], at, a["rows"], a["bfloat16"] > 0)
    e.finish()


def _emit_decode(module: ir.Module, format_: Scaled) -> None:
    """Rows as numbers: chunks are ranges of rows, `out` [rows, columns] is bfloat16 or float32."""
    e = Emitter(module, "decode", 4)
    a = arguments(e, _FIELDS)
    columns, lanes = a["columns"], format_.lanes
    whole = columns // format_.block * format_.block
    row_bytes = format_.weight_bytes(columns), format_.row_scale_bytes(columns)
    all_rows = RowAddress(a["weight"], a["scales"], a["table"])
    first, last = share(e, a["rows"])
    for dtype, case in (("float32", e.otherwise(a["bfloat16"] > 0)), ("bfloat16", e.when(a["bfloat16"] > 0))):
        with case, e.loop(first, last) as row:
            at = all_rows.shifted(row * row_bytes[0], row * row_bytes[1])
            out = a["out"] + row * columns * SIZES[dtype]
            with e.loop(0, whole, format_.block) as column:
                here = at.shifted(format_.weight_bytes(column), format_.scale_bytes(column))
                for half, values in enumerate(format_.in_order(e, format_.vectors(e, here))):
                    store(e, dtype, values, out + (column + half * lanes) * SIZES[dtype])
            with e.when(whole < columns):
                tail, block = product.complete_tail(e, format_, at, whole, columns), e.stack(4 * format_.block)
                for half, values in enumerate(format_.in_order(e, format_.vectors(e, tail))):
                    e.store(values, block + 4 * lanes * half)
                with e.loop(whole, columns) as column:
                    store(e, dtype, e.load(F32, block + (column - whole) * 4), out + column * SIZES[dtype])
    e.finish()


_PLAIN = {torch.bfloat16: ("bfloat16", 2), torch.float16: ("float16", 2), torch.float32: ("float32", 4)}
_Key = torch.dtype | tuple[str, int, str]


class _Compiled:
    """Compiled functions for one storage of weights and their working memory."""

    def __init__(self, format_: Format) -> None:
        machine = target.host()
        self.tile = product.tiling(machine)
        self.block = format_.block
        module = ir.Module(name=f"k3tool.linear.{format_.name}")
        _emit_pack(module, format_, self.tile)
        _emit_vector_product(module, format_)
        _emit_matrix_product(module, format_, self.tile, product.emit_micros(module, self.tile))
        if isinstance(format_, Scaled):
            _emit_decode(module, format_)
        library = target.Library(module, machine)
        self.pack, self.vector, self.matrix = (Job(library, name, _FIELDS) for name in ("pack", "vector", "matrix"))
        self.decode = Job(library, "decode", _FIELDS) if isinstance(format_, Scaled) else None
        self.scratch = Scratch()


@cache
def _compiled(key: _Key) -> _Compiled:
    machine = target.host()
    if isinstance(key, torch.dtype):
        return _Compiled(Plain(*_PLAIN[key], machine.float_lanes))
    kind, group, scale = key
    return _Compiled(Fp4(group, machine) if kind == "e2m1" else Scaled(kind, group, scale, machine))


def _key(weight: Tensor | StoredMatrix) -> _Key:
    if isinstance(weight, Tensor):
        return weight.dtype
    return weight.kind, weight.group_size, "" if weight.kind == "e2m1" else str(weight.scale.dtype)[6:]


_TABLES: WeakKeyDictionary[StoredMatrix, Tensor] = WeakKeyDictionary()


def _addresses(weight: Tensor | StoredMatrix) -> tuple[int, int, int]:
    """Of codes or numbers, of scales, and of the 256 numbers behind scale bytes."""
    if isinstance(weight, Tensor):
        return weight.data_ptr(), 0, 0
    table = _TABLES.get(weight)
    if table is None and weight.kind == "e2m1":
        with tape.aside():
            codes = torch.arange(256, dtype=torch.uint8).view(weight.scale.dtype)
            table = _TABLES[weight] = fp4.scale_values(codes, weight.divisor)
    return weight.codes.data_ptr(), weight.scale.data_ptr(), 0 if table is None else table.data_ptr()


def linear(x: Tensor, weight: Weight) -> Tensor:
    """x [..., in], weight [out, in] -> [..., out] in x.dtype. See the public twin."""
    rows, columns = weight.shape
    tokens = x.numel() // columns
    if tokens == 0 or rows == 0 or (isinstance(weight, Tensor) and not weight.is_contiguous()):
        return reference.linear(x, weight)
    if isinstance(weight, StackedMatrix) and tokens > 1:
        return torch.cat([linear(x, part) for part in weight.parts], dim=-1)
    if tokens > 1 and (found := _by_torch(x, weight, tokens)) is not None:
        return found
    out = torch.empty((*x.shape[:-1], rows), dtype=x.dtype)
    if tokens == 1:
        x, first = x.contiguous(), 0
        for part in weight.parts if isinstance(weight, StackedMatrix) else (weight,):
            _one_token(_compiled(_key(part)), x, part, out[..., first : first + part.shape[0]])
            first += part.shape[0]
        return out
    assert not isinstance(weight, StackedMatrix)
    x = x.reshape(tokens, columns)
    _many_tokens(_compiled(_key(weight)), x if x.stride(1) == 1 else x.contiguous(), weight, out)
    return out


def _by_torch(x: Tensor, weight: Tensor | StoredMatrix, tokens: int) -> Tensor | None:
    """Products that torch does better, or nothing."""
    is_stored = isinstance(weight, StoredMatrix)
    if tokens >= NATIVE_TOKENS and x.dtype == torch.bfloat16 and _has_bfloat16_units():
        if is_stored:
            rows = [functional.linear(x, decode(weight, some, torch.bfloat16)) for some in weight.split()]
            return torch.cat(rows, dim=-1) if len(rows) > 1 else rows[0]
        if weight.dtype == torch.bfloat16:
            return functional.linear(x, weight)
    numel = weight.shape[0] * weight.shape[1]
    if tokens <= EXACT_TOKENS and x.dtype == torch.float32 and numel <= EXACT_WEIGHTS:
        wide = decode(weight, slice(None), torch.float32) if is_stored else weight
        return functional.linear(x.double(), wide.double()).to(torch.float32)
    return None


def decode(weight: StoredMatrix, some: slice, dtype: torch.dtype) -> Tensor:
    """Some rows as numbers [n, in] in float32 (code times scale, rounded once) or that in bfloat16."""
    codes, scale = weight.codes[some], weight.scale[some]
    out = torch.empty(codes.shape[0], weight.shape[1], dtype=dtype)
    compiled = None if weight.kind == "e2m1" else _compiled(_key(weight)).decode
    if compiled is None:
        return weight.rows(some, dtype)
    chunks = max(1, min(out.shape[0], out.numel() // VALUES_AT_ONCE, 8 * pool.shared().threads))
    compiled.run(
        chunks, 0, codes.data_ptr(), out.data_ptr(), *out.shape, 0, dtype == torch.bfloat16, 0, 0, 0, 0, 0,
        scale.data_ptr(), 0,
    )  # fmt: skip
    return out


@cache
def _has_bfloat16_units() -> bool:
    """Does torch multiply bfloat16 on this processor in hardware (AVX512-BF16 or AMX), and may it?"""
    if target.level() in target.LEVELS[:-1]:
        return False
    checks = (getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"))
    return any(check is not None and check() for check in checks)


def _one_token(compiled: _Compiled, x: Tensor, weight: Tensor | StoredMatrix, out: Tensor) -> None:
    workers = pool.shared()
    codes, scales, table = _addresses(weight)
    rows, columns = weight.shape
    row_bytes = 4 * (columns + compiled.block) // 64 * 64 + 64
    with compiled.scratch.lock:
        scratch = compiled.scratch.address("row", row_bytes * workers.threads)
        compiled.vector.run(
            _chunks(rows * columns, workers.threads), x.data_ptr(), codes, out.data_ptr(), rows, columns, 1,
            x.dtype == torch.bfloat16, scratch, row_bytes, 0, 0, 0, scales, table,
        )  # fmt: skip


def _chunks(weights: int, threads: int) -> int:
    """Chunks of a product with that many weights: one below 32k, else a few for each thread to even out."""
    return 1 if weights < 32768 or threads == 1 else min(4 * threads, weights // 16384)


def _many_tokens(compiled: _Compiled, x: Tensor, weight: Tensor | StoredMatrix, out: Tensor) -> None:
    workers, tokens = pool.shared(), x.shape[0]
    codes, scales, table = _addresses(weight)
    rows, columns = weight.shape
    depth = -(-columns // compiled.block) * compiled.block
    most = min(tokens, TOKENS_AT_ONCE)
    lanes = -(-most // compiled.tile.tokens) * compiled.tile.tokens
    scratch_bytes = 4 * BLOCK_ROWS * (DEPTH + lanes)
    with compiled.scratch.lock:
        scratch = compiled.scratch.address("scratch", scratch_bytes * workers.threads)
        panel = compiled.scratch.address("panel", 4 * depth * lanes)
        block_rows = product.balanced_rows(rows, workers.threads)
        for first in range(0, tokens, TOKENS_AT_ONCE):
            count = min(TOKENS_AT_ONCE, tokens - first)
            values = (
                x[first].data_ptr(), codes, out.data_ptr() + out.element_size() * first * rows, rows, columns, count,
                x.dtype == torch.bfloat16, scratch, scratch_bytes, panel, block_rows, x.stride(0), scales, table,
            )  # fmt: skip
            compiled.pack.run(-(-count // compiled.tile.tokens), *values)
            compiled.matrix.run(-(-rows // block_rows), *values)
