"""Text to ids and back, from `tiktoken.model` and `tokenizer_config.json` alone.

The tokenizer of Kimi K3 is shipped as Python code beside the weights. That code is never run: the rank file and the
table of added tokens hold everything, and tiktoken's encoder is built from them directly (nothing is downloaded).

Ids: the ranks of `tiktoken.model` come first, 0 to n-1; the ids after them are control tokens, named by
`added_tokens_decoder`, the others `<|reserved_token_ID|>`. Ordinary text never yields a control token: only a segment
that says so (`allow_special`, or a control `Segment` of `k3tool.chat`) does.
"""

from __future__ import annotations

import binascii
import codecs
import re
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from k3tool.checkpoint.origin import again, damaged
from k3tool.checkpoint.outside import parse_json
from k3tool.checkpoint.source import LocalSource, Source, open_source
from k3tool.checkpoint.strays import folder_with
from k3tool.errors import CheckpointCorrupt, CheckpointMissing, UsageError

if TYPE_CHECKING:
    import tiktoken

RANKS_NAME = "tiktoken.model"
TOKENIZER_CONFIG_NAME = "tokenizer_config.json"
RESERVED_TOKENS = 256
"""Ids set aside for control tokens after the ranks, where the model's vocabulary size is not known."""

MAX_RANKS_BYTES = 64 * 1024 * 1024  # the released file has 2.8 MB
MAX_TOKENIZER_CONFIG_BYTES = 16 * 1024 * 1024
MAX_ENCODE_CHARS = 400_000
MAX_RUN_CHARS = 25_000

_RANK_LINE = re.compile(rb"([A-Za-z0-9+/]+={0,2}) (\d{1,9})", re.ASCII)
_RUN = re.compile(r"\s+|\S+")


def _split_pattern() -> str:
    """How text is cut before byte pairs are merged. Tried in this order at every position:

    1. a run of Han characters; 2. and 3. a word, with at most one leading character that is neither letter, digit nor
    line break, and an English contraction after it: upper-case letters then at least one lower-case letter, or at
    least one upper-case letter then lower-case ones (letters without case and marks count as both, Han as neither);
    4. one to three digits; 5. a run of punctuation with at most one space before and line breaks after; 6. white
    space up to line breaks; 7. white space at the end or up to the last one before a word; 8. other white space.

    Source of the rules: the released tokenizer, as k3-compatible packages publish it (nemo-automodel 0.7.0,
    `kimi_k3/tokenization.py`). Set difference `--` is syntax of the Rust engine; Python's `re` has none.
    """
    caseless = r"\p{Lm}\p{Lo}\p{M}"
    upper = rf"[\p{{Lu}}\p{{Lt}}{caseless}--\p{{Han}}]"
    lower = rf"[\p{{Ll}}{caseless}--\p{{Han}}]"
    lead, contraction = r"[^\p{L}\p{N}\r\n]?", r"(?i:'(?:s|t|re|ve|m|ll|d))?"
    return "|".join(
        (
            r"\p{Han}+",
            f"{lead}{upper}*{lower}+{contraction}",
            f"{lead}{upper}+{lower}*{contraction}",
            r"\p{N}{1,3}",
            r" ?[^\s\p{L}\p{N}]+[\r\n]*",
            r"\s*[\r\n]+",
            r"\s+(?!\S)",
            r"\s+",
        )
    )


SPLIT_PATTERN = _split_pattern()


class TextSegment(Protocol):
    """What `k3tool.chat` renders: text, and whether it is a control token."""

    @property
    def text(self) -> str: ...

    @property
    def control(self) -> bool: ...


