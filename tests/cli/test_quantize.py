"""`k3tool quantize` from the outside: what it prints, how it ends, what it leaves behind."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from k3tool.execute import Options
from k3tool.quantize import quantize
from k3tool.reshard import Request
from k3tool.standin import serve
from tests.helpers import copy_checkpoint, k3tool, k3tool_process

KEYS = {"scheme", "tensors", "exact_tensors", "relative_error", "max_error", "worst"}


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_experts_exactly_and_latents_measured(mini: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ran = k3tool(capsys, "quantize", mini, tmp_path / "q", "--experts", "nvfp4", "--latent", "nf4", "--json")
    document = ran.json
    assert ran.code == 0 and document["ok"] is True and document["command"] == "quantize"
    assert {"bytes_in", "bytes_out", "components", "seconds", "peak_memory_bytes"} <= document.keys()
    assert document["bytes_in"] == 1_147_856 and document["bytes_out"] == 1_117_700
    experts, latent = document["components"]["routed_experts"], document["components"]["latent"]
    assert experts.keys() >= KEYS and latent.keys() >= KEYS
    assert (experts["scheme"], experts["tensors"], experts["exact_tensors"]) == ("nvfp4", 252, 252)
    assert (latent["scheme"], latent["tensors"], latent["exact_tensors"]) == ("nf4", 14, 0)
    assert 0.08 < latent["relative_error"] < 0.1 and len(latent["worst"]) == 5
    assert document["components"]["vision"]["scheme"] == "keep"
    assert "k3tool alone" in document["readers"] and "k3tool alone" in ran.err
    assert k3tool(capsys, "verify", tmp_path / "q", "--depth", "bytes").code == 0
    assert k3tool(capsys, "inspect", tmp_path / "q", "--json").json["unexpected"] == []


def test_people_see_a_table_and_who_can_read_it(mini: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ran = k3tool(capsys, "quantize", mini, tmp_path / "q", "--experts", "int8")
    assert ran.code == 0
    assert re.search(r"routed_experts\s+int8\s+252\s+252\s+0\s+0", ran.out)
    assert "untouched: attn_res" in ran.out and "readable by: engines with a compressed-tensors loader" in ran.out
    quiet = k3tool(capsys, "quantize", mini, tmp_path / "q", "--experts", "int8", "-q")
    assert quiet.out.strip() == str(tmp_path / "q") and quiet.err == ""


def test_a_report_of_nothing_is_refused(mini: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "r.html"
    ran = k3tool(capsys, "quantize", mini, tmp_path / "q", "--experts", "nvfp4", "--dry-run", "--report", page)
    assert ran.code == 2 and "--report does not go with --dry-run" in ran.err and not page.exists()


def test_a_dry_run_writes_nothing(mini: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ran = k3tool(capsys, "quantize", mini, tmp_path / "q", "--experts", "nvfp4", "--dry-run", "--json")
    document = ran.json
    assert ran.code == 0 and not (tmp_path / "q").exists()
    assert document["components"] == {"routed_experts": {"from": "mxfp4", "scheme": "nvfp4", "tensors": 252}}
    assert document["bytes_out"] > document["bytes_in"] and document["step_memory_bytes"] > 0
    assert k3tool(capsys, "quantize", mini, tmp_path / "q", "--experts", "nvfp4", "--dry-run").code == 0


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (["--experts", "int3"], 2, "unknown scheme 'int3'"),
        (["--expert", "int4"], 2, "--expert"),
        (["--format", "zip"], 2, "unknown format 'zip'"),
        (["--scales", "best"], 2, "unknown way to choose scales"),
        (["--device", "tpu"], 2, "unknown device"),
        (["--report", "nowhere/report.html"], 2, "cannot write"),
        (["--trunk", "q8_0"], 2, "--trunk does not go with --format safetensors"),
        (["--format", "gguf", "--latent", "nf4"], 2, "--latent does not go with --format gguf"),
        (["--format", "gguf", "--max-rel-error", "0.1"], 2, "--max-rel-error does not go with"),
        (["--format", "gguf", "--report", "report.html"], 2, "--report does not go with --format gguf"),
        (["--max-shard-size", "five"], 2, "not a size"),
        (["--max-shard-size", "5"], 2, "--max-shard-size 5 is too small"),
        (["--max-shard-size", "0", "--format", "gguf"], 2, "--max-shard-size 0 is too small"),
        (["--attention", "fp8-block"], 14, "self_attn.b_proj: fp8-block cannot hold"),
        (["--latent", "nf4", "--exact"], 1, "changes values"),
        (["--latent", "nf4", "--max-rel-error", "0.05"], 1, "beyond --max-rel-error 0.05"),
        (["--recipe", "missing.toml"], 10, "cannot read recipe"),
        (["--gpus", "2", "--tp", "2"], 14, "TP 2 does not divide"),
    ],
)
def test_refusals(
    mini: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], code: int, said: str
) -> None:
    ran = k3tool(capsys, "quantize", mini, tmp_path / "q", *options, "--json")
    assert ran.code == code and said in ran.err, ran.err
    assert ran.json["ok"] is False and ran.json["error"]["code"] == code and ran.json["error"]["hint"]
    assert not (tmp_path / "q" / "config.json").exists()


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        (["--latent", "nf4", "--exact"], ["--latent", "nf4"]),
        (["--latent", "nf4", "--exact"], ["--experts", "int8"]),
        (["--latent", "nf4", "--exact", "--ep", 2, "--rank", 1], ["--experts", "int8", "--pp", 2]),
        (["--experts", "int4", "--max-memory", "1MB"], ["--experts", "int8"]),
        (["--format", "gguf", "--trunk", "q8_0", "--exact"], ["--format", "gguf", "--trunk", "q8_0"]),
        (["--format", "gguf", "--trunk", "q8_0", "--exact"], ["--format", "gguf"]),
        (["--format", "gguf", "--trunk", "q8_0", "--exact"], ["--experts", "int8"]),
    ],
)
def test_a_refused_conversion_leaves_no_claim(
    mini: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], wrong: list[object], right: list[object]
) -> None:
    wrong = [*wrong, "--max-workers", 1]  # the first file is the one that is refused
    ran = k3tool(capsys, "quantize", mini, tmp_path / "a" / "q", *wrong)
    assert ran.code in (1, 12) and list(tmp_path.rglob("*")) == []
    (tmp_path / "a" / "q").mkdir(parents=True)
    assert k3tool(capsys, "quantize", mini, tmp_path / "a" / "q", *wrong).code in (1, 12)
    assert (tmp_path / "a" / "q").is_dir() and not any((tmp_path / "a" / "q").iterdir())
    assert k3tool(capsys, "quantize", mini, tmp_path / "a" / "q", *right).code == 0


@pytest.mark.parametrize("options", [["--latent", "nf4"], ["--format", "gguf", "--trunk", "q8_0"]])
def test_a_bound_that_a_finished_result_breaks_is_no_claim_on_it(
    mini: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    """Nor is what was written without the bound taken for what keeps it."""
    assert k3tool(capsys, "quantize", mini, tmp_path / "q", *options).code == 0
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "q").iterdir()}
    ran = k3tool(capsys, "quantize", mini, tmp_path / "q", *options, "--exact")
    assert ran.code == 1 and "an earlier run without --exact changed values of" in ran.err
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "q").iterdir()}
    assert k3tool(capsys, "quantize", mini, tmp_path / "q", *options).code == 0


def test_a_broken_bound_shows_the_components(mini: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ran = k3tool(capsys, "quantize", mini, tmp_path / "q", "--latent", "nf4", "--max-rel-error", "0.05", "--json")
    assert ran.json["components"]["latent"]["relative_error"] > 0.05
    again = k3tool(capsys, "quantize", mini, tmp_path / "q", "--latent", "nf4", "--max-rel-error", "0.1", "--json")
    assert again.code == 0 and again.json["bytes_read"] == 0


def test_a_broken_bound_leaves_its_report_and_a_finished_folder_finished(
    mini: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, page = tmp_path / "q", tmp_path / "page.html"
    line = ["quantize", mini, out, "--latent", "nf4", "--report", page]
    ran = k3tool(capsys, *line, "--max-rel-error", "0.01")
    assert ran.code == 1 and "page.html shows the errors" in ran.err
    assert "0.09068" in page.read_text() and not (out / "config.json").exists()
    page.unlink()
    assert k3tool(capsys, *line).code == 0 and "0.09068" in page.read_text()
    before = contents(out)
    assert k3tool(capsys, *line, "--max-rel-error", "0.01").code == 1
    assert contents(out) == before, "what was whole stays so, without a ledger"
    assert k3tool(capsys, "verify", out, "--depth", "bytes").code == 0


@pytest.mark.parametrize("name", ["report.html", "pages/report.html"])
def test_a_report_may_lie_in_the_result(
    mini: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    out = tmp_path / "q"
    line = ["quantize", mini, out, "--latent", "int8", "--report", out / name]
    assert k3tool(capsys, *line, "--max-rel-error", "0.0001").code == 1
    assert "relative error" in (out / name).read_text().lower()
    for more in ([], [], ["--overwrite"]):
        assert k3tool(capsys, *line, *more).code == 0
        ran = k3tool(capsys, "verify", out, "--depth", "bytes", "--json")
        assert ran.code == 0 and not ran.json["problems"] and (out / name).is_file()
    assert (name in contents(out)) and ("report.html" in {file["name"] for file in ran.json["files"]}) == (
        "/" not in name
    )


@pytest.mark.parametrize(("scheme", "said"), [("nf4", True), ("bf16", True), ("int8", False)])
def test_scales_that_choose_nothing_are_said(
    mini: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], scheme: str, said: bool
) -> None:
    line = ["quantize", mini, tmp_path / "q", "--experts", scheme, "--scales", "plain", "--dry-run"]
    assert (f"--scales plain changes nothing: {scheme} leaves no scale" in k3tool(capsys, *line).err) == said
    assert "--scales" not in k3tool(capsys, *line[:5], "--dry-run").err


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        (["--tp", "2"], "llama.cpp divides the model"),
        (["--scales", "plain"], "no scale to choose"),
        (["--shared", "int8"], "--trunk"),
        (["--device", "cuda"], "the CPU writes the same bytes"),
    ],
)
def test_what_gguf_does_not_use_is_refused_with_what_to_do_instead(
    mini: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], hint: str
) -> None:
    ran = k3tool(capsys, "quantize", mini, tmp_path / "q", "--format", "gguf", *options)
    assert ran.code == 2 and hint in ran.err.partition("hint: ")[2] and not (tmp_path / "q").exists()


def test_a_report_replaces_reports_only(mini: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shard = tmp_path / "model.safetensors"
    shard.write_bytes(b"weights")
    ran = k3tool(capsys, "quantize", mini, tmp_path / "q", "--latent", "int8", "--report", shard)
    assert ran.code == 2 and "no report of k3tool quantize" in ran.err and shard.read_bytes() == b"weights"
    ran = k3tool(
        capsys, "quantize", mini, tmp_path / "q", "--latent", "int8", "--report", tmp_path / "q" / "config.json"
    )
    assert ran.code == 2 and "ends with .html" in ran.err and not (tmp_path / "q").exists()


def test_quantized_experts_are_refused(mini: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert k3tool(capsys, "quantize", mini, tmp_path / "a", "--experts", "nvfp4").code == 0
    ran = k3tool(capsys, "quantize", tmp_path / "a", tmp_path / "b", "--experts", "nvfp4")
    assert ran.code == 14 and "experts.0.w1 is stored as nvfp4 already" in ran.err and "hint: " in ran.err


def test_a_source_that_is_missing_or_short(mini: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert k3tool(capsys, "quantize", tmp_path / "none", tmp_path / "q", "--experts", "nvfp4").code == 10
    copy = copy_checkpoint(mini, tmp_path / "copy")
    (copy / "model-00008-of-000011.safetensors").unlink()
    ran = k3tool(capsys, "quantize", copy, tmp_path / "q", "--experts", "nvfp4")
    assert ran.code == 10 and "model-00008" in ran.err and not (tmp_path / "q").exists()
    copy = copy_checkpoint(mini, tmp_path / "short")
    shard = copy / "model-00010-of-000011.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])
    assert k3tool(capsys, "quantize", copy, tmp_path / "q", "--experts", "nvfp4").code == 11


def test_a_recipe_and_its_report(mini: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe, page = tmp_path / "recipe.toml", tmp_path / "report.html"
    recipe.write_text(
        'experts = "nvfp4"\n[[rule]]\nmatch = "re:.*\\\\.shared_experts\\\\..*"\nlayers = "1-3"\nscheme = "int4"\n'
    )
    ran = k3tool(capsys, "quantize", mini, tmp_path / "q", "--recipe", recipe, "--report", page, "--json")
    shared = ran.json["components"]["shared_experts"]
    assert shared["scheme"] == "mixed" and shared["schemes"] == {"int4": 9, "keep": 12}
    text = page.read_text()
    assert text.startswith("<!doctype html>") and "<svg" in text and "shared_experts.gate_proj" in text
    assert not re.search(r"(?:src|href)\s*=|@import|url\(", text), "the page refers to something outside it"
    assert f"{shared['relative_error']:.5f}" in text


def test_ranks_in_the_same_pass(mini: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ran = k3tool(capsys, "quantize", mini, tmp_path / "q", "--experts", "nvfp4", "--gpus", "4", "--ep", "4", "--json")
    assert ran.code == 0 and ran.json["layout"] == {"tp": 1, "ep": 4, "pp": 1} and len(ran.json["ranks"]) == 4
    assert ran.json["components"]["routed_experts"]["tensors"] == 252
    assert (tmp_path / "q" / "rank-00003-of-00004" / "config.json").is_file()
    config = json.loads((tmp_path / "q" / "rank-00003-of-00004" / "config.json").read_bytes())
    assert config["text_config"]["quantization_config"]["format"] == "nvfp4-pack-quantized"
    assert k3tool(capsys, "reshard", tmp_path / "q", tmp_path / "back", "--gpus", "1", "--layout", "hf").code == 0


def test_gguf_is_written_by_the_same_command(mini: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["quantize", mini, tmp_path / "q", "--format", "gguf", "--vocabulary", "ids", "--json"]
    dry = k3tool(capsys, *arguments, "--dry-run")
    assert dry.code == 0 and not (tmp_path / "q").exists()
    ran = k3tool(capsys, *arguments)
    assert ran.code == 0 and ran.json["components"]["routed_experts"]["relative_error"] == 0
    assert list((tmp_path / "q").glob("*.gguf"))


def test_help_is_quick_and_needs_neither_torch_nor_numba() -> None:
    code = (
        "import sys; from k3tool.cli import app; code = app.run(['quantize', '--help']); "
        "sys.exit(code or bool({'torch', 'numba', 'numpy'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


def test_neither_torch_nor_bitsandbytes_is_imported(mini: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from k3tool.quantize import quantize; "
        f"quantize({str(mini)!r}, {str(tmp_path / 'q')!r}, experts='nvfp4', latent='nf4'); "
        "sys.exit(bool({'torch', 'bitsandbytes'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stderr == ""


def test_killed_at_fifty_moments_it_resumes_to_the_same_bytes(mini: Path, tmp_path: Path) -> None:
    seed = int.from_bytes(os.urandom(4), "big")
    moments = random.Random(seed)
    request = Request(gpus=1, form="hf", max_shard_bytes=100_000)
    quantize(mini, tmp_path / "whole", experts="nvfp4", latent="nf4", request=request, options=Options(max_workers=2))
    expected = contents(tmp_path / "whole")
    assert len(expected) > 10
    command = [sys.executable, "-m", "tests.cli.quantize_runner", str(mini), str(tmp_path / "killed")]
    codes, longest = [], 0.25
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as run:
        assert run.stdin is not None and run.stdout is not None

        def once(delay: float | None) -> int:
            run.stdin.write("\n")
            child = int(run.stdout.readline())
            if delay is not None:
                time.sleep(delay)
                os.kill(child, signal.SIGKILL)
            return int(run.stdout.readline())

        for _ in range(50):
            codes.append(once(moments.uniform(0.0, longest)))
            held = contents(tmp_path / "killed") if (tmp_path / "killed").exists() else {}
            for name, data in held.items():  # a final name never holds partial data
                if name in expected and not name.endswith(".json"):
                    assert data == expected[name], f"{name}, seed {seed}"
            if codes[-1] == 0:  # it was finished before it was killed: begin anew, and kill sooner
                longest /= 2
                for path in sorted((tmp_path / "killed").rglob("*"), reverse=True):
                    path.rmdir() if path.is_dir() else path.unlink()
        assert once(None) == 0
        run.stdin.close()
    assert sum(code == -signal.SIGKILL for code in codes) >= 25, f"seed {seed}: {codes}"
    found = contents(tmp_path / "killed")
    assert found.keys() == expected.keys()
    assert [name for name in found if found[name] != expected[name]] == [], f"seed {seed}"


def test_one_process_alone_works_as_well(mini: Path, tmp_path: Path) -> None:
    ran = k3tool_process("quantize", mini, tmp_path / "q", "--experts", "bf16", "--json", "--verify")
    assert ran.code == 0 and json.loads(ran.out)["components"]["routed_experts"]["exact_tensors"] == 252


EXACT = ({"experts": "nvfp4"}, {"experts": "int8"}, {"experts": "fp8-channel"}, {"experts": "bf16"})
ROUNDED = (
    {"experts": "int4", "latent": "nf4"},
    {"experts": "nf4", "shared": "int8"},
    {"experts": "fp4", "latent": "int4"},
)


@pytest.mark.parametrize("schemes", EXACT + ROUNDED, ids=lambda schemes: "-".join(schemes.values()))
def test_run_reads_every_scheme(
    mini: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], schemes: dict[str, str]
) -> None:
    """Exact schemes give the golden logits; the others give logits that are near, for one prompt of random weights."""
    from safetensors.numpy import load_file

    golden = load_file(mini / "golden.safetensors")
    quantize(mini, tmp_path / "q", **schemes)  # type: ignore[arg-type]
    ids = ",".join(str(token) for token in golden["input_ids"])
    ran = k3tool(
        capsys, "run", tmp_path / "q", "--input-ids", ids, "--max-new-tokens", 1, "--dtype", "float32",
        "--logits-out", tmp_path / "logits.safetensors", "--json",
    )  # fmt: skip
    assert ran.code == 0, ran.err
    logits = load_file(tmp_path / "logits.safetensors")["logits"]
    distance = np.linalg.norm(logits - golden["logits"]) / np.linalg.norm(golden["logits"])
    assert distance < 5e-5 if schemes in EXACT else 0.01 < distance < 1.0


def test_a_hub_repository_is_read_by_ranges(
    mini: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same tensors as from the folder, each source byte asked for once, and the commit on record."""
    copy = copy_checkpoint(mini, tmp_path / "repository")
    with serve(copy, "org/mini") as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        ran = k3tool(
            capsys, "quantize", "org/mini", tmp_path / "remote", "--experts", "nvfp4", "--latent", "nf4", "--json"
        )
        commit = hub.repos["org/mini"].commit
    assert ran.code == 0 and ran.json["bytes_read"] <= 1.1 * ran.json["bytes_in"]
    assert k3tool(capsys, "quantize", copy, tmp_path / "local", "--experts", "nvfp4", "--latent", "nf4").code == 0
    remote, local = contents(tmp_path / "remote"), contents(tmp_path / "local")
    same = [name for name in local if not name.startswith(("k3tool-", "README"))]
    assert len(same) > 3 and all(remote[name] == local[name] for name in same)
    assert "base_model: org/mini\n" in remote["README.md"].decode() and commit in remote["README.md"].decode()
    assert json.loads(remote["k3tool-manifest.json"])["revision"] == commit
