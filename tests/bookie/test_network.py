"""The ports that a bookie takes."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import sys

import pytest
from support.servers import free_port

from bkctl.bookie import network
from bkctl.bookie.network import reserved_port
from bkctl.config import BookieConfig
from bkctl.errors import UsageError
from bkctl.protocol.acceptor import claim_port


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


def test_a_bookie_on_all_addresses_answers_on_those_of_ipv6() -> None:
    async def main() -> None:
        claimed = await claim_port(network.listening_host(BookieConfig(), "192.0.2.7"), free_port())
        for listener in claimed:
            listener.listen()
        port = claimed[0].getsockname()[1]
        for address in ("127.0.0.1", "::1") if socket.has_dualstack_ipv6() else ("127.0.0.1",):
            socket.create_connection((address, port), 5).close()
        for listener in claimed:
            listener.close()

    asyncio.run(main())


def test_a_host_with_ipv6_only_is_registered_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a pod of a cluster with IPv6 only."""
    name = "bookie-0.bookie.bk.svc.cluster.local"
    found = [(socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("fd00::7", 0, 0, 0))]
    monkeypatch.setattr(network.socket, "gethostname", lambda: "bookie-0")
    monkeypatch.setattr(network.socket, "getaddrinfo", lambda *_, **__: found)
    monkeypatch.setattr(network.socket, "getfqdn", lambda host: name if host == "fd00::7" else host)
    assert network.advertised_host(BookieConfig(use_host_name_as_bookie_id=True)) == name
    with pytest.raises(UsageError, match="fd00::7 is one of IPv6") as refused:
        network.advertised_host(BookieConfig())
    assert "useHostNameAsBookieID" in (refused.value.hint or "")


def _context(monkeypatch: pytest.MonkeyPatch, *protocols: str) -> ssl.SSLContext:
    monkeypatch.setattr(network, "load_certificate", lambda *_: None)
    settings = {"tls_key_store_type": "PEM", "tls_key_store": "key.pem", "tls_certificate_path": "certificate.pem"}
    config = BookieConfig(tls_provider_factory_class="x", tls_enabled_protocols=protocols, **settings)  # type: ignore[arg-type]
    return network._load_tls(config)


@pytest.mark.parametrize(
    ("protocols", "lowest", "highest", "left_out"),
    [
        (("TLSv1.2", "TLSv1.1"), "TLSv1_2", "TLSv1_2", "TLSv1.1"),
        (("TLSv1", "SSLv3", "TLSv1.3", "SSLv2Hello"), "TLSv1_3", "TLSv1_3", "TLSv1, SSLv3, SSLv2Hello"),
        (("TLSv1.2", "TLSv1.3"), "TLSv1_2", "TLSv1_3", ""),
    ],
)
def test_old_tls_versions_are_left_out_with_a_warning(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    protocols: tuple[str, ...],
    lowest: str,
    highest: str,
    left_out: str,
) -> None:
    with caplog.at_level(logging.WARNING):
        context = _context(monkeypatch, *protocols)
    assert (context.minimum_version.name, context.maximum_version.name) == (lowest, highest)
    assert [record.getMessage() for record in caplog.records] == (
        [f"tlsEnabledProtocols: not offered, since not secure: {left_out}"] if left_out else []
    )


@pytest.mark.parametrize("protocols", [("TLSv1.1",), ("TLSv1.2", "TLSv9"), ("tls",)])
def test_tls_protocols_without_a_secure_one_or_with_an_unknown_one_are_refused(
    monkeypatch: pytest.MonkeyPatch, protocols: tuple[str, ...]
) -> None:
    with pytest.raises(UsageError, match="tlsEnabledProtocols names") as refused:
        _context(monkeypatch, *protocols)
    assert "TLSv1.2, TLSv1.3" in (refused.value.hint or "")


def test_a_user_without_a_name_may_start_a_bookie_unless_only_others_may(monkeypatch: pytest.MonkeyPatch) -> None:
    """Containers run as numbers that /etc/passwd need not have."""
    monkeypatch.setattr(network.os, "geteuid", lambda: 2_000_000_017)
    network.check_user(BookieConfig())
    network.check_user(BookieConfig(permitted_startup_users=("2000000017",)))
    with pytest.raises(UsageError, match="User 2000000017 may not start this bookie"):
        network.check_user(BookieConfig(permitted_startup_users=("bookkeeper",)))
