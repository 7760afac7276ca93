"""What a verification found: every file's status, every problem, and the failure to raise for them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from k3tool.checkpoint.origin import Origin, again
from k3tool.errors import CheckpointCorrupt, CheckpointMissing, K3Error
from k3tool.units import plural

Depth = Literal["names", "headers", "bytes"]
DEPTHS: tuple[Depth, ...] = ("names", "headers", "bytes")


@dataclass
class FileReport:
    """status: ok, missing, corrupt, or unknown (bytes depth: no digest to compare with, or not in the sample)."""

    name: str
    status: Literal["ok", "missing", "corrupt", "unknown"] = "ok"
    problem: str = ""
    proven: str = ""  # when an earlier check read this file, where this one relied on it
    stray: bool = False  # no shard of the index, and in the way of those


@dataclass
class VerifyReport:
    source: str
    depth: Depth
    files: list[FileReport] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    bytes_read: int = 0
    seconds: float = 0.0
    digests: str = ""  # where the expected digests came from
    remedy: str = ""  # what mends it, where that is known better than from the names of the files
    warnings: list[str] = field(default_factory=list)  # what loaders may stumble over and this check does not
    known: Origin | None = None  # where such files are published, where the folder itself does not say

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
            "warnings": self.warnings,
        }

    def error(self) -> K3Error:
        """The failure to raise for a report that is not ok: missing (exit 10) only where nothing is corrupt."""
        corrupt = [file for file in self.files if file.status == "corrupt"]
        kind = (
            CheckpointCorrupt if corrupt or all(file.status != "missing" for file in self.files) else CheckpointMissing
        )
        named = [file.problem for file in corrupt if file.problem] or self.problems
        first = named[0]
        more = f" (and {plural(len(self.problems) - 1, 'more problem')})" if len(self.problems) > 1 else ""
        bad = [file for file in self.files if file.status in ("corrupt", "missing")]
        names = sorted({file.name for file in bad if not file.stray})
        if bad and not names:
            return kind(first + more, hint=f"move {bad[0].name} out of the folder").with_document(self.as_json())
        hint = self.remedy or (
            again(self.source, names, known=self.known, overwrite=bool(corrupt))
            if names
            else "config.json, index and shards are not of one checkpoint: take all three from the same revision"
        )
        return kind(first + more, hint=hint).with_document(self.as_json())


def fail(report: VerifyReport, file: FileReport, text: str, status: Literal["missing", "corrupt"]) -> None:
    """Put a problem of one file into the report."""
    report.problems.append(text)
    file.status = status
    file.problem = file.problem or text
