"""Where a reply ends: the end tokens that a checkpoint names, and texts that the caller names. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from k3tool.chat import Segment
from k3tool.checkpoint.origin import damage
from k3tool.checkpoint.outside import parse_object, read_named
from k3tool.checkpoint.source import LocalSource, Source
from k3tool.checkpoint.strays import folder_with
from k3tool.config import K3Config, token_list
from k3tool.errors import UsageError

GENERATION_CONFIG_NAME = "generation_config.json"
MAX_GENERATION_CONFIG_BYTES = 1 << 20  # the released file has 53
MAX_STOP_TEXTS = 64
MAX_STOP_CHARS = 512


class EndTokens(NamedTuple):
    """ids: those that end a reply. unknown: what is named as one and is no token of the model."""

    ids: tuple[int, ...]
    unknown: tuple[int, ...] = ()


def end_tokens(source: Source, config: K3Config) -> EndTokens:
    """All end tokens of a checkpoint: of `generation_config.json`, of the configuration, and of its text part.

    In a folder of ranks without that file, the first rank's is read. Raises CheckpointCorrupt where it is damaged or
    names what is no token id.
    """
    files = source.files()
    folder, root = folder_with(source, GENERATION_CONFIG_NAME), source.local_path("")
    if GENERATION_CONFIG_NAME not in files and root is not None and folder.startswith("rank-"):
        source = LocalSource(root / folder)
        files = source.files()
    named = list(config.eos_token_ids)
    if GENERATION_CONFIG_NAME in files:
        where = f"{source.label}/{GENERATION_CONFIG_NAME}"
        fail = damage(where)
        text = read_named(source, GENERATION_CONFIG_NAME, MAX_GENERATION_CONFIG_BYTES, fail=fail, files=files)
        named = token_list(parse_object(text, where=where, fail=fail, unique_keys=False), "eos_token_id") + named
    known = dict.fromkeys(token for token in named if 0 <= token < config.vocab_size)
    return EndTokens(tuple(known), tuple(dict.fromkeys(token for token in named if token >= config.vocab_size)))


def check_stop_texts(texts: Sequence[str]) -> None:
    """Raises UsageError for too many stop texts, and for one that is empty, too long, or no text."""
    if len(texts) > MAX_STOP_TEXTS:
        raise UsageError(
            f"--stop is given {len(texts)} times, at most {MAX_STOP_TEXTS} are watched for",
            hint="leave some of them out",
        )
    for text in texts:
        if not text:
            raise UsageError("--stop is empty, and would end every reply at once", hint="give the text to stop at")
        if len(text) > MAX_STOP_CHARS:
            raise UsageError(
                f"--stop {text[:40]!r}... has {len(text)} characters, at most {MAX_STOP_CHARS} are watched for",
                hint="give its beginning",
            )


class StopTexts:
    """Lets generated text through until one of `texts` stands in it; that text and what follows it never come out.

    Text that may be the beginning of one is held back until that is known, across any number of tokens. Control tokens
    count as the text they are written as, and come out whole or not at all. `found` is the text that was met.
    """

    def __init__(self, texts: Sequence[str] = ()) -> None:
        """Raises UsageError, see `check_stop_texts`."""
        check_stop_texts(texts)
        self.found: str | None = None
        self._texts = tuple(texts)
        self._longest = max(map(len, texts), default=0)
        self._held: list[Segment] = []

    def feed(self, segment: Segment) -> list[Segment]:
        """What may be shown now that this text has come."""
        if self.found is not None or not segment.text:
            return []
        self._held.append(segment)
        text = "".join(held.text for held in self._held)
        first = min(((text.find(stop), stop) for stop in self._texts if stop in text), default=None)
        if first is None:
            return self._take(self._sure(text))
        self.found = first[1]
        shown = self._take(first[0])
        self._held.clear()
        return shown

    def finish(self) -> list[Segment]:
        """What was held back, when nothing more comes."""
        rest, self._held = self._held, []
        return rest

    def _sure(self, text: str) -> int:
        """How many characters cannot be part of a stop text, whatever follows."""
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            if any(stop.startswith(text[start:]) for stop in self._texts):
                return start
        return len(text)

    def _take(self, count: int) -> list[Segment]:
        taken: list[Segment] = []
        while self._held and count > 0:
            segment = self._held[0]
            if len(segment.text) > count:
                if segment.control:
                    break
                self._held[0] = Segment(segment.text[count:])
                segment = Segment(segment.text[:count])
            else:
                del self._held[0]
            taken.append(segment)
            count -= len(segment.text)
        return taken
