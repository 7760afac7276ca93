"""One fetch from beginning to end: what is wanted, what is there, does it fit, bring the rest, prove it, write it down."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path

from k3tool import release
from k3tool.checkpoint.index import INDEX_NAME
from k3tool.checkpoint.ledger import Ledger
from k3tool.checkpoint.manifest import FileRecord
from k3tool.checkpoint.reader import CONFIG_NAME
from k3tool.config import K3Config
from k3tool.disk import disk_errors
from k3tool.errors import CheckFailed, CheckpointCorrupt, CheckpointMissing, K3Error, UsageError
from k3tool.events import Progress
from k3tool.fetch.folder import manifest_of
from k3tool.fetch.index_text import RemoteIndex, from_folder, read_proven
from k3tool.fetch.local import FolderSource
from k3tool.fetch.partial import was_brought
from k3tool.fetch.reuse import adopt, belongs, candidates, hash_file
from k3tool.fetch.structure import Structure
from k3tool.fetch.target import Target
from k3tool.fetch.transfer import TASK, Job, Outcome, fetch_target, proof
from k3tool.hub import HubSource, Listing, RemoteFile, Stopped
from k3tool.units import format_bytes

CHECK_TASK = "check what is here"


def check_release(listing: Listing, label: str) -> bool:
    """Whether this commit is one of the release; its file list must then agree with the built-in table."""
    if listing.commit not in release.revisions():
        return False
    for name, record in {**release.shards(), **release.other_files()}.items():
        found = listing.files.get(name)
        if found is None:
            raise CheckpointCorrupt(
                f"{label}: the file list of the released commit {listing.commit[:12]} lacks {name}",
                hint="check HF_ENDPOINT",
            )
        seen = (found.size, found.sha256 or record.sha256)
        if seen != (record.size, record.sha256):
            raise CheckpointCorrupt(
                f"{name}: the Hub's file list and the built-in table of the release disagree "
                f"(built-in {record.size} bytes {record.sha256}, Hub {seen[0]} bytes {seen[1]})",
                hint="do not trust this endpoint: check HF_ENDPOINT, or upgrade k3tool",
                file=name,
                expected=record.sha256,
                found=seen[1],
            )
    return True


class Session:
    """Brings `targets` into `folder` under a ledger. `run` returns the outcome of every one."""

    def __init__(
        self,
        source: HubSource | FolderSource,
        folder: Path,
        targets: Sequence[Target],
        *,
        workers: int,
        verify: bool,
        overwrite: bool,
        reuse: Sequence[Path],
        progress: Progress,
        structure: Callable[[Session], Structure | None],
    ) -> None:
        self.source = source
        self.folder = folder
        self.targets = {target.name: target for target in targets}
        self.workers = workers
        self.verify = verify
        self.overwrite = overwrite
        self.reuse = reuse
        self.progress = progress
        self.outcomes: dict[str, Outcome] = {}
        self.failures: list[CheckFailed] = []
        self.manifest = manifest_of(folder)
        self._make_structure = structure
        self._lock = threading.Lock()

    def run(self, ledger: Ledger) -> list[Outcome]:
        """Raises what stopped it; files that arrived wrong twice are named after all others are done."""
        self.job = Job(self.source, self.folder, ledger, self.progress, self.verify)
        self._check_present()
        missing = [target for target in self.targets.values() if target.name not in self.outcomes]
        self._adopt(missing)
        missing = [target for target in missing if target.name not in self.outcomes]
        self.progress.started(TASK, sum(target.size for target in missing))
        first = [target for target in missing if target.name in (CONFIG_NAME, INDEX_NAME)]
        self._fetch(sorted(first, key=lambda target: target.name != CONFIG_NAME), workers=1)
        self.job.structure = self._make_structure(self)
        if self.job.structure is not None:
            self._check_headers_present(self.job.structure)
        self._fetch([target for target in missing if target not in first], workers=self.workers)
        self.progress.finished(TASK)
        if self.failures:
            raise self._failed()
        return [self.outcomes[name] for name in sorted(self.outcomes)]

    def undo(self) -> None:
        """After a refusal: leave the folder as this run found it, unless there is a shard in it now."""
        brought = [
            outcome.name for outcome in self.outcomes.values() if outcome.status != "kept" or outcome.origin != "disk"
        ]
        if any(self.targets[name].is_shard for name in brought):
            return
        for name in brought:
            (self.folder / name).unlink(missing_ok=True)
            for folder in (self.folder / name).relative_to(self.folder).parents:
                with contextlib.suppress(OSError):
                    (self.folder / folder).rmdir()
        self.job.ledger.abandon()

    # -- what is here --

    def _check_present(self) -> None:
        """Prove the files that have their final name; remove wrong ones that are ours to replace."""
        present = [target for target in self.targets.values() if (self.folder / target.name).is_file()]
        to_hash: list[Target] = []
        for target in present:
            done = self.job.ledger.done.get(target.name)
            if done is not None and done.size == target.size:
                self._keep(target, done.sha256)
            else:
                to_hash.append(target)
        self.progress.started(CHECK_TASK, sum(t.size for t in to_hash) if self.verify else 0)
        self._each(to_hash, self._check_one, self.workers)
        self.progress.finished(CHECK_TASK)

    def _check_one(self, target: Target) -> None:
        path = self.folder / target.name
        with disk_errors(path):
            size = path.stat().st_size
        if size != target.size:
            self._replace(target, f"has {size} bytes, expected {target.size}")
        elif not self.verify:
            self._keep(target, None)
        else:
            digests = hash_file(path, size, self._expected_of(target), self._counted(CHECK_TASK))
            mismatch = digests.mismatch()
            if mismatch is not None:
                self._replace(target, f"{mismatch[0]} differs (expected {mismatch[1]}, found {mismatch[2]})")
            elif target.expected is None and not self._is_ours(target):
                self._replace(target, "has no known digest")
            else:
                self._keep(target, digests.sha256)

    def _is_ours(self, target: Target) -> bool:
        """Whether a file that nothing is published for was made here."""
        if self._recorded(target.name) is not None:
            return True
        with disk_errors(self.folder / target.name):
            return was_brought(self.job.ledger, target.name, target.size)

    def _recorded(self, name: str) -> FileRecord | None:
        manifest = self.manifest
        return manifest.files.get(name) if manifest is not None and manifest.source == self.source.repo else None

    def _expected_of(self, target: Target) -> RemoteFile | None:
        """The published digest; for a file made of ranges the one that this folder's manifest remembers."""
        if target.expected is not None:
            return target.expected
        record = self._recorded(target.name)
        return RemoteFile(record.size, record.sha256) if record is not None else None

    def _replace(self, target: Target, problem: str) -> None:
        """Remove a wrong file, if it is known to have come from here. Raises UsageError otherwise."""
        path = self.folder / target.name
        if not self.overwrite and not belongs(self.folder, target.name, self.source.repo, self.manifest):
            raise UsageError(
                f"{path} is not what {self.source.label} holds under that name: it {problem}",
                hint="name an empty folder, or add --overwrite to replace it",
            )
        self.progress.warn(f"{target.name} {problem}; fetching it again")
        with disk_errors(path, "remove"):
            path.unlink()

    def _keep(self, target: Target, sha256: str | None, origin: str = "disk") -> None:
        proven = proof(target, self.verify and sha256 is not None)
        if sha256 is not None:
            self.job.ledger.record(target.name, target.size, sha256)
        with self._lock:
            self.outcomes[target.name] = Outcome(target.name, target.size, "kept", sha256, origin, proven)

    def _check_headers_present(self, structure: Structure) -> None:
        for name, outcome in list(self.outcomes.items()):
            if outcome.status == "kept" and name.endswith(".safetensors") and self.targets[name].expected is not None:
                with disk_errors(self.folder / name), open(self.folder / name, "rb") as file:
                    prefix = file.read(8)
                    length = int.from_bytes(prefix, "little")
                    text = file.read(min(length, outcome.size))
                structure.check_header(name, text, outcome.size)

    def _adopt(self, missing: Sequence[Target]) -> None:
        """Take over what the Hub cache or a named folder already holds, after hashing it."""
        work: list[tuple[Target, list[Path]]] = []
        for target in missing:
            if target.expected is not None and target.expected.etag:
                found = list(candidates(self.source.repo, target.name, target.expected, self.reuse))
                found = [path for path in found if path.resolve() != (self.folder / target.name).resolve()]
                if found:
                    work.append((target, found))
        if not work:
            return
        task = "check the cache"
        self.progress.started(task, sum(target.size for target, _ in work))

        def take(item: tuple[Target, list[Path]]) -> None:
            target, paths = item
            for path in paths:
                digests = hash_file(path, target.size, target.expected, self._counted(task))
                if digests.mismatch() is None:
                    how = adopt(path, self.folder / target.name, self.job.ledger.state, target.name)
                    self._keep(target, digests.sha256, origin=how)
                    self.progress.item(f"{target.name} {format_bytes(target.size)} taken from {path} ({how})")
                    return
                self.progress.warn(f"{path} is damaged and not used")

        self._each(work, take, self.workers)
        self.progress.finished(task)

    # -- what is not --

    def _fetch(self, targets: Sequence[Target], workers: int) -> None:
        def one(target: Target) -> None:
            try:
                outcome = fetch_target(self.job, target)
            except CheckFailed as error:
                with self._lock:
                    self.failures.append(error)
                self.progress.warn(error.message)
                return
            with self._lock:
                self.outcomes[target.name] = outcome

        self._each(targets, one, workers)

    def _each(self, items: Sequence[object], work: Callable[..., None], workers: int) -> None:
        """Run `work` on every item; the first failure ends the others at their next block, and is raised."""
        if not items:
            return
        pool = ThreadPoolExecutor(min(workers, len(items)), thread_name_prefix="fetch")
        try:
            waiting: set[Future[None]] = {pool.submit(work, item) for item in items}
            while waiting:
                done, waiting = wait(waiting, timeout=0.5, return_when=FIRST_COMPLETED)
                for future in done:
                    future.result()
        except BaseException:
            self.job.stop.set()
            self.source.stop()
            raise
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def _counted(self, task: str) -> Callable[[int], None]:
        def on_bytes(count: int) -> None:
            if self.job.stop.is_set():
                raise Stopped
            self.progress.advanced(task, count)

        return on_bytes

    def _failed(self) -> K3Error:
        first = self.failures[0]
        more = f" (and {len(self.failures) - 1} more files)" if len(self.failures) > 1 else ""
        return CheckFailed(f"{first.message}{more}, twice", hint=first.hint, **first.details)


def structure_of(session: Session) -> Structure | None:
    """What the commit's own configuration and index imply, or None where no tensor file is wanted."""
    if not any(target.is_shard for target in session.targets.values()):
        return None
    files = session.source.listing.files
    label = session.source.label
    if CONFIG_NAME not in files:
        raise CheckpointMissing(
            f"{label} has no {CONFIG_NAME}, so it is no Kimi K3 checkpoint", hint="check the name of the repository"
        )
    if CONFIG_NAME in session.outcomes:
        with disk_errors(session.folder / CONFIG_NAME):
            text = (session.folder / CONFIG_NAME).read_bytes()
    else:
        text = read_proven(session.source, CONFIG_NAME)
    config = K3Config.from_bytes(text, where=f"{label}/{CONFIG_NAME}")
    shards = {name: file.size for name, file in files.items() if name.endswith(".safetensors")}
    index = from_folder(session.folder) if INDEX_NAME in session.outcomes else RemoteIndex(session.source)
    return Structure(label, config, index if INDEX_NAME in files else None, shards)
