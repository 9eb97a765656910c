"""Plugins: a program `bkctl-NAME` on the PATH is the command `bkctl NAME`."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

from .parser import Command
from .session import SESSION_FLAGS, Session
from .settings import SETTINGS

PREFIX: Final = "bkctl-"
_NAME: Final = re.compile(r"[a-z0-9][a-z0-9-]*")


def find_plugins(environment: Mapping[str, str], wanted: str | None = None) -> dict[str, str]:
    """Return name → path of the plugins on the PATH, sorted by name; only `wanted` if that is given.

    Of two programs with one name, the first on the PATH counts. Relative directories of the PATH are skipped.
    """
    found: dict[str, str] = {}
    for directory in dict.fromkeys(filter(os.path.isabs, environment.get("PATH", "").split(os.pathsep))):
        with suppress(OSError):
            files = os.listdir(directory) if wanted is None else [PREFIX + wanted]
            for file in [file for file in files if file.startswith(PREFIX)]:
                name = file.removeprefix(PREFIX)
                path = os.path.join(directory, file)
                if _NAME.fullmatch(name) and os.path.isfile(path) and os.access(path, os.X_OK):
                    found.setdefault(name, path)
    return dict(sorted(found.items()))


class Plugin(Command):
    """A command that is a program of its own: it gets the words behind its name, as they are.

    Options before the name reach it as BKCTL_ variables, so that bkctl within it uses the same cluster.
    """

    def __init__(self, name: str, path: str) -> None:
        super().__init__(name=name, callback=None, add_help_option=False, rich_markup_mode=None)
        self._path = path

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        """Keep all words."""
        ctx.args = list(args)
        return ctx.args

    def invoke(self, ctx: Any) -> Any:
        """Replace this process with the program. Raises OSError."""
        environment = os.environ | _variables(ctx.find_root().obj)
        sys.stdout.flush()
        sys.stderr.flush()
        os.execve(self._path, [self._path, *ctx.args], environment)


def _variables(session: Session) -> dict[str, str]:
    """Return the options before the group as environment variables."""
    found = {f"BKCTL_{field.upper()}": "1" for field in SESSION_FLAGS.values() if getattr(session, field)}
    for setting in SETTINGS:
        value = getattr(session.globals, setting.field)
        if setting.variable is not None and value:
            found[setting.variable] = setting.to_variable(value)
    return found
