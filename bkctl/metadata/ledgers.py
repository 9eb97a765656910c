"""Ledgers in a metadata store: where each one's metadata is kept, listing them in order, new ids, the JSON object.

In scope 0 the paths are Apache's. On ZooKeeper the scopes ≠ 0 are a tree beside them, whatever Apache's layout is
(BP-35): `scopes/<scope: 4 hex>/<12 hex>/<ledger: 4 hex>/<4>/<4>/L<4>`; `scopes` itself holds the instance id.
Source: AbstractZkLedgerManager and its subclasses, StringUtils, ZkLedgerIdGenerator, LongZkLedgerIdGenerator.
"""

from __future__ import annotations

import re
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, islice
from typing import Any, Final, Literal, NamedTuple

from bkctl.errors import (
    AlreadyExists,
    BkctlError,
    Conflict,
    Corrupt,
    IllegalOperation,
    LedgerExists,
    LedgerNotFound,
    MetadataVersionConflict,
    NotFound,
    Unreachable,
    UsageError,
)
from bkctl.formats.metadata import LedgerMetadata
from bkctl.ids import I64_MAX, U64_MAX, LedgerId, ledger_ids, random_u64
from bkctl.metadata.store import NEW, NO_CLUSTER_HINT, MetadataStore, Versioned, walk_levels

#: The first id that the hierarchical manager keeps in the long tree, and that a 31-bit sequence cannot give.
SHORT_ID_END: Final = (1 << 31) - 1
SCOPES: Final = "scopes"
INSTANCE_ID: Final = "INSTANCEID"
_HIGH_ORDER_DIRECTORY = re.compile(r"HOB-([0-9]{10})", re.ASCII)
_HIGH_ORDER_DIRECTORIES_KEPT: Final = 3
_QUALIFIED_NAME = re.compile(r"[0-9a-f]{32}", re.ASCII)
_FLAT_LEDGER = re.compile(r"L([0-9]{10,19})", re.ASCII)
_LEAF = re.compile(r"L([0-9]{4})", re.ASCII)
_SCOPED_LEAF = re.compile(r"L([0-9a-f]{4})", re.ASCII)
_HEX_4 = re.compile(r"[0-9a-f]{4}", re.ASCII)
_HEX_12 = re.compile(r"[0-9a-f]{12}", re.ASCII)
_PAGE_SIZE: Final = 1000
RANGE_SIZE: Final = 10_000

ScopesState = Literal["absent", "ours", "foreign"]


class VersionedMetadata(NamedTuple):
    """A ledger's metadata as read; `ctime_ms` is the one stored in it, else the store's, else None."""

    metadata: LedgerMetadata
    version: int
    ctime_ms: int | None


class LedgerRange(NamedTuple):
    """Every ledger there is from `first` to `last`, both included: `ledgers`, ascending, perhaps none."""

    first: LedgerId
    last: LedgerId
    ledgers: list[LedgerId]


class ProcessedLedgers(NamedTuple):
    """How many ledgers were `seen`, and those that failed, with their errors, in the order in which they failed."""

    seen: int
    failures: list[tuple[LedgerId, BkctlError]]


