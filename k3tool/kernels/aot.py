"""Compile every Triton kernel ahead of time for GPUs that are not here, at the shapes of the released model.

The launchers are run on tensors without storage and their launches recorded, so what is compiled is what would run,
with the constants they chose. A compiled kernel tells its registers, spills and shared memory; how fast it is, only a
GPU tells. Not for a process that interprets kernels (`TRITON_INTERPRET`).
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from k3tool.kernels import lang, tuning
from k3tool.kernels.cases import Case, Draw, all_cases


@dataclass(frozen=True)
class Target:
    """A GPU generation: what its compiler is told, and the shared memory that a program may take."""

    name: str
    backend: str
    arch: int | str
    warp_size: int
    shared_bytes: int


TARGETS = {
    target.name: target
    for target in (
        Target("sm_80", "cuda", 80, 32, 163 << 10),
        Target("sm_90", "cuda", 90, 32, 227 << 10),
        Target("sm_100", "cuda", 100, 32, 227 << 10),
        Target("gfx942", "hip", "gfx942", 64, 64 << 10),
        Target("gfx950", "hip", "gfx950", 64, 160 << 10),
    )
}


@dataclass(frozen=True)
class Launch:
    """One recorded launch: the kernel, its arguments by name, and the compiler's options."""

    kernel: JITFunction
    arguments: dict[str, Any]
    options: dict[str, Any]
    grid: tuple[int, ...]

    @property
    def name(self) -> str:
        """With the package that it is in: `kda.scan_kernel`."""
        return f"{self.kernel.__module__.split('.')[2]}.{self.kernel.__name__}"


@dataclass(frozen=True)
class Compiled:
    """What the compiler says of one kernel. registers: 32-bit ones of a thread. spills: bytes of a thread in memory."""

    kernel: str
    target: str
    registers: int
    spills: int
    shared_bytes: int
    warps: int


@contextmanager
def recording(target: str, *, every: bool = False) -> Iterator[list[Launch]]:
    """Kernels that are launched inside are noted and not run. Launchers choose for `target`.

    every: a kernel with several configurations is noted in each of them.
    """
    launches: list[Launch] = []
    choose = tuning.best

    def best(kernel: str, shape: Any, candidates: Any, launch: Any) -> Any:
        for options in candidates[1:] if every else ():
            launch(options)
        return choose(kernel, shape, candidates, launch)

    def run(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        names = self.arg_names
        options = {key: kwargs.pop(key) for key in list(kwargs) if key not in names}
        bound = {**dict(zip(names, args, strict=False)), **kwargs}
        launches.append(Launch(self, bound, options, grid(bound) if callable(grid) else grid))

    original, JITFunction.run = JITFunction.run, run  # type: ignore[method-assign]
    token = lang.TARGET.set(target)
    tuning.best = best
    try:
        yield launches
    finally:
        tuning.best = choose
        lang.TARGET.reset(token)
        JITFunction.run = original  # type: ignore[method-assign]


def compile_launch(launch: Launch, target: Target) -> Compiled:
    """Compile as Triton would at the launch: integers that are 1 or multiples of 16 are known as such."""
    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    for index, parameter in enumerate(launch.kernel.params):
        value = launch.arguments[parameter.name]
        kind = "constexpr" if parameter.is_constexpr or value is None else _type_of(value)
        signature[parameter.name] = kind
        if kind == "constexpr":
            constants[(index,)] = value
        elif kind[0] == "*" or (kind[0] == "i" and kind != "i1" and value % 16 == 0):
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=launch.kernel, signature=signature, constexprs=constants, attrs=attributes)
    gpu = GPUTarget(target.backend, target.arch, target.warp_size)
    compiled = triton.compile(source, target=gpu, options=launch.options)
    registers, spills = (_cuda_resources if target.backend == "cuda" else _hip_resources)(compiled.asm)
    return Compiled(launch.name, target.name, registers, spills, compiled.metadata.shared, compiled.metadata.num_warps)


def _type_of(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"*{_POINTERS[value.dtype]}"
    if isinstance(value, bool):
        return "i1"
    if isinstance(value, int):
        return "constexpr" if value == 1 else "i32" if -(2**31) <= value < 2**31 else "i64"
    return "fp32"


_POINTERS = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "u8",
    torch.bool: "i1",
}


