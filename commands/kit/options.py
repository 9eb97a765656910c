"""Option types that commands share, and where to connect.

A parameter annotated with one of the types below (`OneLedger`, `ScopeFilter`, `LedgerPassword` …) becomes one or more
arguments and options on the command line, and arrives in the command's function as one domain value.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from inspect import Parameter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple, TextIO

import typer

from bkctl.errors import UsageError
from bkctl.ids import LedgerId, parse_bookie_address, parse_scope_id, resolve_ledger

from .output import Output

if TYPE_CHECKING:
    from bkctl.metadata.store import StoreSecurity

PASSWORD_SIZE_BYTES_MAX: Final = 65536
TIMEOUT_S_DEFAULT: Final = 30.0
GLOBAL_PANEL: Final = "Connection and output"
WATCH_S_DEFAULT: Final = 2.0
WATCH_S_MIN: Final = 0.1


class Composite(NamedTuple):
    """Several command-line parameters that make one value: `resolve` gets their values by name, None where absent."""

    parameters: tuple[Parameter, ...]
    resolve: Callable[[Mapping[str, Any]], Any]


def parameter(name: str, annotation: Any, default: Any = None) -> Parameter:
    """A keyword-only parameter of a command's signature."""
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


# --- numbers --------------------------------------------------------------------------------------------------------

_SIZE: Final = re.compile(r"(\d{1,19})\s*(?:([kmgt])(i?)b?|b)?", re.ASCII | re.IGNORECASE)
_DURATION: Final = re.compile(r"(\d{1,9}(?:\.\d{1,6})?)\s*(ms|s|m|h|d)?", re.ASCII)
_NUMBER: Final = re.compile(r"-?[0-9]{1,19}|0[xX][0-9a-fA-F]{1,16}", re.ASCII)


