"""How much memory each rank of a layout needs: weights by component, states and caches, activations.

Weights are counted with the same table that `reshard` cuts by (`k3tool.transform.split`), tensor by tensor, so that
what is planned is what will be written. Caches follow from the configuration. No tensor is read, torch is not needed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import NamedTuple

from k3tool import formats
from k3tool.catalog import COMPONENTS, count, expert_matrix_shapes, section_entries
from k3tool.checkpoint.header import dtype_bits
from k3tool.checkpoint.table import Kind
from k3tool.config import K3Config
from k3tool.declared import Declared
from k3tool.errors import CheckpointCorrupt, UnsupportedError
from k3tool.layout import Layout, Place, stages
from k3tool.names import TensorName, component_of, parse_name
from k3tool.transform.quantize_config import Storage
from k3tool.transform.split import EXPERT, Rule, Splitter

PREFILL_TOKENS = 8192
"""Tokens in flight on one rank during prefill, as serving engines batch them by default."""

KEEP = "keep"
_LATENT_MODULES = ("block_sparse_moe.routed_expert_down_proj", "block_sparse_moe.routed_expert_up_proj")


class Stored(NamedTuple):
    """A tensor of the checkpoint, or one that several layers (`layers`) and all `experts` of a layer hold alike; `name`
    is then that of the first. layers: empty outside the layers."""

    name: TensorName
    kind: Kind
    layers: tuple[int, ...] = ()
    experts: int = 1

    @property
    def nbytes(self) -> int:
        return _nbytes(self.kind.dtype, self.kind.shape) * self.experts * (len(self.layers) or 1)


class Inventory:
    """The tensors of one checkpoint, ready to be divided by any layout."""

    def __init__(self, config: K3Config, tensors: Iterable[Stored]) -> None:
        self.config = config
        self.tensors = list(tensors)
        self._splitter = Splitter(config)
        self._divided: dict[int, dict[tuple[TensorName, Rule], dict[str, int]]] = {}
        self._refused: dict[int, UnsupportedError] = {}  # by TP, as those above

    @classmethod
    def from_config(cls, config: K3Config, declared: Declared | None = None) -> Inventory:
        """What the configuration implies, stored as its `quantization_config` declares. What that leaves open, or
        cannot be, stands in `declared.open` afterwards."""
        declared = Declared(config) if declared is None else declared
        alike: dict[tuple[str, bool], list[int]] = defaultdict(list)
        for layer, kind in enumerate(config.layer_kinds):
            alike[kind, config.is_moe(layer)].append(layer)
        tensors: list[Stored] = []
        for layers in alike.values():
            tensors += _declared_tensors(config, declared, layers[0], layers)
        for section in _sections_beyond_layers(config):
            tensors += _declared_tensors(config, declared, section, [])
        return cls(config, tensors)

    @classmethod
    def from_tensors(cls, config: K3Config, tensors: Iterable[tuple[str, Kind]]) -> Inventory:
        """What the headers of a checkpoint hold. Raises CheckpointCorrupt for a name that the configuration does not
        imply, and where the experts of one layer are stored differently, so that ranks would differ."""
        experts: dict[tuple[TensorName, Kind], int] = defaultdict(int)
        for text, kind in tensors:
            name = parse_name(text) or _one_number(text, kind)
            if name is None or (name.layer is not None and name.layer >= config.num_layers):
                raise _unexpected(text)
            experts[name if name.expert is None else name._replace(expert=0), kind] += 1
        layers: dict[tuple[object, ...], list[Stored]] = defaultdict(list)
        for (name, kind), number in experts.items():
            if name.expert is not None and number != config.num_experts:
                raise CheckpointCorrupt(
                    f"{number} of {config.num_experts} experts of layer {name.layer} store {name.module}.{name.part} as "
                    f"{kind.dtype} {list(kind.shape)}",
                    hint="all experts of a layer must be stored alike; verify lists what is absent",
                )
            layer_kind = None if name.layer is None else config.layer_kinds[name.layer]
            layers[layer_kind, name._replace(layer=0), kind].append(Stored(name, kind, (), number))
        return cls(
            config,
            [
                held[0]._replace(layers=tuple(item.name.layer for item in held if item.name.layer is not None))
                for held in layers.values()
            ],
        )

    @property
    def total_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def storage(self, component: str) -> set[tuple[str, str, Kind]]:
        """Module, part and kind of every tensor of a component: equal where it is stored alike."""
        return {
            (tensor.name.module, tensor.name.part, tensor.kind)
            for tensor in self.tensors
            if self._component(tensor.name) == component
        }

    def with_schemes(self, experts: str = KEEP, latent: str = KEEP) -> Inventory:
        """The same checkpoint with routed experts or MoE latent projections stored under another scheme.

        Raises UnsupportedError where a scheme cannot hold the shapes, UsageError for an unknown scheme.
        """
        config = self.config
        shapes: dict[str, tuple[str, tuple[int, ...]]] = {}
        if experts != KEEP and config.moe_layers:
            for matrix, shape in expert_matrix_shapes(config).items():
                shapes[f"block_sparse_moe.experts.{matrix}"] = experts, shape
            config = replace(config, quantization=_QUANTIZATION.get(experts))
        if latent != KEEP and config.latent_size:
            down = (config.latent_size, config.hidden_size)
            for module, shape in zip(_LATENT_MODULES, (down, down[::-1]), strict=True):
                shapes[module] = latent, shape
        stored: list[Stored] = []
        seen: dict[str, set[int]] = defaultdict(set)
        for tensor in self.tensors:
            module = tensor.name.module
            if not tensor.layers or module not in shapes:
                stored.append(tensor)
                continue
            layers = tuple(layer for layer in tensor.layers if layer not in seen[module])
            seen[module].update(layers)
            scheme, shape = shapes[module]
            for part, (dtype, dims) in formats.stored_tensors(scheme, shape).items() if layers else ():
                name = tensor.name._replace(layer=layers[0], part=part)
                stored.append(Stored(name, Kind(dtype, dims), layers, tensor.experts))
        return Inventory(config, stored)

    def weights(self, layout: Layout, redundant: int = 0) -> list[dict[str, int]]:
        """Bytes by component of one rank of each PP stage. The TP and EP ranks of a stage hold equally much.

        redundant: experts of each layer that are held twice. Raises UnsupportedError where a tensor's storage cannot
        be divided so, CheckpointCorrupt for a shape or a name that the configuration does not imply.
        """
        result: list[dict[str, int]] = [dict.fromkeys(COMPONENTS, 0) for _ in range(layout.pp)]
        experts = self.config.num_experts
        for (name, rule), components in self._on_one_tp_rank(layout.tp).items():
            held, of = ((experts + redundant) // layout.ep, experts) if rule.owner == EXPERT else (1, 1)
            stages_of = self._splitter.owners(name, rule, replace(layout, ep=1))
            for stage, _ in stages_of:
                for component, nbytes in components.items():
                    result[stage][component] += nbytes * held // of
        return result

    def _on_one_tp_rank(self, tp: int) -> dict[tuple[TensorName, Rule], dict[str, int]]:
        """Bytes by component, summed over what has the same owners: a layer's tensors, a layer's experts, and the
        modules at either end. The key names one of the tensors and its rule."""
        if tp in self._refused:
            raise self._refused[tp]
        if tp not in self._divided:
            kept: dict[tuple[TensorName, Rule], dict[str, int]] = {}
            first: dict[tuple[int | None, str], tuple[TensorName, Rule]] = {}
            for tensor in self.tensors:
                rule = self._rule(tensor)
                try:
                    cut = self._splitter.cut(tensor.name, rule, tensor.kind, tp)
                except UnsupportedError as error:
                    self._refused[tp] = error
                    raise
                nbytes = _nbytes(tensor.kind.dtype, cut.shape(tensor.kind.shape)) * tensor.experts
                component = self._component(tensor.name)
                for layer in tensor.layers or (None,):
                    key = first.setdefault((layer, rule.owner), (tensor.name._replace(layer=layer), rule))
                    parts = kept.setdefault(key, {})
                    parts[component] = parts.get(component, 0) + nbytes
            self._divided[tp] = kept
        return self._divided[tp]

    def _component(self, name: TensorName) -> str:
        """As the catalogue says it: attention modules whose names both kinds share belong to their layer's kind."""
        if name.layer is not None and name.module.split(".")[0] == "self_attn":
            return self.config.layer_kinds[name.layer]
        return component_of(name)

    def _rule(self, tensor: Stored) -> Rule:
        rule = self._splitter.rule(tensor.name)
        if rule is None:
            raise _unexpected(str(tensor.name))
        return rule