class LedgerManager(ABC):
    """The ledgers of one cluster. Methods raise Unreachable, as `MetadataStore`; all may be called from any thread."""

    def __init__(self, store: MetadataStore) -> None:
        self.store = store

    # one ledger

    def create(self, ledger: LedgerId, metadata: LedgerMetadata) -> int:
        """Store the metadata of a new ledger; returns its version.

        Format version 3 carries a random creator token, so that a create whose answer was lost is recognised.
        Raises LedgerExists; UsageError for a scope-0 id of 2^63 or more; Conflict when `scopes` is another cluster's.
        Source: AbstractZkLedgerManager.createLedgerMetadata.
        """
        if not ledger.is_scoped and ledger.ledger_id > I64_MAX:
            raise UsageError(
                f"Ledger id {ledger.ledger_id} is 2^63 or more, which no ledger of scope 0 can have",
                hint="give a smaller id, or a ledger scope id",
            )
        path = self.path(ledger)
        if ledger.is_scoped:
            self._prepare_scopes()
        if metadata.format_version > 2 and metadata.c_token is None:
            metadata = replace(metadata, c_token=random_u64() % I64_MAX)
        try:
            return self.store.put(path, metadata.serialize(), NEW)
        except AlreadyExists as error:
            if metadata.format_version > 2:
                try:
                    found = self.read(ledger)
                except (LedgerNotFound, Corrupt):
                    pass  # Created and removed by somebody, or nothing that we wrote.
                else:
                    if found.metadata.c_token == metadata.c_token:
                        return found.version
            raise LedgerExists(f"Ledger {ledger} exists in {self.store.name}", hint="give another id") from error

    def read(self, ledger: LedgerId) -> VersionedMetadata:
        """The ledger's metadata. Raises LedgerNotFound; Corrupt or Unsupported, naming the ledger, for bad bytes."""
        path = self._path_to_read(ledger)
        return self._decode(ledger, path, self.store.get(path))

    def read_many(self, ids: Iterable[LedgerId]) -> Iterator[tuple[LedgerId, VersionedMetadata | BkctlError]]:
        """`read` of each ledger in the order given, several requests under way; a ledger's error comes in its place.

        `ids` is consumed a bounded number ahead. Raises only Unreachable.
        """
        waiting: deque[tuple[LedgerId, str, BkctlError | None]] = deque()

        def paths() -> Iterator[str]:
            for ledger in ids:
                try:
                    path = self._path_to_read(ledger)
                except Unreachable:
                    raise
                except BkctlError as error:
                    waiting.append((ledger, "", error))
                else:
                    waiting.append((ledger, path, None))
                    yield path

        def errors_ahead() -> Iterator[tuple[LedgerId, BkctlError]]:
            while waiting and (problem := waiting[0][2]) is not None:
                yield waiting.popleft()[0], problem

        for value in self.store.get_many(paths()):
            yield from errors_ahead()
            ledger, path, _ = waiting.popleft()
            try:
                found = self._decode(ledger, path, value)
            except BkctlError as error:
                yield ledger, error
            else:
                yield ledger, found
        yield from errors_ahead()

    def write(self, ledger: LedgerId, metadata: LedgerMetadata, version: int) -> int:
        """Replace the metadata that was read in `version`; returns the new version.

        Raises MetadataVersionConflict, LedgerNotFound. Source: AbstractZkLedgerManager.writeLedgerMetadata.
        """
        found = self.write_many([(ledger, metadata, version)])[0]
        if isinstance(found, BkctlError):
            raise found
        return found

    def write_many(self, ledgers: Sequence[tuple[LedgerId, LedgerMetadata, int]]) -> list[int | BkctlError]:
        """`write` of each, with the version it was read in; a ledger's error comes in its place.

        Raises only Unreachable.
        """
        nodes = []
        errors: dict[int, BkctlError] = {}
        for at, (ledger, metadata, version) in enumerate(ledgers):
            if metadata.format_version > 2:
                metadata = replace(metadata, c_token=0)  # Only the create carries a token.
            try:
                nodes.append((self._path_to_read(ledger), metadata.serialize(), version))
            except LedgerNotFound as error:
                errors[at] = error
        written = iter(self.store.put_many(nodes))
        return [
            errors[at] if at in errors else self._write_result(ledger, version, next(written))
            for at, (ledger, _, version) in enumerate(ledgers)
        ]

    def _write_result(self, ledger: LedgerId, version: int, found: int | BkctlError) -> int | BkctlError:
        return self._write_error(ledger, version, found) if isinstance(found, BkctlError) else found

    def _write_error(self, ledger: LedgerId, version: int | None, error: BkctlError) -> BkctlError:
        """What a store's error on changing the ledger's metadata is called."""
        named = error
        if isinstance(error, MetadataVersionConflict):
            named = MetadataVersionConflict(
                f"The metadata of ledger {ledger} changed since version {version} was read",
                hint="read it and try again",
                may_be_applied=error.may_be_applied,
            )
        elif isinstance(error, NotFound):
            named = self._no_ledger(ledger)
        if named is not error:
            named.__cause__ = error
        return named

    def remove(self, ledger: LedgerId, version: int | None = None) -> None:
        """Delete the ledger's metadata (only in `version`, if given), then parents left empty.

        Raises LedgerNotFound, unlike Apache's ZooKeeper driver, and MetadataVersionConflict. A removal that was applied
        although its answer was lost is done. Source: removeLedgerMetadata.
        """
        path = self._path_to_read(ledger)
        try:
            self.store.delete(path, version, prune=self._prunable_count(ledger, path))
        except (MetadataVersionConflict, NotFound) as error:
            raise self._write_error(ledger, version, error) from error

    def watch(self, ledger: LedgerId, callback: Callable[[VersionedMetadata | BkctlError], None]) -> Callable[[], None]:
        """Call `callback` with the ledger's metadata now, and after each change; LedgerNotFound once it is deleted.

        The first call comes before `watch` returns, later ones from the store's thread; a version is told once, and
        versions between may be left out. Damaged metadata is told as its error. Returns a function that cancels.
        """
        lock = threading.Lock()
        told: list[int | type[BkctlError]] = []

        def tell() -> None:
            found: VersionedMetadata | BkctlError
            with lock:
                try:
                    found = self.read(ledger)
                except Unreachable:
                    return  # The store calls again when the connection is back.
                except BkctlError as error:
                    found = error
                state = type(found) if isinstance(found, BkctlError) else found.version
                if told == [state] and not isinstance(found, Corrupt):
                    return
                told[:] = [state]
                callback(found)

        cancel = self.store.watch(self._path_to_read(ledger), tell)
        tell()
        return cancel

    # many ledgers

    def ledgers(self, scope_id: int | None = 0, after: LedgerId | None = None) -> Iterator[LedgerId]:
        """Ids of the scope's ledgers (None: of every scope) in ascending order, those after `after` only.

        Streams: at most some directories of ledgers are held. What exists from before the first to after the last
        step is in it, exactly once; what is created or deleted meanwhile may be. Raises Conflict for a scope ≠ 0 when
        the `scopes` tree is another cluster's; with None such a tree is passed over (see `scopes_state`).
        """
        return chain.from_iterable(self.batches(scope_id, after))

    def batches(self, scope_id: int | None = 0, after: LedgerId | None = None) -> Iterator[list[LedgerId]]:
        """`ledgers`, in lists that are not empty: of one directory each, where the store has directories."""
        if after is not None and scope_id is not None and after.scope_id != scope_id:
            if after.scope_id > scope_id:
                return
            after = None
        scopes = (scope_id,) if scope_id is not None else self._scopes_from(0 if after is None else after.scope_id)
        for scope in scopes:
            same = after is not None and scope == after.scope_id
            found = self._ledgers_of_scope(scope, after.ledger_id if after is not None and same else -1)
            while batch := list(islice(found, _PAGE_SIZE)):
                yield batch

    def ranges(self, scope_id: int | None = 0, *, size: int = RANGE_SIZE) -> Iterator[LedgerRange]:
        """The scope's ids (None: of all scopes) cut into ranges of about `size` ledgers each, in ascending order.

        Ranges touch but never overlap, and the last one goes to the end of the scope, an empty scope being one range.
        A range's `ledgers` are all that exist between its ends: a ledger that was there before the first step, and is
        not in its range, was deleted. Scopes ≠ 0 for which there is no such proof (see `scopes_state`) are in no range;
        an error ends the ranges, and says nothing about the ids behind the last one. Source: getLedgerRanges.
        """
        proven = scope_id == 0 or self.scopes_state() == "ours"
        if scope_id is None:
            first, end = LedgerId(0, 0), LedgerId(U64_MAX if proven else 0, U64_MAX)
        else:
            if not proven:
                next(self._ledgers_of_scope(scope_id, -1), None)  # raises where they are another cluster's
                return
            first, end = LedgerId(scope_id, 0), LedgerId(scope_id, U64_MAX)
        held: list[LedgerId] = []
        for batch in self.batches(scope_id if proven else 0, None):
            held += batch
            if len(held) >= size and held[-1] < end:
                yield LedgerRange(first, held[-1], held)
                first, held = LedgerId.from_value(held[-1].value + 1), []
        yield LedgerRange(first, end, held)

    def process(
        self,
        processor: Callable[[LedgerId], object],
        scope_id: int | None = 0,
        *,
        ledgers: Iterable[LedgerId] | None = None,
        concurrency: int = 1,
        keep_going: bool = False,
    ) -> ProcessedLedgers:
        """Call `processor` with each ledger of the scope (None: of all), or of `ledgers` where they are given.

        At most `concurrency` calls run at once, each in a thread of its own. The first BkctlError ends it: no further
        call begins, those under way end, and it is raised. With `keep_going` such errors are collected instead, and
        returned with the ledgers they belong to. Any other exception always ends it. Source: asyncProcessLedgers.
        """
        from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

        count = 0
        failures: list[tuple[LedgerId, BkctlError]] = []
        under_way: dict[Future[object], LedgerId] = {}

        def collect(done: Iterable[Future[object]]) -> None:
            nonlocal count
            for future in done:
                ledger = under_way.pop(future)
                count += 1
                try:
                    future.result()
                except BkctlError as error:
                    if not keep_going:
                        raise
                    failures.append((ledger, error))

        with ThreadPoolExecutor(max(concurrency, 1), thread_name_prefix="process-ledgers") as executor:
            for ledger in self.ledgers(scope_id) if ledgers is None else ledgers:
                if len(under_way) >= max(concurrency, 1):
                    collect(wait(under_way, return_when=FIRST_COMPLETED).done)
                under_way[executor.submit(processor, ledger)] = ledger
            while under_way:
                collect(wait(under_way, return_when=FIRST_COMPLETED).done)
        return ProcessedLedgers(count, failures)

    def scopes(self) -> Iterator[int]:
        """Scope ids that have at least one ledger, ascending; a `scopes` tree of another cluster is passed over."""
        return (scope for scope in self._scopes_from(0) if next(self._ledgers_of_scope(scope, -1), None) is not None)

    def scopes_state(self) -> ScopesState:
        """Whose the scopes ≠ 0 in this store are, asked anew each time.

        "absent": there are none, and there is no proof of it; "ours": what is not listed does not exist; "foreign":
        left by a cluster that was formatted away. Only "ours" entitles garbage collection to act on a scoped ledger.
        """
        return "ours"

    def new_ledger_id(self, scope_id: int = 0) -> LedgerId:
        """An id for a new ledger: from the store's own sequence in scope 0, else random.

        A ledger created with a given id may hold it already: `create` then raises LedgerExists; take the next id.
        """
        if scope_id == 0:
            return LedgerId(0, self._new_default_id())
        import uuid

        return LedgerId(scope_id, uuid.uuid4().int & U64_MAX)

    # copies of metadata

    def values(self, ids: Iterable[LedgerId]) -> Iterator[tuple[LedgerId, Versioned[bytes] | None]]:
        """The bytes of each ledger's metadata in the order given, several requests under way; None where it is gone."""
        waiting: deque[LedgerId] = deque()

        def paths() -> Iterator[str]:
            for ledger in ids:
                waiting.append(ledger)
                yield self._path_to_read(ledger)

        for found in self.store.get_many(paths()):
            yield waiting.popleft(), found

    def restore(self, ledger: LedgerId, value: bytes, expected: int) -> int:
        """Put the bytes of a ledger's metadata back as they were, new (NEW) or in place of version `expected`.

        Returns the version. Raises AlreadyExists, NotFound, MetadataVersionConflict, and as `create`.
        """
        path = self.path(ledger)
        if ledger.is_scoped:
            self._prepare_scopes()
        return self.store.put(path, value, expected)

    def id_position(self) -> int | None:
        """Past every id of scope 0 that was generated; None: unknown.

        Generators that count give this one next, or a greater one; etcd's buckets come round to smaller ones too.
        """
        return None

    def skip_ids(self, position: int) -> bool:
        """Generate no id again that a generator at `position` (see `id_position`) gave; whether that is so."""
        return False

    # what a layout decides

    @abstractmethod
    def path(self, ledger: LedgerId) -> str:
        """Where the ledger's metadata is kept, below the root. Raises UsageError for an id that has no place here."""

    @abstractmethod
    def _ledgers_of_scope(self, scope_id: int, after: int) -> Iterator[LedgerId]:
        """The scope's ledgers after the ledger id `after`, ascending. Raises Conflict for another cluster's scope."""

    @abstractmethod
    def _scopes_from(self, first: int) -> Iterator[int]:
        """The scopes from `first` on that may have ledgers, ascending."""

    @abstractmethod
    def _new_default_id(self) -> int: ...

    def _prunable_count(self, ledger: LedgerId, path: str) -> int:
        return 0

    def _prepare_scopes(self) -> None:  # noqa: B027
        """Make sure that scoped ledgers can be kept."""

    def _path_to_read(self, ledger: LedgerId) -> str:
        try:
            if not ledger.is_scoped and ledger.ledger_id > I64_MAX:
                raise UsageError(f"Ledger id {ledger.ledger_id} is 2^63 or more")
            return self.path(ledger)
        except UsageError as error:
            raise LedgerNotFound(
                f"No ledger {ledger} in {self.store.name}: no ledger of scope 0 can have this id here"
            ) from error

    def _no_ledger(self, ledger: LedgerId) -> LedgerNotFound:
        where = f" --ledger-scope-id {ledger.scope_id}" if ledger.is_scoped else ""
        return LedgerNotFound(
            f"No ledger {ledger} in {self.store.name}", hint=f"'bkctl ledger list{where}' shows those that are there"
        )

    def _decode(self, ledger: LedgerId, path: str, found: Versioned[bytes] | None) -> VersionedMetadata:
        if found is None:
            raise self._no_ledger(ledger)
        metadata = LedgerMetadata.parse(found.value, f"ledger {ledger} at {path} in {self.store.name}")
        ctime_ms = found.ctime_ms if metadata.ctime_ms is None else metadata.ctime_ms
        return VersionedMetadata(metadata, found.version, ctime_ms)


