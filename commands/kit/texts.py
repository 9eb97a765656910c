"""Values as text for people: times, sizes, bytes, widths, colours."""

from __future__ import annotations

import functools
import re
from typing import Final

from bkctl.columns import base64_text
from bkctl.columns import counted as counted
from bkctl.columns import plain as plain
from bkctl.columns import size_text as size_text

NULL: Final = "-"
BOLD: Final = "\x1b[1m"
GREEN: Final = "\x1b[32m"
YELLOW: Final = "\x1b[33m"
RED: Final = "\x1b[31m"
CYAN: Final = "\x1b[36m"
RESET: Final = "\x1b[0m"


def duration_text(seconds: float) -> str:
    """Return an exact duration: `1 h 30 min`, `45 s`, `250 ms`."""
    if 0 < seconds < 1:
        return f"{seconds * 1000:.3g} ms"
    parts = []
    rest = round(seconds, 3)
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        count, rest = divmod(rest, size)
        if count:
            parts.append(f"{count:.0f} {unit}")
    if rest or not parts:
        parts.append(f"{round(rest, 3):g} s")
    return " ".join(parts)


def milliseconds(value: float) -> str:
    """Return a latency: `12.3`, and two digits that count where it is less than one: `0.034`."""
    if value >= 1:
        return f"{value:.1f}" if value < 1000 else f"{value:,.0f}"
    return f"{value:.2g}" if value >= 0.001 or value == 0 else "<0.001"


def time_text(seconds: float) -> str:
    """Return about how long something takes or took: `45 s`, `12 min`, `3.5 h`."""
    minutes, hours = seconds / 60, seconds / 3600
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{minutes:.0f} min" if minutes < 90 else f"{hours:.1f} h"


@functools.cache
def words(name: str) -> str:
    """Return a name of several words as people write it: `endOfFile` as `end of file`."""
    text = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", plain(str(name)))
    return text.lower().replace(" lac", " LAC") if text != name else text


def binary_text(data: bytes | bytearray | memoryview, format: str | None) -> str:
    """Return `data` as text: `utf8` (invalid bytes as U+FFFD), `hex`, else base64."""
    if format == "utf8":
        return bytes(data).decode("utf-8", "replace")
    if format == "hex":
        return data.hex()
    return base64_text(data)


def readable_text(data: bytes | bytearray | memoryview) -> str:
    """Return `data` for a table: as text if it is printable UTF-8, else base64."""
    try:
        text = bytes(data).decode()
    except UnicodeDecodeError:
        return base64_text(data)
    return text if text.replace("\n", "").replace("\t", "").isprintable() else base64_text(data)


def plain_lines(text: str) -> str:
    """Return `plain` of each line of `text`; tabs stay."""
    return "\n".join("\t".join(map(plain, line.split("\t"))) for line in text.split("\n"))


def width_of(text: str) -> int:
    """Return the number of terminal cells that `text` occupies."""
    if text.isascii():
        return len(text)
    from unicodedata import combining, east_asian_width

    return sum(0 if combining(char) else 2 if east_asian_width(char) in "WF" else 1 for char in text)


def cut(text: str, width: int) -> str:
    """Return `text` in at most `width` cells, with `…` in place of its end, or of the start of an absolute path."""
    if width_of(text) <= width:
        return text
    if text.startswith("/"):
        while text and width_of(text) > width - 1:
            text = text[1:]
        return "…" + text
    while text and width_of(text) > width - 1:
        text = text[:-1]
    return text + "…"


def wrapped(text: str, width: int) -> list[str]:
    """Return the lines of `text`, broken at spaces into at most `width` cells; a longer word has a line of its own."""
    lines = [""]
    for word in text.split(" "):
        joined = f"{lines[-1]} {word}" if lines[-1] else word
        if lines[-1] and width_of(joined) > width:
            lines.append(word)
        else:
            lines[-1] = joined
    return lines
