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
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
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
from bkctl.ids import I64_MAX, U64_MAX, LedgerId, random_u64
from bkctl.metadata.store import NEW, MetadataStore, Versioned

#: The first id that the hierarchical manager keeps in the long tree, and that a 31-bit sequence cannot give.
SHORT_ID_END: Final = (1 << 31) - 1
SCOPES: Final = "scopes"
INSTANCE_ID: Final = "INSTANCEID"
_HIGH_ORDER_DIRECTORY = re.compile(r"HOB-([0-9]{10})", re.ASCII)
_HIGH_ORDER_DIRECTORIES_KEPT: Final = 3
_QUALIFIED_NAME = re.compile(r"[0-9a-f]{32}", re.ASCII)
_FLAT_LEDGER = re.compile(r"L([0-9]{10,19})", re.ASCII)
_PAGE_SIZE: Final = 1000

ScopesState = Literal["absent", "ours", "foreign"]


class VersionedMetadata(NamedTuple):
    """A ledger's metadata as read; `ctime_ms` is the one stored in it, else the store's, else None."""

    metadata: LedgerMetadata
    version: int
    ctime_ms: int | None


class LedgerManager(ABC):
    """The ledgers of one cluster. Methods raise Unreachable, as `MetadataStore`; all may be called from any thread."""

    def __init__(self, store: MetadataStore) -> None:
        self.store = store

    # one ledger

    def create(self, ledger: LedgerId, metadata: LedgerMetadata) -> int:
        """Store the metadata of a new ledger; returns its version (0).

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
        if metadata.format_version > 2:
            metadata = replace(metadata, c_token=0)  # Only the create carries a token.
        path = self._path_to_read(ledger)
        try:
            return self.store.put(path, metadata.serialize(), version)
        except MetadataVersionConflict as error:
            raise MetadataVersionConflict(
                f"The metadata of ledger {ledger} changed since version {version} was read",
                hint="read it and try again",
            ) from error
        except NotFound as error:
            raise self._no_ledger(ledger) from error

    def remove(self, ledger: LedgerId, version: int | None = None) -> None:
        """Delete the ledger's metadata (only in `version`, if given), then parents left empty.

        Raises LedgerNotFound, MetadataVersionConflict.
        """
        path = self._path_to_read(ledger)
        try:
            self.store.delete(path, version, prune=self._prunable_count(ledger, path))
        except MetadataVersionConflict as error:
            raise MetadataVersionConflict(
                f"The metadata of ledger {ledger} changed since version {version} was read",
                hint="read it and try again",
            ) from error
        except NotFound as error:
            raise self._no_ledger(ledger) from error

    def watch(
        self, ledger: LedgerId, callback: Callable[[VersionedMetadata | BkctlError], None]
    ) -> Callable[[], None]:
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
        if after is not None and scope_id is not None and after.scope_id != scope_id:
            if after.scope_id > scope_id:
                return
            after = None
        if scope_id is not None:
            yield from self._ledgers_of_scope(scope_id, -1 if after is None else after.ledger_id)
            return
        for each in self._scopes_from(0 if after is None else after.scope_id):
            same = after is not None and each == after.scope_id
            yield from self._ledgers_of_scope(each, after.ledger_id if after is not None and same else -1)

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

    # what a layout decides

    @abstractmethod
    def path(self, ledger: LedgerId) -> str:
        """Where the ledger's metadata is kept, below the root. Raises UsageError for an id that has no place here."""

    @abstractmethod
    def _ledgers_of_scope(self, scope_id: int, after: int) -> Iterator[LedgerId]: ...

    @abstractmethod
    def _scopes_from(self, first: int) -> Iterator[int]: ...

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
    """Every ledger at `ledgers/<32 hex>`, for stores that list a range of names cheaply (SQLite)."""

    def path(self, ledger: LedgerId) -> str:
        """See LedgerManager.path."""
        return f"ledgers/{ledger.qualified_name}"

    def _ledgers_of_scope(self, scope_id: int, after: int) -> Iterator[LedgerId]:
        # "g" sorts after every hex digit, "" before; a prefix sorts before all that it begins.
        last = f"{scope_id:016x}" if after < 0 else LedgerId(scope_id, after).qualified_name
        while names := self.store.children("ledgers", after=last, limit=_PAGE_SIZE):
            for last in names:
                if not _QUALIFIED_NAME.fullmatch(last):
                    continue
                ledger = LedgerId.from_value(int(last, 16))
                if ledger.scope_id != scope_id:
                    return
                yield ledger

    def _scopes_from(self, first: int) -> Iterator[int]:
        last = f"{first:016x}"
        while names := self.store.children("ledgers", after=last, limit=1):
            last = names[0]
            if _QUALIFIED_NAME.fullmatch(last):
                yield int(last[:16], 16)
                last = last[:16] + "g"

    def _new_default_id(self) -> int:
        return self.store.sequence("idgen")


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
    def _default_ledgers(self, after: int) -> Iterator[int]: ...

    def _ledgers_of_scope(self, scope_id: int, after: int) -> Iterator[LedgerId]:
        if scope_id == 0:
            for ledger_id in self._default_ledgers(after):
                yield LedgerId(0, ledger_id)
        elif self._scopes_are_ours():
            base = _scope_path(scope_id)
            last = "" if after < 0 else f"{after:016x}"
            for digits in self._walk(self.store.children(base), base, (4, 4, 4, 4), last, alphabet="0-9a-f"):
                yield LedgerId(scope_id, int(digits, 16))

    def _scopes_from(self, first: int) -> Iterator[int]:
        if first == 0:
            yield 0
        if self._scopes_ours or self.scopes_state() == "ours":
            last = f"{max(first - 1, 0):016x}"
            names = self.store.children(SCOPES)
            for digits in self._walk(names, SCOPES, (4, 12), last, alphabet="0-9a-f", leaf=""):
                yield int(digits, 16)

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

    def _walk(
        self,
        names: list[str] | None,
        path: str,
        widths: tuple[int, ...],
        after: str,
        prefix: str = "",
        *,
        alphabet: str = "0-9",
        leaf: str = "L",
    ) -> Iterator[str]:
        """Digits of all leaves below `path`, whose children are `names`, that sort after the digits `after`.

        `widths` are the digits of each level; all of a level have the same width, so text order is numeric order. Names
        of another form are passed over, and so is what vanishes meanwhile: only an empty directory is ever deleted.
        """
        is_leaf = len(widths) == 1
        pattern = re.compile(f"{leaf if is_leaf else ''}([{alphabet}]{{{widths[0]}}})", re.ASCII)
        found = sorted(match[1] for match in map(pattern.fullmatch, names or ()) if match)
        if is_leaf:
            yield from (prefix + digits for digits in found if prefix + digits > after)
            return
        found = [digits for digits in found if prefix + digits >= after[: len(prefix) + len(digits)]]
        below = self.store.children_many(f"{path}/{digits}" if path else digits for digits in found)
        for digits, children in zip(found, below, strict=True):
            if children:
                child = f"{path}/{digits}" if path else digits
                yield from self._walk(
                    children, child, widths[1:], after, prefix + digits, alphabet=alphabet, leaf=leaf
                )

    def _walk_default(
        self, names: list[str], widths: tuple[int, ...], first: int, end: int, after: int
    ) -> Iterator[int]:
        """Ledger ids in [first, end) of the decimal tree of `widths` below the root, after the id `after`."""
        digit_count = sum(widths)
        last = "" if after < 0 else f"{after:0{digit_count}d}"
        if len(last) <= digit_count:
            for digits in self._walk(names, "", widths, last):
                if first <= int(digits) < end:
                    yield int(digits)

    def _root_children(self) -> list[str]:
        names = self.store.children("")
        if names is None:
            raise NotFound(f"No BookKeeper cluster in {self.store.name}")
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

    def _default_ledgers(self, after: int) -> Iterator[int]:
        names = self._root_children()
        if after < SHORT_ID_END:
            yield from self._walk_default(names, (2, 4, 4), 0, SHORT_ID_END, after)
        yield from self._walk_default(names, (3, 4, 4, 4, 4), SHORT_ID_END, 1 << 63, after)


