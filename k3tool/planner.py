"""Which layout for how many GPUs, whether it fits, and what else would: the answer of `k3tool plan`.

Pure arithmetic on `k3tool.layout` (what is possible) and `k3tool.sizing` (what it takes). Nothing is read or written.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from typing import Any

from k3tool import layout as layouts
from k3tool.cards import CARDS, Card, fits_on, smallest_card
from k3tool.errors import K3Error, UsageError
from k3tool.layout import Layout, padded_vocab
from k3tool.layout_search import Finder, Option, divisibility, max_sequences
from k3tool.sizing import KEEP, Inventory, RankMemory, Workload, rank_memory, stage_memory

DEFAULT_CONTEXT = 131_072
SCHEMES = ("bf16", "mxfp4", "nvfp4", "fp8-block", "fp8-channel", "int8", "int4", "nf4", "fp4")


@dataclass(frozen=True)
class SchemeEffect:
    """What another storage of one component would make of the largest rank, or why it cannot be (`problem`)."""

    component: str  # experts or latent
    scheme: str
    weights_bytes: int = 0
    total_bytes: int = 0
    fits: bool = False
    problem: str = ""

    def as_json(self) -> dict[str, Any]:
        if self.problem:
            return {"scheme": self.scheme, "problem": self.problem}
        return {
            "scheme": self.scheme,
            "weights_bytes": self.weights_bytes,
            "total_bytes": self.total_bytes,
            "fits": self.fits,
        }


@dataclass(frozen=True)
class Deployment:
    """The plan for one number of GPUs. `card_chosen`: the memory was not given, `card` is the smallest that holds it.

    fewest: the layout of the fewest GPUs that hold it. fewest_in_nodes: of the fewest that fill nodes of `node_gpus` or
    divide one evenly. None where no number up to the bound of the search does.
    """

    source: str
    inventory: Inventory
    layout: Layout
    reason: str
    workload: Workload
    card: Card
    card_chosen: bool
    ranks: list[RankMemory]
    alternatives: list[Option]
    stored: Inventory  # before other schemes were applied
    experts: str = KEEP
    latent: str = KEEP
    gpu_price: float | None = None
    replicated: dict[str, int] = field(default_factory=dict)
    node_gpus: int = layouts.NODE_GPUS
    redundant: int = 0
    fewest: Option | None = None
    fewest_in_nodes: Option | None = None

    @property
    def largest(self) -> RankMemory:
        return max(self.ranks, key=lambda rank: rank.total)

    @property
    def equal_ranks(self) -> list[tuple[RankMemory, RankMemory]]:
        """First and last of each row of neighbouring ranks that hold equally much."""
        rows = [list(held) for _, held in groupby(self.ranks, key=lambda rank: (rank.sizes, rank.weights))]
        return [(held[0], held[-1]) for held in rows]

    @property
    def free_bytes(self) -> int:
        """Left on the largest rank after the margin; negative where it does not fit."""
        return self.card.memory_bytes - self.card.margin_bytes - self.largest.total

    @property
    def fits(self) -> bool:
        return self.free_bytes >= 0

    @property
    def even_share_bytes(self) -> int:
        """Weights of a rank if nothing had to be held whole by several."""
        return self.inventory.total_bytes // self.layout.ranks

    @property
    def price_per_hour(self) -> float | None:
        return None if self.gpu_price is None else self.gpu_price * self.layout.ranks

    @property
    def max_sequences(self) -> int:
        """Sequences of the planned context that the whole deployment can hold at once."""
        return max_sequences(self.inventory, self.layout, self.workload.context, self.card, self.redundant)

    @cached_property
    def conversions(self) -> list[tuple[str, str]]:
        """(component, scheme) of what would be stored otherwise than the source stores it."""
        planned = (("experts", "routed_experts", self.experts), ("latent", "latent", self.latent))
        return [
            (component, scheme)
            for component, name, scheme in planned
            if scheme != KEEP and self.inventory.storage(name) != self.stored.storage(name)
        ]

    @cached_property
    def effects(self) -> list[SchemeEffect]:
        """What each other scheme would change, the rest kept as the source stores it."""
        return list(_effects(self.stored, self.layout, self.workload, self.card, self.redundant))

    @property
    def cards(self) -> dict[str, bool]:
        """Every named card, and whether the largest rank fits on it."""
        return {name: fits_on(self.largest.total, Card(name, size, self.card.margin)) for name, size in CARDS.items()}

    def as_json(self) -> dict[str, Any]:
        config = self.inventory.config
        return {
            "source": self.source,
            "layout": self.layout.as_json(),
            "gpus": self.layout.ranks,
            "node_gpus": self.node_gpus,
            "redundant_experts": self.redundant,
            "fits": self.fits,
            "reason": self.reason,
            "gpu_memory_bytes": self.card.memory_bytes,
            "gpu": self.card.name or None,
            "margin_bytes": self.card.margin_bytes,
            "free_bytes": self.free_bytes,
            "cards": self.cards,
            "context": self.workload.context,
            "sequences": self.workload.sequences,
            "max_sequences": self.max_sequences,
            "checkpoint_bytes": self.inventory.total_bytes,
            "schemes": {"experts": self.experts, "latent": self.latent},
            "padded_vocab": padded_vocab(config.vocab_size, self.layout.tp),
            "even_share_bytes": self.even_share_bytes,
            "replicated_bytes": sum(self.replicated.values()),
            "gpu_price": self.gpu_price,
            "price_per_hour": self.price_per_hour,
            "divisibility": divisibility(self.inventory).as_json(),
            "ranks": [rank.as_json() for rank in self.ranks],
            "fewest": self.fewest.as_json() if self.fewest else None,
            "fewest_in_nodes": self.fewest_in_nodes.as_json() if self.fewest_in_nodes else None,
            "alternatives": [option.as_json() for option in self.alternatives],
            "effects": {
                component: [effect.as_json() for effect in self.effects if effect.component == component]
                for component in ("experts", "latent")
            },
        }


def plan_deployment(
    inventory: Inventory,
    *,
    source: str,
    gpus: int | None = None,
    tp: int | None = None,
    ep: int | None = None,
    pp: int | None = None,
    card: Card | None = None,
    context: int | None = None,
    sequences: int = 1,
    experts: str = KEEP,
    latent: str = KEEP,
    gpu_price: float | None = None,
    node_gpus: int = layouts.NODE_GPUS,
    margin: int | None = None,
    redundant: int = 0,
) -> Deployment:
    """Choose what was not given, size every rank, and look around for what else fits.

    Without `gpus` and without any of tp, ep, pp: the fewest GPUs that hold it on `card` and fill nodes of `node_gpus`
    (or divide one). margin: bytes left free on a card that is chosen here (`card` brings its own). redundant: experts
    of each layer that serving engines keep twice, so that EP divides them.
    Raises UsageError, UnsupportedError (exit 14) for impossible layouts and schemes, with the nearest possible ones.
    """
    workload = _workload(inventory.config.max_positions, context, sequences)
    if gpu_price is not None and not 0 <= gpu_price < 1e9:
        raise UsageError(f"{gpu_price} is no price of a GPU hour", hint="write --gpu-price 2.50")
    if redundant and not 0 < redundant <= inventory.config.num_experts:
        raise UsageError(
            f"{redundant} redundant experts of {inventory.config.num_experts} cannot be",
            hint="give as many as EP lacks to divide the experts, at most a second copy of each",
        )
    wanted = inventory.with_schemes(experts, latent)
    finder = Finder(wanted, workload, card, gpu_price, node_gpus, redundant)
    if gpus is None and tp is None and ep is None and pp is None:
        layout, reason = finder.recommended()
    else:
        layout, reason = finder.preferred(gpus, tp, ep, pp)
    ranks = rank_memory(wanted, layout, workload, redundant)
    largest = max(rank.total for rank in ranks)
    taken = card or smallest_card(largest, margin)
    finder.card = taken
    return Deployment(
        source=source,
        inventory=wanted,
        layout=layout,
        reason=reason,
        workload=workload,
        card=taken,
        card_chosen=card is None,
        ranks=ranks,
        alternatives=finder.alternatives(layout),
        stored=inventory,
        experts=experts,
        latent=latent,
        gpu_price=gpu_price,
        replicated=_replicated(wanted, layout),
        node_gpus=node_gpus,
        redundant=redundant,
        fewest=finder.fewest,
        fewest_in_nodes=finder.fewest_in_nodes,
    )


def _workload(positions: int, context: int | None, sequences: int) -> Workload:
    workload = Workload(min(DEFAULT_CONTEXT, positions) if context is None else context, sequences)
    if workload.context > positions:
        raise UsageError(
            f"--context {workload.context} is beyond the model's {positions} positions",
            hint=f"give 1 to {positions} tokens",
        )
    for option, number in (("--context", workload.context), ("--sequences", sequences)):
        if number < 1:
            raise UsageError(f"{option} {number} is nothing to plan for", hint="give at least 1")
    return workload


def _effects(
    inventory: Inventory, layout: Layout, workload: Workload, card: Card, redundant: int
) -> Iterator[SchemeEffect]:
    """Each scheme for the experts, and for the latent projections, the rest kept as it is."""
    config = inventory.config
    for component, present in (("experts", bool(config.moe_layers)), ("latent", bool(config.latent_size))):
        for scheme in (KEEP, *SCHEMES) if present else ():
            experts, latent = (scheme, KEEP) if component == "experts" else (KEEP, scheme)
            try:
                stored = inventory.with_schemes(experts, latent)
                layouts.check(stored.config, layout, redundant)
                stages = stage_memory(stored, layout, workload, redundant)
            except K3Error as error:
                yield SchemeEffect(component, scheme, problem=error.message.removeprefix("module: "))
                continue
            largest = max(stages, key=lambda stage: stage.total)
            yield SchemeEffect(component, scheme, largest.weights_bytes, largest.total, fits_on(largest.total, card))


def _replicated(inventory: Inventory, layout: Layout) -> dict[str, int]:
    """Bytes of the largest stage that every TP rank holds whole, by component: tp * share = whole + (tp - 1) * those."""
    if layout.tp == 1:
        return {}
    divided = max(inventory.weights(layout), key=lambda parts: sum(parts.values()))
    whole = inventory.weights(Layout(1, layout.ep, layout.pp))
    stage = inventory.weights(layout).index(divided)
    found = {name: (layout.tp * divided[name] - whole[stage][name]) // (layout.tp - 1) for name in divided}
    return {name: nbytes for name, nbytes in found.items() if nbytes > 0}
