"""Servers that answer what no Hub answers: every one ends with one line and a documented exit code, soon and in bounds."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from k3tool.checkpoint.ledger import LEDGER_FOLDER
from k3tool.errors import CheckpointCorrupt, K3Error, RemoteError
from k3tool.fetch import fetch
from k3tool.hub import HubSource, RetryPolicy
from k3tool.standin import Fault, HubFile, StandIn, serve
from k3tool.standin.faults import answer
from tests.fetch.conftest import REPO, FakeClock, Recorder, contents

SHARD = "model-00003-of-000011.safetensors"
SHA = "c" * 40
SOON = RetryPolicy(first_s=0.01, longest_s=0.02, patience_s=0.05, stall_s=0.12, word_s=0.03)


def info(**changes: object) -> bytes:
    """What the Hub says of a repository, with some of it changed."""
    files = [{"rfilename": "config.json", "size": 2, "blobId": "a" * 40}]
    return answer(json.dumps({"id": REPO, "sha": SHA, "siblings": files, **changes}).encode())


def sibling(**changes: object) -> bytes:
    return info(siblings=[{"rfilename": "config.json", "size": 2, "blobId": "a" * 40, **changes}])


def moved(location: str, status: str = "302 Found") -> bytes:
    return answer(b"", f"Location: {location}", status=status)


LISTS: dict[str, bytes | tuple[bytes, bytes, float]] = {
    "a page": answer(b"<!doctype html><title>Log in</title>", json=False),
    "nothing": answer(b""),
    "no length and nothing": answer(b"", length=None),
    "null": answer(b"null"),
    "a list": answer(b"[]"),
    "a list of it": answer(b"[" + b"{}" + b"]"),
    "a text": answer(b'"org/mini"'),
    "a number": answer(b"12"),
    "an infinity": answer(b'{"sha": Infinity}'),
    "no UTF-8": answer(b'{"sha": "\xff\xfe"}'),
    "UTF-16": answer(json.dumps({"sha": SHA}).encode("utf-16")),
    "a byte order mark": answer(b"\xef\xbb\xbf{}"),
    "cut off": answer(b'{"sha": "cccc'),
    "shorter than it says": answer(b"{}", length=100),
    "nested deep": answer(b"[" * 200_000),
    "nested deep in a field": answer(b'{"sha": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    "a number of many digits": answer(b'{"sha": ' + b"9" * 10_000 + b"}"),
    "an empty object": answer(b"{}"),
    "no commit": info(sha=None),
    "a number as commit": info(sha=7),
    "a branch as commit": info(sha="main"),
    "a path as commit": info(sha="../" * 13 + "c"),
    "files as an object": info(siblings={"a": 1}),
    "files as a text": info(siblings="config.json"),
    "files as numbers": info(siblings=[1, 2]),
    "files as null": info(siblings=[None]),
    "a file without a name": info(siblings=[{"size": 2}]),
    "a name that is null": sibling(rfilename=None),
    "a name that is a list": sibling(rfilename=["config.json"]),
    "half a surrogate pair": answer(b'{"sha": "' + SHA.encode() + b'", "siblings": [{"rfilename": "\\ud800", "size": 1}]}'),
    "a size that is a text": sibling(size="2"),
    "a size below nothing": sibling(size=-1),
    "a size beyond any disk": sibling(size=1 << 70),
    "a size that is true": sibling(size=True),
    "a size that is a fraction": sibling(size=2.5),
    "lfs that is a text": sibling(lfs="sha256"),
    "lfs that is a list": sibling(lfs=[1]),
    "204": answer(b"", status="204 No Content", length=None),
    "206": answer(b"{}", status="206 Partial Content"),
    "300": answer(b"{}", status="300 Multiple Choices"),
    "304": answer(b"", status="304 Not Modified", length=None),
    "418": answer(b"{}", status="418 I'm a teapot"),
    "a status of four digits": b"HTTP/1.1 2000 OK\r\n\r\n",
    "a status of letters": b"HTTP/1.1 abc OK\r\n\r\n",
    "no HTTP": b"220 mail.example.org ESMTP\r\n",
    "zeros": bytes(1000),
    "an early hint": b"HTTP/1.1 103 Early Hints\r\n\r\n",
    "a header without a colon": b"HTTP/1.1 200 OK\r\nnonsense\r\n\r\n",
    "a header line without an end": (b"HTTP/1.1 200 OK\r\nX: ", b"x" * 10_000, 0.0),
    "headers without an end": (b"HTTP/1.1 200 OK\r\n", b"X: y\r\n" * 100, 0.0),
    "100 Continue for ever": (b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 50, 0.0),
    "100 Continue now and then": (b"", b"HTTP/1.1 100 Continue\r\n\r\n", 0.02),
    "headers that trickle": (b"HTTP/1.1 200 OK\r\nX: ", b"x", 0.02),
    "a status that trickles": (b"HTTP", b"/", 0.02),
    "a body that trickles": (answer(b"", length=1_000_000) + b'{"sha":', b" ", 0.02),
    "a body without an end": (answer(b"", length=None) + b'{"sha":', b" " * 65536, 0.0),
    "chunks without an end": (answer(b"", "Transfer-Encoding: chunked", length=None), b"4\r\n    \r\n" * 5000, 0.0),
    "chunks that trickle": (answer(b"", "Transfer-Encoding: chunked", length=None), b"1\r\n \r\n", 0.02),
    "a chunk of nonsense": answer(b"zz\r\n", "Transfer-Encoding: chunked", length=None),
    "a chunk of less than nothing": answer(b"-5\r\n{}\r\n", "Transfer-Encoding: chunked", length=None),
    "trailers without an end": (answer(b"0\r\n", "Transfer-Encoding: chunked", length=None), b"X: y\r\n" * 500, 0.0),
    "a length of 5,000 digits": answer(b"", f"Content-Length: {'9' * 5000}", length=None),
    "a length beyond memory": answer(b"{}", length=1 << 50),
    "a coding that unfolds": answer(gzip.compress(bytes(50_000_000)), "Content-Encoding: gzip"),
    "a coding that nobody asked for": answer(b"{}", "Content-Encoding: br"),
    "a damaged coding": answer(b"\x1f\x8b\x08" + b"x" * 50, "Content-Encoding: gzip"),
    "a redirect in a circle": moved(f"/api/models/{REPO}"),
    "a redirect without a place": answer(b"", status="302 Found"),
}  # fmt: skip

PLACES = {
    "a host of bad brackets": "http://[::1/x",
    "a host that is no IPv6": "http://[zz]/x",
    "a port out of range": "http://127.0.0.1:99999/x",
    "a port of letters": "http://127.0.0.1:http/x",
    "port 0": "http://127.0.0.1:0/x",
    "no host": "http:///x",
    "empty labels": "http://a..b/x",
    "a label of 70 letters": f"http://{'a' * 70}.example/x",
    "a file": "file:///etc/passwd",
    "another scheme": "gopher://127.0.0.1/x",
    "a NUL": "http://127.0.0.1\0/x",
}
RANGES: dict[str, bytes | tuple[bytes, bytes, float]] = {
    "a range of 5,000 digits": answer(b"x", f"Content-Range: bytes {'9' * 5000}-1/2", status="206 Partial Content"),
    "a range of letters": answer(b"x", "Content-Range: bytes a-b/c", status="206 Partial Content"),
    "an empty range": answer(b"x", "Content-Range:", status="206 Partial Content"),
    "another range": answer(b"x", "Content-Range: bytes 5-9/145416", status="206 Partial Content"),
    "a whole that is a page": answer(b"<html>", json=False),
    "204": answer(b"", status="204 No Content", length=None),
    "304": answer(b"", status="304 Not Modified", length=None),
    "headers that trickle": (b"HTTP/1.1 206 Partial\r\nX: ", b"x", 0.02),
    "100 Continue for ever": (b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 50, 0.0),
    "chunks that trickle": (answer(b"", "Transfer-Encoding: chunked", length=None, json=False), b"1\r\n \r\n", 0.02),
    "a coding nobody asked for": answer(bytes(145_416), "Content-Encoding: br", json=False),
    "no HTTP": b"SSH-2.0-OpenSSH_9.6\r\n",
}  # fmt: skip


def fault(stage: str, match: str, case: bytes | tuple[bytes, bytes, float]) -> Fault:
    raw, again, seconds = case if isinstance(case, tuple) else (case, b"", 0.0)
    return Fault("raw", match=match, stage=stage, times=None, raw=raw, again=again, seconds=seconds)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def _small_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where an answer has no end, the test need not wait for the real bound."""
    monkeypatch.setattr("k3tool.hub.remote.API_LIMIT", 1 << 20)


