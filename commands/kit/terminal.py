"""The terminal: its width, its colours, stdout that closes."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from shutil import get_terminal_size
from typing import Final, TextIO
from urllib.parse import quote

#: The first release of VTE (GNOME's terminals) whose links do not crash.
_VTE_VERSION_MIN: Final = 5000
_PROGRAMS_WITH_LINKS: Final = frozenset(("iTerm.app", "WezTerm", "vscode", "ghostty", "Hyper", "Tabby", "rio"))


class ClosedOutput(Exception):
    """The reader of stdout is gone (`| head`), so the command ends without an error."""


def emit(text: str, stream: TextIO | None = None) -> None:
    """Write `text` to stdout. Raises ClosedOutput if the reader of stdout is gone."""
    try:
        (stream or sys.stdout).write(text)
    except OSError as error:
        raise output_error(error) from error


def output_error(error: OSError) -> Exception:
    """Return ClosedOutput if the reader of stdout is gone, else the error with `stdout` as its file name."""
    if isinstance(error, BrokenPipeError):
        return ClosedOutput()
    return OSError(error.errno, error.strerror, "stdout")


def emit_bytes(data: bytes | bytearray | memoryview) -> None:
    """Write raw bytes to stdout. Raises ClosedOutput if the reader of stdout is gone."""
    try:
        sys.stdout.flush()
        sys.stdout.buffer.write(data)
    except OSError as error:
        raise output_error(error) from error


def terminal_width() -> int:
    """Return the width of the terminal on stdout, or COLUMNS; 80 if both are unknown."""
    return max(get_terminal_size((80, 24)).columns, 20)


def has_links(environment: Mapping[str, str]) -> bool:
    """Return True for terminals that are known to show OSC 8 links; FORCE_HYPERLINK decides for the others."""
    forced = environment.get("FORCE_HYPERLINK")
    if forced:
        return forced != "0"
    term = environment.get("TERM", "")
    if term.startswith(("screen", "tmux")):
        return False
    vte = environment.get("VTE_VERSION", "")
    return (
        (vte.isdecimal() and int(vte) >= _VTE_VERSION_MIN)
        or term.startswith(("xterm-kitty", "xterm-ghostty", "foot", "alacritty", "wezterm"))
        or environment.get("TERM_PROGRAM") in _PROGRAMS_WITH_LINKS
        or any(name in environment for name in ("KONSOLE_VERSION", "WT_SESSION", "DOMTERM"))
    )


def linked(path: str, text: str) -> str:
    """Return `text` as a link to a file of this host."""
    place = f"file://{os.uname().nodename}{quote(os.fsencode(path))}"
    return f"\x1b]8;;{place}\x1b\\{text}\x1b]8;;\x1b\\"


def wants_color(stream: TextIO, *, no_color: bool) -> bool:
    """Return True for terminals, unless they are dumb or NO_COLOR is set to a non-empty value."""
    return not no_color and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb" and stream.isatty()
