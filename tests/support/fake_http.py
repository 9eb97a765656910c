"""HTTP servers that tests make up: one that answers as told and remembers what it was asked, one that misbehaves."""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple


class Asked(NamedTuple):
    """A request that a FakeServer got."""

    method: str
    path: str
    body: bytes
    headers: dict[str, str]


class Reply(NamedTuple):
    """An answer: `body` as it is when bytes, else as JSON."""

    body: Any = b""
    status: int = 200
    content_type: str | None = None
    headers: tuple[tuple[str, str], ...] = ()


class Turns(list[Any]):
    """Replies to give one after the other, the last for good."""


class FakeServer:
    """Answers from `replies`, by "GET /path" without the query: a Reply, a body, or Turns of those."""

    def __init__(self, certificate: Path | None = None) -> None:
        self.asked: list[Asked] = []
        self.replies: dict[str, Any] = {}
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                fake.asked.append(Asked(self.command, self.path, body, dict(self.headers)))
                reply = fake.reply(f"{self.command} {self.path.partition('?')[0]}")
                data = reply.body if isinstance(reply.body, bytes) else json.dumps(reply.body).encode()
                self.send_response(reply.status)
                if reply.content_type is not None:
                    self.send_header("Content-Type", reply.content_type)
                for name, value in reply.headers:
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                with contextlib.suppress(ConnectionError):
                    self.wfile.write(data)

            do_GET = do_PUT = do_DELETE = answer

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate)
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self.address = f"127.0.0.1:{self._server.server_address[1]}"
        self.url = f"{'http' if certificate is None else 'https'}://{self.address}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    def reply(self, what: str) -> Reply:
        found = self.replies.get(what, Reply(b"<html><h1>Resource not found</h1></html>", 404, "text/html"))
        if isinstance(found, Turns):
            found = found.pop(0) if len(found) > 1 else found[0]
        return found if isinstance(found, Reply) else Reply(found)

    def bodies(self, method: str = "PUT") -> list[Any]:
        """The JSON bodies of the requests of that method, None for a request without one."""
        return [json.loads(each.body) if each.body else None for each in self.asked if each.method == method]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class Misbehaving:
    """A TCP server that gives each connection to `behave`, after the request's head has come."""

    def __init__(self, behave: Callable[[socket.socket], None]) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._behave = behave
        self._connections: list[socket.socket] = []
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        #: Set once the test is over: whatever lasts for ever ends then.
        self.over = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            if self.over.is_set():
                connection.close()
                return
            with connection, contextlib.suppress(OSError):
                head = b""
                while b"\r\n\r\n" not in head and (part := connection.recv(65536)):
                    head += part
                self._behave(connection)

    def close(self) -> None:
        self.over.set()
        with contextlib.suppress(OSError), socket.create_connection(self._listener.getsockname()):
            pass  # It waits for a connection no more.
        self._listener.close()
        self._thread.join()


@contextlib.contextmanager
def misbehaving(behave: Callable[[socket.socket, threading.Event], None]) -> Iterator[Misbehaving]:
    """A server whose connections `behave` handles until its event is set."""
    server = Misbehaving(lambda connection: behave(connection, server.over))
    try:
        yield server
    finally:
        server.close()


# --- the ways to misbehave -------------------------------------------------------------------------------------------

HEAD = b"HTTP/1.1 200 OK\r\n"


def sends(data: bytes) -> Callable[[socket.socket, threading.Event], None]:
    """Sends that, and closes."""
    return lambda connection, _: connection.sendall(data)


def sends_for_ever(first: bytes, more: bytes, count: list[int]) -> Callable[[socket.socket, threading.Event], None]:
    """Sends `first`, then `more` until the peer leaves; `count` gets the number of bytes sent."""

    def behave(connection: socket.socket, over: threading.Event) -> None:
        connection.sendall(first)
        while not over.is_set():
            count[0] += connection.send(more)

    return behave


def drips(first: bytes, drop: bytes, pause_s: float) -> Callable[[socket.socket, threading.Event], None]:
    """Sends `first`, then a drop now and then."""

    def behave(connection: socket.socket, over: threading.Event) -> None:
        connection.sendall(first)
        while not over.wait(pause_s):
            connection.sendall(drop)

    return behave


def is_silent(connection: socket.socket, over: threading.Event) -> None:
    """Never answers."""
    over.wait()
