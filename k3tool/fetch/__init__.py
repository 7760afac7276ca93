"""A checkpoint from the Hub into a folder: once, whole and proven.

    result = fetch("moonshotai/Kimi-K3", "DIR")

A killed fetch continues where it was; nothing has its final name before its digest is right; the manifest says what
was proven and against what. Files are described in `target`, moved in `transfer`, kept together in `session`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from k3tool.checkpoint.index import INDEX_NAME
from k3tool.checkpoint.ledger import Ledger, job_id, read_marks
from k3tool.checkpoint.own import is_own
from k3tool.checkpoint.reader import CONFIG_NAME
from k3tool.config import K3Config, parse_config
from k3tool.disk import refusal
from k3tool.errors import CapacityError, CheckpointCorrupt, CheckpointMissing, K3Error, UsageError, tell
from k3tool.events import SILENT, Progress
from k3tool.fetch.folder import (
    LAYER_LIMIT,
    another_commit,
    check_space,
    free_space,
    guard_folder,
    is_same_work,
    other_partials,
    remove_replaced,
    survey,
    write_manifest,
)
from k3tool.fetch.index_text import RemoteIndex, read_proven
from k3tool.fetch.local import FolderSource, local_folder
from k3tool.fetch.select import select
from k3tool.fetch.session import Session, check_release, structure_of
from k3tool.fetch.shrink import Choice, Shrinker
from k3tool.fetch.structure import Structure
from k3tool.fetch.target import Target, whole_file
from k3tool.fetch.transfer import Outcome
from k3tool.hub import HubSource, Listing, RetryPolicy
from k3tool.hub.retry import Clock
from k3tool.units import format_ranges, parse_ranges, parse_size

__all__ = ["FetchResult", "fetch"]

DEFAULT_REPO = "moonshotai/Kimi-K3"
DEFAULT_WORKERS = 8
BASE_MEMORY = 96 << 20  # Python, the Hub client, and one shard's header being parsed
WORKER_MEMORY = 4 << 20
RATES = (50_000_000, 125_000_000, 500_000_000, 1_250_000_000)  # bytes per second, for the dry run


@dataclass
class FetchResult:
    """What was done, or for a dry run what would be. Sizes in bytes.

    verified: what the files were compared with: `sha256` and `git-sha1` of the Hub's list, `release-sha256` of the
    built-in table, `headers` against index and configuration, `sizes` alone. files_unfinished, bytes_unfinished: what
    an earlier, wider choice of files had begun and this one did not ask for; it is kept. is_whole: the folder now holds a
    checkpoint, not a part of the files of one.
    """

    repo: str
    revision: str
    files: list[Outcome]
    bytes_fetched: int = 0
    seconds: float = 0.0
    verified: list[str] = field(default_factory=list)
    unproven: list[str] = field(default_factory=list)
    dry_run: bool = False
    bytes_needed: int = 0
    bytes_free: int | None = None
    files_unfinished: int = 0
    bytes_unfinished: int = 0
    is_whole: bool = True

    @property
    def fits(self) -> bool:
        return self.bytes_free is None or self.bytes_needed <= self.bytes_free

    @property
    def is_local(self) -> bool:
        """Whether a folder was read, and no repository; `revision` then stands for its files' names, sizes and times."""
        return os.path.isabs(self.repo)

    @property
    def bytes_total(self) -> int:
        return sum(file.size for file in self.files)

    def as_json(self) -> dict[str, Any]:
        document: dict[str, Any] = {
            "repo": self.repo,
            "revision": self.revision,
            "files": [
                {"name": f.name, "bytes": f.size, "status": f.status, "sha256": f.sha256, "origin": f.origin}
                for f in self.files
            ],
            "bytes_fetched": self.bytes_fetched,
            "bytes_total": self.bytes_total,
            "seconds": round(self.seconds, 3),
            "verified": self.verified,
            "unproven": self.unproven,
            "files_unfinished": self.files_unfinished,
            "bytes_unfinished": self.bytes_unfinished,
            "whole": self.is_whole,
        }
        if self.dry_run:
            document |= {
                "dry_run": True,
                "shards": sum(file.name.endswith(".safetensors") for file in self.files),
                "bytes_shards": sum(file.size for file in self.files if file.name.endswith(".safetensors")),
                "bytes_needed": self.bytes_needed,
                "bytes_free": self.bytes_free,
                "fits": self.fits,
                "hours_at": {str(rate): round(self.bytes_needed / rate / 3600, 3) for rate in RATES},
            }
        return document


