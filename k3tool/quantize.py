"""Quantize a checkpoint, and reshard it in the same pass: plan, carry out, measure, and describe what is stored.

`prepare` makes the plan and writes nothing; `quantize` carries it out. Exactness and errors are known before the
index and the configuration are written, so that a broken bound leaves no checkpoint behind.
"""

from __future__ import annotations

import json
import os
import shlex
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from k3tool.activations import Activations
from k3tool.checkpoint.origin import names_of
from k3tool.checkpoint.reader import CONFIG_NAME
from k3tool.checkpoint.source import Source, open_source, opened_source
from k3tool.checkpoint.writer import write_atomic
from k3tool.config import K3Config
from k3tool.disk import make_folder
from k3tool.errors import CheckFailed, UsageError
from k3tool.events import SILENT, Progress
from k3tool.execute import Options, Report, SmallFile, execute, source_name
from k3tool.layout import Layout
from k3tool.names import component_of, parse_name
from k3tool.readback import Readback, check_digests
from k3tool.reshard import DEFAULT_SHARD_BYTES, Prepared, Request, closing_files
from k3tool.reshard import prepare as prepare_reshard
from k3tool.transform import quantize_config, quantize_report
from k3tool.transform.forms import Opened
from k3tool.transform.quantize import QuantizedForm, QuantizingResharder, is_compensated
from k3tool.transform.quantize_card import CARD_NAME, SOURCE_CARD_NAME, model_card, source_card_of
from k3tool.transform.quantize_config import Section
from k3tool.transform.quantize_html import html_page, name_inside
from k3tool.transform.quantize_policy import Policy, make_policy
from k3tool.transform.quantize_report import REPORT_NAME, Row
from k3tool.transform.quantize_step import Converting
from k3tool.transform.quantize_warnings import crossing, few_tokens, harmful, idle
from k3tool.transform.reshard import Form, Resharder
from k3tool.transform.split import Splitter
from k3tool.units import format_bytes, plural

SCALES = ("search", "plain")


@dataclass
class Change:
    """A policy as what `k3tool.reshard.prepare` lets ride along."""

    policy: Policy
    search: bool = True
    exact: bool = False
    activations: Activations | None = None
    calibrated: bool = False
    device: str | None = None
    section: Section | None = None
    quantized: QuantizedForm | None = None
    command: str = "quantize"

    @property
    def options(self) -> str:
        said = list(self.policy.options)
        if not self.search:
            said += ["--scales", "plain"]
        if self.activations is not None:
            said += ["--activations", os.path.abspath(self.activations.path)]
        if self.calibrated:
            said.append("--calibrated")
        return shlex.join(said)

    @property
    def bytes_in(self) -> int:
        assert self.quantized is not None
        return self.quantized.bytes_in

    @property
    def untouched(self) -> dict[str, int]:
        assert self.quantized is not None
        return self.quantized.untouched

    @property
    def description(self) -> Mapping[str, Any]:
        described: dict[str, Any] = {
            "quantize": self.policy.as_json(),
            "scales": "search" if self.search else "plain",
        }
        if self.activations is not None:
            described["activations"] = self.activations.sha256
        if self.calibrated:
            described["calibrated"] = True
        return described

    def form(self, opened: Opened) -> Form:
        quantized = QuantizedForm(opened.form, opened.splitter, self.policy)
        self._check_rules(quantized, opened.source.label)
        if self.activations is not None:
            quantized.check_activations(self.activations, calibrated=self.calibrated)
        self.section = quantize_config.section(quantize_config.summarize(quantized.items(), quantized.matrix_shape))
        document = quantize_config.rewrite(opened.form.config.raw, self.section)
        quantized.config = K3Config.from_dict(document, where="the new config.json")
        self.quantized = quantized
        return quantized

    def _check_rules(self, quantized: QuantizedForm, label: str) -> None:
        for rule in self.policy.rules:
            names = (parse_name(text) for text, _ in quantized.inner.items())
            if not any(name is not None and rule.covers(name.module_path, name) for name in names):
                raise UsageError(
                    f"rule {rule.match!r} of the recipe covers no module",
                    hint=f"patterns after re: match from the start; {names_of(label, '*')}",
                )

    def resharder(self, form: Form, splitter: Splitter, target: Layout) -> Resharder:
        assert isinstance(form, QuantizedForm)
        return QuantizingResharder(
            form, splitter, target, search=self.search, exact=self.exact, activations=self.activations,
            calibrated=self.calibrated, device=self.device,
        )  # fmt: skip


