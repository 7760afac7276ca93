"""What `k3tool run` shows of a reply while it appears: text where there is a tokenizer, else ids."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from k3tool.chat import Segment
from k3tool.stopping import StopTexts

if TYPE_CHECKING:
    from k3tool.reply import Reply
    from k3tool.tokenizer import StreamDecoder, Tokenizer

TITLES = {"reasoning": "[reasoning]", "response": "[response]", "tools": "[tools]"}


class Printer:
    """Shows tokens as they come, channel by channel in a chat. The end token is not shown, nor is a stop text.

    `completes` takes the text of a token, `token` shows it. Before `start`, and on every rank but the first, nothing
    is shown.
    """

    def __init__(self) -> None:
        self.input_ids: list[int] = []
        self.ids: list[int] = []
        self.reply: Reply | None = None
        self._texts: list[str] = []
        self._tokenizer: Tokenizer | None = None
        self._stream: StreamDecoder | None = None
        self._stops = StopTexts()
        self._ready: list[Segment] = []
        self._title = ""
        self._live = False

    def start(self, tokenizer: Tokenizer | None, *, stops: Sequence[str], reply: Reply | None, live: bool) -> None:
        """reply: takes the text of a chat apart. live: whether tokens are shown, or only kept."""
        self._tokenizer = tokenizer
        self._stream = tokenizer.stream() if tokenizer else None
        self._stops = StopTexts(stops)
        self.reply = reply
        self._live = live

    @property
    def text(self) -> str | None:
        """All text so far, tags included; None without a tokenizer."""
        return "".join(self._texts) if self._stream else None

    @property
    def essential(self) -> str:
        """The response of a chat, else all text; the ids without a tokenizer."""
        if self._stream is None:
            return " ".join(map(str, self.ids))
        return self.reply.response if self.reply else self.text or ""

    @property
    def is_reasoning(self) -> bool:
        """Whether a chat's reply has not come to its response."""
        return self.reply is not None and self.reply.channel == "reasoning" and not self.reply.response

    @property
    def so_far(self) -> dict[str, object]:
        """What a run tells of its reply, also one that was interrupted."""
        document: dict[str, object] = {"input_ids": self.input_ids, "token_ids": self.ids, "text": self.text}
        return {**document, **self.channels}

    @property
    def channels(self) -> dict[str, object]:
        """The reply of a chat, taken apart."""
        if self.reply is None:
            return {}
        return {"reasoning": self.reply.reasoning, "response": self.reply.response, "tool_calls": self.reply.tool_calls}

    def completes(self, token: int) -> str | None:
        """Take the text of a token that is none of the end tokens. The stop text that it completes, or None."""
        if self._stream is not None and self._tokenizer is not None:
            text, own = self._stream.feed(token), ""
            if self._tokenizer.is_control(token):  # half a character may stand before it
                own = self._tokenizer.decode([token])
                text = text[: len(text) - len(own)]
            self._ready += self._stops.feed(Segment(text)) + self._stops.feed(Segment(own, True))
        return self._stops.found

    def token(self, token: int) -> None:
        self.ids.append(token)
        if self._stream is None:
            self._write(f" {token}" if len(self.ids) > 1 else str(token))
        self._show_ready()

    def finish(self) -> None:
        if self._stream is not None:
            if self._stops.found is None:
                self._ready += self._stops.feed(Segment(self._stream.finish()))
                self._ready += self._stops.finish()
            self._show_ready()
        if self.reply is not None:
            for call in self.reply.tool_calls:
                self._say("tools", json.dumps(call["function"], ensure_ascii=False) + "\n")
        if self._live:
            sys.stdout.write("\n")
            sys.stdout.flush()
        self._live = False

    def _show_ready(self) -> None:
        for segment in self._ready:
            self._texts.append(segment.text)
            if self.reply is None:
                self._write(segment.text)
                continue
            for channel, text in self.reply.feed(segment):
                if channel != "tools":  # shown when they are whole
                    self._say(channel, text)
        self._ready = []

    def _say(self, channel: str, text: str) -> None:
        """Text of a channel, under its title; a reply that is nothing but a response has none."""
        if channel != self._title and (self._title or channel != "response"):
            self._write(("\n\n" if self._title else "") + TITLES[channel] + "\n")
        self._title = channel
        self._write(text)

    def _write(self, text: str) -> None:
        if self._live and text:
            sys.stdout.write(visible(text) if sys.stdout.isatty() else text)
            sys.stdout.flush()


def visible(text: str) -> str:
    """Generated text for a terminal: control characters cannot move its cursor, everything else stays."""
    return "".join(f"\\x{ord(c):02x}" if (c < " " and c not in "\n\t") or "\x7f" <= c <= "\x9f" else c for c in text)
