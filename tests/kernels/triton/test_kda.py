"""KDA: Triton against the torch twin, and against the recurrence in float64."""

from __future__ import annotations

import importlib.metadata
import importlib.util

import pytest
import torch

from k3tool.kernels.kda import kernel, reference
from tests.kernels.test_kda import inputs, naive
from tests.kernels.triton.fence import relative, strided, ulps

# 3e-6: float32 sums over at most 64 tokens and 32 channels, as for the torch twin.
BOUND = 3e-6


def run(args, lower_bound, fence):
    """Outputs and last state of the Triton twin; the inputs stay as they are."""
    state = fence.copy(args[-1])
    return kernel.kda(*args[:-1], state, lower_bound=lower_bound), state


@pytest.mark.parametrize("time", [1, 2, 15, 16, 17, 63, 64, 65, 100, 129])
def test_every_length_with_an_initial_state(time, fence):
    args = inputs(time, heads=1, key_dim=32, value_dim=16, seed=time)
    expected, last = naive(*args, -5.0)
    found, state = run(args, -5.0, fence)
    assert relative(found, expected) < BOUND
    assert relative(state, last) < BOUND


@pytest.mark.parametrize("time", [1, 17, 100])
@pytest.mark.parametrize("lower_bound", [-1.0, -9.0, None])
def test_other_gates(time, lower_bound, fence):
    """-9 is too strong for blocks of 16 split in their middle; None has no bound at all."""
    args = inputs(time, heads=1, seed=time)
    expected, last = naive(*args, lower_bound)
    found, state = run(args, lower_bound, fence)
    assert relative(found, expected) < BOUND
    assert relative(state, last) < BOUND


@pytest.mark.parametrize(
    "heads,key_dim,value_dim,batch,time", [(1, 8, 8, 1, 66), (3, 20, 33, 2, 1), (2, 20, 33, 2, 70)]
)
def test_odd_sizes_and_batches(heads, key_dim, value_dim, batch, time, fence):
    args = inputs(time, heads, key_dim, value_dim, batch)
    expected, last = naive(*args, -5.0)
    found, state = run(args, -5.0, fence)
    assert relative(found, expected) < BOUND
    assert relative(state, last) < BOUND


def test_key_and_value_blocks(monkeypatch, fence):
    """Several blocks of channels per program, as on a GPU, where the interpreter would take all at once."""
    args = inputs(70, heads=1, key_dim=40, value_dim=48)
    expected, last = naive(*args, -5.0)
    narrow = {
        "products_options": {"BLOCK_K": 16},
        "scan_options": {"BLOCK_V": 16},
        "solve_options": {"BLOCK_K": 16, "BLOCK_V": 32},
    }
    for name, options in narrow.items():
        first = getattr(kernel, name)
        monkeypatch.setattr(kernel, name, lambda *a, first=first, options=options: [{**first(*a)[0], **options}])
    found, state = run(args, -5.0, fence)
    assert relative(found, expected) < BOUND
    assert relative(state, last) < BOUND


@pytest.mark.parametrize("lower_bound", [-5.0, None])
@pytest.mark.parametrize("pattern", ["strong", "none", "alternating", "one strong token", "channels apart"])
def test_gate_extremes(pattern, lower_bound, fence):
    """Both ends of the gate: g = -5 for whole chunks (exp(320) if exponents were not differences), g = 0."""
    args = inputs(100, heads=1, key_dim=16)
    f, a_log, dt_bias = args[3], args[5], args[6]
    a_log.fill_(1.0)
    dt_bias.zero_()
    low, high = -40.0, 40.0
    f.fill_(high if pattern == "strong" else low)
    if pattern == "alternating":
        f[:, ::2] = high
    elif pattern == "one strong token":
        f[:, 70] = high
    elif pattern == "channels apart":
        f[..., ::2] = high
    expected, last = naive(*args, lower_bound)
    found, state = run(args, lower_bound, fence)
    assert torch.isfinite(found).all()
    assert torch.isfinite(state).all()
    # 2e-5: a cumulated log decay of up to 320 (2,000 without bound) is known to 1.5e-5 (1e-4) in float32.
    assert relative(found, expected) < 2e-5
    assert relative(state, last) < 2e-5


