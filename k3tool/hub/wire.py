"""Answers of servers, bounded before they are understood: bytes and time of a head, bytes and pace of a body.

A server may send one byte a minute, headers without end, `100 Continue` for ever, or a body that never stops. Everything
that arrives passes through `Wire`, so no parser above it has to think of that; and whoever waits for long is told.
"""

from __future__ import annotations

import http.client
import io
import socket
import threading
import time
import zlib
from collections.abc import Callable
from typing import Any

HEAD_LIMIT = 1 << 18
CODINGS = {"gzip": 47, "x-gzip": 47, "deflate": 47}  # window bits by which zlib knows gzip and zlib apart
TRICKLE_BYTES = 1 << 14  # less than this in one stall time is no progress


class Waiting:
    """Says that a server is waited for: after `after_s` of nothing, then about every three times as long."""

    def __init__(self, after_s: float, tell: Callable[[str], object]) -> None:
        self.after_s = after_s
        self._tell = tell
        self._lock = threading.Lock()
        self._next = 0.0

    def for_host(self, host: str, since: float) -> None:
        """`since`: when (monotonic) the host was last heard of. Says something where it is time to."""
        now = time.monotonic()
        with self._lock:
            if now - since < self.after_s or now < self._next:
                return
            self._next = now + 3 * self.after_s
        self._tell(f"waiting for {host} ...")


class Wire(io.RawIOBase):
    """What a socket receives. Raises TimeoutError where it brings too little, HTTPException where it brings too much.

    stall_s: the time that is waited for a whole head, and for each 16 KiB of a body. left: bytes that may still come.
    """

    def __init__(self, sock: socket.socket, stall_s: float, waiting: Waiting, host: str) -> None:
        self._socket = sock
        self._held = sock.makefile("rb", buffering=0)  # keeps the socket open as long as this is
        self._stall_s = stall_s
        self._waiting = waiting
        self._host = host
        self._in_head = True
        self.left = HEAD_LIMIT
        self._timeout = -1.0
        self._start()

    def _start(self) -> None:
        self._heard = time.monotonic()
        self._waited = 0.0  # in receiving, not in what is done with it
        self._window = 0

    def begin_body(self, limit: int) -> None:
        """The head is there; at most about `limit` more bytes are wanted."""
        self._in_head = False
        self.left = limit
        self._start()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if self.left <= 0:
            raise http.client.HTTPException("the answer does not end")
        while True:
            rest = self._stall_s - self._waited
            if rest <= 0:
                raise TimeoutError(f" ({self._window} bytes)" if self._window else "")
            began = time.monotonic()
            try:
                got = self._receive(buffer, min(rest, self._waiting.after_s))
                break
            except TimeoutError:
                self._waiting.for_host(self._host, self._heard)
            finally:
                self._waited += time.monotonic() - began
        self.left -= got
        self._window += got
        if self._window >= TRICKLE_BYTES and not self._in_head:
            self._start()
        else:
            self._waiting.for_host(self._host, self._heard)
        return got

    def _receive(self, buffer: Any, timeout: float) -> int:
        if timeout != self._timeout:
            self._socket.settimeout(timeout)
            self._timeout = timeout
        return self._socket.recv_into(buffer)

    def close(self) -> None:
        if not self.closed:
            self._held.close()
        super().close()


class Response(http.client.HTTPResponse):
    """An answer whose bytes come through a `Wire`."""

    stall_s = 30.0
    waiting = Waiting(5.0, lambda _: None)
    host = ""

    def __init__(self, sock: socket.socket, *args: Any, **options: Any) -> None:
        super().__init__(sock, *args, **options)
        self.fp.close()
        self.wire = Wire(sock, self.stall_s, self.waiting, self.host)
        self.fp = io.BufferedReader(self.wire)


def response_class(stall_s: float, waiting: Waiting, host: str) -> type[Response]:
    """`Response` for the connections to one host."""
    return type("Response", (Response,), {"stall_s": stall_s, "waiting": waiting, "host": host})


class Decoder:
    """Undoes gzip or deflate, no more of it at a time than fits where it is wanted."""

    def __init__(self, receive: Callable[[memoryview], int], bits: int) -> None:
        self._receive = receive
        self._bits = bits
        self._inflate = zlib.decompressobj(bits)
        self._buffer = memoryview(bytearray(1 << 16))
        self._rest = b""
        self._first = True

    def readinto(self, view: memoryview) -> int:
        while not self._inflate.eof:
            if not self._rest:
                got = self._receive(self._buffer)
                if not got:
                    return 0
                self._rest = bytes(self._buffer[:got])
            try:
                data = self._inflate.decompress(self._rest, len(view))
            except zlib.error:
                if not self._first:
                    raise
                self._inflate = zlib.decompressobj(-15)  # `deflate` without its head, as some servers take the word
                data = self._inflate.decompress(self._rest, len(view))
            self._first = False
            self._rest = self._inflate.unconsumed_tail
            if data:
                view[: len(data)] = data
                return len(data)
        return 0
