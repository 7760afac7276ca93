"""Reused working memory of compiled kernels.

Fresh memory costs page faults, which are slower than most kernels here. Buffers grow and are kept; nothing may
read what it did not write in the same call (tests fill them with NaN).
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from k3tool.kernels.cpu import tape


class Scratch:
    """Named buffers. `lock` is held by whoever uses them."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._buffers: dict[str, Tensor] = {}

    def address(self, name: str, size: int) -> int:
        """Address of `size` bytes, aligned to 64; the same memory on every call until it must grow."""
        recorder = tape.current()
        if recorder is not None:
            return -(-recorder.scratch(self, name, size + 64).data_ptr() // 64) * 64
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < size + 64:
            buffer = self._buffers[name] = torch.empty(size + 64, dtype=torch.uint8)
        return -(-buffer.data_ptr() // 64) * 64

    def poison(self) -> None:
        """Fill every buffer with float32 NaN."""
        with torch.inference_mode():  # buffers may have been made in inference mode
            for buffer in self._buffers.values():
                buffer.fill_(0xFF)
