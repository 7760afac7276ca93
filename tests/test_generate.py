"""Prefill, decode, sampling and stopping."""

from __future__ import annotations

import json
import math

import pytest
import torch

from k3tool.errors import CheckFailed, UnsupportedError, UsageError
from k3tool.generate import Session, Timing, decode_one_token, prefill, prefill_block, run_session, sample
from k3tool.synthetic import tiny_config, write_checkpoint

IDS = [3, 1, 4, 1, 5, 9, 2, 6]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("generate")
    write_checkpoint(path, tiny_config(num_layers=4), seed=7)
    return path


def opened(folder, **options):
    return Session.open(folder, **{"device": "cpu", "dtype": "float32", **options})


def test_generate_is_prefill_then_decode(folder):
    session = opened(folder)
    tokens = list(session.generate(IDS, 6, stop_at_end=False))
    cache = session.model.new_cache()
    logits = prefill(session.model, IDS, cache)
    for token in tokens:
        assert int(logits.argmax()) == token
        logits = decode_one_token(session.model, token, cache)
    assert session.prefill_timing.tokens == len(IDS)
    assert session.decode_timing.tokens == 5  # the last token is not fed back
    assert session.cache.position == len(IDS) + 5
    assert session.finish_reason == "length"


def test_blocks_of_any_size_give_the_same_result(folder):
    session = opened(folder)
    ids = [(7 * i) % 1024 for i in range(150)]
    whole = prefill(session.model, ids, session.model.new_cache(), all_logits=True)
    for block in (1, 16, 37, 64, 149, 1000):
        found = prefill(session.model, ids, session.model.new_cache(), all_logits=True, block=block)
        assert ((found - whole).norm() / whole.norm()).item() < 1e-5


def test_prefill_block_is_bounded():
    from k3tool.config import K3Config

    small = K3Config.from_dict(tiny_config())
    large = K3Config.from_dict(
        tiny_config(num_layers=93, hidden_size=7168, kda_heads=96, kda_head_dim=128, block_size=12)
    )
    assert prefill_block(small) == 4096
    assert 256 <= prefill_block(large) < 1024
    assert prefill_block(large) % 64 == 0


def test_generation_stops_on_the_end_token(folder):
    session = opened(folder)
    tokens = list(session.generate(IDS, 8, stop_at_end=False))
    ending = tokens[3]
    first = tokens.index(ending)
    session.end_ids = (99999, ending)
    session.reset()
    assert list(session.generate(IDS, 8)) == tokens[: first + 1]
    assert (session.finish_reason, session.stop_reason) == ("stop", ending)
    session.reset()
    assert (session.finish_reason, session.stop_reason) == (None, None)
    assert list(session.generate(IDS, 8, stop_at_end=False)) == tokens
    assert session.finish_reason == "length"


def test_a_caller_may_end_it(folder):
    session, seen = opened(folder), []
    session.end_ids = ()

    def stop(token):
        seen.append(token)
        return "enough" if len(seen) == 3 else None

    result = run_session(session, IDS, max_new_tokens=8, stop=stop)
    assert result.token_ids == seen and len(seen) == 3
    assert (result.finish_reason, result.stop_reason) == ("stop", "enough") and result.as_json()[
        "stop_reason"
    ] == "enough"


def test_the_end_token_is_not_shown_to_the_caller(folder):
    session = opened(folder)
    first = next(iter(session.generate(IDS, 1)))
    session.end_ids = (first,)
    session.reset()
    assert list(session.generate(IDS, 8, stop=lambda _: "never")) == [first]
    assert session.stop_reason == first


def test_end_tokens_come_from_the_folder(tmp_path, capsys):
    write_checkpoint(tmp_path, tiny_config(num_layers=4), seed=7)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 5000]}))
    said = []

    class Heard:
        def warn(self, text):
            said.append(text)

        def __getattr__(self, _):
            return lambda *arguments, **options: None

    assert 9 in opened(tmp_path, progress=Heard()).end_ids
    assert said == ["end tokens outside the vocabulary of 1024 are ignored: 5000"]


def test_no_new_tokens(folder):
    session = opened(folder)
    result = run_session(session, IDS, max_new_tokens=0, keep_logits=True)
    assert (result.token_ids, result.finish_reason) == ([], "length")
    assert result.logits.shape == (8, 1024)
    assert result.decode_logits.shape == (0, 1024)


def test_generation_ends_at_the_last_position(folder):
    session = opened(folder)
    object.__setattr__(session.model.config, "max_positions", 10)
    result = run_session(session, IDS, max_new_tokens=50, stop_at_end=False)
    assert len(result.token_ids) == 3  # two more are fed, the third has no position
    assert session.cache.position == 10
    session.reset()
    with pytest.raises(UsageError, match="11 tokens do not fit in the model's 10 positions"):
        session.generate(list(range(11)), 1)


@pytest.mark.parametrize("ids", [[], [0, 1024], [-1], [10**9]])
def test_bad_ids_are_refused(folder, ids):
    session = opened(folder)
    with pytest.raises(UsageError, match=str(ids[-1]) if ids else "no token"):
        session.generate(ids, 3)
    assert session.cache.position == 0


