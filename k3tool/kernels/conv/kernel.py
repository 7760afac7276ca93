"""The short convolution in Triton: a program makes some tokens of some channels; taps are shifted loads."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3tool.kernels.lang import IS_INTERPRETED, cast, dense_last, power_of_two, silu

BLOCK_T = 128 if IS_INTERPRETED else 32
BLOCK_C = 1024 if IS_INTERPRETED else 128


@triton.jit
def causal_conv_kernel(
    x, weight, history, out, offsets, x_stride_b, x_stride_t, time, channels,
    TAPS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Programs (channel block, time block, sequence). The first time block of a sequence also renews its history."""
    sequence = tl.program_id(2).to(tl.int64)
    if PACKED:
        begin = tl.load(offsets + sequence).to(tl.int64)
        length = tl.load(offsets + sequence + 1).to(tl.int64) - begin
        first, out_first = begin * x_stride_t, begin
    else:
        length = sequence * 0 + time  # a time of 1 is a constant, which has no type to convert
        first, out_first = sequence * x_stride_b, sequence * length
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
    t = (tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)[:, None]
    known = c < channels
    held = history + sequence * (TAPS - 1) * channels + c
    total = tl.zeros((BLOCK_T, BLOCK_C), tl.float32)
    for tap in tl.static_range(TAPS):
        at = t + (tap - (TAPS - 1))
        now = tl.load(x + first + at * x_stride_t + c, known & (at >= 0) & (at < length), 0.0).to(tl.float32)
        if TAPS > 1:
            before = tl.load(held + (at + TAPS - 1) * channels, known & (at < 0) & (t < length), 0.0)
            now += before.to(tl.float32)
        total += now * tl.load(weight + tap * channels + c, known, 0.0)
    result = cast(silu(total), out.dtype.element_ty)
    tl.store(out + (out_first + t) * channels + c, result, known & (t < length))
    if (TAPS > 1) & (tl.program_id(1) == 0):
        _renew_history(x + first + c, held, x_stride_t, length, channels, known, TAPS)


@triton.jit
def _renew_history(x, held, x_stride_t, length, channels, known, TAPS: tl.constexpr):
    """history = last TAPS - 1 rows of history followed by x. No row is written before a thread may still read it."""
    rows = tl.where(known, length, 0)  # of every channel: Triton 3.9 interprets no mask of a scalar and a block
    for tap in tl.static_range(TAPS - 1):
        at = rows - (TAPS - 1) + tap  # of x; rows before x lie in the history
        tl.debug_barrier()
        new = tl.load(x + at * x_stride_t, known & (at >= 0), 0.0)
        old = tl.load(held + (at + TAPS - 1) * channels, known & (at < 0), 0.0)
        # Row `tap` takes row `tap + length` or later, so rows still to be read lie behind it.
        value = tl.where(at >= 0, new.to(tl.float32), old.to(tl.float32))
        tl.debug_barrier()
        tl.store(held + tap * channels, cast(value, held.dtype.element_ty), rows > 0)


def causal_conv(x: Tensor, weight: Tensor, history: Tensor) -> Tensor:
    """x [B, T, C], weight [W, C], history [B, W - 1, C] (overwritten) -> [B, T, C]. See the public twin."""
    return _convolve(x, weight, history, None, x.shape[1])


def causal_conv_packed(x: Tensor, weight: Tensor, history: Tensor, offsets: Tensor) -> Tensor:
    """x [T, C], weight [W, C], history [N, W - 1, C] (overwritten), offsets [N + 1] -> [T, C]. See the public twin."""
    return _convolve(x.unsqueeze(0), weight, history, offsets, x.shape[0]).squeeze(0)


def _convolve(x: Tensor, weight: Tensor, history: Tensor, offsets: Tensor | None, longest: int) -> Tensor:
    x, weight = dense_last(x), weight.contiguous()
    held = history.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    sequences, channels = history.shape[0], x.shape[2]
    if sequences and longest:
        block_t = min(BLOCK_T, power_of_two(longest, 1))
        block_c = min(BLOCK_C, power_of_two(channels, 1))
        grid = (triton.cdiv(channels, block_c), triton.cdiv(longest, block_t), sequences)
        causal_conv_kernel[grid](
            x, weight, held, out, held if offsets is None else offsets, x.stride(0), x.stride(1), x.shape[1], channels,
            TAPS=weight.shape[0], BLOCK_T=block_t, BLOCK_C=block_c, PACKED=offsets is not None, num_warps=4,
        )  # fmt: skip
    if held is not history:
        history.copy_(held)
    return out
