"""What the disk refuses: every errno has a code, a path and a remedy of its own."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from k3tool.disk import cache_folder, disk_errors, free_bytes, make_folder, refusal
from k3tool.errors import CapacityError, CheckpointCorrupt, CheckpointMissing, UsageError


@pytest.mark.parametrize(
    "number, reading, writing, remedy",
    [
        (errno.ENOSPC, 12, 12, "free space"),
        (errno.EDQUOT, 12, 12, "quota"),
        (errno.EFBIG, 12, 12, "ulimit -f"),
        (errno.EACCES, 2, 2, "chmod"),
        (errno.EPERM, 2, 2, "chmod"),
        (errno.EROFS, 2, 2, "mounted read-only"),
        (errno.ENOTDIR, 2, 2, "is a file"),
        (errno.EISDIR, 2, 2, "a folder is there"),
        (errno.ENAMETOOLONG, 2, 2, "shorter"),
        (errno.ELOOP, 2, 2, "circle"),
        (errno.EEXIST, 2, 2, "another path"),
        (errno.ENOENT, 10, 2, "folder"),
        (errno.EMFILE, 12, 12, "ulimit -n"),
        (errno.ENFILE, 12, 12, "ulimit -n"),
        (errno.ENOMEM, 12, 12, "free memory"),
        (errno.EBUSY, 3, 3, "finish"),
        (errno.ETXTBSY, 3, 3, "finish"),
        (errno.EIO, 11, 12, "check the disk"),
        (errno.ENODATA, 11, 12, "check the disk"),
        (errno.ENXIO, 11, 12, "check the disk"),
        (errno.ESTALE, 11, 12, "file server"),
        (errno.EREMOTEIO, 11, 12, "file server"),
        (errno.ETIMEDOUT, 11, 12, "file server"),
        (errno.EHOSTDOWN, 11, 12, "file server"),
        (errno.ENOSYS, 14, 14, "file system"),
        (errno.EOPNOTSUPP, 14, 14, "file system"),
    ],
)
def test_cause_code_and_remedy(number: int, reading: int, writing: int, remedy: str):
    for doing, code in (("read", reading), ("write", writing)):
        error = refusal(OSError(number, os.strerror(number)), "/a folder/of mine", doing)
        assert error.exit_code == code and remedy in error.hint
        assert "/a folder/of mine" in error.message and os.strerror(number) in error.message
        assert error.details == {"path": "/a folder/of mine", "errno": errno.errorcode[number]}


def test_no_errno_is_without_an_answer():
    for number in errno.errorcode:
        for doing in ("read", "write", "remove"):
            error = refusal(OSError(number, os.strerror(number)), "/x", doing)
            assert error.exit_code in (2, 3, 10, 11, 12, 14) and error.hint and "/x" in error.message


def test_the_block_gives_its_path_and_lets_others_pass(tmp_path: Path):
    with pytest.raises(CheckpointCorrupt, match="cannot read /a/b"), disk_errors("/a/b"):
        raise OSError(errno.EIO, os.strerror(errno.EIO))
    with pytest.raises(CapacityError, match="while writing /a/b"), disk_errors("/a/b", "write"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with pytest.raises(CheckpointMissing), disk_errors(tmp_path / "x"):
        open(tmp_path / "x").close()
    with pytest.raises(ValueError), disk_errors("/a/b"):
        raise ValueError


def test_a_folder_that_cannot_be_made(tmp_path: Path):
    make_folder(tmp_path / "a" / "b")
    make_folder(tmp_path / "a" / "b")
    (tmp_path / "link").symlink_to("/not/mounted")
    with pytest.raises(UsageError, match="link") as failure:
        make_folder(tmp_path / "link")
    assert failure.value.hint.endswith("/not/mounted")
    with pytest.raises(UsageError):
        make_folder("/proc/nope")


def test_a_file_system_that_counts_no_blocks_has_room(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    assert free_bytes(tmp_path)
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"total": 0, "used": 0, "free": 0}))
    assert free_bytes(tmp_path) is None
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"total": 9, "used": 9, "free": 0}))
    assert free_bytes(tmp_path) == 0


def test_a_user_without_a_home_keeps_things_among_the_temporary_ones(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("K3TOOL_CACHE", "~/kept")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "kept"
    monkeypatch.delenv("K3TOOL_CACHE")
    assert cache_folder() == tmp_path / ".cache" / "k3tool"
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    for home in ("/nonexistent", "/proc/1"):
        monkeypatch.setenv("HOME", home)
        folder = cache_folder()
        assert folder.parent == tmp_path and folder.stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # nor an entry in the list of users
    assert cache_folder() == folder
    folder.chmod(0o777)  # others may have put something into it
    assert not cache_folder().exists()
    folder.chmod(0o700)
    owner = folder.stat().st_uid
    monkeypatch.setattr("os.getuid", lambda: owner + 1)
    (tmp_path / f"k3tool-cache-{owner + 1}").symlink_to(folder)
    assert not cache_folder().exists()