def _one_number(text: str, kind: Kind) -> TensorName | None:
    """A number beside a matrix that engines read, such as a scale of what is cached (`k_proj.k_scale`)."""
    module, _, part = text.rpartition(".")
    owner = parse_name(f"{module}.weight") if part.endswith("scale") and prod(kind.shape) == 1 else None
    return None if owner is None else owner._replace(part=part)


def _declared_tensors(config: K3Config, declared: Declared, section: int, layers: list[int]) -> Iterator[Stored]:
    """The tensors of a section of the catalogue, of all `layers` that are like it, stored as declared."""
    experts = expert_matrix_shapes(config)
    for entry in section_entries(config, section):
        name = parse_name(entry.name)
        assert name is not None
        if name.expert is not None:
            # All parts of a matrix follow at its first; the first expert stands for all.
            matrix = name.module.rpartition(".")[2]
            if name.expert or matrix not in experts:
                continue
            kind, shape = None, experts.pop(matrix)
        else:
            kind, shape = Kind(entry.dtype, entry.shape), entry.shape
        matrix_like = kind is None or (name.part == "weight" and len(shape) == 2)
        stored: dict[Storage | None, list[int]] = defaultdict(list)
        for layer in layers or (None,):
            place = name._replace(layer=layer)
            stored[declared.storage(place) if matrix_like else None].append(-1 if layer is None else layer)
        for storage, where in stored.items():
            held = tuple(where) if layers else ()
            first = name._replace(layer=held[0] if held else None)
            if storage is None and kind is not None:
                yield Stored(first, kind, held)
                continue
            number = config.num_experts if kind is None else 1
            for part, (dtype, dims) in _parts(declared, storage, shape, config.dtype, first).items():
                yield Stored(first._replace(part=part), Kind(dtype, dims), held, number)


