"""`k3tool plan`: what each GPU of a deployment would hold, and whether it fits."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from k3tool import commands
from k3tool.checkpoint.origin import free_folder
from k3tool.cli.options import IsPath, JsonOption, QuietOption, check_page
from k3tool.cli.output import Output, clean, table
from k3tool.units import format_bytes, plural

if TYPE_CHECKING:
    from rich.console import Console

    from k3tool.plan_source import PlanSource
    from k3tool.planner import Deployment

SOURCE_HELP = "Checkpoint folder, config.json, Hub repository org/name[@revision], or k3: the built-in release."


CARDS_HELP = "h100, h20, h20-3e, h200, b200, gb200, mi300x, mi325x, b300, gb300, mi350x, mi355x"
SCHEMES_HELP = "bf16, mxfp4, nvfp4, fp8-block, fp8-channel, int8, int4, nf4, fp4"


def command(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help=SOURCE_HELP), IsPath],
    gpus: Annotated[int | None, typer.Option("--gpus", metavar="N", min=1, help="tp x ep x pp.")] = None,
    tp: Annotated[int | None, typer.Option("--tp", metavar="N", min=1, help="Ranks that share every matrix.")] = None,
    ep: Annotated[int | None, typer.Option("--ep", metavar="N", min=1, help="Ranks that deal out the experts.")] = None,
    pp: Annotated[int | None, typer.Option("--pp", metavar="N", min=1, help="Ranks that deal out the layers.")] = None,
    node_gpus: Annotated[
        int, typer.Option("--node-gpus", metavar="N", min=1, help="GPUs of a node; TP groups are kept inside nodes.")
    ] = 8,
    redundant: Annotated[
        int, typer.Option("--redundant-experts", metavar="N", min=0, help="Held twice, so that EP divides the experts.")
    ] = 0,
    gpu_memory: Annotated[
        str | None, typer.Option("--gpu-memory", metavar="SIZE", help=f"141GB, or a card: {CARDS_HELP}.")
    ] = None,
    margin: Annotated[
        str | None,
        typer.Option("--margin", metavar="SIZE", help="Left free on each GPU for the runtime. Default: a tenth."),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(
            "--context", metavar="TOKENS", min=1, help="Of a sequence. Default: 131072, or what the model has."
        ),
    ] = None,
    sequences: Annotated[
        int, typer.Option("--sequences", metavar="N", min=1, help="At once, over all GPUs; EP ranks share them.")
    ] = 1,
    experts: Annotated[
        str, typer.Option("--experts", metavar="SCHEME", help=f"Store routed experts so: {SCHEMES_HELP}.")
    ] = "keep",
    latent: Annotated[
        str, typer.Option("--latent", metavar="SCHEME", help="Store latent projections so; the same schemes.")
    ] = "keep",
    gpu_price: Annotated[
        float | None, typer.Option("--gpu-price", metavar="PER_HOUR", help="Of one GPU; any currency.")
    ] = None,
    fits: Annotated[bool, typer.Option("--fits", help="Exit 1 where it does not fit; without this exit 0.")] = False,
    report: Annotated[
        Path | None, typer.Option("--report", metavar="FILE.html", help="Write a page with bars.")
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace FILE.html even where it is no such page.")
    ] = False,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Size every rank of a deployment before anything is fetched or written.

    What is not given is chosen and the reason told. Without --gpus, --tp, --ep and --pp the fewest GPUs with
    --gpu-memory are found, and the fewest in whole nodes are laid out.
    """
    from k3tool.cards import parse_card
    from k3tool.checkpoint.writer import write_atomic
    from k3tool.errors import CheckFailed
    from k3tool.plan_source import open_plan_source
    from k3tool.planner import plan_deployment
    from k3tool.units import parse_size

    if report is not None:
        check_page(report, "plan", overwrite=overwrite)

    with Output("plan", json=json, quiet=quiet) as output:
        left = None if margin is None else parse_size(margin)
        card = None if gpu_memory is None else parse_card(gpu_memory, left)
        found = open_plan_source(source, output.progress)
        plan = plan_deployment(
            found.inventory, source=source, gpus=gpus, tp=tp, ep=ep, pp=pp, card=card, context=context,
            sequences=sequences, experts=experts, latent=latent, gpu_price=gpu_price, node_gpus=node_gpus, margin=left,
            redundant=redundant,
        )  # fmt: skip
        if report is not None:
            from k3tool.plan_report import plan_html

            write_atomic(report, plan_html(plan).encode(errors="backslashreplace"))
        document = {
            **plan.as_json(),
            "origin": found.origin,
            "notes": found.notes,
            "report": None if report is None else str(report),
        }
        essential = f"{plan.layout} {'fits' if plan.fits else 'does not fit'}"
        if fits and not plan.fits:
            output.show(lambda console: _show(console, plan, found))
            if quiet and not json:
                output.result(document, essential=essential)
            raise CheckFailed(
                f"{plan.layout} does not fit: {format_bytes(-plan.free_bytes)} are missing on {plan.card}",
                hint=_what_fits(plan),
            ).with_document(document)
        note = _cut_it_so(plan, found.readable) if plan.fits else _what_fits(plan)
        output.result(document, essential=essential, human=lambda console: _show(console, plan, found))
        if note:
            output.note(note)


