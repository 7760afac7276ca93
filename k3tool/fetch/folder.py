"""The local folder: what it holds, whether it may be written to and has room, and the manifest that it ends with."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from k3tool.checkpoint.ledger import LEDGER_FOLDER
from k3tool.checkpoint.manifest import MANIFEST_NAME, FileRecord, Manifest, is_as_recorded, load_manifest
from k3tool.checkpoint.writer import PARTIAL_SUFFIX
from k3tool.disk import disk_errors, free_bytes
from k3tool.errors import CapacityError, CheckpointCorrupt, UsageError
from k3tool.fetch.partial import partial_path, trusted_length
from k3tool.fetch.target import Target
from k3tool.fetch.transfer import Outcome
from k3tool.units import format_bytes, format_ranges, parse_ranges

LAYER_LIMIT = 1 << 16


@dataclass
class Survey:
    """What the folder holds of the wanted files, by size alone. Bytes by file."""

    whole: dict[str, int] = field(default_factory=dict)
    partial: dict[str, int] = field(default_factory=dict)
    missing: dict[str, int] = field(default_factory=dict)
    replaced: int = 0  # held by files of the wrong size, which go before theirs are fetched

    @property
    def remaining(self) -> int:
        return sum(self.missing.values())

    @property
    def needed(self) -> int:
        """Bytes that the disk must still have room for."""
        return max(0, self.remaining - self.replaced)


def survey(folder: Path, targets: Iterable[Target], synced: Mapping[str, tuple[int, str]]) -> Survey:
    found = Survey()
    for target in targets:
        path = folder / target.name
        with disk_errors(path):
            size = path.stat().st_size if path.is_file() else None
        if size == target.size:
            found.whole[target.name] = target.size
            continue
        found.replaced += size or 0
        there = min(
            trusted_length(partial_path(folder / LEDGER_FOLDER, target.name), synced.get(target.name)), target.size
        )
        if there:
            found.partial[target.name] = there
        found.missing[target.name] = target.size - there
    return found


def other_partials(state: Path, names: Iterable[str]) -> dict[Path, int]:
    """Unfinished files of this job that are none of `names`, with their lengths; empty ones are removed."""
    ours = {partial_path(state, name) for name in names}
    found: dict[Path, int] = {}
    for path in sorted(state.glob(f"*{PARTIAL_SUFFIX}")):
        if path in ours or not path.is_file():
            continue
        if size := path.stat().st_size:
            found[path] = size
        else:
            path.unlink()
    return found


def free_space(folder: Path) -> int | None:
    """Bytes that may still be written where `folder` is or will be; None where the file system does not say."""
    place = folder.absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    return free_bytes(place)


def check_space(folder: Path, needed: int, free: int | None) -> None:
    """Raises CapacityError where `needed` more bytes do not fit."""
    if free is not None and needed > free:
        raise too_little_space(folder, needed, free)


def too_little_space(folder: Path, needed: int, free: int) -> CapacityError:
    return CapacityError(
        f"{folder}: {format_bytes(needed)} ({needed} bytes) still to fetch, {format_bytes(free)} ({free} bytes) free",
        hint="free space, name a folder on another disk, or fetch less (--text-only, --layers, --include)",
        needed=needed,
        free=free,
    )


def write_manifest(
    folder: Path,
    repo: str,
    commit: str,
    outcomes: Sequence[Outcome],
    targets: Mapping[str, Target],
    extra: Mapping[str, object],
) -> None:
    """The folder's manifest: what was there of the same commit, and what this run brought or proved."""
    files: dict[str, FileRecord] = {}
    before = manifest_of(folder)
    if before is not None and before.revision == commit and is_same_work(before, repo, extra):
        files = {n: r for n, r in before.files.items() if (folder / n).is_file()}
    unproven = []
    for outcome in outcomes:
        expected = targets[outcome.name].expected
        sha256 = outcome.sha256 or (expected.sha256 if expected else None)
        if outcome.sha256 is None:
            unproven.append(outcome.name)
        if sha256:
            files[outcome.name] = FileRecord(outcome.size, sha256)
    document = {**extra, **({"unproven": sorted(unproven)} if unproven else {})}
    Manifest("fetch", repo, commit, files, document).write(folder)


def guard_folder(folder: Path, repo: str, commit: str, made: Mapping[str, object], *, overwrite: bool) -> None:
    """Refuse a folder of another repository or commit, or of another smaller checkpoint. Raises UsageError."""
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file, not a folder", hint="name a folder for --local-dir")
    manifest = manifest_of(folder)
    if manifest is None or overwrite:
        return
    other = "name another folder, or add --overwrite to replace what differs"
    if manifest.source != repo or manifest.command != "fetch":
        raise UsageError(f"{folder} holds {manifest.source} ({manifest.command}), not a fetch of {repo}", hint=other)
    if manifest.revision is not None and manifest.revision != commit:
        raise another_commit(folder, manifest.revision, commit, "was fetched at", repo=repo)
    if not is_same_work(manifest, repo, made):
        raise UsageError(f"{folder} holds {_says(manifest.extra)} of {repo}, not {_says(made)}", hint=other)


def is_same_work(manifest: Manifest, repo: str, made: Mapping[str, object]) -> bool:
    """Whether a folder was fetched from this repository in this form (whole, some layers, text only)."""
    forms = [(_layers(extra.get("layers")), bool(extra.get("text_only"))) for extra in (manifest.extra, made)]
    return manifest.source == repo and manifest.command == "fetch" and forms[0] == forms[1]


def _layers(text: object) -> object:
    """`0,1` and `0-1` are the same layers. What is no list of layers stays as it is."""
    with contextlib.suppress(UsageError):
        return format_ranges(parse_ranges(text, what="layers", limit=LAYER_LIMIT)) if isinstance(text, str) else text
    return text


def _says(made: Mapping[str, object]) -> str:
    if "layers" in made:
        return f"layers {made['layers']}" + (" without vision" if made.get("text_only") else "")
    return "the text model" if made.get("text_only") else "the whole model"


def remove_replaced(folder: Path, before: Manifest | None, targets: Iterable[str]) -> None:
    """After --overwrite with another checkpoint: files that the former manifest names and the new one does not."""
    files = before.files if before else {}
    for name in sorted(set(files) - set(targets)):
        if is_as_recorded(folder, name, files[name]):
            with disk_errors(folder / name, "remove"):
                (folder / name).unlink()


def another_commit(folder: Path, before: str, now: str, verb: str, *, repo: str = "") -> UsageError:
    if os.path.isabs(repo):
        return UsageError(
            f"{folder} {verb} another state of {repo}: names, sizes or times of its files have changed since",
            hint="add --overwrite to replace what differs, or name another folder",
            expected=before,
            found=now,
        )
    return UsageError(
        f"{folder} {verb} commit {before}, the repository is now at commit {now}",
        hint=f"add --revision {before} to stay with it, or --overwrite to move this folder to the new commit",
        expected=before,
        found=now,
    )


def manifest_of(folder: Path) -> Manifest | None:
    if not (folder / MANIFEST_NAME).is_file():
        return None
    with contextlib.suppress(CheckpointCorrupt):
        return load_manifest(folder)
    return None
