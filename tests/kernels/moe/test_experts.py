"""Routed experts: the compiled twin against the torch twin and a float64 twin, in every storage format."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from k3tool.kernels import cpu as compiled
from k3tool.kernels.dispatch import use
from k3tool.kernels.moe import DenseExperts, PackedExperts, experts_forward

needs_compiler = pytest.mark.skipif(not compiled.available(), reason="compiled kernels are not available here")
FORMATS = ["mxfp4", "nvfp4", "bfloat16", "float16", "float32"]
# (experts, I, D, K): widths of 32 beside blocks of 64, one expert, all experts, more experts than tokens visit.
LAYERS = [(5, 32, 96, 2), (3, 64, 32, 3), (16, 160, 64, 3), (1, 96, 128, 1), (40, 32, 32, 2)]
TOKENS = [1, 3, 17, 70]
BETA, LINEAR_BETA = 4.0, 25.0


def make(format_: str, experts: int, inner: int, wide: int, seed: int = 0) -> PackedExperts | DenseExperts:
    draw = torch.Generator().manual_seed(seed)
    shapes = {"w1": (inner, wide), "w3": (inner, wide), "w2": (wide, inner)}
    if format_ not in ("mxfp4", "nvfp4"):
        dtype = getattr(torch, format_)
        return DenseExperts(
            *((torch.randn(experts, *s, generator=draw) * s[1] ** -0.5).to(dtype) for s in shapes.values())
        )
    group = 32 if format_ == "mxfp4" else 16
    fields: dict[str, Tensor] = {}
    for name, (rows, columns) in shapes.items():
        fields[f"{name}_packed"] = torch.randint(0, 256, (experts, rows, columns // 2), generator=draw).to(torch.uint8)
        if group == 32:
            scale = torch.randint(120, 125, (experts, rows, columns // 32), generator=draw).to(torch.uint8)
        else:
            scale = (torch.rand(experts, rows, columns // 16, generator=draw) * 3 + 0.01).to(torch.float8_e4m3fn)
            fields[f"{name}_global"] = torch.rand(experts, generator=draw) * 20 + 5
        fields[f"{name}_scale"] = scale
    return PackedExperts(**fields, group_size=group)


def route(tokens: int, experts: int, top_k: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    ids = torch.rand(tokens, experts, generator=draw).argsort(1)[:, :top_k].contiguous()
    return ids, torch.rand(tokens, top_k, generator=draw)


def float64_twin(x: Tensor, layer: PackedExperts | DenseExperts, ids: Tensor, weights: Tensor, kind: str) -> Tensor:
    """One token and one slot after the other, nothing rounded but what bfloat16 activations round."""

    def rounded(value: Tensor) -> Tensor:
        return value.to(torch.bfloat16).double() if x.dtype == torch.bfloat16 else value

    out = torch.zeros(x.shape, dtype=torch.float64)
    matrices = {
        e: [layer.matrix(name, e, torch.float32).double() for name in ("w1", "w3", "w2")]
        for e in set(ids.flatten().tolist())
    }
    for token in range(x.shape[0]):
        for slot in range(ids.shape[1]):
            w1, w3, w2 = matrices[int(ids[token, slot])]
            g, u = rounded(w1 @ x[token].double()), rounded(w3 @ x[token].double())
            if kind == "silu":
                hidden = g * torch.sigmoid(g) * u
            else:
                hidden = BETA * torch.tanh(g / BETA) * torch.sigmoid(g) * LINEAR_BETA * torch.tanh(u / LINEAR_BETA)
            out[token] += weights[token, slot].double() * rounded(w2 @ rounded(hidden))
    return out


def error(found: Tensor, wanted: Tensor) -> float:
    return ((found.double() - wanted.double()).norm() / wanted.double().norm()).item()


def poison() -> None:
    from k3tool.kernels.moe import cpu

    for layer in list(cpu._LAYERS.values()):
        layer.compiled.scratch.poison()


@needs_compiler
@pytest.mark.parametrize("format_", FORMATS)
def test_both_paths_against_the_torch_twin(format_: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Float32 activations: three chained sums of at most 160 terms, each within a few float32 steps."""
    from k3tool.kernels.moe import cpu

    for experts, inner, wide, top_k in LAYERS:
        layer = make(format_, experts, inner, wide)
        for tokens in TOKENS:
            x = torch.randn(tokens, wide, generator=torch.Generator().manual_seed(tokens))
            ids, weights = route(tokens, experts, top_k)
            with use("reference"):
                wanted = experts_forward(x, layer, ids, weights)
            for crowds in (True, False):
                if tokens > 17 and not crowds:
                    continue
                monkeypatch.setattr(cpu, "_has_crowds", lambda *_, crowds=crowds: crowds)
                poison()
                found = experts_forward(x, layer, ids, weights)
                assert found.dtype == torch.float32 and found.shape == x.shape
                assert error(found, wanted) < 1e-6, (experts, inner, wide, top_k, tokens, crowds)