def _cuda_resources(asm: dict[str, Any]) -> tuple[int, int]:
    """Registers and stack bytes from the resource table of the binary, read by the cuobjdump that Triton brings."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(asm["cubin"])
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.findall(r"REG:(\d+) STACK:(\d+)", text)  # of the kernel and, rarely, of functions that it calls
    return max(int(registers) for registers, _ in found), max(int(stack) for _, stack in found)


def _hip_resources(asm: dict[str, Any]) -> tuple[int, int]:
    """Vector registers (the accumulation file included) and scratch bytes from the metadata of the assembly."""

    def number(key: str) -> int:
        return int(re.search(rf"\.{key}:\s+(\d+)", asm["amdgcn"])[1])  # type: ignore[index]

    return number("vgpr_count"), number("private_segment_fixed_size")


def launches_of(case: Case, target: Target, dtype: torch.dtype, *, every: bool = False) -> list[Launch]:
    """What a case launches on `target`; with `every`, in all the configurations that may be chosen there."""
    with recording(target.name, every=every) as launches:
        case.twin("kernel")(**case.make(Draw(torch.device("meta"), dtype)))
    return launches


class _Absent:
    """The driver of a GPU that is not here: what Triton asks of it to compile."""

    def __init__(self, target: Target) -> None:
        self._target = GPUTarget(target.backend, target.arch, target.warp_size)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def fill_cache(target: Target, dtypes: Collection[torch.dtype], part: int, parts: int) -> int:
    """Compile what the cases may launch on `target`, in all configurations, into Triton's cache on disk.

    Every `parts`-th launch, from number `part` on, so that several processes share the work. Compiled as at a launch:
    a process with the GPU finds them all. What fails here fails again there, and is told there. Returns how many failed.
    """
    triton.runtime.driver.set_active(_Absent(target))
    failed = 0
    launches = [
        launch for dtype in dtypes for case in all_cases() for launch in launches_of(case, target, dtype, every=True)
    ]
    for launch in launches[part::parts]:
        arguments = [launch.arguments[name] for name in launch.kernel.arg_names]
        try:
            launch.kernel.warmup(*arguments, grid=launch.grid, **launch.options)
        except Exception:  # a compiler raises what it likes
            failed += 1
    return failed


MAX_SPILLS = 256
"""Bytes of a thread that a kernel may keep in memory for want of registers, in its first configuration in bfloat16."""


@dataclass(frozen=True)
class Row:
    """One kernel of one case, compiled."""

    case: str
    grid: tuple[int, ...]
    compiled: Compiled

    def problem(self) -> str:
        """Which limit is broken, or nothing."""
        found, most = self.compiled, TARGETS[self.compiled.target].shared_bytes
        if found.shared_bytes > most:
            return f"{found.kernel} takes {found.shared_bytes} bytes of shared memory of {most} on {found.target}"
        if found.spills > MAX_SPILLS:
            return f"{found.kernel} spills {found.spills} bytes of a thread on {found.target}, more than {MAX_SPILLS}"
        return ""


def compile_cases(
    target: Target, dtype: torch.dtype, *, kernels: Collection[str] = (), once: bool = False
) -> list[Row]:
    """All cases as they would run on `target`, or only some kernels of them; with `once`, each kernel in one case."""
    rows: list[Row] = []
    seen: set[str] = set()
    for case in all_cases():
        for launch in launches_of(case, target, dtype):
            if (kernels and launch.name not in kernels) or (once and launch.name in seen):
                continue
            seen.add(launch.name)
            rows.append(Row(case.name, launch.grid, compile_launch(launch, target)))
    return rows


def main(arguments: list[str]) -> int:
    """`TARGET [KERNEL ...]`: compile each kernel once; one line of JSON with what the compiler said.

    `--fill TARGET PART PARTS`: see `fill_cache`.
    """
    if arguments[0] == "--fill":
        part, parts = map(int, arguments[2:])
        return int(fill_cache(TARGETS[arguments[1]], (torch.bfloat16, torch.float32), part, parts) > 0)
    rows = compile_cases(TARGETS[arguments[0]], torch.bfloat16, kernels=arguments[1:], once=True)
    sys.stdout.write(json.dumps([{**asdict(row.compiled), "problem": row.problem()} for row in rows]) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
