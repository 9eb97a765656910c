"""`bkctl context`: named connections in the user's configuration file."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from bkctl.columns import Column, Columns, Kind
from bkctl.errors import UsageError

from .kit.access import context_connection, context_names
from .kit.columns import PlainRow
from .kit.command import Run, command, group, object_of, rows_of
from .kit.contexts import Contexts
from .kit.options import flag, word
from .kit.settings import CONTEXT_SETTINGS, GlobalOptions, Setting
from .kit.texts import GREEN

app = group()


def _column(setting: Setting) -> Column:
    """Return the column of a context's setting, which is left out of JSON where it is not set."""
    first, *words = setting.key.split("-")
    name, title = first + "".join(map(str.capitalize, words)), setting.key.replace("-", " ").upper()

    def value(row: PlainRow) -> Any:
        given = getattr(row.options, setting.field)
        return setting.to_toml(given) if given else None

    if setting.type.absent == ():
        return Column(f"{title}ES", f"{name}es", value, Kind.NESTED, optional=True, text=", ".join)
    kind = Kind.BOOLEAN if setting.type.option is bool else Kind.TEXT
    return Column(title, name, value, kind, optional=setting.field != "metadata_uri")


CONTEXT_COLUMNS = Columns(
    Column("CONTEXT", "name", "name"),
    Column("CURRENT", "current", "is_current", Kind.BOOLEAN, style={"yes": GREEN}),
    *map(_column, CONTEXT_SETTINGS),
    key="name",
)
LIST_COLUMNS = Columns(*CONTEXT_COLUMNS.columns[:3], key="name", none="No contexts; 'bkctl context add' makes one")

ContextName = Annotated[str, word("CONTEXT", "The context.")]


def _row(contexts: Contexts, name: str, **changes: bool) -> PlainRow:
    """Return a context; one of them is current."""
    found = context_connection(name, os.environ)
    options = replace(found.settings, metadata_uri=found.uri)
    return PlainRow(**{"name": name, "options": options, "is_current": name == contexts.current, **changes})


@command(app, "list", prints=rows_of(LIST_COLUMNS))
def list_contexts(run: Run) -> None:
    """List the contexts of the configuration file.

    A local cluster that is up is the context `local`, unless the file has one of this name.

    $ bkctl context list
    """
    contexts = Contexts.read(os.environ)
    run.out.render([_row(contexts, name) for name in context_names(contexts)], LIST_COLUMNS)


@command(app, "show", prints=object_of(CONTEXT_COLUMNS))
def show(run: Run, name: Annotated[str | None, word("CONTEXT", "The context (default: current).")] = None) -> None:
    """Show one context with all its settings.

    $ bkctl context show prod
    """
    contexts = Contexts.read(os.environ)
    wanted = name or contexts.current
    if wanted is None:
        raise UsageError("No context is the current one", hint="name one, or choose one with 'bkctl context use'")
    run.out.show(_row(contexts, wanted), CONTEXT_COLUMNS)


@command(app, "add", connects=True, changes=True, opens=False, prints=object_of(CONTEXT_COLUMNS))
def add(
    run: Run,
    name: ContextName,
    overwrite: Annotated[bool, flag("--overwrite", "Replace the context of this name.", "--replace")] = False,
    use: Annotated[bool, flag("--use", "Make the new context the current one.")] = False,
) -> None:
    """Save the connection options under a name.

    Saves --metadata-uri (or the one in --conf), --bookie-address, and the --tls and --metadata- options; files by their
    absolute path. Does not connect. Passwords stay in their own files, see --metadata-password-file.

    $ bkctl context add prod --metadata-uri zk://zk1:2181/ledgers --use
    """
    from bkctl.metadata.uri import parse_uri

    location = parse_uri(run.access.given_connection().uri)
    if location.security is not None:
        raise UsageError(
            "A context keeps no login or TLS in its URI",
            hint="give --metadata-user and --metadata-password-file, --metadata-tls-ca …",
        )
    given: dict[str, Any] = {setting.field: getattr(run.given, setting.field) for setting in CONTEXT_SETTINGS}
    given |= {name: path.absolute() for name, path in given.items() if isinstance(path, Path)}
    context = GlobalOptions(**{**given, "metadata_uri": location.text})
    contexts = Contexts.read(os.environ).add(name, context, replace=overwrite)
    if use:
        contexts = contexts.use(name)
    run.out.show(_row(contexts, name), CONTEXT_COLUMNS)


@command(app, "use", changes=True, prints=object_of(CONTEXT_COLUMNS))
def use(run: Run, name: ContextName) -> None:
    """Make a context the current one.

    Commands use it if neither an option nor the environment names a cluster. `local` is the local cluster that is up.

    $ bkctl context use prod
    """
    row = _row(Contexts.read(os.environ), name, is_current=True)
    Contexts.read(os.environ).use(name)
    run.out.show(row, CONTEXT_COLUMNS)


@command(app, "rename", changes=True, prints=object_of(CONTEXT_COLUMNS))
def rename(run: Run, name: ContextName, new: Annotated[str, word("NEW", "The new name.")]) -> None:
    """Give a context another name.

    The current context stays the current one. An existing name is refused.

    $ bkctl context rename prod prod-eu
    """
    contexts = Contexts.read(os.environ).rename(name, new)
    run.out.show(_row(contexts, new), CONTEXT_COLUMNS)


@command(app, "delete", asks=True, changes=True, prints=object_of(CONTEXT_COLUMNS))
def delete(run: Run, name: ContextName) -> None:
    """Delete a context from the configuration file.

    $ bkctl context delete prod --yes
    """
    contexts = Contexts.read(os.environ)
    contexts.get(name)  # The file must have it.
    row = _row(contexts, name, is_current=False)
    run.consent.confirm(f"Context {name!r} ({row.options.metadata_uri}) would be deleted from {contexts.path}")
    contexts.delete(name)
    run.out.show(row, CONTEXT_COLUMNS)
