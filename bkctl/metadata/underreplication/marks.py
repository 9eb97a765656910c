"""Marks of under-replicated ledgers: which ledger lacks entries on which bookies, since when."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from itertools import tee
from typing import Final, NamedTuple

from bkctl.errors import AlreadyExists, BkctlError, MetadataVersionConflict, NotFound
from bkctl.formats.metadata import parse_text, print_text
from bkctl.ids import I64_MAX, LedgerId, check_bookie_id
from bkctl.metadata.store import NEW, MetadataStore, Versioned, attempt, walk_levels, watch_all
from bkctl.metadata.underreplication.layout import (
    DISABLE,
    SCOPED,
    UNDERREPLICATION,
    UnderreplicationLayout,
    base_path,
    mark_path,
)

_HEX_4: Final = re.compile("[0-9a-f]{4}", re.ASCII)
#: Names of marks, and of locks.
DEFAULT_NODE: Final = re.compile("urL([0-9]{10,19})", re.ASCII)
SCOPED_NODE: Final = re.compile("urL([0-9a-f]{32})", re.ASCII)


class UnderreplicatedLedger(NamedTuple):
    """A marked ledger.

    `missing_replicas` are the bookies that lack entries of it, in the order in which the auditor found them missing;
    `ctime_ms` is the time of the last mark, in ms since 1970 (from the mark, else from the store, else None).
    `suspects` are the missing replicas whose every entry a worker verifies, if they answer: the mark names them twice,
    which Apache's workers and auditors ignore and keep.
    """

    ledger: LedgerId
    missing_replicas: tuple[str, ...]
    ctime_ms: int | None
    version: int
    suspects: tuple[str, ...] = ()


class MarkChange(NamedTuple):
    """A ledger and the bookies of its mark; `changed` is False if the mark was as requested."""

    ledger: LedgerId
    missing_replicas: tuple[str, ...]
    changed: bool


class LedgerMarks:
    """The marks of one cluster, in all scopes. Methods raise Unreachable, as `MetadataStore`."""

    def __init__(self, store: MetadataStore, layout: UnderreplicationLayout | None = None) -> None:
        self.store = store
        self._layout = layout or UnderreplicationLayout(store)

    def list(self, scope_id: int | None = 0) -> Iterator[tuple[LedgerId, UnderreplicatedLedger | BkctlError]]:
        """Yield the marked ledgers of the scope (None: of every scope) in ascending order.

        A damaged mark is yielded as its error. Marks written or removed during the iteration may be included.
        Raises Unsupported for a later layout.
        """
        self._layout.check()
        places, asked = tee(self._places(scope_id))
        for (path, ledger), found in zip(places, self.store.get_many(path for path, _ in asked), strict=True):
            if found is not None:
                yield ledger, attempt(self._parse, ledger, path, found)

    def cursor(self) -> Callable[[LedgerId], UnderreplicatedLedger | None]:
        """Return a function that gives a ledger's mark, or None; callers ask for ledgers in ascending order.

        A damaged mark counts as none. The cursor holds one mark at a time. Raises as `list`.
        """
        marks = (mark for _, mark in self.list(None) if not isinstance(mark, BkctlError))
        present = next(marks, None)

        def mark_of(ledger: LedgerId) -> UnderreplicatedLedger | None:
            nonlocal present
            while present is not None and present.ledger < ledger:
                present = next(marks, None)
            return present if present is not None and present.ledger == ledger else None

        return mark_of

    def has_marks(self, scope_id: int | None = None) -> bool:
        """Return whether a ledger of the scope (None: of any scope) is marked."""
        return next(self._places(scope_id), None) is not None

    def ids(self, *, scoped: bool) -> Iterator[LedgerId]:
        """Yield the ids of marked ledgers of scope 0, or with `scoped` of all other scopes, ascending.

        The marks themselves are not read.
        """
        return (ledger for _, ledger in self._places(None if scoped else 0) if ledger.is_scoped == scoped)

    def get(self, ledger: LedgerId) -> UnderreplicatedLedger | None:
        """Return the ledger's mark, None for an unmarked ledger. Raises Corrupt, naming the node."""
        path = mark_path(ledger)
        found = self.store.get(path)
        return None if found is None else self._parse(ledger, path, found)

    def add(
        self, ledger: LedgerId, missing_replicas: Collection[str], *, suspect: bool = False, now_ms: int | None = None
    ) -> bool:
        """`mark` the ledger; return False when the mark says all of that already."""
        return self.mark(ledger, missing_replicas, suspect=suspect, now_ms=now_ms).changed

    def mark(
        self,
        ledger: LedgerId,
        missing_replicas: Collection[str],
        *,
        suspect: bool = False,
        now_ms: int | None = None,
        dry_run: bool = False,
    ) -> MarkChange:
        """Mark the ledger as lacking entries on the bookies `missing_replicas`, in addition to those already marked.

        `suspect`: workers verify every entry of these. With `dry_run` nothing is written. Raises UsageError for an
        invalid bookie id, Corrupt when the present mark is damaged. Source: markLedgerUnderreplicatedAsync.
        """
        from bkctl.formats.data_formats_pb2 import UnderreplicatedLedgerFormat

        for bookie_id in missing_replicas:
            check_bookie_id(bookie_id)
        if not dry_run:
            self._layout.prepare()
        path = mark_path(ledger)
        ctime_ms = time.time_ns() // 1_000_000 if now_ms is None else now_ms
        while True:
            found = self.store.get(path)
            mark = None if found is None else self._parse(ledger, path, found)
            present, suspects = ((), ()) if mark is None else (mark.missing_replicas, mark.suspects)
            every = tuple(dict.fromkeys((*present, *missing_replicas)))
            twice = tuple(dict.fromkeys((*suspects, *missing_replicas))) if suspect else suspects
            change = MarkChange(ledger, every, mark is None or (every, twice) != (present, suspects))
            if dry_run or not change.changed:
                return change
            message = UnderreplicatedLedgerFormat(replica=[*every, *twice], ctime=ctime_ms)
            try:
                self.store.put(path, print_text(message).encode("ascii"), NEW if found is None else found.version)
            except (AlreadyExists, NotFound, MetadataVersionConflict):
                continue  # Another process marked or unmarked the ledger since the read.
            return change

    def remove(self, ledger: LedgerId, version: int | None = None) -> None:
        """Delete the ledger's mark (with `version`: only in that version), and the parents left empty.

        Raises NotFound for an unmarked ledger; MetadataVersionConflict when the ledger was marked again since: the mark
        stays.
        """
        path = mark_path(ledger)
        try:
            self.store.delete(path, version, prune=8 if ledger.is_scoped else 4)
        except MetadataVersionConflict as error:
            raise MetadataVersionConflict(
                f"Ledger {ledger} was marked underreplicated again meanwhile", may_be_applied=error.may_be_applied
            ) from error
        except NotFound as error:
            raise NotFound(f"Ledger {ledger} is not marked underreplicated") from error

    def watch_work(self, callback: Callable[[], None], *, scoped: bool) -> Callable[[], None]:
        """Call `callback()` when workers on scope 0, or with `scoped` on the other scopes, may have new work.

        New work: the first mark, a released lock, auto-recovery switched on or off. Further marks beside existing ones
        cause no call. Returns a function that cancels. See MetadataStore.watch.
        """
        base = base_path(scoped)
        places = ((f"{base}/ledgers", True), (f"{base}/locks", True), (DISABLE, False))
        return watch_all(self.store.watch(path, callback, children=children) for path, children in places)

    def _places(self, scope_id: int | None) -> Iterator[tuple[str, LedgerId]]:
        """Yield the path and ledger of each mark, by ascending ledger id."""
        if scope_id in (None, 0):
            for directory, _, names in walk_levels(self.store, f"{UNDERREPLICATION}/ledgers", (_HEX_4,) * 4):
                numbers = [(int(match[1]), name) for name in names if (match := DEFAULT_NODE.fullmatch(name))]
                for number, name in sorted(numbers):
                    if number <= I64_MAX:
                        yield f"{directory}/{name}", LedgerId(0, number)
        if scope_id == 0:
            return
        first = "" if scope_id is None else f"{scope_id:016x}"
        for directory, _, names in walk_levels(self.store, f"{SCOPED}/ledgers", (_HEX_4,) * 8, first):
            for name in names:
                if match := SCOPED_NODE.fullmatch(name):
                    ledger = LedgerId.from_value(int(match[1], 16))
                    if scope_id is not None and ledger.scope_id != scope_id:
                        return
                    yield f"{directory}/{name}", ledger

    def _parse(self, ledger: LedgerId, path: str, found: Versioned[bytes]) -> UnderreplicatedLedger:
        return parse_mark(ledger, found, f"{path} in {self.store.name}: Mark")


def parse_mark(ledger: LedgerId, found: Versioned[bytes], where: str = "Mark") -> UnderreplicatedLedger:
    """Return the mark that a node holds. Raises Corrupt, naming `where`."""
    message = parse_text("UnderreplicatedLedgerFormat", found.value, where)
    ctime_ms = message.ctime if message.HasField("ctime") else found.ctime_ms
    replicas = Counter(message.replica)
    suspects = tuple(bookie_id for bookie_id, count in replicas.items() if count > 1)
    return UnderreplicatedLedger(ledger, tuple(replicas), ctime_ms, found.version, suspects)
