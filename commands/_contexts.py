"""The configuration file: named connections ("contexts"), and which of them is the current one.

TOML, in bkctl/config.toml of the user's configuration directory (BKCTL_CONFIG names another file):

    current-context = "prod"

    [contexts.prod]
    metadata-uri = "zk+hierarchical://zk1:2181;zk2:2181/ledgers"
    metadata-user = "admin"
    metadata-password-file = "/run/secrets/zookeeper"

There are no secrets in it. It is changed as text, so that comments stay; a file that is written in a way that this does
not understand is left alone. It is replaced in one step.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

from bkctl.errors import AlreadyExists, Conflict, NotFound, UsageError

CURRENT: Final = "current-context"
_FILE_SIZE_BYTES_MAX: Final = 1 << 20
_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,64}", re.ASCII)
_SECRET: Final = re.compile(r"(?:.*[-_])?(?:password|passwd|secret|token|master-key)", re.IGNORECASE)
_HEADER: Final = re.compile(r"\s*\[")
_BLANK: Final = re.compile(r"\s*(?:#.*)?", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """One named connection: the options of the same names."""

    metadata_uri: str
    bookie_address: tuple[str, ...] = ()
    tls_ca: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    metadata_tls: bool = False
    metadata_tls_ca: str | None = None
    metadata_tls_cert: str | None = None
    metadata_tls_key: str | None = None
    metadata_user: str | None = None
    metadata_password_file: str | None = None
    metadata_sasl: bool = False
    metadata_creator_acl: bool = False

    def settings(self) -> dict[str, Any]:
        """What is set, under the keys of the file."""
        values = {each.name.replace("_", "-"): getattr(self, each.name) for each in fields(self)}
        return {key: list(value) if isinstance(value, tuple) else value for key, value in values.items() if value}


_KINDS: Final = {each.name.replace("_", "-"): str(each.type) for each in fields(Context)}


def config_file(environment: Mapping[str, str]) -> Path:
    """The configuration file: BKCTL_CONFIG, else bkctl/config.toml under XDG_CONFIG_HOME or ~/.config."""
    if given := environment.get("BKCTL_CONFIG"):
        return Path(given)
    home = environment.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    return Path(home) / "bkctl" / "config.toml"


class Contexts:
    """The configuration file as it was read. Methods that change it write it, and return the file as it is then."""

    def __init__(self, path: Path, text: str | None) -> None:
        self.path = path
        self._text = text
        self._document = _parse(path, text or "")

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> Contexts:
        """The user's file; one without contexts where there is none. Raises UsageError when it is no TOML."""
        path = config_file(environment)
        try:
            with open(path, "rb") as file:
                content = file.read(_FILE_SIZE_BYTES_MAX + 1)
        except (FileNotFoundError, NotADirectoryError):
            return cls(path, None)
        if len(content) > _FILE_SIZE_BYTES_MAX:
            raise UsageError(f"{path} is larger than {_FILE_SIZE_BYTES_MAX} bytes, so it is no configuration file")
        try:
            return cls(path, content.decode())
        except UnicodeDecodeError as error:
            raise UsageError(f"{path}: not TOML: {error}") from error

    @property
    def current(self) -> str | None:
        """Name of the current context."""
        name = self._document.get(CURRENT)
        if name is not None and not isinstance(name, str):
            raise UsageError(f"{self.path}: {CURRENT} is no text")
        return name or None

    @property
    def names(self) -> list[str]:
        """The contexts, as the file orders them."""
        contexts = self._document.get("contexts", {})
        if not isinstance(contexts, dict):
            raise UsageError(f"{self.path}: contexts is no table")
        return list(contexts)

    def get(self, name: str) -> Context:
        """One context. Raises NotFound; UsageError for a setting that is none, or holds a secret."""
        if self._text is None:
            raise NotFound(f"Context {name!r}: there is no {self.path}", hint="'bkctl context add' makes one")
        if name not in self.names:
            raise NotFound(
                f"Context {name!r} is not in {self.path}",
                hint=f"it has {', '.join(self.names)}" if self.names else "'bkctl context add' makes one",
            )
        settings = self._document["contexts"][name]
        if not isinstance(settings, dict):
            raise UsageError(f"{self.path}: context {name!r} is no table")
        return _context(settings, f"{self.path}: context {name!r}")

    def add(self, name: str, context: Context, *, replace: bool = False) -> Contexts:
        """Add a context. Raises AlreadyExists without `replace`, UsageError for a name that is none."""
        if not _NAME.fullmatch(name):
            raise UsageError(f"Not a name of a context: {name!r}", hint="letters, digits, - and _")
        settings = context.settings()
        _context(settings, f"context {name!r}")
        exists = name in self.names
        if exists and not replace:
            raise AlreadyExists(f"Context {name!r} is in {self.path}", hint="add --replace, or give another name")
        document = {**self._document, "contexts": {**self._document.get("contexts", {}), name: settings}}
        lines = self._lines()
        block = [f"[contexts.{name}]\n", *(f"{key} = {_toml(value)}\n" for key, value in settings.items())]
        if exists:
            start, end = self._block(lines, name)
            return self._write([*lines[:start], *block, *lines[end:]], document)
        if lines and lines[-1].strip():
            block.insert(0, "\n")
        return self._write([*lines, *block], document)

    def use(self, name: str) -> Contexts:
        """Make a context the current one. Raises NotFound."""
        self.get(name)
        lines = self._lines()
        at = self._current_line(lines)
        line = f"{CURRENT} = {_toml(name)}\n"
        if at is None:
            lines[:0] = [line] if not lines or not lines[0].strip() else [line, "\n"]
        else:
            comment = re.search(r"(\s+#[^\"']*)$", lines[at].rstrip("\r\n"))
            lines[at] = line.rstrip("\n") + (comment[1] if comment else "") + "\n"
        return self._write(lines, {**self._document, CURRENT: name})

    def delete(self, name: str) -> Contexts:
        """Take a context out; it is the current one no more. Raises NotFound."""
        if name not in self.names:
            self.get(name)
        lines = self._lines()
        start, end = self._block(lines, name)
        # The blank lines before it went with it.
        while start and not lines[start - 1].strip() and (end == len(lines) or not lines[end].strip()):
            start -= 1
        del lines[start:end]
        contexts = {key: value for key, value in self._document["contexts"].items() if key != name}
        document = {**self._document, "contexts": contexts}
        if not contexts:
            del document["contexts"]
        if self.current == name:
            at = self._current_line(lines)
            if at is not None:
                del lines[at]
            del document[CURRENT]
        return self._write(lines, document)

    def _lines(self) -> list[str]:
        lines = (self._text or "").splitlines(keepends=True)
        if lines and not lines[-1].endswith("\n"):
            lines[-1] += "\n"
        return lines

    @staticmethod
    def _current_line(lines: list[str]) -> int | None:
        for at, line in enumerate(lines):
            if _HEADER.match(line):
                return None
            if re.match(rf"\s*(?:{CURRENT}|\"{CURRENT}\")\s*=", line):
                return at
        return None

    def _block(self, lines: list[str], name: str) -> tuple[int, int]:
        """First line of a context's table, and the one behind its last setting: comments before the next table stay."""
        header = re.compile(rf"\s*\[\s*contexts\s*\.\s*(?:{name}|\"{name}\"|'{name}')\s*\]\s*(?:#.*)?")
        for start, line in enumerate(lines):
            if header.fullmatch(line.rstrip("\r\n")):
                end = start + 1
                while end < len(lines) and not _HEADER.match(lines[end]):
                    end += 1
                while end > start + 1 and _BLANK.fullmatch(lines[end - 1]):
                    end -= 1
                return start, end
        raise self._unknown_form()

    def _unknown_form(self) -> Conflict:
        return Conflict(f"{self.path} is written in a way that cannot be changed here", hint="change it by hand")

    def _write(self, lines: list[str], document: dict[str, Any]) -> Contexts:
        text = "".join(lines)
        try:
            changed = Contexts(self.path, text)
        except UsageError as error:
            raise self._unknown_form() from error
        if changed._document != document:
            raise self._unknown_form()
        from bkctl.storage.files import create_unfinished

        target = self.path.resolve()
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            mode = target.stat().st_mode & 0o777
        except FileNotFoundError:
            mode = 0o600
        new, file = create_unfinished(target)
        try:
            with open(file, "wb") as stream:
                os.fchmod(file, mode)
                stream.write(text.encode())
                stream.flush()
                os.fsync(file)
            os.replace(new, target)
        except BaseException:
            new.unlink(missing_ok=True)
            raise
        return changed


