"""JSON and TOML from outside (a file, a header, a server's answer): bounded before they are read, typed when used

`parse_json` gives plain values or raises what its caller says. `Fields` reads one object by field; each refusal names
the file, the field, what was expected and what is there. The rules, for every document alike: UTF-8 without byte order
mark, no NaN or infinity (spelled or overflowed), integers of at most 40 digits, at most 64 levels, no half surrogate
pairs in strings. A repeated key is refused, or with `unique_keys=False` the last one counts, as in Python's own reader.
"""

from __future__ import annotations

import json
import math
import os
import re
import reprlib
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from k3tool.errors import CheckpointCorrupt, K3Error

if TYPE_CHECKING:
    from k3tool.checkpoint.source import Source

MAX_DEPTH = 64
MAX_DIGITS = 40
MAX_TEXT_CHARS = 1 << 20
_MAX_FLOAT_CHARS = 400
_LONG_KEY = re.compile(r"(?:[\w\"'-]+[ \t]*\.[ \t]*){64}")
REQUIRED: Any = object()
"""The default of a field that must be there."""
_T = TypeVar("_T")

Fail = Callable[[str], K3Error]
"""Makes the error of one message, which already names the file."""


def corrupt(hint: str) -> Fail:
    """CheckpointCorrupt with this remedy."""
    return lambda message: CheckpointCorrupt(message, hint=hint)


# Bytes


def read_file(path: Path, limit: int, *, fail: Fail) -> bytes:
    """All bytes of a file of at most `limit`. Raises `fail` before reading a larger one, OSError as the system says."""
    with open(path, "rb") as file:
        check_size(str(path), os.fstat(file.fileno()).st_size, limit, fail=fail)
        return read_stream(file.read, limit, where=str(path), fail=fail)


def read_stream(read: Callable[[int], bytes], limit: int, *, where: str, fail: Fail) -> bytes:
    """What `read(n)` gives until it gives nothing; at most `limit` bytes are ever held. Raises `fail` beyond."""
    pieces: list[bytes] = []
    left = limit + 1
    while left and (piece := read(min(left, 1 << 20))):
        pieces.append(piece)
        left -= len(piece)
    if not left:
        raise fail(f"{where}: more than {limit} bytes, the limit for such a file")
    return b"".join(pieces)


def read_named(source: Source, name: str, limit: int, *, fail: Fail, files: Mapping[str, int] | None = None) -> bytes:
    """All bytes of a small file of a Source. Raises `fail` before reading one beyond `limit`, CheckpointMissing.

    files: what `source.files()` says, where it is known already.
    """
    size = (source.files() if files is None else files).get(name, 0)
    check_size(f"{source.label}/{name}", size, limit, fail=fail)
    return source.read(name)


def check_size(where: str, size: int, limit: int, *, fail: Fail) -> None:
    if size > limit:
        raise fail(f"{where}: {size} bytes are beyond the limit of {limit} for such a file")


# Text


def parse_json(
    text: bytes, *, where: str, fail: Fail, unique_keys: bool = True, own: bool = False, bare: bool = False
) -> Any:
    """The value of a JSON text, by the rules above. Raises `fail` naming `where`.

    own: a record of k3tool itself: strings may hold bytes of file names that are no UTF-8, as `os.fsdecode` gives them,
    and what was measured may be infinite. bare: depth and integers are not bounded here, because the caller looks at every value of half a million tensors.
    """
    try:
        return decode_json(text.decode(), unique_keys=unique_keys, own=own, bare=bare)
    except (ValueError, RecursionError) as error:
        raise fail(f"{where}: not JSON that can be read ({_reason(text, error)})") from None


def decode_json(text: str, *, unique_keys: bool = True, own: bool = False, bare: bool = False) -> Any:
    """`parse_json` for text that is decoded. Raises ValueError, RecursionError."""
    value = json.loads(
        text,
        parse_int=None if bare else _integer,
        parse_float=None if own else _float,
        parse_constant=None if own else _constant,
        object_pairs_hook=_unique if unique_keys else None,
    )
    if not bare:
        _check_depth(value, MAX_DEPTH)
    if "\\ud" in text or "\\uD" in text:
        _check_surrogates(value, "surrogateescape" if own else "strict")
    return value


def parse_object(text: bytes, *, where: str, fail: Fail, unique_keys: bool = True, own: bool = False) -> Fields:
    """The object that a JSON text holds. Raises `fail` for anything else."""
    value = parse_json(text, where=where, fail=fail, unique_keys=unique_keys, own=own)
    if not isinstance(value, dict):
        raise fail(f"{where}: expected a JSON object, found {shown(value)}")
    return Fields(value, where, fail)


def parse_lines(text: bytes) -> Iterator[dict[str, Any]]:
    """The objects of a text with one on each line, such as k3tool keeps. What is torn, or no object, is passed over."""
    for line in text.splitlines():
        try:
            value = decode_json(line.decode(), own=True)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            yield value


