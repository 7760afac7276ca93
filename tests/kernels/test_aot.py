"""Every Triton kernel compiles for every target at the shapes of the released model, within the limits of the chip.

In processes of their own, because this one interprets kernels. `benchmarks/compile.py` compiles every storage and size.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ALL = {
    "attn_res.mix_blocks_kernel", "conv.causal_conv_kernel", "kda.decode_kernel", "kda.products_kernel",
    "kda.recurrent_kernel", "kda.scan_kernel", "kda.solve_kernel", "linear.linear_kernel", "mla.absorb_kernel",
    "mla.join_kernel", "mla.prefill_kernel", "mla.split_kernel", "moe.down_kernel", "moe.gate_up_kernel",
    "moe.gated_kernel", "moe.sum_kernel", "mxfp4.decode_kernel", "norm.l2_normalize_kernel", "norm.rms_norm_kernel",
    "router.select_experts_kernel",
}  # fmt: skip
HEAVY = {
    "kda.products_kernel", "kda.solve_kernel", "kda.scan_kernel", "mla.prefill_kernel", "mla.split_kernel",
    "moe.gate_up_kernel",
}  # fmt: skip
"""Those near the limits of a chip; a generation beside another one whose kernels are all compiled gets these."""


def python(arguments, cache):
    """What a process that does not interpret kernels prints."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        env={**environment, "TRITON_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1"},
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.parametrize(
    "target,kernels", [("sm_90", ALL), ("gfx942", ALL), ("sm_80", HEAVY), ("sm_100", HEAVY), ("gfx950", HEAVY)]
)
def test_kernels_compile_within_the_limits(target, kernels, tmp_path):
    wanted = [] if kernels is ALL else sorted(kernels)
    rows = json.loads(python(["-m", "k3tool.kernels.aot", target, *wanted], tmp_path))
    assert {row["kernel"] for row in rows} == kernels
    assert [row["problem"] for row in rows if row["problem"]] == []
    assert all(row["registers"] > 0 and row["target"] == target for row in rows)


def test_every_kernel_has_a_case():
    """Each `*_kernel` of the package is launched by some case, so that none escapes compilation."""
    import k3tool.kernels

    folder = Path(k3tool.kernels.__file__).parent
    found = {
        f"{path.parent.name}.{name}"
        for path in folder.glob("*/*.py")
        for name in re.findall(r"^def (\w+_kernel)\(", path.read_text(), re.MULTILINE)
    }
    assert found == ALL


ONES = """
import torch
from k3tool.kernels import aot
from k3tool.kernels.attn_res.kernel import mix_blocks
from k3tool.kernels.conv.kernel import causal_conv
from k3tool.kernels.kda.kernel import kda
from k3tool.kernels.linear.kernel import product
from k3tool.kernels.mla.kernel import mla
from k3tool.kernels.norm.kernel import rms_norm
from k3tool.kernels.router.kernel import select_experts

def new(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="meta")

with aot.recording("sm_90") as launches:
    causal_conv(new(1, 1, 1), new(4, 1), new(1, 3, 1))
    kda(*(new(1, 2, 1, 1) for _ in "qkvf"), new(1, 2, 1), new(1), new(1, 1), new(1, 1, 1, 1), lower_bound=-5.0)
    kda(*(new(1, 1, 1, 1) for _ in "qkvf"), new(1, 1, 1), new(1), new(1, 1), new(1, 1, 1, 1), lower_bound=-5.0)
    mla(new(1, 1, 1, 2), new(1, 1, 2), new(1, 2, 1), key_dim=1)
    mla(new(1, 17, 1, 2), new(1, 18, 2), new(1, 2, 1), key_dim=1)
    rms_norm(new(1, 1), new(1), 1e-5)
    mix_blocks(new(1, 1, 1), new(1), 1e-5)
    select_experts(new(1, 1), None, 1, "sigmoid", True, 1.0, 1, 1)
    product(new(1, 1), new(1, 1), torch.float32)
for launch in launches:
    assert aot.compile_launch(launch, aot.TARGETS["sm_90"]).registers > 0
print(len(launches))
"""


def test_sizes_of_one_compile(tmp_path):
    """At a launch, an integer argument that is 1 becomes a constant: a kernel must not take it for a number on the GPU."""
    assert int(python(["-c", ONES], tmp_path)) == 14


FILL = """
import os
import torch
from k3tool.kernels import aot

assert aot.fill_cache(aot.TARGETS["sm_90"], (torch.bfloat16,), 5, 60) == 0
print(sum(name.endswith(".cubin") for _, _, names in os.walk(os.environ["TRITON_CACHE_DIR"]) for name in names))
"""


def test_a_cache_is_filled_for_a_gpu_that_this_process_does_not_see(tmp_path):
    assert int(python(["-c", FILL], tmp_path)) >= 1
