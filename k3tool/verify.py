"""Is this folder the checkpoint it claims to be? Three depths, each including the one before.

names: index against configuration and files. headers: every header against index, configuration and file length.
bytes: SHA-256 of every file against the digests known for it: the manifest that k3tool wrote, the release's built-in
table, or the records an `hf download --local-dir` left. A file without a known digest is `unknown`, never `ok`.
"""

from __future__ import annotations

import time
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from k3tool.checkpoint.header import TensorSpec
from k3tool.checkpoint.index import INDEX_NAME
from k3tool.checkpoint.manifest import Manifest, load_manifest
from k3tool.checkpoint.origin import Origin, look
from k3tool.checkpoint.reader import CONFIG_NAME, Checkpoint
from k3tool.checkpoint.source import LocalSource
from k3tool.checkpoint.strays import stray_shards, unfinished, why_absent
from k3tool.errors import CheckpointCorrupt, CheckpointMissing, K3Error, UsageError
from k3tool.events import SILENT, Progress
from k3tool.garbage import collector_paused
from k3tool.units import parse_ranges, plural
from k3tool.verify_bytes import BytesOptions, Reading
from k3tool.verify_report import DEPTHS, Depth, FileReport, VerifyReport, fail

if TYPE_CHECKING:
    from k3tool.conform import Conformance

__all__ = ["DEPTHS", "BytesOptions", "Depth", "VerifyReport", "verify"]


def verify(
    folder: str | Path,
    *,
    depth: Depth = "headers",
    options: BytesOptions | None = None,
    ranks: str | None = None,
    progress: Progress = SILENT,
) -> VerifyReport:
    """Check a local checkpoint and report every problem; raises only where there is no checkpoint to check.

    At depth bytes, files proven by an earlier check and unchanged since are not read again (`options.full` reads all).
    A folder of ranks is checked rank by rank and as a whole; `ranks` (`0-3,7`): only those, as on a node that has
    no others. One of another kind that k3tool wrote (GGUF) is compared with its manifest: files and sizes, then digests.
    Raises CheckpointMissing (no folder, no configuration, no index), CheckpointCorrupt (those two unreadable).
    """
    begun = time.monotonic()
    checkpoint = Checkpoint(LocalSource(folder))
    manifest = None if CONFIG_NAME in checkpoint.files else load_manifest(Path(folder))
    folders: list[str] = []
    if manifest is None and INDEX_NAME not in checkpoint.files:
        from k3tool.verify_ranks import rank_folders

        folders = rank_folders(checkpoint)
    chosen = _chosen(folders, ranks, checkpoint.source.label)
    with ExitStack() as stack:

        def begin() -> Reading | None:
            if depth != "bytes":
                return None
            return stack.enter_context(closing(Reading(checkpoint, options or BytesOptions(), progress, chosen)))

        reading = begin() if not folders else None
        with collector_paused():
            if manifest is not None:
                report = _by_manifest(checkpoint, manifest, depth)
            elif folders:
                report = _by_ranks(checkpoint, folders, chosen, depth, progress)
                reading = begin()  # only now are the files of the ranks known
            else:
                report = _Verification(checkpoint, depth, progress).run()
        if reading is not None:
            reading.finish(report)
    report.files.sort(key=lambda file: file.name)
    report.seconds = time.monotonic() - begun
    return report


def _chosen(folders: list[str], ranks: str | None, label: str) -> list[str] | None:
    """The rank folders that are asked for, None for all. Raises UsageError."""
    if ranks is None:
        return None
    if not folders:
        raise UsageError(f"--rank is about a folder of ranks, and {label} is none", hint="leave --rank out")
    return [folders[rank] for rank in parse_ranges(ranks, what="ranks", limit=len(folders), option="--rank")]


def _by_manifest(checkpoint: Checkpoint, manifest: Manifest, depth: Depth) -> VerifyReport:
    """Names, and beyond that depth sizes, of the files that a manifest lists."""
    report = VerifyReport(checkpoint.source.label, depth)
    for name, record in sorted(manifest.files.items()):
        file = FileReport(name)
        report.files.append(file)
        size = checkpoint.files.get(name)
        if size is None:
            fail(report, file, f"{name} is missing: the manifest names it", "missing")
        elif depth != "names" and size != record.size:
            fail(report, file, f"{name} has {size} bytes, {record.size} were written", "corrupt")
    return report


