"""Deadlines of a served connection, by the server's clock: first request, rest of a request, idle time."""

from __future__ import annotations

from bkctl.protocol.limits import ServerLimits


class Deadlines:
    """Times since which a bookie waits for its client. Time in which the bookie does not read is excused."""

    __slots__ = ("_first_since_s", "_heard_s", "_limits", "_unfinished_since_s")

    def __init__(self, limits: ServerLimits, now_s: float) -> None:
        self._limits = limits
        self._first_since_s: float | None = now_s  # None: the first request has arrived
        self._unfinished_since_s: float | None = None
        self._heard_s = now_s

    @property
    def awaits_first(self) -> bool:
        """True until the first request has arrived."""
        return self._first_since_s is not None

    def restart(self, now_s: float) -> None:
        """Restart the wait for the first request, because TLS begins."""
        self._first_since_s = now_s

    def received(self, now_s: float, *, is_whole: bool, is_unfinished: bool, is_served: bool) -> None:
        """Record input: whether it completed a request, left one unfinished, and counts as the first one."""
        if is_whole:
            self._unfinished_since_s = now_s if is_unfinished else None
            if is_served:
                self._first_since_s = None
        elif is_unfinished and self._unfinished_since_s is None:
            self._unfinished_since_s = now_s
        self._heard_s = now_s

    def excuse(self, now_s: float) -> None:
        """Restart the waits for input, because the bookie did not read."""
        self._heard_s = now_s
        if self._unfinished_since_s is not None:
            self._unfinished_since_s = now_s

    def missed(self, now_s: float, unfinished_bytes: int, *, is_shut: bool, is_busy: bool) -> tuple[str, str] | None:
        """Return the reason (a key of `BookieServer.ended`) and description of a missed deadline; None without one.

        `is_shut`: nothing is served before TLS. `is_busy`: the client waits for answers, or has answers to read.
        """
        limits = self._limits
        if _is_past(self._first_since_s, limits.first_request_ms, now_s):
            missed = "did not begin TLS" if is_shut else "sent no whole request"
            return "mute", f"{missed} within {limits.first_request_ms} ms"
        if _is_past(self._unfinished_since_s, limits.request_ms, now_s):
            return "unfinished", f"sent {unfinished_bytes} bytes of a request and no more within {limits.request_ms} ms"
        if is_busy:
            self._heard_s = now_s
        elif _is_past(self._heard_s, limits.idle_ms, now_s):
            return "idle", f"sent nothing for {limits.idle_ms} ms"
        return None


def _is_past(since_s: float | None, limit_ms: int, now_s: float) -> bool:
    return since_s is not None and 0 < limit_ms < (now_s - since_s) * 1000
