"""Tokens of HTTP servers on this machine that were given none: made by the server, found by the same user's commands.

A server without a token or client certificates makes a token when it starts and keeps it in
`$XDG_DATA_HOME/bkctl/http/ADDRESS:PORT` (mode 0600), locked as long as it serves. A client looks there under the
address that it is connected to, and sends the token only while the lock is held: a file that a killed server left
behind never goes to whoever took the port since.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import stat
import time
from pathlib import Path
from typing import Final

from bkctl.bookie.local import data_directory

_TOKEN_SIZE_BYTES_MAX: Final = 256
_LOCK_ATTEMPTS: Final = 100
_LOCK_PAUSE_S: Final = 0.01


def token_path(address: str, port: int) -> Path:
    """The file of the server that listens on `address` (as the socket has it, never a name) and `port`."""
    return data_directory() / "http" / f"{address}:{port}"


class LocalToken:
    """The token of a server of this process. `close` removes the file."""

    def __init__(self, address: str, port: int) -> None:
        """Make a token and write it to its file. Raises OSError where the file cannot be written."""
        self.text = secrets.token_urlsafe(32)
        self.path = token_path(address, port)
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._fd = self._locked()
        try:
            os.fchmod(self._fd, 0o600)
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, f"{self.text}\n".encode("ascii"), 0)
        except OSError:
            self.close()
            raise

    def _locked(self) -> int:
        for _ in range(_LOCK_ATTEMPTS):
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.samestat(os.fstat(fd), os.stat(self.path)):
                    return fd
            except (BlockingIOError, FileNotFoundError):  # a client looks at it, or the last server removes it
                time.sleep(_LOCK_PAUSE_S)
            os.close(fd)
        raise BlockingIOError(f"{self.path} is locked by another process")

    def close(self) -> None:
        """Remove the file; harmless when it is closed."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with contextlib.suppress(FileNotFoundError):
                self.path.unlink()
            os.close(fd)


def find_local_token(address: str, port: int) -> str | None:
    """Return the token of this user's server on `address` and `port`; None where none of this user's listens there."""
    try:
        fd = os.open(token_path(address, port), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            return None
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return os.read(fd, _TOKEN_SIZE_BYTES_MAX).decode("ascii", "replace").strip() or None
        return None  # nobody holds it: the server is gone
    except OSError:
        return None
    finally:
        os.close(fd)
