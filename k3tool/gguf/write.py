"""Write the text model of a checkpoint as GGUF for llama.cpp: plan it from names and shapes, then carry it out.

One pass over the source in bounded memory: every output tensor is a row of small steps, experts one by one.
"""

from __future__ import annotations

import hashlib
import os
import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from k3tool.checkpoint.index import INDEX_NAME
from k3tool.checkpoint.origin import free_folder
from k3tool.checkpoint.reader import Checkpoint
from k3tool.checkpoint.source import Source, open_source
from k3tool.checkpoint.table import TensorTable
from k3tool.commands import command
from k3tool.config import K3Config
from k3tool.errors import CheckFailed, UsageError
from k3tool.events import SILENT, Progress
from k3tool.execute import Options, Report, SmallFile, execute, source_identity, source_name
from k3tool.garbage import collector_paused
from k3tool.gguf.container import TYPES, GgmlType, TensorInfo, Value, build_head, i32, u16
from k3tool.gguf.mapping import GgufTensor, Types, gguf_tensors
from k3tool.gguf.metadata import check_supported, model_keys
from k3tool.gguf.report import REPORT_NAME, Changes, components, earlier_report, merge, report_file, summarize
from k3tool.gguf.vocabulary import chat_template, no_keys, number_keys, tokenizer_keys
from k3tool.names import component_of, parse_name
from k3tool.parts import Part
from k3tool.plan import Compute, Copy, Plan, Step, TensorOut, Zeros, file_job, pack
from k3tool.readback import Readback, check_digests
from k3tool.tokenizer import find_tokenizer
from k3tool.transform.gguf import load
from k3tool.transform.reshard import LAYOUT_NAME
from k3tool.units import plural

TRUNK_TYPES = ("bf16", "f16", "f32", "q8_0")
EXPERT_TYPES = ("keep", "mxfp4", "bf16", "f16", "f32", "q8_0")
VOCABULARIES = ("auto", "none", "ids")
DEFAULT_FILE_BYTES = 20_000_000_000  # a layer of the release is 16.6 GB
MAX_STEM_BYTES = 150
MAX_FILES = 99_999
_LEGAL_FILES = re.compile(r"(LICENSE|THIRD.?PARTY|NOTICE)[\w.-]*", re.IGNORECASE | re.ASCII)


@dataclass(frozen=True)
class GgufOptions:
    """What is written. trunk, experts: types; experts `keep` stays MXFP4, or in the source's plain type.

    vocabulary: `auto` is the source's tokenizer, or none where it has none; `ids` names each token by its number.
    name: of the model, default that of the source; file names begin with it. exact: fail rather than change a value.
    """

    trunk: str = "bf16"
    experts: str = "keep"
    max_file_bytes: int = DEFAULT_FILE_BYTES
    vocabulary: str = "auto"
    name: str | None = None
    exact: bool = False

    def __post_init__(self) -> None:
        for what, value, known in (
            ("trunk type", self.trunk, TRUNK_TYPES),
            ("expert type", self.experts, EXPERT_TYPES),
            ("vocabulary", self.vocabulary, VOCABULARIES),
        ):
            if value not in known:
                raise UsageError(f"GGUF knows no {what} {value!r}", hint=f"one of {', '.join(known)}")

    @property
    def types(self) -> Types:
        experts = None if self.experts == "keep" else TYPES[self.experts.upper()]
        return Types(TYPES[self.trunk.upper()], experts, self.exact)


@dataclass(frozen=True)
class Prepared:
    """A job ready to run. files: per output file its tensors. warnings: what the user should know before.
    left_out: tensors of the source that have no place in the file, with their bytes, by component."""

    plan: Plan
    table: TensorTable
    tensors: list[GgufTensor]
    files: list[list[GgufTensor]]
    warnings: list[str]
    left_out: dict[str, dict[str, int]] = field(default_factory=dict)
    exact: bool = False

    def load(self) -> int:
        """See `k3tool.execute.Options`."""
        firsts = (tensor.steps[0] for tensor in self.tensors)
        load(step.transform for step in firsts if isinstance(step, Compute))
        return 0

    def as_json(self) -> dict[str, Any]:
        """What a dry run shows."""
        return {
            "plan": self.plan.id,
            "files": [
                {"name": job.path, "tensors": len(held), "bytes": job.size_estimate}
                for job, held in zip(self.plan.jobs, self.files, strict=True)
            ],
            "bytes_in": self.plan.read_bytes,
            "bytes_out": self.plan.write_bytes,
            "step_memory_bytes": self.plan.step_bytes,
            "left_out": self.left_out,
            "warnings": self.warnings,
        }


