"""A Hub repository as a source of bytes: exact reads, refusals that say what to do, names that cannot leave a folder."""

from __future__ import annotations

import base64
import http.client
import itertools
import random
import shutil
import ssl
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar
from urllib.parse import urlsplit

import huggingface_hub
import pytest

from k3tool.checkpoint.reader import Checkpoint
from k3tool.checkpoint.source import LocalSource, Source, open_source
from k3tool.errors import CheckpointCorrupt, CheckpointMissing, RemoteError, UsageError
from k3tool.hub import HubSource, RemoteFile, RetryPolicy, SystemClock, Transient
from k3tool.hub.connect import origin
from k3tool.hub.http import Connections, open_range, retry_after
from k3tool.hub.remote import check_path, endpoint_of
from k3tool.hub.retry import Retry, Stopped
from k3tool.inspection import inspect
from k3tool.standin import Fault, HubFile, StandIn, serve
from tests.fetch.conftest import FakeClock

REPO = "org/mini"
SHARD = "model-00002-of-000011.safetensors"


@pytest.fixture
def hub(mini: Path) -> Iterator[StandIn]:
    with serve(mini, REPO) as stand_in:
        yield stand_in


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def source(hub: StandIn, clock: FakeClock) -> Iterator[HubSource]:
    made = HubSource(REPO, endpoint=hub.endpoint, clock=clock)
    yield made
    made.close()


def refusal(repo: str, hub: StandIn, revision: str | None = None, token: str | None = None) -> RemoteError:
    with pytest.raises(RemoteError) as caught:
        HubSource(repo, revision, endpoint=hub.endpoint, token=token or False, policy=RetryPolicy(patience_s=0)).files()
    assert caught.value.exit_code == 13
    return caught.value


# -- reading --


def test_it_is_a_source(source: HubSource, mini: Path):
    assert isinstance(source, Source)
    assert source.files() == LocalSource(mini).files()
    assert source.local_path(SHARD) is None
    assert source.label == REPO


@pytest.mark.parametrize("small_file", [0, 1 << 20])
def test_reads_are_exact(source: HubSource, mini: Path, monkeypatch: pytest.MonkeyPatch, small_file: int):
    monkeypatch.setattr("k3tool.hub.SMALL_FILE", small_file)
    data = (mini / SHARD).read_bytes()
    dice = random.Random(1)
    for _ in range(20):
        start = dice.randrange(len(data))
        length = dice.randrange(len(data) - start + 1)
        assert source.read(SHARD, start, length) == data[start : start + length]
    assert source.read(SHARD) == data
    assert source.read(SHARD, len(data) - 5) == data[-5:]
    buffer = bytearray(100)
    source.read_into(SHARD, 50, memoryview(buffer))
    assert buffer == data[50:150]
    assert source.read(SHARD, 7, 0) == b""


def test_small_files_are_asked_for_once(source: HubSource, hub: StandIn):
    for _ in range(3):
        source.read("config.json")
        source.read(SHARD, 5, 10)
    assert sum(request.method == "GET" and "api/models" not in request.path for request in hub.requests) == 2


