"""`run --save-activations`: the moments are those of the inputs that a plain run multiplies with, however it runs."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import load_file

from k3tool.activations import Activations, fingerprint
from k3tool.checkpoint.reader import Checkpoint
from k3tool.config import K3Config
from k3tool.errors import CapacityError
from k3tool.generate import Session, run_session
from k3tool.kernels import dispatch
from k3tool.kernels.dispatch import Backend
from k3tool.kernels.linear import reference as linear_reference
from k3tool.kernels.moe import reference as moe_reference
from k3tool.model import attention, decoder, moe, recording
from k3tool.model.recording import Recorder
from k3tool.names import parse_name
from tests.helpers import k3tool
from tests.model.test_streaming import stream
from tests.transform.test_quantize import read_values

IDS = [5, 90, 17, 3, 3, 200, 123, 44, 8, 70, 31]
NEW = 4
PREFIX = "language_model.model.layers."
MOMENTS, GRAM = ".input_mean_square", ".input_gram"


def record(session: Session, path: Path, *, gram: bool = True) -> dict[str, np.ndarray]:
    recorder = Recorder(session, path.parent if gram else None)
    with recorder.watching():
        run_session(session, IDS, max_new_tokens=NEW, stop_at_end=False)
    recorder.write(path)
    return load_file(path)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    mini = Path(__file__).parent.parent / "golden" / "k3-mini-8"
    return record(Session.open(mini, device="cpu", dtype="float32"), tmp_path_factory.mktemp("a") / "a.safetensors")


@pytest.fixture(scope="module")
def seen() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(x, weight) of every product of the same run on torch twins, read off the plainest linear there is."""
    mini = Path(__file__).parent.parent / "golden" / "k3-mini-8"
    session = Session.open(mini, device="cpu", dtype="float32")
    session.backend = Backend("reference", "for the test")
    found: list[tuple[torch.Tensor, torch.Tensor]] = []
    plain = linear_reference.linear

    def spy(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        found.append((x.double().clone(), weight.float()))
        return plain(x, weight)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear_reference, "linear", spy)
        patch.setattr(moe_reference, "linear", spy)
        dispatch._find.cache_clear()
        run_session(session, IDS, max_new_tokens=NEW, stop_at_end=False)
    dispatch._find.cache_clear()
    return found


def inputs_of(seen: list[tuple[torch.Tensor, torch.Tensor]], weight: np.ndarray) -> torch.Tensor:
    """All rows that were multiplied with a matrix, found by the values of its first row in any stack."""
    first = torch.from_numpy(weight[0])
    rows = [x for x, w in seen if w.shape[1] == len(first) and bool((w == first).all(1).any())]
    return torch.cat([x.reshape(-1, len(first)) for x in rows]) if rows else torch.zeros(0, len(first))


def test_moments_are_those_of_what_plain_products_are_given(
    mini: Path, recorded: dict[str, np.ndarray], seen: list
) -> None:
    """Compiled kernels and torch twins sum in other orders, so that inputs agree to float32 rounding through 8 layers."""
    checkpoint = Checkpoint.open(mini)
    modules = {str(n.module_path) for n in map(parse_name, checkpoint.index.weight_map) if n and n.layer is not None}
    by_entry: dict[str, list[torch.Tensor]] = defaultdict(list)
    for module in sorted(modules):
        name = parse_name(module + ".weight")
        assert name is not None
        entry = name._replace(expert=None).module_path
        if entry + MOMENTS in recorded and not entry.endswith("kv_b_proj"):
            by_entry[entry].append(inputs_of(seen, read_values(mini, module)))
    assert len(by_entry) == len([name for name in recorded if name.endswith(MOMENTS)]) - 2  # two layers of MLA
    for entry, found in by_entry.items():
        rows = torch.cat(found)
        visits = 3 if ".experts." in entry and "shared" not in entry else 1
        assert len(rows) == visits * (len(IDS) + NEW - 1), entry
        expected = rows.square().mean(0).numpy()
        assert np.allclose(recorded[entry + MOMENTS], expected, rtol=1e-3, atol=1e-3 * expected.mean()), entry
        if entry + GRAM in recorded:
            gram = (rows.T @ rows).numpy() / len(rows)
            assert np.allclose(recorded[entry + GRAM], gram, rtol=0, atol=1e-3 * expected.mean()), entry
            assert np.allclose(np.diagonal(recorded[entry + GRAM]), recorded[entry + MOMENTS], rtol=1e-5)


def test_the_absorbed_matrix_of_mla_has_the_normalized_latent_as_its_input(
    mini: Path, recorded: dict, seen: list
) -> None:
    module = PREFIX + "3.self_attn."
    rows = inputs_of(seen, read_values(mini, module + "kv_a_proj_with_mqa"))
    latent = rows @ torch.from_numpy(read_values(mini, module + "kv_a_proj_with_mqa")).double().T[:, :32]
    normalized = latent / (latent.square().mean(1, keepdim=True) + 1e-6).sqrt()
    weight = torch.frombuffer(
        bytearray(Checkpoint.open(mini).read(module + "kv_a_layernorm.weight")), dtype=torch.bfloat16
    )
    expected = (normalized * weight.double()).square().mean(0)
    assert np.allclose(recorded[module + "kv_b_proj" + MOMENTS], expected.numpy(), rtol=1e-3)


