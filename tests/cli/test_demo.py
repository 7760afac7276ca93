"""The README's first command: every step of the demo ends well and says what it should."""

from __future__ import annotations

from pathlib import Path

import pytest

from k3tool import demo
from k3tool.errors import CheckFailed
from tests.helpers import k3tool

SAYS = {
    "fetch": "101 files (101 fetched)",
    "verify": "101 ok (depth bytes",
    "inspect": "every tensor that config.json implies is named, and no other",
    "plan": "fits: the largest rank needs",
    "reshard": "verified: 6,894 tensors equal the source's",
    "quantize": "routed_experts    nvfp4",
    "run": "finished by",
}


def test_every_step(tmp_path: Path, monkeypatch):
    # A proxy that nothing answers at, variables that a launcher left and a Hub that is off lead no command astray.
    for name, value in {"http_proxy": "http://127.0.0.1:9", "ALL_PROXY": "socks5://127.0.0.1:9", "HF_HUB_OFFLINE": "1",
                        "WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1"}.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    announced: list[demo.Step] = []
    outcomes = list(demo.play(tmp_path / "demo", announced.append))
    assert [outcome.step for outcome in outcomes] == announced == list(demo.STEPS)
    for outcome in outcomes:
        assert outcome.exit_code == 0 and SAYS[outcome.step.arguments[0]] in outcome.output, outcome.output
    assert {path.name for path in (tmp_path / "demo").iterdir() if path.is_dir()} == {
        "hub", "checkpoint", "ranks", "quantized"
    }  # fmt: skip
    held = sum(path.stat().st_size for path in (tmp_path / "demo").rglob("*") if path.is_file())
    assert 80e6 < held < 95e6  # "90 MB" in README and --help
    demo.prepare(tmp_path / "demo")  # a second demo in the same folder starts over
    assert not (tmp_path / "demo" / "checkpoint").exists()


def test_other_peoples_folders_are_left_alone(tmp_path: Path, capsys):
    (tmp_path / "mine").write_text("precious")
    for folder in (tmp_path, tmp_path / "mine"):
        ran = k3tool(capsys, "demo", folder, "--json")
        assert ran.code == 2 and ran.json["error"]["hint"] == "name a folder that is new or empty"
    assert (tmp_path / "mine").read_text() == "precious"


def test_the_demo_reaches_its_own_hub_and_its_own_code_from_anywhere(tmp_path: Path):
    inherited = {
        **dict.fromkeys(("http_proxy", "HTTPS_PROXY", "ALL_PROXY", "no_proxy"), "http://proxy:1"),
        **dict.fromkeys(("HF_TOKEN", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "TRANSFORMERS_OFFLINE"), "x"),
        **dict.fromkeys(("SLURM_PROCID", "RANK", "WORLD_SIZE", "MASTER_ADDR"), "1"),
        "PATH": "/bin", "K3TOOL_DEBUG": "1", "PYTHONPATH": "here",
    }  # fmt: skip
    found = demo.surroundings(inherited, "http://127.0.0.1:1", tmp_path)
    assert not [name for name in found if name.lower().endswith("_proxy") and name != "NO_PROXY"]
    assert not [name for name in found if name.startswith(("SLURM", "RANK", "WORLD", "MASTER", "TRANSF", "HUGGING"))]
    assert "HF_TOKEN" not in found and "HF_HUB_CACHE" not in found
    assert found["HF_ENDPOINT"] == "http://127.0.0.1:1" and found["HF_HOME"] == str(tmp_path / "hf-home")
    assert found["PATH"] == "/bin" and found["K3TOOL_DEBUG"] == "1"
    code, here = found["PYTHONPATH"].split(":")
    assert (Path(code) / "k3tool" / "demo.py").is_file() and here == str(Path("here").resolve())


def test_a_step_that_fails_is_told_in_its_own_words(tmp_path: Path, monkeypatch):
    broken = demo.Step("Look at nothing.", ("verify", "nowhere"))
    monkeypatch.setattr(demo, "STEPS", (broken,))
    monkeypatch.setattr(demo, "prepare", lambda folder, progress: (folder / "hub").mkdir(parents=True))
    with pytest.raises(CheckFailed) as caught:
        list(demo.play(tmp_path / "demo", lambda step: None))
    assert caught.value.message.startswith("the demo stopped: `k3tool verify nowhere` ended with 10: ")
    assert "nowhere" in caught.value.message and caught.value.hint and "error: " in str(caught.value.details["output"])


def test_what_it_says_last_is_found_by_the_shell_that_made_it(tmp_path: Path, capsys, monkeypatch):
    """After `make demo` the program is in .venv alone, and the folder beside it."""
    said: list[demo.Step] = []

    def played(folder: Path, announce, progress):
        demo.prepare(folder, progress)
        (folder / "hub").rename(folder / "quantized")
        announce(demo.STEPS[1])
        said.append(demo.STEPS[1])
        yield demo.Outcome(demo.STEPS[1], 0, 0.0, "")

    program = tmp_path / ".venv" / "bin" / "k3tool"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "play", played)
    monkeypatch.setattr("sys.executable", str(program.with_name("python")))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    ran = k3tool(capsys, "demo", "my demo")
    assert ran.code == 0 and ran.out.startswith("\n$ cd 'my demo'\n# ")
    assert ran.err.rstrip().endswith("try this: .venv/bin/k3tool inspect 'my demo/quantized'")
    assert k3tool(capsys, "inspect", "my demo/quantized").code == 0