def parse_size(text: str, what: str) -> int:
    """Bytes: a number, with KB, MB, GB, TB (powers of 1000) or K, KiB, M, MiB … (powers of 1024).

    Raises UsageError, naming `what`.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise UsageError(
            f"{what}: not a size: {text!r}", hint="give bytes, or a number with KiB, MiB, GiB, KB, MB or GB"
        )
    power = " kmgt".index(match[2].lower()) if match[2] else 0
    decimal = bool(match[2]) and not match[3] and text.strip().lower().endswith("b")
    unit: int = (1000 if decimal else 1024) ** power
    return int(match[1]) * unit


def parse_duration(text: str, what: str) -> float:
    """Seconds: a number, with ms, s, m, h or d. Raises UsageError, naming `what`."""
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"{what}: not a duration: {text!r}", hint="give seconds, or a number with ms, s, m, h or d")
    return float(match[1]) * {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86400}[match[2] or "s"]


def is_duration(text: str) -> bool:
    """Whether `parse_duration` reads it."""
    return _DURATION.fullmatch(text) is not None


def parse_number(text: str, what: str) -> int:
    """A decimal (also negative) or 0x number of at most 64 bits. Raises UsageError, naming `what`."""
    if not _NUMBER.fullmatch(text) or not -(1 << 63) <= int(text, 0 if text[1:2] in "xX" else 10) < 1 << 64:
        raise UsageError(f"{what}: not a number: {text!r}", hint="give a decimal or 0x number of at most 64 bits")
    return int(text, 0 if text[1:2] in "xX" else 10)


def _converted(name: str, option: Any, convert: Callable[[str], Any], default: str | None = None) -> Composite:
    """One option whose text `convert` reads."""

    def resolve(values: Mapping[str, Any]) -> Any:
        return None if values[name] is None else convert(values[name])

    return Composite((parameter(name, Annotated[str, option], default),), resolve)


def _flags(short: str | None, flag: str) -> tuple[str, ...]:
    return (flag,) if short is None else (short, flag)


def number_option(flag: str, help: str) -> Composite:
    """An option for an entry id, a position or an offset: decimal or 0x; None when absent."""
    name = flag.removeprefix("--").replace("-", "_")
    return _converted(
        f"{name}_number", typer.Option(flag, help=help, metavar="N"), lambda text: parse_number(text, flag)
    )


def count_option(flag: str, help: str, *, default: int | None = None, short: str | None = None) -> Composite:
    """An option for a count that is 1 or more."""

    def convert(text: str) -> int:
        number = parse_number(text, flag)
        if number < 1:
            raise UsageError(f"{flag} {text}: must be 1 or more")
        return number

    name = flag.removeprefix("--").replace("-", "_")
    option = typer.Option(*_flags(short, flag), help=help, metavar="N", show_default=default is not None)
    return _converted(f"{name}_count", option, convert, None if default is None else str(default))


def size_option(flag: str, help: str, *, default: str | None = None) -> Composite:
    """An option for a size in bytes."""
    name = flag.removeprefix("--").replace("-", "_")
    option = typer.Option(flag, help=help, metavar="SIZE", show_default=default is not None)
    return _converted(f"{name}_size", option, lambda text: parse_size(text, flag), default)


def duration_option(flag: str, help: str, *, default: str | None = None, short: str | None = None) -> Composite:
    """An option for a duration, in seconds."""
    name = flag.removeprefix("--").replace("-", "_")
    option = typer.Option(*_flags(short, flag), help=help, metavar="DURATION", show_default=default is not None)
    return _converted(f"{name}_duration", option, lambda text: parse_duration(text, flag), default)


def _byte_rate(text: str) -> int:
    rate = parse_size(text.strip().removesuffix("/s"), "--rate")
    if rate < 1:
        raise UsageError(f"--rate {text}: must be more than 0")
    return rate


#: `--rate` of what copies entries: bytes a second, None for no limit.
ByteRate = Annotated[
    int | None,
    _converted(
        "byte_rate",
        typer.Option("--rate", metavar="RATE", help="Copy at most so much a second: 50MB/s, 20MiB."),
        _byte_rate,
    ),
]


class BinaryFormat(StrEnum):
    """How bytes are shown."""

    BASE64 = "base64"
    UTF8 = "utf8"
    HEX = "hex"
    RAW = "raw"


#: `--format` of what prints bytes; None: base64 in json, ndjson and csv.
BinaryFormatOption = Annotated[
    BinaryFormat | None,
    typer.Option(
        "--format", help="How bytes are shown: base64, utf8, hex, or raw (nothing else is printed).", metavar="FORMAT"
    ),
]


def _protocol(values: Mapping[str, Any]) -> Any:
    from bkctl.protocol.messages import Protocol

    return Protocol.V2 if values["protocol_version"] is ProtocolVersion.V2 else Protocol.V3


class ProtocolVersion(StrEnum):
    """How to speak to bookies."""

    V2 = "v2"
    V3 = "v3"


#: `--protocol` as a bkctl.protocol.messages.Protocol.
ProtocolOption = Annotated[
    Any,
    Composite(
        (
            parameter(
                "protocol_version",
                Annotated[
                    ProtocolVersion,
                    typer.Option("--protocol", metavar="v2|v3", help="Wire protocol; v2 carries no ledger scope."),
                ],
                ProtocolVersion.V3,
            ),
        ),
        _protocol,
    ),
]


def _digest_type(text: str) -> Any:
    from bkctl.formats.entry import DigestType

    return DigestType.parse(text)


def digest_type_option(help: str) -> Composite:
    """`--digest TYPE`, also `--digest-type`, as a bkctl.formats.entry.DigestType."""
    option = typer.Option("--digest", "--digest-type", metavar="TYPE", help=help)
    return _converted("digest_type_name", option, _digest_type)


#: What `--digest` without a type stands for, where it may be without: that digests be checked.
ANY_DIGEST: Final = "any"
DIGEST_NAMES: Final = frozenset(("CRC32", "CRC32C", "HMAC", "MAC", "DUMMY"))

#: What `--suspend` and `--resume` of `bookie gc` take, in capitals, and what they stand for without it.
COMPACTIONS: Final = frozenset(("MAJOR", "MINOR", "BOTH"))
BOTH_COMPACTIONS: Final = "both"


class DigestCheck(NamedTuple):
    """`--digest [TYPE]`: whether it was given, and which type (None: found out ledger by ledger)."""

    wanted: bool
    digest_type: Any


def _digest_check(values: Mapping[str, Any]) -> DigestCheck:
    name = values["digest_type_name"]
    return DigestCheck(name is not None, None if name in (None, ANY_DIGEST) else _digest_type(name))


#: `--digest [TYPE]`, also `--digest-type TYPE`.
DigestToCheck = Annotated[
    DigestCheck,
    Composite(
        (
            parameter(
                "digest_type_name",
                Annotated[
                    str,
                    typer.Option(
                        "--digest",
                        "--digest-type",
                        metavar="[TYPE]",
                        help="Check that each entry matches its digest; ledgers of scope 0 are of TYPE (CRC32C, CRC32, "
                        "HMAC, DUMMY; default: found out ledger by ledger).",
                    ),
                ],
            ),
        ),
        _digest_check,
    ),
]


def _key_values(values: Mapping[str, Any]) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for text in values["custom_metadata"] or ():
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise UsageError(f"--custom-metadata {text!r}: not KEY=VALUE")
        if key in found:
            raise UsageError(f"--custom-metadata {key!r} is given twice")
        found[key] = os.fsencode(value)
    return found


#: `--custom-metadata KEY=VALUE`, repeatable.
CustomMetadata = Annotated[
    dict[str, bytes],
    Composite(
        (
            parameter(
                "custom_metadata",
                Annotated[
                    list[str],
                    typer.Option("--custom-metadata", metavar="KEY=VALUE", help="Kept in the metadata; repeatable."),
                ],
            ),
        ),
        _key_values,
    ),
]


class Shape(NamedTuple):
    """Sizes and digest of a new ledger."""

    ensemble_size: int
    write_quorum_size: int
    ack_quorum_size: int
    digest_type: Any


def _shape(values: Mapping[str, Any]) -> Shape:
    return Shape(
        values["ensemble_size"], values["write_quorum"], values["ack_quorum"], _digest_type(values["digest_type_name"])
    )


def _shape_size(name: str, flag: str, help: str, default: int) -> Parameter:
    return parameter(name, Annotated[int, typer.Option(flag, metavar="N", help=help, show_default=True)], default)


#: Ensemble size, quorums and digest type of a ledger that is to be created.
LedgerShape = Annotated[
    Shape,
    Composite(
        (
            _shape_size("ensemble_size", "--ensemble-size", "Bookies that a fragment is spread over.", 3),
            _shape_size("write_quorum", "--write-quorum", "Bookies that get each entry.", 2),
            _shape_size("ack_quorum", "--ack-quorum", "Bookies that must have an entry before it counts.", 2),
            parameter(
                "digest_type_name",
                Annotated[
                    str,
                    typer.Option(
                        "--digest-type", metavar="TYPE", help="CRC32C, CRC32, HMAC or DUMMY.", show_default=True
                    ),
                ],
                "CRC32C",
            ),
        ),
        _shape,
    ),
]


# --- changing and watching ------------------------------------------------------------------------------------------

#: `--dry-run` of what changes something.
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show what would be changed, and change nothing.")]

#: `--undo FILE`; see Run.undo.
UndoOption = Annotated[
    Path | None,
    typer.Option(
        "--undo",
        metavar="FILE",
        help="Where to keep what 'metadata undo' needs: a new file (default: in the user's state directory), or none.",
    ),
]

KeepGoing = Annotated[
    bool, typer.Option("--keep-going", help="Go on past failures, and report them at the end (exit code 3 then).")
]


def _watch_interval(text: str) -> float:
    seconds = parse_duration(text, "--watch")
    if seconds < WATCH_S_MIN:
        raise UsageError(f"--watch {text}: must be {WATCH_S_MIN} s or more")
    return seconds


def watch_option(help: str) -> Composite:
    """`--watch [SECONDS]`: the seconds between looks, None when absent.

    Where the command takes arguments, seconds are given as `--watch=SECONDS`.
    """
    return _converted("watch_interval", typer.Option("--watch", metavar="[SECONDS]", help=help), _watch_interval)


#: `--watch` of what goes on until the user ends it; see Run.watch.
WatchOption = Annotated[
    float | None, watch_option("Show what changes, until Ctrl-C; --watch=SECONDS looks so often (default 2).")
]


# --- ledgers --------------------------------------------------------------------------------------------------------

LEDGER_LINE_LENGTH_MAX: Final = 1 << 20
LEDGER_FORMS: Final = "decimal, 0x hex, SCOPE:ID, 32 hex digits (qualified name) or UUID"

_LEDGER_ID = parameter(
    "ledger_id",
    Annotated[
        str, typer.Option("--ledger-id", metavar="ID", help="Ledger id; a negative decimal is two's complement.")
    ],
)
_LEDGER_SCOPE_ID = parameter(
    "ledger_scope_id",
    Annotated[str, typer.Option("--ledger-scope-id", metavar="SCOPE", help="Ledger scope id of a bare ledger id.")],
)
_LEDGER_QUALIFIED_NAME = parameter(
    "ledger_qualified_name",
    Annotated[
        str,
        typer.Option("--ledger-qualified-name", metavar="NAME", help="Ledger as 32 hex digits or UUID, scope first."),
    ],
)
_LEDGER_PARAMETERS = (_LEDGER_ID, _LEDGER_SCOPE_ID, _LEDGER_QUALIFIED_NAME)


def _one_ledger(values: Mapping[str, Any]) -> LedgerId:
    ledger = resolve_ledger(
        values["ledger"],
        ledger_id=values["ledger_id"],
        ledger_scope_id=values["ledger_scope_id"],
        ledger_qualified_name=values["ledger_qualified_name"],
    )
    if ledger is None:
        raise UsageError("No ledger is given", hint=f"name it as {LEDGER_FORMS}")
    return ledger


def _many_ledgers(values: Mapping[str, Any]) -> list[LedgerId]:
    texts: list[str] = values["ledgers"] or []
    if len(texts) < 2:
        return [_one_ledger({**values, "ledger": texts[0] if texts else None})]
    for name, flag in (("ledger_id", "--ledger-id"), ("ledger_qualified_name", "--ledger-qualified-name")):
        if values[name] is not None:
            raise UsageError(f"{flag} names one ledger, and {len(texts)} are given", hint="give all as arguments")
    return [_one_ledger({**values, "ledger": text}) for text in texts]


#: The one ledger that a command acts on, named by argument or options.
OneLedger = Annotated[
    LedgerId,
    Composite(
        (
            parameter(
                "ledger",
                Annotated[
                    str,
                    typer.Argument(metavar="LEDGER", help=f"The ledger: {LEDGER_FORMS}.", show_default=False),
                ],
            ),
            *_LEDGER_PARAMETERS,
        ),
        _one_ledger,
    ),
]

#: The arguments and options that name ledgers.
MANY_LEDGERS: Final = Composite(
    (
        parameter(
            "ledgers",
            Annotated[
                list[str],
                typer.Argument(metavar="LEDGER", help=f"The ledgers: {LEDGER_FORMS}.", show_default=False),
            ],
        ),
        *_LEDGER_PARAMETERS,
    ),
    _many_ledgers,
)
#: One ledger or more.
ManyLedgers = Annotated[list[LedgerId], MANY_LEDGERS]


def _any_ledgers(values: Mapping[str, Any]) -> list[LedgerId]:
    named = any(values[name] is not None for name in ("ledger_id", "ledger_qualified_name")) or values["ledgers"]
    return _many_ledgers(values) if named else []


#: Ledgers by argument; none named: an empty list.
LedgersOfExport = Annotated[
    list[LedgerId],
    Composite(
        (
            parameter(
                "ledgers",
                Annotated[
                    list[str],
                    typer.Argument(
                        metavar="LEDGER", help=f"Only these ledgers: {LEDGER_FORMS} (default: all).", show_default=False
                    ),
                ],
            ),
            *_LEDGER_PARAMETERS,
        ),
        _any_ledgers,
    ),
]


def _ledgers_or_file(values: Mapping[str, Any]) -> list[LedgerId]:
    file: str | None = values["from_file"]
    if file is None:
        return _many_ledgers(values)
    ledgers = _any_ledgers(values)
    scope = None if values["ledger_scope_id"] is None else parse_scope_id(values["ledger_scope_id"])
    ledgers.extend(_read_ledgers(file, scope))
    return ledgers


def _read_ledgers(file: str, scope_id: int | None) -> list[LedgerId]:
    """The ledgers in a file: one a line in any text form, or an object of ndjson; empty lines and # comments aside."""
    import sys

    if file == "-":
        if sys.stdin is None:
            raise UsageError("stdin is closed, so it names no ledgers")
        return _ledgers_in(sys.stdin, "stdin", scope_id)
    with open(file, encoding="utf-8", errors="replace") as stream:
        return _ledgers_in(stream, file, scope_id)


