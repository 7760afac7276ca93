"""The one `quantization_config` that says what is really stored, and which engines can read the result.

Derived from the tensors as they will be, module kind by module kind, never from the source's own list. Engines rename
and fuse modules, so that patterns match every spelling that is known: with or without `language_model.`, `mlp` for
`block_sparse_moe`, and the fused names of vLLM and SGLang.
"""

from __future__ import annotations

import copy
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from k3tool.checkpoint.table import Kind
from k3tool.errors import UnsupportedError
from k3tool.names import parse_name

SECTION = "k3tool_quantization"  # top-level key beside a configuration that cannot say everything
OTHER_PLACES = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")
"""Files in which other tools say beside `config.json` how weights are stored: ModelOpt, GPTQ, AWQ."""
_FAMILIES = {"nf4": "bitsandbytes", "fp4": "bitsandbytes", "nvfp4-modelopt": "modelopt"}
_PLAIN = ("bf16", "f16", "f32")
_FUSED = {
    "self_attn.in_proj_qkvgfab": ("q_proj", "k_proj", "v_proj", "g_proj", "f_a_proj", "b_proj"),
    "self_attn.fused_qkvg_proj": ("q_proj", "k_proj", "v_proj", "g_proj"),
    "self_attn.fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
    "self_attn.fused_qkv_a_proj_with_mqa": ("q_a_proj", "kv_a_proj_with_mqa"),
    "block_sparse_moe.shared_experts.gate_up_proj": ("gate_proj", "up_proj"),
    "mlp.gate_up_proj": ("gate_proj", "up_proj"),
}
# Wide patterns of the release, used where everything they cover is unquantized.
_WIDE = {
    "re:.*self_attn.*": re.compile(r"self_attn\."),
    "re:.*shared_experts.*": re.compile(r".*shared_experts\."),
    r"re:.*mlp\.(gate|up|gate_up|down)_proj.*": re.compile(r"mlp\.\w+_proj"),
    "re:.*lm_head.*": re.compile(r"lm_head"),
    "re:.*vision_tower.*": re.compile(r"vision_tower\."),
    "re:.*mm_projector.*": re.compile(r"mm_projector\."),
}


class Storage(NamedTuple):
    """Scheme and, for integers, values per scale (0: a whole row)."""

    scheme: str
    group_size: int = 0


Summary = dict[str, dict[int | None, Storage]]
"""Module (without expert number) to layer (None outside the layers) to storage; matrices only."""


class Section(NamedTuple):
    """config: the quantization_config, None where nothing is quantized. others: modules in ways that it cannot
    express, pattern to scheme. readers: one line on what reads the result. files: further files, name to JSON.
    warnings: what engines will not like about it."""

    config: dict[str, Any] | None
    others: dict[str, str]
    readers: str
    files: dict[str, Any]
    warnings: list[str]


def summarize(items: Iterable[tuple[str, Kind]], shape_of: Callable[[str], tuple[int, ...] | None]) -> Summary:
    """What is stored how, from the names and kinds of all tensors. The first expert of a layer stands for all.

    shape_of: [out, in] of the matrix at a module path; the shapes of packed integers alone leave it open.
    """
    from k3tool import formats

    parts: dict[tuple[str, int | None, str], dict[str, Kind]] = defaultdict(dict)
    chosen: dict[tuple[str, int | None], str] = {}
    for text, kind in items:
        if ".experts." in text and ".experts.0." not in text:
            continue
        name = parse_name(text)
        if name is None or not name.part.startswith("weight"):
            continue
        place = (name.module, name.layer)
        path = name.module_path
        if chosen.setdefault(place, path) == path:
            parts[name.module, name.layer, path][name.part] = kind
    summary: Summary = defaultdict(dict)
    for (module, layer, path), held in parts.items():
        if set(held) == {"weight"} and len(held["weight"].shape) != 2:
            continue
        scheme = formats.detect(held, where=path, shape=shape_of(path))
        group = 0
        if scheme in ("int4", "int8"):
            columns = formats.logical_shape(scheme, held)[1]  # type: ignore[index]
            groups = held["weight_scale"].shape[-1]
            group = 0 if groups == 1 else columns // groups
        summary[module][layer] = Storage(scheme, group)
    return dict(summary)


