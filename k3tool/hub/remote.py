"""One revision of a repository as the Hub's API tells it: its commit, its files with their digests, their addresses.

Every answer is hostile until checked, and every failure becomes one of ours here, with what to do about it: final ones
RemoteError, passing ones Transient. Token and names of the environment are huggingface_hub's.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any
from urllib.parse import quote

from k3tool.checkpoint.outside import parse_json, shown
from k3tool.errors import CheckpointCorrupt, K3Error, RemoteError, UsageError
from k3tool.hub.answer import Answer, ask
from k3tool.hub.connect import CHECK_HUB, follow, is_address, origin
from k3tool.hub.http import ODD_LIMIT, Connections, Refused, retry_after
from k3tool.hub.listing import Listing, RemoteFile
from k3tool.hub.retry import RESUME_HINT, Transient

API_LIMIT = 48 << 20  # bytes of one list of files
FILE_LIMIT = 150_000
PAGE_LIMIT = 1000
_REPO = re.compile(r"[\w.-]{1,96}/[\w.-]{1,96}", re.ASCII)
_NEXT = re.compile(r'<([^<>]{1,4000})>\s*;\s*rel="?next"?', re.IGNORECASE)
_SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)
_SHA1 = re.compile(r"[0-9a-f]{40}", re.ASCII)
COMMIT = _SHA1
LOGIN_HINT = "run `hf auth login` or set HF_TOKEN, then run the same command again"


def endpoint_of(endpoint: str | None = None) -> str:
    """The Hub's address: the argument, HF_ENDPOINT, or the library's default. No trailing slash."""
    from huggingface_hub import constants

    endpoint = (endpoint or os.environ.get("HF_ENDPOINT") or constants.ENDPOINT).rstrip("/")
    if not is_address(endpoint):
        raise UsageError(f"HF_ENDPOINT is not a web address: {endpoint!r}", hint="set it like https://hub.example.org")
    return endpoint


def is_offline() -> bool:
    """HF_HUB_OFFLINE (or TRANSFORMERS_OFFLINE), as it stands now."""
    names = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    return any(os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE") for name in names)


def offline_error(what: str) -> RemoteError:
    return RemoteError(
        f"HF_HUB_OFFLINE is set, so {what} cannot be reached", hint="unset HF_HUB_OFFLINE, or name a local folder"
    )


@dataclass(frozen=True)
class Hub:
    """One Hub as it is asked: connections, address, token, and how this program calls itself."""

    pool: Connections
    endpoint: str
    token: str | bool | None = None

    @property
    def home(self) -> tuple[str, str, int]:
        return origin(self.endpoint)

    @property
    def headers(self) -> dict[str, str]:
        return {"User-Agent": user_agent(), "Accept": "*/*"}

    def ask(self, url: str, what: str, *, method: str = "GET", leave_home: bool = True) -> Answer:
        """An answer of 200 (or a redirect that is not followed). Raises Transient, RemoteError."""
        token = authorization(self.token)
        try:
            answer = ask(
                self.pool,
                url,
                method=method,
                headers=self.headers,
                authorization=token,
                home=self.home,
                limit=API_LIMIT,
                leave_home=leave_home,
            )
        except Transient as error:
            if error.unreachable or error.limit is None:
                raise Transient(
                    f"no answer from {self.endpoint} ({error.reason})",
                    hint=error.hint or f"check the network and HF_ENDPOINT, then {RESUME_HINT}",
                    unreachable=error.unreachable,
                ) from None
            raise
        if answer.status != 200 and not (300 < answer.status < 400 and "Location" in answer.headers):
            raise judge(answer.status, answer.headers, what, self.endpoint, token_sent=token is not None)
        return answer


def check_repo(repo: str, what: str) -> None:
    """Raises UsageError for what cannot be the name of a repository."""
    if not _REPO.fullmatch(repo) or ".." in repo or "--" in repo or repo.endswith(".git"):
        raise UsageError(f"not a repository name: {what}", hint="write org/name or org/name@revision")


def list_revision(hub: Hub, repo: str, revision: str | None) -> Listing:
    """Resolve the revision to a commit and list its files. Raises RemoteError, CheckpointCorrupt, Transient, UsageError."""
    what = f"{repo}@{revision}" if revision else repo
    check_repo(repo, what)
    at = f"/revision/{quote(revision, safe='')}" if revision else ""
    info = _parsed(hub, f"{hub.endpoint}/api/models/{repo}{at}?blobs=true", what)
    if not isinstance(info, dict):
        raise contradiction(what, hub.endpoint, f"a repository was asked for, found {shown(info)}")
    commit = info.get("sha")
    if not isinstance(commit, str) or not COMMIT.fullmatch(commit.lower()):
        raise contradiction(what, hub.endpoint, f"it names no commit, found {shown(commit)}")
    commit = commit.lower()
    entries = _entries(hub, what, info.get("siblings") or [], "rfilename")
    if any(size is None for size, _, _ in entries.values()):  # a mirror that lists names without sizes
        entries = _tree(hub, repo, commit, what)
    files = {check_path(name, what): _remote(hub, what, name, *entry) for name, entry in entries.items()}
    _refuse_collisions(files, what)
    return Listing(commit, files)


def _parsed(hub: Hub, url: str, what: str) -> Any:
    """The JSON of an answer. Raises Transient, a few times, where it is none: something may stand in between."""
    return _json(hub.ask(url, what), what, hub.endpoint)


def _json(answer: Answer, what: str, endpoint: str) -> Any:
    def fail(message: str) -> K3Error:
        raise Transient(message, limit=ODD_LIMIT, hint=CHECK_HUB)

    return parse_json(answer.data, where=f"the answer of {endpoint}", fail=fail, unique_keys=False)


Entry = tuple[Any, Any, Any]  # size, SHA-256 or None, git SHA-1 or None, as the Hub says them


def _entries(hub: Hub, what: str, listed: Any, key: str) -> dict[str, Entry]:
    """The files of a list: of a repository (`rfilename`, `lfs.sha256`, `blobId`) or of its tree (`path`, `lfs.oid`, `oid`)."""
    if not isinstance(listed, list):
        raise contradiction(what, hub.endpoint, f"its files are {shown(listed)}")
    if len(listed) > FILE_LIMIT:
        raise contradiction(what, hub.endpoint, f"it lists {len(listed)} files, more than a repository holds")
    found: dict[str, Entry] = {}
    for entry in listed:
        if not isinstance(entry, dict) or not isinstance(entry.get(key), str):
            raise contradiction(what, hub.endpoint, f"it lists a file without a name: {shown(entry)}")
        if key == "path" and entry.get("type") == "directory":
            continue
        lfs = entry.get("lfs")
        if lfs is not None and not isinstance(lfs, dict):
            raise contradiction(what, hub.endpoint, f"lfs of {shown(entry[key])} is {shown(lfs)}")
        sha256 = (lfs.get("sha256") or lfs.get("oid")) if lfs else None
        git = None if lfs else entry.get("blobId" if key == "rfilename" else "oid")
        found[entry[key]] = (entry.get("size"), sha256, git)
    return found


def _tree(hub: Hub, repo: str, commit: str, what: str) -> dict[str, Entry]:
    """All files by the route that lists a tree, page by page."""
    url = f"{hub.endpoint}/api/models/{repo}/tree/{commit}?recursive=true&expand=false"
    found: dict[str, Entry] = {}
    for _ in range(PAGE_LIMIT):
        answer = hub.ask(url, what)
        found |= _entries(hub, what, _json(answer, what, hub.endpoint), "path")
        if len(found) > FILE_LIMIT:
            break
        more = _NEXT.search({key.lower(): value for key, value in answer.headers.items()}.get("link", ""))
        if not more:
            return found
        url = follow(url, more[1])
        if origin(url) != hub.home:
            raise contradiction(what, hub.endpoint, f"the next page of its list is elsewhere: {url[:200]}")
    raise contradiction(what, hub.endpoint, f"its list of files does not end ({len(found)} so far)")


def contradiction(what: str, endpoint: str, found: str) -> RemoteError:
    """An answer that no Hub gives."""
    return RemoteError(f"{what}: the answer of {endpoint} contradicts itself: {found}", hint=CHECK_HUB)


def find_address(hub: Hub, repo: str, commit: str, name: str, file: RemoteFile) -> str:
    """The address that serves the content now (signed, and good for a while).

    Raises RemoteError, Transient; CheckpointCorrupt where the Hub's answer contradicts its own file list.
    """
    what = f"{repo}@{commit[:12]} {name}"
    url = f"{hub.endpoint}/{repo}/resolve/{commit}/{quote(name)}"
    answer = hub.ask(url, what, method="HEAD", leave_home=False)
    found = {key.lower(): value.strip() for key, value in answer.headers.items()}
    # What a server says of itself beside the Hub's own words (a coded length, a tag of a cache) proves nothing.
    pairs = (
        ("commit", commit, found.get("x-repo-commit", "").lower() or None),
        ("size", file.size, _number(found.get("x-linked-size", ""))),
        ("digest", file.etag, _hex(found.get("x-linked-etag") or found.get("etag"), file)),
    )
    for label, expected, seen in pairs:
        if expected is not None and seen is not None and expected != seen:
            raise CheckpointCorrupt(
                f"{what}: the Hub's answer contradicts its file list ({label}: expected {expected}, found {_plain(seen)})",
                hint="check HF_ENDPOINT; a mirror may be out of date",
                expected=expected,
                found=seen,
            )
    return str(answer.headers["Location"]) if answer.status != 200 else answer.url


def _plain(value: object) -> str:
    text = str(value)[:300]
    return text if text.isprintable() else ascii(text)


def _number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else None


def judge(status: int, headers: Mapping[str, str], what: str, endpoint: str, *, token_sent: bool) -> Exception:
    """What an HTTP error of the Hub means and what to do about it."""
    lower = {key.lower(): value for key, value in headers.items()}
    code = lower.get("x-error-code", "")
    said = _plain(lower.get("x-error-message", "").strip()[:300])
    if status in (408, 425, 429) or status >= 500:
        return Transient(f"HTTP {status} from {endpoint}", retry_after_s=retry_after(headers))

    def final(message: str, hint: str) -> RemoteError:
        return RemoteError(f"{message} (HTTP {status})", hint=hint, status=status)

    if code == "GatedRepo":
        terms = f"{endpoint}/{what.split('@')[0].split(' ')[0]}"
        if token_sent:
            return final(f"{what} is gated and this token has no access", f"ask for access at {terms}, then run again")
        return final(f"{what} is gated and no token was sent", f"accept the terms at {terms}; {LOGIN_HINT}")
    if code == "RevisionNotFound":
        return final(f"{what}: no such revision", "name a branch, tag or commit of the repository")
    if code == "EntryNotFound":
        return final(f"{what}: no such file", "the repository may have changed: start with a fresh file list")
    if status == 401 and token_sent:
        return final(f"{what}: the token was refused ({said or 'unauthorized'})", LOGIN_HINT)
    if status == 401:
        return final(f"{what} does not exist, or is private and no token was sent", f"check the name; {LOGIN_HINT}")
    if status == 403:
        return final(f"{what}: access denied ({said or 'forbidden'})", "use a token that may read this repository")
    if status == 404:
        return final(f"{what} does not exist on {endpoint}", "check the name, and HF_ENDPOINT where a mirror is used")
    return final(f"{what}: unexpected answer from {endpoint} ({said or 'no reason given'})", "check HF_ENDPOINT")


def judge_content(refused: Refused, what: str, endpoint: str, *, token_sent: bool) -> Exception:
    """A refused content request: from the Hub itself as above, from its storage a signed address that has expired."""
    if origin(refused.url) == origin(endpoint):
        return judge(refused.status, refused.headers, what, endpoint, token_sent=token_sent)
    host = origin(refused.url)[1]
    return Transient(
        f"{host} refused the address (HTTP {refused.status})",
        limit=6,
        stale_address=True,
        hint="check the clock of this machine and HF_ENDPOINT, then run the same command again",
    )


def check_path(name: str, what: str) -> str:
    """A file of a repository must stay inside the folder. Raises CheckpointCorrupt."""
    parts = name.split("/")
    bad = (
        not name
        or len(name) > 1024
        or any(0xD800 <= ord(char) < 0xE000 for char in name)
        or any(
            part in ("", ".", "..") or len(part.encode(errors="replace")) > 255 or part.endswith((" ", "."))
            for part in parts
        )
        or any(char in '\\:*?"<>|' or ord(char) < 32 or ord(char) == 127 for char in name)
        or parts[0].lower() == ".git"
        or name.lower().startswith(".cache/huggingface")
    )
    if bad:
        raise CheckpointCorrupt(
            f"{what}: file name {ascii(name)[:300]} leaves the folder or cannot be written",
            hint="do not use this repository",
        )
    return name


def _refuse_collisions(files: Mapping[str, RemoteFile], what: str) -> None:
    folders = {"/".join(parts[:n]) for name in files for parts in [name.split("/")] for n in range(1, len(parts))}
    for name in files:
        if name in folders:
            raise CheckpointCorrupt(f"{what}: {name!r} is both a file and a folder", hint="do not use this repository")


def _remote(hub: Hub, what: str, name: str, size: Any, sha256: Any, git_sha1: Any) -> RemoteFile:
    """A file of the list. What has not the form of a digest is none."""
    if isinstance(size, bool) or not isinstance(size, int) or not 0 <= size < 1 << 60:
        raise contradiction(what, hub.endpoint, f"{shown(name)} has size {shown(size)}")
    return RemoteFile(size, _digest(sha256, _SHA256), _digest(git_sha1, _SHA1))


def _digest(value: Any, form: re.Pattern[str]) -> str | None:
    found = value.lower() if isinstance(value, str) else ""
    return found if form.fullmatch(found) else None


def _hex(etag: str | None, file: RemoteFile) -> str | None:
    """An ETag that is a digest of the kind that the list has; other ETags of mirrors and caches say nothing."""
    text = (etag or "").removeprefix("W/").strip('"').lower()
    form = _SHA256 if file.sha256 else _SHA1
    return text if form.fullmatch(text) else None


def authorization(token: str | bool | None) -> str | None:
    """The `Authorization` header that huggingface_hub would send, or None. Raises UsageError for what is no token."""
    from huggingface_hub.utils import build_hf_headers

    headers = build_hf_headers(token=token, library_name="k3tool")
    found = headers.get("authorization") or headers.get("Authorization")
    if found and not (found.isascii() and found.isprintable()):
        raise UsageError("the token holds characters that no token has", hint=f"set HF_TOKEN again; {LOGIN_HINT}")
    return found


@cache
def user_agent() -> str:
    from huggingface_hub.utils import build_hf_headers

    return build_hf_headers(token=False, library_name="k3tool").get("user-agent", "k3tool")
