"""`k3tool plan --report`: one HTML page that needs nothing but itself, with a bar for every rank; equal neighbours share one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from html import escape

from k3tool.layout_search import divisibility
from k3tool.planner import Deployment
from k3tool.sizing import RankMemory
from k3tool.units import format_bytes, plural

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
_WIDTH, _BAR, _GAP, _LEFT, _LABEL = 960, 18, 6, 150, 110
_STYLE = """
:root{color-scheme:light dark}
body{font:15px/1.5 system-ui,sans-serif;max-width:1060px;margin:2em auto;padding:0 1em}
h1{font-size:1.5em}h2{font-size:1.15em;margin-top:2em}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}
td,th{padding:.2em .9em .2em 0;text-align:right;border-bottom:1px solid #8884}
td:first-child,th:first-child{text-align:left}
.key{display:inline-block;white-space:nowrap;margin-right:1.2em}
.swatch{display:inline-block;width:.8em;height:.8em;margin-right:.4em;border-radius:2px}
.wide{overflow-x:auto}
.yes{color:#2a9d6f}.no{color:#d62828}
svg{width:100%;height:auto}svg text{font:14px system-ui,sans-serif;fill:currentColor}
"""


MARK = '<meta name="generator" content="k3tool plan">'  # a page with it may be replaced by a later one


def plan_html(plan: Deployment) -> str:
    """The whole page. Names from the source are escaped; nothing is loaded from anywhere."""
    title = f"{plan.source}: {plan.layout} on {plural(plan.layout.ranks, 'GPU')}"
    verdict = "fits" if plan.fits else "does not fit"
    body = [
        f"<h1>{escape(title)}</h1>",
        f"<p>{escape(_sentence(plan.reason))}</p>",
        f"<p>Planned for {plural(plan.workload.sequences, 'sequence')} of {plural(plan.workload.context, 'token')}"
        f"{_room(plan)}.</p>",
        f'<p><b class="{"yes" if plan.fits else "no"}">It {verdict}</b> on {escape(str(plan.card))} a GPU: the largest '
        f"rank needs {format_bytes(plan.largest.total)}, the margin is {format_bytes(plan.card.margin_bytes)}, "
        f"{format_bytes(abs(plan.free_bytes))} {'are left' if plan.fits else 'are missing'}. "
        f"{_price(plan)}</p>",
        "<h2>Memory of every rank</h2>",
        "<p>The line is the memory of a GPU, the dashed line what the margin leaves of it.</p>",
        _legend(plan.ranks),
        _bars(plan),
        "<h2>The numbers</h2>",
        _table(
            ("ranks", "weights", "KDA state", "conv. history", "MLA cache", "activations", "total"), _rank_rows(plan)
        ),
        "<h2>Other layouts that fit</h2>",
        _table(
            ("layout", "GPUs", "weights", "largest rank", "room for sequences", *_priced(plan, "price per hour")),
            _alternative_rows(plan),
        ),
        "<h2>Other storage</h2>",
        _table(("scheme", "weights", "largest rank", "fits"), _effect_rows(plan)),
        "<h2>What divides this model</h2><ul>",
        *(f"<li>{escape(reason)}</li>" for reason in divisibility(plan.inventory).reasons),
        "</ul>",
    ]
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8">{MARK}<title>{escape(title)}</title>'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
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
    marks = (
        f'<span class="key"><span class="swatch" style="background:{_color(name)}"></span>{escape(name)}</span> '
        for name in used
    )
    return f"<p>{''.join(marks)}</p>"


def _bars(plan: Deployment) -> str:
    """One bar for each row of equal ranks."""
    card = plan.card
    scale = (_WIDTH - _LEFT - 10) / max(card.memory_bytes, plan.largest.total)
    height = len(plan.equal_ranks) * (_BAR + _GAP) + 28
    parts = [f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="memory of every rank">']
    for number, (rank, last) in enumerate(plan.equal_ranks):
        top = number * (_BAR + _GAP) + 4
        parts.append(f'<text x="0" y="{top + _BAR - 4}">{_ranks(rank, last)}</text>')
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
        parts.append(f'<line x1="{x:.2f}" x2="{x:.2f}" y1="0" y2="{height - 22}" stroke="#d62828"{dash}/>')
    parts.append(f"{_axis(_LEFT + card.memory_bytes * scale, height - 6, format_bytes(card.memory_bytes))}</svg>")
    return "".join(parts)


def _axis(end: float, y: int, size: str) -> str:
    """Zero at the left and the GPU's memory under its line; beside the line where there is no room for both."""
    if end < _LEFT + _LABEL:
        return f'<text x="{end:.2f}" y="{y}">{size}</text>'
    return f'<text x="{_LEFT}" y="{y}">0</text><text x="{end:.2f}" y="{y}" text-anchor="end">{size}</text>'


def _ranks(first: RankMemory, last: RankMemory) -> str:
    if first is last:
        return f"rank {first.place.rank}"
    count = last.place.rank - first.place.rank + 1
    return f"ranks {first.place.rank}-{last.place.rank} ({count})"


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + "."


def _room(plan: Deployment) -> str:
    return f"; there is room for {plural(plan.max_sequences, 'sequence')} of that length" if plan.fits else ""


def _rank_rows(plan: Deployment) -> Iterator[tuple[object, ...]]:
    for first, last in plan.equal_ranks:
        yield _ranks(first, last), *map(format_bytes, first.sizes)


def _priced(plan: Deployment, *cells: object) -> tuple[object, ...]:
    """Cells of the price column, which is there when a price was given."""
    return cells if plan.gpu_price is not None else ()


def _alternative_rows(plan: Deployment) -> Iterator[tuple[object, ...]]:
    for option in plan.alternatives:
        price = _priced(plan, f"{option.price or 0:,.2f}")
        sizes = format_bytes(option.weights_bytes), format_bytes(option.largest_bytes)
        yield option, option.layout.ranks, *sizes, f"{option.max_sequences:,}", *price


def _effect_rows(plan: Deployment) -> Iterator[tuple[object, ...]]:
    for effect in plan.effects:
        name = f"{effect.component} {effect.scheme}"
        if effect.problem:
            yield name, effect.problem, "", "no"
        else:
            fits = "yes" if effect.fits else "no"
            yield name, format_bytes(effect.weights_bytes), format_bytes(effect.total_bytes), fits


def _table(head: Iterable[object], rows: Iterable[tuple[object, ...]]) -> str:
    lines = [f"<tr>{''.join(f'<td>{escape(str(cell))}</td>' for cell in row)}</tr>" for row in rows]
    if not lines:
        return "<p>None.</p>"
    names = "".join(f"<th>{escape(str(name))}</th>" for name in head)
    return f'<div class="wide"><table><tr>{names}</tr>{"".join(lines)}</table></div>'


def _price(plan: Deployment) -> str:
    if plan.price_per_hour is None:
        return ""
    return f"An hour of {plural(plan.layout.ranks, 'GPU')} at {plan.gpu_price:,.2f} costs {plan.price_per_hour:,.2f}."


def _color(name: str) -> str:
    return COLORS.get(name, "#555555")
