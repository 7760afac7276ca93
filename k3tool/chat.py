"""K3's message format: a conversation to segments of text and control tokens.

A message is a tree of tags written with three control tokens, `<|open|>tag key="value"<|sep|>`, its content and
`<|close|>tag<|sep|>`, and ends with `<|end_of_msg|>`. Every stretch of text is a segment of its own and is encoded as
ordinary text, so nothing that a user, a tool or a file says can become a control token (`Tokenizer.encode_segments`).
No beginning-of-sequence token is written.

What this module does not do: the system messages that the publisher's own renderer writes from parameters (tool
declarations, thinking effort, tool choice, response format). Their wording belongs to the publisher; a caller who has
it gives them as messages: `{"role": "system", "type": "thinking-effort", "content": ...}`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

from k3tool.checkpoint.outside import decode_json, parse_json, shown
from k3tool.errors import UnsupportedError, UsageError

OPEN = "<|open|>"
CLOSE = "<|close|>"
SEP = "<|sep|>"
END_OF_MSG = "<|end_of_msg|>"
ROLES = ("system", "user", "assistant", "tool")
MAX_SEGMENTS = 1 << 21
"""More than any model of this family holds tokens: each segment is at least one."""

Message = Mapping[str, Any]


class Segment(NamedTuple):
    """Text to encode on its own. control: it is exactly one control token; otherwise it is ordinary text."""

    text: str
    control: bool = False


def render(messages: Sequence[Message], *, thinking: bool = True, add_generation_prompt: bool = True) -> list[Segment]:
    """Segments of a conversation, in the order in which they are encoded and joined.

    A message holds `role` and `content` (text, or a list of `{"type": "text", "text": ...}`), and where it applies
    `name`; `type` (system); `reasoning_content` and `tool_calls` (assistant); `tool_call_id` or `name` (tool).
    A role `developer`, as newer clients call it, is `system`.
    thinking: assistant messages carry a think channel, and the reply begins in it; otherwise it begins in the response.
    Raises UsageError for a message of another shape and for more than any model holds, UnsupportedError for images and
    tool declarations.
    """
    segments = list(islice(_segments(messages, thinking, add_generation_prompt), MAX_SEGMENTS + 1))
    if len(segments) > MAX_SEGMENTS:
        raise UsageError(
            f"the messages have more than {MAX_SEGMENTS} parts, and each is at least one token", hint="shorten them"
        )
    return segments


def _segments(messages: Sequence[Message], thinking: bool, add_generation_prompt: bool) -> Iterator[Segment]:
    calls: list[Mapping[str, Any]] = []
    results = 0
    for message in _in_call_order(messages):
        role = message["role"]
        if role == "tool":
            results += 1
            attributes = [("role", role), ("tool", _tool_name(message, calls, results)), ("index", str(results))]
        else:
            attributes = [("role", role), *((key, message[key]) for key in _ATTRIBUTES[role] if message.get(key))]
        if role == "assistant":
            calls, results = _calls(message), 0
        body = _assistant(message, calls, thinking) if role == "assistant" else _content(message)
        yield from _open("message", attributes)
        yield from body
        yield from (*_close("message"), Segment(END_OF_MSG, True))
    if add_generation_prompt:
        yield from (*_open("message", [("role", "assistant")]), *_open("think" if thinking else "response"))


_ATTRIBUTES = {"system": ("name", "type"), "user": ("name",), "assistant": ("name",)}


def render_prompt(text: str, *, system: str | None = None, thinking: bool = True) -> list[Segment]:
    """One user message, after a system message where there is one, ready for the reply."""
    messages = [{"role": "system", "content": system}] if system else []
    return render([*messages, {"role": "user", "content": text}], thinking=thinking)


def parse_messages(text: str, *, where: str, ignored: list[str] | None = None) -> list[Message]:
    """A conversation from JSON: a list of messages, or an object that holds it as `messages`. Raises UsageError.

    ignored: takes the other keys of the object, such as those of a request to a server (`model`, `temperature`).
    """
    document = parse_json(text.encode(errors="surrogateescape"), where=where, fail=_not_messages)
    if isinstance(document, dict):
        if document.get("tools"):
            raise _declares_tools(where)
        if ignored is not None:
            ignored += [key for key in document if key not in ("messages", "tools")]
        document = document.get("messages")
    if not isinstance(document, list) or not document:
        raise UsageError(f"{where}: not a list of messages, found {shown(document)}", hint=_SHAPE_HINT)
    return document


def are_messages(text: str) -> bool:
    """Whether text is meant as a conversation in JSON, whole or damaged, rather than as somebody's words."""
    return _LIKE_MESSAGES.match(text) is not None and re.search(r'"(?:role|messages)"\s*:', text) is not None


_LIKE_MESSAGES = re.compile(r'\s*(\[\s*\{\s*"|\{\s*")')
_SHAPE_HINT = (
    'write [{"role": "user", "content": "..."}, ...], or an object that holds it as "messages"; roles: system, user, '
    "assistant, tool"
)


def _not_messages(message: str) -> UsageError:
    return UsageError(message, hint=_SHAPE_HINT)


def _declares_tools(what: str) -> UnsupportedError:
    return UnsupportedError(
        f"{what} declares tools, and their wording is the publisher's",
        hint='give the rendered text: {"role": "system", "type": "tool-declare", "content": ...}',
    )


def _text(text: str) -> Iterator[Segment]:
    if text:
        yield Segment(text)


def _open(tag: str, attributes: Iterable[tuple[str, str]] = ()) -> Iterator[Segment]:
    """Every key, quote and value is a segment: their borders decide the ids."""
    yield Segment(OPEN, True)
    yield Segment(tag)
    for key, value in attributes:
        yield from (Segment(f" {key}"), Segment('="'), *_text(_escape(value)), Segment('"'))
    yield Segment(SEP, True)


