"""Every kernel against its reference while the model runs: same inputs, layer by layer.

The model goes through a prompt and one more token as always; each kernel that has a twin beside its reference is called
a second time as reference with copies of the same inputs, and the results are compared. The model goes on with what the
kernel gave, so that errors of one kernel do not hide in those of another.
"""

from __future__ import annotations

import importlib
import inspect
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from k3tool.kernels import dispatch
from k3tool.kernels.router.ties import same_where_tied
from k3tool.model import attention, decoder, divided, moe
from k3tool.model.decoder import Model

CHECKED_TOKENS = 512
"""Tokens of the prompt that are checked: the reference is slow, and longer prompts repeat the same work."""

BOUNDS = {torch.float32: (1e-4, 1e-5), torch.bfloat16: (2.0**-6, 2.0**-8)}
"""Largest and RMS difference, each relative to the largest and the RMS reference value. float32 twins differ by the
order of their sums only; in bfloat16 they may round neighbouring values, and intermediate ones, to the other side."""

_IN_PLACE = ("state", "history", "place", "out")
_CALLERS = (attention, decoder, divided, moe)


@dataclass(frozen=True)
class KernelCheck:
    """The worst call of one kernel in one layer (None: after the last layer). Errors as in `BOUNDS`."""

    layer: int | None
    kernel: str
    max_error: float
    rms_error: float
    ok: bool

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def worst_of(reports: Iterable[Sequence[KernelCheck]]) -> list[KernelCheck]:
    """The checks of several ranks as those of one model: of each kernel and layer, the worst that any of them found."""
    found: dict[tuple[int | None, str], KernelCheck] = {}
    for check in (check for report in reports for check in report):
        key = check.layer, check.kernel
        other = found.get(key, check)
        found[key] = KernelCheck(
            *key, max(check.max_error, other.max_error), max(check.rms_error, other.rms_error), check.ok and other.ok
        )
    return sorted(found.values(), key=lambda check: math.inf if check.layer is None else check.layer)


def check_kernels(model: Model, ids: Sequence[int]) -> list[KernelCheck]:
    """Run up to 512 tokens of a prompt and one decode step on a fresh cache. Empty where no kernel has a twin here.

    Runs on the backend that is active. Not for several threads at once: the model's calls are redirected meanwhile.
    """
    checker = _Checker(model.share.layers)
    with redirected(checker.checked):
        cache = model.new_cache()
        tokens = torch.tensor(list(ids[:CHECKED_TOKENS]), dtype=torch.int64, device=model.device)
        for _ in range(2):
            checker.layer = checker.first
            hidden = model.forward(tokens, cache, checker.observe)
            checker.layer = None
            tokens = model.logits(hidden[-1:]).argmax(-1)
    return [
        KernelCheck(layer, kernel, largest, rms, ok) for (layer, kernel), (largest, rms, ok) in checker.found.items()
    ]


@contextmanager
def redirected(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """The model's modules call `wrap(kernel)` inside, for every kernel that they call by name."""
    originals = [
        (caller, name, function)
        for caller in _CALLERS
        for name, function in vars(caller).items()
        if inspect.isfunction(function) and function.__module__.startswith("k3tool.kernels.")
    ]
    try:
        for caller, name, function in originals:
            setattr(caller, name, wrap(function))
        yield
    finally:
        for caller, name, function in originals:
            setattr(caller, name, function)


class _Checker:
    """layer: the one that runs now; None outside the layers."""

    def __init__(self, layers: range) -> None:
        self.first = layers.start
        self.layer: int | None = self.first
        self.found: dict[tuple[int | None, str], tuple[float, float, bool]] = {}
        self._last = layers.stop - 1

    def observe(self, what: str, layer: int, value: Tensor) -> None:
        if what == "hidden":
            self.layer = None if layer == self._last else layer + 1

    def checked(self, function: Callable[..., Any]) -> Callable[..., Any]:
        kernel, name = function.__module__.split(".")[2], function.__name__
        if kernel not in dispatch.KERNELS:
            return function
        reference = getattr(importlib.import_module(f"k3tool.kernels.{kernel}.reference"), name, None)
        if reference is None or reference is function:
            return function
        signature = inspect.signature(function)

        def call(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            inputs = dict(bound.arguments)
            first = next(value for value in inputs.values() if isinstance(value, Tensor))
            if dispatch.twin(kernel, name, first) is reference:
                return function(*args, **kwargs)
            for place in _IN_PLACE:
                if inputs.get(place) is not None:
                    inputs[place] = inputs[place].clone()
            # First: what the kernel writes into may be one of its inputs.
            expected = reference(**inputs)
            given = function(*args, **kwargs)
            if isinstance(given, tuple):
                routed = same_where_tied(given, expected, inputs["logits"], inputs["bias"], inputs["activation"])
                self._record(name, routed[:1], routed[1:])
            else:
                self._record(name, _outputs(given, bound.arguments), _outputs(expected, inputs))
            return given

        return call

    def _record(self, kernel: str, given: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
        for found, wanted in zip(given, expected, strict=True):
            largest, rms, ok = compare(found, wanted)
            before = self.found.get((self.layer, kernel), (0.0, 0.0, True))
            self.found[self.layer, kernel] = max(before[0], largest), max(before[1], rms), before[2] and ok


def compare(found: Tensor, expected: Tensor) -> tuple[float, float, bool]:
    """(largest difference over largest value, RMS difference over RMS value, whether both are within `BOUNDS`).

    Bounds are those of the dtype of `expected`. A shape or dtype that differs, or a number that is none, is never ok.
    """
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return sys.float_info.max, sys.float_info.max, False
    if not expected.numel():
        return 0.0, 0.0, True
    wanted = expected.double()
    difference = found.double() - wanted
    pairs = (
        (difference.abs().max(), wanted.abs().max()),
        (difference.square().mean().sqrt(), wanted.square().mean().sqrt()),
    )
    errors = [float(error / scale) if float(scale) > 0 else float(error) for error, scale in pairs]
    bounds = BOUNDS[expected.dtype]
    ok = all(error <= bound for error, bound in zip(errors, bounds, strict=True))
    largest, rms = (error if math.isfinite(error) else sys.float_info.max for error in errors)
    return largest, rms, ok


def _outputs(result: Any, inputs: dict[str, Any]) -> list[Tensor]:
    """The tensors to compare: the result, and what was changed in place."""
    results = [] if result is None else [result]
    return [*results, *(inputs[place] for place in _IN_PLACE if inputs.get(place) is not None)]
