"""Replies taken apart: what `k3tool.chat` renders comes back, in the same channels, and nothing else is lost."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3tool.chat import CLOSE, END_OF_MSG, OPEN, SEP, Segment, render
from k3tool.reply import Reply

USER = [{"role": "user", "content": "u"}]


def read(segments: list[Segment], *, thinking: bool = True) -> tuple[Reply, str]:
    """The reply, and its channels as they were shown."""
    reply, shown = Reply(thinking=thinking), ""
    for segment in segments:
        for channel, text in reply.feed(segment):
            shown += f"{channel}:{text};"
    return reply, shown


def generated(message: dict[str, Any], *, thinking: bool = True) -> list[Segment]:
    """What the model writes for this message to stand in the conversation: all behind the prompt, up to the end token."""
    whole = render([*USER, message], thinking=thinking, add_generation_prompt=False)
    prompt = render(USER, thinking=thinking)
    assert whole[: len(prompt)] == prompt and whole[-1] == Segment(END_OF_MSG, True)
    return whole[len(prompt) : -1]


words = st.text(alphabet='a<|>&" \n中', max_size=6)
values = st.none() | st.booleans() | st.integers(-9, 9) | words | st.lists(st.integers(0, 9), max_size=2)
calls = st.lists(
    st.fixed_dictionaries({"name": words, "arguments": st.dictionaries(words, values, max_size=3)}), max_size=3
)


@given(words, words, calls, st.booleans())
def test_a_rendered_message_comes_back(reasoning: str, response: str, functions: list[Any], thinking: bool):
    tool_calls = [{"id": str(n), "type": "function", "function": call} for n, call in enumerate(functions, start=1)]
    message = {"role": "assistant", "content": response, "reasoning_content": reasoning, "tool_calls": tool_calls}
    reply, _ = read(generated(message, thinking=thinking), thinking=thinking)
    assert reply.response == response and reply.tool_calls == tool_calls
    assert reply.reasoning == (reasoning if thinking and reasoning.strip() else "")


def test_text_is_shown_as_it_comes():
    parts = generated({"role": "assistant", "content": "R", "reasoning_content": "T"})
    assert read(parts)[1] == "reasoning:T;response:R;"
    assert read(parts[:3])[1] == "reasoning:T;"
    reply, _ = read(parts[:3])
    assert (reply.reasoning, reply.response, reply.channel) == ("T", "", "reasoning")


def c(text: str) -> Segment:
    return Segment(text, True)


@pytest.mark.parametrize(
    ("segments", "reasoning", "response"),
    [
        # No tag, or none that may stand there, is text.
        ([Segment("a"), c(SEP), Segment("b")], "a<|sep|>b", ""),
        ([c(OPEN), Segment("x"), c(SEP)], "<|open|>x<|sep|>", ""),
        ([c(CLOSE), Segment("call"), c(SEP)], "<|close|>call<|sep|>", ""),
        ([c(OPEN), Segment("x"), c(OPEN), Segment("response"), c(SEP), Segment("r")], "<|open|>x", "r"),
        ([c(CLOSE), Segment("x" * 1200), Segment("y"), c(SEP)], "<|close|>" + "x" * 1200 + "y<|sep|>", ""),
        ([c("<|reserved_token_9|>"), Segment("<|close|>think<|sep|>")], "<|reserved_token_9|><|close|>think<|sep|>", ""),
        # A channel ends the one before, also where the model has not closed that; a message all that is in it.
        ([Segment("t"), c(OPEN), Segment("response"), c(SEP), Segment("r")], "t", "r"),
        ([c(CLOSE), Segment("message"), c(SEP), Segment("r")], "", "r"),
        ([c(CLOSE), Segment("think"), c(SEP), c(CLOSE), Segment("message"), c(SEP)] * 2, "", "<|close|>think<|sep|><|close|>message<|sep|>"),
        # The reasoning does not begin again.
        ([c(OPEN), Segment("response"), c(SEP), c(OPEN), Segment("think"), c(SEP)], "", "<|open|>think<|sep|>"),
        # A tag that the end cuts off.
        ([Segment("t"), c(CLOSE), Segment("thi")], "t", ""),
    ],
)  # fmt: skip
def test_a_broken_format_loses_nothing(segments: list[Segment], reasoning: str, response: str):
    reply, _ = read(segments)
    assert (reply.reasoning, reply.response, reply.tool_calls) == (reasoning, response, [])


def test_calls_that_are_cut_off_are_none():
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    parts = generated({"role": "assistant", "content": "", "tool_calls": [call]})
    end = next(n for n in range(len(parts)) if read(parts[:n])[0].tool_calls)
    assert read(parts[:end])[0].tool_calls == [call] and parts[end - 3 : end] == [c(CLOSE), Segment("call"), c(SEP)]


def test_arguments_that_are_not_what_their_type_says_stay_text():
    call = {"name": "f", "arguments": {"a": 1, "b": 2}}
    parts = generated({"role": "assistant", "content": "", "tool_calls": [call]})
    damaged = [Segment("{1") if part == Segment("1") and before.text == SEP else part
               for before, part in zip([Segment(""), *parts], parts, strict=False)]  # fmt: skip
    assert read(damaged)[0].tool_calls[0]["function"]["arguments"] == {"a": "{1", "b": 2}
    whole = generated({"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{broken"}]})
    assert read(whole)[0].tool_calls[0]["function"]["arguments"] == "{broken"


@given(st.lists(st.sampled_from([c(OPEN), c(CLOSE), c(SEP), c(END_OF_MSG), *(Segment(t) for t in
       ("think", "response", "tools", 'call tool="f" index="1"', "call", 'argument key="k" type="number"', "argument", "json", "message", "1"))]),
       max_size=40))  # fmt: skip
def test_any_order_of_tags_is_read(segments: list[Segment]):
    reply, shown = read(segments)
    assert shown.count("reasoning:") <= len(segments) and len(reply.reasoning + reply.response) <= sum(
        len(segment.text) for segment in segments
    )
