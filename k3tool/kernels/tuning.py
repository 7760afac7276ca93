"""Which of a few pinned configurations of a kernel is fastest here: measured once per shape, remembered in a file.

A kernel lists the configurations for a GPU generation, the one to trust first in front. Where nothing is measured (no
GPU, `K3TOOL_TUNE=0`) the first one runs; while a CUDA graph is captured, the one chosen before. The file is one per GPU and Triton version,
`~/.cache/k3tool/` or `K3TOOL_CACHE`; losing it costs the measurements, nothing else.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
import triton
from triton.errors import TritonError

from k3tool.disk import cache_folder
from k3tool.kernels import lang

log = logging.getLogger(__name__)

Options = dict[str, Any]
Launch = Callable[[Options], None]
RUNS = 5  # measured runs of each configuration, after a warm-up

_chosen: dict[str, int] = {}
_read: set[Path] = set()


def bucket(number: int) -> int:
    """Sizes that share a choice: the next power of two."""
    return triton.next_power_of_2(max(1, number))


def best(kernel: str, shape: Sequence[object], candidates: Sequence[Options], launch: Launch) -> Options:
    """One of `candidates`. `launch` runs the kernel with one; it may run several times and must leave inputs alone.

    shape: what the choice depends on. Raises what the last candidate raised where none can run.
    """
    if len(candidates) == 1 or not is_wanted():
        return candidates[0]
    key = f"{kernel}({', '.join(map(str, shape))}) of {len(candidates)}"
    path = cache_file()
    if path not in _read:
        _read.add(path)
        _chosen.update(_load(path))
    if not 0 <= _chosen.get(key, -1) < len(candidates):
        if torch.cuda.is_current_stream_capturing():
            return candidates[0]
        _chosen[key] = _fastest(key, candidates, launch)
        _save(path)
    return candidates[_chosen[key]]


def run(kernel: str, shape: Sequence[object], candidates: Sequence[Options], launch: Launch) -> None:
    """Launch once with the best of `candidates`. For kernels that may run several times on the same inputs."""
    launch(best(kernel, shape, candidates, launch))


def is_wanted() -> bool:
    """Is there a GPU to choose for?"""
    return (
        not lang.IS_INTERPRETED
        and lang.TARGET.get() is None
        and os.environ.get("K3TOOL_TUNE", "1") != "0"
        and torch.cuda.is_available()
    )


@cache
def cache_file() -> Path:
    name = "".join(c if c.isalnum() else "-" for c in f"{torch.cuda.get_device_name()} triton {triton.__version__}")
    return cache_folder() / f"kernels-{name}.json"


def _fastest(key: str, candidates: Sequence[Options], launch: Launch) -> int:
    times: list[float] = []
    for options in candidates:
        try:
            times.append(_measure(lambda options=options: launch(options)))
        except (TritonError, RuntimeError) as error:  # too large for the GPU, or a compiler that gives up
            log.warning("%s: %s cannot run here (%s)", key, options, str(error).strip().split("\n")[0])
            times.append(float("inf"))
            if options is candidates[-1] and min(times) == float("inf"):
                raise
    index = times.index(min(times))
    log.info("%s: configuration %d of %s ms", key, index, ", ".join(f"{time:.3f}" for time in times))
    return index


def _measure(run: Callable[[], None]) -> float:
    """Milliseconds, the median of some runs."""
    run()
    times = []
    for _ in range(RUNS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[RUNS // 2]


def _load(path: Path) -> dict[str, int]:
    """What the file holds; nothing where it is absent or damaged."""
    try:
        held = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return {str(k): v for k, v in held.items() if isinstance(v, int)} if isinstance(held, dict) else {}


def _save(path: Path) -> None:
    """Write all choices; a folder that cannot be written to is not an error."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            json.dump(_load(path) | _chosen, file, indent=0, sort_keys=True)
        os.replace(file.name, path)
    except OSError as error:
        log.info("kernel configurations are not remembered: %s", error)
