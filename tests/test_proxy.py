"""Proxy variables: one reading of them, for file lists and for data."""

from __future__ import annotations

import pytest

from k3tool.errors import RemoteError, UsageError
from k3tool.hub import HubSource, RetryPolicy
from k3tool.hub.proxy import is_direct, proxy_for
from k3tool.standin import serve
from k3tool.standin.repo import HubFile

NAMES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")


@pytest.fixture(autouse=True)
def _no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.mark.parametrize(
    ("entry", "host", "port", "direct"),
    [
        ("*", "hub.example", 443, True),
        ("hub.example", "hub.example", 443, True),
        ("HUB.example", "hub.EXAMPLE", 443, True),
        ("example", "hub.example", 443, True),
        (".example", "hub.example", 443, True),
        ("*.example", "hub.example", 443, True),
        ("ample", "hub.example", 443, False),
        ("hub.example:443", "hub.example", 443, True),
        ("hub.example:8080", "hub.example", 443, False),
        ("a.example, hub.example", "hub.example", 443, True),
        ("a.example hub.example", "hub.example", 443, True),
        ("127.0.0.1:5000", "127.0.0.1", 5000, True),
        ("127.0.0.1:5000", "127.0.0.1", 5001, False),
        ("127.0.0.0/8", "127.3.2.1", 80, True),
        ("10.0.0.0/8", "127.3.2.1", 80, False),
        ("10.0.0.0/8", "ten.example", 80, False),
        ("::1", "::1", 80, True),
        ("[::1]:80", "::1", 80, True),
        ("[::1]:81", "::1", 80, False),
        ("fd00::/8", "fd12::1", 80, True),
        ("http://hub.example", "hub.example", 80, True),
        (", ,", "hub.example", 80, False),
        ("", "hub.example", 80, False),
    ],
)
def test_what_is_reached_directly(entry: str, host: str, port: int, direct: bool):
    assert is_direct(entry, host, port) is direct


def test_which_proxy(monkeypatch: pytest.MonkeyPatch):
    assert proxy_for("https", "hub.example", 443) is None
    monkeypatch.setenv("ALL_PROXY", "proxy.example:3128")
    found = proxy_for("https", "hub.example", 443)
    assert found is not None and str(found) == "the proxy proxy.example:3128 (ALL_PROXY)"
    monkeypatch.setenv("HTTPS_PROXY", "http://me:s%20p@other.example:8080")
    found = proxy_for("https", "hub.example", 443)
    assert found is not None and str(found) == "the proxy other.example:8080 (HTTPS_PROXY)"
    assert "s p" not in str(found) and found.credentials[0][0] == "Proxy-Authorization"
    monkeypatch.setenv("https_proxy", "http://small.example")
    assert str(proxy_for("https", "hub.example", 443)) == "the proxy small.example:80 (https_proxy)"
    monkeypatch.setenv("no_proxy", "hub.example")
    assert proxy_for("https", "hub.example", 443) is None


@pytest.mark.parametrize("scheme", ["socks5", "socks5h", "socks4", "socks"])
def test_socks_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, scheme: str):
    monkeypatch.setenv("all_proxy", f"{scheme}://me:secret@127.0.0.1:1080")
    with pytest.raises(UsageError, match=f"all_proxy names a SOCKS proxy .{scheme}://127") as refusal:
        proxy_for("http", "hub.example", 80)
    assert "secret" not in refusal.value.message and "no_proxy" in refusal.value.hint
    monkeypatch.setenv("no_proxy", "hub.example:80")
    assert proxy_for("http", "hub.example", 80) is None


@pytest.mark.parametrize("text", ["http://", "http://[::1", "http://proxy:99999", "gopher://x:1"])
def test_what_is_no_proxy(monkeypatch: pytest.MonkeyPatch, text: str):
    monkeypatch.setenv("http_proxy", text)
    with pytest.raises(UsageError, match="http_proxy is not the address of a proxy"):
        proxy_for("http", "hub.example", 80)


def test_the_proxy_that_failed_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with serve({"config.json": HubFile("config.json", b"{}")}, "org/name") as hub:
        source = HubSource("org/name", endpoint=hub.endpoint, policy=RetryPolicy(patience_s=0))
        with pytest.raises(RemoteError, match=r"through the proxy 127\.0\.0\.1:9 \(http_proxy\)") as failure:
            source.files()
        assert "http_proxy" in failure.value.hint and hub.requests == []
        monkeypatch.setenv("no_proxy", hub.endpoint.partition("//")[2])
        source = HubSource("org/name", endpoint=hub.endpoint)
        assert source.read("config.json") == b"{}"
        source.close()
