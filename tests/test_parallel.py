"""Ranks against one process: the same logits and tokens in every layout, one voice, one exit code, and no hang."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from k3tool.checkpoint.reader import Checkpoint
from k3tool.errors import CapacityError
from k3tool.generate import Session, run_session
from k3tool.layout import Layout
from k3tool.model.divided import row_linear
from k3tool.model.load import prepare_model
from k3tool.parallel.groups import Group
from k3tool.parallel.link import joined
from k3tool.reshard import Request, reshard
from k3tool.synthetic import tiny_config, write_checkpoint
from k3tool.tokenizer import load_tokenizer
from tests.helpers import k3tool
from tests.model.edit import edit_checkpoint
from tests.ranks import (
    WAIT_S,
    begun,
    break_rank,
    chatter,
    command_line,
    free_port,
    give_way_for_long,
    hang,
    run_folders,
    started,
    talk,
    until_written,
)

IDS = [5, 600, 17, 3, 3, 256, 500, 44, 8]
TEXT = ",".join(map(str, IDS))
WIDE = {"moe_intermediate_size": 64, "mla_heads": 4, "kda_heads": 4, "vision": False}


def edited(config: dict[str, Any], text: dict[str, Any] | None = None, **linear: Any) -> dict[str, Any]:
    config["text_config"].update(text or {})
    config["text_config"]["linear_attn_config"].update(linear)
    return config


def kimi_linear() -> dict[str, Any]:
    """The flat form: no Attention Residuals, no latent, SiLU, softplus gate, low-rank output gate, plain experts."""
    config = tiny_config(num_layers=4, block_size=None, latent_size=None, q_lora_rank=None, vocab_size=639, **WIDE)
    text = {"hidden_act": "silu", "mla_use_output_gate": False, "quantization_config": None}
    return edited(config, text, gate_lower_bound=None, use_full_rank_gate=False)["text_config"]


CHECKPOINTS = {
    "released": lambda: tiny_config(num_layers=5, vocab_size=639, **WIDE),
    "kimi-linear": kimi_linear,
    "no latent": lambda: tiny_config(num_layers=4, vocab_size=640, latent_size=None, **WIDE),
    "no shared": lambda: tiny_config(num_layers=4, vocab_size=640, num_shared_experts=0, block_size=1, **WIDE),
    "tied": lambda: {**edited(tiny_config(num_layers=4, vocab_size=639, block_size=2, **WIDE), {"tie_word_embeddings": True})},
}  # fmt: skip
LAYOUTS = [
    ("released", Layout(tp=2)), ("released", Layout(ep=2)), ("released", Layout(pp=2)),
    ("kimi-linear", Layout(tp=2)), ("kimi-linear", Layout(ep=2)), ("kimi-linear", Layout(pp=2)),
    ("no latent", Layout(tp=2)), ("no latent", Layout(ep=2)), ("no shared", Layout(tp=2)),
    ("tied", Layout(pp=2)),
    ("released", Layout(tp=2, ep=2)), ("released", Layout(tp=2, pp=2)), ("released", Layout(ep=2, pp=2)),
    ("released", Layout(pp=4)), ("kimi-linear", Layout(tp=4)), ("released", Layout(ep=4)), ("kimi-linear", Layout(tp=2, ep=2)),
    ("tied", Layout(tp=2, pp=2)),
]  # fmt: skip


def name_of(checkpoint: str, layout: Layout) -> str:
    return f"{checkpoint} {layout}".replace(" x ", "-").replace(" ", "-")


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every checkpoint, whole and divided."""
    folder = tmp_path_factory.mktemp("parallel")
    for number, (name, make) in enumerate(CHECKPOINTS.items()):
        write_checkpoint(folder / name, make(), seed=number, tokenizer=name == "released")
    for name, layout in LAYOUTS:
        reshard(folder / name, folder / name_of(name, layout), Request(tp=layout.tp, ep=layout.ep, pp=layout.pp))
    return folder


def alone(folder: Path, *, dtype: str = "float32", new: int = 4, **options: Any) -> Any:
    session = Session.open(folder, device="cpu", dtype=dtype, **options)
    return run_session(session, IDS, max_new_tokens=new, keep_logits=True, stop_at_end=False)


