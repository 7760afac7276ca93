"""`k3tool run`: a prompt in, tokens out."""

from __future__ import annotations

import os
import re
import sys
import traceback
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from k3tool.cli.options import IsPath, JsonOption, QuietOption, check_output_file
from k3tool.cli.output import Output, print_failure
from k3tool.commands import command as command_line
from k3tool.commands import torchrun
from k3tool.disk import STARTS_OVER
from k3tool.errors import CheckFailed, Interrupted, K3Error, UnsupportedError, UsageError
from k3tool.units import format_bytes, parse_size

if TYPE_CHECKING:
    from k3tool.config import K3Config
    from k3tool.generate import RunResult, Session, Timing
    from k3tool.model.check import KernelCheck
    from k3tool.model.recording import Recorder
    from k3tool.tokenizer import StreamDecoder, Tokenizer


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
        bool, typer.Option("--chat", help="A user message in K3's format; a .json prompt file holds the messages.")
    ] = False,
    thinking: Annotated[
        bool, typer.Option("--thinking/--no-thinking", help="With --chat: reply with a think channel first.")
    ] = True,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", metavar="N", min=0)] = 64,
    temperature: Annotated[
        float, typer.Option("--temperature", metavar="T", min=0.0, help="Sample; without it, greedy.")
    ] = 0.0,
    top_p: Annotated[float, typer.Option("--top-p", metavar="P", help="Sample from the likeliest tokens only.")] = 1.0,
    seed: Annotated[int | None, typer.Option("--seed", metavar="N", min=0, max=2**63 - 1)] = None,
    backend: Annotated[str, typer.Option("--backend", metavar="auto|triton|cpu|reference", help="triton: a GPU. cpu: compiled for this processor. reference: plain torch, slow.")] = "auto",
    device: Annotated[str, typer.Option("--device", metavar="auto|cpu|cuda")] = "auto",
    dtype: Annotated[str, typer.Option("--dtype", metavar="bfloat16|float32", help="Of activations.")] = "bfloat16",
    layers: Annotated[int | None, typer.Option("--layers", metavar="N", help="Run the first N layers only.")] = None,
    memory: Annotated[
        str | None,
        typer.Option("--memory", metavar="SIZE", help="Keep this much in memory; other experts stream from disk."),
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
        bool, typer.Option("--gram", help="And Gram matrices of the latent projections' inputs, for quantize --calibrated (24 GB for the release).")
    ] = False,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:  # fmt: skip
    """Generate from a prompt. Text streams to stdout as it appears; timing and memory follow on stderr.

    A folder of ranks runs under torchrun, one process for each: `torchrun --nproc-per-node N -m k3tool run RANKS_DIR ...`.
    Rank 0 reads the prompt, writes the logits, and speaks for all.
    """
    from k3tool.parallel.link import joined
    from k3tool.parallel.world import rank_folder_of, world_of

    given = [name for name, value in (("--prompt", prompt), ("--prompt-file", prompt_file), ("--input-ids", input_ids)) if value is not None]  # fmt: skip
    if len(given) != 1:
        raise UsageError(
            f"{' and '.join(given)} contradict each other" if given else "there is no prompt",
            hint="give one of --prompt, --prompt-file and --input-ids",
        )
    if input_ids is not None and chat:
        raise UsageError("--chat renders text, and --input-ids gives ids", hint="leave out one of them")
    budget = parse_size(memory) if memory is not None else None
    world = world_of(os.environ)
    _check_recording(save_activations, gram, world.size)
    printer = Printer()
    with Output("run", json=json, quiet=quiet or world.rank > 0) as output:
        rank_folder_of(folder, world)  # a wrong number of processes is known before anything slow is imported
        with joined(world, voice=_Voice(output, printer)) as link:
            if link.is_first:
                if logits_out is not None:
                    _check_result_file(logits_out)
                config, tokenizer, ids = _prompt(folder, prompt, prompt_file, input_ids, chat, thinking)
                printer.start(ids, tokenizer, config.eos_token_ids, live=not json and not quiet)
            ids = link.from_first(lambda: printer.input_ids)
            from k3tool.generate import Session, run_session, write_logits
            from k3tool.sampling import check_sampling

            check_sampling(max_new_tokens, temperature, top_p)
            if top_p != 1.0 and temperature == 0.0 and link.is_first:
                output.progress.warn("--top-p has no effect without --temperature")
            session = Session.open(
                folder, device=device, dtype=dtype, layers=layers, backend=backend, memory_bytes=budget,
                progress=output.progress, link=link,
            )  # fmt: skip
            output.close()
            checks = session.check(ids) if check else []
            recorder = _recorder(session, save_activations, gram)
            try:
                with recorder.watching() if recorder else nullcontext():
                    result = run_session(
                        session, ids, max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, seed=seed,
                        keep_logits=logits_out is not None, on_token=printer.token,
                    )  # fmt: skip
            except KeyboardInterrupt as error:
                printer.finish()
                raise Interrupted.of(error, STARTS_OVER).with_document(printer.so_far) from None
            printer.finish()
            if logits_out is not None and link.is_first:
                write_logits(logits_out, result)
            if recorder is not None and save_activations is not None:
                recorder.write(save_activations)
            document = {**result.as_json(), "text": printer.text, "checks": [item.as_json() for item in checks]}
            if recorder is not None:
                document["activations"] = {"file": str(save_activations), "tokens": recorder.tokens, "gram": gram}
            if check and link.is_first:
                _check_table(output, checks)
            failed = [item for item in checks if not item.ok]
            if failed:
                words = ("run", folder, *_prompt_words(prompt, prompt_file, input_ids, chat), "--backend", "reference")
                again = torchrun(world.size, *words) if world.size > 1 else command_line(*words)
                raise _check_failed(failed, len(checks), again).with_document(document)
        if world.rank == 0:
            output.result(document, essential=printer.shown)
            _report(output, result)
            if recorder is not None:
                output.note(
                    f"{save_activations}: inputs of {recorder.tokens} tokens, for k3tool quantize --activations"
                )
            if check:
                output.note(_check_note(checks))


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


