"""The processor at hand and the compiler for it.

Kernels ask `Target` how wide vectors are and which table look-up exists; everything else is portable LLVM IR.
Compiling takes fractions of a second per kernel and needs no C compiler; what was compiled is kept (see `objects`).
`K3TOOL_CPU` (sse, avx2, avx512, avx512bf16) makes an x86 processor pass for one without the later instructions, so that
one machine can test what several would run.
"""

from __future__ import annotations

import ctypes
import logging
import os
from dataclasses import dataclass
from functools import cache
from typing import Any

import llvmlite
import llvmlite.binding as llvm
from llvmlite import ir

from k3tool.errors import UsageError
from k3tool.kernels.cpu import objects

LEVELS = ("sse", "avx2", "avx512", "avx512bf16")
"""What `K3TOOL_CPU` may say: the last instructions that are used."""
_WITH_AVX = ("avx", "fma", "f16c", "xop", "vaes", "vpclmulqdq")  # names of features that need 256-bit registers

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Target:
    """cpu and features as LLVM names them; float_lanes: float32 numbers in one vector register."""

    cpu: str
    features: str
    float_lanes: int
    vector_registers: int
    byte_lookup: str | None  # LLVM intrinsic that picks bytes from a 16-byte table in each 128-bit lane
    widens_float16: bool = False  # has an instruction that does


def describe(triple: str, cpu: str, features: dict[str, bool]) -> Target:
    """Choose vector width and byte look-up from a feature list."""
    flags = ",".join(("+" if on else "-") + name for name, on in sorted(features.items()))
    architecture = triple.split("-")[0]
    if architecture in ("x86_64", "amd64"):
        if features.get("avx512bw") and features.get("avx512vl"):
            return Target(cpu, flags, 16, 32, "llvm.x86.avx512.pshuf.b.512", True)
        if features.get("avx2") and features.get("fma"):
            return Target(cpu, flags, 8, 16, "llvm.x86.avx2.pshuf.b", bool(features.get("f16c")))
        return Target(cpu, flags, 4, 16, "llvm.x86.ssse3.pshuf.b.128" if features.get("ssse3") else None)
    if architecture in ("aarch64", "arm64"):
        return Target(cpu, flags, 4, 32, "llvm.aarch64.neon.tbl1.v16i8", True)
    return Target(cpu, flags, 4, 16, None)


def architecture() -> str:
    return llvm.get_process_triple().split("-")[0]


def level() -> str | None:
    """What `K3TOOL_CPU` limits this processor to, or None. Raises UsageError."""
    asked = os.environ.get("K3TOOL_CPU") or None
    if asked is not None and asked not in LEVELS:
        raise UsageError(
            f"K3TOOL_CPU={asked}: no such processor", hint=f"one of {', '.join(LEVELS)}, or leave it unset"
        )
    return asked


def limited(features: dict[str, bool], most: str | None) -> dict[str, bool]:
    """A feature list without what came after `most` of `LEVELS`; whole with None."""
    if most is None:
        return features
    later = {"sse": _WITH_AVX, "avx2": ("avx512", "avx10"), "avx512": ("avx512bf16", "avx512fp16"), "avx512bf16": ()}
    return {name: on and not name.startswith(later[most]) for name, on in features.items()}


@cache
def host() -> Target:
    """This machine. Raises whatever llvmlite raises where it cannot tell."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    features = limited(dict(llvm.get_host_cpu_features()), level())
    return describe(llvm.get_process_triple(), llvm.get_host_cpu_name(), features)


class Library:
    """Machine code of one LLVM module; functions come out as addresses or as ctypes callables without the GIL."""

    def __init__(self, module: ir.Module, target: Target) -> None:
        machine = llvm.Target.from_default_triple().create_target_machine(
            cpu=target.cpu, features=target.features, opt=3, jit=True
        )
        module.triple = llvm.get_process_triple()
        module.data_layout = str(machine.target_data)
        text = str(module)
        version = f"llvmlite {llvmlite.__version__}, LLVM {llvm.llvm_version_info}, passes {_PASSES}"
        key = objects.key_of(version, target.cpu, target.features, text)
        code = objects.load(key)
        if code is None:
            code = _compile(text, machine)
            objects.save(key, code)
        self._engine: Any = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
        self._engine.add_object_file(llvm.ObjectFileRef.from_data(code))
        self._engine.finalize_object()

    def address(self, name: str) -> int:
        return self._engine.get_function_address(name)

    def function(self, name: str, params: int, *, returns: bool = False) -> Any:
        prototype = ctypes.CFUNCTYPE(ctypes.c_int64 if returns else None, *[ctypes.c_int64] * params)
        return prototype(self.address(name))


_PASSES = 1  # to be counted up when `_compile` changes


def _compile(text: str, machine: Any) -> bytes:
    """An object file. Raises RuntimeError."""
    parsed = llvm.parse_assembly(text)
    parsed.verify()
    # Kernels are vectorized and unrolled as written; doing it again costs more time than it saves.
    options = llvm.create_pipeline_tuning_options(speed_level=2)
    options.loop_vectorization = options.slp_vectorization = options.loop_unrolling = False
    passes = llvm.create_pass_builder(machine, options)
    passes.getModulePassManager().run(parsed, passes)
    return machine.emit_object(parsed)