def refusal(hub: StandIn, folder: Path) -> K3Error:
    with pytest.raises(K3Error) as caught:
        fetch(REPO, folder, endpoint=hub.endpoint, token="hf_secret", policy=SOON, clock=FakeClock(), max_workers=2)
    error = caught.value
    for line in (error.message, error.hint):
        assert line and len(line) < 700 and line.isprintable()
    assert all("hf_secret" not in str(request.headers) for request in hub.requests if request.role == "data")
    return error


@pytest.fixture
def hub(mini: Path) -> Iterator[StandIn]:
    with serve(mini, REPO) as stand_in:
        yield stand_in


@pytest.mark.parametrize("case", LISTS)
def test_a_list_that_is_none(hub: StandIn, tmp_path: Path, case: str):
    hub.faults.add(fault("api", "*", LISTS[case]))
    error = refusal(hub, tmp_path / "out")
    assert isinstance(error, RemoteError), error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("stage", ["api", "resolve", "data"])
@pytest.mark.parametrize("place", PLACES)
def test_a_redirect_to_no_place(hub: StandIn, tmp_path: Path, stage: str, place: str):
    match = "*" if stage == "api" else SHARD
    hub.faults.add(fault(stage, match, moved(PLACES[place])))
    assert isinstance(refusal(hub, tmp_path / "out"), RemoteError)
    assert not (tmp_path / "out" / SHARD).exists()


