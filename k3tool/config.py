"""K3Config: the architecture as `config.json` states it, checked once.

Nothing in k3tool looks at a model's name: layer kinds, widths, counts and scaling factors all come from here.
Both the nested form of Kimi K3 (`text_config`) and the flat form of Kimi Linear are read. What the file holds
beyond the architecture is kept untouched in `raw`, so that a rewritten configuration loses nothing.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from k3tool.checkpoint.origin import damage
from k3tool.checkpoint.outside import REQUIRED, Fail, Fields, check_size, parse_json, read_file, shown
from k3tool.disk import refusal
from k3tool.errors import CheckpointMissing, K3Error

LayerKind = Literal["kda", "mla"]
_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
MAX_CONFIG_BYTES = 16 * 1024 * 1024
# Bounds of sense, far above any model there is (93 layers of 896 experts): a number beyond them is an accident or an
# attack, and is refused before anything of that size is made.
MAX_LAYERS = 2_000
MAX_EXPERTS = 1 << 18
MAX_WIDTH = 1 << 24
MAX_TOKEN = (1 << 31) - 1
MAX_TOKENS_NAMED = 1000
_HIGHEST = {
    "num_hidden_layers": MAX_LAYERS,
    "vt_num_hidden_layers": MAX_LAYERS,
    "num_experts": 1 << 14,
    "num_attention_heads": 1 << 16,
    "num_heads": 1 << 16,
    "short_conv_kernel_size": 1 << 10,
    "vocab_size": 1 << 28,
    "attn_res_block_size": 1 << 20,
    "max_position_embeddings": (1 << 32) - 1,
    "patch_size": 1 << 10,
    "init_pos_emb_height": 1 << 14,
    "init_pos_emb_width": 1 << 14,
}


@dataclass(frozen=True)
class VisionConfig:
    """MoonViT tower and projector, as far as names and shapes go."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    qkv_hidden_size: int
    patch_size: int
    pos_emb_height: int
    pos_emb_width: int
    merge_size: int  # patches merged into one feature: product of merge_kernel_size
    text_hidden_size: int


