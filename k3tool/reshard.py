"""Cut a checkpoint for any number of ranks, regroup its shards, or join ranks again: plan, carry out, read back.

`prepare` makes the plan and writes nothing; `reshard` carries it out. Bytes are moved, never interpreted, so that a
checkpoint that is divided and joined is the same to the bit.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from k3tool.checkpoint.index import INDEX_NAME
from k3tool.checkpoint.manifest import MANIFEST_NAME, Manifest
from k3tool.checkpoint.note import as_it_was
from k3tool.checkpoint.reader import CONFIG_NAME
from k3tool.checkpoint.source import Source, open_source, opened_source
from k3tool.checkpoint.table import TensorTable
from k3tool.errors import CheckFailed, K3Error, UsageError
from k3tool.events import SILENT
from k3tool.execute import Options, Report, SmallFile, execute, source_identity, source_name
from k3tool.garbage import collector_paused
from k3tool.layout import Layout, check, choose, expert_block, rank_folder, stages
from k3tool.lockstep import reads_of
from k3tool.plan import FileJob, Plan
from k3tool.readback import Readback, verify_joined, verify_written, written_files
from k3tool.reclaim import Reclaimer
from k3tool.transform.forms import Opened, data_companions, open_form
from k3tool.transform.record import LayoutRecord
from k3tool.transform.regroup import Grouped, group_by_owner, owner_jobs, rank_jobs
from k3tool.transform.reshard import LAYOUT_NAME, Form, Resharder
from k3tool.transform.split import Splitter

DEFAULT_SHARD_BYTES = 5_000_000_000


@dataclass(frozen=True)
class Request:
    """What the user asked for. gpus, tp, ep, pp: what is None is chosen. form: `ranks` or `hf`. ranks: of which ranks
    files are written (None: all; only for `ranks`)."""

    gpus: int | None = None
    tp: int | None = None
    ep: int | None = None
    pp: int | None = None
    form: str = "ranks"
    ranks: tuple[int, ...] | None = None
    max_shard_bytes: int = DEFAULT_SHARD_BYTES


class Change(Protocol):
    """What happens to tensors on the way, such as a quantization. Plans stay plans: nothing is read but names."""

    @property
    def command(self) -> str:
        """How the command that asked for it begins: `quantize`."""
        ...

    @property
    def options(self) -> str:
        """Its options, as they stand in the command line."""
        ...

    @property
    def description(self) -> Mapping[str, Any]:
        """What the result depends on, as JSON."""
        ...

    def form(self, opened: Opened) -> Form:
        """The tensors and the configuration as they will be."""
        ...

    def resharder(self, form: Form, splitter: Splitter, target: Layout) -> Resharder: ...


@dataclass(frozen=True)
class Prepared:
    """A job ready to run. jobs_of: rank to its files (for `hf`: the files that it needs). record: the layout file."""

    request: Request
    layout: Layout
    reason: str
    plan: Plan
    opened: Opened
    resharder: Resharder
    record: LayoutRecord
    jobs_of: dict[int, list[FileJob]]

    @property
    def wanted(self) -> list[FileJob]:
        """The files that this command writes."""
        if self.request.ranks is None:
            return list(self.plan.jobs)
        mine = {job.path for rank in self.request.ranks for job in self.jobs_of[rank]}
        return [job for job in self.plan.jobs if job.path in mine]

    def ranks_json(self, files: Any = None) -> list[dict[str, Any]]:
        """[{rank, files, bytes}] of the ranks asked for; sizes on disk where `files` has them, else planned ones."""
        shown = range(self.layout.ranks) if self.request.ranks is None else self.request.ranks
        sizes = {path: record.size for path, record in (files or {}).items()}
        return [
            {
                "rank": rank,
                "files": [job.path for job in self.jobs_of[rank]],
                "bytes": sum(sizes.get(job.path, job.size_estimate) for job in self.jobs_of[rank]),
            }
            for rank in shown
        ]

    def as_json(self) -> dict[str, Any]:
        """What `--dry-run` shows."""
        wanted = self.wanted
        mine = {job.path for job in wanted}
        batches = [[job for job in batch if job.path in mine] for batch in self.plan.batches()]
        return {
            "layout": self.layout.as_json(),
            "form": self.request.form,
            "reason": self.reason,
            "plan": self.plan.id,
            "tensors": self.record.tensors,
            "ranks": self.ranks_json(),
            "bytes_read": sum(reads_of(batch) for batch in batches if batch),
            "bytes_written": sum(job.size_estimate for job in wanted),
        }


@dataclass
class Resharded:
    """The outcome: what was prepared, what the run did, and what reading back found (None: not asked for)."""

    prepared: Prepared
    report: Report
    readback: Readback | None = None

    def as_json(self) -> dict[str, Any]:
        document = {
            "layout": self.prepared.layout.as_json(),
            "form": self.prepared.request.form,
            "reason": self.prepared.reason,
            "ranks": self.prepared.ranks_json(self.report.files),
            "complete": self.report.complete,
            "files_kept": len(self.report.kept),
            "bytes_read": self.report.bytes_read,
            "bytes_written": self.report.bytes_written,
            "seconds": round(self.report.seconds, 3),
            "workers": self.report.workers,
            "peak_memory_bytes": self.report.peak_memory_bytes,
        }
        if self.readback is not None:
            document["verified"] = self.readback.as_json()
        return document


def prepare(
    source: str | Path | Source,
    request: Request,
    change: Change | None = None,
    *,
    reclaim: bool = False,
    dest: str | Path | None = None,
    dry_run: bool = False,
) -> Prepared:
    """Plan a job from names, shapes and dtypes. Writes nothing. change: what is done to tensors on the way.
    reclaim: the source may be one that the same job has begun to free for `dest`; what is left of one that it has freed
    whole is removed, but in a dry run.

    Raises CheckpointMissing, CheckpointCorrupt (a source that is incomplete or not what its configuration says),
    UsageError, and UnsupportedError (exit 14) for a layout that this model cannot have, with the nearest ones.
    """
    if request.form not in ("ranks", "hf"):
        raise UsageError(f"unknown layout {request.form!r}", hint="write --layout ranks or --layout hf")
    if request.ranks is not None and request.form != "ranks":
        raise UsageError("--rank goes with --layout ranks only", hint="leave --rank out, or write --layout ranks")
    with collector_paused():
        opened = open_source(source) if isinstance(source, (str, Path)) else source
        return _prepare(as_it_was(opened, dest, reclaim=reclaim, dry_run=dry_run), request, change)


def _prepare(source: Source, request: Request, change: Change | None) -> Prepared:
    opened = open_form(source)
    if change is not None:
        opened = opened._replace(form=change.form(opened))
    config = opened.form.config
    choice = choose(config, request.gpus, request.tp, request.ep, request.pp)
    layout = choice.layout
    check(config, layout)
    for rank in request.ranks or ():
        layout.place(rank)
    target = layout if request.form == "ranks" else Layout(1, layout.ep, layout.pp)
    resharder = (change.resharder if change else Resharder)(opened.form, opened.splitter, target)
    grouped = group_by_owner(resharder)
    if request.form == "ranks":
        jobs = rank_jobs(resharder, grouped, request.max_shard_bytes)
        jobs_of = _by_folder(jobs, layout)
        needed: dict[int, list[str]] = {}
    else:
        jobs, needed = owner_jobs(resharder, grouped, request.max_shard_bytes, layout)
        by_path = {job.path: job for job in jobs}
        jobs_of = {rank: [by_path[path] for path in paths] for rank, paths in needed.items()}
    description = {**_description(request, layout, opened), **(change.description if change else {})}
    plan = Plan(_command(request, layout, opened, change), tuple(jobs), description)
    return Prepared(
        request, layout, choice.reason, plan, opened, resharder, _record(request, layout, grouped, needed), jobs_of
    )


def reshard(
    source: str | Path | Source,
    dest: str | Path,
    request: Request,
    *,
    options: Options | None = None,
    verify: bool = False,
    reclaim: bool = False,
) -> Resharded:
    """Carry out `request`: every file once, the index and configuration last. Raises what `prepare` and
    `execute` raise, and CheckFailed (exit 1) where `verify` finds a tensor that differs from the source."""
    with opened_source(source) as opened:
        prepared = prepare(opened, request, reclaim=reclaim, dest=dest)
        return carry_out(prepared, Path(dest), options=options or Options(), verify=verify, reclaim=reclaim)


def carry_out(
    prepared: Prepared, dest: Path, *, options: Options, verify: bool = False, reclaim: bool = False
) -> Resharded:
    """The second half of `reshard`, for those who looked at the plan first.

    reclaim: DELETES the source along the way (see `k3tool.reclaim`)."""
    if reclaim:
        reclaimer = reclaimer_of(prepared, dest, options, verify)
        with reclaimer.held():
            done = _carry_out(prepared, dest, replace(options, reclaimer=reclaimer), verify)
            reclaimer.finish()
            return done
    return _carry_out(prepared, dest, options, verify)


def _carry_out(prepared: Prepared, dest: Path, options: Options, verify: bool) -> Resharded:
    wanted = {job.path for job in prepared.wanted}
    report = execute(
        prepared.plan,
        prepared.opened.form.tensors,
        dest,
        closing=lambda report: closing_files(prepared, report),
        options=options,
        only=None if prepared.request.ranks is None else lambda job: job.path in wanted,
        revision=getattr(prepared.opened.source, "commit", None),
    )
    done = Resharded(prepared, report)
    if verify:
        done.readback = read_back(prepared, report, dest, options)
    return done


def read_back(prepared: Prepared, report: Report, dest: Path, options: Options) -> Readback:
    """Read every byte that was written: of all that was asked for where this process closed the job, else of its share.
    Raises what `k3tool.readback.verify_written` raises."""
    request, layout = prepared.request, prepared.layout
    own = set(report.written)
    jobs = [job for job in prepared.wanted if report.is_closed or job.path in own]
    folders = None if request.ranks is None else [rank_folder(rank, layout.ranks) for rank in request.ranks]
    files = written_files(report, prepared.plan.jobs, folders) if report.is_closed else {}
    by_rank = request.form == "ranks"
    readback = verify_written(prepared.resharder, jobs, dest, options, by_rank=by_rank, files=files)
    if report.is_closed and request.ranks is None:
        verify_joined(prepared.opened.form, dest)
    return readback


def reclaimer_of(prepared: Prepared, dest: Path, options: Options, verify: bool) -> Reclaimer:
    """Raises UsageError where freeing the source would contradict what else was asked for, and what `Reclaimer` raises."""
    table = prepared.opened.form.tensors
    if prepared.request.ranks is not None or options.part:
        raise UsageError("--reclaim frees the whole source, so one process must write all ranks", hint="leave it out")
    if verify:
        raise UsageError(
            "--verify needs the source that --reclaim gives up", hint="--reclaim reads every file back by itself"
        )
    if not isinstance(table, TensorTable):
        raise UsageError("--reclaim takes a checkpoint, not a folder of ranks", hint="leave --reclaim out")
    return Reclaimer(
        prepared.plan,
        table,
        dest,
        layout_options(prepared.request, prepared.layout),
        lambda jobs: _differing(prepared, jobs, dest, replace(options, progress=SILENT)),
        overwrite=options.overwrite,
    )


def _differing(prepared: Prepared, jobs: Sequence[FileJob], dest: Path, options: Options) -> set[str]:
    """Files of these jobs in `dest` that are not what the source makes."""
    found: set[str] = set()
    while left := [job for job in jobs if job.path not in found]:
        paths = {job.path for job in left}
        try:
            verify_written(prepared.resharder, left, dest, options, by_rank=prepared.request.form == "ranks", files={})
            break
        except CheckFailed as error:
            named = {str(place).partition(": ")[0] for place in error.details["different"]}  # type: ignore[attr-defined]
            found |= named & paths or paths
        except K3Error:  # one that cannot be read
            found |= paths
    return found


def _command(request: Request, layout: Layout, opened: Opened, change: Change | None) -> str:
    name, options = ("reshard", "") if change is None else (change.command, f"{change.options} ")
    return f"{name} {source_name(opened.source)} {options}{layout_options(request, layout)}"


def layout_options(request: Request, layout: Layout) -> str:
    """What decides the files of a result, as options."""
    return (
        f"--layout {request.form} --tp {layout.tp} --ep {layout.ep} --pp {layout.pp} "
        f"--max-shard-size {request.max_shard_bytes}"
    )


def _description(request: Request, layout: Layout, opened: Opened) -> dict[str, Any]:
    return {
        "layout": layout.as_json(),
        "form": request.form,
        "max_shard_bytes": request.max_shard_bytes,
        **source_identity(opened.source, opened.digest),
    }


def _record(request: Request, layout: Layout, grouped: Grouped, needed: dict[int, list[str]]) -> LayoutRecord:
    return LayoutRecord(
        request.form, layout, grouped.tensors, grouped.total_size, grouped.joins, grouped.exceptions, needed
    )


def _by_folder(jobs: Sequence[FileJob], layout: Layout) -> dict[int, list[FileJob]]:
    by_folder: dict[str, list[FileJob]] = defaultdict(list)
    for job in jobs:
        by_folder[job.path.partition("/")[0]].append(job)
    return {
        rank: sorted(by_folder[rank_folder(rank, layout.ranks)], key=lambda job: job.path)
        for rank in range(layout.ranks)
    }


# What is written after the shards


def closing_files(prepared: Prepared, report: Report) -> Iterator[SmallFile]:
    """Companions first, then each rank's index, configuration and manifest, and config.json of the whole last."""
    opened = prepared.opened
    shared = data_companions(opened.companions, opened.source.files()) if prepared.request.form == "ranks" else []
    held: list[SmallFile] = []  # read once, for every rank
    for name in opened.companions:
        small = SmallFile(name, opened.source.read(name))
        yield small
        if name in shared:
            held.append(small)
    config = opened.source.read(CONFIG_NAME)
    if prepared.request.form == "ranks":
        shown = range(prepared.layout.ranks) if prepared.request.ranks is None else prepared.request.ranks
        for rank in shown:
            yield from _rank_files(prepared, rank, report, held)
    else:
        yield SmallFile(INDEX_NAME, lambda: index_chunks(prepared.plan.jobs, prepared.record.total_size))
    if prepared.request.form == "ranks" or prepared.layout.ranks > 1:
        yield SmallFile(LAYOUT_NAME, prepared.record.as_bytes(opened.form.config))
    yield SmallFile(CONFIG_NAME, config)


