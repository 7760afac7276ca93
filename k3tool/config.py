"""K3Config: the architecture as `config.json` states it, checked once.

Nothing in k3tool looks at a model's name: layer kinds, widths, counts and scaling factors all come from here.
Both the nested form of Kimi K3 (`text_config`) and the flat form of Kimi Linear are read. What the file holds
beyond the architecture is kept untouched in `raw`, so that a rewritten configuration loses nothing.
"""

from __future__ import annotations

import errno
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from k3tool.checkpoint.origin import damaged
from k3tool.disk import refusal
from k3tool.errors import CheckpointCorrupt, CheckpointMissing

LayerKind = Literal["kda", "mla"]
_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
MAX_CONFIG_BYTES = 16 * 1024 * 1024


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
            size = path.stat().st_size
            if size > MAX_CONFIG_BYTES:
                raise CheckpointCorrupt(f"{path}: {size} bytes is no configuration", hint="name a config.json")
            text = path.read_bytes()
        except OSError as error:
            if error.errno != errno.ENOENT:
                raise refusal(error, path) from error
            raise CheckpointMissing(
                f"cannot read {path}: {error.strerror}", hint="name a checkpoint folder with a config.json"
            ) from None
        return cls.from_bytes(text, where=str(path))

    @classmethod
    def from_bytes(cls, text: bytes, *, where: str = "config.json") -> K3Config:
        try:
            document = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise damaged(where, f"not JSON ({error})") from None
        return cls.from_dict(document, where=where)

    @classmethod
    def from_dict(cls, document: Any, *, where: str = "config.json") -> K3Config:
        """Check and normalize a parsed `config.json`. Raises CheckpointCorrupt naming the key and its value."""
        return _Reader(document, where).config()


