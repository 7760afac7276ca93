"""Byte ranges over HTTP: one GET, its redirects and its answer checked, its body read into the caller's memory.

Plain `http.client`, because bytes go from the socket straight into a reused buffer with the interpreter lock
released. The token travels to the Hub's own address only. File lists, addresses and data take the same way: one rule
for proxies, one for certificates, one bound on what an answer may be.
"""

from __future__ import annotations

import email.utils
import http.client
import re
import socket
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import urlsplit

from k3tool.errors import RemoteError
from k3tool.events import aside
from k3tool.hub.connect import follow, is_address, new_connection, origin, proxy_refused, unreachable, words
from k3tool.hub.proxy import Proxy, proxy_for
from k3tool.hub.retry import Transient
from k3tool.hub.wire import CODINGS, Decoder, Response, Waiting, response_class

MAX_REDIRECTS = 5
ODD_LIMIT = 4  # answers that break the protocol are not asked for more often than this
NEAR_S = 0.002  # a connection made within this time has no use for a deep receive buffer
NEAR_BUFFER = 1 << 18
SKIP_LIMIT = 1 << 26
FRAMING = 8  # a chunked body may be so many times as long as what it holds, and this much longer in any case:
FRAMING_BYTES = 1 << 20
WORD_S = 5.0  # who waits for longer is told so
_CONTENT_RANGE = re.compile(r"bytes[ =](\d{1,19})-(\d{1,19})/(\d{1,19}|\*)", re.ASCII | re.IGNORECASE)
OTHER_SERVER = "the server breaks the protocol, and goes on to: name another mirror (HF_ENDPOINT)"
REDIRECTS = (301, 302, 303, 307, 308)


class Refused(Exception):
    """An HTTP status that the caller must judge: which host said it decides what it means."""

    def __init__(self, status: int, url: str, headers: Mapping[str, str]) -> None:
        super().__init__(f"HTTP {status}")
        self.status = status
        self.url = url
        self.headers = headers


class Connections:
    """Idle connections of one thread, by origin, and every open socket of all threads, so that a stop reaches them."""

    def __init__(self, stall_s: float, *, word_s: float = WORD_S, tell: Callable[[str], object] = aside) -> None:
        """stall_s: how long a server may bring nothing. word_s: after how much of that `tell` hears of it."""
        self.stall_s = stall_s
        self.waiting = Waiting(word_s, tell)
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
        scheme, host, port = origin(url)
        proxy = proxy_for(scheme, host, port)
        connection = new_connection(url, proxy)
        connection.response_class = response_class(self.stall_s, self.waiting, urlsplit(url).netloc)
        with self._announced(str(proxy) if proxy else urlsplit(url).netloc):
            began = time.monotonic()
            try:
                connection.connect()
            except (OSError, ValueError, http.client.HTTPException) as error:
                connection.close()
                raise unreachable(url, proxy, error) from None
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

    @contextmanager
    def _announced(self, host: str) -> Iterator[None]:
        """A block that cannot look at the clock itself; said where it takes long."""
        since = time.monotonic()
        timer = threading.Timer(self.waiting.after_s, self.waiting.for_host, (host, since))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

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

    def __del__(self) -> None:
        """Whoever reads a few headers and lets a source go leaves no open socket."""
        self.close()

    def close(self) -> None:
        with self._lock:
            open_now, self._open = list(self._open), set()
        for connection in open_now:
            connection.close()
        self._idle = threading.local()


class Body:
    """The open answer to one range request: exactly `remaining` bytes are still to come."""

    def __init__(self, pool: Connections, connection: http.client.HTTPConnection, response: Any, url: str) -> None:
        self._pool = pool
        self._connection = connection
        self._response: Response = response
        self._url = url
        self.remaining = 0
        self.ignored_range = False  # the server sends the whole file: what is beyond `remaining` is left unread
        self.skipped = 0  # bytes that came although they were not asked for
        self._received = 0
        plain = response.length is not None and not response.chunked
        # One receive per call, so that what arrived is never lost to a later timeout.
        self._receive: Callable[[memoryview], int] = response.fp.readinto1 if plain else response.readinto
        self.coded = False

    def expect(self, count: int, framing: int = FRAMING) -> None:
        """So many bytes are to come, and little more may: `framing` times as many in chunks."""
        self.remaining = count
        self._response.wire.begin_body(framing * count + FRAMING_BYTES)

    def decode(self, coding: str) -> None:
        """What comes is undone on its way: `gzip` or `deflate`, that some servers send whatever is asked."""
        self._receive = Decoder(self._receive, CODINGS[coding]).readinto
        self.coded = True

    def read_into(self, view: memoryview) -> int:
        """Some bytes, at least one. Raises Transient where the connection ends early or brings nothing."""
        try:
            got = self._receive(view[: self.remaining])
        except TimeoutError as error:
            raise Transient(f"no progress for {self._pool.stall_s:g} s{error}") from None
        except zlib.error as error:
            raise Transient(f"a damaged coding of the answer ({error})", limit=ODD_LIMIT) from None
        except (OSError, http.client.HTTPException, ValueError, AssertionError) as error:
            raise Transient(f"connection lost ({words(error)})") from None
        if not got:
            raise Transient(f"connection closed with {self.remaining} bytes still to come", ended=True)
        self.remaining -= got
        self._received += got
        return got

    def skip(self, count: int) -> None:
        buffer = memoryview(bytearray(min(count, 1 << 20)))
        self.skipped = 0
        while self.skipped < count:
            self.skipped += self.read_into(buffer[: count - self.skipped])

    def uncount(self) -> None:
        """This is no content of a file: it does not count as received."""
        self._received = 0

    def abandon(self) -> None:
        self.remaining = 1
        self.close()

    def close(self) -> None:
        """Keep the connection when the answer was read to its end, else drop it."""
        whole = self.remaining == 0 and self._response.length is not None and not self._response.will_close
        whole = whole and not self._response.chunked and not self.ignored_range and not self.coded
        self._response.close()
        self._pool.count(self._received)
        self._received = 0
        if whole and not self._pool.stopped:
            self._pool.keep(self._url, self._connection)
        else:
            self._pool.drop(self._connection)


