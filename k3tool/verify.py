"""Is this folder the checkpoint it claims to be? Three depths, each including the one before.

names: index against configuration and files. headers: every header against index, configuration and file length.
bytes: SHA-256 of every file against the digests known for it: the manifest that k3tool wrote, the release's built-in
table, or the records an `hf download --local-dir` left. A file without a known digest is `unknown`, never `ok`.
"""

from __future__ import annotations

import re
import time
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from k3tool.checkpoint.header import TensorSpec
from k3tool.checkpoint.index import INDEX_NAME
from k3tool.checkpoint.manifest import FileRecord, Manifest, load_manifest
from k3tool.checkpoint.reader import CONFIG_NAME, Checkpoint
from k3tool.checkpoint.source import LocalSource
from k3tool.disk import refusal
from k3tool.errors import CheckpointCorrupt, CheckpointMissing, K3Error
from k3tool.events import SILENT, Progress
from k3tool.garbage import collector_paused
from k3tool.proofs import Proof, ProofBook, Readers, choose_sample
from k3tool.units import format_bytes

Depth = Literal["names", "headers", "bytes"]
DEPTHS: tuple[Depth, ...] = ("names", "headers", "bytes")
_SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)


@dataclass
class FileReport:
    """status: ok, missing, corrupt, or unknown (bytes depth: no digest to compare with, or not in the sample)."""

    name: str
    status: Literal["ok", "missing", "corrupt", "unknown"] = "ok"
    problem: str = ""
    proven: str = ""  # when an earlier check read this file, where this one relied on it


@dataclass
class VerifyReport:
    source: str
    depth: Depth
    files: list[FileReport] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    bytes_read: int = 0
    seconds: float = 0.0
    digests: str = ""  # where the expected digests came from
    remedy: str = ""  # what mends it, where that is not fetching

    @property
    def ok(self) -> bool:
        return not self.problems

    @property
    def unproven(self) -> int:
        return sum(file.status == "unknown" for file in self.files)

    @property
    def proven_earlier(self) -> int:
        return sum(bool(file.proven) for file in self.files)

    def as_json(self) -> dict[str, Any]:
        return {
            "source": self.source,
            "depth": self.depth,
            "files": [vars(file) for file in self.files],
            "problems": self.problems,
            "bytes_read": self.bytes_read,
            "seconds": round(self.seconds, 3),
            "digests": self.digests,
            "unproven": self.unproven,
            "proven_earlier": self.proven_earlier,
        }

    def error(self) -> K3Error:
        """The failure to raise for a report that is not ok: missing (exit 10) only where nothing is corrupt."""
        corrupt = [file for file in self.files if file.status == "corrupt"]
        kind = (
            CheckpointCorrupt if corrupt or all(file.status != "missing" for file in self.files) else CheckpointMissing
        )
        named = [file.problem for file in corrupt if file.problem] or self.problems
        first = named[0]
        more = f" (and {len(self.problems) - 1} more problems)" if len(self.problems) > 1 else ""
        names = sorted({file.name for file in self.files if file.status in ("corrupt", "missing")})
        hint = self.remedy or (
            f"k3tool {self._fetch(names)} fetches only what is wrong"
            if names
            else ("compare config.json, index and shards with their publisher's")
        )
        return kind(first + more, hint=hint).with_document(self.as_json())

    def _fetch(self, names: list[str]) -> str:
        """The command that brings these files again, as it was given where a manifest remembers it."""
        with suppress(K3Error):
            manifest = load_manifest(Path(self.source))
            if manifest is not None and manifest.command.startswith("fetch "):
                return f"{manifest.command} --local-dir {self.source}"
        include = "".join(f" --include '{name}'" for name in names) if len(names) <= 3 else ""
        return f"fetch REPO{include} --local-dir {self.source}"


@dataclass(frozen=True)
class BytesOptions:
    """full: trust no earlier proof. sample: read only this share (0..1) of the bytes, another one each time."""

    workers: int = 4
    full: bool = False
    sample: float | None = None


