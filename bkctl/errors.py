"""The one error tree. Each class has an exit code and, where a bookie can send it, its wire status codes.

`str(error)` is one line: the problem, its place, and `error.hint`, which is a remedy. Only `main` prints errors.
"""

from __future__ import annotations

import copyreg
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, ClassVar, Final

EXIT_CODES: Final[dict[int, str]] = {
    0: "done",
    1: "failed",
    2: "usage error",
    3: "finished with findings",
    4: "not found",
    5: "conflict (version, fenced, exists)",
    6: "unreachable or timed out",
    7: "corrupt data",
    8: "unsupported version",
    129: "interrupted by SIGHUP",
    130: "interrupted",
    143: "interrupted by SIGTERM",
}


class BkctlError(Exception):
    """Failed."""

    exit_code: ClassVar[int] = 1
    #: BookieProtocol (v2) and StatusCode (v3) numbers that a bookie sends for this error.
    v2_code: ClassVar[int | None] = None
    v3_code: ClassVar[int | None] = None

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}; {self.hint}" if self.hint else self.message

    def __reduce__(self) -> tuple[Any, ...]:
        """Return what pickle needs: attributes are restored, since subclasses are constructed in different ways."""
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for codes, code in ((BY_V2_CODE, cls.__dict__.get("v2_code")), (BY_V3_CODE, cls.__dict__.get("v3_code"))):
            if code is not None and codes.setdefault(code, cls) is not cls:
                raise TypeError(f"{cls.__name__} and {codes[code].__name__} both claim status code {code}")


#: Bookie status code → error class, filled as the classes are made.
BY_V2_CODE: Final[dict[int, type[BkctlError]]] = {}
BY_V3_CODE: Final[dict[int, type[BkctlError]]] = {}


def is_interrupt(error: BaseException | None) -> bool:
    """Return True if `error` is a KeyboardInterrupt, or was raised while one ended the work."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, KeyboardInterrupt):
            return True
        seen.add(id(error))
        error = error.__context__
    return False


def restated(error: BkctlError) -> BkctlError:
    """Return a new error like `error` to raise at another place, so that tracebacks do not pile up."""
    if type(error).__init__ is not BkctlError.__init__:
        return error
    copy = type(error)(error.message, hint=error.hint)
    copy.__cause__ = error.__cause__
    return copy


class UsageError(BkctlError):
    """The request does not make sense."""

    exit_code = 2


class IllegalOperation(UsageError):
    """The protocol or the ledger cannot do this (BKIllegalOpException)."""


class Unauthorized(BkctlError):
    """Wrong ledger password, master key or login.

    `changed_nothing`: a metadata store refused the first and only attempt of a write.
    """

    changed_nothing: bool = False
    v2_code = 102
    v3_code = 502


class BadRequest(BkctlError):
    """The bookie refused the request as malformed."""

    v2_code = 100
    v3_code = 404


class BookieIOError(BkctlError):
    """The bookie failed on its disk."""

    v2_code = 101
    v3_code = 501


class ReadOnlyBookie(BkctlError):
    """The bookie accepts no writes at present."""

    v2_code = 105
    v3_code = 505


class TooManyRequests(BkctlError):
    """The bookie is overloaded."""

    v2_code = 106
    v3_code = 506


class UnknownLedgerState(BkctlError):
    """The bookie may have lost data of this ledger, and so gives no negative answer."""

    v2_code = 107
    v3_code = 507


class FindingsError(BkctlError):
    """A check finished, and found problems."""

    exit_code = 3


class NotFound(BkctlError):
    """The named object does not exist."""

    exit_code = 4


class LedgerNotFound(NotFound):
    """No such ledger (NoSuchLedgerExistsException)."""

    v2_code = 1
    v3_code = 402


class EntryNotFound(NotFound):
    """No such entry (NoSuchEntryException)."""

    v2_code = 2
    v3_code = 403


class Conflict(BkctlError):
    """Another client got there first."""

    exit_code = 5


class MetadataVersionConflict(Conflict):
    """The metadata changed since it was read (MetadataVersionException).

    `may_be_applied`: the connection was lost before the write was answered, and another client has written since, so
    that it is unknown if our write came before.
    """

    def __init__(self, message: str, *, hint: str | None = None, may_be_applied: bool = False) -> None:
        super().__init__(message, hint=hint)
        self.may_be_applied = may_be_applied


class AlreadyExists(Conflict):
    """The object to create exists already."""


class LedgerExists(AlreadyExists):
    """A ledger of this id exists (LedgerExistException)."""


class LedgerFenced(Conflict):
    """The ledger is fenced: another client recovers or recovered it."""

    v2_code = 104
    v3_code = 504


class LedgerClosed(Conflict):
    """The ledger is closed."""


class UnclosedFragment(Conflict):
    """Its writer may still change this fragment, so it is not replicated (UnclosedFragmentException)."""


class DuplicateEntryId(Conflict):
    """The entry id was added before (DuplicateEntryIdException)."""


class DirectoryInUse(Conflict):
    """A bookie or another command holds the directory."""


class TooManyPending(BkctlError):
    """More adds are in flight than a ledger may have; `await handle.ready()` before each add."""


class Unreachable(BkctlError):
    """A server cannot be reached, or did not answer in time."""

    exit_code = 6


class TimedOut(Unreachable):
    """No progress within the timeout."""


class BookieUnavailable(Unreachable):
    """A bookie cannot be reached, or cannot serve this ledger."""


class NotEnoughBookies(Unreachable):
    """Too few bookies for the ensemble."""


class LedgerRecoveryFailed(Unreachable):
    """Too few bookies helped to decide where the ledger ends; it stays IN_RECOVERY and can be tried again."""


class LedgerLengthUnknown(LedgerRecoveryFailed):
    """A ledger's last entry is known, but no bookie gives it, and only that entry tells the ledger's length."""


class Corrupt(BkctlError):
    """Bytes that a bookie never writes."""

    exit_code = 7


class TruncatedRecord(Corrupt):
    """The bytes end inside a record."""

    def __init__(self, what: str, *, offset: int, needed: int, present: int, where: str = "") -> None:
        super().__init__(
            f"{where + ': ' if where else ''}{what} at byte {offset} needs {needed} bytes, {present} are there"
        )
        self.what, self.offset, self.needed, self.present = what, offset, needed, present


class CorruptRecord(Corrupt):
    """A record whose fields contradict the format."""

    def __init__(self, problem: str, *, offset: int, where: str = "", hint: str | None = None) -> None:
        super().__init__(f"{where + ': ' if where else ''}{problem} at byte {offset}", hint=hint)
        self.problem, self.offset = problem, offset


class DigestMismatch(Corrupt):
    """An entry that does not match its digest, or is not the requested one."""


class ProtocolError(Corrupt):
    """The peer sent what the protocol does not allow."""


class Unsupported(BkctlError):
    """A version, store or storage class that this release does not speak."""

    exit_code = 8


class BadVersion(Unsupported):
    """The bookie does not speak this protocol version."""

    v2_code = 103
    v3_code = 503


@contextmanager
def on_error(undo: Callable[[], object], *ignored: type[BaseException]) -> Iterator[None]:
    """Call `undo` after any error in the block, which stays on its way; of its own errors, `ignored` are dropped."""
    try:
        yield
    except BaseException:
        with suppress(*ignored):
            undo()
        raise


__all__ = [name for name, found in list(globals().items()) if isinstance(found, type) and issubclass(found, BkctlError)]
