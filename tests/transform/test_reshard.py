"""Dividing and joining: the identity on bytes, and every byte where the table says, for every layout up to 16 ranks."""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from k3tool.checkpoint.header import TensorSpec
from k3tool.config import K3Config
from k3tool.conform import conform
from k3tool.errors import UnsupportedError
from k3tool.layout import Layout, rank_folder
from k3tool.reshard import Request, prepare
from k3tool.synthetic import tiny_config
from k3tool.transform.expected import expected
from tests.transform import cases

SLOW = settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


def request(layout: Layout, **more: object) -> Request:
    return Request(tp=layout.tp, ep=layout.ep, pp=layout.pp, **more)  # type: ignore[arg-type]


@given(cases.documents(), st.integers(0, 2**32), st.booleans())
@SLOW
def test_split_is_what_the_table_says_and_join_is_the_identity(document, seed, short_a_log):
    files = cases.write(document, seed, short_a_log=short_a_log)
    check_every_layout(document, files)


@pytest.mark.parametrize(
    "sizes",
    [
        {"num_layers": 16, "num_experts": 0, "experts_per_token": 0, "kda_heads": 1, "mla_heads": 1},
        {"num_layers": 2, "num_experts": 16, "kda_heads": 1, "mla_heads": 1},
        {"num_layers": 2, "num_experts": 2, "kda_heads": 16, "mla_heads": 16, "moe_intermediate_size": 512},
    ],
    ids=["16 stages", "16 expert blocks", "16 heads"],
)
def test_every_factor_up_to_16(sizes):
    small = {"hidden_size": 32, "kda_head_dim": 4, "v_head_dim": 2, "qk_nope_head_dim": 2, "qk_rope_head_dim": 2,
             "kv_lora_rank": 4, "q_lora_rank": 4, "vocab_size": 259, "experts_per_token": 1, "vision": False}  # fmt: skip
    document = tiny_config(**{**small, **sizes})
    check_every_layout(document, cases.write(document, 1))


def check_every_layout(document, files):
    original = cases.tensors_of(files)
    config = K3Config.from_dict(document)
    layouts = cases.legal_layouts(config)
    assert layouts
    for layout in layouts:
        ranks = cases.carry_out_in_memory(prepare(cases.as_source(files), request(layout, max_shard_bytes=20_000)))
        for rank in range(layout.ranks):
            folder = rank_folder(rank, layout.ranks)
            held = cases.tensors_of(ranks, folder)
            assert held == cases.expected_rank(original, config, layout, rank), (layout, rank)
        # A third opinion, on names and shapes of one rank: the catalogue of a model with that rank's widths.
        local, implied = expected(K3Config.from_bytes(ranks[f"{folder}/config.json"]), len(held))
        specs = {name: TensorSpec(name, dtype, shape, 0, 0) for name, (dtype, shape, _) in held.items()}
        assert conform(local, implied, specs).ok, (layout, rank)
        joined = cases.carry_out_in_memory(prepare(cases.as_source(ranks), Request(gpus=1, form="hf")))
        assert cases.tensors_of(joined) == original, layout
        assert joined["config.json"] == files["config.json"]
        assert joined["tokenizer_config.json"] == files["tokenizer_config.json"]


@given(cases.documents(), st.integers(0, 2**32), st.booleans(), st.data())
@settings(SLOW, max_examples=25)
def test_ranks_to_other_ranks_equal_a_direct_split(document, seed, short_a_log, data):
    files = cases.write(document, seed, short_a_log=short_a_log)
    layouts = cases.legal_layouts(K3Config.from_dict(document))
    first, second = data.draw(st.sampled_from(layouts)), data.draw(st.sampled_from(layouts))
    size = data.draw(st.sampled_from([1_000, 10_000, 10**9]))
    ranks = cases.carry_out_in_memory(prepare(cases.as_source(files), request(first)))
    direct = cases.carry_out_in_memory(prepare(cases.as_source(files), request(second, max_shard_bytes=size)))
    again = cases.carry_out_in_memory(prepare(cases.as_source(ranks), request(second, max_shard_bytes=size)))
    assert {n: d for n, d in again.items() if "manifest" not in n} == {
        n: d for n, d in direct.items() if "manifest" not in n
    }


@given(cases.documents(), st.integers(0, 2**32), st.data())
@settings(SLOW, max_examples=15)
def test_grouped_shards_are_the_same_checkpoint(document, seed, data):
    files = cases.write(document, seed)
    config = K3Config.from_dict(document)
    layout = data.draw(st.sampled_from(cases.legal_layouts(config)))
    prepared = prepare(cases.as_source(files), request(layout, form="hf", max_shard_bytes=5_000))
    grouped = cases.carry_out_in_memory(prepared)
    original = cases.tensors_of(files)
    assert cases.tensors_of(grouped) == original
    for rank in range(layout.ranks):
        held = {o.name for job in prepared.jobs_of[rank] for o in job.outputs()}
        needed = set(cases.expected_rank(original, config, Layout(layout.tp, layout.ep, layout.pp), rank))
        assert held == needed, (layout, rank)
    if layout.ranks > 1:
        owners = json.loads(grouped["k3tool.json"])["owners"]
        assert owners == {str(r): [j.path for j in prepared.jobs_of[r]] for r in range(layout.ranks)}


@given(cases.documents(), st.integers(1, 16), st.integers(1, 16), st.integers(1, 16))
@settings(SLOW, max_examples=60)
def test_illegal_layouts_are_refused_with_the_reason(document, tp, ep, pp):
    config = K3Config.from_dict(document)
    layout = Layout(tp, ep, pp)
    files = cases.as_source(cases.write(document, 0))
    if layout in cases.legal_layouts(config) or layout.ranks > 16:
        return
    with pytest.raises(UnsupportedError) as caught:
        prepare(files, request(layout))
    assert caught.value.exit_code == 14
    assert caught.value.details["reasons"] and caught.value.details["nearest"]
    for near in caught.value.details["nearest"]:  # type: ignore[attr-defined]
        prepare(files, Request(tp=near["tp"], ep=near["ep"], pp=near["pp"]))


def test_tp_neighbours_come_in_files_that_several_workers_find_work_in(monkeypatch):
    """Files of TP neighbours are one batch, which one worker writes: there must be more of them than workers."""
    files = cases.write(
        tiny_config(num_layers=4, kda_heads=4, mla_heads=4, num_experts=12, moe_intermediate_size=64, vision=False), 1
    )

    def batches() -> int:
        return len(prepare(cases.as_source(files), Request(tp=2)).plan.batches())

    assert batches() == 1  # small files for their own sake are no gain
    monkeypatch.setattr("k3tool.transform.regroup.LEAST_SHARED_BYTES", 1)
    assert 12 <= batches() <= 32