@dataclass(frozen=True)
class PreparedQuantization:
    """A job ready to run: the resharding with the change that rides along."""

    prepared: Prepared
    change: Change

    @property
    def changing(self) -> dict[str, Converting]:
        """Module path to what it becomes."""
        return self.change.quantized.changing if self.change.quantized is not None else {}

    @property
    def readers(self) -> str:
        """One line: what can read the result."""
        assert self.change.section is not None
        return self.change.section.readers

    @property
    def bytes_out(self) -> int:
        return self.prepared.record.total_size

    @property
    def warnings(self) -> list[str]:
        """What the user should know before: schemes that others found harmful, a result that no engine reads."""
        changing = self.changing
        said = [*idle(self.change.policy, changing, self.bytes_out), *harmful(changing), *crossing(changing)]
        if self.change.calibrated and self.change.activations is not None:
            widths = (made.shape[1] for path, made in changing.items() if is_compensated(path, made))
            said += few_tokens(widths, self.change.activations)
        assert self.change.section is not None
        if changing and self.bytes_out > self.change.bytes_in:
            said.append(
                f"the result is larger than the source: {format_bytes(self.change.bytes_in)} become "
                f"{format_bytes(self.bytes_out)}"
            )
        said += self.change.section.warnings
        return said + ([f"readable by {self.readers}"] if self.change.section.others else [])

    def as_json(self) -> dict[str, Any]:
        """What `--dry-run` shows."""
        planned: dict[str, dict[str, Any]] = {}
        for path, converting in self.changing.items():
            component = component_of(parse_name(path + ".weight"))
            entry = planned.setdefault(component, {"from": converting.scheme, "scheme": "", "tensors": 0})
            scheme = converting.choice.scheme
            entry["scheme"] = scheme if entry["scheme"] in ("", scheme) else "mixed"
            entry["tensors"] += 1
        return {
            **self.prepared.as_json(),
            "bytes_in": self.change.bytes_in,
            "bytes_out": self.bytes_out,
            "components": planned,
            "readers": self.readers,
            "warnings": self.warnings,
            "step_memory_bytes": self.prepared.plan.step_bytes,
        }


@dataclass
class QuantizeResult:
    """The outcome. rows: one per module that was converted. readback: what reading it back found, None: not asked for."""

    job: PreparedQuantization
    report: Report
    rows: list[Row]
    readback: Readback | None = None

    @property
    def components(self) -> dict[str, dict[str, Any]]:
        return quantize_report.by_component(self.rows, self.job.change.untouched)

    def html(self) -> bytes:
        """The report as one page without references to anything outside it."""
        page = html_page(self.job.prepared.opened.source.label, self.as_json(), self.rows)
        return page.encode(errors="backslashreplace")

    def write_html(self, path: str | Path) -> None:
        """`html` as a file, in a folder that is made where there is none."""
        make_folder(Path(path).parent)
        write_atomic(Path(path), self.html())

    def as_json(self) -> dict[str, Any]:
        prepared = self.job.prepared
        return {
            "bytes_in": self.job.change.bytes_in,
            "bytes_out": self.job.bytes_out,
            "components": self.components,
            "readers": self.job.readers,
            "warnings": self.job.warnings,
            "layout": prepared.layout.as_json(),
            "form": prepared.request.form,
            "ranks": prepared.ranks_json(self.report.files),
            "complete": self.report.complete,
            "files_kept": len(self.report.kept),
            "bytes_read": self.report.bytes_read,
            "bytes_written": self.report.bytes_written,
            "seconds": round(self.report.seconds, 3),
            "workers": self.report.workers,
            "peak_memory_bytes": self.report.peak_memory_bytes,
            **({} if self.readback is None else {"verified": self.readback.as_json()}),
        }


