"""Forks one quantization per line of stdin, so that a test can kill many without starting Python each time.

Prints the child's process id, then its exit code.
"""

from __future__ import annotations

import os
import sys

from k3tool.execute import Options
from k3tool.formats import convert
from k3tool.quantize import quantize
from k3tool.reshard import Request


def main() -> None:
    source, folder = sys.argv[1:]
    assert convert  # compiled kernels are loaded once, before the forks
    for _ in sys.stdin:
        child = os.fork()
        if child == 0:
            request = Request(gpus=1, form="hf", max_shard_bytes=100_000)
            quantize(source, folder, experts="nvfp4", latent="nf4", request=request, options=Options(max_workers=2))
            os._exit(0)
        print(child, flush=True)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()
