"""From one division of a checkpoint to another: where each piece of each tensor comes from.

A source is either a checkpoint under its original names (`WholeForm`) or a folder of ranks (`RanksForm`). Both give
the same logical tensors and can say which regions hold a window of one, so that every output, whole or divided in any
other way, is composed directly from source ranges.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

from k3tool.checkpoint.reader import Located
from k3tool.checkpoint.source import Source
from k3tool.checkpoint.table import Kind, Tensors, TensorTable
from k3tool.config import K3Config
from k3tool.errors import CheckpointCorrupt, CheckpointMissing
from k3tool.layout import Layout
from k3tool.names import TensorName
from k3tool.plan import FileJob, LazySteps
from k3tool.transform.base import Applied, Compute, Copy, Region, Step, TensorOut, Zeros, whole
from k3tool.transform.split import Cut, Rule, Splitter, parsed, unit_of

LAYOUT_NAME = "k3tool.json"


class Form(Protocol):
    """A source as logical tensors: names, kinds of the whole tensors, and where windows of them are."""

    config: K3Config
    layout: Layout

    @property
    def tensors(self) -> Tensors: ...

    def items(self) -> Iterator[tuple[str, Kind]]:
        """Name and kind of every logical tensor, each once, in any order."""
        ...

    def kind(self, name: str) -> Kind: ...

    def regions(self, name: TensorName, kind: Kind, rule: Rule, first: int, last: int) -> tuple[Region, ...]:
        """What holds the content [first, last) along the axis that TP divides."""
        ...

    def one(self, name: TensorName, kind: Kind, rule: Rule) -> Region:
        """All that is stored of a tensor that ranks hold whole."""
        ...

    def padding_is_ours(self) -> bool:
        """Whether k3tool itself wrote the padding, so that it is known to be zero."""
        ...


class WholeForm:
    """A checkpoint under its original names."""

    layout = Layout()

    def __init__(self, table: TensorTable, config: K3Config, splitter: Splitter) -> None:
        self.config = config
        self._table = table
        self._splitter = splitter

    @property
    def tensors(self) -> TensorTable:
        return self._table

    def items(self) -> Iterator[tuple[str, Kind]]:
        return self._table.items()

    def kind(self, name: str) -> Kind:
        return self._table.kind(name)

    def regions(self, name: TensorName, kind: Kind, rule: Rule, first: int, last: int) -> tuple[Region, ...]:
        if first == last:
            return ()
        axis = self._splitter.cut(name, rule, kind, 1).axis or 0
        return (Region(str(name), kind.dtype, kind.shape, axis, first, last),)

    def one(self, name: TensorName, kind: Kind, rule: Rule) -> Region:
        return whole(str(name), kind.dtype, kind.shape)

    def padding_is_ours(self) -> bool:
        return False


class RankTensors:
    """Tensors of all rank folders of one source, under `RANK/NAME`."""

    def __init__(self, source: Source, folders: Sequence[str], tables: Mapping[int, TensorTable]) -> None:
        self._source = source
        self._folders = folders
        self.tables = tables

    @property
    def source(self) -> Source:
        return self._source

    def locate(self, name: str) -> Located:
        rank, _, tensor = name.partition("/")
        place = self.tables[int(rank)].locate(tensor)
        return Located(place.spec, f"{self._folders[int(rank)]}/{place.shard}", place.offset)


class Join(NamedTuple):
    """How the pieces of a role (or of one exceptional tensor) become one again: joined along `axis` up to `stored`,
    cut or filled with zeros beyond `content`; axis None: every piece is the whole."""

    split: str
    axis: int | None
    stored: int
    content: int


class RanksForm:
    """A folder of ranks that k3tool wrote: pieces of logical tensors."""

    def __init__(
        self,
        tensors: RankTensors,
        config: K3Config,
        splitter: Splitter,
        layout: Layout,
        joins: Mapping[str, Join],
    ) -> None:
        self.config = config
        self.layout = layout
        self._tensors = tensors
        self._splitter = splitter
        self._joins = joins
        self._kinds: dict[tuple[Any, ...], Kind] = {}

    @property
    def tensors(self) -> RankTensors:
        return self._tensors

    def padding_is_ours(self) -> bool:
        return True

    def items(self) -> Iterator[tuple[str, Kind]]:
        """Each tensor once: from the first of the ranks that hold it. Pieces of TP neighbours are checked alike."""
        for rank in sorted(self._tensors.tables):
            place = self.layout.place(rank)
            for text in self._tensors.tables[rank]:
                name = parsed(text)
                rule = self._rule(name)
                if not self._splitter.holds(name, rule, self.layout, place):
                    raise CheckpointCorrupt(
                        f"rank {rank} holds {text}, which belongs to another rank of {self.layout}",
                        hint="write the ranks again",
                    )
                stage, ep = self._splitter.owners(name, rule, self.layout)[0]
                if place.tp_rank == 0 and (place.pp_rank, place.ep_rank) == (stage, ep or 0):
                    self._check_neighbours(name, rule, rank)
                    yield text, self._whole_kind(name, rule, rank)

    def kind(self, name: str) -> Kind:
        found = parsed(name)
        rule = self._rule(found)
        return self._whole_kind(found, rule, self._rank(found, rule, 0))

    def _rule(self, name: TensorName) -> Rule:
        rule = self._splitter.rule(name)
        if rule is None:
            raise CheckpointCorrupt(
                f"{name} is no tensor that this configuration implies",
                hint="config.json and shards are not of one checkpoint; inspect lists what is unexpected",
            )
        return rule

    def _rank(self, name: TensorName, rule: Rule, tp_rank: int) -> int:
        stage, ep = self._splitter.owners(name, rule, self.layout)[0]
        return self.layout.rank_at(tp_rank, ep or 0, stage)

    def _piece(self, name: TensorName, rank: int) -> Kind:
        try:
            return self._tensors.tables[rank].kind(str(name))
        except KeyError:
            raise CheckpointMissing(
                f"rank {rank} lacks tensor {name}",
                hint=f"write that rank again: reshard its source into this folder with --rank {rank}",
            ) from None

    def _whole_kind(self, name: TensorName, rule: Rule, rank: int) -> Kind:
        """The kind of the whole tensor, from one rank's piece."""
        piece = self._piece(name, rank)
        key = (self._splitter.role(name), name.part, piece, self._joins.get(str(name)))
        if key not in self._kinds:
            self._kinds[key] = self._join_kind(name, rule, piece)
        return self._kinds[key]

    def _check_neighbours(self, name: TensorName, rule: Rule, rank: int) -> None:
        """All TP ranks must hold their piece, and store it alike."""
        piece = self._piece(name, rank)
        for tp_rank in range(1, self.layout.tp):
            other = self._piece(name, self._rank(name, rule, tp_rank))
            if other != piece:
                raise CheckpointCorrupt(
                    f"{name}: rank {rank} stores {piece.dtype} {list(piece.shape)}, its TP neighbour {tp_rank} "
                    f"{other.dtype} {list(other.shape)}",
                    hint="write the ranks again",
                )

    def _join_kind(self, name: TensorName, rule: Rule, piece: Kind) -> Kind:
        """Raises CheckpointCorrupt where the layout file does not know the role or the piece has another extent."""
        join = self._joins.get(str(name)) or self._joins.get(role_key(self._splitter, name))
        if join is None:
            raise CheckpointCorrupt(f"{LAYOUT_NAME} does not say how {name} joins", hint="write the ranks again")
        kind = piece
        if join.axis is not None and join.axis < len(piece.shape):
            kind = Kind(piece.dtype, _with(piece.shape, join.axis, join.stored))
        expected = self._splitter.cut(name, rule, kind, self.layout.tp).shape(kind.shape)
        if expected != piece.shape:
            raise CheckpointCorrupt(
                f"{name}: a rank stores {list(piece.shape)}, {LAYOUT_NAME} says {list(expected)}",
                hint="write the ranks again",
            )
        return kind

    def regions(self, name: TensorName, kind: Kind, rule: Rule, first: int, last: int) -> tuple[Region, ...]:
        cut = self._splitter.cut(name, rule, kind, self.layout.tp)
        assert cut.axis is not None
        shape = cut.shape(kind.shape)
        found: list[Region] = []
        for tp_rank in range(self.layout.tp):
            begin, end = cut.window(tp_rank)
            low, high = max(first, begin), min(last, end)
            if low < high:
                source = f"{self._rank(name, rule, tp_rank)}/{name}"
                found.append(Region(source, kind.dtype, shape, cut.axis, low - begin, high - begin))
        return tuple(found)

    def one(self, name: TensorName, kind: Kind, rule: Rule) -> Region:
        return whole(f"{self._rank(name, rule, 0)}/{name}", kind.dtype, kind.shape)


