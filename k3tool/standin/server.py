"""The stand-in's routes: what the Hub answers to the official client, over two local ports.

The first port is the Hub (API and `resolve`), the second the storage to which `resolve` redirects large files with a
signed address. Bodies go out by `sendfile`.
"""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

from k3tool.standin.faults import Fault
from k3tool.standin.repo import BLOCK, HubFile, Repo

if TYPE_CHECKING:
    from k3tool.standin import StandIn

SLOW_BLOCK = 1 << 16
_ID = r"(?P<repo>[\w.-]+/[\w.-]+)"
_INFO = re.compile(rf"/api/models/{_ID}(?:/revision/(?P<rev>[^/]+))?")
_TREE = re.compile(rf"/api/models/{_ID}/tree/(?P<rev>[^/]+)(?:/(?P<path>.*))?")
_PATHS = re.compile(rf"/api/models/{_ID}/paths-info/(?P<rev>[^/]+)")
_REFS = re.compile(rf"/api/models/{_ID}/refs")
_RESOLVE = re.compile(rf"/{_ID}/resolve/(?P<rev>[^/]+)/(?P<path>.+)")
_CACHED = re.compile(rf"/api/resolve-cache/models/{_ID}/(?P<rev>[^/]+)/(?P<path>.+)")
_DATA = re.compile(rf"/repos/{_ID}/(?P<digest>[0-9a-f]{{64}})")
_RANGE = re.compile(r"bytes=(\d*)-(\d*)")


