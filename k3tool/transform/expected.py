"""What a folder should hold: all that its configuration implies, or the part of one rank.

A rank's tensors are those of a model with its share of the widths, and of these the ones that the rank owns.
"""

from __future__ import annotations

from dataclasses import replace

from k3tool.catalog import Catalog, catalog, check_extent
from k3tool.config import K3Config
from k3tool.errors import CheckpointCorrupt
from k3tool.layout import padded_vocab, problems, share_of
from k3tool.transform.split import Splitter, parsed


def expected(config: K3Config, names: int) -> tuple[K3Config, Catalog]:
    """The configuration with the widths that are stored here, and the tensors that follow from it.

    names: how many tensors there are. Raises CheckpointCorrupt where the configuration implies many times as many, or
    where the `k3tool` section of a rank's configuration is not one that k3tool wrote.
    """
    share = share_of(config)
    if share is None:
        check_extent(config, names)
        return config, catalog(config)
    layout, place = share
    if found := problems(config, layout):
        raise CheckpointCorrupt(
            f"config.json: its k3tool section is not one that k3tool wrote ({found[0]})",
            hint="write the ranks again from the checkpoint",
        )
    check_extent(config, names * layout.ranks)
    local = replace(
        config,
        kda_num_heads=config.kda_num_heads // layout.tp,
        num_heads=config.num_heads // layout.tp,
        intermediate_size=config.intermediate_size // layout.tp,
        moe_intermediate_size=config.moe_intermediate_size // layout.tp,
        vocab_size=padded_vocab(config.vocab_size, layout.tp) // layout.tp,
    )
    splitter = Splitter(config)
    whole = catalog(local)
    held = []
    for entry in whole.entries:
        name = parsed(entry.name)
        rule = splitter.rule(name)
        if rule is not None and splitter.holds(name, rule, layout, place):
            held.append(entry)
    return local, Catalog(held, whole.shards)
