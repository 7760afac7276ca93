"""Played back decode steps give the bits of ordinary ones, whatever happens between them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from k3tool.generate import Session
from k3tool.kernels import cpu as compiled
from k3tool.kernels.dispatch import use
from k3tool.model import replay
from k3tool.model.cache import FIRST_CAPACITY
from k3tool.model.replay import decode_step
from k3tool.synthetic import tiny_config, write_checkpoint

if not compiled.available():
    pytest.skip("compiled kernels are not available here", allow_module_level=True)

from k3tool.kernels.cpu.tape import Recorder

CONFIGS = {
    "released": {},
    "plain residuals, one shared expert": {"block_size": None, "num_shared_experts": 1},
    "no query rank, no latent": {"q_lora_rank": None, "latent_size": None, "num_shared_experts": 0},
    "odd widths": {"hidden_size": 72, "kda_heads": 5, "kda_head_dim": 16, "kv_lora_rank": 24, "v_head_dim": 24},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for name, change in CONFIGS.items():
        made[name] = tmp_path_factory.mktemp("checkpoint")
        write_checkpoint(made[name], tiny_config(**{"num_layers": 6, "vocab_size": 320, **change}), seed=4)
    return made


def ordinary(session: Session, token: int, cache) -> torch.Tensor:
    ids = torch.tensor([token])
    return session.model.logits(session.model.forward(ids, cache))[0]


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_bits_of_ordinary_steps(folders: dict[str, Path], name: str, dtype: str) -> None:
    session = Session.open(folders[name], device="cpu", dtype=dtype)
    session.prefill(range(20))
    twin = session.cache.clone()
    assert twin.recorded is None
    for token in range(30, 45):
        assert torch.equal(decode_step(session.model, token, session.cache), ordinary(session, token, twin))
    recorded = session.cache.recorded
    assert recorded is not None and recorded.problem == "" and recorded.tape is not None
    assert session.cache.position == twin.position
    for held, other in zip(session.cache.layers, twin.layers, strict=True):
        if hasattr(held, "state"):
            assert torch.equal(held.state, other.state) and torch.equal(held.history, other.history)


def test_growth_prompts_and_copies_in_between(folders: dict[str, Path]) -> None:
    session = Session.open(folders["released"], device="cpu", dtype="float32")
    model, cache = session.model, session.cache
    twin = cache.clone()
    for count in (3, 1, FIRST_CAPACITY - 6, 2):
        ids = torch.arange(count) % 300
        model.forward(ids, cache)
        model.forward(ids, twin)
        for token in (1, 2, 3):
            assert torch.equal(decode_step(model, token, cache), ordinary(session, token, twin))
    copy = cache.clone()
    kept = decode_step(model, 9, cache)
    assert torch.equal(decode_step(model, 9, copy), kept)
    assert torch.equal(decode_step(model, 8, cache), decode_step(model, 8, copy))
    assert torch.equal(kept, ordinary(session, 9, twin))  # what was returned is nobody's working memory


def test_two_sequences_in_turns(folders: dict[str, Path]) -> None:
    session = Session.open(folders["released"], device="cpu", dtype="bfloat16")
    caches = [session.model.new_cache() for _ in range(2)]
    twins = [session.model.new_cache() for _ in range(2)]
    for step in range(8):
        for index in range(2):
            token = 17 * step + index
            found = decode_step(session.model, token, caches[index])
            assert torch.equal(found, ordinary(session, token, twins[index]))
            recorded = caches[index].recorded
            assert recorded is not None and recorded.problem == ""


def test_the_reference_is_never_played_back(folders: dict[str, Path]) -> None:
    session = Session.open(folders["released"], device="cpu", dtype="float32")
    session.prefill(range(4))
    decode_step(session.model, 5, session.cache)
    played = session.cache.recorded
    twin = session.cache.clone()
    with use("reference"):
        found = decode_step(session.model, 6, session.cache)
        assert torch.equal(found, ordinary(session, 6, twin))
    assert session.cache.recorded is played


def test_what_cannot_be_written_down_takes_the_ordinary_step(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A torch operation in the step is noticed; the numbers are right all the same."""
    session = Session.open(folders["released"], device="cpu", dtype="float32")
    session.prefill(range(4))
    twin = session.cache.clone()
    forward = type(session.model).layers_and_norm
    monkeypatch.setattr(type(session.model), "layers_and_norm", lambda *a, **o: forward(*a, **o) * 2.0)
    for token in (5, 6, 7):
        assert torch.equal(decode_step(session.model, token, session.cache), ordinary(session, token, twin))
    assert session.cache.recorded is not None and session.cache.recorded.tape is None
    assert "mul" in session.cache.recorded.problem


