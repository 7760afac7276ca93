"""What is refused before anything is written: foreign, absent and misshapen tensors, folders of ranks that are not whole."""

from __future__ import annotations

import json

import pytest

from k3tool.checkpoint.header import build_header
from k3tool.checkpoint.index import build_index
from k3tool.errors import CheckpointCorrupt, CheckpointMissing, UsageError
from k3tool.reshard import Request, prepare
from k3tool.synthetic import tiny_config
from k3tool.transform.forms import companions, open_form
from k3tool.transform.record import LayoutRecord, parse_record
from tests.transform import cases

RANK = "rank-00001-of-00004/"
PREFIX = "language_model.model.layers."


def document() -> dict:
    return tiny_config(num_layers=2, kda_heads=2, mla_heads=2, num_experts=4, moe_intermediate_size=64, vocab_size=259)


def checkpoint(change=lambda specs: specs) -> dict[str, bytes]:
    """One shard of zeros with the specs of the catalogue, changed."""
    from k3tool.catalog import catalog
    from k3tool.config import K3Config

    specs = change([(e.name, e.dtype, e.shape) for e in catalog(K3Config.from_dict(document())).entries])
    head, header = build_header(specs)
    index = build_index({spec.name: "model.safetensors" for spec in header.tensors}, 0)
    return {
        "model.safetensors": head + bytes(header.file_size - header.data_start),
        "model.safetensors.index.json": index,
        "config.json": json.dumps(document()).encode(),
    }


@pytest.mark.parametrize("name", ["mtp.head.weight", PREFIX + "2.input_layernorm.weight", PREFIX + "0.self_attn.x.weight",
                                  PREFIX + "1.block_sparse_moe.experts.4.w1.weight_packed", "../../etc/passwd"])  # fmt: skip
def test_foreign_tensors_are_named(name):
    with pytest.raises(CheckpointCorrupt, match=r"holds 1 tensors that its configuration does not imply") as caught:
        prepare(cases.as_source(checkpoint(lambda specs: [*specs, (name, "BF16", (4,))])), Request(tp=2))
    assert name in caught.value.message and caught.value.details["unexpected"] == [name]
    assert caught.value.exit_code == 11


def test_absent_tensors_are_named():
    gone = PREFIX + "1.block_sparse_moe.experts.2.w2.weight_scale"
    with pytest.raises(CheckpointMissing, match="lacks 1 tensors") as caught:
        prepare(cases.as_source(checkpoint(lambda specs: [s for s in specs if s[0] != gone])), Request(tp=2))
    assert gone in caught.value.message and caught.value.exit_code == 10


def test_misshapen_tensors_are_named():
    wrong = PREFIX + "0.self_attn.o_proj.weight"
    with pytest.raises(CheckpointCorrupt, match=r"o_proj\.weight: expected BF16 \[64, 64\], found BF16 \[64, 32\]"):
        prepare(
            cases.as_source(checkpoint(lambda specs: [(n, d, (64, 32) if n == wrong else s) for n, d, s in specs])),
            Request(tp=2),
        )


def test_a_text_only_checkpoint_may_lack_the_vision_tower_but_not_half_of_it():
    text = checkpoint(lambda specs: [s for s in specs if not s[0].startswith(("vision_tower", "mm_projector"))])
    prepare(cases.as_source(text), Request(tp=2))
    with pytest.raises(CheckpointMissing, match="vision_tower"):
        prepare(
            cases.as_source(checkpoint(lambda specs: [s for s in specs if not s[0].startswith("vision_tower")])),
            Request(tp=2),
        )


@pytest.fixture(scope="module")
def ranks() -> dict[str, bytes]:
    source = cases.as_source(cases.write(document(), 3))
    return cases.carry_out_in_memory(prepare(source, Request(tp=2, ep=2)))


def join(files: dict[str, bytes]) -> None:
    prepare(cases.as_source(files), Request(gpus=1, form="hf"))


def test_ranks_join(ranks):
    join(ranks)
    opened = open_form(cases.as_source(ranks))
    assert opened.companions == ["tokenizer_config.json"]


def test_a_missing_rank_is_named(ranks):
    with pytest.raises(CheckpointMissing, match="lacks rank 1") as caught:
        join({name: data for name, data in ranks.items() if not name.startswith(RANK)})
    assert "--rank 1" in caught.value.hint


def test_a_missing_rank_file_is_named(ranks):
    gone = next(name for name in ranks if name.startswith(RANK) and name.endswith(".safetensors"))
    with pytest.raises(CheckpointMissing, match=gone.rpartition("/")[2]):
        join({name: data for name, data in ranks.items() if name != gone})


def test_one_rank_is_no_checkpoint(ranks):
    alone = {name.removeprefix(RANK): data for name, data in ranks.items() if name.startswith(RANK)}
    with pytest.raises(UsageError, match="is rank 1 of 4, not a whole checkpoint"):
        join(alone)


@pytest.mark.parametrize("other", ["rank-00000", "rank-00003"], ids=["TP neighbour", "other experts"])
def test_two_ranks_swapped_are_noticed(ranks, other):
    def swap(name: str) -> str:
        return name.replace("rank-00001", "rank-x").replace(other, "rank-00001").replace("rank-x", other)

    with pytest.raises(CheckpointCorrupt, match=r"config\.json says rank \d of 4 .*, k3tool\.json says"):
        join({swap(name): data for name, data in ranks.items()})


