"""Option types that commands share.

A parameter annotated with one of the types below (`EntryIdRange`, `LedgerPassword` …) becomes one or more arguments and
options on the command line, and arrives in the command's function as one domain value.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from inspect import Parameter
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

import typer

from bkctl.errors import UsageError
from bkctl.pace import Pace

from .values import checked, parse_duration, parse_number, parse_size

PASSWORD_SIZE_BYTES_MAX: Final = 65536
WATCH_S_DEFAULT: Final = 2.0
WATCH_S_MIN: Final = 0.1


class Composite(NamedTuple):
    """Several command-line parameters that make one value: `resolve` gets their values by name, None where absent."""

    parameters: tuple[Parameter, ...]
    resolve: Callable[[Mapping[str, Any]], Any]


class OldName(str):
    """A former name of an option: it works, but help, completion and documents leave it out."""

    __slots__ = ()


def parameter(name: str, annotation: Any, default: Any = None) -> Parameter:
    """Return a keyword-only parameter of a command's signature."""
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def option(name: str, kind: Any, *flags: str, default: Any = None, **settings: Any) -> Parameter:
    """Return the option `flags` of type `kind`, as part of a Composite; `settings` go to `typer.Option`."""
    return parameter(name, Annotated[kind, typer.Option(*flags, **settings)], default)


def argument(name: str, kind: Any, **settings: Any) -> Parameter:
    """Return an argument of type `kind`, as part of a Composite; `settings` go to `typer.Argument`."""
    return parameter(name, Annotated[kind, typer.Argument(**settings)])


def text_option(
    name: str, convert: Callable[[Any], Any], *flags: str, kind: Any = str, default: Any = None, **settings: Any
) -> Composite:
    """Return one option whose text, or value of another `kind`, `convert` reads; None when absent."""
    return combined(
        lambda value: None if value is None else convert(value), option(name, kind, *flags, default=default, **settings)
    )


def combined(make: Callable[..., Any], *parts: Any) -> Composite:
    """Return the parameters of `parts` as one value, which `make` returns for the values of the parts, in order.

    A part is a Parameter, a Composite, or a type of options that is annotated with one.
    """
    given = (getattr(part, "__metadata__", (part,))[0] for part in parts)
    found = [each if isinstance(each, Composite) else Composite((each,), itemgetter(each.name)) for each in given]
    return Composite(
        tuple(each for part in found for each in part.parameters),
        lambda values: make(*(part.resolve(values) for part in found)),
    )


# --- numbers --------------------------------------------------------------------------------------------------------


def _reader(kind: str, convert: Callable[[str, str], Any], metavar: str) -> Callable[..., Composite]:
    """Return a function that returns options whose text `convert` reads; `kind` ends the names of their parameters."""

    def parsed_option(
        flag: str, help: str, *, default: int | str | None = None, short: str | None = None, old: str | None = None
    ) -> Composite:
        """Return the option `flag`, None when absent and without a default; `old` is a former name of it."""
        name = f"{flag.removeprefix('--').replace('-', '_')}_{kind}"
        flags = [each for each in (short, flag, old and OldName(old)) if each is not None]
        text = None if default is None else str(default)
        return text_option(
            name, lambda text: convert(text, flag), *flags, default=text, show_default=text is not None,
            metavar=metavar, help=help,
        )  # fmt: skip

    return parsed_option


#: Options for an entry id, a position or an offset (decimal or 0x), a count of 1 or more, bytes, and seconds.
number_option: Final = _reader("number", parse_number, "N")
count_option: Final = _reader("count", checked(parse_number, lambda count: count >= 1, "must be 1 or more"), "N")
size_option: Final = _reader("size", parse_size, "SIZE")
duration_option: Final = _reader("duration", parse_duration, "DURATION")
_entry_option: Final = _reader(
    "entry", checked(parse_number, lambda id: 0 <= id < 1 << 63, "entry ids are 0 or more, below 2^63"), "ENTRY"
)

_STEPS_RATE: Final = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,6})?)(?: ?(?:entry|entries|ledgers?|records?))", re.ASCII)