def prepare(
    source: str | Path | Source,
    policy: Policy,
    *,
    request: Request | None = None,
    scales: str = "search",
    exact: bool = False,
    activations: str | Path | None = None,
    calibrated: bool = False,
    device: str | None = None,
) -> PreparedQuantization:
    """Plan from names, shapes and dtypes. Writes nothing. activations: a file that `k3tool run --save-activations` wrote.
    calibrated: compensate the errors of the latent projections, which needs Gram matrices in that file.
    device: of torch, where the arithmetic runs (None: compiled kernels on the CPU); the result is the same to the byte.

    Raises what `k3tool.reshard.prepare` raises, UnsupportedError (14) for a scheme that a tensor cannot have or that
    would quantize it twice, UsageError (2) for a rule that covers nothing or experts that would differ in a layer,
    and what `k3tool.activations.Activations` raises for a file that is damaged or of another model.
    """
    if scales not in SCALES:
        raise UsageError(f"unknown way to choose scales {scales!r}", hint=f"write {' or '.join(SCALES)}")
    if calibrated and activations is None:
        raise UsageError(
            "--calibrated needs to know what the latent projections are multiplied with",
            hint="record that by run with --save-activations FILE --gram, then add --activations FILE",
        )
    if calibrated and scales == "plain":
        raise UsageError("--calibrated starts from searched scales", hint="leave --scales plain out")
    if device is not None:
        from k3tool.formats.device import check_device

        check_device(device)
    recorded = None if activations is None else Activations.open(activations)
    change = Change(
        policy, search=scales == "search", exact=exact, activations=recorded, calibrated=calibrated, device=device
    )
    opened = open_source(source) if isinstance(source, (str, Path)) else source
    request = request or Request(gpus=1, form="hf", max_shard_bytes=default_shard_bytes(opened))
    return PreparedQuantization(prepare_reshard(opened, request, change), change)


