"""The options of data sources: from strings, as Spark passes them, to checked values, and to an open cluster.

Options end up in plans and logs, so they contain no secrets: they name the file or environment variable that has the
secret where the task runs. Nothing here needs Spark.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Collection, Coroutine, Iterable, Mapping, Sequence
from difflib import get_close_matches
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from bkctl.disk import Closing
from bkctl.errors import BkctlError, UsageError, on_error
from bkctl.formats.entry import DigestType
from bkctl.ids import LedgerId, parse_bookie_address, parse_scope_id
from bkctl.metadata.cluster import Cluster, open_cluster
from bkctl.metadata.store import StoreSecurity, client_tls
from bkctl.metadata.uri import parse_uri
from bkctl.protocol.connection import new_event_loop

if TYPE_CHECKING:
    from bkctl.client.ledger import BookKeeper

_SIZE: Final = re.compile(r"([0-9]{1,18})\s*(|[kmgt]i?b?|b)", re.ASCII | re.IGNORECASE)
_UNITS: Final = {"": 0, "b": 0, "k": 10, "m": 20, "g": 30, "t": 40}
_FLAGS: Final = {"true": True, "false": False}

_Word = TypeVar("_Word", bound=StrEnum)
_Value = TypeVar("_Value")
T = TypeVar("T")


class Mode(StrEnum):
    """Ways to treat damage; the values are the words of the option `mode`."""

    #: The first damage fails the job.
    FAILFAST = "failfast"
    #: Each damage is a row whose column `damage` has file, offset and reason; data before the damage is read.
    PERMISSIVE = "permissive"

    def check(self, error: BkctlError) -> None:
        """Raise `error` in mode failfast; return in mode permissive, where the caller makes it a row."""
        if self is Mode.FAILFAST:
            raise error


class SourceOptions:
    """The options of one data source; names are case-insensitive.

    `path` and `paths` (a JSON list, as Spark's `load` passes several) are always allowed. Raises UsageError for a name
    that is not in `known`; every method raises it for a value that does not parse.
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
        """Return the option's text; None if it is not given."""
        return self._values.get(name.lower())

    def needed(self, name: str) -> str:
        """Return the option's text. Raises UsageError if it is not given, or empty."""
        value = self.text(name)
        if not value:
            raise UsageError(f"{self._source} needs the option {name}")
        return value

    def integer(self, name: str, default: int, minimum: int = 0) -> int:
        """Return a whole number of at least `minimum`."""
        is_number = re.fullmatch(r"[0-9]{1,18}", value := self.text(name) or "", re.ASCII) is not None
        found = int(value) if is_number and int(value) >= minimum else None
        return self._parsed(name, default, found, f"a whole number of at least {minimum}")

    def size_bytes(self, name: str, default: int) -> int:
        """Return a size of at least 1 byte: digits, or with a unit of KiB, MiB, GiB, TiB (`128m` is 128 MiB)."""
        match = _SIZE.fullmatch((self.text(name) or "").strip())
        size = int(match[1]) << _UNITS[match[2][:1].lower()] if match else 0
        expected = "a size of at least 1 byte, as 134217728 or 128MiB"
        return self._parsed(name, default, size if 0 < size < 1 << 62 else None, expected)

    def flag(self, name: str, default: bool = False) -> bool:
        """Return `true` or `false` as a boolean."""
        return self._parsed(name, default, _FLAGS.get((self.text(name) or "").lower()), "true or false")

    def choice(self, name: str, default: _Word) -> _Word:
        """Return a member of the enumeration of `default` by its value, case-insensitive."""
        words = {word.value.lower(): word for word in type(default)}
        found = words.get((self.text(name) or "").lower())
        return self._parsed(name, default, found, f"one of {', '.join(type(default))}")

    def _parsed(self, name: str, default: _Value, found: _Value | None, expected: str) -> _Value:
        """Return `default` if the option is not given, else what was found. Raises UsageError."""
        value = self.text(name)
        if value is None:
            return default
        if found is None:
            raise self._wrong(name, value, expected)
        return found

    def words(self, name: str) -> list[str]:
        """Return a list: words between commas, or a JSON list of strings. Empty if the option is not given."""
        value = (self.text(name) or "").strip()
        if not value.startswith("["):
            return [word for part in value.split(",") if (word := part.strip())]
        try:
            found = json.loads(value)
        except ValueError as error:
            raise self._wrong(name, value, "words between commas or a JSON list") from error
        if not all(isinstance(word, str) for word in found):
            raise self._wrong(name, value, "a JSON list of strings")
        return list(found)

    def offsets(self, name: str) -> dict[str, list[int]]:
        """Return offsets by file: a JSON object of files, each with a list of offsets in order."""
        value = self.text(name)
        if value is None:
            return {}
        try:
            found = json.loads(value)
            is_valid = all(
                offsets == sorted(set(offsets)) and all(type(offset) is int and offset > 0 for offset in offsets)
                for offsets in found.values()
            )
        except (ValueError, TypeError, AttributeError):
            is_valid = False
        if not is_valid:
            raise self._wrong(name, value, "a JSON object of files, each with a list of offsets in order,")
        return dict(found)

    def paths(self) -> list[str]:
        """Return the given files, directories and patterns, each once. Raises UsageError if there are none."""
        path = self.text("path")
        found = self.words("paths") if path is None else [path, *self.words("paths")]
        if not found:
            raise UsageError(f"{self._source} needs a path", hint="give load() a file, a directory or a pattern")
        return list(dict.fromkeys(found))

    def columns(self, default: Sequence[str], on_request: Iterable[str] = ()) -> list[str]:
        """Return the columns that the option `columns` names; `*`, or no option, stands for the `default` ones."""
        wanted = self.words("columns")
        if not wanted:
            return list(default)
        known = {name.lower(): name for name in (*default, *on_request)}
        found: dict[str, None] = {}
        for name in wanted:
            if name == "*":
                found.update(dict.fromkeys(default))
            elif name.lower() in known:
                found[known[name.lower()]] = None
            else:
                raise self._wrong("columns", name, f"among {', '.join(known.values())}")
        return list(found)

    def ledgers(self) -> list[LedgerId]:
        """Return the ledgers of the option `ledger` in any text form; a bare id is in scope `ledgerScopeId`, else 0."""
        scope_id = self.scope_id()
        return [LedgerId.parse(text, scope_id) for text in self.words("ledger")]

    def scope_id(self) -> int | None:
        """Return the option `ledgerScopeId`, unsigned; None if it is not given."""
        value = self.text("ledgerScopeId")
        return None if value is None else parse_scope_id(value)

    def digest_type(self) -> DigestType | None:
        """Return the option `digestType`; None if it is not given."""
        value = self.text("digestType")
        return None if value is None else DigestType.parse(value)

    def secret(self, name: str) -> bytes | None:
        """Return the secret in the file that `<name>File` names, or in the variable that `<name>Env` names.

        Plans show options, so options never contain a secret. File and variable belong to the calling process. A
        newline at the file's end is removed. None if neither option is given. Raises UsageError if it cannot be read.
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
                raise UsageError(f"{name}Env {variable}: the variable is not set in the environment of this process")
            return value.encode()
        return None

    def _wrong(self, name: str, value: str, expected: str) -> UsageError:
        return UsageError(f"{self._source}: option {name} {value!r}: {expected} is needed")


# --- the connection to a live cluster ---------------------------------------------------------------------------------

TIMEOUT_S_DEFAULT: Final = 30
#: Options of every source that connects to a cluster; only `metadataUri` is required.
CONNECTION_OPTIONS: Final = (
    "metadataUri", "metadataUser", "metadataPasswordFile", "metadataPasswordEnv", "metadataSasl", "metadataCreatorAcl",
    "metadataTls", "metadataTlsCa", "metadataTlsCert", "metadataTlsKey",
    "bookieAddress", "tlsCa", "tlsCert", "tlsKey", "timeoutSeconds",
)  # fmt: skip


class ClusterOptions:
    """The checked connection options of a data source; a plain value without secrets, which pickles.

    Raises UsageError, also for a `metadataUri` with a password in it; Unsupported for an unknown kind of store.
    """

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self.uri = options.needed("metadataUri")
        location = parse_uri(self.uri)
        if location.security is not None and location.security.password is not None:
            raise UsageError(
                "The metadata URI has a password in it, and options are printed in plans",
                hint="name the user by metadataUser (--metadata-user), and where the password is by "
                "metadataPasswordFile (--metadata-password-file) or metadataPasswordEnv",
            )
        self.timeout_s = float(options.integer("timeoutSeconds", TIMEOUT_S_DEFAULT, 1))
        self.bookie_addresses = dict(
            parse_bookie_address(text, "bookieAddress") for text in options.words("bookieAddress")
        )
        if (options.text("tlsCert") or options.text("tlsKey")) and not options.text("tlsCa"):
            raise UsageError("tlsCert and tlsKey go with tlsCa", hint="add the authorities' PEM file")
        for name in ("metadataSasl", "metadataCreatorAcl", "metadataTls"):
            options.flag(name)

    def open(self) -> Cluster:
        """Return the open cluster, which the caller closes; reads the secrets. Raises as `open_cluster`."""
        options = self._options
        password = options.secret("metadataPassword")
        ca = options.text("metadataTlsCa")
        security = StoreSecurity(
            tls=options.flag("metadataTls") or ca is not None,
            ca=ca,
            certificate=options.text("metadataTlsCert"),
            key=options.text("metadataTlsKey"),
            user=options.text("metadataUser"),
            password=None if password is None else password.decode("utf-8", "surrogateescape"),
            sasl=options.flag("metadataSasl"),
            creator_acl=options.flag("metadataCreatorAcl"),
        )
        return open_cluster(self.uri, timeout_s=self.timeout_s, security=security)

    def bookkeeper(self, cluster: Cluster) -> BookKeeper:
        """Return a client of `cluster` with these options' TLS, timeout and bookie addresses."""
        from bkctl.client.ledger import BookKeeper

        ca, certificate, key = map(self._options.text, ("tlsCa", "tlsCert", "tlsKey"))
        tls = None if ca is None else client_tls(ca, certificate, key)
        return BookKeeper(cluster, tls=tls, timeout_s=self.timeout_s, addresses=self.bookie_addresses)


class Client(Closing):
    """A cluster and its client, open until `close`; a context manager. `run` runs a coroutine to its end.

    The event loop runs only inside `run`, so a coroutine should leave no request in flight.
    """

    def __init__(self, options: ClusterOptions) -> None:
        self.cluster = options.open()
        with on_error(self.cluster.close):
            self._runner = asyncio.Runner(loop_factory=new_event_loop)
            self.bookkeeper = options.bookkeeper(self.cluster)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Return or raise the result of `work`."""
        return self._runner.run(work)

    def close(self) -> None:
        try:
            self._runner.run(self.bookkeeper.close())
        finally:
            self._runner.close()
            self.cluster.close()
