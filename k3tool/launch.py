"""Which processes were started together with this one, as far as the environment can be believed.

Variables such as RANK and SLURM_NTASKS outlive what they were set for: in a batch script, a notebook, a shell inside an
allocation. Believed is what a launcher sets for the processes that it starts, and for nothing else. Why: decision 0007.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

# Steps of SLURM that run no tasks of srun: the batch script, an interactive shell, what lies outside of steps.
FIRST_SPECIAL_STEP = 0xFFFFFFF0
SIZES = ("WORLD_SIZE", "SLURM_NTASKS", "SLURM_NPROCS", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")


class Launched(NamedTuple):
    """One of several processes of one launch. rank: from 0. by: the launcher."""

    rank: int
    size: int
    by: str


def launched(environment: Mapping[str, str]) -> Launched | None:
    """The launch that this process is part of; None for a process alone, whatever else is left in the environment.

    torchrun: it names its run. srun: a numbered step with several tasks. Where both are there torchrun is the nearer one,
    which runs inside a step."""
    if environment.get("TORCHELASTIC_RUN_ID"):
        return _consistent(environment, "RANK", "WORLD_SIZE", "torchrun")
    step = _number(environment.get("SLURM_STEP_ID") or environment.get("SLURM_STEPID", ""))
    if step is not None and step < FIRST_SPECIAL_STEP:
        return _consistent(environment, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "srun")
    return None


def runs_ranks(environment: Mapping[str, str]) -> bool:
    """Whether RANK and WORLD_SIZE are those of a launch: torchrun sets them; scripts of srun copy its own numbers there."""
    found = launched(environment)
    if environment.get("TORCHELASTIC_RUN_ID"):
        return environment.get("WORLD_SIZE", "1") != "1"
    return found is not None and (environment.get("RANK"), environment.get("WORLD_SIZE")) == (
        str(found.rank),
        str(found.size),
    )


def is_first(environment: Mapping[str, str]) -> bool:
    """Whether this process speaks for the ranks that run a model together, or is alone."""
    return not runs_ranks(environment) or environment.get("RANK", "0") == "0"


def left_over(environment: Mapping[str, str]) -> str:
    """The first variable that speaks of several processes where none were launched together; empty where none does."""
    if launched(environment) is not None:
        return ""
    return next((name for name in SIZES if (_number(environment.get(name, "")) or 1) > 1), "")


def _consistent(environment: Mapping[str, str], rank: str, size: str, by: str) -> Launched | None:
    number, count = _number(environment.get(rank, "")), _number(environment.get(size, ""))
    if number is None or count is None or count < 2 or number >= count:
        return None
    return Launched(number, count, by)


def _number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 12 else None