def parse_pace(text: str, what: str = "--rate", *, has_bytes: bool = True) -> Pace:
    """Return the pace for `20MiB`, `50MB/s` or `5000 entries`, for work without bytes for `5000`.

    Raises UsageError, which begins with `what`.
    """
    amount = text.strip().removesuffix("/s").rstrip()
    match = _STEPS_RATE.fullmatch(amount if has_bytes else f"{amount} entries")
    if match is None and not has_bytes:
        raise UsageError(f"{what} {text}: must be a number")
    try:
        steps, size = (float(match[1]), None) if match else (None, float(parse_size(amount, what)))
    except UsageError:
        raise UsageError(f"{what}: not a rate: {text!r}", hint="give 20MiB, 50MB/s or '5000 entries'") from None
    pace = Pace(steps_per_s=steps, bytes_per_s=size, has_bytes=has_bytes)
    if pace.bytes_per_s is None and pace.steps_per_s is None:
        raise UsageError(f"{what} {text}: must be more than 0")
    return pace


def pace_option(help: str, *, has_bytes: bool = True) -> Composite:
    """Return the option `--rate`, a Pace; without the option a Pace without limits, which may get one while it runs."""
    rate = option("rate_limit", str, "--rate", metavar="RATE" if has_bytes else "N", help=help)
    return combined(
        lambda text: Pace(has_bytes=has_bytes) if text is None else parse_pace(text, has_bytes=has_bytes), rate
    )


#: `--rate` of commands that copy entries, and of commands that read them.
CopyPace = Annotated[Pace, pace_option("Copy at most this much per second: 50MB/s, 20MiB, or '5000 entries'.")]
ReadPace = Annotated[Pace, pace_option("Read at most this much per second: 20MiB, or '5000 entries'.")]
#: `--rate` of commands that go through records of metadata.
RecordPace = Annotated[Pace, pace_option("Process at most N records per second.", has_bytes=False)]


class BinaryFormat(StrEnum):
    """The form of bytes in the output."""

    BASE64 = "base64"
    UTF8 = "utf8"
    HEX = "hex"
    RAW = "raw"


#: `--format` of commands that print bytes; None: base64 in json, ndjson and csv.
BinaryFormatOption = Annotated[
    BinaryFormat | None,
    typer.Option("--format", help="Form of bytes: base64, utf8, hex, or raw (prints nothing else).", metavar="FORMAT"),
]


class ProtocolVersion(StrEnum):
    """The wire protocol."""

    V2 = "v2"
    V3 = "v3"


def _protocol(version: ProtocolVersion) -> Any:
    from bkctl.protocol.messages import Protocol

    return Protocol[version.name]


#: `--protocol` as a bkctl.protocol.messages.Protocol.
ProtocolOption = Annotated[
    Any,
    text_option(
        "protocol_version", _protocol, "--protocol", kind=ProtocolVersion, default=ProtocolVersion.V3, metavar="v2|v3",
        help="Wire protocol; v2 carries no ledger scope.",
    ),
]  # fmt: skip


def _digest_type(text: str) -> Any:
    from bkctl.formats.entry import DigestType

    return DigestType.parse(text)


def digest_type_option(help: str) -> Composite:
    """Return the option `--digest-type TYPE` as a bkctl.formats.entry.DigestType."""
    return text_option(
        "digest_type_name", _digest_type, "--digest-type", OldName("--digest"), metavar="TYPE", help=help
    )


#: The value of `--digest` without a type, for commands that allow this: check digests.
ANY_DIGEST: Final = "any"
DIGEST_NAMES: Final = frozenset(("CRC32", "CRC32C", "HMAC", "MAC", "DUMMY"))

#: The values of `--suspend` and `--resume` of `bookie gc`, in capitals, and the value without one.
COMPACTIONS: Final = frozenset(("MAJOR", "MINOR", "BOTH"))
BOTH_COMPACTIONS: Final = "both"


class DigestCheck(NamedTuple):
    """`--digest [TYPE]`: whether it was given, and which type (None: found out ledger by ledger)."""

    wanted: bool
    digest_type: Any