class Server(ThreadingHTTPServer):
    """One port. Open connections are known, so that closing the stand-in ends stalled ones too."""

    daemon_threads = False
    block_on_close = True
    request_queue_size = 128

    def __init__(self, hub: StandIn, role: str, port: int = 0) -> None:
        self.hub = hub
        self.role = role
        self.open_connections: set[socket.socket] = set()
        super().__init__(("127.0.0.1", port), Handler)

    def get_request(self) -> tuple[socket.socket, Any]:
        connection, address = super().get_request()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self.hub.rate is not None:  # so that what was sent is close to what has arrived
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SLOW_BLOCK)
        self.open_connections.add(connection)
        return connection, address

    def shutdown_request(self, request: Any) -> None:
        self.open_connections.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that leaves is everyday business, not news for the terminal."""

    def drop_connections(self) -> None:
        for connection in list(self.open_connections):
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server  # type: ignore[assignment]

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._dispatch()

    def do_GET(self) -> None:
        self._dispatch()

    def do_POST(self) -> None:
        self._dispatch()

    def _dispatch(self) -> None:
        self.hub = self.server.hub
        self.entry = self.hub.note(self.server.role, self.command, self.path, dict(self.headers.items()))
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.hub.dark:
            self._hang_up()
            return
        path = unquote(urlsplit(self.path).path)
        routes: list[tuple[re.Pattern[str], Callable[..., None]]] = (
            [(_DATA, self._data)]
            if self.server.role == "data"
            else [(_RESOLVE, self._resolve), (_CACHED, self._cached), (_TREE, self._tree), (_PATHS, self._paths),
                  (_REFS, self._refs), (_INFO, self._info)]
        )  # fmt: skip
        for pattern, answer in routes:
            match = pattern.fullmatch(path)
            if match:
                answer(match, body) if answer == self._paths else answer(match)
                return
        self._error(404, "EntryNotFound", "no such route")

    # -- the API --

    def _repo(self, match: re.Match[str], *, content: bool = False) -> Repo | None:
        """The repository at the asked revision; answers the error itself and returns None where there is none."""
        fault = None if content else self.hub.faults.take("api", match.string, self.command)
        if fault is not None:
            self._failed(fault)
            return None
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if token and self.hub.tokens is not None and token not in self.hub.tokens:
            self._error(401, None, "Invalid credentials in Authorization header")
            return None
        repo = self.hub.repos.get(match["repo"])
        revision = unquote(match.groupdict().get("rev") or "main")
        if repo is None or (repo.private and token not in repo.readers):
            self._error(404 if token else 401, "RepoNotFound", "Repository not found")
        elif repo.gated and content and token not in repo.readers:
            self._error(403 if token else 401, "GatedRepo", f"Access to model {repo.repo_id} is restricted")
        elif not repo.knows(revision):
            self._error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        else:
            return repo
        return None

    def _info(self, match: re.Match[str]) -> None:
        repo = self._repo(match)
        if repo is None:
            return
        blobs = "blobs" in parse_qs(urlsplit(self.path).query)
        siblings = [file.as_sibling() if blobs else {"rfilename": name} for name, file in repo.files.items()]
        self._json(
            {
                "_id": repo.commit[:24],
                "id": repo.repo_id,
                "modelId": repo.repo_id,
                "author": repo.repo_id.split("/")[0],
                "sha": repo.commit,
                "private": repo.private,
                "gated": "manual" if repo.gated else False,
                "disabled": False,
                "downloads": 0,
                "likes": 0,
                "tags": ["safetensors"],
                "lastModified": "2026-07-27T00:00:00.000Z",
                "createdAt": "2026-07-27T00:00:00.000Z",
                "siblings": siblings,
            }
        )

    def _tree(self, match: re.Match[str]) -> None:
        repo = self._repo(match)
        if repo is None:
            return
        base = f"{match['path']}/" if match["path"] else ""
        recursive = parse_qs(urlsplit(self.path).query).get("recursive", ["false"])[0].lower() == "true"
        inside = {name: file for name, file in repo.files.items() if name.startswith(base)}
        folders = sorted({base + name[len(base) :].split("/")[0] for name in inside if "/" in name[len(base) :]})
        entries: list[dict[str, object]] = [
            {"type": "directory", "path": f, "size": 0, "oid": "0" * 40} for f in folders
        ]
        if recursive:
            entries = []
        entries += [f.as_tree_entry() for n, f in inside.items() if recursive or "/" not in n[len(base) :]]
        self._json(entries, {"X-Repo-Commit": repo.commit})

    def _paths(self, match: re.Match[str], body: bytes) -> None:
        repo = self._repo(match)
        if repo is None:
            return
        if (self.headers.get("Content-Type") or "").startswith("application/json"):
            wanted = json.loads(body)["paths"]
        else:
            wanted = parse_qs(body.decode()).get("paths", [])
        self._json([repo.files[name].as_tree_entry() for name in wanted if name in repo.files])

    def _refs(self, match: re.Match[str]) -> None:
        repo = self._repo(match)
        if repo is not None:
            branches = [{"name": "main", "ref": "refs/heads/main", "targetCommit": repo.commit}]
            self._json({"branches": branches, "tags": [], "converts": [], "pullRequests": []})

    # -- the content --

    def _resolve(self, match: re.Match[str]) -> None:
        """Small files by a relative redirect, large ones by a signed address on the other port, as the Hub does."""
        repo = self._repo(match, content=True)
        if repo is None:
            return
        name = unquote(match["path"])
        file = repo.files.get(name)
        if file is None:
            self._error(404, "EntryNotFound", f"Entry not found: {name}")
            return
        fault = self.hub.faults.take("resolve", name, self.command)
        if fault is not None and self._failed(fault):
            return
        commit = "f" * 40 if fault is not None and fault.kind == "wrong_commit" else repo.commit
        headers = {"X-Repo-Commit": commit, "X-Linked-Size": str(file.size), "X-Linked-Etag": f'"{file.etag}"'}
        if file.is_lfs:
            address = self.hub.sign(repo, file)
            self._send(302, {**headers, "Location": address, "Content-Length": "0"})
        else:
            target = f"/api/resolve-cache/models/{repo.repo_id}/{commit}/{quote(name)}"
            self._send(307, {**headers, "Location": target, "Content-Length": "0"})

    def _cached(self, match: re.Match[str]) -> None:
        repo = self._repo(match, content=True)
        if repo is None:
            return
        file = repo.files.get(unquote(match["path"]))
        if file is None:
            self._error(404, "EntryNotFound", "Entry not found")
        else:
            self._content(file, {"X-Repo-Commit": repo.commit})

    def _data(self, match: re.Match[str]) -> None:
        """The storage: knows no tokens, only signatures, and those expire."""
        signature = parse_qs(urlsplit(self.path).query).get("Signature", [""])[0]
        if not self.hub.is_valid(signature):
            self._send(403, {"Content-Type": "application/xml"}, b"<Error><Code>AccessDenied</Code></Error>")
            return
        repo = self.hub.repos.get(match["repo"])
        file = (
            next((f for f in repo.files.values() if f.is_lfs and f.sha256 == match["digest"]), None) if repo else None
        )
        if file is None:
            self._send(404, {"Content-Length": "0"})
        else:
            self._content(file, {})

    def _content(self, file: HubFile, headers: dict[str, str]) -> None:
        fault = self.hub.faults.take("data", file.name, self.command)
        if fault is not None and self._failed(fault):
            return
        kind = fault.kind if fault is not None else None
        size = file.size if kind != "short" or fault is None else fault.after
        start, stop, partial = 0, size, False
        asked = _RANGE.fullmatch(self.headers.get("Range") or "")
        if asked and kind != "ignore_range" and asked.group(0) != "bytes=-":
            first, last = asked.groups()
            start = int(first) if first else max(0, size - int(last))
            stop = min(size, int(last) + 1) if first and last else size
            partial = True
            if start >= size:
                self._send(416, {"Content-Range": f"bytes */{size}", "Content-Length": "0"})
                return
        headers = {**headers, "ETag": f'"{file.etag}"', "Accept-Ranges": "bytes", "Content-Length": str(stop - start)}
        headers["Content-Type"] = "application/octet-stream"
        if partial:
            shift = 1 if kind == "wrong_content_range" else 0
            headers["Content-Range"] = f"bytes {start + shift}-{stop - 1 + shift}/{size}"
        self._send(206 if partial else 200, headers)
        if self.command != "HEAD":
            self._body(file, start, stop, fault)

    def _body(self, file: HubFile, start: int, stop: int, fault: Fault | None) -> None:
        kind = fault.kind if fault is not None else None
        end = stop
        if fault is not None and kind in ("drop", "stall", "drip"):
            end = min(stop, start + fault.after)
        if kind is None and self.hub.rate is None and hasattr(file.content, "open"):
            self._sendfile(file, start, stop)
            return
        position = start
        for data in file.blocks(start, end, SLOW_BLOCK if self.hub.rate else BLOCK):
            if fault is not None and kind == "flip" and position <= fault.after < position + len(data):
                changed = bytearray(data)
                changed[fault.after - position] ^= 1
                data = bytes(changed)
            self._write(data)
            position += len(data)
            if self.hub.rate:
                self.hub.wait(len(data) / self.hub.rate)
        if end < stop and fault is not None:
            if kind == "drip":
                for data in file.blocks(end, stop, 1):
                    if self.hub.wait(fault.seconds):
                        break
                    self._write(data)
            elif kind == "stall":
                self.hub.wait(3600)
            self._hang_up()

    def _sendfile(self, file: HubFile, start: int, stop: int) -> None:
        with open(file.content, "rb", buffering=0) as source:  # type: ignore[arg-type]
            while start < stop:
                count = min(8 * BLOCK, stop - start)
                # Counted before, so that a client that has it all never finds the count behind.
                self.entry.sent += count
                try:
                    sent = self.connection.sendfile(source, start, count)
                except OSError:
                    self.entry.sent -= count - (source.tell() - start)
                    raise
                self.entry.sent -= count - sent
                if not sent:
                    self._hang_up()
                    return
                start += sent

    def _write(self, data: bytes) -> None:
        self.entry.sent += len(data)
        self.connection.sendall(data)

    # -- answers --

    def _failed(self, fault: Fault) -> bool:
        """Answer a fault that replaces the content. False: the fault belongs to the body."""
        if fault.kind == "refuse":
            self._hang_up()
        elif fault.kind == "status":
            self._send(fault.status, fault.headers, b"told to fail")
        elif fault.kind == "raw":
            self.connection.sendall(fault.raw)
            while fault.again and not self.hub.wait(fault.seconds):
                self.connection.sendall(fault.again)
            self._hang_up()
        else:
            return False
        return True

    def _hang_up(self) -> None:
        self.close_connection = True
        try:
            self.connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            return

    def _json(self, document: object, headers: dict[str, str] | None = None) -> None:
        self._send(
            200, {"Content-Type": "application/json; charset=utf-8", **(headers or {})}, json.dumps(document).encode()
        )

    def _error(self, status: int, code: str | None, message: str) -> None:
        headers = {"X-Error-Message": message, "Content-Type": "application/json; charset=utf-8"}
        if code:
            headers["X-Error-Code"] = code
        self._send(status, headers, json.dumps({"error": message}).encode())

    def _send(self, status: int, headers: dict[str, str], body: bytes = b"") -> None:
        self.entry.status = status
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        if "Content-Length" not in headers:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if body and self.command != "HEAD":
            self.wfile.write(body)