def default_shard_bytes(source: Source) -> int:
    """5 GB, and less for small sources: an eighth, so that several files can be worked on at once; at least 64 MB."""
    total = sum(size for name, size in source.files().items() if name.endswith(".safetensors"))
    return min(DEFAULT_SHARD_BYTES, max(total // 8, 64_000_000))


def quantize(
    source: str | Path | Source,
    dest: str | Path,
    *,
    experts: str | None = None,
    latent: str | None = None,
    shared: str | None = None,
    attention: str | None = None,
    recipe: str | Path | None = None,
    scales: str = "search",
    exact: bool = False,
    activations: str | Path | None = None,
    calibrated: bool = False,
    device: str | None = None,
    max_rel_error: float | None = None,
    request: Request | None = None,
    options: Options | None = None,
    progress: Progress = SILENT,
) -> QuantizeResult:
    """Write `source` into `dest` with the components named in other schemes (None: what the recipe says, else kept).

    activations: second moments of inputs, by which errors are weighted when scales are searched, and reported.
    calibrated: compensate the errors of the latent projections as well. device: see `prepare`.
    request: layout and shard sizes; by default one Hugging Face checkpoint. options: workers, memory, overwriting.
    Raises what `prepare` and `k3tool.execute.execute` raise, and CheckFailed (1) where `exact` would change a value
    or a component's relative error is beyond `max_rel_error`: then neither index nor configuration is written.
    """
    wanted = {"experts": experts, "latent": latent, "shared": shared, "attention": attention}
    with opened_source(source) as opened:
        policy = make_policy(wanted, recipe)
        job = prepare(
            opened, policy, request=request, scales=scales, exact=exact, activations=activations,
            calibrated=calibrated, device=device,
        )  # fmt: skip
        return carry_out(job, dest, max_rel_error=max_rel_error, options=options or Options(progress=progress))


def carry_out(
    job: PreparedQuantization,
    dest: str | Path,
    *,
    max_rel_error: float | None = None,
    verify: bool = False,
    page: Path | None = None,
    options: Options,
) -> QuantizeResult:
    """The second half of `quantize`, for those who looked at the plan first. verify: read every file back.

    page: where the report is written as HTML, also where an error is beyond `max_rel_error`. In `dest` it is one of the
    result's files, and its name must end with .html (UsageError)."""
    prepared = job.prepared
    inside = name_inside(page, Path(dest))
    began = time.monotonic()

    def closing(report: Report) -> Iterator[SmallFile]:
        report.seconds = time.monotonic() - began
        result = QuantizeResult(job, report, _rows(report, earlier))
        try:
            _check(result.components, max_rel_error, job.change.exact)
        except CheckFailed:
            if page is not None:
                result.write_html(page)
                options.progress.item(f"{page} shows the errors")
            raise
        for small in _closing(result):
            if small.path != inside:
                yield small
            if small.path == REPORT_NAME and inside:
                yield SmallFile(inside, result.html())

    wanted = {item.path for item in prepared.wanted}
    earlier = quantize_report.earlier_rows(Path(dest), prepared.plan.id)
    report = execute(
        prepared.plan,
        prepared.opened.form.tensors,
        Path(dest),
        closing=closing,
        options=replace(options, summarize=list, load=prepared.resharder.load),
        only=None if prepared.request.ranks is None else lambda item: item.path in wanted,
        manifest={"quantization": job.change.policy.as_json()},
        revision=getattr(prepared.opened.source, "commit", None),
    )
    if report.complete and not report.is_closed:  # another process wrote the report of all
        earlier = quantize_report.earlier_rows(Path(dest), prepared.plan.id)
    result = QuantizeResult(job, report, _rows(report, earlier))
    if verify:
        result.readback = check_digests(Path(dest), report, options)
    if page is not None and not (inside and report.complete):
        result.write_html(page)
    return result


def _rows(report: Report, earlier: list[Row]) -> list[Row]:
    """What this run measured, and what an earlier one did for files that were kept."""
    rows = quantize_report.rows_of(quantize_report.compact_rows(report.notes))
    known = {row.path for row in rows}
    return sorted(rows + [row for row in earlier if row.path not in known], key=lambda row: row.path)


def _closing(result: QuantizeResult) -> Iterator[SmallFile]:
    """The report, further files of the section, what resharding closes with, the configuration last."""
    job, rows, components = result.job, result.rows, result.components
    assert job.change.section is not None
    head = {
        "plan": job.prepared.plan.id,
        "source": job.prepared.opened.source.label,
        "policy": job.change.policy.as_json(),
        "scales": "search" if job.change.search else "plain",
        **_activations(job.change),
        "readers": job.readers,
        "bytes_in": job.change.bytes_in,
        "bytes_out": job.bytes_out,
        "components": components,
        "layers": quantize_report.by_layer(rows),
    }
    yield SmallFile(REPORT_NAME, lambda: quantize_report.report_chunks(head, rows))
    for name, document in job.change.section.files.items():
        yield SmallFile(name, _json(document))
    source_card = source_card_of(job.prepared.opened.source)
    revision = getattr(job.prepared.opened.source, "commit", None)
    card = model_card(head, revision=revision, command=_shown(job), source_card=source_card)
    for small in closing_files(job.prepared, result.report):
        if PurePosixPath(small.path).name in quantize_config.OTHER_PLACES:  # what the source said of itself
            document = job.change.section.files.get(PurePosixPath(small.path).name)
            if document is None:
                continue
            small = replace(small, data=_json(document))
        if small.path == CARD_NAME:
            small = replace(small, path=SOURCE_CARD_NAME)
        if small.path == CONFIG_NAME:
            yield SmallFile(CARD_NAME, card.encode(errors="backslashreplace"))
            small = SmallFile(CONFIG_NAME, _json(job.prepared.opened.form.config.raw))
        yield small


def _activations(change: Change) -> dict[str, Any]:
    recorded = change.activations
    if recorded is None:
        return {}
    return {"activations": {"file": recorded.path.name, "sha256": recorded.sha256, "tokens": recorded.tokens}}


def _shown(job: PreparedQuantization) -> str:
    """The command for readers of the model card: files by their names alone, whatever folders are called here."""
    source, line = job.prepared.opened.source, job.prepared.plan.command
    words = shlex.split(job.change.options)
    shown = shlex.join(os.path.basename(word) if os.path.isabs(word) else word for word in words)
    return f"k3tool {line.replace(source_name(source), source.label).replace(job.change.options, shown)}"


def _check(components: Mapping[str, Mapping[str, Any]], max_rel_error: float | None, exact: bool) -> None:
    """Raises CheckFailed. Steps see to `exact` themselves; files that an earlier run wrote without it do not."""
    for name, entry in components.items():
        changed = entry["tensors"] - entry["exact_tensors"]
        if exact and changed:
            raise CheckFailed(
                f"{name} as {entry['scheme']}: an earlier run without --exact changed values of "
                f"{plural(changed, 'tensor')}, worst {entry['worst'][0]}",
                hint="choose a scheme that holds them and start over with --overwrite, or leave --exact out",
                component=name,
            ).with_document({"components": dict(components)})
        if max_rel_error is not None and entry["relative_error"] > max_rel_error:
            worst = f", worst {entry['worst'][0]}" if entry["worst"] else ""
            raise CheckFailed(
                f"{name} as {entry['scheme']}: relative error {entry['relative_error']:.4g} is beyond "
                f"--max-rel-error {max_rel_error:g}{worst}",
                hint="choose another scheme with --overwrite, or run again with a wider bound: nothing is computed twice",
                component=name,
                expected=max_rel_error,
                found=entry["relative_error"],
            ).with_document({"components": dict(components)})


def _json(document: Any) -> bytes:
    return json.dumps(document, indent=2, ensure_ascii=False).encode() + b"\n"
