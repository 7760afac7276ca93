"""One inference engine in a process of its own: reads commands as JSON lines, answers each with one JSON line.

    python benchmarks/engine.py k3tool|mlx|llama FOLDER THREADS [float32]

Commands: {"prefill": [ids]} starts a new sequence; {"decode": n} takes n greedy steps after it; {"logits": [ids],
"new": n, "out": PATH} writes float32 logits of all prompt tokens and of n forced steps; {"memory": true}.
Each engine imports its own packages, so that it may run under another interpreter.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any


class K3tool:
    """This package, as `k3tool run` uses it."""

    def __init__(self, folder: Path, threads: int, dtype: str) -> None:
        from k3tool.generate import Session

        self.session = Session.open(folder, device="cpu", dtype=dtype)
        self.logits: Any = None

    def prefill(self, ids: list[int]) -> dict[str, Any]:
        self.session.reset()
        self.session.cache.reserve(len(ids) + 256)
        self.logits = self.session.prefill(ids)
        return {"token": int(self.logits.argmax())}

    def decode(self, count: int) -> dict[str, Any]:
        tokens = []
        for _ in range(count):
            tokens.append(int(self.logits.argmax()))
            self.logits = self.session.decode(tokens[-1])
        return {"tokens": tokens}

    def all_logits(self, ids: list[int], cut: int) -> Any:
        import numpy as np

        self.session.reset()
        rows = [self.session.prefill(ids[:cut], all_logits=True).numpy()]
        rows += [self.session.decode(token).numpy()[None] for token in ids[cut:]]
        return np.concatenate(rows)


class Mlx:
    """mlx-lm on its CPU backend, with its own cache."""

    def __init__(self, folder: Path, threads: int, dtype: str) -> None:
        import mlx.core as mx
        from mlx_lm.utils import load_model

        self.mx = mx
        self.model, _ = load_model(folder)
        if dtype == "float32":
            self.model.set_dtype(mx.float32)
        self.cache: Any = None
        self.logits: Any = None

    def prefill(self, ids: list[int]) -> dict[str, Any]:
        self.cache = self.model.make_cache()
        self.logits = self.model(self.mx.array([ids]), self.cache)[0, -1]
        return {"token": int(self.mx.argmax(self.logits).item())}

    def decode(self, count: int) -> dict[str, Any]:
        tokens = []
        for _ in range(count):
            tokens.append(int(self.mx.argmax(self.logits).item()))
            self.logits = self.model(self.mx.array([tokens[-1:]]), self.cache)[0, -1]
            self.mx.eval(self.logits)
        return {"tokens": tokens}

    def all_logits(self, ids: list[int], cut: int) -> Any:
        import numpy as np

        self.cache = self.model.make_cache()
        rows = [np.array(self.model(self.mx.array([ids[:cut]]), self.cache)[0])]
        rows += [np.array(self.model(self.mx.array([[token]]), self.cache)[0]) for token in ids[cut:]]
        return np.concatenate(rows)


class Llama:
    """llama.cpp through xllamacpp, on a GGUF that k3tool wrote; seconds are the server's own timings."""

    def __init__(self, folder: Path, threads: int, dtype: str) -> None:
        import xllamacpp as xlc

        params = xlc.CommonParams()
        params.model.path = str(next(folder.glob("*.gguf")))
        params.n_ctx, params.n_parallel, params.n_gpu_layers = 1024, 1, 0
        params.n_batch = params.n_ubatch = 512
        params.warmup, params.fit_params, params.verbosity = True, False, 0
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
        self.server = xlc.Server(params)
        self.ids: list[int] = []

    def _complete(self, ids: list[int], count: int) -> dict[str, Any]:
        request = {"prompt": ids, "n_predict": count, "temperature": 0, "cache_prompt": False, "ignore_eos": True}
        reply = self.server.handle_completions(request)
        return json.loads(reply) if isinstance(reply, str) else reply

    def prefill(self, ids: list[int]) -> dict[str, Any]:
        self.ids = ids
        return {"seconds": self._complete(ids, 1)["timings"]["prompt_ms"] / 1e3}

    def decode(self, count: int) -> dict[str, Any]:
        timings = self._complete(self.ids, count + 1)["timings"]
        return {"seconds": count / timings["predicted_per_second"]}


ENGINES = {"k3tool": K3tool, "mlx": Mlx, "llama": Llama}


def peak_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def answer(engine: Any, command: dict[str, Any]) -> dict[str, Any]:
    if "memory" in command:
        return {"peak_bytes": peak_bytes()}
    begun = time.perf_counter()
    if "prefill" in command:
        result = engine.prefill(command["prefill"])
    elif "decode" in command:
        result = engine.decode(command["decode"])
    else:
        import numpy as np

        np.save(command["out"], engine.all_logits(command["logits"], command["cut"]))
        result = {}
    return {"seconds": time.perf_counter() - begun, **result}


def main() -> None:
    name, folder, threads = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    dtype = sys.argv[4] if len(sys.argv) > 4 else "bfloat16"
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # engines print on stdout
    begun = time.perf_counter()
    engine = ENGINES[name](folder, threads, dtype)
    print(json.dumps({"load_seconds": time.perf_counter() - begun}), file=replies, flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(engine, json.loads(line))), file=replies, flush=True)
    os._exit(0)  # llama.cpp's server threads do not end by themselves


if __name__ == "__main__":
    main()
