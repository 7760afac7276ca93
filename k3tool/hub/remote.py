"""One revision of a repository through huggingface_hub: its commit, its files with their digests, their addresses.

Every failure becomes one of ours here, with what to do about it: final ones RemoteError, passing ones Transient.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from k3tool.errors import CheckpointCorrupt, K3Error, RemoteError, UsageError
from k3tool.hub.http import Refused, origin, retry_after
from k3tool.hub.retry import Transient

API_TIMEOUT_S = 30.0
_SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)
_SHA1 = re.compile(r"[0-9a-f]{40}", re.ASCII)
COMMIT = _SHA1
LOGIN_HINT = "run `hf auth login` or set HF_TOKEN, then run the same command again"


@dataclass(frozen=True)
class RemoteFile:
    """Size and the digest that the Hub publishes: SHA-256 for large files, the git blob SHA-1 for small ones."""

    size: int
    sha256: str | None = None
    git_sha1: str | None = None

    @property
    def etag(self) -> str | None:
        return self.sha256 or self.git_sha1


@dataclass(frozen=True)
class Listing:
    """What a revision resolved to: the commit, and every file of it."""

    commit: str
    files: Mapping[str, RemoteFile]


def endpoint_of(endpoint: str | None = None) -> str:
    """The Hub's address: the argument, HF_ENDPOINT, or the library's default. No trailing slash."""
    from huggingface_hub import constants

    endpoint = (endpoint or os.environ.get("HF_ENDPOINT") or constants.ENDPOINT).rstrip("/")
    if origin(endpoint)[0] not in ("http", "https") or not origin(endpoint)[1]:
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


def list_revision(repo: str, revision: str | None, endpoint: str, token: str | bool | None) -> Listing:
    """Resolve the revision to a commit and list its files. Raises RemoteError, CheckpointCorrupt, Transient."""
    from huggingface_hub import HfApi

    api = HfApi(endpoint=endpoint, token=token, library_name="k3tool")
    what = f"{repo}@{revision}" if revision else repo
    try:
        info = api.model_info(repo, revision=revision, files_metadata=True, timeout=API_TIMEOUT_S)
        commit = str(info.sha or "").lower()
        if not COMMIT.fullmatch(commit):
            raise CheckpointCorrupt(f"{what}: the Hub names no commit (found {info.sha!r})", hint="check HF_ENDPOINT")
        files = {entry.rfilename: _from_sibling(entry) for entry in info.siblings or []}
        if any(file is None for file in files.values()):  # a mirror that lists names without sizes
            tree = api.list_repo_tree(repo, recursive=True, revision=commit)
            files = {entry.path: _from_tree(entry) for entry in tree if hasattr(entry, "blob_id")}
    except K3Error:
        raise
    except Exception as error:
        raise translate(error, what, endpoint, token_sent=_has_token(token)) from None
    checked = {check_path(name, what): file for name, file in files.items() if file is not None}
    _refuse_collisions(checked, what)
    return Listing(commit, checked)


def find_address(repo: str, commit: str, name: str, file: RemoteFile, endpoint: str, token: str | bool | None) -> str:
    """The address that serves the content now (signed, and good for a while).

    Raises RemoteError, Transient; CheckpointCorrupt where the Hub's answer contradicts its own file list.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    url = hf_hub_url(repo, name, revision=commit, endpoint=endpoint)
    what = f"{repo}@{commit[:12]} {name}"
    try:
        found = get_hf_file_metadata(url, token=token, timeout=API_TIMEOUT_S, library_name="k3tool", endpoint=endpoint)
    except Exception as error:
        raise translate(error, what, endpoint, token_sent=_has_token(token)) from None
    pairs = (
        ("commit", commit, found.commit_hash),
        ("size", file.size, found.size),
        ("digest", file.etag, _hex(found.etag)),
    )
    for label, expected, seen in pairs:
        if expected is not None and seen is not None and expected != seen:
            raise CheckpointCorrupt(
                f"{what}: the Hub's answer contradicts its file list ({label}: expected {expected}, found {seen})",
                hint="check HF_ENDPOINT; a mirror may be out of date",
                expected=expected,
                found=seen,
            )
    return found.location