def _by_ranks(
    checkpoint: Checkpoint, folders: list[str], chosen: list[str] | None, depth: Depth, progress: Progress
) -> VerifyReport:
    """Every rank's names and headers; then whether the ranks join to what the configuration implies."""
    from k3tool.transform.reshard import LAYOUT_NAME
    from k3tool.verify_ranks import check_rank_folders, joined_problem

    report = VerifyReport(checkpoint.source.label, depth)

    def check_one(part: Checkpoint, folder: str) -> None:
        found = _Verification(part, depth, progress).run()
        report.bytes_read += found.bytes_read
        report.problems.extend(f"{folder}: {text}" for text in found.problems)
        report.warnings.extend(f"{folder}: {text}" for text in found.warnings)
        report.remedy = report.remedy or found.remedy
        for file in found.files:
            file.name = f"{folder}/{file.name}"
            file.problem = f"{folder}: {file.problem}" if file.problem else ""
            report.files.append(file)

    def problem(text: str, name: str, missing: bool) -> None:
        report.files.append(FileReport(name))
        fail(report, report.files[-1], text, "missing" if missing else "corrupt")

    check_rank_folders(checkpoint, folders if chosen is None else chosen, check_one, problem)
    if chosen is None and depth != "names" and report.ok and (text := joined_problem(checkpoint)):
        problem(text, LAYOUT_NAME, False)
    return report


