"""A socket for http.client whose waits are bounded one by one and in all."""

from __future__ import annotations

import io
import socket
import time
from typing import Any, Final

#: An answer that is kept in memory must be complete after so many timeouts, however steadily it arrives.
ANSWER_TIMEOUTS_MAX: Final = 4

CHUNK_SIZE_BYTES: Final = 1 << 16


class PatientSocket(io.RawIOBase):
    """A socket as http.client uses it: one wait lasts at most `timeout_s`, all waits ANSWER_TIMEOUTS_MAX as long."""

    def __init__(self, sock: socket.socket, timeout_s: float) -> None:
        self._sock, self._timeout_s = sock, timeout_s
        self.renew()

    def renew(self) -> None:
        """Allow ANSWER_TIMEOUTS_MAX timeouts in all from now on."""
        self._limit = time.monotonic() + self._timeout_s * ANSWER_TIMEOUTS_MAX

    def patience(self) -> float:
        """Return the seconds that the next wait may take. Raise TimeoutError if none are left."""
        left = self._limit - time.monotonic()
        if left <= 0:
            raise TimeoutError("The answer takes too long")
        return min(self._timeout_s, left)

    def sendall(self, data: bytes) -> None:
        self._sock.settimeout(self.patience())
        self._sock.sendall(data)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._sock.settimeout(self.patience())
        return self._sock.recv_into(buffer)

    def makefile(self, *_: Any) -> io.BufferedReader:
        return io.BufferedReader(self, CHUNK_SIZE_BYTES)

    def close(self) -> None:
        """Do nothing: the opener of the socket closes it."""