def test_reads_beyond_the_file_are_refused(source: HubSource, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(CheckpointMissing, match="has 145416 bytes, needed up to 145417"):
        source.read(SHARD, 145_410, 7)
    monkeypatch.setattr("k3tool.hub.SMALL_FILE", 0)
    with pytest.raises(CheckpointMissing, match="has 145416 bytes, needed up to 145417"):
        source.read(SHARD, 145_410, 7)
    with pytest.raises(CheckpointMissing, match=r"org/mini at commit [0-9a-f]{12} has no file nothing\.bin"):
        source.read("nothing.bin")


def test_reads_from_many_threads(source: HubSource, mini: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("k3tool.hub.SMALL_FILE", 0)
    names = [f"model-{n:05d}-of-000011.safetensors" for n in range(1, 12)]
    with ThreadPoolExecutor(8) as pool:
        for name, data in zip(names, pool.map(source.read, names), strict=True):
            assert data == (mini / name).read_bytes()


def test_reads_survive_dropped_connections(
    source: HubSource, hub: StandIn, mini: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("k3tool.hub.SMALL_FILE", 0)
    hub.faults.add(Fault("drop", match=SHARD, after=30_000, times=3))
    hub.faults.add(Fault("status", match=SHARD, status=500))
    assert source.read(SHARD, 1000, 130_000) == (mini / SHARD).read_bytes()[1000:131_000]
    assert hub.bytes_sent == 130_000


def test_a_server_that_ignores_range_serves_small_offsets(
    source: HubSource, hub: StandIn, mini: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("k3tool.hub.SMALL_FILE", 0)
    hub.faults.add(Fault("ignore_range", match=SHARD, times=None))
    assert source.read(SHARD, 1000, 500) == (mini / SHARD).read_bytes()[1000:1500]
    with pytest.raises(RemoteError, match="ignores Range: it answers with the whole file of 145416 bytes"):
        source.open(SHARD, 1000, 1500, skip_limit=999)


def test_inspect_reads_headers_only(source: HubSource, hub: StandIn, mini: Path):
    found, expected = inspect(Checkpoint(source)), inspect(Checkpoint(LocalSource(mini)))
    assert found.total_size == expected.total_size and found.conformance.ok
    assert found.components == expected.components


def test_a_repository_by_name(hub: StandIn, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
    commit = hub.repos[REPO].commit
    for text in (REPO, f"hf://{REPO}", f"{REPO}@main", f"{REPO}@{commit}"):
        opened = open_source(text)
        assert isinstance(opened, HubSource) and opened.commit == commit
        opened.close()


def test_a_mirror_that_lists_names_without_sizes(hub: StandIn, monkeypatch: pytest.MonkeyPatch, mini: Path):
    monkeypatch.setattr(HubFile, "as_sibling", lambda self: {"rfilename": self.name})
    opened = HubSource(REPO, endpoint=hub.endpoint)
    assert opened.files() == LocalSource(mini).files()
    assert opened.remote(SHARD).sha256 == hub.repos[REPO].files[SHARD].sha256
    assert opened.remote("config.json").git_sha1 == hub.repos[REPO].files["config.json"].oid
    opened.close()


# -- refusals --


def test_a_missing_repository(hub: StandIn):
    error = refusal("org/missing", hub)
    assert error.message == "org/missing does not exist, or is private and no token was sent (HTTP 401)"
    assert "check the name" in error.hint and "HF_TOKEN" in error.hint
    error = refusal("org/missing", hub, token="hf_x")
    assert error.message == f"org/missing does not exist on {hub.endpoint} (HTTP 404)"


def test_a_gated_repository(mini: Path):
    with serve(mini, "org/gated", gated=True, readers={"hf_good"}) as hub:
        for token, text in ((None, "is gated and no token was sent (HTTP 401)"), ("hf_x", "is gated and this token has no access (HTTP 403)")):  # fmt: skip
            source = HubSource("org/gated", endpoint=hub.endpoint, token=token or False)
            assert source.files()  # the list is public
            with pytest.raises(RemoteError) as caught:
                source.read("config.json")
            assert caught.value.message.endswith(f"config.json {text}")
            assert f"{hub.endpoint}/org/gated" in caught.value.hint
            source.close()
        source = HubSource("org/gated", endpoint=hub.endpoint, token="hf_good")
        assert source.read("config.json") == (mini / "config.json").read_bytes()
        source.close()


def test_a_wrong_token(mini: Path):
    with serve(mini, REPO, tokens={"hf_good"}) as hub:
        error = refusal(REPO, hub, token="hf_bad")
    assert error.message == "org/mini: the token was refused (Invalid credentials in Authorization header) (HTTP 401)"
    assert "hf auth login" in error.hint


def test_a_missing_revision(hub: StandIn):
    error = refusal(REPO, hub, revision="v9")
    assert error.message == "org/mini@v9: no such revision (HTTP 404)"
    assert "branch, tag or commit" in error.hint


def test_a_file_that_vanished(source: HubSource, hub: StandIn):
    source.files()
    del hub.repos[REPO].files[SHARD]
    with pytest.raises(RemoteError, match=rf"{SHARD}: no such file \(HTTP 404\)"):
        source.read(SHARD)


def test_a_forbidden_repository(hub: StandIn):
    hub.faults.add(Fault("status", stage="api", status=403, times=None))
    assert "access denied (forbidden) (HTTP 403)" in refusal(REPO, hub).message
    hub.faults.clear()
    hub.faults.add(Fault("status", stage="api", status=418, times=None))
    assert "unexpected answer" in refusal(REPO, hub).message


def test_offline(hub: StandIn, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    error = refusal(REPO, hub)
    assert error.message == f"HF_HUB_OFFLINE is set, so org/mini at {hub.endpoint} cannot be reached"
    assert "unset HF_HUB_OFFLINE" in error.hint
    assert hub.requests == []


def test_offline_with_a_cache(hub: StandIn, mini: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    huggingface_hub.snapshot_download(REPO, cache_dir=tmp_path, endpoint=hub.endpoint)
    asked = len(hub.requests)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for text in (REPO, f"{REPO}@main", f"{REPO}@{hub.repos[REPO].commit}"):
        opened = open_source(text)
        assert isinstance(opened, LocalSource) and inspect(Checkpoint(opened)).conformance.ok
    for text in (f"{REPO}@v2", f"{REPO}@../../x", "org/other"):
        with pytest.raises((RemoteError, CheckpointMissing)):
            open_source(text).files()
    assert len(hub.requests) == asked


def test_endpoints(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_ENDPOINT", "https://mirror.example/hub/")
    assert endpoint_of() == "https://mirror.example/hub"
    assert endpoint_of("http://other:8080/") == "http://other:8080"
    for bad in ("ftp://x", "mirror.example", "http://"):
        monkeypatch.setenv("HF_ENDPOINT", bad)
        with pytest.raises(UsageError, match="HF_ENDPOINT is not a web address"):
            endpoint_of()
    monkeypatch.delenv("HF_ENDPOINT")
    assert endpoint_of().startswith("https://")


def test_not_a_repository_name(hub: StandIn):
    with pytest.raises(UsageError, match="not a repository name"):
        HubSource("a/b/c", endpoint=hub.endpoint).files()


@pytest.mark.parametrize(
    "name",
    ["../x", "a/../../x", "/etc/passwd", "a//b", "./x", "a\\b", "C:x", "x\0y", "x\ny", "", ".git/config",
     ".GIT/x", ".cache/huggingface/x", "a/", "x" * 256, "nul. ", "a./b"],
)  # fmt: skip
def test_names_that_leave_the_folder(hub: StandIn, name: str):
    hub.add("org/bad", {name: HubFile(name, b"x"), "config.json": HubFile("config.json", b"{}")})
    with pytest.raises(CheckpointCorrupt, match="leaves the folder or cannot be written") as caught:
        HubSource("org/bad", endpoint=hub.endpoint).files()
    assert caught.value.exit_code == 11


def test_names_that_are_fine():
    for name in (
        "config.json",
        "assets/kimi-logo.png",
        ".gitattributes",
        "model-00001-of-000096.safetensors",
        "日本.txt",
    ):
        assert check_path(name, "x") == name


def test_a_name_that_is_file_and_folder(hub: StandIn):
    hub.add("org/bad", {"a": HubFile("a", b"x"), "a/b": HubFile("a/b", b"x")})
    with pytest.raises(CheckpointCorrupt, match="'a' is both a file and a folder"):
        HubSource("org/bad", endpoint=hub.endpoint).files()


def test_a_list_with_an_impossible_size(hub: StandIn):
    hub.add("org/bad", {"a": HubFile("a", None, size=-5, sha256="0" * 64)})
    with pytest.raises(RemoteError, match=r"contradicts itself: .a. has size -5"):
        HubSource("org/bad", endpoint=hub.endpoint).files()


def test_an_answer_that_contradicts_the_list(source: HubSource, hub: StandIn, mini: Path):
    source.files()
    hub.repos[REPO].files[SHARD] = HubFile(SHARD, mini / "model-00003-of-000011.safetensors")
    digests = [HubFile("x", mini / name).sha256 for name in (SHARD, "model-00003-of-000011.safetensors")]
    with pytest.raises(CheckpointCorrupt, match=rf"digest: expected {digests[0]}, found {digests[1]}"):
        source.read(SHARD)


# -- when to try again --


def test_pauses_double_with_jitter_up_to_a_bound():
    policy = RetryPolicy(first_s=0.5, longest_s=30)
    assert [policy.pause(n, 1.0) for n in range(1, 9)] == [0.5, 1, 2, 4, 8, 16, 30, 30]
    assert [policy.pause(n, 0.0) for n in (1, 2, 8)] == [0.25, 0.5, 15]
    assert policy.pause(10_000, 1.0) == 30


def test_patience_grows_with_the_work_done():
    policy = RetryPolicy()
    assert [policy.patience(ran) for ran in (0, 59, 600, 10_000)] == [60, 60, 600, 3600]
    assert RetryPolicy(patience_s=5).patience(10_000) == 5


def test_an_hour_without_network_after_a_long_run(clock: FakeClock):
    retry = Retry(RetryPolicy(), clock, job_began=-7200.0)
    with pytest.raises(RemoteError, match=r"x: gone, after \d+ attempts in (59 min|1 h 00 min)"):
        for _ in range(10_000):
            retry.failed(Transient("gone"), "x")
    assert 3500 < sum(clock.slept) <= 3600


def test_progress_forgives_but_a_few_bytes_do_not(clock: FakeClock):
    retry = Retry(RetryPolicy(), clock, job_began=0.0)
    for _ in range(3):
        retry.failed(Transient("gone"), "x")
    retry.progressed(100)
    assert retry.failures == 3
    retry.progressed(1 << 14)
    assert retry.failures == 0


def test_failures_in_a_row_are_told_as_they_double(clock: FakeClock):
    told: list[str] = []
    retry = Retry(RetryPolicy(longest_s=2.0), clock, job_began=-7200.0, tell=told.append)
    for _ in range(8):
        retry.failed(Transient("no answer"), "file list of org/name")
    assert len(told) == 2 and told[0].startswith("file list of org/name: no answer, 4 times in a row; again in ")


def test_no_wait_is_without_a_word_for_long(clock: FakeClock):
    words: list[float] = []
    retry = Retry(RetryPolicy(), clock, job_began=-7200.0, tell=lambda _: words.append(clock.now()))
    for _ in range(40):
        retry.failed(Transient("no answer"), "x")
    assert all(after - before < 45 for before, after in itertools.pairwise([0.0, *words]))
    words.clear()
    retry = Retry(RetryPolicy(), clock, job_began=-7200.0, tell=lambda _: words.append(clock.now()))
    retry.failed(Transient("HTTP 429", retry_after_s=300), "x")
    assert len(words) == 1


def test_a_limited_failure_ends_early(clock: FakeClock):
    retry = Retry(RetryPolicy(), clock, job_began=0.0)
    retry.failed(Transient("odd", limit=3), "x")
    retry.failed(Transient("odd", limit=3), "x")
    with pytest.raises(RemoteError, match=r"^x: odd$"):
        retry.failed(Transient("odd", limit=3, hint="look"), "x")


def test_a_stop_ends_a_pause():
    clock = SystemClock()
    retry = Retry(RetryPolicy(first_s=600, longest_s=600, patience_s=3600), clock, clock.now())
    threading.Timer(0.05, clock.stop.set).start()
    with pytest.raises(Stopped):
        retry.failed(Transient("gone"), "x")


def test_what_servers_ask_to_wait():
    assert retry_after({"Retry-After": "12"}) == 12
    assert retry_after({"RETRY-AFTER": " 3 "}) == 3
    assert retry_after({"RateLimit": '"api";r=0;t=55'}) == 55
    assert retry_after({"RateLimit": '"api";r=9;t=55'}) is None
    assert retry_after({"Retry-After": "soon"}) is None
    assert retry_after({"Retry-After": "Wed, 21 Oct 2015 07:28:00 GMT"}) == 0
    assert retry_after({}) is None


def test_origins():
    assert origin("https://a.example/x?y") == ("https", "a.example", 443)
    assert origin("http://A.example:81") == ("http", "a.example", 81)
    assert origin("http://a.example") != origin("https://a.example")


def test_digests_of_the_list_are_checked_for_form(hub: StandIn):
    vars(hub.repos[REPO].files["config.json"])["oid"] = "not a digest"
    source = HubSource(REPO, endpoint=hub.endpoint)
    assert source.remote("config.json") == RemoteFile(4180, None, None)
    source.close()


# -- connections --


class Proxy(BaseHTTPRequestHandler):
    """A forward proxy that wants a password and notes what it was asked."""

    asked: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self._forward()

    def do_HEAD(self) -> None:
        self._forward()

    def _forward(self) -> None:
        if self.headers.get("Proxy-Authorization") != "Basic " + base64.b64encode(b"me:s p").decode():
            self.send_error(407)
            return
        self.asked.append(f"{self.command} {self.path}")
        headers = {key: value for key, value in self.headers.items() if key.lower() != "proxy-authorization"}
        target = urlsplit(self.path)
        upstream = http.client.HTTPConnection(str(target.hostname), target.port or 80, timeout=10)
        upstream.request(self.command, f"{target.path}?{target.query}", headers=headers)
        answer = upstream.getresponse()
        body = answer.read()
        self.send_response(answer.status)
        for key, value in answer.headers.items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(body)
        upstream.close()

    def log_message(self, format: str, *args: object) -> None: ...


def test_a_proxy_for_plain_addresses(hub: StandIn, mini: Path, monkeypatch: pytest.MonkeyPatch):
    Proxy.asked.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), Proxy) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        monkeypatch.setenv("http_proxy", f"http://me:s%20p@127.0.0.1:{server.server_port}")
        for name in ("no_proxy", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)
        pool = Connections(5.0)
        url = hub.sign(hub.repos[REPO], hub.repos[REPO].files[SHARD])
        body = open_range(pool, url, 10, 30, 145_416, headers={}, authorization=None, home=origin(hub.endpoint))
        buffer = bytearray(20)
        assert body.read_into(memoryview(buffer)) == 20
        body.close()
        pool.close()
        server.shutdown()
        thread.join()
    assert buffer == (mini / SHARD).read_bytes()[10:30]
    assert Proxy.asked == [f"GET {url}"]


def test_certificates_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A server with a certificate of its own is refused until that certificate is trusted."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl, which makes the certificate, is not installed")
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=127.0.0.1",
               "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", "key.pem", "-out", "cert.pem"]  # fmt: skip
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "cert.pem", tmp_path / "key.pem")

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(206)
            self.send_header("Content-Range", "bytes 2-4/10")
            self.send_header("Content-Length", "3")
            self.end_headers()
            self.wfile.write(b"abc")

        def log_message(self, format: str, *args: object) -> None: ...

    class Quiet(ThreadingHTTPServer):
        def handle_error(self, request: object, client_address: object) -> None: ...

    def ask() -> bytes:
        pool = Connections(5.0)
        try:
            body = open_range(pool, url, 2, 5, 10, headers={}, authorization=None, home=origin(url))
            buffer = bytearray(3)
            body.read_into(memoryview(buffer))
            body.close()
            return bytes(buffer)
        finally:
            pool.close()

    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    with Quiet(("127.0.0.1", 0), Answer) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        url = f"https://127.0.0.1:{server.server_port}/x"
        with pytest.raises(RemoteError, match=r"the certificate of 127\.0\.0\.1:\d+ is not trusted: self") as refused:
            ask()
        assert "SSL_CERT_FILE" in refused.value.hint and "REQUESTS_CA_BUNDLE" in refused.value.hint
        for name in ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE"):
            monkeypatch.setenv(name, "/nowhere/ca.pem")
            with pytest.raises(UsageError, match=f"{name} names certificates that cannot be read: /nowhere/ca.pem"):
                ask()
            monkeypatch.delenv(name)
            monkeypatch.setenv(name, str(tmp_path / "cert.pem"))
            assert ask() == b"abc"
            monkeypatch.delenv(name)
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "key.pem"))
        with pytest.raises(UsageError, match="SSL_CERT_FILE names certificates that cannot be read"):
            ask()
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "cert.pem"))
        assert ask() == b"abc"
        server.shutdown()
        thread.join()


def test_redirects_have_an_end_and_a_scheme(hub: StandIn):
    pool = Connections(5.0)
    loop = f"{hub.endpoint}/{REPO}/resolve/main/config.json"
    options = {"headers": {}, "authorization": None, "home": origin(hub.endpoint)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("k3tool.standin.server.quote", lambda name: f"../../../../../../{REPO}/resolve/main/{name}")
        with pytest.raises(RemoteError, match="more than 5 redirects"):
            open_range(pool, loop, 0, 10, 4180, **options)  # type: ignore[arg-type]
    for target in ("file:///etc/passwd", "ftp://x/y"):
        with pytest.raises(RemoteError, match="which is no web address"):
            open_range(pool, target, 0, 10, 4180, **options)  # type: ignore[arg-type]
    pool.close()