@pytest.mark.parametrize(
    "options",
    [
        *({"temperature": value} for value in (-1.0, -1e-300, math.nan, math.inf)),
        *({"top_p": value} for value in (0.0, -1e-12, math.nextafter(1.0, 2.0), 1.5, math.nan, math.inf)),
        {"top_k": -1},
        {"seed": -1},
        {"seed": 1 << 63},
    ],
)
def test_bad_sampling_options_are_refused(folder, options):
    ((name, value),) = options.items()
    with pytest.raises(UsageError, match=f"sampling option: {name} is {value}") as caught:
        opened(folder).generate(IDS, 3, **options)
    assert f"--{name.replace('_', '-')} " in caught.value.hint


def test_bad_session_options_are_refused(folder, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(UsageError, match="float8"):
        opened(folder, dtype="float8")
    with pytest.raises(UnsupportedError, match="triton"):
        opened(folder, backend="triton")


def test_sampling_follows_the_distribution():
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -8.0])
    generator = torch.Generator().manual_seed(1)
    for temperature in (0.5, 1.0, 2.0):
        drawn = torch.tensor([sample(logits, temperature, 1.0, generator) for _ in range(4000)])
        found = torch.bincount(drawn, minlength=5) / 4000
        # Four standard errors of a frequency near 1/2 over 4000 draws.
        assert (found - torch.softmax(logits / temperature, -1)).abs().max() < 4 * 0.5 / 4000**0.5


def test_the_nucleus_is_the_smallest_set_that_reaches_top_p():
    logits = torch.log(torch.tensor([0.1, 0.5, 0.15, 0.25]))
    generator = torch.Generator().manual_seed(1)
    for top_p, allowed in ((0.1, {1}), (0.5, {1}), (0.6, {1, 3}), (0.76, {1, 3, 2}), (0.95, {0, 1, 2, 3})):
        assert {sample(logits, 1.0, top_p, generator) for _ in range(400)} == allowed


def test_the_top_k_are_the_likeliest():
    logits = torch.log(torch.tensor([0.1, 0.5, 0.15, 0.25]))
    generator = torch.Generator().manual_seed(1)
    for top_k, allowed in (
        (1, {1}),
        (2, {1, 3}),
        (3, {1, 3, 2}),
        (4, {0, 1, 2, 3}),
        (10**30, {0, 1, 2, 3}),
        (0, {0, 1, 2, 3}),
    ):
        assert {sample(logits, 1.0, 1.0, generator, top_k=top_k) for _ in range(400)} == allowed
    # The nucleus is of the tokens that are left: 0.5 and 0.25 are two thirds and one.
    assert {sample(logits, 1.0, 0.6, generator, top_k=2) for _ in range(400)} == {1}
    assert {sample(logits, 1.0, 0.7, generator, top_k=2) for _ in range(400)} == {1, 3}


@pytest.mark.parametrize(("temperature", "scale"), [
    *((t, s) for t in (5e-324, 1e-310, 1e-300, 1e-45) for s in (1e-30, 1.0, 1e30)), (1e-38, 1.0), (1e-20, 1.0), (1e20, 1e30),
])  # fmt: skip
def test_a_temperature_near_zero_is_greedy(temperature, scale):
    """Near zero for logits of this scale, that is."""
    logits = torch.tensor([1.0, 3.0, 2.999, -math.inf]) * scale
    assert {sample(logits, temperature, top_p) for top_p in (1.0, 0.5) for _ in range(20)} == {1}


def test_a_very_high_temperature_is_uniform():
    logits = torch.tensor([-3e38, 0.0, 3e38, -math.inf])
    generator = torch.Generator().manual_seed(1)
    for temperature in (1e300, 1.7976931348623157e308):
        assert {sample(logits, temperature, 1.0, generator) for _ in range(200)} == {0, 1, 2}


@pytest.mark.parametrize("top_p", [5e-324, 1e-300, 1e-45, 1e-12])
def test_a_tiny_top_p_leaves_the_first_token(top_p):
    flat = torch.zeros(1000)
    flat[123] = 1e-3
    assert {sample(flat, temperature, top_p) for temperature in (1e-300, 1e-6, 1.0) for _ in range(20)} == {123}


def test_a_processor_that_takes_the_smallest_numbers_for_zero_samples_too():
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot be told to")
    try:
        logits = torch.tensor([1.0, 3.0, 2.0])
        assert {sample(logits, temperature, 5e-324) for temperature in (5e-324, 1.0)} == {1}
        assert sample(logits, 5e-324) == 1
    finally:
        torch.set_flush_denormal(False)


def test_top_p_just_below_one_keeps_every_token_that_counts():
    logits = torch.zeros(4)
    generator = torch.Generator().manual_seed(1)
    assert {sample(logits, 1.0, math.nextafter(1.0, 0.0), generator) for _ in range(200)} == {0, 1, 2, 3}


def test_greedy_and_seeds(folder):
    session = opened(folder)

    def run(**options):
        session.reset()
        return list(session.generate(IDS, 8, stop_at_end=False, **options))

    assert run() == run(temperature=0.0, seed=4)
    warm = [run(temperature=5.0, seed=seed) for seed in (1, 1, 2)]
    assert warm[0] == warm[1] != warm[2]
    assert run(temperature=5.0, top_p=1e-6, seed=3) == run()


def test_logits_that_are_no_numbers_are_an_error():
    for bad in (float("nan"), float("inf")):
        with pytest.raises(CheckFailed, match="overflowed"):
            sample(torch.tensor([0.0, bad, 1.0]))


def test_timing():
    assert Timing(10, 2.0).tokens_per_second == 5.0
    assert Timing().tokens_per_second == 0.0
