"""Compile every Triton kernel for every GPU generation, and write what the compilers say into docs/kernels.md.

    python benchmarks/compile.py [--target NAME]... [--every] [--write]

No GPU is needed. --every compiles all pinned configurations (without --write: the table is of the first ones). Exits 1
where a limit is broken. Takes some minutes; Triton's own cache makes a second run short.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections import defaultdict
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "0"
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import triton

from k3tool.kernels.aot import TARGETS, Row, compile_launch, launches_of
from k3tool.kernels.cases import Case, all_cases

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "kernels.md"
BEGIN, END = "<!-- compiled: written by benchmarks/compile.py -->", "<!-- /compiled -->"


def compile_all(targets: list[str], every: bool) -> list[Row]:
    rows: list[Row] = []
    for name in targets:
        for dtype in (torch.bfloat16, torch.float32):
            for case in all_cases():
                for launch in launches_of(case, TARGETS[name], dtype, every=every):
                    row = Row(case.name, launch.grid, compile_launch(launch, TARGETS[name]))
                    if dtype == torch.bfloat16:
                        rows.append(row)
                        problem = row.problem()
                        if problem or every:
                            print(f"{case.name}: {row.compiled} {problem}", flush=True)
                    elif row.compiled.shared_bytes > TARGETS[name].shared_bytes:
                        print(f"{case.name} in float32: {row.compiled}", flush=True)
        print(f"{name}: done", flush=True)
    return rows


def table(rows: list[Row], targets: list[str]) -> str:
    """Kernels by cases; per target `registers / shared KiB`, and spilled bytes where there are any."""
    cells: dict[tuple[str, str], dict[str, Row]] = defaultdict(dict)
    for row in rows:
        cells[row.case, row.compiled.kernel].setdefault(row.compiled.target, row)
    lines = [
        f"Triton {triton.__version__}. Per target: registers of a thread / shared memory of a program in KiB (spilled bytes).",
        "",
        f"| case | kernel | {' | '.join(targets)} |",
        f"| --- | --- | {' | '.join('---' for _ in targets)} |",
    ]
    last = ""
    for (case, kernel), found in cells.items():
        texts = [_cell(found[target]) if target in found else "" for target in targets]
        lines.append(f"| {'' if case == last else case} | {kernel.removesuffix('_kernel')} | {' | '.join(texts)} |")
        last = case
    return "\n".join(lines)


def _cell(row: Row) -> str:
    found = row.compiled
    spills = f" ({found.spills})" if found.spills else ""
    return f"{found.registers} / {found.shared_bytes / 1024:.0f}{spills}"


def floors(cases: list[Case]) -> str:
    """Bytes of each case: the least that any implementation moves, and what these kernels move."""
    lines = [
        "| case | floor MB | moved MB | moved over floor | GFLOP | FLOP per byte of the floor |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for case in cases:
        lines.append(
            f"| {case.name} | {case.floor_bytes / 1e6:,.2f} | {case.moved_bytes / 1e6:,.2f} | "
            f"{case.moved_bytes / case.floor_bytes:.2f} | {case.operations / 1e9:,.1f} | "
            f"{case.operations / case.floor_bytes:,.0f} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description="Compile every Triton kernel for every GPU generation.")
    parser.add_argument("--target", action="append", choices=list(TARGETS), help="only this one (repeat for more)")
    parser.add_argument("--every", action="store_true", help="all pinned configurations")
    parser.add_argument("--write", action="store_true", help="put the tables into docs/kernels.md")
    options = parser.parse_args()
    targets = options.target or list(TARGETS)
    rows = compile_all(targets, options.every)
    if options.write:
        text = f"{BEGIN}\n{floors(all_cases())}\n\n{table(rows, targets)}\n{END}"
        document = DOCUMENT.read_text()
        DOCUMENT.write_text(re.sub(f"{re.escape(BEGIN)}.*{re.escape(END)}", lambda _: text, document, flags=re.DOTALL))
    problems = sorted({row.problem() for row in rows if row.problem()})
    print("\n".join(problems) or f"{len(rows)} kernels compile within their limits")
    return 1 if problems and not options.every else 0


if __name__ == "__main__":
    sys.exit(main())
