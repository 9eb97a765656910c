"""HTTP as it goes over the wire, without our own client."""

from __future__ import annotations

import http.client
import json
import re
import socket
from collections.abc import Mapping
from typing import Any, NamedTuple

from support.servers import Server, wait_for
from support.waiting import LIMIT_S

from bkctl.http.local_token import find_local_token


class Answer(NamedTuple):
    """A response: status, headers by lower-case name, body."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """The body read as JSON; names must not be there twice."""
        return json.loads(self.body, object_pairs_hook=_unique)

    @property
    def error(self) -> str:
        """The message of a refusal, which must look like one."""
        found = self.json
        assert self.headers["content-type"] == "application/json"
        assert set(found) == {"error", "hint"}
        assert isinstance(found["error"], str)
        assert found["error"]
        assert found["hint"] is None or isinstance(found["hint"], str)
        assert "Traceback" not in self.body.decode()
        return found["error"]


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    assert len(names) == len(set(names)), names
    return dict(pairs)


def call(
    port: int,
    method: str,
    path: str,
    body: object = None,
    *,
    headers: Mapping[str, str] = {},
    timeout_s: float = LIMIT_S,
) -> Answer:
    """One request to 127.0.0.1. A `body` that is not text is sent as JSON.

    A server that made a token for its user gets that one, unless `headers` have another.
    """
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)
    try:
        text = body if body is None or isinstance(body, str | bytes) else json.dumps(body)
        connection.request(method, path, text, local_authorization(port) | dict(headers))
        response = connection.getresponse()
        found = {name.lower(): value for name, value in response.getheaders()}
        return Answer(response.status, found, response.read())
    finally:
        connection.close()


def local_authorization(port: int) -> dict[str, str]:
    """The header with the token that the server on `port` made, nothing where it made none."""
    token = find_local_token("127.0.0.1", port)
    return {} if token is None else {"Authorization": f"Bearer {token}"}


def exchange(port: int, data: bytes, *, timeout_s: float = LIMIT_S) -> bytes:
    """Return the bytes that come back until the server closes, for bytes sent as they are; then close our side."""
    with socket.create_connection(("127.0.0.1", port), timeout=timeout_s) as connection:
        received = bytearray()
        try:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            while part := connection.recv(1 << 16):
                received += part
        except TimeoutError:
            raise
        except OSError:
            pass  # it does not want to hear the rest
        return bytes(received)


def http_port(server: Server) -> int:
    """The port of the HTTP server of one of our bookies, or of a gateway, as its log says it."""

    def ports() -> list[str]:
        return re.findall(r"HTTP server on \S+:(\d+)", server.log_tail(size_max=1 << 20))

    wait_for(ports, f"the HTTP server of {server.name}")  # a bookie's begins once the bookie serves
    return int(ports()[-1])
