"""`k3tool plan` end to end: every kind of source, the contract's document, and every way to be refused."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path

import pytest

from k3tool import release
from k3tool.standin import serve
from tests.helpers import copy_checkpoint, k3tool, k3tool_process


def test_json(capsys):
    ran = k3tool(capsys, "plan", "k3", "--gpus", 16, "--ep", 16, "--gpu-memory", "b300", "--gpu-price", "2.5", "--json")
    document = ran.json
    assert ran.code == 0 and document["ok"] is True and document["command"] == "plan"
    assert document["layout"] == {"tp": 1, "ep": 16, "pp": 1} and document["gpus"] == 16
    assert document["fits"] is True and document["gpu"] == "b300" and document["margin_bytes"] == 28_800_000_000
    assert document["reason"] == "as given" and document["node_gpus"] == 8 and document["redundant_experts"] == 0
    # 113.5 GB of text model without experts, a sixteenth of the experts, and the vision tower.
    weights = 113_509_540_864 + 1_446_456_066_048 // 16 + 894_717_952
    assert [rank["rank"] for rank in document["ranks"]] == list(range(16))
    for rank in document["ranks"]:
        assert rank["weights_bytes"] == weights == sum(rank["components"].values())
        assert rank["kda_state_bytes"] == 434_110_464 and rank["conv_history_bytes"] == 15_261_696
        assert rank["mla_cache_bytes"] == 27_648 * 131_072
        parts = ("weights_bytes", "kda_state_bytes", "conv_history_bytes", "mla_cache_bytes", "activation_bytes")
        assert rank["total_bytes"] == sum(rank[part] for part in parts)
    assert document["price_per_hour"] == 40.0 and document["even_share_bytes"] == release.TOTAL_SIZE // 16
    assert {"tp": 8, "ep": 2, "pp": 1}.items() <= document["alternatives"][0].items()
    assert document["alternatives"][0]["price_per_hour"] == 40.0
    assert all(option["max_sequences"] > 0 for option in document["alternatives"])
    assert document["fewest"]["gpus"] == 7 and document["fewest_in_nodes"]["gpus"] == 8 and document["notes"] == []
    schemes = {item["scheme"]: item for item in document["effects"]["latent"]}
    assert schemes["nf4"]["weights_bytes"] < weights == schemes["keep"]["weights_bytes"]


def test_what_people_see(capsys):
    ran = k3tool(capsys, "plan", "k3", "--gpus", 16, "--gpu-memory", "h200")
    assert (
        ran.code == 0 and "TP8 x EP2 x PP1 on 16 GPUs" in ran.out and "fits: the largest rank needs 120 GB" in ran.out
    )
    assert "0-15" in ran.out and "experts nf4, fp4: TP 8 cannot divide" in ran.out
    assert "possible TP: 1, 2, 3, 4, 6" in ran.out
    small = k3tool(capsys, "plan", "k3", "--gpus", 8, "--gpu-memory", "h200")
    assert small.code == 0 and "DOES NOT FIT" in small.out and "TP8 x EP2 x PP1" in small.out
    quiet = k3tool(capsys, "plan", "k3", "--gpus", 8, "--gpu-memory", "h200", "-q")
    assert quiet.out == "TP8 x EP1 x PP1 does not fit\n" and quiet.err == ""
    assert k3tool(capsys, "plan", "k3", "--gpu-memory", "h200", "-q").out == "TP8 x EP2 x PP1 fits\n"


def pasted(line: str) -> list[str]:
    """The words of the command that a line ends with, without the program's name."""
    words = shlex.split(line.strip())
    start = next(n for n, word in enumerate(words) if word.rpartition("/")[2] == "k3tool" or word == "-m")
    return words[start + (2 if words[start] == "-m" else 1) :]


