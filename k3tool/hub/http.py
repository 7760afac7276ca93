"""Byte ranges over HTTP: one GET, its redirects and its answer checked, its body read into the caller's memory.

Plain `http.client`, because bytes go from the socket straight into a reused buffer with the interpreter lock
released. The token travels to the Hub's own address only. Proxies and certificates follow the usual environment.
"""

from __future__ import annotations

import email.utils
import http.client
import re
import socket
import ssl
import threading
import time
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from urllib.parse import urljoin, urlsplit

from k3tool.errors import RemoteError
from k3tool.hub.retry import Transient

CONNECT_TIMEOUT_S = 15.0
MAX_REDIRECTS = 5
ODD_LIMIT = 4  # answers that break the protocol are not asked for more often than this
NEAR_S = 0.002  # a connection made within this time has no use for a deep receive buffer
NEAR_BUFFER = 1 << 18
TRICKLE_BYTES = 1 << 14
SKIP_LIMIT = 1 << 26
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")
_REDIRECTS = (301, 302, 303, 307, 308)


class Refused(Exception):
    """An HTTP status that the caller must judge: which host said it decides what it means."""

    def __init__(self, status: int, url: str, headers: Mapping[str, str]) -> None:
        super().__init__(f"HTTP {status}")
        self.status = status
        self.url = url
        self.headers = headers


def origin(url: str) -> tuple[str, str, int]:
    """(scheme, host, port): where a credential may go is decided on this."""
    split = urlsplit(url)
    return split.scheme, split.hostname or "", split.port or (443 if split.scheme == "https" else 80)


class Connections:
    """Idle connections of one thread, by origin, and every open socket of all threads, so that a stop reaches them."""

    def __init__(self, stall_s: float) -> None:
        self.stall_s = stall_s
        self._idle = threading.local()
        self._lock = threading.Lock()
        self._open: set[http.client.HTTPConnection] = set()
        self.stopped = False
        self.received = 0  # bytes of bodies, over all connections

    def take(self, url: str) -> tuple[http.client.HTTPConnection, bool]:
        """A connection to the origin of `url`, and whether it was used before (and may have been closed meanwhile)."""
        idle: dict[tuple[str, str, int], http.client.HTTPConnection] = self._idle.__dict__.setdefault("pool", {})
        connection = idle.pop(origin(url), None)
        if connection is not None:
            return connection, True
        connection = _connect(url)
        began = time.monotonic()
        try:
            connection.connect()
        except OSError as error:
            connection.close()
            raise Transient(f"no connection to {urlsplit(url).netloc} ({_words(error)})") from None
        is_near = time.monotonic() - began < NEAR_S
        connection.sock.settimeout(self.stall_s)
        if is_near:  # keeps what a killed process had not read yet, and must ask for again, small
            connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, NEAR_BUFFER)
        with self._lock:
            self._open.add(connection)
        if self.stopped:
            self.drop(connection)
            raise Transient("stopped")
        return connection, False

    def keep(self, url: str, connection: http.client.HTTPConnection) -> None:
        self._idle.__dict__.setdefault("pool", {})[origin(url)] = connection

    def drop(self, connection: http.client.HTTPConnection) -> None:
        with self._lock:
            self._open.discard(connection)
        connection.close()

    def count(self, received: int) -> None:
        with self._lock:
            self.received += received

    def stop(self) -> None:
        """End every transfer now, from any thread."""
        self.stopped = True
        with self._lock:
            open_now = list(self._open)
        for connection in open_now:
            with suppress(OSError, AttributeError):
                connection.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with self._lock:
            open_now, self._open = list(self._open), set()
        for connection in open_now:
            connection.close()
        self._idle = threading.local()