@pytest.mark.parametrize("case", RANGES)
@pytest.mark.parametrize("stage", ["resolve", "data"])
def test_content_that_is_none(hub: StandIn, tmp_path: Path, case: str, stage: str):
    if stage == "resolve" and "range" in case:
        pytest.skip("an address has no range")
    hub.faults.add(fault(stage, SHARD, RANGES[case]))
    error = refusal(hub, tmp_path / "out")
    assert isinstance(error, RemoteError), error
    assert not (tmp_path / "out" / SHARD).exists()


# -- odd, and yet proven by size and digest --


def coded(data: bytes, how: str) -> bytes:
    """An answer with all of `data`, coded or framed as some servers and caches do."""
    raw_deflate = zlib.compressobj(wbits=-15)
    bodies: dict[str, tuple[bytes, tuple[str, ...], int | None]] = {
        "gzip": (gzip.compress(data), ("Content-Encoding: gzip",), -1),
        "x-gzip in capitals": (gzip.compress(data), ("Content-Encoding: X-GZIP",), None),
        "deflate": (zlib.compress(data), ("Content-Encoding: deflate",), -1),
        "deflate without its head": (raw_deflate.compress(data) + raw_deflate.flush(), ("Content-Encoding: deflate",), -1),
        "identity": (data, ("Content-Encoding: identity", 'ETag: W/"abc"', "Content-Type: text/html"), -1),
        "no length": (data, ('ETag: "changed"',), None),
        "chunks": (b"".join(b"%x\r\n%s\r\n" % (len(p), p) for p in (data[:9], data[9:])) + b"0\r\n\r\n",
                   ("Transfer-Encoding: chunked",), None),
        "gzip in chunks": (b"%x\r\n%s\r\n0\r\n\r\n" % (len(gzip.compress(data)), gzip.compress(data)),
                           ("Transfer-Encoding: chunked", "Content-Encoding: gzip"), None),
    }  # fmt: skip
    body, headers, length = bodies[how]
    return answer(body, *headers, json=False, length=length)


CODINGS = ("gzip", "x-gzip in capitals", "deflate", "deflate without its head", "identity", "no length", "chunks",
           "gzip in chunks")  # fmt: skip


@pytest.mark.parametrize("how", CODINGS)
def test_odd_answers_are_judged_by_size_and_digest(hub: StandIn, mini: Path, tmp_path: Path, how: str):
    for name in ("config.json", SHARD):
        hub.faults.add(fault("data", name, coded((mini / name).read_bytes(), how)))
    fetch(REPO, tmp_path / "out", endpoint=hub.endpoint, policy=SOON)
    for name in ("config.json", SHARD):
        assert (tmp_path / "out" / name).read_bytes() == (mini / name).read_bytes()
    source = HubSource(REPO, endpoint=hub.endpoint, policy=SOON)
    assert source.read(SHARD, 1000, 5000) == (mini / SHARD).read_bytes()[1000:6000]
    source.close()


def test_a_coded_range_is_asked_for_again_as_a_whole(hub: StandIn, mini: Path, tmp_path: Path):
    data = (mini / SHARD).read_bytes()
    header = f"Content-Range: bytes 0-{len(data) - 1}/{len(data)}"
    part = answer(gzip.compress(data), header, "Content-Encoding: gzip", status="206 Partial Content", json=False)
    hub.faults.add(Fault("raw", match=SHARD, raw=part, times=1))
    fetch(REPO, tmp_path / "out", endpoint=hub.endpoint, policy=SOON)
    assert (tmp_path / "out" / SHARD).read_bytes() == data
    asked = [r.headers.get("range") for r in hub.requests if r.path.startswith(f"/repos/{REPO}/{hub.repos[REPO].files[SHARD].sha256}")]  # fmt: skip
    assert asked == [f"bytes=0-{len(data) - 1}", None]


