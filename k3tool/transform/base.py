"""What a job is made of: output tensors, the source ranges each comes from, and transforms of those that must travel
together.

All of it is pure description (names, dtypes, shapes); nothing here opens a file. An output is either a `Copy` of
source ranges or the result of a `Compute` on them, and in both cases a pure function of those ranges.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

from k3tool.catalog import count
from k3tool.checkpoint.header import dtype_bits

AHEAD_BYTES = 64 << 20  # inputs of a transform that are read while the one before it computes; larger ones wait


class TensorOut(NamedTuple):
    """One tensor of an output file. `dtype` as safetensors spells it."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return count(self.shape) * dtype_bits(self.dtype) // 8


class Region(NamedTuple):
    """[start, stop) along `axis` of one source tensor of the given whole shape; everything along the other axes.

    `tensor` is the name under which the source finds it (`Tensors.locate`). A scalar is axis 0, [0, 1).
    """

    tensor: str
    dtype: str
    shape: tuple[int, ...]
    axis: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        """Extent along `axis`."""
        return self.stop - self.start

    @property
    def rows(self) -> Blocks:
        """Where its bytes are, counted from the tensor's first byte: one row for each index above the axis."""
        return _rows(*self[1:])

    @property
    def blocks(self) -> Blocks:
        """The same with rows that touch each other joined: one row where the region is one plain byte range."""
        return _blocks(*self[1:])

    @property
    def nbytes(self) -> int:
        blocks = self.blocks
        return blocks.width * blocks.rows


class Blocks(NamedTuple):
    """`rows` runs of `width` bytes, one every `pitch` bytes, the first at `offset`. One row: a plain byte range."""

    offset: int
    width: int
    pitch: int
    rows: int


@lru_cache(maxsize=4096)
def _rows(dtype: str, shape: tuple[int, ...], axis: int, start: int, stop: int) -> Blocks:
    inner = count(shape[axis + 1 :]) * dtype_bits(dtype)
    extent = shape[axis] if shape else 1
    assert inner * start % 8 == 0 and inner * stop % 8 == 0, "a cut inside a byte"
    return Blocks(start * inner // 8, (stop - start) * inner // 8, extent * inner // 8, count(shape[:axis]))


@lru_cache(maxsize=4096)
def _blocks(dtype: str, shape: tuple[int, ...], axis: int, start: int, stop: int) -> Blocks:
    rows = _rows(dtype, shape, axis, start, stop)
    if rows.width != rows.pitch and rows.rows != 1:
        return rows
    length = rows.width * rows.rows
    return Blocks(rows.offset, length, length, 1)


class Zeros(NamedTuple):
    """Zero padding, `size` long along the axis of its Copy."""

    size: int


class Literal(NamedTuple):
    """Bytes that the plan itself knows (a stored shape). The only member of its Copy."""

    data: bytes


Member = Region | Zeros | Literal


class Copy(NamedTuple):
    """One output tensor: its members joined along `axis` in order. Bytes are carried, never interpreted."""

    output: TensorOut
    members: tuple[Member, ...]
    axis: int = 0

    @property
    def outputs(self) -> tuple[TensorOut, ...]:
        return (self.output,)

    @property
    def needs(self) -> tuple[Region, ...]:
        return tuple(member for member in self.members if isinstance(member, Region))

    @property
    def memory_bytes(self) -> int:
        """What it needs beside the copy buffers: nothing that grows with the tensor."""
        return 0

    def rows(self, member: Member) -> Blocks:
        """A member as rows of the output: one for each index above the axis."""
        if isinstance(member, Region):
            return member.rows
        if isinstance(member, Literal):
            return Blocks(0, len(member.data), len(member.data), 1)
        shape = self.output.shape
        width = member.size * count(shape[self.axis + 1 :]) * dtype_bits(self.output.dtype) // 8
        return Blocks(0, width, width, count(shape[: self.axis]))


class Applied(NamedTuple):
    """What a transform gives back: the bytes of each output in order, and optionally a JSON value to report."""

    outputs: Sequence[Any]
    measured: Any = None


class Transform(Protocol):
    """A pure function from whole inputs to whole outputs. Called from several threads at once.

    Equal transforms of equal inputs are applied once for all files that are written together."""

    def describe(self) -> str:
        """What it does in a few words; equal words mean equal results (the job's identity is made of them)."""
        ...

    def apply(self, inputs: Sequence[Any]) -> Applied:
        """inputs: one 1-D numpy uint8 array per region of `needs`, in order, row-major, writable, not kept after: the
        next step's inputs may overwrite them once the outputs were taken.

        Each output is anything with the buffer interface whose length is exactly its TensorOut's bytes; where the step
        has a `Keep`, what that expects.
        """
        ...


class Keep(Protocol):
    """What one file stores of what a transform has made: a pure function, with equality."""

    def take(self, made: Sequence[Any]) -> Iterator[Any]:
        """The bytes of each output of the step in order, one at a time. made: the outputs of the transform."""
        ...


@dataclass(frozen=True)
class Compute:
    """Several output tensors that follow each other in a file, made by one transform from what travels together.

    working_bytes: memory the transform needs beside its inputs and outputs. keep: which part of what is made this file
    stores (None: all). made_bytes: of all that is made, where that is more than the outputs.
    """

    outputs: tuple[TensorOut, ...]
    needs: tuple[Region, ...]
    transform: Transform
    working_bytes: int = field(default=0)
    keep: Keep | None = None
    made_bytes: int = 0

    @property
    def input_bytes(self) -> int:
        return sum(region.nbytes for region in self.needs)

    @property
    def memory_bytes(self) -> int:
        """Beside its own inputs and outputs, inputs of the next step that are read meanwhile, and one cut output."""
        moved = self.input_bytes + max(self.made_bytes, sum(output.nbytes for output in self.outputs))
        cut = max((output.nbytes for output in self.outputs), default=0) if self.made_bytes else 0
        return moved + cut + min(self.input_bytes, AHEAD_BYTES) + self.working_bytes


Step = Copy | Compute


def whole(tensor: str, dtype: str, shape: tuple[int, ...]) -> Region:
    """All of one source tensor."""
    return Region(tensor, dtype, shape, 0, 0, shape[0] if shape else 1)


def carry(name: str, dtype: str, shape: tuple[int, ...], *, source: str | None = None) -> Copy:
    """One tensor unchanged, under `name`; `source` where the source knows it by another."""
    return Copy(TensorOut(name, dtype, shape), (whole(source or name, dtype, shape),))
