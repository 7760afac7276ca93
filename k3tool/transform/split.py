"""The one table that says how each tensor is divided among ranks, and the arithmetic of a cut.

A tensor's role is the kind of its layer and the path of its module. The role decides which ranks own it (its stage,
its expert's EP rank, the first or last stage) and along which axis TP divides it: by heads, rows, columns, vocabulary
rows, or not at all. Packed values and their scales follow the same rule, each in its own units, so that they always
travel together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from k3tool.checkpoint.table import Kind
from k3tool.config import K3Config
from k3tool.errors import CheckpointCorrupt, UnsupportedError
from k3tool.layout import Layout, Place, expert_owner, padded_vocab, stage_of
from k3tool.names import TensorName, module_and_part, parse_name

HEADS, ROWS, COLUMNS = "heads", "rows", "columns"
VOCABULARY, REPLICATED = "vocabulary", "replicated"
STAGE, EXPERT, FIRST, LAST, ENDS = "stage", "expert", "first", "last", "ends"
_AXIS = {HEADS: 0, ROWS: 0, COLUMNS: 1, VOCABULARY: 0}

Size = Callable[[K3Config], int]


def _kda_width(config: K3Config) -> int:
    return config.kda_size


def _kda_heads(config: K3Config) -> int:
    return config.kda_num_heads


def _queries(config: K3Config) -> int:
    return config.num_heads * (config.qk_nope_head_dim + config.qk_rope_head_dim)


def _keys_and_values(config: K3Config) -> int:
    return config.num_heads * (config.qk_nope_head_dim + config.v_head_dim)


def _values(config: K3Config) -> int:
    return config.num_heads * config.v_head_dim


def _dense(config: K3Config) -> int:
    return config.intermediate_size


def _shared(config: K3Config) -> int:
    return config.shared_intermediate_size


def _expert(config: K3Config) -> int:
    return config.moe_intermediate_size


def _vocabulary(config: K3Config) -> int:
    return config.vocab_size


def _none(_: K3Config) -> int:
    return 0


# role -> (how TP divides it, the logical size that is divided). Linear weights are [out, in]: rows are outputs.
TABLE: dict[str, dict[str, tuple[str, Size]]] = {
    "kda": {
        "self_attn.q_proj": (HEADS, _kda_width),
        "self_attn.k_proj": (HEADS, _kda_width),
        "self_attn.v_proj": (HEADS, _kda_width),
        "self_attn.q_conv1d": (HEADS, _kda_width),
        "self_attn.k_conv1d": (HEADS, _kda_width),
        "self_attn.v_conv1d": (HEADS, _kda_width),
        "self_attn.f_a_proj": (REPLICATED, _none),
        "self_attn.f_b_proj": (HEADS, _kda_width),
        "self_attn.g_a_proj": (REPLICATED, _none),
        "self_attn.g_b_proj": (HEADS, _kda_width),
        "self_attn.g_proj": (HEADS, _kda_width),
        "self_attn.b_proj": (HEADS, _kda_heads),
        "self_attn.A_log": (HEADS, _kda_heads),
        "self_attn.dt_bias": (HEADS, _kda_width),
        "self_attn.o_norm": (REPLICATED, _none),
        "self_attn.o_proj": (COLUMNS, _kda_width),
    },
    "mla": {
        "self_attn.q_proj": (HEADS, _queries),
        "self_attn.q_a_proj": (REPLICATED, _none),
        "self_attn.q_a_layernorm": (REPLICATED, _none),
        "self_attn.q_b_proj": (HEADS, _queries),
        "self_attn.kv_a_proj_with_mqa": (REPLICATED, _none),
        "self_attn.kv_a_layernorm": (REPLICATED, _none),
        "self_attn.kv_b_proj": (HEADS, _keys_and_values),
        "self_attn.g_proj": (HEADS, _values),
        "self_attn.o_proj": (COLUMNS, _values),
    },
    "layer": {
        "input_layernorm": (REPLICATED, _none),
        "post_attention_layernorm": (REPLICATED, _none),
        "self_attention_res_norm": (REPLICATED, _none),
        "self_attention_res_proj": (REPLICATED, _none),
        "mlp_res_norm": (REPLICATED, _none),
        "mlp_res_proj": (REPLICATED, _none),
        "mlp.gate_proj": (ROWS, _dense),
        "mlp.up_proj": (ROWS, _dense),
        "mlp.down_proj": (COLUMNS, _dense),
        "block_sparse_moe.gate": (REPLICATED, _none),
        # The norm between them follows the sum over experts and ranks, so all three stay whole.
        "block_sparse_moe.routed_expert_down_proj": (REPLICATED, _none),
        "block_sparse_moe.routed_expert_norm": (REPLICATED, _none),
        "block_sparse_moe.routed_expert_up_proj": (REPLICATED, _none),
        "block_sparse_moe.shared_experts.gate_proj": (ROWS, _shared),
        "block_sparse_moe.shared_experts.up_proj": (ROWS, _shared),
        "block_sparse_moe.shared_experts.down_proj": (COLUMNS, _shared),
    },
    "expert": {
        "block_sparse_moe.experts.w1": (ROWS, _expert),
        "block_sparse_moe.experts.w3": (ROWS, _expert),
        "block_sparse_moe.experts.w2": (COLUMNS, _expert),
    },
    "first": {"model.embed_tokens": (VOCABULARY, _vocabulary)},
    "last": {
        "lm_head": (VOCABULARY, _vocabulary),
        "model.norm": (REPLICATED, _none),
        "model.output_attn_res_norm": (REPLICATED, _none),
        "model.output_attn_res_proj": (REPLICATED, _none),
    },
}
_OWNERS = {"kda": STAGE, "mla": STAGE, "layer": STAGE, "expert": EXPERT, "first": FIRST, "last": LAST}


class Rule(NamedTuple):
    """split: how TP divides the module. axis: of its logical [out, in] weight, None where it stays whole.
    size: the logical extent along that axis. owner: which ranks hold it."""

    split: str
    axis: int | None
    size: int
    owner: str


class Cut(NamedTuple):
    """One stored tensor along one axis, divided over TP ranks.

    axis: of the stored tensor, None where every rank holds it whole. stored: its extent. content: how much of that
    is more than padding. share: content of one rank (the last ones may have less). kept: extent that a rank stores.
    """

    axis: int | None
    stored: int = 0
    content: int = 0
    share: int = 0
    kept: int = 0

    def window(self, tp_rank: int) -> tuple[int, int]:
        """[first, last) of the content that `tp_rank` holds."""
        return min(tp_rank * self.share, self.content), min((tp_rank + 1) * self.share, self.content)

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """The shape that one rank stores of a tensor of shape `whole`."""
        return whole if self.axis is None else (*whole[: self.axis], self.kept, *whole[self.axis + 1 :])

    def whole_shape(self, kept: tuple[int, ...]) -> tuple[int, ...]:
        """The inverse: the shape of the tensor of which a rank stores `kept`."""
        return kept if self.axis is None else (*kept[: self.axis], self.stored, *kept[self.axis + 1 :])


WHOLE = Cut(None)


class Splitter:
    """The table applied to one configuration: rules by role, remembered."""

    def __init__(self, config: K3Config) -> None:
        self.config = config
        self._rules: dict[tuple[str, str], Rule | None] = {}

    def role(self, name: TensorName) -> tuple[str, str]:
        """(kind, module) of a tensor: kind is `kda` or `mla` for attention modules, `expert`, `layer` or `global`.

        `A_log` and `dt_bias` count as modules of their own below `self_attn`."""
        module = name.module
        if name.layer is None:
            return "global", module
        if name.expert is not None:
            return "expert", module
        if name.part in ("A_log", "dt_bias"):
            module = f"{module}.{name.part}"
        if module.startswith("self_attn.") and name.layer < self.config.num_layers:
            return self.config.layer_kinds[name.layer], module
        return "layer", module

    def rule(self, name: TensorName) -> Rule | None:
        """The rule of a tensor, or None for one that the table does not know."""
        if name.layer is not None and name.layer >= self.config.num_layers:
            return None
        role = self.role(name)
        try:
            return self._rules[role]
        except KeyError:
            return self._rules.setdefault(role, self._rule(*role))

    def _rule(self, kind: str, module: str) -> Rule | None:
        if kind == "global" and module.startswith(("vision_tower.", "mm_projector.")):
            return Rule(REPLICATED, None, 0, FIRST)
        for group in ("first", "last") if kind == "global" else (kind,):
            if module in TABLE[group]:
                split, size = TABLE[group][module]
                owner = _OWNERS[group]
                if module == "model.embed_tokens" and self.config.tie_word_embeddings:
                    owner = ENDS
                return Rule(split, _AXIS.get(split), size(self.config), owner)
        return None

    def owners(self, name: TensorName, rule: Rule, layout: Layout) -> list[tuple[int, int | None]]:
        """(PP stage, EP rank or None for all) of the ranks that hold a tensor; first the one to take it from."""
        if rule.owner in (STAGE, EXPERT):
            assert name.layer is not None
            stage = stage_of(name.layer, self.config.num_layers, layout.pp)
            if rule.owner == STAGE:
                return [(stage, None)]
            assert name.expert is not None
            return [(stage, expert_owner(name.expert, self.config.num_experts, layout.ep))]
        last = layout.pp - 1
        return [(stage, None) for stage in {FIRST: (0,), LAST: (last,), ENDS: sorted({0, last})}[rule.owner]]

    def holds(self, name: TensorName, rule: Rule, layout: Layout, place: Place) -> bool:
        return any(
            stage == place.pp_rank and ep in (None, place.ep_rank) for stage, ep in self.owners(name, rule, layout)
        )

    def cut(self, name: TensorName, rule: Rule, kind: Kind, tp: int) -> Cut:
        """How `tp` ranks divide one stored tensor. Raises UnsupportedError where its storage cannot be divided so,
        CheckpointCorrupt where its shape is not what the configuration says."""
        if rule.axis is None or name.part == "weight_shape":
            return WHOLE
        # bitsandbytes: `weight` is one column of bytes, its states are `weight.absmax` and so on; ModelOpt's bytes
        # (`weight` U8 [out, in / 2]) keep the rows and columns of the matrix and are cut like any other
        column = name.part == "weight" and kind.dtype == "U8" and kind.shape[-1:] == (1,)
        if name.part.startswith("weight.") or column:
            return WHOLE if tp == 1 else self._refuse_states(name, tp)
        if name.part == "A_log":
            return self._decay_cut(name, rule, kind, tp)
        axis = rule.axis
        if len(kind.shape) <= axis or kind.shape[axis] == 1 != rule.size:
            return WHOLE  # one scale for the whole extent, or for the whole tensor
        stored = kind.shape[axis]
        if rule.split == VOCABULARY:
            if stored != rule.size:
                raise _mismatch(name, kind, f"{rule.size} vocabulary rows")
            share = padded_vocab(stored, tp) // tp
            return Cut(axis, stored, stored, share, share)
        if tp > 1:
            self._check_groups(name, rule, stored, tp)
        return Cut(axis, stored, stored, stored // tp, stored // tp)

    def _check_groups(self, name: TensorName, rule: Rule, stored: int, tp: int) -> None:
        group, rest = divmod(rule.size, stored)
        # A group that is no power of two is a block that does not fill its last place (192 columns in blocks of 128).
        if rest or group & (group - 1) or stored % tp or rule.size // tp % group:
            what = (
                f"{rule.size} {rule.split} in {stored} stored units"
                if rest or group > 1
                else f"{rule.size} {rule.split}"
            )
            raise UnsupportedError(
                f"TP {tp} cannot divide {name}: {what} do not fall into {tp} whole shares",
                hint="use a TP that keeps every scale group on one rank, or reshard before quantizing",
            )

    def _refuse_states(self, name: TensorName, tp: int) -> Any:
        raise UnsupportedError(
            f"TP {tp} cannot divide {name.module_path}: its quantization states ({name.part}) cover blocks that run "
            "across rows and cannot be split",
            hint="use --tp 1 with EP or PP, or a scheme whose scales can be divided",
        )

    def _decay_cut(self, name: TensorName, rule: Rule, kind: Kind, tp: int) -> Cut:
        """`A_log`: one number a head, stored with or without zero padding to a multiple of the head width."""
        axis = max(range(len(kind.shape)), key=lambda index: kind.shape[index], default=-1)
        stored = kind.shape[axis] if axis >= 0 else 0
        if stored not in (rule.size, self.config.a_log_size) or any(
            size != 1 for index, size in enumerate(kind.shape) if index != axis
        ):
            raise _mismatch(name, kind, f"{rule.size} heads")
        share = rule.size // tp
        dim = self.config.kda_head_dim
        return Cut(axis, stored, rule.size, share, share if stored == rule.size else -(-share // dim) * dim)


def unit_of(name: str) -> str:
    """What must stay in one file, as the start of a tensor's name: its module, or for an expert or MLP all of it."""
    module, _ = module_and_part(name)
    whole = ".experts." in module or ".shared_experts." in module or ".mlp." in module
    return module.rpartition(".")[0] if whole else module


def parsed(name: str) -> TensorName:
    """Raises CheckpointCorrupt for a name outside the grammar."""
    found = parse_name(name)
    if found is None:
        raise CheckpointCorrupt(
            f"{name[:200]!r} is no tensor name of this family",
            hint="this is another model, or of a newer kind; inspect lists what does not belong",
        )
    return found


def _mismatch(name: TensorName, kind: Kind, expected: str) -> CheckpointCorrupt:
    return CheckpointCorrupt(
        f"{name}: the configuration says {expected}, found {kind.dtype} {list(kind.shape)}",
        hint="config.json and shards are not of one checkpoint; inspect shows what differs",
    )