def section(summary: Summary) -> Section:
    """The configuration of what is stored. Every module of `summary` is either targeted by its scheme or ignored."""
    by_family: dict[str, dict[Storage, dict[str, set[int | None]]]] = defaultdict(lambda: defaultdict(dict))
    for module, layers in summary.items():
        for layer, storage in layers.items():
            family = "plain" if storage.scheme in _PLAIN else _FAMILIES.get(storage.scheme, "compressed-tensors")
            by_family[family][storage].setdefault(module, set()).add(layer)
    families = [family for family in by_family if family != "plain"]
    if not families:
        return Section(None, {}, "everything that reads the release's bfloat16 tensors", {}, [])
    main = max(families, key=lambda family: (_holds_experts(by_family[family]), family == "compressed-tensors"))
    others = {
        pattern: storage.scheme
        for family in families
        if family != main
        for storage, modules in by_family[family].items()
        for pattern in _patterns(modules, summary)
    }
    config, files = _MAKERS[main](by_family[main], summary)
    return Section(config, others, _readers(main, others), files, broken_fusions(summary))


def _holds_experts(groups: Mapping[Storage, Mapping[str, Any]]) -> bool:
    return any(".experts." in f".{module}" for modules in groups.values() for module in modules)


def _readers(main: str, others: Mapping[str, str]) -> str:
    if others:
        schemes = " and ".join(sorted(set(others.values())))
        return f"k3tool alone: no engine's configuration holds {schemes} modules beside {main} ones"
    if main == "bitsandbytes":
        return "loaders of bitsandbytes 4-bit checkpoints (its states cannot be split by TP), and k3tool"
    if main == "modelopt":
        return "engines with a ModelOpt NVFP4 loader (vLLM, SGLang, TensorRT-LLM), and k3tool"
    return "engines with a compressed-tensors loader (vLLM, SGLang), and k3tool"


# Patterns


def _patterns(modules: Mapping[str, set[int | None]], summary: Summary) -> list[str]:
    """`re:` patterns that match exactly these modules in their layers, in every known spelling, and fused names."""
    found: list[str] = []
    fused = {
        name: layers for name, members in _FUSED.items() if (layers := _fused_layers(name, members, modules, summary))
    }
    for module, layers in {**modules, **fused}.items():
        everywhere = set(summary.get(module, layers))
        found.append(_pattern(module, None if layers == everywhere else layers))
    return sorted(found)


def _fused_layers(
    name: str, members: tuple[str, ...], modules: Mapping[str, set[int | None]], summary: Summary
) -> set[int | None]:
    """Layers in which all that an engine fuses under `name` is in `modules`."""
    parent = name.rpartition(".")[0]
    paths = [f"{parent}.{member}" for member in members]
    if not all(path in summary for path in paths):
        return set()
    return set.intersection(*(modules.get(path, set()) for path in paths))


def _pattern(module: str, layers: set[int | None] | None) -> str:
    owner, _, matrix = module.rpartition(".")
    if owner.endswith(".experts"):
        spelt = rf"(?:block_sparse_moe|mlp)\.experts\.\d+\.{re.escape(matrix)}"
    else:
        spelt = re.escape(module).replace("block_sparse_moe", "(?:block_sparse_moe|mlp)")
        spelt = re.sub(r"(?=f_[ab]_proj$)", r"(?:forget_gate\\.)?", spelt)  # where transformers keeps them
    if layers is None:
        return rf"re:(?:.*\.)?{spelt}$"
    numbers = "|".join(str(layer) for layer in sorted(layer for layer in layers if layer is not None))
    return rf"re:.*\.layers\.(?:{numbers})\.{spelt}$" if numbers else rf"re:(?:.*\.)?{spelt}$"


