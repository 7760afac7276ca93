"""Checkpoint to model: which tensors make up each module, checked before a byte of them is read.

How a module is stored is decided from the names, dtypes and shapes of its tensors, never from a quantization
configuration. The model is built twice from the same code: once only to check and to count bytes, then for real.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from k3tool.catalog import count
from k3tool.checkpoint.header import TensorSpec
from k3tool.checkpoint.origin import look
from k3tool.checkpoint.reader import Checkpoint, Located
from k3tool.config import K3Config
from k3tool.conform import FLOAT_HINT, foreign_float, fused_error, fused_experts
from k3tool.errors import CapacityError, CheckpointCorrupt, UsageError
from k3tool.events import SILENT, Progress
from k3tool.layout import Layout, Place
from k3tool.memory import available_bytes
from k3tool.model.attention import KdaAttention, MlaAttention
from k3tool.model.bound import Bound, too_little
from k3tool.model.cache import Cache
from k3tool.model.decoder import DecoderLayer, Model
from k3tool.model.experts import load_experts
from k3tool.model.moe import GatedMlp, SparseMoe
from k3tool.model.streaming import stream_experts
from k3tool.model.weights import Matrix, Weights
from k3tool.names import INPUT_SCALES, parse_name
from k3tool.parallel.groups import SINGLE, Group, Parallel
from k3tool.parallel.share import Share, share_of
from k3tool.units import format_bytes


def load_model(
    checkpoint: Checkpoint,
    *,
    device: torch.device,
    dtype: torch.dtype,
    layers: int | None = None,
    memory_bytes: int | None = None,
    progress: Progress = SILENT,
) -> Model:
    """The text model with its first `layers` layers (all with None). Matrices stay in memory as they are on disk (kv_b of
    MLA is widened where it is quantized; on a GPU all quantized ones but experts).

    memory_bytes: a limit below what the machine has; where it does not hold all experts, as many of every layer as fit
    stay resident and the others are read when a token visits them. Without it, experts are never streamed.
    Raises CheckpointMissing, CheckpointCorrupt, UnsupportedError (a storage scheme), UsageError (`layers`),
    CapacityError before anything is read.
    """
    found = prepare_model(checkpoint, device=device, dtype=dtype, layers=layers, memory_bytes=memory_bytes)
    return found.read(progress)


@dataclass(frozen=True)
class Prepared:
    """A model whose tensors are found, checked and known to fit. slots: experts of every layer to be resident, or all."""

    checkpoint: Checkpoint
    share: Share
    device: torch.device
    dtype: torch.dtype
    located: dict[str, Located]
    used: set[str]
    slots: int | None

    def read(self, progress: Progress = SILENT, parallel: Parallel = SINGLE) -> Model:
        """Raises CheckpointMissing and CheckpointCorrupt for what only the bytes show."""
        size = sum(self.located[name].spec.nbytes for name in self.used if self.slots is None or not _is_routed(name))
        progress.started("load", size)
        weights = Weights(self.checkpoint, self.located, self.device, progress, self.dtype)
        model = _build(weights, self.share, self.dtype, self.slots, parallel)
        progress.finished("load")
        return model


def prepare_model(
    checkpoint: Checkpoint,
    *,
    device: torch.device,
    dtype: torch.dtype,
    layers: int | None = None,
    memory_bytes: int | None = None,
    bound: Bound | None = None,
    room_bytes: int | None = None,
    layout: Layout | None = None,
    place: Place | None = None,
) -> Prepared:
    """Everything of `load_model` but the reading. checkpoint: of the rank at `place` of `layout` (None: of all).

    bound: instead of memory_bytes, a limit of the whole process. room_bytes: the memory that this process may use (None: what the device has). Raises what `load_model` raises.
    """
    config = checkpoint.config
    number = config.num_layers if layers is None else layers
    if not 1 <= number <= config.num_layers:
        raise UsageError(
            f"--layers {number}: the model has {config.num_layers} layers", hint="give a number within them"
        )
    share = share_of(config, layout or Layout(), place or Layout().place(0), number)
    located = _locate(checkpoint, share)
    measured = _measure(checkpoint, located, device, share, dtype, None)
    _refuse_unknown(located, measured.used)
    slots = None
    need = measured.nbytes + _state_bytes(share)
    room = _room(device) if room_bytes is None else room_bytes
    beside = 0
    if bound is not None:
        beside = bound.beside(config, number, dtype) if device.type == "cpu" else 0
        memory_bytes = bound.process_bytes - beside
    if memory_bytes is not None:
        room = min(room, memory_bytes)
    if need > room:
        least = _measure(checkpoint, located, device, share, dtype, 1)
        if bound is not None and beside and least.nbytes + _state_bytes(share) > memory_bytes:
            streams = measured.nbytes > least.nbytes
            raise too_little(bound, least.nbytes + _state_bytes(share), beside, streams)
        slots = _slots(need, measured.nbytes - least.nbytes, room, len(share.experts), memory_bytes is not None)
    return Prepared(checkpoint, share, device, dtype, located, measured.used, slots)


def _locate(checkpoint: Checkpoint, share: Share) -> dict[str, Located]:
    """Places of the tensors of a rank's layers and of the text model's globals; reads their headers only."""
    wanted: dict[str, set[str]] = {}
    for name, shard in checkpoint.index.weight_map.items():
        if _belongs(name, share):
            wanted.setdefault(shard, set()).add(name)
    located: dict[str, Located] = {}
    config, weight_map = share.config, checkpoint.index.weight_map
    odd: list[TensorSpec] = []
    for shard, names in wanted.items():
        header = checkpoint.header(shard)
        for spec in header.tensors:
            if spec.name in names:
                located[spec.name] = Located(spec, shard, header.data_start + spec.start)
                names.discard(spec.name)
                if {spec.dtype, config.dtype} == {"BF16", "F16"}:
                    odd.append(spec)
            elif weight_map.get(spec.name) != shard:
                raise CheckpointCorrupt(
                    f"{shard} holds tensor {spec.name} that the index does not place there",
                    hint=look(checkpoint.source.label),
                )
        if names:
            raise CheckpointCorrupt(
                f"{shard} does not hold tensor {min(names)} that the index places there",
                hint=look(checkpoint.source.label),
            )
    if fused := fused_experts(located):
        raise fused_error(checkpoint.source.label, fused)
    if text := foreign_float(config, odd):
        raise CheckpointCorrupt(f"{checkpoint.source.label}: {text}", hint=FLOAT_HINT)
    return located


def _belongs(name: str, share: Share) -> bool:
    """Whether a tensor is part of the text model cut to the layers that run: of one of them, or of what surrounds them."""
    prefix = share.config.name_prefix
    if not name.startswith(prefix):
        return False
    words = name[len(prefix) :].split(".", 3)
    if words[:2] == ["model", "layers"] and len(words) > 2 and words[2].isdecimal():
        return int(words[2]) < share.num_layers
    return words[0] in ("model", "lm_head")


def _refuse_unknown(located: dict[str, Located], used: set[str]) -> None:
    """A tensor that nothing reads would change what the model computes."""
    unread = (".rotary_emb.inv_freq", *(f".{part}" for part in INPUT_SCALES))  # of engines that round activations
    unknown = sorted(name for name in set(located) - used if not name.endswith(unread))
    if unknown:
        raise CheckpointCorrupt(
            f"{located[unknown[0]].shard}: the configuration implies no tensor {unknown[0]}"
            + (f" (and {len(unknown) - 1} more)" if len(unknown) > 1 else ""),
            hint="config.json and shards must come from the same checkpoint",
        )


def _measure(
    checkpoint: Checkpoint,
    located: dict[str, Located],
    device: torch.device,
    share: Share,
    dtype: torch.dtype,
    slots: int | None,
) -> Weights:
    """The model built without reading anything: what it would occupy, and which tensors it uses."""
    measured = Weights(checkpoint, located, device, None, dtype)
    _build(measured, share, dtype, slots)
    return measured


def _state_bytes(share: Share) -> int:
    return Cache(share.config, share.layers, torch.device("meta"), torch.float32).kda_state_bytes


def _room(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_bytes()


def _slots(need: int, streamable: int, room: int, num_experts: int, may_stream: bool) -> int:
    """How many experts of every layer may stay in memory, where not all of them may.

    need: bytes of the whole model; streamable: of all experts but one a layer. Raises CapacityError.
    """
    least = need - streamable
    if may_stream and streamable and least <= room:
        return 1 + (room - least) * (num_experts - 1) // streamable
    can = (
        f"; with --memory SIZE of at least {format_bytes(least)} the routed experts stream from disk"
        if streamable
        else ""
    )
    raise CapacityError(
        f"{format_bytes(need)} of weights and states do not fit in {format_bytes(room)}",
        hint=f"run fewer layers (--layers N), or on a machine with more memory{can}",
        needed_bytes=need,
        least_bytes=least,
        available_bytes=room,
    )


def _is_routed(name: str) -> bool:
    parsed = parse_name(name)
    return parsed is not None and parsed.expert is not None


def _build(
    weights: Weights, share: Share, dtype: torch.dtype, slots: int | None = None, parallel: Parallel = SINGLE
) -> Model:
    """slots: experts of every layer that are resident; None: all, read at once."""
    config = share.config
    prefix = config.name_prefix
    table = (share.vocab_rows, config.hidden_size)
    tied = config.tie_word_embeddings
    embed_tokens = lm_head = norm = output_attn_res = None
    if share.is_first or (share.is_last and tied):
        embed_tokens = weights.matrix(f"{prefix}model.embed_tokens", *table)
    if share.is_last:
        lm_head = embed_tokens if tied else weights.matrix(f"{prefix}lm_head", *table)
        norm = weights.vector(f"{prefix}model.norm.weight", (config.hidden_size,))
        output_attn_res = _query(weights, config, f"{prefix}model.output_attn_res")
    weights.fill()
    layers = []
    for layer in share.layers:
        layers.append(_layer(weights, share, parallel, layer, slots))
        weights.fill()
    return Model(share, dtype, weights.device, embed_tokens, tuple(layers), output_attn_res, norm, lm_head, parallel)


def _query(weights: Weights, config: K3Config, site: str) -> Tensor | None:
    """norm.weight * proj.weight of one mixing site, float32 [hidden]: they are only ever used as this product."""
    if config.attn_res_block_size is None:
        return None
    hidden = config.hidden_size
    query = weights.vector(f"{site}_norm.weight", (hidden,))
    proj = weights.vector(f"{site}_proj.weight", (1, hidden), (hidden,))
    weights.check(lambda: query.mul_(proj.view(-1)))
    return query


def _layer(weights: Weights, share: Share, parallel: Parallel, layer: int, slots: int | None) -> DecoderLayer:
    config = share.config
    prefix = f"{config.name_prefix}model.layers.{layer}"
    attention = _kda if config.layer_kinds[layer] == "kda" else _mla
    mlp = _moe(weights, share, parallel, f"{prefix}.block_sparse_moe", slots) if config.is_moe(layer) else None
    return DecoderLayer(
        input_layernorm=weights.vector(f"{prefix}.input_layernorm.weight", (config.hidden_size,)),
        post_attention_layernorm=weights.vector(f"{prefix}.post_attention_layernorm.weight", (config.hidden_size,)),
        self_attention_res=_query(weights, config, f"{prefix}.self_attention_res"),
        mlp_res=_query(weights, config, f"{prefix}.mlp_res"),
        self_attn=attention(weights, config, f"{prefix}.self_attn", parallel.tp),
        mlp=mlp or _mlp(weights, config, f"{prefix}.mlp", parallel.tp),
    )


def _kda(weights: Weights, config: K3Config, prefix: str, tp: Group) -> KdaAttention:
    hidden, width = config.hidden_size, config.kda_size
    heads, dim, taps = config.kda_num_heads, config.kda_head_dim, config.conv_kernel_size
    full = config.full_rank_gate
    rows = [Matrix(f"{prefix}.{stream}_proj", (width, hidden)) for stream in "qkv"]
    rows.append(Matrix(f"{prefix}.{'g' if full else 'g_a'}_proj", (width if full else dim, hidden)))
    rows.append(Matrix(f"{prefix}.f_a_proj", (dim, hidden)))
    rows.append(Matrix(f"{prefix}.b_proj", (heads, hidden)))
    return KdaAttention(
        heads=heads,
        head_dim=dim,
        lower_bound=config.gate_lower_bound,
        eps=config.rms_norm_eps,
        in_proj=weights.stack(rows),
        conv1d=_convolutions(weights, prefix, width, taps),
        f_b_proj=weights.matrix(f"{prefix}.f_b_proj", width, dim),
        A_log=_a_log(weights, config, f"{prefix}.A_log"),
        dt_bias=weights.vector(f"{prefix}.dt_bias", (width,), (heads, dim)).view(heads, dim),
        g_b_proj=None if full else weights.matrix(f"{prefix}.g_b_proj", width, dim),
        o_norm=weights.vector(f"{prefix}.o_norm.weight", (dim,)),
        o_proj=weights.matrix(f"{prefix}.o_proj", hidden, width),
        tp=tp,
    )


def _convolutions(weights: Weights, prefix: str, width: int, taps: int) -> Tensor:
    """[W, 3 C] float32 from the three [C, 1, W] (or [C, W]) of the checkpoint: channels lie side by side per tap."""
    parts = [
        weights.vector(f"{prefix}.{stream}_conv1d.weight", (width, 1, taps), (width, taps)).view(width, taps)
        for stream in "qkv"
    ]
    result = torch.empty(taps, 3 * width, dtype=torch.float32, device=parts[0].device)
    weights.check(lambda: result.copy_(torch.cat(parts).t()))
    return result


def _a_log(weights: Weights, config: K3Config, name: str) -> Tensor:
    """[H]: one per head. What is stored beyond the heads is padding and must be zero. Raises CheckpointCorrupt."""
    heads = config.kda_num_heads
    found = weights.modules.get(name.rpartition(".")[0], {}).get("A_log")
    shapes: list[tuple[int, ...]] = [(heads,), (config.a_log_size,), (1, 1, heads, 1)]
    if found is not None and len(found.spec.shape) == 1 and heads <= count(found.spec.shape) <= 4096:
        shapes.append(found.spec.shape)
    stored = weights.vector(name, *shapes).view(-1)

    def check() -> None:
        extra = stored[heads:].nonzero()
        if len(extra):
            at = heads + int(extra[0])
            raise CheckpointCorrupt(
                f"tensor {name}: entry {at} is padding behind {heads} heads and must be 0, found {float(stored[at]):g}",
                hint="the checkpoint was written by a tool that misreads A_log: take the original",
            )

    weights.check(check)
    return stored[:heads]


def _mla(weights: Weights, config: K3Config, prefix: str, tp: Group) -> MlaAttention:
    hidden, heads, rank = config.hidden_size, config.num_heads, config.q_lora_rank
    queries = heads * (config.qk_nope_head_dim + config.qk_rope_head_dim)
    pairs, values = config.qk_nope_head_dim + config.v_head_dim, heads * config.v_head_dim
    rows = [Matrix(f"{prefix}.q_a_proj", (rank, hidden)) if rank else Matrix(f"{prefix}.q_proj", (queries, hidden))]
    rows.append(Matrix(f"{prefix}.kv_a_proj_with_mqa", (config.mla_cache_width, hidden)))
    if config.mla_output_gate:
        rows.append(Matrix(f"{prefix}.g_proj", (values, hidden)))
    # Absorbed into queries and outputs, head by head: no kernel multiplies with its codes.
    kv_b = weights.plain([Matrix(f"{prefix}.kv_b_proj", (heads * pairs, config.kv_lora_rank))])
    return MlaAttention(
        heads=heads,
        key_dim=config.qk_nope_head_dim,
        query_width=rank or queries,
        has_gate=config.mla_output_gate,
        in_proj=weights.stack(rows),
        q_a_layernorm=weights.vector(f"{prefix}.q_a_layernorm.weight", (rank,)) if rank else None,
        q_b_proj=weights.matrix(f"{prefix}.q_b_proj", queries, rank) if rank else None,
        kv_a_layernorm=weights.vector(f"{prefix}.kv_a_layernorm.weight", (config.kv_lora_rank,)),
        kv_b_proj=kv_b.view(heads, pairs, config.kv_lora_rank),
        o_proj=weights.matrix(f"{prefix}.o_proj", hidden, values),
        tp=tp,
    )


def _gate_up(prefix: str, intermediate: int, hidden: int) -> list[Matrix]:
    return [Matrix(f"{prefix}.{name}_proj", (intermediate, hidden)) for name in ("gate", "up")]


def _mlp(weights: Weights, config: K3Config, prefix: str, tp: Group) -> GatedMlp:
    hidden, intermediate = config.hidden_size, config.intermediate_size
    gate_up = weights.stack(_gate_up(prefix, intermediate, hidden))
    return GatedMlp(config, gate_up, weights.matrix(f"{prefix}.down_proj", hidden, intermediate), tp)


def _moe(weights: Weights, share: Share, parallel: Parallel, prefix: str, slots: int | None) -> SparseMoe:
    config = share.config
    hidden, latent, shared = config.hidden_size, config.latent_size, config.shared_intermediate_size
    rows = [Matrix(f"{prefix}.routed_expert_down_proj", (latent, hidden))] if latent else []
    rows += _gate_up(f"{prefix}.shared_experts", shared, hidden) if shared else []
    has_norm = latent and config.latent_norm
    return SparseMoe(
        config=config,
        gate=weights.matrix(f"{prefix}.gate", config.num_experts, hidden),
        e_score_correction_bias=(
            weights.vector(f"{prefix}.gate.e_score_correction_bias", (config.num_experts,))
            if config.router_bias
            else None
        ),
        experts=(
            load_experts(weights, config, f"{prefix}.experts", share.experts)
            if slots is None
            else stream_experts(weights, config, f"{prefix}.experts", share.experts, slots)
        ),
        in_proj=weights.stack(rows) if rows else None,
        routed_expert_norm=weights.vector(f"{prefix}.routed_expert_norm.weight", (latent,)) if has_norm else None,
        routed_expert_up_proj=weights.matrix(f"{prefix}.routed_expert_up_proj", hidden, latent) if latent else None,
        shared_down_proj=(weights.matrix(f"{prefix}.shared_experts.down_proj", hidden, shared) if shared else None),
        owned=share.experts,
        parallel=parallel,
    )
