"""`bkctl context`: named connections in the user's configuration file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from bkctl.errors import UsageError

from .kit.command import Run, command, group
from .kit.contexts import Context, Contexts
from .kit.output import GREEN, Column, Columns, Kind

app = group()


class ContextRow(NamedTuple):
    """A context and whether it is the current one."""

    name: str
    context: Context
    is_current: bool


def _setting(title: str | None, name: str, attribute: str, kind: Kind = Kind.TEXT, **settings: Any) -> Column:
    return Column(title, name, lambda row: getattr(row.context, attribute) or None, kind, **settings)


CONTEXT_COLUMNS = Columns(
    Column("CONTEXT", "name", "name"),
    Column("CURRENT", "current", "is_current", Kind.BOOLEAN, style={"yes": GREEN}),
    _setting("METADATA URI", "metadataUri", "metadata_uri"),
    _setting(
        "BOOKIE ADDRESSES", "bookieAddresses", "bookie_address", Kind.NESTED, optional=True,
        text=lambda value: ", ".join(value),
    ),
    _setting("TLS CA", "tlsCa", "tls_ca", optional=True),
    _setting("TLS CERT", "tlsCert", "tls_cert", optional=True),
    _setting("TLS KEY", "tlsKey", "tls_key", optional=True),
    _setting("METADATA TLS", "metadataTls", "metadata_tls", Kind.BOOLEAN, optional=True),
    _setting("METADATA TLS CA", "metadataTlsCa", "metadata_tls_ca", optional=True),
    _setting("METADATA TLS CERT", "metadataTlsCert", "metadata_tls_cert", optional=True),
    _setting("METADATA TLS KEY", "metadataTlsKey", "metadata_tls_key", optional=True),
    _setting("METADATA USER", "metadataUser", "metadata_user", optional=True),
    _setting("METADATA PASSWORD FILE", "metadataPasswordFile", "metadata_password_file", optional=True),
    _setting("METADATA SASL", "metadataSasl", "metadata_sasl", Kind.BOOLEAN, optional=True),
    _setting("METADATA CREATOR ACL", "metadataCreatorAcl", "metadata_creator_acl", Kind.BOOLEAN, optional=True),
    key="name",
)  # fmt: skip
LIST_COLUMNS = Columns(*CONTEXT_COLUMNS.columns[:3], key="name")

ContextName = Annotated[str, typer.Argument(metavar="CONTEXT", help="The context.")]


def _row(contexts: Contexts, name: str) -> ContextRow:
    return ContextRow(name, contexts.get(name), name == contexts.current)


@command(app, "list")
def list_contexts(run: Run) -> None:
    """List the contexts of the configuration file."""
    contexts = Contexts.read(os.environ)
    run.render((_row(contexts, name) for name in contexts.names), LIST_COLUMNS)


@command(app, "show")
def show(
    run: Run,
    name: Annotated[str | None, typer.Argument(metavar="CONTEXT", help="The context (default: current).")] = None,
) -> None:
    """Show one context with all its settings."""
    contexts = Contexts.read(os.environ)
    wanted = name or contexts.current
    if wanted is None:
        raise UsageError("No context is the current one", hint="name one, or choose one with 'bkctl context use'")
    run.show(_row(contexts, wanted), CONTEXT_COLUMNS)


@command(app, "add", connects=True, changes=True)
def add(
    run: Run,
    name: ContextName,
    replace: Annotated[bool, typer.Option("--replace", help="Replace the context of this name.")] = False,
    use: Annotated[bool, typer.Option("--use", help="Make it the current one.")] = False,
) -> None:
    """Add a context: the connection that the options of this command line name, under a name.

    Kept are --metadata-uri (or the one in --conf), --bookie-address, the --tls and --metadata- options; files by their
    absolute path. Nothing is connected. Passwords are kept in files of their own, see --metadata-password-file.
    """
    options = run.given_options()
    uri = run.given_connection().uri
    from bkctl.metadata.uri import parse_uri

    location = parse_uri(uri)
    if location.security is not None:
        raise UsageError(
            "A context keeps no login or TLS in its URI",
            hint="give --metadata-user and --metadata-password-file, --metadata-tls-ca …",
        )
    context = Context(
        metadata_uri=location.text,
        bookie_address=options.bookie_addresses,
        **{key: _absolute(getattr(options, name)) for key, name in _FILES.items()},
        metadata_tls=options.metadata_tls,
        metadata_user=options.metadata_user,
        metadata_sasl=options.metadata_sasl,
        metadata_creator_acl=options.metadata_creator_acl,
    )
    contexts = Contexts.read(os.environ).add(name, context, replace=replace)
    if use:
        contexts = contexts.use(name)
    run.show(_row(contexts, name), CONTEXT_COLUMNS)


#: Setting → the option that names its file.
_FILES = {
    "tls_ca": "tls_ca",
    "tls_cert": "tls_certificate",
    "tls_key": "tls_key",
    "metadata_tls_ca": "metadata_tls_ca",
    "metadata_tls_cert": "metadata_tls_certificate",
    "metadata_tls_key": "metadata_tls_key",
    "metadata_password_file": "metadata_password_file",
}


def _absolute(path: Path | None) -> Any:
    return None if path is None else str(path.absolute())


@command(app, "use", changes=True)
def use(run: Run, name: ContextName) -> None:
    """Make a context the current one: it counts where neither an option nor the environment names a cluster."""
    run.show(_row(Contexts.read(os.environ).use(name), name), CONTEXT_COLUMNS)


@command(app, "delete", asks=True, changes=True)
def delete(run: Run, name: ContextName) -> None:
    """Take a context out of the configuration file; asks on a terminal, elsewhere --yes is needed."""
    contexts = Contexts.read(os.environ)
    row = _row(contexts, name)
    run.confirm(f"Context {name!r} ({row.context.metadata_uri}) would be taken out of {contexts.path}")
    contexts.delete(name)
    run.show(row._replace(is_current=False), CONTEXT_COLUMNS)