class QualifiedNameLedgerManager(LedgerManager):
    """Every ledger at `ledgers/<name>`, for stores that list a range of names cheaply. SQLite: the qualified name."""

    def path(self, ledger: LedgerId) -> str:
        """See LedgerManager.path."""
        return f"ledgers/{self._name(ledger)}"

    def _name(self, ledger: LedgerId) -> str:
        """The node's name; names sort as the ids do."""
        return ledger.qualified_name

    def _ledger(self, name: str) -> LedgerId | None:
        """The ledger that a node of this name stands for; None for what is no ledger's."""
        return LedgerId.from_value(int(name, 16)) if _QUALIFIED_NAME.fullmatch(name) else None

    def _ledgers_of_scope(self, scope_id: int, after: int) -> Iterator[LedgerId]:
        # A name without its last digit sorts just before those that it begins.
        last = self._name(LedgerId(scope_id, 0))[:-1] if after < 0 else self._name(LedgerId(scope_id, after))
        while names := self.store.children("ledgers", after=last, limit=_PAGE_SIZE):
            for last in names:
                ledger = self._ledger(last)
                if ledger is None:
                    continue
                if ledger.scope_id != scope_id:
                    return
                yield ledger

    def _scopes_from(self, first: int) -> Iterator[int]:
        last = self._name(LedgerId(first, 0))[:-1]
        while names := self.store.children("ledgers", after=last, limit=1):
            last = names[0]
            if (ledger := self._ledger(last)) is not None:
                yield ledger.scope_id
                last = self._name(LedgerId(ledger.scope_id, U64_MAX))

    def _new_default_id(self) -> int:
        return self.store.sequence("idgen")

    def id_position(self) -> int | None:
        """See LedgerManager.id_position."""
        return self.store.sequence_position("idgen")

    def skip_ids(self, position: int) -> bool:
        """See LedgerManager.skip_ids."""
        return self.store.advance_sequence("idgen", position)


