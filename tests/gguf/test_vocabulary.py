"""Token texts, kinds and merges; that merges say what ranks say; the chat template against the renderer."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from typing import Any

import jinja2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3tool import chat
from k3tool.checkpoint.source import LocalSource
from k3tool.config import K3Config
from k3tool.errors import CheckpointCorrupt
from k3tool.gguf.vocabulary import chat_template, merges, number_keys, token_text, tokenizer_keys
from k3tool.synthetic import byte_pair_ranks, tiny_config
from k3tool.tokenizer import Tokenizer

CONFIG = K3Config.from_dict(tiny_config(vocab_size=1024))


def trained(text: bytes, size: int) -> list[bytes]:
    """A vocabulary learned the plain way: the most frequent pair becomes the next token."""
    tokens = [bytes([byte]) for byte in range(256)]
    parts = [bytes([byte]) for byte in text]
    while len(tokens) < size:
        counts: dict[bytes, int] = {}
        for left, right in pairwise(parts):
            counts[left + right] = counts.get(left + right, 0) + 1
        counts = {token: count for token, count in counts.items() if token not in tokens}
        if not counts:
            break
        best = max(counts, key=lambda token: (counts[token], token))
        tokens.append(best)
        parts = by_merges(parts, {pair: 0 for pair in pairwise(parts) if pair[0] + pair[1] == best})
    return tokens


def by_merges(parts: list[bytes], rank: dict[tuple[bytes, bytes], int]) -> list[bytes]:
    """GPT-2's algorithm: the pair of lowest rank, the leftmost of them, until none is left."""
    parts = list(parts)
    while True:
        known = [(rank[pair], at) for at, pair in enumerate(pairwise(parts)) if pair in rank]
        if not known:
            return parts
        at = min(known)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


def in_order(pairs: list[tuple[bytes, bytes]]) -> dict[tuple[bytes, bytes], int]:
    return {pair: number for number, pair in enumerate(pairs)}


@settings(max_examples=40, deadline=None)
@given(
    st.text("abc ", min_size=50, max_size=200),
    st.integers(258, 300),
    st.lists(st.text("abc", min_size=1, max_size=25), max_size=20),
)
def test_merges_of_a_trained_vocabulary_give_the_same_tokens(text, size, words):
    tokens = trained(text.encode(), size)
    found = merges(tokens)
    assert len(found) == len(tokens) - 256  # one pair for each
    assert all(left + right == token for (left, right), token in zip(found, tokens[256:], strict=True))
    tokenizer, rank = Tokenizer(tokens, {}), in_order(found)
    for word in words:
        expected = [tokens[token] for token in tokenizer.encode(word)]
        assert by_merges([bytes([byte]) for byte in word.encode()], rank) == expected


def test_a_vocabulary_that_was_cut_down_gives_every_pair():
    tokens = [*(bytes([byte]) for byte in range(256)), b"ab", b"cd", b"abcde", b"bc", b"abcd"]
    # `abcde` is made of `abcd`, which ranks higher: no two lower tokens make it up
    assert merges(tokens) == [(b"a", b"b"), (b"c", b"d"), (b"abcd", b"e"), (b"b", b"c"), (b"ab", b"cd")]


def test_texts_are_printable_and_distinct():
    texts = [token_text(bytes([byte])) for byte in range(256)]
    assert len(set(texts)) == 256 and all(text.isprintable() and not text.isspace() for text in texts)
    assert token_text(b" a\n") == "ĠaĊ" and token_text("é".encode()) == "Ã©" and token_text(b"\0\xad") == "ĀŃ"


def test_a_whole_vocabulary():
    ranks = byte_pair_ranks(768)
    named = {"[BOS]": 768, "<|end_of_msg|>": 770, "[PAD]": 1023}
    keys = dict(tokenizer_keys(replace(CONFIG, vocab_size=1030), Tokenizer(ranks, named, 1030), "{{ x }}"))
    tokens, kinds = keys["tokenizer.ggml.tokens"].value, keys["tokenizer.ggml.token_type"].value
    assert len(tokens) == len(kinds) == 1030 and len(set(tokens)) == 1030
    assert tokens[:768] == [token_text(token) for token in ranks] and kinds[:768] == [1] * 768
    assert (tokens[768], tokens[770], tokens[1023]) == ("[BOS]", "<|end_of_msg|>", "[PAD]")
    assert (tokens[769], kinds[769]) == ("<|reserved_token_769|>", 3)
    assert tokens[1024:] == [f"[PAD{token}]" for token in range(1024, 1030)] and kinds[1024:] == [5] * 6
    assert kinds[768:1024] == [3] * 256
    assert keys["tokenizer.ggml.model"].value == "gpt2" and keys["tokenizer.ggml.pre"].value == "kimi-k2"
    # the end of a message ends generation, although the tokenizer calls [EOS] its end
    assert [keys[f"tokenizer.ggml.{role}_token_id"].value for role in ("bos", "eos", "padding")] == [768, 770, 1023]
    assert keys["tokenizer.ggml.add_bos_token"].value is False
    assert keys["tokenizer.chat_template"].value == "{{ x }}"