def verify(
    folder: str | Path,
    *,
    depth: Depth = "headers",
    options: BytesOptions | None = None,
    progress: Progress = SILENT,
) -> VerifyReport:
    """Check a local checkpoint and report every problem; raises only where there is no checkpoint to check.

    At depth bytes, files proven by an earlier check and unchanged since are not read again (`options.full` reads all).
    A folder of ranks is checked rank by rank and as a whole. One of another kind that k3tool wrote (GGUF) is compared with its manifest: files and sizes, then digests.
    Raises CheckpointMissing (no folder, no configuration, no index), CheckpointCorrupt (those two unreadable).
    """
    begun = time.monotonic()
    checkpoint = Checkpoint(LocalSource(folder))
    manifest = None if CONFIG_NAME in checkpoint.files else load_manifest(Path(folder))
    folders: list[str] = []
    if manifest is None and INDEX_NAME not in checkpoint.files:
        from k3tool.verify_ranks import rank_folders

        folders = rank_folders(checkpoint)
    with ExitStack() as stack:

        def begin() -> _Reading | None:
            if depth != "bytes":
                return None
            return stack.enter_context(closing(_Reading(checkpoint, options or BytesOptions(), progress)))

        reading = begin() if not folders else None
        with collector_paused():
            if manifest is not None:
                report = _by_manifest(checkpoint, manifest, depth)
            elif folders:
                report = _by_ranks(checkpoint, folders, depth, progress)
                reading = begin()  # only now are the files of the ranks known
            else:
                report = _Verification(checkpoint, depth, progress).run()
        if reading is not None:
            reading.finish(report)
    report.files.sort(key=lambda file: file.name)
    report.seconds = time.monotonic() - begun
    return report


def _by_manifest(checkpoint: Checkpoint, manifest: Manifest, depth: Depth) -> VerifyReport:
    """Names, and beyond that depth sizes, of the files that a manifest lists."""
    report = VerifyReport(checkpoint.source.label, depth, remedy=f"run it again: k3tool {manifest.command}")
    for name, record in sorted(manifest.files.items()):
        file = FileReport(name)
        report.files.append(file)
        size = checkpoint.files.get(name)
        if size is None:
            _fail(report, file, f"{name} is missing: the manifest names it", "missing")
        elif depth != "names" and size != record.size:
            _fail(report, file, f"{name} has {size} bytes, {record.size} were written", "corrupt")
    return report


def _by_ranks(checkpoint: Checkpoint, folders: list[str], depth: Depth, progress: Progress) -> VerifyReport:
    """Every rank's names and headers; then whether the ranks join to what the configuration implies."""
    from k3tool.transform.reshard import LAYOUT_NAME
    from k3tool.verify_ranks import check_rank_folders, joined_problem

    written = load_manifest(Path(checkpoint.source.label))
    remedy = f"write it again: k3tool {written.command}" if written else "write the ranks again: k3tool reshard"
    report = VerifyReport(checkpoint.source.label, depth, remedy=remedy)

    def check_one(part: Checkpoint, folder: str) -> None:
        found = _Verification(part, depth, progress).run()
        report.bytes_read += found.bytes_read
        report.problems.extend(f"{folder}: {text}" for text in found.problems)
        for file in found.files:
            file.name = f"{folder}/{file.name}"
            file.problem = f"{folder}: {file.problem}" if file.problem else ""
            report.files.append(file)

    def problem(text: str, name: str, missing: bool) -> None:
        report.files.append(FileReport(name))
        _fail(report, report.files[-1], text, "missing" if missing else "corrupt")

    check_rank_folders(checkpoint, folders, check_one, problem)
    if depth != "names" and report.ok and (text := joined_problem(checkpoint)):
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
        for shard in index.shards:
            self.files[shard] = FileReport(shard)
            if shard not in checkpoint.files:
                self.problem(f"{shard} is missing: the index places tensors in it", shard, "missing")
        found: dict[str, TensorSpec | None] = dict.fromkeys(index.weight_map)
        whole = all(shard in checkpoint.files for shard in index.shards)
        if self.depth != "names":
            self.read_headers(found)
            whole = whole and None not in found.values()
        from k3tool.conform import conform  # at depth bytes, files are already being read while these are imported
        from k3tool.transform.expected import expected

        local, implied = expected(config)
        self.compare(conform(local, implied, found))
        size = sum(spec.nbytes for spec in found.values() if spec is not None)
        if self.depth != "names" and whole and index.total_size not in (None, size):
            self.problem(f"{INDEX_NAME}: total_size says {index.total_size}, the tensors have {size} bytes", INDEX_NAME)
        self.report.files = list(self.files.values())
        return self.report

    def read_headers(self, found: dict[str, TensorSpec | None]) -> None:
        checkpoint = self.checkpoint
        weight_map = checkpoint.index.weight_map
        shards = [shard for shard in checkpoint.index.shards if shard in checkpoint.files]
        self.progress.started("verify headers", len(shards), "shards")
        for shard in shards:
            try:
                header = checkpoint.header(shard)
            except K3Error as error:
                self.problem(error.message, shard, "missing" if isinstance(error, CheckpointMissing) else "corrupt")
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

    def compare(self, found: Any) -> None:
        weight_map = self.checkpoint.index.weight_map
        for name in found.missing:
            self.problem(f"{name} is missing: the configuration implies it", None)
        for name in found.unexpected:
            self.problem(f"{name} is not part of what the configuration implies", None)
        for name, text in found.mismatched.items():
            self.problem(f"{name}: {text}", weight_map.get(name))


