"""RefreshedContext: a TLS context that takes new certificates from its files while connections go on.

Source: TLSContextFactory (tlsCertFilesRefreshDurationSeconds).
"""

from __future__ import annotations

import hashlib
import logging
import ssl
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Final, Self

from bkctl.errors import BkctlError, UsageError

log: Final = logging.getLogger("bkctl.tls")


class RefreshedContext(ssl.SSLContext):
    """The context that `make` returns, made again every `refresh_s` seconds (0: never) if `files` changed.

    Each handshake uses the newest context; connections that are open keep theirs. New files that cannot be used, or
    whose certificate is not valid now, are logged and left: the old ones stay in use. `certificate` is the file of our
    own certificate, if any. Raise the errors of `make`.
    """

    def __new__(cls, *_: Any) -> Self:
        return super().__new__(cls, ssl.PROTOCOL_TLS_SERVER)

    def __init__(
        self, make: Callable[[], ssl.SSLContext], files: Iterable[str | None], certificate: str | None, refresh_s: float
    ) -> None:
        self._make, self._certificate = make, certificate
        self._files = [file for file in files if file]
        self._digest = self._refused = self._read()  # before they are loaded: a change meanwhile is seen
        self._current = make()
        #: The expiry of our certificate, in seconds since 1970; None without one.
        self.expires_s = None if certificate is None else _validity(certificate)[1]
        self.verify_mode = self._current.verify_mode
        if refresh_s > 0:
            gone = threading.Event()
            this = weakref.ref(self, lambda _: gone.set())
            arguments = (this, gone, refresh_s)
            threading.Thread(target=_refresh_regularly, args=arguments, name="tls-files", daemon=True).start()

    def wrap_bio(self, *arguments: Any, **settings: Any) -> ssl.SSLObject:
        return self._current.wrap_bio(*arguments, **settings)

    def wrap_socket(self, *arguments: Any, **settings: Any) -> ssl.SSLSocket:
        return self._current.wrap_socket(*arguments, **settings)

    def refresh(self) -> None:
        """Take the files if they changed. Blocks."""
        found = self._read()
        if found == self._digest:
            return
        try:
            current, expires_s = self._make(), None
            if self._certificate is not None:
                begins_s, expires_s = _validity(self._certificate)
                if not begins_s <= time.time() < expires_s:
                    raise UsageError(f"the certificate is valid from {_day(begins_s)} to {_day(expires_s)} only")
        except (BkctlError, OSError, ValueError) as error:
            if found != self._refused:
                log.warning("New TLS files (%s) are refused, the old ones stay in use: %s", self._names, error)
            self._refused = found
            return
        self._current, self.expires_s, self._digest, self._refused = current, expires_s, found, found
        log.info("New TLS files (%s) are in use", self._names)

    @property
    def _names(self) -> str:
        return ", ".join(self._files)

    def _read(self) -> bytes:
        """Return a digest of the files; one that cannot be read counts as empty."""
        digest = hashlib.sha256()
        for name in self._files:
            try:
                with open(name, "rb") as file:
                    digest.update(hashlib.sha256(file.read()).digest())
            except OSError:
                digest.update(b"-")
        return digest.digest()


def _refresh_regularly(this: weakref.ReferenceType[RefreshedContext], gone: threading.Event, refresh_s: float) -> None:
    while not gone.wait(refresh_s):
        context = this()
        if context is not None:
            context.refresh()
        del context


def _validity(certificate: str) -> tuple[float, float]:
    """Return when the first certificate of a PEM file begins and ends to be valid, in seconds since 1970."""
    found = ssl._ssl._test_decode_cert(certificate)  # type: ignore[attr-defined]
    return ssl.cert_time_to_seconds(found["notBefore"]), ssl.cert_time_to_seconds(found["notAfter"])


def _day(time_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(time_s))
