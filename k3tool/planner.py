"""Which layout for how many GPUs, whether it fits, and what else would: the answer of `k3tool plan`.

Pure arithmetic on `k3tool.layout` (what is possible) and `k3tool.sizing` (what it takes). Nothing is read or written.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from k3tool import layout as layouts
from k3tool.errors import K3Error, UnsupportedError, UsageError
from k3tool.layout import Layout, candidates, choose, padded_vocab, problems
from k3tool.sizing import KEEP, Inventory, RankMemory, Workload, rank_memory, stage_memory
from k3tool.units import format_bytes, parse_size

CARDS = {
    "h100": 80_000_000_000,
    "h200": 141_000_000_000,
    "b200": 180_000_000_000,
    "mi300x": 192_000_000_000,
    "b300": 288_000_000_000,
    "mi355x": 288_000_000_000,
}
"""Memory of one card as its maker sells it. B200: the 180 GB that HGX and DGX B200 systems offer of its 192 GB."""

MARGIN = 0.10
"""Share of the memory left to the runtime, communication buffers, workspaces and fragmentation."""

DEFAULT_CONTEXT = 131_072
SCHEMES = ("bf16", "mxfp4", "nvfp4", "fp8-block", "fp8-channel", "int8", "int4", "nf4", "fp4")
MAX_SEARCHED_GPUS = 4096


@dataclass(frozen=True)
class Card:
    """What one GPU holds. `name` is empty for a plain number of bytes."""

    name: str
    memory_bytes: int

    @property
    def margin_bytes(self) -> int:
        return round(self.memory_bytes * MARGIN)

    def __str__(self) -> str:
        return f"{self.name} ({format_bytes(self.memory_bytes)})" if self.name else format_bytes(self.memory_bytes)


@dataclass(frozen=True)
class Option:
    """One layout and what its largest rank needs. price: of all GPUs for an hour, or None."""

    layout: Layout
    largest_bytes: int
    weights_bytes: int
    fits: bool
    price: float | None

    def as_json(self) -> dict[str, Any]:
        return {
            **self.layout.as_json(),
            "gpus": self.layout.ranks,
            "weights_bytes": self.weights_bytes,
            "total_bytes": self.largest_bytes,
            "fits": self.fits,
            "price_per_hour": self.price,
        }


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
    """The plan for one number of GPUs. `card_chosen`: the memory was not given, `card` is the smallest that holds it."""

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

    @property
    def largest(self) -> RankMemory:
        return max(self.ranks, key=lambda rank: rank.total)

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
        return max_sequences(self.inventory, self.layout, self.workload.context, self.card)

    @cached_property
    def effects(self) -> list[SchemeEffect]:
        """What each other scheme would change, the rest kept as the source stores it."""
        return list(_effects(self.stored, self.layout, self.workload, self.card))

    @property
    def cards(self) -> dict[str, bool]:
        """Every named card, and whether the largest rank fits on it."""
        return {name: _fits(self.largest.total, Card(name, memory)) for name, memory in CARDS.items()}

    def as_json(self) -> dict[str, Any]:
        config = self.inventory.config
        return {
            "source": self.source,
            "layout": self.layout.as_json(),
            "gpus": self.layout.ranks,
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
            "alternatives": [option.as_json() for option in self.alternatives],
            "effects": {
                component: [effect.as_json() for effect in self.effects if effect.component == component]
                for component in ("experts", "latent")
            },
        }


def parse_card(text: str) -> Card:
    """A card by name, or a size. Raises UsageError."""
    name = text.strip().lower()
    if name in CARDS:
        return Card(name, CARDS[name])
    try:
        memory = parse_size(text)
    except UsageError:
        raise UsageError(
            f"unknown GPU memory {text!r}", hint=f"name a card ({', '.join(CARDS)}) or a size such as 141GB"
        ) from None
    if memory < 1:
        raise UsageError(f"a GPU with {text} holds nothing", hint="write a size such as 141GB")
    return Card("", memory)


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
) -> Deployment:
    """Choose what was not given, size every rank, and look around for what else fits.

    Without `gpus` and without any of tp, ep, pp, the fewest GPUs that fit on `card` are taken.
    Raises UsageError, UnsupportedError (exit 14) for impossible layouts and schemes, with the nearest possible ones.
    """
    positions = inventory.config.max_positions
    workload = Workload(min(DEFAULT_CONTEXT, positions) if context is None else context, sequences)
    if not 1 <= workload.context <= positions or sequences < 1:
        raise UsageError(
            f"{sequences} sequences of {workload.context} tokens cannot be",
            hint=f"at least one sequence, and 1 to {positions} tokens each (the model's positions)",
        )
    if gpu_price is not None and not 0 <= gpu_price < 1e9:
        raise UsageError(f"{gpu_price} is no price of a GPU hour", hint="write --gpu-price 2.50")
    wanted = inventory.with_schemes(experts, latent)
    finder = _Finder(wanted, workload, card, gpu_price)
    if gpus is None and tp is None and ep is None and pp is None:
        layout, reason = finder.fewest()
    else:
        layout, reason = finder.preferred(gpus, tp, ep, pp)
    ranks = rank_memory(wanted, layout, workload)
    largest = max(rank.total for rank in ranks)
    taken = card or _smallest_card(largest)
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
    )


def max_sequences(inventory: Inventory, layout: Layout, context: int, card: Card) -> int:
    """How many sequences of `context` tokens fit: by bisection, as activations grow with them in steps."""

    def holds(sequences: int) -> bool:
        stages = stage_memory(inventory, layout, Workload(context, sequences * layout.ep))
        return _fits(max(stage.total for stage in stages), card)

    if not holds(1):
        return 0
    low, high = 1, 2
    while holds(high):
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low * layout.ep


@dataclass(frozen=True)
class Divisibility:
    """What a model can be divided by: every TP and EP that is possible alone, the most PP stages, and why."""

    tp: list[int]
    ep: list[int]
    max_pp: int
    reasons: list[str]

    def as_json(self) -> dict[str, Any]:
        return {"tp": self.tp, "ep": self.ep, "max_pp": self.max_pp, "reasons": self.reasons}


def divisibility(inventory: Inventory) -> Divisibility:
    config = inventory.config
    heads = config.num_heads if "mla" in config.layer_kinds else config.kda_num_heads
    tp = [n for n in range(1, heads + 1) if not problems(config, Layout(tp=n))]
    ep = [n for n in range(1, config.num_experts + 1) if not problems(config, Layout(ep=n))] or [1]
    reasons = [f"TP divides the {heads} attention heads"]
    group = layouts.expert_group_size(config)
    if config.moe_layers and group > 1:
        reasons[0] += (
            f", and the experts' intermediate width of {config.moe_intermediate_size} into whole scale groups of {group}"
        )
    elif config.moe_layers:
        reasons[0] += f", and the experts' intermediate width of {config.moe_intermediate_size}"
    if config.moe_layers:
        reasons.append(f"EP divides the {config.num_experts} experts")
    reasons.append(f"PP deals out {config.num_layers} layers")
    reasons.append(f"the vocabulary of {config.vocab_size} is padded with zero rows where TP does not divide it")
    return Divisibility(tp, ep, config.num_layers, reasons)


class _Finder:
    """Looks for layouts of one inventory and workload; sizes are remembered."""

    def __init__(self, inventory: Inventory, workload: Workload, card: Card | None, gpu_price: float | None) -> None:
        self.inventory = inventory
        self.workload = workload
        self.card = card
        self.gpu_price = gpu_price
        self._known: dict[Layout, Option | None] = {}

    def option(self, layout: Layout) -> Option | None:
        """The layout sized, or None where a tensor's storage cannot be divided so."""
        if layout not in self._known:
            try:
                stages = stage_memory(self.inventory, layout, self.workload)
            except UnsupportedError:
                self._known[layout] = None
            else:
                largest = max(stages, key=lambda stage: stage.total)
                price = None if self.gpu_price is None else self.gpu_price * layout.ranks
                self._known[layout] = Option(layout, largest.total, largest.weights_bytes, False, price)
        found = self._known[layout]
        if found is None or self.card is None:
            return found
        return Option(
            found.layout, found.largest_bytes, found.weights_bytes, _fits(found.largest_bytes, self.card), found.price
        )

    def fitting(
        self, gpus: int, tp: int | None = None, ep: int | None = None, pp: int | None = None
    ) -> Iterator[Option]:
        """Layouts of `gpus` ranks that fit, the preferred first."""
        for layout in candidates(self.inventory.config, gpus, tp, ep, pp):
            option = self.option(layout)
            if option is not None and (option.fits or self.card is None):
                yield option

    def preferred(self, gpus: int | None, tp: int | None, ep: int | None, pp: int | None) -> tuple[Layout, str]:
        """What `reshard` would choose, unless it does not fit and another layout with what was given does."""
        choice = choose(self.inventory.config, gpus, tp, ep, pp)
        first = self.option(choice.layout)
        if first is None or (self.card is not None and not first.fits):
            better = next(self.fitting(choice.layout.ranks, tp, ep, pp), None)
            if better is not None:
                why = (
                    "cannot divide the storage"
                    if first is None
                    else f"needs {format_bytes(first.largest_bytes)} on its largest rank"
                )
                return better.layout, f"{choice.layout} would be preferred but {why}; {better.layout} fits"
        if first is None:
            self.inventory.weights(choice.layout)  # raises, naming the tensor
        return choice.layout, choice.reason

    def fewest(self) -> tuple[Layout, str]:
        if self.card is None:
            raise UsageError(
                "neither GPUs nor their memory are given",
                hint="give --gpus N, or --gpu-memory to have the fewest found",
            )
        for gpus in _counts():
            option = next(self.fitting(gpus), None)
            if option is not None:
                return option.layout, f"{gpus} GPUs are the fewest that hold it with {self.card} each"
        raise UnsupportedError(
            f"no layout of up to {MAX_SEARCHED_GPUS} GPUs with {self.card} holds this",
            hint="give more --gpu-memory, a shorter --context or fewer --sequences",
        )

    def alternatives(self, layout: Layout) -> list[Option]:
        """Other layouts that fit: of as many GPUs (up to three), of the fewest GPUs, and the next larger number where
        this one does not fit."""
        own = self.option(layout)
        found = [option for option in self.fitting(layout.ranks) if option.layout != layout][:3]
        fewest = self._first(count for count in _counts() if count < layout.ranks)
        if fewest is not None:
            found.append(fewest)
        if own is not None and not own.fits and not found:
            more = self._first(count for count in _counts() if count > layout.ranks)
            if more is not None:
                found.append(more)
        return found

    def _first(self, counts: Iterator[int]) -> Option | None:
        return next((option for count in counts for option in self.fitting(count)), None)