@pytest.fixture(scope="module")
def whole(home: Path) -> dict[str, Any]:
    """What one process computes."""
    return {name: alone(home / name) for name in CHECKPOINTS}


SAMPLING = {"temperature": 3.0, "top_p": 0.9, "seed": 11, "max_new_tokens": 8}


@pytest.fixture(scope="module")
def golden(home: Path, mini: Path) -> dict[str, torch.Tensor]:
    """The golden checkpoint, divided, and its results. Its three heads cannot be divided by two."""
    for layout in (Layout(ep=2), Layout(pp=2)):
        reshard(mini, home / name_of("mini", layout), Request(ep=layout.ep, pp=layout.pp))
    return load_file(mini / "golden.safetensors")


def jobs_of(home: Path, ranks: int, golden: dict[str, torch.Tensor]) -> list[tuple[str, str, dict[str, Any]]]:
    jobs: list[tuple[str, str, dict[str, Any]]] = [
        (name_of(name, layout), str(home / name_of(name, layout)), {})
        for name, layout in LAYOUTS
        if layout.ranks == ranks
    ]
    if ranks == 2:
        tp, ep, pp = (str(home / name_of("released", layout)) for layout in (Layout(2), Layout(1, 2), Layout(1, 1, 2)))
        jobs += [
            ("bfloat16", tp, {"dtype": "bfloat16"}),
            ("three layers", pp, {"layers": 3}),
            ("sampled", tp, {"sampling": SAMPLING}),
            ("sampled stages", pp, {"sampling": SAMPLING}),
            *((name, str(home / name), golden_options(golden)) for name in GOLDEN_NAMES),
            ("streamed", ep, {"memory_bytes": streaming_budget(home / name_of("released", Layout(1, 2)))}),
        ]
    return jobs


GOLDEN_NAMES = [name_of("mini", layout) for layout in (Layout(ep=2), Layout(pp=2))]


def golden_options(golden: dict[str, torch.Tensor]) -> dict[str, Any]:
    sampling = {"max_new_tokens": len(golden["greedy_tokens"])}
    return {"ids": golden["input_ids"].tolist(), "sampling": sampling}


def streaming_budget(folder: Path) -> int:
    """Midway between all experts of a rank and one of every layer."""
    layout = Layout(ep=2)
    own = Checkpoint.open(folder / "rank-00000-of-00002")
    with pytest.raises(CapacityError) as refused:
        prepare_model(
            own, device=torch.device("cpu"), dtype=torch.float32, memory_bytes=1, layout=layout, place=layout.place(0)
        )
    details = refused.value.details
    return (details["needed_bytes"] + details["least_bytes"]) // 2


@pytest.fixture(scope="module")
def results(home: Path, golden: dict[str, torch.Tensor]) -> Path:
    """Logits and tokens of every job, by two and by four ranks: one start each."""
    out = home / "results"
    out.mkdir()
    for count in (2, 4):
        with started(
            home / f"printed-{count}", count, run_folders, jobs_of(home, count, golden), IDS, str(out)
        ) as ranks:
            assert ranks.wait().codes == [0] * count, ranks.err
            assert ranks.out == [""] * count
    return out


@pytest.mark.parametrize(("checkpoint", "layout"), LAYOUTS, ids=lambda value: str(value))
def test_ranks_compute_what_one_process_computes(checkpoint: str, layout: Layout, results: Path, whole: dict[str, Any]):
    found, expected = load_file(results / f"{name_of(checkpoint, layout)}.safetensors"), whole[checkpoint]
    assert found["tokens"].tolist() == [expected.token_ids] * layout.ranks
    for name in ("logits", "decode_logits"):
        wanted = getattr(expected, name)
        assert found[name].shape == wanted.shape
        if layout.tp == layout.ep == 1:  # stages compute the same in the same order
            assert torch.equal(found[name], wanted)
        else:
            assert relative(found[name], wanted) < 1e-5


