"""`k3tool run`: a prompt in, tokens out."""

from __future__ import annotations

import os
import traceback
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from k3tool.cli import signals, streams
from k3tool.cli.options import IsPath, JsonOption, QuietOption, check_output_file
from k3tool.cli.output import Output, print_failure
from k3tool.cli.printer import Printer
from k3tool.cli.prompt import Prompt, check_text
from k3tool.commands import command as command_line
from k3tool.commands import torchrun
from k3tool.disk import GOES_ON, STARTS_OVER, free_bytes
from k3tool.errors import CapacityError, CheckFailed, Interrupted, K3Error, UnsupportedError, UsageError, tell
from k3tool.events import aside
from k3tool.sampling import check_sampling
from k3tool.stopping import check_stop_texts
from k3tool.units import format_bytes, parse_size, plural

if TYPE_CHECKING:
    from k3tool.config import K3Config
    from k3tool.generate import RunResult, Session, Timing
    from k3tool.model.check import KernelCheck
    from k3tool.model.recording import Recorder


def command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Checkpoint folder; under torchrun, a folder of ranks.")],
    prompt: Annotated[str | None, typer.Option("--prompt", metavar="TEXT", help="The prompt.")] = None,
    prompt_file: Annotated[
        str | None,
        typer.Option("--prompt-file", metavar="FILE", help="A file that holds it (- for stdin); messages with --chat."),
        IsPath,
    ] = None,
    input_ids: Annotated[
        str | None, typer.Option("--input-ids", metavar='"1,2,3"', help="Token ids; needs no tokenizer.")
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="A user message in K3's format, or the messages that a JSON prompt file holds.")
    ] = False,
    system: Annotated[
        str | None, typer.Option("--system", metavar="TEXT", help="With --chat: a system message before the others.")
    ] = None,
    thinking: Annotated[
        bool | None,
        typer.Option("--thinking/--no-thinking", help="With --chat: the reply begins with reasoning (default), or not."),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", metavar="N", min=0)] = 64,
    temperature: Annotated[
        float, typer.Option("--temperature", metavar="T", help="Sample; without it, greedy.")
    ] = 0.0,
    top_p: Annotated[float, typer.Option("--top-p", metavar="P", help="Sample from the likeliest tokens only.")] = 1.0,
    top_k: Annotated[
        int | None, typer.Option("--top-k", metavar="N", min=0, help="Sample from the N likeliest tokens only; 0: all.")
    ] = None,
    seed: Annotated[int | None, typer.Option("--seed", metavar="N", min=0, max=2**63 - 1)] = None,
    stop: Annotated[
        list[str] | None,
        typer.Option("--stop", metavar="TEXT", help="End the reply before this text, as written; may be repeated."),
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on after end tokens, to --max-new-tokens.")
    ] = False,
    backend: Annotated[str, typer.Option("--backend", metavar="auto|triton|cpu|reference", help="triton: a GPU. cpu: compiled for this processor. reference: plain torch, slow.")] = "auto",
    device: Annotated[str, typer.Option("--device", metavar="auto|cpu|cuda")] = "auto",
    dtype: Annotated[str, typer.Option("--dtype", metavar="bfloat16|float32", help="Of activations.")] = "bfloat16",
    layers: Annotated[int | None, typer.Option("--layers", metavar="N", help="Run the first N layers only.")] = None,
    memory: Annotated[
        str | None,
        typer.Option("--memory", metavar="SIZE", help="Bound the process (on a GPU: weights and states); experts beyond it stream from disk, and logits differ in the last bits."),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Compare every built-in kernel with its reference, layer by layer.")
    ] = False,
    logits_out: Annotated[
        Path | None, typer.Option("--logits-out", metavar="FILE", help="Write the logits as safetensors.")
    ] = None,
    save_activations: Annotated[
        Path | None,
        typer.Option("--save-activations", metavar="FILE", help="Write mean squares of every matrix's inputs, for quantize --activations."),
    ] = None,
    gram: Annotated[
        bool, typer.Option("--gram", help="And Gram matrices of the latent projections' inputs, for quantize --calibrated (25 GB for the release).")
    ] = False,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:  # fmt: skip
    """Generate from a prompt. Text streams to stdout as it appears; timing and memory follow on stderr.

    A folder of ranks runs under torchrun, one process for each: `torchrun --nproc-per-node N -m k3tool run RANKS_DIR ...`.
    Rank 0 reads the prompt, writes the logits, and speaks for all.
    """
    from k3tool.launch import left_over
    from k3tool.parallel.link import joined
    from k3tool.parallel.world import rank_folder_of, world_of

    asked = Prompt(prompt, prompt_file, input_ids, chat, system, thinking)
    check_sampling(max_new_tokens, temperature, top_p, top_k=top_k, seed=seed)
    stops = list(stop or ())
    check_stop_texts(stops)
    for text in stops:
        check_text("--stop", text)
    budget = parse_size(memory) if memory is not None else None
    world = world_of(os.environ)
    _check_recording(save_activations, gram, world.size)
    printer = Printer()
    if world.size > 1:
        streams.keep_stdout()  # libraries that connect ranks print there
    with Output("run", json=json, quiet=quiet or world.rank > 0) as output:
        if left_over(os.environ) == "WORLD_SIZE":
            output.note(
                f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, but no launcher (torchrun) started this process with others: "
                "it runs alone"
            )
        rank_folder_of(folder, world)  # a wrong number of processes is known before anything slow is imported
        with joined(world, voice=_Voice(output, printer)) as link:
            if link.is_first:
                if logits_out is not None:
                    _check_result_file(logits_out)
                config = _read_prompt(folder, asked, stops, printer, output)
                if logits_out is not None:
                    _check_room(logits_out, len(printer.input_ids), max_new_tokens, config.vocab_size)
                _warn_of_greedy(
                    output, temperature, {"--top-p": top_p != 1.0, "--top-k": top_k, "--seed": seed is not None}
                )
            ids = printer.input_ids = link.from_first(lambda: printer.input_ids)
            from k3tool.generate import Session, run_session, write_logits
            from k3tool.model.bound import Bound

            bound = (
                Bound(budget, len(ids) + max_new_tokens, logits_out is not None, check) if budget is not None else None
            )
            session = Session.open(
                folder, device=device, dtype=dtype, layers=layers, backend=backend, bound=bound,
                progress=output.progress, link=link,
            )  # fmt: skip
            output.close()
            checks = session.check(ids) if check else []
            recorder = _recorder(session, save_activations, gram)
            try:
                with recorder.watching() if recorder else nullcontext():
                    result = run_session(
                        session, ids, max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, top_k=top_k,
                        seed=seed, stop_at_end=not ignore_eos, stop=printer.completes,
                        keep_logits=logits_out is not None, on_token=printer.token,
                    )  # fmt: skip
            except KeyboardInterrupt as error:
                printer.finish()
                raise Interrupted.of(error, STARTS_OVER).with_document(printer.so_far) from None
            except K3Error as error:
                printer.finish()
                tell(error, printer.so_far)
                raise
            printer.finish()
            document = {**result.as_json(), **printer.so_far, "checks": [item.as_json() for item in checks]}
            try:
                if logits_out is not None and link.is_first:
                    write_logits(logits_out, result)
                if recorder is not None and save_activations is not None:
                    recorder.write(save_activations)
            except K3Error as error:  # what was computed is not lost with it
                error.hint = error.hint.replace(GOES_ON, STARTS_OVER)
                tell(error, document)
                raise
            if recorder is not None:
                document["activations"] = {"file": str(save_activations), "tokens": recorder.tokens, "gram": gram}
            if check and link.is_first:
                _check_table(output, checks)
            failed = [item for item in checks if not item.ok]
            if failed:
                words = ("run", folder, *asked.words, "--backend", "reference")
                again = torchrun(world.size, *words) if world.size > 1 else command_line(*words)
                raise _check_failed(failed, len(checks), again).with_document(document)
        if world.rank == 0:
            output.result(document, essential=printer.essential)
            _report(output, result)
            if printer.is_reasoning and result.finish_reason == "length":
                output.note("the reply ends in its reasoning, before any response: give more --max-new-tokens")
            if recorder is not None:
                output.note(
                    f"{save_activations}: inputs of {plural(recorder.tokens, 'token')}, for k3tool quantize --activations"
                )
            if check:
                output.note(_check_note(checks))


def _read_prompt(folder: Path, asked: Prompt, stops: list[str], printer: Printer, output: Output) -> K3Config:
    """The prompt into the printer, with what takes the reply apart. Returns the configuration.

    Raises what is wrong with either, or with the files that say how a reply ends: before weights are read."""
    from k3tool.checkpoint.reader import Checkpoint
    from k3tool.checkpoint.source import LocalSource
    from k3tool.reply import Reply
    from k3tool.stopping import end_tokens

    checkpoint = Checkpoint(LocalSource(folder))  # never a repository: weights are read again and again
    tokenizer, printer.input_ids = asked.read(checkpoint.source, checkpoint.config, output.progress)
    end_tokens(checkpoint.source, checkpoint.config)
    if stops and tokenizer is None:
        raise UsageError(
            f"--stop compares text, and {folder} has no tokenizer",
            hint="leave it out, or put tiktoken.model and tokenizer_config.json there",
        )
    live = not output.json and not output.quiet
    printer.start(tokenizer, stops=stops, reply=Reply(thinking=asked.thinks) if asked.chat else None, live=live)
    return checkpoint.config


def _check_room(path: Path, prompt: int, new: int, vocab_size: int) -> None:
    """Raises CapacityError where the logits of the prompt do not fit on the disk of `path`; warns where those of all new
    tokens would not."""
    free = free_bytes(path.absolute().parent)
    sure, most = (4 * vocab_size * tokens for tokens in (prompt, prompt + max(0, new - 1)))
    if free is None or most <= free:
        return
    if sure > free:
        raise CapacityError(
            f"{path}: {format_bytes(sure)} of logits for {plural(prompt, 'token')} to write, {format_bytes(free)} free there",
            hint="name a file on another disk, give a shorter prompt, or leave out --logits-out",
        )
    aside(f"{path}: the logits take up to {format_bytes(most)}, and {format_bytes(free)} are free there")


def _warn_of_greedy(output: Output, temperature: float, given: Mapping[str, object]) -> None:
    names = [name for name, is_given in given.items() if is_given]
    if names and temperature == 0.0:
        has = "has" if len(names) == 1 else "have"
        output.progress.warn(f"{' and '.join(names)} {has} no effect without --temperature")


def _check_recording(path: Path | None, gram: bool, ranks: int) -> None:
    """Raises what cannot be recorded, before anything is read."""
    if path is None:
        if gram:
            raise UsageError("--gram goes with --save-activations", hint="add --save-activations FILE")
        return
    if ranks > 1:
        raise UnsupportedError(
            "activations are recorded by one process, which sees whole matrices",
            hint="run without torchrun on the whole checkpoint; with --memory SIZE its experts stream from disk",
        )
    _check_result_file(path)


def _check_result_file(path: Path) -> None:
    """Raises UsageError for what cannot be written, and for a file that no run wrote: a shard must not be lost so."""
    from k3tool.activations import SQUARES
    from k3tool.checkpoint.header import header_length, parse_header

    check_output_file(path)
    names: list[str] = []
    with suppress(K3Error, OSError), open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        header = parse_header(
            file.read(header_length(file.read(8), size, where=str(path))), file_size=size, where=str(path)
        )
        names = [spec.name for spec in header.tensors]
    is_result = "logits" in names or any(name.endswith(SQUARES) for name in names)
    if not is_result and path.exists() and path.stat().st_size:
        raise UsageError(f"{path} exists, and no run wrote it", hint="name another file: only results are replaced")


def _recorder(session: Session, path: Path | None, gram: bool) -> Recorder | None:
    if path is None:
        return None
    from k3tool.model.recording import Recorder

    return Recorder(session, path.absolute().parent if gram else None)


class _Voice:
    """How ranks that run together fail: rank 0 speaks, and the rank with a bug shows where it is."""

    def __init__(self, output: Output, printer: Printer) -> None:
        self._output = output
        self._printer = printer

    def failure(self, error: K3Error) -> None:
        self._output.close()
        self._printer.finish()
        if not error.document and (isinstance(error, Interrupted) or self._printer.input_ids):
            error.with_document(self._printer.so_far)
        print_failure("run", error, as_json=self._output.json)

    def settle(self) -> None:
        signals.finish()

    def trace(self, error: BaseException) -> None:
        self._output.close()
        traceback.print_exception(error)


def _report(output: Output, result: RunResult) -> None:
    """One line each on stderr: speed, memory, what ran."""
    output.note(f"prefill {_speed(result.prefill)}; decode {_speed(result.decode)}; finished by {_ending(result)}")
    memory = result.memory
    device = f", {format_bytes(memory.peak_device_bytes)} on the GPU" if memory.peak_device_bytes else ""
    output.note(
        f"memory at most {format_bytes(memory.peak_host_bytes)}{device}; KDA state {format_bytes(memory.kda_state_bytes)}, "
        f"MLA cache {format_bytes(memory.mla_cache_bytes)}"
    )
    if memory.resident_experts is not None:
        output.note(
            f"{plural(memory.resident_experts, 'expert')} of every layer resident; {format_bytes(memory.streamed_bytes)} read from "
            "disk for those that tokens visited"
        )
    output.note(
        f"{plural(result.layers, 'layer')} in {result.dtype} on {result.device}, {result.backend} kernels ({result.backend_reason})"
    )


def _check_table(output: Output, checks: list[KernelCheck]) -> None:
    """What `--check` found, a line for each kernel: the layers that it ran in, its worst errors, and their bounds there."""
    lines = [("kernel", "layers", "largest", "of", "RMS", "of", "")]
    for kernel in dict.fromkeys(item.kernel for item in checks):
        own = [item for item in checks if item.kernel == kernel]
        layers = [item.layer for item in own if item.layer is not None]
        failed = sum(not item.ok for item in own)
        worst = own[0].difference
        for item in own[1:]:
            worst = worst.worst(item.difference)
        numbers = (worst.max_error, worst.max_bound, worst.rms_error, worst.rms_bound)
        where = " and ".join(([_span(layers)] if layers else []) + ["outside"] * (len(layers) < len(own)))
        lines.append((kernel, where, *(f"{number:.1e}" if number else "0" for number in numbers),
                      f"failed in {failed}" if failed else "ok"))  # fmt: skip
    widths = [max(len(line[column]) for line in lines) for column in range(6)]
    for line in lines if checks else []:
        cells = [cell.ljust(width) if column < 2 else cell.rjust(width) for column, (cell, width) in enumerate(zip(line, widths, strict=False))]  # fmt: skip
        output.note("  ".join([*cells, line[6]]).rstrip())


def _span(layers: list[int]) -> str:
    """`0-7`, or `6 of 0-7` where some between them are missing."""
    first, last = min(layers), max(layers)
    span = str(first) if first == last else f"{first}-{last}"
    return span if len(layers) == last - first + 1 else f"{len(layers)} of {span}"


def _check_failed(failed: list[KernelCheck], count: int, again: str) -> CheckFailed:
    worst = max(failed, key=lambda item: item.difference.excess)
    where = "after the last layer" if worst.layer is None else f"in layer {worst.layer}"
    return CheckFailed(
        f"{len(failed)} of {plural(count, 'kernel check')} failed; worst is {worst.kernel} {where}: relative RMS error "
        f"{worst.rms_error:.2g} (bound {worst.rms_bound:.2g}), largest {worst.max_error:.2g} (bound {worst.max_bound:.2g})",
        hint=f"report the kernel with this machine's processor or GPU; plain torch computes without it: {again}",
    )


def _check_note(checks: list[KernelCheck]) -> str:
    if not checks:
        return "what runs here is the reference: nothing was compared"
    worst = max(checks, key=lambda item: item.difference.excess)
    return (
        f"{plural(len(checks), 'kernel check')} passed; nearest to its bound is {worst.kernel}: relative RMS error "
        f"{worst.rms_error:.2g} of {worst.rms_bound:.2g}, largest {worst.max_error:.2g} of {worst.max_bound:.2g}"
    )


def _ending(result: RunResult) -> str:
    if result.stop_reason is None:
        return result.finish_reason
    is_text = isinstance(result.stop_reason, str)
    return f"stop text {result.stop_reason!r}" if is_text else f"end token {result.stop_reason}"


def _speed(timing: Timing) -> str:
    return f"{plural(timing.tokens, 'token')} in {timing.seconds:.2f} s ({timing.tokens_per_second:,.1f} tokens/s)"