def test_every_matrix_that_options_reach_is_recorded(mini: Path, recorded: dict[str, np.ndarray]) -> None:
    from k3tool.transform.quantize_policy import component_of_module

    for text in Checkpoint.open(mini).index.weight_map:
        name = parse_name(text)
        if name is not None and component_of_module(name) is not None and name.part in ("weight", "weight_packed"):
            entry = name._replace(expert=None).module_path
            assert entry + MOMENTS in recorded, entry
    with_gram = {name.removesuffix(GRAM) for name in recorded if name.endswith(GRAM)}
    assert with_gram == {
        f"{PREFIX}{layer}.block_sparse_moe.routed_expert_{way}_proj" for layer in range(1, 8) for way in ("down", "up")
    }


def test_tokens_are_those_of_a_run_that_nobody_watches(mini: Path, tmp_path: Path) -> None:
    for dtype in ("float32", "bfloat16"):
        session = Session.open(mini, device="cpu", dtype=dtype)
        before = [dict(vars(module)) for module in (attention, decoder, moe)]
        alone = run_session(session, IDS, max_new_tokens=NEW, stop_at_end=False, keep_logits=True)
        session.reset()
        recorder = Recorder(session)
        with recorder.watching():
            watched = run_session(session, IDS, max_new_tokens=NEW, stop_at_end=False, keep_logits=True)
        assert [dict(vars(module)) for module in (attention, decoder, moe)] == before and session.observer is None
        assert watched.token_ids == alone.token_ids and torch.equal(watched.logits, alone.logits)
        assert recorder.tokens == len(IDS) + NEW - 1


def test_a_step_that_nobody_saw_is_noticed(mini: Path, tmp_path: Path) -> None:
    session = Session.open(mini, device="cpu", dtype="float32")
    recorder = Recorder(session)
    with recorder.watching():
        session.prefill(IDS)
    session.decode(3)
    with pytest.raises(RuntimeError, match=f"{len(IDS)} rows seen, {len(IDS) + 1} tokens fed"):
        recorder.write(tmp_path / "a.safetensors")
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from k3tool.synthetic import tiny_config, write_checkpoint

    folder = tmp_path_factory.mktemp("small")
    write_checkpoint(folder, tiny_config(num_layers=4, vision=False), seed=3)
    return folder


def test_streamed_experts_show_the_same(small: Path, tmp_path: Path) -> None:
    whole = record(Session.open(small, device="cpu", dtype="float32"), tmp_path / "whole.safetensors")
    for slots in (1, 5):
        found = record(stream(small, slots), tmp_path / "streamed.safetensors")
        assert whole.keys() == found.keys()
        for name in whole:
            assert np.allclose(found[name], whole[name], rtol=1e-4, atol=1e-4 * np.abs(whole[name]).mean()), name


def test_many_tokens_go_into_a_gram_matrix_in_blocks(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = Session.open(small, device="cpu", dtype="float32")
    whole = record(session, tmp_path / "a.safetensors")
    monkeypatch.setattr(recording, "ROWS_AT_ONCE", 4)
    monkeypatch.setattr(recording, "COPY_ROWS", 7)
    session.reset()
    found = record(session, tmp_path / "b.safetensors")
    for name in whole:
        assert np.allclose(found[name], whole[name], rtol=1e-5, atol=1e-6 * np.abs(whole[name]).max()), name


def test_on_the_command_line(mini: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, ids = tmp_path / "a.safetensors", ",".join(map(str, IDS))
    common = ("run", mini, "--input-ids", ids, "--max-new-tokens", NEW, "--dtype", "float32", "--layers", 4)
    ran = k3tool(capsys, *common, "--save-activations", out, "--json")
    assert ran.code == 0
    assert ran.json["activations"] == {"file": str(out), "tokens": len(IDS) + NEW - 1, "gram": False}
    opened = Activations.open(out)
    config = K3Config.from_file(mini / "config.json")
    assert opened.tokens == len(IDS) + NEW - 1 and opened.model == fingerprint(config)
    with safe_open(out, "np") as file:
        assert not any(name.endswith(GRAM) or ".layers.4." in name for name in file.keys())  # noqa: SIM118
    assert [path.name for path in tmp_path.iterdir()] == ["a.safetensors"]
    assert "for k3tool quantize --activations" in k3tool(capsys, *common, "--save-activations", out, "--gram").err
    with safe_open(out, "np") as file:
        assert sum(name.endswith(GRAM) for name in file.keys()) == 6  # noqa: SIM118


def test_what_cannot_be_recorded_is_refused_at_once(
    mini: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = ("run", mini, "--input-ids", "1,2")
    assert "--gram goes with --save-activations" in k3tool(capsys, *run, "--gram").err
    ran = k3tool(capsys, *run, "--save-activations", tmp_path / "none" / "a.safetensors")
    assert ran.code == 2 and "cannot write" in ran.err
    session = Session.open(mini, device="cpu", dtype="float32", layers=2)
    monkeypatch.setattr(recording.shutil, "disk_usage", lambda folder: type("Usage", (), {"free": 100}))
    with pytest.raises(CapacityError, match="Gram matrices need"):
        Recorder(session, tmp_path)
    launch = {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "2", "RANK": "0"}
    for name, value in {**launch, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    ran = k3tool(capsys, *run, "--save-activations", tmp_path / "a.safetensors")
    assert ran.code == 14 and "recorded by one process" in ran.err and "run without torchrun" in ran.err
