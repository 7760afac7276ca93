"""Which proxy an address is reached through: one reading of the environment, for file lists and for data alike.

`http_proxy` and `https_proxy` by the scheme of the address, `all_proxy` where that is not set, `no_proxy` for what is
reached directly; in small letters or capitals, small letters first. An entry of `no_proxy` is `*`, a host (and all
below it, with or without a leading dot or `*.`), an IP address, a network (`10.0.0.0/8`), each with `:port` where only
that port is meant.
"""

from __future__ import annotations

import base64
import ipaddress
import os
import urllib.request
from dataclasses import dataclass
from urllib.parse import SplitResult, unquote, urlsplit

from k3tool.errors import UsageError


@dataclass(frozen=True)
class Proxy:
    """An HTTP proxy. variable: which one of the environment names it. credentials: headers that it wants."""

    scheme: str
    host: str
    port: int
    variable: str
    credentials: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        return f"the proxy {self.host}:{self.port} ({self.variable})"


def proxy_for(scheme: str, host: str, port: int) -> Proxy | None:
    """The proxy for an address, None where it is reached directly.

    Raises UsageError for a proxy that cannot be used: SOCKS, or no address at all.
    """
    found = urllib.request.getproxies()
    text = found.get(scheme) or found.get("all")
    if not text or is_direct(found.get("no", ""), host, port):
        return None
    variable = _variable(scheme, text)
    split = _split(text)
    if split is not None and split.scheme.startswith("socks"):
        raise UsageError(
            f"{variable} names a SOCKS proxy ({split.scheme}://{split.hostname}:{split.port or 1080}), and k3tool speaks HTTP "
            f"proxies only",
            hint=f"set {scheme}_proxy to an HTTP proxy, or add {host} to no_proxy where it can be reached directly",
        )
    if split is None or split.scheme not in ("http", "https") or not split.hostname:
        raise UsageError(f"{variable} is not the address of a proxy", hint="set it like http://proxy.example.org:3128")
    return Proxy(
        split.scheme,
        split.hostname,
        split.port or (443 if split.scheme == "https" else 80),
        variable,
        _credentials(split),
    )


def is_direct(no_proxy: str, host: str, port: int) -> bool:
    """Whether an entry of `no_proxy` covers this host and port."""
    host = host.lower().rstrip(".")
    address = _address(host)
    for entry in no_proxy.lower().replace(",", " ").split():
        if entry == "*":
            return True
        name, wanted = _entry(entry)
        if wanted is not None and wanted != port:
            continue
        network = _network(name)
        if network is not None and address is not None:
            if address in network:
                return True
            continue
        name = name.removeprefix("*").strip(".")
        if name and (host == name or (address is None and host.endswith(f".{name}"))):
            return True
    return False


def _entry(entry: str) -> tuple[str, int | None]:
    """`host:8080`, `[::1]:8080`, `::1` as (host, port)."""
    entry = entry.split("://")[-1]
    if entry.startswith("["):
        name, _, port = entry[1:].partition("]")
        port = port.removeprefix(":")
    elif entry.count(":") == 1:
        name, _, port = entry.partition(":")
    else:
        name, port = entry, ""
    return name, int(port) if port.isascii() and port.isdigit() and len(port) < 6 else None


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host.strip("[]").partition("%")[0])
    except ValueError:
        return None


def _network(text: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network | None:
    try:
        return ipaddress.ip_network(text, strict=False)
    except ValueError:
        return None


def _split(text: str) -> SplitResult | None:
    try:
        split = urlsplit(text if "://" in text else f"http://{text}")
        _ = split.port, split.hostname
        return split
    except ValueError:
        return None


def _variable(scheme: str, text: str) -> str:
    names = (f"{scheme}_proxy", f"{scheme}_proxy".upper(), "all_proxy", "ALL_PROXY")
    return next((name for name in names if os.environ.get(name) == text), f"{scheme}_proxy")


def _credentials(split: SplitResult) -> tuple[tuple[str, str], ...]:
    if not split.username:
        return ()
    text = f"{unquote(split.username)}:{unquote(split.password or '')}".encode()
    return (("Proxy-Authorization", "Basic " + base64.b64encode(text).decode()),)
