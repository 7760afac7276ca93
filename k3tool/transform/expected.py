"""What a folder should hold: all that its configuration implies, or the part of one rank.

A rank's tensors are those of a model with its share of the widths, and of these the ones that the rank owns.
"""

from __future__ import annotations

from dataclasses import replace

from k3tool.catalog import Catalog, catalog
from k3tool.config import K3Config
from k3tool.errors import CheckpointCorrupt, K3Error
from k3tool.layout import Layout, padded_vocab, problems
from k3tool.transform.split import Splitter, parsed


def expected(config: K3Config) -> tuple[K3Config, Catalog]:
    """The configuration with the widths that are stored here, and the tensors that follow from it.

    Raises CheckpointCorrupt where the `k3tool` section of a rank's configuration is not one that k3tool wrote.
    """
    section = config.raw.get("k3tool")
    if section is None:
        return config, catalog(config)
    try:
        layout = Layout(*(int(section[key]) for key in ("tp", "ep", "pp")))
        place = layout.place(int(section["rank"]))
        if problems(config, layout):
            raise ValueError(problems(config, layout)[0])
    except (K3Error, KeyError, TypeError, ValueError) as error:
        raise CheckpointCorrupt(
            f"config.json: its k3tool section is not one that k3tool wrote ({error})", hint="write the ranks again"
        ) from None
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
