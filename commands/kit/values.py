"""Numbers, sizes, durations and switches as people type them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final, TypeVar

from bkctl.errors import UsageError

_SIZE: Final = re.compile(r"(\d{1,19})\s*(?:([kmgt])(i?)b?|b)?", re.ASCII | re.IGNORECASE)
_DURATION: Final = re.compile(r"(\d{1,9}(?:\.\d{1,6})?)\s*(ms|s|m|h|d|w)?", re.ASCII)
_NUMBER: Final = re.compile(r"-?[0-9]{1,20}|0[xX][0-9a-fA-F]{1,16}", re.ASCII)

N = TypeVar("N", int, float)
R = TypeVar("R")


def parse_size(text: str, name: str) -> int:
    """Return bytes: a number, with KB, MB, GB, TB (powers of 1000) or K, KiB, M, MiB … (powers of 1024).

    Raises UsageError, which begins with `name`.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise UsageError(
            f"{name}: not a size: {text!r}", hint="give bytes, or a number with KiB, MiB, GiB, KB, MB or GB"
        )
    power = " kmgt".index(match[2].lower()) if match[2] else 0
    decimal = bool(match[2]) and not match[3] and text.strip().lower().endswith("b")
    unit: int = (1000 if decimal else 1024) ** power
    return int(match[1]) * unit


def parse_duration(text: str, name: str) -> float:
    """Return seconds: a number, with ms, s, m, h, d or w (weeks). Raises UsageError, which begins with `name`."""
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"{name}: not a duration: {text!r}", hint="give seconds, or a number with ms, s, m, h, d or w")
    return float(match[1]) * {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}[match[2] or "s"]


def checked(parse: Callable[[str, str], N], fits: Callable[[N], bool], words: str) -> Callable[[str, str], N]:
    """Return a function like `parse` that refuses a value that does not fit: it `words`."""

    def parsed(text: str, name: str) -> N:
        value = parse(text, name)
        if not fits(value):
            raise UsageError(f"{name} {text}: {words}")
        return value

    return parsed


def is_duration(text: str) -> bool:
    """Return True if `parse_duration` accepts `text`."""
    return _DURATION.fullmatch(text) is not None


def parse_number(text: str, name: str) -> int:
    """Return a decimal (also negative) or 0x number of at most 64 bits. Raises UsageError, which begins with `name`."""
    if not _NUMBER.fullmatch(text) or not -(1 << 63) <= int(text, 0 if text[1:2] in "xX" else 10) < 1 << 64:
        raise UsageError(f"{name}: not a number: {text!r}", hint="give a decimal or 0x number of at most 64 bits")
    return int(text, 0 if text[1:2] in "xX" else 10)


def refuse_both(first: str, is_first: object, second: str, is_second: object, hint: str = "give one of them") -> None:
    """Raise UsageError if both are given: neither None, nor False or empty."""
    if all(each is not None and each is not False and each not in ([], "", ()) for each in (is_first, is_second)):
        raise UsageError(f"{first} and {second} are given", hint=hint)


def parse_switch(text: str, name: str) -> bool:
    """Return True for 1, true and yes, False for 0, false and no. Raises UsageError, which begins with `name`."""
    if text.lower() not in ("0", "1", "false", "true", "no", "yes"):
        raise UsageError(f"{name}={text!r}: not a switch", hint="set it to 1 or 0")
    return text.lower() in ("1", "true", "yes")


def tap(rows: Iterable[R], look: Callable[[R], object]) -> Iterator[R]:
    """Yield the rows on their way to the output; `look` gets each once it was taken."""
    for row in rows:
        yield row
        look(row)


def read_bounded(path: Path, what: str, size_max_bytes: int = 1 << 20) -> bytes:
    """Return the content of a file. Raises UsageError for one too large to be `what`, OSError."""
    with open(path, "rb") as file:
        content = file.read(size_max_bytes + 1)
    if len(content) > size_max_bytes:
        raise UsageError(f"{path} is larger than {size_max_bytes} bytes, so it is not {what}")
    return content


def percentage(threshold: float | None) -> float | None:
    """Return the value of --threshold. Raises UsageError if it is not a percentage."""
    if threshold is not None and not 0 <= threshold <= 100:
        raise UsageError(f"--threshold {threshold:g}: percent are 0 to 100")
    return threshold
