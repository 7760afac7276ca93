"""Which processes run together, and whether the folder that they were given was made for so many. No torch here."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from k3tool.checkpoint.origin import write_rank
from k3tool.checkpoint.reader import Checkpoint
from k3tool.checkpoint.source import LocalSource
from k3tool.errors import CheckpointCorrupt, CheckpointMissing, UsageError
from k3tool.launch import is_first, runs_ranks
from k3tool.layout import Layout, Place, check, rank_folder, share_of
from k3tool.transform.record import LayoutRecord, read_record
from k3tool.transform.reshard import LAYOUT_NAME

GIVE_WAY_S = 3.0
_NEEDED = ("RANK", "MASTER_ADDR", "MASTER_PORT")


class World(NamedTuple):
    """This process among those that were started together. local: the same on this machine."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1


def world_of(environment: Mapping[str, str]) -> World:
    """What torchrun says in RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE; one process where no launcher said it.

    Raises UsageError for numbers that are none and where something is missing.
    """
    if not runs_ranks(environment):
        return World()
    missing = [name for name in _NEEDED if not environment.get(name)]
    if missing:
        raise UsageError(
            f"WORLD_SIZE is {environment['WORLD_SIZE']!r}, but {' and '.join(missing)} are not set",
            hint="start with torchrun, which sets them all, or unset WORLD_SIZE",
        )
    size = _number(environment, "WORLD_SIZE", "", 1, 1 << 20)
    rank = _number(environment, "RANK", "", 0, size - 1)
    local_size = _number(environment, "LOCAL_WORLD_SIZE", "1", 1, size)
    return World(rank, size, _number(environment, "LOCAL_RANK", "0", 0, local_size - 1), local_size)


def _number(environment: Mapping[str, str], name: str, default: str, low: int, high: int) -> int:
    text = environment.get(name, default)
    if not (text.isascii() and text.isdigit() and low <= int(text[:9]) <= high):
        raise UsageError(f"{name} is {text!r}, expected {low} to {high}", hint="start with torchrun, which sets it")
    return int(text)


def give_way(environment: Mapping[str, str]) -> None:
    """What fails before ranks have met fails on all of them, and rank 0 says so: the others wait.

    When rank 0 ends, torchrun ends the others. A rank that is still there afterwards failed alone, and must speak.
    """
    if not is_first(environment):
        time.sleep(GIVE_WAY_S)


class RankFolder(NamedTuple):
    """The checkpoint folder of one rank: its own in a folder of ranks, or a whole checkpoint for a process alone."""

    folder: Path
    layout: Layout
    place: Place

    def open(self) -> Checkpoint:
        """Raises CheckpointMissing where the folder is not there, CheckpointCorrupt where it is that of another rank,
        UnsupportedError for a layout that this model cannot have."""
        if self.layout.ranks > 1 and not self.folder.is_dir():
            raise CheckpointMissing(
                f"{self.folder.parent} lacks the folder of rank {self.place.rank}: {self.folder.name}",
                hint=write_rank(self.folder.parent, self.place.rank),
            )
        checkpoint = Checkpoint(LocalSource(self.folder))
        check(checkpoint.config, self.layout)
        found = share_of(checkpoint.config)
        if self.layout.ranks > 1 and found != (self.layout, self.place):
            said = f"rank {found[1].rank} of {found[0].ranks} ({found[0]})" if found else "nothing of ranks"
            raise CheckpointCorrupt(
                f"{self.folder}: {LAYOUT_NAME} implies rank {self.place.rank} of {self.layout.ranks} ({self.layout}), "
                f"its own config.json says {said}",
                hint="put every rank's folder back under its own name, or write the ranks again",
            )
        return checkpoint


def rank_folder_of(folder: str | Path, world: World) -> RankFolder:
    """What this process is to run of `folder`.

    Raises UsageError where the number of ranks is not that of the processes (naming both), CheckpointMissing where
    `folder` is no checkpoint.
    """
    source = LocalSource(Path(folder))
    files = source.files()
    record: LayoutRecord | None = None
    if LAYOUT_NAME in files:
        record = read_record(source)
    if record is None or record.form != "ranks":
        return _whole(Path(folder), world)
    ranks = record.layout.ranks
    if ranks != world.size:
        started = "this is one process" if world.size == 1 else f"{world.size} processes were started"
        raise UsageError(
            f"{folder} holds {ranks} ranks ({record.layout}), and {started}",
            hint=f"start {ranks} processes by torchrun (--nproc-per-node {ranks}; with --nnodes x --nproc-per-node of "
            "that number over several nodes)",
            ranks=ranks,
            processes=world.size,
        )
    return RankFolder(Path(folder) / rank_folder(world.rank, ranks), record.layout, record.layout.place(world.rank))


def _whole(folder: Path, world: World) -> RankFolder:
    share = share_of(Checkpoint(LocalSource(folder)).config)
    if share is not None and share[0].ranks != 1:
        ranks = share[0].ranks
        raise UsageError(
            f"{folder} is the folder of rank {share[1].rank} of {ranks}, which cannot run alone",
            hint=f"run the folder above it, {folder.absolute().parent}, by torchrun with {ranks} processes",
        )
    if world.size > 1:
        raise UsageError(
            f"{folder} is a whole checkpoint, and {world.size} processes were started",
            hint=f"run it in one process, without torchrun, or reshard it for {world.size} GPUs and run the result",
            ranks=1,
            processes=world.size,
        )
    return RankFolder(folder, Layout(), Layout().place(0))