def test_what_is_said_last_works_as_pasted(tmp_path: Path, capsys, monkeypatch):
    from k3tool.synthetic import tiny_config, write_checkpoint

    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "my model"
    small = tiny_config(num_layers=2, kda_heads=4, mla_heads=4, num_experts=4, moe_intermediate_size=64, vision=False)
    write_checkpoint(folder, small)
    said = k3tool(capsys, "plan", folder, "--gpus", 4, "--tp", 2).err
    assert said.startswith("cut it so: ")
    words = pasted(said)
    assert words == ["reshard", str(folder), str(tmp_path / "my model-tp2-ep2"),
                     "--gpus", "4", "--tp", "2", "--ep", "2", "--pp", "1"]  # fmt: skip
    assert k3tool(capsys, *words).code == 0
    again = pasted(k3tool(capsys, "plan", folder / "config.json", "--gpus", 4, "--tp", 2).err)
    assert again[2] == f"{tmp_path / 'my model-tp2-ep2'}-2"  # the other is taken
    # Other storage is written by quantize, cut or not.
    for layout in (("--gpus", 1), ("--gpus", 2, "--tp", 2)):
        words = pasted(k3tool(capsys, "plan", folder, *layout, "--experts", "nvfp4", "--latent", "int8").err)
        assert words[0] == "quantize" and "nvfp4" in words and "int8" in words and ("--tp" in words) == (layout[1] > 1)
        assert k3tool(capsys, *words).code == 0
    # From the folder itself, nothing is written into it.
    monkeypatch.chdir(folder)
    words = pasted(k3tool(capsys, "plan", ".", "--gpus", 2, "--ep", 2).err)
    assert words[1:3] == [".", str(tmp_path / "my model-ep2")] and k3tool(capsys, *words).code == 0
    assert k3tool(capsys, "plan", ".", "--gpus", 1).err == ""  # nothing to cut


def test_what_is_stored_so_already_is_no_conversion(cut: Path, capsys):
    """The experts of the source are MXFP4, its latent projections are not."""
    planned = ("plan", cut / "whole", "--experts", "mxfp4")
    assert k3tool(capsys, *planned, "--gpus", 1).err == ""
    assert pasted(k3tool(capsys, *planned, "--gpus", 2).err)[0] == "reshard"
    words = pasted(k3tool(capsys, *planned, "--gpus", 2, "--latent", "mxfp4").err)
    assert words[0] == "quantize" and "--latent" in words and "--experts" not in words