#: `--digest [TYPE]`, also `--digest-type TYPE`.
DigestToCheck = Annotated[
    DigestCheck,
    combined(
        lambda name: DigestCheck(name is not None, None if name in (None, ANY_DIGEST) else _digest_type(name)),
        option(
            "digest_type_name", str, "--digest", OldName("--digest-type"), metavar="[TYPE]",
            help="Check that each entry matches its digest; ledgers of scope 0 are of TYPE (CRC32C, CRC32, HMAC, "
            "DUMMY; default: found out ledger by ledger).",
        ),
    ),
]  # fmt: skip


def _keys_and_values(texts: Sequence[str] | None) -> dict[str, bytes | None]:
    found: dict[str, bytes | None] = {}
    for text in texts or ():
        key, equals, value = text.partition("=")
        if not key:
            raise UsageError(f"--custom-metadata {text!r}: names no key")
        if key in found:
            raise UsageError(f"--custom-metadata {key!r} is given twice")
        found[key] = os.fsencode(value) if equals else None
    return found


def _key_values(texts: Sequence[str] | None) -> dict[str, bytes | None]:
    found = _keys_and_values(texts)
    if without := [key for key, value in found.items() if value is None]:
        raise UsageError(f"--custom-metadata {without[0]!r}: not KEY=VALUE")
    return found


def _custom_metadata(read: Callable[..., Any], metavar: str, help: str) -> Composite:
    return combined(read, option("custom_metadata", list[str], "--custom-metadata", metavar=metavar, help=help))


#: `--custom-metadata KEY=VALUE`, repeatable.
CustomMetadata = Annotated[
    dict[str, bytes], _custom_metadata(_key_values, "KEY=VALUE", "Custom metadata of the ledger; repeatable.")
]

#: `--custom-metadata KEY[=VALUE]` of a filter, repeatable: the value is None where the key alone is given.
CUSTOM_METADATA_FILTER: Final = _custom_metadata(
    _keys_and_values, "KEY[=VALUE]", "List only ledgers with this custom metadata, or with this key; repeatable."
)


class LedgerSizes(NamedTuple):
    """Sizes and digest of a new ledger."""

    ensemble_size: int
    write_quorum_size: int
    ack_quorum_size: int
    digest_type: Any


def _shape_size(name: str, flag: str, help: str, default: int) -> Parameter:
    return option(name, int, flag, metavar="N", help=help, show_default=True, default=default)


#: Ensemble size, quorums and digest type of a ledger that is to be created.
LedgerShape = Annotated[
    LedgerSizes,
    combined(
        LedgerSizes,
        _shape_size("ensemble_size", "--ensemble-size", "Number of bookies that store a fragment.", 3),
        _shape_size("write_quorum", "--write-quorum", "Number of bookies that store each entry.", 2),
        _shape_size("ack_quorum", "--ack-quorum", "Number of bookies that must acknowledge an entry.", 2),
        text_option(
            "digest_type_name", _digest_type, "--digest-type", metavar="TYPE", help="CRC32C, CRC32, HMAC or DUMMY.",
            show_default=True, default="CRC32C",
        ),
    ),
]  # fmt: skip


def file_argument(help: str) -> Composite:
    """Return the argument FILE, formerly `--file FILE` and `-f FILE`, as a Path."""

    def one_file(named: Path | None, by_option: Path | None) -> Path:
        if named is not None and by_option is not None:
            raise UsageError(f"{named} and --file {by_option} are given", hint="give one of them")
        file = named or by_option
        if file is None:
            raise UsageError("No file is named", hint="give it as FILE")
        return file

    return combined(
        one_file,
        argument("file", Path, metavar="FILE", help=help, show_default=False),
        option("file_option", Path, "--file", "-f", metavar="FILE", hidden=True),
    )


# --- changing and watching ------------------------------------------------------------------------------------------

#: `--dry-run` of commands that change something; see Run.dry_run.
DRY_RUN: Final = option(
    "dry_run", bool, "--dry-run", help="Show what would change, without changing it.", default=False
)

