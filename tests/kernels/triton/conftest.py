"""Pair tests of the Triton twins, under Triton's interpreter.

Whatever a launcher allocates is full of NaN and fenced: a result that is not written shows, and so does a write past the
ends.
"""

from __future__ import annotations

import pytest
import torch
from triton.runtime import interpreter

from tests.kernels.triton.fence import Fence

torch.set_num_threads(1)

_call = interpreter.InterpretedFunction.__call__


def _call_once_patched(self: interpreter.InterpretedFunction, *args, **options):
    """Our functions within a kernel see the language as the interpreter has already adapted it for the kernel.

    It would do so again at every call, which takes a third of the time.
    """
    if self.fn.__module__.startswith("k3tool."):
        return self.rewrite()(*args, **options)
    return _call(self, *args, **options)


interpreter.InterpretedFunction.__call__ = _call_once_patched


@pytest.fixture(autouse=True)
def fence(monkeypatch: pytest.MonkeyPatch):
    """Fences around everything that `torch.empty` gives out during the test, checked when it ends."""
    fence = Fence(torch.empty)
    monkeypatch.setattr(torch, "empty", fence.empty)
    yield fence
    fence.check()
