"""Every Triton kernel on the GPU at hand: is it right, how fast is it against its floor, and what does a model make of it?

    python benchmarks/gpu.py [--json FILE] [--seconds N] [--only TEXT] [--no-model] [--tiny]

Needs this repository, torch and triton (and what k3tool imports for its model: safetensors); nothing is downloaded. All
work on the GPU is done by `gpu_worker.py` in a process of its own, one job after another: a kernel that crashes, hangs or
takes the GPU's context with it costs its own row and a fresh process. Kernels are compiled on all processors while the
card is being measured. What does not fit in the time is left out and said so; the file is rewritten after every job.

--tiny walks the same way on tiny shapes with interpreted kernels, without a GPU: its numbers say nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from k3tool.kernels.cases import RELEASED, TINY, Case, all_cases

HERE = Path(__file__).resolve().parent
MARK = "@@ "  # begins a line that answers a job
CASE_SECONDS, COMPILE_SECONDS = 60.0, 100.0
MODEL_SECONDS, OTHER_SECONDS = 75.0, 40.0
AFTER_CASES = 95.0  # kept for the model, other implementations and float32
OTHERS = ("KDA prefill, fla-core", "MLA prefill, torch attention")


class Worker:
    """A process that does jobs on the GPU. One that dies or answers too late is replaced at the next job."""

    def __init__(self, command: list[str]) -> None:
        self.command = command
        self.process: subprocess.Popen[str] | None = None
        self.listener: threading.Thread | None = None
        self.answers: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self.said: deque[str] = deque(maxlen=6)

    def ask(self, job: dict[str, Any], seconds: float) -> dict[str, Any]:
        """What the worker answers, or `{"problem": ...}`."""
        process = self.process or self._start()
        try:
            assert process.stdin is not None
            process.stdin.write(json.dumps(job) + "\n")
            process.stdin.flush()
            answer = self.answers.get(timeout=max(1.0, seconds))
        except (queue.Empty, OSError) as error:
            late = isinstance(error, queue.Empty)
            self.stop()
            return {"problem": f"no answer within {seconds:.0f} s" if late else self._last_words()}
        if answer is None:
            self.stop()
            return {"problem": self._last_words()}
        if answer.get("is_lost"):
            self.stop()
        return answer

    def _last_words(self) -> str:
        return "the process died" + (f": {' / '.join(self.said)[-400:]}" if self.said else "")

    def _start(self) -> subprocess.Popen[str]:
        self.answers, self.said = queue.Queue(), deque(maxlen=6)
        process = subprocess.Popen(
            self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=HERE
        )
        self.listener = threading.Thread(target=_listen, args=(process, self.answers, self.said), daemon=True)
        self.listener.start()
        self.process = process
        return process

    def stop(self) -> None:
        """End the process: its memory is free for the next one."""
        if self.process is not None:
            assert self.process.stdin is not None and self.listener is not None
            self.process.kill()
            self.process.wait()
            with contextlib.suppress(OSError):  # what was not sent is of no use any more
                self.process.stdin.close()
            self.listener.join(2.0)
            self.process = None


def _listen(process: subprocess.Popen[str], answers: queue.Queue[Any], said: deque[str]) -> None:
    assert process.stdout is not None
    with process.stdout:
        for line in process.stdout:
            if line.startswith(MARK):
                answers.put(json.loads(line[len(MARK) :]))
            elif line.strip():
                said.append(line.strip())
    answers.put(None)


class Run:
    """Jobs in order of importance, until the time is up; `document` is written after each of them."""

    def __init__(self, options: argparse.Namespace, cases: list[Case], command: list[str]) -> None:
        self.options = options
        self.deadline = time.monotonic() + options.seconds
        self.worker = Worker(command)
        self.cases = cases
        self.rows: dict[str, dict[str, Any]] = {
            case.name: {
                "case": case.name,
                "bound": case.bound,
                "target": case.target,
                "errors": {},
                "ok": False,
                "note": "",
            }
            for case in cases
        }
        self.document: dict[str, Any] = {
            "machine": None, "cases": list(self.rows.values()), "others": [], "model": None, "ok": False,
        }  # fmt: skip

    def left(self, kept: float = 0.0) -> float:
        return self.deadline - kept - time.monotonic()

    def save(self) -> None:
        rows = self.document["cases"]
        self.document["ok"] = bool(rows) and all(row["ok"] for row in rows)
        target: Path | None = self.options.json
        if target is not None:
            partial = target.with_name(target.name + ".partial")
            partial.write_text(json.dumps(self.document, indent=1))
            os.replace(partial, target)

    def everything(self) -> int:
        """Exit code: 0 where all kernels agree with their references, 14 without a GPU, else 1."""
        compilers = start_compilers(self.options.tiny)
        machine = self.worker.ask({"do": "machine"}, self.left())
        if "problem" in machine:
            print(f"error: {machine['problem']}", file=sys.stderr)
            return 14 if machine.get("no_gpu") else 1
        self.document["machine"] = machine
        print(
            f"{machine['date']}: {machine['name']} ({machine['generation']}), torch {machine['torch']}, triton "
            f"{machine['triton']}; copy {machine['copy_bytes_per_second'] / 1e12:.2f} TB/s, bfloat16 matmul "
            f"{machine['matmul_per_second'] / 1e12:.0f} TFLOP/s",
            flush=True,
        )
        wait_for(compilers, min(COMPILE_SECONDS, self.left(120.0)))
        for case in sorted(self.cases, key=lambda case: case.target is None):  # those with a goal first
            self.check(case, "bfloat16", self.left(AFTER_CASES if not self.options.no_model else 30.0))
        self.worker.stop()
        if not self.options.no_model:
            self.model()
        for name in OTHERS:
            if self.options.only in name:
                self.other(name)
        seen: set[tuple[str, str]] = set()
        for case in self.cases:  # once per kernel: the arithmetic is that of bfloat16
            if (case.kernel, case.function) not in seen:
                seen.add((case.kernel, case.function))
                self.check(case, "float32", self.left())
        self.worker.stop()
        self.save()
        report(self.document)
        return 0 if self.document["ok"] else 1

    def check(self, case: Case, dtype: str, left: float) -> None:
        row = self.rows[case.name]
        if left <= 0:
            row["note"] += f" no time for {dtype};"
            return self.save()
        job = {"do": "case", "name": case.name, "dtype": dtype, "machine": self.document["machine"]}
        answer = self.worker.ask(job, min(CASE_SECONDS, left))
        row["errors"].update(answer.get("errors", {}))
        was_ok = row["ok"] or dtype == "bfloat16"
        row["ok"] = was_ok and answer.get("ok", False)
        row.update(answer.get("times", {}))
        if "problem" in answer:
            row["note"] += f" {dtype}: {answer['problem']};"
        if dtype == "bfloat16" or not row["ok"]:
            print(line(row), flush=True)
        return self.save()

    def model(self) -> None:
        if self.left(20.0) <= 0:
            self.document["model"] = {"text": "model of true width: no time"}
        else:
            seconds = min(MODEL_SECONDS, self.left(20.0))
            answer = self.worker.ask({"do": "model", "machine": self.document["machine"], "seconds": seconds}, seconds)
            problem = answer.get("problem")
            self.document["model"] = answer if problem is None else {"text": f"model of true width: {problem}"}
        print(self.document["model"]["text"], flush=True)
        self.worker.stop()
        self.save()

    def other(self, name: str) -> None:
        found = {"name": name, "text": "no time"}
        if self.left() > 0:
            answer = self.worker.ask({"do": "other", "name": name}, min(OTHER_SECONDS, self.left()))
            found = {"name": name, "text": answer.get("problem", ""), **answer}
        self.document["others"].append(found)
        print(f"{name}: {found['text']}", flush=True)
        self.save()


def start_compilers(tiny: bool) -> list[subprocess.Popen[bytes]]:
    """Processes that compile all kernels for the GPU at hand into Triton's cache, without touching the GPU."""
    generation = "" if tiny else generation_here()
    if not generation:
        return []
    number = max(1, min(14, (os.cpu_count() or 2) - 1))
    return [
        subprocess.Popen(
            [sys.executable, "-m", "k3tool.kernels.aot", "--fill", generation, str(part), str(number)],
            cwd=HERE.parent,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for part in range(number)
    ]


def generation_here() -> str:
    """Which target of `k3tool.kernels.aot` the GPU is exactly; asked of a process that ends, so that this has no context."""
    question = (
        "import torch; from k3tool.kernels import lang; p = torch.cuda.is_available() and lang.gpu(); "
        "exact = p and (torch.version.hip or 'sm_%d%d' % torch.cuda.get_device_capability() == p); print(p if exact else '')"
    )
    try:
        asked = subprocess.run(
            [sys.executable, "-c", question], cwd=HERE.parent, capture_output=True, text=True, timeout=60, check=True
        )
    except (subprocess.SubprocessError, OSError):
        return ""
    return asked.stdout.split()[-1] if asked.stdout.split() else ""


def wait_for(compilers: list[subprocess.Popen[bytes]], seconds: float) -> None:
    """Those that are not ready in time are ended: what they did not compile is compiled where it is needed."""
    begun = time.monotonic()
    late = 0
    for process in compilers:
        try:
            process.wait(max(0.0, begun + seconds - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            late += 1
    if compilers:
        after = f", {late} stopped before their end" if late else ""
        print(f"kernels compiled by {len(compilers)} processes, {time.monotonic() - begun:.0f} s{after}", flush=True)


def line(row: dict[str, Any]) -> str:
    errors = " ".join(f"{name} {error:.1e}" for name, error in row["errors"].items())
    text = f"{row['case']:44s} {'ok ' if row['ok'] else 'BAD'} {errors:34s}"
    if row.get("ms") is not None:
        text += f" {row['ms']:9.4f} ms, floor {row['floor_ms']:9.4f}, {row['fraction']:5.0%} of {row['bound']}"
        if row["target"]:
            text += f" (goal {row['target']:.0%}{'' if row['fraction'] >= row['target'] else ', missed'})"
    return text + row["note"]


def report(document: dict[str, Any]) -> None:
    print("\n| case | error bf16 | error fp32 | ms | floor ms | of the ceiling | goal |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for row in document["cases"]:
        numbers = [row["errors"].get("bfloat16"), row["errors"].get("float32")]
        cells = [row["case"], *("" if n is None else f"{n:.1e}" for n in numbers)]
        cells += ["" if n is None else f"{n:.4f}" for n in (row.get("ms"), row.get("floor_ms"))]
        cells.append("" if row.get("fraction") is None else f"{row['fraction']:.0%} {row['bound']}")
        cells.append("" if row["target"] is None else f"{row['target']:.0%}")
        print(f"| {' | '.join(cells)} |" + ("" if row["ok"] else " WRONG" + row["note"]))
    for other in document["others"]:
        print(f"{other['name']}: {other['text']}")
    if document["model"]:
        print(document["model"]["text"])
    print("all kernels agree with their references" if document["ok"] else "SOME KERNELS ARE WRONG OR DID NOT RUN")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Check and time every Triton kernel on the GPU at hand.")
    parser.add_argument("--json", type=Path, default=Path("gpu-result.json"), help="write everything to this file")
    parser.add_argument("--seconds", type=float, default=330.0, help="start nothing after this time")
    parser.add_argument("--only", default="", help="cases whose name holds this text")
    parser.add_argument("--no-model", action="store_true", help="leave out the synthetic model")
    parser.add_argument(
        "--tiny", action="store_true", help="tiny shapes, interpreted on the CPU: a test of this script"
    )
    return parser.parse_args()


def main() -> int:
    options = arguments()
    if options.tiny:
        os.environ["TRITON_INTERPRET"] = "1"
    cases = [case for case in all_cases(TINY if options.tiny else RELEASED) if options.only in case.name]
    command = [sys.executable, str(HERE / "gpu_worker.py"), *(["--tiny"] if options.tiny else [])]
    run = Run(options, cases, command)
    try:
        return run.everything()
    finally:
        run.worker.stop()


if __name__ == "__main__":
    sys.exit(main())
