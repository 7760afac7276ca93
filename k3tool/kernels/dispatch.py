"""Which twin of the kernels runs: chosen once, from what was asked, the device, and what this version holds.

A kernel folder may hold `kernel.py`, the Triton twin of its `reference.py`. The choice is for all kernels together
and carries its reason, so that a run can show it; a twin that is asked for and cannot run is refused, never replaced.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Literal

import torch

from k3tool.errors import UnsupportedError, UsageError

BACKENDS = ("auto", "triton", "reference")
KERNELS = ("attn_res", "conv", "kda", "linear", "mla", "moe", "mxfp4", "norm", "router")


@dataclass(frozen=True)
class Backend:
    """`name` is what runs; `reason` says in one line why."""

    name: Literal["reference", "triton"]
    reason: str


def triton_kernels() -> tuple[str, ...]:
    """The kernels that have a Triton twin in this version."""
    return tuple(name for name in KERNELS if importlib.util.find_spec(f"k3tool.kernels.{name}.kernel"))


def choose_backend(requested: str, device: torch.device) -> Backend:
    """`auto` takes Triton on a GPU where twins exist, else the reference. Raises UsageError, UnsupportedError."""
    if requested not in BACKENDS:
        raise UsageError(f"unknown backend {requested!r}", hint=f"backends: {', '.join(BACKENDS)}")
    if requested == "reference":
        return Backend("reference", "asked for")
    problem = _triton_problem(device)
    if not problem:
        return Backend("triton", "asked for" if requested == "triton" else f"kernels for {device.type} are present")
    if requested == "triton":
        raise UnsupportedError(f"the triton backend cannot run: {problem}", hint="use --backend reference or auto")
    return Backend("reference", problem)


def _triton_problem(device: torch.device) -> str:
    if device.type != "cuda":
        return f"Triton needs a GPU, the device is {device.type}"
    if not triton_kernels():
        return "this version holds no Triton kernels"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    return ""


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
