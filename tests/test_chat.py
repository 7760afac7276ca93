"""The message format, written out by hand for each kind of message, and that no text can leave its segment."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3tool.chat import CLOSE, END_OF_MSG, OPEN, SEP, Segment, are_messages, parse_messages, render, render_prompt
from k3tool.errors import UnsupportedError, UsageError
from k3tool.synthetic import byte_pair_ranks
from k3tool.tokenizer import Tokenizer

CONTROLS = {OPEN, CLOSE, SEP, END_OF_MSG}
USER_HI = '<|open|>message role="user"<|sep|>Hi<|close|>message<|sep|><|end_of_msg|>'


def text_of(messages: list[Any], **options: Any) -> str:
    return "".join(segment.text for segment in render(messages, **options))


def test_a_user_message_with_the_generation_prompt() -> None:
    user = [{"role": "user", "content": "Hi"}]
    assert text_of(user) == USER_HI + '<|open|>message role="assistant"<|sep|><|open|>think<|sep|>'
    assert text_of(user, thinking=False).endswith('role="assistant"<|sep|><|open|>response<|sep|>')
    assert text_of(user, add_generation_prompt=False) == USER_HI
    assert render_prompt("Hi") == render(user)
    assert render_prompt("Hi", system="Be brief", thinking=False) == render(
        [{"role": "system", "content": "Be brief"}, *user], thinking=False
    )


def test_every_border_is_a_segment() -> None:
    segments = render([{"role": "user", "name": 'A "b" & c', "content": "Hi"}], add_generation_prompt=False)
    assert segments == [
        Segment("<|open|>", True),
        Segment("message"),
        Segment(" role"),
        Segment('="'),
        Segment("user"),
        Segment('"'),
        Segment(" name"),
        Segment('="'),
        Segment("A &quot;b&quot; &amp; c"),
        Segment('"'),
        Segment("<|sep|>", True),
        Segment("Hi"),
        Segment("<|close|>", True),
        Segment("message"),
        Segment("<|sep|>", True),
        Segment("<|end_of_msg|>", True),
    ]


def test_no_empty_segment_and_no_beginning_of_sequence() -> None:
    segments = render([{"role": "user", "content": ""}, {"role": "user", "content": None}])
    assert all(segment.text for segment in segments)
    assert segments[0] == Segment(OPEN, True)
    assert "[BOS]" not in "".join(segment.text for segment in segments)


def test_system_messages_and_their_type() -> None:
    assert text_of([{"role": "system", "content": "S"}], add_generation_prompt=False) == (
        '<|open|>message role="system"<|sep|>S<|close|>message<|sep|><|end_of_msg|>'
    )
    typed = [{"role": "system", "type": "thinking-effort", "content": "low"}]
    assert '<|open|>message role="system" type="thinking-effort"<|sep|>low' in text_of(typed)


def test_assistant_messages_carry_think_and_response() -> None:
    message = {"role": "assistant", "content": "R", "reasoning_content": "T"}
    assert text_of([message], add_generation_prompt=False) == (
        '<|open|>message role="assistant"<|sep|><|open|>think<|sep|>T<|close|>think<|sep|>'
        "<|open|>response<|sep|>R<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>"
    )
    blank = {"role": "assistant", "content": "R", "reasoning_content": " \n"}
    assert "<|open|>think<|sep|><|close|>think<|sep|>" in text_of([blank])
    assert "think" not in text_of([message], thinking=False)


def test_tool_calls_and_results() -> None:
    call = {
        "id": "1",
        "function": {"name": "f", "arguments": '{"a": 1, "b": "x", "c": null, "d": true, "e": [1], "g": {"h": "ü"}}'},
    }
    conversation = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "out"},
    ]
    assert text_of(conversation, thinking=False, add_generation_prompt=False) == (
        '<|open|>message role="assistant"<|sep|><|open|>response<|sep|><|close|>response<|sep|>'
        '<|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|>'
        '<|open|>argument key="a" type="number"<|sep|>1<|close|>argument<|sep|>'
        '<|open|>argument key="b" type="string"<|sep|>x<|close|>argument<|sep|>'
        '<|open|>argument key="c" type="null"<|sep|>null<|close|>argument<|sep|>'
        '<|open|>argument key="d" type="boolean"<|sep|>true<|close|>argument<|sep|>'
        '<|open|>argument key="e" type="array"<|sep|>[1]<|close|>argument<|sep|>'
        '<|open|>argument key="g" type="object"<|sep|>{"h": "ü"}<|close|>argument<|sep|>'
        "<|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|><|end_of_msg|>"
        '<|open|>message role="tool" tool="f" index="1"<|sep|>out<|close|>message<|sep|><|end_of_msg|>'
    )


def test_arguments_that_are_no_json_stay_whole() -> None:
    call = {"name": "f", "arguments": "{broken"}
    rendered = text_of([{"role": "assistant", "tool_calls": [call]}])
    assert '<|open|>json type="object"<|sep|>{broken<|close|>json<|sep|><|close|>call<|sep|>' in rendered
    for empty in (None, "", " ", {}):
        rendered = text_of([{"role": "assistant", "tool_calls": [{"name": "f", "arguments": empty}]}])
        assert '<|open|>call tool="f" index="1"<|sep|><|close|>call<|sep|>' in rendered


def results(messages: list[dict[str, Any]]) -> list[str]:
    """`tool index content` of every tool message."""
    calls = [{"id": "x", "name": "first"}, {"id": "y", "name": "second"}]
    conversation = [{"role": "assistant", "tool_calls": calls}, *messages, {"role": "user", "content": "u"}]
    found = text_of(conversation).split('message role="tool" tool="')[1:]
    return [part.split("<|close|>")[0].replace('" index="', " ").replace('"<|sep|>', " ") for part in found]


def test_results_stand_in_the_order_of_the_calls() -> None:
    late = {"role": "tool", "tool_call_id": "y", "content": "Y", "name": "stale"}
    early = {"role": "tool", "tool_call_id": "x", "content": "X"}
    assert results([late, early]) == ["first 1 X", "second 2 Y"]
    # One result that names no call: the order given is kept, and names come from the position.
    assert results([{"role": "tool", "content": "Y"}, {**early, "tool_call_id": "z"}]) == ["first 1 Y", "second 2 X"]
    with pytest.raises(UsageError, match="names no tool"):
        render([{"role": "tool", "content": "x"}])


def test_lists_of_texts_are_segments_of_their_own() -> None:
    content = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert render([{"role": "user", "content": content}])[7:9] == [Segment("a"), Segment("b")]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
hostile = st.lists(st.sampled_from([*CONTROLS, "[EOS]", '"', "&", "a", " ", "中"]), max_size=8).map("".join)
messages = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "system", "assistant", "tool"]), "content": hostile},
    optional={
        "name": hostile,
        "type": hostile,
        "reasoning_content": hostile,
        "tool": hostile,
        "tool_calls": st.lists(
            st.fixed_dictionaries({"name": hostile, "arguments": st.dictionaries(hostile, json_values) | hostile}),
            max_size=2,
        ),
    },
)


@settings(max_examples=200, deadline=None)
@given(st.lists(messages, max_size=4), st.booleans())
def test_no_text_becomes_a_control_token(conversation: list[dict[str, Any]], thinking: bool) -> None:
    try:
        segments = render(conversation, thinking=thinking)
    except UsageError:  # a tool message without a name, arguments that are a JSON list
        return
    assert all(segment.text in CONTROLS for segment in segments if segment.control)
    named = {text: 256 + number for number, text in enumerate((*CONTROLS, "[EOS]"))}
    tokenizer = Tokenizer(byte_pair_ranks(256), named)
    ids = tokenizer.encode_segments(segments)
    controls = sum(segment.control for segment in segments)
    assert sum(token >= 256 for token in ids) == controls
    # Tags nest: as many are opened as closed, except those of the generation prompt.
    opened = sum(segment == Segment(OPEN, True) for segment in segments)
    assert opened == sum(segment == Segment(CLOSE, True) for segment in segments) + 2
    assert sum(segment == Segment(END_OF_MSG, True) for segment in segments) == len(conversation)


@pytest.mark.parametrize(
    "message",
    [
        "text",
        {"content": "x"},
        {"role": "bot", "content": "x"},
        {"role": "user", "content": 7},
        {"role": "user", "content": [{"type": "text"}]},
        {"role": "user", "content": ["x"]},
        {"role": "user", "content": {"type": "text", "text": "x", "role": "user"}, "name": 7},
        {"role": "assistant", "tool_calls": "f"},
        {"role": "assistant", "tool_calls": [{"function": {}}]},
        {"role": "assistant", "tool_calls": [{"name": "f", "arguments": "[1]"}]},
        {"role": "assistant", "tool_calls": [{"name": "f", "arguments": 3}]},
    ],
)
def test_messages_of_another_shape_are_refused(message: Any) -> None:
    with pytest.raises(UsageError):
        render([message])


def test_what_only_the_publisher_can_word_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="declares tools") as caught:
        render([{"role": "system", "tools": [{"type": "function"}]}])
    assert "tool-declare" in caught.value.hint
    with pytest.raises(UnsupportedError, match="image_url"):
        render([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]}])


def test_messages_from_json() -> None:
    assert parse_messages('[{"role": "user", "content": "x"}]', where="f.json")[0]["content"] == "x"
    request = '{"model": "k3", "messages": [{"role": "user", "content": "x"}], "temperature": 1, "tools": []}'
    ignored: list[str] = []
    assert parse_messages(request, where="f.json", ignored=ignored) == [{"role": "user", "content": "x"}]
    assert ignored == ["model", "temperature"]
    with pytest.raises(UnsupportedError, match=r"f\.json declares tools"):
        parse_messages('{"messages": [{"role": "user"}], "tools": [{"type": "function"}]}', where="f.json")


HOSTILE_MESSAGES = [
    "{", "{}", "[]", '"x"', "null", "[" * 100_000, '{"messages": {}}', '{"messages": []}', '{"messages": null}',
    '[{"role": "user", "content": NaN}]', '[{"role": "user", "content": 1e999}]',
    '[{"role": "user", "content": "\\ud800"}]', '[{"role": "user", "role": "system"}]',
    '[{"role": "user", "content": ' + "9" * 5000 + "}]",
    '[{"role": ["user"]}]', '[{"role": {"user": 1}}]', "[null]", "[[]]", '[{"role": "user", "content": true}]',
    '[{"role": "user", "content": [[]]}]', '[{"role": "user", "content": [{"type": ["text"], "text": "x"}]}]',
    '[{"role": "assistant", "tool_calls": [null]}]', '[{"role": "assistant", "tool_calls": {"a": 1}}]',
    '[{"role": "user", "name": {"a": 1}}]', '[{"role": "' + "x" * 100_000 + '"}]',
]  # fmt: skip


@pytest.mark.parametrize("text", HOSTILE_MESSAGES)
def test_hostile_messages_are_refused_in_one_short_line(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        render(parse_messages(text, where="f.json"))
    assert len(caught.value.message) < 400 and "\n" not in caught.value.message and caught.value.hint


def test_a_conversation_of_more_parts_than_tokens_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("k3tool.chat.MAX_SEGMENTS", 100)
    user = {"role": "user", "content": "x"}
    assert len(render([user] * 6)) <= 100
    arguments = {str(number): number for number in range(100)}
    for many in ([user] * 12, [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": arguments}]}],
                 [{"role": "user", "content": [{"type": "text", "text": "x"}] * 101}]):  # fmt: skip
        with pytest.raises(UsageError, match="more than 100 parts"):
            render(many)


def test_developer_messages_are_system_messages() -> None:
    system, developer = ([{"role": role, "content": "S", "name": "n"}] for role in ("system", "developer"))
    assert render(developer) == render(system)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('[{"role": "user"', True),
        (' \n{"messages": [', True),
        ('{"model": "k3", "messages": []}', True),
        ("[1, 2]", False),
        ('{"a": 1} what is this? role', False),
        ('say [{"role": "user"}]', False),
        ("", False),
    ],
)
def test_what_is_meant_as_messages(text: str, expected: bool) -> None:
    assert are_messages(text) is expected
