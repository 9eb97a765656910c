"""A bookie whose certificates are replaced while it serves: bookie port, HTTP, metrics and health."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import re
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cryptography.x509")

from support.bookie_load import api_of
from support.certificates import replace, write_pair
from support.command_line import CommandLine
from support.served_bookies import PLAIN, add, statuses
from support.servers import INTERLEAVED, wait_for
from support.waiting import LIMIT_S

from bkctl.protocol.connection import BookieConnection
from bkctl.protocol.messages import ReadRequest, Status


class Files:
    """The pair of the bookie port, and the file of the HTTP server."""

    def __init__(self, directory: Path) -> None:
        self.certificate, self.key = directory / "certificate.pem", directory / "key.pem"
        self.http = directory / "http.pem"

    def write(self, serial: int, days: float = 30) -> None:
        write_pair(self.certificate, self.key, serial, days=days)
        write_pair(self.http, self.http, serial + 100, days=days)

    @property
    def settings(self) -> dict[str, Any]:
        return {
            "tlsProviderFactoryClass": "org.apache.bookkeeper.tls.TLSContextFactory",
            "tlsKeyStoreType": "PEM", "tlsKeyStore": self.key, "tlsCertificatePath": self.certificate,
            "tlsTrustStoreType": "PEM", "tlsTrustStore": self.certificate, "tlsRequired": "true",
            "httpServerTlsEnable": "true", "httpServerKeyStorePath": self.http,
            "ledgerStorageClass": INTERLEAVED,
        }  # fmt: skip


def lenient() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def serial_in(data: bytes | None) -> int:
    from cryptography import x509

    assert data is not None
    return x509.load_der_x509_certificate(data).serial_number


def http_connection(port: int) -> http.client.HTTPSConnection:
    return http.client.HTTPSConnection("127.0.0.1", port, context=lenient(), timeout=LIMIT_S)


def answer(connection: http.client.HTTPSConnection, path: str) -> tuple[int, str]:
    """Status and body, asked on a connection that stays open."""
    connection.request("GET", path)
    response = connection.getresponse()
    return response.status, response.read().decode()


def http_serial(port: int) -> int:
    with contextlib.closing(http_connection(port)) as connection:
        connection.connect()
        return serial_in(connection.sock.getpeercert(binary_form=True))


async def opened(bookie: Any) -> BookieConnection:
    host, port = bookie.bookie_id.split(":")
    return await BookieConnection.open(host, int(port), bookie_id=bookie.bookie_id, tls=lenient())


async def bookie_serial(bookie: Any) -> int:
    connection = await opened(bookie)
    try:
        assert connection._transport is not None
        return serial_in(connection._transport.get_extra_info("ssl_object").getpeercert(binary_form=True))
    finally:
        connection.close()
        await connection.wait_closed()


def metrics(port: int) -> dict[str, int]:
    with contextlib.closing(http_connection(port)) as connection:
        text = answer(connection, "/metrics")[1]
    found = re.findall(r'^bookie_certificate_expiry_seconds\{server="(\w+)"\} (-?\d+)', text, re.MULTILINE)
    return {server: int(value) for server, value in found}


def test_renewed_certificates_are_used_without_a_restart(http_bookie: Callable[..., Any], tmp_path: Path) -> None:
    files = Files(tmp_path)
    files.write(1, days=30)
    bookie = http_bookie(**files.settings, tlsCertFilesRefreshDurationSeconds=1)
    bookie.start()
    port = bookie.http_port

    async def main() -> None:
        old, old_http = await opened(bookie), http_connection(port)
        assert await statuses(old, add(PLAIN, 0)) == [Status.EOK]
        assert answer(old_http, "/heartbeat")[0] == 200
        assert (await bookie_serial(bookie), http_serial(port)) == (1, 101)
        assert {29 * 86_400 <= left < 30 * 86_400 for left in metrics(port).values()} == {True}

        files.write(2, days=60)
        while (await bookie_serial(bookie), http_serial(port)) != (2, 102):
            await asyncio.sleep(0.05)
        assert {59 * 86_400 <= left < 60 * 86_400 for left in metrics(port).values()} == {True}
        assert set(metrics(port)) == {"bookie", "http"}
        assert await statuses(old, add(PLAIN, 1), ReadRequest(PLAIN, 0)) == [Status.EOK] * 2
        assert answer(old_http, "/heartbeat") == (200, "OK\n")

        write_pair(tmp_path / "else.pem", files.key, 9)  # the key of another certificate
        replace(files.http, b"no certificate")
        wait_for(lambda: bookie.log_tail(size_max=1 << 20).count("the old ones stay in use") >= 2, "both are refused")
        assert (await bookie_serial(bookie), http_serial(port)) == (2, 102)
        assert await statuses(old, add(PLAIN, 2)) == [Status.EOK]
        assert answer(old_http, "/heartbeat")[0] == 200

        files.write(3)
        while (await bookie_serial(bookie), http_serial(port)) != (3, 103):
            await asyncio.sleep(0.05)
        assert await statuses(old, add(PLAIN, 3)) == [Status.EOK]
        old.close()
        await old.wait_closed()
        old_http.close()

    asyncio.run(asyncio.wait_for(main(), LIMIT_S))


def test_without_the_setting_certificates_stay_until_a_restart(http_bookie: Callable[..., Any], tmp_path: Path) -> None:
    files = Files(tmp_path)
    files.write(1)
    bookie = http_bookie(**files.settings)
    bookie.start()
    files.write(2)
    assert (asyncio.run(bookie_serial(bookie)), http_serial(bookie.http_port)) == (1, 101)


@pytest.mark.parametrize(("days", "severity", "said"), [(5.5, "warning", "expires in 5 days"), (20, None, "")])
def test_health_names_certificates_that_expire(
    http_bookie: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    days: float,
    severity: str | None,
    said: str,
) -> None:
    monkeypatch.setattr("bkctl.commands.kit.access.METRICS_WAIT_S", 60.0)
    files = Files(tmp_path)
    files.write(1, days=30)
    write_pair(files.http, files.http, 7, days=days)
    bookie = http_bookie(**files.settings)
    bookie.start()
    cli = CommandLine(str(bookie.settings["metadataServiceUri"]))
    trust = tmp_path / "trust.pem"
    trust.write_bytes(files.certificate.read_bytes() + files.http.read_bytes())
    answer = cli("cluster", "health", "-o", "ndjson", "--timeout", "60s", "--tls-ca", trust)
    rows = [json.loads(line) for line in answer.out.splitlines()]
    found = [row for row in rows if row["code"] == "certificate-expires"]
    assert [(row["severity"], row["subject"]) for row in found] == ([(severity, bookie.bookie_id)] if severity else [])
    assert all(said in row["message"] for row in found)


def test_health_says_that_a_certificate_has_expired(monkeypatch: pytest.MonkeyPatch) -> None:
    from support.fake_http import FakeServer, Reply

    from bkctl.formats.metadata import BookieEndpoint, BookieServiceInfo
    from bkctl.http.bookie_load import cluster_vitals, vitals_findings
    from bkctl.metadata.cluster import VERSION_PROPERTY, RegisteredBookie

    fake = FakeServer()
    try:
        lines = [
            f'bookie_certificate_expiry_seconds{{server="{name}"}} {left}\n'
            for name, left in (("bookie", 9e9), ("http", -5))
        ]
        fake.replies["GET /metrics"] = Reply("".join(lines).encode(), 200, "text/plain")
        endpoint = BookieEndpoint("httpserver", int(fake.address.rpartition(":")[2]), "127.0.0.1", "http")
        info = BookieServiceInfo((endpoint,), {VERSION_PROPERTY: "bkctl 1"})
        bookies = [RegisteredBookie("127.0.0.1:1", "rw", info)]
        (found,) = vitals_findings(cluster_vitals(bookies, api_of, wait_s=LIMIT_S))
    finally:
        fake.close()
    assert (found.code, found.severity) == ("certificate-expires", "error")
    assert found.message.endswith("has expired")