class ZooKeeperLedgerManager(LedgerManager):
    """What Apache's layouts on ZooKeeper have in common: a tree of directories, and ours for the scopes ≠ 0."""

    def __init__(self, store: MetadataStore) -> None:
        super().__init__(store)
        self._scopes_ours = False

    def path(self, ledger: LedgerId) -> str:
        """See LedgerManager.path."""
        if not ledger.is_scoped:
            return self._default_path(ledger.ledger_id)
        name = f"{ledger.ledger_id:016x}"
        return f"{_scope_path(ledger.scope_id)}/{name[:4]}/{name[4:8]}/{name[8:12]}/L{name[12:]}"

    def scopes_state(self) -> ScopesState:
        """See LedgerManager.scopes_state."""
        scopes, instance_id = self.store.get_many((SCOPES, INSTANCE_ID))
        if scopes is None:
            return "absent"
        return "ours" if scopes.value == (b"" if instance_id is None else instance_id.value) else "foreign"

    @abstractmethod
    def _default_path(self, ledger_id: int) -> str: ...

    @abstractmethod
    def _default_batches(self, after: int) -> Iterator[list[LedgerId]]:
        """Scope 0's ledgers after the id `after`, ascending, one directory at a time."""

    def batches(self, scope_id: int | None = 0, after: LedgerId | None = None) -> Iterator[list[LedgerId]]:
        """See LedgerManager.batches."""
        last_scope_id = 0 if after is None else after.scope_id
        if scope_id in (None, 0) and last_scope_id == 0:
            yield from self._default_batches(-1 if after is None else after.ledger_id)
        if scope_id is None:
            if self._scopes_ours or self.scopes_state() == "ours":
                yield from self._scoped_batches(SCOPES, (4, 12, 4, 4, 4), after)
        elif scope_id > 0 and last_scope_id <= scope_id and self._scopes_are_ours():
            after = after if last_scope_id == scope_id else None
            yield from self._scoped_batches(_scope_path(scope_id), (4, 4, 4), after, scope_id)

    def _scoped_batches(
        self, base: str, widths: tuple[int, ...], after: LedgerId | None, scope_id: int = 0
    ) -> Iterator[list[LedgerId]]:
        """The ledgers in the tree below `base` whose directories name what `scope_id` does not."""
        first = after.qualified_name[-sum(widths) - 4 :] if after is not None else ""
        levels = tuple(re.compile(f"[0-9a-f]{{{width}}}", re.ASCII) for width in widths)
        for _, digits, names in walk_levels(self.store, base, levels, first):
            high = LedgerId.from_value(scope_id << 64 | int(digits, 16) << 16)
            ids = [high.ledger_id | int(match[1], 16) for match in map(_SCOPED_LEAF.fullmatch, names) if match]
            found = ledger_ids(high.scope_id, ids)
            if after is not None and found and found[0] <= after:
                found = [ledger for ledger in found if ledger > after]
            if found:
                yield found

    def _ledgers_of_scope(self, scope_id: int, after: int) -> Iterator[LedgerId]:
        return chain.from_iterable(self.batches(scope_id, LedgerId(scope_id, after) if after >= 0 else None))

    def _scopes_from(self, first: int) -> Iterator[int]:
        if first == 0:
            yield 0
        if self._scopes_ours or self.scopes_state() == "ours":
            for _, high, names in walk_levels(self.store, SCOPES, (_HEX_4,), f"{first:016x}"[:4]):
                for name in names:
                    if _HEX_12.fullmatch(name) and (scope := int(high + name, 16)) >= max(first, 1):
                        yield scope

    def _scopes_are_ours(self) -> bool:
        """Whether there are scopes. Raises Conflict when they are another cluster's."""
        if not self._scopes_ours:
            state = self.scopes_state()
            if state == "foreign":
                raise Conflict(
                    f"The scoped ledgers in {self.store.name} belong to a cluster that was formatted: "
                    f"{SCOPES} names another instance id than {INSTANCE_ID}",
                    hint="remove the orphaned scopes tree first",
                )
            self._scopes_ours = state == "ours"
        return self._scopes_ours

    def _prepare_scopes(self) -> None:
        if not self._scopes_are_ours():
            instance_id = self.store.get(INSTANCE_ID)
            try:
                self.store.put(SCOPES, b"" if instance_id is None else instance_id.value, NEW)
            except AlreadyExists:
                self._scopes_are_ours()

    def _path_to_read(self, ledger: LedgerId) -> str:
        if ledger.is_scoped:
            try:
                self._scopes_are_ours()
            except Conflict as error:
                raise LedgerNotFound(f"No ledger {ledger} in {self.store.name}", hint=str(error)) from error
        return super()._path_to_read(ledger)

    def _prunable_count(self, ledger: LedgerId, path: str) -> int:
        return path.count("/") - (1 if ledger.is_scoped else 0)  # never `scopes` itself

    def _walk_default(self, widths: tuple[int, ...], first: int, end: int, after: int) -> Iterator[list[LedgerId]]:
        """Ledger ids in [first, end) of the decimal tree of `widths` below the root, after the id `after`."""
        first = max(first, after + 1)
        if first >= end:
            return
        levels = tuple(re.compile(f"[0-9]{{{width}}}", re.ASCII) for width in widths)
        digit_count = sum(widths)
        for _, digits, names in walk_levels(self.store, "", levels, f"{first:0{digit_count + 4}d}"[:digit_count]):
            high = int(digits) * 10_000
            if high >= end:
                return
            ids = [high + number for number in _leaf_numbers(names)]
            if ids and not first <= ids[0] <= ids[-1] < end:
                ids = [ledger_id for ledger_id in ids if first <= ledger_id < end]
            if ids:
                yield ledger_ids(0, ids)

    def _check_root(self) -> None:
        if self.store.get("") is None:
            raise NotFound(f"No BookKeeper cluster in {self.store.name}", hint=NO_CLUSTER_HINT)

    def _root_children(self) -> list[str]:
        names = self.store.children("")
        if names is None:
            raise NotFound(f"No BookKeeper cluster in {self.store.name}", hint=NO_CLUSTER_HINT)
        return names

    def _new_default_id(self) -> int:
        """Source: LongZkLedgerIdGenerator."""
        if self.store.get("idgen-long") is None:
            ledger_id = self.store.sequence("idgen")
            if 0 <= ledger_id < SHORT_ID_END:
                return ledger_id
            self._create_if_missing("idgen-long")
        while True:
            names = self.store.children("idgen-long") or ()
            found = sorted(int(match[1]) for match in map(_HIGH_ORDER_DIRECTORY.fullmatch, names) if match)
            if not found:
                self._create_if_missing(f"idgen-long/HOB-{1:010d}")
                continue
            high = found[-1]
            low = self.store.sequence(f"idgen-long/HOB-{high:010d}")
            if 0 <= low < SHORT_ID_END:
                for old in found[:-_HIGH_ORDER_DIRECTORIES_KEPT]:
                    self._delete_if_empty(f"idgen-long/HOB-{old:010d}")
                return high << 32 | low
            if high >= SHORT_ID_END:
                raise IllegalOperation(f"No ledger ids are left in {self.store.name}")
            self._create_if_missing(f"idgen-long/HOB-{high + 1:010d}")

    def id_position(self) -> int | None:
        """See LedgerManager.id_position."""
        names = self.store.children("idgen-long")
        if names is None:
            return self.store.sequence_position("idgen")
        # The generator begins with directory 1 where there is none.
        high = max((int(match[1]) for match in map(_HIGH_ORDER_DIRECTORY.fullmatch, names) if match), default=1)
        return high << 32 | self.store.sequence_position(f"idgen-long/HOB-{high:010d}")

    def skip_ids(self, position: int) -> bool:
        """See LedgerManager.skip_ids. Where the short ids are too far behind, the long ones begin."""
        present = self.id_position() or 0
        if position <= present:
            return True
        short = position < SHORT_ID_END and self.store.get("idgen-long") is None
        if short and self.store.advance_sequence("idgen", position):
            return True
        high = (position - 1 >> 32) + 1
        if high >= SHORT_ID_END:
            return False
        self._create_if_missing("idgen-long")
        self._create_if_missing(f"idgen-long/HOB-{high:010d}")
        return True

    def _create_if_missing(self, path: str) -> None:
        try:
            self.store.put(path, b"", NEW)
        except AlreadyExists:
            return

    def _delete_if_empty(self, path: str) -> None:
        try:
            self.store.delete(path, 0)
        except (NotFound, Conflict):
            return


