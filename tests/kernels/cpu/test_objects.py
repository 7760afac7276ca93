"""Compiled kernels kept between runs: used when whole and meant for this processor, never otherwise, never needed."""

from __future__ import annotations

import ctypes
import dataclasses
import os
from pathlib import Path

import pytest

from k3tool.kernels import cpu as compiled

if not compiled.available():
    pytest.skip("compiled kernels are not available here", allow_module_level=True)

from llvmlite import ir

from k3tool.kernels.cpu import objects, target
from k3tool.kernels.cpu.emit import Emitter


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("K3TOOL_CACHE", str(tmp_path / "kept"))
    return tmp_path / "kept"


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    seen: list[str] = []
    real = target._compile
    monkeypatch.setattr(target, "_compile", lambda text, machine: (seen.append(text), real(text, machine))[1])
    return seen


def answer(number: int, machine: target.Target | None = None) -> int:
    """What a function that was compiled, or found, returns."""
    module = ir.Module(name="answer")
    e = Emitter(module, "answer", 1, returns=True)
    e.finish(e.params[0] * number + 1)
    library = target.Library(module, machine or target.host())
    return library.function("answer", 1, returns=True)(ctypes.c_int64(2))


def test_the_second_time_nothing_is_compiled(folder: Path, compilations: list[str]) -> None:
    assert [answer(7), answer(7), answer(8)] == [15, 15, 17]
    assert len(compilations) == 2
    assert len(list(folder.iterdir())) == 2


def test_another_processor_is_another_file(compilations: list[str]) -> None:
    host = target.host()
    answer(7)
    answer(7, dataclasses.replace(host, features=host.features.replace("+sse4a", "-sse4a") + ",-popcnt"))
    assert len(compilations) == 2


@pytest.mark.parametrize("damage", ["flip", "cut", "empty"])
def test_a_damaged_file_is_made_anew(folder: Path, compilations: list[str], damage: str) -> None:
    answer(7)
    (path,) = folder.iterdir()
    whole = path.read_bytes()
    broken = bytearray(whole)
    broken[len(whole) // 2] ^= 1
    path.write_bytes({"flip": bytes(broken), "cut": whole[:-1], "empty": b""}[damage])
    assert answer(7) == 15
    assert len(compilations) == 2
    assert path.read_bytes() == whole


def test_a_file_of_another_user_is_not_run(
    folder: Path, compilations: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not hasattr(os, "getuid"):
        pytest.skip("files have no owner on this system")
    answer(7)
    stranger = os.getuid() + 1
    monkeypatch.setattr(objects.os, "getuid", lambda: stranger)
    assert answer(7) == 15
    assert len(compilations) == 2


@pytest.mark.parametrize("place", ["/dev/null/nowhere", "/proc/nowhere"])
def test_without_a_place_to_keep_them(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("K3TOOL_CACHE", place)
    assert answer(7) == 15


def test_no_home() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("K3TOOL_CACHE")
        patch.setattr("os.path.expanduser", lambda path: path)
        patch.setattr("tempfile.gettempdir", lambda: os.devnull)
        assert objects.load("0" * 64) is None
        objects.save("0" * 64, b"code")
