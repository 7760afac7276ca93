"""A checkpoint on the Hub as a Source: one pinned commit, read by byte ranges. The only package that uses the network.

    source = HubSource("org/name")
    source.files(); source.read("config.json"); source.read(shard, offset, length)

Reads are retried (see `retry`), exact, and bounded in memory; `open` gives the fetch command an open body instead.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from k3tool.errors import CheckpointMissing
from k3tool.hub.http import SKIP_LIMIT, Body, Connections, Refused, open_range, origin
from k3tool.hub.remote import (
    Listing,
    RemoteFile,
    authorization,
    endpoint_of,
    find_address,
    is_offline,
    judge_content,
    list_revision,
    offline_error,
)
from k3tool.hub.retry import Clock, Retry, RetryPolicy, Stopped, SystemClock, Transient

__all__ = ["HubSource", "Listing", "RemoteFile", "RetryPolicy", "Stopped", "SystemClock", "Transient"]

SMALL_FILE = 1 << 20


class HubSource:
    """`repo` at `revision` (a branch, tag or commit; None is the default branch), resolved to a commit on first use.

    token: None uses the stored token or HF_TOKEN, False sends none. Safe to use from several threads.
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
        tell: Callable[[str], object] = lambda _: None,
    ) -> None:
        self.repo = repo
        self.revision = revision
        self.label = f"{repo}@{revision}" if revision else repo
        self.endpoint = endpoint_of(endpoint)
        self.policy = policy or RetryPolicy()
        self.clock: Clock = clock or SystemClock()
        self.tell = tell
        self.connections = Connections(self.policy.stall_s)
        self.began = self.clock.now()
        self._token = token
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
        self._fill(name, offset, buffer.cast("B"))

    def local_path(self, name: str) -> Path | None:
        return None

    # -- for fetch --

    @property
    def listing(self) -> Listing:
        """Commit and files. Raises RemoteError, CheckpointCorrupt."""
        with self._lock:
            if self._listing is None:
                if is_offline():
                    raise offline_error(f"{self.label} at {self.endpoint}")
                retry = self.retry()
                while self._listing is None:
                    try:
                        self._listing = list_revision(self.repo, self.revision, self.endpoint, self._token)
                    except Transient as error:
                        retry.failed(error, self.label)
                    except ImportError as error:
                        raise CheckpointMissing(
                            f"the Hub cannot be used: {error}", hint="install huggingface_hub"
                        ) from None
            return self._listing

    @property
    def commit(self) -> str:
        return self.listing.commit

    def remote(self, name: str) -> RemoteFile:
        file = self.listing.files.get(name)
        if file is None:
            raise CheckpointMissing(
                f"{self.label} at commit {self.commit[:12]} has no file {name}", hint="k3tool inspect lists what it has"
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
        token = authorization(self._token)
        try:
            return open_range(
                self.connections,
                self._address(name, file),
                start,
                stop,
                file.size,
                headers={"User-Agent": _user_agent()},
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
            known = find_address(self.repo, self.commit, name, file, self.endpoint, self._token)
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
            f"{self.label}: {name} has {size} bytes, needed up to {offset + length}", hint="k3tool inspect checks it"
        )


def _user_agent() -> str:
    from huggingface_hub.utils import build_hf_headers

    return build_hf_headers(token=False, library_name="k3tool").get("user-agent", "k3tool")