def known_digests(checkpoint: Checkpoint) -> tuple[dict[str, FileRecord], str]:
    """Expected size and SHA-256 per file, and the words that say where they came from."""
    folder = Path(checkpoint.source.label)
    manifest = load_manifest(folder)
    if manifest is not None:
        return dict(manifest.files), f"the manifest of k3tool {manifest.command}"
    from k3tool import release

    recorded = _downloaded_digests(folder)
    if release.same_architecture(checkpoint.config) and set(release.shards()) == set(checkpoint.shards):
        others = {name: r for name, r in release.other_files().items() if name in checkpoint.files}
        return {**recorded, **others, **release.shards()}, "the built-in table of the release"
    return recorded, "the records of hf download" if recorded else ""


def _downloaded_digests(folder: Path) -> dict[str, FileRecord]:
    """What `hf download --local-dir` noted: for LFS files the ETag is the SHA-256 of the content."""
    digests: dict[str, FileRecord] = {}
    notes = folder / ".cache" / "huggingface" / "download"
    for path in sorted(notes.glob("*.metadata")) if notes.is_dir() else ():
        lines = path.read_text(errors="replace").split("\n")
        if len(lines) >= 2 and _SHA256.fullmatch(lines[1].strip()):
            digests[path.name[: -len(".metadata")]] = FileRecord(-1, lines[1].strip())
    return digests


class _Reading:
    """Depth bytes: files are read from the moment this is made, while names and headers are still being looked at."""

    def __init__(self, checkpoint: Checkpoint, options: BytesOptions, progress: Progress) -> None:
        self.digests, self.origin = known_digests(checkpoint)
        self.files = checkpoint.files
        self.options, self.progress = options, progress
        folder = Path(checkpoint.source.label)
        self.book = ProofBook(folder)
        self.sizes = {name: self.files[name] for name in self.digests if name in self.files}
        self.chosen = self.sizes if options.sample is None else choose_sample(self.sizes, options.sample, self.book)
        self.proven = {} if options.full else {name: proof for name in self.sizes if (proof := self.earlier(name))}
        kept = self.proven if options.sample is None else ()
        self.names = [name for name in self.sizes if name in self.chosen and name not in kept]
        self.task = "verify bytes"
        progress.started(self.task, sum(self.sizes[name] for name in self.names))
        self.readers = Readers(folder, self.names, workers=options.workers, task=self.task, progress=progress)

    def earlier(self, name: str) -> Proof | None:
        """The proof of an earlier check, where it still holds and is of the digest that is wanted."""
        proof = self.book.valid(name)
        return proof if proof is not None and proof.sha256 == self.digests[name].sha256 else None

    def finish(self, report: VerifyReport) -> None:
        """Put what was read, what was proven earlier and what cannot be proven into the report."""
        report.digests = self.origin
        by_name = {file.name: file for file in report.files}
        for name in self.digests:
            if name not in by_name:
                by_name[name] = FileReport(name)
                report.files.append(by_name[name])
                if name not in self.files:
                    _fail(report, by_name[name], f"{name} is missing: its digest is on record", "missing")
        for file in report.files:
            if file.status == "ok" and file.name not in self.digests:
                file.status, file.problem = "unknown", "no digest is known for this file"
        for name in self.sizes.keys() - set(self.names):
            if name in self.proven:
                when = time.localtime(self.proven[name].when)
                by_name[name].proven = time.strftime("%Y-%m-%dT%H:%M:%S", when)
            elif by_name[name].status == "ok":
                by_name[name].status, by_name[name].problem = "unknown", "not in this sample"
        for name, proof in self.readers:
            self.add(report, by_name[name], proof)
        self.progress.finished(self.task)

    def add(self, report: VerifyReport, file: FileReport, proof: Proof | OSError) -> None:
        if isinstance(proof, OSError):
            refused = refusal(proof, self.book.folder / file.name)
            if not isinstance(refused, (CheckpointCorrupt, CheckpointMissing)):
                raise refused from proof  # it may be whole: this process cannot read it
            _fail(report, file, f"{file.name} cannot be read: {proof.strerror or proof}", "corrupt")
            return
        report.bytes_read += proof.size
        wanted = self.digests[file.name].sha256
        if proof.sha256 == wanted:
            self.book.add(proof)
            self.progress.item(f"{file.name}: {format_bytes(proof.size)} ok")
            return
        _fail(report, file, f"{file.name}: sha256 differs (expected {wanted}, found {proof.sha256})", "corrupt")
        self.progress.item(f"{file.name}: WRONG sha256 {proof.sha256}, expected {wanted}")

    def close(self) -> None:
        self.readers.close()


def _fail(report: VerifyReport, file: FileReport, text: str, status: Literal["missing", "corrupt"]) -> None:
    report.problems.append(text)
    file.status = status
    file.problem = file.problem or text
