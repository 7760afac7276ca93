"""A valid smaller checkpoint: chosen layers renumbered from 0, or the text model alone, with a configuration to match.

Planned from configuration, index and headers; tensors keep their order within each source shard, so that what is
wanted of a shard is a few merged ranges, and a shard that is wanted whole and unrenamed stays the published file.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from k3tool.checkpoint.header import Header
from k3tool.checkpoint.index import INDEX_NAME
from k3tool.checkpoint.reader import CONFIG_NAME, Located, read_header_text
from k3tool.config import K3Config
from k3tool.errors import UnsupportedError, UsageError
from k3tool.fetch.index_scan import scan_or_parse
from k3tool.fetch.local import FolderSource
from k3tool.fetch.structure import Structure
from k3tool.fetch.target import PackedText, Segment, Target, from_job, literal, whole_file
from k3tool.hub import HubSource
from k3tool.names import component_of, parse_name, shard_name
from k3tool.plan import Copy, carry, file_job

_LAYER_IN_PATTERN = re.compile(r"(layers(?:\\)?\.)(\d+)(?=(?:\\)?\.|$|\b)")


@dataclass(frozen=True)
class Choice:
    """What to keep. layers: source layers in ascending order, None for all. vision: keep tower and projector."""

    layers: tuple[int, ...] | None
    vision: bool

    def renamed(self, name: str, where: str) -> str | None:
        """The name of a tensor in the smaller checkpoint, None where it is left out. Raises UnsupportedError."""
        parsed = parse_name(name)
        if parsed is None:
            raise UnsupportedError(
                f"{where}: tensor {name} has a name that says neither layer nor part", hint="fetch the checkpoint whole"
            )
        if parsed.layer is None:
            return name if self.vision or component_of(parsed) != "vision" else None
        if self.layers is None:
            return name
        if parsed.layer not in self.layers:
            return None
        return str(parsed._replace(layer=self.layers.index(parsed.layer)))


def shrink_config(document: dict[str, Any], config: K3Config, choice: Choice) -> dict[str, Any]:
    """The configuration of the smaller checkpoint. Raises UnsupportedError where it cannot be expressed."""
    result = json.loads(json.dumps(document))
    if not choice.vision:
        result.pop("vision_config", None)
    if choice.layers is None:
        return result
    text = result["text_config"] if config.is_k3 else result
    kinds = [config.layer_kinds[layer] for layer in choice.layers]
    text["num_hidden_layers"] = len(kinds)
    linear = text["linear_attn_config"]
    if "kda_layers" in linear or "layer_types" not in text:
        linear["kda_layers"] = [number for number, kind in enumerate(kinds, 1) if kind == "kda"]
        linear["full_attn_layers"] = [number for number, kind in enumerate(kinds, 1) if kind == "mla"]
    for key, value in text.items():
        if key.startswith("layer_") and isinstance(value, list) and len(value) == config.num_layers:
            text[key] = [value[layer] for layer in choice.layers]
    text["first_k_dense_replace"] = _dense_layers(config, choice.layers)
    for holder in (result, text):
        if isinstance(holder.get("quantization_config"), dict):
            holder["quantization_config"] = _renumber(holder["quantization_config"], choice.layers)
    return result


def _dense_layers(config: K3Config, layers: Sequence[int]) -> int:
    """`first_k_dense_replace` under which every kept layer stays what it was."""
    moe = [config.is_moe(layer) for layer in layers]
    for first in range(len(moe) + 1):
        if all(is_moe == (n >= first and n % config.moe_layer_freq == 0) for n, is_moe in enumerate(moe)):
            return first
    dense = layers[moe.index(False, moe.index(True))] if True in moe else layers[0]
    raise UnsupportedError(
        f"layer {dense} is dense and would follow a MoE layer, which config.json cannot express "
        f"(moe_layer_freq {config.moe_layer_freq})",
        hint="choose layers so that dense ones come first",
    )


def _renumber(value: Any, layers: Sequence[int]) -> Any:
    """Layer numbers in module patterns follow the layers; patterns of layers that are left out go."""
    if isinstance(value, dict):
        return {key: _renumber(item, layers) for key, item in value.items()}
    if isinstance(value, list):
        kept = [_renumber(item, layers) for item in value]
        return [item for item in kept if item is not None]
    if isinstance(value, str):
        match = _LAYER_IN_PATTERN.search(value)
        if match:
            layer = int(match[2])
            if layer not in layers:
                return None
            return f"{value[: match.start(2)]}{layers.index(layer)}{value[match.end(2) :]}"
    return value


@dataclass(frozen=True)
class _Part:
    """One output shard: its target, the names of its tensors (JSON, compressed), how many, and their bytes."""

    shard: str
    target: Target
    names: bytes
    count: int
    data_bytes: int


def _index_text(names: Sequence[str], parts: Sequence[_Part]) -> Segment:
    text = PackedText()
    total = sum(part.data_bytes for part in parts)
    text.add(f'{{\n  "metadata": {{\n    "total_size": {total}\n  }},\n  "weight_map": {{')
    before = "\n"
    for shard, part in zip(names, parts, strict=True):
        for tensor in json.loads(zlib.decompress(part.names)):
            text.add(f"{before}    {json.dumps(tensor, ensure_ascii=False)}: {json.dumps(shard)}")
            before = ",\n"
    text.add("\n  }\n}\n")
    return text.segment()


class Shrinker:
    """Plans the targets of a smaller checkpoint of one commit. Reads every wanted header by range."""

    def __init__(
        self,
        source: HubSource | FolderSource,
        structure: Structure,
        choice: Choice,
        index: Callable[[], Iterator[bytes]],
    ):
        if structure.index is None:
            raise UnsupportedError(
                f"{source.label} has no {INDEX_NAME}: --layers and --text-only need one", hint="fetch it whole"
            )
        self.source = source
        self.structure = structure
        self.choice = choice
        self.index = index

    def targets(self, document: dict[str, Any], workers: int) -> list[Target]:
        """Shards, then the index and the configuration. Raises UnsupportedError, CheckpointCorrupt, RemoteError."""
        shards = self._wanted_shards()
        with ThreadPoolExecutor(max(1, min(workers, len(shards)))) as pool:
            try:
                parts = list(pool.map(self._shard, shards))
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                self.source.stop()
                raise
        kept = [part for part in parts if part is not None]
        if not kept:
            raise UsageError("nothing is left of the checkpoint", hint="choose at least one layer")
        names = [self._name(number, part, len(kept)) for number, part in enumerate(kept)]
        result = [replace(part.target, name=name) for name, part in zip(names, kept, strict=True)]
        result.append(Target(INDEX_NAME, (_index_text(names, kept),)))
        config = shrink_config(document, self.structure.config, self.choice)
        K3Config.from_dict(config, where="the configuration of the smaller checkpoint")
        text = json.dumps(config, indent=2, ensure_ascii=False).encode() + b"\n"
        result.append(Target(CONFIG_NAME, (literal(text),)))
        return result

    def _name(self, number: int, part: _Part, total: int) -> str:
        return part.shard if self.choice.layers is None else shard_name(number + 1, total)

    def _wanted_shards(self) -> list[str]:
        """Shards that hold anything that is kept, in order of name."""
        wanted: set[str] = set()
        label = self.source.label

        def each(name: str, shard: str) -> None:
            if shard not in wanted and self.choice.renamed(name, label) is not None:
                wanted.add(shard)

        scan_or_parse(self.index, f"{label}/{INDEX_NAME}", each)
        return sorted(wanted)

    def _shard(self, shard: str) -> _Part | None:
        """What is kept of one source shard."""
        file = self.source.remote(shard)
        text = read_header_text(self.source, shard, file.size)
        header: Header = self.structure.check_header(shard, text, file.size)
        copies: list[Copy] = []
        places: dict[str, Located] = {}
        unchanged = True
        for spec in header.tensors:
            new = self.choice.renamed(spec.name, f"{self.source.label}/{shard}")
            unchanged = unchanged and new == spec.name
            if new is not None:
                copies.append(carry(new, spec.dtype, spec.shape, source=spec.name))
                places[spec.name] = Located(spec, shard, header.data_start + spec.start)
        if not copies:
            return None
        job = file_job(shard, copies, metadata=header.metadata)
        names = zlib.compress(json.dumps([copy.output.name for copy in copies]).encode(), 1)
        target = whole_file(shard, file) if unchanged else from_job(job, places.__getitem__)
        return _Part(shard, target, names, len(copies), job.data_bytes)
