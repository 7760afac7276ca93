"""The prompt of `k3tool run`: ids, text or messages, from the command line, a file or stdin, to token ids."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from k3tool.chat import are_messages, parse_messages, render
from k3tool.checkpoint.outside import Fail, read_file, read_stream
from k3tool.errors import K3Error, UsageError

if TYPE_CHECKING:
    from k3tool.chat import Message, Segment
    from k3tool.checkpoint.source import Source
    from k3tool.config import K3Config
    from k3tool.events import Progress
    from k3tool.tokenizer import Tokenizer

MAX_PROMPT_BYTES = 64 * 1024 * 1024  # a million tokens are about 4 MB of text


@dataclass(frozen=True)
class Prompt:
    """The prompt options as they were typed. thinking: None where neither form of it was given.

    Raises UsageError where they contradict each other.
    """

    text: str | None = None
    file: str | None = None
    ids: str | None = None
    chat: bool = False
    system: str | None = None
    thinking: bool | None = None

    def __post_init__(self) -> None:
        given = [name for name, value in self._sources if value is not None]
        if len(given) != 1:
            raise UsageError(
                f"{' and '.join(given)} contradict each other" if given else "there is no prompt",
                hint="give one of --prompt, --prompt-file and --input-ids",
            )
        if self.ids is not None and self.chat:
            raise UsageError("--chat renders text, and --input-ids gives ids", hint="leave out one of them")
        if self.system is not None and not self.chat:
            raise UsageError("--system is a message of a chat, and there is no --chat", hint="add --chat")
        for name, value in (("--prompt", self.text), ("--system", self.system)):
            if value is not None:
                check_text(name, value)

    @property
    def _sources(self) -> tuple[tuple[str, str | None], ...]:
        return ("--prompt", self.text), ("--prompt-file", self.file), ("--input-ids", self.ids)

    @property
    def thinks(self) -> bool:
        """Whether the reply of a chat begins with reasoning."""
        return self.thinking is not False

    @property
    def words(self) -> list[object]:
        """These options again, for a command that runs the same prompt."""
        words: list[object] = [word for name, value in self._sources if value is not None for word in (name, value)]
        words += ["--chat"] * self.chat + (["--system", self.system] if self.system is not None else [])
        return words + ["--no-thinking"] * (self.thinking is False)

    def read(self, source: Source, config: K3Config, progress: Progress) -> tuple[Tokenizer | None, list[int]]:
        """The tokenizer, where there is one, and the ids of the prompt.

        Raises UsageError, UnsupportedError for messages that the text model cannot take, CheckpointMissing for text
        where the checkpoint has no tokenizer, CheckpointCorrupt.
        """
        from k3tool.sampling import check_ids
        from k3tool.tokenizer import find_tokenizer, load_tokenizer

        if self.thinking is not None and not self.chat:
            progress.warn("--thinking and --no-thinking have no effect without --chat")
        tokenizer: Tokenizer | None
        if self.ids is not None:
            ids = parse_ids(self.ids)
            tokenizer = find_tokenizer(source, config.vocab_size)
        else:
            text = self.text if self.text is not None else read_text(str(self.file))
            tokenizer = load_tokenizer(source, config.vocab_size)
            ids = self._encode(tokenizer, text, progress)
        check_ids(config, ids)
        return tokenizer, ids

    @property
    def _name(self) -> str:
        return "--prompt" if self.file is None else "stdin" if self.file == "-" else self.file

    def _encode(self, tokenizer: Tokenizer, text: str, progress: Progress) -> list[int]:
        if not text:
            raise UsageError("the prompt is empty", hint="give some text")
        if not self.chat:
            if self.file is not None and are_messages(text):
                progress.warn(f"{self._name} holds messages, and is taken as plain text: --chat renders them")
            return tokenizer.encode(text)
        return tokenizer.encode_segments(self._rendered(text, progress))

    def _rendered(self, text: str, progress: Progress) -> list[Segment]:
        messages: list[Message] = [{"role": "user", "content": text}]
        if self.file is not None and (self.file.endswith(".json") or are_messages(text)):
            ignored: list[str] = []
            messages = parse_messages(text, where=self._name, ignored=ignored)
            if ignored:
                names = ", ".join(ignored[:8])
                progress.warn(f"{self._name}: only the messages of this request are used, not its {names}")
        if self.system is not None:
            first = messages[0]
            if isinstance(first, dict) and first.get("role") in ("system", "developer") and not first.get("type"):
                raise UsageError(
                    f"--system and the {first['role']} message of {self._name} contradict each other",
                    hint="leave out one of them",
                )
            messages = [{"role": "system", "content": self.system}, *messages]
        return render(messages, thinking=self.thinks)


def parse_ids(text: str) -> list[int]:
    """Token ids separated by commas or white space. Raises UsageError."""
    words = [word for word in re.split(r"[,\s]+", text.strip()) if word]
    for word in words:
        if not re.fullmatch(r"[+-]?\d{1,18}", word, re.ASCII):
            raise UsageError(f"not a token id: {word!r}", hint='write --input-ids "1,2,3"')
    return [int(word) for word in words]


def check_text(option: str, text: str) -> None:
    """Raises UsageError for bytes on the command line that are no UTF-8: they would become other text."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UsageError(f"{option} is not UTF-8 text", hint="set a UTF-8 locale, or write it in UTF-8") from None


def read_text(name: str) -> str:
    """The text of a prompt file, or of stdin for `-`, without a byte order mark. Raises UsageError."""
    fail: Fail = _too_large
    if name == "-" and sys.stdin is None:
        raise UsageError("there is no stdin to read a prompt from: it is closed", hint="name a file, or give --prompt")
    try:
        if name == "-":
            data = read_stream(sys.stdin.buffer.read, MAX_PROMPT_BYTES, where="stdin", fail=fail)
        else:
            data = read_file(Path(name), MAX_PROMPT_BYTES, fail=fail)
        return data.decode("utf-8-sig")
    except OSError as error:
        raise UsageError(f"cannot read {name}: {error.strerror or error}", hint="name a text file") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{name} is not UTF-8 text (byte {error.start})", hint="convert it to UTF-8") from None


def _too_large(message: str) -> K3Error:
    return UsageError(message, hint="give a prompt that the model has positions for")
