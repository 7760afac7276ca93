"""Experts that stream from disk: the same numbers as resident ones, in the memory that was given."""

from __future__ import annotations

import re
import shutil

import pytest
import torch

from k3tool.checkpoint.reader import Checkpoint
from k3tool.errors import CapacityError, CheckpointCorrupt
from k3tool.generate import Session
from k3tool.kernels import dispatch
from k3tool.memory import resident_memory
from k3tool.model.bound import Bound
from k3tool.synthetic import tiny_config, write_checkpoint
from tests.helpers import k3tool, k3tool_process
from tests.model.edit import edit_checkpoint
from tests.model.test_load import quantize

IDS = [5, 900, 17, 3, 3, 256, 1023, 44, 8, 700, 31]
EXPERT_BYTES = 3 * (32 * 32 // 2 + 32)  # MXFP4: w1, w2, w3 of [32, 32]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("streamed")
    write_checkpoint(path, tiny_config(num_layers=4, vision=False), seed=3)
    return path


def needed(folder) -> tuple[int, int]:
    """Bytes of the whole model, and the least that can run."""
    with pytest.raises(CapacityError) as caught:
        Session.open(folder, device="cpu", dtype="float32", memory_bytes=1)
    details = caught.value.details
    return details["needed_bytes"], details["least_bytes"]


def stream(folder, slots: int) -> Session:
    whole, least = needed(folder)
    session = Session.open(
        folder, device="cpu", dtype="float32", memory_bytes=least + (slots - 1) * (whole - least) // 11
    )
    assert {experts.slots for experts in session.model.streamed_experts} == {slots}
    return session


def relative(found, expected):
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


def everything(session: Session, vocabulary: int = 1024) -> torch.Tensor:
    rows = [
        session.prefill([token % vocabulary for token in IDS], all_logits=True),
        session.decode(77)[None],
        session.decode(3)[None],
    ]
    return torch.cat(rows)


@pytest.mark.parametrize("slots", [1, 2, 5, 11])
def test_logits_are_those_of_resident_experts(folder, slots):
    expected = everything(Session.open(folder, device="cpu", dtype="float32"))
    streamed = everything(stream(folder, slots))
    assert relative(streamed, expected) < 2e-6  # a token's experts are summed in another order
    assert torch.equal(streamed.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("slots", [1, 4])
def test_what_is_promised_of_the_output(mini, slots):
    """The documents say: within 1e-5 of the norm in float32, and the same bits every time."""
    expected = everything(Session.open(mini, device="cpu", dtype="float32"), vocabulary=256)
    found = [everything(stream(mini, slots), vocabulary=256) for _ in range(2)]
    assert torch.equal(*found)
    assert relative(found[0], expected) < 1e-5
    assert torch.equal(found[0].argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("scheme", ["bf16", "nvfp4", "nvfp4-modelopt", "int8", "fp8-channel", "nf4"])
def test_every_storage_streams(folder, tmp_path, scheme):
    path = shutil.copytree(folder, tmp_path / "other")

    def change(tensors):
        generator = torch.Generator().manual_seed(9)
        packed = {name: tensors.pop(name) for name in sorted(tensors) if ".experts." in name}
        for name, codes in packed.items():
            if name.endswith(".weight_packed"):
                module = name.removesuffix(".weight_packed")
                values = torch.randn(codes.shape[0], codes.shape[1] * 2, generator=generator) * 0.05
                tensors[f"{module}.weight"] = values.bfloat16()
                if scheme != "bf16":
                    quantize(tensors, module, scheme)

    edit_checkpoint(path, change)
    expected = everything(Session.open(path, device="cpu", dtype="float32"))
    session = stream(path, 3)
    assert relative(everything(session), expected) < 2e-6
    session.reset()
    assert relative(everything(session), expected) < 2e-6  # slots have been used and overwritten


def test_all_experts_resident_where_they_fit(folder):
    whole, least = needed(folder)
    assert Session.open(folder, device="cpu", dtype="float32", memory_bytes=whole).model.streamed_experts == []
    assert whole - least == 3 * 11 * EXPERT_BYTES
    with pytest.raises(CapacityError) as caught:
        Session.open(folder, device="cpu", dtype="float32", memory_bytes=least - 1)
    assert "--memory SIZE of at least" in caught.value.hint


def test_reading_is_counted_and_what_is_resident_is_not_read_again(folder):
    session = stream(folder, 11)
    assert session.memory().resident_experts == 11 and session.memory().streamed_bytes == 0
    seen: dict[int, set[int]] = {}

    def observe(what, layer, value):
        if what == "router_ids":
            seen.setdefault(layer, set()).update(value.flatten().tolist())

    session.prefill([5], observe=observe)
    assert session.memory().streamed_bytes == sum(map(len, seen.values())) * EXPERT_BYTES == 9 * EXPERT_BYTES
    session.reset()
    session.prefill([5])
    assert session.memory().streamed_bytes == 9 * EXPERT_BYTES


def test_the_expert_used_longest_ago_gives_way(folder):
    experts = stream(folder, 3).model.streamed_experts[0]
    for wanted, resident in (
        ([1, 2], [1, 2]),
        ([4], [1, 2, 4]),
        ([1], [2, 4, 1]),
        ([7], [4, 1, 7]),
        ([2, 4], [4, 7, 2]),
    ):
        experts._bring(wanted)
        assert set(experts._slot_of) == set(resident)
    assert sorted(experts._slot_of.values()) == [0, 1, 2]


def test_a_failed_read_leaves_no_wrong_weights(folder, tmp_path):
    path = shutil.copytree(folder, tmp_path / "copy")
    session = stream(path, 2)
    experts = session.model.streamed_experts[0]
    experts._bring([0, 1])
    shard = path / Checkpoint.open(path).locate("language_model.model.layers.1.block_sparse_moe.experts.5.w1.weight_packed").shard  # fmt: skip
    whole = shard.read_bytes()
    shard.write_bytes(whole[: len(whole) // 50])
    with pytest.raises(CheckpointCorrupt, match="truncated"):
        experts._bring([5])
    assert list(experts._slot_of) == [1]
    shard.write_bytes(whole)
    experts._bring([1, 5])
    assert sorted(experts._slot_of.items()) == [(1, 1), (5, 0)]
    data = Checkpoint.open(path).read("language_model.model.layers.1.block_sparse_moe.experts.5.w2.weight_packed")
    assert experts._held["w2_packed"][0].numpy().tobytes() == data


def test_a_scale_that_stands_for_nan_is_found_when_it_is_read(folder, tmp_path):
    path = shutil.copytree(folder, tmp_path / "copy")
    name = "language_model.model.layers.2.block_sparse_moe.experts.7.w3.weight_scale"
    edit_checkpoint(path, lambda tensors: tensors[name].fill_(255))
    experts = stream(path, 2).model.streamed_experts[1]
    experts._bring([6])
    with pytest.raises(CheckpointCorrupt, match=r"experts\.7\.w3\.weight_scale holds byte 255"):
        experts._bring([7])


def test_kernels_are_checked_on_slots(folder):
    checks = stream(folder, 2).check(IDS)
    assert all(item.ok for item in checks)
    if dispatch.twin("moe", "experts_forward", torch.zeros(1)).__module__.endswith("cpu"):
        assert {item.layer for item in checks if item.kernel == "experts_forward"} == {1, 2, 3}


def test_on_the_command_line(folder, capsys, monkeypatch):
    """What a process takes beside its weights is left out: a process that tests has any size."""
    monkeypatch.setattr(Bound, "beside", lambda self, *given: 0)
    whole, least = needed(folder)
    expected = k3tool(capsys, "run", folder, "--input-ids", "1 2 3", "--dtype", "float32", "--json").json
    ran = k3tool(capsys, "run", folder, "--input-ids", "1 2 3", "--dtype", "float32", "--memory", least, "--json").json
    assert ran["token_ids"] == expected["token_ids"]
    assert ran["memory"]["resident_experts"] == 1 and ran["memory"]["streamed_bytes"] > 0
    assert expected["memory"]["resident_experts"] is None and expected["memory"]["streamed_bytes"] == 0
    human = k3tool(capsys, "run", folder, "--input-ids", "1 2 3", "--memory", whole - 1)
    assert human.code == 0 and "of every layer resident" in human.err
    assert k3tool(capsys, "run", folder, "--input-ids", "1 2 3", "--memory", least - 1).code == 12


def test_a_bound_holds_for_the_whole_process(folder):
    """A bound that the interpreter alone exceeds is refused with a figure that works, and no peak is above what was asked."""
    ids = " ".join(str(5 + index % 300) for index in range(700))
    refused = k3tool_process("run", folder, "--input-ids", ids, "--memory", "7.2MB", "--json")
    error = refused.json["error"]
    assert refused.code == 12 and "--memory 7.2 MB is too little" in error["message"]
    figure = re.search(r"give --memory (\d+)MB", error["hint"])
    assert figure is not None
    for size in (int(figure[1]), int(figure[1]) + 40):
        ran = k3tool_process(
            "run", folder, "--input-ids", ids, "--max-new-tokens", "3", "--memory", f"{size}MB", "--json"
        )
        assert ran.code == 0, ran.err
        assert ran.json["memory"]["peak_host_bytes"] <= size * 1_000_000


def test_what_a_run_takes_beside_its_weights_grows_with_it(folder):
    config = Checkpoint.open(folder).config
    few, many = (Bound(1, tokens).working_bytes(config, 4, torch.float32) for tokens in (10, 1000))
    assert few < many
    assert (
        Bound(1, 1000, keeps_logits=True).working_bytes(config, 4, torch.float32)
        == many + 2 * 4 * 1000 * config.vocab_size
    )
    assert Bound(1, 1000, checks=True).working_bytes(config, 4, torch.float32) > many
    assert Bound(1, 1000).beside(config, 4, torch.float32) > many + resident_memory()