def translate(error: Exception, what: str, endpoint: str, *, token_sent: bool) -> Exception:
    """A failure of huggingface_hub or its HTTP client as ours; one that is none of theirs unchanged."""
    name = type(error).__name__
    response: Any = getattr(error, "response", None)
    if name == "OfflineModeIsEnabled":
        return offline_error(what)
    if name == "HFValidationError":
        return UsageError(f"not a repository name: {what}", hint="write org/name or org/name@revision")
    if response is not None and isinstance(getattr(response, "status_code", None), int):
        return judge(response.status_code, response.headers, what, endpoint, token_sent=token_sent)
    root = type(error).__module__.partition(".")[0]
    if root in ("httpx", "httpx2", "httpcore", "httpcore2") or isinstance(error, OSError):
        reason = f"no answer from {endpoint} ({str(error) or name})"
        return Transient(reason, hint=f"check the network and HF_ENDPOINT, then {_AGAIN}")
    return error


_AGAIN = "run the same command again: it goes on from what is on disk"


def judge(status: int, headers: Mapping[str, str], what: str, endpoint: str, *, token_sent: bool) -> Exception:
    """What an HTTP error of the Hub means and what to do about it."""
    lower = {key.lower(): value for key, value in headers.items()}
    code = lower.get("x-error-code", "")
    said = lower.get("x-error-message", "").strip()[:300]
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
        or any(part in ("", ".", "..") or len(part) > 255 or part.endswith((" ", ".")) for part in parts)
        or any(char in '\\:*?"<>|' or ord(char) < 32 or ord(char) == 127 for char in name)
        or parts[0].lower() == ".git"
        or name.lower().startswith(".cache/huggingface")
    )
    if bad:
        raise CheckpointCorrupt(
            f"{what}: file name {name!r} leaves the folder or cannot be written", hint="do not use this repository"
        )
    return name


def _refuse_collisions(files: Mapping[str, RemoteFile], what: str) -> None:
    folders = {"/".join(parts[:n]) for name in files for parts in [name.split("/")] for n in range(1, len(parts))}
    for name in files:
        if name in folders:
            raise CheckpointCorrupt(f"{what}: {name!r} is both a file and a folder", hint="do not use this repository")


def _from_sibling(entry: Any) -> RemoteFile | None:
    if entry.size is None:
        return None
    lfs = entry.lfs
    sha256 = lfs.get("sha256") if isinstance(lfs, dict) else getattr(lfs, "sha256", None)
    return _remote(entry.size, sha256, None if lfs else entry.blob_id)


def _from_tree(entry: Any) -> RemoteFile:
    lfs = entry.lfs
    sha256 = lfs.get("sha256") if isinstance(lfs, dict) else getattr(lfs, "sha256", None)
    return _remote(entry.size, sha256, None if lfs else entry.blob_id)


def _remote(size: Any, sha256: Any, git_sha1: Any) -> RemoteFile:
    if isinstance(size, bool) or not isinstance(size, int) or not 0 <= size < 1 << 60:
        raise CheckpointCorrupt(f"the Hub lists a file of size {size!r}", hint="check HF_ENDPOINT")
    sha256 = str(sha256).lower() if sha256 else None
    git_sha1 = str(git_sha1).lower() if git_sha1 else None
    return RemoteFile(
        size,
        sha256 if sha256 and _SHA256.fullmatch(sha256) else None,
        git_sha1 if git_sha1 and _SHA1.fullmatch(git_sha1) else None,
    )


def _hex(etag: str | None) -> str | None:
    """An ETag that is a digest; other ETags of mirrors say nothing."""
    return etag if etag and (_SHA256.fullmatch(etag) or _SHA1.fullmatch(etag)) else None


def _has_token(token: str | bool | None) -> bool:
    return authorization(token) is not None


def authorization(token: str | bool | None) -> str | None:
    """The `Authorization` header that huggingface_hub would send, or None."""
    from huggingface_hub.utils import build_hf_headers

    headers = build_hf_headers(token=token, library_name="k3tool")
    return headers.get("authorization") or headers.get("Authorization")
