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


@pytest.fixture(scope="module")
def none_aside(activations: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As files were before inputs were kept: the same moments."""
    return edited(activations, tmp_path_factory.mktemp("older"), drop_held)


def drop_held(tensors: dict[str, np.ndarray]) -> None:
    for name in [name for name in tensors if name.endswith(".input_held")]:
        del tensors[name]


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
    source: Path, none_aside: Path, tmp_path: Path, scheme: str
) -> None:
    activations = none_aside
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


def test_the_error_that_is_told_is_of_tokens_kept_aside(source: Path, activations: Path, tmp_path: Path) -> None:
    """Nothing of them is in what was made, and where it is worse on them than rounding, the matrix is rounded."""
    recorded = load_file(activations)
    tokens = len(IDS) + 1
    made = quantize(source, tmp_path / "q", latent="int4", activations=activations, calibrated=True)
    without = {}
    for name in [name for name in recorded if name.endswith(".input_held")]:
        held = recorded[name].astype(np.float64)
        module = name.removesuffix(".input_held")
        assert held.shape == (tokens // 8, recorded[module + ".input_mean_square"].shape[0])
        others = (recorded[module + ".input_gram"] * float(tokens) - held.T @ held) / (tokens - len(held))
        without |= {module + ".input_gram": others.astype(np.float32)}
        without |= {module + ".input_mean_square": np.diagonal(others).astype(np.float32).copy()}
    path = edited(activations, tmp_path, lambda t: (drop_held(t), t.update(without)))
    alone = quantize(source, tmp_path / "alone", latent="int4", activations=path, calibrated=True)
    quantize(source, tmp_path / "searched", latent="int4", activations=path)
    quantize(source, tmp_path / "plain", latent="int4", scales="plain")
    assert alone.components["latent"]["output_error"]["tokens_kept_aside"] == 0
    sums, rounded = np.zeros(4), 0
    for row in made.rows:
        assert row.weighted is not None and row.weighted.outputs is not None
        held = recorded[row.path + ".input_held"].astype(np.float64)
        assert row.weighted.outputs.held == len(held)
        before = read_values(source, row.path).astype(np.float64)

        def error(folder: str, held: np.ndarray = held, before: np.ndarray = before, path: str = row.path) -> float:
            lost = before - read_values(tmp_path / folder, path)
            return float(np.square(held @ lost.T).sum() / len(held))

        found = [error(folder) for folder in ("plain", "searched", "alone", "q")]
        assert found[3] == pytest.approx(min(found[:3]), rel=1e-3)
        assert row.weighted.outputs[1:4] == pytest.approx((*found[:2], found[3]), rel=1e-3)
        rounded += found[3] < 0.999 * found[2]
        sums += float(np.square(held @ before.T).sum() / len(held)), *found[:2], found[3]
    told = made.components["latent"]["output_error"]
    assert told["compensated"] == pytest.approx((sums[3] / sums[0]) ** 0.5, rel=1e-3)
    assert told["tokens_kept_aside"] == tokens // 8 and told["tensors_kept"] == rounded and told["tensors"] == 4


def test_few_tokens_gain_nothing_on_others_and_that_is_said(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "few.safetensors"
    ids = ",".join(map(str, IDS[:24]))
    run = ["run", source, "--input-ids", ids, "--max-new-tokens", 0, "--dtype", "float32"]
    assert k3tool(capsys, *run, "--save-activations", path, "--gram").code == 0
    command = ["quantize", source, tmp_path / "q", "--latent", "int4", "--calibrated", "--activations", path]
    ran = k3tool(capsys, *command)
    assert ran.code == 0 and "was recorded over 24 tokens" in ran.err and "record 1,024 or more" in ran.err
    assert "on 3 tokens kept aside" in ran.out
    told = k3tool(capsys, *command, "--json").json["components"]["latent"]["output_error"]
    assert told["compensated"] <= told["searched"] and told["tokens_kept_aside"] == 3
    if told["tensors_kept"]:
        assert f"all of {told['tensors_kept']} of 4 matrices" in ran.out


def test_a_file_without_tokens_to_keep_aside_is_told(
    source: Path, none_aside: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["quantize", source, tmp_path / "q", "--latent", "int4", "--calibrated", "--activations", none_aside]
    ran = k3tool(capsys, *command)
    assert ran.code == 0 and "holds no inputs that can be kept aside" in ran.err
    assert "on the tokens that it was made for" in ran.out


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
    source: Path, none_aside: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = k3tool(
        capsys, "quantize", source, tmp_path / "q", "--latent", "int4", "--calibrated", "--activations", none_aside,
        "--report", tmp_path / "report.html",
    )  # fmt: skip
    assert ran.code == 0
    assert re.search(
        r"latent: error of outputs 0\.\d{5} with plain scales, 0\.\d{5} with searched ones, 0\.\d{5} compensated \(-\d\d%\)",
        ran.out,
    )
    assert "Error of outputs" in (tmp_path / "report.html").read_text()
    assert "--calibrated" in (tmp_path / "q" / "README.md").read_text()
