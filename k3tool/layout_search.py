"""Which layouts fit: of so many GPUs, of the fewest, of the fewest in whole nodes, and how many sequences they have room for.

Sizes come from `k3tool.sizing`, what is possible from `k3tool.layout`. Nothing is read.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from k3tool import layout as layouts
from k3tool.cards import Card, fits_on
from k3tool.errors import UnsupportedError, UsageError
from k3tool.layout import Layout, candidates, choose
from k3tool.sizing import Inventory, Workload, stage_memory
from k3tool.units import format_bytes, plural

MAX_SEARCHED_GPUS = 4096


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


def max_sequences(inventory: Inventory, layout: Layout, context: int, card: Card, redundant: int = 0) -> int:
    """How many sequences of `context` tokens fit: by bisection, as activations grow with them in steps."""

    def holds(sequences: int) -> bool:
        stages = stage_memory(inventory, layout, Workload(context, sequences * layout.ep), redundant)
        return fits_on(max(stage.total for stage in stages), card)

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
    tp, ep, max_pp = layouts.Factors.of(config)
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
    return Divisibility(tp, ep, max_pp, reasons)


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
        return replace(found, fits=fits_on(found.largest_bytes, self.card))

    def _sized(self, layout: Layout, redundant: int) -> Option | None:
        try:
            stages = stage_memory(self.inventory, layout, self.workload, redundant)
        except UnsupportedError:
            return None
        largest = max(stages, key=lambda stage: stage.total)
        price = None if self.gpu_price is None else self.gpu_price * layout.ranks
        fits = self.card is not None and fits_on(largest.total, self.card)
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
                crossing = layouts.straddling(better.layout, self.node_gpus)
                return better.layout, f"{choice.layout} would be preferred but {why}; {better.layout} fits{crossing}"
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
        copies = f" and {plural(self.redundant, 'redundant expert')}" if self.redundant else ""
        said = f"{plural(count, 'GPU')} {'is' if count == 1 else 'are'} the fewest that hold it with {self.card} each{copies}"
        if even is None or even.layout.ranks == count:
            return fewest.layout, said + layouts.straddling(fewest.layout, self.node_gpus)
        node = f"in whole nodes of {self.node_gpus}"
        if even.layout.ranks < self.node_gpus:
            node = f"that divide a node of {self.node_gpus} evenly"
        crossing = layouts.straddling(even.layout, self.node_gpus)
        return (
            even.layout,
            f"{said} ({fewest.layout}); {even.layout.ranks} are recommended, the fewest {node}{crossing}",
        )

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
        that fits is found by bisection. So few that even shares of the weights are too large are not tried."""
        config, best = self.inventory.config, MAX_SEARCHED_GPUS + 1
        room = self.card.memory_bytes - self.card.margin_bytes if self.card is not None else 0
        least = self.inventory.total_bytes // max(1, room)
        tps, eps, max_pp = layouts.Factors.of(config, self.redundant)
        pairs = ((tp, pp) for tp in tps for pp in range(1, min(max_pp, MAX_SEARCHED_GPUS) + 1))
        for tp, pp in sorted(pairs, key=lambda pair: pair[0] * pair[1]):
            sizes = [Layout(tp, ep, pp) for ep in eps if least <= tp * ep * pp < best and allowed(tp * ep * pp)]
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