def parse_toml(text: bytes, *, where: str, fail: Fail) -> dict[str, Any]:
    """The table of a TOML text in UTF-8. Raises `fail`; keys of more than 64 parts take memory with their square."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        decoded = text.decode()
        if _LONG_KEY.search(decoded):
            raise ValueError("a key of more than 64 parts")
        document = tomllib.loads(decoded)
        _check_depth(document, MAX_DEPTH)
    except (ValueError, RecursionError) as error:
        raise fail(f"{where}: not TOML ({_reason(text, error)})") from None
    return document


def shown(value: Any) -> str:
    """A value of JSON, short enough for a message, whatever its size."""
    return _SHORT.repr(value)


def _reason(text: bytes, error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "nested too deep"
    if text.startswith((b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff")):
        return "it begins with a byte order mark: save it as UTF-8 without one"
    if isinstance(error, UnicodeDecodeError):
        return f"no UTF-8 at byte {error.start}"
    return "it is empty" if not text.strip() else str(error)


def _integer(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)


def _float(digits: str) -> float:
    value = float(digits) if len(digits) <= _MAX_FLOAT_CHARS else math.inf
    if not math.isfinite(value):
        raise ValueError(f"the number {digits[:40]} is beyond any float")
    return value


def _constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"it names {shown(twice)} twice")
    return values


def _children(value: dict[str, Any] | list[Any]) -> list[Any]:
    return [item for item in (value.values() if type(value) is dict else value) if type(item) in (dict, list)]


def _check_depth(value: Any, limit: int) -> None:
    """Raises RecursionError where lists and objects are within each other more than `limit` deep."""
    level = [value] if isinstance(value, (dict, list)) else []
    for _ in range(limit):
        level = [child for container in level for child in _children(container)]
        if not level:
            return
    raise RecursionError


def _check_surrogates(value: Any, errors: str) -> None:
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, str):
            try:
                item.encode(errors=errors)
            except UnicodeEncodeError:
                raise ValueError(f"the text {shown(item)} holds half of a surrogate pair") from None
        elif isinstance(item, dict):
            waiting.extend(item)
            waiting.extend(item.values())
        elif isinstance(item, list):
            waiting.extend(item)


class _Short(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxdict, self.maxlist, self.maxstring = 2, 2, 4, 80

    def repr_int(self, number: int, level: int) -> str:
        return repr(number) if abs(number) < 10**MAX_DIGITS else f"a number of more than {MAX_DIGITS} digits"


_SHORT = _Short()


# Fields


class Fields:
    """One JSON object, read by field. Raises what `fail` makes, naming file, field, what is there and what was expected.

    Every accessor takes a `default` for a field that is absent or null; without one the field must be there. `where`
    names the file, and for an object inside it the way to it.
    """

    def __init__(self, values: Mapping[str, Any], where: str, fail: Fail) -> None:
        self.values = values
        self.where = where
        self.fail = fail

    def __contains__(self, key: str) -> bool:
        """Whether the field is there and not null."""
        return self.values.get(key) is not None

    def bad(self, key: str, expected: str) -> K3Error:
        """The error of a field that is not what was expected, for the caller to raise."""
        found = f"found {shown(self.values[key])}" if key in self.values else "it is missing"
        return self.fail(f"{self.where}: {key} must be {expected}, {found}")

    def _get(self, key: str, default: Any, expected: str, fits: Callable[[Any], bool]) -> Any:
        value = self.values.get(key)
        if value is None and default is not REQUIRED:
            return default
        if not fits(value):
            raise self.bad(key, expected)
        return value

    def integer(self, key: str, default: _T | int = REQUIRED, *, low: int = 0, high: int = (1 << 63) - 1) -> int | _T:
        """A whole number in [low, high]; true and false are none."""
        value = self._get(key, default, f"a whole number of at least {low}", lambda v: type(v) is int and v >= low)
        if type(value) is int and value > high:
            raise self.bad(key, f"a whole number of at most {high}")
        return value

    def number(self, key: str, default: _T | float = REQUIRED, *, low: float = -1e30, high: float = 1e30) -> float | _T:
        """A number in [low, high], as float."""
        value = self._get(key, default, "a number", lambda v: type(v) in (int, float))
        if value is not default and not low <= value <= high:
            raise self.bad(key, f"a number from {low:g} to {high:g}")
        return value if value is default else float(value)

    def text(
        self, key: str, default: _T | str = REQUIRED, *, choices: tuple[str, ...] = (), longest: int = MAX_TEXT_CHARS
    ) -> str | _T:
        """A string of at most `longest` characters; with `choices`, one of them."""

        def fits(value: Any) -> bool:
            return type(value) is str and (value in choices if choices else len(value) <= longest)

        return self._get(key, default, f"one of {', '.join(choices)}" if choices else "a text", fits)

    def flag(self, key: str, default: _T | bool = REQUIRED) -> bool | _T:
        return self._get(key, default, "true or false", lambda value: type(value) is bool)

    def mapping(self, key: str, default: _T | dict[str, Any] = REQUIRED) -> dict[str, Any] | _T:
        return self._get(key, default, "an object", lambda value: isinstance(value, dict))

    def items(self, key: str, default: _T | list[Any] = REQUIRED) -> list[Any] | _T:
        return self._get(key, default, "a list", lambda value: isinstance(value, list))

    def integers(
        self, key: str, default: _T | list[int] = REQUIRED, *, low: int = 0, high: int = (1 << 63) - 1
    ) -> list[int] | _T:
        """A list of whole numbers in [low, high]."""

        def fits(value: Any) -> bool:
            return isinstance(value, list) and all(type(item) is int and low <= item <= high for item in value)

        return self._get(key, default, f"a list of whole numbers from {low} to {high}", fits)

    def fields(self, key: str, default: Mapping[str, Any] = REQUIRED) -> Fields:
        """The object in a field, to be read by field itself."""
        return Fields(self.mapping(key, default), f"{self.where}: {key}", self.fail)

    def each(self, key: str, default: Mapping[str, Any] = REQUIRED) -> Iterator[tuple[str, Fields]]:
        """The objects that an object maps names to, each to be read by field."""
        inner = self.fields(key, default)
        for name in inner.values:
            yield name, inner.fields(name)