def _parse(path: Path, text: str) -> dict[str, Any]:
    if not text:
        return {}
    import tomllib

    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{path}: not TOML: {error}") from error


def _context(settings: Mapping[str, Any], where: str) -> Context:
    values: dict[str, Any] = {}
    for key, value in settings.items():
        kind = _KINDS.get(key)
        if kind is None:
            if _SECRET.fullmatch(key):
                raise UsageError(
                    f"{where}: {key} is a secret, and none is read from this file",
                    hint="use metadata-password-file, or the environment",
                )
            raise UsageError(f"{where}: unknown setting {key!r}", hint=f"known are {', '.join(_KINDS)}")
        if kind.startswith("tuple"):
            good = isinstance(value, list) and all(isinstance(item, str) for item in value)
            value = tuple(value) if good else value
        else:
            good = isinstance(value, bool if kind == "bool" else str)
        if not good:
            raise UsageError(f"{where}: {key} has a value of the wrong kind: {value!r}")
        values[key.replace("-", "_")] = value
    if "metadata_uri" not in values:
        raise UsageError(f"{where} has no metadata-uri")
    if re.search(r"://[^/]*@", values["metadata_uri"]):
        raise UsageError(f"{where}: metadata-uri names a user", hint="use metadata-user and metadata-password-file")
    return Context(**values)


def _toml(value: Any) -> str:
    """A TOML value; JSON's strings, lists and booleans are."""
    import json

    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
