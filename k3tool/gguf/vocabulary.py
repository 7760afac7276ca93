"""The tokenizer as llama.cpp keeps it: token texts, their kinds, and byte pair merges.

llama.cpp knows merges where tiktoken knows ranks. A trained vocabulary is the same thing said in the other way: every
token is made of two that rank lower. Where one is not (a vocabulary that was cut down afterwards), every pair that
makes up a token is given instead, which merges as ranks do but for rare ties.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import cache
from importlib import resources
from itertools import pairwise

from k3tool.checkpoint.outside import corrupt, parse_object, read_named
from k3tool.checkpoint.source import Source
from k3tool.config import K3Config
from k3tool.errors import CheckpointCorrupt
from k3tool.gguf.container import Value, flag, i32_list, text, text_list, u32
from k3tool.tokenizer import MAX_TOKENIZER_CONFIG_BYTES, TOKENIZER_CONFIG_NAME, Tokenizer

PRE_TOKENIZER = "kimi-k2"  # llama.cpp's name for the rules by which K2 and K3 cut text into words
TEMPLATE_NAME = "chat_template.jinja"
MAX_TEMPLATE_BYTES = 1 << 20
NORMAL, CONTROL, UNUSED = 1, 3, 5


@cache
def _byte_letters() -> tuple[str, ...]:
    """A printable character for each byte, as GPT-2 vocabularies write them: itself, or the next one from U+0100."""
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return tuple(chr(byte if byte in plain else next(others)) for byte in range(256))


def token_text(token: bytes) -> str:
    letters = _byte_letters()
    return "".join(letters[byte] for byte in token)


def merges(tokens: Sequence[bytes]) -> list[tuple[bytes, bytes]]:
    """The pairs that make up the tokens longer than a byte, in the order in which they take precedence."""
    rank = {token: number for number, token in enumerate(tokens)}
    found: list[tuple[bytes, bytes]] = []
    for number, token in enumerate(tokens):
        if len(token) == 1:
            continue
        parts = _merged_below(token, rank, number)
        if len(parts) != 2:
            return list(_all_pairs(tokens, rank))
        found.append((parts[0], parts[1]))
    return found


def _merged_below(token: bytes, rank: dict[bytes, int], limit: int) -> list[bytes]:
    """The parts that are left of `token` once everything that ranks below `limit` is merged, lowest rank first."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        pairs = [rank.get(left + right, limit) for left, right in pairwise(parts)]
        lowest = min(pairs)
        if lowest >= limit:
            break
        at = pairs.index(lowest)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts


def _all_pairs(tokens: Sequence[bytes], rank: dict[bytes, int]) -> Iterator[tuple[bytes, bytes]]:
    for token in tokens:
        for cut in range(1, len(token)):
            if token[:cut] in rank and token[cut:] in rank:
                yield token[:cut], token[cut:]


def chat_template(source: Source) -> str:
    """The source's own template where it has one, else that of k3tool: llama.cpp would take another model's format."""
    files = source.files()
    if 0 < files.get(TEMPLATE_NAME, 0) <= MAX_TEMPLATE_BYTES:
        return source.read(TEMPLATE_NAME).decode("utf-8", errors="replace")
    if TOKENIZER_CONFIG_NAME in files:
        fail = corrupt("leave the template out: llama.cpp then takes that of k3tool")
        with contextlib.suppress(CheckpointCorrupt):
            text = read_named(source, TOKENIZER_CONFIG_NAME, MAX_TOKENIZER_CONFIG_BYTES, fail=fail, files=files)
            found = parse_object(text, where=TOKENIZER_CONFIG_NAME, fail=fail, unique_keys=False)
            if template := found.text("chat_template", ""):
                return template
    return (resources.files("k3tool") / "data" / "kimi-k3.jinja").read_text(encoding="utf-8")


def tokenizer_keys(config: K3Config, tokenizer: Tokenizer, template: str) -> list[tuple[str, Value]]:
    """Keys of a whole vocabulary. The end of generation is the configuration's (`<|end_of_msg|>`), not the
    tokenizer's, which ends documents; no beginning token is added to a prompt, as K3's own renderer adds none."""
    control = {token: name for name, token in tokenizer.control_ids.items()}
    texts, kinds = [], []
    for token in range(config.vocab_size):
        if token < len(tokenizer.tokens):
            texts.append(token_text(tokenizer.tokens[token]))
            kinds.append(NORMAL)
        else:
            texts.append(control.get(token, f"[PAD{token}]"))
            kinds.append(CONTROL if token in control else UNUSED)
    pairs = [f"{token_text(left)} {token_text(right)}" for left, right in merges(tokenizer.tokens)]
    return [
        ("tokenizer.ggml.model", text("gpt2")),
        ("tokenizer.ggml.pre", text(PRE_TOKENIZER)),
        ("tokenizer.ggml.tokens", text_list(texts)),
        ("tokenizer.ggml.token_type", i32_list(kinds)),
        ("tokenizer.ggml.merges", text_list(pairs)),
        *_special_ids(config),
        ("tokenizer.chat_template", text(template)),
    ]


def number_keys(config: K3Config) -> list[tuple[str, Value]]:
    """A vocabulary for models without a tokenizer, so that they can be run on token ids: id 17 reads `t17`.

    The texts are plain and distinct because llama.cpp's server withholds tokens that read as nothing.
    """
    return [
        ("tokenizer.ggml.model", text("gpt2")),
        ("tokenizer.ggml.pre", text(PRE_TOKENIZER)),
        ("tokenizer.ggml.tokens", text_list([f"t{token}" for token in range(config.vocab_size)])),
        ("tokenizer.ggml.token_type", i32_list([NORMAL] * config.vocab_size)),
        *_special_ids(config),
    ]


def no_keys() -> list[tuple[str, Value]]:
    """No vocabulary: llama.cpp loads the weights and cannot generate."""
    return [("tokenizer.ggml.model", text("none"))]


def _special_ids(config: K3Config) -> Iterator[tuple[str, Value]]:
    eos = config.eos_token_ids[0] if config.eos_token_ids else None
    for role, token in (("bos", config.bos_token_id), ("eos", eos), ("padding", config.pad_token_id)):
        if token is None:
            continue
        if not 0 <= token < config.vocab_size:
            raise CheckpointCorrupt(
                f"config.json: the {role} token {token} is outside the vocabulary of {config.vocab_size}",
                hint="config.json is wrong: its publisher has to mend it, or correct the number by hand",
            )
        yield f"tokenizer.ggml.{role}_token_id", u32(token)
    yield "tokenizer.ggml.add_bos_token", flag(False)
