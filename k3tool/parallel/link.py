"""How the ranks of one run meet, agree, fail and end together. Torch is imported when there is more than one.

A rank that fails writes its failure into the store where the ranks met, then leaves its connections, so that nobody
waits for it. Every other rank finds its collective broken (or is found by its watcher), reads what happened, and leaves
with the same exit code. Rank 0 tells it, once.

A rank that is killed says nothing: the watchers of its machine see its process end, and write for it. What launchers do
next, end the others by SIGTERM, is then no interrupt. Where rank 0 is gone, the lowest rank that is left tells it.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from k3tool.errors import EXIT_INTERRUPTED, K3Error, RemoteError, UsageError, is_interrupt
from k3tool.events import aside
from k3tool.parallel.failure import Failure, RankLost
from k3tool.parallel.peers import Peers, this_process
from k3tool.parallel.world import World

if TYPE_CHECKING:
    from k3tool.parallel.groups import Parallel

T = TypeVar("T")


class Voice(Protocol):
    """How a run that fails is shown."""

    def failure(self, error: K3Error) -> None:
        """On rank 0, or the lowest that is left: what happened, wherever it happened."""
        ...

    def settle(self) -> None:
        """The run has failed, and is about to say so: no signal changes that any more."""
        ...

    def trace(self, error: BaseException) -> None:
        """On the rank where a bug showed itself: its traceback."""
        ...


TIMEOUT_VARIABLE = "K3TOOL_RANK_TIMEOUT"
TIMEOUT_S = 1800.0  # for other ranks to appear, to load their share, to answer
NOTICE_S = 10.0  # of waiting for the others without a word
CONNECT_S = 5.0
POLL_S = 0.2
GRACE_S = 3.0  # for the main thread to notice by itself that another rank failed
TOLD_S = 10.0  # for rank 0 to say what happened
LEAVE_S = 10.0  # for the others to see that it has: those that live need a moment, however busy the machine is
SEEN_S = 0.2  # for the end of a process to be seen
APPEAR_S = 1.0  # for a failure to appear whose consequence has
LAST_S = 30.0  # for a main thread that fails to come to its end
_FAILURE, _TOLD, _LEFT, _ENDS = "k3tool/failure", "k3tool/told", "k3tool/left", "k3tool/ends"


class Link:
    """The ranks of a run. This class is a process alone: it agrees with itself."""

    world = World()
    timeout = timedelta(seconds=TIMEOUT_S)
    uses_nccl = False

    def belongs(self, parallel: Parallel) -> None:
        """These groups are given up when the run fails, so that nobody waits in them for this rank."""

    @property
    def is_first(self) -> bool:
        """Rank 0 reads the prompt, samples and speaks."""
        return self.world.rank == 0

    def together(self, action: Callable[[], T]) -> T:
        """Run `action` on every rank. Where it fails on any, the failure of the lowest such rank is raised on all.

        Returns after all have finished, each its own result."""
        return action()

    def from_first(self, make: Callable[[], T]) -> T:
        """What `make` gives on rank 0 (plain JSON), on every rank; the others do not call it."""
        return make()

    def gather(self, value: Any) -> list[Any]:
        """The value (plain JSON) of every rank, in order."""
        return [value]


ALONE = Link()


class RankLink(Link):
    """Several ranks, connected by gloo whatever their devices: control messages are small and live in host memory."""

    def __init__(self, world: World, store: Any, timeout: timedelta, voice: Voice | None) -> None:
        import torch.distributed as dist

        self.world = world
        self.timeout = timeout
        self._voice = voice
        self._is_deserted = False
        self._parallel: list[Parallel] = []
        self._lock = threading.Lock()
        self._settled: tuple[Failure, bool] | None = None
        self._seen: Failure | None = None  # what the watcher has read: the store may be gone when it is needed
        self._closing = threading.Event()
        self._failing = threading.Event()
        self._closed = threading.Event()
        self._store = store
        self._watched = store.clone()  # a store serves one thread at a time
        self._dist = dist
        dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size, timeout=timeout)
        self._peers = Peers(self.gather(this_process()), world.rank)
        threading.Thread(target=self._watch, name="k3tool-ranks", daemon=True).start()

    def belongs(self, parallel: Parallel) -> None:
        self._parallel.append(parallel)

    def together(self, action: Callable[[], T]) -> T:
        result: T | None = None
        failed: K3Error | None = None
        try:
            result = action()
        except K3Error as error:
            failed = error
        found = self.gather(None if failed is None else Failure.of(failed, self.world.rank)._asdict())
        first = next((item for item in found if item is not None), None)
        if first is None:
            return result  # type: ignore[return-value]
        raise failed if failed is not None and first["rank"] == self.world.rank else self._error(Failure(**first))

    def from_first(self, make: Callable[[], T]) -> T:
        value = make() if self.is_first else None
        text = json.dumps(value).encode() if self.is_first else b""
        return json.loads(self._broadcast(text))

    def gather(self, value: Any) -> list[Any]:
        import torch

        text = json.dumps(value).encode()
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world.size)]
        self._call(self._dist.all_gather, sizes, torch.tensor([len(text)]))
        longest = max(int(size) for size in sizes)
        mine = torch.zeros(longest, dtype=torch.uint8)
        mine[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        parts = [torch.zeros(longest, dtype=torch.uint8) for _ in sizes]
        self._call(self._dist.all_gather, parts, mine)
        return [json.loads(bytes(part[: int(size)].numpy())) for part, size in zip(parts, sizes, strict=True)]

    def _broadcast(self, text: bytes) -> bytes:
        """Short messages travel at once: length and up to 248 bytes."""
        import torch

        head = torch.zeros(256, dtype=torch.uint8)
        if self.is_first:
            head[:8] = torch.frombuffer(bytearray(len(text).to_bytes(8, "little")), dtype=torch.uint8)
            head[8 : 8 + len(text[:248])] = torch.frombuffer(bytearray(text[:248]), dtype=torch.uint8)
        self._call(self._dist.broadcast, head, src=0)
        first = bytes(head.numpy())
        length = int.from_bytes(first[:8], "little")
        if length <= 248:
            return first[8 : 8 + length]
        rest = torch.zeros(length - 248, dtype=torch.uint8)
        if self.is_first:
            rest[:] = torch.frombuffer(bytearray(text[248:]), dtype=torch.uint8)
        self._call(self._dist.broadcast, rest, src=0)
        return first[8:] + bytes(rest.numpy())

    def _call(self, collective: Callable[..., Any], *arguments: Any, **options: Any) -> None:
        from k3tool.parallel.groups import call

        call(collective, *arguments, **options)

    # The end

    def close(self) -> None:
        """All have finished. Raises RankLost where one does not come to the end."""
        self._closing.set()
        with suppress(Exception):  # the store may end with rank 0
            self._store.set(f"{_ENDS}/{self.world.rank}", "1")
        self.gather(None)
        self._closed.set()
        self._peers.close()
        self._dist.destroy_process_group()

    def fail(self, error: BaseException) -> K3Error:
        """This rank cannot go on: everybody learns it. Returns what is to be raised here, `told` where rank 0 spoke."""
        self._failing.set()
        if self._voice is not None:
            self._voice.settle()
        first = self._publish(error)
        if not self.uses_nccl:
            self._disconnect(error)
        own = Failure.of(error, self.world.rank)
        if self._voice is not None and own.is_bug:
            self._voice.trace(error)
        if own.is_cause and own.code == first.code:
            raised = error if isinstance(error, K3Error) else self._error(own)
        else:
            raised = self._error(first)
        told = self._settle(first, raised)
        self._closed.set()
        if self.uses_nccl:  # kernels that wait for a lost rank keep a process from ending
            _leave(first.code)
        raised.told = told
        return raised

    def _disconnect(self, error: BaseException) -> None:
        """Connections close when nothing refers to their groups any more."""
        for parallel in self._parallel:
            parallel.leave()
        for lost in (error, error.__cause__):
            if isinstance(error, RankLost) and lost is not None:
                traceback.clear_frames(lost.__traceback__)
        with suppress(Exception):
            self._dist.destroy_process_group()

    def _error(self, failure: Failure) -> K3Error:
        return failure.as_error(self.world.rank)

    def _publish(self, error: BaseException) -> Failure:
        """The first failure of the run: this one, one that another rank has written before, or a rank that was killed."""
        own = Failure.of(error, self.world.rank)
        try:
            if not own.is_cause:
                self._await(_FAILURE, APPEAR_S)
            if not own.is_cause or is_interrupt(own.code):  # a launcher ends those that are left
                own = self._lost(self._store, SEEN_S) or own
            return Failure.parse(self._store.compare_set(_FAILURE, "", own.as_bytes().decode()))
        except Exception:
            if self._seen is not None:
                return self._seen
            self._is_deserted = True  # the store is gone: every rank speaks for itself, or the lowest that is left
            return own if own.code == EXIT_INTERRUPTED else self._lost(None, APPEAR_S) or own

    def _lost(self, store: Any, wait_s: float = 0.0) -> Failure | None:
        """The lowest rank of this machine whose process ended before the end, without a failure or a farewell.

        store: where these would stand; None where it is gone."""
        for rank in self._peers.ended(wait_s):
            if store is None or not (store.check([_FAILURE]) or store.check([f"{_ENDS}/{rank}"])):
                return Failure.lost(rank, self._peers.pids[rank])
        return None

    def _await(self, key: str, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while not self._store.check([key]):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        return True

    def _settle(self, first: Failure, raised: K3Error) -> bool:
        """Rank 0 tells what happened; the others wait until it has. Once per process. Returns whether it was told."""
        with self._lock:
            if self._settled is None:
                told = self._tell_it(raised) if self.is_first else self._was_told(first, raised)
                self._settled = first, told
            return self._settled[1]

    def _tell_it(self, raised: K3Error) -> bool:
        if self._voice is not None:
            self._voice.failure(raised)
        with suppress(Exception):
            self._store.set(_TOLD, "1")
            self._until_left(LEAVE_S, lambda: self._store.add(_LEFT, 0))  # the store may end with this process
            return self._voice is not None
        self._until_left(TOLD_S, lambda: 0)  # the others look whether this one lives
        return self._voice is not None

    def _until_left(self, seconds: float, left: Callable[[], int]) -> None:
        deadline = time.monotonic() + seconds
        while left() < self._left_over and time.monotonic() < deadline:
            time.sleep(0.02)

    @property
    def _left_over(self) -> int:
        """Other ranks that have not been seen to end."""
        return self.world.size - 1 - len(self._peers.ended())

    @property
    def _is_lowest(self) -> bool:
        """Whether all ranks before this one are seen to have ended."""
        return set(range(self.world.rank)) <= set(self._peers.ended())

    def _was_told(self, first: Failure, raised: K3Error) -> bool:
        """Waits for rank 0 to tell. Where all ranks before this one are gone, and have not, this one does."""
        is_lowest = self._is_lowest
        try:
            deadline = time.monotonic() + TOLD_S
            while not self._store.check([_TOLD]):
                if is_lowest:
                    return self._tell_it(raised)
                if time.monotonic() > deadline:
                    return False
                is_lowest = self._is_lowest  # before it is looked whether they have told
                time.sleep(0.02)
            self._store.add(_LEFT, 1)
            return True
        except Exception:  # the store went with rank 0
            is_unsaid = self._is_deserted or (first.type, first.rank) == (RankLost.__name__, 0)
            if is_unsaid and is_lowest:
                return self._tell_it(raised)
            return not is_unsaid or any(rank in self._peers.pids for rank in range(self.world.rank))

    def _watch(self) -> None:
        """Ends this process where another rank has failed or is gone and the main thread does not get to see it."""
        try:
            while not self._watched.check([_FAILURE]):
                if self._closed.wait(POLL_S):
                    return
                lost = self._lost(self._watched)
                if lost is not None:
                    self._watched.compare_set(_FAILURE, "", lost.as_bytes().decode())
            first = self._seen = Failure.parse(self._watched.get(_FAILURE))
            if self._closed.wait(GRACE_S):
                return
        except Exception:  # without a store: broken connections tell the main thread, where it can be told
            found = None if self._closing.is_set() or self._closed.wait(GRACE_S) else self._lost(None)
            if found is None:
                return
            first = found
        if self._failing.is_set() and self._closed.wait(LAST_S):  # the main thread has seen it, and tells it
            return
        if self._voice is not None:
            self._voice.settle()
        self._settle(first, self._error(first))
        _leave(first.code)


def _leave(code: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(code)


def timeout_of(text: str | None) -> timedelta:
    """Seconds from the environment. Raises UsageError."""
    try:
        seconds = TIMEOUT_S if not text else float(text)
    except ValueError:
        seconds = 0.0
    if not 0.1 <= seconds <= 1e6:
        raise UsageError(f"{TIMEOUT_VARIABLE} is {text!r}, expected seconds", hint=f"unset {TIMEOUT_VARIABLE}")
    return timedelta(seconds=seconds)


@contextmanager
def joined(world: World, *, voice: Voice | None = None) -> Iterator[Link]:
    """Meet the other ranks; leave together, whatever happens inside. voice: shows failures (None: the caller does).

    K3TOOL_RANK_TIMEOUT: how many seconds a rank may be late, at any time (1800). Raises RemoteError where the others do
    not come; and on every rank, as a K3Error, what was raised on one.
    """
    if world.size == 1:
        yield ALONE
        return
    link = _meet(world, voice)
    try:
        yield link
        link.close()
    except BaseException as error:
        try:
            raised = link.fail(error)
        except KeyboardInterrupt as again:  # in the moment before `settle`
            raised = link.fail(again)
        raise raised from (None if raised is error else error)


def _meet(world: World, voice: Voice | None) -> RankLink:
    timeout = timeout_of(os.environ.get(TIMEOUT_VARIABLE))
    address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    _refuse_ended_launch(os.environ, address)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # a store that ends with its rank is worth no stack traces
    said = f"rank {world.rank} of {world.size} waits for the others at {address}, up to {timeout.total_seconds():g} s"
    notice = threading.Timer(NOTICE_S, aside, (f"{said} ({TIMEOUT_VARIABLE})",))
    notice.daemon = True
    notice.start()
    try:
        from torch.distributed.rendezvous import rendezvous

        store, _, _ = next(rendezvous("env://", world.rank, world.size, timeout=timeout))
        return RankLink(world, store, timeout, voice)
    except (RuntimeError, ValueError, OSError) as error:
        raise RemoteError(
            f"rank {world.rank} of {world.size} did not meet the others at {address}: {str(error).splitlines()[0][:300]}",
            hint="every rank must be started within "
            f"{timeout.total_seconds():g} s and reach that address; torchrun sets all of it",
        ) from error
    finally:
        notice.cancel()


def _refuse_ended_launch(environment: Mapping[str, str], address: str) -> None:
    """Raises UsageError where torchrun itself was to listen for its ranks and is gone: its variables are left over."""
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return
    try:
        host, _, port = address.rpartition(":")
        socket.create_connection((host, int(port)), timeout=CONNECT_S).close()
    except ConnectionRefusedError:
        raise UsageError(
            f"RANK and WORLD_SIZE are left over from a launch that has ended: its torchrun no longer answers at {address}",
            hint="start with torchrun, or unset TORCHELASTIC_RUN_ID and WORLD_SIZE",
        ) from None
    except (OSError, ValueError):
        return  # the ranks try again, for as long as they may
