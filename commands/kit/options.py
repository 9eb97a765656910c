"""Option types that commands share.

A parameter annotated with one of the types below (`EntryIdRange`, `LedgerPassword` …) becomes one or more arguments and
options on the command line, and arrives in the command's function as one domain value.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from inspect import Parameter, signature
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple, get_type_hints

import typer

from bkctl.errors import UsageError
from bkctl.pace import Pace

from .values import checked, parse_duration, parse_number, parse_size, read_bounded, refuse_both

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


def flag(text: str, help: str, *old: str, **settings: Any) -> Any:
    """Return Typer's option for its flags and metavar, `--all` or `--file -f FILE`; `old` are former flags."""
    words = text.split()
    flags = [word for word in words if word.startswith("-")]
    metavar = words[-1] if len(words) > len(flags) else None
    return typer.Option(*flags, *map(OldName, old), metavar=metavar, help=help, **settings)


def word(metavar: str, help: str, **settings: Any) -> Any:
    """Return Typer's argument `metavar`, such as `BOOKIE`."""
    return typer.Argument(metavar=metavar, help=help, **settings)


def option(
    text: str,
    help: str,
    kind: Any = str,
    default: Any = None,
    *old: str,
    parse: Callable[[Any], Any] | None = None,
    **settings: Any,
) -> Composite:
    """Return the option that `flag` makes of these, with the value that `parse` makes of its own; None when absent."""
    info = flag(text, help, *old, **settings)
    name = re.findall(r"--([\w-]+)", text)[0].replace("-", "_") + "_option"
    return _part(parameter(name, Annotated[kind, info], default), parse)


def argument(metavar: str, help: str, kind: Any) -> Composite:
    """Return the argument `metavar` of type `kind`."""
    info = word(metavar, help, show_default=False)
    return _part(parameter(f"{metavar.lower()}_argument", Annotated[kind, info]))


def _part(param: Parameter, parse: Callable[[Any], Any] | None = None) -> Composite:
    def resolve(values: Mapping[str, Any]) -> Any:
        value = values[param.name]
        return value if parse is None or value is None else parse(value)

    return Composite((param,), resolve)


def composite_of(part: Any) -> Composite:
    """Return the composite of a parameter, or of a type: the one that annotates it, else one of the parameter alone.

    A NamedTuple whose fields are options is the composite of these.
    """
    annotation = part.annotation if isinstance(part, Parameter) else part
    found = [each for each in getattr(annotation, "__metadata__", ()) if isinstance(each, Composite)]
    if found:
        return found[0]
    if not (isinstance(annotation, type) and issubclass(annotation, tuple)):
        return _part(part.replace(kind=Parameter.KEYWORD_ONLY))
    types, fields = get_type_hints(annotation, include_extras=True), signature(annotation).parameters.values()
    return combined(annotation, *(parameter(each.name, types[each.name], each.default) for each in fields))


def combined(make: Callable[..., Any], *parts: Any) -> Composite:
    """Return the parameters of `parts` as one value, which `make` returns for the values of the parts, in order.

    A part is a Parameter, a Composite, or what `composite_of` takes.
    """
    found = [part if isinstance(part, Composite) else composite_of(part) for part in parts]
    return Composite(
        tuple(each for part in found for each in part.parameters),
        lambda values: make(*(part.resolve(values) for part in found)),
    )


# --- numbers --------------------------------------------------------------------------------------------------------


def _reader(convert: Callable[[str, str], Any], metavar: str) -> Callable[..., Composite]:
    """Return a function that returns options whose text `convert` reads, None when absent and without a default."""

    def parsed_option(text: str, help: str, *old: str, default: int | str | None = None) -> Composite:
        """Return the option with the flags in `text`; `old` are former ones."""
        shown, name = None if default is None else str(default), text.split()[-1]
        return option(
            f"{text} {metavar}", help, str, shown, *old, parse=lambda given: convert(given, name),
            show_default=shown is not None
        )  # fmt: skip

    return parsed_option


