"""Ranks as processes of this machine, started like torchrun starts them, but forked from one that has imported torch.

`start` gives each its environment and runs a function in it; what it prints goes to a file of its own.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from operator import mul
from pathlib import Path
from typing import Any

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.ranks_warm"])
WAIT_S = 240.0  # until a test gives up on processes that should have ended long ago


class Ranks:
    """Running ranks. `codes` are exit codes, `out` and `err` what each has printed."""

    def __init__(self, folder: Path, processes: list[Any]) -> None:
        self._folder = folder
        self.processes = processes

    def wait(self, seconds: float = WAIT_S) -> Ranks:
        deadline = time.monotonic() + seconds
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        assert all(process.exitcode is not None for process in self.processes), f"still running: {self.err}"
        return self

    @property
    def codes(self) -> list[int]:
        return [process.exitcode for process in self.processes]

    @property
    def out(self) -> list[str]:
        return [(self._folder / f"{rank}.out").read_text() for rank in range(len(self.processes))]

    @property
    def err(self) -> list[str]:
        return [(self._folder / f"{rank}.err").read_text() for rank in range(len(self.processes))]

    def kill(self, rank: int, number: int = signal.SIGKILL) -> None:
        os.kill(self.processes[rank].pid, number)

    def until_begun(self, out: Path, seconds: float = WAIT_S) -> None:
        """Wait until all ranks of `begun` have written to `out`."""
        until_written(out, len(self.processes), seconds)

    def until_printed(self, rank: int, length: int, seconds: float = WAIT_S) -> None:
        """Wait until a rank has printed so many characters."""
        deadline = time.monotonic() + seconds
        while len(self.out[rank]) < length:
            assert time.monotonic() < deadline and self.processes[rank].is_alive(), self.err
            time.sleep(0.02)


def until_written(out: Path, count: int, seconds: float = WAIT_S) -> list[int]:
    """Wait for the process ids that the ranks of `begun` write, in the order of ranks."""
    deadline = time.monotonic() + seconds
    while True:
        texts = [(out / str(rank)).read_text() if (out / str(rank)).exists() else "" for rank in range(count)]
        if all(texts):
            return [int(text) for text in texts]
        assert time.monotonic() < deadline, f"only {texts} have begun"
        time.sleep(0.02)


@contextmanager
def started(
    folder: Path, count: int, function: Callable[..., Any], *arguments: Any, **environment: str
) -> Iterator[Ranks]:
    """`count` ranks that run function(*arguments); none of them survives the block."""
    folder.mkdir(parents=True, exist_ok=True)
    port = str(free_port())
    processes = []
    for rank in range(count):
        world = {
            "RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(count),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "none", "OMP_NUM_THREADS": "1", **environment,
        }  # fmt: skip
        for stream in ("out", "err"):
            (folder / f"{rank}.{stream}").touch()
        process = CONTEXT.Process(target=_rank, args=(str(folder / str(rank)), world, function, arguments))
        process.start()
        processes.append(process)
    try:
        yield Ranks(folder, processes)
    finally:
        for process in processes:
            if process.is_alive():
                os.kill(process.pid, signal.SIGCONT)
                process.kill()
            process.join()


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def _rank(name: str, environment: dict[str, str], function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    for stream, number in (("out", 1), ("err", 2)):
        os.dup2(os.open(f"{name}.{stream}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.environ.update(environment)
    function(*arguments)


def command_line(*arguments: Any) -> None:
    """`k3tool ARGUMENTS` in this process."""
    from k3tool.cli import app

    app.main([str(argument) for argument in arguments])


def run_folders(jobs: list[tuple[str, str, dict[str, Any]]], ids: list[int], out: str) -> None:
    """Ranks that run one folder after another; of each, rank 0 writes logits and what every rank generated.

    jobs: (name, folder, options); options of `Session.open`, under "sampling" those of `run_session`, and other "ids".
    """
    import torch
    from safetensors.torch import save_file

    from k3tool.generate import Session, run_session
    from k3tool.parallel.link import joined
    from k3tool.parallel.world import world_of

    with joined(world_of(os.environ)) as link:
        for name, folder, options in jobs:
            options = {"dtype": "float32", "sampling": {}, **options}
            sampling = {"max_new_tokens": 4, "stop_at_end": False, **options.pop("sampling")}
            own_ids = options.pop("ids", ids)
            session = Session.open(folder, device="cpu", link=link, **options)
            result = run_session(session, own_ids, keep_logits=True, **sampling)
            tokens = torch.tensor(link.gather(result.token_ids))
            if link.is_first:
                tensors = {"logits": result.logits, "decode_logits": result.decode_logits, "tokens": tokens}
                save_file({key: value.contiguous() for key, value in tensors.items()}, f"{out}/{name}.safetensors")


def break_rank(broken: int, *arguments: str) -> None:
    """The command line, with a bug on one rank in the third token."""

    def fail() -> None:
        if os.environ["RANK"] == str(broken):
            raise ZeroDivisionError("on purpose")

    _at_third_token(fail)
    command_line(*arguments)


def begun(out: str, *arguments: str) -> None:
    """The command line. At its third token a rank writes its process id to `out`/RANK."""
    _at_third_token(lambda: Path(out, os.environ["RANK"]).write_text(str(os.getpid())))
    command_line(*arguments)


def hang(who: str, out: str, *arguments: str) -> None:
    """As `begun`, and then rank `who` comes to no further collective."""

    def wait() -> None:
        if os.environ["RANK"] == who:
            time.sleep(10 * WAIT_S)

    _at_third_token(wait)
    begun(out, *arguments)


def _at_third_token(action: Callable[[], Any]) -> None:
    from k3tool import generate

    decode, calls = generate.decode_one_token, []

    def counted(*given: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            action()
        return decode(*given)

    generate.decode_one_token = counted


def chatter(*arguments: str) -> None:
    """The command line, where the libraries that connect ranks print to stdout, as some versions of gloo do."""
    import torch.distributed as dist

    for name in ("init_process_group", "new_group"):

        def loud(*given: Any, _call: Any = getattr(dist, name), **options: Any) -> Any:
            os.write(1, b"[Gloo] Rank 0 is connected to 1 peer ranks.\n")
            return _call(*given, **options)

        setattr(dist, name, loud)
    command_line(*arguments)


def talk(out: str) -> None:
    """What ranks tell each other, as each of them heard it."""
    from k3tool.errors import CheckpointCorrupt, K3Error, UsageError
    from k3tool.parallel.link import joined
    from k3tool.parallel.world import world_of

    def fail_above_0() -> None:
        if rank > 0:
            raise [CheckpointCorrupt, UsageError][rank - 1](f"cause {rank}", hint=f"remedy {rank}")

    with joined(world_of(os.environ)) as link:
        rank = link.world.rank
        heard: dict[str, Any] = {
            "long": link.from_first(lambda: {"text": "é" * 3000, "rank": rank}),
            "short": [link.from_first(partial(mul, "y", length)) for length in (0, 244, 245, 246, 247, 248)],
            "gathered": link.gather({"rank": rank, "pad": "é" * (100 * rank)}),
            "own": link.together(lambda: 10 * rank),
        }
        try:
            link.together(fail_above_0)
        except K3Error as error:
            heard["failure"] = [type(error).__name__, error.exit_code, error.message, error.hint, error.told]
        heard["after"] = link.from_first(lambda: 7)
        Path(f"{out}/{rank}.json").write_text(json.dumps(heard))


def give_way_for_long(*arguments: str) -> None:
    """The command line, with more patience for rank 0 than any test has."""
    from k3tool.parallel import world

    world.GIVE_WAY_S = 10 * WAIT_S
    command_line(*arguments)


if __name__ == "__main__":  # under torchrun
    import sys

    globals()[sys.argv[1]](*sys.argv[2:])