@dataclass
class GgufResult:
    """The outcome; `report` is None after a dry run, `readback` where nothing was read back."""

    prepared: Prepared
    report: Report | None = None
    changes: dict[str, Changes] = field(default_factory=dict)
    readback: Readback | None = None

    @property
    def components(self) -> dict[str, Any]:
        return components(self.prepared.tensors, self.changes)

    def as_json(self) -> dict[str, Any]:
        """The keys of `k3tool quantize --json`."""
        document = {**self.prepared.as_json(), "format": "gguf", "dry_run": self.report is None}
        if self.report is None:
            return document
        names = {job.path for job in self.prepared.plan.jobs}
        return {
            **document,
            "bytes_out": sum(record.size for name, record in self.report.files.items() if name in names),
            "components": self.components,
            "complete": self.report.complete,
            "files_kept": len(self.report.kept),
            "bytes_read": self.report.bytes_read,
            "bytes_written": self.report.bytes_written,
            "seconds": round(self.report.seconds, 3),
            "peak_memory_bytes": self.report.peak_memory_bytes,
            **({} if self.readback is None else {"verified": self.readback.as_json()}),
        }


def write_gguf(
    source: str | Path | Source,
    dest: str | Path,
    *,
    trunk: str = "bf16",
    experts: str = "keep",
    max_shard_size: int = DEFAULT_FILE_BYTES,
    vocabulary: str = "auto",
    name: str | None = None,
    exact: bool = False,
    progress: Progress = SILENT,
    max_memory: int | None = None,
    max_workers: int | None = None,
    overwrite: bool = False,
    part: Part | None = None,
    verify: bool = False,
    dry_run: bool = False,
) -> GgufResult:
    """Write `source` (a folder, a Hub repository or a Source) as one or more GGUF files into the folder `dest`.

    Sizes in bytes. verify: read every written file back. The same call continues where the last one stopped. Raises UsageError for an unknown type,
    UnsupportedError (14) for a model or a tensor that the architecture cannot hold, CheckFailed (1) where `exact`
    and a value changes, and what `k3tool.execute.execute` raises.
    """
    prepared = prepare(source, GgufOptions(trunk, experts, max_shard_size, vocabulary, name, exact))
    for warning in prepared.warnings:
        progress.warn(warning)
    if dry_run:
        return GgufResult(prepared)
    options = Options(max_workers=max_workers, max_memory=max_memory, overwrite=overwrite, part=part, progress=progress)
    return carry_out(prepared, dest, options=options, verify=verify)


def prepare(source: str | Path | Source, options: GgufOptions) -> Prepared:
    """Plan the job from the configuration, the headers and the tokenizer files. Writes nothing."""
    checkpoint = Checkpoint(open_source(source) if isinstance(source, (str, Path)) else source)
    config = checkpoint.config
    _refuse_ranks(checkpoint)
    check_supported(config)
    with collector_paused():
        table = TensorTable.of(checkpoint)
        tensors, left = gguf_tensors(config, table, options.types)
    name = options.name or model_name(checkpoint.source.label)
    vocabulary, warnings = _vocabulary(config, checkpoint.source, options)
    warnings += _kept_wide(tensors, options)
    experts = next(t.info.kind for t in tensors if t.component == "routed_experts")
    keys = model_keys(config, name, experts.name, any(t.info.kind.block > 1 for t in tensors)) + vocabulary
    files = [held for _, held, _ in pack(((None, t, t.info.padded) for t in tensors), options.max_file_bytes)]
    if len(files) > MAX_FILES:
        raise UsageError(
            f"{len(files)} files of {options.max_file_bytes} bytes are more than llama.cpp counts ({MAX_FILES})",
            hint="give a larger --max-shard-size",
        )
    stem = _file_stem(name, experts, options)
    heads = [_head(keys, held, number, len(files), len(tensors)) for number, held in enumerate(files)]
    jobs = [
        file_job(_file_name(stem, number, len(files)), FileSteps(held), metadata={}, head=head)
        for number, (held, head) in enumerate(zip(files, heads, strict=True))
    ]
    description = {
        "format": "gguf",
        "trunk": options.trunk,
        "experts": options.experts,
        "heads": hashlib.sha256(b"".join(heads)).hexdigest(),
        **source_identity(checkpoint.source, table.digest()),
    }
    plan = Plan(_command(source_name(checkpoint.source), options), tuple(jobs), description)
    return Prepared(plan, table, tensors, files, warnings, _left_out(table, left), options.exact)


