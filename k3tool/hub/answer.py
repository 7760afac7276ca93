"""Small answers, whole: file lists and addresses, of at most so many bytes in at most so much time."""

from __future__ import annotations

import http.client
import time
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from k3tool.errors import RemoteError
from k3tool.hub.connect import CHECK_HUB, follow, origin
from k3tool.hub.http import MAX_REDIRECTS, ODD_LIMIT, REDIRECTS, Body, Connections, coding_of, request
from k3tool.hub.retry import Transient
from k3tool.hub.wire import CODINGS

SMALL_ANSWER = 1 << 16  # the body of a refusal


@dataclass(frozen=True)
class Answer:
    """A small answer, whole. url: who gave it in the end, after redirects."""

    status: int
    headers: Mapping[str, str]
    url: str
    data: bytes = b""


def ask(
    pool: Connections,
    url: str,
    *,
    method: str = "GET",
    headers: Mapping[str, str],
    authorization: str | None,
    home: tuple[str, str, int],
    limit: int,
    leave_home: bool = True,
) -> Answer:
    """A small answer of at most `limit` bytes, in at most four stall times; an answer of any status.

    leave_home: follow redirects to other hosts than `home`, else such a redirect is the answer.
    Raises Transient, RemoteError.
    """
    asked = {**headers, "Accept-Encoding": "identity"}
    for _ in range(MAX_REDIRECTS + 1):
        sent = {**asked, "Authorization": authorization} if authorization and origin(url) == home else asked
        connection, response = request(pool, url, sent, method)
        found = dict(response.headers.items())
        location = response.headers.get("Location")
        if response.status in REDIRECTS and location:
            response.close()
            pool.drop(connection)
            target = follow(url, location)
            if not leave_home and origin(target) != home:
                return Answer(response.status, {**found, "Location": target}, url)
            url = target
            continue
        if method == "HEAD":
            response.close()
            pool.keep(url, connection) if not response.will_close else pool.drop(connection)
            return Answer(response.status, found, url)
        body = Body(pool, connection, response, url)
        try:
            data = _whole(body, response, limit if response.status == 200 else SMALL_ANSWER)
        except BaseException:
            body.uncount()
            body.abandon()
            raise
        body.uncount()
        body.close()
        return Answer(response.status, found, url, data)
    raise RemoteError(f"more than {MAX_REDIRECTS} redirects, last to {url[:200]}", hint="check HF_ENDPOINT")


def _whole(body: Body, response: http.client.HTTPResponse, limit: int) -> bytes:
    """A body of unknown length, at most `limit` bytes. Raises Transient, RemoteError."""
    coding = coding_of(response)
    if coding in CODINGS:
        body.decode(coding)
    elif coding:
        raise Transient(f"an answer coded as {coding}, though identity was asked", limit=ODD_LIMIT)
    host, began = urlsplit(body._url).netloc, time.monotonic()
    if not coding and response.length is not None and response.length > limit:
        raise _too_long(host, limit)
    if response.length == 0:
        return b""
    body.expect(limit + 1, framing=1)
    data = bytearray()
    view = memoryview(bytearray(1 << 16))
    plain = response.length is not None and not response.chunked and not coding
    if plain:
        body.remaining = response.length or 0
    while body.remaining:
        try:
            got = body.read_into(view)
        except Transient as error:
            if error.ended and not plain:
                body.ignored_range = True  # the connection is not one to go on with
                break
            raise
        data += view[:got]
        if len(data) > limit:
            raise _too_long(host, limit)
        if time.monotonic() - began > 4 * body._pool.stall_s:
            raise Transient(f"{host} has not ended its answer in {4 * body._pool.stall_s:g} s", limit=ODD_LIMIT)
    return bytes(data)


def _too_long(host: str, limit: int) -> RemoteError:
    return RemoteError(f"the answer of {host} is longer than {limit} bytes, which is no answer to this", hint=CHECK_HUB)