class Body:
    """The open answer to one range request: exactly `remaining` bytes are still to come."""

    def __init__(
        self, pool: Connections, connection: http.client.HTTPConnection, response: http.client.HTTPResponse, url: str
    ) -> None:
        self._pool = pool
        self._connection = connection
        self._response = response
        self._url = url
        self.remaining = 0
        self.ignored_range = False  # the server sends the whole file: what is beyond `remaining` is left unread
        self.skipped = 0  # bytes that came although they were not asked for
        self._received = 0
        self._window_began = time.monotonic()
        self._window_bytes = 0
        plain = response.length is not None and not response.chunked
        # One receive per call, so that what arrived is never lost to a later timeout.
        self._receive = response.fp.readinto1 if plain else response.readinto

    def read_into(self, view: memoryview) -> int:
        """Some bytes, at least one. Raises Transient where the connection ends early or brings nothing."""
        try:
            got = self._receive(view[: self.remaining])
        except TimeoutError:
            raise Transient(f"no progress for {self._pool.stall_s:g} s") from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise Transient(f"connection lost ({_words(error)})") from None
        if not got:
            raise Transient(f"connection closed with {self.remaining} bytes still to come")
        self.remaining -= got
        self._received += got
        self._watch(got)
        return got

    def _watch(self, got: int) -> None:
        """A trickle is a stall: less than `TRICKLE_BYTES` in one stall time is no progress."""
        self._window_bytes += got
        now = time.monotonic()
        if now - self._window_began < self._pool.stall_s:
            return
        if self._window_bytes < TRICKLE_BYTES and self.remaining:
            raise Transient(f"no progress for {self._pool.stall_s:g} s ({self._window_bytes} bytes)")
        self._window_began, self._window_bytes = now, 0

    def skip(self, count: int) -> None:
        buffer = memoryview(bytearray(min(count, 1 << 20)))
        self.skipped = 0
        while self.skipped < count:
            self.skipped += self.read_into(buffer[: count - self.skipped])

    def abandon(self) -> None:
        self.remaining = 1
        self.close()

    def close(self) -> None:
        """Keep the connection when the answer was read to its end, else drop it."""
        whole = self.remaining == 0 and self._response.length is not None and not self._response.will_close
        whole = whole and not self._response.chunked and not self.ignored_range
        self._response.close()
        self._pool.count(self._received)
        self._received = 0
        if whole and not self._pool.stopped:
            self._pool.keep(self._url, self._connection)
        else:
            self._pool.drop(self._connection)


def open_range(
    pool: Connections,
    url: str,
    start: int,
    stop: int,
    size: int,
    *,
    headers: Mapping[str, str],
    authorization: str | None,
    home: tuple[str, str, int],
    skip_limit: int = SKIP_LIMIT,
) -> Body:
    """GET bytes [start, stop) of the file of `size` bytes at `url`.

    authorization: sent to the origin `home` and nowhere else, redirects included. skip_limit: how many bytes before
    `start` may be read and thrown away where the server sends the whole file.
    Raises Transient, Refused (4xx that are not about ranges), RemoteError.
    """
    asked = {**headers, "Accept-Encoding": "identity", "Range": f"bytes={start}-{stop - 1}"}
    for _ in range(MAX_REDIRECTS + 1):
        if urlsplit(url).scheme not in ("http", "https"):
            raise RemoteError(f"redirected to {url[:200]}, which is no web address", hint="check HF_ENDPOINT")
        sent = {**asked, "Authorization": authorization} if authorization and origin(url) == home else asked
        connection, response = _request(pool, url, sent)
        if response.status in _REDIRECTS:
            location = response.headers.get("Location")
            pool.drop(connection)
            if not location:
                raise Transient(f"HTTP {response.status} without a Location", limit=ODD_LIMIT)
            url = urljoin(url, location)
            continue
        body = Body(pool, connection, response, url)
        try:
            _check(body, response, start, stop, size, skip_limit)
        except BaseException:
            body.abandon()
            raise
        return body
    raise RemoteError(f"more than {MAX_REDIRECTS} redirects, last to {url[:200]}", hint="check HF_ENDPOINT")


def _request(
    pool: Connections, url: str, headers: Mapping[str, str]
) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    split = urlsplit(url)
    target = (split.path or "/") + (f"?{split.query}" if split.query else "")
    while True:
        connection, used = pool.take(url)
        via = getattr(connection, "k3_proxy", None)  # a proxy for plain HTTP wants the whole address
        try:
            connection.request("GET", target if via is None else url, headers={**headers, **(via or {})})
            return connection, connection.getresponse()
        except TimeoutError:
            pool.drop(connection)
            raise Transient(f"no answer from {split.netloc} for {pool.stall_s:g} s") from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            pool.drop(connection)
            if used and not pool.stopped:  # the server closed an idle connection: no failure yet
                continue
            raise Transient(f"connection to {split.netloc} lost ({_words(error)})") from None


