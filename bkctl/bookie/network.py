"""A bookie's network: the addresses that it listens on and registers, its TLS settings, the limits of its server.

Source: BookieImpl.getBookieAddress, BookieNettyServer, TLSContextFactory.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import pwd
import random
import resource
import socket
import ssl
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from bkctl.config import MEBIBYTE, BookieConfig
from bkctl.errors import BkctlError, Unsupported, UsageError
from bkctl.formats.metadata import Cookie
from bkctl.formats.names import CURRENT
from bkctl.metadata.refreshed_tls import RefreshedContext
from bkctl.metadata.store import client_tls, load_certificate
from bkctl.protocol.acceptor import share_of_descriptors
from bkctl.protocol.backpressure import ServerLimits

log: Final = logging.getLogger("bkctl.bookie")

#: Bytes of requests without an answer, of all clients, unless journalMaxMemorySizeMb says otherwise.
IN_FLIGHT_BYTES_MAX: Final = 256 << 20
#: Below the ports that systems choose for outgoing connections (from 32768 on by Linux, from 49152 on by macOS).
_FREE_PORTS: Final = range(10_000, 15_000)
_TLS_VERSIONS: Final = {"TLSv1.2": ssl.TLSVersion.TLSv1_2, "TLSv1.3": ssl.TLSVersion.TLSv1_3}
#: Java's names of versions that we do not speak.
_OLD_TLS_VERSIONS: Final = frozenset({"SSLv2Hello", "SSLv3", "TLSv1", "TLSv1.1"})
#: The default of bookieAuthProviderFactoryClass in Apache's bookie.
_NO_AUTH_CLASS: Final = "AuthenticationDisabledAuthProviderFactory"


def server_limits(config: BookieConfig) -> ServerLimits:
    """Return the limits that `config` sets. Clients get half of the file descriptors: a bookie needs files too."""
    memory_mb = config.journal_max_memory_size_mb
    return ServerLimits(
        connections=share_of_descriptors(2, config.server_max_connections),
        frame_size_bytes=config.netty_max_frame_size_bytes,
        in_flight_bytes=IN_FLIGHT_BYTES_MAX if memory_mb is None else memory_mb * MEBIBYTE,
        unfinished_bytes=config.unfinished_requests_max_memory_size_mb * MEBIBYTE,
        first_request_ms=config.server_first_request_timeout_ms,
        request_ms=config.server_request_timeout_ms,
        idle_ms=config.server_idle_timeout_ms,
        tls_handshake_ms=config.server_tls_handshake_timeout_ms,
        adds_in_progress=config.max_adds_in_progress_limit,
        reads_in_progress=config.max_reads_in_progress_limit,
        reads_waiting=config.num_read_worker_threads * config.max_pending_read_requests_per_thread,
        backpressure_wait_ms=config.wait_timeout_on_response_backpressure_ms,
        closes_on_backpressure=config.close_channel_on_response_timeout,
        keepalive=config.server_sock_keepalive,
        keepalive_idle_s=config.server_tcp_keep_idle,
        keepalive_interval_s=config.server_tcp_keep_intvl,
        keepalive_count=config.server_tcp_keep_cnt,
    )


def allow_open_files() -> None:
    """Raise the limit of open files and connections to the hard limit, as Java does by itself."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # some systems refuse the hard limit that they report
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def advertised_host(config: BookieConfig) -> str:
    """Return the host that the bookie registers. Raises UsageError for an unknown host, or a forbidden loopback one.

    Source: BookieImpl.getBookieAddress.
    """
    host = (config.advertised_address or "").strip()
    try:
        if not host:
            interface = config.listening_interface
            host = _interface_address(interface) if interface else _address_of(socket.gethostname())
            if config.use_host_name_as_bookie_id:
                name = socket.getfqdn(host)
                if name == host:
                    raise UsageError(f"Cannot find the host name of {host}", hint="set advertisedAddress")
                host = name.split(".", 1)[0] if config.use_short_host_name else name
            elif ":" in host:
                problem = f"This bookie's address {host} is one of IPv6, which a bookie id cannot contain"
                raise UsageError(problem, hint="set useHostNameAsBookieID=true, or advertisedAddress to a name")
        is_loopback = _is_loopback(host)
    except OSError as error:
        problem = f"Cannot resolve the bookie's address {host!r}: {error}"
        raise UsageError(problem, hint="set advertisedAddress") from error
    if is_loopback and not config.allow_loopback:
        raise UsageError(
            f"This bookie's address {host} is a loopback address, which other machines cannot reach",
            hint="set advertisedAddress or listeningInterface, or allowLoopback=true",
        )
    return host