class _Reader:
    """Reads one configuration, key by key, so that each refusal names the key and the value found."""

    def __init__(self, document: Any, where: str) -> None:
        self.where = where
        if not isinstance(document, dict):
            raise self._bad("not a JSON object")
        self.top: dict[str, Any] = document
        text = document.get("text_config")
        self.is_k3 = isinstance(text, dict)
        self.text: dict[str, Any] = text if isinstance(text, dict) else document
        if not isinstance(self.text.get("linear_attn_config"), dict):
            found = document.get("model_type")
            raise self._bad(
                f"no linear_attn_config (model_type {found!r}), so this is no Kimi K3 or Kimi Linear checkpoint"
            )
        self.linear: dict[str, Any] = self.text["linear_attn_config"]

    def _bad(self, what: str) -> CheckpointCorrupt:
        error = damaged(self.where, what)
        if "holds" not in error.details:  # JSON, and of another model or of another mind
            error.hint = "name a Kimi K3 or Kimi Linear checkpoint; this configuration is not one that it can have"
        return error

    def integer(self, source: dict[str, Any], key: str, default: int | None = None, *, low: int = 1) -> int:
        value = source.get(key, default)
        if value is None:
            value = default
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= 2**40:
            raise self._bad(f"{key} must be a whole number of at least {low}, found {source.get(key)!r}")
        return value

    def number(self, source: dict[str, Any], key: str, default: float) -> float:
        value = source.get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < 1e30:
            raise self._bad(f"{key} must be a number, found {value!r}")
        return float(value)

    def optional(self, source: dict[str, Any], key: str) -> int | None:
        return None if source.get(key) in (None, 0) else self.integer(source, key)

    def flag(self, source: dict[str, Any], key: str, default: bool) -> bool:
        value = source.get(key, default)
        if not isinstance(value, bool):
            raise self._bad(f"{key} must be true or false, found {value!r}")
        return value

    def token(self, key: str) -> int | None:
        value = self.top.get(key, self.text.get(key))
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise self._bad(f"{key} must be a token id, found {value!r}")
        return value

    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """`kda_layers` and `full_attn_layers` count from 1; together they must name every layer once."""
        count = self.integer(self.text, "num_hidden_layers")
        if count > 100_000:
            raise self._bad(f"num_hidden_layers {count} is beyond any model")
        types = self.text.get("layer_types")
        if "kda_layers" not in self.linear and isinstance(types, list) and len(types) == count:
            return tuple("kda" if kind == "linear_attention" else "mla" for kind in types)
        kinds: dict[int, LayerKind] = {}
        for key, kind in (("kda_layers", "kda"), ("full_attn_layers", "mla")):
            layers = self.linear.get(key, [])
            if not isinstance(layers, list):
                raise self._bad(f"{key} must be a list of layer numbers, found {layers!r}")
            for layer in layers:
                if isinstance(layer, bool) or not isinstance(layer, int) or not 1 <= layer <= count or layer in kinds:
                    raise self._bad(f"{key}: layer {layer!r} is out of 1..{count} or named twice")
                kinds[layer] = kind  # type: ignore[assignment]
        if len(kinds) != count:
            absent = next(layer for layer in range(1, count + 1) if layer not in kinds)
            raise self._bad(f"layer {absent} (counted from 1) is neither in kda_layers nor in full_attn_layers")
        return tuple(kinds[layer] for layer in range(1, count + 1))

    def dtype(self) -> str:
        found = self.top.get("dtype") or self.top.get("torch_dtype") or self.text.get("dtype") or "bfloat16"
        if found not in _DTYPES:
            raise self._bad(f"dtype must be one of {', '.join(_DTYPES)}, found {found!r}")
        return _DTYPES[found]

    def eos(self) -> tuple[int, ...]:
        value = self.top.get("eos_token_id", self.text.get("eos_token_id"))
        values = value if isinstance(value, list) else [] if value is None else [value]
        if any(isinstance(item, bool) or not isinstance(item, int) for item in values):
            raise self._bad(f"eos_token_id must be a token id or a list of them, found {value!r}")
        return tuple(values)

    def vision(self) -> VisionConfig | None:
        source = self.top.get("vision_config")
        if not self.is_k3 or not isinstance(source, dict):
            return None
        merge = source.get("merge_kernel_size", [2, 2])
        merge = merge if isinstance(merge, list) else [merge, merge]
        if len(merge) != 2 or not all(isinstance(item, int) and 1 <= item <= 64 for item in merge):
            raise self._bad(f"merge_kernel_size must be two small numbers, found {merge!r}")
        hidden = self.integer(source, "vt_hidden_size", 1024)
        return VisionConfig(
            num_layers=self.integer(source, "vt_num_hidden_layers", 27),
            hidden_size=hidden,
            intermediate_size=self.integer(source, "vt_intermediate_size", 4096),
            qkv_hidden_size=self.integer(source, "qkv_hidden_size", hidden),
            patch_size=self.integer(source, "patch_size", 14),
            pos_emb_height=self.integer(source, "init_pos_emb_height", 64),
            pos_emb_width=self.integer(source, "init_pos_emb_width", 64),
            merge_size=merge[0] * merge[1],
            text_hidden_size=self.integer(source, "text_hidden_size", self.integer(self.text, "hidden_size")),
        )

    def config(self) -> K3Config:
        text, linear = self.text, self.linear
        activation = text.get("hidden_act", "silu")
        router = text.get("moe_router_activation_func", "sigmoid")
        if activation not in ("situ", "silu"):
            raise self._bad(f"hidden_act must be situ or silu, found {activation!r}")
        if router not in ("sigmoid", "softmax"):
            raise self._bad(f"moe_router_activation_func must be sigmoid or softmax, found {router!r}")
        if text.get("mla_use_nope", True) is not True:
            raise self._bad("mla_use_nope must be true: MLA with rotary positions is not part of this family")
        num_heads = self.integer(text, "num_attention_heads")
        num_experts = self.integer(text, "num_experts", 0, low=0)
        per_token = self.integer(text, "num_experts_per_token", 0, low=0)
        groups = self.integer(text, "num_expert_group", 1)
        topk_groups = self.integer(text, "topk_group", 1)
        if num_experts and not 1 <= per_token <= num_experts:
            raise self._bad(f"num_experts_per_token {per_token} does not fit num_experts {num_experts}")
        if num_experts and (num_experts % groups or topk_groups > groups):
            raise self._bad(f"num_expert_group {groups} (topk_group {topk_groups}) does not fit {num_experts} experts")
        lower_bound = linear.get("gate_lower_bound")
        quantization = text.get("quantization_config") or self.top.get("quantization_config")
        return K3Config(
            model_type=str(self.top.get("model_type", "kimi_linear")),
            is_k3=self.is_k3,
            dtype=self.dtype(),
            vocab_size=self.integer(text, "vocab_size"),
            hidden_size=self.integer(text, "hidden_size"),
            layer_kinds=self.layer_kinds(),
            kda_num_heads=self.integer(linear, "num_heads"),
            kda_head_dim=self.integer(linear, "head_dim"),
            conv_kernel_size=self.integer(linear, "short_conv_kernel_size", 4),
            gate_lower_bound=None if lower_bound is None else self.number(linear, "gate_lower_bound", 0.0),
            full_rank_gate=self.flag(linear, "use_full_rank_gate", False),
            num_heads=num_heads,
            q_lora_rank=self.optional(text, "q_lora_rank"),
            kv_lora_rank=self.integer(text, "kv_lora_rank"),
            qk_nope_head_dim=self.integer(text, "qk_nope_head_dim"),
            qk_rope_head_dim=self.integer(text, "qk_rope_head_dim", 0, low=0),
            v_head_dim=self.integer(text, "v_head_dim"),
            mla_output_gate=self.flag(text, "mla_use_output_gate", False),
            intermediate_size=self.integer(text, "intermediate_size"),
            first_k_dense=self.integer(text, "first_k_dense_replace", 0, low=0),
            moe_layer_freq=self.integer(text, "moe_layer_freq", 1),
            num_experts=num_experts,
            experts_per_token=per_token,
            num_shared_experts=self.integer(text, "num_shared_experts", 0, low=0),
            moe_intermediate_size=self.integer(text, "moe_intermediate_size", self.integer(text, "intermediate_size")),
            latent_size=self.optional(text, "routed_expert_hidden_size"),
            latent_norm=self.flag(text, "latent_moe_use_norm", True),
            router_activation=router,
            router_bias=text.get("topk_method", "noaux_tc") == "noaux_tc",
            renormalize=self.flag(text, "moe_renormalize", True),
            routed_scaling_factor=self.number(text, "routed_scaling_factor", 1.0),
            num_expert_groups=groups,
            topk_groups=topk_groups,
            activation=activation,
            situ_beta=self.number(text, "activation_situ_beta", 4.0),
            situ_linear_beta=self.number(text, "activation_situ_linear_beta", 25.0),
            attn_res_block_size=self.optional(text, "attn_res_block_size"),
            rms_norm_eps=self.number(text, "rms_norm_eps", 1e-5),
            tie_word_embeddings=self.flag(
                text, "tie_word_embeddings", self.flag(self.top, "tie_word_embeddings", False)
            ),
            max_positions=self.integer(text, "max_position_embeddings", 1048576),
            bos_token_id=self.token("bos_token_id"),
            eos_token_ids=self.eos(),
            pad_token_id=self.token("pad_token_id"),
            media_token_id=self.token("media_placeholder_token_id"),
            quantization=quantization if isinstance(quantization, dict) else None,
            vision=self.vision(),
            raw=self.top,
        )