def _ignored(summary: Summary, quantized: Mapping[Storage, Mapping[str, set[int | None]]]) -> list[str]:
    """Patterns for every matrix that is not among `quantized`: the release's wide ones where they are true."""
    left: dict[str, set[int | None]] = {}
    for module, layers in summary.items():
        rest = {layer for layer in layers if not any(layer in m.get(module, ()) for m in quantized.values())}
        if rest:
            left[module] = rest
    wide: list[str] = []
    for pattern, covers in _WIDE.items():
        covered = [module for module in summary if covers.match(module)]
        if covered and all(left.get(module) == set(summary[module]) for module in covered):
            wide.append(pattern)
            for module in covered:
                left.pop(module)
    return [*wide, *_patterns(left, summary)]


def broken_fusions(summary: Summary) -> list[str]:
    """Modules that engines fuse into one but that are stored in different schemes, one line for each fused name."""
    said: list[str] = []
    for name, members in _FUSED.items():
        parent, _, fused = name.rpartition(".")
        held = {member: summary[f"{parent}.{member}"] for member in members if f"{parent}.{member}" in summary}
        layers = set.intersection(*(set(where) for where in held.values())) if len(held) == len(members) else set()
        mixed = [layer for layer in layers if len({where[layer] for where in held.values()}) > 1]
        if mixed and fused not in ("fused_qkv_a_proj_with_mqa", "fused_qkvg_proj"):
            schemes = ", ".join(sorted({where[mixed[0]].scheme for where in held.values()}))
            said.append(
                f"engines fuse {', '.join(members)} of {parent} and need one scheme for all of them; they would be {schemes}"
            )
    return said


# compressed-tensors


def _weights(storage: Storage) -> tuple[str, dict[str, Any], dict[str, Any] | None]:
    """(format, arguments of the weights, of the activations) as compressed-tensors' own presets have them."""
    base: dict[str, Any] = {
        "actorder": None,
        "block_structure": None,
        "dynamic": False,
        "group_size": None,
        "num_bits": 4,
        "observer": "minmax",
        "observer_kwargs": {},
        "scale_dtype": None,
        "strategy": "group",
        "symmetric": True,
        "type": "float",
        "zp_dtype": None,
    }
    fp8 = {**base, "num_bits": 8}
    dynamic = {**base, "num_bits": 8, "dynamic": True, "observer": None}
    if storage.scheme == "mxfp4":
        return "mxfp4-pack-quantized", {**base, "group_size": 32, "scale_dtype": "torch.uint8"}, None
    if storage.scheme == "nvfp4":
        changes = {"group_size": 16, "strategy": "tensor_group", "scale_dtype": "torch.float8_e4m3fn"}
        return "nvfp4-pack-quantized", {**base, **changes}, None
    if storage.scheme == "fp8-channel":
        return "float-quantized", {**fp8, "strategy": "channel"}, {**dynamic, "strategy": "token"}
    if storage.scheme == "fp8-block":
        block = {**fp8, "strategy": "block", "block_structure": [128, 128]}
        return "float-quantized", block, {**dynamic, "group_size": 128}
    bits = {"int4": 4, "int8": 8}[storage.scheme]
    group = {"strategy": "group", "group_size": storage.group_size} if storage.group_size else {"strategy": "channel"}
    return "pack-quantized", {**base, "num_bits": bits, "type": "int", **group}, None


