"""Forks one fetch per line of stdin, so that a test can kill many without starting Python each time.

Prints the child's process id, then its exit code and peak memory in KiB.
"""

from __future__ import annotations

import os
import sys

import huggingface_hub
from huggingface_hub import HfApi

from k3tool.errors import K3Error
from k3tool.fetch import fetch


def main() -> None:
    endpoint, repo, folder, workers = sys.argv[1:]
    assert HfApi and huggingface_hub.get_hf_file_metadata  # imported once, before the forks
    client = type(huggingface_hub.get_session())  # reading the certificates takes longer than most of these runs live
    huggingface_hub.set_client_factory(lambda: client(verify=False, follow_redirects=True))
    for _ in sys.stdin:
        child = os.fork()
        if child == 0:
            code = 0
            try:
                fetch(repo, folder, endpoint=endpoint, max_workers=int(workers))
            except K3Error as error:
                sys.stderr.write(f"{error.message}\n")
                sys.stderr.flush()
                code = error.exit_code
            os._exit(code)
        print(child, flush=True)
        _, status, usage = os.wait4(child, 0)
        print(os.waitstatus_to_exitcode(status), usage.ru_maxrss, flush=True)


if __name__ == "__main__":
    main()
