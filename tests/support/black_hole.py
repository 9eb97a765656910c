"""Ports that do not answer when one connects, as a host behind a firewall."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def black_hole_port() -> Iterator[int]:
    """Yield such a port of this machine."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        waiting = []
        for _ in range(4):  # more than its queue takes
            waiting.append(socket.socket())
            waiting[-1].setblocking(False)
            waiting[-1].connect_ex(server.getsockname())
        yield server.getsockname()[1]
        for connection in waiting:
            connection.close()
