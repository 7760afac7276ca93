"""The README's first command: every step of the demo ends well and says what it should."""

from __future__ import annotations

from pathlib import Path

from k3tool import demo
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


def test_every_step(tmp_path: Path):
    announced: list[demo.Step] = []
    outcomes = list(demo.play(tmp_path / "demo", announced.append))
    assert [outcome.step for outcome in outcomes] == announced == list(demo.STEPS)
    for outcome in outcomes:
        assert outcome.exit_code == 0 and SAYS[outcome.step.arguments[0]] in outcome.output, outcome.output
    assert {path.name for path in (tmp_path / "demo").iterdir() if path.is_dir()} == {
        "hub", "checkpoint", "ranks", "quantized"
    }  # fmt: skip
    demo.prepare(tmp_path / "demo")  # a second demo in the same folder starts over
    assert not (tmp_path / "demo" / "checkpoint").exists()


def test_other_peoples_folders_are_left_alone(tmp_path: Path, capsys):
    (tmp_path / "mine").write_text("precious")
    for folder in (tmp_path, tmp_path / "mine"):
        ran = k3tool(capsys, "demo", folder, "--json")
        assert ran.code == 2 and ran.json["error"]["hint"] == "name a folder that is new or empty"
    assert (tmp_path / "mine").read_text() == "precious"