#: `--yes-really ID` of commands whose loss cannot be undone; see Run.confirm_name.
YesReally = Annotated[
    str | None,
    typer.Option("--yes-really", metavar="ID", help="Go ahead without a question; --yes alone is not enough."),
]

#: `--undo FILE`; see Run.recorded.
UNDO: Final = option(
    "undo", Path, "--undo", metavar="FILE",
    help="New file for 'metadata undo' (default: in the user's state directory), or none.",
)  # fmt: skip

KeepGoing = Annotated[
    bool, typer.Option("--keep-going", help="Continue after failures, and report them at the end (exit code 3).")
]


_watch_interval: Final = checked(parse_duration, lambda each: each >= WATCH_S_MIN, f"must be {WATCH_S_MIN} s or more")


def watch_option(help: str) -> Composite:
    """Return the option `--watch [SECONDS]`: the seconds between updates, None if absent.

    Where the command takes arguments, seconds are given as `--watch=SECONDS`.
    """
    return text_option(
        "watch_interval", lambda text: _watch_interval(text, "--watch"), "--watch", metavar="[SECONDS]", help=help
    )


#: `--watch` of a command that runs until the user ends it; see Run.watch.
WatchOption = Annotated[
    float | None, watch_option("Show changes until Ctrl-C; --watch=SECONDS sets the interval (default 2).")
]


# --- passwords ------------------------------------------------------------------------------------------------------


def read_password_file(path: Path) -> bytes:
    """Return the password in a file, without a final line end. Raises UsageError for too large a file, OSError."""
    with open(path, "rb") as stream:
        content = stream.read(PASSWORD_SIZE_BYTES_MAX + 1)
    if len(content) > PASSWORD_SIZE_BYTES_MAX:
        raise UsageError(f"{path}: larger than {PASSWORD_SIZE_BYTES_MAX} bytes, so not a password file")
    return content.removesuffix(b"\n").removesuffix(b"\r")


def ledger_password(text: str | None, file: Path | None) -> bytes:
    """Return the password of --password or --password-file, else that of the environment, else an empty one."""
    if text is not None and file is not None:
        raise UsageError("--password and --password-file are given", hint="give one of them")
    if file is not None:
        return read_password_file(file)
    return os.fsencode(os.environ.get("BKCTL_LEDGER_PASSWORD", "") if text is None else text)


PASSWORD_FILE: Final = option(
    "password_file", Path, "--password-file", metavar="FILE",
    help="File with the password; a final line end is ignored.",
)  # fmt: skip
#: The ledger's password as bytes; empty when none is given.
LedgerPassword = Annotated[
    bytes,
    combined(
        ledger_password,
        option(
            "password", str, "--password", metavar="TEXT",
            help="Ledger password (default empty; also BKCTL_LEDGER_PASSWORD). Visible in ps.",
        ),
        PASSWORD_FILE,
    ),
]  # fmt: skip


class EntryIdRange(NamedTuple):
    """`--from` and `--to`, both inclusive; None where not given."""

    first: int | None
    last: int | None


def _entry_range(first: int | None, last: int | None) -> EntryIdRange:
    if first is not None and last is not None and first > last:
        raise UsageError(f"--from {first} is after --to {last}")
    return EntryIdRange(first, last)


#: `--from` and `--to` of entry ids.
Entries = Annotated[
    EntryIdRange,
    combined(
        _entry_range,
        _entry_option("--from", "First entry id (default 0)."),
        _entry_option("--to", "Last entry id, inclusive."),
    ),
]


def flag(text: str, help: str, *more: str, **settings: Any) -> Any:
    """Return the option `text`, such as `--all` or `--file FILE`; `more` are other flags, `settings` Typer's."""
    name, _, metavar = text.partition(" ")
    return typer.Option(name, *more, metavar=metavar or None, help=help, **settings)


def word(metavar: str, help: str, **settings: Any) -> Any:
    """Return the argument `metavar`, such as `BOOKIE`; `settings` are Typer's."""
    return typer.Argument(metavar=metavar, help=help, **settings)
