"""Settings of an HTTP server: its address, tokens and TLS."""

from __future__ import annotations

import functools
import logging
import socket
import ssl
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from bkctl.config import BookieConfig
from bkctl.errors import UsageError
from bkctl.http.server_url import LOOPBACK, WILDCARDS, is_loopback_address
from bkctl.metadata.refreshed_tls import RefreshedContext
from bkctl.metadata.store import load_certificate

log: Final = logging.getLogger("bkctl.http")

TOKEN_SIZE_BYTES_MAX: Final = 4096


@dataclass(frozen=True, slots=True)
class HttpSettings:
    """The address of a server, and its access control: `token`, and client certificates if `tls` requires them.

    Clients with the `read_only_token` may read, but get no secrets. With `open_probes`, probes need no token.
    `token_source` says where `token` is.
    """

    host: str
    port: int
    token: str | None = field(default=None, repr=False)
    tls: RefreshedContext | None = None
    read_only_token: str | None = field(default=None, repr=False)
    open_probes: bool = True
    token_source: str = ""

    @classmethod
    def of(cls, config: BookieConfig) -> HttpSettings:
        """Return the settings of a bookie.

        Without authentication, it listens on every address for its open probes (else, without httpServerHost, on
        loopback). Raise UsageError for unusable files, and for a server that would be open to everyone.
        """
        if config.http_server_token and config.http_server_token_file:
            raise UsageError("httpServerToken and httpServerTokenFile are both set", hint="keep the file")
        token, source = config.http_server_token, f"httpServerToken in {config.conf_path}"
        if config.http_server_token_file:
            token, source = read_token(Path(config.http_server_token_file)), config.http_server_token_file
        tls = None
        if config.http_server_tls_enable:
            if not config.http_server_key_store_path:
                raise UsageError("httpServerTlsEnable needs httpServerKeyStorePath: a PEM file, key and certificate")
            tls = tls_context(
                config.http_server_key_store_path,
                config.http_server_key_store_password,
                config.http_server_trust_store_path,
                refresh_s=config.tls_cert_files_refresh_duration_seconds,
            )
        read_only = config.http_server_read_only_token_file
        settings = cls(
            config.http_server_host or "0.0.0.0", config.http_server_port, token or None, tls,
            read_token(Path(read_only)) if read_only else None,
            config.http_server_open_probes, source,
        )  # fmt: skip
        if not settings.authenticates and settings.host in WILDCARDS:
            if settings.open_probes and read_only is None:
                log.warning(
                    "The HTTP server has no token: it answers probes and /metrics on every address, and the rest on %s "
                    "only; to open it, set httpServerTokenFile, or TLS with httpServerTrustStorePath", LOOPBACK,
                )  # fmt: skip
                return settings
            if config.http_server_host is None:
                settings = replace(settings, host=LOOPBACK)
        return settings.checked(
            "set httpServerHost=127.0.0.1, or httpServerTokenFile, or TLS with httpServerTrustStorePath"
        )

    def checked(self, hint: str) -> HttpSettings:
        """Return these settings.

        Raise UsageError with `hint` for a server beyond loopback without authentication, and for a read-only token
        without a different full token.
        """
        if self.read_only_token is not None and (self.token is None or self.token == self.read_only_token):
            raise UsageError("A read-only token needs a full token beside it", hint="give two different tokens")
        if not self.authenticates and not is_loopback(self.host):
            raise UsageError(
                f"The HTTP server on {self.host} would be open to everyone who can reach this machine", hint=hint
            )
        return self

    @property
    def authenticates(self) -> bool:
        """True if a client needs a token or a certificate."""
        return self.token is not None or (self.tls is not None and self.tls.verify_mode is ssl.CERT_REQUIRED)

    @property
    def protocol(self) -> str:
        """`http` or `https`."""
        return "http" if self.tls is None else "https"


def read_token(path: Path) -> str:
    """Return the token in a file, without surrounding white space. Raise UsageError."""
    try:
        with open(path, "rb") as file:
            data = file.read(TOKEN_SIZE_BYTES_MAX + 1)
        token = data.decode("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"Cannot read the token in {path}: {error}") from error
    if not token or len(data) > TOKEN_SIZE_BYTES_MAX or any(char.isspace() for char in token):
        raise UsageError(f"{path} has no token: one word of at most {TOKEN_SIZE_BYTES_MAX} characters")
    return token


def tls_context(
    key_store: str, password: str | None, trust_store: str | None, key: str | None = None, *, refresh_s: float = 0
) -> RefreshedContext:
    """Return a server's TLS settings from PEM files; with `trust_store`, clients need a certificate signed by it.

    `key` is the file of the private key if `key_store` does not contain it. `refresh_s` as in RefreshedContext. Raise
    UsageError.
    """
    make = functools.partial(_load_tls, key_store, password, trust_store, key)
    return RefreshedContext(make, (key_store, key, trust_store), key_store, refresh_s)


def _load_tls(key_store: str, password: str | None, trust_store: str | None, key: str | None) -> ssl.SSLContext:
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        load_certificate(context, key_store, key, password)
        if trust_store:
            context.load_verify_locations(trust_store)
            context.verify_mode = ssl.CERT_REQUIRED
    except (OSError, ssl.SSLError) as error:
        raise UsageError(f"The TLS files of the HTTP server cannot be used: {error}", hint="give PEM files") from error
    return context


def is_loopback(host: str) -> bool:
    """Return True if only this machine can reach a server on `host`."""
    try:
        found = socket.getaddrinfo(host.strip("[]") or "0.0.0.0", None)
    except OSError:
        return False
    return all(is_loopback_address(str(address[0]).partition("%")[0]) for *_, address in found)
