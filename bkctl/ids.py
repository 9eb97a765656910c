"""Names of ledgers and bookies: 128-bit ledger ids (scope id + ledger id) in all their text forms. Source: BP-35."""

from __future__ import annotations

import os
import re
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Set
from functools import lru_cache
from itertools import repeat
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from bkctl.errors import UsageError

if TYPE_CHECKING:
    from uuid import UUID

U64_MAX: Final = (1 << 64) - 1
I64_MAX: Final = (1 << 63) - 1

_QUALIFIED_NAME = re.compile(r"(?:0[xX])?([0-9a-fA-F]{32})", re.ASCII)
_DASHED_UUID = re.compile(
    r"([0-9a-fA-F]{8})-([0-9a-fA-F]{4})-([0-9a-fA-F]{4})-([0-9a-fA-F]{4})-([0-9a-fA-F]{12})", re.ASCII
)
_DECIMAL = re.compile(r"[0-9]{1,40}", re.ASCII)
_NEGATIVE = re.compile(r"-[0-9]{1,40}", re.ASCII)
_HEX = re.compile(r"0[xX]([0-9a-fA-F]{1,16})", re.ASCII)
_BOOKIE_ID = re.compile(r"[a-zA-Z0-9:-_.\-]+", re.ASCII)

FORMS_HELP: Final = "accepted are a decimal or 0x ledger id, SCOPE:ID, 32 hex digits (the qualified name) or a UUID"


def to_signed(value: int) -> int:
    """Return the int64 (two's complement) that carries the unsigned 64-bit `value` in protobuf and files."""
    return value - (1 << 64) if value > I64_MAX else value


def to_unsigned(value: int) -> int:
    """Return the unsigned 64-bit number that the int64 `value` carries."""
    return value & U64_MAX


class _LedgerIdFields(NamedTuple):
    scope_id: int
    ledger_id: int


class LedgerId(_LedgerIdFields):
    """A ledger's 128-bit name: `scope_id` (high 64 bits) and `ledger_id` (low 64 bits), both 0 … 2^64−1.

    Immutable, hashable, and ordered as the unsigned 128-bit number. Scope 0 is today's BookKeeper. Source: BP-35.
    Raises UsageError when a half is outside its 64 bits.
    """

    __slots__ = ()

    def __new__(cls, scope_id: int, ledger_id: int) -> LedgerId:
        if not (0 <= scope_id <= U64_MAX and 0 <= ledger_id <= U64_MAX):
            raise UsageError(f"Ledger id ({scope_id}, {ledger_id}) does not fit in two unsigned 64-bit halves")
        return super().__new__(cls, scope_id, ledger_id)

    @classmethod
    def from_value(cls, value: int) -> LedgerId:
        """Return the id that is the unsigned 128-bit number `value`."""
        return cls(value >> 64, value & U64_MAX)

    @classmethod
    def of(cls, ledger: AnyLedgerId, scope_id: int | None = None) -> LedgerId:
        """Return the id that `ledger` is: a LedgerId or UUID, or the number of a ledger in `scope_id` (None: scope 0).

        Raises UsageError for a number that does not fit, an id of another scope than `scope_id`, and other types.
        """
        if isinstance(ledger, int):
            return cls(scope_id or 0, ledger)
        number = getattr(ledger, "int", None)
        found = ledger if isinstance(ledger, LedgerId) else None if number is None else cls.from_value(number)
        if found is None:
            raise UsageError(
                f"Not a ledger id: {ledger!r}", hint="give an int, LedgerId or UUID; LedgerId.parse reads text"
            )
        if scope_id is not None and found.scope_id != scope_id:
            raise UsageError(f"Ledger {found} is in scope {found.scope_id}, not in scope {scope_id}")
        return found

    @classmethod
    def random(cls) -> LedgerId:
        """Return a new id from a random (version 4) UUID split in two; needs no central counter."""
        import uuid

        return cls.from_value(uuid.uuid4().int)

    @classmethod
    def parse(cls, text: str, scope_id: int | None = None) -> LedgerId:
        """Read any text form; a bare ledger id is in `scope_id`, else in scope 0.

        Raises UsageError if the text is not a ledger id, or names a scope other than `scope_id`.
        """
        full = _parse_qualified(text)
        if full is None and ":" in text:
            scope_text, _, id_text = text.partition(":")
            scope, ledger = _parse_half(scope_text), _parse_half(id_text)
            if scope is None or ledger is None:
                raise UsageError(f"Not a ledger id: {text!r}", hint=FORMS_HELP)
            full = cls(scope, ledger)
        if full is not None:
            if scope_id is not None and full.scope_id != scope_id:
                raise UsageError(
                    f"Ledger {text!r} is in scope {full.scope_id}, but the scope id given is {scope_id}",
                    hint="drop one of the two",
                )
            return full
        ledger = _parse_half(text, negative=True)
        if ledger is None:
            raise UsageError(f"Not a ledger id: {text!r}", hint=FORMS_HELP)
        return cls(scope_id or 0, ledger)

    @property
    def value(self) -> int:
        """The unsigned 128-bit number."""
        return self[0] << 64 | self[1]

    @property
    def qualified_name(self) -> str:
        """`ledgerQualifiedName`: 32 lower-case hex digits, scope first."""
        return f"{self[0]:016x}{self[1]:016x}"

    @property
    def uuid(self) -> str:
        """The dashed UUID form."""
        name = self.qualified_name
        return f"{name[:8]}-{name[8:12]}-{name[12:16]}-{name[16:20]}-{name[20:]}"

    @property
    def is_scoped(self) -> bool:
        """True if the scope is not 0, so that BP-35's formats apply."""
        return self[0] != 0

    def to_json(self) -> dict[str, str]:
        """Return the three id fields of every JSON object that names a ledger; unsigned decimal strings."""
        return {
            "ledgerScopeId": str(self[0]),
            "ledgerId": str(self[1]),
            "ledgerQualifiedName": self.qualified_name,
        }

    def __str__(self) -> str:
        return self.qualified_name if self[0] else str(self[1])

    def __repr__(self) -> str:
        return f"LedgerId({self[0]}, {self[1]})"


