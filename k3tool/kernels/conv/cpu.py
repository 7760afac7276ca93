"""The short convolution as compiled CPU code: channels are independent, so each chunk owns some and their history."""

from __future__ import annotations

from functools import cache

import torch
from llvmlite import ir
from torch import Tensor

from k3tool.kernels.cpu import target
from k3tool.kernels.cpu.emit import F32, Emitter, Value, vector
from k3tool.kernels.cpu.numeric import sigmoid
from k3tool.kernels.cpu.rows import SIZES, Job, arguments, chunks_for, dense_rows, load, name_of, over, share, store

BLOCK = 64  # channels that one chunk takes at least
# `x` and `history` are the inputs of channel 0; steps between tokens in bytes.
_FIELDS = ("x", "x_step", "weight", "history", "out", "tokens", "channels")


def emit_channels(
    e: Emitter, dtype: str, lanes: int, taps: int, a: dict[str, Value], span: tuple[Value, Value], out: Value,
    out_step: Value,
) -> None:  # fmt: skip
    """Convolve channels span[0]..span[1] of every token to `out` (address of the first of them), then move their
    history on. `a` holds the fields x, x_step, weight, history, tokens and channels."""
    size = SIZES[dtype]
    first, last = span
    before = taps - 1
    history_step = a["channels"] * size

    def source(index: Value | int) -> Value:
        """Address of input `index`, first channel: the history comes first, then the tokens."""
        index = index if isinstance(index, Value) else e.number(index)
        old, new = a["history"] + index * history_step, a["x"] + (index - before) * a["x_step"]
        return e.select(index < before, old, new) + first * size

    with e.loop(0, a["tokens"]) as token:
        inputs = [source(token + tap) for tap in range(taps)]

        def convolve(offset: Value, wide: int, inputs: list[Value] = inputs, token: Value = token) -> None:
            total = e.number(0.0, vector(F32, wide) if wide > 1 else F32)
            for tap, address in enumerate(inputs):
                weight = load(e, "float32", a["weight"] + (a["channels"] * tap + first + offset) * 4, wide)
                total = e.fma(weight, load(e, dtype, address + offset * size, wide), total)
            store(e, dtype, total * sigmoid(e, total), out + token * out_step + offset * size)

        over(e, last - first, lanes, convolve)
    for index in range(before):  # ascending: each place is read before it is overwritten
        origin, place = source(a["tokens"] + index), source(index)

        def move(offset: Value, wide: int, origin: Value = origin, place: Value = place) -> None:
            store(e, dtype, load(e, dtype, origin + offset * size, wide), place + offset * size)

        over(e, last - first, lanes, move)


def _emit(module: ir.Module, dtype: str, lanes: int, taps: int) -> None:
    e = Emitter(module, "conv", 4)
    a = arguments(e, _FIELDS)
    size = SIZES[dtype]
    first, last = share(e, (a["channels"] + (BLOCK - 1)) // BLOCK)
    with e.loop(first, last) as block:
        start = block * BLOCK
        span = start, e.smaller(start + BLOCK, a["channels"])
        emit_channels(e, dtype, lanes, taps, a, span, a["out"] + start * size, a["channels"] * size)
    e.finish()


@cache
def _job(dtype: str, taps: int) -> Job:
    machine = target.host()
    module = ir.Module(name=f"k3tool.conv.{dtype}.{taps}")
    _emit(module, dtype, machine.float_lanes, taps)
    return Job(target.Library(module, machine), "conv", _FIELDS)


def causal_conv(x: Tensor, weight: Tensor, history: Tensor) -> Tensor:
    """x [B, T, C], weight [W, C], history [B, W - 1, C] (overwritten) -> [B, T, C]. See the public twin."""
    batch, tokens, channels = x.shape
    x, weight = dense_rows(x), weight.contiguous()
    own = history if history.is_contiguous() else history.contiguous()
    out = torch.empty(batch, tokens, channels, dtype=x.dtype)
    size = x.element_size()
    chunks = min(chunks_for(-(-channels // BLOCK), BLOCK * tokens * weight.shape[0] * 4), -(-channels // BLOCK))
    for index in range(batch if out.numel() else 0):
        _job(name_of(x.dtype), weight.shape[0]).run(
            chunks, x[index].data_ptr(), x.stride(1) * size, weight.data_ptr(), own[index].data_ptr(),
            out[index].data_ptr(), tokens, channels,
        )  # fmt: skip
    if own is not history:
        history.copy_(own)
    return out
