"""What a `quantization_config` says about how matrices are stored: module by module, and what it leaves open.

The headers of a checkpoint decide what is stored; this is for configurations without them. Read as the libraries that
write such sections do: compressed-tensors (`config_groups`, `targets`, `ignore`), FP8 in blocks, ModelOpt, bitsandbytes,
and what k3tool itself adds where one section cannot say everything.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any

from k3tool.config import K3Config
from k3tool.names import TensorName
from k3tool.transform.quantize_config import SECTION, Storage

Matcher = Callable[[str], bool]

MAX_PATTERNS = 10_000
_MAX_PATTERN = 4000  # characters; layers are listed one by one in some
_NOT_LINEAR = re.compile(r"(^|\.)(embed_tokens|gate|\w*norm\w*|\w+_res_proj|\w+_conv1d|pos_emb|patch_embed\.proj)$")
_PRESETS = {
    "MXFP4": Storage("mxfp4"),
    "MXFP4A16": Storage("mxfp4"),
    "NVFP4": Storage("nvfp4"),
    "NVFP4A16": Storage("nvfp4"),
    "FP8_BLOCK": Storage("fp8-block"),
    "FP8_DYNAMIC": Storage("fp8-channel"),
    "W8A16": Storage("int8"),
    "W4A16": Storage("int4", 128),
}
_GROUPED = ("int8", "int4")


class Declared:
    """storage(name): how a configuration says that the matrix of `name` is stored, None for plain.

    open: what the configuration leaves unsaid or says in a way that is not understood, one line each.
    """

    def __init__(self, config: K3Config) -> None:
        self.open: list[str] = []
        self._others: list[tuple[Matcher, Storage]] = []  # beside the section: what it cannot say
        self._named: list[tuple[Matcher, Storage]] = []
        self._wide: Storage | None = None
        self._ignored: Matcher = _nothing
        self._experts_only = False
        self._spellings = _spellings
        self._know_others(config.raw.get(SECTION))
        quantization = config.quantization
        method = ""
        if quantization:
            method = str(quantization.get("quant_method") or "compressed-tensors").lower()
            reader = _READERS.get(method)
            if reader is None:
                self._unknown(f"quant_method {method[:40]!r}")
            else:
                reader(self, quantization)
        if method == "compressed-tensors" and self._wide is not None and config.moe_layers:
            # A list that does not even leave out the router, which nothing stores quantized, speaks of experts alone.
            router = f"{config.name_prefix}model.layers.{config.moe_layers[0]}.block_sparse_moe.gate"
            self._experts_only = not any(self._ignored(text) for text in _spellings(router))

    def storage(self, name: TensorName) -> Storage | None:
        spellings = self._spellings(name.module_path)
        found = _first(self._others, _spellings(name.module_path))
        if found is not None or any(map(self._ignored, spellings)):
            return found
        found = _first(self._named, spellings)
        if found is not None or self._wide is None or _NOT_LINEAR.search(spellings[0]):
            return found
        return self._wide if name.expert is not None or not self._experts_only else None

    @property
    def leaves_others_open(self) -> bool:
        """Whether it says nothing about matrices beside the routed experts."""
        return self._experts_only

    def _unknown(self, what: str) -> None:
        self.open.append(f"{what} of quantization_config is not understood; what it covers is counted as plain")

    def _know_others(self, section: object) -> None:
        modules = section.get("modules") if isinstance(section, dict) else None
        for pattern, scheme in (modules if isinstance(modules, dict) else {}).items():
            storage = Storage(str(scheme), 32 if scheme in _GROUPED else 0)
            if _known(storage):
                self._others.append((self._matcher([pattern]), storage))
            else:
                self._unknown(f"scheme {str(scheme)[:40]!r}")

    def _matcher(self, patterns: object, find: Callable[[str], Matcher | None] | None = None) -> Matcher:
        """One matcher of many patterns; those that are not understood are told and match nothing."""
        found: list[Matcher] = []
        for pattern in patterns[:MAX_PATTERNS] if isinstance(patterns, list) else []:
            matches = (find or _target)(pattern) if isinstance(pattern, str) else None
            if matches is None:
                self._unknown(f"pattern {str(pattern)[:60]!r}")
            else:
                found.append(matches)
        return lambda text: any(matches(text) for matches in found)


def _compressed_tensors(declared: Declared, section: dict[str, Any]) -> None:
    groups = section.get("config_groups")
    declared._ignored = declared._matcher(section.get("ignore"))
    if not isinstance(groups, dict):
        scheme = Storage(str(section.get("format") or "").split("-")[0])
        declared._wide = scheme if scheme.scheme in ("mxfp4", "nvfp4") else None
        if declared._wide is None:
            declared._unknown("config_groups")
        return
    for key, group in groups.items():
        if isinstance(group, list):
            storage, targets = _PRESETS.get(str(key).upper()), group
        elif isinstance(group, dict):
            storage, targets = _of_group(group, section.get("format")), group.get("targets")
        else:
            storage, targets = None, None
        if storage is None:
            declared._unknown(f"group {str(key)[:40]!r}")
            continue
        named = [target for target in targets or [] if isinstance(target, str) and target != "Linear"]
        if isinstance(targets, list) and "Linear" in targets:
            declared._wide = storage
        if named:
            declared._named.append((declared._matcher(named), storage))


def _of_group(group: dict[str, Any], default: object) -> Storage | None:
    """The storage of one `config_groups` entry, None where it is none that k3tool writes."""
    form = str(group.get("format") or default or "")
    weights = group.get("weights")
    if form.startswith(("mxfp4", "nvfp4")):
        return Storage(form[:5])
    if not isinstance(weights, dict) or weights.get("symmetric", True) is False:
        return None
    kind, bits, strategy = weights.get("type"), weights.get("num_bits"), weights.get("strategy")
    if kind == "float" and bits == 8 and strategy == "channel":
        return Storage("fp8-channel")
    if (
        kind == "float"
        and bits == 8
        and strategy == "block"
        and weights.get("block_structure") in ([128, 128], "128x128")
    ):
        return Storage("fp8-block")
    size = weights.get("group_size")
    group_size = size if strategy == "group" and type(size) is int and 0 < size < 1 << 30 else 0
    if kind == "int" and bits in (4, 8) and form in ("pack-quantized", "") and (group_size or strategy == "channel"):
        return Storage(f"int{bits}", group_size)
    return None


def _fp8(declared: Declared, section: dict[str, Any]) -> None:
    if section.get("weight_block_size") != [128, 128]:
        declared._unknown(f"weight_block_size {str(section.get('weight_block_size'))[:40]}")
        return
    declared._wide, declared._spellings = Storage("fp8-block"), _own
    skipped = [*_strings(section.get("modules_to_not_convert")), *_strings(section.get("ignored_layers"))]
    declared._ignored = declared._matcher(skipped, _words)


def _modelopt(declared: Declared, section: dict[str, Any]) -> None:
    algorithm = str(section.get("quant_algo") or "")
    if algorithm.upper() != "NVFP4":
        declared._unknown(f"quant_algo {algorithm[:40]!r}")
        return
    declared._wide = Storage("nvfp4-modelopt")
    skipped = [*_strings(section.get("ignore")), *_strings(section.get("exclude_modules"))]
    declared._ignored = declared._matcher(skipped, _wildcard)


def _bitsandbytes(declared: Declared, section: dict[str, Any]) -> None:
    kind = section.get("bnb_4bit_quant_type")
    if section.get("load_in_4bit") is not True and section.get("_load_in_4bit") is not True:
        declared._unknown("load_in_8bit" if section.get("load_in_8bit") else "bitsandbytes without load_in_4bit")
        return
    if section.get("bnb_4bit_use_double_quant") is True:
        declared.open.append("double quantization of states is counted as single: up to 0.4 bits a weight too much")
    declared._wide, declared._spellings = Storage(kind if kind in ("nf4", "fp4") else "fp4"), _own
    declared._ignored = declared._matcher(_strings(section.get("llm_int8_skip_modules")), _words)


_READERS: dict[str, Callable[[Declared, dict[str, Any]], None]] = {
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
    "modelopt": _modelopt,
    "bitsandbytes": _bitsandbytes,
}


def _own(path: str) -> tuple[str, ...]:
    """As the checkpoint names it: words of its model's code are matched with nothing else."""
    return (path,)