def test_equal_keys_without_decay(fence):
    """The triangular system at its worst: every key alike, beta near one, no decay."""
    args = inputs(64, heads=1, key_dim=16)
    args[1][:] = args[1][:, :1]
    args[3].fill_(-60.0)
    args[4].fill_(8.0)
    expected, last = naive(*args, -5.0)
    found, state = run(args, -5.0, fence)
    # 2e-5: 64 corrections in a row, each nearly cancelling the last.
    assert relative(found, expected) < 2e-5
    assert relative(state, last) < 2e-5


def test_large_and_tiny_inputs(fence):
    args = inputs(40)
    args[0] *= 1e15
    args[1] *= 1e-18
    args[2] *= 1e10
    args[4] *= 50
    expected, last = naive(*args, -5.0)
    found, state = run(args, -5.0, fence)
    assert relative(found, expected) < BOUND
    assert relative(state, last) < BOUND


def test_packed_sequences(fence):
    lengths = [5, 0, 64, 1, 15, 16, 17, 63, 65, 100, 0]
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    args = [x[0] for x in inputs(int(offsets[-1]))[:5]]
    a_log, dt_bias = inputs(1)[5:7]
    states = torch.randn(len(lengths), 2, 32, 16)
    expected_states = states.clone()
    expected = reference.kda_packed(*args, a_log, dt_bias, expected_states, offsets, lower_bound=-5.0)
    found_states = fence.copy(states)
    found = kernel.kda_packed(*args, a_log, dt_bias, found_states, offsets, lower_bound=-5.0)
    assert relative(found, expected) < BOUND
    assert relative(found_states, expected_states) < BOUND
    assert torch.equal(found_states[1], states[1])
    assert torch.equal(found_states[-1], states[-1])


@pytest.mark.parametrize("lengths", [[], [0, 0]])
def test_packed_without_tokens(lengths, fence):
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    args = [x[0, :0] for x in inputs(3)[:5]]
    states = torch.randn(len(lengths), 2, 32, 16)
    held = fence.copy(states)
    assert kernel.kda_packed(*args, *inputs(1)[5:7], held, offsets, lower_bound=-5.0).shape == (0, 2, 16)
    assert torch.equal(held, states)


def test_views_and_a_cut(fence):
    args = inputs(100)
    expected, last = naive(*args, -5.0)
    for index in range(4):
        args[index] = strided(args[index])
    args[4] = strided(args[4])
    state, rest = fence.copy(args[-1]), args[5:7]
    pieces = [
        kernel.kda(*(x[:, a:b] for x in args[:5]), *rest, state, lower_bound=-5.0)
        for a, b in ((0, 1), (1, 37), (37, 100))
    ]
    assert relative(torch.cat(pieces, 1), expected) < BOUND
    assert relative(state, last) < BOUND


@pytest.mark.parametrize("time", [1, 70])
def test_bfloat16_tokens_round_only_at_the_end(time, fence):
    args = inputs(time, dtype=torch.bfloat16)
    state = args[-1].clone()
    expected = reference.kda(*args[:-1], state, lower_bound=-5.0)
    found, held = run(args, -5.0, fence)
    # One unit: the float32 value may fall on the other side of a rounding boundary.
    assert ulps(found, expected) <= 1
    assert relative(held, state) < BOUND


def decode_inputs(batch, heads, dim, taps=4, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape, dtype=dtype):
        return torch.randn(*shape, generator=generator).to(dtype)

    return {
        "x": draw(batch, 3 * heads * dim),
        "conv_weight": draw(taps, 3 * heads * dim, dtype=torch.float32),
        "history": draw(batch, taps - 1, 3 * heads * dim),
        "f": draw(batch, heads, dim),
        "b": draw(batch, heads),
        "a_log": draw(heads, dtype=torch.float32),
        "dt_bias": draw(heads, dim, dtype=torch.float32),
        "state": draw(batch, heads, dim, dim, dtype=torch.float32),
        "gate": draw(batch, heads, dim),
        "norm_weight": draw(dim, dtype=torch.float32),
    }


