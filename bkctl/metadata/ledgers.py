"""Ledgers in a metadata store: read and write the metadata of each, list them in order, generate ids.

Source: LedgerManager, LedgerIdGenerator, AbstractZkLedgerManager.
"""

from __future__ import annotations

import re
import threading
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import chain, islice, repeat, tee
from typing import Any, Final, Literal, NamedTuple

from bkctl import errors
from bkctl.formats.metadata import LedgerMetadata, parse_many
from bkctl.ids import I64_MAX, U64_MAX, LedgerId, random_u64
from bkctl.metadata.store import NEW, MetadataStore, StoredValue, Versioned, attempt, value_of, watch_all

SCOPES: Final = "scopes"
#: The node with the ledgers of a store that keeps them side by side.
LEDGERS: Final = "ledgers"
INSTANCE_ID: Final = "INSTANCEID"
_QUALIFIED_NAME = re.compile(r"[0-9a-f]{32}", re.ASCII)
#: Names in the first page of a listing, of which many callers take one, and in the largest.
_PAGE_SIZE_MIN: Final = 16
_PAGE_SIZE_MAX: Final = 1024
RANGE_SIZE: Final = 10_000

ScopesState = Literal["absent", "ours", "foreign"]


class VersionedMetadata(NamedTuple):
    """A ledger's metadata as read; `ctime_ms` is the one stored in it, else the store's, else None."""

    metadata: LedgerMetadata
    version: int
    ctime_ms: int | None


def _versioned(metadata: LedgerMetadata, found: Versioned[bytes]) -> VersionedMetadata:
    ctime_ms = found.ctime_ms if metadata.ctime_ms is None else metadata.ctime_ms
    # A call of the class takes twice as long.
    return tuple.__new__(VersionedMetadata, (metadata, found.version, ctime_ms))


class ReadLedgers(NamedTuple):
    """Ledgers, and what was read of each."""

    ledgers: Sequence[LedgerId]
    values: Collection[StoredValue]

    def __reduce__(self) -> tuple[Callable[..., ReadLedgers], tuple[Any, ...]]:
        """Return what pickle keeps: lists of plain values, since a tuple of a class takes ten times as long.

        Raises Corrupt where one has no value.
        """
        values = list(zip(*self._present(), strict=True)) if isinstance(self.values, list) else self.values
        return _read_ledgers, (values, *zip(*self.ledgers, strict=True))

    def parse(self) -> list[VersionedMetadata]:
        """Return the metadata of all of them. Raises Corrupt or Unsupported where one has none that can be read."""
        present = self._present()
        return list(map(_versioned, parse_many([each.value for each in present]), present))

    def _present(self) -> list[Versioned[bytes]]:
        present = [each for each in self.values if isinstance(each, Versioned)]
        if len(present) < len(self.values):
            raise errors.Corrupt("Some have no value")
        return present


def _read_ledgers(values: Any, scopes: tuple[int, ...], numbers: tuple[int, ...]) -> ReadLedgers:
    if isinstance(values, list):
        values = list(map(tuple.__new__, repeat(Versioned), zip(*values, strict=True)))
    return ReadLedgers(list(map(tuple.__new__, repeat(LedgerId), zip(scopes, numbers, strict=True))), values)


class LedgerRange(NamedTuple):
    """All `ledgers` that exist from `first` to `last`, both included, ascending; possibly none."""

    first: LedgerId
    last: LedgerId
    ledgers: list[LedgerId]


