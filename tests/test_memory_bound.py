"""`--max-memory` bounds the whole process: libraries that come later, compiled loops, workers and children count.

Each command runs in a process of its own, whose peak is its own: what a refusal asks for is enough, and is kept.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from k3tool.synthetic import tiny_config, write_checkpoint
from k3tool.units import parse_size

MEASURED = (
    "import resource, sys\n"
    "from k3tool.cli.app import main\n"
    "from k3tool.memory import peak_bytes\n"
    "sys.argv[0] = 'k3tool'\n"
    "try:\n"
    "    code = main()\n"
    "except SystemExit as end:\n"
    "    code = end.code\n"
    "children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024\n"
    "print(code or 0, peak_bytes() + children, file=sys.stderr)\n"
)

JOBS = {
    "experts by table, for eight ranks": ["--experts", "nvfp4", "--latent", "int8", "--gpus", "8", "--tp", "8"],
    "fused attention, errors searched": ["--attention", "nvfp4", "--shared", "int4"],
    "bitsandbytes": ["--shared", "nf4"],
    "gguf": ["--format", "gguf", "--trunk", "q8_0"],
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("memory") / "k3"
    document = tiny_config(
        num_layers=4, hidden_size=512, kda_heads=8, kda_head_dim=128, mla_heads=8, moe_intermediate_size=1024,
        num_experts=8, latent_size=512, intermediate_size=2048, vision=False,
    )  # fmt: skip
    write_checkpoint(folder, document)
    return folder


def run(*arguments: object) -> tuple[int, int, dict[str, Any]]:
    """(exit code, peak bytes of the process and of the largest child, document)."""
    words = [sys.executable, "-c", MEASURED, *map(str, arguments), "--json"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    code, peak = done.stderr.split()[-2:]
    return int(code), int(peak), json.loads(done.stdout)


@pytest.mark.parametrize("job", JOBS)
def test_what_the_refusal_asks_for_is_enough_and_is_kept(source: Path, tmp_path: Path, job: str) -> None:
    command = ["quantize", source, tmp_path / "out", *JOBS[job], "--max-workers", 2, "--max-memory"]
    code, _, document = run(*command, "90MB")
    error = document["error"]
    assert code == 12 and not (tmp_path / "out").exists()
    asked = re.search(r"--max-memory (\S+)", error["hint"])
    assert asked and "--max-memory 90 MB is too little" in error["message"]
    bound = parse_size(asked[1])
    assert f"one worker needs {bound // 1_000_000} MB" in error["message"]
    code, peak, document = run(*command, asked[1])
    assert code == 0, document
    assert peak <= bound < 2 * peak