def _ledgers_in(lines: TextIO, where: str, scope_id: int | None) -> list[LedgerId]:
    ledgers = []
    number = 0
    while line := lines.readline(LEDGER_LINE_LENGTH_MAX):
        number += 1
        if len(line) == LEDGER_LINE_LENGTH_MAX:
            raise UsageError(f"{where} line {number}: longer than {LEDGER_LINE_LENGTH_MAX} characters")
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        try:
            ledgers.append(LedgerId.parse(_ledger_in_json(text) if text.startswith("{") else text, scope_id))
        except UsageError as error:
            raise UsageError(f"{where} line {number}: {error.message}", hint=error.hint) from error
    return ledgers


def _ledger_in_json(text: str) -> str:
    import json

    try:
        name = json.loads(text).get("ledgerQualifiedName")
    except (ValueError, RecursionError):
        name = None
    if not isinstance(name, str):
        raise UsageError("an object without ledgerQualifiedName", hint="give what 'bkctl ledger list -o ndjson' prints")
    return name


#: Ledgers by argument, or in a file.
LedgersOrFile = Annotated[
    list[LedgerId],
    Composite(
        (
            parameter(
                "ledgers",
                Annotated[
                    list[str],
                    typer.Argument(metavar="LEDGER", help=f"The ledgers: {LEDGER_FORMS}.", show_default=False),
                ],
            ),
            parameter(
                "from_file",
                Annotated[
                    str,
                    typer.Option(
                        "--from-file",
                        metavar="FILE",
                        help="The ledgers in this file (-: stdin), one a line, as 'ledger list -o id' prints them.",
                    ),
                ],
            ),
            *_LEDGER_PARAMETERS,
        ),
        _ledgers_or_file,
    ),
]