def test_numbers_as_tokens():
    keys = dict(number_keys(CONFIG))
    assert keys["tokenizer.ggml.tokens"].value == [f"t{token}" for token in range(1024)]
    assert "tokenizer.ggml.merges" not in keys and "tokenizer.chat_template" not in keys


@pytest.mark.parametrize("change", [{"bos_token_id": 1024}, {"pad_token_id": -1}, {"eos_token_ids": (2000, 2)}])
def test_special_ids_outside_the_vocabulary_are_refused(change):
    with pytest.raises(CheckpointCorrupt, match="outside the vocabulary of 1024"):
        number_keys(replace(CONFIG, **change))


# The chat template


def environment() -> jinja2.Environment:
    def fail(message: str) -> None:
        raise jinja2.TemplateError(message)

    made = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    made.filters["tojson"] = lambda value, ensure_ascii=True: json.dumps(value, ensure_ascii=ensure_ascii)
    made.globals["raise_exception"] = fail
    return made


def call(name: str, arguments: Any, number: str | None = None) -> dict[str, Any]:
    return {
        **({"id": number} if number else {}),
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


ARGUMENTS = {"x": 1, "y": 'é "&"', "z": [1, {"k": None}], "b": True, "n": None, "o": {"p": "q"}, "f": 2.5}
CONVERSATIONS = [
    [{"role": "user", "content": 'say "hi" & <|open|>'}],
    [
        {"role": "system", "content": "be brief", "name": 'x&"y'},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "ok", "reasoning_content": " thought\n"},
        {"role": "user", "content": "more", "name": "bob"},
    ],
    [
        {"role": "system", "type": "thinking-effort", "content": "`high`"},
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": None, "tool_calls": [call("f", ARGUMENTS, "a"), call("g", {}, "b")]},
        {"role": "tool", "tool_call_id": "b", "content": "second"},
        {"role": "tool", "tool_call_id": "a", "content": "first"},
        {"role": "assistant", "content": "done", "reasoning": "  "},
    ],
    [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "", "tool_calls": [call("f", "{broken"), {"name": "g", "arguments": {"a": 0}}]},
        {"role": "tool", "content": "one"},
        {"role": "tool", "name": "other", "content": "two"},
        {"role": "user", "content": "and then?"},
    ],
    [
        {"role": "assistant", "content": "", "tool_calls": [call("f", {}, "a"), call("g", {}, "b")]},
        {"role": "tool", "tool_call_id": "b", "name": "late", "content": "two"},
        {"role": "tool", "tool_call_id": "c", "content": "names no call, so none is sorted"},
    ],
]  # fmt: skip


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("prompt", [True, False])
def test_the_template_renders_what_the_renderer_renders(conversation, thinking, prompt, mini):
    template = environment().from_string(chat_template(LocalSource(mini)))
    expected = "".join(s.text for s in chat.render(conversation, thinking=thinking, add_generation_prompt=prompt))
    assert template.render(messages=conversation, thinking=thinking, add_generation_prompt=prompt) == expected
    assert template.render(messages=conversation, enable_thinking=thinking, add_generation_prompt=prompt) == expected


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"messages": [], "tools": [{"name": "f"}]}, "tools: give their declaration"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "names no tool"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "content of type image"),
        ({"messages": [{"role": "critic", "content": "x"}]}, "unknown role critic"),
    ],
)
def test_the_template_refuses(variables, message, mini):
    with pytest.raises(jinja2.TemplateError, match=message):
        environment().from_string(chat_template(LocalSource(mini))).render(**variables)


def test_the_sources_own_template_wins(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "from the configuration"}')
    assert chat_template(LocalSource(tmp_path)) == "from the configuration"
    (tmp_path / "chat_template.jinja").write_text("from the file")
    assert chat_template(LocalSource(tmp_path)) == "from the file"