class StoredLedgerIds(ABC):
    """The ids of a cluster's ledgers: those that exist, in ascending order, and the generator of new ones."""

    def ledgers(self, scope_id: int | None = 0, after: LedgerId | None = None) -> Iterator[LedgerId]:
        """Yield the ids of the scope's ledgers (None: of every scope) in ascending order, only those after `after`.

        At most some directories of ledgers are held. Ledgers that exist during the whole iteration are included exactly
        once; ledgers created or deleted meanwhile may be. Raises Conflict for a scope ≠ 0 when the `scopes` tree is
        another cluster's; with None such a tree is passed over (see `scopes_state`).
        """
        return chain.from_iterable(self.batches(scope_id, after))

    @abstractmethod
    def batches(self, scope_id: int | None = 0, after: LedgerId | None = None) -> Iterator[list[LedgerId]]:
        """Yield `ledgers` in non-empty lists: of one directory each, where the store has directories.

        No list has ledgers of scope 0 and of another scope.
        """

    def ranges(self, scope_id: int | None = 0, *, size: int = RANGE_SIZE) -> Iterator[LedgerRange]:
        """Cut the scope's ids (None: those in all scopes) into ranges of about `size` ledgers, in ascending order.

        Ranges touch but never overlap; the last one reaches the end of the scope, and an empty scope is one range.
        A range's `ledgers` are all that exist between its ends: a ledger that existed before the iteration, and is
        missing in its range, was deleted. Scopes ≠ 0 without such a proof (see `scopes_state`) are in no range; an
        error ends the ranges, and proves nothing about the ids behind the last one. Source: getLedgerRanges.
        """
        proven = scope_id == 0 or self.scopes_state() == "ours"
        if scope_id is None:
            first, end = LedgerId(0, 0), LedgerId(U64_MAX if proven else 0, U64_MAX)
        else:
            if not proven:
                next(self.ledgers(scope_id), None)  # raises where they are another cluster's
                return
            first, end = LedgerId(scope_id, 0), LedgerId(scope_id, U64_MAX)
        held: list[LedgerId] = []
        for batch in self.batches(scope_id if proven else 0, None):
            held += batch
            while len(held) >= size and held[size - 1] < end:
                cut, held = held[:size], held[size:]
                yield LedgerRange(first, cut[-1], cut)
                first = LedgerId.from_value(cut[-1].value + 1)
        yield LedgerRange(first, end, held)

    def scopes(self) -> Iterator[int]:
        """Yield the scope ids that have a ledger, ascending; a `scopes` tree of another cluster is passed over."""
        if next(self.ledgers(0), None) is not None:
            yield 0
        last = 0
        # Scopes mostly have few ledgers, and a listing has many requests under way.
        for scope_id, _ in self.ledgers(None, LedgerId(0, U64_MAX)):
            if scope_id != last:
                yield scope_id
                last = scope_id

    def scopes_state(self) -> ScopesState:
        """Return the owner of the scopes ≠ 0 in this store, read again in each call.

        "ours": a scoped ledger that is not listed does not exist. "absent": none is listed, which proves nothing.
        "foreign": a cluster that was formatted since left them. Garbage collection may only act on "ours".
        """
        return "ours"

    def unlisted(self) -> list[str]:
        """Return nodes with ledgers that no listing has: `scopes` of another cluster, a ledger of each other layout."""
        return [SCOPES] if self.scopes_state() == "foreign" else []

    def new_ledger_id(self, scope_id: int = 0) -> LedgerId:
        """Return an id for a new ledger: from the store's own sequence in scope 0, else random.

        A ledger created with an explicit id may have it already: `create` then raises LedgerExists; take the next id.
        """
        if scope_id == 0:
            return LedgerId(0, self._new_default_id())
        import uuid

        return LedgerId(scope_id, uuid.uuid4().int & U64_MAX)

    def id_position(self) -> int | None:
        """Return a position past every generated id of scope 0; None: unknown.

        Generators that count give this id next, or a greater one; etcd's buckets also return to smaller ones.
        """
        return None

    def skip_ids(self, position: int) -> bool:
        """Advance the generator past the ids that one at `position` (see `id_position`) gave; False: impossible."""
        return False

    def generator_state(self) -> tuple[int, ...]:
        """Return the state of the generator of ids in scope 0, for `generated_since`."""
        return (self.id_position() or 0,)

    def generated_since(self, state: tuple[int, ...]) -> Iterator[LedgerId]:
        """Yield every ledger of scope 0 whose id was generated since `state`, ascending, and no id generated before.

        Ids without a ledger, and ledgers that were created with explicit ids, may be among them. The cost is that of
        the ids since `state`.
        """
        return self.ledgers(0, LedgerId(0, state[0] - 1) if state[0] else None)

    @abstractmethod
    def _new_default_id(self) -> int:
        """Return the next id of scope 0."""


