"""Keys as they are pressed: the terminal on stdin without line editing and echo, put back on every way out."""

from __future__ import annotations

import os
import re
import select
import sys
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

#: The rest of a key's escape sequence follows its first byte within this time; a lone Escape key has none.
ESCAPE_WAIT_S: Final = 0.05
_SEQUENCES: Final = {
    "A": "up",
    "B": "down",
    "C": "right",
    "D": "left",
    "5~": "page-up",
    "6~": "page-down",
    "H": "home",
    "F": "end",
}
_CONTROLS: Final = {
    "\r": "enter", "\n": "enter", "\x7f": "backspace", "\x08": "backspace", "\x04": "end-of-input", "\x1b": "escape"
}  # fmt: skip
#: One key: an escape sequence with what follows its `[` or `O`, or one character.
_KEY: Final = re.compile(r"\x1b[\[O]([^@-~]*[@-~]?)|.", re.DOTALL)


class Keys:
    """The keys of a terminal: printable characters as they are, others by name (`up`, `enter`, `escape`)."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def read(self, timeout_s: float) -> list[str]:
        """Return the keys that were pressed, waiting at most `timeout_s` for the first; `end-of-input` on a hang-up."""
        data = self._bytes(timeout_s)
        if data is None:
            return []
        if data.endswith(b"\x1b"):
            data += self._bytes(ESCAPE_WAIT_S) or b""
        return list(_split(data.decode("utf-8", "replace")))

    def _bytes(self, timeout_s: float) -> bytes | None:
        """Return the bytes that wait, None without any."""
        if not select.select([self._descriptor], [], [], timeout_s)[0]:
            return None
        try:
            return os.read(self._descriptor, 1024) or b"\x04"
        except OSError:  # The terminal is gone.
            return b"\x04"


def _split(text: str) -> Iterator[str]:
    """Yield the keys in `text`; an unknown escape sequence yields nothing."""
    for key in _KEY.finditer(text):
        name = _CONTROLS.get(key[0], key[0]) if key[1] is None else _SEQUENCES.get(key[1], "")
        if name and (len(name) > 1 or name.isprintable()):
            yield name


@contextmanager
def keys() -> Iterator[Keys]:
    """Yield the keys of the terminal on stdin. Restores the terminal at the end, after errors and interrupts.

    Ctrl-C still interrupts. Ctrl-Z does nothing: a stopped command would leave the terminal without echo.
    """
    descriptor = sys.stdin.fileno()
    saved = termios.tcgetattr(descriptor)
    try:
        tty.setcbreak(descriptor)
        settings = termios.tcgetattr(descriptor)
        settings[6][termios.VSUSP] = os.fpathconf(descriptor, "PC_VDISABLE").to_bytes(1, "big")
        termios.tcsetattr(descriptor, termios.TCSANOW, settings)
        yield Keys(descriptor)
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, saved)
