"""How ranks talk while the model runs: sums over TP and EP, gathered logits, and hand-over from stage to stage.

Layers call these objects without asking how many ranks there are; the groups of a rank alone return what they are
given. Collectives are those of torch.distributed: NCCL between GPUs, gloo between CPUs (and for GPUs that ranks share,
by way of host memory). Sums are of float32 partial sums; what is rounded is their total.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from k3tool.layout import Layout, Place
from k3tool.parallel.failure import RankLost


class Group:
    """Ranks that work on the same thing. This class is a group of one, which has nobody to talk to."""

    size = 1
    rank = 0

    def sum(self, x: Tensor) -> Tensor:
        """The sum over all ranks of x, in place where that is possible. x: float32, of one shape on all ranks."""
        return x

    def gather(self, x: Tensor) -> Tensor:
        """The x of all ranks side by side along the last dimension, in the order of ranks."""
        return x

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        """The x of the rank `source`, in place of this rank's own."""
        return x

    def send(self, x: Tensor, to: int) -> None:
        raise AssertionError("a rank alone has nobody to send to")

    def receive(self, x: Tensor, source: int) -> Tensor:
        raise AssertionError("a rank alone has nobody to receive from")

    def leave(self) -> None:
        """Give up the connections: whoever waits for this rank learns that it is gone."""


ALONE = Group()
_WHOLE = Layout()
_FIRST = _WHOLE.place(0)


class RankGroup(Group):
    """Several ranks. Every call is made by all of them in the same order (send and receive: by both ends).

    Raises RankLost where a rank ends or does not answer in time.
    """

    def __init__(self, ranks: Sequence[int], rank: int, group: Any, *, through_host: bool) -> None:
        """ranks: of this group, numbered among all. rank: this process's place in it. group: None for all ranks.
        through_host: whether tensors on a GPU are copied to host memory to be sent."""
        self.size = len(ranks)
        self.rank = rank
        self._ranks = ranks
        self._group = group
        self._through_host = through_host

    def sum(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        held = self._outgoing(x)
        call(dist.all_reduce, held, group=self._group)
        return self._incoming(held, x)

    def gather(self, x: Tensor) -> Tensor:
        held = self._outgoing(x.contiguous())
        parts = [torch.empty_like(held) for _ in range(self.size)]
        call(dist.all_gather, parts, held, group=self._group)
        return torch.cat(parts, dim=-1).to(x.device)

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        x = x.contiguous()
        held = self._outgoing(x)
        call(dist.broadcast, _bytes(held), src=self._ranks[source], group=self._group)
        return self._incoming(held, x)

    def send(self, x: Tensor, to: int) -> None:
        call(dist.send, _bytes(self._outgoing(x.contiguous())), dst=self._ranks[to], group=self._group)

    def receive(self, x: Tensor, source: int) -> Tensor:
        assert x.is_contiguous()
        held = self._outgoing(x)
        call(dist.recv, _bytes(held), src=self._ranks[source], group=self._group)
        return self._incoming(held, x)

    def leave(self) -> None:
        self._group = None

    def _outgoing(self, x: Tensor) -> Tensor:
        return x.cpu() if self._through_host else x

    def _incoming(self, held: Tensor, x: Tensor) -> Tensor:
        return held if held.device == x.device else x.copy_(held)


def _bytes(x: Tensor) -> Tensor:
    """The same memory as bytes: they travel alike whatever the dtype."""
    return x.view(-1).view(torch.uint8)


def call(collective: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Run a collective. Raises RankLost for what torch.distributed raises where a rank is gone or late."""
    try:
        return collective(*arguments, **options)
    except RuntimeError as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise RankLost(
            f"lost contact with another rank: {first[:300]}",
            hint="look at what the other ranks' machines say; a rank that was killed may have run out of memory",
        ) from error


@dataclass(frozen=True)
class Parallel:
    """The groups of one rank: `tp` its TP neighbours, `experts` all that hold experts of its layers (TP x EP), `stages`
    those with its TP and EP rank in every PP stage."""

    layout: Layout = _WHOLE
    place: Place = _FIRST
    tp: Group = ALONE
    experts: Group = ALONE
    stages: Group = ALONE

    def add_experts(self, routed: Tensor, shared: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Partial sums [T, *] of routed experts, over TP and EP, and of shared ones, over TP: EP ranks hold those whole.

        Without EP both travel as one message."""
        if shared is None or self.tp.size == 1:
            return self.experts.sum(routed), shared
        if self.layout.ep == 1:
            both = self.tp.sum(torch.cat([routed, shared], dim=-1))
            return both[:, : routed.shape[1]], both[:, routed.shape[1] :]
        return self.experts.sum(routed), self.tp.sum(shared)

    def send_on(self, x: Tensor) -> None:
        """To the next stage."""
        self.stages.send(x, self.place.pp_rank + 1)

    def receive_from_before(self, x: Tensor) -> Tensor:
        """What the stage before sent, into x."""
        return self.stages.receive(x, self.place.pp_rank - 1)

    def from_last(self, x: Tensor) -> Tensor:
        """The x of the last stage, on every rank."""
        return self.stages.broadcast(x, self.layout.pp - 1)

    def leave(self) -> None:
        for group in (self.tp, self.experts, self.stages):
            group.leave()


SINGLE = Parallel()


def make_parallel(layout: Layout, place: Place, device: torch.device, *, own_devices: bool, timeout: Any) -> Parallel:
    """The groups of this rank. Collective: every rank calls it with the same layout, after the ranks have met.

    own_devices: whether every rank has a GPU of its own, so that they can talk through NCCL."""
    if layout.ranks == 1:
        return Parallel(layout, place)
    backend = "nccl" if device.type == "cuda" and own_devices else "gloo"
    through_host = device.type == "cuda" and backend == "gloo"
    made: dict[tuple[int, ...], Group] = {}

    def group(members: Callable[[Place], bool]) -> Group:
        ranks = tuple(other.rank for other in layout.places() if members(other))
        if len(ranks) == 1:
            return ALONE
        if ranks not in made:
            handle = call(dist.new_group, list(ranks), timeout=timeout, backend=backend, use_local_synchronization=True)
            made[ranks] = RankGroup(ranks, ranks.index(place.rank), handle, through_host=through_host)
        return made[ranks]

    stage = group(lambda other: other.pp_rank == place.pp_rank)
    return Parallel(
        layout=layout,
        place=place,
        tp=group(lambda other: (other.pp_rank, other.ep_rank) == (place.pp_rank, place.ep_rank)),
        experts=stage,
        stages=group(lambda other: (other.tp_rank, other.ep_rank) == (place.tp_rank, place.ep_rank)),
    )
