"""Opens what the user named as a source: a checkpoint under its original names, or a folder of ranks.

Everything that would make a job fail later is found here, before anything is written: names that the configuration
does not imply, absent tensors, shapes that differ, a rank that is not there.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from k3tool.catalog import Catalog, check_extent, section_entries
from k3tool.checkpoint.header import TensorSpec
from k3tool.checkpoint.index import INDEX_NAME
from k3tool.checkpoint.manifest import MANIFEST_NAME
from k3tool.checkpoint.note import RECLAIMED_NAME
from k3tool.checkpoint.origin import look, write_rank
from k3tool.checkpoint.reader import CONFIG_NAME, Checkpoint
from k3tool.checkpoint.source import LocalSource, Source
from k3tool.checkpoint.table import TensorTable
from k3tool.config import K3Config
from k3tool.conform import Conformance, conform, fused_error, fused_experts
from k3tool.errors import CheckpointCorrupt, CheckpointMissing, UsageError
from k3tool.layout import rank_folder, share_of
from k3tool.names import parse_name
from k3tool.transform.record import LayoutRecord, read_record
from k3tool.transform.reshard import LAYOUT_NAME, Form, RanksForm, RankTensors, WholeForm
from k3tool.transform.split import Splitter

SHOWN_NAMES = 5
DATA_SUFFIXES = (".json", ".model", ".jinja", ".txt", ".py")
MAX_DATA_BYTES = 64 << 20
VISION_PREFIXES = ("vision_tower.", "mm_projector.")


class Opened(NamedTuple):
    """source: as named. form: its logical tensors. splitter: the split table for its configuration.
    digest: of every name, kind and place. companions: files beside the weights, carried along unchanged."""

    source: Source
    form: Form
    splitter: Splitter
    digest: str
    companions: list[str]


class SubSource:
    """One folder of a source that has folders."""

    def __init__(self, source: Source, folder: str) -> None:
        self._source = source
        self._folder = folder
        self.label = f"{source.label}/{folder}"

    def files(self) -> dict[str, int]:
        path = self._source.local_path(self._folder)
        if path is not None:
            return LocalSource(path).files()
        prefix = self._folder + "/"
        return {name[len(prefix) :]: size for name, size in self._source.files().items() if name.startswith(prefix)}

    def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        return self._source.read(f"{self._folder}/{name}", offset, length)

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        self._source.read_into(f"{self._folder}/{name}", offset, buffer)

    def local_path(self, name: str) -> Path | None:
        return self._source.local_path(f"{self._folder}/{name}")


def open_form(source: Source) -> Opened:
    """Raises CheckpointMissing (10) and CheckpointCorrupt (11) naming what is absent, foreign or of another shape."""
    checkpoint = Checkpoint(source)
    config = checkpoint.config
    _refuse_single_rank(checkpoint)
    splitter = Splitter(config)
    record = None
    if LAYOUT_NAME in checkpoint.files:
        record = read_record(source)
    if record is not None and record.form == "ranks":
        form, digest = _open_ranks(source, config, splitter, record)
    else:
        table = TensorTable.of(checkpoint)
        form, digest = WholeForm(table, config, splitter), table.digest()
    check_conformance(config, form, source.label)
    return Opened(source, form, splitter, digest, companions(checkpoint.files))


def _refuse_single_rank(checkpoint: Checkpoint) -> None:
    here = share_of(checkpoint.config)
    if here is not None:
        raise UsageError(
            f"{checkpoint.source.label} is rank {here[1].rank} of {here[0].ranks}, not a whole checkpoint",
            hint="name the folder above it, which holds every rank and k3tool.json",
        )


def _open_ranks(source: Source, config: K3Config, splitter: Splitter, record: LayoutRecord) -> tuple[RanksForm, str]:
    folders = [rank_folder(rank, record.layout.ranks) for rank in range(record.layout.ranks)]
    tables: dict[int, TensorTable] = {}
    digest = hashlib.sha256(json.dumps([record.layout.as_json(), record.tensors]).encode())
    for rank, folder in enumerate(folders):
        try:
            checkpoint = Checkpoint(SubSource(source, folder))
            _check_rank(checkpoint, rank, record)
            tables[rank] = TensorTable.of(checkpoint)
        except CheckpointMissing as error:
            raise CheckpointMissing(
                f"{source.label} lacks rank {rank} of {len(folders)}: {error.message}",
                hint=write_rank(source.label, rank),
                rank=rank,
            ) from None
        digest.update(tables[rank].digest().encode())
    form = RanksForm(
        RankTensors(source, folders, tables), config, splitter, record.layout, {**record.joins, **record.exceptions}
    )
    return form, digest.hexdigest()


def _check_rank(checkpoint: Checkpoint, rank: int, record: LayoutRecord) -> None:
    """A folder must hold the rank that its name says: neighbours store the same names and shapes."""
    found = share_of(checkpoint.config)
    if found is None or found != (record.layout, record.layout.place(rank)):
        said = f"rank {found[1].rank} of {found[0].ranks} ({found[0]})" if found else "nothing of ranks"
        raise CheckpointCorrupt(
            f"{checkpoint.source.label}: its {CONFIG_NAME} says {said}, "
            f"{LAYOUT_NAME} says rank {rank} of {record.layout.ranks} ({record.layout})",
            hint="put every rank's folder back under its own name, or write the ranks again",
        )


def companions(files: Mapping[str, int]) -> list[str]:
    """Files that belong to a checkpoint beside its weights: tokenizer, generation settings, licence, ..."""
    ours = {CONFIG_NAME, INDEX_NAME, MANIFEST_NAME, LAYOUT_NAME, RECLAIMED_NAME}
    return sorted(
        name
        for name in files
        if name not in ours
        and not name.startswith(".")
        and not name.endswith((".safetensors", ".k3partial"))
        and not any(char in name for char in "/\\\0")
    )


def data_companions(names: Sequence[str], sizes: Mapping[str, int]) -> list[str]:
    """Those companions that a rank's folder gets too, so that a node needs no other: tokenizer, chat template,
    generation settings. Not the model card, not pictures."""
    return [
        name
        for name in names
        if name.endswith(DATA_SUFFIXES) and not name.startswith("k3tool") and sizes.get(name, 0) <= MAX_DATA_BYTES
    ]


def check_conformance(config: K3Config, form: Form, label: str) -> None:
    """Every tensor that the configuration implies, in any complete storage scheme, and no other."""
    names: dict[int | None, list[str]] = defaultdict(list)
    foreign: list[str] = []
    has_vision = False
    for text, _ in form.items():
        name = parse_name(text)
        if name is None or (name.layer is not None and name.layer >= config.num_layers):
            foreign.append(text)
            continue
        has_vision = has_vision or text.startswith(VISION_PREFIXES)
        names[name.layer].append(text)
    check_extent(config, sum(map(len, names.values())))
    found = Conformance(unexpected=foreign)
    sections: dict[int | None, list[int]] = {layer: [layer] for layer in range(config.num_layers)}
    sections[None] = [config.num_layers, *([config.num_layers + 1, config.num_layers + 2] if has_vision else [])]
    if has_vision and config.vision is None:
        found.unexpected.extend(text for text in names[None] if text.startswith(VISION_PREFIXES))
        names[None] = [text for text in names[None] if not text.startswith(VISION_PREFIXES)]
        sections[None] = [config.num_layers]
    for layer, numbers in sections.items():
        expected = Catalog([entry for number in numbers for entry in section_entries(config, number)], [])
        specs = {text: TensorSpec(text, *form.kind(text), 0, 0) for text in names.pop(layer, [])}
        part = conform(config, expected, specs)
        found.missing.extend(part.missing)
        found.unexpected.extend(part.unexpected)
        found.mismatched.update(part.mismatched)
    _refuse(found, label)


def _refuse(found: Conformance, label: str) -> None:
    fused = fused_experts(found.unexpected)
    if fused:
        raise fused_error(label, fused)
    if found.unexpected:
        raise CheckpointCorrupt(
            f"{label} holds {len(found.unexpected):,} tensors that its configuration does not imply: "
            + _some(found.unexpected),
            hint=f"check that config.json belongs to these shards; {look(label)}",
            unexpected=found.unexpected[:1000],
        )
    if found.mismatched:
        name, what = next(iter(found.mismatched.items()))
        raise CheckpointCorrupt(
            f"{label}: {len(found.mismatched):,} tensors differ from the configuration; {name}: {what}",
            hint=f"check that config.json belongs to these shards; {look(label)}",
            mismatched=dict(list(found.mismatched.items())[:1000]),
        )
    if found.missing:
        raise CheckpointMissing(
            f"{label} lacks {len(found.missing):,} tensors that its configuration implies: {_some(found.missing)}",
            hint=look(label),
            missing=found.missing[:1000],
        )


def _some(names: list[str]) -> str:
    shown = ", ".join(name[:200] for name in names[:SHOWN_NAMES])
    return shown + (", ..." if len(names) > SHOWN_NAMES else "")


__all__ = ["Opened", "check_conformance", "companions", "data_companions", "open_form"]
