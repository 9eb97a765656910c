"""The options of data sources: strings, as Spark hands them over, to checked values. Nothing here needs Spark."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from difflib import get_close_matches
from enum import StrEnum
from pathlib import Path
from typing import Final, TypeVar

from bkctl.errors import UsageError
from bkctl.formats.entry import DigestType
from bkctl.ids import LedgerId, parse_scope_id

#: Stands in `columns` for all that come without asking.
DEFAULT_COLUMNS: Final = "*"

_SIZE: Final = re.compile(r"([0-9]{1,18})\s*(|[kmgt]i?b?|b)", re.ASCII | re.IGNORECASE)
_UNITS: Final = {"": 0, "b": 0, "k": 10, "m": 20, "g": 30, "t": 40}
_FLAGS: Final = {"true": True, "false": False}

_Word = TypeVar("_Word", bound=StrEnum)


class Mode(StrEnum):
    """What a source does about damage; the values are the words of the option `mode`."""

    #: The job fails with the first damage.
    FAILFAST = "failfast"
    #: What stands before damage is there, and a row for each damage whose column `damage` says file, offset and reason.
    PERMISSIVE = "permissive"


class SourceOptions:
    """The options of one data source, by any case of their names.

    `path` and `paths` (several as a JSON list, which is how Spark's `load` gives them) are always known. Raises
    UsageError for any other name that is not among `known`; every method does for a value that does not parse.
    """

    def __init__(self, source: str, options: Mapping[str, str], known: Collection[str]) -> None:
        self._source = source
        self._values = {name.lower(): value for name, value in options.items()}
        names = {name.lower(): name for name in ("path", "paths", *known)}
        for name in self._values:
            if name not in names:
                near = get_close_matches(name, names, 1)
                hint = f"did you mean {names[near[0]]}?" if near else f"options are {', '.join(sorted(names.values()))}"
                raise UsageError(f"{source} has no option {name!r}", hint=hint)

    def text(self, name: str) -> str | None:
        """The option as it is; None where it is not given."""
        return self._values.get(name.lower())

    def needed(self, name: str) -> str:
        """The option as it is. Raises UsageError where it is not given."""
        value = self.text(name)
        if not value:
            raise UsageError(f"{self._source} needs the option {name}")
        return value

    def integer(self, name: str, default: int, minimum: int = 0) -> int:
        """A whole number."""
        value = self.text(name)
        if value is None:
            return default
        if not re.fullmatch(r"[0-9]{1,18}", value, re.ASCII) or int(value) < minimum:
            raise self._wrong(name, value, f"a whole number of at least {minimum}")
        return int(value)

    def size_bytes(self, name: str, default: int) -> int:
        """A size in bytes of at least 1: digits, or with one of the units KiB, MiB, GiB, TiB (`128m` is 128 MiB)."""
        value = self.text(name)
        if value is None:
            return default
        match = _SIZE.fullmatch(value.strip())
        size = int(match[1]) << _UNITS[match[2][:1].lower()] if match else 0
        if not 0 < size < 1 << 62:
            raise self._wrong(name, value, "a size of at least 1 byte, as 134217728 or 128MiB")
        return size

    def flag(self, name: str, default: bool = False) -> bool:
        """`true` or `false`."""
        value = self.text(name)
        if value is None:
            return default
        if value.lower() not in _FLAGS:
            raise self._wrong(name, value, "true or false")
        return _FLAGS[value.lower()]

    def choice(self, name: str, default: _Word) -> _Word:
        """One word of the enumeration that `default` is of, in any case."""
        value = self.text(name)
        if value is None:
            return default
        words = {word.value.lower(): word for word in type(default)}
        if value.lower() not in words:
            raise self._wrong(name, value, f"one of {', '.join(type(default))}")
        return words[value.lower()]

    def words(self, name: str) -> list[str]:
        """A list: words between commas, or a JSON list of strings. Empty where the option is not given."""
        value = (self.text(name) or "").strip()
        if not value.startswith("["):
            return [word for part in value.split(",") if (word := part.strip())]
        try:
            found = json.loads(value)
        except ValueError as error:
            raise self._wrong(name, value, "words between commas or a JSON list") from error
        if not all(isinstance(each, str) for each in found):
            raise self._wrong(name, value, "a JSON list of strings")
        return list(found)

    def mode(self) -> Mode:
        """The option `mode`."""
        return self.choice("mode", Mode.FAILFAST)

    def paths(self) -> list[str]:
        """Files, directories and patterns, as given, each once. Raises UsageError where there are none."""
        path = self.text("path")
        found = self.words("paths") if path is None else [path, *self.words("paths")]
        if not found:
            raise UsageError(f"{self._source} needs a path", hint="give load() a file, a directory or a pattern")
        return list(dict.fromkeys(found))

    def columns(self, default: Sequence[str], on_request: Iterable[str] = ()) -> list[str]:
        """The option `columns`: names between commas, `*` for the `default` ones; default: those."""
        wanted = self.words("columns")
        if not wanted:
            return list(default)
        known = {name.lower(): name for name in (*default, *on_request)}
        found: dict[str, None] = {}
        for name in wanted:
            if name == DEFAULT_COLUMNS:
                found.update(dict.fromkeys(default))
            elif name.lower() in known:
                found[known[name.lower()]] = None
            else:
                raise self._wrong("columns", name, f"among {', '.join(known.values())}")
        return list(found)

    def ledgers(self) -> list[LedgerId]:
        """The option `ledger`: one or more ledgers in any text form; a bare id is in scope `ledgerScopeId`, else 0."""
        scope_id = self.scope_id()
        return [LedgerId.parse(text, scope_id) for text in self.words("ledger")]

    def scope_id(self) -> int | None:
        """The option `ledgerScopeId`, unsigned; None where it is not given."""
        value = self.text("ledgerScopeId")
        return None if value is None else parse_scope_id(value)

    def digest_type(self) -> DigestType | None:
        """The option `digestType`; None where it is not given."""
        value = self.text("digestType")
        return None if value is None else DigestType.parse(value)

    def secret(self, name: str) -> bytes | None:
        """A secret where this runs: from the file that `<name>File` names, or the variable that `<name>Env` names.

        The options say where the secret is, never what it is: they are printed in plans. The newline at a file's end
        is no part of it. None where neither is given. Raises UsageError where it is not there.
        """
        file, variable = self.text(f"{name}File"), self.text(f"{name}Env")
        if file is not None and variable is not None:
            raise UsageError(f"{name}File and {name}Env are given", hint="give one of them")
        if file is not None:
            try:
                return Path(file).read_bytes().removesuffix(b"\n")
            except OSError as error:
                raise UsageError(f"{name}File {file}: {error.strerror or error}") from error
        if variable is not None:
            value = os.environ.get(variable)
            if value is None:
                raise UsageError(f"{name}Env {variable}: there is no such variable in this process's environment")
            return value.encode()
        return None

    def _wrong(self, name: str, value: str, expected: str) -> UsageError:
        return UsageError(f"{self._source}: option {name} {value!r}: {expected} is needed")
