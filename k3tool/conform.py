"""A checkpoint's tensors against what its configuration implies: missing, unexpected, of another shape or dtype.

A module may be stored in another scheme than the configuration's default (experts in NVFP4, latent projections in
NF4): it conforms when its parts together are one complete scheme of the right logical shape. Decided from names,
shapes and dtypes, never from the `ignore` list of a quantization_config.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from k3tool.catalog import Catalog, Entry, count
from k3tool.checkpoint.header import TensorSpec
from k3tool.config import K3Config
from k3tool.errors import K3Error
from k3tool.names import parse_name

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
    """Other spellings of the same values: `A_log` without padding, convolutions without their middle 1, and for
    Kimi Linear, whose float32 set is not fixed, float32 entries in the model's dtype."""
    dtype_ok = spec.dtype == entry.dtype or (
        not config.is_k3 and entry.dtype == "F32" and spec.dtype in (config.dtype, "F32")
    )
    if not dtype_ok:
        return False
    if entry.name.endswith(".A_log"):
        return count(spec.shape) in (config.kda_num_heads, config.a_log_size)
    if entry.name.endswith("_conv1d.weight"):
        return count(spec.shape) == count(entry.shape) and spec.shape[0] == entry.shape[0]
    return spec.shape == entry.shape


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
