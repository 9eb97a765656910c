"""Tokens that HTTP servers on this machine create for the commands of the same user.

A server without a token or client certificates creates a token at its start, and keeps it in
`$XDG_DATA_HOME/bkctl/http/ADDRESS:PORT` (mode 0600), locked while it serves. A client looks there under the address
that it is connected to, and sends the token only while the file is locked: the token of a killed server is never sent
to another server on its port.
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
from bkctl.disk import make_private_directory
from bkctl.errors import on_error

_TOKEN_SIZE_BYTES_MAX: Final = 256
_LOCK_ATTEMPTS: Final = 100
_LOCK_PAUSE_S: Final = 0.01


def token_path(address: str, port: int) -> Path:
    """Return the file of the server that listens on `address` (the socket's, never a name) and `port`."""
    return data_directory() / "http" / f"{address}:{port}"


class LocalToken:
    """The token of a server of this process. `close` removes the file."""

    def __init__(self, address: str, port: int) -> None:
        """Create a token and write it to its file. Raise OSError if the file cannot be written."""
        self.text = secrets.token_urlsafe(32)
        self.path = token_path(address, port)
        make_private_directory(self.path.parent)
        self._fd = self._locked()
        with on_error(self.close):
            os.fchmod(self._fd, 0o600)
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, f"{self.text}\n".encode("ascii"), 0)

    def _locked(self) -> int:
        for _ in range(_LOCK_ATTEMPTS):
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.samestat(os.fstat(fd), os.stat(self.path)):
                    return fd
            except (BlockingIOError, FileNotFoundError):  # a client reads it, or the previous server removes it
                time.sleep(_LOCK_PAUSE_S)
            os.close(fd)
        raise BlockingIOError(f"{self.path} is locked by another process")

    def close(self) -> None:
        """Remove the file; a second call does nothing."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with contextlib.suppress(FileNotFoundError):
                self.path.unlink()
            os.close(fd)


def find_local_token(address: str, port: int) -> str | None:
    """Return the token of this user's server on `address` and `port`; None if no server of this user listens there."""
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
        return None  # not locked: the server has ended
    except OSError:
        return None
    finally:
        os.close(fd)
