"""The ports that a bookie takes."""

from __future__ import annotations

import socket
import sys

import pytest

from bkctl.bookie import network
from bkctl.bookie.network import reserved_port


@pytest.mark.skipif(sys.platform != "linux", reason="a reservation lasts on Linux only")
def test_reserved_port_is_for_one_caller_and_its_server_can_listen(monkeypatch: pytest.MonkeyPatch) -> None:
    with reserved_port("127.0.0.1") as first:
        monkeypatch.setattr(network, "_FREE_PORTS", range(first, first + 1))
        with reserved_port("127.0.0.1") as second:
            assert second != first
        for address in ("127.0.0.1", ""):
            with socket.socket() as server:
                server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                server.bind((address, first))
                server.listen()
    with reserved_port("127.0.0.1") as third:
        assert third == first