def _parts(
    declared: Declared, storage: Storage | None, shape: tuple[int, ...], dtype: str, name: TensorName
) -> dict[str, tuple[str, tuple[int, ...]]]:
    if storage is None:
        return {"weight": (dtype, shape)}
    group_size = storage.group_size if storage.scheme in ("int4", "int8") else None
    try:
        return formats.stored_tensors(storage.scheme, shape, group_size=group_size, dtype=dtype)
    except UnsupportedError:
        declared.cannot(storage, name.module)
        return {"weight": (dtype, shape)}


def _sections_beyond_layers(config: K3Config) -> range:
    """Globals, then projector and vision tower where there is vision (see `section_entries`)."""
    return range(config.num_layers, config.num_layers + (3 if config.vision else 1))


def _unexpected(name: str) -> CheckpointCorrupt:
    return CheckpointCorrupt(
        f"the configuration implies no tensor {name[:200]!r}",
        hint="config.json and shards are not of one checkpoint; inspect lists what does not belong",
    )


_QUANTIZATION = {"mxfp4": {"format": "mxfp4-pack-quantized"}, "nvfp4": {"format": "nvfp4-pack-quantized"}}


def _nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    return count(shape) * dtype_bits(dtype) // 8


@dataclass(frozen=True)
class Workload:
    """context: tokens per sequence. sequences: at once over the whole deployment; EP ranks deal them out."""

    context: int
    sequences: int

    def per_rank(self, layout: Layout) -> int:
        return -(-self.sequences // layout.ep)

    def tokens_in_flight(self, layout: Layout) -> int:
        """Of a prefill batch, or one for each sequence where that is more."""
        sequences = self.per_rank(layout)
        return max(sequences, min(PREFILL_TOKENS, sequences * self.context))


@dataclass(frozen=True)
class RankMemory:
    """What one rank holds, in bytes.

    weights: by component. kda_state: float32 states of its sequences. conv_history: bfloat16 inputs of the short
    convolutions. mla_cache: bfloat16 latents and shared key dimensions. activations: bfloat16 block snapshots and
    running sum of the tokens in flight.
    """

    place: Place
    weights: Mapping[str, int]
    kda_state: int
    conv_history: int
    mla_cache: int
    activations: int
    weights_bytes: int = field(init=False)
    total: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "weights_bytes", sum(self.weights.values()))
        caches = self.kda_state + self.conv_history + self.mla_cache + self.activations
        object.__setattr__(self, "total", self.weights_bytes + caches)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of weights, KDA state, convolution history, MLA cache, activations, and their sum."""
        parts = (self.weights_bytes, self.kda_state, self.conv_history, self.mla_cache, self.activations)
        return (*parts, self.total)

    def as_json(self) -> dict[str, object]:
        return {
            "rank": self.place.rank,
            "tp_rank": self.place.tp_rank,
            "ep_rank": self.place.ep_rank,
            "pp_rank": self.place.pp_rank,
            "weights_bytes": self.weights_bytes,
            "kda_state_bytes": self.kda_state,
            "conv_history_bytes": self.conv_history,
            "mla_cache_bytes": self.mla_cache,
            "activation_bytes": self.activations,
            "total_bytes": self.total,
            "components": {name: nbytes for name, nbytes in self.weights.items() if nbytes},
        }


def kda_state_bytes(config: K3Config, layers: Iterable[int], tp: int = 1) -> int:
    """float32 states [heads / tp, head_dim, head_dim] of one sequence: constant in its length."""
    return 4 * config.kda_num_heads // tp * config.kda_head_dim**2 * _kinds(config, layers, "kda")


def conv_history_bytes(config: K3Config, layers: Iterable[int], tp: int = 1) -> int:
    """bfloat16 inputs that the q, k and v convolutions still need, of one sequence."""
    return 2 * 3 * (config.conv_kernel_size - 1) * config.kda_size // tp * _kinds(config, layers, "kda")


def mla_cache_bytes(config: K3Config, layers: Iterable[int]) -> int:
    """bfloat16 latent and shared key dimensions of one token: whole on every TP rank, as all heads read them."""
    return 2 * config.mla_cache_width * _kinds(config, layers, "mla")


def activation_bytes(config: K3Config, layers: range) -> int:
    """bfloat16 snapshots and running sum of one token in flight, where the stage's last layer holds the most."""
    block = config.attn_res_block_size
    snapshots = 0 if block is None or not layers else (layers[-1] // block + 1)
    return 2 * config.hidden_size * (snapshots + 1)


def _kinds(config: K3Config, layers: Iterable[int], kind: str) -> int:
    return sum(config.layer_kinds[layer] == kind for layer in layers)


def stage_memory(inventory: Inventory, layout: Layout, workload: Workload, redundant: int = 0) -> list[RankMemory]:
    """The first rank of every PP stage; the other ranks of a stage hold equally much.

    redundant: experts of each layer that are held twice (see `layout.redundant_experts`).
    """
    config, sequences = inventory.config, workload.per_rank(layout)
    result: list[RankMemory] = []
    layers_of = stages(config.num_layers, layout.pp)
    for stage, weights in enumerate(inventory.weights(layout, redundant)):
        layers = layers_of[stage]
        result.append(
            RankMemory(
                place=layout.place(layout.rank_at(0, 0, stage)),
                weights=weights,
                kda_state=sequences * kda_state_bytes(config, layers, layout.tp),
                conv_history=sequences * conv_history_bytes(config, layers, layout.tp),
                mla_cache=sequences * workload.context * mla_cache_bytes(config, layers),
                activations=workload.tokens_in_flight(layout) * activation_bytes(config, layers),
            )
        )
    return result


def rank_memory(inventory: Inventory, layout: Layout, workload: Workload, redundant: int = 0) -> list[RankMemory]:
    """Every rank, in order."""
    by_stage = stage_memory(inventory, layout, workload, redundant)
    return [replace(by_stage[place.pp_rank], place=place) for place in layout.places()]
