"""Every kernel in the shapes that other processors would give it, and without the compiler."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from k3tool.errors import UsageError
from k3tool.kernels import cpu as compiled
from k3tool.kernels.dispatch import use
from k3tool.kernels.linear import linear
from k3tool.kernels.moe import experts_forward
from k3tool.kernels.mxfp4 import decode_values
from tests.kernels.linear.test_stored import stored
from tests.kernels.moe.test_experts import error, make, route

if not compiled.available():
    pytest.skip("compiled kernels are not available here", allow_module_level=True)

import llvmlite.binding as llvm
from llvmlite import ir

from k3tool.kernels.cpu import product, target
from k3tool.kernels.cpu.formats import Fp4, Plain
from k3tool.kernels.linear import cpu as linear_cpu
from k3tool.kernels.moe import cpu as moe_cpu
from k3tool.kernels.moe import emit
from k3tool.kernels.mxfp4 import cpu as mxfp4_cpu

# Width of a vector, registers: as without AVX2, as on ARM, as with AVX-512. Byte look-up by arithmetic in all.
SHAPES = [(4, 16), (4, 32), (16, 32)]
FEATURES = {
    "avx512": ("x86_64-unknown-linux-gnu", "skylake-avx512", ["avx512bw", "avx512vl", "avx512f", "avx2", "fma", "ssse3"]),
    "avx2": ("x86_64-unknown-linux-gnu", "haswell", ["avx2", "fma", "ssse3"]),
    "ssse3": ("x86_64-unknown-linux-gnu", "core2", ["ssse3"]),
    "sse2": ("x86_64-unknown-linux-gnu", "x86-64", []),
    "arm": ("aarch64-unknown-linux-gnu", "neoverse-n1", ["neon"]),
}  # fmt: skip
LOOKUPS = {"avx512": "vpshufb\t%zmm", "avx2": "vpshufb\t%ymm", "ssse3": "pshufb\t%xmm", "arm": "tbl\tv"}


@pytest.fixture(params=SHAPES, ids=str)
def shaped(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[target.Target]:
    """This processor, described as one with other vectors; LLVM splits or pads them."""
    lanes, registers = request.param
    other = dataclasses.replace(
        target.host(), float_lanes=lanes, vector_registers=registers, byte_lookup=None, widens_float16=False
    )
    caches = (linear_cpu._compiled, moe_cpu._compiled, mxfp4_cpu._compiled)
    monkeypatch.setattr(target, "host", lambda: other)
    monkeypatch.setattr(moe_cpu, "_LAYERS", type(moe_cpu._LAYERS)())
    for cached in caches:
        cached.cache_clear()
    yield other
    for cached in caches:
        cached.cache_clear()


def test_linear(shaped: target.Target) -> None:
    for tokens in (1, 3, 17, 70):
        for rows, columns in ((97, 33), (40, 256), (110, 300)):
            x, weight = torch.randn(tokens, columns), torch.randn(rows, columns).bfloat16()
            assert error(linear(x, weight), x.double() @ weight.double().t()) < 1e-6


def test_every_float16(shaped: target.Target) -> None:
    """Older processors have no instruction that widens them."""
    weight = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.float16).reshape(-1, 8)
    weight = torch.where(weight.isfinite(), weight, 1.0)
    for column in range(0, 8, 3):
        x = torch.zeros(1, 8)
        x[0, column] = 1.0
        assert torch.equal(linear(x, weight)[0], weight[:, column].float())


KINDS = [("int4", 32, torch.bfloat16), ("int4", 0, torch.float32), ("int8", 64, torch.bfloat16), ("fp8", 0, torch.float32),
         ("fp8", 128, torch.float32), ("nf4", 64, torch.float32), ("fp4", 32, torch.float32), ("e2m1", 16, None)]  # fmt: skip


@pytest.mark.parametrize(("kind", "group", "dtype"), KINDS)
def test_stored_matrices(shaped: target.Target, kind: str, group: int, dtype: torch.dtype | None) -> None:
    for rows, columns in ((97, 64), (40, 320), (30, 72)):
        if columns % (group or 8) and kind != "fp8":
            continue
        weight = stored(kind, rows, columns, group, dtype)
        for tokens in (1, 17, 70):
            x = torch.randn(tokens, columns)
            assert error(linear(x, weight), x.double() @ weight.rows(slice(None)).double().t()) < 1e-6


@pytest.mark.parametrize("format_", ["mxfp4", "nvfp4"])
def test_experts(shaped: target.Target, format_: str) -> None:
    for inner, wide in ((96, 160), (32, 64)):
        layer = make(format_, 4, inner, wide)
        for tokens in (1, 33):
            x, (ids, weights) = torch.randn(tokens, wide), route(tokens, 4, 2)
            with use("reference"):
                wanted = experts_forward(x, layer, ids, weights)
            assert error(experts_forward(x, layer, ids, weights), wanted) < 1e-6


@pytest.mark.parametrize("group", [16, 32])
def test_decoding_is_exact(shaped: target.Target, group: int) -> None:
    packed = torch.arange(256, dtype=torch.uint8).repeat(40, 1)[:, : 16 * 9]
    scale = torch.randint(1, 255, (40, 2 * packed.shape[1] // group)).to(torch.uint8)
    for dtype in (torch.float32, torch.bfloat16):
        with use("reference"):
            wanted = decode_values(packed, scale, dtype)
        assert torch.equal(decode_values(packed, scale, dtype).view(torch.uint8), wanted.view(torch.uint8))


@pytest.mark.parametrize("name", FEATURES)
def test_kernels_compile_for(name: str) -> None:
    """Machine code for processors that are not here: the instructions are there, none is unknown to LLVM."""
    triple, cpu, flags = FEATURES[name]
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    described = target.describe(triple, cpu, dict.fromkeys(flags, True))
    tile = product.tiling(described)
    module = ir.Module(name=name)
    micros = product.emit_micros(module, tile)
    linear_cpu._emit_vector_product(module, Plain("bfloat16", 2, described.float_lanes))
    format_ = Fp4(32, described)
    block_product = product.emit_block_product(module, format_, tile, micros)
    emit.emit_gate_up(module, format_, tile)
    emit.emit_contract(module, format_, tile, block_product)
    module.triple = triple
    machine = llvm.Target.from_triple(triple).create_target_machine(cpu=cpu, features=described.features, opt=2)
    parsed = llvm.parse_assembly(str(module))
    parsed.verify()
    text = machine.emit_assembly(parsed)
    assert LOOKUPS.get(name, "") in text


def test_what_a_processor_is_asked_for() -> None:
    lanes = {
        name: target.describe(triple, cpu, dict.fromkeys(flags, True))
        for name, (triple, cpu, flags) in FEATURES.items()
    }
    assert [lanes[name].float_lanes for name in FEATURES] == [16, 8, 4, 4, 4]
    assert [lanes[name].byte_lookup is not None for name in FEATURES] == [True, True, True, False, True]
    assert target.describe("riscv64-unknown-linux-gnu", "generic", {}).byte_lookup is None


WITHOUT = """
import logging, sys
logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
sys.modules['llvmlite'] = None
import torch
from k3tool.kernels import cpu
from k3tool.kernels.dispatch import choose_backend
from k3tool.kernels.linear import linear
x, w = torch.ones(3, 8), torch.full((2, 8), 0.5, dtype=torch.bfloat16)
assert linear(x, w).tolist() == [[4.0, 4.0]] * 3
assert linear(x[:1], w).tolist() == [[4.0, 4.0]]
assert not cpu.available()
assert choose_backend("auto", torch.device("cpu")).name == "reference"
"""


def test_torch_takes_over_and_says_so_once() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    assert [text.startswith("WARNING compiled CPU kernels are not available here") for text in lines] == [True]


def test_a_processor_can_pass_for_an_older_one(monkeypatch: pytest.MonkeyPatch) -> None:
    features = {"avx512bw": True, "avx512vl": True, "avx512bf16": True, "avx2": True, "avx": True, "fma": True, "ssse3": True, "sse2": True, "sha": False}  # fmt: skip
    triple = "x86_64-unknown-linux-gnu"
    lanes = {}
    for level in target.LEVELS:
        kept = target.limited(features, level)
        assert kept.keys() == features.keys() and kept["sse2"] and not kept["sha"]
        lanes[level] = target.describe(triple, "znver4", kept).float_lanes
        assert kept["avx512bf16"] == (level == "avx512bf16")
    assert lanes == {"sse": 4, "avx2": 8, "avx512": 16, "avx512bf16": 16}
    assert target.limited(features, None) == features
    monkeypatch.setattr(linear_cpu.torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    for level, native in (("avx512", False), ("avx512bf16", True), ("", True)):
        monkeypatch.setenv("K3TOOL_CPU", level)
        assert linear_cpu._has_bfloat16_units.__wrapped__() == native
    monkeypatch.setenv("K3TOOL_CPU", "avx1024")
    with pytest.raises(UsageError, match="K3TOOL_CPU=avx1024"):
        target.host.__wrapped__()
