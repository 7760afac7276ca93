"""`python -m k3tool.standin FOLDER`: serve a checkpoint folder as a Hub repository until the process is stopped."""

from __future__ import annotations

import argparse
import signal
import sys

from k3tool.standin import serve
from k3tool.units import parse_size


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m k3tool.standin", description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--repo-id", default="moonshotai/Kimi-K3")
    parser.add_argument("--port", type=int, default=0, help="port of the Hub side; 0 takes a free one")
    parser.add_argument(
        "--rate", type=parse_size, default=None, help="bytes per second of each connection, such as 10MB"
    )
    options = parser.parse_args()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    with serve(options.folder, options.repo_id, rate=options.rate, port=options.port) as hub:
        sys.stdout.write(f"HF_ENDPOINT={hub.endpoint}\n")
        sys.stdout.flush()
        signal.sigwait({signal.SIGINT, signal.SIGTERM})


if __name__ == "__main__":
    main()
