"""Where a reply ends: stop texts across any borders of tokens, and end tokens wherever a checkpoint names them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3tool.chat import Segment
from k3tool.checkpoint.source import LocalSource
from k3tool.config import K3Config
from k3tool.errors import CheckpointCorrupt, UsageError
from k3tool.stopping import MAX_STOP_CHARS, MAX_STOP_TEXTS, StopTexts, end_tokens
from k3tool.synthetic import tiny_config


def texts(segments: list[Segment]) -> str:
    return "".join(segment.text for segment in segments)


LETTERS = st.text(alphabet="abé", max_size=12)


@given(st.lists(LETTERS, max_size=8), st.lists(LETTERS.filter(bool), max_size=3))
def test_what_comes_out_ends_before_the_first_stop_text(pieces: list[str], stops: list[str]):
    watched, shown, fed = StopTexts(stops), "", ""
    for piece in pieces:
        shown += texts(watched.feed(Segment(piece)))
        fed += piece
        first = min((fed.index(stop) for stop in stops if stop in fed), default=None)
        assert (watched.found is not None) == (first is not None)
        if first is not None:
            assert shown == fed[:first] and fed.startswith(str(watched.found), first)
            assert watched.feed(Segment("more")) == watched.finish() == []
            return
        # Held back is what may be the beginning of a stop text, and nothing else.
        assert fed.startswith(shown)
        held = fed[len(shown) :]
        assert not held or any(stop.startswith(held) for stop in stops)
        assert not any(stop.startswith(shown[-n:] + held) for stop in stops for n in range(1, len(shown) + 1))
    assert shown + texts(watched.finish()) == fed


def test_control_tokens_come_out_whole_or_not_at_all():
    watched = StopTexts(["think|x", "|>b"])
    assert watched.feed(Segment("<|sep|>", True)) == []  # "|>" may become "|>b"
    assert watched.feed(Segment("a")) == [Segment("<|sep|>", True), Segment("a")]
    watched.feed(Segment("<|sep|>", True))
    assert watched.feed(Segment("b")) == [] and watched.found == "|>b"
    assert watched.finish() == []


@pytest.mark.parametrize(
    ("stops", "says"),
    [
        ([""], "empty"),
        (["x" * (MAX_STOP_CHARS + 1)], f"{MAX_STOP_CHARS + 1} characters, at most {MAX_STOP_CHARS}"),
        (["x"] * (MAX_STOP_TEXTS + 1), f"{MAX_STOP_TEXTS + 1} times, at most {MAX_STOP_TEXTS}"),
    ],
)
def test_stop_texts_are_bounded(stops: list[str], says: str):
    with pytest.raises(UsageError, match=says):
        StopTexts(stops)


def ends(folder: Path, generation: object, top: Any = None, text: Any = None) -> tuple[Any, ...]:
    config = tiny_config(num_layers=4)
    config["eos_token_id"], config["text_config"]["eos_token_id"] = top, text
    if generation is not None:
        written = generation if isinstance(generation, str) else json.dumps(generation)
        (folder / "generation_config.json").write_text(written)
    return tuple(end_tokens(LocalSource(folder), K3Config.from_dict(config)))


def test_end_tokens_come_from_all_three_places(tmp_path: Path):
    assert ends(tmp_path, None) == ((), ())
    assert ends(tmp_path, None, top=5, text=[6, 5]) == ((5, 6), ())
    assert ends(tmp_path, None, text=[6, 7]) == ((6, 7), ())
    assert ends(tmp_path, {"eos_token_id": [8, 5]}, top=5, text=6) == ((8, 5, 6), ())
    for nothing in ({}, {"eos_token_id": None}, {"eos_token_id": []}, {"eos_token_id": -1}):
        assert ends(tmp_path, nothing, top=5) == ((5,), ())


def test_end_tokens_that_the_model_does_not_have(tmp_path: Path):
    assert ends(tmp_path, {"eos_token_id": [3, 1024, 163586]}, top=1024) == ((3,), (1024, 163586))


@pytest.mark.parametrize(
    "generation",
    ["{", "[]", "", "\ufeff{}", '{"eos_token_id": NaN}', '{"eos_token_id": ' + "[" * 500,
     {"eos_token_id": "2"}, {"eos_token_id": True}, {"eos_token_id": [2.0]}, {"eos_token_id": {"id": 2}},
     {"eos_token_id": [[2]]}, {"eos_token_id": 1 << 40}, {"eos_token_id": -2}, {"eos_token_id": list(range(1001))},
     " " * (1 << 20) + "{}"],
)  # fmt: skip
def test_a_damaged_generation_config_is_told(generation: object, tmp_path: Path):
    with pytest.raises(CheckpointCorrupt, match=r"generation_config\.json") as caught:
        ends(tmp_path, generation, top=5)
    assert len(caught.value.message) < 400


def test_a_folder_of_ranks_has_that_of_its_first_rank(tmp_path: Path):
    for rank, token in ((0, 8), (1, 9)):
        folder = tmp_path / f"rank-0000{rank}-of-00002"
        folder.mkdir()
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": token}))
    assert ends(tmp_path, None) == ((8,), ())