def in_order(form: Form) -> Iterator[tuple[str, TensorName]]:
    """All logical tensors in the order in which outputs hold them, whatever the source's own order: layer by layer
    (what is outside the layers last), experts by number after the rest, names in between."""
    layers: dict[int, list[tuple[int, str]]] = {}
    for text, _ in form.items():
        name = parsed(text)
        layer = form.config.num_layers if name.layer is None else name.layer
        layers.setdefault(layer, []).append((-1 if name.expert is None else name.expert, text))
    for layer in sorted(layers):  # parsed again: half a million parsed names would outweigh everything else
        yield from ((text, parsed(text)) for _, text in sorted(layers.pop(layer)))


class Resharder:
    """Steps of the tensors of one form for the ranks of one target layout."""

    def __init__(self, form: Form, splitter: Splitter, target: Layout) -> None:
        self.form = form
        self.splitter = splitter
        self.target = target
        self._cuts: dict[tuple[Any, ...], tuple[Cut, Cut]] = {}

    def cuts(self, name: TensorName, rule: Rule, kind: Kind) -> tuple[Cut, Cut]:
        """How the source and the target divide a tensor."""
        key = (rule, name.part, kind)
        found = self._cuts.get(key)
        if found is None:
            here = self.splitter.cut(name, rule, kind, self.form.layout.tp)
            found = self._cuts[key] = (here, self.splitter.cut(name, rule, kind, self.target.tp))
        return found

    def load(self) -> int:
        """Bring in what the steps use, for `k3tool.execute.Options`."""
        return 0

    def rule(self, name: TensorName) -> Rule:
        rule = self.splitter.rule(name)
        if rule is None:
            raise CheckpointCorrupt(
                f"{name} is no tensor that this configuration implies",
                hint="config.json and shards are not of one checkpoint; inspect lists what is unexpected",
            )
        return rule

    def unit(self, text: str) -> str:
        """Tensors of equal units stay in one file."""
        return unit_of(text)

    def output(self, text: str) -> TensorOut:
        """What each rank that holds the tensor stores of it (all of them alike)."""
        name = parsed(text)
        kind = self.form.kind(text)
        return TensorOut(text, kind.dtype, self.cuts(name, self.rule(name), kind)[1].shape(kind.shape))

    def step(self, text: str, tp_rank: int) -> Step:
        """The step that makes what `tp_rank` of the target stores of one logical tensor."""
        name = parsed(text)
        rule = self.rule(name)
        kind = self.form.kind(text)
        here, there = self.cuts(name, rule, kind)
        output = TensorOut(text, kind.dtype, there.shape(kind.shape))
        if name.part == "weight_shape" and rule.axis is not None and self.form.layout.tp != self.target.tp:
            scale = ScaleShape(rule.axis, self.form.layout.tp, self.target.tp)
            return Compute((output,), (self.form.one(name, kind, rule),), scale)
        if there.axis is None or (here == there and self.form.layout.tp == self.target.tp == 1):
            return Copy(output, (self.form.one(name, kind, rule),))
        first, last = there.window(tp_rank)
        padding = there.kept - (last - first)
        if there.stored != there.content and not self.form.padding_is_ours():
            source = self.form.one(name, kind, rule)
            whole_bytes, held = source.nbytes, Padded(there.stored, there.kept, first, last)
            return Compute((output,), (source,), CheckPadding(text, there.stored, there.content), 0, held, whole_bytes)
        regions = self.form.regions(name, kind, rule, first, last)
        return Copy(output, (*regions, *((Zeros(padding),) if padding else ())), there.axis)

    def jobs(
        self, paths: Sequence[str], names: Sequence[str], places: Sequence[int], size: int, *, batch: str = ""
    ) -> list[FileJob]:
        """The file of these tensors, `size` bytes of them, for each TP rank. places: of the names, among all tensors."""
        return [
            FileJob(
                path,
                LazySteps(names, partial(self.step, tp_rank=share)),
                size,
                size,
                batch=batch,
                places=places,
                share=share,
            )
            for share, path in enumerate(paths)
        ]