class GivenLedgerId(LedgerId):
    """A ledger id that is printed in the form in which it was given: a UUID, hex, `SCOPE:ID`. Equal to its LedgerId."""

    text = ""

    @classmethod
    def keep(cls, ledger: LedgerId, *texts: str | None) -> LedgerId:
        """Return `ledger` with the first of `texts` that names it without a scope beside; else as it is."""
        for text in filter(None, texts):
            if not _NEGATIVE.fullmatch(text) and LedgerId.parse(text) == ledger:
                given = cls(*ledger)
                given.text = text
                return given
        return ledger

    def __str__(self) -> str:
        return self.text


#: A ledger, in the forms that the client accepts.
AnyLedgerId: TypeAlias = "int | LedgerId | UUID"


def ledger_ids(scope_id: int, numbers: Iterable[int]) -> list[LedgerId]:
    """Return the ledgers of one scope with these ids. Ids are not checked, since listings have millions of them."""
    return list(map(tuple.__new__, repeat(LedgerId), zip(repeat(scope_id), numbers)))


class LedgerIdSet(Set[LedgerId]):
    """A set of ledger ids in ascending order, in 16 bytes each."""

    __slots__ = ("_ids", "_scopes")

    def __init__(self, ids: Iterable[LedgerId] = ()) -> None:
        self._scopes, self._ids = array("Q"), array("Q")
        for ledger in ids:
            self.add(ledger)

    def add(self, ledger: LedgerId) -> None:
        """Add an id, fastest if it is among the greatest."""
        if not self._ids or (self._scopes[-1], self._ids[-1]) < ledger:
            self._scopes.append(ledger.scope_id)
            self._ids.append(ledger.ledger_id)
        elif ledger not in self:
            at = bisect_left(self, ledger)
            self._scopes.insert(at, ledger.scope_id)
            self._ids.insert(at, ledger.ledger_id)

    def __len__(self) -> int:
        return len(self._ids)

    def __iter__(self) -> Iterator[LedgerId]:
        return map(LedgerId, self._scopes, self._ids)

    def place(self, ledger: object) -> int:
        """Return the index of an id in ascending order, -1 for one that is not here."""
        if not isinstance(ledger, LedgerId):
            return -1
        first = bisect_left(self._scopes, ledger.scope_id)
        end = bisect_right(self._scopes, ledger.scope_id, first)
        at = bisect_left(self._ids, ledger.ledger_id, first, end)
        return at if at < end and self._ids[at] == ledger.ledger_id else -1

    def __contains__(self, ledger: object) -> bool:
        return self.place(ledger) >= 0

    def __getitem__(self, index: int) -> LedgerId:
        """Return the id at `index` in ascending order; negative from the end."""
        return LedgerId(self._scopes[index], self._ids[index])

    def between(self, first: LedgerId, last: LedgerId) -> Iterator[LedgerId]:
        """Yield the ids from `first` to `last`, both included."""
        places = slice(bisect_left(self, first), bisect_right(self, last))
        return map(LedgerId, self._scopes[places], self._ids[places])


