"""Promises that hold under all faults, derived from the answers that clients got, and not from the product's state.

Durable      an acknowledged entry is at or below the end where the ledger is closed, and can be read
One end      a ledger is closed once: every reader gets the last entry and length of its entries
Fenced       a bookie that said that a ledger is fenced stores no entry of its writer any more
Confirmed    no reader gets a last add confirmed that was not acknowledged to the writer
Replicas     what a bookie said it stored it gives back, until the ledger is deleted
Exact        each read returns the bytes that were written there
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from simulation.runtime import World

from bkctl.client.reader import LedgerEntry
from bkctl.formats.entry import DigestType, read_entry_header
from bkctl.formats.metadata import LedgerMetadata, LedgerState
from bkctl.ids import LedgerId
from bkctl.protocol.messages import AddRequest, ReadRequest, Request, Response, Status


class Violation(AssertionError):
    """Something that must hold did not."""


@dataclass
class Story:
    """One ledger, as its clients know it."""

    ledger: LedgerId
    path: str
    payloads: dict[int, bytes] = field(default_factory=dict)
    last_acknowledged: int = -1
    metadata: LedgerMetadata | None = None
    is_deleted: bool = False

    @property
    def has_no_digest(self) -> bool:
        """Return True if damaged entries cannot be told from intact ones."""
        return self.metadata is not None and self.metadata.digest_type is DigestType.DUMMY

    @property
    def end(self) -> tuple[int, int] | None:
        """Last entry and length, once the ledger is closed."""
        metadata = self.metadata
        if metadata is None or not metadata.is_closed:
            return None
        return metadata.last_entry_id, metadata.length

    def length_at(self, entry_id: int) -> int:
        """Payload bytes up to an entry."""
        return sum(len(self.payloads[each]) for each in range(entry_id + 1))


_MAY_FOLLOW = {
    None: {LedgerState.OPEN},
    LedgerState.OPEN: {LedgerState.OPEN, LedgerState.IN_RECOVERY, LedgerState.CLOSED},
    LedgerState.IN_RECOVERY: {LedgerState.CLOSED},
    LedgerState.CLOSED: set(),
}


class Checker:
    """The stories of all ledgers; each method notes one thing, and raises Violation at once."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.stories: dict[LedgerId, Story] = {}
        self._paths: dict[str, LedgerId] = {}
        #: The entries that each bookie reported as stored: bookie → ledger → entries.
        self.stored: dict[str, dict[LedgerId, set[int]]] = {}
        self._fenced: set[tuple[str, LedgerId]] = set()
        #: Bookies whose disks lie: what they said proves nothing.
        self.liars: set[str] = set()
        self.acknowledged_count = 0
        self.read_count = 0

    def violated(self, what: str) -> Violation:
        """The violation, which also ends the run."""
        violation = Violation(f"seed {self.world.seed}, at {self.world.now:.6f}: {what}")
        self.world.fail(violation)
        return violation

    # --- writers -----------------------------------------------------------------------------------------------------

    def created(self, ledger: LedgerId, path: str, metadata: LedgerMetadata) -> Story:
        story = self.stories[ledger] = Story(ledger, path, metadata=metadata)
        self._paths[path] = ledger
        return story

    def adding(self, story: Story, entry_id: int, payload: bytes) -> None:
        assert story.payloads.setdefault(entry_id, payload) == payload

    def acknowledged(self, story: Story, entry_id: int) -> None:
        if entry_id != story.last_acknowledged + 1:
            raise self.violated(f"{story.ledger!r}: {entry_id} acknowledged behind {story.last_acknowledged}")
        story.last_acknowledged = entry_id
        self.acknowledged_count += 1
        end = story.end
        # Of a ledger that was deleted a bookie knows no fence once it was killed, as Apache's.
        if end is not None and entry_id > end[0] and not (self.is_excused(story) or story.is_deleted):
            raise self.violated(f"{story.ledger!r}: {entry_id} acknowledged although it is closed at {end[0]}")

    def is_excused(self, story: Story) -> bool:
        """Return True if it may end below an acknowledged entry: one was given to a disk that lies."""
        assert story.metadata is not None
        bookies = {bookie for fragment in story.metadata.ensembles for bookie in fragment.bookies}
        return bool(bookies & self.liars)

    # --- metadata ----------------------------------------------------------------------------------------------------

    def stored_metadata(self, path: str, old: bytes | None, new: bytes | None) -> None:
        """A node of the store changed."""
        ledger = self._paths.get(path)
        if ledger is None:
            return
        story = self.stories[ledger]
        if new is None:
            if not story.is_deleted:
                raise self.violated(f"{ledger!r}: its metadata was deleted, and nobody asked for that")
            return
        before, after = story.metadata, LedgerMetadata.parse(new, path)
        story.metadata = after
        state = None if before is None else before.state
        if after.state not in _MAY_FOLLOW[state]:
            raise self.violated(f"{ledger!r}: from {state} to {after.state}")
        if before is not None:
            kept = [each for each in before.ensembles if each.first_entry_id < after.last_fragment.first_entry_id]
            if list(after.ensembles[: len(kept)]) != kept and after.state is not LedgerState.CLOSED:
                raise self.violated(f"{ledger!r}: fragments {before.ensembles} became {after.ensembles}")
        for fragment in after.ensembles:
            if len(set(fragment.bookies)) != after.ensemble_size:
                raise self.violated(f"{ledger!r}: a bookie is twice in {fragment}")
        if after.is_closed:
            self.world.note(f"{ledger!r} is closed at {after.last_entry_id}, {after.length} bytes")
            last = after.last_entry_id
            if last < story.last_acknowledged and not self.is_excused(story):
                raise self.violated(f"{ledger!r}: closed at {last}, and {story.last_acknowledged} was acknowledged")
            if any(entry_id not in story.payloads for entry_id in range(last + 1)):
                raise self.violated(f"{ledger!r}: closed at {last}, behind what was ever written")
            if after.length != story.length_at(last):
                raise self.violated(f"{ledger!r}: closed with {after.length} bytes, not {story.length_at(last)}")

    # --- readers -----------------------------------------------------------------------------------------------------

    def opened(self, story: Story, is_closed: bool, last: int, length: int) -> None:
        """Note that a reader got the last add confirmed, or the end."""
        if is_closed:
            if (last, length) != story.end and not story.is_deleted:
                raise self.violated(f"{story.ledger!r}: a reader sees the end {last, length}, another one {story.end}")
        else:
            self.confirmed(story, last)

    def confirmed(self, story: Story, lac: int) -> None:
        assert story.metadata is not None
        # A recovery confirms what the writer perhaps never knew to be acknowledged.
        known = story.last_acknowledged if story.metadata.state is LedgerState.OPEN else len(story.payloads) - 1
        if lac > known:
            raise self.violated(f"{story.ledger!r}: a reader was told LAC {lac}, {known} is the last")

    def read(self, story: Story, entry: LedgerEntry) -> None:
        self.read_count += 1
        written = story.payloads.get(entry.entry_id)
        if story.has_no_digest and (self.is_excused(story) or entry.entry_id > story.last_acknowledged):
            return  # the rest of a torn group, unacknowledged, and only a digest tells it from an entry
        if entry.payload != written:
            raise self.violated(f"{story.ledger!r}: entry {entry.entry_id} was read, not as written")
        if entry.length != story.length_at(entry.entry_id):
            raise self.violated(f"{story.ledger!r}: entry {entry.entry_id} has length {entry.length}")

    # --- bookies -----------------------------------------------------------------------------------------------------

    def asked(self, bookie: str, request: Request) -> Any:
        """A request reached a bookie; what is returned goes to `answered`."""
        if isinstance(request, AddRequest):
            return (bookie, request.ledger) in self._fenced
        return None

    def answered(self, bookie: str, request: Request, was_fenced: Any, response: Response) -> None:
        if isinstance(request, ReadRequest) and request.fence:
            if response.status in (Status.EOK, Status.ENOENTRY) and bookie not in self.liars:
                self._fenced.add((bookie, request.ledger))
        elif isinstance(request, AddRequest) and response.status is Status.EOK:
            if was_fenced and not request.recovery_add and not self.stories[request.ledger].is_deleted:
                raise self.violated(f"{request.ledger!r}: {bookie} stored entry {request.entry_id} after it was fenced")
            if not request.deferred_sync and bookie not in self.liars:
                self.stored.setdefault(bookie, {}).setdefault(request.ledger, set()).add(request.entry_id)

    def is_fenced(self, bookie: str, ledger: LedgerId) -> bool:
        """Return True if that bookie reported the ledger as fenced."""
        return (bookie, ledger) in self._fenced

    def body_read(self, bookie: str, request: ReadRequest, body: Any) -> None:
        """A bookie gave an entry: it is the one asked for."""
        header = read_entry_header(body)
        if header.ledger != request.ledger or (request.entry_id >= 0 and header.entry_id != request.entry_id):
            raise self.violated(f"{bookie} gave entry {header.entry_id} of {header.ledger!r} to {request}")
