"""What a checkpoint of a given configuration holds: every tensor's name, shape, dtype, component and shard.

Made from the configuration alone (no file is read), so that everything else can be compared with it: for the
released configuration it yields exactly the 497,220 names of the released index and its 1,560,860,324,864 bytes.
Shard layout of the release: layer N is shard N+1, then embeddings and head, projector, vision tower.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from k3tool.config import K3Config
from k3tool.errors import CheckpointCorrupt, UnsupportedError
from k3tool.garbage import collector_paused
from k3tool.names import parse_name, shard_name

COMPONENTS = (
    "routed_experts",
    "shared_experts",
    "latent",
    "kda",
    "mla",
    "router",
    "dense_mlp",
    "attn_res",
    "norms",
    "embeddings",
    "vision",
)
DTYPE_BITS = {"BF16": 16, "F16": 16, "F32": 32, "F64": 64, "U8": 8, "I8": 8, "I16": 16, "I32": 32, "I64": 64,
              "U16": 16, "U32": 32, "U64": 64, "BOOL": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4}  # fmt: skip
MXFP4_GROUP = 32
EXPERT_MATRICES = ("w1", "w2", "w3")  # gate, down, up


class Entry(NamedTuple):
    """One tensor that the configuration implies. `shard` counts from 0.

    parameters: logical weights; an MXFP4 code counts one, its scales count none.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    component: str
    shard: int
    nbytes: int
    parameters: int