def parse_ids(text: str) -> list[int]:
    """Token ids separated by commas or white space. Raises UsageError."""
    words = [word for word in re.split(r"[,\s]+", text.strip()) if word]
    for word in words:
        if not re.fullmatch(r"[+-]?\d{1,18}", word, re.ASCII):
            raise UsageError(f"not a token id: {word!r}", hint='write --input-ids "1,2,3"')
    return [int(word) for word in words]


class Printer:
    """Shows tokens as they come: as text where there is a tokenizer, else as ids. The end token is not shown.

    Before `start`, and on every rank but the first, it shows nothing."""

    def __init__(self) -> None:
        self.input_ids: list[int] = []
        self.ids: list[int] = []
        self.shown = ""
        self._stream: StreamDecoder | None = None
        self._end_ids: tuple[int, ...] = ()
        self._live = False

    def start(self, ids: list[int], tokenizer: Tokenizer | None, end_ids: tuple[int, ...], *, live: bool) -> None:
        self.input_ids = ids
        self._stream = tokenizer.stream() if tokenizer else None
        self._end_ids = end_ids
        self._live = live

    @property
    def text(self) -> str | None:
        return self.shown if self._stream else None

    @property
    def so_far(self) -> dict[str, object]:
        """What an interrupted run tells of itself."""
        return {"input_ids": self.input_ids, "token_ids": self.ids, "text": self.text}

    def token(self, token: int) -> None:
        self.ids.append(token)
        if self._stream is None:
            self._show(f" {token}" if self.shown else str(token))
        elif token not in self._end_ids:
            self._show(self._stream.feed(token))

    def finish(self) -> None:
        if self._stream is not None:
            self._show(self._stream.finish())
        if self._live:
            sys.stdout.write("\n")
            sys.stdout.flush()
        self._live = False

    def _show(self, text: str) -> None:
        self.shown += text
        if self._live and text:
            sys.stdout.write(visible(text) if sys.stdout.isatty() else text)
            sys.stdout.flush()


class _Voice:
    """How ranks that run together fail: rank 0 speaks, and the rank with a bug shows where it is."""

    def __init__(self, output: Output, printer: Printer) -> None:
        self._output = output
        self._printer = printer

    def failure(self, error: K3Error) -> None:
        self._output.close()
        self._printer.finish()
        if isinstance(error, Interrupted) and not error.document:
            error.with_document(self._printer.so_far)
        print_failure("run", error, as_json=self._output.json)

    def trace(self, error: BaseException) -> None:
        self._output.close()
        traceback.print_exception(error)


def visible(text: str) -> str:
    """Generated text for a terminal: control characters cannot move its cursor, everything else stays."""
    return "".join(f"\\x{ord(c):02x}" if (c < " " and c not in "\n\t") or "\x7f" <= c <= "\x9f" else c for c in text)


