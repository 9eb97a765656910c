"""Certificates that are replaced while servers and clients run: the new pair is used, a bad one is not."""

from __future__ import annotations

import contextlib
import gc
import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("cryptography.x509")

from support.certificates import replace, write_pair
from support.waiting import eventually

from bkctl.errors import UsageError
from bkctl.http.server_settings import tls_context
from bkctl.metadata.backends.zookeeper.zookeeper_connection import ZooKeeperConnection
from bkctl.metadata.refreshed_tls import RefreshedContext
from bkctl.metadata.store import StoreSecurity, client_tls


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    files = tmp_path / "certificate.pem", tmp_path / "key.pem"
    write_pair(*files, 1)
    return files


@contextlib.contextmanager
def connected(server: ssl.SSLContext, client: ssl.SSLContext) -> Iterator[tuple[ssl.SSLSocket, ssl.SSLSocket]]:
    """Both ends of a connection after its handshake."""
    ours, theirs = socket.socketpair()
    accepted: list[ssl.SSLSocket] = []
    thread = threading.Thread(target=lambda: accepted.append(server.wrap_socket(ours, server_side=True)))
    thread.start()
    with contextlib.closing(client.wrap_socket(theirs, server_hostname="127.0.0.1")) as there:
        thread.join()
        with contextlib.closing(accepted[0]) as here:
            yield here, there


def anyone() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def serial_of(peer: ssl.SSLSocket) -> int:
    from cryptography import x509

    data = peer.getpeercert(binary_form=True)
    assert data is not None
    return x509.load_der_x509_certificate(data).serial_number


def serial(server: ssl.SSLContext) -> int:
    """The serial number of the certificate in the server's next handshake."""
    with connected(server, anyone()) as (_, there):
        return serial_of(there)


def test_next_handshake_has_the_new_certificate_and_open_connections_go_on(pair: tuple[Path, Path]) -> None:
    server = tls_context(str(pair[0]), None, None, str(pair[1]))
    first_s = server.expires_s
    with connected(server, anyone()) as (here, there):
        write_pair(*pair, 2, days=60)
        assert serial(server) == 1  # not looked at yet
        server.refresh()
        assert serial(server) == 2
        here.sendall(b"still here")
        assert there.recv(99) == b"still here"
    assert first_s is not None
    assert server.expires_s is not None
    assert server.expires_s - first_s > 29 * 86_400


BAD: dict[str, Callable[[Path, Path], None]] = {
    "another key": lambda certificate, key: write_pair(certificate.with_name("else.pem"), key, 3),
    "no PEM": lambda certificate, key: replace(certificate, b"\x00\xff" * 99),
    "empty key": lambda certificate, key: replace(key, b""),
    "no file": lambda certificate, key: certificate.unlink(),
    "cut": lambda certificate, key: replace(certificate, certificate.read_bytes()[:200]),
    "expired": lambda certificate, key: write_pair(certificate, key, 3, days=-0.5),
    "not valid yet": lambda certificate, key: write_pair(certificate, key, 3, begins_days=1),
}


@pytest.mark.parametrize("bad", BAD)
def test_a_bad_pair_is_refused_once_and_the_old_one_stays(
    pair: tuple[Path, Path], bad: str, caplog: pytest.LogCaptureFixture
) -> None:
    server = tls_context(str(pair[0]), None, None, str(pair[1]))
    before_s = server.expires_s
    with caplog.at_level(logging.INFO, "bkctl.tls"):
        BAD[bad](*pair)
        for _ in range(3):
            server.refresh()
            assert serial(server) == 1
        (record,) = caplog.records
        assert record.levelno == logging.WARNING
        assert "the old ones stay in use" in record.getMessage()
        assert str(pair[0]) in record.getMessage()
        assert server.expires_s == before_s
        write_pair(*pair, 4)
        server.refresh()
        assert serial(server) == 4
        assert "are in use" in caplog.records[-1].getMessage()


def test_client_presents_and_trusts_the_new_files(tmp_path: Path, pair: tuple[Path, Path]) -> None:
    """A server that trusts certificates by name of the file, and a client whose own one and authority change."""
    own = tmp_path / "own.pem"
    write_pair(own, own, 11)
    client = client_tls(str(pair[0]), str(own), str(own), refresh_s=3600)
    assert isinstance(client, RefreshedContext)
    server = tls_context(str(pair[0]), None, str(own), str(pair[1]))
    with connected(server, client) as (here, there):
        assert (serial_of(here), serial_of(there)) == (11, 1)
        write_pair(own, own, 12)
        write_pair(*pair, 2)
        server.refresh()
        with pytest.raises(ssl.SSLError), connected_or_error(server, client):
            pass  # the old authority is not the new one
        client.refresh()
        with connected(server, client) as (new_here, new_there):
            assert (serial_of(new_here), serial_of(new_there)) == (12, 2)
        there.sendall(b"old")
        assert here.recv(9) == b"old"


@contextlib.contextmanager
def connected_or_error(server: ssl.SSLContext, client: ssl.SSLContext) -> Iterator[None]:
    ours, theirs = socket.socketpair()

    def accept() -> None:
        with contextlib.suppress(OSError), contextlib.closing(ours):
            server.wrap_socket(ours, server_side=True)

    thread = threading.Thread(target=accept)
    thread.start()
    try:
        with contextlib.closing(client.wrap_socket(theirs, server_hostname="127.0.0.1")):
            yield
    finally:
        thread.join()


def test_next_connection_to_zookeeper_presents_the_new_certificate(tmp_path: Path, pair: tuple[Path, Path]) -> None:
    own = tmp_path / "own.pem"
    write_pair(own, own, 11, days=3)
    security = StoreSecurity(tls=True, ca=str(pair[0]), certificate=str(own), key=str(own))
    connection = ZooKeeperConnection("127.0.0.1:1", "/ledgers", security=security)
    server = tls_context(str(pair[0]), None, str(own), str(pair[1]))

    def presented() -> int:
        """The serial number of the certificate that kazoo's next connection shows."""
        shown: list[int] = []

        def accept() -> None:
            with contextlib.closing(server.wrap_socket(listener.accept()[0], server_side=True)) as here:
                shown.append(serial_of(here))

        with socket.create_server(("127.0.0.1", 0)) as listener:
            thread = threading.Thread(target=accept)
            thread.start()
            address = listener.getsockname()
            connection.client.handler.create_connection(address=address, hostname="127.0.0.1", timeout=30).close()
            thread.join()
        return shown[0]

    assert presented() == 11
    write_pair(own, own, 12, days=60)
    server.refresh()
    assert connection.tls is not None
    connection.tls.refresh()
    assert presented() == 12
    assert connection.tls.expires_s is not None
    assert connection.tls.expires_s > time.time() + 59 * 86_400


def test_files_are_looked_at_until_nobody_has_the_context(pair: tuple[Path, Path]) -> None:
    before = set(threading.enumerate())  # Other tests' threads may still end.
    servers = [tls_context(str(pair[0]), None, None, str(pair[1]), refresh_s=0.02)]
    (thread,) = (each for each in threading.enumerate() if each not in before and each.name == "tls-files")
    write_pair(*pair, 2)
    eventually(lambda: serial(servers[0]) == 2)
    servers.clear()
    gc.collect()
    eventually(lambda: not thread.is_alive())


def test_unusable_files_are_refused_at_the_start(tmp_path: Path, pair: tuple[Path, Path]) -> None:
    for files in ((tmp_path / "none.pem", pair[1]), (pair[1], pair[1])):
        with pytest.raises(UsageError):
            tls_context(str(files[0]), None, None, str(files[1]), refresh_s=1)