class HierarchicalLedgerManager(ZooKeeperLedgerManager):
    """Ids below 2^31−1 as `00/1234/L5678`, the others as 19 digits. Source: HierarchicalLedgerManager."""

    def _default_path(self, ledger_id: int) -> str:
        return _short_path(ledger_id) if ledger_id < SHORT_ID_END else _long_path(ledger_id)

    def _default_batches(self, after: int) -> Iterator[list[LedgerId]]:
        self._check_root()
        yield from self._walk_default((2, 4), 0, SHORT_ID_END, after)
        yield from self._walk_default((3, 4, 4, 4), SHORT_ID_END, 1 << 63, after)


class LegacyHierarchicalLedgerManager(ZooKeeperLedgerManager):
    """All ids as `00/1234/L5678`, so 10 digits at most. Source: LegacyHierarchicalLedgerManager."""

    def _default_path(self, ledger_id: int) -> str:
        if ledger_id >= 10**10:
            raise UsageError(f"Ledger id {ledger_id} has more than the 10 digits of a LegacyHierarchical layout")
        return _short_path(ledger_id)

    def _default_batches(self, after: int) -> Iterator[list[LedgerId]]:
        self._check_root()
        yield from self._walk_default((2, 4), 0, 10**10, after)

    def _new_default_id(self) -> int:
        return _short_id(self.store, "idgen")

    def id_position(self) -> int | None:
        """See LedgerManager.id_position."""
        return self.store.sequence_position("idgen")

    def skip_ids(self, position: int) -> bool:
        """See LedgerManager.skip_ids."""
        return self.store.advance_sequence("idgen", position)


