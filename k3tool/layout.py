"""Which rank owns what: TP x EP x PP layouts, whether a model can have one, and why not.

Everything here follows from configuration values; no tensor is named and no byte is read. TP splits heads and
intermediate widths, EP deals whole experts out in contiguous blocks, PP deals whole layers out in contiguous stages.
Ranks are numbered with TP innermost and PP outermost, so that the ranks of one TP group are neighbours. They share a
node where the node's GPUs are a multiple of TP: groups of 6 would straddle nodes of 8.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from math import isqrt
from typing import NamedTuple

from k3tool.checkpoint.outside import Fields, corrupt
from k3tool.config import K3Config
from k3tool.errors import UnsupportedError, UsageError
from k3tool.units import plural

NODE_GPUS = 8  # TP groups are kept inside nodes of this many GPUs where there is a choice: it talks twice a layer
MAX_RANKS = 100_000
_EXPERT_GROUP = {"mxfp4": 32, "nvfp4": 16}


class Place(NamedTuple):
    """One rank's coordinates."""

    rank: int
    tp_rank: int
    ep_rank: int
    pp_rank: int


@dataclass(frozen=True, order=True)
class Layout:
    """tp x ep x pp ranks. EP ranks hold everything but the routed experts whole, as far as TP does not split it."""

    tp: int = 1
    ep: int = 1
    pp: int = 1

    def __post_init__(self) -> None:
        for name, value in (("TP", self.tp), ("EP", self.ep), ("PP", self.pp)):
            if value < 1:
                raise UsageError(f"{name} must be at least 1, found {value}", hint="leave it out to have it chosen")

    @property
    def ranks(self) -> int:
        return self.tp * self.ep * self.pp

    def place(self, rank: int) -> Place:
        """Coordinates of `rank`. Raises UsageError outside 0..ranks-1."""
        if not 0 <= rank < self.ranks:
            raise UsageError(
                f"rank {rank} does not exist in {self}", hint=f"ranks are numbered from 0 to {self.ranks - 1}"
            )
        rest, tp_rank = divmod(rank, self.tp)
        pp_rank, ep_rank = divmod(rest, self.ep)
        return Place(rank, tp_rank, ep_rank, pp_rank)

    def rank_at(self, tp_rank: int, ep_rank: int, pp_rank: int) -> int:
        return (pp_rank * self.ep + ep_rank) * self.tp + tp_rank

    def places(self) -> Iterator[Place]:
        return (self.place(rank) for rank in range(self.ranks))

    def as_json(self) -> dict[str, int]:
        return {"tp": self.tp, "ep": self.ep, "pp": self.pp}

    def __str__(self) -> str:
        return f"TP{self.tp} x EP{self.ep} x PP{self.pp}"


class Choice(NamedTuple):
    layout: Layout
    reason: str


def share_of(config: K3Config) -> tuple[Layout, Place] | None:
    """The layout and rank whose share a folder holds, as the `k3tool` section of its configuration says; None where it
    says nothing. Raises CheckpointCorrupt for what k3tool did not write."""
    if config.raw.get("k3tool") is None:
        return None
    where = "config.json: its k3tool section is not one that k3tool wrote"
    top = Fields(config.raw, where, corrupt("write the ranks again from the checkpoint"))
    section = top.fields("k3tool")
    section.where = where
    counts = {key: section.integer(key, low=1, high=MAX_RANKS) for key in ("tp", "ep", "pp", "ranks")}
    layout = Layout(counts["tp"], counts["ep"], counts["pp"])
    if layout.ranks != counts["ranks"]:
        raise section.bad("ranks", f"{layout.ranks} for {layout}")
    return layout, layout.place(section.integer("rank", high=layout.ranks - 1))


INSIDE, WHOLE_NODES, STRADDLES = range(3)
"""Where the ranks of one TP group are: in one node each, in whole nodes, or in parts of several; the best first."""


def tp_placement(layout: Layout, node_gpus: int) -> int:
    """INSIDE, WHOLE_NODES or STRADDLES. Ranks fill nodes of `node_gpus` in order."""
    if layout.ranks <= node_gpus or node_gpus % layout.tp == 0:
        return INSIDE
    return WHOLE_NODES if layout.tp % node_gpus == 0 else STRADDLES


