"""Layouts: who owns what, what is impossible and why."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3tool.config import K3Config
from k3tool.errors import UnsupportedError, UsageError
from k3tool.layout import (
    INSIDE,
    WHOLE_NODES,
    Layout,
    candidates,
    check,
    choose,
    expert_block,
    expert_owner,
    nearest,
    padded_vocab,
    problems,
    rank_folder,
    redundant_experts,
    stage_of,
    stages,
    tp_placement,
)
from k3tool.synthetic import tiny_config


@pytest.fixture(scope="module")
def k3(shared) -> K3Config:
    return K3Config.from_dict(json.loads((shared / "k3" / "config.json").read_bytes()))


@given(st.integers(1, 120), st.data())
def test_stages_hold_every_layer_once(count, data):
    pp = data.draw(st.integers(1, count))
    found = stages(count, pp)
    assert [layer for stage in found for layer in stage] == list(range(count))
    assert max(map(len, found)) - min(map(len, found)) <= 1
    assert all(stage_of(layer, count, pp) == number for number, stage in enumerate(found) for layer in stage)


def test_93_layers_over_4_stages_lose_none():
    assert [(stage.start, stage.stop) for stage in stages(93, 4)] == [(0, 24), (24, 47), (47, 70), (70, 93)]


@given(st.integers(1, 16), st.integers(1, 8))
def test_experts_are_dealt_in_contiguous_blocks(size, ep):
    experts = size * ep
    assert [e for rank in range(ep) for e in expert_block(experts, ep, rank)] == list(range(experts))
    assert all(e in expert_block(experts, ep, expert_owner(e, experts, ep)) for e in range(experts))


@given(st.integers(1, 5), st.integers(1, 5), st.integers(1, 5))
def test_places_are_a_bijection_with_tp_innermost(tp, ep, pp):
    layout = Layout(tp, ep, pp)
    places = list(layout.places())
    assert [layout.rank_at(p.tp_rank, p.ep_rank, p.pp_rank) for p in places] == list(range(layout.ranks))
    assert [p.tp_rank for p in places[:tp]] == list(range(tp))
    assert {p.pp_rank for p in places[: tp * ep]} == {0}


def test_a_rank_outside_is_a_usage_error():
    with pytest.raises(UsageError, match="rank 8 does not exist in TP2 x EP2 x PP2"):
        Layout(2, 2, 2).place(8)
    with pytest.raises(UsageError, match="TP must be at least 1"):
        Layout(0, 1, 1)


def test_names_and_padding():
    assert rank_folder(3, 16) == "rank-00003-of-00016"
    assert [padded_vocab(163840, tp) for tp in (1, 3, 8, 96)] == [163840, 163842, 163840, 163872]


def test_the_release_has_exactly_these_factors(k3):
    tensor = [tp for tp in range(1, 200) if not problems(k3, Layout(tp, 1, 1))]
    assert tensor == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 96]
    expert = [ep for ep in range(1, 900) if not problems(k3, Layout(1, ep, 1))]
    assert expert == [1, 2, 4, 7, 8, 14, 16, 28, 32, 56, 64, 112, 128, 224, 448, 896]
    assert [pp for pp in range(90, 96) if not problems(k3, Layout(1, 1, pp))] == [90, 91, 92, 93]


@pytest.mark.parametrize(
    ("layout", "reason"),
    [
        (Layout(5, 1, 1), "TP 5 does not divide the KDA heads (96)"),
        (Layout(64, 1, 1), "TP 64 does not divide the MLA heads (96)"),
        (Layout(192, 1, 1), "TP 192 leaves w2 no whole scale groups: 3072 / 192 = 16 is not a multiple of 32"),
        (Layout(1, 3, 1), "EP 3 does not divide the experts (896)"),
        (Layout(1, 1, 94), "PP 94 has more stages than the model has layers (93)"),
    ],
)
def test_impossible_layouts_say_why_and_what_is_near(k3, layout, reason):
    with pytest.raises(UnsupportedError) as caught:
        check(k3, layout)
    assert reason in caught.value.details["reasons"]
    near = nearest(k3, layout)
    assert 1 <= len(near) <= 3 and all(str(item) in caught.value.hint for item in near)
    assert not any(problems(k3, item) for item in near)


def test_what_a_model_lacks_does_not_bind_it():
    dense = K3Config.from_dict(tiny_config(num_experts=0, experts_per_token=0, kda_heads=4, mla_heads=4))
    assert not problems(dense, Layout(4, 1, 1))
    assert problems(dense, Layout(1, 2, 1)) == ["EP 2 has no experts to deal out: this model is dense"]
    document = tiny_config(num_layers=1, kda_heads=5, mla_heads=4, intermediate_size=96)
    assert not problems(K3Config.from_dict(document), Layout(4, 1, 1))  # its only layer is MLA: KDA heads do not bind
    document["text_config"]["linear_attn_config"].update(full_attn_layers=[], kda_layers=[1])
    assert problems(K3Config.from_dict(document), Layout(4, 1, 1)) == ["TP 4 does not divide the KDA heads (5)"]


def test_scale_groups_bind_by_scheme():
    document = tiny_config(kda_heads=4, mla_heads=4, moe_intermediate_size=64)
    assert problems(K3Config.from_dict(document), Layout(4, 1, 1))  # groups of 32: 16 each
    document["text_config"]["quantization_config"] = {"format": "nvfp4-pack-quantized"}
    assert not problems(K3Config.from_dict(document), Layout(4, 1, 1))  # groups of 16
    document["text_config"].pop("quantization_config")
    assert not problems(K3Config.from_dict(document), Layout(4, 1, 1))


@pytest.mark.parametrize(
    ("gpus", "given", "expected"),
    [
        (1, {}, Layout(1, 1, 1)),
        (8, {}, Layout(8, 1, 1)),
        (16, {}, Layout(8, 2, 1)),
        (7, {}, Layout(1, 7, 1)),
        (10, {}, Layout(2, 1, 5)),
        (16, {"ep": 16}, Layout(1, 16, 1)),
        (16, {"tp": 8, "pp": 2}, Layout(8, 1, 2)),
        (None, {"tp": 4, "ep": 2}, Layout(4, 2, 1)),
    ],
)
def test_choice(k3, gpus, given, expected):
    choice = choose(k3, gpus, **given)
    assert choice.layout == expected and choice.reason
    assert choice.layout in candidates(k3, choice.layout.ranks, **given)


def test_factors_that_contradict_are_usage(k3):
    with pytest.raises(UsageError, match="TP2 x EP2 x PP2 does not make 16 GPUs"):
        choose(k3, 16, 2, 2, 2)
    with pytest.raises(UsageError, match="TP3 does not make 16 GPUs"):
        choose(k3, 16, 3)
    with pytest.raises(UsageError, match="out of range"):
        choose(k3, 0)


def test_where_nothing_makes_the_number_the_reason_is_about_the_number(k3):
    with pytest.raises(UnsupportedError) as caught:
        choose(k3, 97)
    assert caught.value.message == (
        "no layout of 97 GPUs exists: TP has to divide the 96 heads, EP the 896 experts, PP may have 93 stages at most"
    )
    assert "TP8 x EP4 x PP3 (96 GPUs)" in caught.value.hint
    with pytest.raises(UnsupportedError, match="no layout of 194 GPUs has TP2, as EP x PP would have to make 97"):
        choose(k3, 194, tp=2)
    with pytest.raises(UnsupportedError) as caught:  # what was given is impossible whatever the rest
        choose(k3, 14, tp=7)
    assert caught.value.message.startswith("TP7 x EP1 x PP1 is impossible for this model: TP 7 does not divide the KDA")
    assert caught.value.message.count("does not divide") == 1 and len(caught.value.details["reasons"]) == 5


def test_the_factors_are_those_that_have_no_problem(k3):
    """Against every product tried by itself; and what is near never lies beyond what can be asked for."""
    for gpus in (1, 24, 72, 93, 96):
        ways = [Layout(tp, ep, gpus // tp // ep) for tp in range(1, gpus + 1) for ep in range(1, gpus + 1)
                if gpus % (tp * ep) == 0]  # fmt: skip
        assert set(candidates(k3, gpus)) == {layout for layout in ways if not problems(k3, layout)}
    with pytest.raises(UnsupportedError) as caught:
        choose(k3, 99_999)
    assert all(1 <= Layout(**near).ranks <= 100_000 for near in caught.value.details["nearest"])
    assert len(caught.value.details["nearest"]) == 3


@pytest.mark.parametrize(
    ("gpus", "node", "expected", "says"),
    [
        (24, 8, Layout(8, 1, 3), "TP 8 stays inside a node of 8"),
        (96, 8, Layout(8, 4, 3), "TP 8 stays inside a node of 8"),
        (12, 8, Layout(4, 1, 3), "TP 4 stays inside a node of 8"),
        (6, 8, Layout(6, 1, 1), "TP 6 stays inside a node of 8"),  # one node, not filled
        (8, 4, Layout(4, 2, 1), "TP 4 stays inside a node of 4"),
        (72, 72, Layout(24, 1, 3), "TP 24 stays inside a node of 72"),
        (12, 6, Layout(6, 2, 1), "TP 6 stays inside a node of 6"),
    ],
)
def test_tp_groups_are_kept_inside_nodes(k3, gpus, node, expected, says):
    choice = choose(k3, gpus, node_gpus=node)
    assert choice.layout == expected and says in choice.reason


@given(st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16, 24]), st.integers(1, 6), st.sampled_from([4, 6, 8, 72]))
def test_placement_is_what_counting_nodes_gives(tp, groups, node):
    layout = Layout(tp, groups, 1)
    nodes = [{rank // node for rank in range(g * tp, (g + 1) * tp)} for g in range(groups)]
    found = tp_placement(layout, node)
    assert (found == INSIDE) == all(len(held) == 1 for held in nodes)
    if found == WHOLE_NODES:
        assert all(len(held) == tp // node for held in nodes) and tp % node == 0


def test_a_group_that_straddles_nodes_is_not_called_inside(k3):
    assert "TP 6 straddles nodes of 8" in choose(k3, 24, tp=6).reason
    assert "TP 16 spans 2 whole nodes of 8" in choose(k3, 32, tp=16).reason
    assert choose(k3, 12, 6, 2, 1).reason == "as given; TP 6 straddles nodes of 8 GPUs"
    assert choose(k3, 12, 6, 2, 1, node_gpus=6).reason == choose(k3, 16, 8, 2, 1).reason == "as given"
    assert choose(k3, 66, 3, 2).reason.endswith("what was given; TP 3 straddles nodes of 8 GPUs")
    order = candidates(k3, 24)
    assert order.index(Layout(8, 1, 3)) < order.index(Layout(24, 1, 1)) < order.index(Layout(6, 4, 1))


def test_redundant_experts_make_more_divisors(k3):
    assert redundant_experts(k3, 72) == 40 and redundant_experts(k3, 64) == 0
    assert problems(k3, Layout(1, 72, 1)) == ["EP 72 does not divide the experts (896)"]
    assert not problems(k3, Layout(1, 72, 1), 40)
    assert problems(k3, Layout(1, 72, 1), 39) == ["EP 72 does not divide the experts (896 + 39 redundant)"]
    assert problems(k3, Layout(1, 2, 1), 898) == ["EP 2 would hold 897 experts a rank, the model has 896"]


def test_what_was_given_whole_is_called_so(k3):
    assert choose(k3, 2, ep=2) == (Layout(1, 2, 1), "as given")
    assert choose(k3, 95 - 2).reason.startswith("chosen among")
    assert choose(k3, 22, tp=2).reason == "the only possible layout of 22 GPUs with what was given"
