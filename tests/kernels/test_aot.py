"""Every Triton kernel compiles for every target at the shapes of the released model, within the limits of the chip.

In processes of their own, because this one interprets kernels. `benchmarks/compile.py` compiles every storage and size.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

ALL = {
    "absorb_kernel", "causal_conv_kernel", "decode_kernel", "down_kernel", "gate_up_kernel", "gated_kernel", "join_kernel",
    "linear_kernel", "mix_blocks_kernel", "prefill_kernel", "products_kernel", "rms_norm_kernel", "scan_kernel",
    "select_experts_kernel", "solve_kernel", "split_kernel", "sum_kernel",
}  # fmt: skip
HEAVY = {"products_kernel", "solve_kernel", "scan_kernel", "prefill_kernel", "split_kernel", "gate_up_kernel"}
"""Those near the limits of a chip; a generation beside another one whose kernels are all compiled gets these."""


@pytest.mark.parametrize(
    "target,kernels", [("sm_90", ALL), ("gfx942", ALL), ("sm_80", HEAVY), ("sm_100", HEAVY), ("gfx950", HEAVY)]
)
def test_kernels_compile_within_the_limits(target, kernels, tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    wanted = [] if kernels is ALL else sorted(kernels)
    done = subprocess.run(
        [sys.executable, "-m", "k3tool.kernels.aot", target, *wanted],
        capture_output=True,
        text=True,
        env={**environment, "TRITON_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"},
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    rows = json.loads(done.stdout)
    assert {row["kernel"] for row in rows} == kernels
    assert [row["problem"] for row in rows if row["problem"]] == []
    assert all(row["registers"] > 0 and row["target"] == target for row in rows)
