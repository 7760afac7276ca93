"""What a `quantization_config` says about how matrices are stored: module by module, and what it leaves open.

The headers of a checkpoint decide what is stored; this is for configurations without them. Read as the libraries that
write such sections do: compressed-tensors (`config_groups`, `targets`, `ignore`), FP8 in blocks, ModelOpt, bitsandbytes,
and what k3tool itself adds where one section cannot say everything. Storage that k3tool does not write (GPTQ, AWQ, Quark,
one scale for a whole matrix, zero points) is counted as the one that it writes of as many bits, and that is told.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from typing import Any

from k3tool.config import K3Config
from k3tool.names import TensorName
from k3tool.transform.quantize_config import SECTION, Storage

Matcher = Callable[[str], bool]
Places = Callable[[str], Iterator[str]]

MAX_PATTERNS = 200  # of those that have to be tried one by one; plain names are looked up
_MOST_TOLD = 20
_MOST_REPEATS = 3
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
_ALGORITHMS = {
    "NVFP4": Storage("nvfp4-modelopt"),
    "FP8_PER_CHANNEL_PER_TOKEN": Storage("fp8-channel"),
    "FP8_PB_WO": Storage("fp8-block"),
}
_LIKE_ALGORITHMS = {
    **dict.fromkeys(("NVFP4_AWQ", "W4A16_NVFP4", "W4A8_NVFP4_FP8", "NVFP4_SVDQUANT"), Storage("nvfp4-modelopt")),
    **dict.fromkeys(("MXFP4", "W4A8_MXFP4_FP8", "W4A16_MXFP4"), Storage("mxfp4")),
    **dict.fromkeys(("W4A16_AWQ", "W4A8_AWQ", "INT4_AWQ", "W4A16"), Storage("int4", 128)),
    **dict.fromkeys(("INT8", "W8A16", "W8A8_SQ_PER_CHANNEL", "INT8_SQ"), Storage("int8")),
    "FP8": Storage("fp8-channel"),
    "MXFP8": Storage("int8", 32),
}
"""Names that ModelOpt gives to ways of storage: those that k3tool writes, and those that it counts as one of these."""


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

    def _near(self, what: str, storage: Storage | None) -> Storage | None:
        """Storage of as many bits as `what`, which is none that k3tool writes."""
        if storage is None:
            self._unknown(what)
        else:
            group = f" in groups of {storage.group_size}" if storage.group_size else ""
            self.open.append(f"{what} of quantization_config is counted as {storage.scheme}{group}: scales may differ")
        return storage

    def cannot(self, storage: Storage, module: str) -> None:
        """Told by who counts: a matrix whose shape this storage cannot have is plain, or padded in a way unknown here."""
        self.open.append(f"{storage.scheme} cannot hold {module}, which is counted as plain")

    def _know_others(self, section: object) -> None:
        modules = section.get("modules") if isinstance(section, dict) else None
        for pattern, scheme in (modules if isinstance(modules, dict) else {}).items():
            storage = Storage(str(scheme), 32 if scheme in _GROUPED else 0)
            if _known(storage):
                self._others.append((self._matcher([pattern]), storage))
            else:
                self._unknown(f"scheme {str(scheme)[:40]!r}")

    def _matcher(
        self, patterns: object, find: Callable[[str], Matcher | str | None] | None = None, places: Places | None = None
    ) -> Matcher:
        """One matcher of many patterns. find: a pattern's text to look up among the `places` of a path, or a matcher to
        be tried, or None; those that are not understood, or too many, are told and match nothing."""
        names: set[str] = set()
        found: list[Matcher] = []
        for pattern in patterns if isinstance(patterns, list) else []:
            matches = (find or _target)(pattern) if isinstance(pattern, str) else None
            if isinstance(matches, str):
                names.add(matches)
            elif matches is not None and len(found) < MAX_PATTERNS:
                found.append(matches)
            elif len(self.open) < _MOST_TOLD:
                self._unknown(f"pattern {str(pattern)[:60]!r}")
        where = places or _ends
        return lambda text: not names.isdisjoint(where(text)) or any(matches(text) for matches in found)


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
            if storage is None:
                storage = declared._near(f"group {str(key)[:40]!r}", _of_weights(group.get("weights")))
        else:
            storage, targets = None, None
        if storage is None:
            if not isinstance(group, dict):
                declared._unknown(f"group {str(key)[:40]!r}")
            continue
        named = [target for target in _strings(targets) if target != "Linear"]
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
        return Storage(f"int{bits:.0f}", group_size)
    return None


def _of_weights(weights: object) -> Storage | None:
    """The storage of as many bits as a description of weights in the words of compressed-tensors gives."""
    if not isinstance(weights, dict):
        return None
    size = weights.get("group_size")
    bits = weights.get("num_bits")
    return _of_bits(str(weights.get("type")), bits, size, blocks=weights.get("strategy") == "block")


def _of_bits(kind: str, bits: object, group_size: object, *, blocks: bool = False) -> Storage | None:
    """int or float of so many bits; a group size that is none, or not positive, is a whole row."""
    size = group_size if type(group_size) is int and 0 < group_size < 1 << 30 else 0
    if kind == "float" and bits == 4:
        return Storage("nvfp4" if size == 16 else "mxfp4")
    if kind == "float" and bits == 8:
        return Storage("fp8-block" if blocks else "int8" if size == 32 else "fp8-channel", 32 * (size == 32))
    return Storage(f"int{bits:.0f}", size) if kind == "int" and bits in (4, 8) else None


def _fp8(declared: Declared, section: dict[str, Any]) -> None:
    blocks = section.get("weight_block_size")
    declared._spellings = _own
    if blocks == [128, 128]:
        declared._wide = Storage("fp8-block")
    else:
        like = Storage("fp8-channel" if blocks is None else "fp8-block")
        declared._wide = declared._near(f"weight_block_size {str(blocks)[:40]}", like)
    skipped = [*_strings(section.get("modules_to_not_convert")), *_strings(section.get("ignored_layers"))]
    declared._ignored = declared._matcher(skipped, _words, _runs)


def _modelopt(declared: Declared, section: dict[str, Any]) -> None:
    algorithm = str(section.get("quant_algo") or "").upper()
    if not algorithm and isinstance(section.get("config_groups"), dict):
        return _compressed_tensors(declared, section)
    layers = section.get("quantized_layers")
    skipped = [*_strings(section.get("ignore")), *_strings(section.get("exclude_modules"))]
    declared._ignored = declared._matcher(skipped, _wildcard, _heads)
    if not isinstance(layers, dict) or not layers:
        declared._wide = _of_algorithm(declared, algorithm)
        return
    groups: dict[Storage, list[str]] = {}
    known: dict[str, Storage | None] = {}
    for name, value in layers.items():
        words = str(value.get("quant_algo") or "").upper() if isinstance(value, dict) else ""
        if words not in known and len(known) < 64:
            known[words] = _of_algorithm(declared, words)
        if (storage := known.get(words)) is not None:
            groups.setdefault(storage, []).append(name)
    for storage, names in groups.items():
        declared._named.append((declared._matcher(names, str, _heads), storage))


def _of_algorithm(declared: Declared, algorithm: str) -> Storage | None:
    if algorithm in _ALGORITHMS:
        return _ALGORITHMS[algorithm]
    return declared._near(f"quant_algo {algorithm[:40]!r}", _LIKE_ALGORITHMS.get(algorithm))


def _bitsandbytes(declared: Declared, section: dict[str, Any]) -> None:
    kind = section.get("bnb_4bit_quant_type")
    declared._spellings = _own
    declared._ignored = declared._matcher(_strings(section.get("llm_int8_skip_modules")), _words, _runs)
    if section.get("load_in_8bit") is True or section.get("_load_in_8bit") is True:
        declared._wide = declared._near("load_in_8bit", Storage("int8"))
        return
    if section.get("load_in_4bit") is not True and section.get("_load_in_4bit") is not True:
        declared._unknown("bitsandbytes without load_in_4bit")
        return
    if section.get("bnb_4bit_use_double_quant") is True:
        declared.open.append("double quantization of states is counted as single: up to 0.4 bits a weight too much")
    declared._wide = Storage(kind if kind in ("nf4", "fp4") else "fp4")


def _grouped_integers(declared: Declared, section: dict[str, Any]) -> None:
    """GPTQ, AWQ, AutoRound: integers in groups with zero points, the head left out."""
    bits = next((section[key] for key in ("bits", "w_bit") if section.get(key) is not None), None)
    size = next((section[key] for key in ("group_size", "q_group_size") if section.get(key) is not None), None)
    what = f"{str(section.get('quant_method'))[:20]} of {str(bits)[:8]} bits"
    declared._wide = declared._near(what, _of_bits("int", bits, size))
    declared._ignored = declared._matcher(["lm_head", *_strings(section.get("modules_to_not_convert"))], _words, _runs)


def _quark(declared: Declared, section: dict[str, Any]) -> None:
    declared._ignored = declared._matcher(section.get("exclude"), _wildcard, _heads)
    declared._wide = _of_quark(declared, section.get("global_quant_config"))
    layers = section.get("layer_quant_config")
    for pattern, config in list(layers.items())[:MAX_PATTERNS] if isinstance(layers, dict) else []:
        storage = _of_quark(declared, config)
        if storage is not None:
            declared._named.append((declared._matcher([pattern], _wildcard, _heads), storage))


def _of_quark(declared: Declared, config: object) -> Storage | None:
    weight = config.get("weight") if isinstance(config, dict) else None
    weight = weight[0] if isinstance(weight, list) and weight else weight
    found = re.match(r"u?(fp|int)([48])", str(weight.get("dtype")).lower()) if isinstance(weight, dict) else None
    if not isinstance(weight, dict) or found is None:
        declared._unknown("a weight of Quark")
        return None
    kind = {"fp": "float", "int": "int"}[found[1]]
    size = weight.get("group_size") if weight.get("qscheme") == "per_group" else 0
    return declared._near(f"Quark's {found[0]}", _of_bits(kind, int(found[2]), size))


def _experts_in_mxfp4(declared: Declared, section: dict[str, Any]) -> None:
    declared._wide, declared._experts_only = declared._near("quant_method 'mxfp4'", Storage("mxfp4")), True
    declared._ignored = declared._matcher(_strings(section.get("modules_to_not_convert")), _words, _runs)


def _fp8_rows(declared: Declared, section: dict[str, Any]) -> None:
    declared._wide = declared._near("quant_method 'fbgemm_fp8'", Storage("fp8-channel"))
    declared._ignored = declared._matcher(_strings(section.get("modules_to_not_convert")), _words, _runs)


_READERS: dict[str, Callable[[Declared, dict[str, Any]], None]] = {
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
    **dict.fromkeys(("modelopt", "modelopt_mixed", "modelopt_fp4", "modelopt_mxfp8"), _modelopt),
    "bitsandbytes": _bitsandbytes,
    **dict.fromkeys(("gptq", "gptq_marlin", "awq", "awq_marlin", "auto-round", "auto_round"), _grouped_integers),
    "quark": _quark,
    "mxfp4": _experts_in_mxfp4,
    "fbgemm_fp8": _fp8_rows,
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


def _ends(path: str) -> Iterator[str]:
    """`a.b.c`, `b.c`, `c`."""
    words = path.split(".")
    return (".".join(words[first:]) for first in range(len(words)))


def _heads(path: str) -> Iterator[str]:
    """`a.b.c`, `a.b`, `a`: what a module belongs to."""
    words = path.split(".")
    return (".".join(words[:last]) for last in range(len(words), 0, -1))


def _runs(path: str) -> Iterator[str]:
    """Every row of whole words anywhere in the path: `self_attn`, `lm_head`, `layers.0.mlp`."""
    return (end for head in _heads(path) for end in _ends(head))


def _target(pattern: str) -> Matcher | str | None:
    """As compressed-tensors matches: `re:` patterns from the start of a name, other words the name or its end."""
    if not pattern.startswith("re:"):
        return pattern
    text = pattern[3:]
    anywhere = text.startswith(".*") and not _alternatives(text)  # `.*x` matches where `x` is found: no walking back
    text = text[2:] if anywhere else text
    # Repeated groups and many repeats can take forever on a name; nobody's lists have them.
    repeats = len(re.findall(r"[*+}]", text.removesuffix(".*")))
    if len(text) > _MAX_PATTERN or re.search(r"\)[*+{]", text) or repeats > _MOST_REPEATS:
        return None
    try:
        compiled = re.compile(text)
    except (re.error, OverflowError, RecursionError):
        return None
    found = compiled.search if anywhere else compiled.match
    return lambda name: found(name) is not None


def _alternatives(text: str) -> bool:
    """Whether a `|` stands outside of parentheses, as far as that is plain to see."""
    return "|" in re.sub(r"\([^()]*\)", "", text)


def _words(entry: str) -> str:
    return entry.strip(".")


def _wildcard(pattern: str) -> Matcher | str | None:
    """As file names are matched; a module stands for all that is below it."""
    if pattern.startswith("re:"):
        return _target(pattern)
    if not re.search(r"[*?[]", pattern):
        return pattern
    if len(pattern) > _MAX_PATTERN or pattern.count("*") > 8:
        return None
    return lambda text: fnmatchcase(text, pattern) or fnmatchcase(text, f"{pattern}.*")


def _strings(values: object) -> list[str]:
    return [value for value in values if isinstance(value, str)] if isinstance(values, list) else []


def _known(storage: Storage) -> bool:
    from k3tool.formats import SCHEMES

    return storage.scheme in SCHEMES


def _nothing(text: str) -> bool:
    return False