class NewLedger(NamedTuple):
    """What `ledger write` was asked to create: a given id, or one that is generated in `scope_id`."""

    ledger: LedgerId | None
    scope_id: int


def _new_ledger(values: Mapping[str, Any]) -> NewLedger:
    scope_text, name, id_text = values["ledger_scope_id"], values["ledger_qualified_name"], values["ledger_id"]
    if values["uuid"]:
        if (id_text, name, scope_text) != (None, None, None):
            raise UsageError("--uuid makes a new id, and another option gives one", hint="drop one of the two")
        ledger = LedgerId.random()
        return NewLedger(ledger, ledger.scope_id)
    if id_text is None and name is None:
        return NewLedger(None, 0 if scope_text is None else parse_scope_id(scope_text))
    given = resolve_ledger(None, ledger_id=id_text, ledger_scope_id=scope_text, ledger_qualified_name=name)
    assert given is not None
    return NewLedger(given, given.scope_id)


#: The id of a ledger that is to be created.
LedgerToCreate = Annotated[
    NewLedger,
    Composite(
        (
            parameter("uuid", Annotated[bool, typer.Option("--uuid", help="A random UUID as the 128-bit id.")], False),
            *_LEDGER_PARAMETERS,
        ),
        _new_ledger,
    ),
]


def _scope_filter(default: int | None) -> Callable[[Mapping[str, Any]], int | None]:
    def resolve(values: Mapping[str, Any]) -> int | None:
        text = values["ledger_scope_id"]
        if values["all_scopes"]:
            if text is not None:
                raise UsageError("--all-scopes and --ledger-scope-id are given", hint="give one of them")
            return None
        return default if text is None else parse_scope_id(text)

    return resolve


