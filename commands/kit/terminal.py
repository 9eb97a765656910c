"""The terminal: its width, its colours, stdout and stderr that close."""

from __future__ import annotations

import errno
import os
import stat
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from shutil import get_terminal_size
from typing import Final, TextIO
from urllib.parse import quote

#: The first release of VTE (GNOME's terminals) whose links do not crash.
_VTE_VERSION_MIN: Final = 5000
_PROGRAMS_WITH_LINKS: Final = frozenset(("iTerm.app", "WezTerm", "vscode", "ghostty", "Hyper", "Tabby", "rio"))


class ClosedOutput(Exception):
    """The reader of stdout is gone (`| head`, a closed terminal), so the command ends without an error."""


#: Called once the reader of stdout is gone, where the command continues; None: ClosedOutput ends it.
_on_closed: Callable[[], None] | None = None


def continue_without_stdout(on_closed: Callable[[], None] | None) -> None:
    """Let the command continue once the reader of stdout is gone, after `on_closed`; None: end it with ClosedOutput."""
    global _on_closed
    _on_closed = on_closed


def discard(stream: TextIO) -> None:
    """Redirect a stream that failed to /dev/null, which also takes what the stream still holds."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


@contextmanager
def _writing() -> Iterator[None]:
    """Raise ClosedOutput, or continue, if the reader of stdout is gone; other errors get `stdout` as their file."""
    try:
        yield
    except OSError as error:
        # EIO of a file is its disk's, which loses data; that of a terminal says that it is closed.
        is_closed = error.errno == errno.EIO and stat.S_ISCHR(os.fstat(sys.stdout.fileno()).st_mode)
        if not (is_closed or isinstance(error, BrokenPipeError)):
            raise OSError(error.errno, error.strerror, "stdout") from error
        if _on_closed is None:
            raise ClosedOutput from error
        discard(sys.stdout)
        _on_closed()


def emit(text: str, stream: TextIO | None = None) -> None:
    """Write `text` to stdout. Raises ClosedOutput if its reader is gone and the command does not continue."""
    with _writing():
        (stream or sys.stdout).write(text)


def emit_bytes(data: bytes | bytearray | memoryview) -> None:
    """Write raw bytes to stdout. Raises as `emit`."""
    with _writing():
        sys.stdout.flush()
        sys.stdout.buffer.write(data)


def flush(stream: TextIO | None = None) -> None:
    """Flush stdout. Raises as `emit`."""
    with _writing():
        (stream or sys.stdout).flush()


def say(text: str) -> None:
    """Print `text` on stderr, as `draw` does."""
    draw(f"{text}\n", sys.stderr)


def draw(text: str, stream: TextIO) -> None:
    """Write `text` to a stream that is not the output. One that is closed, or on a full disk, takes nothing more."""
    try:
        stream.write(text)
        stream.flush()
    except OSError:
        discard(stream)


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
