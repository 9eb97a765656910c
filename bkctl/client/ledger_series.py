"""Work on ledgers one after the other: read, verify and recover them, as rows that come one by one."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from bkctl.client.ledger import BookKeeper
from bkctl.client.read_handle import ReadHandle
from bkctl.client.reader import LedgerEntry
from bkctl.client.recovery import RecoveryLoss, RecoveryPlan
from bkctl.client.verify import ReplicaFinding, Verification, read_replica
from bkctl.errors import EntryNotFound
from bkctl.ids import LedgerId
from bkctl.metadata.ledgers import VersionedMetadata
from bkctl.pace import Pace
from bkctl.tasks import in_order

#: Ledgers that are looked at at once.
LOOKS_AT_ONCE: Final = 64


class EntriesToRead(NamedTuple):
    """The entries of a ledger to read: from `first` to `last`, at most `count_max`; or its last `tail_count`."""

    first: int | None = None
    last: int | None = None
    count_max: int | None = None
    tail_count: int | None = None

    def of(self, handle: ReadHandle) -> tuple[int, int]:
        """Return the first and last entry; an empty range for an empty ledger. Raises EntryNotFound beyond its end."""
        end = handle.last_add_confirmed
        for flag, bound in (("--from", self.first), ("--to", self.last)):
            if bound is not None and bound > end:
                raise EntryNotFound(
                    f"Ledger {handle.ledger} {_extent(handle)}, and {flag} is {bound}",
                    hint=f"drop {flag}, or give less",
                )
        final = end if self.last is None else self.last
        if self.tail_count is not None:
            return max(0, final - self.tail_count + 1), final
        start = self.first or 0
        return start, final if self.count_max is None else min(final, start + self.count_max - 1)


def _extent(handle: ReadHandle) -> str:
    end = handle.last_add_confirmed
    if handle.is_closed:
        return "has no entries" if end < 0 else f"ends at entry {end}"
    return "is open and has no confirmed entries yet" if end < 0 else f"is open and confirmed up to entry {end}"


async def read_ledger(
    bookkeeper: BookKeeper,
    ledger: LedgerId,
    entries: EntriesToRead,
    *,
    password: bytes | None = b"",
    recovery: bool = False,
    bookie_id: str | None = None,
    verify: bool = True,
    note: Callable[[str], None] = lambda _: None,
) -> AsyncGenerator[Sequence[LedgerEntry]]:
    """Yield runs of the entries of a ledger, from its readers' bookies or from `bookie_id`; `note` gets the range.

    Raises as `open_ledger`, `EntriesToRead.of`, `read_runs` and `read_replica`.
    """
    async with await bookkeeper.open_ledger(ledger, password=password, recovery=recovery) as handle:
        first, final = entries.of(handle)
        note(f"ledger {ledger}: entries {first} to {final}")
        if final < first:
            return
        found: AsyncIterator[Sequence[LedgerEntry]] = (
            handle.read_runs(first, final, verify=verify)
            if bookie_id is None
            else ((entry,) async for entry in read_replica(handle, bookie_id, first, final, verify=verify))
        )
        async for run in found:
            yield run


async def follow_ledger(
    bookkeeper: BookKeeper,
    ledger: LedgerId,
    *,
    first: int | None = None,
    tail_count: int = 10,
    password: bytes | None = b"",
    verify: bool = True,
) -> AsyncGenerator[Sequence[LedgerEntry]]:
    """Yield the entries from `first` (None: the last `tail_count`), and new ones until the ledger is closed."""
    async with await bookkeeper.open_ledger(ledger, password=password) as handle:
        start = max(0, handle.last_add_confirmed + 1 - tail_count) if first is None else first
        async for entry in handle.tail(start, verify=verify):
            yield (entry,)


class FindingRow(NamedTuple):
    """One finding of a verification of several ledgers."""

    ledger: LedgerId
    finding: ReplicaFinding


async def verify_ledgers(
    bookkeeper: BookKeeper,
    ledgers: Iterable[LedgerId],
    *,
    begin: Callable[[str, int], None],
    end: Callable[[LedgerId, Verification], None],
    progress: Callable[[int], None],
    pace: Pace | None = None,
) -> AsyncGenerator[FindingRow]:
    """Yield the findings of each ledger, as `Verification`.

    `begin` gets each stage and its number of entries, `end` each ledger with its finished verification.
    """
    for ledger in ledgers:
        async with await bookkeeper.open_ledger(ledger, password=None) as handle:
            begin(f"Verifying ledger {ledger}", handle.last_add_confirmed + 1)
            verification = Verification(handle, progress, pace=pace)
            async for finding in verification.findings():
                yield FindingRow(ledger, finding)
        end(ledger, verification)


async def plan_recoveries(
    bookkeeper: BookKeeper, ledgers: Iterable[LedgerId], *, with_losses: bool
) -> AsyncGenerator[RecoveryPlan]:
    """Yield in order what a recovery of each ledger would do, and `with_losses` what it would give up."""

    async def look(ledger: LedgerId) -> RecoveryPlan:
        return await bookkeeper.plan_recovery(ledger, with_loss=with_losses)

    async for _, plan in in_order(ledgers, look, lambda: LOOKS_AT_ONCE):
        yield plan


async def recover_ledgers(
    bookkeeper: BookKeeper, ledgers: Iterable[LedgerId], losses: Mapping[LedgerId, RecoveryLoss]
) -> AsyncGenerator[tuple[LedgerId, VersionedMetadata]]:
    """Recover and close each ledger, and yield its metadata then; `losses` are those that a recovery may cause."""
    for ledger in ledgers:
        async with await bookkeeper.open_ledger(
            ledger, password=None, recovery=True,
            accept_loss=losses.get(ledger),
        ) as handle:  # fmt: skip
            yield ledger, handle.versioned_metadata
