"""The configuration file: named connections ("contexts"), one of them current.

TOML, in bkctl/config.toml of the user's configuration directory (BKCTL_CONFIG names another file):

    current-context = "prod"

    [contexts.prod]
    metadata-uri = "zk+hierarchical://zk1:2181;zk2:2181/ledgers"
    metadata-user = "admin"
    metadata-password-file = "/run/secrets/zookeeper"

The file holds no secrets. Changes keep comments and order, and replace the file in one step. A change that would alter
anything else in the file is refused.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import Any, Final

from bkctl.errors import AlreadyExists, Conflict, NotFound, UsageError

from .settings import CONTEXT_SETTINGS, GlobalOptions
from .values import read_bounded

CURRENT: Final = "current-context"
#: The context that is there without being added: the local cluster that is up.
LOCAL_CONTEXT: Final = "local"
_KEYS: Final = (CURRENT, "contexts")
_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,64}", re.ASCII)
_SECRET: Final = re.compile(r"(?:.*[-_])?(?:password|passwd|secret|token|master-key)", re.IGNORECASE)


def config_file(environment: Mapping[str, str]) -> Path:
    """Return the configuration file: BKCTL_CONFIG, else bkctl/config.toml under XDG_CONFIG_HOME or ~/.config."""
    if given := environment.get("BKCTL_CONFIG"):
        return Path(given)
    return Path(environment.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config"), "bkctl", "config.toml")


class Contexts:
    """The configuration file as it was read. Methods that change the file write it, and return its new state."""

    def __init__(self, path: Path, text: str | None) -> None:
        self.path = path
        self._text = text
        self._document = _parse(path, text or "")

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> Contexts:
        """Return the user's file; one without contexts if there is none.

        Raises UsageError if it is not TOML, or has unknown keys.
        """
        path = config_file(environment)
        try:
            return cls(path, read_bounded(path, "a configuration file").decode())
        except (FileNotFoundError, NotADirectoryError):
            return cls(path, None)
        except UnicodeDecodeError as error:
            raise UsageError(f"{path}: not TOML: {error}") from error

    @property
    def current(self) -> str | None:
        """Name of the current context."""
        name = self._document.get(CURRENT)
        if name is not None and not isinstance(name, str):
            raise UsageError(f"{self.path}: {CURRENT} is not a string")
        return name or None

    @property
    def names(self) -> list[str]:
        """The contexts, as the file orders them."""
        contexts = self._document.get("contexts", {})
        if not isinstance(contexts, dict):
            raise UsageError(f"{self.path}: contexts is not a table")
        return list(contexts)

    def get(self, name: str) -> GlobalOptions:
        """Return one context. Raises NotFound; UsageError for a setting that is none, or holds a secret."""
        if self._text is None:
            raise NotFound(f"Context {name!r}: {self.path} does not exist", hint="'bkctl context add' creates one")
        if name not in self.names:
            raise NotFound(
                f"Context {name!r} is not in {self.path}",
                hint=f"it has {', '.join(self.names)}" if self.names else "'bkctl context add' creates one",
            )
        settings = self._document["contexts"][name]
        if not isinstance(settings, dict):
            raise UsageError(f"{self.path}: context {name!r} is not a table")
        return _context(settings, f"{self.path}: context {name!r}")

    def add(self, name: str, options: GlobalOptions, *, replace: bool = False) -> Contexts:
        """Add a context. Raises AlreadyExists without `replace`, UsageError for a name that is none."""
        if name == LOCAL_CONTEXT or not _NAME.fullmatch(name):
            hint = f"use letters, digits, - and _; {LOCAL_CONTEXT!r} is the local cluster"
            raise UsageError(f"Not a name of a context: {name!r}", hint=hint)
        settings = toml_values(options)
        _context(settings, f"context {name!r}")
        exists = name in self.names
        if exists and not replace:
            raise AlreadyExists(f"Context {name!r} is in {self.path}", hint="add --overwrite, or give another name")
        import tomlkit

        document = self._editable()
        contexts = document.setdefault("contexts", tomlkit.table(is_super_table=True))
        if exists:
            for key in contexts[name].keys() - settings.keys():
                del contexts[name][key]
            contexts[name].update(settings)
        else:
            contexts[name] = settings
        expected = {**self._document.get("contexts", {}), name: settings}
        return self._write(document, {**self._document, "contexts": expected})

    def use(self, name: str) -> Contexts:
        """Make a context the current one; the caller has seen that there is one of this name."""
        document = self._editable()
        document[CURRENT] = name
        return self._write(document, {**self._document, CURRENT: name})

    def rename(self, name: str, new: str) -> Contexts:
        """Give a context another name, also as the current one. Raises NotFound, AlreadyExists, UsageError.

        Written in steps: after an interruption the context may have both names.
        """
        contexts = self.add(new, self.get(name))
        if self.current == name:
            contexts = contexts.use(new)
        return contexts.delete(name)

    def delete(self, name: str) -> Contexts:
        """Remove a context, also as the current one; comments before the next table stay. Raises NotFound."""
        if name not in self.names:
            self.get(name)
        document = self._editable()
        contexts = document["contexts"]
        before = self.names[: self.names.index(name)]
        body = contexts[before[-1]].value.body if before else document.body
        at = len(body) if before else next(index for index, (key, _) in enumerate(body) if key == "contexts")
        kept = _comments_behind(contexts[name], [item for _, item in body[:at]])
        expected = {**self._document, "contexts": {**self._document["contexts"]}}
        del contexts[name], expected["contexts"][name]
        if not expected["contexts"]:
            del document["contexts"], expected["contexts"]
        if self.current == name:
            del document[CURRENT], expected[CURRENT]
        # Last: tomlkit's own index of the document does not include the items inserted here.
        body[at:at] = kept
        return self._write(document, expected)

    def _editable(self) -> Any:
        """Return the file as a document of tomlkit, which keeps comments and order. Raises Conflict."""
        import tomlkit
        from tomlkit.exceptions import TOMLKitError

        try:
            return tomlkit.parse(self._text or "")
        except TOMLKitError as error:
            raise self._unknown_form() from error

    def _unknown_form(self) -> Conflict:
        return Conflict(f"{self.path} is written in a way that cannot be changed here", hint="change it by hand")

    def _write(self, document: Any, expected: dict[str, Any]) -> Contexts:
        text = document.as_string()
        try:
            changed = Contexts(self.path, text if self._text else text.lstrip("\n"))
        except UsageError as error:
            raise self._unknown_form() from error
        if changed._document != expected:
            raise self._unknown_form()
        from bkctl.disk import atomic_write, make_private_directory

        target, mode = self.path.resolve(), 0o600
        make_private_directory(target.parent)
        with suppress(FileNotFoundError):
            mode = target.stat().st_mode & 0o777
        with atomic_write(target) as stream:
            os.fchmod(stream.fileno(), mode)
            stream.write((changed._text or "").encode())
        return changed


def _comments_behind(table: Any, before: list[Any]) -> list[Any]:
    """Return the comments and blank lines after the last setting of a context: to tomlkit they belong to its table.

    A blank line is left out where the items `before` the table end with one.
    """
    from tomlkit.items import Whitespace

    items = list(takewhile(lambda item: item[0] is None, reversed(table.value.body)))[::-1]
    doubled = items and isinstance(items[0][1], Whitespace) and before and isinstance(before[-1], Whitespace)
    return items[1:] if doubled else items


def _parse(path: Path, text: str) -> dict[str, Any]:
    if not text:
        return {}
    import tomllib

    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{path}: not TOML: {error}") from error
    for key in document:
        if key not in _KEYS:
            raise UsageError(f"{path}: unknown setting {key!r}", hint=f"known settings: {', '.join(_KEYS)}")
    return document


def _context(values: Mapping[str, Any], where: str) -> GlobalOptions:
    known = {setting.key: setting for setting in CONTEXT_SETTINGS}
    given: dict[str, Any] = {}
    for key, value in values.items():
        setting = known.get(key)
        if setting is None:
            if _SECRET.fullmatch(key):
                raise UsageError(
                    f"{where}: {key} is a secret, and this file must hold none",
                    hint="use metadata-password-file, or the environment",
                )
            raise UsageError(f"{where}: unknown setting {key!r}", hint=f"known settings: {', '.join(known)}")
        given[setting.field] = setting.from_toml(value, where)
    options = GlobalOptions(**given)
    if options.metadata_uri is None:
        raise UsageError(f"{where} has no metadata-uri")
    if re.search(r"://[^/]*@", options.metadata_uri):
        raise UsageError(f"{where}: metadata-uri names a user", hint="use metadata-user and metadata-password-file")
    return options


def toml_values(options: GlobalOptions) -> dict[str, Any]:
    """Return the settings of a context that are given, under the keys of the file."""
    values = ((setting, getattr(options, setting.field)) for setting in CONTEXT_SETTINGS)
    return {setting.key: setting.to_toml(value) for setting, value in values if value}