def _scope_parameters(help: str) -> tuple[Parameter, ...]:
    return (
        parameter("ledger_scope_id", Annotated[str, typer.Option("--ledger-scope-id", metavar="SCOPE", help=help)]),
        parameter("all_scopes", Annotated[bool, typer.Option("--all-scopes", help="Ledgers of every scope.")], False),
    )


#: The scope that a command lists (scope 0 when none is named); None: all scopes.
ScopeToList = Annotated[
    int | None, Composite(_scope_parameters("Only ledgers of this scope (default 0)."), _scope_filter(0))
]

#: The scope that a command looks at (None: all scopes, as when none is named).
ScopeOfAny = Annotated[
    int | None, Composite(_scope_parameters("Only ledgers of this scope (default: all)."), _scope_filter(None))
]


#: `--ledger`, repeatable, as a part of a Composite.
SOME_LEDGERS: Final = parameter(
    "some_ledgers",
    Annotated[
        list[str], typer.Option("--ledger", metavar="LEDGER", help=f"Only this ledger, repeatable: {LEDGER_FORMS}.")
    ],
)


class ScanFilter(NamedTuple):
    """Which ledgers a scan shows: one ledger, one scope, or (both None) all."""

    ledger: LedgerId | None
    scope_id: int | None


def _scan_filter(values: Mapping[str, Any]) -> ScanFilter:
    scope = _scope_filter(None)(values)
    if values["ledger_filter"] is None:
        return ScanFilter(None, scope)
    return ScanFilter(LedgerId.parse(values["ledger_filter"], scope), scope)


#: `--ledger`, `--ledger-scope-id`, `--all-scopes` of a scan, as a ScanFilter; a bare `--ledger` is in the scope given.
SCAN_LEDGERS: Final = Composite(
    (
        parameter(
            "ledger_filter",
            Annotated[str, typer.Option("--ledger", metavar="LEDGER", help=f"Only this ledger: {LEDGER_FORMS}.")],
        ),
        *_scope_parameters("Only ledgers of this scope."),
    ),
    _scan_filter,
)


# --- passwords ------------------------------------------------------------------------------------------------------


def read_password_file(path: Path) -> bytes:
    """The password in a file, without one last line end. Raises UsageError for a file that is too large, OSError."""
    with open(path, "rb") as stream:
        content = stream.read(PASSWORD_SIZE_BYTES_MAX + 1)
    if len(content) > PASSWORD_SIZE_BYTES_MAX:
        raise UsageError(f"{path}: larger than {PASSWORD_SIZE_BYTES_MAX} bytes, so not a password file")
    return content.removesuffix(b"\n").removesuffix(b"\r")


def _password(values: Mapping[str, Any]) -> bytes:
    text, file = values["password"], values["password_file"]
    if text is not None and file is not None:
        raise UsageError("--password and --password-file are given", hint="give one of them")
    if file is not None:
        return read_password_file(file)
    if text is None:
        text = os.environ.get("BKCTL_LEDGER_PASSWORD", "")
    return os.fsencode(text)


#: The ledger's password as bytes; empty when none is given.
LedgerPassword = Annotated[
    bytes,
    Composite(
        (
            parameter(
                "password",
                Annotated[
                    str,
                    typer.Option(
                        "--password",
                        metavar="TEXT",
                        help="Ledger password (default empty; also BKCTL_LEDGER_PASSWORD). Other users see it in ps.",
                    ),
                ],
            ),
            parameter(
                "password_file",
                Annotated[
                    Path,
                    typer.Option("--password-file", metavar="FILE", help="File with the password; one last LF is cut."),
                ],
            ),
        ),
        _password,
    ),
]


class EntryRange(NamedTuple):
    """`--from` and `--to`, both inclusive; None where not given."""

    first: int | None
    last: int | None


def _entry_range(values: Mapping[str, Any]) -> EntryRange:
    bounds: list[int | None] = []
    for name, flag in (("range_from", "--from"), ("range_to", "--to")):
        text = values[name]
        number = None if text is None else parse_number(text, flag)
        if number is not None and not 0 <= number < 1 << 63:
            raise UsageError(f"{flag} {text}: entry ids are 0 or more, below 2^63")
        bounds.append(number)
    first, last = bounds
    if first is not None and last is not None and first > last:
        raise UsageError(f"--from {first} is after --to {last}")
    return EntryRange(first, last)


#: `--from` and `--to` of entry ids.
Entries = Annotated[
    EntryRange,
    Composite(
        (
            parameter(
                "range_from",
                Annotated[str, typer.Option("--from", metavar="ENTRY", help="First entry id (default 0).")],
            ),
            parameter(
                "range_to",
                Annotated[str, typer.Option("--to", metavar="ENTRY", help="Last entry id, itself included.")],
            ),
        ),
        _entry_range,
    ),
]


