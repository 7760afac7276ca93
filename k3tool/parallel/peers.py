"""The other ranks of this machine as processes: which of them have ended. No torch.

A rank that is killed tells nobody, and whoever waits for it in a collective may wait for long. The kernel knows at once.
"""

from __future__ import annotations

import os
import select
import socket
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def this_process() -> dict[str, Any]:
    """This process as `Peers` of other ranks know it: plain JSON."""
    return {"machine": _machine(), "pid": os.getpid()}


def _machine(proc: Path = Path("/proc")) -> str:
    """What two processes share that can see each other: the boot of a kernel and a namespace of process ids."""
    try:
        boot = (proc / "sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink(proc / 'self/ns/pid')}"
    except OSError:
        return socket.gethostname()


class Peers:
    """Ranks whose processes this one can see. Where processes have no handles (old kernels), their ids are asked."""

    def __init__(self, processes: Sequence[dict[str, Any]], rank: int) -> None:
        """processes: what `this_process` gave on every rank, in order. rank: this one."""
        here = processes[rank]["machine"]
        self.pids = {
            other: int(found["pid"])
            for other, found in enumerate(processes)
            if other != rank and found["machine"] == here
        }
        self._lock = threading.Lock()
        self._handles: dict[int, int] = {}
        self._ended: set[int] = set()
        for other, pid in self.pids.items():
            try:
                self._handles[other] = os.pidfd_open(pid)  # type: ignore[attr-defined]  # Linux
            except ProcessLookupError:
                self._ended.add(other)
            except (OSError, AttributeError):
                pass

    def ended(self, wait_s: float = 0.0) -> list[int]:
        """The ranks whose processes have ended, in order; waits for a first one. From any thread."""
        with self._lock:
            poll = select.poll()
            for handle in self._handles.values():
                poll.register(handle, select.POLLIN)
            found = {handle for handle, _ in poll.poll(0 if self._ended else int(wait_s * 1000))}
            for rank in [rank for rank, handle in self._handles.items() if handle in found]:
                os.close(self._handles.pop(rank))
                self._ended.add(rank)
            asked = self.pids.keys() - self._handles.keys() - self._ended
            self._ended.update(rank for rank in asked if _is_gone(self.pids[rank]))
            return sorted(self._ended)

    def close(self) -> None:
        """Give the handles back; nobody is seen to end any more."""
        with self._lock:
            self.pids = {}
            while self._handles:
                os.close(self._handles.popitem()[1])


def _is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        pass
    return False
