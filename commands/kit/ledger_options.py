"""Option types that name ledgers: one, several, a scope, a file, one to create."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext, suppress
from typing import Annotated, Any, Final, NamedTuple

from bkctl.errors import UsageError
from bkctl.ids import GivenLedgerId, LedgerId, parse_scope_id, resolve_ledger

from .options import Composite, argument, combined, option
from .values import refuse_both

LEDGER_LINE_LENGTH_MAX: Final = 1 << 20
LEDGER_FORMS: Final = "decimal, 0x hex, SCOPE:ID, 32 hex digits (qualified name) or UUID"

_LEDGER_OPTIONS: Final = (
    option("--ledger-id ID", "Ledger id; a negative decimal is two's complement."),
    option("--ledger-scope-id SCOPE", "Ledger scope id of a bare ledger id."),
    option("--ledger-qualified-name NAME", "Ledger as 32 hex digits or UUID, scope first."),
)


def scope_option(help: str, flag: str = "--ledger-scope-id") -> Composite:
    """Return the option `flag`, a scope id; None when absent."""
    return option(f"{flag} SCOPE", help, parse=parse_scope_id)


def ledger_option(help: str, default: Any = None) -> Composite:
    """Return the option `--ledger`, the text of one ledger, whose forms follow `help`."""
    return option("--ledger LEDGER", f"{help}: {LEDGER_FORMS}.", str, default, "--ledger-id")


def _one_ledger(text: str | None, id_text: str | None, scope: str | None, name: str | None) -> LedgerId:
    ledger = resolve_ledger(text, ledger_id=id_text, ledger_scope_id=scope, ledger_qualified_name=name)
    if ledger is None:
        raise UsageError("No ledger is given", hint=f"name it as {LEDGER_FORMS}")
    return GivenLedgerId.keep(ledger, text, name, id_text)


def _many_ledgers(texts: list[str] | None, id_text: str | None, scope: str | None, name: str | None) -> list[LedgerId]:
    for value, flag in ((id_text, "--ledger-id"), (name, "--ledger-qualified-name")):
        if texts and len(texts) > 1 and value is not None:
            raise UsageError(f"{flag} names one ledger, but {len(texts)} are given", hint="give all as arguments")
    return [_one_ledger(text, id_text, scope, name) for text in texts or (None,)]


def _any_ledgers(texts: list[str] | None, id_text: str | None, scope: str | None, name: str | None) -> list[LedgerId]:
    return _many_ledgers(texts, id_text, scope, name) if texts or (id_text, name) != (None, None) else []


def _ledgers_of_export(*given: Any) -> list[LedgerId]:
    try:
        return _any_ledgers(*given)
    except UsageError as error:
        raise UsageError(error.message, hint=f"-f FILE names the file to write; {error.hint}") from error


_THE_LEDGERS = argument("LEDGER", f"The ledgers: {LEDGER_FORMS}.", list[str])
_SOME_LEDGERS = argument("LEDGER", f"Only these ledgers: {LEDGER_FORMS} (default: all).", list[str])
#: The one ledger that a command acts on, named by argument or options.
OneLedger = Annotated[
    LedgerId, combined(_one_ledger, argument("LEDGER", f"The ledger: {LEDGER_FORMS}.", str), *_LEDGER_OPTIONS)
]
#: One ledger or more, named by arguments or options.
ManyLedgers = Annotated[list[LedgerId], combined(_many_ledgers, _THE_LEDGERS, *_LEDGER_OPTIONS)]
#: Ledgers by argument; none named: an empty list.
LedgersOfExport = Annotated[list[LedgerId], combined(_ledgers_of_export, _SOME_LEDGERS, *_LEDGER_OPTIONS)]


class LedgersOrAll(NamedTuple):
    """The named ledgers; None: all ledgers, or with `scope_id` all of that scope."""

    ledgers: list[LedgerId] | None
    scope_id: int | None


def _ledgers_or_all(texts: list[str] | None, id_text: str | None, scope: str | None, name: str | None) -> LedgersOrAll:
    ledgers = _any_ledgers(texts, id_text, scope, name)
    return LedgersOrAll(ledgers or None, None if ledgers or scope is None else parse_scope_id(scope))


AnyLedgers = Annotated[LedgersOrAll, combined(_ledgers_or_all, _THE_LEDGERS, *_LEDGER_OPTIONS)]


def _ledgers_or_file(
    texts: list[str] | None, file: str | None, id_text: str | None, scope: str | None, name: str | None
) -> list[LedgerId]:
    if file is None:
        return _many_ledgers(texts, id_text, scope, name)
    scope_id = None if scope is None else parse_scope_id(scope)
    return [*_any_ledgers(texts, id_text, scope, name), *_read_ledgers(file, scope_id)]


def _read_ledgers(file: str, scope_id: int | None) -> list[LedgerId]:
    """Return the ledgers in a file: one per line, in any text form or as ndjson; skip empty lines and # comments."""
    if file == "-" and sys.stdin is None:
        raise UsageError("stdin is closed, so no ledgers can be read")
    where, ledgers, number = "stdin" if file == "-" else file, [], 0
    with nullcontext(sys.stdin) if file == "-" else open(file, encoding="utf-8", errors="replace") as lines:
        while line := lines.readline(LEDGER_LINE_LENGTH_MAX):
            number += 1
            if len(line) == LEDGER_LINE_LENGTH_MAX:
                raise UsageError(f"{where} line {number}: longer than {LEDGER_LINE_LENGTH_MAX} characters")
            text = line.strip()
            if text and not text.startswith("#"):
                try:
                    ledgers.append(LedgerId.parse(_ledger_in_json(text) if text.startswith("{") else text, scope_id))
                except UsageError as error:
                    raise UsageError(f"{where} line {number}: {error.message}", hint=error.hint) from error
    return ledgers