def _what_fits(plan: Deployment) -> str:
    """The same question for a layout that fits, as a command."""
    best = plan.fewest_in_nodes or plan.fewest
    if best is None:
        return "give more --gpu-memory, a shorter --context or fewer --sequences"
    card, load = plan.card, plan.workload
    words: list[object] = ["plan", _named(plan.source), "--gpus", best.layout.ranks]
    words += ["--gpu-memory", card.name or card.memory_bytes, "--context", load.context, "--sequences", load.sequences]
    for option, value, usual in (
        ("--margin", card.margin, None), ("--node-gpus", plan.node_gpus, 8), ("--experts", plan.experts, "keep"),
        ("--latent", plan.latent, "keep"), ("--redundant-experts", plan.redundant, 0),
    ):  # fmt: skip
        words += [option, value] if value != usual else []
    return f"{plural(best.layout.ranks, 'GPU')} would hold it: {commands.command(*words)}"


def _cut_it_so(plan: Deployment, readable: str) -> str:
    """The command that writes this layout. readable: the source that it reads, empty where there is nothing to read."""
    layout = plan.layout
    changed = [word for component, scheme in plan.conversions for word in (f"--{component}", scheme)]
    if plan.redundant:
        return "reshard writes no second copies of experts: serving engines place them when they load the checkpoint"
    if layout.ranks == 1 and not changed:
        return ""
    if not readable:
        return "reshard cuts it so when all of its shards are there"
    factors = ["--gpus", layout.ranks, "--tp", layout.tp, "--ep", layout.ep, "--pp", layout.pp]
    dest = free_folder(readable, "-".join([*_factors(plan), *changed[1::2]]))
    if changed:
        words = ["quantize", _named(readable), dest, *changed, *(factors if layout.ranks > 1 else [])]
    else:
        words = ["reshard", _named(readable), dest, *factors]
    return f"cut it so: {commands.command(*words)}"


def _factors(plan: Deployment) -> list[str]:
    factors = (("tp", plan.layout.tp), ("ep", plan.layout.ep), ("pp", plan.layout.pp))
    return [f"{name}{number}" for name, number in factors if number > 1]


def _named(source: str) -> str | Path:
    """As a word of a command: a file or folder may begin with a dash."""
    return Path(source) if os.path.lexists(source) else source


def _show(console: Console, plan: Deployment, found: PlanSource) -> None:
    layout, card, load = plan.layout, plan.card, plan.workload
    verdict = "fits" if plan.fits else "DOES NOT FIT"
    chosen = ", the smallest named card that holds it" if plan.card_chosen and plan.fits else ""
    copies = f", {plan.redundant} redundant experts" if plan.redundant else ""
    joint = ", " if plan.reason == "as given" else ": "
    lines = [
        f"{plan.source}: {format_bytes(plan.inventory.total_bytes)} of tensors ({found.origin})",
        *(f"note: {note}" for note in found.notes),
        f"layout: {layout}{copies} on {plural(layout.ranks, 'GPU')}{joint}{plan.reason}",
        f"load: {plural(load.sequences, 'sequence')} of {plural(load.context, 'token')}",
        f"{verdict}: the largest rank needs {format_bytes(plan.largest.total)} of {card}{chosen}; margin "
        f"{format_bytes(card.margin_bytes)}, {format_bytes(abs(plan.free_bytes))} {'left' if plan.fits else 'missing'}",
    ]
    if plan.fits:
        lines.append(f"room for {plural(plan.max_sequences, 'sequence')} of that length")
    if plan.price_per_hour is not None:
        lines.append(f"price: {plan.price_per_hour:,.2f} an hour")
    if layout.ranks > 1:
        lines.append(
            f"an even share of the weights would be {format_bytes(plan.even_share_bytes)}; {_held_whole(plan)}"
        )
    for line in lines:
        console.print(clean(line), markup=False)
    head = ("ranks", "weights", "KDA state", "conv.", "MLA cache", "activations", "total")
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
    for first, last in plan.equal_ranks:
        name = str(first.place.rank) if first is last else f"{first.place.rank}-{last.place.rank}"
        rows.append((name, *map(format_bytes, first.sizes)))
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
    from k3tool.layout_search import divisibility

    priced = plan.gpu_price is not None
    rows = [
        (option, option.layout.ranks, format_bytes(option.largest_bytes), f"{option.max_sequences:,}",
         *([f"{option.price:,.2f}"] if option.price is not None else []))
        for option in plan.alternatives
    ]  # fmt: skip
    if rows:
        console.print(table(("also fits", "GPUs", "largest rank", "sequences", *(["an hour"] if priced else [])), rows))
    else:
        console.print("no other layout fits", markup=False)
    effects = [
        (f"{effect.component} {effect.scheme}", format_bytes(effect.weights_bytes), format_bytes(effect.total_bytes),
         "yes" if effect.fits else "no")
        for effect in plan.effects
        if not effect.problem
    ]  # fmt: skip
    console.print(table(("stored as", "weights a rank", "largest rank", "fits"), effects))
    problems: dict[tuple[str, str], list[str]] = {}
    for effect in plan.effects:
        if effect.problem:
            problems.setdefault((effect.component, effect.problem), []).append(effect.scheme)
    for (component, problem), schemes in problems.items():
        console.print(f"{component} {', '.join(schemes)}: {clean(problem)}", markup=False)
    found = divisibility(plan.inventory)
    console.print(f"possible TP: {_numbers(found.tp)}; EP: {_numbers(found.ep)}; PP: 1 to {found.max_pp}", markup=False)
    console.print("; ".join(found.reasons), markup=False)


def _numbers(values: list[int]) -> str:
    return ", ".join(map(str, values)) if len(values) <= 24 else f"{', '.join(map(str, values[:24]))}, ..."
