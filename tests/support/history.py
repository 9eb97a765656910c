"""A checker of one ledger's history, as writers and readers saw it.

It holds what a ledger promises: each acknowledged entry is read by every later reader, in order, once, as it was
written; the last add confirmed of a reader never moves back; nothing appears after a close.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count, pairwise


@dataclass
class Read:
    """One read of all entries up to `last`; `entries` are ids and payloads as they came.

    `closed` says that the ledger was closed; a `partial` read ended with an error.
    """

    started: int
    last: int
    entries: list[tuple[int, bytes]]
    closed: bool = False
    partial: bool = False


@dataclass
class History:
    """The events of one ledger, in the order of one clock. An add may have an effect without acknowledgement."""

    name: str = "ledger"
    sent: dict[int, bytes] = field(default_factory=dict)
    #: Entry ids with the time when their acknowledgement was seen, in the order of these.
    acknowledged: list[tuple[int, int]] = field(default_factory=list)
    #: Of each reader: the last add confirmed, time after time.
    confirmed: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    reads: list[Read] = field(default_factory=list)
    #: Times at which a client saw that the ledger is closed, with its last entry.
    closes: list[tuple[int, int]] = field(default_factory=list)
    _clock: Iterator[int] = field(default_factory=count)

    def now(self) -> int:
        """Return the next time."""
        return next(self._clock)

    def add(self, entry_id: int, payload: bytes) -> None:
        """Note an add that is sent."""
        self.sent[entry_id] = payload

    def acknowledge(self, entry_id: int) -> None:
        self.acknowledged.append((self.now(), entry_id))

    def confirm(self, reader: str, last: int) -> None:
        """Note the last add confirmed that a reader sees."""
        self.confirmed.setdefault(reader, []).append((self.now(), last))

    def close(self, last: int) -> None:
        """Note that the ledger was seen closed at `last`."""
        self.closes.append((self.now(), last))

    def read(
        self, started: int, last: int, entries: list[tuple[int, bytes]], *, closed: bool = False, partial: bool = False
    ) -> None:
        self.reads.append(Read(started, last, entries, closed, partial))

    def problems(self) -> list[str]:
        """Return what contradicts the promises of a ledger; empty for a good history."""
        return [f"{self.name}: {problem}" for problem in self._problems()]

    def _problems(self) -> Iterator[str]:
        ids = [entry_id for _, entry_id in self.acknowledged]
        for expected, entry_id in enumerate(ids):
            if entry_id != expected:
                yield f"entry {entry_id} is acknowledged where entry {expected} is due"
                break
        ends = {last for _, last in self.closes}
        if len(ends) > 1:
            yield f"closed at several entries: {sorted(ends)}"
        if ends and max(ids, default=-1) > min(ends):
            yield f"closed at entry {min(ends)}, and entry {max(ids)} is acknowledged"
        for reader, seen in self.confirmed.items():
            for (_, before), (_, after) in pairwise(seen):
                if after < before:
                    yield f"the last add confirmed of {reader} moves back from {before} to {after}"
            if ends and max(last for _, last in seen) > min(ends):
                yield f"{reader} saw entry {max(last for _, last in seen)} confirmed, closed at {min(ends)}"
        for read in self.reads:
            yield from self._problems_of(read)

    def _problems_of(self, read: Read) -> Iterator[str]:
        ids = [entry_id for entry_id, _ in read.entries]
        if ids != list(range(read.last + 1)):
            yield f"a read up to entry {read.last} gave {ids[:5]}…, {len(ids)} entries, not each once and in order"
        for entry_id, payload in read.entries:
            if self.sent.get(entry_id) != payload:
                what = "was written otherwise" if entry_id in self.sent else "was never written"
                yield f"entry {entry_id} of a read {what}"
                break
        for when, end in self.closes:
            if read.last > end or (not read.partial and when < read.started and read.last < end):
                yield f"a read ends at entry {read.last}, the ledger at {end}"
                break
        due = max((entry_id for when, entry_id in self.acknowledged if when < read.started), default=-1)
        if read.closed and read.last < due:
            yield f"a read of the closed ledger ends at entry {read.last}, and entry {due} was acknowledged before"
