"""Tokens in, tokens out: prefill, decode_one_token, sample, and a Session that joins them to a checkpoint.

    session = Session.open("path/to/checkpoint", dtype="float32")
    for token in session.generate([1, 2, 3], max_new_tokens=16):
        ...
    session.finish_reason, session.decode_timing.tokens_per_second, session.memory().mla_cache_bytes

One sequence at a time. Text is the business of `k3tool.tokenizer` and `k3tool.chat`. Several processes run a folder of
ranks together, each of them this same code (see `k3tool.parallel.link`):

    with joined(world_of(os.environ)) as link:
        session = Session.open("path/to/ranks", link=link)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from k3tool.checkpoint.source import LocalSource
from k3tool.checkpoint.writer import ShardWriter
from k3tool.config import K3Config
from k3tool.errors import UsageError
from k3tool.events import SILENT, Progress
from k3tool.kernels.dispatch import Backend
from k3tool.memory import peak_bytes
from k3tool.model.bound import PREFILL_TOKENS, Bound, prefill_block
from k3tool.model.cache import Cache
from k3tool.model.check import KernelCheck, check_kernels, worst_of
from k3tool.model.decoder import Model
from k3tool.model.moe import Observer
from k3tool.model.open import open_model
from k3tool.model.replay import decode_step
from k3tool.parallel.link import ALONE, Link
from k3tool.sampling import check_ids, check_sampling, sample
from k3tool.stopping import end_tokens

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class Timing:
    tokens: int = 0
    seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds > 0 else 0.0

    def as_json(self) -> dict[str, float]:
        return {"tokens": self.tokens, "seconds": self.seconds, "tokens_per_second": self.tokens_per_second}

    def plus(self, tokens: int, seconds: float) -> Timing:
        return Timing(self.tokens + tokens, self.seconds + seconds)


@dataclass(frozen=True)
class MemoryReport:
    """Peaks are those of the process; caches are those of the sequence (`mla_cache_bytes`: of its tokens so far).

    resident_experts: of every layer; None where all are. streamed_bytes: read from disk for the others so far.
    """

    peak_host_bytes: int
    peak_device_bytes: int
    kda_state_bytes: int
    mla_cache_bytes: int
    resident_experts: int | None = None
    streamed_bytes: int = 0


def prefill(
    model: Model,
    ids: Sequence[int],
    cache: Cache,
    *,
    all_logits: bool = False,
    block: int | None = None,
    observe: Observer | None = None,
    progress: Progress = SILENT,
) -> Tensor:
    """Feed `ids` behind what `cache` has seen. Returns float32 logits: [vocab] of the last, or [T, vocab] of all.

    block: tokens per pass (default: bounded memory); any value gives the same result up to rounding.
    Raises UsageError for no ids or an id outside the vocabulary.
    """
    check_ids(model.config, ids)
    tokens = torch.tensor(list(ids), dtype=torch.int64, device=model.device)
    cache.reserve(cache.position + len(ids))
    progress.started("prefill", len(ids), unit="tokens")
    kept: list[Tensor] = []
    hidden = None
    for start in range(0, len(ids), block or prefill_block(model.config)):
        piece = tokens[start : start + (block or prefill_block(model.config))]
        hidden = model.forward(piece, cache, observe)
        if all_logits:
            kept.append(model.logits(hidden))
        progress.advanced("prefill", piece.shape[0])
    progress.finished("prefill")
    assert hidden is not None
    return torch.cat(kept) if all_logits else model.logits(hidden[-1:])[0]


def decode_one_token(model: Model, token: int, cache: Cache, observe: Observer | None = None) -> Tensor:
    """Feed one token; float32 logits [vocab] of what follows it."""
    if observe is None:
        return decode_step(model, token, cache)
    ids = torch.tensor([token], dtype=torch.int64, device=model.device)
    return model.logits(model.forward(ids, cache, observe))[0]


@dataclass
class Session:
    """A loaded checkpoint and one running sequence. `backend.name` and `backend.reason` say which kernels run.

    On one rank of several, `model` and `cache` are what this rank has of them, and all ranks call every method with the
    same arguments: each gets the same logits and the same tokens, and rank 0 samples.
    observer: sees every prefill and decode step that is given none of its own.
    """

    label: str
    model: Model
    backend: Backend
    cache: Cache
    progress: Progress = SILENT
    link: Link = ALONE
    end_ids: tuple[int, ...] = ()  # tokens that end a reply
    finish_reason: str | None = None  # "stop" (an end token or a stop text) or "length", once `generate` has ended
    stop_reason: int | str | None = None  # which end token or stop text it was
    prefill_timing: Timing = field(default_factory=Timing)
    decode_timing: Timing = field(default_factory=Timing)
    observer: Observer | None = None

    @classmethod
    def open(
        cls,
        path: str | Path,
        *,
        device: str = "auto",
        dtype: str = "bfloat16",
        layers: int | None = None,
        backend: str = "auto",
        memory_bytes: int | None = None,
        bound: Bound | None = None,
        progress: Progress = SILENT,
        link: Link = ALONE,
    ) -> Session:
        """Load a checkpoint folder. device: auto, cpu, cuda, cuda:N. layers: only the first N.

        memory_bytes: a limit of weights and states; the experts beyond it stream from disk (see `load_model`). bound: the
        same of the whole process. link: the processes that run
        a folder of ranks, each loading its own; with auto or cuda, on the GPU of its local rank.

        Raises UsageError, UnsupportedError (no such device or backend here), CheckpointMissing, CheckpointCorrupt,
        CapacityError (before anything is read).
        """
        if dtype not in DTYPES:
            raise UsageError(f"unknown dtype {dtype!r}", hint=f"dtypes: {', '.join(DTYPES)}")
        model, chosen = open_model(
            path,
            device=device,
            dtype=DTYPES[dtype],
            layers=layers,
            backend=backend,
            memory_bytes=memory_bytes,
            bound=bound,
            progress=progress,
            link=link,
        )
        ends = link.together(lambda: end_tokens(LocalSource(Path(path)), model.config))
        if ends.unknown and link.is_first:
            names = ", ".join(map(str, ends.unknown[:8]))
            progress.warn(f"end tokens outside the vocabulary of {model.config.vocab_size} are ignored: {names}")
        return cls(str(path), model, chosen, model.new_cache(), progress, link, ends.ids)

    @property
    def config(self) -> K3Config:
        return self.model.config

    @property
    def device(self) -> str:
        return str(self.model.device)

    @property
    def dtype(self) -> str:
        return next(name for name, dtype in DTYPES.items() if dtype == self.model.dtype)

    @property
    def num_layers(self) -> int:
        """Layers that run, on all ranks."""
        return self.model.share.num_layers

    def reset(self) -> None:
        """Forget the sequence; the weights stay."""
        self.cache = self.model.new_cache()
        self.finish_reason = self.stop_reason = None
        self.prefill_timing = self.decode_timing = Timing()

    def prefill(self, ids: Sequence[int], *, all_logits: bool = False, observe: Observer | None = None) -> Tensor:
        """Feed a prompt, or more of it: float32 logits [vocab] of the last token, or [T, vocab]. See `prefill`."""
        started = time.perf_counter()
        with self.backend.use():
            logits = prefill(
                self.model, ids, self.cache, all_logits=all_logits, observe=observe or self.observer,
                progress=self.progress,
            )  # fmt: skip
        self._synchronize()
        self.prefill_timing = self.prefill_timing.plus(len(ids), time.perf_counter() - started)
        return logits

    def decode(self, token: int, observe: Observer | None = None) -> Tensor:
        """Feed one token: float32 logits [vocab]. Raises UsageError for an id outside the vocabulary."""
        check_ids(self.config, [token])
        started = time.perf_counter()
        with self.backend.use():
            logits = decode_one_token(self.model, token, self.cache, observe or self.observer)
        self._synchronize()
        self.decode_timing = self.decode_timing.plus(1, time.perf_counter() - started)
        return logits

    def generate(
        self,
        ids: Sequence[int],
        max_new_tokens: int,
        *,
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int | None = None,
        seed: int | None = None,
        stop_at_end: bool = True,
        stop: Callable[[int], str | None] | None = None,
        on_logits: Callable[[Tensor], None] | None = None,
    ) -> Iterator[int]:
        """Feed the prompt `ids`, then yield token after token: at most `max_new_tokens`, an end token included.

        Greedy at temperature 0. The last token is not fed back. stop_at_end: whether `end_ids` end it. `stop` sees each
        token on rank 0 that is no end token, and gives the text for which this one shall be the last, or None.
        `on_logits` sees what was computed: first [T, vocab] of the prompt, then [vocab] after each token that was fed.
        Sets `finish_reason` and `stop_reason` at the end.
        Raises UsageError for bad options and for a prompt beyond the positions that the model was made for.
        """
        check_sampling(max_new_tokens, temperature, top_p, top_k=top_k, seed=seed)
        room = self.config.max_positions - self.cache.position - len(ids)
        if room < 0:
            raise UsageError(
                f"{len(ids)} tokens do not fit in the model's {self.config.max_positions} positions",
                hint="shorten the prompt",
            )
        check_ids(self.config, ids)
        generator = torch.Generator()
        if seed is not None:
            generator.manual_seed(seed)
        else:
            generator.seed()
        draw = partial(sample, temperature=temperature, top_p=top_p, top_k=top_k, generator=generator)

        def choose(logits: Tensor) -> tuple[int, int | str | None]:
            token = draw(logits)
            if stop_at_end and token in self.end_ids:
                return token, token
            return token, stop(token) if stop is not None else None

        return self._generate(ids, min(max_new_tokens, room + 1), choose, on_logits)

    def _generate(
        self,
        ids: Sequence[int],
        count: int,
        choose: Callable[[Tensor], tuple[int, int | str | None]],
        on_logits: Callable[[Tensor], None] | None,
    ) -> Iterator[int]:
        """choose: on rank 0, the next token and for what reason it is the last."""
        self.finish_reason = self.stop_reason = None
        self.cache.reserve(self.cache.position + len(ids) + min(count, PREFILL_TOKENS))
        logits = self.prefill(ids, all_logits=on_logits is not None)
        if on_logits is not None:
            on_logits(logits)
            logits = logits[-1]
        for index in range(count):
            token, self.stop_reason = self.link.from_first(partial(choose, logits))
            if self.stop_reason is not None:
                self.finish_reason = "stop"
            elif index == count - 1:
                self.finish_reason = "length"
            yield token
            if self.finish_reason is not None:
                return
            logits = self.decode(token)
            if on_logits is not None:
                on_logits(logits)
        self.finish_reason = "length"

    def check(self, ids: Sequence[int]) -> list[KernelCheck]:
        """Compare every kernel that runs with its reference, on a prompt of its own; see `check_kernels`."""
        check_ids(self.config, ids)
        with self.backend.use():
            own = [check.as_json() for check in check_kernels(self.model, ids)]
        return worst_of([KernelCheck(**check) for check in report] for report in self.link.gather(own))

    def memory(self) -> MemoryReport:
        peak_device = torch.cuda.max_memory_allocated(self.model.device) if self.model.device.type == "cuda" else 0
        streamed = self.model.streamed_experts
        return MemoryReport(
            peak_bytes(),
            peak_device,
            self.cache.kda_state_bytes,
            self.cache.mla_cache_bytes,
            streamed[0].slots if streamed else None,
            sum(experts.read_bytes for experts in streamed),
        )

    def _synchronize(self) -> None:
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)


@dataclass(frozen=True)
class RunResult:
    """What `k3tool run` reports. logits [prompt, vocab] and decode_logits [new - 1, vocab]: only where kept.

    layout: TP, EP and PP. memory: of this rank; ranks: device and memory of each.
    """

    input_ids: list[int]
    token_ids: list[int]
    finish_reason: str
    stop_reason: int | str | None
    backend: str
    backend_reason: str
    device: str
    dtype: str
    layers: int
    prefill: Timing
    decode: Timing
    memory: MemoryReport
    layout: dict[str, int]
    ranks: list[dict[str, Any]]
    logits: Tensor | None = None
    decode_logits: Tensor | None = None

    def as_json(self) -> dict[str, Any]:
        """Everything but the logits."""
        plain = (
            "input_ids",
            "token_ids",
            "finish_reason",
            "stop_reason",
            "backend",
            "backend_reason",
            "device",
            "dtype",
            "layers",
            "layout",
        )
        return {
            **{name: getattr(self, name) for name in plain},
            "prefill": self.prefill.as_json(),
            "decode": self.decode.as_json(),
            "memory": asdict(self.memory),
            "ranks": self.ranks,
        }


def run_session(
    session: Session,
    ids: Sequence[int],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int | None = None,
    seed: int | None = None,
    stop_at_end: bool = True,
    stop: Callable[[int], str | None] | None = None,
    keep_logits: bool = False,
    on_token: Callable[[int], None] | None = None,
) -> RunResult:
    """Generate from a prompt and gather everything that a run reports. `on_token` is called as each token appears.

    Logits are kept on rank 0."""
    kept: list[Tensor] = []
    tokens: list[int] = []
    steps = session.generate(
        ids,
        max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        stop_at_end=stop_at_end,
        stop=stop,
        on_logits=(lambda logits: kept.append(logits.cpu()) if session.link.is_first else None)
        if keep_logits
        else None,
    )
    for token in steps:
        tokens.append(token)
        if on_token is not None:
            on_token(token)
    memory = session.memory()
    return RunResult(
        input_ids=list(ids),
        token_ids=tokens,
        finish_reason=session.finish_reason or "length",
        stop_reason=session.stop_reason,
        backend=session.backend.name,
        backend_reason=session.backend.reason,
        device=session.device,
        dtype=session.dtype,
        layers=session.num_layers,
        prefill=session.prefill_timing,
        decode=session.decode_timing,
        memory=memory,
        layout=session.model.share.layout.as_json(),
        ranks=session.link.gather({"device": session.device, **asdict(memory)}),
        logits=kept[0] if kept else None,
        decode_logits=(torch.stack(kept[1:]) if kept[1:] else kept[0].new_empty(0, kept[0].shape[1])) if kept else None,
    )


def write_logits(path: Path, result: RunResult) -> None:
    """`logits` and `decode_logits` of a run that kept them, float32, as one safetensors file (written atomically)."""
    assert result.logits is not None and result.decode_logits is not None
    tensors = {"logits": result.logits, "decode_logits": result.decode_logits}
    with ShardWriter(path, [(name, "F32", tuple(value.shape)) for name, value in tensors.items()]) as writer:
        for value in tensors.values():
            writer.append(memoryview(value.contiguous().view(-1).numpy()).cast("B") if value.numel() else b"")