class LedgerManager(StoredLedgerIds):
    """The ledgers of one cluster. Methods raise Unreachable, as `MetadataStore`; all may be called from any thread."""

    #: The largest id of scope 0 whose name every Apache class of the layout recognises.
    id_max: int = I64_MAX

    def __init__(self, store: MetadataStore) -> None:
        self.store = store

    # one ledger

    def create(self, ledger: LedgerId, metadata: LedgerMetadata) -> int:
        """Store the metadata of a new ledger; return its version.

        Format version 3 carries a random creator token, by which a create whose answer was lost is recognised.
        Raises LedgerExists; UsageError for a scope-0 id of 2^63 or more; Conflict when `scopes` is another cluster's.
        Source: AbstractZkLedgerManager.createLedgerMetadata.
        """
        if not ledger.is_scoped and ledger.ledger_id > I64_MAX:
            raise errors.UsageError(
                f"Ledger id {ledger.ledger_id} is 2^63 or more, which no ledger of scope 0 can have",
                hint="give a smaller id, or a ledger scope id",
            )
        path = self.path(ledger)
        if ledger.is_scoped:
            self._prepare_scopes()
        if metadata.format_version > 2 and metadata.c_token is None:
            metadata = metadata._replace(c_token=random_u64() % I64_MAX)
        try:
            return self.store.put(path, metadata.serialize(), NEW)
        except errors.AlreadyExists as error:
            if metadata.format_version > 2:
                try:
                    found = self.read(ledger)
                except (errors.LedgerNotFound, errors.Corrupt):
                    pass  # Another client created the ledger, and removed it or wrote bytes that we never write.
                else:
                    if found.metadata.c_token == metadata.c_token:
                        return found.version
            raise errors.LedgerExists(f"Ledger {ledger} exists in {self.store.name}", hint="give another id") from error

    def read(self, ledger: LedgerId) -> VersionedMetadata:
        """Return the ledger's metadata. Raises LedgerNotFound; Corrupt or Unsupported for bad bytes."""
        return self.parse(ledger, self.store.get(self._path_to_read(ledger)))

    def read_many(self, ids: Iterable[LedgerId]) -> Iterator[tuple[LedgerId, VersionedMetadata | errors.BkctlError]]:
        """`read` each ledger in the order given, several requests under way; a ledger's error comes in its place.

        `ids` is consumed a bounded number ahead. Raises only Unreachable.
        """
        for batch in self.read_batches(ids):
            yield from self.parse_each(batch)

    def read_batches(self, ids: Iterable[LedgerId]) -> Iterator[ReadLedgers]:
        """Read the metadata of ledgers without a look at it, in batches. Raises only Unreachable."""
        ledgers, asked = tee(ids)
        places, paths = tee(attempt(self._path_to_read, ledger) for ledger in asked)
        for values in self.store.get_batches(path for path in paths if isinstance(path, str)):
            batch = list(islice(places, len(values)))
            while lacking := len(values) - len([path for path in batch if isinstance(path, str)]):
                batch += islice(places, lacking)
            if len(batch) > len(values):
                remaining = iter(values)
                values = [next(remaining) if isinstance(path, str) else path for path in batch]
            yield ReadLedgers(list(islice(ledgers, len(batch))), values)
        if last := [path for path in places if not isinstance(path, str)]:
            yield ReadLedgers(list(ledgers), last)

    def parse_each(self, batch: ReadLedgers) -> Iterator[tuple[LedgerId, VersionedMetadata | errors.BkctlError]]:
        """`parse` the value of each ledger; a ledger's error comes in its place."""
        try:
            yield from zip(batch.ledgers, batch.parse(), strict=True)
        except (errors.Corrupt, errors.Unsupported):
            # One by one, to name the ledger: the name takes long to make for millions.
            for ledger, found in zip(*batch, strict=True):
                yield ledger, found if isinstance(found, errors.BkctlError) else attempt(self.parse, ledger, found)

    def read_each(self, ids: Iterable[LedgerId]) -> Iterator[tuple[LedgerId, VersionedMetadata]]:
        """`read_many`, which raises a ledger's error in its place."""
        return ((ledger, value_of(found)) for ledger, found in self.read_many(ids))

    def write(self, ledger: LedgerId, metadata: LedgerMetadata, version: int) -> int:
        """Replace the metadata that was read in `version`; return the new version.

        Raises MetadataVersionConflict, LedgerNotFound. Source: AbstractZkLedgerManager.writeLedgerMetadata.
        """
        return value_of(self.write_many([(ledger, metadata, version)])[0])

    def write_many(self, ledgers: Sequence[tuple[LedgerId, LedgerMetadata, int]]) -> list[int | errors.BkctlError]:
        """`write` each ledger, with the version it was read in; a ledger's error comes in its place.

        Raises only Unreachable.
        """
        paths = [attempt(self._path_to_read, ledger) for ledger, _, _ in ledgers]
        nodes = []
        for path, (_, metadata, version) in zip(paths, ledgers, strict=True):
            if metadata.format_version > 2:
                metadata = metadata._replace(c_token=0)  # Only the create carries a token.
            if isinstance(path, str):
                nodes.append((path, metadata.serialize(), version))
        written = iter(self.store.put_many(nodes))
        return [
            self._write_result(ledger, version, next(written)) if isinstance(path, str) else path
            for path, (ledger, _, version) in zip(paths, ledgers, strict=True)
        ]

    def _write_result(self, ledger: LedgerId, version: int, found: int | errors.BkctlError) -> int | errors.BkctlError:
        return self._write_error(ledger, version, found) if isinstance(found, errors.BkctlError) else found

    def _write_error(self, ledger: LedgerId, version: int | None, error: errors.BkctlError) -> errors.BkctlError:
        """Return the store's error on a change of the ledger's metadata in the words of ledgers."""
        named = error
        if isinstance(error, errors.MetadataVersionConflict):
            named = errors.MetadataVersionConflict(
                f"The metadata of ledger {ledger} changed since version {version} was read",
                hint="read it and try again",
                may_be_applied=error.may_be_applied,
            )
        elif isinstance(error, errors.NotFound):
            named = self._no_ledger(ledger)
        if named is not error:
            named.__cause__ = error
        return named

    def remove(self, ledger: LedgerId, version: int | None = None) -> None:
        """Delete the ledger's metadata (only in `version`, if given), then parents left empty.

        Raises LedgerNotFound, unlike Apache's ZooKeeper driver, and MetadataVersionConflict. A removal that was applied
        although its answer was lost succeeds. Source: removeLedgerMetadata.
        """
        path = self._path_to_read(ledger)
        try:
            self.store.delete(path, version, prune=self._prunable_count(ledger, path))
        except (errors.MetadataVersionConflict, errors.NotFound) as error:
            raise self._write_error(ledger, version, error) from error

    def watch_each(self, ledgers: Iterable[LedgerId], callback: Callable[[], None]) -> Callable[[], None]:
        """Call `callback` as `watch` of each ledger does, without the metadata. Returns a function that cancels."""
        return watch_all(self.watch(ledger, lambda _: callback()) for ledger in ledgers)

    def watch(
        self, ledger: LedgerId, callback: Callable[[VersionedMetadata | errors.BkctlError], None]
    ) -> Callable[[], None]:
        """Call `callback` with the ledger's metadata now, and after each change; LedgerNotFound once it is deleted.

        The first call comes before `watch` returns, later ones from the store's thread, once per version; intermediate
        versions may be skipped. Damaged metadata is reported as its error. Returns a function that cancels.
        """
        lock = threading.Lock()
        reported: int | type[errors.BkctlError] | None = None

        def report() -> None:
            nonlocal reported
            found: VersionedMetadata | errors.BkctlError
            with lock:
                try:
                    found = self.read(ledger)
                except errors.Unreachable:
                    return  # The store calls again when the connection is back.
                except errors.BkctlError as error:
                    found = error
                state = type(found) if isinstance(found, errors.BkctlError) else found.version
                if reported == state and not isinstance(found, errors.Corrupt):
                    return
                reported = state
                callback(found)

        cancel = self.store.watch(self._path_to_read(ledger), report)
        report()
        return cancel

    # copies of metadata

    def values(self, ids: Iterable[LedgerId]) -> Iterator[tuple[LedgerId, Versioned[bytes] | None]]:
        """Yield each ledger with the bytes of its metadata (None: deleted), in order, several requests under way."""
        ledgers, asked = tee(ids)
        return zip(ledgers, self.store.get_many(map(self._path_to_read, asked)), strict=True)

    def parse(self, ledger: LedgerId, found: Versioned[bytes] | None) -> VersionedMetadata:
        """Return the metadata in a value of `values`. Raises as `read`."""
        if found is None:
            raise self._no_ledger(ledger)
        where = f"ledger {ledger} at {self.path(ledger)} in {self.store.name}"
        return _versioned(LedgerMetadata.parse(found.value, where), found)

    def prepare_restore(self, ledger: LedgerId) -> str:
        """Return the path at which bytes of the ledger's metadata may be written unchanged. Raises as `create`."""
        if ledger.is_scoped:
            self._prepare_scopes()
        return self.path(ledger)

    # for subclasses

    @abstractmethod
    def path(self, ledger: LedgerId) -> str:
        """Return the path of the ledger's metadata, below the root. Raises UsageError for an id that does not fit."""

    def _prunable_count(self, ledger: LedgerId, path: str) -> int:
        """Return the number of parents to delete with the ledger's node where they are empty."""
        return 0

    def _prepare_scopes(self) -> None:
        """Prepare the store for scoped ledgers."""

    def _check_scopes(self) -> bool:
        """Return whether scoped ledgers have a place. Raises Conflict where it is another cluster's."""
        return True

    def _path_to_read(self, ledger: LedgerId) -> str:
        try:
            if ledger.scope_id:
                self._check_scopes()
            elif ledger.ledger_id > I64_MAX:
                raise errors.UsageError(f"Ledger id {ledger.ledger_id} is 2^63 or more")
            return self.path(ledger)
        except errors.Conflict as error:
            raise errors.LedgerNotFound(f"No ledger {ledger} in {self.store.name}", hint=str(error)) from error
        except errors.UsageError as error:
            raise errors.LedgerNotFound(
                f"No ledger {ledger} in {self.store.name}: no ledger of scope 0 can have this id here"
            ) from error

    def _no_ledger(self, ledger: LedgerId) -> errors.LedgerNotFound:
        where = f" --ledger-scope-id {ledger.scope_id}" if ledger.is_scoped else ""
        return errors.LedgerNotFound(
            f"No ledger {ledger} in {self.store.name}", hint=f"'bkctl ledger list{where}' lists the existing ones"
        )