def test_the_place_of_the_result_is_one_that_people_would_take(cut: Path, tmp_path: Path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    copy_checkpoint(cut / "whole", tmp_path / "-odd")
    words = pasted(k3tool(capsys, "plan", "--gpus", 2, "--", "-odd").err)
    assert words[1:3] == ["./-odd", "./-odd-tp2"] and k3tool(capsys, *words).code == 0
    # A snapshot of the Hub's cache has a commit for a name, and nothing is to be written beside it.
    snapshot = tmp_path / "cache" / "models--some--model" / "snapshots" / ("a" * 40)
    copy_checkpoint(cut / "whole", snapshot)
    words = pasted(k3tool(capsys, "plan", snapshot, "--gpus", 2).err)
    assert words[1:3] == [str(snapshot), "model-tp2"] and k3tool(capsys, *words).code == 0
    with serve(cut / "whole", "some/where") as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        for source in ("some/where", "hf://some/where@main", f"{hub.endpoint}/some/where/tree/main"):
            words = pasted(k3tool(capsys, "plan", source, "--gpus", 2).err)
            assert words[1:3] == [source, "where-tp2"]
        assert k3tool(capsys, *words).code == 0


def test_what_has_no_shards_here_is_named_by_its_repository(tmp_path: Path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(release.config_dict()))
    for source in ("k3", "config.json", "."):
        words = pasted(k3tool(capsys, "plan", source, "--gpus", 16).err)
        assert words == ["reshard", "moonshotai/Kimi-K3", "Kimi-K3-tp8-ep2",
                         "--gpus", "16", "--tp", "8", "--ep", "2", "--pp", "1"]  # fmt: skip
    other = release.config_dict()
    other["text_config"]["num_attention_heads"] = 48
    (tmp_path / "config.json").write_text(json.dumps(other))
    said = k3tool(capsys, "plan", "config.json", "--gpus", 16).err
    assert "shards" in said and "k3tool" not in said


def test_fits_is_a_check(capsys):
    asked = ("plan", "k3", "--gpus", 8, "--gpu-memory", "h200", "--fits")
    ran = k3tool(capsys, *asked)
    assert ran.code == 1 and "DOES NOT FIT" in ran.out
    cause, hint = ran.err.splitlines()
    assert cause == "error: TP8 x EP1 x PP1 does not fit: 83.8 GB are missing on h200 (141 GB)"
    assert hint.startswith("hint: 16 GPUs would hold it: ")
    assert k3tool(capsys, *pasted(hint), "--fits").code == 0
    failed = k3tool(capsys, *asked, "--json")
    assert failed.code == 1 and failed.json["ok"] is False and failed.json["error"]["code"] == 1
    assert failed.json["fits"] is False and failed.json["alternatives"]
    assert k3tool(capsys, *asked, "-q").out == "TP8 x EP1 x PP1 does not fit\n"
    # Without it the answer is no failure, and what would fit is said.
    told = k3tool(capsys, *asked[:-1])
    assert told.code == 0 and told.err.startswith("16 GPUs would hold it: ")
    fitting = k3tool(capsys, "plan", "k3", "--gpus", 8, "--gpu-memory", "h200", "--margin", "1GB", "--fits")
    assert fitting.code == 1 and fitting.err.count("\n") == 2 and "--margin 1000000000" in fitting.err


def test_help_names_every_card_and_scheme():
    from k3tool.cards import CARDS
    from k3tool.cli.plan import CARDS_HELP, SCHEMES_HELP
    from k3tool.planner import SCHEMES

    assert CARDS_HELP.split(", ") == list(CARDS) and SCHEMES_HELP.split(", ") == list(SCHEMES)


def test_tables_fit_eighty_columns(capsys):
    out = k3tool(capsys, "plan", "k3", "--gpus", 72, "--node-gpus", 72, "--gpu-memory", "gb200", "--gpu-price", 3).out
    drawn = [line for line in out.splitlines() if "─" in line]
    assert len(drawn) == 4 and max(map(len, drawn)) <= 80


def test_every_kind_of_source_gives_the_same_bytes(mini: Path, tmp_path: Path, capsys, monkeypatch):
    def planned(source: object) -> tuple[object, str]:
        document = k3tool(capsys, "plan", source, "--gpus", 4, "--ep", 2, "--pp", 2, "--json").json
        return document["ranks"], document["origin"]

    ranks, origin = planned(mini)
    assert origin == "counted in the headers of 11 shards"
    assert planned(mini / "config.json") == (ranks, "computed from the configuration")
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_bytes((mini / "config.json").read_bytes())
    assert planned(bare) == (ranks, "computed from its config.json")
    partial = copy_checkpoint(mini, tmp_path / "partial")
    (partial / "model-00002-of-000011.safetensors").unlink()
    assert planned(partial) == (ranks, "computed from its config.json; 1 shard is absent")
    with serve(mini, "some/where") as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        assert planned("some/where") == (ranks, "counted in the headers of 11 shards")


def test_a_folder_does_not_hide_the_built_in_release(mini: Path, tmp_path: Path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "k3"
    folder.mkdir()

    def planned(source: str) -> tuple[str, list[str]]:
        document = k3tool(capsys, "plan", source, "--gpus", 2, "--json").json
        return document["origin"], document["notes"]

    (folder / ".k3tool").mkdir()  # where a fetch has just begun
    origin, notes = planned("k3")
    assert origin == "the built-in release" and notes[0].endswith("./k3 names what is here")
    assert k3tool(capsys, "plan", "./k3", "--gpus", 2).code == 10
    shutil.rmtree(folder)
    copy_checkpoint(mini, folder)
    origin, notes = planned("k3")
    assert origin == "counted in the headers of 11 shards" and "moonshotai/Kimi-K3" in notes[0]
    assert planned("./k3") == (origin, [])
    # The release by its repository needs no Hub; another commit of it, or another Hub, is asked.
    monkeypatch.delenv("HF_ENDPOINT", raising=False)
    for source in (
        "moonshotai/Kimi-K3",
        "https://huggingface.co/moonshotai/Kimi-K3/tree/main",
        f"hf://moonshotai/Kimi-K3@{release.revisions()[0]}",
    ):
        assert planned(source)[0] == "the built-in release"
    with serve(mini, "moonshotai/Kimi-K3") as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        assert planned("moonshotai/Kimi-K3")[0] == "counted in the headers of 11 shards"


@pytest.fixture(scope="module")
def cut(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from k3tool.synthetic import tiny_config, write_checkpoint

    folder = tmp_path_factory.mktemp("cut")
    write_checkpoint(
        folder / "whole",
        tiny_config(num_layers=5, kda_heads=4, mla_heads=4, num_experts=4, moe_intermediate_size=128, latent_size=128),
    )
    assert k3tool_process("reshard", folder / "whole", folder / "ranks", "--gpus", 4, "--tp", 2, "--ep", 2).code == 0
    return folder


def test_ranks_are_planned_as_the_checkpoint_that_they_make(cut: Path, capsys):
    def planned(source: Path) -> object:
        return k3tool(capsys, "plan", source, "--gpus", 2, "--json").json["ranks"]

    assert planned(cut / "ranks") == planned(cut / "whole")
    one = k3tool(capsys, "plan", cut / "ranks" / "rank-00001-of-00004", "--gpus", 2)
    assert one.code == 2 and "is rank-00001-of-00004 of a layout" in one.err
    assert one.err.splitlines()[1] == f"hint: name the folder that holds every rank: {cut / 'ranks'}"
    config = k3tool(capsys, "plan", cut / "ranks" / "rank-00001-of-00004" / "config.json", "--gpus", 2)
    assert config.code == 2 and config.err.splitlines()[1] == one.err.splitlines()[1]


@pytest.mark.parametrize(
    "options",
    [
        *(
            ("--experts", scheme)
            for scheme in ("int4", "int8", "fp8-channel", "fp8-block", "nf4", "fp4", "bf16", "nvfp4")
        ),
        ("--experts", "int4", "--latent", "fp8-channel"),
        ("--experts", "nf4", "--latent", "int8", "--shared", "fp8-channel"),
        ("--latent", "nf4", "--attention", "fp8-channel"),
        ("--experts", "fp8-channel", "--latent", "fp8-channel", "--shared", "int8", "--attention", "int4"),
        ("--latent", "mxfp4"),
    ],
    ids=" ".join,
)
def test_quantized_checkpoints_are_planned_alike_wherever_they_are(
    cut: Path, tmp_path: Path, options, capsys, monkeypatch
):
    """By headers here, by headers through a Hub, and by the quantization_config alone: equal to the byte."""
    folder = tmp_path / "q"
    ran = k3tool(capsys, "quantize", cut / "whole", folder, *options)
    assert ran.code == 0, ran.err

    def planned(source: object) -> tuple[list[dict[str, int]], object]:
        document = k3tool(capsys, "plan", source, "--gpus", 2, "--ep", 2, "--json").json
        return [rank["components"] for rank in document["ranks"]], document["notes"]

    here = planned(folder)
    assert here[0] != planned(cut / "whole")[0] and here[1] == []
    assert planned(folder / "config.json") == here
    with serve(folder, "some/where") as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        assert planned("some/where") == here


def test_other_storage_is_planned(capsys):
    def largest(*options: str) -> int:
        document = k3tool(capsys, "plan", "k3", "--gpus", 16, *options, "--json").json
        return max(rank["weights_bytes"] for rank in document["ranks"])

    assert largest("--experts", "nvfp4") > largest() > largest("--latent", "nf4")
    states = k3tool(capsys, "plan", "k3", "--gpus", 16, "--tp", 8, "--experts", "nf4", "--json")
    assert states.code == 14 and "TP 8 cannot divide" in states.json["error"]["message"]


@pytest.mark.parametrize(
    ("options", "code", "says"),
    [
        (("k3", "--gpus", "16", "--tp", "5", "--ep", "2"), 2, "does not make 16 GPUs"),
        (("k3",), 2, "neither GPUs nor their memory"),
        (("k3", "--gpus", "0"), 2, "gpus"),
        (("k3", "--gpus", "8", "--gpu-memory", "many"), 2, "unknown GPU memory 'many'"),
        (("k3", "--gpus", "8", "--context", "2000000"), 2, "--context 2000000 is beyond the model's 1048576 positions"),
        (("k3", "--gpus", "8", "--sequences", "0"), 2, "sequences"),
        (("k3", "--gpus", "8", "--experts", "int3"), 2, "unknown scheme 'int3'"),
        (("k3", "--gpus", "8", "--gpu-price", "-1"), 2, "price"),
        (("k3", "--gpus", "8", "--gpu-memory=-5GB"), 2, "a size is positive: '-5GB'"),
        (("k3", "--gpus", "8", "--gpu-memory", "h100", "--margin", "90GB"), 2, "leaves nothing of h100"),
        (("k3", "--gpus", "97"), 14, "no layout of 97 GPUs exists: TP has to divide the 96 heads"),
        (("k3", "--gpus", "8", "--report", "/nowhere/at/all.html"), 2, "cannot write"),
        (("k3", "--gpus", "5", "--tp", "5"), 14, "TP 5 does not divide the KDA heads (96)"),
        (("k3", "--gpus", "9", "--ep", "9"), 14, "EP 9 does not divide the experts (896)"),
        (("k3", "--gpus", "94", "--pp", "94"), 14, "PP 94 has more stages than the model has layers (93)"),
        (("k3", "--gpus", "64", "--tp", "64"), 14, "TP 64 does not divide"),
        (("absent-folder", "--gpus", "8"), 10, "does not exist"),
    ],
)
def test_refusals(capsys, options: tuple[str, ...], code: int, says: str):
    ran = k3tool(capsys, "plan", *options)
    assert ran.code == code and ran.out == ""
    cause, hint = ran.err.splitlines()
    assert cause.startswith("error: ") and says in cause and hint.startswith("hint: ")
    failure = k3tool(capsys, "plan", *options, "--json").json
    assert failure["ok"] is False and failure["error"]["code"] == code


def test_impossible_layouts_name_the_nearest_possible(capsys):
    error = k3tool(capsys, "plan", "k3", "--gpus", 7, "--tp", 7, "--json").json["error"]
    assert "possible: TP" in error["hint"] and {"tp", "ep", "pp"} == set(error["details"]["nearest"][0])
    assert len(error["details"]["reasons"]) >= 2


def test_damaged_sources(mini: Path, tmp_path: Path, capsys):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert k3tool(capsys, "plan", tmp_path, "--gpus", 2).code == 11
    assert k3tool(capsys, "plan", tmp_path / "config.json", "--gpus", 2).code == 11
    copy = copy_checkpoint(mini, tmp_path / "copy")
    with open(copy / "model-00003-of-000011.safetensors", "r+b") as file:
        file.truncate(9000)
    ran = k3tool(capsys, "plan", copy, "--gpus", 2)
    assert ran.code == 11 and "model-00003-of-000011.safetensors" in ran.err


@pytest.mark.parametrize("name", ["num_experts", "num_hidden_layers", "vocab_size", "moe_intermediate_size"])
def test_numbers_that_no_model_has_are_refused_before_anything_is_counted(name: str, tmp_path: Path, capsys):
    document = release.config_dict()
    document["text_config"][name] = 10_000_000_000
    (tmp_path / "config.json").write_text(json.dumps(document))
    for options in (("--gpus", 16), ("--gpu-memory", "h200")):
        ran = k3tool(capsys, "plan", tmp_path / "config.json", *options)
        assert ran.code == 11 and f"{name} must be a whole number of at most" in ran.err


def test_report(tmp_path: Path, capsys):
    page = tmp_path / "plan.html"
    ran = k3tool(capsys, "plan", "k3", "--gpus", 16, "--report", page, "--json")
    assert ran.code == 0 and ran.json["report"] == str(page)
    text = page.read_text()
    assert text.startswith("<!doctype html>") and "ranks 0-15 (16)" in text and "131,072 tokens" in text
    assert k3tool(capsys, "plan", "k3", "--gpus", 8, "--report", page).code == 0  # a page of its own is replaced
    assert "ranks 0-7 (8)" in page.read_text()


def test_a_report_replaces_no_other_file(tmp_path: Path, capsys):
    shard = tmp_path / "model.safetensors"
    shard.write_bytes(b"precious")
    asked = ("plan", "k3", "--gpus", 8, "--report", shard)
    ran = k3tool(capsys, *asked)
    assert ran.code == 2 and "no report of k3tool plan" in ran.err and shard.read_bytes() == b"precious"
    assert k3tool(capsys, *asked, "--overwrite").code == 0 and shard.read_text().startswith("<!doctype html>")
    shard.write_bytes(b"")
    assert k3tool(capsys, *asked).code == 0  # nothing is lost with an empty file


def test_neither_torch_nor_the_network_is_needed():
    code = "import sys; from k3tool.cli import app; app.run(['plan', 'k3', '--gpus', '8', '--json']); " + (
        "assert not {'torch', 'huggingface_hub'} & set(sys.modules), sorted(sys.modules)"
    )
    import subprocess
    import sys

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["ok"] is True
    assert k3tool_process("plan", "--help").code == 0
