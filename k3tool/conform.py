"""A checkpoint's tensors against what its configuration implies: missing, unexpected, of another shape or dtype.

A module may be stored in another scheme than the configuration's default (experts in NVFP4, latent projections in
NF4): it conforms when its parts together are one complete scheme of the right logical shape. Decided from names,
shapes and dtypes, never from the `ignore` list of a quantization_config.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from k3tool.catalog import Catalog, Entry, count, section_entries
from k3tool.checkpoint.header import TensorSpec
from k3tool.config import K3Config
from k3tool.errors import CheckpointCorrupt, K3Error
from k3tool.names import INPUT_SCALES, parse_name

_FUSED = re.compile(r"\.experts\.(?!\d)[A-Za-z_]")
_FLOATS = ("F32", "BF16", "F16")
_ABSENT = TensorSpec("", "U8", (0,), 0, 0)


@dataclass
class Conformance:
    """missing, unexpected: names. mismatched: name to `expected ..., found ...`. schemes: module path to scheme."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    mismatched: dict[str, str] = field(default_factory=dict)
    schemes: dict[str, str] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return not (self.missing or self.unexpected or self.mismatched)


def fused_experts(names: Iterable[str]) -> str:
    """The first name that holds all routed experts of a layer in one tensor (`experts.gate_up_proj`); empty: none."""
    return next((name for name in names if _FUSED.search(name)), "")


FLOAT_HINT = (
    "its bytes are what their maker wrote, another download brings the same: store the tensor in the type that "
    "config.json names, or in float32"
)
FUSED_HINT = (
    "its bytes are what their maker wrote, another download brings the same: take the checkpoint whose experts are "
    "tensors of their own, or split them by the tool that fused them"
)


def fused_error(label: str, name: str) -> CheckpointCorrupt:
    """The failure for a checkpoint whose experts are fused, the same for every command."""
    return CheckpointCorrupt(
        f"{label}: its routed experts are stored fused, all of a layer in one tensor ({name}), as transformers 5 saves "
        "them; k3tool reads one tensor for each expert (experts.0.w1, ...)",
        hint=FUSED_HINT,
        tensor=name,
    )


def conform(config: K3Config, expected: Catalog, found: Mapping[str, TensorSpec | None]) -> Conformance:
    """Compare. `found` maps each present name to its spec, or to None where only names are known."""
    result = Conformance()
    suspects: list[Entry] = []
    absent = 0
    for entry in expected.entries:
        spec = found.get(entry.name, _ABSENT)
        if spec is _ABSENT:
            absent += 1
            suspects.append(entry)
            continue
        if spec is None or (spec.shape == entry.shape and spec.dtype == entry.dtype):
            continue
        if not _tolerated(config, entry, spec):
            suspects.append(entry)
    extra: set[str] = set()
    names: set[str] = set()
    if len(expected.entries) - absent < len(found):
        names = {entry.name for entry in expected.entries}
        extra = set(found) - names
    if suspects or extra:
        _settle(suspects, extra, names, found, result)
    return result


def _tolerated(config: K3Config, entry: Entry, spec: TensorSpec) -> bool:
    """Other spellings of the same values: `A_log` without padding, convolutions without their middle 1, and plain
    tensors in another float type of which one holds every value of the other (see `same_values`)."""
    if not same_values(entry.dtype, spec.dtype):
        return False
    if entry.name.endswith(".A_log"):
        return count(spec.shape) in (config.kda_num_heads, config.a_log_size)
    if entry.name.endswith("_conv1d.weight"):
        return count(spec.shape) == count(entry.shape) and spec.shape[0] == entry.shape[0]
    return spec.shape == entry.shape


def same_values(expected: str, found: str) -> bool:
    """Whether a plain tensor may be stored as `found` where `expected` is what the configuration implies: float32 and
    either 16-bit float hold what was meant; bfloat16 and float16 do not hold each other's values."""
    return expected == found or ("F32" in (expected, found) and {expected, found} <= {"F32", "BF16", "F16"})


