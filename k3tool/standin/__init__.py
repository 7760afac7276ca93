"""A small Hub on this machine, for the demo, the tests and the benchmarks: real routes, and misbehaviour on demand.

    with serve(folder, repo_id="org/name") as hub:
        fetch("org/name", target, endpoint=hub.endpoint)

It listens on 127.0.0.1 only. Large files are redirected to a second port with a signed address, as the Hub redirects
them to its storage. `hub.faults` holds the rules of misbehaviour, `hub.requests` what was asked and answered.
`python -m k3tool.standin FOLDER` serves a folder from a process of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from urllib.parse import urlencode

from k3tool.standin.faults import Fault, Faults
from k3tool.standin.repo import HubFile, Repo, commit_of, read_folder
from k3tool.standin.server import Server

__all__ = ["Fault", "HubFile", "Repo", "Request", "StandIn", "serve"]


@dataclass
class Request:
    """One request: `role` is the port that got it (`hub` or `data`), `sent` the bytes of file content sent back."""

    role: str
    method: str
    path: str
    headers: dict[str, str] = field(default_factory=dict)
    status: int = 0
    sent: int = 0


class StandIn:
    """Two ports and any number of repositories. Use `serve`, or as a context manager after `add`.

    tokens: the credentials that exist; None accepts any. rate: bytes per second of each connection; None is unbounded.
    """

    def __init__(self, *, tokens: set[str] | None = None, rate: float | None = None, port: int = 0) -> None:
        self.repos: dict[str, Repo] = {}
        self.faults = Faults()
        self.requests: list[Request] = []
        self.tokens = tokens
        self.rate = rate
        self.dark = False  # True: connections are closed without an answer, as if the network were gone
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._issued = 0
        self._expired = 0
        self._servers = [Server(self, "hub", port), Server(self, "data")]
        self._threads: list[threading.Thread] = []

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._servers[0].server_port}"

    @property
    def data_endpoint(self) -> str:
        return f"http://127.0.0.1:{self._servers[1].server_port}"

    @property
    def bytes_sent(self) -> int:
        """File content sent so far, over all requests."""
        return sum(request.sent for request in list(self.requests))

    def add(
        self,
        repo_id: str,
        content: Path | str | Mapping[str, HubFile],
        *,
        commit: str | None = None,
        gated: bool = False,
        private: bool = False,
        readers: set[str] | None = None,
    ) -> Repo:
        """Serve a folder, or files listed by hand, as `repo_id`; a second call moves `main` to the new content."""
        files = dict(content) if isinstance(content, Mapping) else read_folder(Path(content))
        repo = Repo(repo_id, files, commit or commit_of(files), gated, private, readers or set())
        self.repos[repo_id] = repo
        return repo

    def go_dark(self) -> None:
        """The network is gone: open connections break, new ones get no answer."""
        self.dark = True
        for server in self._servers:
            server.drop_connections()

    def come_back(self) -> None:
        self.dark = False

    def expire_addresses(self) -> None:
        """Every signed address handed out so far is refused with 403 from now on."""
        with self._lock:
            self._expired = self._issued

    def __enter__(self) -> StandIn:
        for server in self._servers:
            thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
            thread.start()
            self._threads.append(thread)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping.set()
        for server, thread in zip(self._servers, self._threads, strict=True):
            server.shutdown()
            server.drop_connections()
            server.server_close()
            thread.join()

    # -- for the handlers --

    def note(self, role: str, method: str, path: str, headers: dict[str, str]) -> Request:
        request = Request(role, method, path, {key.lower(): value for key, value in headers.items()})
        self.requests.append(request)
        return request

    def wait(self, seconds: float) -> bool:
        """Sleep; True at once when the stand-in is closing."""
        return self._stopping.wait(seconds)

    def sign(self, repo: Repo, file: HubFile) -> str:
        with self._lock:
            self._issued += 1
            query = urlencode({"X-Amz-Expires": 3600, "Signature": self._issued})
        return f"{self.data_endpoint}/repos/{repo.repo_id}/{file.sha256}?{query}"

    def is_valid(self, signature: str) -> bool:
        return signature.isdigit() and self._expired < int(signature) <= self._issued


@contextmanager
def serve(
    folder: Path | str | Mapping[str, HubFile],
    repo_id: str = "moonshotai/Kimi-K3",
    *,
    commit: str | None = None,
    gated: bool = False,
    private: bool = False,
    readers: set[str] | None = None,
    tokens: set[str] | None = None,
    rate: float | None = None,
    port: int = 0,
) -> Iterator[StandIn]:
    """Serve one repository from free ports of 127.0.0.1 until the block is left."""
    hub = StandIn(tokens=tokens, rate=rate, port=port)
    hub.add(repo_id, folder, commit=commit, gated=gated, private=private, readers=readers)
    with hub:
        yield hub