#: Options for an entry id, a position or an offset (decimal or 0x), a count of 1 or more, bytes, and seconds.
number_option: Final = _reader(parse_number, "N")
count_option: Final = _reader(checked(parse_number, lambda count: count >= 1, "must be 1 or more"), "N")
size_option: Final = _reader(parse_size, "SIZE")
duration_option: Final = _reader(parse_duration, "DURATION")
_entry_option: Final = _reader(
    checked(parse_number, lambda id: 0 <= id < 1 << 63, "entry ids are 0 or more, below 2^63"), "ENTRY"
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
    rate = option(f"--rate {'RATE' if has_bytes else 'N'}", help)
    return combined(
        lambda text: Pace(has_bytes=has_bytes) if text is None else parse_pace(text, has_bytes=has_bytes), rate
    )


#: `--rate` of commands that copy entries, and of commands that read them.
CopyPace = Annotated[Pace, pace_option("Copy at most this much per second: 50MB/s, 20MiB, or '5000 entries'.")]
ReadPace = Annotated[Pace, pace_option("Read at most this much per second: 20MiB, or '5000 entries'.")]
#: `--rate` of commands that go through records of metadata.
RecordPace = Annotated[Pace, pace_option("Process at most N records per second.", has_bytes=False)]


#: The form of bytes in the output.
BinaryFormat = StrEnum("BinaryFormat", "BASE64 UTF8 HEX RAW")
#: `--format` of commands that print bytes; None: base64 in json, ndjson and csv.
BinaryFormatOption = Annotated[
    BinaryFormat | None, flag("--format FORMAT", "Form of bytes: base64, utf8, hex, or raw (prints nothing else).")
]
#: The wire protocol.
ProtocolVersion = StrEnum("ProtocolVersion", "V2 V3")


def _protocol(version: ProtocolVersion) -> Any:
    from bkctl.protocol.messages import Protocol

    return Protocol[version.name]


#: `--protocol` as a bkctl.protocol.messages.Protocol.
ProtocolOption = Annotated[
    Any,
    option(
        "--protocol v2|v3", "Wire protocol; v2 carries no ledger scope.", ProtocolVersion, ProtocolVersion.V3,
        parse=_protocol
    )
]  # fmt: skip


def _digest_type(text: str) -> Any:
    from bkctl.formats.entry import DigestType

    return DigestType.parse(text)


def digest_type_option(help: str) -> Composite:
    """Return the option `--digest-type TYPE` as a bkctl.formats.entry.DigestType."""
    return option("--digest-type TYPE", help, str, None, "--digest", parse=_digest_type)


#: The value of `--digest` without a type, for commands that allow this: check digests.
ANY_DIGEST: Final = "any"
DIGEST_NAMES: Final = frozenset(("CRC32", "CRC32C", "HMAC", "MAC", "DUMMY"))

#: The values of `--suspend` and `--resume` of `bookie gc`; BOTH without one.
Compactions = StrEnum("Compactions", "MAJOR MINOR BOTH")


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
            "--digest [TYPE]", "Check that each entry matches its digest; ledgers of scope 0 are of TYPE (CRC32C, "
            "CRC32, HMAC, DUMMY; default: found out ledger by ledger).", str, None, "--digest-type"
        )
    )
]  # fmt: skip


def pairs_option(text: str, help: str, read: Callable[[str], Any] = str) -> Composite:
    """Return a repeatable option such as `--set NAME=VALUE` as a dict; `NAME[=VALUE]`: None for a name alone."""
    flag, form = text.split()

    def pairs(texts: Sequence[str] | None) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for given in texts or ():
            name, equals, value = given.partition("=")
            if not name or not (equals or "[" in form):
                raise UsageError(f"{flag} {given!r}: not {form}")
            if name in found:
                raise UsageError(f"{flag} {name!r} is given twice")
            found[name] = read(value) if equals else None
        return found

    return combined(pairs, option(text, help, list[str]))


CustomMetadata = Annotated[
    dict[str, bytes],
    pairs_option("--custom-metadata KEY=VALUE", "Custom metadata of the ledger; repeatable.", os.fsencode),
]


