"""What people write for a repository of the Hub: `org/name[@revision]`, `hf://`, or an address pasted from a browser."""

from __future__ import annotations

import os
import re
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from k3tool.errors import UsageError

_NAME = re.compile(r"\w[\w.-]{0,95}/\w[\w.-]{0,95}", re.ASCII)
_REVISION = re.compile(r"\w[\w./-]{0,199}", re.ASCII)
HUB_HOSTS = ("huggingface.co", "www.huggingface.co", "hf.co", "hub.huggingface.co")
PAGES = ("tree", "blob", "resolve", "raw", "commit", "commits", "blame", "edit", "discussions")
NAMED = "write org/name or org/name@revision"


class Address(NamedTuple):
    repo: str
    revision: str | None


def parse_repository(text: str) -> Address | None:
    """The repository that `text` names, None where it cannot be one. Of an address the revision is taken too.

    Raises UsageError for what is an address, and not that of a model on the Hub in use.
    """
    if text.startswith("hf://"):
        rest = text.removeprefix("hf://").removeprefix("models/").rstrip("/")
        found = _named(rest)
        if found is None:
            raise UsageError(f"not a repository: {text}", hint=NAMED)
        return found
    if "://" in text or text.lower().startswith(tuple(f"{host}/" for host in HUB_HOSTS)):
        return _pasted(text)
    return _named(text)


def _named(text: str) -> Address | None:
    name, at, revision = text.partition("@")
    if not _NAME.fullmatch(name) or (at and not _REVISION.fullmatch(revision)):
        return None
    if ".." in name or ".." in revision:
        raise UsageError(f"not a repository: {text}", hint=NAMED)
    return Address(name, revision if at else None)


def _pasted(text: str) -> Address:
    """`https://HOST/org/name[/tree/REVISION[/...]]`, with or without the scheme."""
    try:
        split = urlsplit(text if "://" in text else f"https://{text}")
        host, here = (split.hostname or "").lower(), urlsplit(os.environ.get("HF_ENDPOINT", ""))
        base = here.path.strip("/") if host == here.hostname else ""
        is_hub = split.scheme in ("http", "https") and (host in HUB_HOSTS or host == here.hostname)
    except ValueError:
        raise UsageError(f"not an address: {text}", hint=NAMED) from None
    if not is_hub:
        raise UsageError(
            f"{text} is not an address of the Hub in use ({here.hostname or HUB_HOSTS[0]})",
            hint=f"{NAMED}; another Hub is named by HF_ENDPOINT",
        )
    path = split.path.strip("/").removeprefix(base).strip("/").removeprefix("api/").removeprefix("models/")
    parts = [unquote(part) for part in path.split("/") if part]
    if parts[:1] and parts[0] in ("datasets", "spaces", "collections", "papers", "docs"):
        raise UsageError(f"{text} is not a model but one of {parts[0]}", hint=NAMED)
    revision = None
    if len(parts) > 3 and parts[2] in PAGES and parts[2] != "discussions":
        revision = "/".join(parts[3:6]) if parts[3] == "refs" else parts[3]
    found = _named("/".join(parts[:2]).removesuffix(".git"))
    if found is None or (len(parts) > 2 and parts[2] not in PAGES):
        raise UsageError(f"{text} does not name a repository", hint=NAMED)
    if revision is None:
        return found
    if not _REVISION.fullmatch(revision) or ".." in revision:
        raise UsageError(f"{text} names a revision that cannot be one: {revision[:80]!r}", hint=NAMED)
    return Address(found.repo, revision)
