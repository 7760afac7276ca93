"""KDA against a token-by-token twin in float64, written from the recurrence alone."""

from __future__ import annotations

import math

import pytest
import torch

from k3tool.kernels import cpu as compiled
from k3tool.kernels.conv import causal_conv
from k3tool.kernels.dispatch import use
from k3tool.kernels.kda import kda, kda_decode
from k3tool.kernels.kda.reference import log_decay
from k3tool.kernels.norm import gated_rms_norm


@pytest.fixture(params=["reference", "cpu"], autouse=True)
def backend(request):
    """Every test runs on the torch twins and on the code compiled for this processor."""
    with use(request.param):
        yield request.param


def naive(q, k, v, f, b, a_log, dt_bias, state, lower_bound):
    """The recurrence of one sequence, one token after the other, in float64. Returns outputs and the last state."""
    q, k, v, f, b, a_log, dt_bias, state = (x.double() for x in (q, k, v, f, b, a_log, dt_bias, state))
    state = state.clone()
    outputs = []
    for t in range(q.shape[1]):
        z = f[:, t] + dt_bias
        rate = torch.exp(a_log)[:, None]
        g = -rate * torch.log1p(torch.exp(z)) if lower_bound is None else lower_bound / (1 + torch.exp(-rate * z))
        unit_q = q[:, t] / torch.sqrt((q[:, t] ** 2).sum(-1, keepdim=True) + 1e-6) / math.sqrt(q.shape[-1])
        unit_k = k[:, t] / torch.sqrt((k[:, t] ** 2).sum(-1, keepdim=True) + 1e-6)
        state = state * torch.exp(g)[..., None]
        error = v[:, t] - torch.einsum("bhkv,bhk->bhv", state, unit_k)
        beta = 1 / (1 + torch.exp(-b[:, t]))
        state = state + beta[..., None, None] * unit_k[..., None] * error[..., None, :]
        outputs.append(torch.einsum("bhkv,bhk->bhv", state, unit_q))
    return torch.stack(outputs, 1), state


def inputs(time, heads=2, key_dim=32, value_dim=16, batch=1, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator)

    q, k = (draw(batch, time, heads, key_dim).to(dtype) for _ in range(2))
    v = draw(batch, time, heads, value_dim).to(dtype)
    f = draw(batch, time, heads, key_dim).to(dtype)
    b = draw(batch, time, heads).to(dtype)
    a_log = torch.rand(heads, generator=generator) * 1.5 - 0.5
    dt_bias = -6 * torch.rand(heads, key_dim, generator=generator)
    state = draw(batch, heads, key_dim, value_dim)
    return [q, k, v, f, b, a_log, dt_bias, state]


def error(found, expected):
    return ((found.double() - expected).norm() / expected.norm()).item()


# 3e-6: float32 sums over at most 64 tokens and 32 channels; measured at most 8e-7.
BOUND = 3e-6


@pytest.mark.parametrize("lower_bound", [-5.0, -1.0, None])
@pytest.mark.parametrize("time", [1, 2, 15, 16, 17, 63, 64, 65, 100, 128, 200])
def test_chunked_and_recurrent_forms_equal_the_recurrence(time, lower_bound):
    args = inputs(time, seed=time)
    expected, last = naive(*args, lower_bound)
    found = kda(*args, lower_bound=lower_bound)
    assert error(found, expected) < BOUND
    assert error(args[-1], last) < BOUND


@pytest.mark.parametrize("time", [1, 40])
def test_eps_decides_the_size_of_tiny_queries_and_keys(time):
    args = inputs(time)
    args[0] *= 1e-4
    args[1] *= 1e-4
    expected, last = naive(*args, -5.0)
    assert error(kda(*args, lower_bound=-5.0), expected) < BOUND
    assert error(args[-1], last) < BOUND


@pytest.mark.parametrize("heads,key_dim,value_dim,batch", [(1, 8, 8, 1), (3, 20, 33, 2), (5, 64, 7, 1)])
def test_odd_sizes_and_batches(heads, key_dim, value_dim, batch):
    args = inputs(70, heads, key_dim, value_dim, batch)
    expected, last = naive(*args, -5.0)
    assert error(kda(*args, lower_bound=-5.0), expected) < BOUND
    assert error(args[-1], last) < BOUND


@pytest.mark.parametrize("cut", [1, 16, 63, 64, 65, 99])
def test_a_cut_anywhere_leaves_outputs_and_state_unchanged(cut):
    args = inputs(100)
    expected, last = naive(*args, -5.0)
    state = args[-1]
    tokens, rest = args[:5], args[5:7]
    first = kda(*(x[:, :cut] for x in tokens), *rest, state, lower_bound=-5.0)
    second = kda(*(x[:, cut:] for x in tokens), *rest, state, lower_bound=-5.0)
    assert error(torch.cat([first, second], 1), expected) < BOUND
    assert error(state, last) < BOUND


