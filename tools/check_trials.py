"""How often `run --check` is wrong: hundreds of random prompts on sound kernels, and damaged kernels on one prompt.

    python tools/check_trials.py CHECKPOINT... [--prompts 200] [--dtype bfloat16,float32] [--backend cpu] [--damages]

Prompts: of 1 to 130 random tokens; every check must pass, and the line says how near each kernel came to its bound.
Damages: each twin is made wrong in each of several ways, one at a time; every one must be found, in that kernel.
Exits with 1 where either is not so. For the triton backend without a GPU set TRITON_INTERPRET=1 and give few prompts.
"""

from __future__ import annotations

import argparse
import importlib
import random
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from k3tool.generate import Session
from k3tool.kernels import dispatch
from k3tool.model.check import DECODE_STEP, KernelCheck

LONGEST = 130


def _scaled(x: Tensor) -> None:
    x.mul_(1.02)


def _last_column(x: Tensor) -> None:
    x[..., -1] = 0


def _shifted(x: Tensor) -> None:
    x.copy_(x.roll(1, -1).clone())


def _one_number(x: Tensor) -> None:
    x[torch.unravel_index(x.abs().argmax(), x.shape)] *= 0.9


DAMAGES: dict[str, Callable[[Tensor], None]] = {
    "2 % too large": _scaled,
    "last column zero": _last_column,
    "shifted by one": _shifted,
    "one number 10 % off": _one_number,
}
IN_PLACE = {"put": ("place",), "kda": ("state",), "causal_conv": ("history",), "kda_decode": ("state", "history")}
"""What a kernel writes beside its result: damaged too, one at a time."""


def damaged(
    function: Callable[..., Any], spoil: Callable[[Tensor], None], where: str, calls: list[str]
) -> Callable[..., Any]:
    """The twin with `spoil` done to its result, or to the argument named `where`. Notes each call."""
    names = function.__code__.co_varnames[: function.__code__.co_argcount + function.__code__.co_kwonlyargcount]

    def wrong(*args: Any, **kwargs: Any) -> Any:
        calls.append(where)
        result = function(*args, **kwargs)
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        if where != "result":
            spoil(given[where])
            return result
        if isinstance(result, tuple):  # a routing: its weights
            spoil(result[-1])
            return result
        own = result if given.get("out") is not None else result.clone()
        spoil(own)
        return own

    return wrong


def owns(kernel: str, name: str) -> bool:
    package = importlib.import_module(f"k3tool.kernels.{kernel}")
    return getattr(getattr(package, name, None), "__module__", "") == package.__name__


def checked(session: Session, ids: list[int]) -> list[KernelCheck]:
    dispatch._find.cache_clear()
    return session.check(ids)


def random_prompt(session: Session, generator: random.Random) -> list[int]:
    return [generator.randrange(session.config.vocab_size) for _ in range(generator.randint(1, LONGEST))]


def part(error: float, bound: float) -> float:
    return error / bound if bound else float("inf") if error else 0.0


def try_prompts(session: Session, count: int) -> int:
    """Prompts with a check that failed."""
    generator, failed, began = random.Random(0), 0, time.time()
    nearest: dict[str, tuple[float, float]] = {}
    for _ in range(count):
        ids = random_prompt(session, generator)
        checks = checked(session, ids)
        wrong = [check for check in checks if not check.ok]
        failed += bool(wrong)
        for check in wrong[:1]:
            print(f"  failed with {len(ids)} tokens: {check}")
        for check in checks:
            largest, rms = nearest.get(check.kernel, (0.0, 0.0))
            nearest[check.kernel] = (
                max(largest, part(check.max_error, check.max_bound)),
                max(rms, part(check.rms_error, check.rms_bound)),
            )
    print(f"{session.label} {session.dtype} {session.backend.name}: {failed} of {count} prompts fail "
          f"({time.time() - began:.0f} s)")  # fmt: skip
    print("  of the bound: " + ", ".join(f"{k} {a:.2f}/{b:.2f}" for k, (a, b) in nearest.items()))
    return failed


def try_damages(session: Session) -> int:
    """Damages that no check of the damaged kernel found."""
    ids = random_prompt(session, random.Random(7))[:40] or [1, 2, 3]
    ids = (ids * 40)[:40]
    kernels = dict.fromkeys(check.kernel for check in checked(session, ids) if check.kernel != DECODE_STEP)
    suffix = "kernel" if session.backend.name == "triton" else "cpu"
    missed = done = 0
    for name in kernels:
        folder = next(k for k in dispatch.KERNELS if owns(k, name))
        module = importlib.import_module(f"k3tool.kernels.{folder}.{suffix}")
        sound = getattr(module, name)
        places = (() if name == "put" else ("result",)) + IN_PLACE.get(name, ())
        for where in places:
            for what, spoil in DAMAGES.items():
                calls: list[str] = []
                setattr(module, name, damaged(sound, spoil, where, calls))
                try:
                    found = [check for check in checked(session, ids) if not check.ok]
                finally:
                    setattr(module, name, sound)
                    dispatch._find.cache_clear()
                done += bool(calls)  # float32 is converted to float32 by nobody
                if calls and not any(check.kernel == name for check in found):
                    missed += 1
                    print(f"  missed: {name}, {where}: {what}")
    print(f"{session.label} {session.dtype} {session.backend.name}: {done - missed} of {done} damages found")
    return missed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoints", nargs="+")
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--dtype", default="bfloat16,float32")
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--damages", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    wrong = 0
    for path in options.checkpoints:
        for dtype in options.dtype.split(","):
            session = Session.open(path, dtype=dtype, backend=options.backend)
            wrong += try_prompts(session, options.prompts) if options.prompts else 0
            wrong += try_damages(session) if options.damages else 0
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
