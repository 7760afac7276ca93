"""Elementwise operations as compiled CPU code, on dense memory; anything else takes the torch twin."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from llvmlite import ir
from torch import Tensor

from k3tool.kernels.cpu import target
from k3tool.kernels.cpu.emit import Emitter, Value
from k3tool.kernels.cpu.numeric import sigmoid
from k3tool.kernels.cpu.rows import SIZES, Job, arguments, chunks_for, load, name_of, over, rounded, share, store
from k3tool.kernels.elementwise import reference

_FIELDS = ("x", "y", "out", "count")
STRETCH = 4096  # numbers that a chunk holds at least


def _sum(e: Emitter, dtype: str, x: Value, y: Value) -> Value:
    return x + y


def _gated(e: Emitter, dtype: str, x: Value, y: Value) -> Value:
    return x * rounded(e, dtype, sigmoid(e, y))


def _first(e: Emitter, dtype: str, x: Value, y: Value) -> Value:
    return x


_Operation = Callable[[Emitter, str, Value, Value], Value]
_OPERATIONS: dict[str, _Operation] = {"add": _sum, "gate": _gated, "copy": _first}


def _emit(module: ir.Module, name: str, dtype: str, result: str, lanes: int) -> None:
    """Chunks are stretches of the numbers, each a multiple of a vector but the last."""
    e = Emitter(module, name, 4)
    a = arguments(e, _FIELDS)
    blocks = (a["count"] + (lanes - 1)) // lanes
    first, last = (part * lanes for part in share(e, blocks))
    start, count = first, e.smaller(last, a["count"]) - first
    x, y = (a[operand] + start * SIZES[dtype] for operand in ("x", "y"))
    out = a["out"] + start * SIZES[result]

    def step(index: Value, wide: int) -> None:
        one = load(e, dtype, x + index * SIZES[dtype], wide)
        other = one if name == "copy" else load(e, dtype, y + index * SIZES[dtype], wide)
        store(e, result, _OPERATIONS[name](e, dtype, one, other), out + index * SIZES[result])

    over(e, count, lanes, step)
    e.finish()


@cache
def _job(name: str, dtype: str, result: str) -> Job:
    machine = target.host()
    module = ir.Module(name=f"k3tool.elementwise.{name}.{dtype}.{result}")
    _emit(module, name, dtype, result, machine.float_lanes)
    return Job(target.Library(module, machine), name, _FIELDS)


def _run(name: str, x: Tensor, y: Tensor, result: Tensor, **growth: int) -> None:
    count = x.numel()
    if count:
        chunks = chunks_for(-(-count // STRETCH), STRETCH)
        job = _job(name, name_of(x.dtype), name_of(result.dtype))
        job.run(chunks, x.data_ptr(), y.data_ptr(), result.data_ptr(), count, **growth)


def _plain(*tensors: Tensor) -> bool:
    return all(t.is_contiguous() and t.dtype in (torch.float32, torch.bfloat16) for t in tensors)


def add(x: Tensor, y: Tensor, out: Tensor | None = None) -> Tensor:
    """See the public twin."""
    if not _plain(x, y, x if out is None else out):
        return reference.add(x, y, out)
    out = torch.empty(x.shape, dtype=x.dtype) if out is None else out
    _run("add", x, y, out)
    return out


def multiply_by_sigmoid(x: Tensor, gate: Tensor) -> Tensor:
    """See the public twin."""
    if not _plain(x, gate):
        return reference.multiply_by_sigmoid(x, gate)
    out = torch.empty(x.shape, dtype=x.dtype)
    _run("gate", x, gate, out)
    return out


def convert(x: Tensor, dtype: torch.dtype) -> Tensor:
    """See the public twin."""
    if not _plain(x):
        return reference.convert(x, dtype)
    out = torch.empty(x.shape, dtype=dtype)
    _run("copy", x, x, out)
    return out


def put(x: Tensor, place: Tensor, *, growth: int = 0) -> None:
    """See the public twin."""
    if not _plain(x, place):
        reference.put(x, place)
        return
    _run("copy", x, x, place, out=growth)
