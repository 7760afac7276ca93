"""Sizes, counts, durations and index ranges as people write and read them."""

from __future__ import annotations

import re
from collections.abc import Iterable

from k3tool.errors import UsageError

_FACTORS = {
    "": 1,
    "b": 1,
    **{f"{p}b": 1000**n for n, p in enumerate("kmgtp", 1)},
    **{f"{p}ib": 1024**n for n, p in enumerate("kmgtp", 1)},
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", re.ASCII)


def parse_size(text: str) -> int:
    """`5GB`, `5GiB`, `512MiB` or a number of bytes, as bytes. Raises UsageError."""
    if text.strip().startswith("-"):
        raise UsageError(f"a size is positive: {text!r}", hint="write 5GB, 5GiB, 512MiB or a number of bytes")
    match = _SIZE.fullmatch(text)
    factor = _FACTORS.get(match.group(2).lower()) if match else None
    if match is None or factor is None:
        raise UsageError(f"not a size: {text!r}", hint="write 5GB, 5GiB, 512MiB or a number of bytes")
    return int(float(match.group(1)) * factor) if "." in match.group(1) else int(match.group(1)) * factor


MAX_SPAN = 100_000


def parse_ranges(text: str, *, what: str, limit: int | None = None, option: str = "") -> tuple[int, ...]:
    """`0-3,7` as (0, 1, 2, 3, 7): ascending, without repeats, each below `limit`. Raises UsageError, which names `option`."""
    said = f"{option}: " if option else ""
    values: set[int] = set()
    for item in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,9})(?:\s*-\s*(\d{1,9}))?\s*", item, re.ASCII)
        first, last = (int(match.group(1)), int(match.group(2) or match.group(1))) if match else (1, 0)
        if first > last:
            raise UsageError(f"{said}not a list of {what}: {text!r}", hint="write it as 0-3,7")
        if limit is not None and last >= limit:
            raise UsageError(
                f"{said}{what.removesuffix('s')} {last} does not exist",
                hint=f"{what} are numbered from 0 to {limit - 1}",
            )
        if last - first > MAX_SPAN:
            raise UsageError(f"{said}{what} {first}-{last} are {last - first + 1:,} of them", hint="write it as 0-3,7")
        values.update(range(first, last + 1))
    return tuple(sorted(values))


def format_ranges(values: Iterable[int]) -> str:
    """The shortest way to write a list of numbers: (0, 1, 2, 7) as `0-2,7`."""
    runs: list[list[int]] = []
    for value in sorted(set(values)):
        if runs and value == runs[-1][1] + 1:
            runs[-1][1] = value
        else:
            runs.append([value, value])
    return ",".join(f"{first}-{last}" if last > first else f"{first}" for first, last in runs)


def format_bytes(count: float) -> str:
    """Decimal units, as disks and the Hub count: `1.56 TB`."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(count) < 999.5 or unit == "TB":
            return (
                f"{count:.0f} B"
                if unit == "B"
                else f"{count:.3g} {unit}"
                if abs(count) < 1000
                else f"{count:,.0f} {unit}"
            )
        count /= 1000
    raise AssertionError("unreachable")


def format_count(count: float) -> str:
    """Parameter counts: `2.78T`."""
    for unit in ("", "K", "M", "B"):
        if abs(count) < 999.5:
            return f"{count:.0f}" if not unit else f"{count:.3g}{unit}"
        count /= 1000
    return f"{count:.3g}T"


def plural(number: int, noun: str, nouns: str = "") -> str:
    """`1 GPU`, `2 GPUs`, `1,500 sequences`. nouns: where it is more than an `s`."""
    return f"{number:,} {noun if number == 1 else nouns or f'{noun}s'}"


def format_duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"
