"""Recording a step of compiled jobs once and replaying it without Python in between.

A decode step of a large model is some hundred short jobs; between them Python and torch would take as long as the jobs.
While a `Recorder` is open, every job that runs is written down with its arguments, and every tensor is kept, so
that its address stays good. A torch operation that computes something outside of a job could not be replayed: the
recorder notices each and says so in `problem`. Arguments that depend on the position are declared by the job.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar, Token
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from k3tool.kernels.cpu import pool

_current: ContextVar[Recorder | None] = ContextVar("k3tool_recorder", default=None)
_ALLOCATIONS = ("empty", "empty_strided", "new_empty", "new_empty_strided", "empty_like")


@dataclass(frozen=True)
class _Call:
    function: int
    values: tuple[int, ...]
    chunks: int
    moves: tuple[tuple[int, int], ...]  # which value grows, by how much, with every position


def current() -> Recorder | None:
    """The recorder that is open in this thread or task."""
    return _current.get()


@contextmanager
def aside() -> Iterator[None]:
    """For work that is done once and for all: it belongs to no step."""
    recorder = _current.get()
    if recorder is None:
        yield
        return
    before, recorder.is_aside = recorder.is_aside, True
    try:
        yield
    finally:
        recorder.is_aside = before


class _Watch:
    """What a recorder does with each operation of torch.

    A class of its own: torch wraps a `__torch_dispatch__` that a mode itself defines so that its first call imports
    the whole compiler stack of torch, which takes more than a second and 140 MB.
    """

    kept: list[Any]
    is_aside: bool
    problem: str

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.kept.append(result)
        if self.is_aside or self.problem:
            return result
        if func._schema.is_mutable or not (_is_allocation(func) or _is_view(result, args)):
            self.problem = f"{func} computes outside of compiled jobs"
        return result


class Recorder(_Watch, TorchDispatchMode):
    """Writes down the jobs that run while it is open. `problem` names the first thing that cannot be replayed."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[_Call] = []
        self.kept: list[Any] = []
        self.problem = ""
        self.is_aside = False
        self._scratch: dict[tuple[int, str], Tensor] = {}
        self._token: Token[Recorder | None] | None = None

    def __enter__(self) -> Recorder:
        self._token = _current.set(self)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        assert self._token is not None
        _current.reset(self._token)

    def note(self, function: int, values: tuple[int, ...], chunks: int, moves: tuple[tuple[int, int], ...]) -> None:
        self.calls.append(_Call(function, tuple(int(value) for value in values), chunks, moves))

    def scratch(self, owner: object, name: str, size: int) -> Tensor:
        """Working memory for what is recorded, of nobody else: at least `size` bytes."""
        held = self._scratch.get((id(owner), name))
        if held is None or held.numel() < size:
            held = self._scratch[id(owner), name] = torch.empty(size, dtype=torch.uint8)
            self.kept.append(owner)
        return held


def _is_allocation(func: Any) -> bool:
    return func.overloadpacket.__name__ in _ALLOCATIONS


def _is_view(result: Any, args: Any) -> bool:
    """Does everything in `result` lie in the memory of a tensor among the arguments?"""
    results = result if isinstance(result, (list, tuple)) else [result]
    sources = {tensor.untyped_storage().data_ptr() for tensor in args if isinstance(tensor, Tensor)}
    return all(isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() in sources for tensor in results)


class Tape:
    """What a recorder wrote down at `position`, ready to be played at any other."""

    def __init__(self, recorder: Recorder, position: int) -> None:
        assert not recorder.problem, recorder.problem
        self._position = position
        self._kept = recorder.kept
        self._scratch = recorder._scratch
        calls = recorder.calls
        self._values = (ctypes.c_int64 * sum(len(call.values) for call in calls))()
        self._table = (ctypes.c_int64 * (3 * len(calls)))()
        self._moves: list[tuple[int, int, int]] = []  # index, value at `position`, growth
        self._count = len(calls)
        start = 0
        for number, call in enumerate(calls):
            self._values[start : start + len(call.values)] = call.values
            address = ctypes.addressof(self._values) + 8 * start
            self._table[3 * number : 3 * number + 3] = (call.function, address, call.chunks)
            self._moves += [(start + index, call.values[index], growth) for index, growth in call.moves]
            start += len(call.values)

    def play(self, position: int) -> None:
        for index, value, growth in self._moves:
            self._values[index] = value + growth * (position - self._position)
        pool.shared().play(ctypes.addressof(self._table), self._count)
