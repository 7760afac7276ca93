"""What one GPU holds: cards by name, sizes as people write them, and the margin that is left free on each."""

from __future__ import annotations

from dataclasses import dataclass

from k3tool.errors import UsageError
from k3tool.units import format_bytes, parse_size

CARDS = {
    "h100": 80_000_000_000,
    "h20": 96_000_000_000,
    "h20-3e": 141_000_000_000,
    "h200": 141_000_000_000,
    "b200": 180_000_000_000,
    "gb200": 186_000_000_000,
    "mi300x": 192_000_000_000,
    "mi325x": 256_000_000_000,
    "b300": 288_000_000_000,
    "gb300": 288_000_000_000,
    "mi350x": 288_000_000_000,
    "mi355x": 288_000_000_000,
}
"""Memory of one card as its maker's data sheet states it. B200: the 180 GB that HGX and DGX B200 systems offer of its
192 GB. GB200: the 13.4 TB of an NVL72 rack, divided by 72."""

MARGIN = 0.10
"""Share of the memory left to the runtime, communication buffers, workspaces and fragmentation."""


@dataclass(frozen=True)
class Card:
    """What one GPU holds. `name` is empty for a plain number of bytes. margin: bytes that are left free; None for the
    usual share."""

    name: str
    memory_bytes: int
    margin: int | None = None

    @property
    def margin_bytes(self) -> int:
        return round(self.memory_bytes * MARGIN) if self.margin is None else self.margin

    def __str__(self) -> str:
        return f"{self.name} ({format_bytes(self.memory_bytes)})" if self.name else format_bytes(self.memory_bytes)


def parse_card(text: str, margin: int | None = None) -> Card:
    """A card by name, or a size. Raises UsageError."""
    name = text.strip().lower()
    if name in CARDS:
        card = Card(name, CARDS[name], margin)
    else:
        card = Card("", _card_size(text), margin)
    if card.margin_bytes >= card.memory_bytes:
        raise UsageError(
            f"a margin of {format_bytes(card.margin_bytes)} leaves nothing of {card}", hint="give a smaller --margin"
        )
    return card


def _card_size(text: str) -> int:
    try:
        memory = parse_size(text)
    except UsageError as error:
        message = error.message if text.strip().startswith("-") else f"unknown GPU memory {text!r}"
        raise UsageError(message, hint=f"name a card ({', '.join(CARDS)}) or a size such as 141GB") from None
    if memory < 1:
        raise UsageError(f"a GPU with {text} holds nothing", hint="write a size such as 141GB")
    return memory


def fits_on(total: int, card: Card) -> bool:
    return total + card.margin_bytes <= card.memory_bytes


def smallest_card(total: int, margin: int | None) -> Card:
    cards = sorted((Card(name, memory, margin) for name, memory in CARDS.items()), key=lambda card: card.memory_bytes)
    return next((card for card in cards if fits_on(total, card)), cards[-1])