def _command(source: str, options: GgufOptions) -> str:
    """What writes the same files again, without its DEST."""
    vocabulary = "" if options.vocabulary == "auto" else f" --vocabulary {options.vocabulary}"
    return (
        f"quantize {source} --format gguf --trunk {options.trunk} --experts {options.experts} "
        f"--max-shard-size {options.max_file_bytes}{vocabulary}{' --exact' if options.exact else ''}"
    )


def _left_out(table: TensorTable, names: Sequence[str]) -> dict[str, dict[str, int]]:
    """Component to how many of its tensors llama.cpp's file does not hold, and their bytes."""
    found: dict[str, dict[str, int]] = {}
    for name in names:
        entry = found.setdefault(component_of(parse_name(name)), {"tensors": 0, "bytes": 0})
        entry["tensors"] += 1
        entry["bytes"] += table.locate(name).spec.nbytes
    return found


def carry_out(prepared: Prepared, dest: str | Path, *, options: Options, verify: bool = False) -> GgufResult:
    """The second half of `write_gguf`, for those who looked at the plan first. verify: read every file back."""
    source, plan, dest = prepared.table.source, prepared.plan, Path(dest)
    result = GgufResult(prepared)

    def closing(report: Report) -> Iterator[SmallFile]:
        found = merge(report.notes.values())
        earlier = earlier_report(dest, plan.id) if report.kept else {}
        result.changes = found or earlier
        if prepared.exact:
            _check_exact(found)
            _check_exact(earlier)
        for name in source.files():
            if _LEGAL_FILES.fullmatch(name):
                yield SmallFile(name, source.read(name))
        yield SmallFile(REPORT_NAME, report_file(plan.id, result.changes))

    revision = getattr(source, "commit", None)
    options = replace(options, summarize=summarize, load=prepared.load)
    result.report = execute(plan, prepared.table, dest, closing=closing, options=options, revision=revision)
    if verify:
        result.readback = check_digests(dest, result.report, options)
    if result.report.complete and not result.report.is_closed:  # another process wrote the report of all
        result.changes = earlier_report(dest, plan.id)
    if not result.changes:
        result.changes = merge(result.report.notes.values())
    return result


def _check_exact(changes: Mapping[str, Changes]) -> None:
    """Raises CheckFailed where files that an earlier run without `exact` wrote hold changed values."""
    for component, found in changes.items():
        if found.changed:
            raise CheckFailed(
                f"{component}: an earlier run without --exact changed values of {plural(found.changed, 'tensor')}"
                + (f", such as {found.worst[0][1]}" if found.worst else ""),
                hint="choose types that hold the values and start over with --overwrite, or leave --exact out",
            )


def _refuse_ranks(checkpoint: Checkpoint) -> None:
    """GGUF is made from whole tensors; what is cut for ranks must be joined first."""
    label = checkpoint.source.label
    one = "k3tool" in checkpoint.config.raw
    if one or (LAYOUT_NAME in checkpoint.files and INDEX_NAME not in checkpoint.files):
        folder = Path(label).resolve().parent if one and Path(label).is_dir() else label
        source = Path(folder) if Path(folder).is_dir() else folder
        whole = command("reshard", source, free_folder(str(folder), "joined"), "--gpus", 1, "--layout", "hf")
        raise UsageError(
            f"{label} is cut for ranks, and GGUF is written from a whole checkpoint", hint=f"join it first: {whole}"
        )


