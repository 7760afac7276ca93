"""Which tensors go into which output file: a folder for each rank, or shards of one checkpoint grouped by owner.

Files hold tensors in one order whatever the source (`in_order`), a module's values and scales stay in one file, and no
file is larger than asked for (unless a single module is).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import groupby

from k3tool.checkpoint.table import Kind
from k3tool.layout import Layout, rank_folder
from k3tool.names import TensorName, shard_name
from k3tool.plan import FileJob, pack
from k3tool.transform.base import TensorOut
from k3tool.transform.reshard import Join, Resharder, in_order, role_key
from k3tool.transform.split import WHOLE, Cut, Rule

Owner = tuple[int, int | None]  # PP stage, EP rank (None: all of the stage)
TIED: Owner = (-1, None)  # an embedding that the first and the last stage share
# Files of ranks that are written together are one batch, and one batch is one worker's: small enough that all workers of
# a machine, or all machines, find work, and that little is lost when they are stopped.
SHARED_FILES = 16  # of each rank
LEAST_SHARED_BYTES = 128 << 20  # of a file: each is synced
MOST_SHARED_BYTES = 16 << 30  # of a batch, unless its files were smaller than ENOUGH_BYTES
ENOUGH_BYTES = 1 << 30


@dataclass
class Group:
    """Tensors with the same owners, in order. sizes: bytes that one rank stores of each. places: position of
    each among all tensors."""

    names: list[str] = field(default_factory=list)
    sizes: array[int] = field(default_factory=lambda: array("q"))
    places: array[int] = field(default_factory=lambda: array("q"))

    def add(self, name: str, size: int, place: int) -> None:
        self.names.append(name)
        self.sizes.append(size)
        self.places.append(place)

    def files(self, max_bytes: int, unit: Callable[[str], str]) -> list[tuple[range, int]]:
        """(tensor numbers, bytes) of each file. Names of one unit (a module, an expert) stay together."""
        found: list[tuple[range, int]] = []
        items = ((0, numbers, sum(self.sizes[number] for number in numbers)) for numbers in self._units(unit))
        for _, held, size in pack(items, max_bytes):
            found.append((range(held[0].start, held[-1].stop), size))
        return found

    def _units(self, unit: Callable[[str], str]) -> Iterator[range]:
        for _, numbers in groupby(range(len(self.names)), key=lambda number: unit(self.names[number])):
            run = list(numbers)
            yield range(run[0], run[-1] + 1)


@dataclass
class Grouped:
    """groups: by owner. joins, exceptions: how the pieces become one again. tensors, total_size: of the whole."""

    groups: dict[Owner, Group]
    joins: dict[str, Join]
    exceptions: dict[str, Join]
    tensors: int
    total_size: int


def group_by_owner(resharder: Resharder) -> Grouped:
    """Walk through every logical tensor once. Raises UnsupportedError where the target cannot divide one."""
    splitter, layout, form = resharder.splitter, resharder.target, resharder.form
    found = Grouped({}, {}, {}, 0, 0)
    known: dict[tuple[Rule, str, Kind], tuple[int, int, Join]] = {}
    for place, (text, name) in enumerate(in_order(form)):
        kind = form.kind(text)
        rule = resharder.rule(name)
        key = (rule, name.part, kind)
        if key not in known:
            cut = resharder.cuts(name, rule, kind)[1]
            kept = TensorOut(text, kind.dtype, cut.shape(kind.shape)).nbytes
            known[key] = (kept, TensorOut(text, kind.dtype, kind.shape).nbytes, _join(name, rule, cut))
        size, whole_size, join = known[key]
        owners = splitter.owners(name, rule, layout)
        owner = owners[0] if len(owners) == 1 else TIED
        found.groups.setdefault(owner, Group()).add(text, size, place)
        found.tensors += 1
        found.total_size += whole_size
        role = role_key(splitter, name)
        if found.joins.setdefault(role, join) != join:
            found.exceptions[text] = join
    return found


def _join(name: TensorName, rule: Rule, cut: Cut) -> Join:
    if cut == WHOLE:
        return Join("shape" if name.part == "weight_shape" and rule.axis is not None else "replicated", None, 0, 0)
    return Join(rule.split, cut.axis, cut.stored, cut.content)


def rank_jobs(resharder: Resharder, grouped: Grouped, max_bytes: int) -> list[FileJob]:
    """Every rank's files. Those that hold the same tensors, or shares of them, are one batch: with as many experts of
    one size on every EP rank, the files of one number of a stage."""
    layout = resharder.target
    made: list[tuple[int, FileJob]] = []
    tied = set(grouped.groups[TIED].places) if TIED in grouped.groups else set()
    for stage in range(layout.pp):
        for ep in range(layout.ep):
            held = _merged([g for owner, g in grouped.groups.items() if _belongs(owner, stage, ep, layout)])
            files = held.files(min(max_bytes, _shared_bytes(held, layout.tp * layout.ep)), resharder.unit)
            for number, (run, size) in enumerate(files, 1):
                places = held.places[run.start : run.stop]
                shared = not tied.isdisjoint(places)
                batch = "tied" if shared else f"{stage}/{number}" if layout.tp * layout.ep > 1 else ""
                paths = [
                    f"{rank_folder(layout.rank_at(tp_rank, ep, stage), layout.ranks)}/{shard_name(number, len(files))}"
                    for tp_rank in range(layout.tp)
                ]
                names = held.names[run.start : run.stop]
                made.extend((places[0], job) for job in resharder.jobs(paths, names, places, size, batch=batch))
    made.sort(key=lambda item: item[0])
    return [job for _, job in made]


def _shared_bytes(held: Group, together: int) -> int:
    """Largest file of a rank, of whose kind `together` are written at a time."""
    size = sum(held.sizes)
    if together == 1:
        return size
    most = max(ENOUGH_BYTES, MOST_SHARED_BYTES // together)
    return max(LEAST_SHARED_BYTES, min(-(-size // SHARED_FILES), most))


def _belongs(owner: Owner, stage: int, ep: int, layout: Layout) -> bool:
    if owner == TIED:
        return stage in (0, layout.pp - 1)
    return owner[0] == stage and owner[1] in (None, ep)


def _merged(groups: list[Group]) -> Group:
    """Several groups as one, in order."""
    if len(groups) == 1:
        return groups[0]
    entries = sorted(
        (place, size, name) for g in groups for name, size, place in zip(g.names, g.sizes, g.places, strict=True)
    )
    merged = Group()
    for place, size, name in entries:
        merged.add(name, size, place)
    return merged


def owner_jobs(
    resharder: Resharder, grouped: Grouped, max_bytes: int, layout: Layout
) -> tuple[list[FileJob], dict[int, list[str]]]:
    """The shards of one checkpoint, grouped by owner, and the shards that each rank of the target needs.

    `resharder` makes whole tensors; `grouped` is by `layout`, whose ranks own them.
    """
    groups = grouped.groups
    cut = {
        owner: groups[owner].files(max_bytes, resharder.unit)
        for owner in sorted(groups, key=lambda o: (o[0], o[1] is not None, o[1] or 0))
    }
    total = sum(len(files) for files in cut.values())
    made: list[tuple[int, Owner, FileJob]] = []
    for owner, files in cut.items():
        group = groups[owner]
        for run, size in files:
            names = group.names[run.start : run.stop]
            places = group.places[run.start : run.stop]
            (job,) = resharder.jobs([shard_name(len(made) + 1, total)], names, places, size)
            made.append((group.places[run.start], owner, job))
    needed = {
        place.rank: [job.path for _, owner, job in made if _belongs(owner, place.pp_rank, place.ep_rank, layout)]
        for place in layout.places()
    }
    made.sort(key=lambda item: item[0])
    return [job for _, _, job in made], needed


__all__ = ["Group", "Grouped", "group_by_owner", "owner_jobs", "rank_jobs"]
