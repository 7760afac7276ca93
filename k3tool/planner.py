"""Which layout for how many GPUs, whether it fits, and what else would: the answer of `k3tool plan`.

Pure arithmetic on `k3tool.layout` (what is possible) and `k3tool.sizing` (what it takes). Nothing is read or written.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from typing import Any

from k3tool import layout as layouts
from k3tool.errors import K3Error, UnsupportedError, UsageError
from k3tool.layout import Layout, candidates, choose, padded_vocab, problems
from k3tool.sizing import KEEP, Inventory, RankMemory, Workload, rank_memory, stage_memory
from k3tool.units import format_bytes, parse_size, plural

CARDS = {
    "h100": 80_000_000_000,
    "h20": 96_000_000_000,
    "h20-3e": 141_000_000_000,
    "h200": 141_000_000_000,
    "b200": 180_000_000_000,
    "gb200": 186_000_000_000,
    "mi300x": 192_000_000_000,
    "mi325x": 256_000_000_000,
    "b300": 288_000_000_000,
    "gb300": 288_000_000_000,
    "mi350x": 288_000_000_000,
    "mi355x": 288_000_000_000,
}
"""Memory of one card as its maker's data sheet states it. B200: the 180 GB that HGX and DGX B200 systems offer of its
192 GB. GB200: the 13.4 TB of an NVL72 rack, divided by 72."""

MARGIN = 0.10
"""Share of the memory left to the runtime, communication buffers, workspaces and fragmentation."""

DEFAULT_CONTEXT = 131_072
SCHEMES = ("bf16", "mxfp4", "nvfp4", "fp8-block", "fp8-channel", "int8", "int4", "nf4", "fp4")
MAX_SEARCHED_GPUS = 4096


@dataclass(frozen=True)
class Card:
    """What one GPU holds. `name` is empty for a plain number of bytes. margin: bytes that are left free; None for the
    usual share."""

    name: str
    memory_bytes: int
    margin: int | None = None

    @property
    def margin_bytes(self) -> int:
        return round(self.memory_bytes * MARGIN) if self.margin is None else self.margin

    def __str__(self) -> str:
        return f"{self.name} ({format_bytes(self.memory_bytes)})" if self.name else format_bytes(self.memory_bytes)


@dataclass(frozen=True)
class Option:
    """One layout and what its largest rank needs. price: of all GPUs for an hour, or None. max_sequences: of the
    planned context, on all GPUs together; None where nobody asked. redundant: experts of a layer that are held twice."""

    layout: Layout
    largest_bytes: int
    weights_bytes: int
    fits: bool
    price: float | None
    redundant: int = 0
    max_sequences: int | None = None

    def __str__(self) -> str:
        return f"{self.layout}, {self.redundant} redundant" if self.redundant else str(self.layout)

    def as_json(self) -> dict[str, Any]:
        return {
            **self.layout.as_json(),
            "gpus": self.layout.ranks,
            "redundant_experts": self.redundant,
            "max_sequences": self.max_sequences,
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
    def effects(self) -> list[SchemeEffect]:
        """What each other scheme would change, the rest kept as the source stores it."""
        return list(_effects(self.stored, self.layout, self.workload, self.card, self.redundant))

    @property
    def cards(self) -> dict[str, bool]:
        """Every named card, and whether the largest rank fits on it."""
        return {name: _fits(self.largest.total, Card(name, size, self.card.margin)) for name, size in CARDS.items()}

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


def parse_card(text: str, margin: int | None = None) -> Card:
    """A card by name, or a size. Raises UsageError."""
    name = text.strip().lower()
    if name in CARDS:
        card = Card(name, CARDS[name], margin)
    else:
        card = Card("", _card_size(text), margin)
    if card.margin_bytes >= card.memory_bytes:
        raise UsageError(
            f"a margin of {format_bytes(card.margin_bytes)} leaves nothing of {card}", hint="give a smaller --margin"
        )
    return card


def _card_size(text: str) -> int:
    try:
        memory = parse_size(text)
    except UsageError as error:
        message = error.message if text.strip().startswith("-") else f"unknown GPU memory {text!r}"
        raise UsageError(message, hint=f"name a card ({', '.join(CARDS)}) or a size such as 141GB") from None
    if memory < 1:
        raise UsageError(f"a GPU with {text} holds nothing", hint="write a size such as 141GB")
    return memory


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
    taken = card or _smallest_card(largest, margin)
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


def max_sequences(inventory: Inventory, layout: Layout, context: int, card: Card, redundant: int = 0) -> int:
    """How many sequences of `context` tokens fit: by bisection, as activations grow with them in steps."""

    def holds(sequences: int) -> bool:
        stages = stage_memory(inventory, layout, Workload(context, sequences * layout.ep), redundant)
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
    tp = [n for n in layouts.divisors(heads) if not problems(config, Layout(tp=n))]
    ep = [n for n in layouts.divisors(max(1, config.num_experts)) if not problems(config, Layout(ep=n))]
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


class Finder:
    """Looks for layouts of one inventory and workload; sizes are remembered."""

    def __init__(
        self,
        inventory: Inventory,
        workload: Workload,
        card: Card | None,
        gpu_price: float | None,
        node_gpus: int = layouts.NODE_GPUS,
        redundant: int = 0,
    ) -> None:
        self.inventory = inventory
        self.workload = workload
        self.card = card
        self.gpu_price = gpu_price
        self.node_gpus = node_gpus
        self.redundant = redundant
        self._known: dict[Layout, Option | None] = {}

    def option(self, layout: Layout) -> Option | None:
        """The layout sized, or None where a tensor's storage cannot be divided so."""
        if layout not in self._known:
            self._known[layout] = self._sized(layout, self.redundant)
        found = self._known[layout]
        if found is None or self.card is None:
            return found
        return replace(found, fits=_fits(found.largest_bytes, self.card))

    def _sized(self, layout: Layout, redundant: int) -> Option | None:
        try:
            stages = stage_memory(self.inventory, layout, self.workload, redundant)
        except UnsupportedError:
            return None
        largest = max(stages, key=lambda stage: stage.total)
        price = None if self.gpu_price is None else self.gpu_price * layout.ranks
        fits = self.card is not None and _fits(largest.total, self.card)
        return Option(layout, largest.total, largest.weights_bytes, fits, price, redundant)

    def fitting(
        self, gpus: int, tp: int | None = None, ep: int | None = None, pp: int | None = None
    ) -> Iterator[Option]:
        """Layouts of `gpus` ranks that fit, the preferred first."""
        config = self.inventory.config
        for layout in candidates(config, gpus, tp, ep, pp, node_gpus=self.node_gpus, redundant=self.redundant):
            option = self.option(layout)
            if option is not None and (option.fits or self.card is None):
                yield option

    def preferred(self, gpus: int | None, tp: int | None, ep: int | None, pp: int | None) -> tuple[Layout, str]:
        """What `reshard` would choose, unless it does not fit and another layout with what was given does."""
        choice = self._chosen(gpus, tp, ep, pp)
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

    def _chosen(self, gpus: int | None, tp: int | None, ep: int | None, pp: int | None) -> layouts.Choice:
        config = self.inventory.config
        try:
            return choose(config, gpus, tp, ep, pp, node_gpus=self.node_gpus, redundant=self.redundant)
        except UnsupportedError as error:
            wanted = ep or (gpus if gpus and tp in (None, 1) and pp in (None, 1) else 1) or 1
            copies = layouts.redundant_experts(config, wanted)
            if config.moe_layers and not self.redundant and copies and wanted <= config.num_experts:
                each = (config.num_experts + copies) // wanted
                error.hint += f"; or as serving engines do, EP {wanted} of {each} each: --redundant-experts {copies}"
            raise

    def recommended(self) -> tuple[Layout, str]:
        """The fewest GPUs that hold it and fill nodes or divide one; where there are none, the fewest of all."""
        if self.card is None:
            raise UsageError(
                "neither GPUs nor their memory are given",
                hint="give --gpus N, or --gpu-memory to have the fewest found",
            )
        fewest, even = self.fewest, self.fewest_in_nodes
        if fewest is None:
            raise UnsupportedError(
                f"no layout of up to {MAX_SEARCHED_GPUS} GPUs with {self.card} holds this",
                hint="give more --gpu-memory, a shorter --context or fewer --sequences",
            )
        count = fewest.layout.ranks
        said = f"{plural(count, 'GPU')} {'is' if count == 1 else 'are'} the fewest that hold it with {self.card} each"
        if even is None or even.layout.ranks == count:
            return fewest.layout, said
        node = f"in whole nodes of {self.node_gpus}"
        if even.layout.ranks < self.node_gpus:
            node = f"that divide a node of {self.node_gpus} evenly"
        return even.layout, f"{said} ({fewest.layout}); {even.layout.ranks} are recommended, the fewest {node}"

    @cached_property
    def fewest(self) -> Option | None:
        """Of the fewest GPUs that hold it, whatever their number: the preferred layout."""
        return self._least(lambda count: True)

    @cached_property
    def fewest_in_nodes(self) -> Option | None:
        return self._least(lambda count: self.node_gpus % count == 0 or count % self.node_gpus == 0)

    def _least(self, allowed: Callable[[int], bool]) -> Option | None:
        """The preferred layout of the smallest allowed number of GPUs that holds it; every number up to
        MAX_SEARCHED_GPUS is covered. With more EP a rank never holds more, so that for each TP and PP the smallest EP
        that fits is found by bisection."""
        config, best = self.inventory.config, MAX_SEARCHED_GPUS + 1
        found = divisibility(self.inventory)
        eps = [n for n in layouts.divisors(max(1, config.num_experts + self.redundant))
               if not problems(config, Layout(ep=n), self.redundant)]  # fmt: skip
        pairs = ((tp, pp) for tp in found.tp for pp in range(1, min(found.max_pp, MAX_SEARCHED_GPUS) + 1))
        for tp, pp in sorted(pairs, key=lambda pair: pair[0] * pair[1]):
            sizes = [Layout(tp, ep, pp) for ep in eps if tp * ep * pp < best and allowed(tp * ep * pp)]
            if sizes and self._holds(sizes[-1]):
                best = sizes[bisect_left(sizes, True, key=self._holds)].ranks
        return next(self.fitting(best), None) if best <= MAX_SEARCHED_GPUS else None

    def _holds(self, layout: Layout) -> bool:
        option = self.option(layout)
        return option is not None and option.fits

    def alternatives(self, layout: Layout) -> list[Option]:
        """Other layouts that fit: of as many GPUs (up to three), with redundant experts where EP does not divide them,
        of the fewest GPUs, and of the fewest in whole nodes; fewer than here, or more where this does not fit."""
        own = self.option(layout)
        found = [option for option in self.fitting(layout.ranks) if option.layout != layout][:3]
        found += self._with_redundant_experts(layout.ranks)
        for option in (self.fewest, self.fewest_in_nodes):
            fewer = option is not None and (option.layout.ranks < layout.ranks or (own is not None and not own.fits))
            if option is not None and fewer and option not in found:
                found.append(option)
        return [replace(option, max_sequences=self._room(option)) for option in found]

    def _with_redundant_experts(self, gpus: int) -> list[Option]:
        """Attention data-parallel with EP over all GPUs, where only copies of some experts make that possible."""
        config = self.inventory.config
        copies = layouts.redundant_experts(config, gpus) if config.moe_layers and gpus <= config.num_experts else 0
        option = self._sized(Layout(ep=gpus), copies) if copies and not self.redundant else None
        return [option] if option is not None and option.fits else []

    def _room(self, option: Option) -> int | None:
        if self.card is None:
            return None
        return max_sequences(self.inventory, option.layout, self.workload.context, self.card, option.redundant)


def _fits(total: int, card: Card) -> bool:
    return total + card.margin_bytes <= card.memory_bytes


def _smallest_card(total: int, margin: int | None) -> Card:
    cards = sorted((Card(name, memory, margin) for name, memory in CARDS.items()), key=lambda card: card.memory_bytes)
    return next((card for card in cards if _fits(total, card)), cards[-1])


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