# --- global options -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Globals:
    """The options that stand before the group or after the command; None where not given."""

    metadata_uri: str | None = None
    conf: Path | None = None
    context: str | None = None
    bookie_addresses: tuple[str, ...] = ()
    tls_ca: Path | None = None
    tls_certificate: Path | None = None
    tls_key: Path | None = None
    metadata_tls: bool = False
    metadata_tls_ca: Path | None = None
    metadata_tls_certificate: Path | None = None
    metadata_tls_key: Path | None = None
    metadata_user: str | None = None
    metadata_password_file: Path | None = None
    metadata_sasl: bool = False
    metadata_creator_acl: bool = False
    output: Output | None = None
    timeout_s: float | None = None
    yes: bool = False

    def over(self, earlier: Globals) -> Globals:
        """These options where they are given, else the `earlier` ones. What names the cluster is up to connect_to."""
        merged: dict[str, Any] = {}
        for each in fields(self):
            mine = getattr(self, each.name)
            merged[each.name] = getattr(earlier, each.name) if mine is None or mine is False else mine
        merged["bookie_addresses"] = earlier.bookie_addresses + self.bookie_addresses
        return Globals(**merged)

    def tls_files(self) -> tuple[str | None, str | None, str | None]:
        """The PEM files of the authorities, of our certificate and of its key."""
        return _text(self.tls_ca), _text(self.tls_certificate), _text(self.tls_key)


def _global(name: str, annotation: Any, *declarations: str, default: Any = None, **settings: Any) -> Parameter:
    option = typer.Option(*declarations, rich_help_panel=GLOBAL_PANEL, **settings)
    return parameter(name, Annotated[annotation, option], default)


def global_parameters(*, connects: bool, asks: bool, full: bool = False) -> tuple[Parameter, ...]:
    """The options accepted before the group and after the command. Those that the command has no use for are hidden.

    How to log in to the metadata store is shown by the `full` help alone, the program's own.
    """
    return (
        _global(
            "g_metadata_uri",
            str,
            "--metadata-uri",
            "-u",
            metavar="URI",
            hidden=not connects,
            help="Metadata store: zk://HOST:PORT/ledgers, etcd://HOST:PORT/SCOPE, sqlite:///FILE. [BKCTL_METADATA_URI]",
        ),
        _global(
            "g_conf",
            Path,
            "--conf",
            "-c",
            metavar="FILE",
            help="A bookie's bk_server.conf (or Pulsar's bookkeeper.conf): its cluster and directories. [BKCTL_CONF]",
        ),
        _global(
            "g_context",
            str,
            "--context",
            "-x",
            metavar="CONTEXT",
            hidden=not connects,
            help="A named connection of the configuration file. [BKCTL_CONTEXT]",
        ),
        _global(
            "g_bookie_address",
            list[str],
            "--bookie-address",
            metavar="ID=HOST:PORT",
            hidden=not connects,
            help="Reach bookie ID at HOST:PORT instead of its advertised one; repeatable. [BKCTL_BOOKIE_ADDRESS]",
        ),
        _global(
            "g_tls_ca",
            Path,
            "--tls-ca",
            metavar="FILE",
            hidden=not connects,
            help="Talk TLS to the bookies; PEM file of the authorities that sign their certificates. [BKCTL_TLS_CA]",
        ),
        _global(
            "g_tls_certificate",
            Path,
            "--tls-cert",
            metavar="FILE",
            hidden=not connects,
            help="Our own certificate for bookies that ask for one (PEM, with --tls-ca). [BKCTL_TLS_CERT]",
        ),
        _global(
            "g_tls_key",
            Path,
            "--tls-key",
            metavar="FILE",
            hidden=not connects,
            help="Its private key (PEM). [BKCTL_TLS_KEY]",
        ),
        _global(
            "g_metadata_tls",
            bool,
            "--metadata-tls",
            default=False,
            hidden=not full,
            help="Talk TLS to the metadata store. [BKCTL_METADATA_TLS=1]",
        ),
        _global(
            "g_metadata_tls_ca",
            Path,
            "--metadata-tls-ca",
            metavar="FILE",
            hidden=not full,
            help="The same, with these authorities (PEM) instead of the system's. [BKCTL_METADATA_TLS_CA]",
        ),
        _global(
            "g_metadata_tls_certificate",
            Path,
            "--metadata-tls-cert",
            metavar="FILE",
            hidden=not full,
            help="Our own certificate for the metadata store (PEM). [BKCTL_METADATA_TLS_CERT]",
        ),
        _global(
            "g_metadata_tls_key",
            Path,
            "--metadata-tls-key",
            metavar="FILE",
            hidden=not full,
            help="Its private key (PEM). [BKCTL_METADATA_TLS_KEY]",
        ),
        _global(
            "g_metadata_user",
            str,
            "--metadata-user",
            metavar="NAME",
            hidden=not full,
            help="Log in to the metadata store: etcd, or ZooKeeper's digest scheme. [BKCTL_METADATA_USER]",
        ),
        _global(
            "g_metadata_password_file",
            Path,
            "--metadata-password-file",
            metavar="FILE",
            hidden=not full,
            help="File with that user's password. [BKCTL_METADATA_PASSWORD_FILE, or BKCTL_METADATA_PASSWORD itself]",
        ),
        _global(
            "g_metadata_sasl",
            bool,
            "--metadata-sasl",
            default=False,
            hidden=not full,
            help="Log in to ZooKeeper by SASL (DIGEST-MD5) instead. [BKCTL_METADATA_SASL=1]",
        ),
        _global(
            "g_metadata_creator_acl",
            bool,
            "--metadata-creator-acl",
            default=False,
            hidden=not full,
            help="Create ZooKeeper nodes for that user alone, as zkEnableSecurity in --conf. "
            "[BKCTL_METADATA_CREATOR_ACL=1]",
        ),
        _global(
            "g_timeout",
            str,
            "--timeout",
            metavar="DURATION",
            hidden=not connects,
            help="Longest wait without progress from a server (default 30s). [BKCTL_TIMEOUT]",
        ),
        _global(
            "g_output",
            Output,
            "--output",
            "-o",
            metavar="FORM",
            help=f"Form of output: {', '.join(Output)} (default table). [BKCTL_OUTPUT]",
        ),
        _global("g_yes", bool, "--yes", "-y", default=False, hidden=not asks, help="Do not ask before destroying."),
    )


