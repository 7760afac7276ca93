"""A checkpoint folder as a source: what cannot be read is told as what it is."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from k3tool.checkpoint.ranges import Reader
from k3tool.checkpoint.source import LocalSource
from k3tool.errors import K3Error


def failing_open(monkeypatch: pytest.MonkeyPatch, name: str, number: int, times: int = 1 << 30) -> None:
    left = [times]

    def failing(real: Any) -> Any:
        def open_(path: Any, *args: Any, **options: Any) -> Any:
            if str(path).endswith(name) and left[0]:
                left[0] -= 1
                raise OSError(number, os.strerror(number), str(path))
            return real(path, *args, **options)

        return open_

    monkeypatch.setattr("os.open", failing(os.open))
    monkeypatch.setattr("builtins.open", failing(open))


@pytest.mark.parametrize(
    "number, code, remedy",
    [
        (errno.ENOENT, 10, "copy"),
        (errno.EACCES, 2, "chmod"),
        (errno.EMFILE, 12, "ulimit -n"),
        (errno.EIO, 11, "check the disk"),
        (errno.ESTALE, 11, "file server"),
    ],
)
def test_only_what_is_missing_is_to_be_brought_again(
    number: int, code: int, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "shard").write_bytes(bytes(100))
    failing_open(monkeypatch, "shard", number)
    source = LocalSource(tmp_path)
    reader = Reader(source, 1 << 20)
    for read in (
        lambda: source.read("shard"),
        lambda: source.read_into("shard", 0, memoryview(bytearray(4))),
        lambda: reader.read_into("shard", 0, memoryview(bytearray(4))),
    ):
        with pytest.raises(K3Error) as failure:
            read()
        assert failure.value.exit_code == code and str(tmp_path / "shard") in failure.value.message
        assert remedy in failure.value.hint and ("copy" in failure.value.hint) == (number == errno.ENOENT)


def test_kept_descriptors_are_given_up_when_there_are_too_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(name.encode() * 4)
    reader, buffer = Reader(LocalSource(tmp_path), 1 << 20), bytearray(4)
    reader.read_into("a", 0, memoryview(buffer))
    failing_open(monkeypatch, "/b", errno.EMFILE, times=1)
    reader.read_into("b", 0, memoryview(buffer))
    assert buffer == b"bbbb"
    reader.read_into("a", 0, memoryview(buffer))
    assert buffer == b"aaaa"
    reader.close()


@pytest.mark.parametrize("number", [errno.EIO, errno.EINVAL, errno.EOPNOTSUPP])
def test_a_failing_read_names_the_file(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "shard").write_bytes(bytes(1 << 20))

    def preadv(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("os.preadv", preadv)
    with pytest.raises(K3Error, match="shard") as failure:
        Reader(LocalSource(tmp_path), 1 << 20).read_into("shard", 0, memoryview(bytearray(1 << 20)))
    assert failure.value.exit_code == (11 if number == errno.EIO else 14)
