"""What a checkpoint holds, from its headers alone: sizes by shard and component, and what the configuration misses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from k3tool.catalog import COMPONENTS, Catalog, catalog, count
from k3tool.checkpoint.header import TensorSpec, dtype_bits
from k3tool.checkpoint.index import INDEX_NAME
from k3tool.checkpoint.reader import Checkpoint
from k3tool.checkpoint.strays import stray_shards
from k3tool.conform import Conformance, conform
from k3tool.events import SILENT, Progress
from k3tool.garbage import collector_paused
from k3tool.layout import rank_folder, share_of
from k3tool.names import INPUT_SCALES, component_of, parse_name
from k3tool.transform.expected import expected
from k3tool.transform.forms import SubSource, open_form
from k3tool.transform.reshard import LAYOUT_NAME, RanksForm
from k3tool.units import plural

_NO_PARAMETERS = ("weight_scale", "weight_global_scale", "weight_scale_2", "weight_shape", "weight_zero_point",
                  *INPUT_SCALES, "weight.absmax", "weight.quant_map", "weight.nested_absmax")  # fmt: skip

_ABSENT = TensorSpec("", "U8", (0,), 0, 0)


@dataclass
class Component:
    tensors: int = 0
    parameters: int = 0
    bytes: int = 0


@dataclass
class Inspection:
    """headers: "read", "partial" (some shards absent) or "absent" (only the index is there; sizes are computed)."""

    source: str
    model_type: str
    layers: int
    tensors: int
    total_size: int
    shards: list[dict[str, Any]]
    components: dict[str, Component]
    conformance: Conformance
    headers: str
    missing_files: list[str] = field(default_factory=list)
    rank: str = ""  # "rank 1 of 4" for the folder of one rank
    ranks: str = ""  # "4 ranks, TP2 x EP2 x PP1" for a folder of ranks, described as the checkpoint that they make up
    misplaced: list[str] = field(default_factory=list)  # on which the index and the headers disagree
    strays: list[str] = field(default_factory=list)  # .safetensors files that the index does not name
    listed: list[dict[str, Any]] | None = None

    @property
    def whole(self) -> bool:
        """Whether the index, every header and the configuration agree on every tensor."""
        return self.conformance.ok and not self.misplaced

    @property
    def parameters(self) -> int:
        return sum(component.parameters for component in self.components.values())

    def as_json(self) -> dict[str, Any]:
        document: dict[str, Any] = {
            "source": self.source,
            "model_type": self.model_type,
            "layers": self.layers,
            "tensors": self.tensors,
            "total_size": self.total_size,
            "parameters": self.parameters,
            "headers": self.headers,
            "shards": self.shards,
            "components": {name: vars(component) for name, component in self.components.items()},
            "missing": self.conformance.missing,
            "unexpected": self.conformance.unexpected,
            "mismatched": self.conformance.mismatched,
            "missing_files": self.missing_files,
            "misplaced": self.misplaced,
            "stray_files": self.strays,
        }
        if self.listed is not None:
            document["listed"] = self.listed
        return document


def inspect(
    checkpoint: Checkpoint,
    *,
    pattern: str | None = None,
    layer: int | None = None,
    workers: int = 8,
    progress: Progress = SILENT,
) -> Inspection:
    """Read configuration, index and headers (by byte ranges) and compare them.

    pattern, layer: list the tensors whose name matches the glob, and lie in the layer. Raises CheckpointMissing,
    CheckpointCorrupt; a checkpoint without its shards is described from index and configuration.
    """
    with collector_paused():
        if INDEX_NAME not in checkpoint.files and LAYOUT_NAME in checkpoint.files:
            return _inspect_ranks(checkpoint, pattern, layer)
        return _inspect(checkpoint, pattern, layer, workers, progress)


def _inspect(
    checkpoint: Checkpoint, pattern: str | None, layer: int | None, workers: int, progress: Progress
) -> Inspection:
    config = checkpoint.config
    index = checkpoint.index
    share = share_of(config)
    present = [shard for shard in checkpoint.shards if shard in checkpoint.files]
    absent = [shard for shard in checkpoint.shards if shard not in checkpoint.files]
    load_headers(checkpoint, present, workers=workers, progress=progress)
    local, implied = expected(config, len(index.weight_map))
    found, misplaced = _found(checkpoint, present)
    components = _components(found, implied)
    return Inspection(
        source=checkpoint.source.label,
        model_type=config.model_type,
        layers=config.num_layers,
        tensors=len(found),
        total_size=sum(component.bytes for component in components.values()),
        shards=_shards(checkpoint),
        components=components,
        conformance=conform(local, implied, found),
        rank=f"rank {share[1].rank} of {share[0].ranks}" if share else "",
        headers="read" if not absent else "absent" if not present else "partial",
        missing_files=absent,
        misplaced=misplaced,
        strays=stray_shards(checkpoint.files, set(checkpoint.shards)),
        listed=_listed(found, implied, index.weight_map, pattern, layer)
        if pattern is not None or layer is not None
        else None,
    )


def _found(checkpoint: Checkpoint, present: Iterable[str]) -> tuple[dict[str, TensorSpec | None], list[str]]:
    """Every tensor that the index names and a header holds (None: its shard is absent); and the names of which only one
    of the two knows, or that they place differently."""
    there, weight_map = set(present), checkpoint.index.weight_map
    found: dict[str, TensorSpec | None] = dict.fromkeys(weight_map)
    misplaced: set[str] = set()
    held = 0
    for shard in there:
        for spec in checkpoint.header(shard).tensors:
            if weight_map.get(spec.name) == shard:
                found[spec.name] = spec
                held += 1
            else:
                misplaced.add(spec.name)
    if held < len(found):  # named, and in a shard that does not hold it
        misplaced.update(name for name, spec in found.items() if spec is None and weight_map[name] in there)
        found = {name: spec for name, spec in found.items() if spec is not None or weight_map[name] not in there}
    return found, sorted(misplaced)


def _inspect_ranks(checkpoint: Checkpoint, pattern: str | None, layer: int | None) -> Inspection:
    """A folder of ranks as the checkpoint that they make up. Raises where a rank is absent or another one's."""
    opened = open_form(checkpoint.source)
    form = opened.form
    assert isinstance(form, RanksForm), "an index is absent, so the layout file says ranks"
    config = checkpoint.config
    found: dict[str, TensorSpec | None] = {}
    for name, kind in form.items():
        found[name] = TensorSpec(name, kind.dtype, kind.shape, 0, count(kind.shape) * dtype_bits(kind.dtype) // 8)
    implied = catalog(config)
    components = _components(found, implied)
    folders = [rank_folder(rank, form.layout.ranks) for rank in range(form.layout.ranks)]
    return Inspection(
        source=checkpoint.source.label,
        model_type=config.model_type,
        layers=config.num_layers,
        tensors=len(found),
        total_size=sum(component.bytes for component in components.values()),
        shards=[
            {**shard, "name": f"{folder}/{shard['name']}"}
            for folder in folders
            for shard in _shards(Checkpoint(SubSource(checkpoint.source, folder)))
        ],
        components=components,
        conformance=conform(config, implied, found),
        ranks=f"{plural(form.layout.ranks, 'rank')}, {form.layout}",
        headers="read",
        listed=_listed(found, implied, {}, pattern, layer) if pattern is not None or layer is not None else None,
    )


def load_headers(checkpoint: Checkpoint, shards: list[str], *, workers: int, progress: Progress = SILENT) -> None:
    """Read the headers of `shards`; requests to a Hub overlap, local files are read one after the other."""
    local = not shards or checkpoint.source.local_path(shards[0]) is not None
    task = "read headers"
    progress.started(task, len(shards), "shards")
    if local:
        for shard in shards:
            checkpoint.header(shard)
            progress.advanced(task, 1)
    else:
        with ThreadPoolExecutor(workers) as pool:
            for _ in pool.map(checkpoint.header, shards):
                progress.advanced(task, 1)
    progress.finished(task)


def _shards(checkpoint: Checkpoint) -> list[dict[str, Any]]:
    tensors = Counter(checkpoint.index.weight_map.values())
    return [
        {"name": shard, "bytes": checkpoint.files.get(shard), "tensors": tensors[shard]} for shard in checkpoint.shards
    ]


def _components(found: Mapping[str, TensorSpec | None], expected: Catalog) -> dict[str, Component]:
    """Sizes by component. Where a header is absent (None), the configuration says what the tensor is."""
    components = {name: Component() for name in COMPONENTS}
    implied: dict[tuple[tuple[int, ...], str], int] = {}
    seen = 0
    for entry in expected.entries:
        spec = found.get(entry.name, _ABSENT)
        if spec is _ABSENT:
            continue
        seen += 1
        component = components[entry.component]
        component.tensors += 1
        if spec is None:
            key = (entry.shape, entry.dtype)
            size = implied.get(key)
            if size is None:
                size = implied[key] = entry.nbytes
        else:
            size = spec.end - spec.start
        component.bytes += size
        component.parameters += entry.parameters if spec is None or spec.shape == entry.shape else parameters_of(spec)
    if seen < len(found):
        names = {entry.name for entry in expected.entries}
        for name, spec in found.items():
            if name not in names and spec is not None:
                component = components.setdefault(component_of(parse_name(name)), Component())
                component.tensors += 1
                component.bytes += spec.end - spec.start
                component.parameters += parameters_of(spec)
    return components


def parameters_of(spec: TensorSpec) -> int:
    """Logical weights of one stored tensor: a 4-bit code counts one, scales and shapes count none."""
    if spec.name.endswith(_NO_PARAMETERS) or ".quant_state." in spec.name or ".nested_" in spec.name:
        return 0
    if spec.dtype == "U8" and spec.name.endswith((".weight_packed", ".weight")):
        return 2 * count(spec.shape)
    return count(spec.shape)


def _listed(
    found: Mapping[str, TensorSpec | None],
    expected: Catalog,
    weight_map: Mapping[str, str],
    pattern: str | None,
    layer: int | None,
) -> list[dict[str, Any]]:
    implied = {entry.name: entry for entry in expected.entries} if None in found.values() else {}
    rows: list[dict[str, Any]] = []
    for name in _matching(found, pattern, layer):
        tensor = found[name] or implied.get(name)
        rows.append(
            {
                "name": name,
                "dtype": tensor.dtype if tensor else None,
                "shape": list(tensor.shape) if tensor else None,
                "bytes": tensor.nbytes if tensor else None,
                "shard": weight_map.get(name),
            }
        )
    return rows


def _matching(names: Iterable[str], pattern: str | None, layer: int | None) -> Iterator[str]:
    for name in names:
        if pattern is not None and not fnmatchcase(name, pattern):
            continue
        if layer is not None:
            parsed = parse_name(name)
            if parsed is None or parsed.layer != layer:
                continue
        yield name