@pytest.mark.parametrize("name", GOLDEN_NAMES)
def test_golden_results(name: str, results: Path, golden: dict[str, torch.Tensor]):
    found = load_file(results / f"{name}.safetensors")
    assert found["tokens"].tolist() == [golden["greedy_tokens"].tolist()] * 2
    assert relative(found["logits"], golden["logits"]) < 5e-5
    assert relative(found["decode_logits"], golden["decode_logits"]) < 1e-4


def test_first_layers_only(results: Path, home: Path):
    """The second stage has none of them and passes on what it gets."""
    expected = alone(home / "released", layers=3)
    found = load_file(results / "three layers.safetensors")
    assert torch.equal(found["logits"], expected.logits) and found["tokens"].tolist() == [expected.token_ids] * 2


def test_partial_sums_are_not_rounded():
    class Other(Group):
        size = 2

        def sum(self, x: torch.Tensor) -> torch.Tensor:
            assert x.dtype == torch.float32
            return x - 1000.25

    found = row_linear(torch.ones(1, 1, dtype=torch.bfloat16), torch.tensor([[1000.5]]), Other())
    assert found.dtype == torch.bfloat16 and found.item() == 0.25


def test_bfloat16(results: Path, home: Path, whole: dict[str, Any]):
    """Two ranks are as near to float32 as one process is."""
    exact = whole["released"].logits
    error = relative(alone(home / "released", dtype="bfloat16").logits, exact)
    assert 1e-3 < error < 0.1
    assert relative(load_file(results / "bfloat16.safetensors")["logits"], exact) < 1.25 * error


def test_one_rank_samples(results: Path, home: Path):
    session = Session.open(home / "released", device="cpu", dtype="float32")
    expected = run_session(session, IDS, stop_at_end=False, **SAMPLING).token_ids
    for name in ("sampled", "sampled stages"):
        assert load_file(results / f"{name}.safetensors")["tokens"].tolist() == [expected] * 2


def test_experts_stream_on_every_rank(results: Path, whole: dict[str, Any]):
    found = load_file(results / "streamed.safetensors")
    assert relative(found["logits"], whole["released"].logits) < 1e-5
    assert found["tokens"].tolist() == [whole["released"].token_ids] * 2


# The command line, and how it ends


def run_arguments(folder: Path, *options: object) -> list[str]:
    return ["run", str(folder), "--input-ids", TEXT, "--dtype", "float32", "--device", "cpu", *map(str, options)]


def torchrun(count: int, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(count), "--master-port",
               str(free_port()), "-m", "k3tool", *map(str, arguments)]  # fmt: skip
    return subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )


@pytest.mark.parametrize(("count", "layout"), [(2, Layout(tp=2)), (4, Layout(tp=2, pp=2))])
def test_under_torchrun(count: int, layout: Layout, home: Path, whole: dict[str, Any], tmp_path: Path):
    out = tmp_path / "logits.safetensors"
    arguments = run_arguments(home / name_of("released", layout), "--max-new-tokens", 4, "--logits-out", out, "--json")
    done = torchrun(count, *arguments)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    expected = whole["released"]
    assert document["token_ids"] == expected.token_ids and document["input_ids"] == IDS
    assert document["layout"] == layout.as_json() and document["layers"] == 5 and len(document["ranks"]) == count
    assert sum(rank["kda_state_bytes"] for rank in document["ranks"]) == expected.memory.kda_state_bytes
    assert done.stderr.count("decode 3 tokens") == 1 and isinstance(document["text"], str)
    found = load_file(out)
    assert relative(found["logits"], expected.logits) < 1e-5
    assert relative(found["decode_logits"], expected.decode_logits) < 1e-5


def test_a_stop_text_ends_all_ranks(home: Path, whole: dict[str, Any], tmp_path: Path):
    """Only rank 0 knows the text."""
    tokens = whole["released"].token_ids
    stop = load_tokenizer(home / "released").decode(tokens[1:2])
    arguments = run_arguments(home / name_of("released", Layout(tp=2)), "--ignore-eos", "--stop", stop, "--json")
    with started(tmp_path, 2, command_line, *arguments) as ranks:
        assert ranks.wait().codes == [0, 0], ranks.err
    document = json.loads(ranks.out[0])
    assert document["token_ids"] == tokens[:2] and document["stop_reason"] == stop