def make_entry(name: str, shape: tuple[int, ...], dtype: str, component: str, shard: int) -> Entry:
    elements = count(shape)
    parameters = elements
    if component == "routed_experts" and not name.endswith(".weight"):
        parameters = 2 * elements if name.endswith(".weight_packed") else 0
    return Entry(name, shape, dtype, component, shard, elements * DTYPE_BITS[dtype] // 8, parameters)


class Catalog(NamedTuple):
    entries: list[Entry]
    shards: list[str]

    @property
    def total_size(self) -> int:
        return sum(entry.nbytes for entry in self.entries)


def count(shape: tuple[int, ...]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product


def catalog(config: K3Config) -> Catalog:
    """All tensors that `config` implies, in shard order. Raises UnsupportedError where a width cannot be stored."""
    with collector_paused():
        return _catalog(config)


def check_extent(config: K3Config, names: int) -> None:
    """Refuse a configuration that implies many times the `names` tensors that are there, before they are listed: its
    numbers belong to another checkpoint. Raises CheckpointCorrupt."""
    experts = len(config.moe_layers) * config.num_experts
    if len(EXPERT_MATRICES) * experts > 4 * names + 100_000:
        raise CheckpointCorrupt(
            f"config.json: num_experts {config.num_experts} in {len(config.moe_layers)} layers are {experts:,} experts, "
            f"and the checkpoint has {names:,} tensors in all",
            hint="put the config.json there that belongs to these shards",
        )


def _catalog(config: K3Config) -> Catalog:
    total = config.num_layers + (3 if config.vision else 1)
    entries = [entry for section in range(total) for entry in section_entries(config, section)]
    return Catalog(entries, [shard_name(number + 1, total) for number in range(total)])


def section_entries(config: K3Config, section: int) -> list[Entry]:
    """The entries of one shard of the released layout (layer N is section N, then globals, projector, vision tower),
    for those who cannot hold half a million at once."""
    beyond = section - config.num_layers
    makers = [_globals, _projector, _vision] if config.vision else [_globals]
    entries = list(_layer(config, section) if beyond < 0 else makers[beyond](config, section))
    if config.dtype != "BF16":
        entries = [
            make_entry(*entry[:2], config.dtype, *entry[3:5]) if entry.dtype == "BF16" else entry for entry in entries
        ]
    return entries


class MatrixShapes:
    """[out, in] of the matrix at a module path, as the configuration implies; None where it implies none. Some storage
    does not tell it (bitsandbytes) or leaves it open (packed integers). One section is held at a time."""

    def __init__(self, config: K3Config) -> None:
        self._config = config
        self._section = -1
        self._shapes: dict[str, tuple[int, ...]] = {}

    def __call__(self, path: str) -> tuple[int, ...] | None:
        name = parse_name(path + ".weight")
        if name is None or (name.layer is not None and name.layer >= self._config.num_layers):
            return None
        beyond = self._config.num_layers
        sections = range(beyond, beyond + (3 if self._config.vision else 1)) if name.layer is None else (name.layer,)
        for section in sections:
            if section != self._section:
                self._section, self._shapes = section, dict(self._matrices(section))
            if path in self._shapes:
                return self._shapes[path]
        return None

    def _matrices(self, section: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        for entry in section_entries(self._config, section):
            if len(entry.shape) != 2:
                continue
            if entry.name.endswith(".weight"):
                halved = entry.dtype == "U8"
                yield entry.name.removesuffix(".weight"), (entry.shape[0], entry.shape[1] * (2 if halved else 1))
            elif entry.name.endswith(".weight_packed"):
                yield entry.name.removesuffix(".weight_packed"), (entry.shape[0], entry.shape[1] * 2)


def attention_tensors(config: K3Config, layer: int) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """(name below `self_attn.`, shape, dtype) of one attention layer, KDA or MLA. Linear weights are [out, in]."""
    hidden = config.hidden_size
    if config.layer_kinds[layer] == "kda":
        width, dim = config.kda_size, config.kda_head_dim
        for stream in "qkv":
            yield f"{stream}_proj.weight", (width, hidden), "BF16"
        for stream in "qkv":
            yield f"{stream}_conv1d.weight", (width, 1, config.conv_kernel_size), "F32"
        yield "f_a_proj.weight", (dim, hidden), "BF16"
        yield "f_b_proj.weight", (width, dim), "BF16"
        yield "b_proj.weight", (config.kda_num_heads, hidden), "BF16"
        yield "A_log", (config.a_log_size,), "F32"
        yield "dt_bias", (width,), "F32"
        yield "o_norm.weight", (dim,), "F32"
        if config.full_rank_gate:
            yield "g_proj.weight", (width, hidden), "BF16"
        else:
            yield "g_a_proj.weight", (dim, hidden), "BF16"
            yield "g_b_proj.weight", (width, dim), "BF16"
        yield "o_proj.weight", (hidden, width), "BF16"
        return
    heads = config.num_heads
    queries = heads * (config.qk_nope_head_dim + config.qk_rope_head_dim)
    if config.q_lora_rank:
        yield "q_a_proj.weight", (config.q_lora_rank, hidden), "BF16"
        yield "q_a_layernorm.weight", (config.q_lora_rank,), "BF16"
        yield "q_b_proj.weight", (queries, config.q_lora_rank), "BF16"
    else:
        yield "q_proj.weight", (queries, hidden), "BF16"
    yield "kv_a_proj_with_mqa.weight", (config.mla_cache_width, hidden), "BF16"
    yield "kv_a_layernorm.weight", (config.kv_lora_rank,), "BF16"
    yield "kv_b_proj.weight", (heads * (config.qk_nope_head_dim + config.v_head_dim), config.kv_lora_rank), "BF16"
    if config.mla_output_gate:
        yield "g_proj.weight", (heads * config.v_head_dim, hidden), "BF16"
    yield "o_proj.weight", (hidden, heads * config.v_head_dim), "BF16"


def expert_matrix_shapes(config: K3Config) -> dict[str, tuple[int, int]]:
    """Logical [out, in] of w1 (gate), w2 (down) and w3 (up) of one routed expert."""
    inner, outer = config.moe_intermediate_size, config.expert_size
    return {"w1": (inner, outer), "w2": (outer, inner), "w3": (inner, outer)}


def _layer(config: K3Config, layer: int) -> Iterator[Entry]:
    prefix = f"{config.name_prefix}model.layers.{layer}."
    hidden = config.hidden_size
    kind = config.layer_kinds[layer]

    def entry(name: str, shape: tuple[int, ...], component: str, dtype: str = "BF16") -> Entry:
        return make_entry(prefix + name, shape, dtype, component, layer)

    yield entry("input_layernorm.weight", (hidden,), "norms")
    yield entry("post_attention_layernorm.weight", (hidden,), "norms")
    if config.attn_res_block_size:
        for site in ("self_attention_res", "mlp_res"):
            yield entry(f"{site}_norm.weight", (hidden,), "attn_res")
            yield entry(f"{site}_proj.weight", (1, hidden), "attn_res")
    for name, shape, dtype in attention_tensors(config, layer):
        yield entry(f"self_attn.{name}", shape, kind, dtype)
    if not config.is_moe(layer):
        for name, shape in _glu(hidden, config.intermediate_size):
            yield entry(f"mlp.{name}", shape, "dense_mlp")
        return
    yield entry("block_sparse_moe.gate.weight", (config.num_experts, hidden), "router")
    if config.router_bias:
        yield entry("block_sparse_moe.gate.e_score_correction_bias", (config.num_experts,), "router", "F32")
    if config.latent_size:
        yield entry("block_sparse_moe.routed_expert_down_proj.weight", (config.latent_size, hidden), "latent")
        if config.latent_norm:
            yield entry("block_sparse_moe.routed_expert_norm.weight", (config.latent_size,), "latent")
        yield entry("block_sparse_moe.routed_expert_up_proj.weight", (hidden, config.latent_size), "latent")
    if config.num_shared_experts:
        for name, shape in _glu(hidden, config.shared_intermediate_size):
            yield entry(f"block_sparse_moe.shared_experts.{name}", shape, "shared_experts")
    yield from _experts(config, layer, f"{prefix}block_sparse_moe.experts.")


def _experts(config: K3Config, layer: int, prefix: str) -> Iterator[Entry]:
    stored: list[tuple[str, tuple[int, ...], str]] = []
    for matrix, (rows, columns) in expert_matrix_shapes(config).items():
        if config.expert_scheme == "bf16":
            stored.append((f".{matrix}.weight", (rows, columns), "BF16"))
            continue
        group, scale_dtype = (16, "F8_E4M3") if config.expert_scheme == "nvfp4" else (MXFP4_GROUP, "U8")
        if columns % group:
            raise UnsupportedError(
                f"expert {matrix}: {columns} columns are not whole groups of {group}",
                hint="check moe_intermediate_size and routed_expert_hidden_size in config.json",
            )
        stored.append((f".{matrix}.weight_packed", (rows, columns // 2), "U8"))
        stored.append((f".{matrix}.weight_scale", (rows, columns // group), scale_dtype))
        if config.expert_scheme == "nvfp4":
            stored.append((f".{matrix}.weight_global_scale", (1,), "F32"))
    sample = [
        (suffix, make_entry(suffix, shape, dtype, "routed_experts", layer)[1:]) for suffix, shape, dtype in stored
    ]
    for expert in range(config.num_experts):
        for suffix, rest in sample:
            yield Entry(f"{prefix}{expert}{suffix}", *rest)


def _glu(hidden: int, intermediate: int) -> Iterator[tuple[str, tuple[int, int]]]:
    yield "gate_proj.weight", (intermediate, hidden)
    yield "up_proj.weight", (intermediate, hidden)
    yield "down_proj.weight", (hidden, intermediate)


def _globals(config: K3Config, shard: int) -> Iterator[Entry]:
    prefix, table = config.name_prefix, (config.vocab_size, config.hidden_size)
    if not config.tie_word_embeddings:
        yield make_entry(f"{prefix}lm_head.weight", table, "BF16", "embeddings", shard)
    yield make_entry(f"{prefix}model.embed_tokens.weight", table, "BF16", "embeddings", shard)
    yield make_entry(f"{prefix}model.norm.weight", (config.hidden_size,), "BF16", "norms", shard)
    if config.attn_res_block_size:
        yield make_entry(f"{prefix}model.output_attn_res_norm.weight", (config.hidden_size,), "BF16", "attn_res", shard)
        yield make_entry(
            f"{prefix}model.output_attn_res_proj.weight", (1, config.hidden_size), "BF16", "attn_res", shard
        )


def _projector(config: K3Config, shard: int) -> Iterator[Entry]:
    vision = config.vision
    assert vision is not None
    merged = vision.hidden_size * vision.merge_size
    yield make_entry("mm_projector.post_norm.weight", (vision.text_hidden_size,), "BF16", "vision", shard)
    yield make_entry("mm_projector.proj.0.weight", (merged, merged), "BF16", "vision", shard)
    yield make_entry("mm_projector.proj.2.weight", (vision.text_hidden_size, merged), "BF16", "vision", shard)


def _vision(config: K3Config, shard: int) -> Iterator[Entry]:
    vision = config.vision
    assert vision is not None
    width, inner, qkv = vision.hidden_size, vision.intermediate_size, vision.qkv_hidden_size

    def entry(name: str, *shape: int) -> Entry:
        return make_entry(f"vision_tower.{name}.weight", shape, "BF16", "vision", shard)

    for block in range(vision.num_layers):
        prefix = f"encoder.blocks.{block}."
        yield entry(prefix + "mlp.fc0", inner, width)
        yield entry(prefix + "mlp.fc1", width, inner)
        yield entry(prefix + "norm0", width)
        yield entry(prefix + "norm1", width)
        yield entry(prefix + "wo", width, qkv)
        yield entry(prefix + "wqkv", 3 * qkv, width)
    yield entry("encoder.final_layernorm", width)
    yield entry("patch_embed.pos_emb", vision.pos_emb_height, vision.pos_emb_width, width)
    yield entry("patch_embed.proj", width, 3, vision.patch_size, vision.patch_size)
