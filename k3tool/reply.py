"""A generated reply taken apart: reasoning, response and tool calls, as `k3tool.chat` writes them into a conversation.

What the model generates is the rest of an assistant message: the think channel that the prompt has opened, the
response, tools. Text goes to the channel that it stands in, as it comes. A model that breaks the format loses nothing:
what is no tag there is text of the channel. A tag that is cut off by the end of the reply is of none.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from k3tool.chat import CLOSE, OPEN, SEP, Segment
from k3tool.checkpoint.outside import decode_json

MAX_TAG_CHARS = 1000
_CHANNELS = ("think", "response", "tools")  # of a message, in this order
_INSIDE = {"tools": ("call",), "call": ("argument", "json")}
_ATTRIBUTE = re.compile(r' ([A-Za-z_]{1,20})="([^"]*)"')

Channel = Literal["reasoning", "response", "tools"]


class Shown(NamedTuple):
    channel: Channel
    text: str


@dataclass
class _Tag:
    name: str
    attributes: dict[str, str] = field(default_factory=dict)
    text: str = ""
    arguments: Any = None  # of a call


class Reply:
    """Feed it the segments of a reply in order; read `reasoning`, `response` and `tool_calls`.

    tool_calls: the calls that are complete, in the form in which messages take them.
    """

    def __init__(self, *, thinking: bool) -> None:
        """thinking: the prompt ends in an open think channel (`render(..., thinking=True)`), else in the response."""
        self._said: dict[Channel, list[str]] = {"reasoning": [], "response": [], "tools": []}
        self.tool_calls: list[dict[str, Any]] = []
        self._open = [_Tag("message"), _Tag("think" if thinking else "response")]
        self._tag: list[Segment] = []  # a tag that has begun: its control token and what came after

    @property
    def reasoning(self) -> str:
        return "".join(self._said["reasoning"])

    @property
    def response(self) -> str:
        return "".join(self._said["response"])

    @property
    def channel(self) -> Channel:
        """Where text goes now."""
        names = [tag.name for tag in self._open]
        return "tools" if "tools" in names else "reasoning" if "think" in names else "response"

    def feed(self, segment: Segment) -> list[Shown]:
        """The next text or control token; what of it, and of what was waited for, is text of a channel."""
        if self._tag:
            if not segment.control and sum(len(part.text) for part in self._tag) <= MAX_TAG_CHARS:
                self._tag.append(segment)
                return []
            parts, self._tag = self._tag, []
            if segment == Segment(SEP, True) and self._apply(parts):
                return []
            broken = self._say("".join(part.text for part in parts))
            return broken + self.feed(segment)
        if segment in (Segment(OPEN, True), Segment(CLOSE, True)):
            self._tag = [segment]
            return []
        return self._say(segment.text)

    def _say(self, text: str) -> list[Shown]:
        channel = self.channel
        self._said[channel].append(text)
        if channel == "tools":
            self._open[-1].text += text
        return [Shown(channel, text)] if text else []

    def _apply(self, parts: list[Segment]) -> bool:
        """Carry out a whole tag. False where it cannot stand here."""
        text = "".join(part.text for part in parts[1:])
        if parts[0].text == CLOSE:
            return self._closed(text)
        name = text.partition(" ")[0]
        if not self._may_open(name):
            return False
        attributes = {key: _plain(value) for key, value in _ATTRIBUTE.findall(text[len(name) :])}
        self._open.append(_Tag(name, attributes))
        return True

    def _may_open(self, name: str) -> bool:
        """Whether a tag may begin here. A channel ends the one before it, also where the model has not closed that."""
        if not self._open:
            return False
        inner = self._open[-1].name
        if name in _CHANNELS and inner in ("message", *_CHANNELS[: _CHANNELS.index(name)]):
            del self._open[1:]
            return True
        return name in _INSIDE.get(inner, ())

    def _closed(self, name: str) -> bool:
        names = [tag.name for tag in self._open]
        if name not in names:
            return False
        while (tag := self._open.pop()).name != name:
            pass
        self._ended(tag)
        return True

    def _ended(self, tag: _Tag) -> None:
        parent = self._open[-1] if self._open else tag
        if tag.name == "argument":
            parent.arguments = parent.arguments if isinstance(parent.arguments, dict) else {}
            parent.arguments[tag.attributes.get("key", "")] = _value(tag)
        elif tag.name == "json":
            parent.arguments = tag.text
        elif tag.name == "call":
            function = {"name": tag.attributes.get("tool", ""), "arguments": tag.arguments or {}}
            number = tag.attributes.get("index", str(len(self.tool_calls) + 1))
            self.tool_calls.append({"id": number, "type": "function", "function": function})


def _plain(value: str) -> str:
    return value.replace("&quot;", '"').replace("&amp;", "&")


def _value(tag: _Tag) -> Any:
    """An argument as JSON has it; one that is not what its type says stays text."""
    if tag.attributes.get("type") == "string":
        return tag.text
    try:
        return decode_json(tag.text)
    except (ValueError, RecursionError):
        return tag.text