@needs_compiler
@pytest.mark.parametrize("format_", ["mxfp4", "nvfp4", "bfloat16"])
@pytest.mark.parametrize("activation", ["situ", "silu"])
@pytest.mark.parametrize("crowds", [True, False])
def test_bfloat16_activations_round_where_the_model_rounds(
    format_: str, activation: str, crowds: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against float64 with the same roundings. What differs is a bfloat16 step where a float32 sum falls on the other
    side of a tie, which is rare: leaving out any one of the four roundings gives an error above 1e-3."""
    from k3tool.kernels.moe import cpu

    monkeypatch.setattr(cpu, "_has_crowds", lambda *_: crowds)
    layer = make(format_, 6, 96, 160)
    x = torch.randn(24, 160, generator=torch.Generator().manual_seed(1)).bfloat16()
    ids, weights = route(24, 6, 3)
    wanted = float64_twin(x, layer, ids, weights, activation)
    assert error(experts_forward(x, layer, ids, weights, activation), wanted) < 4e-4
    with use("reference"):
        assert error(experts_forward(x, layer, ids, weights, activation), wanted) < 4e-4


@pytest.mark.parametrize("backend", ["reference", pytest.param("auto", marks=needs_compiler)])
def test_against_float64(backend: str) -> None:
    layer = make("mxfp4", 9, 64, 96)
    x = torch.randn(12, 96, generator=torch.Generator().manual_seed(2))
    ids, weights = route(12, 9, 4)
    with use(backend):
        assert error(experts_forward(x, layer, ids, weights), float64_twin(x, layer, ids, weights, "situ")) < 1e-6


@pytest.mark.parametrize("backend", ["reference", pytest.param("auto", marks=needs_compiler)])
@pytest.mark.parametrize("tokens", [1, 40])
def test_an_expert_named_twice_counts_twice(backend: str, tokens: int) -> None:
    layer = make("mxfp4", 3, 32, 64)
    x = torch.randn(tokens, 64, generator=torch.Generator().manual_seed(3))
    ids = torch.tensor([[2, 0, 2]]).repeat(tokens, 1)
    weights = torch.tensor([[0.5, 0.25, 1.0]]).repeat(tokens, 1)
    with use(backend):
        twice = experts_forward(x, layer, ids, weights)
        once = experts_forward(x, layer, ids[:, :2].contiguous(), torch.tensor([[1.5, 0.25]]).repeat(tokens, 1))
    assert error(twice, once) < 1e-6


@needs_compiler
@pytest.mark.parametrize("tokens", [1, 40])
def test_equal_ids_are_summed_in_order_of_position(tokens: int) -> None:
    """One is lost in 10^8 when it comes first, and is what remains when it comes last."""
    layer = make("mxfp4", 3, 32, 64)
    x = torch.randn(1, 64, generator=torch.Generator().manual_seed(3)).repeat(tokens, 1)
    ids = torch.full((tokens, 3), 1)
    lost = experts_forward(x, layer, ids, torch.tensor([[1.0, 1e8, -1e8]]).repeat(tokens, 1))
    kept = experts_forward(x, layer, ids, torch.tensor([[1e8, -1e8, 1.0]]).repeat(tokens, 1))
    once = experts_forward(x, layer, ids[:, :1].contiguous(), torch.ones(tokens, 1))
    assert torch.equal(kept, once)
    assert (lost - once).norm() > 0.5 * once.norm()


@needs_compiler
def test_the_order_of_slots_changes_nothing() -> None:
    """Sums run in ascending order of expert id, however the router happened to order them."""
    layer = make("mxfp4", 12, 32, 64)
    for tokens in (1, 30):
        x = torch.randn(tokens, 64, generator=torch.Generator().manual_seed(4))
        ids, weights = route(tokens, 12, 5)
        turned = experts_forward(x, layer, ids.flip(1).contiguous(), weights.flip(1).contiguous())
        assert torch.equal(experts_forward(x, layer, ids, weights), turned)


@needs_compiler
def test_many_waves_of_hidden_units_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    from k3tool.kernels.moe import cpu

    layer = make("mxfp4", 8, 64, 64)
    x = torch.randn(200, 64, generator=torch.Generator().manual_seed(5))
    ids, weights = route(200, 8, 3)
    whole = experts_forward(x, layer, ids, weights)
    monkeypatch.setattr(cpu, "HIDDEN_BYTES", 1)
    poison()
    assert torch.equal(experts_forward(x, layer, ids, weights), whole)


@needs_compiler
@pytest.mark.parametrize("tokens", [1, 50])
def test_the_result_does_not_depend_on_threads(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from k3tool.kernels.cpu import pool
    from k3tool.kernels.moe import cpu

    layer = make("mxfp4", 6, 320, 256)
    x = torch.randn(tokens, 256, generator=torch.Generator().manual_seed(6))
    ids, weights = route(tokens, 6, 3)
    wanted = experts_forward(x, layer, ids, weights)
    workers = pool.Pool(3)
    try:
        monkeypatch.setattr(cpu.pool, "shared", lambda: workers)
        for _ in range(10):
            poison()
            assert torch.equal(experts_forward(x, layer, ids, weights), wanted)
    finally:
        workers.close()


@needs_compiler
@pytest.mark.parametrize("tokens", [1, 9])
def test_strided_inputs(tokens: int) -> None:
    layer = make("mxfp4", 4, 32, 64)
    x = torch.randn(tokens, 128, generator=torch.Generator().manual_seed(7))[:, :64]
    ids, weights = route(tokens, 4, 2)
    wide_ids, wide_weights = (torch.cat([t, t], 1)[:, ::2] for t in (ids, weights))
    found = experts_forward(x, layer, wide_ids, wide_weights)
    assert torch.equal(found, experts_forward(x.contiguous(), layer, wide_ids.contiguous(), wide_weights.contiguous()))


def test_no_token_and_no_slot() -> None:
    layer = make("mxfp4", 4, 32, 64)
    empty = experts_forward(torch.zeros(0, 64), layer, torch.zeros(0, 2, dtype=torch.int64), torch.zeros(0, 2))
    assert empty.shape == (0, 64)
    none = experts_forward(torch.ones(3, 64), layer, torch.zeros(3, 0, dtype=torch.int64), torch.zeros(3, 0))
    assert torch.equal(none, torch.zeros(3, 64))


def test_a_released_layer_reads_nothing_beside_its_own_experts() -> None:
    """Scales of the experts that are not visited are NaN: nothing of them reaches the result."""
    layer = make("mxfp4", 5, 32, 64)
    for name in ("w1", "w3", "w2"):
        getattr(layer, f"{name}_scale")[[0, 2, 4]] = 255
    for tokens in (1, 20):
        ids = torch.tensor([[1, 3]]).repeat(tokens, 1)
        assert experts_forward(torch.ones(tokens, 64), layer, ids, torch.ones(tokens, 2)).isfinite().all()
        ids[-1, 0] = 2
        assert experts_forward(torch.ones(tokens, 64), layer, ids, torch.ones(tokens, 2))[-1].isnan().all()


def test_what_does_not_fit_is_refused() -> None:
    layer = make("mxfp4", 4, 32, 64)
    x, ids, weights = torch.zeros(2, 64), torch.zeros(2, 1, dtype=torch.int64), torch.zeros(2, 1)
    for bad in (
        (x[:, :32], ids, weights),
        (x, ids.int(), weights),
        (x, ids, weights.double()),
        (x, ids[:1], weights[:1]),
        (x, ids + 4, weights),
        (x, ids - 1, weights),
        (x.double(), ids, weights),
    ):
        with pytest.raises(ValueError):
            experts_forward(bad[0], layer, bad[1], bad[2])
    with pytest.raises(ValueError, match="gelu"):
        experts_forward(x, layer, ids, weights, "gelu")
    with pytest.raises(ValueError, match="w2_scale"):
        fields = {**vars(layer), "w2_scale": layer.w2_scale[:, :, :0]}
        PackedExperts(**fields)
