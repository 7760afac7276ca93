"""The catalogue against the released index and the golden headers: every name, shape, dtype, byte and shard."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path

import pytest

from k3tool import release
from k3tool.catalog import catalog
from k3tool.config import K3Config
from k3tool.errors import UnsupportedError
from k3tool.names import component_of, parse_name
from tests.helpers import read_shard_header

# Parameters and bytes by component as published for the release, computed independently of this code.
RELEASED = {
    "routed experts": (2_722_740_830_208, 1_446_456_066_048),
    "KDA BF16": (30_607_048_704, 61_214_097_408),
    "KDA F32": (11_040_000, 44_160_000),
    "shared experts": (12_155_092_992, 24_310_185_984),
    "MLA": (5_572_706_304, 11_145_412_608),
    "latent": (4_727_310_336, 9_454_620_672),
    "embed_tokens": (1_174_405_120, 2_348_810_240),
    "lm_head": (1_174_405_120, 2_348_810_240),
    "dense MLP": (726_663_168, 1_453_326_336),
    "router weights": (590_872_576, 1_181_745_152),
    "router bias": (82_432, 329_728),
    "vision tower": (401_214_464, 802_428_928),
    "projector": (46_144_512, 92_289_024),
    "layer norms + AttnRes": (3_999_744, 7_999_488),
    "globals": (21_504, 43_008),
}


def _line(entry) -> str:
    name, component = entry.name, entry.component
    if component == "kda":
        return f"KDA {entry.dtype}"
    if component == "embeddings":
        return "lm_head" if "lm_head" in name else "embed_tokens"
    if component == "router":
        return "router bias" if name.endswith("bias") else "router weights"
    if component == "vision":
        return "projector" if name.startswith("mm_projector") else "vision tower"
    if component in ("norms", "attn_res"):
        return "layer norms + AttnRes" if ".layers." in name else "globals"
    names = {
        "routed_experts": "routed experts",
        "shared_experts": "shared experts",
        "mla": "MLA",
        "dense_mlp": "dense MLP",
    }
    return names.get(component, component)


def test_released_totals_to_the_byte():
    found = catalog(release.config())
    parameters: Counter[str] = Counter()
    size: Counter[str] = Counter()
    for entry in found.entries:
        parameters[_line(entry)] += entry.parameters
        size[_line(entry)] += entry.nbytes
    assert {line: (parameters[line], size[line]) for line in size} == RELEASED
    assert len(found.entries) == 497_220
    assert found.total_size == release.TOTAL_SIZE == 1_560_860_324_864
    assert sum(entry.parameters for entry in found.entries) == 2_779_931_837_184


def test_released_index_name_by_name(shared: Path):
    text = gzip.decompress((shared / "k3" / "model.safetensors.index.json.gz").read_bytes())
    index = json.loads(text)
    found = catalog(K3Config.from_file(shared / "k3" / "config.json"))
    assert {entry.name: found.shards[entry.shard] for entry in found.entries} == index["weight_map"]
    assert index["metadata"]["total_size"] == found.total_size
    assert release.same_architecture(K3Config.from_file(shared / "k3" / "config.json"))


def test_released_files():
    shards = release.shards()
    assert len(shards) == 96
    assert sum(record.size for record in shards.values()) == release.FILE_SIZE == 1_560_936_091_448
    assert shards["model-00001-of-000096.safetensors"].size == 2_341_216_112
    assert shards["model-00096-of-000096.safetensors"].sha256.startswith("9d10c74fc10161be")
    assert len({record.sha256 for record in shards.values()}) == 96
    # A shard is longer than its tensors by one header; 0.8 MB at most.
    found = catalog(release.config())
    tensors: Counter[int] = Counter()
    for entry in found.entries:
        tensors[entry.shard] += entry.nbytes
    for number, name in enumerate(found.shards):
        assert 0 < shards[name].size - tensors[number] < 830_000


def _headers(folder: Path) -> dict[str, tuple[str, tuple[int, ...], str]]:
    found = {}
    for path in sorted(folder.glob("model-*.safetensors")):
        for name, entry in read_shard_header(path).items():
            if name != "__metadata__":
                found[name] = (entry["dtype"], tuple(entry["shape"]), path.name)
    return found


def _catalogued(folder: Path) -> dict[str, tuple[str, tuple[int, ...], str]]:
    found = catalog(K3Config.from_file(folder / "config.json"))
    return {entry.name: (entry.dtype, entry.shape, found.shards[entry.shard]) for entry in found.entries}


def test_golden_mini_headers(mini: Path):
    assert _headers(mini) == _catalogued(mini)


@pytest.mark.parametrize("name", ["k3-tiny-14", "k3-tiny-93"])
def test_golden_headers(shared: Path, name: str):
    assert _headers(shared / "golden" / name) == _catalogued(shared / "golden" / name)


def test_names_parse_and_print_back():
    for entry in catalog(release.config()).entries[::37]:
        parsed = parse_name(entry.name)
        assert str(parsed) == entry.name
        if not entry.name.endswith(("g_proj.weight", "o_proj.weight")):  # shared by KDA and MLA
            assert component_of(parsed) == entry.component
    assert parse_name("model.layers.01.mlp.up_proj.weight") != parse_name("model.layers.1.mlp.up_proj.weight")
    assert parse_name("no such tensor") is None


def _variant(mini: Path, **text: object) -> K3Config:
    document = json.loads((mini / "config.json").read_text())
    document["text_config"].update(text)
    return K3Config.from_dict(document)


def test_variants_follow_the_configuration(mini: Path):
    names = {entry.name: entry for entry in catalog(_variant(mini, q_lora_rank=None)).entries}
    prefix = "language_model.model.layers.3."
    assert names[f"{prefix}self_attn.q_proj.weight"].shape == (3 * (16 + 8), 64)
    assert f"{prefix}self_attn.q_a_proj.weight" not in names
    names = {entry.name: entry for entry in catalog(_variant(mini, routed_expert_hidden_size=None)).entries}
    assert names[f"{prefix}block_sparse_moe.experts.0.w2.weight_packed"].shape == (64, 16)
    assert not any("routed_expert_" in name for name in names)
    names = {entry.name: entry for entry in catalog(_variant(mini, num_shared_experts=1)).entries}
    assert names[f"{prefix}block_sparse_moe.shared_experts.gate_proj.weight"].shape == (32, 64)
    names = {entry.name: entry for entry in catalog(_variant(mini, attn_res_block_size=None)).entries}
    assert not any("res_" in name for name in names)


def test_width_that_is_no_whole_group_is_refused(mini: Path):
    with pytest.raises(UnsupportedError, match="48 columns are not whole groups of 32"):
        catalog(_variant(mini, routed_expert_hidden_size=48))
