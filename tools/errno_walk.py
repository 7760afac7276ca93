"""Makes every system call of every command fail with every plausible errno, and looks at what is said and left.

    PYTHONPATH=. python tools/errno_walk.py [--share 0.1] [--seed 0] [--only reshard,run]

Each case is a command in which a call fails (or it and all later ones of its kind, or everything from there on), then the
same command again on a sound disk. Calls are told apart by the lines of k3tool that make them; of each place the first and
the last are refused. Wrong is: exit 70, a traceback, a failure that names nothing or has no remedy, a second run that does
not end well, and another result than that of an undisturbed run.
"""

from __future__ import annotations

import argparse
import errno
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from k3tool.standin import serve  # noqa: E402
from tests import refusing  # noqa: E402

WAYS = ({}, {"sticky": True})


def cases_of(calls: list[refusing.Call]) -> Iterator[tuple[refusing.Call, int, dict[str, bool]]]:
    """Every call with every errno that is plausible for its kind, alone and with what follows."""
    for call in calls:
        for number in refusing.KINDS[call.kind]:
            for way in WAYS:
                yield call, number, way
        if call.kind not in ("cwd", "thread"):
            for number in (errno.EIO, errno.ESTALE):
                yield call, number, {"gone": True}


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--share", type=float, default=1.0, help="of all cases, chosen at random")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--only", default="", help="scenarios, separated by commas")
    options.add_argument("--checkpoint", type=Path, default=ROOT / "tests" / "golden" / "k3-mini-8")
    given = options.parse_args()
    chosen = random.Random(given.seed)
    wanted = [name for name in given.only.split(",") if name]
    wrong = tried = 0
    with tempfile.TemporaryDirectory() as folder, serve(given.checkpoint, "org/mini") as hub:
        os.environ.update(HF_ENDPOINT=hub.endpoint, HF_HOME=f"{folder}/bench/work/hf", HF_HUB_DISABLE_TELEMETRY="1")
        bench = refusing.Bench(given.checkpoint, Path(folder) / "bench")
        for scenario in refusing.SCENARIOS:
            if wanted and scenario.name not in wanted:
                continue
            began, codes = time.monotonic(), Counter[int]()
            _, calls = bench.expected(scenario)
            places = {(call.kind, call.where) for call in calls}
            for call, number, way in cases_of(calls):
                if chosen.random() >= given.share:
                    continue
                code, problem = bench.refuse(scenario, call, number, **way)
                if code is not None:
                    codes[code] += 1
                if problem:
                    wrong += 1
                    how = " ".join(way)
                    print(f"WRONG {scenario.name}: {call} {how} {errno.errorcode[number]}: {problem}", flush=True)
            tried += sum(codes.values())
            ends = ", ".join(f"{code}: {count}" for code, count in sorted(codes.items()))
            took = time.monotonic() - began
            print(
                f"{scenario.name}: {len(places)} places, {sum(codes.values())} cases ({ends}), {took:.0f} s", flush=True
            )
    print(f"{tried} cases, {wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