def fetch(
    repo: str,
    local_dir: str | Path,
    *,
    revision: str | None = None,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    layers: str | None = None,
    text_only: bool = False,
    max_workers: int | None = None,
    max_memory: str | None = None,
    verify: bool = True,
    dry_run: bool = False,
    overwrite: bool = False,
    reuse: Sequence[str | Path] = (),
    endpoint: str | None = None,
    token: str | bool | None = None,
    policy: RetryPolicy | None = None,
    clock: Clock | None = None,
    progress: Progress = SILENT,
) -> FetchResult:
    """Bring a revision of `repo`, or what is asked of it, into `local_dir`. repo: `org/name`, or a folder (`./name`).

    include, exclude: globs over file names. layers: `0-3,7`, a smaller checkpoint of those layers. text_only: without
    the vision tower. verify False: sizes instead of digests. reuse: folders that may already hold files of it.
    policy, clock: patience with the network. Raises UsageError, PartlyDone (the folder is in use), CheckFailed (a
    digest differs twice), CheckpointMissing, CheckpointCorrupt, CapacityError, RemoteError.
    """
    if layers is not None:
        layers = format_ranges(parse_ranges(layers, what="layers", limit=LAYER_LIMIT, option="--layers"))
    here = local_folder(repo)
    if here is not None and revision is not None:
        raise UsageError(f"--revision {revision} is of a repository, and {repo} is a folder", hint="leave it out")
    local = FolderSource(here, Path(local_dir)) if here is not None else None
    repo = local.repo if local is not None else repo
    request = _Request(repo, Path(local_dir), tuple(include), tuple(exclude), layers, text_only, verify, overwrite)
    source: HubSource | FolderSource = local or HubSource(
        repo, revision, endpoint=endpoint, token=token, policy=policy, clock=clock, tell=progress.warn
    )
    try:
        workers = _workers(max_workers or DEFAULT_WORKERS, max_memory)
        return _Fetch(request, source, workers, tuple(map(Path, reuse)), progress).run(dry_run)
    except OSError as error:
        raise refusal(error, error.filename or request.folder, "use") from error
    finally:
        source.close()


@dataclass(frozen=True)
class _Request:
    repo: str
    folder: Path
    include: tuple[str, ...]
    exclude: tuple[str, ...]
    layers: str | None
    text_only: bool
    verify: bool
    overwrite: bool

    @property
    def identity(self) -> str:
        """Runs that may continue each other: the choice of files may change, what is made of them may not."""
        return job_id(["fetch", self.repo, self.layers, self.text_only])

    @property
    def command(self) -> str:
        words = ["fetch", self.repo, *(["--layers", self.layers] if self.layers else [])]
        return " ".join([*words, *(["--text-only"] if self.text_only else [])])


