"""What a file holds that is not what its name says: pointers, pages and archives that stand where a shard should.

Answered from the first kilobytes, so that a message can name what is there and a remedy can fit it.
"""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

from k3tool.checkpoint.outside import decode_json

HEAD_BYTES = 1 << 16  # what `recognise` likes to see of a file
_LFS = re.compile(
    rb"version https://[\w./-]{1,100}/spec/v1\s.*?oid sha256:([0-9a-f]{64})\s+size (\d{1,20})", re.ASCII | re.DOTALL
)
_ANNEX = re.compile(rb"[\w./\\-]{0,300}[/\\]annex[/\\]objects[/\\]", re.ASCII)
_RANKS = re.compile(rb"[A-Za-z0-9+/]+={0,2} \d+\s", re.ASCII)  # of a tokenizer
_TITLE = re.compile(rb"<title[^>]{0,200}>(.{0,300}?)</title", re.IGNORECASE | re.DOTALL)
_XML_ERROR = re.compile(rb"<Code>([^<]{1,200})</Code>\s*(?:<Message>([^<]{0,300}))?", re.DOTALL)
_MAGIC = (
    (b"\x1f\x8b", "gzip", "gzip-compressed data"),
    (b"\x28\xb5\x2f\xfd", "compressed", "zstd-compressed data"),
    (b"\xfd7zXZ\x00", "compressed", "xz-compressed data"),
    (b"PK\x03\x04", "archive", "a zip archive (PyTorch's .bin and .pt files are such)"),
    (b"GGUF", "gguf", "a GGUF file"),
    (b"\x93NUMPY", "numpy", "a numpy array"),
    (b"\x00\x05\x16\x07", "appledouble", "an AppleDouble file, which macOS writes beside the real one"),
    (b"\x80\x02", "pickle", "a Python pickle"),
    (b"\x80\x04", "pickle", "a Python pickle"),
)


class Content(NamedTuple):
    """kind: `lfs`, `annex`, `page`, `answer`, `gzip`, `empty`, `zeros`, ...; text: what is there, for a sentence."""

    kind: str
    text: str


def recognise(head: bytes, size: int) -> Content | None:
    """What a file of `size` bytes that begins with `head` is, where that is known and neither a shard nor plain JSON."""
    if size == 0:
        return Content("empty", "no byte")
    if head and not head.strip(b"\0"):
        return Content("zeros", f"only zero bytes (the first {len(head):,} of {size:,}): it was reserved, not written")
    if match := _LFS.match(head):
        return Content("lfs", f"a Git LFS pointer (to sha256 {match[1].decode()}, {int(match[2]):,} bytes)")
    if head.startswith(b"# xet version"):
        return Content("lfs", "a Xet pointer")
    if _ANNEX.match(head[:400]):
        return Content("annex", "a git-annex pointer")
    for magic, kind, text in _MAGIC:
        if head.startswith(magic) and not _is_shard(head):
            return Content(kind, text)
    if _is_shard(head):
        return Content("safetensors", "a safetensors file")
    return _page(head.lstrip(b"\xef\xbb\xbf \t\r\n"), size)


def _is_shard(head: bytes) -> bool:
    return len(head) > 9 and int.from_bytes(head[:8], "little") < 1 << 27 and head[8:9] == b"{"


def _page(text: bytes, size: int) -> Content | None:
    """Answers of servers that were saved under the file's name."""
    start = text[:256].lower()
    if start.startswith((b"<!doctype html", b"<html", b"<head", b"<!--", b"<script")):
        title = _TITLE.search(text)
        return Content("page", f"an HTML page{_quoted(title[1]) if title else ''}")
    if start.startswith((b"<?xml", b"<error")):
        error = _XML_ERROR.search(text)
        said = b": ".join(part for part in error.groups() if part) if error else b""
        return Content("answer", f"an XML answer of a server{_quoted(said)}")
    if start.startswith(b"{") and size <= HEAD_BYTES:
        return _json_answer(text)
    if size <= 4096 and not start.startswith((b"{", b"[")) and _is_prose(text):
        return Content("answer", f"text{_quoted(text)}")
    return None


def _json_answer(text: bytes) -> Content | None:
    try:
        document = decode_json(text.decode(errors="replace"), unique_keys=False)
    except (ValueError, RecursionError):
        return None
    said: Any = next((document[k] for k in ("error", "message", "detail", "errors") if document.get(k)), None)
    if said is None or len(document) > 8 or "weight_map" in document:
        return None
    return Content("answer", f"a server's answer{_quoted(json.dumps(said, ensure_ascii=False).encode())}")


def _is_prose(text: bytes) -> bool:
    return (
        len(text) > 3
        and b" " in text
        and not _RANKS.match(text)
        and all(32 <= byte < 127 or byte in b"\t\r\n" for byte in text)
    )


def _quoted(text: bytes) -> str:
    words = " ".join(text.decode("utf-8", "replace").strip("\"' \r\n").split())
    return f" ({words[:120]!r})" if words else ""
