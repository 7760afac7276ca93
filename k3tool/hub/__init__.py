"""A checkpoint on the Hub as a Source: one pinned commit, read by byte ranges. The only package that uses the network.

    source = HubSource("org/name")
    source.files(); source.read("config.json"); source.read(shard, offset, length)

Reads are retried (see `retry`), exact, and bounded in memory; `open` gives the fetch command an open body instead.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from k3tool.commands import command
from k3tool.errors import CheckpointMissing, K3Error, RemoteError
from k3tool.events import aside
from k3tool.hub.cache import cached_snapshot, list_snapshot
from k3tool.hub.connect import origin
from k3tool.hub.http import SKIP_LIMIT, Body, Connections, Refused, open_range
from k3tool.hub.listing import Listing, RemoteFile
from k3tool.hub.remote import (
    Hub,
    authorization,
    endpoint_of,
    find_address,
    is_offline,
    judge_content,
    list_revision,
    offline_error,
    user_agent,
)
from k3tool.hub.retry import Clock, Retry, RetryPolicy, Stopped, SystemClock, Transient

__all__ = ["HubSource", "Listing", "RemoteFile", "RetryPolicy", "Stopped", "SystemClock", "Transient"]

SMALL_FILE = 1 << 20
PATH_PATIENCE_S = 8.0


class HubSource:
    """`repo` at `revision` (a branch, tag or commit; None is the default branch), resolved to a commit on first use.

    token: None uses the stored token or HF_TOKEN, False sends none. tell: hears of failures that are waited out.
    meant_path: what the user typed, where that may be a mistyped path: a Hub that cannot be reached is then given up
    soon. While HF_HUB_OFFLINE is set, the listing is that of the Hub client's cache. Safe to use from several threads.
    """

    def __init__(
        self,
        repo: str,
        revision: str | None = None,
        *,
        endpoint: str | None = None,
        token: str | bool | None = None,
        policy: RetryPolicy | None = None,
        clock: Clock | None = None,
        tell: Callable[[str], object] = aside,
        meant_path: str | None = None,
    ) -> None:
        self.repo = repo
        self.revision = revision
        self.label = f"{repo}@{revision}" if revision else repo
        self.endpoint = endpoint_of(endpoint)
        self.policy = policy or RetryPolicy()
        self.clock: Clock = clock or SystemClock()
        self.tell = tell
        self.connections = Connections(self.policy.stall_s, word_s=self.policy.word_s)
        self.began = self.clock.now()
        self.meant_path = meant_path
        self._hub = Hub(self.connections, self.endpoint, token)
        self._lock = threading.RLock()
        self._listing: Listing | None = None
        self._addresses: dict[str, str] = {}
        self._small: dict[str, bytes] = {}

    # -- the Source protocol --

    def files(self) -> dict[str, int]:
        return {name: file.size for name, file in self.listing.files.items()}

    def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        size = self.remote(name).size
        if length is None:
            length = max(0, size - offset)
        if size <= SMALL_FILE:
            whole = self._small.get(name)
            if whole is None:
                buffer = bytearray(size)
                self._fill(name, 0, memoryview(buffer))
                whole = self._small.setdefault(name, bytes(buffer))
            if offset + length > size:
                raise self._beyond(name, offset, length, size)
            return whole[offset : offset + length]
        buffer = bytearray(length)
        self.read_into(name, offset, memoryview(buffer))
        return bytes(buffer)

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        size = self.remote(name).size
        if offset + len(buffer) > size:
            raise self._beyond(name, offset, len(buffer), size)
        whole = self._small.get(name)
        if whole is not None:
            buffer.cast("B")[:] = whole[offset : offset + len(buffer)]
            return
        self._fill(name, offset, buffer.cast("B"))

    def local_path(self, name: str) -> Path | None:
        return None

    # -- for fetch --

    @property
    def listing(self) -> Listing:
        """Commit and files. Raises RemoteError, CheckpointCorrupt, CheckpointMissing."""
        with self._lock:
            if self._listing is None:
                try:
                    self._listing = self._list_offline() if is_offline() else self._list()
                except K3Error as error:
                    self.close()
                    if self.meant_path is not None and isinstance(error, RemoteError):
                        error.message += f"; and there is no folder {self.meant_path} here"
                        error.args = (error.message,)
                    raise
            return self._listing

    def _list(self) -> Listing:
        retry = self.retry()
        if self.meant_path is not None and self.policy == RetryPolicy():
            retry.policy = RetryPolicy(patience_s=PATH_PATIENCE_S)
        while True:
            try:
                return list_revision(self._hub, self.repo, self.revision)
            except Transient as error:
                retry.failed(error, self.label)

    def _list_offline(self) -> Listing:
        """What the Hub client's cache holds of the revision. Raises RemoteError where that is nothing."""
        snapshot = cached_snapshot(self.repo, self.revision)
        if snapshot is None:
            raise offline_error(f"{self.label} at {self.endpoint}")
        return list_snapshot(snapshot, self.label)

    @property
    def commit(self) -> str:
        return self.listing.commit

    def remote(self, name: str) -> RemoteFile:
        file = self.listing.files.get(name)
        if file is None:
            raise CheckpointMissing(
                f"{self.label} at commit {self.commit[:12]} has no file {name}",
                hint=f"see what it holds: {command('inspect', self.label)}",
            )
        return file

    def small(self, name: str) -> bytes | None:
        """A small file that was read before, from memory."""
        return self._small.get(name)

    def retry(self) -> Retry:
        return Retry(self.policy, self.clock, self.began, tell=self.tell)

    def open(self, name: str, start: int, stop: int, *, skip_limit: int = SKIP_LIMIT) -> Body:
        """One attempt at bytes [start, stop), start < stop. Raises Transient, RemoteError, CheckpointCorrupt."""
        file = self.remote(name)
        if is_offline():
            raise offline_error(f"{self.label} {name} at {self.endpoint}")
        token = authorization(self._hub.token)
        try:
            return open_range(
                self.connections,
                self._address(name, file),
                start,
                stop,
                file.size,
                headers={"User-Agent": user_agent()},
                authorization=token,
                home=origin(self.endpoint),
                skip_limit=skip_limit,
            )
        except Refused as refused:
            self.forget_address(name)
            what = f"{self.repo}@{self.commit[:12]} {name}"
            raise judge_content(refused, what, self.endpoint, token_sent=token is not None) from None

    def forget_address(self, name: str) -> None:
        """The next `open` asks the Hub for a fresh address."""
        with self._lock:
            self._addresses.pop(name, None)

    def close(self) -> None:
        self.connections.close()

    def stop(self) -> None:
        """End every transfer and every wait now; called from any thread."""
        stop = getattr(self.clock, "stop", None)
        if stop is not None:
            stop.set()
        self.connections.stop()

    def _address(self, name: str, file: RemoteFile) -> str:
        with self._lock:
            known = self._addresses.get(name)
        if known is None:
            known = find_address(self._hub, self.repo, self.commit, name, file)
            with self._lock:
                self._addresses[name] = known
        return known

    def _fill(self, name: str, offset: int, buffer: memoryview) -> None:
        retry = self.retry()
        done = 0
        while done < len(buffer):
            body = None
            try:
                body = self.open(name, offset + done, offset + len(buffer))
                while done < len(buffer):
                    got = body.read_into(buffer[done:])
                    done += got
                    retry.progressed(got)
            except Transient as error:
                if not error.stale_address:
                    self.forget_address(name)
                retry.failed(error, f"{self.label} {name}")
            finally:
                if body is not None:
                    body.close()

    def _beyond(self, name: str, offset: int, length: int, size: int) -> CheckpointMissing:
        return CheckpointMissing(
            f"{self.label}: {name} has {size} bytes, needed up to {offset + length}",
            hint=f"see what it holds: {command('inspect', self.label)}",
        )