class QualifiedNameLedgerManager(LedgerManager):
    """Every ledger at `ledgers/<name>`, for stores that list a range of names cheaply. SQLite: the qualified name."""

    def path(self, ledger: LedgerId) -> str:
        return f"{LEDGERS}/{self._name(ledger)}"

    def _name(self, ledger: LedgerId) -> str:
        """Return the node's name; names sort as the ids do."""
        return ledger.qualified_name

    def _ledger(self, name: str) -> LedgerId | None:
        """Return the ledger of a node with this name, None for other nodes."""
        return LedgerId.from_value(int(name, 16)) if _QUALIFIED_NAME.fullmatch(name) else None

    def batches(self, scope_id: int | None = 0, after: LedgerId | None = None) -> Iterator[list[LedgerId]]:
        first, end = LedgerId(scope_id or 0, 0), LedgerId(U64_MAX if scope_id is None else scope_id, U64_MAX)
        # A name without its last digit sorts just before the names that begin with it.
        last = self._name(first)[:-1] if after is None or after < first else self._name(after)
        size = _PAGE_SIZE_MIN
        while names := self._names_after(last, size):
            last, size = names[-1], min(2 * size, _PAGE_SIZE_MAX)
            found = [ledger for ledger in map(self._ledger, names) if ledger is not None]
            if found and found[-1] > end:
                found = [ledger for ledger in found if ledger <= end]
                last = ""
            default_count = bisect_left(found, LedgerId(0, I64_MAX + 1))  # Other programs may have written larger ids.
            yield from filter(None, (found[:default_count], found[bisect_left(found, LedgerId(1, 0)) :]))
            if not last:
                return

    def _names_after(self, name: str, limit: int) -> list[str] | None:
        return self.store.children(LEDGERS, after=name, limit=limit)

    def _new_default_id(self) -> int:
        return self.store.sequence("idgen")

    def id_position(self) -> int | None:
        return self.store.sequence_position("idgen")

    def skip_ids(self, position: int) -> bool:
        return self.store.advance_sequence("idgen", position)
