"""Pair tests of the Triton twins, under Triton's interpreter.

Whatever a launcher allocates is full of NaN and fenced: a result that is not written shows, and so does a write past the
ends.
"""

from __future__ import annotations

import pytest
import torch

from tests.kernels.triton.fence import Fence

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def fence(monkeypatch: pytest.MonkeyPatch):
    """Fences around everything that `torch.empty` gives out during the test, checked when it ends."""
    fence = Fence(torch.empty)
    monkeypatch.setattr(torch, "empty", fence.empty)
    monkeypatch.setattr(torch, "empty_like", lambda x, **options: fence.empty(x.shape, **{"dtype": x.dtype, **options}))
    yield fence
    fence.check()
