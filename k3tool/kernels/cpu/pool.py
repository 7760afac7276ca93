"""Worker threads for compiled kernels: dynamic, lock-free, and never in anyone's way.

A job is a compiled function and a number of chunks; threads, the caller among them, claim chunks one by one. The
caller waits only for chunks that were claimed, so on a busy machine where the workers do not get a processor it does
the whole job itself. That is what OpenMP's barriers lack: there a waiting thread costs milliseconds. Workers
spin briefly after a job (decoding posts the next one within microseconds) and then sleep until they are called.

Control block, one cache line each: the state word, `sequence << 32 | chunks << 16 | next`, changed only by
compare-and-swap; the number of finished chunks; function, arguments; stop; one parked flag per worker.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import threading
from functools import cache

from llvmlite import ir

from k3tool.kernels.cpu import target
from k3tool.kernels.cpu.emit import I32, I64, POINTER, VOID, Emitter, Value

MAX_CHUNKS = 0xFFFF
MAX_THREADS = 256
SPINS = 20_000
_STATE, _DONE, _FUNCTION, _ARGUMENTS, _STOP, _PARKED = 0, 64, 128, 136, 192, 256
_PAUSE = {
    "x86_64": ("llvm.x86.sse2.pause", ()),
    "amd64": ("llvm.x86.sse2.pause", ()),
    "aarch64": ("llvm.aarch64.hint", (1,)),
    "arm64": ("llvm.aarch64.hint", (1,)),
}


class Pool:
    """`threads` threads in all, the caller included. One job at a time; callers on other threads queue."""

    def __init__(self, threads: int) -> None:
        self.threads = max(1, min(threads, MAX_THREADS))
        library = _library()
        self._run = library.function("run", 4)
        self._play = library.function("play", 3)
        self._work = library.function("work", 3, returns=True)
        self._memory = ctypes.create_string_buffer(_PARKED + 64 * MAX_THREADS + 64)
        self._control = -(-ctypes.addressof(self._memory) // 64) * 64
        self._lock = threading.Lock()
        self._start()
        atexit.register(self.close)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forget_workers)

    def _start(self) -> None:
        self._workers: list[tuple[threading.Thread, threading.Lock, ctypes.c_int64]] = []
        for index in range(1, self.threads):
            wake = threading.Lock()
            wake.acquire()
            parked = ctypes.c_int64.from_address(self._control + _PARKED + 64 * index)
            parked.value = 1
            thread = threading.Thread(target=self._serve, args=(wake, index), name=f"k3tool-{index}", daemon=True)
            self._workers.append((thread, wake, parked))
            thread.start()

    def _serve(self, wake: threading.Lock, index: int) -> None:
        while True:
            wake.acquire()
            if self._work(self._control, index, SPINS):
                return

    def _forget_workers(self) -> None:
        """Threads do not survive a fork: the child works alone."""
        self._workers = []
        self._lock = threading.Lock()

    def run(self, function: int, arguments: int, chunks: int) -> None:
        """Call `function(arguments, chunk, chunks, thread)` for every chunk below `chunks`, at most MAX_CHUNKS."""
        with self._lock:
            if chunks > 1:
                self._wake()
            self._run(self._control, function, arguments, chunks)

    def play(self, table: int, count: int) -> None:
        """Do `count` jobs one after the other: `table` holds function, arguments and chunks of each."""
        with self._lock:
            self._wake()
            self._play(self._control, table, count)

    def _wake(self) -> None:
        for _, wake, parked in self._workers:
            if parked.value:
                parked.value = 0
                wake.release()

    def close(self) -> None:
        """Let the workers end and wait for them."""
        with self._lock:
            ctypes.c_int64.from_address(self._control + _STOP).value = 1
            for thread, wake, parked in self._workers:
                if parked.value:
                    parked.value = 0
                    wake.release()
                thread.join()
            self._workers = []


def _pause(emitter: Emitter) -> None:
    name, numbers = _PAUSE.get(target.architecture(), ("", ()))
    if name:
        emitter.intrinsic(name, VOID, *(emitter.number(number, I32) for number in numbers))


def _atomic_load(emitter: Emitter, address: Value) -> Value:
    pointer = emitter.builder.inttoptr(address.ir, POINTER)
    return Value(emitter, emitter.builder.load_atomic(pointer, "acquire", 8, typ=I64))


def _atomic_store(emitter: Emitter, value: Value, address: Value) -> None:
    pointer = emitter.builder.inttoptr(address.ir, POINTER)
    # An exchange, since llvmlite's store_atomic refuses untyped pointers.
    emitter.builder.atomic_rmw("xchg", pointer, value.ir, "release")


def _claim_and_call(emitter: Emitter, control: Value, thread: Value) -> Value:
    """Try to take one chunk and do it. Returns an i1: is there nothing left to take?"""
    state = _atomic_load(emitter, control + _STATE)
    chunk, chunks = state & 0xFFFF, (state >> 16) & 0xFFFF
    finished = chunk >= chunks
    with emitter.otherwise(finished):
        function = emitter.load(I64, control + _FUNCTION)
        arguments = emitter.load(I64, control + _ARGUMENTS)
        pointer = emitter.builder.inttoptr((control + _STATE).ir, POINTER)
        swap = emitter.builder.cmpxchg(pointer, state.ir, (state + 1).ir, "acq_rel", "acquire")
        with emitter.when(Value(emitter, emitter.builder.extract_value(swap, 1))):
            emitter.call_address(function, arguments, chunk, chunks, thread)
            done = emitter.builder.inttoptr((control + _DONE).ir, POINTER)
            emitter.builder.atomic_rmw("add", done, ir.Constant(I64, 1), "acq_rel")
    return finished


def _do_job(emitter: Emitter, control: Value, function: Value, arguments: Value, chunks: Value) -> None:
    """Publish a job, help with it, wait for what others took. One chunk is done on the spot."""
    alone = chunks.equals(1)
    with emitter.when(alone):
        emitter.call_address(function, arguments, emitter.number(0), chunks, emitter.number(0))
    with emitter.otherwise(alone):
        emitter.store(function, control + _FUNCTION)
        emitter.store(arguments, control + _ARGUMENTS)
        emitter.store(emitter.number(0), control + _DONE)
        sequence = (emitter.load(I64, control + _STATE) >> 32) + 1
        _atomic_store(emitter, (sequence << 32) | (chunks << 16), control + _STATE)
        with emitter.repeat() as leave:
            leave(_claim_and_call(emitter, control, emitter.number(0)))
        with emitter.repeat() as leave:
            leave(_atomic_load(emitter, control + _DONE) >= chunks)
            _pause(emitter)


def _emit_run(module: ir.Module) -> None:
    """run(control, function, arguments, chunks): one job."""
    emitter = Emitter(module, "run", 4)
    _do_job(emitter, *emitter.params)
    emitter.finish()


def _emit_play(module: ir.Module) -> None:
    """play(control, table, count): `count` jobs, each a function, its arguments and its chunks, one after the other."""
    emitter = Emitter(module, "play", 3)
    control, table, count = emitter.params
    with emitter.loop(0, count) as index:
        function, arguments, chunks = (emitter.load(I64, table + index * 24 + 8 * field) for field in range(3))
        _do_job(emitter, control, function, arguments, chunks)
    emitter.finish()


def _emit_work(module: ir.Module) -> None:
    """work(control, thread, spins): serve jobs until nothing came for `spins` looks. Returns 1 to end the thread."""
    emitter = Emitter(module, "work", 3, returns=True)
    control, thread, spins = emitter.params
    idle = emitter.variable(emitter.number(0))
    with emitter.repeat() as leave:
        nothing = _claim_and_call(emitter, control, thread)
        idle.set(emitter.select(nothing, idle.get() + 1, emitter.number(0)))
        with emitter.when(nothing):
            _pause(emitter)
        leave((idle.get() >= spins) | (_atomic_load(emitter, control + _STOP) > 0))
    _atomic_store(emitter, emitter.number(1), control + thread * 64 + _PARKED)
    emitter.finish(_atomic_load(emitter, control + _STOP))


@cache
def _library() -> target.Library:
    module = ir.Module(name="k3tool.pool")
    _emit_run(module)
    _emit_play(module)
    _emit_work(module)
    return target.Library(module, target.host())


def default_threads() -> int:
    """Processors this process may use, limited by OMP_NUM_THREADS where that is a number."""
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    wanted = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    return max(1, min(available, int(wanted))) if wanted.isdigit() else available


@cache
def shared() -> Pool:
    """The one pool of this process, started at first use."""
    return Pool(default_threads())
