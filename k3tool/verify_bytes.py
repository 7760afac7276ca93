"""Depth bytes of `k3tool verify`: the digests that are known for a folder, and the reading that compares with them."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from pathlib import Path

from k3tool.checkpoint.manifest import MANIFEST_NAME, FileRecord, load_manifest
from k3tool.checkpoint.reader import Checkpoint
from k3tool.disk import refusal
from k3tool.errors import CheckpointCorrupt, CheckpointMissing
from k3tool.events import Progress
from k3tool.proofs import Proof, ProofBook, Readers, choose_sample
from k3tool.units import format_bytes
from k3tool.verify_report import FileReport, VerifyReport, fail

_SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)


@dataclass(frozen=True)
class BytesOptions:
    """full: trust no earlier proof. sample: read only this share (0..1) of the bytes, another one each time."""

    workers: int = 4
    full: bool = False
    sample: float | None = None


def known_digests(checkpoint: Checkpoint) -> tuple[dict[str, FileRecord], str]:
    """Expected size and SHA-256 per file, and the words that say where they came from."""
    folder = Path(checkpoint.source.label)
    manifest = load_manifest(folder)
    if manifest is not None:
        return dict(manifest.files), f"the manifest of k3tool {manifest.command}"
    from k3tool import release
    from k3tool.hub.cache import blob_digests

    recorded = _downloaded_digests(folder)
    if release.same_architecture(checkpoint.config) and set(release.shards()) == set(checkpoint.shards):
        others = {name: r for name, r in release.other_files().items() if name in checkpoint.files}
        return {**recorded, **others, **release.shards()}, "the built-in table of the release"
    if not recorded and (blobs := blob_digests(folder)):
        return blobs, "the names of the Hub cache's blobs"
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


def _of_ranks(checkpoint: Checkpoint, ranks: list[str]) -> tuple[dict[str, FileRecord], str]:
    """Digests of some ranks' files, each from the rank's own manifest, and of what lies beside their folders."""
    folder = Path(checkpoint.source.label)
    whole = load_manifest(folder)
    found = {name: r for name, r in (whole.files if whole else {}).items() if name in checkpoint.files}
    digests = {name: record for name, record in found.items() if "/" not in name}
    origin = f"the manifest of k3tool {whole.command}" if whole else ""
    for rank in ranks:
        own = load_manifest(folder / rank)
        if own is not None:
            digests.update({f"{rank}/{name}": record for name, record in own.files.items()})
            itself = f"{rank}/{MANIFEST_NAME}"
            digests.update({itself: found[itself]} if itself in found else {})
            origin = origin or f"the manifest of k3tool {own.command}"
        elif whole is not None:
            digests.update({name: r for name, r in whole.files.items() if name.startswith(f"{rank}/")})
    return digests, origin


class Reading:
    """Depth bytes: files are read from the moment this is made, while names and headers are still being looked at."""

    def __init__(
        self, checkpoint: Checkpoint, options: BytesOptions, progress: Progress, ranks: list[str] | None = None
    ) -> None:
        """ranks: the rank folders that are looked at, None for all that the digests name."""
        self.digests, self.origin = known_digests(checkpoint) if ranks is None else _of_ranks(checkpoint, ranks)
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
                    fail(report, by_name[name], f"{name} is missing: its digest is on record", "missing")
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
            fail(report, file, refused.message, "corrupt")
            report.remedy = report.remedy or refused.hint  # the disk, not another copy
            return
        report.bytes_read += proof.size
        wanted = self.digests[file.name].sha256
        if proof.sha256 == wanted:
            self.book.add(proof)
            self.progress.item(f"{file.name}: {format_bytes(proof.size)} ok")
            return
        fail(report, file, f"{file.name}: sha256 differs (expected {wanted}, found {proof.sha256})", "corrupt")
        self.progress.item(f"{file.name}: WRONG sha256 {proof.sha256}, expected {wanted}")

    def close(self) -> None:
        self.readers.close()
