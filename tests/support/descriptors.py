"""A process that cannot open another file or socket."""

from __future__ import annotations

import contextlib
import gc
import resource
import socket
from collections.abc import Iterator


@contextlib.contextmanager
def descriptors_used_up() -> Iterator[None]:
    """No file or socket can be opened by this process."""
    gc.collect()  # else what other tests forgot to close may free a descriptor meanwhile
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = [socket.socket()]
    resource.setrlimit(resource.RLIMIT_NOFILE, (held[0].fileno() + 20, before[1]))
    try:
        with contextlib.suppress(OSError):
            while True:
                held.append(socket.socket())
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for each in held:
            each.close()
