"""Waiting for a running bookie, with growing pauses and a deadline."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Annotated, Any, Final

from bkctl.errors import TimedOut, UsageError

from ..kit.options import Composite, duration_option
from .server import Server

#: The first and the longest pause between two looks at background work of a bookie.
POLL_S_MIN: Final = 0.05
POLL_S_MAX: Final = 1.0
#: The shortest timeout of one answer, even if the deadline is nearer.
ANSWER_S_MIN: Final = 5.0
_DEADLINE: Final = duration_option("--deadline", "With --wait: give up after this long (default: never; exit code 6).")


def _deadline(values: Mapping[str, Any]) -> float | None:
    found: float | None = _DEADLINE.resolve(values)
    if found is not None and not values["wait"]:
        raise UsageError("--deadline requires --wait", hint="add --wait")
    return found


#: `--deadline` of a command with `--wait`, in seconds.
WaitDeadline = Annotated[float | None, Composite(_DEADLINE.parameters, _deadline)]


class Patience:
    """Grows the pauses between two attempts; raises TimedOut with the text `what` at the deadline."""

    def __init__(self, what: str, deadline_s: float | None) -> None:
        self._what, self._deadline_s = what, deadline_s
        self._pause_s = POLL_S_MIN
        self._end = None if deadline_s is None else time.monotonic() + deadline_s

    def shorten(self, found: Server) -> None:
        """Lower the timeout of the server's client to the deadline, but not below ANSWER_S_MIN."""
        if self._deadline_s is not None:
            client = found.api.client
            client.timeout_s = min(client.timeout_s, max(self._deadline_s, ANSWER_S_MIN))

    def wait(self) -> None:
        """Sleep until the next request is due. Raises TimedOut after the deadline."""
        pause = self._pause_s
        if self._end is not None:
            left = self._end - time.monotonic()
            if left <= 0:
                raise TimedOut(f"{self._what} after {self._deadline_s:g} s", hint="--deadline allows longer waits")
            pause = min(pause, left)
        time.sleep(pause)
        self._pause_s = min(self._pause_s * 1.5, POLL_S_MAX)
