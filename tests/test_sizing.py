"""Sizes of ranks: against published numbers, against the plan of reshard, and against slower forms of themselves."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3tool import release
from k3tool.cards import CARDS, MARGIN, Card, parse_card
from k3tool.catalog import DTYPE_BITS, catalog, count
from k3tool.checkpoint.reader import Checkpoint
from k3tool.checkpoint.table import Kind, TensorTable
from k3tool.config import K3Config
from k3tool.declared import Declared
from k3tool.errors import CheckpointCorrupt, UnsupportedError, UsageError
from k3tool.layout import Layout, candidates, problems, stages
from k3tool.layout_search import Finder, divisibility, max_sequences
from k3tool.names import parse_name
from k3tool.plan_report import plan_html
from k3tool.planner import plan_deployment
from k3tool.sizing import (
    Inventory,
    Workload,
    activation_bytes,
    conv_history_bytes,
    kda_state_bytes,
    mla_cache_bytes,
    rank_memory,
    stage_memory,
)
from k3tool.synthetic import tiny_config, write_checkpoint
from k3tool.transform.split import Splitter

# Components of the release in bytes, and what they are without the routed experts and without vision.
RELEASE = {
    "routed_experts": 1_446_456_066_048,
    "shared_experts": 24_310_185_984,
    "latent": 9_454_620_672,
    "kda": 61_214_097_408 + 44_160_000,
    "mla": 11_145_412_608,
    "router": 1_181_745_152 + 329_728,
    "dense_mlp": 1_453_326_336,
    "embeddings": 2 * 2_348_810_240,
    "vision": 802_428_928 + 92_289_024,
}
TEXT_WITHOUT_EXPERTS = 113_509_540_864


@pytest.fixture(scope="module")
def k3() -> Inventory:
    return Inventory.from_config(release.config())


def weights(inventory: Inventory, *layout: int) -> list[int]:
    return [sum(parts.values()) for parts in inventory.weights(Layout(*layout))]


def test_one_rank_holds_the_release(k3: Inventory):
    assert k3.total_bytes == release.TOTAL_SIZE == weights(k3, 1, 1, 1)[0]
    parts = k3.weights(Layout())[0]
    assert {name: parts[name] for name in RELEASE} == RELEASE
    assert parts["norms"] + parts["attn_res"] == 7_999_488 + 43_008


def test_published_deployments(k3: Inventory):
    """Attention data-parallel with EP16 and EP32: the text model without experts on every rank, beside a share of the
    experts (203.9 and 158.7 GB published without vision). TP8: an eighth (195.1 GB) plus 7/8 of what stays whole."""
    vision = RELEASE["vision"]
    for ep, published in ((16, 203.9e9), (32, 158.7e9)):
        expected = TEXT_WITHOUT_EXPERTS + RELEASE["routed_experts"] // ep
        assert weights(k3, 1, ep, 1) == [expected + vision]
        assert round(expected / 1e9, 1) == published / 1e9
    splitter, whole = Splitter(k3.config), 0
    for tensor in k3.tensors:
        rule = splitter.rule(tensor.name)
        assert rule is not None
        if splitter.cut(tensor.name, rule, tensor.kind, 8).axis is None:
            whole += tensor.nbytes
    padding = 69 * (128 - 128 // 8) * 4  # A_log is padded back to 128 on every rank
    assert weights(k3, 8, 1, 1) == [(release.TOTAL_SIZE - whole) // 8 + whole + padding]
    assert round(release.TOTAL_SIZE / 8 / 1e9, 1) == 195.1
    # Latent projections and norm, router, vision; q_a, kv_a and their norms of 24 MLA layers; f_a and o_norm of 69 KDA
    # layers; all norms and mixing vectors.
    mla = 24 * 2 * ((1536 + 576) * 7168 + 1536 + 512)
    kda = 69 * (2 * 128 * 7168 + 4 * 128)
    vectors = 7_999_488 + 43_008
    assert whole == RELEASE["latent"] + RELEASE["router"] + vision + mla + kda + vectors


def test_stages_hold_every_layer_once_and_the_ends(k3: Inventory):
    for pp in (2, 3, 5, 8, 93):
        held = k3.weights(Layout(1, 1, pp))
        assert sum(sum(parts.values()) for parts in held) == release.TOTAL_SIZE
        assert [bool(parts["vision"]) for parts in held] == [True] + [False] * (pp - 1)
        assert held[0]["embeddings"] == held[-1]["embeddings"] == 2_348_810_240
        assert all(parts["embeddings"] == 0 for parts in held[1:-1])


def test_caches_of_the_release(k3: Inventory):
    config, layers = k3.config, range(93)
    assert kda_state_bytes(config, layers) == 434_110_464
    assert kda_state_bytes(config, [0], 8) == 786_432  # 0.75 MiB per layer and sequence
    assert conv_history_bytes(config, layers) == 15_261_696
    assert mla_cache_bytes(config, layers) == 27_648
    assert 131_072 * mla_cache_bytes(config, layers) == 3.375 * 2**30
    assert 1_048_576 * mla_cache_bytes(config, layers) == 27 * 2**30
    assert activation_bytes(config, layers) == 129_024
    assert activation_bytes(config, range(12)) == 2 * 14_336
    assert activation_bytes(config, range(13)) == 3 * 14_336


def test_ranks_share_sequences_as_the_layout_says(k3: Inventory):
    load = Workload(context=1000, sequences=24)
    ranks = rank_memory(k3, Layout(8, 2, 2), load)
    assert [rank.place.rank for rank in ranks] == list(range(32))
    by_hand = 12 * kda_state_bytes(k3.config, range(47)) // 8
    assert ranks[0].kda_state == ranks[15].kda_state == by_hand
    assert ranks[0].mla_cache == 12 * 1000 * 2 * 576 * sum(kind == "mla" for kind in k3.config.layer_kinds[:47])
    assert ranks[0].kda_state + ranks[16].kda_state == 12 * 434_110_464 // 8
    assert ranks[0].activations == 8192 * activation_bytes(k3.config, range(47))
    assert ranks[0].total == sum(
        (ranks[0].weights_bytes, by_hand, ranks[0].conv_history, ranks[0].mla_cache, ranks[0].activations)
    )
    assert Workload(100, 3).tokens_in_flight(Layout(1, 2, 1)) == 200
    assert Workload(1, 20_000).tokens_in_flight(Layout(1, 2, 1)) == 10_000


@settings(max_examples=40, deadline=None)
@given(
    st.fixed_dictionaries(
        {
            "num_layers": st.integers(1, 7),
            "num_experts": st.sampled_from([0, 4, 6]),
            "kda_heads": st.sampled_from([4, 6]),
            "mla_heads": st.just(12),
            "moe_intermediate_size": st.sampled_from([64, 96]),
            "intermediate_size": st.just(96),
        }
    ),
    st.floats(0.02, 1.2),
    st.sampled_from([1, 3, 8]),
    st.sampled_from([1, 40]),
    st.sampled_from([0, 2]),
)
def test_the_fewest_are_those_of_a_search_over_everything(
    options: dict[str, Any], share: float, node: int, sequences: int, redundant: int
):
    experts = options["num_experts"]
    config = K3Config.from_dict(tiny_config(experts_per_token=min(2, experts), **options))
    inventory, load = Inventory.from_config(config), Workload(64, sequences)
    redundant = redundant if experts else 0
    card = Card("", int(max(r.total for r in stage_memory(inventory, Layout(), load)) * share), margin=0)

    def fits(layout: Layout) -> bool:
        return max(rank.total for rank in stage_memory(inventory, layout, load, redundant)) <= card.memory_bytes

    holding = [
        count
        for count in range(1, 12 * (experts + redundant or 1) * 7 + 1)
        if any(fits(layout) for layout in candidates(config, count, redundant=redundant))
    ]
    finder = Finder(inventory, load, card, None, node, redundant)
    assert (finder.fewest.layout.ranks if finder.fewest else None) == (holding[0] if holding else None)
    whole = [count for count in holding if node % count == 0 or count % node == 0]
    even = finder.fewest_in_nodes
    assert (even.layout.ranks if even else None) == (whole[0] if whole else None)


def test_every_alternative_says_how_many_sequences_it_has_room_for(k3: Inventory):
    plan = plan_deployment(k3, source="k3", gpus=8, card=parse_card("b300"))
    assert plan.alternatives and plan.max_sequences > 0
    for option in plan.alternatives:
        room = option.max_sequences
        assert room == max_sequences(k3, option.layout, 131_072, plan.card)
        for sequences, fits in ((room, True), (room + option.layout.ep, False)):
            stage = stage_memory(k3, option.layout, Workload(131_072, sequences))
            assert (max(rank.total for rank in stage) <= 259_200_000_000) == fits


def test_redundant_experts_make_the_expert_parallelism_of_a_rack(k3: Inventory):
    """72 GPUs with 13 experts each of 896 + 40, as expert load balancers of serving engines place them."""
    rest = TEXT_WITHOUT_EXPERTS + RELEASE["vision"]
    one = RELEASE["routed_experts"] // 896  # of all layers
    plan = plan_deployment(k3, source="k3", gpus=72, card=parse_card("gb200"), node_gpus=72)
    option = next(option for option in plan.alternatives if option.redundant)
    assert option.layout == Layout(1, 72, 1) and option.redundant == 40
    assert option.weights_bytes == rest + 13 * one and option.max_sequences
    with pytest.raises(UnsupportedError) as caught:
        plan_deployment(k3, source="k3", ep=72)
    assert caught.value.hint.endswith("as serving engines do, EP 72 of 13 each: --redundant-experts 40")
    given = plan_deployment(k3, source="k3", ep=72, redundant=40)
    assert given.largest.weights["routed_experts"] == 13 * one and len(given.ranks) == 72
    with pytest.raises(UsageError, match="redundant"):
        plan_deployment(k3, source="k3", ep=72, redundant=1000)
    fewest = plan_deployment(k3, source="k3", card=parse_card("gb200"), redundant=40).reason
    assert "are the fewest that hold it with gb200 (186 GB) each and 40 redundant experts (" in fewest


small = st.fixed_dictionaries(
    {
        "num_layers": st.integers(2, 9),
        "block_size": st.sampled_from([None, 3]),
        "q_lora_rank": st.sampled_from([None, 32]),
        "latent_size": st.sampled_from([None, 32]),
        "num_experts": st.sampled_from([4, 6]),
        "num_shared_experts": st.integers(0, 2),
        "moe_intermediate_size": st.sampled_from([64, 128]),
        "kda_heads": st.sampled_from([2, 4]),
        "mla_heads": st.just(4),
        "intermediate_size": st.just(96),
        "vocab_size": st.sampled_from([514, 600]),
        "vision": st.booleans(),
    }
)


@settings(max_examples=60, deadline=None)
@given(small, st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 3]), st.integers(1, 4))
def test_any_rank_equals_its_tensors_one_by_one(options: dict[str, Any], tp: int, ep: int, pp: int):
    """The sums over kinds of tensors equal the plain sum over every tensor that the table gives a rank."""
    config = K3Config.from_dict(tiny_config(experts_per_token=2, **options))
    layout = Layout(tp, ep, pp)
    if problems(config, layout):
        return
    entries, splitter = catalog(config).entries, Splitter(config)
    counted = rank_memory(Inventory.from_config(config), layout, Workload(64, 1))
    read = Inventory.from_tensors(config, ((entry.name, Kind(entry.dtype, entry.shape)) for entry in entries))
    assert [rank.weights for rank in rank_memory(read, layout, Workload(64, 1))] == [r.weights for r in counted]
    for rank in counted:
        expected: dict[str, int] = {}
        for entry in entries:
            name = parse_name(entry.name)
            assert name is not None
            rule = splitter.rule(name)
            assert rule is not None
            if splitter.holds(name, rule, layout, rank.place):
                kind = Kind(entry.dtype, entry.shape)
                shape = splitter.cut(name, rule, kind, tp).shape(entry.shape)
                nbytes = count(shape) * DTYPE_BITS[entry.dtype] // 8
                expected[entry.component] = expected.get(entry.component, 0) + nbytes
        assert {name: nbytes for name, nbytes in rank.weights.items() if nbytes} == expected


@pytest.fixture(scope="module")
def divisible(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("divisible")
    config = tiny_config(
        num_layers=5, kda_heads=4, mla_heads=4, num_experts=4, moe_intermediate_size=64, vocab_size=514
    )
    write_checkpoint(folder, config)
    return folder


@pytest.mark.parametrize("layout", [(1, 1, 1), (2, 1, 1), (1, 4, 1), (1, 1, 3), (2, 2, 2), (1, 2, 5)])
def test_plan_and_reshard_count_the_same_bytes(divisible: Path, layout: tuple[int, int, int]):
    from k3tool.reshard import Request, prepare

    tp, ep, pp = layout
    prepared = prepare(divisible, Request(tp * ep * pp, tp, ep, pp))
    written = [sum(job.data_bytes for job in prepared.jobs_of[rank]) for rank in range(tp * ep * pp)]
    checkpoint = Checkpoint.open(divisible)
    planned = rank_memory(Inventory.from_config(checkpoint.config), Layout(*layout), Workload(1, 1))
    assert [rank.weights_bytes for rank in planned] == written
    table = TensorTable.of(checkpoint)
    counted = rank_memory(Inventory.from_tensors(checkpoint.config, table.items()), Layout(*layout), Workload(1, 1))
    assert [rank.weights_bytes for rank in counted] == written


def test_plan_and_reshard_choose_the_same_layout(divisible: Path):
    from k3tool.reshard import Request, prepare

    inventory = Inventory.from_config(Checkpoint.open(divisible).config)
    for gpus in (1, 2, 3, 4, 5, 6, 8):
        plan = plan_deployment(inventory, source="x", gpus=gpus)
        assert prepare(divisible, Request(gpus)).layout == plan.layout


def test_other_schemes(k3: Inventory):
    assert k3.with_schemes().total_bytes == k3.with_schemes("mxfp4", "bf16").total_bytes == release.TOTAL_SIZE
    values = 92 * 896 * 3 * 3072 * 3584
    rest = release.TOTAL_SIZE - RELEASE["routed_experts"]
    assert k3.with_schemes("bf16").total_bytes == rest + 2 * values
    assert k3.with_schemes("nvfp4").total_bytes == rest + values // 2 + values // 16 + 92 * 896 * 3 * 4
    latent = 92 * 2 * 3584 * 7168
    halved = k3.with_schemes("keep", "fp8-channel")
    assert halved.total_bytes == release.TOTAL_SIZE - latent + 92 * 4 * (3584 + 7168)
    assert halved.weights(Layout())[0]["latent"] == latent + 92 * (4 * (3584 + 7168) + 2 * 3584)
    # Two schemes at once, and one over another.
    both = k3.with_schemes("nvfp4", "fp8-channel")
    assert both.total_bytes == k3.with_schemes("nvfp4").with_schemes("keep", "fp8-channel").total_bytes
    assert both.with_schemes("mxfp4", "bf16").total_bytes == release.TOTAL_SIZE
    with pytest.raises(UsageError, match="int3"):
        k3.with_schemes("int3")


def test_quantization_states_are_not_divided(k3: Inventory):
    stored = k3.with_schemes("nf4")
    assert weights(stored, 1, 8, 1)[0] < weights(stored, 1, 1, 1)[0]
    with pytest.raises(UnsupportedError, match="TP 2 cannot divide"):
        stored.weights(Layout(2, 1, 1))
    with pytest.raises(UnsupportedError, match="TP 2 cannot divide"):
        plan_deployment(k3, source="k3", gpus=2, tp=2, experts="nf4")
    plan = plan_deployment(k3, source="k3", gpus=16, experts="nf4")
    assert plan.layout.tp == 1 and "cannot divide the storage" in plan.reason


def test_cards():
    assert parse_card("H200") == Card("h200", 141_000_000_000)
    assert parse_card("80GiB") == Card("", 80 * 2**30)
    assert parse_card("h100").margin_bytes == 8_000_000_000 == MARGIN * CARDS["h100"]
    for bad, says in (
        ("h900", "unknown GPU memory 'h900'"),
        ("-5GB", "a size is positive: '-5GB'"),
        ("0", "holds nothing"),
    ):
        with pytest.raises(UsageError, match=says):
            parse_card(bad)
    assert parse_card("gb200", 4 * 10**9).margin_bytes == 4 * 10**9
    with pytest.raises(UsageError, match="leaves nothing of h100"):
        parse_card("h100", 80 * 10**9)


@pytest.mark.parametrize(
    ("card", "gpus", "fits"),
    [("b300", 8, True), ("mi355x", 8, True), ("h200", 16, True), ("b200", 16, True), ("h100", 32, True),
     ("h200", 8, False), ("h100", 16, False), ("b200", 8, False), ("mi300x", 8, False)],
)  # fmt: skip
def test_known_machines(k3: Inventory, card: str, gpus: int, fits: bool):
    """The units that public recipes name for K3 hold it, and half of them do not."""
    plan = plan_deployment(k3, source="k3", gpus=gpus, card=parse_card(card))
    assert plan.fits == fits == (plan.free_bytes >= 0) == plan.cards[card]
    largest = max(rank.total for rank in plan.ranks)
    assert plan.free_bytes == CARDS[card] - CARDS[card] // 10 - largest
    assert all(option.fits for option in plan.alternatives)
    for option in plan.alternatives:
        stage = stage_memory(k3, option.layout, plan.workload)
        assert option.largest_bytes == max(rank.total for rank in stage)
        assert option.largest_bytes <= CARDS[card] - CARDS[card] // 10
    if not fits:
        assert plan.max_sequences == 0 and plan.alternatives[-1].layout.ranks > gpus


def test_room_for_sequences(k3: Inventory):
    plan = plan_deployment(k3, source="k3", gpus=16, card=parse_card("b300"), context=10_000)
    assert plan.max_sequences > 0
    for sequences, fits in ((plan.max_sequences, True), (plan.max_sequences + plan.layout.ep, False)):
        again = plan_deployment(
            k3, source="k3", gpus=16, tp=plan.layout.tp, ep=plan.layout.ep, pp=plan.layout.pp,
            card=parse_card("b300"), context=10_000, sequences=sequences,
        )  # fmt: skip
        assert again.fits == fits


@pytest.mark.parametrize(
    ("card", "fewest", "whole"),
    [("h200", 14, 16), ("b200", 11, 16), ("mi300x", 10, 16), ("24GB", 84, 88), ("b300", 7, 8)],
)
def test_fewest_gpus(k3: Inventory, card: str, fewest: int, whole: int):
    """The fewest of all are named; the fewest in whole nodes are laid out and called recommended."""
    plan = plan_deployment(k3, source="k3", card=parse_card(card))
    assert plan.fits and plan.fewest and plan.fewest_in_nodes
    assert plan.layout == plan.fewest_in_nodes.layout and plan.layout.ranks == whole
    assert plan.fewest.layout.ranks == fewest and plan.fewest.fits
    assert plan.reason.startswith(f"{fewest} GPUs are the fewest that hold it with")
    assert plan.reason.endswith(f"; {whole} are recommended, the fewest in whole nodes of 8")
    assert plan_deployment(k3, source="k3", gpus=fewest, card=parse_card(card)).fits
    assert not plan_deployment(k3, source="k3", gpus=fewest - 1, card=parse_card(card)).fits


def test_nodes_of_other_sizes(k3: Inventory):
    racks = plan_deployment(k3, source="k3", card=parse_card("gb200"), node_gpus=4)
    assert racks.layout == Layout(4, 1, 3) and "whole nodes of 4" in racks.reason
    single = plan_deployment(k3, source="k3", card=parse_card("gb200"), node_gpus=72)
    assert single.layout.ranks == 12 and "12 are recommended, the fewest that divide a node of 72" in single.reason


def test_a_layout_that_straddles_nodes_is_taken_only_where_no_other_fits_and_called_so(k3: Inventory):
    plan = plan_deployment(k3, source="k3", gpus=84, card=parse_card("24GB"))
    assert plan.fits and plan.layout == Layout(6, 1, 14)
    assert plan.reason.endswith("TP6 x EP1 x PP14 fits; TP 6 straddles nodes of 8 GPUs")
    assert "straddles" not in plan_deployment(k3, source="k3", gpus=84, card=parse_card("24GB"), node_gpus=6).reason


def test_few_gpus_and_no_answer(k3: Inventory):
    tiny = Inventory.from_config(K3Config.from_dict(tiny_config()))
    assert plan_deployment(tiny, source="x", card=parse_card("1GB")).reason.startswith("1 GPU is the fewest that hold")
    with pytest.raises(UsageError, match="neither GPUs nor their memory"):
        plan_deployment(k3, source="k3")
    with pytest.raises(UnsupportedError, match="no layout"):
        plan_deployment(k3, source="k3", card=parse_card("1GB"))


def test_a_layout_that_fits_is_taken_before_one_that_does_not(k3: Inventory):
    plan = plan_deployment(k3, source="k3", gpus=32, card=parse_card("h100"))
    assert plan.fits and plan.layout == Layout(8, 2, 2)
    assert plan.reason.startswith("TP8 x EP4 x PP1 would be preferred but needs 75.1 GB")
    # What was given is kept, fitting or not.
    given = plan_deployment(k3, source="k3", gpus=32, pp=1, tp=8, card=parse_card("h100"))
    assert given.layout == Layout(8, 4, 1) and not given.fits


def test_without_memory_the_smallest_card_is_named(k3: Inventory):
    plan = plan_deployment(k3, source="k3", gpus=8)
    assert plan.card_chosen and plan.fits and plan.card.name == "mi325x"
    tight = plan_deployment(k3, source="k3", gpus=8, margin=50_000_000_000)
    assert tight.fits and CARDS[tight.card.name] == 288_000_000_000 and tight.card.margin_bytes == 50_000_000_000
    none = plan_deployment(k3, source="k3", gpus=1)
    assert not none.fits and not any(none.cards.values())


def test_divisibility(k3: Inventory):
    found = divisibility(k3)
    assert found.tp == [n for n in range(1, 97) if 96 % n == 0]
    assert found.ep == [n for n in range(1, 897) if 896 % n == 0]
    assert found.max_pp == 93
    assert any("96 attention heads" in reason and "groups of 32" in reason for reason in found.reasons)
    with pytest.raises(UnsupportedError) as caught:
        plan_deployment(k3, source="k3", gpus=5, tp=5)
    assert "TP 5 does not divide" in caught.value.message and "possible:" in caught.value.hint


@pytest.mark.parametrize(
    ("section", "terabytes"),
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "modules_to_not_convert": ["self_attn", "vision_tower"]}, 1.5),
        ({"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ["self_attn"]}, 2.85),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, 1.56),
        ({"format": "pack-quantized", "config_groups": {"group_0": {
            "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}, "targets": ["Linear"]}}}, 1.65),
        ({"quant_method": "aqlm"}, 5.56),
    ],
    ids=["gptq", "fp8", "nf4", "int4", "unknown"],
)  # fmt: skip
def test_a_bare_configuration_is_counted_by_what_it_declares(section: dict[str, Any], terabytes: float):
    document = release.config_dict()
    document["text_config"]["quantization_config"] = section
    config = K3Config.from_dict(document)
    declared = Declared(config)
    assert Inventory.from_config(config, declared).total_bytes == pytest.approx(terabytes * 1e12, rel=0.02)
    assert bool(declared.open) == (section.get("quant_method") in ("gptq", "aqlm"))


def test_a_storage_that_cannot_hold_a_matrix_is_told():
    document = tiny_config()
    document["text_config"]["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": 4096}
    config = K3Config.from_dict(document)
    declared = Declared(config)
    plain = sum(tensor.nbytes for tensor in Inventory.from_config(config, declared).tensors)
    assert any(
        "int4 cannot hold block_sparse_moe.experts.w1, which is counted as plain" in line for line in declared.open
    )
    document["text_config"].pop("quantization_config")
    assert Inventory.from_config(K3Config.from_dict(document)).total_bytes == plain


def test_numbers_beside_a_matrix_are_counted_and_other_names_are_not(mini: Path):
    checkpoint = Checkpoint.open(mini)
    items = dict(TensorTable.of(checkpoint).items())
    bare = Inventory.from_tensors(checkpoint.config, items.items()).total_bytes
    scales = {
        f"{name.removesuffix('.weight_packed')}.input_scale": Kind("F32", (1,)) for name in items if "_packed" in name
    }
    scaled = Inventory.from_tensors(checkpoint.config, {**items, **scales}.items())
    assert scales and scaled.total_bytes == bare + 4 * len(scales)
    assert sum(scaled.weights(Layout(ep=2))[0].values()) > 0
    for name, kind in (("k_scale", Kind("F32", (2,))), ("secret", Kind("F32", ()))):
        odd = {**items, f"language_model.model.layers.1.self_attn.o_proj.{name}": kind}
        with pytest.raises(CheckpointCorrupt, match=name):
            Inventory.from_tensors(checkpoint.config, odd.items())


def test_replicated_bytes(k3: Inventory):
    plan = plan_deployment(k3, source="k3", gpus=8)
    assert plan.replicated["latent"] == RELEASE["latent"] and plan.replicated["vision"] == RELEASE["vision"]
    assert plan.replicated["router"] == RELEASE["router"]
    assert "routed_experts" not in plan.replicated and "shared_experts" not in plan.replicated
    assert plan_deployment(k3, source="k3", gpus=1).replicated == {}


def test_uneven_experts_and_foreign_tensors_are_refused(mini: Path):
    checkpoint = Checkpoint.open(mini)
    items = dict(TensorTable.of(checkpoint).items())
    name = next(name for name in items if ".experts.3.w1.weight_packed" in name)
    odd = {**items, name: Kind("BF16", (32, 32))}
    with pytest.raises(CheckpointCorrupt, match="11 of 12 experts"):
        Inventory.from_tensors(checkpoint.config, odd.items())
    foreign = "language_model.model.layers.2.self_attn.rotary.weight"
    with pytest.raises(CheckpointCorrupt, match="rotary"):
        Inventory.from_tensors(checkpoint.config, {**items, foreign: Kind("BF16", (4,))}.items()).weights(Layout())
    beyond = "language_model.model.layers.99.input_layernorm.weight"
    with pytest.raises(CheckpointCorrupt, match=r"layers\.99"):
        Inventory.from_tensors(checkpoint.config, {**items, beyond: Kind("BF16", (4,))}.items())


class _Page(HTMLParser):
    """Collects tags and attributes, and checks that what is opened is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta",):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_stands_alone_and_has_a_bar_for_every_rank(k3: Inventory):
    plan = plan_deployment(
        k3, source="<script>x</script>", gpus=32, pp=2, card=parse_card("h200"), gpu_price=2.0, sequences=4
    )
    text = plan_html(plan)
    page = _Page(text)
    assert page.open == [] and "<script" not in text and "http" not in text
    assert not [attributes for _, attributes in page.tags if {"src", "href"} & attributes.keys()]
    bars: dict[float, float] = {}
    for tag, attributes in page.tags:
        if tag == "rect":
            top = float(attributes["y"] or 0)
            bars[top] = bars.get(top, 0.0) + float(attributes["width"] or 0)
    assert len(bars) == len(plan.equal_ranks) == 2  # equal ranks share one
    scale = (960 - 150 - 10) / 141e9
    for (rank, _), width in zip(plan.equal_ranks, bars.values(), strict=True):
        assert width == pytest.approx(rank.total * scale, abs=0.5)
    assert "ranks 0-15 (16)" in text and "ranks 16-31 (16)" in text
    assert "An hour of 32 GPUs at 2.00 costs 64.00" in text and "price per hour" in text
    assert "4 sequences of 131,072 tokens; there is room for" in text
    unpriced = plan_html(plan_deployment(k3, source="k3", gpus=16, card=parse_card("h200")))
    assert "price" not in unpriced and "room for sequences" in unpriced


