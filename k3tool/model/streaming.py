"""Routed experts that do not fit in memory: a few of a layer's experts are resident, the others are read when needed.

A layer owns a fixed number of slots, stacked like resident experts, so that the kernels run on them unchanged. A token's
experts are brought into slots by one positional read each (the parts of an expert lie side by side in a released
shard); the slot used longest ago gives way. A prompt that visits more experts than there are slots passes in groups.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from k3tool.catalog import expert_matrix_shapes
from k3tool.checkpoint.source import Source
from k3tool.config import K3Config
from k3tool.kernels.moe import Experts
from k3tool.model.experts import ExpertStorage, Field, expert_storage
from k3tool.model.weights import Matrix, Weights, formats, scatter

Forward = Callable[..., Tensor]
"""`k3tool.kernels.moe.experts_forward`."""


class _Part(NamedTuple):
    """One stored tensor of every expert: where it is read from, and what it is."""

    matrix: str
    part: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    shards: list[str]  # per expert
    offsets: array[int]  # per expert, 64 bits


class StreamedExperts:
    """The experts `owned` of one layer, `slots` of them in memory. `read_bytes` counts what was read so far.

    Ids count from the first that is owned."""

    def __init__(
        self,
        source: Source,
        prefix: str,
        owned: range,
        storage: ExpertStorage,
        parts: list[_Part],
        device: torch.device,
    ) -> None:
        self.num_experts = len(owned)
        self.read_bytes = 0
        self._source = source
        self._prefix = prefix
        self._owned = owned
        self._storage = storage
        self._parts = parts
        self._fields = storage.fields
        self._device = device
        self._held: dict[str, Tensor] = {}
        self._experts: Experts | None = None
        self._slot_of: OrderedDict[int, int] = OrderedDict()  # least recently used first
        self._free: list[int] = []

    def allocate(self, weights: Weights, slots: int) -> None:
        """Declare the slots, so that they are counted where memory is measured."""
        for field in self._fields:
            self._held[field.name], _ = weights.allocate((slots, *field.piece.shape), field.piece.dtype)
        self._free = list(reversed(range(slots)))

    @property
    def slots(self) -> int:
        return next(iter(self._held.values())).shape[0]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._held.values())

    def forward(self, run: Forward, x: Tensor, ids: Tensor, weights: Tensor, *options: object) -> Tensor:
        """As `run(x, experts, ids, weights, *options)` on all experts, up to the order of the sum over a token's.

        x: [T, D]; ids, weights: [T, K]. Returns [T, D] float32. Raises CheckpointMissing, CheckpointCorrupt where the
        files change under the run.
        """
        visited = ids.unique().tolist()
        if len(visited) <= self.slots:
            return run(x, self._bring(visited), self._slots_for(ids), weights, *options)
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        resident = [expert for expert in visited if expert in self._slot_of]
        order = resident + [expert for expert in visited if expert not in self._slot_of]
        for start in range(0, len(order), self.slots):
            group = order[start : start + self.slots]
            tokens, places = torch.nonzero(torch.isin(ids, torch.tensor(group, device=ids.device)), as_tuple=True)
            experts = self._bring(group)
            chosen = self._slots_for(ids[tokens, places]).unsqueeze(1)
            out.index_add_(0, tokens, run(x[tokens], experts, chosen, weights[tokens, places].unsqueeze(1), *options))
        return out

    def _bring(self, wanted: Sequence[int]) -> Experts:
        """All of `wanted` (no more than slots) into slots. Returns the slots as experts."""
        for expert in wanted:
            if expert in self._slot_of:
                self._slot_of.move_to_end(expert)
        absent = [expert for expert in wanted if expert not in self._slot_of]
        for expert in absent:
            # A slot is free while it is read into: a failed read leaves no wrong weights behind.
            if not self._free:
                self._free.append(self._slot_of.popitem(last=False)[1])
            self._read(expert, self._free[-1])
            self._slot_of[expert] = self._free.pop()
        if self._experts is None or (absent and any(name.endswith("_global") for name in self._held)):
            # Kernels may keep what they derive from the scales of whole matrices: new scales, new tensors.
            fresh = {n: t.clone() if n.endswith("_global") else t for n, t in self._held.items()}
            self._experts = self._storage.assemble(fresh)
        return self._experts

    def _slots_for(self, ids: Tensor) -> Tensor:
        table = torch.zeros(self.num_experts, dtype=torch.int64)
        for expert, slot in self._slot_of.items():
            table[expert] = slot
        return table.to(ids.device)[ids]

    def _read(self, expert: int, slot: int) -> None:
        """One expert from its file into a slot, checked like resident ones."""
        host = {
            field.name: self._held[field.name][slot : slot + 1]
            if self._device.type == "cpu"
            else torch.empty((1, *field.piece.shape), dtype=field.piece.dtype)
            for field in self._fields
        }
        stored = {(part.matrix, part.part): self._buffer(part, host) for part in self._parts}
        reads: dict[str, list[tuple[int, memoryview]]] = {}
        for part in self._parts:
            view = stored[part.matrix, part.part]
            reads.setdefault(part.shards[expert], []).append((part.offsets[expert], view))
            self.read_bytes += part.nbytes
        for shard, pieces in reads.items():
            scatter(self._source, shard, sorted(pieces, key=lambda piece: piece[0]), None)
        for field in self._fields:
            if field.piece.make is not None:
                self._make(field, stored, host[field.name])
        self._storage.settle(host, [f"{self._prefix}.{self._owned[expert]}"])
        if self._device.type != "cpu":
            for name, tensor in host.items():
                self._held[name][slot : slot + 1].copy_(tensor)

    def _buffer(self, part: _Part, host: dict[str, Tensor]) -> memoryview:
        """Where the bytes of a part go: straight into its field, or aside where something is made of them."""
        for field in self._fields:
            if field.piece.make is None and (field.matrix, *field.piece.parts) == (part.matrix, part.part):
                return memoryview(host[field.name].reshape(-1).view(torch.uint8).numpy())
        return memoryview(bytearray(part.nbytes))

    def _make(self, field: Field, stored: dict[tuple[str, str], memoryview], target: Tensor) -> None:
        arrays = {
            part.part: formats().view(stored[part.matrix, part.part], part.dtype, part.shape)
            for part in self._parts
            if part.matrix == field.matrix
        }
        assert field.piece.make is not None
        target[0].copy_(torch.from_numpy(field.piece.make(arrays)))


def stream_experts(weights: Weights, config: K3Config, prefix: str, owned: range, slots: int) -> StreamedExperts:
    """The experts `{prefix}.E.w1|w2|w3` of one layer, E in `owned`, with `slots` resident; nothing of them is read yet.

    Raises CheckpointCorrupt where the experts of a layer are not all stored in one scheme.
    """
    storage = expert_storage(weights, config, prefix, owned)
    parts: list[_Part] = []
    for matrix, shape in expert_matrix_shapes(config).items():
        found = [weights.parts(Matrix(f"{prefix}.{expert}.{matrix}", shape)) for expert in owned]
        for part, place in found[0].items():
            offsets = array("q", (places[part].offset for places in found))
            shards = [places[part].shard for places in found]
            spec = place.spec
            parts.append(_Part(matrix, part, spec.dtype, spec.shape, spec.nbytes, shards, offsets))
    streamed = StreamedExperts(weights.source, prefix, owned, storage, parts, weights.device)
    streamed.allocate(weights, slots)
    return streamed