def _counts() -> Iterator[int]:
    """Numbers of GPUs that people have: up to eight, then whole nodes, then doublings of racks."""
    yield from range(1, layouts.NODE_GPUS + 1)
    yield from range(2 * layouts.NODE_GPUS, 16 * layouts.NODE_GPUS + 1, layouts.NODE_GPUS)
    count = 32 * layouts.NODE_GPUS
    while count <= MAX_SEARCHED_GPUS:
        yield count
        count *= 2


def _fits(total: int, card: Card) -> bool:
    return total + card.margin_bytes <= card.memory_bytes


def _smallest_card(total: int) -> Card:
    cards = sorted((Card(name, memory) for name, memory in CARDS.items()), key=lambda card: card.memory_bytes)
    return next((card for card in cards if _fits(total, card)), cards[-1])


def _effects(inventory: Inventory, layout: Layout, workload: Workload, card: Card) -> Iterator[SchemeEffect]:
    """Each scheme for the experts, and for the latent projections, the rest kept as it is."""
    config = inventory.config
    for component, present in (("experts", bool(config.moe_layers)), ("latent", bool(config.latent_size))):
        for scheme in (KEEP, *SCHEMES) if present else ():
            experts, latent = (scheme, KEEP) if component == "experts" else (KEEP, scheme)
            try:
                stored = inventory.with_schemes(experts, latent)
                layouts.check(stored.config, layout)
                stages = stage_memory(stored, layout, workload)
            except K3Error as error:
                yield SchemeEffect(component, scheme, problem=error.message.removeprefix("module: "))
                continue
            largest = max(stages, key=lambda stage: stage.total)
            yield SchemeEffect(component, scheme, largest.weights_bytes, largest.total, _fits(largest.total, card))


def _replicated(inventory: Inventory, layout: Layout) -> dict[str, int]:
    """Bytes of the largest stage that every TP rank holds whole, by component: tp * share = whole + (tp - 1) * those."""
    if layout.tp == 1:
        return {}
    divided = max(inventory.weights(layout), key=lambda parts: sum(parts.values()))
    whole = inventory.weights(Layout(1, layout.ep, layout.pp))
    stage = inventory.weights(layout).index(divided)
    found = {name: (layout.tp * divided[name] - whole[stage][name]) // (layout.tp - 1) for name in divided}
    return {name: nbytes for name, nbytes in found.items() if nbytes > 0}