@dataclass(frozen=True)
class ScaleShape:
    """A stored logical shape (`weight_shape`) for another number of TP ranks."""

    axis: int
    source_tp: int
    target_tp: int

    def describe(self) -> str:
        return f"shape axis {self.axis} times {self.source_tp} over {self.target_tp}"

    def apply(self, inputs: Sequence[Any]) -> Applied:
        width = len(inputs[0]) // 2
        sizes = [int.from_bytes(bytes(inputs[0][k * width : (k + 1) * width]), "little") for k in range(2)]
        total = sizes[self.axis] * self.source_tp
        if total % self.target_tp:
            raise CheckpointCorrupt(
                f"a stored weight_shape {sizes} does not divide by {self.target_tp}", hint="verify the source"
            )
        sizes[self.axis] = total // self.target_tp
        return Applied([b"".join(size.to_bytes(width, "little") for size in sizes)])


@dataclass(frozen=True)
class CheckPadding:
    """A padded one-dimensional tensor whose `stored` entries beyond `content` must be zero."""

    name: str
    stored: int
    content: int

    def describe(self) -> str:
        return f"zero padding from {self.content} to {self.stored}"

    def apply(self, inputs: Sequence[Any]) -> Applied:
        width = len(inputs[0]) // self.stored
        if inputs[0][self.content * width :].any():
            raise CheckpointCorrupt(
                f"{self.name}: the entries from {self.content} to {self.stored} pad it and must be zero",
                hint="verify the source: k3tool verify --depth bytes",
            )
        return Applied([inputs[0]])


@dataclass(frozen=True)
class Padded:
    """Entries [first, last) of the `stored` ones, with zeros up to `kept` entries."""

    stored: int
    kept: int
    first: int
    last: int

    def take(self, made: Sequence[Any]) -> Iterator[Any]:
        width = len(made[0]) // self.stored
        held = bytes(made[0][self.first * width : self.last * width])
        yield held + bytes(self.kept * width - len(held))


def role_key(splitter: Splitter, name: TensorName) -> str:
    """A role as the layout file spells it: `kda/self_attn.o_proj.weight`."""
    kind, module = splitter.role(name)
    return f"{kind}/{module}" if name.part in ("A_log", "dt_bias") else f"{kind}/{module}.{name.part}"


def _with(shape: tuple[int, ...], axis: int, size: int) -> tuple[int, ...]:
    return (*shape[:axis], size, *shape[axis + 1 :])


__all__ = [
    "LAYOUT_NAME",
    "CheckPadding",
    "Form",
    "Join",
    "RankTensors",
    "RanksForm",
    "Resharder",
    "WholeForm",
    "in_order",
    "role_key",
]
