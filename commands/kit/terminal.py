"""The terminal: its width, its colours, stdout that closes."""

from __future__ import annotations

import os
import sys
from typing import Protocol


class ClosedOutput(Exception):
    """The reader of stdout is gone (`| head`), so the command ends without an error."""


class Terminal(Protocol):
    """The output stream, as the output layer uses it; replaced in tests."""

    def write(self, text: str, /) -> int: ...
    def flush(self) -> None: ...
    def isatty(self) -> bool: ...


def emit(text: str, stream: Terminal | None = None) -> None:
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
    from shutil import get_terminal_size

    return max(get_terminal_size((80, 24)).columns, 20)


def wants_color(stream: Terminal, *, no_color: bool) -> bool:
    """Return True for terminals, unless they are dumb or NO_COLOR is set to a non-empty value."""
    return not no_color and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb" and stream.isatty()
