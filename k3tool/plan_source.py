"""What `plan` is asked about: a checkpoint, ranks, a repository, a bare configuration or the built-in release.

A source with headers is counted by them (of a Hub repository by byte ranges, as `inspect` reads them); the others by
what their configuration declares. What neither says is told in `notes`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from k3tool import release
from k3tool.checkpoint.address import parse_repository
from k3tool.checkpoint.header import Header
from k3tool.checkpoint.index import INDEX_NAME, SINGLE_NAME
from k3tool.checkpoint.reader import CONFIG_NAME, Checkpoint, read_header
from k3tool.checkpoint.source import opened_source
from k3tool.checkpoint.table import Kind, TensorTable
from k3tool.config import K3Config
from k3tool.declared import Declared
from k3tool.errors import CheckpointCorrupt, CheckpointMissing, UsageError
from k3tool.events import SILENT, Progress
from k3tool.layout import rank_folder, share_of
from k3tool.sizing import Inventory
from k3tool.transform.reshard import LAYOUT_NAME
from k3tool.units import plural

BUILT_IN = "the built-in release"
_HUB = "https://huggingface.co"
_WORKERS = 8


class PlanSource(NamedTuple):
    """inventory: its tensors. origin: in a few words where they were counted. notes: what could not be known, and
    which of two things of one name was taken. readable: what `reshard` would read, empty where nothing can be."""

    inventory: Inventory
    origin: str
    notes: list[str]
    readable: str


def open_plan_source(text: str, progress: Progress = SILENT) -> PlanSource:
    """Raises CheckpointMissing, CheckpointCorrupt, RemoteError, UsageError for the folder of a single rank."""
    path = Path(text)
    if text == release.NAME and not (path / CONFIG_NAME).is_file():
        hidden = path.exists()
        note = f"{text} here holds no {CONFIG_NAME}: the built-in release was taken; ./{text} names what is here"
        return _built_in([note] if hidden else [])
    if not path.exists() and _names_the_release(text):
        return _built_in(["nothing was asked of the Hub: every known commit holds the same weights"])
    if path.is_file():
        return _of_file(path)
    with opened_source(text) as source:
        checkpoint = Checkpoint(source)
        found = _of_checkpoint(checkpoint, text, progress)
    if text == release.NAME:
        note = f"the folder {text} was taken; the built-in release is also called {release.repo()}"
        return found._replace(notes=[note, *found.notes])
    return found


def _built_in(notes: list[str]) -> PlanSource:
    return PlanSource(Inventory.from_config(release.config()), BUILT_IN, notes, release.repo())


def _names_the_release(text: str) -> bool:
    """Its repository at no commit or a known one, where the Hub itself would be asked. A mirror may hold anything."""
    found = parse_repository(text)
    if found is None or found.repo != release.repo():
        return False
    asked = (os.environ.get("HF_ENDPOINT") or _HUB).rstrip("/")
    return found.revision in (None, "main", *release.revisions()) and asked == _HUB


def _of_file(path: Path) -> PlanSource:
    """A bare configuration; the shards beside it are what `reshard` would read, or those of the release."""
    config = K3Config.from_file(path)
    _refuse_rank(config, str(path), path.absolute().parent.parent)
    folder = path.parent
    here = path.name == CONFIG_NAME and any(
        (folder / name).is_file() for name in (INDEX_NAME, SINGLE_NAME, LAYOUT_NAME)
    )
    readable = str(folder) if here else release.repo() if _is_release(config) else ""
    return _computed(config, "computed from the configuration", readable)


def _of_checkpoint(checkpoint: Checkpoint, text: str, progress: Progress) -> PlanSource:
    config = checkpoint.config
    local = Path(text).is_dir()
    _refuse_rank(config, text, Path(text).absolute().parent if local else None)
    files = checkpoint.files
    if LAYOUT_NAME in files and not (INDEX_NAME in files or SINGLE_NAME in files):
        return _of_ranks(checkpoint, text)
    if not (INDEX_NAME in files or SINGLE_NAME in files):
        return _computed(config, f"computed from its {CONFIG_NAME}", release.repo() if _is_release(config) else "")
    absent = [shard for shard in checkpoint.shards if shard not in files]
    if absent:
        origin = f"computed from its {CONFIG_NAME}; {plural(len(absent), 'shard is', 'shards are')} absent"
        return _computed(config, origin, "")
    number = len(checkpoint.shards)
    if checkpoint.source.local_path(CONFIG_NAME) is not None:
        tensors: Iterator[tuple[str, Kind]] = TensorTable.of(checkpoint).items()
    else:
        tensors = _remote_tensors(checkpoint, progress)
    inventory = Inventory.from_tensors(config, tensors)
    return PlanSource(inventory, f"counted in the headers of {plural(number, 'shard')}", [], text)


def _remote_tensors(checkpoint: Checkpoint, progress: Progress) -> Iterator[tuple[str, Kind]]:
    """Names and kinds shard by shard, requests overlapping. Raises CheckpointCorrupt where index and headers differ."""
    weight_map, shards, task = checkpoint.index.weight_map, checkpoint.shards, "read headers"
    seen = 0

    def read(shard: str) -> Header:
        return read_header(checkpoint.source, shard, checkpoint.files)

    progress.started(task, len(shards), "shards")
    with ThreadPoolExecutor(_WORKERS) as pool:
        for shard, header in zip(shards, pool.map(read, shards), strict=True):
            for spec in header.tensors:
                if weight_map.get(spec.name) != shard:
                    raise _disagree(f"{shard} holds tensor {spec.name} that the index does not place there")
                yield spec.name, Kind(spec.dtype, spec.shape)
            seen += len(header.tensors)
            progress.advanced(task, 1)
    progress.finished(task)
    if seen != len(weight_map):
        raise _disagree(f"the index names {len(weight_map):,} tensors, the headers hold {seen:,}")


def _disagree(what: str) -> CheckpointCorrupt:
    return CheckpointCorrupt(what, hint="its publisher has to mend it: index and headers must agree")


def _of_ranks(checkpoint: Checkpoint, text: str) -> PlanSource:
    """A folder of ranks that `reshard` wrote, as the checkpoint that they make together."""
    from k3tool.transform.forms import open_form

    try:
        opened = open_form(checkpoint.source)
    except CheckpointMissing as error:
        found = _computed(checkpoint.config, f"computed from its {CONFIG_NAME}", "")
        return found._replace(notes=[error.message, *found.notes])
    return PlanSource(
        Inventory.from_tensors(checkpoint.config, opened.form.items()), "counted in the headers of its ranks", [], text
    )


def _computed(config: K3Config, origin: str, readable: str) -> PlanSource:
    declared = Declared(config)
    inventory = Inventory.from_config(config, declared)
    notes = list(dict.fromkeys(declared.open))
    if declared.leaves_others_open and not _is_release(config):
        notes.append("its quantization_config speaks of the routed experts alone; everything else is counted as plain")
    return PlanSource(inventory, origin, notes, readable)


def _is_release(config: K3Config) -> bool:
    return release.same_architecture(config) and config.quantization == release.config().quantization


def _refuse_rank(config: K3Config, label: str, above: Path | None) -> None:
    """The folder of one rank: its configuration describes the whole model, its files a part."""
    share = share_of(config)
    if share is None:
        return
    layout, place = share
    name = rank_folder(place.rank, layout.ranks)
    whole = above is not None and (above / LAYOUT_NAME).is_file()
    raise UsageError(
        f"{label} is {name} of a layout, a part of a checkpoint",
        hint=f"name the folder that holds every rank: {above}"
        if whole
        else "name the whole checkpoint, or its config.json",
    )