class _Fetch:
    def __init__(
        self,
        request: _Request,
        source: HubSource | FolderSource,
        workers: int,
        reuse: tuple[Path, ...],
        progress: Progress,
    ) -> None:
        self.request = request
        self.source = source
        self.workers = workers
        self.reuse = reuse
        self.progress = progress
        self.began = time.monotonic()

    def run(self, dry_run: bool) -> FetchResult:
        request, source = self.request, self.source
        listing = source.listing
        is_release = check_release(listing, source.label)
        guard_folder(request.folder, request.repo, listing.commit, self._extra(), overwrite=request.overwrite)
        targets = self._targets(listing)
        synced = {} if request.overwrite else read_marks(request.folder)
        found = survey(request.folder, targets, synced)
        free = free_space(request.folder)
        if dry_run:
            return self._planned(targets, found.partial, found.whole, found.remaining, free)
        check_space(request.folder, found.needed, free)
        facts = {"commit": listing.commit}
        ledger = Ledger(request.folder, request.identity, request.command, facts=facts, overwrite=request.overwrite)
        with ledger:
            begun = str(ledger.facts.get("commit"))
            if begun != listing.commit:
                raise another_commit(
                    request.folder, begun, listing.commit, "holds an unfinished fetch of", repo=request.repo
                )
            session = Session(
                source,
                request.folder,
                targets,
                workers=self.workers,
                verify=request.verify,
                overwrite=request.overwrite,
                reuse=self.reuse,
                progress=self.progress,
                structure=(lambda _: None) if self._shrinks else structure_of,
            )
            try:
                outcomes = session.run(ledger)
            except (K3Error, KeyboardInterrupt) as error:
                tell(error, self._document(session))
                refused = isinstance(error, (CheckpointCorrupt, CheckpointMissing, UsageError))
                if refused and "errno" not in error.details and ledger.is_new and not request.overwrite:
                    session.undo()
                raise
            before = session.manifest
            write_manifest(request.folder, request.repo, listing.commit, outcomes, session.targets, self._extra())
            if before is not None and not is_same_work(before, request.repo, self._extra()):
                remove_replaced(request.folder, before, session.targets)
            unfinished = other_partials(ledger.state, session.targets)
            if not unfinished:
                ledger.complete()
        return self._result(outcomes, is_release, unfinished)

    @property
    def _shrinks(self) -> bool:
        return self.request.layers is not None or self.request.text_only

    def _targets(self, listing: Listing) -> list[Target]:
        request, source = self.request, self.source
        if not self._shrinks:
            wanted = select(listing.files, request.include, request.exclude, source.label, self.progress.warn)
            return [whole_file(name, file) for name, file in wanted.items()]
        if self.reuse:
            self.progress.warn(
                "--reuse takes over whole files only: shards that are made of parts come over the network"
            )
        config_text = read_proven(source, CONFIG_NAME)
        config = K3Config.from_bytes(config_text, where=f"{source.label}/{CONFIG_NAME}")
        layers = None
        if request.layers is not None:
            layers = parse_ranges(request.layers, what="layers", limit=config.num_layers, option="--layers")
        index = RemoteIndex(source)
        shards = {name: file.size for name, file in listing.files.items() if name.endswith(".safetensors")}
        structure = Structure(source.label, config, index if INDEX_NAME in listing.files else None, shards)
        choice = Choice(layers, vision=not request.text_only)
        document = parse_config(config_text, where=f"{source.label}/{CONFIG_NAME}")
        made = Shrinker(source, structure, choice, index).targets(document, self.workers)
        rest = {n: f for n, f in listing.files.items() if n not in shards and n not in (CONFIG_NAME, INDEX_NAME)}
        others = select(rest, request.include, request.exclude, source.label, self.progress.warn) if rest else {}
        return [*made, *(whole_file(name, file) for name, file in others.items())]

    def _extra(self) -> dict[str, object]:
        extra: dict[str, object] = {}
        if self.request.layers is not None:
            extra["layers"] = self.request.layers
        if self.request.text_only:
            extra["text_only"] = True
        return extra

    def _planned(
        self, targets: list[Target], partial: dict[str, int], whole: dict[str, int], needed: int, free: int | None
    ) -> FetchResult:
        def status(name: str) -> str:
            return "kept" if name in whole else "resumed" if name in partial else "fetched"

        files = [Outcome(t.name, t.size, status(t.name), t.expected.sha256 if t.expected else None) for t in targets]
        return FetchResult(
            self.request.repo,
            self.source.commit,
            files,
            seconds=time.monotonic() - self.began,
            dry_run=True,
            bytes_needed=needed,
            bytes_free=free,
        )

    def _result(self, outcomes: list[Outcome], is_release: bool, unfinished: Mapping[Path, int]) -> FetchResult:
        proven = {outcome.proven for outcome in outcomes if outcome.proven}
        verified = sorted(proven)
        if is_release and "sha256" in proven:
            verified.append("release-sha256")
        if any(outcome.name.endswith(".safetensors") for outcome in outcomes):
            verified.append("headers")
        unproven = [outcome.name for outcome in outcomes if not outcome.proven]
        if unproven:
            verified.append("sizes")
        return FetchResult(
            self.request.repo,
            self.source.commit,
            outcomes,
            self.source.connections.received,
            time.monotonic() - self.began,
            verified,
            unproven,
            files_unfinished=len(unfinished),
            bytes_unfinished=sum(unfinished.values()),
            is_whole=self._is_whole(),
        )

    def _is_whole(self) -> bool:
        """Whether configuration and every shard are in the folder, whatever this run was asked for."""
        if self._shrinks:
            return True
        needed = {name for name in self.source.listing.files if name.endswith(".safetensors") or name == INDEX_NAME}
        return all((self.request.folder / name).is_file() for name in {CONFIG_NAME, *needed} if not is_own(name))

    def _document(self, session: Session) -> dict[str, Any]:
        files = [session.outcomes[name] for name in sorted(session.outcomes)]
        done = FetchResult(
            self.request.repo,
            self.source.commit,
            files,
            self.source.connections.received,
            time.monotonic() - self.began,
        ).as_json()
        done["bytes_total"] = sum(target.size for target in session.targets.values())
        return done


def _workers(wanted: int, max_memory: str | None) -> int:
    """As many workers as the bound on resident memory allows. Raises CapacityError where it allows none."""
    if max_memory is None:
        return wanted
    bound = parse_size(max_memory)
    allowed = (bound - BASE_MEMORY) // WORKER_MEMORY
    if allowed < 1:
        raise CapacityError(
            f"--max-memory {max_memory} ({bound} bytes) is below the {BASE_MEMORY + WORKER_MEMORY} bytes that one worker needs",
            hint=f"give --max-memory {BASE_MEMORY + WORKER_MEMORY} or more",
        )
    return min(wanted, allowed)