def _address_of(host: str) -> str:
    """Return the first address of a host, of IPv4 if it has one. Raises OSError."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return str(min(found, key=lambda each: each[0] != socket.AF_INET)[4][0])


def _is_loopback(host: str) -> bool:
    return ipaddress.ip_address(_address_of(host).partition("%")[0]).is_loopback


def _interface_address(name: str) -> str:
    """Return the IPv4 address of a network interface. Raises UsageError."""
    import fcntl
    import struct

    siocgifaddr = 0x8915
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), siocgifaddr, struct.pack("256s", name.encode()[:15]))
        except OSError as error:
            raise UsageError(f"listeningInterface {name!r} has no IPv4 address: {error.strerror}") from error
    return socket.inet_ntoa(answer[20:24])


def listening_host(config: BookieConfig, host: str) -> str:
    """Return the address to listen on: every one (""), unless an interface is named or the bookie is on loopback."""
    if config.listening_interface:
        return _interface_address(config.listening_interface)
    return host if _is_loopback(host) else ""


def former_port(config: BookieConfig, host: str) -> int | None:
    """Return the port in the bookie id of an earlier start, so that `bookiePort=0` keeps its id, or None."""
    if config.bookie_id:
        return None
    path = Path(config.journal_directories[0]) / CURRENT / "VERSION"
    try:
        bookie_id = Cookie.parse(path.read_bytes(), str(path)).bookie_id
    except FileNotFoundError:
        return None
    name, _, port = bookie_id.rpartition(":")
    return int(port) if name == host and port.isdecimal() else None


@contextlib.contextmanager
def reserved_port(host: str) -> Iterator[int]:
    """Yield a free port for a server that keeps it: no other caller gets the port while the block runs.

    One that the system chooses could become the port of an outgoing connection while the server is down. Only on Linux
    can a server listen beside the reservation; elsewhere it ends at once. Raises BkctlError if no port is free.
    """
    address = _address_of(host) if _is_loopback(host) else ""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as holder:
        for port in (*random.sample(_FREE_PORTS, min(100, len(_FREE_PORTS))), 0):
            with contextlib.suppress(OSError):
                holder.bind((address, port))
                break
        else:
            raise BkctlError(f"No port is free on {host}")
        chosen: int = holder.getsockname()[1]
        if sys.platform == "linux":
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        else:
            holder.close()
        yield chosen


def tls_context(config: BookieConfig) -> RefreshedContext | None:
    """Return the TLS settings, None without tlsProviderFactoryClass. Raises Unsupported for Java's key stores."""
    if not config.tls_provider_factory_class:
        if config.tls_required:
            raise UsageError("tlsRequired needs tlsProviderFactoryClass, and a key and certificate")
        return None
    certificate = config.tls_certificate_path
    files = (certificate, config.tls_key_store, config.tls_key_store_password_path, config.tls_trust_store)
    refresh_s = config.tls_cert_files_refresh_duration_seconds
    return RefreshedContext(lambda: _load_tls(config), files, certificate, refresh_s)


def client_tls_context(config: BookieConfig) -> ssl.SSLContext | None:
    """Return the TLS settings of clients that run in the bookie, None without TLS or a trust store."""
    if not config.tls_provider_factory_class or not config.tls_trust_store:
        return None
    return client_tls(
        config.tls_trust_store, config.tls_certificate_path, config.tls_key_store,
        refresh_s=config.tls_cert_files_refresh_duration_seconds,
    )  # fmt: skip


def _load_tls(config: BookieConfig) -> ssl.SSLContext:
    for kind in (config.tls_key_store_type, config.tls_trust_store_type if config.tls_trust_store else "PEM"):
        if kind.upper() != "PEM":
            raise Unsupported(
                f"TLS with a {kind} key store", hint="use tlsKeyStoreType=PEM and tlsTrustStoreType=PEM with PEM files"
            )
    password = None
    try:
        if config.tls_key_store_password_path:
            with open(config.tls_key_store_password_path) as file:
                password = file.read().strip()
        if not config.tls_certificate_path or not config.tls_key_store:
            raise UsageError("TLS needs tlsCertificatePath (certificate) and tlsKeyStore (private key)")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        load_certificate(context, config.tls_certificate_path, config.tls_key_store, password)
        if config.tls_trust_store:
            context.load_verify_locations(config.tls_trust_store)
        if config.tls_enabled_protocols:
            versions = _enabled_versions(config.tls_enabled_protocols)
            context.minimum_version, context.maximum_version = min(versions), max(versions)
    except (OSError, ssl.SSLError) as error:
        raise UsageError(f"The TLS files cannot be used: {error}") from error
    if config.tls_client_authentication:
        if not config.tls_trust_store:
            raise UsageError(
                "tlsClientAuthentication needs tlsTrustStore, the authorities that sign clients' certificates"
            )
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _enabled_versions(names: Sequence[str]) -> list[ssl.TLSVersion]:
    """Return the versions named; those that are no longer secure are left out while a newer one remains."""
    versions = [_TLS_VERSIONS[name] for name in names if name in _TLS_VERSIONS]
    others = [name for name in names if name not in _TLS_VERSIONS]
    if not versions or not _OLD_TLS_VERSIONS.issuperset(others):
        problem = f"tlsEnabledProtocols names {', '.join(others)}"
        raise UsageError(problem, hint=f"name at least one of {', '.join(_TLS_VERSIONS)}, and no unknown one")
    if others:
        log.warning("tlsEnabledProtocols: not offered, since not secure: %s", ", ".join(others))
    return versions


def check_user(config: BookieConfig) -> None:
    """Raise UsageError when this user may not start the bookie. Source: BookieServer.validateUser."""
    permitted = config.permitted_startup_users
    if not permitted:
        return
    try:
        user = pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:  # a container's user often has no name
        user = str(os.geteuid())
    if user not in permitted:
        raise UsageError(
            f"User {user} may not start this bookie: permittedStartupUsers are {', '.join(permitted)}",
            hint="start it as one of them",
        )


def check_authentication(config: BookieConfig) -> None:
    """Raise Unsupported when the configuration asks clients to authenticate, other than by TLS certificates."""
    name = config.bookie_auth_provider_factory_class
    if name and not name.endswith(_NO_AUTH_CLASS):
        raise Unsupported(
            f"bookieAuthProviderFactoryClass {name}: our bookie has no authentication of its own",
            hint="tlsProviderFactoryClass, tlsClientAuthentication and tlsRequired admit only certified clients",
        )