def _ledger_in_json(text: str) -> str:
    name = None
    with suppress(ValueError, RecursionError):
        name = json.loads(text).get("ledgerQualifiedName")
    if not isinstance(name, str):
        hint = "use the output of 'bkctl ledger list -o ndjson'"
        raise UsageError("an object without ledgerQualifiedName", hint=hint)
    return name


#: Ledgers by argument, or in a file.
LedgersOrFile = Annotated[
    list[LedgerId],
    combined(
        _ledgers_or_file,
        _THE_LEDGERS,
        option(
            "--from-file FILE", "Read ledgers from this file (-: stdin), one per line, as 'ledger list -o id' prints."
        ),
        *_LEDGER_OPTIONS,
    ),
]


class NewLedger(NamedTuple):
    """The id that `ledger write` creates: a given one, or one to generate in `scope_id`."""

    ledger: LedgerId | None
    scope_id: int


def _new_ledger(is_random: bool, id_text: str | None, scope_text: str | None, name: str | None) -> NewLedger:
    if is_random:
        if (id_text, name, scope_text) != (None, None, None):
            raise UsageError("--uuid generates an id, but another option gives one", hint="drop one of the two")
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
    combined(_new_ledger, option("--uuid", "Use a random UUID as the 128-bit id.", bool, False), *_LEDGER_OPTIONS),
]


def _scope(help: str, *, default: int | None) -> Composite:
    """Return `--ledger-scope-id` and `--all-scopes` as one scope (None: all); `default` where none is named."""

    def resolve(scope_id: int | None, is_all: bool) -> int | None:
        refuse_both("--all-scopes", is_all, "--ledger-scope-id", scope_id)
        return None if is_all else default if scope_id is None else scope_id

    return combined(resolve, scope_option(help), option("--all-scopes", "Ledgers of every scope.", bool, False))


#: The scope that a command lists (scope 0 when none is named); None: all scopes.
ScopeToList = Annotated[int | None, _scope("Only ledgers of this scope (default 0).", default=0)]

#: The scope that a command looks at (None: all scopes, as when none is named).
ScopeOfAny = Annotated[int | None, _scope("Only ledgers of this scope (default: all).", default=None)]


#: `--ledger`, repeatable, as a part of a Composite.
LEDGERS_BY_OPTION: Final = option(
    "--ledger LEDGER", f"Only this ledger, repeatable: {LEDGER_FORMS}.", list[str], None, "--ledger-id"
)


class ScanFilter(NamedTuple):
    """The ledgers that a scan shows: one ledger, one scope, or (both None) all."""

    ledger: LedgerId | None
    scope_id: int | None


#: `--ledger`, `--ledger-scope-id`, `--all-scopes` of a scan, as a ScanFilter; a bare `--ledger` is in the scope given.
SCAN_LEDGERS: Final = combined(
    lambda text, scope: ScanFilter(None if text is None else LedgerId.parse(text, scope), scope),
    ledger_option("Only this ledger"),
    _scope("Only ledgers of this scope.", default=None),
)
