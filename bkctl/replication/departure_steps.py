"""Steps of a departure: what decommission and drain found or did, one row each."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Final, NamedTuple

from bkctl.replication.fragments import EntrySpan
from bkctl.replication.move_plan import LedgerMove

if TYPE_CHECKING:
    from bkctl.ids import LedgerId

OPEN_ADVICE: Final = "its writer leaves the bookie with its next entry; 'bkctl ledger recover' closes it"
UNRECOVERABLE_ADVICE: Final = "start a bookie that has them; or give them up with --skip-unrecoverable"


class StepKind(StrEnum):
    """The subject of a step."""

    STOPPED = "stopped"
    READ_ONLY = "read-only"
    AUTO_RECOVERY = "auto-recovery"
    AUDITOR = "auditor"
    BOOKIES = "bookies"
    SPACE = "space"
    LEDGERS = "ledgers"
    LEDGER = "ledger"
    COOKIE = "cookie"


class StepResult(StrEnum):
    """The result of a step; a ledger's result may be any MoveOutcome."""

    OK = "ok"
    WARNING = "warning"
    #: The departure cannot continue, or the ledger stays on the bookie.
    BLOCKED = "blocked"
    MOVED = "moved"
    GONE = "gone"
    OPEN = "open"
    UNRECOVERABLE = "unrecoverable"
    #: Unrecoverable, and skipped at the caller's request.
    SKIPPED = "skipped"
    FAILED = "failed"
    DELETED = "deleted"
    KEPT = "kept"


#: The number of passes over the ledgers, to find those that came to the bookie meanwhile.
PASS_COUNT_MAX: Final = 3
#: Results that prevent the departure of a bookie.
BLOCKING_RESULTS: Final = frozenset((StepResult.BLOCKED, StepResult.OPEN, StepResult.UNRECOVERABLE, StepResult.FAILED))


class Step(NamedTuple):
    """A finding or an action. `advice` says what to do about a finding.

    A step about a ledger has its id, the copied entries and bytes, and the entries that no replica returns.
    """

    kind: StepKind
    result: StepResult
    message: str
    advice: str | None = None
    ledger: LedgerId | None = None
    entry_count: int | None = None
    size_bytes: int | None = None
    unreadable: tuple[EntrySpan, ...] = ()


def ledger_step(move: LedgerMove, result: StepResult, advice: str | None) -> Step:
    """Return the step for the result of one ledger's move."""
    if move.problem is not None:
        message = move.problem
    elif result is StepResult.GONE:
        message = "Another worker moved it, or it was deleted"
    else:
        message = f"Copied, in {move.fragment_count:,} {'fragment' if move.fragment_count == 1 else 'fragments'}"
    return Step(
        StepKind.LEDGER, result, message, advice, move.ledger, move.entry_count, move.size_bytes, move.unreadable
    )


def ledgers_text(count: int) -> str:
    """Return `1 ledger`, `2 ledgers`."""
    return f"{count:,} {'ledger' if count == 1 else 'ledgers'}"


def bookies_text(count: int) -> str:
    """Return `1 bookie`, `2 bookies`."""
    return f"{count:,} {'bookie' if count == 1 else 'bookies'}"