def _compressed_tensors(
    groups: Mapping[Storage, Mapping[str, set[int | None]]], summary: Summary
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Experts keep the target `Linear`, which engines look up for fused experts; all other groups name their modules."""
    ordered = sorted(groups.items(), key=lambda item: (not _holds_experts({item[0]: item[1]}), item[0]))
    made: dict[str, Any] = {}
    for number, (storage, modules) in enumerate(ordered):
        form, weights, activations = _weights(storage)
        wide = number == 0 and _holds_experts({storage: modules})
        made[f"group_{number}"] = {
            "format": form,
            "input_activations": activations,
            "output_activations": None,
            "targets": ["Linear"] if wide else _patterns(modules, summary),
            "weights": weights,
        }
    forms = {group["format"] for group in made.values()}
    config = {
        "config_groups": made,
        "format": forms.pop() if len(forms) == 1 else "mixed-precision",
        "global_compression_ratio": None,
        "ignore": _ignored(summary, groups),
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }
    return config, {}


# bitsandbytes and ModelOpt


def _bitsandbytes(
    groups: Mapping[Storage, Mapping[str, set[int | None]]], summary: Summary
) -> tuple[dict[str, Any], dict[str, Any]]:
    schemes = {storage.scheme: next(iter(modules)) for storage, modules in groups.items()}
    if len(schemes) > 1:  # the configuration has one type, by which loaders read every module
        raise UnsupportedError(
            f"{schemes['nf4']} would be nf4 and {schemes['fp4']} fp4, and a bitsandbytes configuration names one of them",
            hint="choose nf4 for all of them, or fp4",
        )
    quantized = {word for modules in groups.values() for module in modules for word in module.split(".")}
    if "block_sparse_moe" in quantized:
        quantized.add("mlp")  # transformers' name of both
    words = {
        next((word for word in module.split(".") if word not in quantized and word != "model"), module)
        for module in summary
        if not any(module in modules for modules in groups.values())
    }
    # transformers 4 looks for a word anywhere in a name; 5 takes it as the end of a name, or a pattern from its start
    skipped = sorted({spelling for word in words for spelling in (word, rf".*\.{re.escape(word)}")})
    config = {
        "_load_in_4bit": True,
        "_load_in_8bit": False,
        "bnb_4bit_compute_dtype": "bfloat16",
        "bnb_4bit_quant_storage": "uint8",
        "bnb_4bit_quant_type": next(iter(schemes)),
        "bnb_4bit_use_double_quant": False,
        "llm_int8_enable_fp32_cpu_offload": False,
        "llm_int8_has_fp16_weight": False,
        "llm_int8_skip_modules": skipped,
        "llm_int8_threshold": 6.0,
        "load_in_4bit": True,
        "load_in_8bit": False,
        "quant_method": "bitsandbytes",
    }
    return config, {}


def _modelopt(
    groups: Mapping[Storage, Mapping[str, set[int | None]]], summary: Summary
) -> tuple[dict[str, Any], dict[str, Any]]:
    excluded = sorted({_wildcard(module) for module in summary if not any(module in m for m in groups.values())})
    quantization = {
        "quant_algo": "NVFP4",
        "kv_cache_quant_algo": None,
        "group_size": 16,
        "exclude_modules": excluded,
    }
    config = {"quant_method": "modelopt", **quantization, "ignore": excluded}
    document = {"producer": {"name": "modelopt", "version": "k3tool"}, "quantization": quantization}
    return config, {"hf_quant_config.json": document}


def _wildcard(module: str) -> str:
    """ModelOpt's spelling: shell patterns over the module path."""
    for prefix in ("self_attn", "vision_tower", "mm_projector", "block_sparse_moe.shared_experts"):
        if module.startswith(prefix):
            return f"*{prefix}*"
    return f"*{module}"


_MAKERS = {
    "compressed-tensors": _compressed_tensors,
    "bitsandbytes": _bitsandbytes,
    "modelopt": _modelopt,
}


# The document


def rewrite(raw: Mapping[str, Any], made: Section) -> dict[str, Any]:
    """`config.json` with this section in the one right place and no stale copy: in `text_config` where there is one.

    Everything else stays, in its order.
    """
    document = copy.deepcopy(dict(raw))
    nested = isinstance(document.get("text_config"), dict)
    owner = document["text_config"] if nested else document
    for place in (document, owner):
        place.pop("compression_config", None)
    if nested:
        document.pop("quantization_config", None)
    document.pop(SECTION, None)
    if made.config is None:
        owner.pop("quantization_config", None)
    else:
        owner["quantization_config"] = made.config
    if made.others:
        document[SECTION] = {"modules": made.others, "readers": made.readers}
    return document