@pytest.mark.parametrize("lower_bound", [-5.0, None])
@pytest.mark.parametrize("batch,heads,dim,taps", [(1, 3, 32, 4), (3, 2, 20, 3), (1, 1, 128, 2), (0, 2, 16, 4)])
def test_decode_step(batch, heads, dim, taps, lower_bound, fence):
    args = decode_inputs(batch, heads, dim, taps)
    history, state = args["history"].clone(), args["state"].clone()
    expected = reference.kda_decode(**{**args, "history": history, "state": state}, lower_bound=lower_bound, eps=1e-5)
    held = {name: fence.copy(args[name]) for name in ("history", "state")}
    found = kernel.kda_decode(**{**args, **held}, lower_bound=lower_bound, eps=1e-5)
    assert found.shape == (batch, heads, dim)
    assert relative(found, expected) < BOUND
    assert relative(held["state"], state) < BOUND
    assert torch.equal(held["history"], history)


@pytest.mark.parametrize("lower_bound", [-5.0, None])
@pytest.mark.parametrize("logit", [40.0, -40.0])
def test_decode_step_at_both_ends_of_the_gate(logit, lower_bound, fence):
    """g = -5 (or the strongest that there is), and g = 0: the state is all but forgotten, or kept whole."""
    args = decode_inputs(2, 2, 16)
    args["f"].fill_(logit)
    args["a_log"].fill_(1.0)
    args["dt_bias"].zero_()
    history, state = args["history"].clone(), args["state"].clone()
    expected = reference.kda_decode(**{**args, "history": history, "state": state}, lower_bound=lower_bound, eps=1e-5)
    held = {name: fence.copy(args[name]) for name in ("history", "state")}
    found = kernel.kda_decode(**{**args, **held}, lower_bound=lower_bound, eps=1e-5)
    assert torch.isfinite(found).all()
    assert relative(found, expected) < BOUND
    assert relative(held["state"], state) < BOUND


def test_decode_step_in_bfloat16_from_views(fence):
    args = decode_inputs(2, 2, 32, dtype=torch.bfloat16)
    history, state = args["history"].clone(), args["state"].clone()
    expected = reference.kda_decode(**{**args, "history": history, "state": state}, lower_bound=-5.0, eps=1e-5)
    wide = torch.full((2, 900), float("nan"), dtype=torch.bfloat16)
    held = {name: fence.copy(args[name]) for name in ("history", "state")}
    wide[:, 100:292], wide[:, 400:464], wide[:, 500:502] = args["x"], args["gate"].flatten(1), args["b"]
    views = {"x": wide[:, 100:292], "gate": wide[:, 400:464].unflatten(1, (2, 32)), "b": wide[:, 500:502]}
    found = kernel.kda_decode(**{**args, **held, **views}, lower_bound=-5.0, eps=1e-5)
    # Two units: convolution, recurrence and norm are rounded one after the other, as in the reference.
    assert ulps(found, expected) <= 2
    assert relative(held["state"], state) < 1e-5
    assert torch.equal(held["history"], history)


@pytest.mark.oracle
def test_fla_naive_kda():
    """fla-core's own slow form, loaded by file because importing the package needs a GPU."""
    try:
        file = importlib.metadata.distribution("fla-core").locate_file("fla/ops/kda/naive.py")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("fla-core is not installed")
    loaded = importlib.util.spec_from_file_location("fla_naive_kda", str(file))
    naive_module = importlib.util.module_from_spec(loaded)
    loaded.loader.exec_module(naive_module)
    args = inputs(100, heads=2, key_dim=32, value_dim=32)
    q, k, v, f, b, a_log, dt_bias, state = args
    unit_q, unit_k = (torch.nn.functional.normalize(x, dim=-1, eps=1e-12) for x in (q, k))
    g = reference.log_decay(f, a_log, dt_bias, -5.0)
    expected, last = naive_module.naive_recurrent_kda(
        unit_q, unit_k, v, g, torch.sigmoid(b), initial_state=state.clone(), output_final_state=True
    )
    found = kernel.kda(*args, lower_bound=-5.0)
    assert relative(found, expected) < BOUND
    assert relative(args[-1], last) < BOUND
