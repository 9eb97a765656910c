"""URLs of HTTP servers: parsed, found for a bookie, and trusted with a token."""

from __future__ import annotations

import ipaddress
import re
import socket
import urllib.parse
from typing import TYPE_CHECKING, Final, NamedTuple

from bkctl.errors import BookieUnavailable, NotFound, UsageError

if TYPE_CHECKING:
    from bkctl.metadata.cluster import RegisteredBookie


LOOPBACK: Final = "127.0.0.1"
WILDCARDS: Final = ("", "0.0.0.0", "::", "[::]", "0:0:0:0:0:0:0:0")

UNSAFE_IN_PATH: Final = re.compile(r"[\x00-\x20\x7f]")


class ServerUrl(NamedTuple):
    """The address of an HTTP server. `prefix` precedes every path, and does not end in a slash."""

    tls: bool
    host: str
    port: int
    prefix: str

    @classmethod
    def parse(cls, text: str) -> ServerUrl:
        """Parse `http[s]://HOST[:PORT][/PREFIX]`, or `HOST:PORT` for http. Raise UsageError."""
        hint = "give http://HOST:PORT or https://HOST:PORT"
        try:
            parts = urllib.parse.urlsplit(text if "://" in text else f"http://{text}")
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise UsageError(f"URL {text!r}: {error}", hint=hint) from error
        if parts.scheme not in ("http", "https") or not host or port == 0 or UNSAFE_IN_PATH.search(text):
            raise UsageError(f"URL {text!r}: not the URL of an HTTP server", hint=hint)
        if parts.query or parts.fragment:
            raise UsageError(f"URL {text!r}: has a query or a fragment", hint=hint)
        if parts.username is not None or parts.password is not None:
            raise UsageError("The URL of an HTTP server contains a user", hint="give a token as BKCTL_API_TOKEN")
        tls = parts.scheme == "https"
        return cls(tls, host, port or (443 if tls else 80), parts.path.rstrip("/"))

    @property
    def is_loopback(self) -> bool:
        """True for `localhost` and loopback addresses; a name that only begins like one does not count."""
        return self.host == "localhost" or is_loopback_address(self.host)

    @property
    def is_private(self) -> bool:
        """True if the traffic cannot be read on the way: TLS, or a server on this machine."""
        return self.tls or self.is_loopback

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.tls else 'http'}://{host}:{self.port}{self.prefix}"


def is_loopback_address(host: str) -> bool:
    """Return True for the text of a loopback address, also of one of IPv4 in IPv6."""
    try:
        return ipaddress.ip_address(host.removeprefix("::ffff:")).is_loopback
    except ValueError:
        return False


def token_for_registered(url: str, token: str | None, *, has_authorities: bool) -> str | None:
    """Return `token` if it may be sent to a server that the metadata store names, else None.

    Any writer of the metadata store can choose that URL. The token goes to loopback, and over TLS to a server whose
    certificate was signed by authorities that the user named (`has_authorities`); the system's ones sign for anyone.
    """
    server = ServerUrl.parse(url)
    return token if server.is_loopback or (server.tls and has_authorities) else None


def bookie_url(bookie: RegisteredBookie, host: str | None = None) -> str:
    """Return the URL of a bookie's HTTP server, from the endpoints that the bookie registered.

    `host` replaces the registered host. A server that listens on every address registers a wildcard: on this machine it
    is asked on loopback, where it serves more than probes without a given token, else at the bookie's own address.
    Blocks: names are looked up.
    Raise NotFound for a bookie without HTTP server, BookieUnavailable for one that is down or serves HTTP on another
    machine's loopback address.
    """
    if bookie.state == "down":
        raise BookieUnavailable(f"Bookie {bookie.bookie_id} is down", hint="'bkctl bookies list' shows live bookies")
    found = bookie.http_endpoint
    if found is None:
        raise NotFound(
            f"Bookie {bookie.bookie_id} registered no HTTP server",
            hint="start it with httpServerEnabled=true, or say where it is with --bookie-url",
        )
    host = host or found.host
    address = bookie.address
    if is_loopback_address(host.strip("[]")) and address is not None and is_of_this_machine(address[0]) is False:
        raise BookieUnavailable(
            f"The HTTP server of bookie {bookie.bookie_id} is open to its own machine only ({address[0]})",
            hint="run the command there, or set httpServerHost and httpServerTokenFile in its configuration",
        )
    if host in WILDCARDS:
        if address is None:
            raise NotFound(
                f"Bookie {bookie.bookie_id} registered no address of its HTTP server, only port {found.port}",
                hint="say where it is with --bookie-url",
            )
        host = address[0]
        if found.protocol != "https" and not is_loopback_address(host) and is_of_this_machine(host):
            host = LOOPBACK  # a certificate is for the host
    return str(ServerUrl(found.protocol == "https", host.strip("[]"), found.port, ""))


def is_of_this_machine(host: str) -> bool | None:
    """Return whether a socket can be bound to the address of `host` here, None for an unknown host. Blocks."""
    try:
        family, kind, number, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)[0]
    except (OSError, UnicodeError):
        return None
    try:
        with socket.socket(family, kind, number) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True
