"""The model card beside a quantized checkpoint: where it comes from, what was changed and by how much, who can read it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from k3tool.checkpoint.source import Source
from k3tool.units import format_bytes

CARD_NAME = "README.md"
SOURCE_CARD_NAME = "README.source.md"
MAX_CARD_BYTES = 4 << 20
_REPO = re.compile(r"[\w][\w.-]*/[\w][\w.-]*", re.ASCII)
_LICENCE = re.compile(r"license[\w-]*: [^\r\n]+", re.ASCII)


def source_card_of(source: Source) -> str:
    """The card of the source as text; empty where it has none, or one that is no card by its size."""
    size = source.files().get(CARD_NAME, 0)
    return source.read(CARD_NAME).decode(errors="replace") if 0 < size <= MAX_CARD_BYTES else ""


def model_card(document: Mapping[str, Any], *, revision: str | None, command: str, source_card: str) -> str:
    """document: the head of the report file (source, policy, scales, readers, sizes, components).

    source_card: text of the source's own card, from which the licence lines are taken.
    """
    source = str(document["source"])
    touched = {name: entry for name, entry in document["components"].items() if entry["scheme"] != "keep"}
    schemes = sorted({entry["scheme"] for entry in touched.values()})
    lines = ["---"]
    lines += licence_lines(source_card)
    if _REPO.fullmatch(source.partition("@")[0]):
        lines += [f"base_model: {source.partition('@')[0]}", "base_model_relation: quantized"]
    lines += ["tags:", *(f"- {scheme}" for scheme in schemes), "---", ""]
    lines += [
        f"# {_plain(source)}, quantized",
        "",
        f"Made by k3tool from `{_plain(source)}`" + (f" at revision `{revision}`." if revision else "."),
        "",
        "```",
        _plain(command),
        "```",
        "",
        f"{format_bytes(document['bytes_in'])} of tensors became {format_bytes(document['bytes_out'])}. "
        f"Readable by: {document['readers']}.",
        "",
        "| component | scheme | tensors | unchanged | relative error | largest error |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| {name} | {entry['scheme']} | {entry['tensors']:,} | {entry['exact_tensors']:,} | "
        f"{entry['relative_error']:.5f} | {entry['max_error']:.3g} |"
        for name, entry in document["components"].items()
    ]
    lines += [
        "",
        "Relative error is the RMS of the difference over the RMS of the source, measured on every weight while it was "
        "converted. `k3tool-quantization.json` holds the numbers of every tensor.",
    ]
    if source_card:
        lines += ["", f"The card of the source is in `{SOURCE_CARD_NAME}`."]
    return "\n".join(lines) + "\n"


def licence_lines(card: str) -> list[str]:
    """The `license` lines of a card's metadata."""
    head, separator, rest = card.partition("---")
    if head.strip() or not separator:
        return []
    metadata = rest.partition("\n---")[0]
    return [line.strip() for line in metadata.splitlines() if _LICENCE.fullmatch(line.strip())]


def _plain(text: str) -> str:
    """Without what would end a line or a code span."""
    return "".join(char for char in text if char.isprintable() and char != "`")
