"""Runs tests once as each x86 processor that this machine can pass for, from SSE to all that it has.

    python tools/cpu_targets.py [sse avx2 avx512 avx512bf16] [--log FOLDER] [-- pytest arguments]

k3tool's own kernels, torch, oneDNN and the compiled formats are limited together. Without pytest arguments: the kernels that
run on a CPU, the model on them, the golden checkpoints and the formats. One line for each processor; exits with 1 where
tests failed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from k3tool.kernels.cpu.target import LEVELS

HERE = Path(__file__).resolve().parent.parent
TESTS = (
    "tests/kernels", "--ignore=tests/kernels/triton", "tests/model", "tests/formats", "tests/oracles/test_formats.py",
    "tests/test_golden.py", "tests/test_golden_schemes.py", "tests/test_generate.py",
)  # fmt: skip
NEEDED = {"sse": "sse4.1", "avx2": "avx2", "avx512": "avx512bw", "avx512bf16": "avx512bf16"}
# What torch, oneDNN and numba call them.
OTHERS = {
    "sse": ("default", "SSE41", "nehalem"),
    "avx2": ("avx2", "AVX2", "haswell"),
    "avx512": ("avx512", "AVX512_CORE", "skylake-avx512"),
    "avx512bf16": ("avx512", "AVX512_CORE_BF16", "cooperlake"),
}
_VARIABLES = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "NUMBA_CPU_NAME")


def present() -> list[str]:
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    features = dict(llvm.get_host_cpu_features())
    return [name for name in LEVELS if features.get(NEEDED[name])]


def main() -> int:
    words, pytest = sys.argv[1:], list(TESTS)
    if "--" in words:
        cut = words.index("--")
        words, pytest = words[:cut], words[cut + 1 :]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("levels", nargs="*", help=f"of {', '.join(LEVELS)}")
    parser.add_argument("--log", type=Path, default=Path())
    options = parser.parse_args(words)
    failed = False
    for name in options.levels or present():
        environment = {**os.environ, "K3TOOL_CPU": name, **dict(zip(_VARIABLES, OTHERS[name], strict=True))}
        log = options.log / f"{name}.log"
        with open(log, "w") as file:
            command = [sys.executable, "-m", "pytest", "-q", *pytest]
            done = subprocess.run(command, cwd=HERE, env=environment, stdout=file, stderr=file)
        last = log.read_text().rstrip().rpartition("\n")[2]
        print(f"{name}: {last} ({log})", flush=True)
        failed |= done.returncode != 0
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