class Tokenizer:
    """Byte-pair encoder over ranks, with control tokens kept apart from text.

    tokens: the bytes of every rank, in rank order. named: control token text to id, all ids beyond the ranks.
    vocab_size: ids the model can emit; ids without a name below it read as `<|reserved_token_ID|>`.
    """

    def __init__(self, tokens: list[bytes], named: dict[str, int], vocab_size: int | None = None) -> None:
        self.tokens = tokens
        self.vocab_size = len(tokens) + RESERVED_TOKENS if vocab_size is None else vocab_size
        self.control_ids = dict(named)
        taken = set(named.values())
        for token in range(len(tokens), min(self.vocab_size, len(tokens) + RESERVED_TOKENS)):
            if token not in taken:
                self.control_ids.setdefault(_reserved(token), token)
        self._control_text = {token: text for text, token in self.control_ids.items()}

    @cached_property
    def _encoding(self) -> tiktoken.Encoding:
        import tiktoken

        return tiktoken.Encoding(
            name="k3tool",
            pat_str=SPLIT_PATTERN,
            mergeable_ranks={token: rank for rank, token in enumerate(self.tokens)},
            special_tokens=self.control_ids,
        )

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
        """Ids of `text`. Without `allow_special` the text of a control token is ordinary text, whatever it says."""
        ids: list[int] = []
        for stretch in encode_stretches(text):
            if allow_special:
                ids.extend(self._encoding.encode(stretch, allowed_special="all"))
            else:
                ids.extend(self._encoding.encode_ordinary(stretch))
        return ids

    def encode_segments(self, segments: Iterable[TextSegment]) -> list[int]:
        """Ids of rendered segments, each encoded on its own; a control segment must be exactly one control token.

        Raises UsageError where a control token does not exist in this tokenizer.
        """
        ids: list[int] = []
        for segment in segments:
            if segment.control:
                ids.append(self.control_id(segment.text))
            else:
                ids.extend(self.encode(segment.text))
        return ids

    def control_id(self, text: str) -> int:
        token = self.control_ids.get(text)
        if token is None:
            raise UsageError(
                f"the tokenizer of this checkpoint has no control token {text}",
                hint="give plain text without --chat, or token ids with --input-ids",
            )
        return token

    def is_control(self, token: int) -> bool:
        """Whether an id stands for no text of its own: all beyond the ranks."""
        return token >= len(self.tokens)

    def token_bytes(self, token: int) -> bytes:
        """The bytes one id stands for; the text of a control token. Raises UsageError for an id that does not exist."""
        if 0 <= token < len(self.tokens):
            return self.tokens[token]
        if not 0 <= token < self.vocab_size:
            raise UsageError(
                f"token id {token} does not exist", hint=f"ids are numbered from 0 to {self.vocab_size - 1}"
            )
        return self._control_text.get(token, _reserved(token)).encode()

    def decode(self, ids: Iterable[int]) -> str:
        """Text of the ids, control tokens as their text; bytes that are no UTF-8 become U+FFFD."""
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", errors="replace")

    def stream(self) -> StreamDecoder:
        return StreamDecoder(self)


class StreamDecoder:
    """Text of ids as they arrive. A character whose bytes are not all there is held back.

    The texts returned, joined, are `Tokenizer.decode` of all ids.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token: int) -> str:
        return self._decoder.decode(self._tokenizer.token_bytes(token))

    def finish(self) -> str:
        """What was held back: U+FFFD for a character that never became whole, mostly nothing."""
        return self._decoder.decode(b"", final=True)


def encode_stretches(text: str) -> Iterator[str]:
    """The stretches in which text is encoded: 400,000 characters, and no run of white space or of anything else over
    25,000 within one. Part of the tokenizer: it decides the ids of very long texts.
    """
    for start in range(0, len(text), MAX_ENCODE_CHARS):
        window = text[start : start + MAX_ENCODE_CHARS]
        before = 0
        for run in _RUN.finditer(window):
            for cut in range(run.start() + MAX_RUN_CHARS, run.end(), MAX_RUN_CHARS):
                yield window[before:cut]
                before = cut
        yield window[before:]


def find_tokenizer(where: Source | str | Path, vocab_size: int | None = None) -> Tokenizer | None:
    """The tokenizer of a checkpoint, or None where its files are not there. Raises CheckpointCorrupt."""
    source = _holder(open_source(where) if isinstance(where, (str, Path)) else where)
    files = source.files()
    if RANKS_NAME not in files or TOKENIZER_CONFIG_NAME not in files:
        return None
    return load_tokenizer(source, vocab_size)


def load_tokenizer(where: Source | str | Path, vocab_size: int | None = None) -> Tokenizer:
    """The tokenizer of a checkpoint folder or repository; reads two files and runs none of its code.

    vocab_size: of the model (`K3Config.vocab_size`); the tokenizer must fit into it.
    Raises CheckpointMissing with the way around it, CheckpointCorrupt naming file, line and value.
    """
    source = _holder(open_source(where) if isinstance(where, (str, Path)) else where)
    files = source.files()
    for name, limit in ((RANKS_NAME, MAX_RANKS_BYTES), (TOKENIZER_CONFIG_NAME, MAX_TOKENIZER_CONFIG_BYTES)):
        if name not in files:
            raise CheckpointMissing(
                f"{source.label} holds no {name}, so it has no tokenizer", hint=_no_tokenizer(source)
            )
        if files[name] > limit:
            raise _corrupt(f"{source.label}/{name}", f"{files[name]} bytes are beyond the limit of {limit}")
    tokens = parse_ranks(source.read(RANKS_NAME), where=f"{source.label}/{RANKS_NAME}")
    where_config = f"{source.label}/{TOKENIZER_CONFIG_NAME}"
    if vocab_size is not None and vocab_size < len(tokens):
        raise _corrupt(
            f"{source.label}/{RANKS_NAME}", f"{len(tokens)} ranks do not fit the model's vocabulary of {vocab_size}"
        )
    limit = len(tokens) + RESERVED_TOKENS if vocab_size is None else vocab_size
    named = parse_control_tokens(source.read(TOKENIZER_CONFIG_NAME), len(tokens), limit, where=where_config)
    return Tokenizer(tokens, named, vocab_size)


def _holder(source: Source) -> Source:
    """Where the tokenizer is: of a folder of ranks without one, the first rank's folder that is here."""
    if RANKS_NAME in source.files():
        return source
    folder, root = folder_with(source, RANKS_NAME), source.local_path("")
    return LocalSource(root / folder) if root is not None and folder.startswith("rank-") else source