def test_a_coded_answer_with_wrong_content_never_gets_its_name(hub: StandIn, mini: Path, tmp_path: Path):
    data = bytearray((mini / SHARD).read_bytes())
    data[-5] ^= 1
    hub.faults.add(fault("data", SHARD, coded(bytes(data), "gzip")))
    with pytest.raises(K3Error, match="sha256 differs") as failure:
        fetch(REPO, tmp_path / "out", endpoint=hub.endpoint, policy=SOON)
    assert failure.value.exit_code == 1 and not (tmp_path / "out" / SHARD).exists()


# -- names and numbers of files --


def test_names_as_long_as_a_file_system_has_them(hub: StandIn, mini: Path, tmp_path: Path):
    names = ["x" * 250, "y" * 255, "z" * 200 + "/" + "z" * 250, "é" * 127]
    files = dict(hub.repos[REPO].files)
    hub.add(REPO, {**files, **{name: HubFile(name, b"long") for name in names}})
    fetch(REPO, tmp_path / "out", endpoint=hub.endpoint)
    assert {name for name in contents(tmp_path / "out") if len(name) > 100} == set(names)
    hub.add(REPO, {**files, "é" * 128: HubFile("é" * 128, b"too long")})
    with pytest.raises(CheckpointCorrupt, match="cannot be written"):
        fetch(REPO, tmp_path / "two", endpoint=hub.endpoint)


def test_a_repository_of_many_files(hub: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    many = [{"rfilename": f"notes/{n:05}.txt", "size": 3, "blobId": "a" * 40} for n in range(30_000)]
    files = [file.as_sibling() for file in hub.repos[REPO].files.values()]
    monkeypatch.setattr("k3tool.hub.remote.API_LIMIT", 8 << 20)
    hub.faults.add(fault("api", "*", info(siblings=[*files, *many])))
    source = HubSource(REPO, endpoint=hub.endpoint)
    assert len(source.files()) == 30_000 + len(files)
    source.close()
    monkeypatch.setattr("k3tool.hub.remote.FILE_LIMIT", 20_000)
    assert "lists 30" in refusal(hub, tmp_path / "out").message


# -- no silence --


@pytest.mark.parametrize("stage", ["api", "resolve", "data"])
def test_a_silent_server_is_said_to_be_waited_for(
    hub: StandIn, tmp_path: Path, stage: str, monkeypatch: pytest.MonkeyPatch
):
    said = Recorder()
    monkeypatch.setattr("k3tool.events._host.progress", said)
    hub.faults.add(fault(stage, "*" if stage == "api" else SHARD, (b"HTTP/1.1 200 OK\r\nX: ", b"x", 0.01)))
    refusal(hub, tmp_path / "out")
    assert said.items and all(text.startswith("waiting for 127.0.0.1:") for text in said.items)


def test_the_token_follows_no_redirect_to_another_host(mini: Path, tmp_path: Path):
    with serve(mini, REPO) as hub, serve(mini, REPO) as other:
        for stage, match in (("api", "*"), ("resolve", SHARD)):
            path = f"/api/models/{REPO}" if stage == "api" else f"/{REPO}/resolve/main/{SHARD}"
            hub.faults.add(Fault("raw", match=match, stage=stage, raw=moved(other.endpoint + path), times=1))  # type: ignore[arg-type]
        source = HubSource(REPO, endpoint=hub.endpoint, token="hf_secret", policy=SOON)
        source.read(SHARD, 0, 10)
        source.close()
        assert any("hf_secret" in str(request.headers) for request in hub.requests)
        assert other.requests and all("hf_secret" not in str(request.headers) for request in other.requests)


def test_what_was_begun_survives_a_hostile_hour(hub: StandIn, mini: Path, tmp_path: Path):
    hub.faults.add(Fault("drop", match=SHARD, after=100_000))
    hub.faults.add(Fault("status", match=SHARD, times=None))
    refusal(hub, tmp_path / "out")
    hub.faults.clear()
    hub.faults.add(fault("data", SHARD, answer(b"<html>", json=False)))
    refusal(hub, tmp_path / "out")
    assert (tmp_path / "out" / LEDGER_FOLDER / f"{SHARD}.k3partial").stat().st_size == 100_000
    hub.faults.clear()
    result = fetch(REPO, tmp_path / "out", endpoint=hub.endpoint)
    assert {file.name: file.status for file in result.files}[SHARD] == "resumed"
