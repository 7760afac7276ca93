"""Second moments of what every matrix of a model is multiplied with, gathered while it runs.

The kernels run as always and the tokens are those of an ordinary run. Beside them, the inputs of each product are
squared and summed; those of an expert's down projection, which live inside a fused kernel, are computed a second time.
Decode steps that are played back from a tape or a graph would pass unseen, so none is while a recorder watches, and
what was seen is counted against the tokens that were fed.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from k3tool.activations import Recorded, gram_bytes, write_activations
from k3tool.disk import STARTS_OVER, disk_errors
from k3tool.errors import CapacityError, UnsupportedError
from k3tool.kernels.linear import Weight, linear
from k3tool.kernels.moe import experts_forward, gated_activation
from k3tool.kernels.norm import rms_norm
from k3tool.model.attention import KdaAttention
from k3tool.model.check import redirected
from k3tool.model.moe import GatedMlp, SparseMoe
from k3tool.units import format_bytes

if TYPE_CHECKING:
    from k3tool.generate import Session

ROWS_AT_ONCE = 256  # tokens squared, or added to a Gram matrix, at once
COPY_ROWS = 256  # of a Gram matrix, while it is written
HELD_ROWS, HELD_EVERY = 256, 8  # inputs that are kept themselves: every eighth at first, at most so many


class Moments:
    """Sums of squares [width] float64 of one input, and of its outer products where there is a `gram`.

    modules: entries of the file that have this input; the Gram matrix goes with the first. gram: [width, width] float32
    zeros in host memory. held: [rows, width] float32 of room for some of the inputs themselves, evenly spread over all.
    visits: rows for each token that is fed.
    """

    def __init__(
        self,
        modules: tuple[str, ...],
        width: int,
        device: torch.device,
        gram: Tensor | None = None,
        held: Tensor | None = None,
        visits: int = 1,
    ) -> None:
        self.modules = modules
        self.width = width
        self.visits = visits
        self.rows = 0
        self.gram = gram
        self.held = held
        self.squares = torch.zeros(width, dtype=torch.float64, device=device)
        self._waiting = None if gram is None else torch.zeros(ROWS_AT_ONCE, width, device=device)
        self._filled = 0
        self._kept, self._every = 0, HELD_EVERY

    def add(self, x: Tensor) -> None:
        """x [..., width]."""
        for rows in x.reshape(-1, self.width).split(ROWS_AT_ONCE):
            if self.held is not None:
                self._keep_some(rows, self.held)
            self.rows += len(rows)
            self.squares += rows.double().square_().sum(0)
            while self._waiting is not None and len(rows):
                taken = rows[: ROWS_AT_ONCE - self._filled]
                self._waiting[self._filled : self._filled + len(taken)] = taken
                self._filled += len(taken)
                rows = rows[len(taken) :]
                if self._filled == ROWS_AT_ONCE:
                    self._flush()

    def _keep_some(self, rows: Tensor, held: Tensor) -> None:
        """Keep the last of every so many inputs; where there is no room left, drop every other of them."""
        for offset in range(-(self.rows + 1) % HELD_EVERY, len(rows), HELD_EVERY):
            if not (self.rows + offset + 1) % self._every and self._kept == len(held):
                self._kept, self._every = self._kept // 2, 2 * self._every
                held[: self._kept] = held[1::2].clone()
            if not (self.rows + offset + 1) % self._every:
                held[self._kept] = rows[offset]
                self._kept += 1

    def _flush(self) -> None:
        """Outer products of single tokens would move the whole matrix for each: they wait until there are many."""
        if self.gram is None or self._waiting is None or not self._filled:
            return
        rows = self._waiting[: self._filled]
        if rows.is_cuda:
            self.gram += (rows.t() @ rows).cpu()
        else:
            self.gram.addmm_(rows.t(), rows)
        self._filled = 0

    def recorded(self) -> Iterator[Recorded]:
        """Means, one for each module."""
        squares = (self.squares / self.rows).float().cpu().numpy().tobytes()
        for number, module in enumerate(self.modules):
            if number or self.gram is None:
                yield Recorded(module, self.width, squares)
                continue
            held = b"" if self.held is None else self.held[: self._kept].numpy().tobytes()
            yield Recorded(module, self.width, squares, self._means, held)

    def _means(self) -> Iterable[bytes]:
        self._flush()
        assert self.gram is not None
        for rows in self.gram.split(COPY_ROWS):
            yield (rows / self.rows).numpy().tobytes()


class Recorder:
    """What a session's model multiplies with, while `watching` is open.

    gram_folder: where to keep Gram matrices of the latent projections' inputs meanwhile (None: record none). They are
    paged out to a file there, so that memory stays bounded.
    """

    def __init__(self, session: Session, gram_folder: Path | None = None) -> None:
        """Raises UnsupportedError on a rank of several, CapacityError where the Gram matrices do not fit on the disk."""
        model = session.model
        if session.link.world.size > 1:
            raise UnsupportedError(
                "activations are recorded by one process, which sees whole matrices",
                hint="run without torchrun; with --memory SIZE, experts stream from disk",
            )
        self.model = model
        self.first_position = session.cache.position
        self.session = session
        self.layer = 0
        self._by_weight: dict[int, Moments] = {}
        self._latents: dict[int, Moments] = {}
        self._hidden: dict[int, Moments] = {}
        self._grams = (
            None
            if gram_folder is None
            else _Scratch(gram_folder, gram_bytes(model.config, len(model.layers), HELD_ROWS))
        )
        for index, layer in zip(model.share.layers, model.layers, strict=True):
            self._attention(f"{model.config.name_prefix}model.layers.{index}.self_attn.", layer.self_attn)
            self._mlp(f"{model.config.name_prefix}model.layers.{index}.", index, layer.mlp)

    def _watch(self, weight: Weight, *modules: str, gram: bool = False) -> Moments:
        """The inputs of products with a weight (or of what a norm's weight gives, [width])."""
        made = self._moments(modules, weight.shape[-1], gram=gram)
        self._by_weight[id(weight)] = made
        return made

    def _moments(self, modules: tuple[str, ...], width: int, *, gram: bool = False, visits: int = 1) -> Moments:
        if not gram or self._grams is None:
            return Moments(modules, width, self.model.device, visits=visits)
        whole, some = self._grams.take(width, width), self._grams.take(HELD_ROWS, width)
        return Moments(modules, width, self.model.device, whole, some, visits)

    def _attention(self, prefix: str, attention: Any) -> None:
        if isinstance(attention, KdaAttention):
            low_rank = attention.g_b_proj is not None
            names = ("q_proj", "k_proj", "v_proj", "g_a_proj" if low_rank else "g_proj", "f_a_proj", "b_proj")
            self._watch(attention.in_proj, *(prefix + name for name in names))
            self._watch(attention.f_b_proj, prefix + "f_b_proj")
            if attention.g_b_proj is not None:
                self._watch(attention.g_b_proj, prefix + "g_b_proj")
        else:
            names = ["q_proj" if attention.q_b_proj is None else "q_a_proj", "kv_a_proj_with_mqa"]
            names += ["g_proj"] if attention.has_gate else []
            self._watch(attention.in_proj, *(prefix + name for name in names))
            if attention.q_b_proj is not None:
                self._watch(attention.q_b_proj, prefix + "q_b_proj")
            self._watch(attention.kv_a_layernorm, prefix + "kv_b_proj")
        self._watch(attention.o_proj, prefix + "o_proj")

    def _mlp(self, prefix: str, index: int, mlp: GatedMlp | SparseMoe) -> None:
        if isinstance(mlp, GatedMlp):
            self._watch(mlp.gate_up_proj, prefix + "mlp.gate_proj", prefix + "mlp.up_proj")
            self._watch(mlp.down_proj, prefix + "mlp.down_proj")
            return
        prefix += "block_sparse_moe."
        config = mlp.config
        self._watch(mlp.gate, prefix + "gate")
        if mlp.in_proj is not None:
            names = ["routed_expert_down_proj"] if config.latent_size else []
            names += [] if mlp.shared_down_proj is None else ["shared_experts.gate_proj", "shared_experts.up_proj"]
            self._watch(mlp.in_proj, *(prefix + name for name in names), gram=bool(config.latent_size))
        if mlp.routed_expert_up_proj is not None:
            self._watch(mlp.routed_expert_up_proj, prefix + "routed_expert_up_proj", gram=True)
        if mlp.shared_down_proj is not None:
            self._watch(mlp.shared_down_proj, prefix + "shared_experts.down_proj")
        into = (prefix + "experts.w1", prefix + "experts.w3")
        visits = config.experts_per_token
        self._latents[index] = self._moments(into, config.expert_size, visits=visits)
        self._hidden[index] = self._moments((prefix + "experts.w2",), config.moe_intermediate_size, visits=visits)

    # While the model runs

    def observe(self, what: str, layer: int, value: Tensor) -> None:
        if what == "router_ids":
            self.layer = layer

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A kernel of the model that also shows its inputs."""
        if function is linear:

            def watched_linear(x: Tensor, weight: Weight) -> Tensor:
                if id(weight) in self._by_weight:
                    self._by_weight[id(weight)].add(x)
                return linear(x, weight)

            return watched_linear
        if function is rms_norm:

            def watched_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
                out = rms_norm(x, weight, eps)
                if id(weight) in self._by_weight:
                    self._by_weight[id(weight)].add(out)
                return out

            return watched_norm
        return self._experts if function is experts_forward else function

    def _experts(self, x: Tensor, experts: Any, ids: Tensor, weights: Tensor, *options: Any) -> Tensor:
        """As `experts_forward`; a slot of experts that stream from disk is an expert like any other."""
        latents, hidden = self._latents[self.layer], self._hidden[self.layer]
        for expert in ids.unique().tolist():
            rows = x[(ids == expert).nonzero(as_tuple=True)[0]]
            latents.add(rows)
            gate, up = (linear(rows, experts.matrix(name, expert)) for name in ("w1", "w3"))
            hidden.add(gated_activation(gate, up, *options))
        return experts_forward(x, experts, ids, weights, *options)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """The session's model shows its inputs inside. Not for several threads at once: its calls are redirected."""
        self.session.observer = self.observe
        try:
            with redirected(self.wrap):
                yield
        finally:
            self.session.observer = None

    # Afterwards

    @property
    def tokens(self) -> int:
        return self.session.cache.position - self.first_position

    def write(self, path: Path) -> None:
        """Everything seen so far, as one file, whole or not at all. Raises CapacityError."""
        found = dict.fromkeys((*self._by_weight.values(), *self._latents.values(), *self._hidden.values()))
        for moments in found:
            if moments.rows != moments.visits * self.tokens:
                raise RuntimeError(f"{moments.modules[0]}: {moments.rows} rows seen, {self.tokens} tokens fed")
        write_activations(
            path, (entry for moments in found for entry in moments.recorded()), self.model.config, self.tokens
        )


class _Scratch:
    """Zeros in a file without a name, mapped into memory; room on the disk is taken before."""

    def __init__(self, folder: Path, size: int) -> None:
        """Raises CapacityError."""
        self._used = 0
        self._map = None
        if not size:
            return
        with disk_errors(folder, "write", again=STARTS_OVER), tempfile.TemporaryFile(dir=folder) as file:
            free = shutil.disk_usage(folder).free
            if 2 * size > free:
                raise CapacityError(
                    f"Gram matrices need {format_bytes(2 * size)} in {folder} while they are summed and written, "
                    f"{format_bytes(free)} are free",
                    hint="write to another disk, run fewer layers (--layers N), or leave --gram out",
                    needed_bytes=2 * size,
                    available_bytes=free,
                )
            os.posix_fallocate(file.fileno(), 0, size)
            self._map = np.memmap(file, np.float32, "r+", shape=(size // 4,))

    def take(self, rows: int, width: int) -> Tensor:
        """[rows, width] float32."""
        assert self._map is not None
        first, self._used = self._used, self._used + rows * width
        return torch.from_numpy(self._map[first : self._used].reshape(rows, width))