def read_globals(values: Mapping[str, Any]) -> Globals:
    """The values of `global_parameters`."""
    return Globals(
        metadata_uri=values["g_metadata_uri"],
        conf=values["g_conf"],
        context=values["g_context"],
        bookie_addresses=tuple(values["g_bookie_address"] or ()),
        tls_ca=values["g_tls_ca"],
        tls_certificate=values["g_tls_certificate"],
        tls_key=values["g_tls_key"],
        metadata_tls=bool(values["g_metadata_tls"]),
        metadata_tls_ca=values["g_metadata_tls_ca"],
        metadata_tls_certificate=values["g_metadata_tls_certificate"],
        metadata_tls_key=values["g_metadata_tls_key"],
        metadata_user=values["g_metadata_user"],
        metadata_password_file=values["g_metadata_password_file"],
        metadata_sasl=bool(values["g_metadata_sasl"]),
        metadata_creator_acl=bool(values["g_metadata_creator_acl"]),
        output=values["g_output"],
        timeout_s=None if values["g_timeout"] is None else parse_duration(values["g_timeout"], "--timeout"),
        yes=bool(values["g_yes"]),
    )


def environment_globals(environment: Mapping[str, str]) -> Globals:
    """The options that the environment gives as BKCTL_… variables; an empty variable counts as absent."""

    def get(name: str) -> str | None:
        return environment.get(f"BKCTL_{name}") or None

    def path(name: str) -> Path | None:
        text = get(name)
        return None if text is None else Path(text)

    def flag(name: str) -> bool:
        text = (get(name) or "").lower()
        if text not in ("", "0", "1", "false", "true", "no", "yes"):
            raise UsageError(f"BKCTL_{name}={text!r}: not a switch", hint="set it to 1 or 0")
        return text in ("1", "true", "yes")

    output, timeout = get("OUTPUT"), get("TIMEOUT")
    if output is not None and output not in set(Output):
        raise UsageError(f"BKCTL_OUTPUT={output!r}: not a form of output", hint=f"one of {', '.join(Output)}")
    return Globals(
        metadata_uri=get("METADATA_URI"),
        conf=path("CONF"),
        context=get("CONTEXT"),
        bookie_addresses=tuple((get("BOOKIE_ADDRESS") or "").replace(",", " ").split()),
        tls_ca=path("TLS_CA"),
        tls_certificate=path("TLS_CERT"),
        tls_key=path("TLS_KEY"),
        metadata_tls=flag("METADATA_TLS"),
        metadata_tls_ca=path("METADATA_TLS_CA"),
        metadata_tls_certificate=path("METADATA_TLS_CERT"),
        metadata_tls_key=path("METADATA_TLS_KEY"),
        metadata_user=get("METADATA_USER"),
        metadata_password_file=path("METADATA_PASSWORD_FILE"),
        metadata_sasl=flag("METADATA_SASL"),
        metadata_creator_acl=flag("METADATA_CREATOR_ACL"),
        output=None if output is None else Output(output),
        timeout_s=None if timeout is None else parse_duration(timeout, "BKCTL_TIMEOUT"),
    )


# --- where to connect -----------------------------------------------------------------------------------------------


class Connection(NamedTuple):
    """The metadata store to open, and what named it (for messages).

    `context` is the context's name where one did; `settings` are its other settings, for what no option says.
    """

    uri: str
    source: str
    context: str | None = None
    settings: Globals = Globals()


def connect_to(levels: list[tuple[str, Globals]], environment: Mapping[str, str]) -> Connection:
    """Where to connect: the first of `levels` (nearest first) that names a place, current context, local cluster.

    Within a level a URI goes before a configuration file, and that before a context.
    Raises UsageError when nothing names a cluster, NotFound for a context or file that is not there.
    """
    from bkctl.config import read_properties

    without: Path | None = None
    for source, options in levels:
        if options.metadata_uri is not None:
            return Connection(options.metadata_uri, f"--metadata-uri {source}")
        if options.conf is not None:
            uri = read_properties(options.conf).metadata_service_uri
            if uri is not None:
                return Connection(uri, str(options.conf))
            without = without or options.conf
        if options.context is not None:
            return _context(options.context, environment)
    if without is not None:
        raise UsageError(f"{without}: no metadataServiceUri and no zkServers", hint="add --metadata-uri")
    from .contexts import Contexts

    current = Contexts.read(environment).current
    if current is not None:
        return _context(current, environment)
    if (local := _local_cluster()) is not None:
        return Connection(local, "the local cluster")
    raise UsageError(
        "No cluster is named", hint="add --metadata-uri URI or --conf FILE, or start one with 'bkctl cluster up'"
    )