def _rank_files(prepared: Prepared, rank: int, report: Report, held: Sequence[SmallFile]) -> Iterator[SmallFile]:
    folder = rank_folder(rank, prepared.layout.ranks)
    jobs = prepared.jobs_of[rank]
    for small in held:
        yield SmallFile(f"{folder}/{small.path}", small.data)
    size = sum(job.data_bytes for job in jobs)
    yield SmallFile(f"{folder}/{INDEX_NAME}", lambda: index_chunks(jobs, size))
    document = {**prepared.opened.form.config.raw, "k3tool": rank_section(prepared, rank)}
    yield SmallFile(f"{folder}/{CONFIG_NAME}", json.dumps(document, indent=2, ensure_ascii=False).encode() + b"\n")
    prefix = folder + "/"
    files = {name[len(prefix) :]: record for name, record in report.files.items() if name.startswith(prefix)}
    files.pop(MANIFEST_NAME, None)
    source = prepared.opened.source
    command, commit = f"{prepared.plan.command} --rank {rank}", getattr(source, "commit", None)
    manifest = Manifest(command, source_name(source), commit, files)
    yield SmallFile(f"{prefix}{MANIFEST_NAME}", manifest.as_bytes())


def rank_section(prepared: Prepared, rank: int) -> dict[str, Any]:
    """The `k3tool` key of a rank's configuration: who it is and what it holds. Ranges are [first, last)."""
    config, layout = prepared.opened.form.config, prepared.layout
    place = layout.place(rank)
    layers = stages(config.num_layers, layout.pp)[place.pp_rank]
    block = expert_block(config.num_experts, layout.ep, place.ep_rank)
    return {
        "rank": rank,
        "ranks": layout.ranks,
        **layout.as_json(),
        "tp_rank": place.tp_rank,
        "ep_rank": place.ep_rank,
        "pp_rank": place.pp_rank,
        "layers": [layers.start, layers.stop],
        "experts": [block.start, block.stop],
    }


def index_chunks(jobs: Iterable[FileJob], total_size: int) -> Iterator[bytes]:
    """An index file in pieces: half a million names are never one string."""
    names = sorted((output.name, job.path.rpartition("/")[2]) for job in jobs for output in job.outputs())
    head = json.dumps({"total_size": total_size}, indent=2).replace("\n", "\n  ")
    yield f'{{\n  "metadata": {head},\n  "weight_map": {{'.encode()
    for start in range(0, len(names), 4096):
        lines = [
            f"\n    {json.dumps(name, ensure_ascii=False)}: {json.dumps(file)}"
            for name, file in names[start : start + 4096]
        ]
        yield (("," if start else "") + ",".join(lines)).encode()
    yield b"\n  }\n}\n"
