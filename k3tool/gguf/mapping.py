"""Which GGUF tensor is made of what: names and shapes of the architecture `kimi-k3`, each with the steps that fill it.

llama.cpp checks that the set of tensors is exact but takes several of them as optional and computes nonsense without
them, so nothing here is optional: a source tensor that is absent, of another shape or stored in another scheme stops
the job, and so does one that nothing here asks for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

from k3tool import formats
from k3tool.catalog import count
from k3tool.checkpoint.origin import free_folder, look
from k3tool.checkpoint.table import Kind, TensorTable
from k3tool.commands import command
from k3tool.config import K3Config
from k3tool.errors import CheckpointCorrupt, CheckpointMissing, K3Error, UnsupportedError
from k3tool.gguf.container import BF16, F32, MXFP4, TYPES, GgmlType, TensorInfo
from k3tool.names import component_of, parse_name
from k3tool.plan import Compute, Copy, LazySteps, Region, Step, TensorOut
from k3tool.transform.base import whole
from k3tool.transform.gguf import MXFP4_SOURCE, DecayRate, Recode, Repack, ScoreVector, can_round
from k3tool.transform.quantize_policy import component_of_module

NATIVE = ("mxfp4", "bf16", "f16", "f32")
PLAIN = ("BF16", "F16", "F32")
BLOCK_VALUES = 1 << 18  # values of one step where a matrix is converted in blocks of rows
WORKING_BYTES_PER_VALUE = 64  # float32 and float64 copies while a block is converted and measured
_STATES = tuple(f"weight.{part}" for part in ("absmax", "quant_map", "nested_absmax", "nested_quant_map"))
_PARTS = ("weight", "weight_packed", "weight_scale", "weight_scale_2", "weight_global_scale", "weight_shape", *_STATES)
_BNB = tuple(f"weight.quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4"))
"""What the tensors of one matrix are called, in every scheme."""
_EXPERT_MATRICES = (("gate", "w1"), ("down", "w2"), ("up", "w3"))


@dataclass(frozen=True)
class GgufTensor:
    """One tensor of the output. sources: how many source matrices it holds (experts are stacked).

    steps: together they make exactly its bytes, in order. rounds: values may change. folded: not the source's own
    values but what llama.cpp's graph expects of them.
    """

    info: TensorInfo
    component: str
    steps: Sequence[Step] = field(repr=False)
    sources: int = 1
    rounds: bool = False
    folded: bool = False


class Types(NamedTuple):
    """trunk: the type of the weight matrices outside the experts. experts: None keeps what the source has."""

    trunk: GgmlType
    experts: GgmlType | None
    exact: bool = False


def gguf_tensors(config: K3Config, table: TensorTable, types: Types) -> tuple[list[GgufTensor], list[str]]:
    """Every tensor of the file, in its order, and the names of the source that are left out: the vision tower. Raises CheckpointMissing, CheckpointCorrupt, UnsupportedError."""
    mapping = _Mapping(config, table, types)
    tensors = list(mapping.tensors())
    mapping.refuse_unused()
    return tensors, list(mapping.left_out())


class _Mapping:
    def __init__(self, config: K3Config, table: TensorTable, types: Types) -> None:
        self.config, self.table, self.types = config, table, types
        self.root = config.name_prefix
        self.used: set[str] = set()

    def tensors(self) -> Iterator[GgufTensor]:
        config, hidden = self.config, self.config.hidden_size
        words = (config.vocab_size, hidden)
        yield self.matrix("token_embd.weight", "model.embed_tokens", words)
        yield self.matrix("output.weight", "lm_head", words)
        yield self.vector("output_norm.weight", "model.norm.weight", hidden)
        yield self.score("output_res_score.weight", "model.output_attn_res")
        for layer in range(config.num_layers):
            yield from self.layer(f"blk.{layer}.", f"model.layers.{layer}.", layer)

    def layer(self, to: str, of: str, layer: int) -> Iterator[GgufTensor]:
        hidden = self.config.hidden_size
        yield self.vector(f"{to}attn_norm.weight", f"{of}input_layernorm.weight", hidden)
        yield self.score(f"{to}attn_res_score.weight", f"{of}self_attention_res")
        yield from (self.kda if self.config.layer_kinds[layer] == "kda" else self.mla)(to, f"{of}self_attn.")
        yield self.vector(f"{to}ffn_norm.weight", f"{of}post_attention_layernorm.weight", hidden)
        yield self.score(f"{to}ffn_res_score.weight", f"{of}mlp_res")
        if self.config.is_moe(layer):
            yield from self.moe(to, f"{of}block_sparse_moe.")
        else:
            yield from self.glu(to, "", f"{of}mlp.", self.config.intermediate_size)

    def kda(self, to: str, of: str) -> Iterator[GgufTensor]:
        config = self.config
        hidden, width, dim, heads = config.hidden_size, config.kda_size, config.kda_head_dim, config.kda_num_heads
        for stream in "qkv":
            yield self.matrix(f"{to}attn_{stream}.weight", f"{of}{stream}_proj", (width, hidden))
        for stream in "qkv":
            yield self.convolution(f"{to}ssm_conv1d_{stream}.weight", f"{of}{stream}_conv1d.weight")
        yield self.matrix(f"{to}ssm_f_a.weight", f"{of}f_a_proj", (dim, hidden))
        yield self.matrix(f"{to}ssm_f_b.weight", f"{of}f_b_proj", (width, dim))
        yield self.matrix(f"{to}ssm_beta.weight", f"{of}b_proj", (heads, hidden))
        yield self.decay(f"{to}ssm_a", f"{of}A_log")
        yield self.vector(f"{to}ssm_dt.bias", f"{of}dt_bias", width)
        yield self.matrix(f"{to}ssm_g.weight", f"{of}g_proj", (width, hidden))
        yield self.vector(f"{to}ssm_norm.weight", f"{of}o_norm.weight", dim)
        yield self.matrix(f"{to}attn_output.weight", f"{of}o_proj", (hidden, width))

    def mla(self, to: str, of: str) -> Iterator[GgufTensor]:
        config = self.config
        hidden, heads, queries, latent = config.hidden_size, config.num_heads, config.q_lora_rank, config.kv_lora_rank
        assert queries is not None
        nope, rope, values = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
        yield self.matrix(f"{to}attn_q_a.weight", f"{of}q_a_proj", (queries, hidden))
        yield self.vector(f"{to}attn_q_a_norm.weight", f"{of}q_a_layernorm.weight", queries)
        yield self.matrix(f"{to}attn_q_b.weight", f"{of}q_b_proj", (heads * (nope + rope), queries))
        yield self.matrix(f"{to}attn_kv_a_mqa.weight", f"{of}kv_a_proj_with_mqa", (latent + rope, hidden))
        yield self.vector(f"{to}attn_kv_a_norm.weight", f"{of}kv_a_layernorm.weight", latent)
        yield from self.keys_and_values(to, f"{of}kv_b_proj", (heads, nope, values, latent))
        yield self.matrix(f"{to}attn_gate.weight", f"{of}g_proj", (heads * values, hidden))
        yield self.matrix(f"{to}attn_output.weight", f"{of}o_proj", (hidden, heads * values))

    def moe(self, to: str, of: str) -> Iterator[GgufTensor]:
        config = self.config
        hidden, latent, inner = config.hidden_size, config.expert_size, config.moe_intermediate_size
        # The router decides by tiny margins; in float32 llama.cpp does not round its input.
        yield self.matrix(f"{to}ffn_gate_inp.weight", f"{of}gate", (config.num_experts, hidden), kind=F32)
        yield self.vector(f"{to}exp_probs_b.bias", f"{of}gate.e_score_correction_bias", config.num_experts)
        yield self.matrix(f"{to}ffn_routed_down.weight", f"{of}routed_expert_down_proj", (latent, hidden))
        yield self.vector(f"{to}ffn_routed_norm.weight", f"{of}routed_expert_norm.weight", latent)
        yield self.matrix(f"{to}ffn_routed_up.weight", f"{of}routed_expert_up_proj", (hidden, latent))
        yield from self.glu(to, "_shexp", f"{of}shared_experts.", config.shared_intermediate_size)
        for role, matrix in _EXPERT_MATRICES:
            shape = (latent, inner) if role == "down" else (inner, latent)
            yield self.experts(f"{to}ffn_{role}_exps.weight", f"{of}experts.", matrix, shape)

    def glu(self, to: str, suffix: str, of: str, inner: int) -> Iterator[GgufTensor]:
        hidden = self.config.hidden_size
        for role, shape in (("gate", (inner, hidden)), ("up", (inner, hidden)), ("down", (hidden, inner))):
            yield self.matrix(f"{to}ffn_{role}{suffix}.weight", f"{of}{role}_proj", shape)

    # Looking up

    def find(self, name: str, *shapes: tuple[int, ...], dtypes: Sequence[str] = PLAIN) -> Kind:
        """The kind of a source tensor, which must have one of `shapes` and one of `dtypes`."""
        if name not in self.table:
            raise self._absent(name)
        kind = self.table.kind(name)
        if kind.dtype not in dtypes:
            raise self._other_storage(name) or UnsupportedError(
                f"{name} is stored as {kind.dtype}; GGUF takes {', '.join(dtypes)} there",
                hint=look(self.table.source.label),
                tensor=name,
            )
        if kind.shape not in shapes:
            expected = " or ".join(str(list(shape)) for shape in shapes)
            raise CheckpointCorrupt(
                f"{name} is {list(kind.shape)}, the configuration implies {expected}",
                hint=f"check that config.json belongs to these shards; {look(self.table.source.label)}",
                tensor=name,
            )
        self.used.add(name)
        return kind

    def _absent(self, name: str) -> Exception:
        label = self.table.source.label
        return self._other_storage(name) or CheckpointMissing(
            f"{label} holds no tensor {name}", hint=look(label), tensor=name
        )

    def _other_storage(self, name: str) -> UnsupportedError | None:
        """The refusal of a matrix that is stored in a scheme which GGUF does not take; None where it is not."""
        module, part = name[: name.find(".weight")], name[name.find(".weight") + 1 :]
        if part not in _PARTS:
            return None
        held = self._held(module)
        scheme = ""
        with suppress(K3Error):
            scheme = formats.detect(held, where=module)
        if not scheme and len(held) > 1:
            scheme = " and ".join(held)
        if not scheme or (scheme.upper() in PLAIN and ".experts." not in module):
            return None
        taken = "experts in MXFP4, BF16, F16 or F32, all alike" if ".experts." in module else "BF16, F16 or F32 there"
        return UnsupportedError(
            f"{module} is stored as {scheme}: GGUF takes {taken}", hint=self._decode_first(), tensor=name
        )

    def _held(self, module: str) -> dict[str, Kind]:
        names = [part for part in (*_PARTS, *_BNB) if f"{module}.{part}" in self.table]
        return {part: self.table.kind(f"{module}.{part}") for part in names}

    def _decode_first(self) -> str:
        """The command that makes a checkpoint which GGUF takes of this one, prose where options cannot say it."""
        options: set[str | None] = set()
        for text in self.table:
            path = text[: text.find(".weight")]
            if ".weight" not in text or (".experts." in path and ".experts.0." not in path):
                continue
            name = parse_name(f"{path}.weight")
            with suppress(K3Error):
                if name is not None and formats.detect(self._held(path), where=path) not in NATIVE:
                    options.add(component_of_module(name))
        if not options or None in options:
            return "start from the released checkpoint, or from one in BF16"
        words = [word for option in sorted(filter(None, options)) for word in (f"--{option}", "bf16")]
        label = self.table.source.label
        source = Path(label) if Path(label).is_dir() else label
        return f"decode it first: {command('quantize', source, free_folder(label, 'bf16'), *words)}"

    def left_out(self) -> Iterator[str]:
        """Names of the source that the mapping did not ask for."""
        if len(self.used) != len(self.table):
            yield from (name for name in self.table if name not in self.used)

    def refuse_unused(self) -> None:
        """What the mapping does not ask for would be lost in silence; only the vision tower is left out on purpose."""
        for name in self.left_out():
            if component_of(parse_name(name)) != "vision":
                raise UnsupportedError(
                    f"tensor {name} has no place in llama.cpp's architecture kimi-k3",
                    hint=look(self.table.source.label),
                    tensor=name,
                )

    # Making

    def vector(self, to: str, of: str, size: int) -> GgufTensor:
        return self._converted(
            TensorInfo(to, F32, (size,)), self.root + of, (size,), self.find(self.root + of, (size,))
        )

    def matrix(self, to: str, module: str, shape: tuple[int, int], *, kind: GgmlType | None = None) -> GgufTensor:
        name = f"{self.root}{module}.weight"
        found = self.find(name, shape)
        return self._converted(TensorInfo(to, kind or self._trunk(shape[-1]), shape), name, shape, found)

    def convolution(self, to: str, of: str) -> GgufTensor:
        width, kernel = self.config.kda_size, self.config.conv_kernel_size
        found = self.find(self.root + of, (width, 1, kernel), (width, kernel))
        return self._converted(TensorInfo(to, F32, (1, width, 1, kernel)), self.root + of, (width, kernel), found)

    def _trunk(self, columns: int) -> GgmlType:
        """The trunk's type, or BF16 where rows are no whole blocks of it."""
        return self.types.trunk if columns % self.types.trunk.block == 0 else BF16

    def _converted(self, info: TensorInfo, name: str, shape: tuple[int, ...], found: Kind) -> GgufTensor:
        """A whole tensor, its rows in the order of the source."""
        component = component_of(parse_name(name))
        columns = shape[-1]
        rows = count(shape) // columns
        recode = self._recode(name, component, found.dtype, info.kind, columns)

        def step(block: tuple[int, int]) -> Step:
            return _rows(info, recode, block, [(name, found.dtype, (rows, columns))])

        return GgufTensor(
            info, component, LazySteps(_blocks(rows, columns), step), rounds=can_round(found.dtype, info.kind.name)
        )

    def _recode(
        self, name: str, component: str, source: str, kind: GgmlType, columns: int, *, turned: bool = False
    ) -> Recode:
        return Recode(name, component, source, kind.name, columns, turned, self.types.exact)

    def score(self, to: str, of: str) -> GgufTensor:
        """Norm and projection of one AttnRes site as one vector."""
        hidden = self.config.hidden_size
        norm, projection = f"{self.root}{of}_norm.weight", f"{self.root}{of}_proj.weight"
        kinds = (self.find(norm, (hidden,)), self.find(projection, (1, hidden), (hidden,)))
        info = TensorInfo(to, F32, (hidden,))
        step = Compute(
            (_bytes(to, info.nbytes),),
            (whole(norm, *kinds[0]), whole(projection, *kinds[1])),
            ScoreVector((kinds[0].dtype, kinds[1].dtype)),
            working_bytes=hidden * WORKING_BYTES_PER_VALUE,
        )
        return GgufTensor(info, "attn_res", (step,), folded=True)

    def decay(self, to: str, of: str) -> GgufTensor:
        """A_log without its padding, as the rate that multiplies the gate."""
        heads, name = self.config.kda_num_heads, self.root + of
        found = self.find(name, (self.config.a_log_size,), (heads,), (1, 1, heads, 1))
        region = Region(name, found.dtype, (count(found.shape),), 0, 0, heads)
        info = TensorInfo(to, F32, (heads,))
        step = Compute((_bytes(to, info.nbytes),), (region,), DecayRate(found.dtype))
        return GgufTensor(info, "kda", (step,), folded=True)

    def keys_and_values(self, to: str, module: str, sizes: tuple[int, int, int, int]) -> Iterator[GgufTensor]:
        """The two halves of kv_b: keys per head turned to [latent, nope], values per head as they are."""
        heads, nope, values, latent = sizes
        name, stacked = f"{self.root}{module}.weight", (heads * (nope + values), latent)
        dtype = self.find(name, stacked).dtype
        for role, half, part, first in (("k", "keys", nope, 0), ("v", "values", values, nope)):
            shape = (heads, latent, part) if role == "k" else (heads, part, latent)
            info = TensorInfo(f"{to}attn_{role}_b.weight", self._trunk(shape[-1]), shape)
            recode = self._recode(f"{name} ({half})", "mla", dtype, info.kind, latent, turned=role == "k")
            source = Region(name, dtype, stacked, 0, first, first + part)
            steps = LazySteps(range(heads), partial(_head, info, recode, source, nope + values))
            yield GgufTensor(info, "mla", steps, rounds=can_round(dtype, info.kind.name))

    def experts(self, to: str, of: str, matrix: str, shape: tuple[int, int]) -> GgufTensor:
        """One matrix of all experts, stacked in the order of their numbers."""
        rows, columns = shape
        total = self.config.num_experts
        source = self._expert_source(of, matrix, shape)
        kind = self.types.experts or TYPES[source]
        if kind is MXFP4 and source != MXFP4_SOURCE:
            raise UnsupportedError(
                f"{self.root}{of}0.{matrix} is {source}, not MXFP4: it has no codes to keep",
                hint="write the experts as bf16, f16 or q8_0, or quantize them to mxfp4 first",
                tensor=f"{self.root}{of}0.{matrix}.weight",
            )
        if columns % kind.block:
            raise UnsupportedError(
                f"{self.root}{of}0.{matrix}: rows of {columns} are no whole {kind.name} blocks of {kind.block}",
                hint="write the experts as bf16 or f32",
                tensor=f"{self.root}{of}0.{matrix}.weight",
            )
        info = TensorInfo(to, kind, (total, rows, columns))
        one = info.nbytes // total
        steps: Sequence[Step]
        if source == kind.name:

            def unit(expert: int) -> Step:
                module = f"{self.root}{of}{expert}.{matrix}"
                needs = tuple(whole(*part) for part in _stored(module, source, shape))
                if source == MXFP4_SOURCE:
                    return Compute((_bytes(to, one),), needs, Repack(module))
                return Copy(_bytes(to, one), needs)

            steps = LazySteps(range(total), unit)
        else:
            blocks = _blocks(rows, columns)

            def piece(number: int) -> Step:
                module = f"{self.root}{of}{number // len(blocks)}.{matrix}"
                recode = self._recode(module, "routed_experts", source, kind, columns)
                return _rows(info, recode, blocks[number % len(blocks)], _stored(module, source, shape))

            steps = LazySteps(range(total * len(blocks)), piece)
        return GgufTensor(info, "routed_experts", steps, total, can_round(source, kind.name))

    def _expert_source(self, of: str, matrix: str, shape: tuple[int, int]) -> str:
        """How this matrix is stored; every expert's must be stored alike."""
        first = f"{self.root}{of}0.{matrix}"
        packed = f"{first}.weight_packed" in self.table
        source = MXFP4_SOURCE if packed else self.find(f"{first}.weight", shape).dtype
        for expert in range(self.config.num_experts):
            for name, dtype, stored in _stored(f"{self.root}{of}{expert}.{matrix}", source, shape):
                allowed = (dtype, "F8_E8M0") if name.endswith("weight_scale") else (dtype,)
                self.find(name, stored, dtypes=allowed)
        return source