def test_a_rank_with_tensors_of_another_is_noticed(ranks):
    mine, theirs = "rank-00000-of-00004/", "rank-00002-of-00004/"
    stolen = {n: d for n, d in ranks.items() if not n.startswith(theirs) or n.endswith("config.json")}
    stolen.update({n.replace(mine, theirs): d for n, d in ranks.items() if n.startswith(mine) and "config" not in n})
    with pytest.raises(CheckpointCorrupt, match="which belongs to another rank"):
        join(stolen)


@pytest.mark.parametrize(
    ("key", "value", "match"),
    [
        ("layout", {"tp": 4, "ep": 1, "pp": 1}, r"config\.json says"),
        ("ranks", 5, "not a layout that k3tool wrote"),
        ("k3tool_layout", 99, "k3tool_layout must be 1, which this k3tool reads, found 99"),
        ("layout", {"tp": 0, "ep": 2, "pp": 2}, "tp must be a whole number of at least 1, found 0"),
        ("joins", {}, "does not say how"),
        (
            "joins",
            {"kda/self_attn.q_proj.weight": {"split": "x", "axis": 0, "stored": 1, "content": 1}},
            "split must be one of .*, found 'x'",
        ),
    ],
)
def test_a_layout_file_that_lies_is_refused(ranks, key, value, match):
    record = {**json.loads(ranks["k3tool.json"]), key: value}
    with pytest.raises((CheckpointCorrupt, CheckpointMissing), match=match):
        join({**ranks, "k3tool.json": json.dumps(record).encode()})


def test_a_join_of_another_extent_is_refused(ranks):
    record = json.loads(ranks["k3tool.json"])
    record["joins"]["global/lm_head.weight"]["stored"] = 264
    with pytest.raises(CheckpointCorrupt, match="lm_head"):
        join({**ranks, "k3tool.json": json.dumps(record).encode()})


@pytest.mark.parametrize("text", [b"", b"[]", b"{}", b"null", b'{"k3tool_layout": 1}', b"\xff", b"[" * 100_000])
def test_bytes_that_are_no_layout_file(text):
    with pytest.raises(CheckpointCorrupt, match="not a layout that k3tool wrote"):
        parse_record(text)


def test_the_record_keeps_every_join(ranks):
    record = parse_record(ranks["k3tool.json"])
    config = open_form(cases.as_source(ranks)).form.config
    again = parse_record(LayoutRecord(**vars(record)).as_bytes(config))
    assert again == record and not record.exceptions
    assert record.joins["kda/self_attn.A_log"]._asdict() == {"split": "heads", "axis": 0, "stored": 32, "content": 2}
    assert record.joins["global/model.embed_tokens.weight"].stored == 259
    assert record.joins["layer/input_layernorm.weight"].axis is None
    document = json.loads(ranks["k3tool.json"])
    assert document["vocabulary"] == {"size": 259, "padded": 260} and document["expert_blocks"] == [[0, 2], [2, 4]]
    assert document["folders"][1] == RANK[:-1] and document["stages"] == [[0, 2]]


def test_what_a_rank_says_of_itself(ranks):
    section = json.loads(ranks[RANK + "config.json"])["k3tool"]
    assert section == {"rank": 1, "ranks": 4, "tp": 2, "ep": 2, "pp": 1, "tp_rank": 1, "ep_rank": 0, "pp_rank": 0,
                       "layers": [0, 2], "experts": [0, 2]}  # fmt: skip


def test_storage_of_one_role_may_differ_between_tensors(tmp_path):
    """Half of the `A_log` padded, half not: the exceptions are named, and the join is still the identity."""
    files = cases.write(tiny_config(num_layers=3, kda_heads=2, mla_heads=2, num_experts=2, experts_per_token=1,
                                    moe_intermediate_size=64, vocab_size=259, vision=False), 0, shards=1)  # fmt: skip
    shard = next(name for name in files if name.startswith("model-"))
    tensors = cases.tensors_of(files)
    changed = PREFIX + "1.self_attn.A_log"
    tensors[changed] = ("F32", (2,), tensors[changed][2][:8])
    head, _ = build_header((name, dtype, shape) for name, (dtype, shape, _) in tensors.items())
    files[shard] = head + b"".join(data for _, _, data in tensors.values())
    ranks = cases.carry_out_in_memory(prepare(cases.as_source(files), Request(tp=2)))
    assert list(json.loads(ranks["k3tool.json"])["exceptions"]) == [changed]
    joined = cases.carry_out_in_memory(prepare(cases.as_source(ranks), Request(gpus=1, form="hf")))
    assert cases.tensors_of(joined) == tensors


def test_companions_are_plain_files_beside_the_weights():
    names = ["config.json", "model.safetensors", "model.safetensors.index.json", "tiktoken.model", "LICENSE", ".git",
             "sub/x.json", "golden.safetensors", "k3tool.json", "k3tool-manifest.json", "x.k3partial", "modeling.py"]  # fmt: skip
    assert companions(dict.fromkeys(names, 1)) == ["LICENSE", "modeling.py", "tiktoken.model"]
