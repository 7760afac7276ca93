"""`k3tool plan`: what each GPU of a deployment would hold, and whether it fits."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from k3tool.cli.options import IsPath, JsonOption, QuietOption, check_output_file
from k3tool.cli.output import Output, clean, table
from k3tool.units import format_bytes

if TYPE_CHECKING:
    from rich.console import Console

    from k3tool.planner import Deployment

SOURCE_HELP = "Checkpoint folder, config.json, Hub repository org/name[@revision], or k3: the built-in release."


def command(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help=SOURCE_HELP), IsPath],
    gpus: Annotated[int | None, typer.Option("--gpus", metavar="N", min=1, help="tp x ep x pp.")] = None,
    tp: Annotated[int | None, typer.Option("--tp", metavar="N", min=1, help="Ranks that share every matrix.")] = None,
    ep: Annotated[int | None, typer.Option("--ep", metavar="N", min=1, help="Ranks that deal out the experts.")] = None,
    pp: Annotated[int | None, typer.Option("--pp", metavar="N", min=1, help="Ranks that deal out the layers.")] = None,
    gpu_memory: Annotated[
        str | None,
        typer.Option("--gpu-memory", metavar="SIZE", help="141GB, or a card: h100, h200, b200, b300, mi300x, mi355x."),
    ] = None,
    context: Annotated[
        int | None, typer.Option("--context", metavar="TOKENS", min=1, help="Tokens of a sequence.")
    ] = None,
    sequences: Annotated[
        int, typer.Option("--sequences", metavar="N", min=1, help="At once, over all GPUs; EP ranks share them.")
    ] = 1,
    experts: Annotated[str, typer.Option("--experts", metavar="SCHEME", help="Store routed experts so.")] = "keep",
    latent: Annotated[str, typer.Option("--latent", metavar="SCHEME", help="Store latent projections so.")] = "keep",
    gpu_price: Annotated[
        float | None, typer.Option("--gpu-price", metavar="PER_HOUR", help="Of one GPU; any currency.")
    ] = None,
    report: Annotated[
        Path | None, typer.Option("--report", metavar="FILE.html", help="Write a page with bars.")
    ] = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Size every rank of a deployment from a configuration alone, before anything is fetched or written.

    What is not given is chosen and the reason told. Without --gpus, --tp, --ep and --pp the fewest GPUs with
    --gpu-memory are found.
    """
    from k3tool import release
    from k3tool.checkpoint.writer import write_atomic
    from k3tool.planner import parse_card, plan_deployment
    from k3tool.sizing import BUILT_IN, open_inventory

    if report is not None:
        check_output_file(report)

    with Output("plan", json=json, quiet=quiet) as output:
        card = None if gpu_memory is None else parse_card(gpu_memory)
        inventory, origin = open_inventory(source)
        plan = plan_deployment(
            inventory, source=source, gpus=gpus, tp=tp, ep=ep, pp=pp, card=card, context=context, sequences=sequences,
            experts=experts, latent=latent, gpu_price=gpu_price,
        )  # fmt: skip
        if report is not None:
            from k3tool.plan_report import plan_html

            write_atomic(report, plan_html(plan).encode())
        document = {**plan.as_json(), "origin": origin, "report": None if report is None else str(report)}
        layout = plan.layout
        output.result(
            document,
            essential=f"{layout} {'fits' if plan.fits else 'does not fit'}",
            human=lambda console: _show(console, plan, origin),
        )
        if plan.fits and not Path(source).is_file():
            where = release.repo() if origin == BUILT_IN else source
            factors = f"--gpus {layout.ranks} --tp {layout.tp} --ep {layout.ep} --pp {layout.pp}"
            output.note(f"cut it so: k3tool reshard {where} DEST {factors}")


