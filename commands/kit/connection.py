"""The metadata store and the bookies to connect to, found from options, environment, contexts and local clusters."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, NamedTuple

from bkctl.errors import NotFound, UsageError
from bkctl.ids import parse_bookie_address

from .contexts import Contexts
from .options import combined, option, read_password_file
from .settings import GlobalOptions

if TYPE_CHECKING:
    from bkctl.metadata.store import StoreSecurity

TIMEOUT_S_DEFAULT: Final = 30.0
CONNECT_TIMEOUT_S_DEFAULT: Final = 10.0
#: The context that is there without being added: the local cluster that is up.
LOCAL_CONTEXT: Final = "local"


class NoClusterNamed(UsageError):
    """No option, variable, context or local cluster names a cluster."""


class Connection(NamedTuple):
    """The metadata store to open, and the source of its name (for messages).

    `context` is the context's name, if a context named it; `settings` are the context's other settings.
    """

    uri: str
    source: str
    context: str | None = None
    settings: GlobalOptions = GlobalOptions()


def connect_to(levels: list[tuple[str | None, GlobalOptions]], environment: Mapping[str, str]) -> Connection:
    """Return the connection: of the first of `levels` (nearest first) that names one, current context, local cluster.

    A level is a place on the command line, or the environment (None). Within a level, a URI takes precedence over a
    configuration file, and that over a context. A file without a cluster hides the environment, the current context and
    the local cluster: its bookie must not be taken for one of theirs.
    Raises NoClusterNamed when nothing names a cluster, NotFound for a context or file that is not there.
    """
    without: Path | None = None
    for source, options in levels:
        if source is None and without is not None:
            break
        if options.metadata_uri is not None:
            named = "BKCTL_METADATA_URI" if source is None else f"--metadata-uri {source}"
            return Connection(options.metadata_uri, named)
        if options.conf is not None:
            from bkctl.config import read_properties

            uri = read_properties(options.conf).metadata_service_uri
            if uri is not None:
                return Connection(uri, "BKCTL_CONF" if source is None else str(options.conf))
            without = without or options.conf
        if options.context is not None:
            found = context_connection(options.context, environment)
            return found._replace(source="BKCTL_CONTEXT") if source is None else found
    if without is not None:
        raise NoClusterNamed(
            f"{without} names no cluster: no metadataServiceUri and no zkServers", hint="add --metadata-uri URI"
        )
    current = Contexts.read(environment).current
    if current is not None:
        return context_connection(current, environment)
    if (local := local_uri()) is not None:
        return Connection(local, "the local cluster")
    raise NoClusterNamed(
        "No cluster is named", hint="add --metadata-uri URI or --conf FILE, or start one with 'bkctl local up'"
    )


def other_connection(text: str, environment: Mapping[str, str]) -> Connection:
    """Return the connection that `text` names: a metadata URI or `context:NAME`. Raises NotFound, UsageError."""
    prefix, colon, name = text.partition(":")
    if prefix == "context" and colon:
        return context_connection(name, environment)
    return Connection(text, "its URI")


class Login(NamedTuple):
    """The login of a metadata store other than the connection's; None if no user is named."""

    user: str | None
    password_file: Path | None

    def over(self, settings: GlobalOptions) -> GlobalOptions:
        """Return the settings with this login in place of theirs, if there is one."""
        if self.user is None and self.password_file is None:
            return settings
        return replace(settings, metadata_user=self.user, metadata_password_file=self.password_file)


NO_LOGIN: Final = Login(None, None)

#: The login of the store that --to names.
LoginOfTarget = Annotated[
    Login,
    combined(
        Login,
        option(
            "to_user", str | None, "--to-user", metavar="NAME", help="Log in to the target; never with --metadata-user."
        ),
        option(
            "to_password_file",
            Path | None,
            "--to-password-file",
            metavar="FILE",
            help="File with that user's password. For TLS or SASL name a context: --to context:NAME.",
        ),
    ),
]


def context_connection(name: str, environment: Mapping[str, str]) -> Connection:
    """Return the connection of a context: one of the configuration file, or the local cluster. Raises NotFound."""
    contexts = Contexts.read(environment)
    if name == LOCAL_CONTEXT and name not in contexts.names:
        local = local_uri()
        if local is None:
            raise NotFound(f"Context {name!r}: no local cluster is up", hint="'bkctl local up' starts one")
        return Connection(local, "the local cluster", name)
    settings = contexts.get(name)
    assert settings.metadata_uri is not None
    return Connection(settings.metadata_uri, f"context {name}", name, replace(settings, metadata_uri=None))


def context_names(contexts: Contexts) -> list[str]:
    """Return the contexts of the file, and the local cluster's if one is up."""
    names = contexts.names
    return [*names, LOCAL_CONTEXT] if LOCAL_CONTEXT not in names and local_uri() is not None else names


def store_security(options: GlobalOptions, environment: Mapping[str, str]) -> StoreSecurity:
    """Return TLS and login of the metadata store as `options` give them. Raises UsageError, OSError (password file)."""
    from bkctl.metadata.store import StoreSecurity

    password: bytes | None = None
    if options.metadata_password_file is not None:
        password = read_password_file(options.metadata_password_file)
    elif options.metadata_user is not None and "BKCTL_METADATA_PASSWORD" in environment:
        password = os.fsencode(environment["BKCTL_METADATA_PASSWORD"])
    creator_acl = options.metadata_creator_acl
    if options.conf is not None and not creator_acl:
        from bkctl.config import read_properties

        creator_acl = (read_properties(options.conf).get("zkEnableSecurity") or "").lower() == "true"
    files = (options.metadata_tls_ca, options.metadata_tls_certificate, options.metadata_tls_key)
    ca, certificate, key = (None if path is None else str(path) for path in files)
    return StoreSecurity(
        tls=options.metadata_tls or ca is not None, ca=ca, certificate=certificate, key=key, user=options.metadata_user,
        password=None if password is None else password.decode("utf-8", "surrogateescape"),
        sasl=options.metadata_sasl, creator_acl=creator_acl,
    )  # fmt: skip


def local_uri() -> str | None:
    """Return the metadata URI of the local cluster that is up, None if none is."""
    from bkctl.bookie.local import active_cluster

    cluster = active_cluster()
    return None if cluster is None else cluster.metadata_uri


def parse_bookie_addresses(texts: tuple[str, ...]) -> dict[str, tuple[str, int]]:
    """Return bookie id → (host, port) of `ID=HOST:PORT` texts; the later of two for an id counts. Raises UsageError."""
    return dict(parse_bookie_address(text, "--bookie-address") for text in texts)