class _Verification:
    """Names and headers: collects problems instead of stopping at the first."""

    def __init__(self, checkpoint: Checkpoint, depth: Depth, progress: Progress) -> None:
        self.checkpoint = checkpoint
        self.depth = depth
        self.progress = progress
        self.report = VerifyReport(checkpoint.source.label, depth)
        self.files: dict[str, FileReport] = {}

    def problem(self, text: str, file: str | None = None, status: Literal["missing", "corrupt"] = "corrupt") -> None:
        self.report.problems.append(text)
        if file is not None:
            entry = self.files.setdefault(file, FileReport(file))
            entry.status = status if entry.status != "corrupt" else "corrupt"
            entry.problem = entry.problem or text

    def run(self) -> VerifyReport:
        checkpoint = self.checkpoint
        config, index = checkpoint.config, checkpoint.index
        self.files = {name: FileReport(name) for name in (CONFIG_NAME, INDEX_NAME) if name in checkpoint.files}
        shards = index.shards
        for shard in shards:
            self.files[shard] = FileReport(shard)
            if shard not in checkpoint.files:
                what, hint = why_absent(checkpoint.source, shard, checkpoint.files, shards)
                self.problem(f"{shard} is missing: the index places tensors in it{what}", shard, "missing")
                if what and (self.depth == "names" or hint != look(checkpoint.source.label)):
                    self.report.remedy = self.report.remedy or hint
            elif left := unfinished(checkpoint.files, shard):
                self.report.warnings.append(f"{left} says that the download of {shard} is not finished")
        found: dict[str, TensorSpec | None] = dict.fromkeys(index.weight_map)
        whole = all(shard in checkpoint.files for shard in index.shards)
        if self.depth != "names":
            self.read_headers(found)
            whole = whole and None not in found.values()
        from k3tool.conform import conform  # at depth bytes, files are already being read while these are imported
        from k3tool.transform.expected import expected

        local, implied = expected(config, len(index.weight_map))
        conformance = conform(local, implied, found)
        self.compare(conformance)
        self.look_at_strays(stray_shards(checkpoint.files, shards))
        size = sum(spec.nbytes for spec in found.values() if spec is not None)
        if self.depth != "names" and whole and index.total_size not in (None, size):
            self.problem(f"{INDEX_NAME}: total_size says {index.total_size}, the tensors have {size} bytes", INDEX_NAME)
        self.report.files = list(self.files.values())
        if self.report.problems:
            from k3tool import release

            if release.same_architecture(config) and set(release.shards()) == set(shards):
                self.report.known = Origin(release.repo())
        return self.report

    def read_headers(self, found: dict[str, TensorSpec | None]) -> None:
        checkpoint = self.checkpoint
        weight_map = checkpoint.index.weight_map
        shards = [shard for shard in checkpoint.index.shards if shard in checkpoint.files]
        self.progress.started("verify headers", len(shards), "shards")
        for shard in shards:
            try:
                header = checkpoint.header(shard)
            except (CheckpointMissing, CheckpointCorrupt) as error:  # others say nothing of the shard
                self.problem(error.message, shard, "missing" if isinstance(error, CheckpointMissing) else "corrupt")
                if "errno" in error.details:  # the disk, not another copy
                    self.report.remedy = self.report.remedy or error.hint
                if "holds" in error.details:  # something else stands in the file, and its remedy is its own
                    self.report.remedy = self.report.remedy or (
                        error.hint if error.details["holds"] in OWN_REMEDY else ""
                    )
                continue
            finally:
                self.progress.advanced("verify headers", 1)
            self.report.bytes_read += header.data_start
            for spec in header.tensors:
                if weight_map.get(spec.name) == shard:
                    found[spec.name] = spec
                else:
                    place = weight_map.get(spec.name)
                    text = f"the index places it in {place}" if place else "the index does not name it"
                    self.problem(f"{shard} holds {spec.name}, but {text}", shard)
            named = {spec.name for spec in header.tensors}
            for name in (name for name, place in weight_map.items() if place == shard and name not in named):
                self.problem(f"{shard} does not hold {name} that the index places there", shard)
        self.progress.finished("verify headers")

    def compare(self, found: Conformance) -> None:
        from k3tool.conform import FLOAT_HINT, fused_error, fused_experts

        weight_map = self.checkpoint.index.weight_map
        if fused := fused_experts(found.unexpected):
            error = fused_error(self.checkpoint.source.label, fused)
            self.report.problems.insert(0, error.message)
            self.report.remedy = error.hint
        elif found.mismatched and not found.missing and all(file.status == "ok" for file in self.files.values()):
            self.report.remedy = FLOAT_HINT if all(map(_same_shape, found.mismatched.values())) else ""
        for name in found.missing:
            self.problem(f"{name} is missing: the configuration implies it", None)
        for name in found.unexpected:
            self.problem(f"{name} is not part of what the configuration implies", None)
        for name, text in found.mismatched.items():
            self.problem(f"{name}: {text}", weight_map.get(name))

    def look_at_strays(self, strays: list[str]) -> None:
        """Tensor files that the index does not name: loaders that read every `.safetensors` take them for shards."""
        if not strays:
            return
        absent = {name for name, file in self.files.items() if file.status == "missing"}
        if self.depth != "names":
            strays, inside = self._collisions(strays, absent)
            if absent and inside:
                self._renamed(inside, absent)
        if strays:
            rest = f" and {len(strays) - 1} more" if len(strays) > 1 else ""
            self.report.warnings.append(
                f"{strays[0]}{rest} lie beside the shards, and the index names them not: loaders that read every "
                ".safetensors file of a folder take them for parts of the checkpoint"
            )

    def _collisions(self, strays: list[str], absent: set[str]) -> tuple[list[str], dict[str, set[str]]]:
        """(strays that are none of this checkpoint's, and of the others by name the tensors that are looked for)."""
        weight_map = self.checkpoint.index.weight_map
        harmless: list[str] = []
        inside: dict[str, set[str]] = {}
        for stray in strays:
            try:
                names = [spec.name for spec in self.checkpoint.header(stray).tensors]
            except K3Error:
                harmless.append(stray)
                continue
            wanted = {name for name in names if weight_map.get(name) in absent}
            twice = [name for name in names if name in weight_map and name not in wanted]
            if wanted:
                inside[stray] = wanted
            if twice:
                self.problem(
                    f"{stray} is not named by the index and holds {plural(len(twice), 'tensor')} that it places in "
                    f"{weight_map[twice[0]]}, such as {twice[0]}: loaders that read every file take one or the other",
                    stray,
                )
                self.files[stray].stray = True
            elif not wanted:
                harmless.append(stray)
        return harmless, inside

    def _renamed(self, inside: dict[str, set[str]], absent: set[str]) -> None:
        """Where the tensors of absent shards are found in files of other names."""
        weight_map = self.checkpoint.index.weight_map
        wanted = [name for name, shard in weight_map.items() if shard in absent]
        held = set().union(*inside.values())
        stray = min(inside)
        shard = weight_map[min(inside[stray])]
        self.report.problems.insert(
            0,
            f"{plural(len(inside), '.safetensors file')} that the index does not name, such as {stray}, "
            f"{'hold' if len(inside) > 1 else 'holds'} {len(held):,} of the {len(wanted):,} tensors of the absent shards",
        )
        if {name for name in wanted if weight_map[name] == shard} == inside[stray]:
            self.report.remedy = (
                f"give the files the names that the index uses: {stray} holds what it places in {shard}"
            )
        else:
            self.report.remedy = (
                f"index and shards are of two revisions: take {INDEX_NAME} from where the shards are from"
            )


OWN_REMEDY = ("lfs", "annex", "gzip")


def _same_shape(text: str) -> bool:
    """Whether `expected BF16 [2, 3], found F16 [2, 3]` is about the type alone."""
    expected, _, found = text.removeprefix("expected ").partition(", found ")
    return expected.partition(" ")[2] == found.partition(" ")[2]