def _check(body: Body, response: http.client.HTTPResponse, start: int, stop: int, size: int, skip_limit: int) -> None:
    """Leave `body` standing at `start` with `stop - start` bytes to come, or raise."""
    status = response.status
    if status == 206:
        found = response.headers.get("Content-Range", "")
        match = _CONTENT_RANGE.fullmatch(found.strip())
        expected = f"bytes {start}-{stop - 1}/{size}"
        if not match or (int(match[1]), int(match[2])) != (start, stop - 1) or match[3] not in (str(size), "*"):
            raise Transient(f"wrong Content-Range (expected {expected!r}, found {found!r})", limit=ODD_LIMIT)
        body.remaining = stop - start
        if response.length is not None and response.length != body.remaining:
            raise Transient(f"wrong Content-Length (expected {stop - start}, found {response.length})", limit=ODD_LIMIT)
        return
    if status == 200:
        if response.headers.get("Content-Encoding", "identity") != "identity":
            raise Transient(f"an encoded answer ({response.headers['Content-Encoding']})", limit=ODD_LIMIT)
        if response.length is not None and response.length != size:
            raise Transient(f"wrong size (expected {size} bytes, found {response.length})", limit=ODD_LIMIT)
        if start > skip_limit:
            raise RemoteError(
                f"{urlsplit(body._url).netloc} ignores Range: it answers with the whole file of {size} bytes",
                hint="name another mirror (HF_ENDPOINT), or fetch the checkpoint whole",
            )
        body.remaining = size
        body.skip(start)
        body.remaining = min(body.remaining, stop - start)
        body.ignored_range = size > stop - start
        return
    if status == 416:
        found = response.headers.get("Content-Range", "no size")
        raise Transient(f"range {start}-{stop - 1} refused (expected {size} bytes, found {found!r})", limit=ODD_LIMIT)
    if status in (408, 425, 429) or status >= 500:
        raise Transient(f"HTTP {status} {response.reason}".rstrip(), retry_after_s=retry_after(dict(response.headers)))
    raise Refused(status, body._url, dict(response.headers))


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds that a server asks to wait: `Retry-After` as seconds or a date, or the Hub's `RateLimit` header."""
    lower = {key.lower(): value for key, value in headers.items()}
    text = lower.get("retry-after", "").strip()
    if text.isascii() and text.isdigit():
        return float(text[:9])
    with suppress(TypeError, ValueError):
        return max(0.0, email.utils.parsedate_to_datetime(text).timestamp() - time.time())
    limited = re.search(r"r\s*=\s*0\s*;\s*t\s*=\s*(\d{1,9})", lower.get("ratelimit", ""))
    return float(limited[1]) if limited else None


def _connect(url: str) -> http.client.HTTPConnection:
    scheme, host, port = origin(url)
    proxy = urllib.request.getproxies().get(scheme) if not urllib.request.proxy_bypass(host) else None
    if not proxy:
        if scheme == "https":
            return http.client.HTTPSConnection(host, port, timeout=CONNECT_TIMEOUT_S, context=_tls())
        return http.client.HTTPConnection(host, port, timeout=CONNECT_TIMEOUT_S)
    via = urlsplit(proxy if "//" in proxy else f"http://{proxy}")
    place = via.hostname or "", via.port or 80
    connection = http.client.HTTPConnection(*place, timeout=CONNECT_TIMEOUT_S)
    if scheme == "https":
        connection = http.client.HTTPSConnection(*place, timeout=CONNECT_TIMEOUT_S, context=_tls())
        connection.set_tunnel(host, port, headers=_proxy_credentials(via.username, via.password))
    else:
        connection.k3_proxy = _proxy_credentials(via.username, via.password)  # type: ignore[attr-defined]
    return connection


def _proxy_credentials(user: str | None, password: str | None) -> dict[str, str]:
    if not user:
        return {}
    import base64
    from urllib.parse import unquote

    text = f"{unquote(user)}:{unquote(password or '')}".encode()
    return {"Proxy-Authorization": "Basic " + base64.b64encode(text).decode()}


@cache
def _tls() -> ssl.SSLContext:
    context = ssl.create_default_context()
    if not context.cert_store_stats()["x509_ca"]:  # a machine without its own certificates
        with suppress(ImportError):
            import certifi

            context.load_verify_locations(certifi.where())
    return context


def _words(error: BaseException) -> str:
    return str(getattr(error, "strerror", None) or error or type(error).__name__)
