"""Choosing among pinned configurations: measured once, remembered, and harmless where it cannot be."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("triton")

import torch
from triton.runtime.errors import OutOfResources

from k3tool.kernels import tuning

TIMES = {1: 3.0, 2: 1.0, 3: 2.0}
CANDIDATES = [{"SIZE": size} for size in TIMES]


@pytest.fixture
def launches(monkeypatch, tmp_path):
    """As if a GPU were here: launches are noted, and cost what `TIMES` says."""
    done: list[int] = []
    monkeypatch.setattr(tuning, "is_wanted", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(tuning, "cache_file", lambda: tmp_path / "folder" / "kernels.json")
    monkeypatch.setattr(tuning, "_chosen", {})
    monkeypatch.setattr(tuning, "_read", set())

    def measure(run):
        run()
        return TIMES[done[-1]]

    monkeypatch.setattr(tuning, "_measure", measure)
    return done


def best(launches, shape=(1,), candidates=CANDIDATES):
    return tuning.best("kernel", shape, candidates, lambda options: launches.append(options["SIZE"]))


def test_the_fastest_is_measured_once_and_remembered(launches, monkeypatch):
    assert best(launches) == {"SIZE": 2}
    assert launches == [1, 2, 3]
    assert best(launches) == {"SIZE": 2}
    monkeypatch.setattr(tuning, "_chosen", {})  # another process
    monkeypatch.setattr(tuning, "_read", set())
    assert best(launches) == {"SIZE": 2}
    assert launches == [1, 2, 3]
    best(launches, shape=(2,))
    assert len(launches) == 6
    held = json.loads(tuning.cache_file().read_text())
    assert held == {"kernel(1) of 3": 1, "kernel(2) of 3": 1}
    assert [path.name for path in tuning.cache_file().parent.iterdir()] == ["kernels.json"]


def test_a_damaged_file_costs_the_measurements_only(launches):
    tuning.cache_file().parent.mkdir()
    for text in ("{", "[1]", '{"kernel(1) of 3": 7}', '{"kernel(1) of 3": "x"}'):
        tuning._chosen.clear()
        tuning._read.clear()
        tuning.cache_file().write_text(text)
        assert best(launches) == {"SIZE": 2}


def test_a_folder_that_cannot_be_written_to_is_no_error(launches, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setattr(tuning, "cache_file", lambda: tmp_path / "file" / "kernels.json")
    assert best(launches) == {"SIZE": 2}


def test_what_cannot_run_is_not_chosen(launches):
    def launch(options):
        if options["SIZE"] == 2:
            raise OutOfResources(300, 200, "shared memory")
        launches.append(options["SIZE"])

    assert tuning.best("kernel", (), CANDIDATES, launch) == {"SIZE": 3}

    def never(options):
        raise OutOfResources(300, 200, "shared memory")

    with pytest.raises(OutOfResources):
        tuning.best("other", (), CANDIDATES, never)


def test_a_capture_takes_what_was_chosen_and_measures_nothing(launches, monkeypatch):
    assert best(launches) == {"SIZE": 2}
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert best(launches) == {"SIZE": 2}
    assert best(launches, shape=(3,)) == {"SIZE": 1}
    assert launches == [1, 2, 3]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert best(launches, shape=(3,)) == {"SIZE": 2}  # the first of a capture is not remembered


def test_the_first_runs_where_nothing_can_be_measured():
    launches: list[int] = []
    assert best(launches) == {"SIZE": 1}
    tuning.run("kernel", (1,), CANDIDATES, lambda options: launches.append(options["SIZE"]))
    assert launches == [1]


def test_buckets():
    assert [tuning.bucket(n) for n in (0, 1, 2, 3, 64, 65)] == [1, 1, 2, 4, 64, 128]