class LegacyHierarchicalLedgerManager(ZooKeeperLedgerManager):
    """All ids as `00/1234/L5678`, so 10 digits at most. Source: LegacyHierarchicalLedgerManager."""

    def _default_path(self, ledger_id: int) -> str:
        if ledger_id >= 10**10:
            raise UsageError(f"Ledger id {ledger_id} has more than the 10 digits of a LegacyHierarchical layout")
        return _short_path(ledger_id)

    def _default_ledgers(self, after: int) -> Iterator[int]:
        yield from self._walk_default(self._root_children(), (2, 4, 4), 0, 10**10, after)

    def _new_default_id(self) -> int:
        return _short_id(self.store, "idgen")


class LongHierarchicalLedgerManager(ZooKeeperLedgerManager):
    """All ids as `000/0000/0000/1234/L5678`; LongLong too. Source: LongHierarchicalLedgerManager."""

    def _default_path(self, ledger_id: int) -> str:
        return _long_path(ledger_id)

    def _default_ledgers(self, after: int) -> Iterator[int]:
        yield from self._walk_default(self._root_children(), (3, 4, 4, 4, 4), 0, 1 << 63, after)


class FlatLedgerManager(ZooKeeperLedgerManager):
    """All ledgers side by side as `L0012345678`. Source: FlatLedgerManager."""

    def _default_path(self, ledger_id: int) -> str:
        return f"L{ledger_id:010d}"

    def _default_ledgers(self, after: int) -> Iterator[int]:
        matches = (_FLAT_LEDGER.fullmatch(name) for name in self._root_children())
        ids = sorted(int(match[1]) for match in matches if match)
        yield from (ledger_id for ledger_id in ids if after < ledger_id <= I64_MAX)

    def _new_default_id(self) -> int:
        return _short_id(self.store, "")


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
    if pulsar := _pulsar_object(metadata):
        value["pulsar"] = pulsar
    if show_secrets:
        value["password"] = None if metadata.password is None else _base64(metadata.password)
    return value


def _pulsar_object(metadata: LedgerMetadata) -> dict[str, str]:
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
