"""Building blocks of compiled kernels that work on rows of activations: float32 or bfloat16 in memory, float32 inside.

`over` walks a row in vectors and finishes with single numbers, so that any width works; `Sums` adds up both. A `Job` is
one compiled function with its block of arguments.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable

import torch
from torch import Tensor

from k3tool.kernels.cpu import pool, tape, target
from k3tool.kernels.cpu.emit import F32, I16, I32, I64, Emitter, Value, vector
from k3tool.kernels.cpu.numeric import float_of, from_bfloat16, round_bfloat16, to_bfloat16

SIZES = {"float32": 4, "bfloat16": 2}


def name_of(dtype: torch.dtype) -> str:
    """`float32` or `bfloat16`, as the functions of each dtype are named."""
    return "bfloat16" if dtype == torch.bfloat16 else "float32"


def load(e: Emitter, dtype: str, address: Value, lanes: int) -> Value:
    """`lanes` numbers as float32; one lane is a scalar."""
    if dtype == "bfloat16":
        return from_bfloat16(e, e.load(vector(I16, lanes) if lanes > 1 else I16, address))
    return e.load(vector(F32, lanes) if lanes > 1 else F32, address)


def store(e: Emitter, dtype: str, value: Value, address: Value) -> None:
    """Rounded to nearest, ties to even."""
    e.store(to_bfloat16(e, value) if dtype == "bfloat16" else value, address)


def rounded(e: Emitter, dtype: str, value: Value) -> Value:
    """What a value becomes when it passes through memory of that dtype."""
    return round_bfloat16(e, value) if dtype == "bfloat16" else value


def splat(e: Emitter, value: Value, lanes: int) -> Value:
    return e.splat(value, lanes) if lanes > 1 else value


def over(e: Emitter, count: Value, lanes: int, body: Callable[[Value, int], None]) -> None:
    """`body(index, lanes)` for whole vectors, then `body(index, 1)` for what is left of `count` numbers."""
    whole = count // lanes * lanes
    with e.loop(0, whole, lanes) as index:
        body(index, lanes)
    with e.loop(whole, count) as index:
        body(index, 1)


class Sums:
    """A running float32 sum over the vectors and numbers of `over`."""

    def __init__(self, e: Emitter, lanes: int) -> None:
        self._e = e
        self._wide = e.variable(e.number(0.0, vector(F32, lanes)))
        self._single = e.variable(e.number(0.0, F32))

    def add_product(self, one: Value, other: Value, lanes: int) -> None:
        sum_ = self._wide if lanes > 1 else self._single
        sum_.set(self._e.fma(one, other, sum_.get()))

    def total(self) -> Value:
        return self._e.total(self._wide.get()) + self._single.get()


def root(e: Emitter, value: Value) -> Value:
    """Square root of a float32."""
    return e.intrinsic("llvm.sqrt.f32", F32, value)


def float_argument(e: Emitter, bits: Value) -> Value:
    """A float32 that came as the low 32 bits of an argument."""
    return float_of(e, e.convert(bits, I32, "trunc"))


def float_bits(value: float) -> int:
    """A float32 as the integer that `float_argument` understands."""
    return struct.unpack("<i", struct.pack("<f", value))[0]


def to_float(e: Emitter, value: Value) -> Value:
    """A 64-bit integer as float32."""
    return e.convert(value, F32, "sitofp")


class Job:
    """A compiled function `name(arguments, chunk, chunks, thread)` and its argument block of 64-bit integers."""

    def __init__(self, library: target.Library, name: str, fields: tuple[str, ...]) -> None:
        self._library = library  # owns the machine code
        self._function = library.address(name)
        self._fields = fields
        self._block = (ctypes.c_int64 * len(fields))()
        self._address = ctypes.addressof(self._block)
        self.lock = threading.Lock()

    def run(self, chunks: int, *values: int, **growth: int) -> None:
        """Fill the arguments in order and do all chunks.

        growth: fields that depend on the position in the sequence, and by how much each grows with it.
        """
        with self.lock:
            self._block[:] = values
            pool.shared().run(self._function, self._address, chunks)
        recorder = tape.current()
        if recorder is not None:
            moves = tuple((self._fields.index(field), step) for field, step in growth.items())
            recorder.note(self._function, values, chunks, moves)


def arguments(e: Emitter, fields: tuple[str, ...]) -> dict[str, Value]:
    """The argument block by name."""
    return {name: e.load(I64, e.params[0] + 8 * index) for index, name in enumerate(fields)}


def share(e: Emitter, count: Value) -> tuple[Value, Value]:
    """First and last of `count` things that belong to this chunk."""
    _, chunk, chunks, _ = e.params
    return count * chunk // chunks, count * (chunk + 1) // chunks


def chunks_for(rows: int, work: int) -> int:
    """Chunks of a job of `rows` rows with `work` numbers each: one where a thread would cost more than it saves."""
    threads = pool.shared().threads
    if threads == 1 or rows * work < 16384:
        return 1
    return max(1, min(rows, 4 * threads, pool.MAX_CHUNKS))


def dense_rows(x: Tensor) -> Tensor:
    """x as it is where its last dimension is dense, else a copy."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()
