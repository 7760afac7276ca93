"""How a host is reached: its address as a server names it, the proxy, the certificates; and why it cannot be."""

from __future__ import annotations

import http.client
import os
import re
import ssl
from contextlib import suppress
from functools import cache
from typing import Any
from urllib.parse import quote, urljoin, urlsplit

from k3tool.errors import RemoteError, UsageError
from k3tool.hub.proxy import Proxy
from k3tool.hub.retry import RESUME_HINT, Transient

CONNECT_TIMEOUT_S = 15.0
CHECK_HUB = "check HF_ENDPOINT: something else than a Hub answers there, or stands in between"


def origin(url: str) -> tuple[str, str, int]:
    """(scheme, host, port): where a credential may go is decided on this."""
    split = urlsplit(url)
    return split.scheme, split.hostname or "", split.port or (443 if split.scheme == "https" else 80)


def is_address(url: str) -> bool:
    """Whether a server's word for an address can be asked: http or https, with a host and a port that can exist."""
    try:
        scheme, host, port = origin(url)
        if ":" not in host:
            host.encode("idna")
        return scheme in ("http", "https") and bool(host) and 0 < port < 65536 and "%" not in host and "\0" not in host
    except ValueError:  # and UnicodeError, which is one
        return False


def follow(url: str, location: str) -> str:
    """Where a redirect leads, every character of it fit for a request. Raises RemoteError where that is no web address."""
    with suppress(ValueError):
        location = location.encode("latin-1").decode()  # http.client reads headers as latin-1
    try:
        found = urljoin(url, quote(location.strip(), safe="%/:=&?~#+!$,;'@()*[]"))
    except ValueError:
        found = ""
    if not found or not is_address(found):
        raise RemoteError(
            f"{urlsplit(url).netloc} redirects to {location[:200]!r}, which is no web address", hint="check HF_ENDPOINT"
        )
    return found


def new_connection(url: str, proxy: Proxy | None) -> http.client.HTTPConnection:
    """Not yet connected. Raises UsageError for certificates that cannot be read, or a proxy that cannot be used."""
    scheme, host, port = origin(url)
    options: dict[str, Any] = {"timeout": CONNECT_TIMEOUT_S}
    if proxy is None:
        if scheme == "https":
            return http.client.HTTPSConnection(host, port, context=_tls(), **options)
        return http.client.HTTPConnection(host, port, **options)
    if proxy.scheme == "https" and scheme == "https":
        raise UsageError(
            f"{proxy.variable} names a proxy that is itself reached by TLS ({proxy.host}:{proxy.port}), and k3tool tunnels TLS "
            "through plain HTTP proxies only",
            hint=f"name its http:// address in {proxy.variable}, or add {host} to no_proxy where it can be reached directly",
        )
    connection = http.client.HTTPConnection(proxy.host, proxy.port, **options)
    if "https" in (scheme, proxy.scheme):
        connection = http.client.HTTPSConnection(proxy.host, proxy.port, context=_tls(), **options)
    if scheme == "https":
        connection.set_tunnel(host, port, headers=dict(proxy.credentials))
    connection.k3_proxy = proxy  # type: ignore[attr-defined]
    return connection


def unreachable(url: str, proxy: Proxy | None, error: Exception) -> Exception:
    """Why there is no connection: what stays so is final at once, what may pass is Transient."""
    netloc = urlsplit(url).netloc
    to = f"{netloc} through {proxy}" if proxy else netloc
    if isinstance(error, ssl.SSLCertVerificationError):
        return RemoteError(f"the certificate of {netloc} is not trusted: {error.verify_message}", hint=_trust(error))
    if isinstance(error, ssl.SSLError) and "WRONG_VERSION_NUMBER" in str(error):
        return RemoteError(f"{netloc} does not speak TLS", hint="check whether its address is http:// (HF_ENDPOINT)")
    tunnel = re.search(r"Tunnel connection failed: (\d{3}.*)", str(error))
    if proxy is not None and tunnel and tunnel[1][:1] == "4" and tunnel[1][:3] not in ("408", "429"):
        return proxy_refused(proxy, f"{tunnel[1][:80]} for {netloc}")
    if isinstance(error, UnicodeError):
        return RemoteError(f"{netloc[:100]!r} is no name of a host", hint=CHECK_HUB)
    hint = f"check the network, HF_ENDPOINT and {proxy.variable}" if proxy else "check the network and HF_ENDPOINT"
    return Transient(f"no connection to {to} ({words(error)})", hint=f"{hint}, then {RESUME_HINT}", unreachable=True)


def proxy_refused(proxy: Proxy, said: str) -> RemoteError:
    hint = f"check what {proxy.variable} says, or add the host to no_proxy where it can be reached directly"
    if said.startswith("407"):
        hint = f"write user and password into {proxy.variable}, like http://USER:PASSWORD@{proxy.host}:{proxy.port}"
    return RemoteError(f"{proxy} refuses: {said}", hint=hint)


def _trust(error: ssl.SSLCertVerificationError) -> str:
    if "expired" in error.verify_message or "not yet valid" in error.verify_message:
        return "check the clock of this machine; if it is right, whoever runs that server has to renew the certificate"
    return (
        "name a file of certificates that vouch for it (behind a company's proxy: the company's) in SSL_CERT_FILE or "
        "REQUESTS_CA_BUNDLE"
    )


CA_VARIABLES = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")


def _tls() -> ssl.SSLContext:
    """Certificates as the environment names them now, else this machine's. Raises UsageError where they are not there."""
    name = next((name for name in CA_VARIABLES if os.environ.get(name)), None)
    return _context(name, os.environ[name] if name else "", os.environ.get("SSL_CERT_DIR", ""))


@cache
def _context(variable: str | None, place: str, folder: str) -> ssl.SSLContext:
    if variable is not None:
        try:
            if os.path.isdir(place):
                context = ssl.create_default_context(capath=place)
            else:
                context = ssl.create_default_context(cafile=place)
                if folder and os.path.isdir(folder):
                    context.load_verify_locations(capath=folder)
            return context
        except OSError as error:  # and ssl.SSLError, which is one
            raise UsageError(
                f"{variable} names certificates that cannot be read: {place} ({words(error)})",
                hint=f"correct {variable}, or unset it to use this machine's own certificates",
            ) from None
    context = ssl.create_default_context()
    if not context.cert_store_stats()["x509_ca"]:  # a machine without its own certificates
        with suppress(ImportError):
            import certifi

            context.load_verify_locations(certifi.where())
    return context


def words(error: BaseException) -> str:
    text = str(getattr(error, "strerror", None) or error or type(error).__name__)
    return "".join(char if char.isprintable() else " " for char in text[:200])