def _first(rules: list[tuple[Matcher, Storage]], spellings: tuple[str, ...]) -> Storage | None:
    return next((storage for matches, storage in rules if any(map(matches, spellings))), None)


def _spellings(path: str) -> tuple[str, ...]:
    """A module as the checkpoint names it, and as engines do."""
    bare = path.removeprefix("language_model.")
    return path, bare, path.replace("block_sparse_moe", "mlp"), bare.replace("block_sparse_moe", "mlp")


def _target(pattern: str) -> Matcher | None:
    """As compressed-tensors matches: `re:` patterns from the start of a name, other words the name or its end."""
    if not pattern.startswith("re:"):
        return lambda text: text == pattern or text.endswith("." + pattern)
    text = pattern[3:]
    # Repeated groups and many repeats can take forever on a name; nobody's lists have them.
    if len(text) > _MAX_PATTERN or re.search(r"\)[*+{]", text) or len(re.findall(r"[*+}]", text)) > 4:
        return None
    try:
        compiled = re.compile(text)
    except (re.error, OverflowError, RecursionError):
        return None
    return lambda name: compiled.match(name) is not None


def _words(entry: str) -> Matcher:
    """A row of whole words anywhere in the path: `self_attn`, `lm_head`, `layers.0.mlp`."""
    return lambda text: f".{entry.strip('.')}." in f".{text}."


def _wildcard(pattern: str) -> Matcher:
    return lambda text: fnmatchcase(text, pattern) or fnmatchcase(text, f"{pattern}.*")


def _strings(values: object) -> list[str]:
    return [value for value in values if isinstance(value, str)] if isinstance(values, list) else []


def _known(storage: Storage) -> bool:
    from k3tool.formats import SCHEMES

    return storage.scheme in SCHEMES


def _nothing(text: str) -> bool:
    return False
