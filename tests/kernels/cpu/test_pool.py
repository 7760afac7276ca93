"""Worker threads: every chunk exactly once, whoever takes it, awake or asleep, alone or among callers."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
import time

import pytest

from k3tool.kernels import cpu as compiled

if not compiled.available():
    pytest.skip("compiled kernels are not available here", allow_module_level=True)

from llvmlite import ir

from k3tool.kernels.cpu import pool, target
from k3tool.kernels.cpu.emit import I64, Emitter

LARGEST = 4096


@pytest.fixture(scope="module")
def counting() -> tuple[target.Library, int]:
    """A job that adds one to the counter of its chunk, and to the counter of its thread behind those."""
    module = ir.Module(name="counting")
    e = Emitter(module, "count", 4)
    memory, chunk, chunks, thread = e.params
    for place in (memory + chunk * 8, memory + (chunks + thread) * 8):
        e.store(e.load(I64, place) + 1, place)
    e.finish()
    library = target.Library(module, target.host())
    return library, library.address("count")


@pytest.fixture(params=[1, 2, 4])
def workers(request: pytest.FixtureRequest):
    made = pool.Pool(request.param)
    yield made
    made.close()


def run(workers: pool.Pool, function: int, chunks: int) -> tuple[list[int], list[int]]:
    memory = (ctypes.c_int64 * (chunks + workers.threads))()
    workers.run(function, ctypes.addressof(memory), chunks)
    return list(memory[:chunks]), list(memory[chunks:])


def test_every_chunk_once(workers: pool.Pool, counting: tuple[target.Library, int]) -> None:
    for chunks in [1, 2, 3, 7, 64, LARGEST, pool.MAX_CHUNKS, *range(1, 200)]:
        done, by_thread = run(workers, counting[1], chunks)
        assert done == [1] * chunks
        assert sum(by_thread) == chunks


def test_sleeping_workers_are_woken(counting: tuple[target.Library, int]) -> None:
    workers = pool.Pool(2)
    try:
        for _ in range(5):
            time.sleep(0.05)
            assert [parked.value for _, _, parked in workers._workers] == [1]
            assert run(workers, counting[1], 8)[0] == [1] * 8
    finally:
        workers.close()


def test_callers_on_many_threads_take_turns(workers: pool.Pool, counting: tuple[target.Library, int]) -> None:
    wrong: list[object] = []

    def call() -> None:
        for chunks in range(1, 150):
            done, _ = run(workers, counting[1], chunks)
            if done != [1] * chunks:
                wrong.append(done)

    callers = [threading.Thread(target=call) for _ in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong


def test_a_closed_pool_still_works_alone(counting: tuple[target.Library, int]) -> None:
    workers = pool.Pool(3)
    workers.close()
    workers.close()
    done, by_thread = run(workers, counting[1], 9)
    assert done == [1] * 9 and by_thread[0] == 9


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_forked_child_works_alone() -> None:
    """Threads do not survive a fork; the child must neither hang nor lose a chunk."""
    script = """
import os, torch
from k3tool.kernels.linear import linear
x, w = torch.randn(20, 512), torch.randn(700, 512)
want = linear(x, w)
child = os.fork()
if child == 0:
    os._exit(0 if torch.equal(linear(x, w), want) else 1)
assert os.waitpid(child, 0)[1] == 0
assert torch.equal(linear(x, w), want)
"""
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("text", "threads"), [("1", 1), ("1,2", 1), ("0", 1), ("100000", None), ("many", None)])
def test_threads_follow_the_environment(text: str, threads: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", text)
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    assert pool.default_threads() == (threads or available)