def test_kernels_are_checked_on_every_rank(home: Path, tmp_path: Path):
    arguments = run_arguments(home / name_of("released", Layout(pp=2)), "--max-new-tokens", 1, "--check", "--json")
    with started(tmp_path, 2, command_line, *arguments) as ranks:
        assert ranks.wait().codes == [0, 0], ranks.err
    checks = json.loads(ranks.out[0])["checks"]
    assert {check["layer"] for check in checks} == {*range(5), None} and all(check["ok"] for check in checks)
    assert len(checks) == len({(check["layer"], check["kernel"]) for check in checks})


def test_text_is_shown_by_one_rank(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = home / name_of("released", Layout(ep=2))
    options = ["--prompt", "the quick fox", "--max-new-tokens", "6", "--dtype", "float32"]
    expected = k3tool(capsys, "run", home / "released", *options)
    with started(tmp_path, 2, command_line, "run", folder, *options) as ranks:
        assert ranks.wait().codes == [0, 0], ranks.err
    assert ranks.out == [expected.out, ""] and ranks.err[1] == ""
    assert "decode 5 tokens" in ranks.err[0]


@pytest.mark.parametrize(
    ("folder", "environment", "says", "hint"),
    [
        (name_of("released", Layout(tp=2)), {}, "holds 2 ranks (TP2 x EP1 x PP1), and this is one process",
         "start 2 processes by torchrun (--nproc-per-node 2"),
        (name_of("released", Layout(tp=2)), {"WORLD_SIZE": "3", "RANK": "0"}, "holds 2 ranks (TP2 x EP1 x PP1), and 3 proc",
         "start 2 processes by torchrun (--nproc-per-node 2"),
        ("released", {"WORLD_SIZE": "2", "RANK": "0"}, "is a whole checkpoint, and 2 processes were started",
         "run it in one process, without torchrun"),
        (name_of("released", Layout(tp=2)) + "/rank-00001-of-00002", {}, "is the folder of rank 1 of 2",
         "by torchrun with 2 processes"),
        ("released", {"WORLD_SIZE": "2", "RANK": ""}, "WORLD_SIZE is '2', but RANK are not set", "torchrun"),
        ("released", {"WORLD_SIZE": "2", "RANK": "2"}, "RANK is '2', expected 0 to 1", "torchrun"),
        ("released", {"WORLD_SIZE": "-2", "RANK": "0"}, "WORLD_SIZE is '-2'", "torchrun"),
    ],
)  # fmt: skip
def test_a_wrong_number_of_processes_is_refused(
    folder: str, environment: dict[str, str], says: str, hint: str, home: Path, capsys: Any, monkeypatch: Any
):
    monkeypatch.setattr("k3tool.parallel.world.GIVE_WAY_S", 0.0)
    monkeypatch.setattr("k3tool.parallel.link.joined", lambda *_, **__: pytest.fail("ranks were to meet"))
    launch = {"TORCHELASTIC_RUN_ID": "none"} if environment else {}
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", **launch, **environment}.items():
        monkeypatch.setenv(name, value)
    if not environment:
        monkeypatch.delenv("WORLD_SIZE", raising=False)
        monkeypatch.setattr("k3tool.parallel.link.joined", joined)
    ran = k3tool(capsys, *run_arguments(home / folder, "--json"))
    assert ran.code == 2 and ran.json["error"]["code"] == 2
    cause, remedy = ran.err.splitlines()
    assert cause.startswith("error: ") and says in cause
    assert remedy.startswith("hint: ") and hint in remedy


LEFT_OVER = [
    {"RANK": "0", "WORLD_SIZE": "2"},
    {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"},
    {"RANK": "0", "WORLD_SIZE": "2", "SLURM_PROCID": "0", "SLURM_NTASKS": "2"},
    {"RANK": "", "WORLD_SIZE": "x"},
]


@pytest.mark.parametrize("environment", LEFT_OVER)
def test_variables_that_were_left_over_make_no_ranks(
    environment: dict[str, str], home: Path, capsys: Any, monkeypatch: Any
):
    """Of a notebook or a batch script: nobody else is there, so nobody is waited for."""
    monkeypatch.setattr("k3tool.parallel.world.GIVE_WAY_S", 1e6)
    monkeypatch.setattr("k3tool.parallel.link._meet", lambda *_: pytest.fail("ranks were to meet"))
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    ran = k3tool(capsys, *run_arguments(home / name_of("released", Layout(tp=2)), "--json"))
    said = [line for line in ran.err.splitlines() if "no launcher (torchrun) started this process with others" in line]
    assert ran.code == 2 and "holds 2 ranks (TP2 x EP1 x PP1), and this is one process" in ran.err
    assert len(said) == (environment["WORLD_SIZE"] == "2")
    ran = k3tool(capsys, *run_arguments(home / "released", "--json", "--max-new-tokens", 1))
    assert ran.code == 0 and ran.json["ok"]


def test_the_variables_of_a_torchrun_that_is_gone_are_told_at_once(home: Path, capsys: Any, monkeypatch: Any):
    launch = {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_USE_AGENT_STORE": "True", "RANK": "0", "WORLD_SIZE": "2",
              "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}  # fmt: skip
    for name, value in launch.items():
        monkeypatch.setenv(name, value)
    ran = k3tool(capsys, *run_arguments(home / name_of("released", Layout(tp=2))))
    assert ran.code == 2 and "left over from a launch that has ended" in ran.err and launch["MASTER_PORT"] in ran.err


def test_other_ranks_leave_the_word_to_the_first(home: Path, tmp_path: Path):
    """Refused before they meet: the others wait for rank 0 to be done (torchrun ends them then), before they speak."""
    arguments = run_arguments(home / name_of("released", Layout(tp=2)))
    with started(tmp_path, 3, give_way_for_long, *arguments) as ranks:
        ranks.processes[0].join(WAIT_S)
        assert ranks.processes[0].exitcode == 2 and ranks.processes[1].is_alive() and ranks.processes[2].is_alive()
        assert "holds 2 ranks" in ranks.err[0] and ranks.err[1:] == ["", ""]


def test_ranks_hear_the_same(tmp_path: Path):
    with started(tmp_path, 3, talk, str(tmp_path)) as ranks:
        assert ranks.wait().codes == [0, 0, 0], ranks.err
    heard = [json.loads((tmp_path / f"{rank}.json").read_bytes()) for rank in range(3)]
    for rank, own in enumerate(heard):
        assert own["long"] == {"text": "é" * 3000, "rank": 0} and own["after"] == 7 and own["own"] == 10 * rank
        assert own["short"] == ["y" * length for length in (0, 244, 245, 246, 247, 248)]
        assert own["gathered"] == [{"rank": other, "pad": "é" * (100 * other)} for other in range(3)]
        cause = "cause 1" if rank == 1 else "rank 1: cause 1"  # the lowest rank that failed
        assert own["failure"] == ["CheckpointCorrupt", 11, cause, "remedy 1", False]


def test_no_one_comes(home: Path, tmp_path: Path):
    arguments = run_arguments(home / name_of("released", Layout(tp=2)))
    with started(tmp_path, 1, command_line, *arguments, WORLD_SIZE="2", K3TOOL_RANK_TIMEOUT="1") as ranks:
        assert ranks.wait().codes == [13]
    assert "rank 0 of 2 did not meet the others at 127.0.0.1:" in ranks.err[0]


def test_an_absent_rank_folder_ends_all_ranks_with_one_message(home: Path, tmp_path: Path):
    folder = tmp_path / "ranks"
    shutil.copytree(home / name_of("released", Layout(tp=2)), folder)
    shutil.rmtree(folder / "rank-00001-of-00002")
    with started(tmp_path / "printed", 2, command_line, *run_arguments(folder, "--json")) as ranks:
        assert ranks.wait().codes == [10, 10], ranks.err
    assert json.loads(ranks.out[0])["error"]["code"] == 10 and ranks.out[1] == ranks.err[1] == ""
    cause, hint = ranks.err[0].splitlines()
    assert "rank 1: " in cause and "lacks the folder of rank 1: rank-00001-of-00002" in cause and "--rank 1" in hint


def test_a_damaged_rank_ends_all_ranks_with_one_message(home: Path, tmp_path: Path):
    """Found while weights are read, when the other rank has read its own and waits."""
    folder = tmp_path / "ranks"
    shutil.copytree(home / name_of("released", Layout(tp=2)), folder)
    own = folder / "rank-00001-of-00002"
    edit_checkpoint(
        own,
        lambda tensors: tensors["language_model.model.layers.1.block_sparse_moe.experts.3.w1.weight_scale"].fill_(255),
    )
    with started(tmp_path / "printed", 2, command_line, *run_arguments(folder)) as ranks:
        assert ranks.wait().codes == [11, 11], ranks.err
    assert ranks.err[0].startswith("error: rank 1: ") and "byte 255" in ranks.err[0] and ranks.err[1] == ""


def test_folders_of_other_ranks_are_refused(home: Path, tmp_path: Path):
    folder = tmp_path / "ranks"
    shutil.copytree(home / name_of("released", Layout(tp=2)), folder)
    shutil.rmtree(folder / "rank-00001-of-00002")
    shutil.copytree(folder / "rank-00000-of-00002", folder / "rank-00001-of-00002")
    with started(tmp_path / "printed", 2, command_line, *run_arguments(folder)) as ranks:
        assert ranks.wait().codes == [11, 11], ranks.err
    assert "implies rank 1 of 2 (TP2 x EP1 x PP1), its own config.json says rank 0 of 2" in ranks.err[0]


@pytest.fixture(scope="module")
def endless(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ranks that generate until they are stopped: they have no end token. Without tokenizers, ids are what is printed."""
    folder = tmp_path_factory.mktemp("endless")
    shutil.copytree(home / name_of("released", Layout(tp=2)), folder, dirs_exist_ok=True)
    for name in ("generation_config.json", "tiktoken.model"):
        for file in folder.rglob(name):
            file.unlink()
    for file in folder.rglob("config.json"):
        config = json.loads(file.read_bytes())
        config["eos_token_id"] = config["text_config"]["eos_token_id"] = None
        file.write_text(json.dumps(config))
    for file in folder.rglob("tiktoken.model"):  # every rank has one
        file.unlink()
    return folder


def test_a_rank_that_does_not_answer_is_lost(endless: Path, tmp_path: Path):
    arguments = run_arguments(endless, "--max-new-tokens", 10**6)
    with started(tmp_path, 2, command_line, *arguments, K3TOOL_RANK_TIMEOUT="6") as ranks:
        ranks.until_printed(0, 20)
        ranks.kill(1, signal.SIGSTOP)
        ranks.processes[0].join(WAIT_S)
        assert ranks.processes[0].exitcode == 13, ranks.err
    assert "lost contact with another rank" in ranks.err[0] and ranks.err[0].count("error: ") == 1


def is_the_loss(text: str, victim: int, pid: int) -> bool:
    """Whether this is the one document of a run that lost a rank after its third token."""
    document = json.loads(text)
    error = document["error"]
    assert (document["ok"], error["code"], error["type"], error["details"]) == (False, 13, "RankLost", {"rank": victim})
    assert error["message"].startswith(f"rank {victim}: contact lost: its process {pid} ended without a word")
    assert document["input_ids"] == IDS and len(document["token_ids"]) >= 2
    return True


@pytest.mark.parametrize(
    ("function", "victim"), [(begun, 0), (begun, 1), (partial(hang, "1"), 0), (partial(hang, "0"), 1)],
    ids=["first", "second", "first, the other is busy", "second, the other is busy"],
)  # fmt: skip
def test_a_killed_rank_ends_the_other(function: Callable[..., None], victim: int, endless: Path, tmp_path: Path):
    """Also where that one waits for nobody, and without waiting for any time limit."""
    arguments = run_arguments(endless, "--max-new-tokens", 10**6, "--json")
    with started(tmp_path, 2, function, str(tmp_path), *arguments, K3TOOL_RANK_TIMEOUT="10000") as ranks:
        ranks.until_begun(tmp_path)
        ranks.kill(victim)
        survivor = 1 - victim
        ranks.processes[survivor].join(WAIT_S)
        assert ranks.processes[survivor].exitcode == 13, ranks.err
    assert is_the_loss(ranks.out[survivor], victim, ranks.processes[victim].pid)
    assert ranks.err[survivor].count("error: ") == 1 and ranks.out[victim] == ranks.err[victim] == ""


def test_what_launchers_do_when_a_rank_is_killed_is_no_interrupt(endless: Path, tmp_path: Path):
    """They end the others by SIGTERM, before these have found out themselves."""
    arguments = run_arguments(endless, "--max-new-tokens", 10**6, "--json")
    with started(tmp_path, 2, partial(hang, "0"), str(tmp_path), *arguments) as ranks:
        ranks.until_begun(tmp_path)
        ranks.kill(1)
        ranks.processes[1].join(WAIT_S)
        ranks.kill(0, signal.SIGTERM)
        ranks.processes[0].join(WAIT_S)
        assert ranks.processes[0].exitcode == 13, ranks.err
    assert is_the_loss(ranks.out[0], 1, ranks.processes[1].pid) and ranks.err[0].count("error: ") == 1


def test_of_many_ranks_one_tells_of_a_killed_one(home: Path, tmp_path: Path):
    folder = tmp_path / "ranks"
    shutil.copytree(home / name_of("released", Layout(pp=4)), folder)
    arguments = run_arguments(folder, "--ignore-eos", "--max-new-tokens", 10**6, "--json")
    with started(tmp_path, 4, begun, str(tmp_path), *arguments) as ranks:
        ranks.until_begun(tmp_path)
        ranks.kill(0)
        assert ranks.wait().codes == [-signal.SIGKILL, 13, 13, 13], ranks.err
    assert is_the_loss(ranks.out[1], 0, ranks.processes[0].pid) and ranks.out[2:] == ["", ""]
    assert [text.count("error: ") for text in ranks.err] == [0, 1, 0, 0]


def test_a_rank_that_is_killed_under_torchrun(endless: Path, tmp_path: Path):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port()),
               "-m", "tests.ranks", "begun", str(tmp_path), *run_arguments(endless, "--max-new-tokens", 10**6, "--json")]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as run:
        pids = until_written(tmp_path, 2)
        os.kill(pids[0], signal.SIGKILL)
        out, err = run.communicate(timeout=WAIT_S)
    assert run.returncode == 1 and is_the_loss(out, 0, pids[0])
    assert sum(line.startswith("error: ") for line in err.splitlines()) == 1


def test_what_libraries_print_is_not_in_the_document(home: Path, tmp_path: Path):
    arguments = run_arguments(home / name_of("released", Layout(tp=2)), "--max-new-tokens", 1, "--json")
    with started(tmp_path, 2, chatter, *arguments) as ranks:
        assert ranks.wait().codes == [0, 0], ranks.err
    assert json.loads(ranks.out[0])["ok"] is True and ranks.out[1] == ""
    assert all("[Gloo]" in text for text in ranks.err)


def test_an_interrupt_ends_all_ranks(endless: Path, tmp_path: Path):
    arguments = run_arguments(endless, "--max-new-tokens", 10**6)
    for who in ((0, 1), (1,)):
        with started(tmp_path / str(who), 2, command_line, *arguments) as ranks:
            ranks.until_printed(0, 20)
            for rank in who:
                ranks.kill(rank, signal.SIGINT)
            assert ranks.wait().codes == [130, 130], ranks.err
        assert ranks.err[0].endswith("error: interrupted\nhint: run the same command again: it starts over\n")
        assert ranks.out[0].endswith("\n") and len(ranks.out[0].split()) > 1
        assert ranks.err[1] == ranks.out[1] == ""


@pytest.mark.parametrize("broken", [0, 1])
def test_a_bug_on_one_rank_ends_all(broken: int, endless: Path, tmp_path: Path):
    arguments = run_arguments(endless, "--max-new-tokens", 10, "--json")
    with started(tmp_path, 2, break_rank, broken, *arguments) as ranks:
        assert ranks.wait().codes == [70, 70], ranks.err
    assert json.loads(ranks.out[0])["error"]["code"] == 70 and ranks.out[1] == ""
    assert "Traceback" in ranks.err[broken] and "ZeroDivisionError: on purpose" in ranks.err[broken]
    assert [text.count("error: ") for text in ranks.err] == [1, 0]
