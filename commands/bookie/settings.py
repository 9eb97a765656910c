"""`bkctl bookie config`."""

from __future__ import annotations

from fnmatch import fnmatchcase
from operator import itemgetter
from typing import Annotated, Any, Final

import typer

from bkctl.columns import Column, Columns, Kind
from bkctl.errors import NotFound, UsageError
from bkctl.redaction import is_secret_name

from ..kit.audit import shown_uri
from ..kit.command import Run, command, group, rows_of
from ..kit.options import DryRun, combined, option
from .server import BookieServerOption, server

app = group()


SETTING_COLUMNS = Columns(
    Column("NAME", "name", itemgetter(0)), Column("VALUE", "value", itemgetter(1), Kind.NESTED, text=str), key="name"
)
HIDDEN: Final = "***"


def _settings(texts: list[str] | None) -> dict[str, str]:
    found: dict[str, str] = {}
    for text in texts or ():
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise UsageError(f"--set {text!r}: not NAME=VALUE")
        if name in found:
            raise UsageError(f"--set {name!r} is given twice")
        found[name] = value
    return found


SettingsToSet = Annotated[
    dict[str, str],
    combined(
        _settings,
        option(
            "settings_to_set",
            list[str],
            "--set",
            metavar="NAME=VALUE",
            help="Change this setting in the bookie's memory; repeatable.",
        ),
    ),
]


@command(app, "config", connects=True, changes=None, prints=rows_of(SETTING_COLUMNS))
def config(
    run: Run,
    which: BookieServerOption,
    changed: SettingsToSet,
    names: Annotated[
        list[str] | None, typer.Argument(metavar="NAME", help="Only these settings; * and ? stand for any characters.")
    ] = None,
    show_secrets: Annotated[bool, typer.Option("--show-secrets", help="Print passwords and tokens, too.")] = False,
    dry_run: DryRun = False,
) -> None:
    """Show or change the settings of a running bookie.

    Apache's bookies show what their file sets, and no defaults. --set changes a setting in the bookie's memory until it
    stops. Bookies read most settings only when they start: change the bookie's file, too.

    $ bkctl bookie config --bookie-url http://127.0.0.1:8080
    $ bkctl bookie config 'gc*' --bookie-url http://127.0.0.1:8080
    """
    if changed and names:
        raise UsageError("NAME and --set are given", hint="--set prints the settings that it changed")
    with server(run, which, changes=bool(changed) and not dry_run) as found:
        settings = found.api.config()
        if changed and dry_run:
            run.out.note_dry_run(f"{found.name} would set {', '.join(changed)}; now it has")
        elif changed:
            run.out.detail(found.api.set_config(changed))
            settings = found.api.config()
        shown = changed or sorted(name for name in settings if _is_asked_for(name, names))
        values = {name: settings.get(name) for name in shown}
        rows = ((name, value if show_secrets else _without_secret(name, value)) for name, value in values.items())
        run.out.render(rows, SETTING_COLUMNS)
        missing = [name for name in names or () if not any(_is_asked_for(each, [name]) for each in settings)]
        if missing:
            raise NotFound(
                f"{found.name} shows no setting {missing[0]}", hint="Apache's bookies show only what was set"
            )
        if changed and not dry_run:
            run.out.note(f"{found.name} loses this change when it stops, and reads most settings only when it starts")


def _is_asked_for(name: str, patterns: list[str] | None) -> bool:
    return not patterns or any(fnmatchcase(name, pattern) for pattern in patterns)


def _without_secret(name: str, value: Any) -> Any:
    """Return the value of a setting as it may be printed: a password as `***`, and one within a URI."""
    if not isinstance(value, str):
        return value
    return HIDDEN if is_secret_name(name) and value else shown_uri(value)
