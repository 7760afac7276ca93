"""Which twin of a kernel runs: decided from what was asked, the device, and what this version and machine hold.

A kernel folder holds `reference.py` (plain torch, any device) and may hold `kernel.py` (Triton) and `cpu.py` (compiled
for this processor): the backends `reference`, `triton` and `cpu`. Twins share names and signatures. A backend is
chosen once for a run, with its reason, and holds while its `use` block is open; kernels ask `twin` for the function to
call. A backend that is asked for and cannot run is refused, never replaced; a function for which it has no twin of
its own runs as reference.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor

from k3tool.errors import UnsupportedError, UsageError
from k3tool.kernels import cpu as compiled

log = logging.getLogger(__name__)

BACKENDS = ("auto", "triton", "cpu", "reference")
KERNELS = ("attn_res", "conv", "elementwise", "kda", "linear", "mla", "moe", "mxfp4", "norm", "router")

_active: ContextVar[str] = ContextVar("k3tool_backend", default="auto")


@contextmanager
def use(name: str) -> Iterator[None]:
    """Kernels called inside (in this thread or task) run on this backend; on the best one until then."""
    token = _active.set(name)
    try:
        yield
    finally:
        _active.reset(token)


@dataclass(frozen=True)
class Backend:
    """`name` is what runs; `reason` says in one line why."""

    name: Literal["triton", "cpu", "reference"]
    reason: str

    def use(self) -> Any:
        """A context in which kernels run on this backend."""
        return use(self.name)


def twin(kernel: str, function: str, x: Tensor) -> Callable[..., Any]:
    """The function of `kernel` that runs on tensors like x under the active backend."""
    return _find(kernel, function, x.device.type, _active.get())


def runs_compiled(device: torch.device) -> bool:
    """Do compiled CPU kernels serve this device under the active backend?"""
    return device.type == "cpu" and _active.get() in ("auto", "cpu") and compiled.available()


@contextmanager
def sole_threads(device: torch.device) -> Iterator[None]:
    """Torch keeps to one thread inside, where compiled kernels run with threads of their own.

    Torch's OpenMP threads spin for milliseconds after each product, on the processors that the compiled kernels
    need: two pools cost a fifth of the speed on two cores. The former number of threads is set again at the end.
    """
    threads = torch.get_num_threads()
    if threads == 1 or not runs_compiled(device):
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@cache
def _find(kernel: str, function: str, device: str, backend: str) -> Callable[..., Any]:
    wanted = ""
    takes_triton = backend == "triton" or (backend == "auto" and device == "cuda")
    if takes_triton and not _triton_problem(device):
        wanted = "kernel"
    elif device == "cpu" and backend in ("auto", "cpu") and compiled.available():
        wanted = "cpu"
    if wanted and importlib.util.find_spec(f"k3tool.kernels.{kernel}.{wanted}"):
        module = importlib.import_module(f"k3tool.kernels.{kernel}.{wanted}")
        if hasattr(module, function):
            return getattr(module, function)
    if wanted:
        log.info("%s has no %s twin and runs as reference", f"{kernel}.{function}", wanted)
    return getattr(importlib.import_module(f"k3tool.kernels.{kernel}.reference"), function)


@cache
def triton_kernels() -> tuple[str, ...]:
    """The kernels that have a Triton twin in this version."""
    return tuple(name for name in KERNELS if importlib.util.find_spec(f"k3tool.kernels.{name}.kernel"))


def choose_backend(requested: str, device: torch.device) -> Backend:
    """`auto` takes Triton on a GPU and compiled kernels on a CPU, else plain torch. Raises UsageError, UnsupportedError.

    Without a GPU, Triton runs only when it is asked for and `TRITON_INTERPRET=1` says that it may interpret: to test.
    """
    if requested not in BACKENDS:
        raise UsageError(f"unknown backend {requested!r}", hint=f"backends: {', '.join(BACKENDS)}")
    if requested == "reference":
        return Backend("reference", "plain torch, asked for")
    if requested == "cpu" or (requested == "auto" and device.type == "cpu"):
        problem = _compiled_problem(device.type)
        if not problem:
            return Backend("cpu", "compiled for this processor" + (", asked for" if requested == "cpu" else ""))
    else:
        problem = _triton_problem(device.type)
        if not problem:
            reason = "asked for" if requested == "triton" else f"kernels for {device.type} are present"
            return Backend("triton", reason if device.type == "cuda" else "asked for, interpreted on the CPU")
    if requested != "auto":
        raise UnsupportedError(f"the {requested} backend cannot run: {problem}", hint="use --backend auto or reference")
    return Backend("reference", f"plain torch: {problem}")


def _compiled_problem(device: str) -> str:
    """Why compiled CPU kernels cannot run on a device, or nothing."""
    return compiled.problem() if device == "cpu" else f"compiled kernels are for a CPU, the device is {device}"


def _triton_problem(device: str) -> str:
    """Why Triton cannot run on a device, or nothing."""
    if device != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"Triton needs a GPU, the device is {device}"
    if not triton_kernels():
        return "this version holds no Triton kernels"
    return "" if importlib.util.find_spec("triton") else "Triton is not installed"


def choose_device(requested: str) -> torch.device:
    """`auto`, `cpu`, `cuda` or `cuda:N` as a device of this machine. Raises UsageError, UnsupportedError."""
    if requested == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(requested)
    except RuntimeError:
        raise UsageError(f"unknown device {requested!r}", hint="use auto, cpu or cuda") from None
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"unknown device {requested!r}", hint="use auto, cpu or cuda")
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            raise UnsupportedError(f"device {requested}: this machine shows {count} GPUs", hint="use --device cpu")
    return device