class LongHierarchicalLedgerManager(ZooKeeperLedgerManager):
    """All ids as `000/0000/0000/1234/L5678`; LongLong too. Source: LongHierarchicalLedgerManager."""

    def _default_path(self, ledger_id: int) -> str:
        return _long_path(ledger_id)

    def _default_batches(self, after: int) -> Iterator[list[LedgerId]]:
        self._check_root()
        yield from self._walk_default((3, 4, 4, 4), 0, 1 << 63, after)


class FlatLedgerManager(ZooKeeperLedgerManager):
    """All ledgers side by side as `L0012345678`. Source: FlatLedgerManager."""

    def _default_path(self, ledger_id: int) -> str:
        return f"L{ledger_id:010d}"

    def _default_batches(self, after: int) -> Iterator[list[LedgerId]]:
        matches = map(_FLAT_LEDGER.fullmatch, self._root_children())
        ids = sorted(number for match in matches if match and after < (number := int(match[1])) <= I64_MAX)
        if ids:
            yield ledger_ids(0, ids)

    def _new_default_id(self) -> int:
        return _short_id(self.store, "")

    def id_position(self) -> int | None:
        """See LedgerManager.id_position: what was created in the root counts too, so that some ids may be left out."""
        return self.store.sequence_position("")

    def skip_ids(self, position: int) -> bool:
        """See LedgerManager.skip_ids."""
        return self.store.advance_sequence("", position)


