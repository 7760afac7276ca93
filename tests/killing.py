"""Forks one `reshard` or `quantize` per line of stdin, so that a test can kill many without starting Python each time.

A line is a job as JSON: source, dest, request, for `quantize` also schemes; `kill_at`: the child kills itself at that event, where an event is
every write, sync, rename and ledger entry; `count_to`: a file that gets the number of events of a whole run;
`file_limit`: the largest file it may write. The answer is its exit code.
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
import resource
import signal
import sys
from typing import Any

from k3tool.checkpoint import ledger, writer
from k3tool.errors import K3Error
from k3tool.execute import Options
from k3tool.quantize import quantize
from k3tool.reshard import Request, reshard

EVENTS = [(writer.AtomicFile, "write"), (ledger.Ledger, "_append"), (os, "replace"), (os, "unlink"), (os, "truncate")]


def watch(kill_at: int) -> itertools.count[int]:
    """Make every event count, and the one numbered `kill_at` the last."""
    counter = itertools.count(1)

    def counted(call: Any) -> Any:
        def wrapped(*args: Any, **options: Any) -> Any:
            if next(counter) == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **options)

        return wrapped

    for owner, name in EVENTS:
        setattr(owner, name, counted(getattr(owner, name)))
    # A kill takes nothing from the kernel, and waiting for the disk would be most of a run.
    os.fsync = counted(lambda _: None)
    return counter


def child(job: dict[str, Any]) -> int:
    counter = watch(job.get("kill_at", 0))
    if "file_limit" in job:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (job["file_limit"], job["file_limit"]))
    try:
        request, schemes = Request(**job["request"]), job.get("schemes")
        if schemes:
            quantize(job["source"], job["dest"], **schemes, request=request, options=Options(max_workers=2))
        else:
            options = Options(max_workers=2)
            reshard(job["source"], job["dest"], request, options=options, reclaim=job.get("reclaim", False))
    except K3Error as error:
        print(error.message, file=sys.stderr, flush=True)
        return error.exit_code
    if "count_to" in job:
        with open(job["count_to"], "w") as file:
            file.write(str(next(counter) - 1))
    return 0


def main() -> None:
    for line in sys.stdin:
        job = json.loads(line)
        if "schemes" in job:
            importlib.import_module("k3tool.formats.convert")  # the kernels are loaded once, before the forks
        process = os.fork()
        if process == 0:
            os._exit(child(job))
        print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
