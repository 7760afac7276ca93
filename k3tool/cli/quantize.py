"""`k3tool quantize`: components of a checkpoint in other formats, exact where they can be, measured where not."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from k3tool.cli.options import (
    DestArgument,
    DryRunOption,
    JsonOption,
    MemoryOption,
    OverwriteOption,
    QuietOption,
    SourceArgument,
    WorkersOption,
    check_page,
    parse_file_size,
)
from k3tool.cli.output import Output, clean, table
from k3tool.cli.parts import PART_HELP, check_whole, share_of
from k3tool.errors import UsageError
from k3tool.units import format_bytes, format_duration, parse_ranges, parse_size, plural

if TYPE_CHECKING:
    from rich.console import Console

    from k3tool.execute import Options
    from k3tool.gguf.write import GgufOptions

Scheme = "SCHEME"


def command(
    context: typer.Context,
    source: SourceArgument,
    dest: DestArgument,
    experts: Annotated[str | None, typer.Option("--experts", metavar=Scheme, help="Routed experts: keep, bf16, mxfp4, nvfp4, nvfp4-modelopt, fp8-block, fp8-channel, int8, int4, nf4, fp4.")] = None,
    latent: Annotated[str | None, typer.Option("--latent", metavar=Scheme, help="Projections into and out of the MoE latent.")] = None,
    shared: Annotated[str | None, typer.Option("--shared", metavar=Scheme, help="Shared experts.")] = None,
    attention: Annotated[str | None, typer.Option("--attention", metavar=Scheme, help="Projections of KDA and MLA.")] = None,
    recipe: Annotated[Path | None, typer.Option("--recipe", metavar="FILE.toml", help="Schemes by component, and rules by module name (re:PATTERN) and layer.")] = None,
    scales: Annotated[str | None, typer.Option("--scales", metavar="search|plain", help="Scales by least squares (the default), or by the largest magnitude alone.")] = None,
    activations: Annotated[Path | None, typer.Option("--activations", metavar="FILE", help="Weight errors by what k3tool run --save-activations FILE recorded.")] = None,
    calibrated: Annotated[bool, typer.Option("--calibrated", help="Compensate errors of --latent (GPTQ); needs --activations with --gram.")] = False,
    exact: Annotated[bool, typer.Option("--exact", help="Fail rather than change a value.")] = False,
    max_rel_error: Annotated[float | None, typer.Option("--max-rel-error", metavar="X", min=0.0, help="Fail where a component's relative error is larger.")] = None,
    report: Annotated[Path | None, typer.Option("--report", metavar="FILE.html", help="The errors as a page of its own.")] = None,
    output_format: Annotated[str, typer.Option("--format", metavar="safetensors|gguf", help="gguf: the text model for llama.cpp.")] = "safetensors",
    trunk: Annotated[str | None, typer.Option("--trunk", metavar="TYPE", help="With --format gguf: bf16 (the default), f16, f32 or q8_0 for what is not an expert (--experts: keep, bf16, f16, f32, q8_0).")] = None,
    vocabulary: Annotated[str | None, typer.Option("--vocabulary", metavar="auto|none|ids", help="With --format gguf: tokens of the source (auto, the default), none, or their numbers.")] = None,
    device: Annotated[str, typer.Option("--device", metavar="auto|cpu|cuda", help="Where the arithmetic runs; the result is the same. auto: the CPU.")] = "auto",
    gpus: Annotated[int | None, typer.Option("--gpus", metavar="N", min=1, help="Reshard in the same pass: ranks in all, TP x EP x PP.")] = None,
    tp: Annotated[int | None, typer.Option("--tp", metavar="N", min=1, help="Tensor parallel ranks.")] = None,
    ep: Annotated[int | None, typer.Option("--ep", metavar="N", min=1, help="Expert parallel ranks.")] = None,
    pp: Annotated[int | None, typer.Option("--pp", metavar="N", min=1, help="Pipeline stages.")] = None,
    layout: Annotated[str | None, typer.Option("--layout", metavar="ranks|hf", help="A folder for each rank, or one checkpoint (the default for one GPU).")] = None,
    rank: Annotated[str | None, typer.Option("--rank", metavar="SPEC", help="Only these ranks, such as 0-3,7.")] = None,
    max_shard_size: Annotated[str | None, typer.Option("--max-shard-size", metavar="SIZE", help="Tensor bytes of a file at most (5GB; 20GB with --format gguf); a tensor is never cut.")] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Read every written file back and compare its digest.")] = False,
    part: Annotated[str | None, typer.Option("--part", metavar="I/N", help=PART_HELP)] = None,
    finalize: Annotated[bool, typer.Option("--finalize", help="Write no shard: only the index and configuration, if every file is there.")] = False,
    dry_run: DryRunOption = False,
    overwrite: OverwriteOption = False,
    max_workers: WorkersOption = None,
    max_memory: MemoryOption = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:  # fmt: skip
    """Write SOURCE into DEST with components in other formats, and say exactly what that changed.

    MXFP4 experts become NVFP4, INT8, FP8 or BF16 without changing a value. Only what is named is touched. Norms,
    router, vision, convolutions and attention residuals are touched only by a rule of a recipe.
    """
    from k3tool.execute import Options

    _check_device(device)
    if report is not None:
        _check_page(report, Path(dest), overwrite=overwrite)
    with Output("quantize", json=json, quiet=quiet) as output:
        share = None if dry_run else share_of(part, finalize, output)
        options = Options(
            max_workers=max_workers,
            max_memory=parse_size(max_memory) if max_memory else None,
            overwrite=overwrite,
            part=share,
            finalize=finalize,
            progress=output.progress,
        )
        if output_format == "gguf":
            for named, hint in (
                ({"--latent": latent, "--shared": shared, "--attention": attention, "--recipe": recipe},
                 "experts are chosen with --experts, all else with --trunk"),
                ({"--gpus": gpus, "--tp": tp, "--ep": ep, "--pp": pp, "--layout": layout, "--rank": rank},
                 "leave it out: llama.cpp divides the model when it loads it"),
                ({"--activations": activations, "--calibrated": calibrated or None, "--scales": scales},
                 "leave it out: the types of --trunk and --experts leave no scale to choose"),
                ({"--device cuda": True if device == "cuda" else None}, "leave it out: the CPU writes the same bytes"),
                ({"--max-rel-error": max_rel_error, "--report": report},
                 "--exact stops before the first changed value; errors are printed, and kept in k3tool-gguf.json"),
            ):  # fmt: skip
                _refuse(named, "--format gguf", hint)
            from k3tool.gguf.write import DEFAULT_FILE_BYTES, GgufOptions

            size = parse_file_size(max_shard_size) if max_shard_size else DEFAULT_FILE_BYTES
            asked = GgufOptions(trunk or "bf16", experts or "keep", size, vocabulary or "auto", exact=exact)
            _gguf(output, source, dest, asked, dry_run, verify, options, context.obj)
            return
        if output_format != "safetensors":
            raise UsageError(f"unknown format {output_format!r}", hint="write --format safetensors or --format gguf")
        _refuse(
            {"--trunk": trunk, "--vocabulary": vocabulary}, "--format safetensors", "add --format gguf, or leave it out"
        )
        from k3tool.checkpoint.source import opened_source
        from k3tool.quantize import carry_out, default_shard_bytes, prepare
        from k3tool.reshard import Request
        from k3tool.transform.quantize_policy import make_policy
        from k3tool.transform.quantize_warnings import unsearched

        one = all(count in (None, 1) for count in (gpus, tp, ep, pp))
        wanted = {"experts": experts, "latent": latent, "shared": shared, "attention": attention}
        policy = make_policy(wanted, recipe)
        with opened_source(source) as opened:
            request = Request(
                1 if one else gpus, tp, ep, pp,
                layout or ("hf" if one else "ranks"),
                parse_ranges(rank, what="ranks", option="--rank") if rank is not None else None,
                parse_file_size(max_shard_size) if max_shard_size else default_shard_bytes(opened),
            )  # fmt: skip
            job = prepare(opened, policy, request=request, scales=scales or "search", exact=exact, activations=activations,
                          calibrated=calibrated, device="cuda" if device == "cuda" else None)  # fmt: skip
            for warning in [*job.warnings, *unsearched(job.changing, scales)]:
                output.progress.warn(warning)
            if dry_run:
                _refuse(
                    {"--report": report}, "--dry-run", "the page shows what a conversion did; leave out one of them"
                )
                document = job.as_json()
                output.result(document, essential=document["plan"], human=lambda c: _show_plan(c, document))
                return
            done = carry_out(job, dest, max_rel_error=max_rel_error, verify=verify, page=report, options=options)
        document = done.as_json()
        human = partial(_show, document=document, dest=dest)
        check_whole(output, done.report, share, document, human, dest=dest, arguments=context.obj)
        output.result(document, essential=dest, human=human)


def _check_page(page: Path, dest: Path, *, overwrite: bool) -> None:
    """Raises UsageError where the page cannot be written. In DEST it can, though that is made later."""
    if dest.absolute() in page.absolute().parents and not page.absolute().parent.exists():
        return
    check_page(page, "quantize", overwrite=overwrite)


def _check_device(device: str) -> None:
    if device not in ("auto", "cpu", "cuda"):
        raise UsageError(f"unknown device {device!r}", hint="write --device auto, cpu or cuda")


def _refuse(named: dict[str, Any], what: str, hint: str) -> None:
    given = [option for option, value in named.items() if value is not None]
    if given:
        raise UsageError(f"{given[0]} does not go with {what}", hint=hint)


def _gguf(
    output: Output,
    source: str,
    dest: str,
    wanted: GgufOptions,
    dry_run: bool,
    verify: bool,
    options: Options,
    arguments: Sequence[str],
) -> None:
    from k3tool.gguf.write import GgufResult, carry_out, prepare

    prepared = prepare(source, wanted)
    for warning in prepared.warnings:
        output.progress.warn(warning)
    if dry_run:
        document = GgufResult(prepared).as_json()
        output.result(document, essential=document["plan"], human=lambda c: _show_gguf_plan(c, document, dest))
        return
    done = carry_out(prepared, dest, options=options, verify=verify)
    assert done.report is not None
    document = done.as_json()
    human = partial(_show, document=document, dest=dest)
    check_whole(output, done.report, options.part, document, human, dest=dest, arguments=arguments)
    output.result(document, essential=dest, human=human)


def _show_plan(console: Console, document: dict[str, Any]) -> None:
    rows = [
        (name, item["from"], item["scheme"], f"{item['tensors']:,}") for name, item in document["components"].items()
    ]
    console.print(table(("component", "from", "to", "tensors"), rows))
    console.print(
        f"{document['tensors']:,} tensors, {format_bytes(document['bytes_in'])} in, {format_bytes(document['bytes_out'])} "
        f"out; one step needs {format_bytes(document['step_memory_bytes'])}; layout: {document['reason']}",
        markup=False,
    )
    console.print(f"readable by: {document['readers']}", markup=False)


def _show_gguf_plan(console: Console, document: dict[str, Any], dest: str) -> None:
    rows = [(item["name"], f"{item['tensors']:,}", format_bytes(item["bytes"])) for item in document["files"]]
    console.print(table(("file", "tensors", "size"), rows))
    console.print(
        f"{format_bytes(document['bytes_in'])} in, {format_bytes(document['bytes_out'])} out to {clean(dest)}",
        markup=False,
    )
    _show_left_out(console, document)


def _show_left_out(console: Console, document: dict[str, Any]) -> None:
    for component, held in document.get("left_out", {}).items():
        text = f"left out: {component}, {held['tensors']:,} tensors, {format_bytes(held['bytes'])}"
        console.print(f"{text} (llama.cpp's file holds the text model)", markup=False)


def _error(value: float | None) -> str:
    return "" if value is None else f"{value:.5f}" if value else "0"


def _gain(error: dict[str, Any]) -> str:
    """What compensation has brought, in one line."""
    before, after = error["searched"], error["compensated"]
    change = f" ({after / before - 1:+.0%})" if before else ""
    aside = error["tokens_kept_aside"]
    where = f", on {plural(aside, 'token')} kept aside" if aside else ", on the tokens that it was made for"
    rounded = error["tensors_kept"]
    kept = (
        f"; {error['rows_kept']:,} of {error['rows']:,} rows gained nothing and are rounded"
        if error["rows_kept"]
        else ""
    )
    if rounded:
        kept += f", all of {rounded:,} of {plural(error['tensors'], 'matrix', 'matrices')}"
    return (
        f"error of outputs {error['plain']:.5f} with plain scales, {before:.5f} with searched ones, "
        f"{after:.5f} compensated{change}{where}{kept}"
    )


def _show(console: Console, document: dict[str, Any], dest: str) -> None:
    touched = {name: item for name, item in document["components"].items() if item["scheme"] != "keep"}
    weighted = any("weighted_error" in item for item in touched.values())
    rows = [
        (name, item["scheme"], f"{item['tensors']:,}", f"{item['exact_tensors']:,}",
         _error(item["relative_error"]), *([_error(item.get("weighted_error"))] if weighted else []),
         f"{item['max_error']:.3g}")
        for name, item in touched.items()
    ]  # fmt: skip
    columns = ("component", "scheme", "tensors", "exact", "relative error", *(["weighted error"] if weighted else []))
    if rows:
        console.print(table((*columns, "max error"), rows))
    for name, item in touched.items():
        if "output_error" in item:
            console.print(f"{name}: {_gain(item['output_error'])}", markup=False)
    untouched = [name for name, item in document["components"].items() if item["scheme"] == "keep"]
    console.print(f"untouched: {', '.join(untouched) or 'nothing'}", markup=False)
    for name, item in document["components"].items():
        if item["worst"]:
            console.print(f"worst of {name}: {clean(str(item['worst'][0]))}", markup=False)
    _show_left_out(console, document)
    kept = f", {plural(document['files_kept'], 'file')} kept from before" if document["files_kept"] else ""
    console.print(
        f"{clean(dest)}: {format_bytes(document['bytes_in'])} became {format_bytes(document['bytes_out'])}{kept} in "
        f"{format_duration(document['seconds'])}, peak memory {format_bytes(document['peak_memory_bytes'])}",
        markup=False,
    )
    if "verified" in document:
        console.print(f"verified: every byte of {plural(document['verified']['files'], 'file')}", markup=False)
    if "readers" in document:
        console.print(f"readable by: {document['readers']}", markup=False)