def coding_of(response: http.client.HTTPResponse) -> str:
    """`Content-Encoding`, in small letters; empty for identity."""
    found = (response.headers.get("Content-Encoding") or "").strip().lower()
    return "" if found == "identity" else found[:40]


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
        if not is_address(url):
            raise RemoteError(f"redirected to {url[:200]!r}, which is no web address", hint="check HF_ENDPOINT")
        sent = {**asked, "Authorization": authorization} if authorization and origin(url) == home else asked
        connection, response = request(pool, url, sent)
        if response.status in REDIRECTS:
            location = response.headers.get("Location")
            response.close()
            pool.drop(connection)
            if not location:
                raise Transient(f"HTTP {response.status} without a Location", limit=ODD_LIMIT)
            url = follow(url, location)
            continue
        if response.status == 206 and coding_of(response) and "Range" in asked and (start, stop) == (0, size):
            response.close()
            pool.drop(connection)  # a coded range says nothing; a coded whole can be undone
            del asked["Range"]
            continue
        body = Body(pool, connection, response, url)
        try:
            _check(body, response, start, stop, size, skip_limit)
        except BaseException:
            body.abandon()
            raise
        return body
    raise RemoteError(f"more than {MAX_REDIRECTS} redirects, last to {url[:200]}", hint="check HF_ENDPOINT")


def request(
    pool: Connections, url: str, headers: Mapping[str, str], method: str = "GET"
) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    split = urlsplit(url)
    target = (split.path or "/") + (f"?{split.query}" if split.query else "")
    while True:
        connection, used = pool.take(url)
        proxy: Proxy | None = getattr(connection, "k3_proxy", None)
        plain = proxy is not None and split.scheme == "http"  # such a proxy wants the whole address
        through = f" through {proxy}" if proxy else ""
        try:
            extra = dict(proxy.credentials) if proxy is not None and plain else {}
            connection.request(method, url if plain else target, headers={**headers, **extra})
            response = connection.getresponse()
        except TimeoutError:
            pool.drop(connection)
            raise Transient(f"no answer from {split.netloc}{through} for {pool.stall_s:g} s") from None
        except (OSError, http.client.HTTPException, ValueError, AssertionError) as error:
            pool.drop(connection)
            if used and not pool.stopped:  # the server closed an idle connection: no failure yet
                continue
            raise Transient(f"connection to {split.netloc}{through} lost ({words(error)})") from None
        if response.status == 407 and proxy is not None:
            response.close()
            pool.drop(connection)
            raise proxy_refused(proxy, "407 Proxy Authentication Required")
        return connection, response


def _check(body: Body, response: http.client.HTTPResponse, start: int, stop: int, size: int, skip_limit: int) -> None:
    """Leave `body` standing at `start` with `stop - start` bytes to come, or raise."""
    status, coding = response.status, coding_of(response)
    is_whole = (start, stop) == (0, size)  # then size and digest say the rest
    if status == 206:
        found = response.headers.get("Content-Range", "")
        match = _CONTENT_RANGE.fullmatch(found.strip())
        expected = f"bytes {start}-{stop - 1}/{size}"
        missing = not found and is_whole and response.length in (None, size)
        right = match and (int(match[1]), int(match[2])) == (start, stop - 1) and match[3] in (str(size), "*")
        if not right and not missing:
            raise Transient(
                f"wrong Content-Range (expected {expected!r}, found {found[:80]!r})", limit=ODD_LIMIT, hint=OTHER_SERVER
            )
        if coding:
            raise Transient(f"a range coded as {coding}, though identity was asked", limit=ODD_LIMIT, hint=OTHER_SERVER)
        body.expect(stop - start)
        if response.length is not None and response.length != body.remaining:
            raise Transient(
                f"wrong Content-Length (expected {stop - start}, found {response.length})",
                limit=ODD_LIMIT,
                hint=OTHER_SERVER,
            )
        return
    if status == 200:
        if coding in CODINGS:
            body.decode(coding)
        elif coding:
            raise Transient(
                f"an answer coded as {coding}, though identity was asked", limit=ODD_LIMIT, hint=OTHER_SERVER
            )
        elif response.length is not None and response.length != size:
            raise Transient(
                f"wrong size (expected {size} bytes, found {response.length})", limit=ODD_LIMIT, hint=OTHER_SERVER
            )
        if start > skip_limit:
            raise RemoteError(
                f"{urlsplit(body._url).netloc} ignores Range: it answers with the whole file of {size} bytes",
                hint="name another mirror (HF_ENDPOINT), or fetch the checkpoint whole",
            )
        body.expect(size)
        body.skip(start)
        body.remaining = min(body.remaining, stop - start)
        body.ignored_range = size > stop - start
        return
    if status == 416:
        found = response.headers.get("Content-Range", "no size")
        raise Transient(
            f"range {start}-{stop - 1} refused (expected {size} bytes, found {found[:80]!r})", limit=ODD_LIMIT
        )
    if status in (408, 425, 429) or status >= 500:
        reason = "".join(char for char in response.reason[:80] if char.isprintable())
        raise Transient(f"HTTP {status} {reason}".rstrip(), retry_after_s=retry_after(dict(response.headers)))
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