def test_a_page_of_many_equal_ranks_is_short_and_a_small_card_has_one_label(k3: Inventory):
    many = plan_html(plan_deployment(k3, source="k3", gpus=512, card=parse_card("h200")))
    assert "(512)" in many and len(many) < 20_000
    small = plan_html(plan_deployment(k3, source="k3", gpus=1, card=parse_card("24GB")))
    axis = small[: small.index("</svg>")].rsplit("<line", 1)[1]
    assert axis.count("<text") == 1 and ">24 GB<" in axis


def test_stage_layers_cover_the_model():
    for pp in range(1, 9):
        assert [layer for stage in stages(8, pp) for layer in stage] == list(range(8))


def test_a_scheme_that_the_layout_cannot_have_is_a_problem():
    """bfloat16 experts of intermediate width 64 divide by TP 4; MXFP4 groups of 32 do not."""
    document = tiny_config(kda_heads=4, mla_heads=4, moe_intermediate_size=64)
    document["text_config"].pop("quantization_config")
    plan = plan_deployment(Inventory.from_config(K3Config.from_dict(document)), source="x", gpus=4, tp=4)
    problems_of = {effect.scheme: effect.problem for effect in plan.effects if effect.component == "experts"}
    assert problems_of["keep"] == problems_of["fp8-channel"] == ""
    assert "no whole scale groups" in problems_of["mxfp4"]
