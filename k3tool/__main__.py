"""The entry of `k3tool`, and of `python -m k3tool`, for torchrun and for folders without one."""

from __future__ import annotations

import signal


def main() -> None:
    """Run the command line. Ctrl-C in the moment before it listens ends the process without a traceback."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from k3tool.cli.app import main as start

    start()


if __name__ == "__main__":
    main()