@dataclass(frozen=True)
class K3Config:
    model_type: str  # of the whole model: "kimi_k3" or "kimi_linear"
    is_k3: bool  # nested form: names carry `language_model.`
    dtype: str  # of the weights that are neither packed nor kept in float32, as safetensors spells it
    vocab_size: int
    hidden_size: int
    layer_kinds: tuple[LayerKind, ...]
    # KDA
    kda_num_heads: int
    kda_head_dim: int
    conv_kernel_size: int
    gate_lower_bound: float | None  # None: softplus gate (Kimi Linear)
    full_rank_gate: bool
    # MLA
    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    mla_output_gate: bool
    # MLP and MoE
    intermediate_size: int
    first_k_dense: int
    moe_layer_freq: int
    num_experts: int  # 0: dense everywhere
    experts_per_token: int
    num_shared_experts: int
    moe_intermediate_size: int
    latent_size: int | None  # None: experts work at hidden_size
    latent_norm: bool
    router_activation: Literal["sigmoid", "softmax"]
    router_bias: bool  # e_score_correction_bias exists
    renormalize: bool
    routed_scaling_factor: float
    num_expert_groups: int
    topk_groups: int
    activation: Literal["situ", "silu"]
    situ_beta: float
    situ_linear_beta: float
    # the rest
    attn_res_block_size: int | None  # None: plain residual stream
    rms_norm_eps: float
    tie_word_embeddings: bool
    max_positions: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
    media_token_id: int | None
    quantization: dict[str, Any] | None  # the quantization_config that applies, wherever it was
    vision: VisionConfig | None
    raw: dict[str, Any]

    @property
    def num_layers(self) -> int:
        return len(self.layer_kinds)

    @property
    def kda_size(self) -> int:
        """Width of the stacked KDA heads: num_heads x head_dim."""
        return self.kda_num_heads * self.kda_head_dim

    @property
    def a_log_size(self) -> int:
        """Stored length of `A_log`: heads padded with zeros to a multiple of the head width ([128] for 96 heads)."""
        return -(-self.kda_num_heads // self.kda_head_dim) * self.kda_head_dim

    @property
    def expert_size(self) -> int:
        """Width at which routed experts read and write: the MoE latent, or the hidden size."""
        return self.latent_size or self.hidden_size

    @property
    def shared_intermediate_size(self) -> int:
        return self.num_shared_experts * self.moe_intermediate_size

    @property
    def name_prefix(self) -> str:
        return "language_model." if self.is_k3 else ""

    @property
    def mla_cache_width(self) -> int:
        """Numbers cached per token and MLA layer: normalized latent and shared key dims (512 + 64)."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def expert_scheme(self) -> str:
        """How the configuration says routed experts are stored. What is on disk is decided from the headers."""
        quantization = self.quantization or {}
        formats = {str(quantization.get("format", ""))}
        for group in (quantization.get("config_groups") or {}).values():
            if isinstance(group, dict):
                formats.add(str(group.get("format") or ""))
        if any(name.startswith("mxfp4") for name in formats):
            return "mxfp4"
        return "nvfp4" if any(name.startswith("nvfp4") for name in formats) else "bf16"

    def is_moe(self, layer: int) -> bool:
        return self.num_experts > 0 and layer >= self.first_k_dense and layer % self.moe_layer_freq == 0

    @property
    def moe_layers(self) -> tuple[int, ...]:
        return tuple(layer for layer in range(self.num_layers) if self.is_moe(layer))

    @classmethod
    def from_file(cls, path: str | Path) -> K3Config:
        """Read `config.json`. Raises CheckpointMissing, CheckpointCorrupt."""
        path = Path(path)
        try:
            text = read_file(path, MAX_CONFIG_BYTES, fail=damage(str(path)))
        except OSError as error:
            if error.errno != errno.ENOENT:
                raise refusal(error, path) from error
            raise CheckpointMissing(
                f"cannot read {path}: {error.strerror}", hint="name a checkpoint folder with a config.json"
            ) from None
        return cls.from_bytes(text, where=str(path))

    @classmethod
    def from_bytes(cls, text: bytes, *, where: str = "config.json") -> K3Config:
        return cls.from_dict(parse_config(text, where=where), where=where)

    @classmethod
    def from_dict(cls, document: Any, *, where: str = "config.json") -> K3Config:
        """Check and normalize a parsed `config.json`. Raises CheckpointCorrupt naming the key and its value."""
        return _Reader(document, where).config()


def _refused(where: str) -> Fail:
    """Makes the error of a configuration that is JSON, and of another model or of another mind."""

    def refused(message: str) -> K3Error:
        error = damage(where)(message)
        if "holds" not in error.details:
            error.hint = "name a Kimi K3 or Kimi Linear checkpoint; this configuration is not one that it can have"
        return error

    return refused


def parse_config(text: bytes, *, where: str) -> Any:
    """The JSON of a `config.json`, not yet checked. Of a repeated key the last counts, as for transformers.
    Raises CheckpointCorrupt."""
    check_size(where, len(text), MAX_CONFIG_BYTES, fail=damage(where))
    return parse_json(text, where=where, fail=damage(where), unique_keys=False)


def token_list(source: Fields, key: str) -> list[int]:
    """The token ids of a field that holds one, several or none; some files write -1 for none."""
    value = source.values.get(key)
    values = value if isinstance(value, list) else [] if value is None else [value]
    if len(values) > MAX_TOKENS_NAMED or not all(type(item) is int and -1 <= item <= MAX_TOKEN for item in values):
        raise source.bad(key, f"a token id or a list of at most {MAX_TOKENS_NAMED}")
    return values


class _Reader:
    """Reads one configuration, key by key, so that each refusal names the key and the value found.

    A null is what an absent key is, the default, for transformers reads it so for optional fields.
    """

    def __init__(self, document: Any, where: str) -> None:
        self.where = where
        if not isinstance(document, dict):
            raise self._bad(f"expected a JSON object, found {shown(document)}")
        self.top = Fields(document, where, _refused(where))
        text = document.get("text_config")
        self.is_k3 = isinstance(text, dict)
        self.text = Fields(text, where, _refused(where)) if isinstance(text, dict) else self.top
        if not isinstance(self.text.values.get("linear_attn_config"), dict):
            found = shown(document.get("model_type"))
            raise self._bad(
                f"no linear_attn_config (model_type {found}), so this is no Kimi K3 or Kimi Linear checkpoint"
            )
        self.linear = self.text.fields("linear_attn_config")
        self.linear.where = where

    def _bad(self, what: str) -> K3Error:
        return _refused(self.where)(f"{self.where}: {what}")

    def size(self, source: Fields, key: str, default: int = REQUIRED, *, low: int = 1) -> int:
        """A width or a count, of at most what `_HIGHEST` allows: a refusal costs nothing, an expansion memory."""
        return source.integer(key, default, low=low, high=_HIGHEST.get(key, MAX_WIDTH))

    def optional(self, source: Fields, key: str) -> int | None:
        return self.size(source, key, 0, low=0) or None

    def token(self, key: str) -> int | None:
        """A token id; some configurations write -1 for none."""
        return (self.top if key in self.top else self.text).integer(key, None, low=-1, high=MAX_TOKEN)

    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """`kda_layers` and `full_attn_layers` count from 1; together they must name every layer once."""
        count = self.size(self.text, "num_hidden_layers")
        types = self.text.values.get("layer_types")
        if "kda_layers" not in self.linear and isinstance(types, list) and len(types) == count:
            return tuple("kda" if kind == "linear_attention" else "mla" for kind in types)
        kinds: dict[int, LayerKind] = {}
        lists: tuple[tuple[str, LayerKind], ...] = (("kda_layers", "kda"), ("full_attn_layers", "mla"))
        for key, kind in lists:
            for layer in self.linear.items(key, []):
                if type(layer) is not int or not 1 <= layer <= count or layer in kinds:
                    raise self._bad(f"{key}: layer {shown(layer)} is out of 1..{count} or named twice")
                kinds[layer] = kind
        if len(kinds) != count:
            absent = next(layer for layer in range(1, count + 1) if layer not in kinds)
            raise self._bad(f"layer {absent} (counted from 1) is neither in kda_layers nor in full_attn_layers")
        return tuple(kinds[layer] for layer in range(1, count + 1))

    def dtype(self) -> str:
        """Of the text model. transformers also writes an object: part of the model (or "" for all) to dtype."""
        for source, key in ((self.top, "dtype"), (self.top, "torch_dtype"), (self.text, "dtype")):
            found = source.values.get(key)
            if isinstance(found, dict):
                found = found.get("text_config") or found.get("")
            if found:
                break
        found = found or "bfloat16"
        if not isinstance(found, str) or found not in _DTYPES:
            raise self._bad(f"dtype must be one of {', '.join(_DTYPES)}, found {shown(found)}")
        return _DTYPES[found]

    def eos(self) -> tuple[int, ...]:
        """Those of the whole model, then those that only its text part names."""
        both = [self.top] if self.top is self.text else [self.top, self.text]
        return tuple(dict.fromkeys(token for source in both for token in token_list(source, "eos_token_id")))

    def quantization(self) -> dict[str, Any] | None:
        """The `quantization_config` that applies, its parts that k3tool looks at checked."""
        source = self.text if self.text.values.get("quantization_config") else self.top
        found = source.mapping("quantization_config", {})
        if not found:
            return None
        section = source.fields("quantization_config")
        section.text("format", "")
        section.text("quant_method", "")
        groups = section.fields("config_groups", {})
        for name, group in groups.values.items():
            if isinstance(group, dict):
                groups.fields(name).text("format", "")
        return found

    def vision(self) -> VisionConfig | None:
        if not self.is_k3 or not isinstance(self.top.values.get("vision_config"), dict):
            return None
        source = self.top.fields("vision_config")
        source.where = self.where
        merge = source.values.get("merge_kernel_size")
        merge = merge if isinstance(merge, list) else [2, 2] if merge is None else [merge, merge]
        if len(merge) != 2 or not all(type(item) is int and 1 <= item <= 64 for item in merge):
            raise source.bad("merge_kernel_size", "two small numbers")
        hidden = self.size(source, "vt_hidden_size", 1024)
        return VisionConfig(
            num_layers=self.size(source, "vt_num_hidden_layers", 27),
            hidden_size=hidden,
            intermediate_size=self.size(source, "vt_intermediate_size", 4096),
            qkv_hidden_size=self.size(source, "qkv_hidden_size", hidden),
            patch_size=self.size(source, "patch_size", 14),
            pos_emb_height=self.size(source, "init_pos_emb_height", 64),
            pos_emb_width=self.size(source, "init_pos_emb_width", 64),
            merge_size=merge[0] * merge[1],
            text_hidden_size=self.size(source, "text_hidden_size", self.size(self.text, "hidden_size")),
        )

    def config(self) -> K3Config:
        text, linear = self.text, self.linear
        if not text.flag("mla_use_nope", True):
            raise self._bad("mla_use_nope must be true: MLA with rotary positions is not part of this family")
        num_heads = self.size(text, "num_attention_heads")
        num_experts = self.size(text, "num_experts", 0, low=0)
        per_token = self.size(text, "num_experts_per_token", 0, low=0)
        groups = self.size(text, "num_expert_group", 1)
        topk_groups = self.size(text, "topk_group", 1)
        if num_experts and not 1 <= per_token <= num_experts:
            raise self._bad(f"num_experts_per_token {per_token} does not fit num_experts {num_experts}")
        if num_experts and (num_experts % groups or topk_groups > groups):
            raise self._bad(f"num_expert_group {groups} (topk_group {topk_groups}) does not fit {num_experts} experts")
        layers = self.layer_kinds()
        if num_experts * len(layers) > MAX_EXPERTS:
            raise self._bad(f"num_experts {num_experts} in {len(layers)} layers are more than {MAX_EXPERTS} in all")
        return K3Config(
            model_type=self.top.text("model_type", "kimi_linear", longest=200),
            is_k3=self.is_k3,
            dtype=self.dtype(),
            vocab_size=self.size(text, "vocab_size"),
            hidden_size=self.size(text, "hidden_size"),
            layer_kinds=layers,
            kda_num_heads=self.size(linear, "num_heads"),
            kda_head_dim=self.size(linear, "head_dim"),
            conv_kernel_size=self.size(linear, "short_conv_kernel_size", 4),
            gate_lower_bound=linear.number("gate_lower_bound", None),
            full_rank_gate=linear.flag("use_full_rank_gate", False),
            num_heads=num_heads,
            q_lora_rank=self.optional(text, "q_lora_rank"),
            kv_lora_rank=self.size(text, "kv_lora_rank"),
            qk_nope_head_dim=self.size(text, "qk_nope_head_dim"),
            qk_rope_head_dim=self.size(text, "qk_rope_head_dim", 0, low=0),
            v_head_dim=self.size(text, "v_head_dim"),
            mla_output_gate=text.flag("mla_use_output_gate", False),
            intermediate_size=self.size(text, "intermediate_size"),
            first_k_dense=self.size(text, "first_k_dense_replace", 0, low=0),
            moe_layer_freq=self.size(text, "moe_layer_freq", 1),
            num_experts=num_experts,
            experts_per_token=per_token,
            num_shared_experts=self.size(text, "num_shared_experts", 0, low=0),
            moe_intermediate_size=self.size(text, "moe_intermediate_size", self.size(text, "intermediate_size")),
            latent_size=self.optional(text, "routed_expert_hidden_size"),
            latent_norm=text.flag("latent_moe_use_norm", True),
            router_activation=text.text("moe_router_activation_func", "sigmoid", choices=("sigmoid", "softmax")),
            router_bias=text.text("topk_method", "noaux_tc") == "noaux_tc",
            renormalize=text.flag("moe_renormalize", True),
            routed_scaling_factor=text.number("routed_scaling_factor", 1.0),
            num_expert_groups=groups,
            topk_groups=topk_groups,
            activation=text.text("hidden_act", "silu", choices=("situ", "silu")),
            situ_beta=text.number("activation_situ_beta", 4.0),
            situ_linear_beta=text.number("activation_situ_linear_beta", 25.0),
            attn_res_block_size=self.optional(text, "attn_res_block_size"),
            rms_norm_eps=text.number("rms_norm_eps", 1e-5),
            tie_word_embeddings=text.flag("tie_word_embeddings", self.top.flag("tie_word_embeddings", False)),
            max_positions=self.size(text, "max_position_embeddings", 1048576),
            bos_token_id=self.token("bos_token_id"),
            eos_token_ids=self.eos(),
            pad_token_id=self.token("pad_token_id"),
            media_token_id=self.token("media_placeholder_token_id"),
            quantization=self.quantization(),
            vision=self.vision(),
            raw=dict(self.top.values),
        )