def _no_tokenizer(source: Source) -> str:
    absent = [name for name in (RANKS_NAME, TOKENIZER_CONFIG_NAME) if name not in source.files()]
    return f"give token ids with --input-ids; for text, {again(source.label, absent)}"


def parse_ranks(text: bytes, *, where: str = RANKS_NAME) -> list[bytes]:
    """The bytes of each rank from lines `base64 rank`, in rank order. Raises CheckpointCorrupt.

    Refused: a line of another form, a repeated rank or token, a rank left out, a single byte without a token (such a
    byte could not be encoded).
    """
    by_rank: dict[int, bytes] = {}
    known: set[bytes] = set()
    for number, line in enumerate(text.splitlines(), start=1):
        if not line:
            continue
        match = _RANK_LINE.fullmatch(line)
        if match is None:
            raise _corrupt(where, f"line {number} is not `base64 rank`: {line[:60]!r}")
        token = _canonical_base64(match[1])
        if not token:
            raise _corrupt(where, f"line {number} holds bad base64: {line[:60]!r}")
        rank = int(match[2])
        if rank in by_rank:
            raise _corrupt(where, f"line {number} repeats rank {rank}")
        if token in known:
            raise _corrupt(where, f"line {number} repeats the token {token[:40]!r}")
        by_rank[rank] = token
        known.add(token)
    absent = next((rank for rank in range(len(by_rank)) if rank not in by_rank), None)
    if absent is not None:
        raise _corrupt(where, f"rank {absent} is left out ({len(by_rank)} ranks, the highest is {max(by_rank)})")
    for byte in range(256):
        if bytes((byte,)) not in known:
            raise _corrupt(where, f"no token stands for byte 0x{byte:02x}, so not every text can be encoded")
    return [by_rank[rank] for rank in range(len(by_rank))]


def _canonical_base64(text: bytes) -> bytes | None:
    """The bytes, or None where another text would stand for them too (bad padding, stray bits) or for nothing."""
    try:
        token = binascii.a2b_base64(text)
    except binascii.Error:
        return None
    return token if binascii.b2a_base64(token, newline=False) == text else None


def parse_control_tokens(text: bytes, first: int, limit: int, *, where: str = TOKENIZER_CONFIG_NAME) -> dict[str, int]:
    """Control token text to id from `added_tokens_decoder`; every id in [first, limit). Raises CheckpointCorrupt."""

    def refused(message: str) -> CheckpointCorrupt:
        return _corrupt(where, message.removeprefix(f"{where}: "))

    document = parse_json(text, where=where, fail=refused, unique_keys=False)
    table = document.get("added_tokens_decoder") if isinstance(document, dict) else []
    table = {} if table is None else table
    if not isinstance(table, dict):
        raise _corrupt(where, "added_tokens_decoder must map token ids to tokens")
    named: dict[str, int] = {}
    ids: set[int] = set()
    for key, entry in table.items():
        token, content = _control_token(key, entry, where)
        if not first <= token < limit:
            raise _corrupt(where, f"control token {content!r} has id {token}, outside {first} to {limit - 1}")
        if content in named or token in ids:
            raise _corrupt(where, f"control token {content!r} with id {token} is named twice")
        named[content] = token
        ids.add(token)
    return named


def _control_token(key: str, entry: Any, where: str) -> tuple[int, str]:
    content = entry.get("content") if isinstance(entry, dict) else entry
    if not re.fullmatch(r"\d{1,9}", key, re.ASCII) or not isinstance(content, str) or not 0 < len(content) <= 1000:
        raise _corrupt(where, f"added_tokens_decoder: {key[:40]!r} does not name a token: {str(entry)[:60]!r}")
    return int(key), content


def _reserved(token: int) -> str:
    return f"<|reserved_token_{token}|>"


def _corrupt(where: str, what: str) -> CheckpointCorrupt:
    error = damaged(where, what)
    error.hint = f"give token ids with --input-ids, or {error.hint}"
    return error