class FileSteps(Sequence[Step]):
    """The steps of a file's tensors one after the other, each tensor padded to the alignment; built while walking."""

    def __init__(self, tensors: Sequence[GgufTensor]) -> None:
        self._tensors = tensors
        self._ends = list(accumulate(len(tensor.steps) + 1 for tensor in tensors))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __iter__(self) -> Iterator[Step]:
        for tensor in self._tensors:
            yield from tensor.steps
            yield _padding(tensor.info)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        if index < 0:
            index += len(self)
        at = bisect_right(self._ends, index)
        if not 0 <= index < len(self):
            raise IndexError(index)
        tensor = self._tensors[at]
        within = index - (self._ends[at - 1] if at else 0)
        return tensor.steps[within] if within < len(tensor.steps) else _padding(tensor.info)


def _padding(info: TensorInfo) -> Copy:
    size = info.padded - info.nbytes
    return Copy(TensorOut(f"{info.name} (padding)", "U8", (size,)), (Zeros(size),))


def _head(keys: list[tuple[str, Value]], held: list[GgufTensor], number: int, files: int, tensors: int) -> bytes:
    """A file's first bytes: the first file alone has the model's keys."""
    split = [("split.no", u16(number)), ("split.count", u16(files)), ("split.tensors.count", i32(tensors))]
    own = (keys if number == 0 else []) + (split if files > 1 else [])
    return build_head(own, (tensor.info for tensor in held))


def model_name(label: str) -> str:
    """The last part of a folder (`.` is the folder's own name) or of a repository's name, without a revision."""
    if Path(label).is_dir():
        return Path(os.path.realpath(label)).name or "model"
    return label.rstrip("/").rpartition("/")[2].partition("@")[0] or "model"


def _file_stem(name: str, experts: GgmlType, options: GgufOptions) -> str:
    """The model's name in letters of any script, then the types. A name that had to be changed to be a file's gets a mark
    of the original, so that two models never share one."""
    plain = re.sub(r"[^\w.+-]+", "-", name).strip("-.")
    plain = plain.encode()[:MAX_STEM_BYTES].decode(errors="ignore")
    if plain != name:
        plain = "-".join(filter(None, (plain, hashlib.sha256(name.encode(errors="surrogateescape")).hexdigest()[:8])))
    kinds = dict.fromkeys((experts.name, options.trunk.upper()))
    return "-".join([plain, *kinds])


def _file_name(stem: str, number: int, files: int) -> str:
    return f"{stem}.gguf" if files == 1 else f"{stem}-{number + 1:05d}-of-{files:05d}.gguf"


def _vocabulary(config: K3Config, source: Source, options: GgufOptions) -> tuple[list[tuple[str, Value]], list[str]]:
    if options.vocabulary == "ids":
        return number_keys(config), []
    tokenizer = find_tokenizer(source, config.vocab_size) if options.vocabulary == "auto" else None
    if tokenizer is not None:
        return tokenizer_keys(config, tokenizer, chat_template(source)), []
    missing = [f"{source.label} has no tokenizer: llama.cpp will load the file but cannot generate text with it"]
    return no_keys(), missing if options.vocabulary == "auto" else []


def _kept_wide(tensors: Sequence[GgufTensor], options: GgufOptions) -> list[str]:
    """Tensors that stay BF16 because their rows are no whole blocks."""
    trunk = options.types.trunk
    kept = [t.info for t in tensors if t.info.kind.name == "BF16" and t.component != "routed_experts"]
    if trunk.block == 1 or not kept:
        return []
    return [
        f"{len(kept)} tensors stay BF16, their rows are no multiple of {trunk.block}: {kept[0].name} "
        f"has rows of {kept[0].shape[-1]}" + (", ..." if len(kept) > 1 else "")
    ]