def _parse_qualified(text: str) -> LedgerId | None:
    if match := _QUALIFIED_NAME.fullmatch(text):
        return LedgerId.from_value(int(match[1], 16))
    if match := _DASHED_UUID.fullmatch(text):
        return LedgerId.from_value(int("".join(match.groups()), 16))
    return None


def _parse_half(text: str, *, negative: bool = False) -> int | None:
    if match := _HEX.fullmatch(text):
        return int(match[1], 16)
    if _DECIMAL.fullmatch(text):
        value = int(text)
    elif negative and _NEGATIVE.fullmatch(text):
        value = int(text)
        return to_unsigned(value) if value >= -(1 << 63) else None
    else:
        return None
    return value if value <= U64_MAX else None


def parse_scope_id(text: str) -> int:
    """Read a scope id: decimal (negative: two's complement) or `0x` hex, at most 64 bits. Raises UsageError."""
    value = _parse_half(text, negative=True)
    if value is None:
        raise UsageError(f"Not a ledger scope id: {text!r}", hint="a decimal or 0x number of at most 64 bits")
    return value


def resolve_ledger(
    argument: str | None = None,
    *,
    ledger_id: str | None = None,
    ledger_scope_id: str | None = None,
    ledger_qualified_name: str | None = None,
) -> LedgerId | None:
    """Return the one ledger that the given text forms name together; None when no form names a ledger.

    Raises UsageError when a form does not parse, two disagree, or only a scope is given.
    """
    scope = None if ledger_scope_id is None else parse_scope_id(ledger_scope_id)
    found: list[tuple[str, LedgerId]] = []
    if ledger_qualified_name is not None:
        full = _parse_qualified(ledger_qualified_name)
        if full is None:
            raise UsageError(
                f"Not a ledger qualified name: {ledger_qualified_name!r}", hint="give 32 hex digits or a UUID"
            )
        if scope is not None and full.scope_id != scope:
            raise UsageError(
                f"--ledger-qualified-name is in scope {full.scope_id}, but --ledger-scope-id is {scope}",
                hint="drop one of the two",
            )
        found.append((ledger_qualified_name, full))
        scope = full.scope_id
    found.extend((text, LedgerId.parse(text, scope)) for text in (argument, ledger_id) if text is not None)
    if not found:
        if scope is not None:
            raise UsageError(
                f"Scope {scope} is given, but no ledger id", hint="add the ledger id, or use --ledger-qualified-name"
            )
        return None
    first_text, first = found[0]
    for text, other in found[1:]:
        if other != first:
            raise UsageError(
                f"{first_text!r} and {text!r} name different ledgers ({first} and {other})", hint="give one of them"
            )
    return first


@lru_cache(maxsize=4096)  # A cluster has few bookies, and a name each in millions of ledgers.
def is_bookie_id(text: str) -> bool:
    """Return whether `text` is a valid bookie id. Source: BookieId."""
    return _BOOKIE_ID.fullmatch(text) is not None and text.lower() != "readonly"


def check_bookie_id(text: str) -> str:
    """Return `text` when it is a valid bookie id. Raises UsageError otherwise."""
    if not is_bookie_id(text):
        raise UsageError(f"Not a bookie id: {text!r}", hint="a bookie id is HOST:PORT or a name without spaces")
    return text


def parse_bookie_address(text: str, what: str) -> tuple[str, tuple[str, int]]:
    """Return the bookie id and (host, port) of `ID=HOST:PORT`. Raises UsageError, which begins with `what`."""
    bookie_id, equals, address = text.rpartition("=")
    host, colon, port = address.rpartition(":")
    if not (equals and colon and bookie_id and host and port.isascii() and port.isdigit() and int(port) < 65536):
        raise UsageError(f"{what} {text!r}: not ID=HOST:PORT")
    return bookie_id, (host.removeprefix("[").removesuffix("]"), int(port))


def random_u64() -> int:
    """Return an unpredictable unsigned 64-bit number."""
    return int.from_bytes(os.urandom(8), "big")
