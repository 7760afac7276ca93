"""Norms as compiled CPU code: one pass for the statistics, one for the result, nothing in between is written."""

from __future__ import annotations

from functools import cache

import torch
from llvmlite import ir
from torch import Tensor

from k3tool.kernels.cpu import target
from k3tool.kernels.cpu.emit import F32, Emitter, Value
from k3tool.kernels.cpu.numeric import sigmoid
from k3tool.kernels.cpu.rows import (
    SIZES,
    Job,
    Sums,
    arguments,
    chunks_for,
    dense_rows,
    float_argument,
    float_bits,
    load,
    name_of,
    over,
    root,
    rounded,
    share,
    splat,
    store,
    to_float,
)

# Row r of x begins at x + r // inner * outer_step + r % inner * inner_step (bytes); the same for the gate.
_FIELDS = ("x", "x_outer", "x_inner", "gate", "gate_outer", "gate_inner", "weight", "out", "rows", "inner", "width", "eps")  # fmt: skip


def inverse_rms(e: Emitter, dtype: str, x: Value, width: Value, eps: Value, lanes: int) -> Value:
    """`1 / sqrt(mean(x^2) + eps)` of one row, float32."""
    sums = Sums(e, lanes)

    def add(index: Value, wide: int) -> None:
        value = load(e, dtype, x + index * SIZES[dtype], wide)
        sums.add_product(value, value, wide)

    over(e, width, lanes, add)
    return e.number(1.0, F32) / root(e, sums.total() / to_float(e, width) + eps)


def _emit(module: ir.Module, dtype: str, lanes: int, *, gated: bool) -> None:
    e = Emitter(module, "norm", 4)
    a = arguments(e, _FIELDS)
    size = SIZES[dtype]
    first, last = share(e, a["rows"])
    with e.loop(first, last) as row:
        outer, inner = row // a["inner"], row % a["inner"]
        x = a["x"] + outer * a["x_outer"] + inner * a["x_inner"]
        gate = a["gate"] + outer * a["gate_outer"] + inner * a["gate_inner"]
        out = a["out"] + row * a["width"] * size
        scale = inverse_rms(e, dtype, x, a["width"], float_argument(e, a["eps"]), lanes)

        def write(
            index: Value, wide: int, x: Value = x, gate: Value = gate, out: Value = out, scale: Value = scale
        ) -> None:
            value = load(e, dtype, x + index * size, wide) * splat(e, scale, wide)
            weight = load(e, "float32", a["weight"] + index * 4, wide)
            if gated:
                value = value * weight * sigmoid(e, load(e, dtype, gate + index * size, wide))
            else:
                value = rounded(e, dtype, value) * weight
            store(e, dtype, value, out + index * size)

        over(e, a["width"], lanes, write)
    e.finish()


@cache
def _job(dtype: str, gated: bool) -> Job:
    machine = target.host()
    module = ir.Module(name=f"k3tool.norm.{dtype}.{'gated' if gated else 'plain'}")
    _emit(module, dtype, machine.float_lanes, gated=gated)
    return Job(target.Library(module, machine), "norm", _FIELDS)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., D], weight [D] float32 -> x.dtype. See the public twin."""
    return _normalize(x, None, weight, eps)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x, gate [..., D], weight [D] float32 -> x.dtype. See the public twin."""
    return _normalize(x, gate, weight, eps)


def _steps(x: Tensor) -> tuple[Tensor, int, int]:
    """x with steps between outer and inner rows in bytes; a copy where two steps do not reach every row."""
    size = x.element_size()
    if x.stride(-1) == 1 or x.shape[-1] == 1:
        if x.dim() == 3:
            return x, x.stride(0) * size, x.stride(1) * size
        if x.dim() == 2:
            return x, x.stride(0) * size, 0
    x = x.contiguous()
    inner = x.shape[-2] if x.dim() > 1 else 1
    return x, inner * x.shape[-1] * size, x.shape[-1] * size


def _normalize(x: Tensor, gate: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype)
    width = x.shape[-1]
    rows = out.numel() // width if width else 0
    if rows == 0:
        return out
    inner = x.shape[-2] if x.dim() > 2 else 1
    x, x_outer, x_inner = _steps(x)
    gate_steps = (x, 0, 0) if gate is None else _steps(gate if gate.dtype == x.dtype else gate.to(x.dtype))
    weight = dense_rows(weight)
    _job(name_of(x.dtype), gate is not None).run(
        chunks_for(rows, width), x.data_ptr(), x_outer, x_inner, gate_steps[0].data_ptr(), *gate_steps[1:],
        weight.data_ptr(), out.data_ptr(), rows, inner, width, float_bits(eps),
    )  # fmt: skip
    return out
