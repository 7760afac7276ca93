"""Every kernel against its reference while the model runs: same inputs, layer by layer.

The model goes through a prompt and one more token as always; each kernel that has a twin beside its reference is called
a second time as reference with copies of the same inputs, and the results are compared (`compare` says how). The model
goes on with what the kernel gave, so that errors of one kernel do not hide in those of another. Where decode steps are
played back from a tape or from a CUDA graph, a few of them are, against the same step done kernel by kernel.
"""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from k3tool.kernels import dispatch
from k3tool.kernels.router.ties import same_where_tied
from k3tool.model import attention, decoder, divided, graph, moe, replay
from k3tool.model.cache import Cache
from k3tool.model.compare import Difference, compare, move, same_bits
from k3tool.model.decoder import Model

CHECKED_TOKENS = 512
"""Tokens of the prompt that are checked: the reference is slow, and longer prompts repeat the same work."""

_IN_PLACE = ("state", "history", "place", "out")
_WEIGHTS = ("weight", "kv_b", "conv_weight", "norm_weight", "query")
_CALLERS = (attention, decoder, divided, moe)


PLAYED_STEPS = 5
"""Decode steps that are checked where they are played back: some of the first are not, as they are being written down."""

DECODE_STEP = "decode_step"


@dataclass(frozen=True)
class KernelCheck:
    """The worst calls of one kernel in one layer (None: outside the layers). Errors and bounds as in `Difference`.

    The kernel `decode_step` is a whole step as it is played back, with the caches that it leaves.
    """

    layer: int | None
    kernel: str
    max_error: float
    max_bound: float
    rms_error: float
    rms_bound: float
    ok: bool

    @classmethod
    def of(cls, layer: int | None, kernel: str, found: Difference) -> KernelCheck:
        return cls(layer, kernel, found.max_error, found.max_bound, found.rms_error, found.rms_bound, found.ok)

    @property
    def difference(self) -> Difference:
        return Difference(self.max_error, self.max_bound, self.rms_error, self.rms_bound)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def worst_of(reports: Iterable[Sequence[KernelCheck]]) -> list[KernelCheck]:
    """The checks of several ranks as those of one model: of each kernel and layer, the worst that any of them found."""
    found: dict[tuple[int | None, str], Difference] = {}
    for check in (check for report in reports for check in report):
        key = check.layer, check.kernel
        found[key] = found.get(key, check.difference).worst(check.difference)
    checks = [KernelCheck.of(layer, kernel, difference) for (layer, kernel), difference in found.items()]
    return sorted(checks, key=lambda check: math.inf if check.layer is None else check.layer)


def check_kernels(model: Model, ids: Sequence[int]) -> list[KernelCheck]:
    """Run up to 512 tokens of a prompt and one decode step on a fresh cache, then steps as they are played back.

    Empty where the reference itself is what runs. Runs on the backend that is active. Not for several threads at once:
    the model's calls are redirected meanwhile.
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
        if graph.captures(model):
            _check_fixed_step(model, int(tokens), cache, checker)
    checks = [KernelCheck.of(layer, kernel, found) for (layer, kernel), found in checker.found.items()]
    return checks + _check_played(model, int(tokens), cache)


@torch.inference_mode()
def _check_fixed_step(model: Model, token: int, cache: Cache, checker: _Checker) -> None:
    """The kernels of a step on the fixed memory of a graph, some of which no other step calls."""
    own = cache.clone()
    own.reserve(own.position + 1)
    step = graph.Step(model, own)
    step.set(token, own.position)
    checker.layer = checker.first
    step.run(checker.observe)


@torch.inference_mode()
def _check_played(model: Model, token: int, cache: Cache) -> list[KernelCheck]:
    """Steps that `decode_step` plays back, and the same steps done kernel by kernel on a copy of the caches.

    They are the same jobs on memory of the same kind, and so must give the same bits. Empty where none is played back.
    """
    if not (graph.captures(model) or replay.may_record(model)):
        return []
    cache.reserve(cache.position + PLAYED_STEPS)
    own = cache.clone()
    fixed = graph.Step(model, own)
    found: Difference | None = None
    for _ in range(PLAYED_STEPS):
        is_played, is_fixed = replay.plays(model, cache), graph.captures(model) and graph.is_fixed(cache)
        logits = replay.decode_step(model, token, cache)
        if is_fixed:
            fixed.set(token, own.position)
            expected = fixed.run()[0]
            own.advance(1)
        else:
            ids = torch.tensor([token], dtype=torch.int64, device=model.device)
            expected = model.logits(model.forward(ids, own))[0]
        if is_played:
            found = (found or Difference()).worst(same_bits(logits, expected))
        token = int(expected.argmax())
    if found is None:
        return []
    for held, wanted in zip(cache.tensors(), own.tensors(), strict=True):
        found = found.worst(same_bits(held, wanted))
    return [KernelCheck.of(None, DECODE_STEP, found)]


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
        self.found: dict[tuple[int | None, str], Difference] = {}
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
            # References first: what the kernel writes into may be one of its inputs.
            if kernel == "router":
                expected = reference(**inputs)
                given = function(*args, **kwargs)
                routed, wanted = same_where_tied(
                    given, expected, inputs["logits"], inputs["bias"], inputs["activation"]
                )
                self._record(name, compare(routed, wanted))
                return given
            wide = {name: _widened(name, value) for name, value in inputs.items()}
            moved = {name: _moved(name, value) for name, value in wide.items()}
            references = [_results(reference, own) for own in (inputs, wide, moved)]
            given = function(*args, **kwargs)
            for results in zip(_outputs(given, inputs), *references, strict=True):
                self._record(name, compare(*results))
            return given

        return call

    def _record(self, kernel: str, difference: Difference) -> None:
        key = self.layer, kernel
        self.found[key] = self.found.get(key, difference).worst(difference)


def _widened(name: str, value: Any) -> Any:
    """Activations in float32. Weights are widened by the reference itself, tile by tile or whole."""
    is_narrow = isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16) and name not in _WEIGHTS
    return value.float() if is_narrow else value


def _moved(name: str, value: Any) -> Any:
    """Activations with other last bits."""
    is_number = isinstance(value, Tensor) and value.dtype == torch.float32 and name not in _WEIGHTS
    return move(value) if is_number else value


def _results(reference: Callable[..., Any], inputs: dict[str, Any]) -> list[Tensor]:
    """What the reference gives and what it writes, into copies of its own."""
    own = {name: value.clone() if name in _IN_PLACE and value is not None else value for name, value in inputs.items()}
    return _outputs(reference(**own), own)


def _outputs(result: Any, inputs: dict[str, Any]) -> list[Tensor]:
    """The tensors to compare: the result, and what was changed in place."""
    results = [] if result is None else [result]
    return [*results, *(inputs[place] for place in _IN_PLACE if inputs.get(place) is not None)]