@pytest.mark.parametrize("lower_bound", [-5.0, None])
@pytest.mark.parametrize("pattern", ["strong", "none", "alternating", "one strong token", "channels apart"])
def test_gate_extremes(pattern, lower_bound):
    """Decays at both ends of the gate: g = -5 for whole chunks (exp(320) if exponents were not differences), g = 0."""
    args = inputs(130, key_dim=16)
    f, dt_bias, a_log = args[3], args[6], args[5]
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
    found = kda(*args, lower_bound=lower_bound)
    assert torch.isfinite(found).all()
    assert torch.isfinite(args[-1]).all()
    # 2e-5: a cumulated log decay of up to 320 (2,000 without bound) is known to 1.5e-5 (1e-4) in float32.
    assert error(found, expected) < 2e-5
    assert error(args[-1], last) < 2e-5


def test_bounded_gate_stays_within_its_bound():
    f = torch.linspace(-200, 200, 4001).view(1, -1, 1, 1)
    g = log_decay(f, torch.tensor([1.0]), torch.zeros(1, 1), -5.0)
    assert g.min().item() == -5.0
    assert g.max().item() == 0.0 or g.max().item() > -1e-30
    assert (g.diff(dim=1) <= 0).all()


def test_the_gates_are_different_functions():
    f = torch.randn(1, 5, 2, 4)
    bounded, unbounded = (log_decay(f, torch.zeros(2), torch.zeros(2, 4), bound) for bound in (-5.0, None))
    assert (bounded - unbounded).abs().max() > 1
    expected = -5 / (1 + torch.exp(-f.double()))
    assert error(bounded, expected) < 1e-6


def test_bfloat16_tokens_round_only_at_the_end():
    args = inputs(100, dtype=torch.bfloat16)
    expected, last = naive(*args, -5.0)
    found = kda(*args, lower_bound=-5.0)
    assert found.dtype == torch.bfloat16
    assert (found.double() - expected).abs().max() <= expected.abs().max() * 2**-8
    assert error(args[-1], last) < BOUND


def test_memory_not_written_to_is_untouched_and_inputs_may_be_views():
    args = inputs(40)
    wide = torch.full((1, 40, 2, 3 * 32), float("nan"))
    wide[..., 32:64] = args[1]
    args[1] = wide[..., 32:64]
    before = [x.clone() for x in args[:7]]
    expected, _ = naive(*args, -5.0)
    assert error(kda(*args, lower_bound=-5.0), expected) < BOUND
    assert all(torch.equal(x, y) for x, y in zip(args[:7], before, strict=True))


def test_shapes_are_checked():
    args = inputs(3)
    with pytest.raises(ValueError, match="dt_bias"):
        kda(*args[:6], args[6][:, :-1], args[7], lower_bound=-5.0)
    with pytest.raises(ValueError, match="contiguous float32"):
        kda(*args[:7], args[7].double(), lower_bound=-5.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lower_bound", [-5.0, None])
@pytest.mark.parametrize("batch,heads,dim,width", [(1, 3, 32, 4), (2, 5, 7, 2), (1, 1, 33, 1), (3, 2, 128, 4)])
def test_a_decode_step_is_convolution_recurrence_and_norm(batch, heads, dim, width, lower_bound, dtype):
    """Against the three public calls on the torch twins; rows are views into wider ones, as the layer gives them."""
    generator = torch.Generator().manual_seed(dim)

    def draw(*shape):
        return torch.randn(*shape, generator=generator)

    channels = 3 * heads * dim
    x = draw(batch, channels + 10).to(dtype)[:, 5:-5]
    weight, history = draw(width, channels), draw(batch, width - 1, channels).to(dtype)
    f, gate = (draw(batch, heads * dim + 3).to(dtype)[:, 3:].unflatten(1, (heads, dim)) for _ in range(2))
    b = draw(batch, heads + 1).to(dtype)[:, 1:]
    a_log, dt_bias, norm = draw(heads), draw(heads, dim), draw(dim)
    state = draw(batch, heads, dim, dim)
    own_history, own_state = history.clone(), state.clone()
    with use("reference"):
        q, k, v = causal_conv(x[:, None], weight, own_history).unflatten(-1, (3, heads, dim)).unbind(2)
        out = kda(q, k, v, f[:, None], b[:, None], a_log, dt_bias, own_state, lower_bound=lower_bound)
        expected = gated_rms_norm(out[:, 0], gate, norm, 1e-5)
    found = kda_decode(x, weight, history, f, b, a_log, dt_bias, state, gate, norm, lower_bound=lower_bound, eps=1e-5)
    assert found.dtype == dtype
    # In bfloat16 a value between two roundings may fall to either side; float32 sums in another order.
    assert error(found, expected.double()) < (BOUND if dtype == torch.float32 else 2e-3)
    assert error(state, own_state.double()) < BOUND
    assert torch.equal(history, own_history)


def test_compiled_code_reads_only_what_it_wrote(backend):
    """Working memory is reused between calls: filled with NaN it must not show."""
    if backend == "reference" or not compiled.available():
        pytest.skip("torch twins have no working memory of their own")
    from k3tool.kernels.kda import cpu

    for time in (1, 3, 64, 70):
        args = inputs(time, key_dim=20, value_dim=33)
        expected, last = naive(*args, -5.0)
        kda(*inputs(time, key_dim=20, value_dim=33), lower_bound=-5.0)
        cpu._compiled("float32").scratch.poison()
        assert error(kda(*args, lower_bound=-5.0), expected) < BOUND
        assert error(args[-1], last) < BOUND
