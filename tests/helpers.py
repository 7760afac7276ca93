"""Small tools shared by tests: raw safetensors bytes, copies of the golden checkpoint, the command line in process."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from k3tool.cli import app
from tests import hints


def raw_shard(header: Any, data: bytes = b"", *, length: int | None = None) -> bytes:
    """A safetensors file from any header (object or raw bytes), with any claimed header length."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def read_shard_header(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length])


def copy_checkpoint(source: Path, target: Path) -> Path:
    """A writable copy of a checkpoint, without its golden results."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("golden.safetensors"))
    for path in [target, *target.rglob("*")]:
        path.chmod(path.stat().st_mode | 0o200)
    return target


class Ran:
    """What one command line did: exit code, stdout, stderr."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def json(self) -> dict[str, Any]:
        """The one JSON document on stdout."""
        return json.loads(self.out)


def k3tool(capsys: pytest.CaptureFixture[str], *arguments: object) -> Ran:
    """Run a command line in this process."""
    capsys.readouterr()
    code = app.run([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    hints.follow(out, err)
    return Ran(code, out, err)


def k3tool_process(*arguments: object, **environment: str) -> Ran:
    """Run a command line in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "k3tool", *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        timeout=300,
    )
    hints.follow(done.stdout, done.stderr)
    return Ran(done.returncode, done.stdout, done.stderr)