def _close(tag: str) -> Iterator[Segment]:
    yield from (Segment(CLOSE, True), Segment(tag), Segment(SEP, True))


def _escape(value: str) -> str:
    return value.replace("&", "&amp;").replace('"', "&quot;")


def _assistant(message: Message, calls: list[Mapping[str, Any]], thinking: bool) -> Iterator[Segment]:
    if thinking:
        reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
        yield from _open("think")
        yield from _text(reasoning if reasoning.strip() else "")
        yield from _close("think")
    yield from _open("response")
    yield from _content(message)
    yield from _close("response")
    if calls:
        yield from _open("tools")
        for number, call in enumerate(calls, start=1):
            yield from _open("call", [("tool", call["name"]), ("index", str(number))])
            yield from _arguments(call.get("arguments"))
            yield from _close("call")
        yield from _close("tools")


def _arguments(arguments: Any) -> Iterator[Segment]:
    """One child for each argument; text that is no JSON goes whole into a `json` child, as the model left it."""
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        return
    if isinstance(arguments, str):
        try:
            arguments = decode_json(arguments)
        except (ValueError, RecursionError):
            yield from (*_open("json", [("type", "object")]), Segment(arguments), *_close("json"))
            return
    if not isinstance(arguments, Mapping):
        raise UsageError("the arguments of a tool call are no JSON object", hint="give an object, or its JSON text")
    for key, value in arguments.items():
        yield from _open("argument", [("key", str(key)), ("type", _json_type(value))])
        yield from _text(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
        yield from _close("argument")


def _json_type(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, (int, float)):
        return "number"
    if isinstance(value, str):
        return "string"
    return "object" if isinstance(value, Mapping) else "array"


def _in_call_order(messages: Sequence[Message]) -> list[Message]:
    """The messages, checked; tool results that name their calls stand in the order of these calls."""
    ordered: list[Message] = []
    names: dict[str, str] = {}
    run: list[Message] = []
    for number, message in enumerate(map(_as_known, messages)):
        _check(message, number)
        if message["role"] == "tool":
            run.append(message)
            continue
        ordered += _sort_results(run, names)
        run = []
        if message["role"] == "assistant":
            names = {}
            for call in _calls(message):
                if call.get("id") is not None:
                    names.setdefault(str(call["id"]), call["name"])
        ordered.append(message)
    return ordered + _sort_results(run, names)


def _as_known(message: Any) -> Any:
    is_system = isinstance(message, Mapping) and message.get("role") == "developer"
    return {**message, "role": "system"} if is_system else message


def _sort_results(results: list[Message], names: Mapping[str, str]) -> list[Message]:
    """A run of results in call order under the names of the calls; unchanged where one of them names no call."""
    ids = [str(result.get("tool_call_id", result.get("id"))) for result in results]
    if not all(call in names for call in ids):
        return results
    order = {call: position for position, call in enumerate(names)}
    ranked = sorted(zip(ids, results, strict=True), key=lambda pair: order[pair[0]])
    return [{**result, "tool": names[call]} for call, result in ranked]


def _tool_name(message: Message, calls: list[Mapping[str, Any]], position: int) -> str:
    name = message.get("tool") or message.get("name")
    if name is None and position <= len(calls):
        name = calls[position - 1]["name"]
    if not isinstance(name, str):
        raise UsageError(
            "a tool message names no tool and follows no call it could answer",
            hint="give it `name`, or the `tool_call_id` of a call of the assistant message before it",
        )
    return name


def _calls(message: Message) -> list[Mapping[str, Any]]:
    """Tool calls of an assistant message as `{"id", "name", "arguments"}`, from the nested or the flat form."""
    calls: list[Mapping[str, Any]] = []
    for call in message.get("tool_calls") or ():
        inner = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(inner, Mapping) or not isinstance(inner.get("name"), str):
            raise UsageError(
                f"a tool call names no function: {shown(call)}",
                hint='write {"id": ..., "function": {"name": ..., "arguments": {...}}}',
            )
        calls.append({"id": call.get("id"), "name": inner["name"], "arguments": inner.get("arguments")})
    return calls


def _check(message: Any, number: int) -> None:
    if not isinstance(message, Mapping) or message.get("role") not in ROLES:
        raise UsageError(f"message {number} has no known role: {shown(message)}", hint=_SHAPE_HINT)
    for key in ("name", "type", "reasoning_content", "reasoning", "tool"):
        if not isinstance(message.get(key, ""), (str, type(None))):
            raise UsageError(f"message {number}: {key} must be text, found {shown(message[key])}", hint=_SHAPE_HINT)
    if not isinstance(message.get("tool_calls") or [], (list, tuple)):
        raise UsageError(f"message {number}: tool_calls must be a list", hint=_SHAPE_HINT)
    if message.get("tools"):
        raise _declares_tools(f"message {number}")


def _content(message: Message) -> Iterator[Segment]:
    """Content as segments: one for each text. Raises UnsupportedError for images, UsageError for anything else."""
    content = message.get("content")
    if content is None or isinstance(content, str):
        yield from _text(content or "")
        return
    for item in content if isinstance(content, (list, tuple)) else [content]:
        kind = item.get("type") if isinstance(item, Mapping) else None
        if kind in ("image", "image_url", "video", "video_url"):
            raise UnsupportedError(
                f"a message holds content of type {kind}, and k3tool runs the text model", hint="leave it out"
            )
        if kind != "text" or not isinstance(item.get("text"), str):
            raise UsageError(f"content is neither text nor a list of texts: {shown(item)}", hint=_SHAPE_HINT)
        yield from _text(item["text"])
