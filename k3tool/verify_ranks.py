"""Verification of what `reshard --layout ranks` wrote: every rank's folder by itself, then all of them as one checkpoint.

Part of `k3tool verify`; a single rank's folder is checked by index and headers, since its configuration describes the
whole model.
"""

from __future__ import annotations

from collections.abc import Callable

from k3tool.checkpoint.reader import Checkpoint
from k3tool.errors import CheckpointCorrupt, CheckpointMissing
from k3tool.layout import rank_folder
from k3tool.transform.forms import SubSource, open_form
from k3tool.transform.record import read_record
from k3tool.transform.reshard import LAYOUT_NAME


def rank_folders(checkpoint: Checkpoint) -> list[str]:
    """The rank folders that `k3tool.json` names; none where the folder is no set of ranks. Raises CheckpointCorrupt."""
    if LAYOUT_NAME not in checkpoint.files:
        return []
    record = read_record(checkpoint.source)
    ranks = record.layout.ranks
    return [rank_folder(rank, ranks) for rank in range(ranks)] if record.form == "ranks" else []


def check_rank_folders(
    checkpoint: Checkpoint,
    folders: list[str],
    check_one: Callable[[Checkpoint, str], None],
    problem: Callable[[str, str, bool], None],
) -> None:
    """`check_one(checkpoint, folder)` for each rank; `problem(text, file, missing)` where that cannot even begin.

    Adds the ranks' files to `checkpoint.files` under their relative names.
    """
    for folder in folders:
        part = Checkpoint(SubSource(checkpoint.source, folder))
        try:
            checkpoint.files.update({f"{folder}/{name}": size for name, size in part.files.items()})
            check_one(part, folder)
        except (CheckpointMissing, CheckpointCorrupt) as error:
            problem(error.message, folder, isinstance(error, CheckpointMissing))


def joined_problem(checkpoint: Checkpoint) -> str:
    """Why the ranks together are not the checkpoint that the configuration implies; empty where they are."""
    try:
        open_form(checkpoint.source)
    except (CheckpointMissing, CheckpointCorrupt) as error:
        return error.message
    return ""