def other_connection(text: str, environment: Mapping[str, str]) -> Connection:
    """Where `text` leads: a metadata URI, or `context:NAME`, with that context's login. Raises NotFound, UsageError."""
    prefix, colon, name = text.partition(":")
    if prefix == "context" and colon:
        return _context(name, environment)
    return Connection(text, "its URI")


class Login(NamedTuple):
    """The user of a metadata store that is not the connection's; None where none is named."""

    user: str | None
    password_file: Path | None

    def over(self, settings: Globals) -> Globals:
        """The settings with this login in place of theirs, if there is one."""
        if self.user is None and self.password_file is None:
            return settings
        return replace(settings, metadata_user=self.user, metadata_password_file=self.password_file)


NO_LOGIN: Final = Login(None, None)

#: The login of the store that --to names.
LoginOfTarget = Annotated[
    Login,
    Composite(
        (
            parameter(
                "to_user",
                Annotated[
                    str | None,
                    typer.Option("--to-user", metavar="NAME", help="Log in to the target; never with --metadata-user."),
                ],
            ),
            parameter(
                "to_password_file",
                Annotated[
                    Path | None,
                    typer.Option(
                        "--to-password-file",
                        metavar="FILE",
                        help="File with that user's password. For TLS or SASL name a context: --to context:NAME.",
                    ),
                ],
            ),
        ),
        lambda values: Login(values["to_user"], values["to_password_file"]),
    ),
]


def _context(name: str, environment: Mapping[str, str]) -> Connection:
    from .contexts import Contexts

    settings = Contexts.read(environment).get(name)
    files = {key: None if getattr(settings, key) is None else Path(getattr(settings, key)) for key in _CONTEXT_FILES}
    return Connection(
        settings.metadata_uri,
        f"context {name}",
        name,
        Globals(
            bookie_addresses=settings.bookie_address,
            metadata_tls=settings.metadata_tls,
            metadata_user=settings.metadata_user,
            metadata_sasl=settings.metadata_sasl,
            metadata_creator_acl=settings.metadata_creator_acl,
            tls_ca=files["tls_ca"],
            tls_certificate=files["tls_cert"],
            tls_key=files["tls_key"],
            metadata_tls_ca=files["metadata_tls_ca"],
            metadata_tls_certificate=files["metadata_tls_cert"],
            metadata_tls_key=files["metadata_tls_key"],
            metadata_password_file=files["metadata_password_file"],
        ),
    )


_CONTEXT_FILES: Final = (
    "tls_ca",
    "tls_cert",
    "tls_key",
    "metadata_tls_ca",
    "metadata_tls_cert",
    "metadata_tls_key",
    "metadata_password_file",
)


def store_security(options: Globals, environment: Mapping[str, str]) -> StoreSecurity:
    """How `options` say the metadata store is reached and logged in to. Raises UsageError, OSError (password file)."""
    from bkctl.metadata.store import NO_SECURITY, StoreSecurity

    password: bytes | None = None
    if options.metadata_password_file is not None:
        password = read_password_file(options.metadata_password_file)
    elif options.metadata_user is not None and "BKCTL_METADATA_PASSWORD" in environment:
        password = os.fsencode(environment["BKCTL_METADATA_PASSWORD"])
    creator_acl = options.metadata_creator_acl or _zk_enable_security(options.conf)
    given = StoreSecurity(
        tls=options.metadata_tls or options.metadata_tls_ca is not None,
        ca=_text(options.metadata_tls_ca),
        certificate=_text(options.metadata_tls_certificate),
        key=_text(options.metadata_tls_key),
        user=options.metadata_user,
        password=None if password is None else password.decode("utf-8", "surrogateescape"),
        sasl=options.metadata_sasl,
        creator_acl=creator_acl,
    )
    return NO_SECURITY if given == NO_SECURITY else given


def _zk_enable_security(conf: Path | None) -> bool:
    if conf is None:
        return False
    from bkctl.config import read_properties

    return (read_properties(conf).get("zkEnableSecurity") or "").lower() == "true"


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)


def _local_cluster() -> str | None:
    from bkctl.bookie.local import active_cluster

    cluster = active_cluster()
    return None if cluster is None else cluster.metadata_uri


def parse_bookie_addresses(texts: tuple[str, ...]) -> dict[str, tuple[str, int]]:
    """`ID=HOST:PORT` → {bookie id: (host, port)}; the later of two for one id counts. Raises UsageError."""
    return dict(parse_bookie_address(text, "--bookie-address") for text in texts)
