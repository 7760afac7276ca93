"""The grammar of tensor names: text to TensorName and back. The only patterns about tensor names live here."""

from __future__ import annotations

import re
from typing import NamedTuple

SHARD_PATTERN = re.compile(r"model-(\d{5,6})-of-(\d{5,6})\.safetensors", re.ASCII)
"""Five digits, then six in the release (`model-00001-of-000096.safetensors`); other writers use five and five."""

_LAYER = re.compile(
    r"(?P<prefix>language_model\.)?model\.layers\.(?P<layer>0|[1-9]\d{0,5})\."
    r"(?:(?P<experts>[a-z_]+)\.experts\.(?P<expert>0|[1-9]\d{0,5})\.(?P<matrix>\w+)|(?P<module>[\w.]+?))"
    r"\.(?P<part>(?:weight|A_log|dt_bias|e_score_correction_bias)[\w.]*|input_(?:global_)?scale)",
    re.ASCII,
)
_GLOBAL = re.compile(r"(?P<module>[\w.]+?)\.(?P<part>weight[\w.]*|input_(?:global_)?scale)", re.ASCII)
INPUT_SCALES = ("input_scale", "input_global_scale")
"""One number for the activations that a quantized matrix meets: ModelOpt writes the first, compressed-tensors the second."""
EXPERT_MODULE = "block_sparse_moe.experts"


class TensorName(NamedTuple):
    """`language_model.model.layers.3.block_sparse_moe.experts.7.w1.weight_scale` in its parts.

    module: path below the layer (`self_attn.q_proj`, `block_sparse_moe.experts.w1`), or below the root for tensors
        outside the layers (`model.embed_tokens`, `vision_tower.patch_embed.proj`); without expert number.
    part: `weight`, `weight_packed`, `weight_scale`, `A_log`, `weight.absmax`, ...
    """

    prefix: str
    layer: int | None
    module: str
    expert: int | None
    part: str

    @property
    def module_path(self) -> str:
        """The full path of the module that owns the tensor, as a `quantization_config` names it."""
        if self.layer is None:
            return f"{self.prefix}{self.module}"
        module = self.module
        if self.expert is not None:
            owner, matrix = module.rsplit(".", 1)
            module = f"{owner}.{self.expert}.{matrix}"
        return f"{self.prefix}model.layers.{self.layer}.{module}"

    def __str__(self) -> str:
        return f"{self.module_path}.{self.part}"


def parse_name(text: str) -> TensorName | None:
    """The parts of a tensor name, or None where it does not follow the grammar."""
    match = _LAYER.fullmatch(text)
    if match:
        prefix, layer, experts, expert, matrix, module, part = match.groups()
        if expert is not None:
            return TensorName(prefix or "", int(layer), f"{experts}.experts.{matrix}", int(expert), part)
        return TensorName(prefix or "", int(layer), module, None, part)
    match = _GLOBAL.fullmatch(text)
    if match is None:
        return None
    module, part = match.groups()
    prefix = "language_model." if module.startswith("language_model.") else ""
    return TensorName(prefix, None, module[len(prefix) :], None, part)


def module_and_part(text: str) -> tuple[str, str]:
    """The module path and the part of a tensor's name; (name, "") where there is no weight. No grammar is checked."""
    at = text.find(".weight")
    if at < 0:
        path, _, part = text.rpartition(".")
        return (path, part) if part in INPUT_SCALES else (text, "")
    return text[:at], text[at + 1 :]


def shard_name(number: int, total: int) -> str:
    """Name of shard `number` (from 1) as the release writes it: five digits of six."""
    return f"model-{number:05d}-of-{total:06d}.safetensors"


def component_of(name: TensorName | None) -> str:
    """The part of the model that a tensor belongs to, in the words of `k3tool inspect`."""
    if name is None:
        return "other"
    module = name.module
    if name.layer is None:
        if module.startswith(("vision_tower", "mm_projector")):
            return "vision"
        if module.startswith("model.output_attn_res"):
            return "attn_res"
        if module in ("model.embed_tokens", "lm_head"):
            return "embeddings"
        return "norms" if module == "model.norm" else "other"
    if name.expert is not None:
        return "routed_experts"
    head, _, rest = module.partition(".")
    if head == "self_attn":
        return "mla" if rest in _MLA_ONLY else "kda"
    if head == "block_sparse_moe":
        if rest.startswith("shared_experts"):
            return "shared_experts"
        return "latent" if rest.startswith("routed_expert_") else "router" if rest == "gate" else "other"
    if head == "mlp":
        return "dense_mlp"
    if module.startswith(("self_attention_res_", "mlp_res_")):
        return "attn_res"
    return "norms" if module in ("input_layernorm", "post_attention_layernorm") else "other"


_MLA_ONLY = {"q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj"}