def straddling(layout: Layout, node_gpus: int) -> str:
    """What to add to a reason where TP groups are in parts of several nodes; else nothing."""
    if tp_placement(layout, node_gpus) != STRADDLES:
        return ""
    return f"; TP {layout.tp} straddles nodes of {node_gpus} GPUs"


def rank_folder(rank: int, ranks: int) -> str:
    """`rank-00003-of-00016`, counted from 0."""
    return f"rank-{rank:05d}-of-{ranks:05d}"


def stages(num_layers: int, pp: int) -> tuple[range, ...]:
    """Layers of each PP stage: contiguous, every layer once. The first stages take what does not divide evenly:
    the first holds the dense layers, which are light."""
    size, extra = divmod(num_layers, pp)
    starts = [index * size + min(index, extra) for index in range(pp + 1)]
    return tuple(range(first, last) for first, last in pairwise(starts))


def stage_of(layer: int, num_layers: int, pp: int) -> int:
    """The PP stage that owns `layer`."""
    size, extra = divmod(num_layers, pp)
    return layer // (size + 1) if layer < extra * (size + 1) else extra + (layer - extra * (size + 1)) // size


def expert_block(num_experts: int, ep: int, ep_rank: int) -> range:
    """Experts of one EP rank: a contiguous block."""
    size = num_experts // ep
    return range(ep_rank * size, (ep_rank + 1) * size)


def expert_owner(expert: int, num_experts: int, ep: int) -> int:
    """The EP rank that owns `expert`."""
    return expert // (num_experts // ep)