def foreign_float(config: K3Config, specs: Iterable[TensorSpec]) -> str:
    """`NAME: expected BF16 ..., found F16 ...` for the first plain tensor in the other 16-bit float, else empty.

    specs: of tensors in bfloat16 or float16 other than the configuration's own dtype."""
    for spec in specs:
        parsed = parse_name(spec.name)
        for section in [parsed.layer] if parsed and parsed.layer is not None else [config.num_layers]:
            for entry in section_entries(config, section):
                if entry.name == spec.name and not same_values(entry.dtype, spec.dtype):
                    return f"{spec.name}: expected {entry.dtype} {list(entry.shape)}, found {spec.dtype} {list(spec.shape)}"
    return ""


def _settle(
    suspects: list[Entry], extra: set[str], names: set[str], found: Mapping[str, TensorSpec | None], result: Conformance
) -> None:
    """Modules stored in another complete scheme are fine; what is left is missing, mismatched or unexpected."""
    parts: dict[str, dict[str, TensorSpec | None]] = defaultdict(dict)
    logical: dict[str, tuple[int, ...]] = {}
    owner: dict[str, str] = {}
    for name in [*(entry.name for entry in suspects), *extra]:
        parsed = parse_name(name)
        owner[name] = parsed.module_path if parsed else name
    for entry in suspects:
        parsed = parse_name(entry.name)
        if parsed and parsed.part == "weight":
            logical[owner[entry.name]] = entry.shape
        elif parsed and parsed.part == "weight_packed":
            logical[owner[entry.name]] = (entry.shape[0], entry.shape[1] * 2)
    modules = set(owner.values())
    for name, spec in found.items():
        parsed = parse_name(name) if name in owner or name.rsplit(".", 1)[0] in modules else None
        if parsed and parsed.module_path in modules:
            parts[parsed.module_path][parsed.part] = spec
    implied = {owner[entry.name] for entry in suspects}
    implied.update(m for m in modules if f"{m}.weight" in names or f"{m}.weight_packed" in names)
    plain = {owner[entry.name] for entry in suspects if entry.name.endswith(".weight")}
    settled: dict[str, str | None] = {}
    for module in modules:
        same_scheme = module in plain and set(parts[module]) == {"weight"}  # only its shape or dtype can be wrong
        settled[module] = None if same_scheme or module not in implied else _scheme(parts[module], logical.get(module))
        scheme = settled[module]
        if scheme:
            result.schemes[module] = scheme
    for entry in suspects:
        if settled[owner[entry.name]]:
            continue
        spec = found.get(entry.name)
        if spec is None:
            result.missing.append(entry.name)
        else:
            shapes = f"expected {entry.dtype} {list(entry.shape)}, found {spec.dtype} {list(spec.shape)}"
            result.mismatched[entry.name] = shapes
    result.unexpected = sorted(name for name in extra if not settled[owner[name]])


def _scheme(parts: Mapping[str, TensorSpec | None], shape: tuple[int, ...] | None) -> str | None:
    """The scheme that these parts make up completely, or None. Without headers the names alone decide."""
    from k3tool import formats

    inputs = [spec for part, spec in parts.items() if part in INPUT_SCALES]
    if any(spec is not None and (count(spec.shape) != 1 or spec.dtype not in _FLOATS) for spec in inputs):
        return None
    parts = {part: spec for part, spec in parts.items() if part not in INPUT_SCALES}
    specs = {part: spec for part, spec in parts.items() if spec is not None}
    if len(specs) < len(parts):
        known = {frozenset(formats.stored_tensors(scheme, (256, 256))): scheme for scheme in formats.SCHEMES}
        return known.get(frozenset(parts))
    try:
        scheme = formats.detect(specs, shape=shape)
    except K3Error:
        return None
    logical = formats.logical_shape(scheme, specs)
    if shape is None or logical is None:
        return scheme
    return scheme if logical == tuple(shape) else None