def _show(console: Console, plan: Deployment, origin: str) -> None:
    layout, card, load = plan.layout, plan.card, plan.workload
    verdict = "fits" if plan.fits else "DOES NOT FIT"
    chosen = ", the smallest named card that holds it" if plan.card_chosen and plan.fits else ""
    lines = [
        f"{clean(plan.source)}: {format_bytes(plan.inventory.total_bytes)} of tensors ({origin})",
        f"layout: {layout} on {layout.ranks} GPUs, {plan.reason}",
        f"load: {load.sequences} sequence{'s' if load.sequences > 1 else ''} of {load.context:,} tokens",
        f"{verdict}: the largest rank needs {format_bytes(plan.largest.total)} of {card}{chosen}; margin "
        f"{format_bytes(card.margin_bytes)}, {format_bytes(abs(plan.free_bytes))} {'left' if plan.fits else 'missing'}",
    ]
    if plan.fits:
        lines.append(f"room for {plan.max_sequences} sequences of that length")
    if plan.price_per_hour is not None:
        lines.append(f"price: {plan.price_per_hour:,.2f} an hour")
    if layout.ranks > 1:
        lines.append(
            f"an even share of the weights would be {format_bytes(plan.even_share_bytes)}; {_held_whole(plan)}"
        )
    for line in lines:
        console.print(line, markup=False)
    head = ("ranks", "weights", "KDA state", "conv. history", "MLA cache", "activations", "total")
    console.print(table(head, _rank_rows(plan)))
    _show_weights(console, plan)
    _show_others(console, plan)


def _held_whole(plan: Deployment) -> str:
    """Why ranks hold more than an even share."""
    layout, held = plan.layout, []
    if layout.tp > 1:
        most = sorted(plan.replicated, key=lambda name: -plan.replicated[name])[:3]
        whole = format_bytes(sum(plan.replicated.values()))
        held.append(f"every TP rank holds {whole} whole (most of it {', '.join(most)})")
    if layout.ep > 1:
        held.append("every EP rank holds all but the routed experts")
    if layout.pp > 1:
        held.append("stages differ by their layers, and hold embeddings or head at the ends")
    return ", ".join(held)


def _rank_rows(plan: Deployment) -> list[tuple[object, ...]]:
    """Neighbouring ranks that hold equally much share a row."""
    rows: list[tuple[object, ...]] = []
    for sizes, group in groupby(
        plan.ranks,
        key=lambda r: (r.weights_bytes, r.kda_state, r.conv_history, r.mla_cache, r.activations, r.total),
    ):
        numbers = [rank.place.rank for rank in group]
        name = str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"
        rows.append((name, *map(format_bytes, sizes)))
    return rows


def _show_weights(console: Console, plan: Deployment) -> None:
    largest, whole = plan.largest, plan.layout.tp > 1
    rows = [
        (name, format_bytes(nbytes), *([format_bytes(plan.replicated.get(name, 0))] if whole else []))
        for name, nbytes in largest.weights.items()
        if nbytes
    ]
    head = (f"weights of rank {largest.place.rank}", "size", *(["whole on every TP rank"] if whole else []))
    console.print(table(head, rows))


def _show_others(console: Console, plan: Deployment) -> None:
    from k3tool.planner import divisibility

    priced = plan.gpu_price is not None
    rows = [
        (option.layout, option.layout.ranks, format_bytes(option.largest_bytes),
         *([f"{option.price:,.2f}"] if option.price is not None else []))
        for option in plan.alternatives
    ]  # fmt: skip
    if rows:
        console.print(table(("also fits", "GPUs", "largest rank", *(["price per hour"] if priced else [])), rows))
    else:
        console.print("no other layout fits", markup=False)
    effects = [
        (f"{effect.component} {effect.scheme}", format_bytes(effect.weights_bytes), format_bytes(effect.total_bytes),
         "yes" if effect.fits else "no")
        for effect in plan.effects
        if not effect.problem
    ]  # fmt: skip
    console.print(table(("stored as", "weights a rank", "largest rank", "fits"), effects))
    for effect in plan.effects:
        if effect.problem:
            console.print(f"{effect.component} {effect.scheme}: {clean(effect.problem)}", markup=False)
    found = divisibility(plan.inventory)
    console.print(f"possible TP: {_numbers(found.tp)}; EP: {_numbers(found.ep)}; PP: 1 to {found.max_pp}", markup=False)
    console.print("; ".join(found.reasons), markup=False)


def _numbers(values: list[int]) -> str:
    return ", ".join(map(str, values)) if len(values) <= 24 else f"{', '.join(map(str, values[:24]))}, ..."
