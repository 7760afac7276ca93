"""`k3tool plan --report`: one HTML page that needs nothing but itself, with a bar for every rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from html import escape

from k3tool.planner import Deployment, divisibility
from k3tool.sizing import RankMemory
from k3tool.units import format_bytes

COLORS = {
    "routed_experts": "#3366aa",
    "shared_experts": "#5d9bd3",
    "latent": "#88c0d0",
    "kda": "#2a9d6f",
    "mla": "#8fc93a",
    "router": "#b48ead",
    "dense_mlp": "#7b8794",
    "attn_res": "#a3be8c",
    "norms": "#c0c8d0",
    "embeddings": "#d08770",
    "vision": "#ebcb8b",
    "KDA state": "#b5179e",
    "MLA cache": "#f72585",
    "activations": "#ff9f1c",
}
_WIDTH, _BAR, _GAP, _LEFT = 960, 14, 4, 70
_STYLE = """
:root{color-scheme:light dark}
body{font:15px/1.5 system-ui,sans-serif;max-width:1060px;margin:2em auto;padding:0 1em}
h1{font-size:1.5em}h2{font-size:1.15em;margin-top:2em}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}
td,th{padding:.2em .9em .2em 0;text-align:right;border-bottom:1px solid #8884}
td:first-child,th:first-child{text-align:left}
.swatch{display:inline-block;width:.8em;height:.8em;margin:0 .4em 0 1em;border-radius:2px}
.yes{color:#2a9d6f}.no{color:#d62828}
svg{width:100%;height:auto}svg text{font:11px system-ui,sans-serif;fill:currentColor}
"""


def plan_html(plan: Deployment) -> str:
    """The whole page. Names from the source are escaped; nothing is loaded from anywhere."""
    title = f"{plan.source}: {plan.layout} on {plan.layout.ranks} GPUs"
    verdict = "fits" if plan.fits else "does not fit"
    body = [
        f"<h1>{escape(title)}</h1>",
        f"<p>{escape(plan.reason)}.</p>",
        f'<p><b class="{"yes" if plan.fits else "no"}">It {verdict}</b> on {escape(str(plan.card))} a GPU: the largest '
        f"rank needs {format_bytes(plan.largest.total)}, the margin is {format_bytes(plan.card.margin_bytes)}, "
        f"{format_bytes(abs(plan.free_bytes))} {'are left' if plan.fits else 'are missing'}. "
        f"{_price(plan)}</p>",
        "<h2>Memory of every rank</h2>",
        _legend(plan.ranks),
        _bars(plan),
        "<h2>The numbers</h2>",
        _table(
            ("rank", "weights", "KDA state", "conv. history", "MLA cache", "activations", "total"), _rank_rows(plan)
        ),
        "<h2>Other layouts that fit</h2>",
        _table(("layout", "GPUs", "weights", "largest rank", "price per hour"), _alternative_rows(plan)),
        "<h2>Other storage</h2>",
        _table(("scheme", "weights", "largest rank", "fits"), _effect_rows(plan)),
        "<h2>What divides this model</h2><ul>",
        *(f"<li>{escape(reason)}</li>" for reason in divisibility(plan.inventory).reasons),
        "</ul>",
    ]
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style></head><body>{''.join(body)}</body></html>\n"
    )


def segments(rank: RankMemory) -> Iterator[tuple[str, int]]:
    """What a bar is made of, in order: components, then caches."""
    yield from ((name, nbytes) for name, nbytes in rank.weights.items() if nbytes)
    yield "KDA state", rank.kda_state + rank.conv_history
    yield "MLA cache", rank.mla_cache
    yield "activations", rank.activations


def _legend(ranks: list[RankMemory]) -> str:
    used = dict.fromkeys(name for rank in ranks for name, nbytes in segments(rank) if nbytes)
    marks = (f'<span class="swatch" style="background:{_color(name)}"></span>{escape(name)}' for name in used)
    return f"<p>{''.join(marks)}</p>"


def _bars(plan: Deployment) -> str:
    """One bar a rank; the line is the memory of the GPU, the dashed one what the margin leaves of it."""
    card = plan.card
    scale = (_WIDTH - _LEFT - 10) / max(card.memory_bytes, plan.largest.total)
    height = len(plan.ranks) * (_BAR + _GAP) + 24
    parts = [f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="memory of every rank">']
    for number, rank in enumerate(plan.ranks):
        top = number * (_BAR + _GAP) + 4
        parts.append(f'<text x="0" y="{top + _BAR - 3}">rank {rank.place.rank}</text>')
        left = float(_LEFT)
        for name, nbytes in segments(rank):
            width = nbytes * scale
            if width > 0.05:
                hint = f"<title>{escape(name)}: {format_bytes(nbytes)}</title>"
                parts.append(
                    f'<rect x="{left:.2f}" y="{top}" width="{width:.2f}" height="{_BAR}" fill="{_color(name)}">{hint}</rect>'
                )
            left += width
    for nbytes, dash in ((card.memory_bytes, ""), (card.memory_bytes - card.margin_bytes, ' stroke-dasharray="4 3"')):
        x = _LEFT + nbytes * scale
        parts.append(f'<line x1="{x:.2f}" x2="{x:.2f}" y1="0" y2="{height - 20}" stroke="#d62828"{dash}/>')
    parts.append(f'<text x="{_LEFT}" y="{height - 6}">0</text>')
    end = _LEFT + card.memory_bytes * scale
    parts.append(
        f'<text x="{end:.2f}" y="{height - 6}" text-anchor="end">{format_bytes(card.memory_bytes)}</text></svg>'
    )
    return "".join(parts)


def _rank_rows(plan: Deployment) -> Iterator[tuple[object, ...]]:
    for rank in plan.ranks:
        sizes = (rank.weights_bytes, rank.kda_state, rank.conv_history, rank.mla_cache, rank.activations, rank.total)
        yield rank.place.rank, *map(format_bytes, sizes)


def _alternative_rows(plan: Deployment) -> Iterator[tuple[object, ...]]:
    for option in plan.alternatives:
        price = "" if option.price is None else f"{option.price:,.2f}"
        yield (
            option.layout,
            option.layout.ranks,
            format_bytes(option.weights_bytes),
            format_bytes(option.largest_bytes),
            price,
        )


def _effect_rows(plan: Deployment) -> Iterator[tuple[object, ...]]:
    for effect in plan.effects:
        name = f"{effect.component} {effect.scheme}"
        if effect.problem:
            yield name, effect.problem, "", "no"
        else:
            fits = "yes" if effect.fits else "no"
            yield name, format_bytes(effect.weights_bytes), format_bytes(effect.total_bytes), fits


def _table(head: Iterable[str], rows: Iterable[tuple[object, ...]]) -> str:
    lines = [f"<tr>{''.join(f'<td>{escape(str(cell))}</td>' for cell in row)}</tr>" for row in rows]
    if not lines:
        return "<p>None.</p>"
    return f"<table><tr>{''.join(f'<th>{escape(name)}</th>' for name in head)}</tr>{''.join(lines)}</table>"


def _price(plan: Deployment) -> str:
    if plan.price_per_hour is None:
        return ""
    return f"An hour of {plan.layout.ranks} GPUs at {plan.gpu_price:,.2f} costs {plan.price_per_hour:,.2f}."


def _color(name: str) -> str:
    return COLORS.get(name, "#555555")
