"""What one rank holds of the text model and computes: its layers, its experts, and its cut of every width.

Follows the table by which checkpoints are divided (`k3tool.transform.split`): TP divides heads, intermediate widths and
vocabulary rows, EP deals out experts, PP deals out layers. Everything else is whole on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from k3tool.config import K3Config
from k3tool.layout import Layout, Place, expert_block, padded_vocab, stages


@dataclass(frozen=True)
class Share:
    """config: the model's, with heads and intermediate widths as this rank has them and everything else whole.

    layers: those that run here, of the first `num_layers` that run on all ranks. experts: those of every layer that
    are held here. vocab_rows: of embedding and head, the padding of the last TP ranks included.
    """

    config: K3Config
    layout: Layout
    place: Place
    num_layers: int
    layers: range
    experts: range
    vocab_rows: int

    @property
    def is_first(self) -> bool:
        """Of the stages: embeds."""
        return self.place.pp_rank == 0

    @property
    def is_last(self) -> bool:
        """Of the stages: norms and makes logits."""
        return self.place.pp_rank == self.layout.pp - 1

    @property
    def first_vocab(self) -> int:
        """The token id of the first row of embedding and head."""
        return self.place.tp_rank * self.vocab_rows


def share_of(config: K3Config, layout: Layout, place: Place, num_layers: int | None = None) -> Share:
    """The share of the rank at `place`. num_layers: how many layers run in all (None: every one)."""
    running = config.num_layers if num_layers is None else num_layers
    own = stages(config.num_layers, layout.pp)[place.pp_rank]
    tp = layout.tp
    local = replace(
        config,
        kda_num_heads=config.kda_num_heads // tp,
        num_heads=config.num_heads // tp,
        intermediate_size=config.intermediate_size // tp,
        moe_intermediate_size=config.moe_intermediate_size // tp,
    )
    return Share(
        config=local,
        layout=layout,
        place=place,
        num_layers=running,
        layers=range(min(own.start, running), min(own.stop, running)),
        experts=expert_block(config.num_experts, layout.ep, place.ep_rank),
        vocab_rows=padded_vocab(config.vocab_size, tp) // tp,
    )