class LedgerShape(NamedTuple):
    """Ensemble size, quorums and digest type of a ledger that is to be created."""

    ensemble_size: Annotated[int, flag("--ensemble-size N", "Number of bookies that store a fragment.")] = 3
    write_quorum_size: Annotated[int, flag("--write-quorum N", "Number of bookies that store each entry.")] = 2
    ack_quorum_size: Annotated[int, flag("--ack-quorum N", "Number of bookies that must acknowledge an entry.")] = 2
    digest_type: Annotated[
        Any, option("--digest-type TYPE", "CRC32C, CRC32, HMAC or DUMMY.", str, "CRC32C", parse=_digest_type)
    ] = None


def file_argument(help: str) -> Composite:
    """Return the argument FILE, formerly `--file FILE` and `-f FILE`, as a Path."""

    def one_file(named: Path | None, by_option: Path | None) -> Path:
        refuse_both(str(named), named, f"--file {by_option}", by_option)
        file = named or by_option
        if file is None:
            raise UsageError("No file is named", hint="give it as FILE")
        return file

    return combined(one_file, argument("FILE", help, Path), option("--file -f FILE", "", Path, hidden=True))


# --- changing and watching ------------------------------------------------------------------------------------------

#: `--dry-run` of commands that change something; see Run.dry_run.
DRY_RUN: Final = parameter(
    "dry_run", Annotated[bool, flag("--dry-run", "Show what would change, without changing it.")], False
)

#: `--yes-really ID` of commands whose loss cannot be undone; see Run.confirm_name.
YesReally = Annotated[str | None, flag("--yes-really ID", "Go ahead without a question; --yes alone is not enough.")]

#: `--undo FILE`; see Run.recorded.
UNDO: Final = parameter(
    "undo",
    Annotated[
        Path | None,
        flag("--undo FILE", "New file for 'metadata undo' (default: in the user's state directory), or none."),
    ],
)

KeepGoing = Annotated[bool, flag("--keep-going", "Continue after failures, and report them at the end (exit code 3).")]

_watch_interval: Final = checked(parse_duration, lambda each: each >= WATCH_S_MIN, f"must be {WATCH_S_MIN} s or more")


def watch_option(help: str) -> Composite:
    """Return the option `--watch [SECONDS]`: the seconds between updates, None if absent.

    Where the command takes arguments, seconds are given as `--watch=SECONDS`.
    """
    return option("--watch [SECONDS]", help, parse=lambda text: _watch_interval(text, "--watch"))


#: `--watch` of a command that runs until the user ends it; see Run.watch.
WatchOption = Annotated[
    float | None, watch_option("Show changes until Ctrl-C; --watch=SECONDS sets the interval (default 2).")
]


# --- passwords ------------------------------------------------------------------------------------------------------


def read_password_file(path: Path) -> bytes:
    """Return the password in a file, without a final line end. Raises UsageError for too large a file, OSError."""
    return read_bounded(path, "a password file", PASSWORD_SIZE_BYTES_MAX).removesuffix(b"\n").removesuffix(b"\r")


def ledger_password(text: str | None, file: Path | None) -> bytes:
    """Return the password of --password or --password-file, else that of the environment, else an empty one."""
    refuse_both("--password", text if text is None else True, "--password-file", file)
    if file is not None:
        return read_password_file(file)
    return os.fsencode(os.environ.get("BKCTL_LEDGER_PASSWORD", "") if text is None else text)


PASSWORD_FILE: Final = option("--password-file FILE", "File with the password; a final line end is ignored.", Path)
#: The ledger's password as bytes; empty when none is given.
LedgerPassword = Annotated[
    bytes,
    combined(
        ledger_password,
        option("--password TEXT", "Ledger password (default empty; also BKCTL_LEDGER_PASSWORD). Visible in ps."),
        PASSWORD_FILE,
    ),
]


class EntryIdRange(NamedTuple):
    """`--from` and `--to`, both inclusive; None where not given."""

    first: int | None
    last: int | None


def _entry_range(first: int | None, last: int | None) -> EntryIdRange:
    if first is not None and last is not None and first > last:
        raise UsageError(f"--from {first} is after --to {last}")
    return EntryIdRange(first, last)


Entries = Annotated[
    EntryIdRange,
    combined(
        _entry_range,
        _entry_option("--from", "First entry id (default 0)."),
        _entry_option("--to", "Last entry id, inclusive."),
    ),
]
