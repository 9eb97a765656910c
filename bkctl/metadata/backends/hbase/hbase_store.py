"""The metadata store on HBase: the ledgers and counters in one table, all else in the ZooKeeper that HBase has.

HBase has neither ephemerals nor watches. So registrations, cookies, LAYOUT, and the marks and locks of auto-recovery
are nodes below a root of our own in HBase's ZooKeeper, as `ZooKeeperStore` keeps them, and watched ledgers are read
periodically. `ledgers` is the table as a node, `ledgers/<qualified name>` a row of it.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby, islice
from typing import Any, Final, TypeVar

from bkctl import errors
from bkctl.ids import I64_MAX, U64_MAX, LedgerId
from bkctl.metadata.backends.hbase.regions import TableMissing
from bkctl.metadata.backends.hbase.rows import HBaseRow, Rows
from bkctl.metadata.backends.sessions import PolledWatch, PolledWatches
from bkctl.metadata.backends.zookeeper.zookeeper_store import ZooKeeperStore
from bkctl.metadata.ledgers import LEDGERS, QualifiedNameLedgerManager
from bkctl.metadata.store import (
    NEW,
    NO_SECURITY,
    VALUE_SIZE_BYTES_MAX,
    MetadataStore,
    StoredValue,
    StoreSecurity,
    Versioned,
    check_path,
    check_size,
    in_batches,
    value_of,
)
from bkctl.metadata.uri import HBASE_ZNODE_DEFAULT

T = TypeVar("T")

WATCH_POLL_S: Final = 0.5
_THREADS: Final = 8
_ROW: Final = re.compile(f"{LEDGERS}/([0-9a-f]{{32}})", re.ASCII)
#: Rows of which `children` asks for the first page, where it wants only some: from each of the buckets.
_PAGE_SIZE_MIN: Final = 4


class HBaseStore(ZooKeeperStore):
    """`MetadataStore` on the HBase of the ZooKeeper ensemble `hosts`, in the table `PREFIX_ledgers`.

    Nodes beside the ledgers are below `/bkctl/PREFIX/ledgers` there. `znode` is HBase's `zookeeper.znode.parent`.
    `security` logs in to ZooKeeper, `times` are the timeouts of `ZooKeeperStore`. Raises as that, and Unsupported for
    TLS; HBase itself is asked once a ledger is needed.
    """

    def __init__(
        self,
        hosts: str,
        prefix: str,
        *,
        znode: str = HBASE_ZNODE_DEFAULT,
        security: StoreSecurity = NO_SECURITY,
        **times: Any,
    ) -> None:
        if security.tls:
            raise errors.Unsupported(
                "HBase is reached without TLS, and ledger metadata holds passwords",
                hint="leave TLS out where the network is trusted",
            )
        self._executor = ThreadPoolExecutor(_THREADS, thread_name_prefix="hbase")
        self._watched = PolledWatches(self._versions)
        super().__init__(hosts, f"/bkctl/{prefix}/ledgers", security=security, **times)
        self.name = f"{prefix} of HBase at {hosts}"
        self._rows = Rows(self._connection, znode, f"{prefix}_{LEDGERS}", self._executor, self.name)

    def get(self, path: str) -> Versioned[bytes] | None:
        """See MetadataStore.get. Raises NotFound for a ledger where HBase has no table."""
        if not _is_row(path):
            return super().get(path)
        ledger = _ledger(path)
        if ledger is None:
            return Versioned(b"", 0, None) if path == LEDGERS and self._rows.exists() else None
        return value_of(_versioned(self._rows.get([ledger])[0]))

    def get_many(self, paths: Iterable[str]) -> Iterator[Versioned[bytes] | None]:
        """See MetadataStore.get_many. Raises as `get`."""
        return map(value_of, self._read_each(paths))

    def get_batches(self, paths: Iterable[str]) -> Iterator[list[StoredValue]]:
        """See MetadataStore.get_batches: Corrupt in place of a malformed row. Raises NotFound without a table."""
        return in_batches(self._read_each(paths))

    def _read_each(self, paths: Iterable[str]) -> Iterator[StoredValue]:
        for (is_ledger, in_hbase), group in groupby(paths, lambda path: (_ledger(path) is not None, _is_row(path))):
            if is_ledger:
                yield from map(_versioned, self._rows.get_many(int(path[-32:], 16) for path in group))
            elif in_hbase:
                yield from map(self.get, group)
            else:
                yield from super().get_many(group)

    def put(self, path: str, value: bytes, expected: int | None, *, repeated: bool = False) -> int:
        """See MetadataStore.put. `ledgers` itself is created with its table; a ledger needs it: NotFound else."""
        if not _is_row(path):
            return super().put(path, value, expected, repeated=repeated)
        check_size(path, value)
        ledger = _ledger(path)
        if ledger is not None:
            return self._in_version(path, expected, lambda version: self._rows.put(ledger, value, version))
        if path != LEDGERS or expected not in (NEW, None):
            raise errors.UsageError(f"{path} cannot be written in {self.name}", hint="below it are ledgers only")
        if not self._rows.create_table() and expected == NEW:
            raise errors.AlreadyExists(f"Table {self._rows.name} exists in HBase at {self.hosts}")
        return 0

    def _in_version(self, path: str, expected: int | None, change: Callable[[int], T]) -> T:
        """Return what `change` of the row returns, in that version; None: in the present one (NEW: missing)."""
        while True:
            version = expected
            if version is None:
                found = self.get(path)
                version = NEW if found is None else found.version
            try:
                return change(version)
            except (errors.AlreadyExists, errors.MetadataVersionConflict, errors.NotFound) as error:
                if expected is not None or (version == NEW and isinstance(error, errors.NotFound)):
                    raise

    def put_many(self, nodes: Sequence[tuple[str, bytes, int]]) -> list[int | errors.BkctlError]:
        """See MetadataStore.put_many: ledgers that follow each other together, and the others so."""
        results: list[int | errors.BkctlError] = []
        for are_rows, group in groupby(
            nodes, lambda node: bool(_ROW.fullmatch(node[0])) and len(node[1]) <= VALUE_SIZE_BYTES_MAX
        ):
            part = list(group)
            if are_rows:
                results += self._put_rows(part)
            elif any(_is_row(path) for path, _, _ in part):
                results += MetadataStore.put_many(self, part)
            else:
                results += super().put_many(part)
        return results

    def _put_rows(self, nodes: Sequence[tuple[str, bytes, int]]) -> list[int | errors.BkctlError]:
        try:
            return self._rows.put_many([(int(path[-32:], 16), value, version) for path, value, version in nodes])
        except (errors.NotFound, errors.Unauthorized) as error:  # of the table
            return [error] * len(nodes)

    def put_all(self, nodes: Sequence[tuple[str, bytes]]) -> None:
        """See MetadataStore.put_all. Raises UsageError for ledgers, which HBase cannot write together."""
        if any(_is_row(path) for path, _ in nodes):
            raise errors.UsageError(f"Ledgers cannot be created in one step in {self.name}")
        super().put_all(nodes)

    def delete(self, path: str, expected: int | None = None, *, prune: int = 0) -> None:
        """See MetadataStore.delete. `ledgers` is deleted with its table, which must be empty."""
        if not _is_row(path):
            return super().delete(path, expected, prune=prune)
        ledger = _ledger(path)
        if ledger is not None:
            return self._in_version(path, expected, lambda version: self._rows.delete(ledger, version))
        found = self.children(path, limit=1)
        if found is None:
            raise errors.NotFound(f"No {path} in {self.name}")
        if found:
            raise errors.Conflict(f"{path} has children in {self.name}")
        return self._rows.drop()

    def children(self, path: str, *, after: str = "", limit: int | None = None) -> list[str] | None:
        if not _is_row(path):
            names = super().children(path)
            if names is None:
                return None
            if path == "" and self._rows.exists():
                names = sorted([*names, LEDGERS])
            return [name for name in names if name > after][:limit]
        if path != LEDGERS:
            return None if self.get(path) is None else []
        if limit == 0:
            return [] if self._rows.exists() else None
        page_size = _PAGE_SIZE_MIN if limit is None else max(min(limit // 8, 1000), _PAGE_SIZE_MIN)
        try:
            found = self._rows.ledgers(_first_from(after), page_size=page_size)
            return list(islice((name for ledger in found if (name := f"{ledger:032x}") > after), limit))
        except TableMissing:
            return None

    def children_many(self, paths: Iterable[str]) -> Iterator[list[str] | None]:
        kinds = groupby(paths, lambda path: (_ledger(path) is not None, _is_row(path) or path == ""))
        for (is_ledger, in_hbase), group in kinds:
            if is_ledger:
                yield from (None if found is None else [] for found in self.get_many(group))
            else:
                yield from map(self.children, group) if in_hbase else super().children_many(group)

    def ledgers(self, first: int, last: int) -> Iterator[int]:
        """Yield the 128-bit numbers of the ledgers from `first` to `last`, ascending.

        Raises NotFound without a table.
        """
        return self._rows.ledgers(first, last)

    def sequence(self, path: str) -> int:
        """See MetadataStore.sequence: an atomic increment."""
        return self._rows.next_number(check_path(path))

    def sequence_position(self, path: str) -> int:
        return self._rows.position(check_path(path))

    def advance_sequence(self, path: str, position: int) -> bool:
        self._rows.advance(check_path(path), position)
        return True

    def watch(self, path: str, callback: Callable[[], None], *, children: bool = False) -> Callable[[], None]:
        """See MetadataStore.watch; a ledger is read every WATCH_POLL_S. Raises Unsupported for the set of ledgers."""
        if not _is_row(path):
            return super().watch(path, callback, children=children)
        if _ledger(path) is None or children:
            raise errors.Unsupported(f"{path} cannot be watched in {self.name}: HBase has no watches")
        cancel = self._watched.add(path, callback, children)
        self._connection.start_thread("rows", self._poll)
        return cancel

    def _versions(self, watches: list[PolledWatch]) -> Iterator[int | None]:
        """Yield the version of each watched ledger; None: missing, -1: malformed."""
        for found in self._read_each(watch.path for watch in watches):
            yield -1 if isinstance(found, errors.BkctlError) else None if found is None else found.version

    def _poll(self) -> None:
        while not self._connection.closed.wait(WATCH_POLL_S):
            with contextlib.suppress(errors.BkctlError):  # HBase may be down: the next round reads again.
                self._watched.poll()

    def close(self) -> None:
        if hasattr(self, "_rows"):  # else the connection failed
            self._rows.close()
        super().close()
        self._executor.shutdown(wait=False)


def _is_row(path: str) -> bool:
    """Return whether the node is in HBase: the table, or one below it."""
    return path == LEDGERS or path.startswith(f"{LEDGERS}/")


def _ledger(path: str) -> int | None:
    """Return the number of the ledger that is at `path`, None for another node. Raises UsageError for no path."""
    match = _ROW.fullmatch(path)
    return int(match[1], 16) if match else None


def _first_from(name: str) -> int:
    """Return the lowest ledger whose name begins with the hex digits that `name` begins with."""
    digits = re.match("[0-9a-f]{0,32}", name)
    return int((digits[0] if digits else "").ljust(32, "0"), 16)


def _versioned(row: HBaseRow | errors.BkctlError | None) -> StoredValue:
    return Versioned(row.value, row.version, None) if isinstance(row, HBaseRow) else row


_BATCH_SIZE: Final = 1000
#: Ledgers of one scope that are passed over before the listing of scopes starts again behind it.
_PASSED_MAX: Final = 4000


class HBaseLedgerManager(QualifiedNameLedgerManager):
    """Every ledger at `ledgers/<qualified name>`, a row of HBase's table; ids of scope 0 from its counter."""

    store: HBaseStore

    def batches(self, scope_id: int | None = 0, after: LedgerId | None = None) -> Iterator[list[LedgerId]]:
        """See LedgerManager.batches: one listing, also of all scopes; a list holds ledgers of one scope."""
        first = LedgerId(scope_id or 0, 0).value
        last = LedgerId(U64_MAX if scope_id is None else scope_id, U64_MAX).value
        if after is not None:
            first = max(first, after.value + 1)
        ids = map(LedgerId.from_value, self.store.ledgers(first, last))
        # Other programs may have written larger ids in scope 0.
        for scope, found in groupby(ids, lambda each: each.scope_id or (0 if each.ledger_id <= I64_MAX else None)):
            while scope is not None and (batch := list(islice(found, _BATCH_SIZE))):
                yield batch

    def scopes(self) -> Iterator[int]:
        if next(self.store.ledgers(0, LedgerId(0, U64_MAX).value), None) is not None:  # passes over most ledgers
            yield 0
        start: int | None = LedgerId(1, 0).value
        while start is not None:
            scope, passed = -1, 0
            found, start = self.store.ledgers(start, LedgerId(U64_MAX, U64_MAX).value), None
            for ledger in found:
                passed += 1
                if ledger >> 64 != scope:
                    scope, passed = ledger >> 64, 0
                    yield scope
                elif passed > _PASSED_MAX:
                    start = (scope + 1) << 64
                    break