def _leaf_numbers(names: list[str]) -> list[int]:
    """The numbers of the names that are `L` and four digits, ascending as the names are; others are passed over."""
    text = "".join(names)
    digits = text.replace("L", "")
    # Ten thousand names in a directory are looked at together: five characters each, of which the first is the L.
    if (
        text[::5] == "L" * len(names)
        and len(text) == 5 * len(names) == len(digits) + len(names)
        and digits.isascii()
        and digits.isdigit()
    ):
        return [int(digits[at : at + 4]) for at in range(0, len(digits), 4)]
    return [int(match[1]) for match in map(_LEAF.fullmatch, names) if match]


def _short_id(store: MetadataStore, path: str) -> int:
    """Source: ZkLedgerIdGenerator."""
    ledger_id = store.sequence(path)
    if not 0 <= ledger_id < SHORT_ID_END:
        raise IllegalOperation(f"No ledger ids are left in {store.name}: this layout's end at 2^31")
    return ledger_id


def _short_path(ledger_id: int) -> str:
    digits = f"{ledger_id:010d}"
    return f"{digits[:2]}/{digits[2:6]}/L{digits[6:]}"


def _long_path(ledger_id: int) -> str:
    digits = f"{ledger_id:019d}"
    return f"{digits[:3]}/{digits[3:7]}/{digits[7:11]}/{digits[11:15]}/L{digits[15:]}"