def _read(name: str) -> tuple[str, str]:
    """Text of a prompt file and what to call it. Raises UsageError."""
    try:
        data = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
        return data.decode("utf-8"), name
    except OSError as error:
        raise UsageError(f"cannot read {name}: {error.strerror}", hint="name a text file") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{name} is not UTF-8 text (byte {error.start})", hint="convert it to UTF-8") from None


def _prompt(
    folder: Path, prompt: str | None, prompt_file: str | None, input_ids: str | None, chat: bool, thinking: bool
) -> tuple[K3Config, Tokenizer | None, list[int]]:
    """Configuration, tokenizer where there is one, and the token ids of the prompt. Raises UsageError."""
    from k3tool.checkpoint.reader import Checkpoint
    from k3tool.checkpoint.source import LocalSource
    from k3tool.tokenizer import find_tokenizer

    checkpoint = Checkpoint(LocalSource(folder))  # never a repository: weights are read again and again
    config = checkpoint.config
    tokenizer: Tokenizer | None
    if input_ids is not None:
        ids = parse_ids(input_ids)
        tokenizer = find_tokenizer(checkpoint.source, config.vocab_size)
    else:
        text, name = (prompt, "--prompt") if prompt is not None else _read(str(prompt_file))
        tokenizer, ids = _encode(checkpoint.source, config.vocab_size, str(text), name, chat, thinking)
    from k3tool.sampling import check_ids

    check_ids(config, ids)
    return config, tokenizer, ids


def _encode(
    source: Any, vocab_size: int, text: str, name: str, chat: bool, thinking: bool
) -> tuple[Tokenizer, list[int]]:
    from k3tool.chat import parse_messages, render, render_prompt
    from k3tool.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(source, vocab_size)
    if not text:
        raise UsageError("the prompt is empty", hint="give some text")
    if not chat:
        return tokenizer, tokenizer.encode(text)
    if name.endswith(".json"):
        return tokenizer, tokenizer.encode_segments(render(parse_messages(text, where=name), thinking=thinking))
    return tokenizer, tokenizer.encode_segments(render_prompt(text, thinking=thinking))


def _report(output: Output, result: RunResult) -> None:
    """One line each on stderr: speed, memory, what ran."""
    output.note(f"prefill {_speed(result.prefill)}; decode {_speed(result.decode)}; finished by {result.finish_reason}")
    memory = result.memory
    device = f", {format_bytes(memory.peak_device_bytes)} on the GPU" if memory.peak_device_bytes else ""
    output.note(
        f"memory at most {format_bytes(memory.peak_host_bytes)}{device}; KDA state {format_bytes(memory.kda_state_bytes)}, "
        f"MLA cache {format_bytes(memory.mla_cache_bytes)}"
    )
    if memory.resident_experts is not None:
        output.note(
            f"{memory.resident_experts} experts of every layer resident; {format_bytes(memory.streamed_bytes)} read from "
            "disk for those that tokens visited"
        )
    output.note(
        f"{result.layers} layers in {result.dtype} on {result.device}, {result.backend} kernels ({result.backend_reason})"
    )


def _prompt_words(prompt: str | None, prompt_file: str | None, input_ids: str | None, chat: bool) -> list[object]:
    """The prompt as options of a command that runs it again."""
    named = (("--prompt", prompt), ("--prompt-file", prompt_file), ("--input-ids", input_ids))
    return [word for name, value in named if value is not None for word in (name, value)] + ["--chat"] * chat


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
        f"{len(failed)} of {count} kernel checks failed; worst is {worst.kernel} {where}: relative RMS error "
        f"{worst.rms_error:.2g} (bound {worst.rms_bound:.2g}), largest {worst.max_error:.2g} (bound {worst.max_bound:.2g})",
        hint=f"report the kernel with this machine's processor or GPU; plain torch computes without it: {again}",
    )


def _check_note(checks: list[KernelCheck]) -> str:
    if not checks:
        return "what runs here is the reference: nothing was compared"
    worst = max(checks, key=lambda item: item.difference.excess)
    return (
        f"{len(checks)} kernel checks passed; nearest to its bound is {worst.kernel}: relative RMS error "
        f"{worst.rms_error:.2g} of {worst.rms_bound:.2g}, largest {worst.max_error:.2g} of {worst.max_bound:.2g}"
    )


def _speed(timing: Timing) -> str:
    return f"{timing.tokens} tokens in {timing.seconds:.2f} s ({timing.tokens_per_second:,.1f} tokens/s)"
