"""Quantizing with recorded activations: errors are weighted as the file says, and the weighted search never loses."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from k3tool.activations import entry_of
from k3tool.errors import CheckpointCorrupt, UnsupportedError, UsageError
from k3tool.generate import Session, run_session
from k3tool.model.recording import Recorder
from k3tool.quantize import QuantizeResult, quantize
from k3tool.synthetic import tiny_config, write_checkpoint
from tests.helpers import k3tool
from tests.transform.test_quantize import read_values

IDS = [int(n) for n in np.random.default_rng(3).integers(0, 700, 300)]
SCHEMES = ("int4", "int8", "nvfp4", "nvfp4-modelopt", "mxfp4", "fp8-channel", "fp8-block")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Widths that every scheme can hold."""
    folder = tmp_path_factory.mktemp("source") / "made"
    config = tiny_config(
        num_layers=3, hidden_size=256, kda_heads=4, mla_heads=4, v_head_dim=32, intermediate_size=128, num_experts=4,
        moe_intermediate_size=128, latent_size=128, vision=False,
    )  # fmt: skip
    write_checkpoint(folder, config, seed=7)
    return folder


@pytest.fixture(scope="module")
def activations(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recorded") / "activations.safetensors"
    session = Session.open(source, device="cpu", dtype="float32")
    recorder = Recorder(session, path.parent)
    with recorder.watching():
        run_session(session, IDS, max_new_tokens=2, stop_at_end=False)
    recorder.write(path)
    return path


def weighted_squares(source: Path, made: Path, squares: dict[str, np.ndarray], module: str) -> tuple[float, float]:
    """Of the source and of the difference, in float64 on decoded values."""
    before, after = (read_values(folder, module).astype(np.float64) for folder in (source, made))
    weight = squares[entry_of(module) + ".input_mean_square"].astype(np.float64)
    return float((before**2 * weight).sum()), float(((before - after) ** 2 * weight).sum())


def rows(result: QuantizeResult) -> Iterator[tuple[str, Any]]:
    return ((row.path, row.weighted) for row in result.rows)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_weighted_search_never_loses_and_what_it_says_is_true(
    source: Path, activations: Path, tmp_path: Path, scheme: str
) -> None:
    squares = load_file(activations)
    quantize(source, tmp_path / "unweighted", latent=scheme, shared=scheme)
    plain = quantize(source, tmp_path / "plain", latent=scheme, shared=scheme, scales="plain", activations=activations)
    made = quantize(source, tmp_path / "made", latent=scheme, shared=scheme, activations=activations)
    of_plain = dict(rows(plain))
    totals = np.zeros(3)
    for module, weighted in rows(made):
        energy, error = weighted_squares(source, tmp_path / "made", squares, module)
        assert weighted.source == pytest.approx(energy, rel=1e-9) and weighted.error == pytest.approx(error, rel=1e-9)
        unweighted = weighted_squares(source, tmp_path / "unweighted", squares, module)[1]
        # The search compares errors formed in float32 steps; beyond their rounding nothing is ever worse.
        assert weighted.error <= of_plain[module].error * (1 + 1e-6)
        assert weighted.error <= unweighted * (1 + 1e-6)
        totals += of_plain[module].error, unweighted, weighted.error
    assert totals[2] < totals[0] and totals[2] < totals[1]
    held = [weighted for _, weighted in rows(made)]
    shares = [made.components[name]["weighted_error"] for name in ("latent", "shared_experts")]
    whole = (sum(w.error for w in held) / sum(w.source for w in held)) ** 0.5
    assert min(shares) <= whole <= max(shares)


def test_experts_that_stay_exact_are_weighed_too(source: Path, activations: Path, tmp_path: Path) -> None:
    made = quantize(source, tmp_path / "exact", experts="nvfp4", activations=activations)
    assert made.components["routed_experts"]["exact_tensors"] == 24
    assert made.components["routed_experts"]["weighted_error"] == 0.0
    lossy = quantize(source, tmp_path / "lossy", experts="nf4", activations=activations)
    squares = load_file(activations)
    sums = np.sum([weighted_squares_of_expert(source, tmp_path / "lossy", squares, m) for m, _ in rows(lossy)], axis=0)
    assert lossy.components["routed_experts"]["weighted_error"] == pytest.approx((sums[1] / sums[0]) ** 0.5, rel=1e-9)


def weighted_squares_of_expert(source: Path, made: Path, squares: dict[str, np.ndarray], module: str) -> np.ndarray:
    before, after = read_values(source, module), read_values(made, module, (128, 128))
    weight = squares[entry_of(module) + ".input_mean_square"].astype(np.float64)
    wide = before.astype(np.float64)
    return np.array([(wide**2 * weight).sum(), ((wide - after) ** 2 * weight).sum()])


def test_the_report_has_both_errors_and_a_second_run_knows_them(
    source: Path, activations: Path, tmp_path: Path
) -> None:
    first = quantize(source, tmp_path / "q", latent="int4", attention="fp8-channel", activations=activations)
    document = json.loads((tmp_path / "q" / "k3tool-quantization.json").read_bytes())
    assert document["activations"]["tokens"] == len(IDS) + 1 and document["activations"]["file"] == activations.name
    assert document["columns"][-1] == "weighted" and all(len(row) == 9 for row in document["tensors"])
    assert {"weighted_error", "relative_error"} <= document["layers"][0].keys()
    again = quantize(source, tmp_path / "q", latent="int4", attention="fp8-channel", activations=activations)
    assert again.report.bytes_read == 0 and again.components == first.components
    assert dict(rows(again)) == dict(rows(first))
    first.write_html(tmp_path / "report.html")
    assert "weighted error" in (tmp_path / "report.html").read_text()
    card = (tmp_path / "q" / "README.md").read_text()
    assert f"--activations {activations.name}" in card


def test_other_activations_are_another_job(source: Path, activations: Path, tmp_path: Path) -> None:
    quantize(source, tmp_path / "q", latent="int4", activations=activations)
    with pytest.raises(UsageError, match="already holds something else"):
        quantize(source, tmp_path / "q", latent="int4")
    other = edited(activations, tmp_path, lambda tensors: next(iter(tensors.values())).__imul__(np.float32(0.5)))
    with pytest.raises(UsageError, match="already holds something else"):
        quantize(source, tmp_path / "q", latent="int4", activations=other)


def edited(activations: Path, folder: Path, change: Any, **said: str) -> Path:
    from safetensors import safe_open

    with safe_open(activations, "np") as file:
        metadata = {**file.metadata(), **said}
    tensors = load_file(activations)
    change(tensors)
    save_file(tensors, folder / "edited.safetensors", metadata)
    return folder / "edited.safetensors"


DOWN = "language_model.model.layers.2.block_sparse_moe.routed_expert_down_proj.input_mean_square"


@pytest.mark.parametrize(
    ("change", "said", "error", "code"),
    [
        (lambda t: t.pop(DOWN), {}, rf"{DOWN} must be \[256\], it is not recorded", 14),
        (lambda t: t.update({DOWN: t[DOWN][:-1].copy()}), {}, rf"{DOWN} must be \[256\], found \[255\]", 14),
        (lambda t: t[DOWN].__setitem__(9, np.nan), {}, rf"{DOWN} holds nan at 9", 11),
        (lambda t: t[DOWN].__setitem__(9, -1), {}, rf"{DOWN} holds -1 at 9", 11),
        (lambda t: None, {"model": "x"}, "was recorded on another model", 14),
    ],
)
def test_activations_that_do_not_match_are_refused_before_anything_is_written(
    source: Path, activations: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    change: Any, said: dict[str, str], error: str, code: int,
) -> None:  # fmt: skip
    path = edited(activations, tmp_path, change, **said)
    with pytest.raises((UnsupportedError, CheckpointCorrupt), match=error):
        quantize(source, tmp_path / "q", latent="int4", activations=path)
    ran = k3tool(capsys, "quantize", source, tmp_path / "q", "--latent", "int4", "--activations", path)
    assert ran.code == code and re.search(error, ran.err) and "hint: record it" in ran.err
    assert not (tmp_path / "q").exists()


def test_on_the_command_line(
    source: Path, activations: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = k3tool(capsys, "quantize", source, tmp_path / "q", "--latent", "int4", "--activations", activations)
    assert ran.code == 0 and "weighted error" in ran.out
    ran = k3tool(capsys, "quantize", source, tmp_path / "q", "--latent", "int4", "--activations", activations, "--json")
    latent = ran.json["components"]["latent"]
    assert 0 < latent["weighted_error"] < 0.15 and ran.json["files_kept"] > 0
    assert k3tool(capsys, "quantize", source, tmp_path / "x", "--latent", "int4", "--activations", "none").code == 10
    ran = k3tool(capsys, "quantize", source, tmp_path / "x", "--format", "gguf", "--activations", activations)
    assert ran.code == 2 and "--activations does not go with --format gguf" in ran.err


# Error compensation


def products(source: Path, made: Path, gram: np.ndarray, module: str) -> tuple[float, float]:
    """Mean squares of the products and of their difference, from decoded weights."""
    before, after = (read_values(folder, module).astype(np.float64) for folder in (source, made))
    wide = gram.astype(np.float64)
    return float(((before @ wide) * before).sum()), float((((before - after) @ wide) * (before - after)).sum())


@pytest.mark.parametrize("scheme", SCHEMES)
def test_calibrated_latents_and_what_the_report_says_of_them(
    source: Path, activations: Path, tmp_path: Path, scheme: str
) -> None:
    grams = load_file(activations)
    made = quantize(source, tmp_path / "q", latent=scheme, shared="int8", activations=activations, calibrated=True)
    searched = quantize(source, tmp_path / "s", latent=scheme, activations=activations)
    sums = np.zeros(3)
    for row in made.rows:
        assert row.weighted is not None and (row.weighted.outputs is not None) == (row.component == "latent")
        if row.component == "latent":
            gram = grams[row.path + ".input_gram"]
            energy, error = products(source, tmp_path / "q", gram, row.path)
            sums += energy, products(source, tmp_path / "s", gram, row.path)[1], error
            assert row.weighted.outputs.stored == pytest.approx(error, rel=1e-5)
    told = made.components["latent"]["output_error"]
    assert told["searched"] == pytest.approx((sums[1] / sums[0]) ** 0.5, rel=1e-5)
    assert told["compensated"] == pytest.approx((sums[2] / sums[0]) ** 0.5, rel=1e-5)
    assert told["compensated"] < 0.9 * told["searched"] and told["rows"] == 2 * (128 + 256)
    assert told["tensors_kept"] == 0
    assert (
        "output_error" not in searched.components["latent"] and "output_error" not in made.components["shared_experts"]
    )


def test_calibration_is_deterministic_resumes_and_goes_with_resharding(
    source: Path, activations: Path, tmp_path: Path
) -> None:
    from k3tool.checkpoint.reader import Checkpoint
    from k3tool.execute import Options
    from k3tool.reshard import Request

    def run(name: str, **options: Any) -> QuantizeResult:
        return quantize(source, tmp_path / name, latent="int4", activations=activations, calibrated=True, **options)

    one = run("one", options=Options(max_workers=1))
    run("two", options=Options(max_workers=2))
    run("ranks", request=Request(gpus=2, tp=2))
    whole = Checkpoint.open(tmp_path / "one")
    for other in ("two", "ranks/rank-00000-of-00002", "ranks/rank-00001-of-00002"):
        opened = Checkpoint.open(tmp_path / other)
        for text in (text for text in opened.index.weight_map if "routed_expert_" in text):
            assert opened.read(text) == whole.read(text), text
    again = run("one")
    assert again.report.bytes_read == 0 and again.components == one.components
    with pytest.raises(UsageError, match="already holds something else"):
        quantize(source, tmp_path / "one", latent="int4", activations=activations)


def test_memory_of_a_calibrated_step_is_in_the_plan(source: Path, activations: Path) -> None:
    from k3tool.formats.compensate import working_bytes
    from k3tool.quantize import prepare
    from k3tool.transform.quantize_policy import make_policy

    job = prepare(source, make_policy({"latent": "int4"}), activations=activations, calibrated=True)
    assert job.as_json()["step_memory_bytes"] > working_bytes(256) > 8 * 256**2


@pytest.mark.parametrize(
    ("options", "code", "said", "hint"),
    [
        (["--latent", "int4", "--calibrated"], 2, "--calibrated needs to know", "--save-activations FILE --gram"),
        (["--latent", "nf4", "--calibrated", "FILE"], 2, "no latent projection becomes a scheme", "add --latent with one of int4"),
        (["--shared", "int4", "--calibrated", "FILE"], 2, "no latent projection becomes a scheme", "add --latent"),
        (["--latent", "int4", "--scales", "plain", "--calibrated", "FILE"], 2, "starts from searched scales", "leave"),
        (["--latent", "int4", "--calibrated", "NO GRAM"], 14, r"holds no language_model.*down_proj\.input_gram", "--gram"),
        (["--format", "gguf", "--calibrated"], 2, "--calibrated does not go with --format gguf", "no scale to choose"),
    ],
)  # fmt: skip
def test_calibration_that_cannot_be_is_refused(
    source: Path, activations: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    options: list[str], code: int, said: str, hint: str,
) -> None:  # fmt: skip
    if options[-1] == "NO GRAM":
        path = edited(activations, tmp_path, lambda t: [t.pop(name) for name in list(t) if name.endswith("gram")])
        options = [*options[:-1], "--activations", str(path)]
    elif options[-1] == "FILE":
        options = [*options[:-1], "--activations", str(activations)]
    ran = k3tool(capsys, "quantize", source, tmp_path / "q", *options)
    assert ran.code == code and re.search(said, ran.err) and hint in ran.err.partition("hint:")[2]
    assert not (tmp_path / "q").exists()


def test_a_gram_matrix_that_is_damaged_leaves_no_checkpoint(source: Path, activations: Path, tmp_path: Path) -> None:
    gram = DOWN.replace("input_mean_square", "input_gram")
    path = edited(activations, tmp_path, lambda t: t[gram].__setitem__((3, 4), np.nan))
    with pytest.raises(CheckpointCorrupt, match=f"{gram} has NaN"):
        quantize(source, tmp_path / "q", latent="int4", activations=path, calibrated=True)
    assert not (tmp_path / "q" / "config.json").exists()


def test_people_are_told_the_gain(
    source: Path, activations: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = k3tool(
        capsys, "quantize", source, tmp_path / "q", "--latent", "int4", "--calibrated", "--activations", activations,
        "--report", tmp_path / "report.html",
    )  # fmt: skip
    assert ran.code == 0
    assert re.search(
        r"latent: error of outputs 0\.\d{5} with plain scales, 0\.\d{5} with searched ones, 0\.\d{5} compensated \(-\d\d%\)",
        ran.out,
    )
    assert "Error of outputs" in (tmp_path / "report.html").read_text()
    assert "--calibrated" in (tmp_path / "q" / "README.md").read_text()
