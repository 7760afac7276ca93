"""SiTU and SiLU gating as compiled CPU code: on vectors inside the expert kernels, and on whole tensors."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from llvmlite import ir
from torch import Tensor

from k3tool.kernels.cpu import pool, target
from k3tool.kernels.cpu.emit import F32, I16, Emitter, Value, vector
from k3tool.kernels.cpu.numeric import from_bfloat16, sigmoid, tanh
from k3tool.kernels.cpu.product import store_activations
from k3tool.kernels.cpu.rows import Job, arguments, float_argument, float_bits

COLUMNS_AT_ONCE = 1024  # of a chunk
CAPS = ("beta", "of_beta", "linear_beta", "of_linear_beta")
_FIELDS = ("gate", "up", "out", "rows", "columns", "gate_step", "up_step", "bfloat16", "silu", *CAPS)


def gated(e: Emitter, gate: Value, up: Value, is_silu: Value, caps: Sequence[Value]) -> Value:
    """Float32 vectors. `caps` are the arguments of those names: the caps of SiTU and one over each."""
    likelihood = sigmoid(e, gate)
    result = e.variable(gate)
    with e.when(is_silu):
        result.set(gate * likelihood * up)
    with e.otherwise(is_silu):
        beta, of_beta, linear, of_linear = (e.splat(float_argument(e, cap), gate.lanes) for cap in caps)
        result.set(beta * tanh(e, gate * of_beta) * likelihood * (linear * tanh(e, up * of_linear)))
    return result.get()


def caps_of(beta: float, linear_beta: float) -> tuple[int, ...]:
    """The arguments named in CAPS."""
    return tuple(float_bits(value) for value in (beta, 1 / beta, linear_beta, 1 / linear_beta))


def _emit(module: ir.Module, lanes: int) -> None:
    """Chunks are (row, stretch of columns)."""
    e = Emitter(module, "activate", 4)
    a = arguments(e, _FIELDS)
    is_bfloat16, is_silu = a["bfloat16"] > 0, a["silu"] > 0
    stretches = (a["columns"] + (COLUMNS_AT_ONCE - 1)) // COLUMNS_AT_ONCE
    row, stretch = e.params[1] // stretches, e.params[1] % stretches
    first = stretch * COLUMNS_AT_ONCE
    last = e.smaller(first + COLUMNS_AT_ONCE, a["columns"])
    starts = (row * a["gate_step"], row * a["up_step"])

    def load(base: Value, index: Value, wide: int) -> Value:
        found = e.variable(e.number(0.0, vector(F32, wide)))
        with e.when(is_bfloat16):
            found.set(from_bfloat16(e, e.load(vector(I16, wide), base + index * 2)))
        with e.otherwise(is_bfloat16):
            found.set(e.load(vector(F32, wide), base + index * 4))
        return found.get()

    def step(column: Value, wide: int) -> None:
        gate, up = (load(a[name], start + column, wide) for name, start in zip(("gate", "up"), starts, strict=True))
        value = gated(e, gate, up, is_silu, [a[cap] for cap in CAPS])
        store_activations(e, value, a["out"], row * a["columns"] + column, is_bfloat16)

    whole = first + (last - first) // lanes * lanes
    with e.loop(first, whole, lanes) as column:
        step(column, lanes)
    with e.loop(whole, last) as column:
        step(column, 1)
    e.finish()


@cache
def _job() -> Job:
    module = ir.Module(name="k3tool.activation")
    _emit(module, target.host().float_lanes)
    return Job(target.Library(module, target.host()), "activate", _FIELDS)


def gated_activation(gate: Tensor, up: Tensor, activation: str, beta: float, linear_beta: float) -> Tensor:
    """gate, up [..., I] -> [..., I] in their dtype. See the public twin."""
    out = torch.empty(gate.shape, dtype=gate.dtype)
    if out.numel() == 0:
        return out
    columns = gate.shape[-1]
    gate, up = (tensor.reshape(-1, columns) for tensor in (gate, up))
    gate, up = (tensor if tensor.stride(1) == 1 or columns == 1 else tensor.contiguous() for tensor in (gate, up))
    rows, caps = gate.shape[0], caps_of(beta, linear_beta)
    stretches = -(-columns // COLUMNS_AT_ONCE)
    at_once = max(1, pool.MAX_CHUNKS // stretches)
    for first in range(0, rows, at_once):
        count = min(at_once, rows - first)
        _job().run(
            count * stretches, gate[first].data_ptr(), up[first].data_ptr(),
            out.data_ptr() + first * columns * out.element_size(), count, columns, gate.stride(0), up.stride(0),
            gate.dtype == torch.bfloat16, activation == "silu", *caps,
        )  # fmt: skip
    return out
