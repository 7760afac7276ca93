"""A folder to a model that is ready to run, in a process alone or on each rank of several.

What can be refused is refused before weights are read, and on all ranks with the same words.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import NamedTuple

import torch

from k3tool.events import SILENT, Progress
from k3tool.kernels.dispatch import Backend, choose_backend, choose_device
from k3tool.kernels.warm import start_warming
from k3tool.memory import available_bytes
from k3tool.model.bound import Bound
from k3tool.model.decoder import Model
from k3tool.model.load import prepare_model
from k3tool.parallel.groups import make_parallel
from k3tool.parallel.link import Link
from k3tool.parallel.world import RankFolder, World, rank_folder_of

log = logging.getLogger(__name__)


class _Choice(NamedTuple):
    """room: bytes that this process may use of what the machine has; None where no other rank shares it."""

    own: RankFolder
    device: torch.device
    backend: Backend
    room: int | None


def open_model(
    path: str | Path,
    *,
    device: str,
    dtype: torch.dtype,
    layers: int | None,
    backend: str,
    memory_bytes: int | None,
    bound: Bound | None = None,
    progress: Progress = SILENT,
    link: Link,
) -> tuple[Model, Backend]:
    """See `k3tool.generate.Session.open`."""
    chosen = link.together(lambda: _choose(path, device, backend, link.world))
    own, unit = chosen.own, chosen.device
    own_devices = ":" not in device
    log.info("%s kernels on %s: %s", chosen.backend.name, unit, chosen.backend.reason)
    if unit.type == "cuda" and unit.index is not None:
        torch.cuda.set_device(unit)  # the one that kernels are launched on
    if unit.type == "cuda" and link.world.size > 1:
        link.uses_nccl = own_devices
    parallel = make_parallel(own.layout, own.place, unit, own_devices=own_devices, timeout=link.timeout)
    link.belongs(parallel)
    checkpoint = link.together(own.open)
    warming = start_warming(checkpoint.config, dtype) if chosen.backend.name == "cpu" else None
    try:
        prepared = link.together(
            lambda: prepare_model(
                checkpoint,
                device=unit,
                dtype=dtype,
                layers=layers,
                memory_bytes=memory_bytes,
                bound=bound,
                room_bytes=chosen.room,
                layout=own.layout,
                place=own.place,
            )
        )
        model = prepared.read(progress, parallel)
    finally:  # a process that ends while a thread compiles is aborted, whatever its exit code should have been
        if warming is not None:
            warming.join()
    link.gather(None)  # until all have loaded
    return model, chosen.backend


def _choose(path: str | Path, device: str, backend: str, world: World) -> _Choice:
    own = rank_folder_of(path, world)
    unit = choose_device(device)
    if unit.type == "cuda" and unit.index is None and world.size > 1:
        unit = choose_device(f"cuda:{world.local_rank}")
    shared = unit.type == "cpu" and world.local_size > 1
    return _Choice(own, unit, choose_backend(backend, unit), available_bytes() // world.local_size if shared else None)