def _scope_path(scope_id: int) -> str:
    name = f"{scope_id:016x}"
    return f"{SCOPES}/{name[:4]}/{name[4:]}"


# the JSON object

#: Custom metadata that Pulsar writes as text, by its key without the prefix. Source: Pulsar's LedgerMetadataUtils.
_PULSAR_NAMES: Final = {
    "managed-ledger": "managedLedger",
    "cursor": "cursor",
    "schemaId": "schemaId",
    "compactedTopic": "compactedTopic",
    "delayedIndexBucketKey": "delayedIndexBucketKey",
    "delayedIndexTopic": "delayedIndexTopic",
    "delayedIndexCursor": "delayedIndexCursor",
}


def ledger_object(ledger: LedgerId, found: VersionedMetadata, show_secrets: bool = False) -> dict[str, Any]:
    """The JSON object of a ledger: its ids, its metadata in camelCase, binary as base64, `ctime` in ISO 8601 UTC.

    `pulsar` is there where the custom metadata is Pulsar's. The password is there only with `show_secrets`.
    """
    metadata = found.metadata
    value: dict[str, Any] = {
        **ledger.to_json(),
        "metadataFormatVersion": metadata.format_version,
        "state": metadata.state.name,
        "ensembleSize": metadata.ensemble_size,
        "writeQuorumSize": metadata.write_quorum_size,
        "ackQuorumSize": metadata.ack_quorum_size,
        "digestType": None if metadata.digest_type is None else metadata.digest_type.name,
        "length": metadata.length,
        "lastEntryId": metadata.last_entry_id,
        "ctime": _iso8601(found.ctime_ms),
        "customMetadata": {key: _base64(metadata.custom_metadata[key]) for key in sorted(metadata.custom_metadata)},
        "ensembles": {str(fragment.first_entry_id): list(fragment.bookies) for fragment in metadata.ensembles},
    }
    if pulsar := pulsar_object(metadata):
        value["pulsar"] = pulsar
    if show_secrets:
        value["password"] = None if metadata.password is None else _base64(metadata.password)
    return value


def pulsar_object(metadata: LedgerMetadata) -> dict[str, str]:
    """What Pulsar wrote into the ledger's custom metadata: application, component, managedLedger, cursor …; else {}."""
    custom = metadata.custom_metadata
    if custom.get("application") != b"pulsar":
        return {}
    value = {key: _text(custom[key]) for key in ("application", "component") if key in custom}
    for key in sorted(custom):
        prefix, _, name = key.rpartition("/")
        if prefix in ("", "pulsar", "psr"):  # 2.x releases before 2.3 wrote "psr/" or no prefix
            if name in _PULSAR_NAMES:
                value[_PULSAR_NAMES[name]] = _text(custom[key])
            elif name == "compactedTo":
                value[name] = _base64(custom[key])
    return value


def _text(value: bytes) -> str:
    return value.decode("utf-8", "backslashreplace")


def _base64(value: bytes) -> str:
    import base64

    return base64.b64encode(value).decode("ascii")


def _iso8601(time_ms: int | None) -> str | None:
    if time_ms is None:
        return None
    from datetime import UTC, datetime, timedelta

    try:
        moment = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=time_ms)
    except OverflowError:
        return None
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
