"""The terminal: its width, its colours, stdout that closes, and the line that shows progress."""

from __future__ import annotations

import os
import sys
import time
from typing import Any, Final, Protocol, TextIO

from .texts import cut, size_text


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


class Activity:
    """A line on stderr that shows the progress of long work; only on a terminal that prints nothing else.

    A context manager. It appears when nothing was printed for `DELAY_S`; `clear` removes it before other output.
    With a `total` it has a bar and a percentage.
    """

    DELAY_S: Final = 0.6
    PERIOD_S: Final = 0.1
    FRAMES: Final = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"

    def __init__(
        self,
        label: str,
        *,
        total: int | None = None,
        unit: str = "",
        stream: TextIO | None = None,
        enabled: bool = True,
    ) -> None:
        self.label, self.total, self.unit = label, total, unit
        self.done = 0
        self._stream = stream or sys.stderr
        self._enabled = enabled and self._stream.isatty()
        self._shown = False
        self._thread: Any = None

    def __enter__(self) -> Activity:
        if self._enabled:
            import threading

            self._stopped = threading.Event()
            self._lock = threading.Lock()
            self._began = self._printed = time.monotonic()
            self._thread = threading.Thread(target=self._draw, name="activity", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._thread is not None:
            self._stopped.set()
            self._thread.join()
            self.clear()
            self._thread = None

    def advance(self, count: int = 1) -> None:
        """Note that `count` more units are done."""
        self.done += count

    def update(self, done: int, total: int | None = None) -> None:
        """Set the finished amount and, if known, the total."""
        self.done = done
        if total is not None:
            self.total = total

    def clear(self) -> None:
        """Remove the line before other output."""
        if self._thread is None:
            return
        with self._lock:
            self._printed = time.monotonic()
            if self._shown:
                self._stream.write("\r\x1b[K")
                self._stream.flush()
                self._shown = False

    def amount(self) -> str:
        """Return how much is done, and of how much if that is known: `3 of 40 ledgers`; "" before the first unit."""
        unit = f" {self.unit}" if self.unit else ""
        if self.unit == "bytes":
            done, total = size_text(self.done), size_text(self.total or 0)
            unit = ""
        else:
            done, total = f"{self.done:,}", f"{self.total or 0:,}"
        if self.total:
            return f"{done} of {total}{unit}"
        return f"{done}{unit}" if self.done else ""

    def text(self, elapsed_s: float) -> str:
        """Return the line without its spinner."""
        amount = self.amount()
        if self.total:
            share = min(self.done / self.total, 1.0)
            filled = int(share * 24)
            return f"{self.label}  {'━' * filled}{'╌' * (24 - filled)} {int(share * 100):3}%  {amount}"
        return f"{self.label}: {amount}, {elapsed_s:.0f} s" if amount else f"{self.label}, {elapsed_s:.0f} s"

    def _draw(self) -> None:
        frame = 0
        while not self._stopped.wait(self.PERIOD_S):
            now = time.monotonic()
            with self._lock:
                if now - self._printed < self.DELAY_S:
                    continue
                line = f"{self.FRAMES[frame % len(self.FRAMES)]} {self.text(now - self._began)}"
                self._stream.write(f"\r\x1b[K{cut(line, terminal_width() - 1)}")
                self._stream.flush()
                self._shown = True
            frame += 1