def _stored(module: str, source: str, shape: tuple[int, int]) -> list[tuple[str, str, tuple[int, int]]]:
    """(name, dtype, shape) of the tensors that hold one expert matrix."""
    rows, columns = shape
    if source != MXFP4_SOURCE:
        return [(f"{module}.weight", source, shape)]
    return [
        (f"{module}.weight_packed", "U8", (rows, columns // 2)),
        (f"{module}.weight_scale", "U8", (rows, columns // MXFP4.block)),
    ]


def _blocks(rows: int, columns: int) -> list[tuple[int, int]]:
    """Row ranges of about BLOCK_VALUES values."""
    step = max(1, BLOCK_VALUES // columns)
    return [(first, min(first + step, rows)) for first in range(0, rows, step)]


def _rows(
    info: TensorInfo, recode: Recode, block: tuple[int, int], parts: Sequence[tuple[str, str, tuple[int, int]]]
) -> Compute:
    """Rows [first, last) of one source matrix through `recode`."""
    first, last = block
    values = (last - first) * recode.columns
    out = _bytes(info.name, values // info.kind.block * info.kind.nbytes)
    needs = tuple(Region(name, dtype, shape, 0, first, last) for name, dtype, shape in parts)
    return Compute((out,), needs, recode, working_bytes=values * WORKING_BYTES_PER_VALUE)


def _head(info: TensorInfo, recode: Recode, source: Region, pitch: int, head: int) -> Compute:
    """One head of kv_b: `recode` of its keys or values, which are the rows `source` of the first head."""
    region = source._replace(start=source.start + head * pitch, stop=source.stop + head * pitch)
    out = _bytes(info.name, info.nbytes // info.shape[0])
    return Compute((out,), (region,), recode, working_bytes=count(info.shape[1:]) * WORKING_BYTES_PER_VALUE)


def _bytes(name: str, nbytes: int) -> TensorOut:
    return TensorOut(name, "U8", (nbytes,))
