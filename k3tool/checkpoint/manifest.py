"""`k3tool-manifest.json`: size and SHA-256 of every file that k3tool wrote into a folder, and where it came from.

`verify --depth bytes` compares with it. Written last, atomically, after every file it names is in place.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from k3tool.checkpoint.outside import Fields, corrupt, parse_object, read_file
from k3tool.checkpoint.writer import write_atomic
from k3tool.disk import disk_errors

MANIFEST_NAME = "k3tool-manifest.json"
MAX_MANIFEST_BYTES = 64 << 20
MAX_DIGESTED_BYTES = 64 << 20
_HEX = re.compile(r"[0-9a-f]{64}", re.ASCII)


@dataclass(frozen=True)
class FileRecord:
    size: int
    sha256: str


@dataclass
class Manifest:
    """command: what wrote the folder. source and revision: what it was made from (commit for a Hub repository)."""

    command: str
    source: str
    revision: str | None = None
    files: dict[str, FileRecord] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)

    def write(self, folder: Path) -> FileRecord:
        """Write it, and return what a file with these bytes is to have."""
        data = self.as_bytes()
        write_atomic(folder / MANIFEST_NAME, data)
        return FileRecord(len(data), hashlib.sha256(data).hexdigest())

    def as_bytes(self) -> bytes:
        from k3tool import __version__

        document = {
            "k3tool": __version__,
            "command": self.command,
            "source": self.source,
            "revision": self.revision,
            **self.extra,
            "files": {name: {"size": r.size, "sha256": r.sha256} for name, r in sorted(self.files.items())},
        }
        return json.dumps(document, indent=1, ensure_ascii=False).encode(errors="replace") + b"\n"


def is_as_recorded(folder: Path, name: str, record: FileRecord) -> bool:
    """Whether this is a file below `folder`, no link, that still is what a manifest says of it: large ones by their size. A
    manifest may be a stranger's that names files of the user's."""
    path = folder / name
    if not is_inner(name) or path.is_symlink() or not path.is_file():
        return False
    if path.parent.resolve() != folder.resolve() / PurePosixPath(name).parent:
        return False
    with disk_errors(path):
        if path.stat().st_size != record.size:
            return False
        return record.size > MAX_DIGESTED_BYTES or hashlib.sha256(path.read_bytes()).hexdigest() == record.sha256


def is_inner(name: str) -> bool:
    """Whether a name with forward slashes stays below its folder."""
    path = PurePosixPath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts and "\0" not in name


def load_manifest(folder: Path) -> Manifest | None:
    """The manifest of a folder, or None where there is none. Raises CheckpointCorrupt for a damaged one."""
    path = folder / MANIFEST_NAME
    if not path.is_file():
        return None
    fail = corrupt(f"remove {path}, then verify against the Hub's digests")
    with disk_errors(path):
        text = read_file(path, MAX_MANIFEST_BYTES, fail=fail)
    document = parse_object(text, where=f"{path}: not a manifest of k3tool", fail=fail, own=True)
    files = {name: _record(entry) for name, entry in document.each("files")}
    if not all(map(is_inner, files)):
        raise document.bad("files", "names below its folder")
    extra = {k: v for k, v in document.values.items() if k not in ("k3tool", "command", "source", "revision", "files")}
    return Manifest(document.text("command"), document.text("source"), document.text("revision", None), files, extra)


def _record(entry: Fields) -> FileRecord:
    record = FileRecord(entry.integer("size"), entry.text("sha256"))
    if not _HEX.fullmatch(record.sha256):
        raise entry.bad("sha256", "64 hexadecimal digits")
    return record