def test_python_runs_once(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    session = Session.open(folders["released"], device="cpu", dtype="float32")
    records = []
    real = replay._record
    monkeypatch.setattr(replay, "_record", lambda *a: (records.append(1), real(*a))[1])
    session.prefill(range(4))
    session.cache.reserve(40)
    for token in range(12):
        decode_step(session.model, token, session.cache)
    assert len(records) == 1


@pytest.mark.parametrize(
    ("work", "seen"),
    [
        (lambda x: x + 1, "add"),
        (lambda x: x.fill_(0.0), "fill_"),
        (lambda x: x[:, ::2].contiguous(), "contiguous"),
        (lambda x: x.double(), "aten.to"),
        (lambda x: x[0, 0].item(), "item"),
        (lambda x: x.t().reshape(-1), "reshape"),
    ],
)
def test_torch_operations_that_compute_are_noticed(work, seen: str) -> None:
    x = torch.ones(4, 4)
    with torch.inference_mode(), Recorder() as recorder:
        work(x)
    assert seen in recorder.problem


def test_views_and_allocations_are_no_work() -> None:
    x = torch.ones(4, 6)
    with torch.inference_mode(), Recorder() as recorder:
        torch.empty(3, 4)
        x.new_empty(2)
        x[:, 1:].split([2, 3], dim=-1)[0].unsqueeze(0)
        x.view(2, 2, 6).unflatten(-1, (2, 3)).flatten(0, 1).unbind(0)
        x.to(torch.float32).t()
    assert recorder.problem == ""


def test_recording_imports_no_compiler_stack(folders: dict[str, Path]) -> None:
    """torch._dynamo takes more than a second and 140 MB; a run has no use for it."""
    script = """
import sys
from k3tool.generate import Session
session = Session.open(sys.argv[1], device="cpu")
tokens = list(session.generate([1, 2, 3], 4, stop_at_end=False))
assert len(tokens) == 4 and session.cache.recorded.tape is not None
print(*(name for name in sys.modules if name in ("torch._dynamo", "torch._inductor", "sympy")))
"""
    ran = subprocess.run([sys.executable, "-c", script, folders["released"]], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip() == ""


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_no_way_of_running_imports_it(folders: dict[str, Path], tmp_path: Path, backend: str) -> None:
    """Nor do the whole command, its check, its files, and sampling."""
    script = """
import sys
from k3tool.cli import app
folder, out, backend = sys.argv[1:]
plain = ["run", folder, "--input-ids", "1 2 3", "--max-new-tokens", "4", "--backend", backend, "--quiet"]
for more in (["--check"], ["--logits-out", f"{out}/logits"], ["--save-activations", f"{out}/inputs"],
             ["--temperature", "0.7", "--top-p", "0.9", "--seed", "1", "--dtype", "float32"], ["--json", "--layers", "3"]):
    assert app.run(plain + more) == 0, more
print("imported", *(name for name in sys.modules if name in ("torch._dynamo", "torch._inductor", "sympy")))
"""
    arguments = [sys.executable, "-c", script, folders["released"], tmp_path, backend]
    ran = subprocess.run(arguments, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines()[-1] == "imported"


def test_working_memory_of_a_recording_is_its_own() -> None:
    """Elsewhere it may be replaced by a larger piece at any time."""
    from k3tool.kernels.cpu.scratch import Scratch

    scratch = Scratch()
    outside = scratch.address("row", 100)
    with Recorder() as recorder:
        inside = scratch.address("row", 100)
        assert scratch.address("row", 50) == inside
        assert scratch.address("row", 5000) != inside
    assert scratch.address("row", 100) == outside != inside
    held = [(t.data_ptr(), t.data_ptr() + t.numel()) for t in recorder.kept if isinstance(t, torch.Tensor)]
    assert any(first <= inside < last for first, last in held)