def padded_vocab(vocab_size: int, tp: int) -> int:
    """Rows of embedding and head over all TP ranks: the vocabulary rounded up to a multiple of TP with zero rows."""
    return -(-vocab_size // tp) * tp


def expert_group_size(config: K3Config) -> int:
    """Weights that share one scale in the routed experts (1 where they have none): TP must keep groups whole."""
    return _EXPERT_GROUP.get(config.expert_scheme, 1)


def redundant_experts(config: K3Config, ep: int) -> int:
    """The fewest experts held twice that make the experts divisible by `ep`."""
    return -config.num_experts % ep


def problems(config: K3Config, layout: Layout, redundant: int = 0) -> list[str]:
    """Why `config` cannot have `layout`, one reason each; empty where it can.

    redundant: experts of which serving engines keep a second copy, so that every EP rank holds equally many.
    """
    found: list[str] = []
    tp, ep, pp = layout.tp, layout.ep, layout.pp

    def divides(what: str, size: int) -> None:
        if size % tp:
            found.append(f"TP {tp} does not divide {what} ({size})")

    if "kda" in config.layer_kinds:
        divides("the KDA heads", config.kda_num_heads)
    if "mla" in config.layer_kinds:
        divides("the MLA heads", config.num_heads)
    if len(config.moe_layers) < config.num_layers:
        divides("the dense intermediate width", config.intermediate_size)
    if config.moe_layers:
        width, group = config.moe_intermediate_size, expert_group_size(config)
        if width % tp or width // tp % group:
            share = f"{width} / {tp} = {width / tp:g}"
            found.append(
                f"TP {tp} does not divide the expert intermediate width ({width})"
                if width % tp
                else f"TP {tp} leaves w2 no whole scale groups: {share} is not a multiple of {group}"
            )
        if config.num_shared_experts:
            divides("the shared experts' intermediate width", config.shared_intermediate_size)
        slots = config.num_experts + redundant
        if slots % ep:
            copies = f" + {redundant} redundant" if redundant else ""
            found.append(f"EP {ep} does not divide the experts ({config.num_experts}{copies})")
        elif slots // ep > config.num_experts:
            found.append(f"EP {ep} would hold {slots // ep} experts a rank, the model has {config.num_experts}")
    elif ep > 1:
        found.append(f"EP {ep} has no experts to deal out: this model is dense")
    if pp > config.num_layers:
        found.append(f"PP {pp} has more stages than the model has layers ({config.num_layers})")
    return found


def check(config: K3Config, layout: Layout, redundant: int = 0) -> None:
    """Raises UnsupportedError (exit 14) with every reason and the nearest possible layouts."""
    reasons = problems(config, layout, redundant)
    if reasons:
        raise _impossible(
            f"{layout} is impossible for this model: {_joined(reasons)}", reasons, nearest(config, layout)
        )


def _joined(reasons: list[str]) -> str:
    """`TP 5 does not divide a; TP 5 does not divide b` as `TP 5 does not divide a, b`."""
    said: list[str] = []
    for reason in reasons:
        head, verb, what = reason.partition(" does not divide ")
        if verb and said and said[-1].startswith(head + verb):
            said[-1] += f", {what}"
        else:
            said.append(reason)
    return "; ".join(said)


def _impossible(message: str, reasons: list[str], near: list[Layout]) -> UnsupportedError:
    return UnsupportedError(
        message,
        hint="possible: " + ", ".join(f"{item} ({plural(item.ranks, 'GPU')})" for item in near),
        reasons=reasons,
        nearest=[item.as_json() for item in near],
    )


class Factors(NamedTuple):
    """Every TP and every EP that is possible, ascending, and the most PP stages: each is possible with each."""

    tp: list[int]
    ep: list[int]
    max_pp: int

    @classmethod
    def of(cls, config: K3Config, redundant: int = 0) -> Factors:
        heads = config.num_heads if "mla" in config.layer_kinds else config.kda_num_heads
        slots = max(1, config.num_experts + redundant)
        return cls(
            [n for n in divisors(heads) if not problems(config, Layout(tp=n))],
            [n for n in divisors(slots) if not problems(config, Layout(ep=n), redundant)],
            config.num_layers,
        )

    def layouts(self, gpus: int) -> list[Layout]:
        """Every possible layout of exactly so many ranks."""
        return [
            Layout(tp, ep, gpus // (tp * ep))
            for tp in self.tp
            for ep in self.ep
            if gpus % (tp * ep) == 0 and gpus // (tp * ep) <= self.max_pp
        ]


def candidates(
    config: K3Config,
    gpus: int,
    tp: int | None = None,
    ep: int | None = None,
    pp: int | None = None,
    *,
    node_gpus: int = NODE_GPUS,
    redundant: int = 0,
) -> list[Layout]:
    """Every possible layout of exactly `gpus` ranks with the given factors fixed, the preferred one first.

    Preferred: TP groups inside nodes, else in whole nodes; few stages; then as much TP as that allows (it splits
    everything that is large), the rest EP.
    """
    found = [
        layout
        for layout in Factors.of(config, redundant).layouts(gpus)
        if tp in (None, layout.tp) and ep in (None, layout.ep) and pp in (None, layout.pp)
    ]
    return sorted(found, key=lambda item: (tp_placement(item, node_gpus), item.pp, -item.tp))


def choose(
    config: K3Config,
    gpus: int | None,
    tp: int | None = None,
    ep: int | None = None,
    pp: int | None = None,
    *,
    node_gpus: int = NODE_GPUS,
    redundant: int = 0,
) -> Choice:
    """The layout for `gpus` ranks with what was given kept and the rest chosen, and the reason in a sentence.

    Raises UsageError where the given factors cannot give `gpus`, UnsupportedError (exit 14) where no layout is
    possible, naming the reasons and the nearest possible ones.
    """
    given = (tp or 1) * (ep or 1) * (pp or 1)
    total = given if gpus is None else gpus
    if total < 1 or total > MAX_RANKS:
        raise UsageError(f"{plural(total, 'GPU')} is out of range", hint=f"give 1 to {MAX_RANKS}")
    free = [name for name, value in (("TP", tp), ("EP", ep), ("PP", pp)) if value is None]
    if total % given or (not free and total != given):
        raise UsageError(
            f"{_given(tp, ep, pp)} does not make {plural(total, 'GPU')}",
            hint="GPUs = TP x EP x PP; leave one out to have it chosen",
        )
    if total == given:
        layout = Layout(tp or 1, ep or 1, pp or 1)
        check(config, layout, redundant)
        reason = "as given" if total > 1 or not free else "nothing is divided"
        return Choice(layout, reason + straddling(layout, node_gpus))
    possible = candidates(config, total, tp, ep, pp, node_gpus=node_gpus, redundant=redundant)
    if not possible:
        raise _none_possible(config, total, tp, ep, pp, redundant)
    return Choice(possible[0], _why(possible[0], free, len(possible), node_gpus))


def _none_possible(
    config: K3Config, total: int, tp: int | None, ep: int | None, pp: int | None, redundant: int
) -> UnsupportedError:
    """What was given is impossible by itself, or nothing makes `total` of the rest."""
    check(config, Layout(tp or 1, ep or 1, pp or 1), redundant)
    rest = total // ((tp or 1) * (ep or 1) * (pp or 1))
    reasons: list[str] = []
    if tp is None:
        heads = config.num_heads if "mla" in config.layer_kinds else config.kda_num_heads
        reasons.append(f"TP has to divide the {heads} heads")
    if ep is None and config.moe_layers:
        copies = f" + {redundant} redundant" if redundant else ""
        reasons.append(f"EP the {config.num_experts}{copies} experts")
    if pp is None:
        reasons.append(f"PP may have {config.num_layers} stages at most")
    given = _given(tp, ep, pp)
    free = " x ".join(name for name, value in (("TP", tp), ("EP", ep), ("PP", pp)) if value is None)
    what = (
        f"no layout of {plural(total, 'GPU')} has {given}, as {free} would have to make {rest}"
        if given
        else (f"no layout of {plural(total, 'GPU')} exists")
    )
    near = nearest(config, Layout(tp or 1, ep or 1, pp or 1)) if given else _near_counts(config, total)
    return _impossible(f"{what}: {', '.join(reasons)}", reasons, near)


def _near_counts(config: K3Config, total: int, limit: int = 3) -> list[Layout]:
    """The preferred layout of each of the nearest numbers of GPUs that have one."""
    found: list[Layout] = []
    factors = Factors.of(config)
    for count in _around(total):
        if len(found) == limit:
            break
        if factors.layouts(count):
            found.append(candidates(config, count)[0])
    return found


def _around(number: int) -> Iterator[int]:
    """Its neighbours from 1 to MAX_RANKS, the nearest first."""
    for step in range(1, number + 16):
        yield from (near for near in (number - step, number + step) if 1 <= near <= MAX_RANKS)


def nearest(config: K3Config, wanted: Layout, limit: int = 3) -> list[Layout]:
    """Possible layouts closest to `wanted`: with the same number of GPUs, else with the nearest numbers of GPUs."""
    factors = Factors.of(config)
    found = sorted(factors.layouts(wanted.ranks), key=lambda item: _distance(item, wanted))[:limit]
    for ranks in _around(wanted.ranks):
        if len(found) == limit:
            break
        possible = factors.layouts(ranks)
        if possible:
            found.append(min(possible, key=lambda item: _distance(item, wanted)))
    return found


def _distance(layout: Layout, wanted: Layout) -> tuple[float, Layout]:
    ratio = 1.0
    for found, meant in ((layout.tp, wanted.tp), (layout.ep, wanted.ep), (layout.pp, wanted.pp)):
        ratio *= max(found, meant) / min(found, meant)
    return ratio, layout


def divisors(number: int) -> list[int]:
    """Ascending."""
    small = [n for n in range(1, isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def _given(tp: int | None, ep: int | None, pp: int | None) -> str:
    return " x ".join(f"{name}{value}" for name, value in (("TP", tp), ("EP", ep), ("PP", pp)) if value is not None)


def _why(layout: Layout, free: list[str], count: int, node_gpus: int) -> str:
    if count == 1:
        given = " with what was given" if len(free) < 3 else ""
        return f"the only possible layout of {plural(layout.ranks, 'GPU')}{given}{straddling(layout, node_gpus)}"
    words: list[str] = []
    if layout.tp > 1:
        words.append(f"TP {layout.tp} {_where(layout, node_gpus)} and splits every large matrix")
    if layout.ep > 1:
        words.append(f"EP {layout.ep} deals out whole experts")
    if layout.pp > 1:
        words.append(f"PP {layout.pp} takes the rest" if "PP" in free else f"PP {layout.pp} as given")
    return f"chosen among {count} possible layouts ({', '.join(free)} free): {', '.join(words) or 'nothing is divided'}"


def _where(layout: Layout, node_gpus: int) -> str:
    placement = tp_placement(layout, node_gpus)
    if placement == INSIDE:
        return f"stays inside a node of {node_gpus}"
    if placement == WHOLE_NODES:
        return f"spans {layout.tp // node_gpus} whole nodes of {node_gpus}"
    return f"straddles nodes of {node_gpus}"
