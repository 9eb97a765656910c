"""The metadata store on etcd, through etcd3 over gRPC.

etcd keeps keys, not a tree: a node is the key `<root>/<path>`, its parents are keys with empty values, as Apache's own
driver leaves them, and its children are the keys below that have no further "/". Every write is a transaction that
compares first, so a write that arrives late, or twice, changes nothing. A node's version is its key's mod revision.
One lease, kept alive, holds the store's ephemerals and claims.

Source: EtcdConstants, EtcdUtils, EtcdRegistrationManager, EtcdLedgerManager.
"""

from __future__ import annotations

import contextlib
import functools
import random
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, Final

import grpc

from bkctl import errors
from bkctl.ids import LedgerId
from bkctl.metadata.backends.etcd import etcd_connection, etcdrpc
from bkctl.metadata.backends.etcd.etcd_watches import RESTORE_PAUSE_S, EtcdWatches
from bkctl.metadata.backends.sessions import SessionStore
from bkctl.metadata.ledgers import LEDGERS, QualifiedNameLedgerManager
from bkctl.metadata.store import (
    NEW,
    NO_CLUSTER_HINT,
    RACKS,
    AbsolutePath,
    Claim,
    MetadataStore,
    Versioned,
    check_path,
    check_size,
    full_path,
    map_each,
    names_in,
    value_of,
)

_EXPIRY_SLACK_S: Final = 3.0
_LEASE_REFRESHES: Final = 3  # within its time to live
PAGE_SIZE: Final = 1000
#: Nodes whose children one request reads.
DIRECTORY_BATCH_SIZE: Final = 16
#: etcd's own bound (--max-txn-ops) is 128 of each kind.
TRANSACTION_SIZE_MAX: Final = 120
#: Nodes, and bytes of their values, in a request of `put_many`: the transaction of each counts among the 128 too, and
#: a request has 1.5 MiB at most (--max-request-bytes).
_PUTS_MAX: Final = 100
_PUTS_SIZE_BYTES_MAX: Final = 1 << 20


def get_key(key: bytes, **options: Any) -> Any:
    """Return the operation that reads a key, or with `range_end` a range of keys."""
    return etcdrpc.RequestOp(request_range=etcdrpc.RangeRequest(key=key, **options))


def put_key(key: bytes, value: bytes, **options: Any) -> Any:
    """Return the operation that writes a key."""
    return etcdrpc.RequestOp(request_put=etcdrpc.PutRequest(key=key, value=value, **options))


def delete_key(key: bytes) -> Any:
    """Return the operation that deletes a key."""
    return etcdrpc.RequestOp(request_delete_range=etcdrpc.DeleteRangeRequest(key=key))


def is_absent(key: bytes) -> Any:
    """Return the comparison: the key does not exist."""
    return etcdrpc.Compare(key=key, target=etcdrpc.Compare.CREATE, result=etcdrpc.Compare.EQUAL, create_revision=0)


def is_present(key: bytes) -> Any:
    """Return the comparison: the key exists."""
    return etcdrpc.Compare(key=key, target=etcdrpc.Compare.CREATE, result=etcdrpc.Compare.GREATER, create_revision=0)


def has_no_children(key: bytes) -> Any:
    """Return the comparison: the node at `key` has no child."""
    return has_no_keys(key + b"/", key + b"0")


def has_no_keys(start: bytes, end: bytes) -> Any:
    """Return the comparison: no key is from `start` to before `end`. It takes etcd a time linear in such keys."""
    compare = is_absent(start)
    compare.range_end = end
    return compare


def at_revision(key: bytes, revision: int) -> Any:
    """Return the comparison: the last write of the key was at `revision`."""
    # The mod revision of a missing key is 0, so ask for -1 instead: no key has it.
    asked = revision if revision > 0 else -1
    return etcdrpc.Compare(key=key, target=etcdrpc.Compare.MOD, result=etcdrpc.Compare.EQUAL, mod_revision=asked)


def first_key(response: Any) -> Any:
    """Return the first key of a read operation's answer, None without one."""
    kvs = response.response_range.kvs
    return kvs[0] if kvs else None


def versioned(kv: Any) -> Versioned[bytes] | None:
    """Return the value of a key with its mod revision as version."""
    return None if kv is None else Versioned(kv.value, kv.mod_revision, None)


#: Bytes behind the parent's key that count as a number: the name of a ledger has 36.
_DIGITS: Final = 40
#: Pages that a range holds by the distances of the keys on the last one.
_PAGES: Final = 8
_FIRST_GROWTH_BITS: Final = 8


class PageRange:
    """The width of the next page of the keys below the node at `key`.

    etcd visits every key of a range to count it, also those behind the limit, so pages that reach to the end of a
    directory take it a time quadratic in the number of keys. A range is as wide as some pages were, and widens where
    there are fewer keys; `width` is a distance of keys as numbers, 0 without one: to the end.
    """

    def __init__(self, key: bytes, width: int = 0) -> None:
        self.key, self.width = key, width
        self.prefix, self.end = key + b"/", key + b"0"
        self._growth_bits = _FIRST_GROWTH_BITS

    def end_from(self, start: bytes) -> bytes:
        """Return the end of a range that begins at the key `start`."""
        number = self._number(start) + self.width
        if not self.width or number >> 8 * _DIGITS:
            return self.end
        return self.prefix + number.to_bytes(_DIGITS, "big")

    def was_full(self, first: bytes, last: bytes) -> None:
        """Note that a page held the keys from `first` to `last`, and that more follow in its range."""
        self.width = _PAGES * (self._number(last) - self._number(first)) or self.width
        self._growth_bits = _FIRST_GROWTH_BITS

    def was_short(self) -> None:
        """Note that a range held less than a page."""
        self.width <<= self._growth_bits
        self._growth_bits *= 2

    def _number(self, key: bytes) -> int:
        return int.from_bytes(key[len(self.prefix) :][:_DIGITS].ljust(_DIGITS, b"\0"), "big")


class EtcdNodes(SessionStore):
    """The nodes of a store below the key `root`, and its lease: a lost lease loses claims, and is granted again."""

    def __init__(self, connection: etcd_connection.EtcdConnection, root: str) -> None:
        super().__init__()
        self.name = f"{root} of etcd at {connection.address}"
        #: The key of the cluster's root.
        self.root = root
        #: The lease of all ephemerals and claims; 0: none is granted.
        self.lease_id = 0
        self._connection = connection
        self._ttl_s = connection.session_timeout_s
        self._lease_lock = threading.Lock()

    def get_many(self, paths: Iterable[str]) -> Iterator[Versioned[bytes] | None]:

        def request(batch: tuple[bytes, ...]) -> Any:
            return etcdrpc.TxnRequest(success=[get_key(key) for key in batch])

        keys = map(self._key, paths)
        batches = iter(lambda: tuple(islice(keys, etcd_connection.BATCH_SIZE)), ())
        for _, answer in self._connection.pipeline(batches, 2, request):
            for response in answer.responses:
                yield versioned(first_key(response))

    def _key(self, path: str) -> bytes:
        """Return the key of the node at `path`."""
        return full_path(self.root, path).encode()

    def _parent_keys(self, path: str) -> list[bytes]:
        """Return the keys of the node's parents, from the root down."""
        parts = path.split("/")[:-1] if path not in ("", RACKS) else []
        return [self._key("/".join(parts[:count])) for count in range(len(parts) + 1)] if path else []

    def _read(self, key: bytes, **options: Any) -> Any:
        """Return the key with its value, None for a missing key."""
        answer, _ = self._connection.transact((), [get_key(key, **options)])
        return first_key(answer.responses[0])

    def _create(self, path: str, value: bytes, lease_id: int = 0, *, repeated: bool = False) -> int:
        """Create the node, together with its missing parents; return its version. Raises AlreadyExists, LeaseLost.

        `repeated`: an earlier request of the caller may have created it.
        """
        key, parents = self._key(path), self._parent_keys(path)
        deadline = time.monotonic() + self._connection.timeout_s
        missing: list[bytes] = []
        while True:
            present = [parent for parent in parents if parent not in missing]
            answer, sent_twice = self._connection.transact(
                [*map(is_absent, (key, *missing)), *map(is_present, present[-1:])],
                [*(put_key(parent, b"") for parent in missing), put_key(key, value, lease=lease_id)],
                [get_key(key), *(get_key(parent, count_only=True) for parent in parents)],
            )
            repeated = repeated or sent_twice
            if answer.succeeded:
                return int(answer.header.revision)
            found = first_key(answer.responses[0])
            if found is not None:
                if repeated and (found.value, found.lease, found.version) == (value, lease_id, 1):
                    return int(found.mod_revision)
                raise errors.AlreadyExists(f"{path or self.root} exists in {self.name}")
            counts = [response.response_range.count for response in answer.responses[1:]]
            missing = [parent for parent, count in zip(parents, counts, strict=True) if not count]
            if missing and missing[0] == parents[0]:
                raise errors.NotFound(f"No BookKeeper cluster in {self.name}", hint=NO_CLUSTER_HINT)
            if time.monotonic() > deadline:  # Other clients keep creating and removing the parents.
                raise self._connection.timed_out()

    def _keep_session(self) -> None:
        self._connection.start_thread("lease", self._keep_lease)

    def _put_ephemeral(self, path: str, value: bytes | None) -> bool:
        """Create or update our ephemeral (None: neither); return False when another lease, or none, holds the key."""
        key = self._key(path)
        if value is None:
            found = self._read(key)
            return found is None or found.lease == self.lease_id != 0
        lease_id = self._lease()
        try:
            self._create(path, value, lease_id)
        except etcd_connection.LeaseLost:
            self._forget_lease(lease_id)
            return False
        except errors.AlreadyExists:
            found = self._read(key)
            if found is None or found.lease != lease_id:
                return False
            if found.value != value:
                update = [put_key(key, value, ignore_lease=True)]
                self._connection.transact([at_revision(key, found.mod_revision)], update)
        return True

    def _expiry_s(self, path: str) -> float:
        """Return the seconds after which the lease that holds the key, without a keeper, is certainly over."""
        granted_s, found = self._connection.session_timeout_s, self._read(self._key(path))
        if found is not None and found.lease:
            answer, _ = self._connection.send("LeaseTimeToLive", etcdrpc.LeaseTimeToLiveRequest(ID=found.lease))
            granted_s = max(granted_s, answer.grantedTTL)
        return granted_s + _EXPIRY_SLACK_S

    def claim(self, path: str, value: bytes, *, numbered: bool = False) -> Claim:
        """See MetadataStore.claim. The number is the count of writes of the parent, which each claim writes once."""
        check_size(path, value, "etcd")
        while True:
            lease_id = self._lease()
            try:
                if numbered:
                    claimed, revision = self._create_numbered(path, value, lease_id)
                else:
                    claimed, revision = path, self._create(path, value, lease_id)
            except etcd_connection.LeaseLost:
                self._forget_lease(lease_id)
                continue
            self._keep_session()
            return Claim(self, claimed, revision)

    def _create_numbered(self, path: str, value: bytes, lease_id: int) -> tuple[str, int]:
        parent = path.rpartition("/")[0]
        while True:
            found = self._read(self._key(parent))
            if found is None:
                with contextlib.suppress(errors.AlreadyExists):
                    self._create(parent, b"")
                continue
            numbered = f"{path}{int(found.version):010d}"
            key = self._key(numbered)
            answer, _ = self._connection.transact(
                [at_revision(found.key, found.mod_revision), is_absent(key)],
                [put_key(found.key, b"", ignore_value=True), put_key(key, value, lease=lease_id)],
                [get_key(key)],
            )
            if answer.succeeded:
                return numbered, int(answer.header.revision)
            # After a lost answer the repeated request finds the node that the first one created.
            there = first_key(answer.responses[0])
            if there is not None and (there.value, there.lease) == (value, lease_id):
                return numbered, int(there.mod_revision)

    def held_many(self, claims: Sequence[Claim]) -> list[bool]:
        found = self.get_many(claim.path for claim in claims)  # a claimed key is never written again
        return [each is not None and each.version == claim.mark for claim, each in zip(claims, found, strict=True)]

    def release_many(self, claims: Sequence[Claim]) -> None:
        def release(claim: Claim) -> None:
            key = self._key(claim.path)
            self._connection.transact([at_revision(key, claim.mark)], [delete_key(key)])

        for found in map_each(release, claims):
            value_of(found)

    # the lease

    def _lease(self) -> int:
        """Return the lease, granted where there is none."""
        with self._lease_lock:
            if not self.lease_id:
                request = etcdrpc.LeaseGrantRequest(TTL=max(1, round(self._connection.session_timeout_s)))
                answer, _ = self._connection.send("LeaseGrant", request)
                self.lease_id, self._ttl_s = int(answer.ID), float(answer.TTL)
            return self.lease_id

    def _forget_lease(self, lease_id: int) -> None:
        with self._lease_lock:
            if self.lease_id == lease_id:
                self.lease_id = 0

    def _keep_lease(self) -> None:
        """Keep the lease alive, and create the ephemerals again after its end (thread `metadata-store-lease`)."""
        restored_under = 0  # the lease that holds all ephemerals
        wait_s = self._ttl_s / _LEASE_REFRESHES
        while not self._connection.closed.wait(wait_s):
            wait_s = self._ttl_s / _LEASE_REFRESHES
            lease_id = self.lease_id
            try:
                if lease_id and not self._refresh(lease_id, wait_s):
                    self._forget_lease(lease_id)
                if restored_under == 0 or restored_under != self.lease_id:
                    done = self._restore_ephemerals()
                    restored_under = self.lease_id if done else 0
                    wait_s = wait_s if done else RESTORE_PAUSE_S
            except (errors.BkctlError, grpc.RpcError, ValueError):
                wait_s = min(wait_s, RESTORE_PAUSE_S)

    def _refresh(self, lease_id: int, limit_s: float) -> bool:
        """Give the lease its whole time to live again; return whether it still exists."""
        client = self._connection.client()
        requests = iter((etcdrpc.LeaseKeepAliveRequest(ID=lease_id),))
        try:
            metadata = (*self._connection.metadata(client, limit_s), *etcd_connection.REQUIRE_LEADER)
            answers: Any = client.leasestub.LeaseKeepAlive(requests, timeout=limit_s, metadata=metadata)
            answer = next(answers, None)
            answers.cancel()
        except grpc.RpcError as error:
            if etcd_connection.is_stale_token(*etcd_connection.status_of(error)):
                self._connection.forget_token()
            self._connection.fail_over(client)
            raise
        if answer is None:
            raise errors.Unreachable(f"etcd at {self._connection.address} did not answer")
        return bool(answer.TTL > 0)


class EtcdStore(EtcdNodes):
    """`MetadataStore` on the etcd cluster whose `hosts` are (host, port) pairs, below the key `root` (`/ledgers`).

    `settings` are StoreConnection's. Raises Unreachable, naming the hosts: at once when each refuses or none resolves,
    else after `connect_timeout_s`; Unauthorized for a wrong user or password; UsageError for unreadable TLS files, and
    options that etcd lacks.
    """

    def __init__(self, hosts: Sequence[tuple[str, int]], root: str, **settings: Any) -> None:
        super().__init__(etcd_connection.EtcdConnection(hosts, root, **settings), root)
        self._watches = EtcdWatches(self._connection)
        #: Of the directory that was listed last: the next call continues there.
        self._last_pages = PageRange(b"")
        with errors.on_error(self.close):
            self._read(self._key(""), count_only=True)

    def get(self, path: str) -> Versioned[bytes] | None:
        return versioned(self._read(self._key(path)))

    def put(self, path: str, value: bytes, expected: int | None, *, repeated: bool = False) -> int:
        """See MetadataStore.put. `repeated`: an earlier request of ours may have written the value."""
        check_size(path, value, "etcd")
        if expected == NEW:
            return self._create(path, value, repeated=repeated)
        key = self._key(path)
        while True:
            revision = expected
            if revision is None:
                found = self._read(key, keys_only=True)
                if found is None:
                    with contextlib.suppress(errors.AlreadyExists):
                        return self._create(path, value)
                    continue
                revision = int(found.mod_revision)
            answer, sent_twice = self._connection.transact(
                [at_revision(key, revision)], [put_key(key, value, ignore_lease=True)], [get_key(key)]
            )
            if answer.succeeded:
                return int(answer.header.revision)
            repeated = repeated or sent_twice
            found = first_key(answer.responses[0])
            ours, is_unsure = self._find_own_write(found, revision, value) if repeated else (None, False)
            if ours is not None:
                return ours
            if expected is not None:
                if found is None:
                    raise errors.NotFound(f"No {path} in {self.name}")
                raise self._version_conflict(path, found, expected, is_unsure)

    def _find_own_write(self, found: Any, revision: int, value: bytes) -> tuple[int | None, bool]:
        """Return the revision of our write over `revision` whose answer was lost, and whether that cannot be known.

        `found` is the key as it is now. The write was ours if the first change after `revision` left our value.
        """
        if found is None:
            return None, False
        change, before, upper = found, revision, int(found.mod_revision)
        try:
            while upper - before > 1:
                middle = (before + upper) // 2
                there = self._read(found.key, revision=middle)
                if there is not None and there.mod_revision == revision:
                    before = middle
                else:
                    change, upper = there, middle if there is None else int(there.mod_revision)
        except etcd_connection.RevisionCompacted:
            return (int(found.mod_revision), False) if found.value == value else (None, True)
        return (int(change.mod_revision) if change is not None and change.value == value else None), False

    def _version_conflict(
        self, path: str, found: Any, expected: int, may_be_applied: bool
    ) -> errors.MetadataVersionConflict:
        return errors.MetadataVersionConflict(
            f"{path} changed meanwhile: version {found.mod_revision}, expected {expected}",
            may_be_applied=may_be_applied,
        )

    def put_many(self, nodes: Sequence[tuple[str, bytes, int]]) -> list[int | errors.BkctlError]:
        """See MetadataStore.put_many: transactions with one inside for each node; what those refuse, one by one."""
        results: dict[int, int | errors.BkctlError] = {}
        refused: dict[bool, list[int]] = {False: [], True: []}
        waiting: deque[int] = deque()
        for at, (path, value, _) in enumerate(nodes):
            try:
                check_size(path, value, "etcd")
                check_path(path)
                waiting.append(at)
            except errors.UsageError as error:
                results[at] = error
        while waiting:
            places, operations = self._next_puts(nodes, waiting)
            answer, repeated = self._connection.send("Txn", etcdrpc.TxnRequest(success=operations))
            for at, response in zip(places, answer.responses, strict=True):
                if response.response_txn.succeeded:
                    results[at] = int(answer.header.revision)
                else:
                    refused[repeated].append(at)
        for repeated, places in refused.items():
            put = functools.partial(self.put, repeated=repeated)
            found = map_each(lambda at, put=put: put(*nodes[at]), places)  # type: ignore[misc]
            results |= zip(places, found, strict=True)
        return [results[at] for at in range(len(nodes))]

    def _next_puts(self, nodes: Sequence[tuple[str, bytes, int]], waiting: deque[int]) -> tuple[list[int], list[Any]]:
        """Take from `waiting` the places of nodes that fit one request, with the operation of each."""
        places: list[int] = []
        operations: list[Any] = []
        paths: set[str] = set()
        size_bytes = 0
        while waiting and len(places) < _PUTS_MAX:
            path, value, expected = nodes[waiting[0]]
            size_bytes += len(value)
            if places and (path in paths or size_bytes > _PUTS_SIZE_BYTES_MAX):
                break
            key = self._key(path)
            if expected == NEW:
                compare = [is_absent(key), *map(is_present, self._parent_keys(path)[-1:])]
            else:
                compare = [at_revision(key, expected)]
            paths.add(path)
            places.append(waiting.popleft())
            put = put_key(key, value, ignore_lease=expected != NEW)
            operations.append(etcdrpc.RequestOp(request_txn=etcdrpc.TxnRequest(compare=compare, success=[put])))
        return places, operations

    def put_all(self, nodes: Sequence[tuple[str, bytes]]) -> None:
        """See MetadataStore.put_all. Raises UsageError for more than TRANSACTION_SIZE_MAX nodes."""
        if len(nodes) > TRANSACTION_SIZE_MAX:
            raise errors.UsageError(f"{len(nodes)} nodes at once: etcd takes {TRANSACTION_SIZE_MAX} in one step")
        for path, value in nodes:
            check_size(path, value, "etcd")
        values = {self._key(path): value for path, value in nodes}
        parents = dict.fromkeys(above[-1] for path, _ in nodes if (above := self._parent_keys(path)))
        outside = [key for key in parents if key not in values]
        answer, repeated = self._connection.transact(
            [*map(is_absent, values), *map(is_present, outside)],
            [put_key(key, value) for key, value in values.items()],
            [get_key(key) for key in values],
        )
        if answer.succeeded or not nodes:
            return
        found = [kv for response in answer.responses if (kv := first_key(response)) is not None]
        if not found:
            raise errors.NotFound(f"{', '.join(key.decode() for key in outside)} does not exist in {self.name}")
        is_one_write = {(kv.create_revision, kv.version) for kv in found} == {(found[0].create_revision, 1)}
        if repeated and is_one_write and {kv.key: kv.value for kv in found} == values:
            return
        raise errors.AlreadyExists(f"{found[0].key.decode()} exists in {self.name}")

    def delete(self, path: str, expected: int | None = None, *, prune: int = 0) -> None:
        if not path:
            raise errors.UsageError("The root of the metadata store cannot be deleted")
        self._delete_node(path, expected)
        child = self._key(path)
        for key in self._parent_keys(path)[:0:-1][:prune]:
            # Children with almost the same name come first: etcd stops at the first comparison that fails.
            near = key + child[len(key) : -2].ljust(1, b"/")
            empty = [is_present(key), has_no_keys(near, near + b"\xff"), has_no_children(key)]
            try:
                answer, _ = self._connection.transact(empty, [delete_key(key)])
            except errors.BkctlError:
                break
            if not answer.succeeded:
                break
            child = key

    def delete_root(self) -> None:
        self._delete_node("", None)

    def _delete_node(self, path: str, expected: int | None) -> None:
        key = self._key(path)
        self._held.pop(path, None)
        while True:
            answer, repeated = self._connection.transact(
                [is_present(key) if expected is None else at_revision(key, expected), has_no_children(key)],
                [delete_key(key)],
                [get_key(key, keys_only=True), get_key(key + b"/", range_end=key + b"0", count_only=True)],
            )
            if answer.succeeded:
                return
            found = first_key(answer.responses[0])
            if found is None:
                if repeated:
                    return
                raise errors.NotFound(f"No {path} in {self.name}")
            if expected is not None and expected != found.mod_revision:
                raise self._version_conflict(path, found, expected, repeated)
            if answer.responses[1].response_range.count:
                raise errors.Conflict(f"{path} has children in {self.name}")
            # The node changed between the comparison and the read: try again.

    def children(self, path: str, *, after: str = "", limit: int | None = None) -> list[str] | None:
        """See MetadataStore.children. All pages are of one revision, as long as etcd keeps it."""
        key = self._key(path)
        last = self._last_pages
        pages = PageRange(key, last.width if last.key == key else 0)
        start = pages.prefix + (after.encode("utf-8", "surrogatepass") + b"\0" if after else b"")
        answer, _ = self._connection.send("Txn", etcdrpc.TxnRequest(success=_first_page(pages, start, limit)))
        names = self._names(path, start, pages, answer.responses, int(answer.header.revision), limit)
        self._last_pages = pages
        return names

    def children_many(self, paths: Iterable[str]) -> Iterator[list[str] | None]:

        def request(batch: tuple[tuple[str, PageRange], ...]) -> Any:
            return etcdrpc.TxnRequest(
                success=[operation for _, pages in batch for operation in _first_page(pages, pages.prefix)]
            )

        directories = ((path, PageRange(self._key(path))) for path in paths)
        batches = iter(lambda: tuple(islice(directories, DIRECTORY_BATCH_SIZE)), ())
        for batch, answer in self._connection.pipeline(batches, 2, request):
            for at, (path, pages) in enumerate(batch):
                responses = answer.responses[2 * at : 2 * at + 2]
                yield self._names(path, pages.prefix, pages, responses, int(answer.header.revision), None)

    def _names(
        self, path: str, start: bytes, pages: PageRange, responses: Sequence[Any], revision: int, limit: int | None
    ) -> list[str] | None:
        """Return the names of the children of `path`, from the answers to `_first_page` and further pages."""
        node, page = (response.response_range for response in responses)
        is_foreign = isinstance(path, AbsolutePath)
        if not node.count and not is_foreign:
            return None
        if limit == 0:
            return []
        names: list[str] = []
        skipped_to = b""
        while True:
            found: list[str] = []
            for kv in page.kvs:
                if kv.key < skipped_to:
                    continue
                name, slash, _ = kv.key[len(pages.prefix) :].partition(b"/")
                if slash:
                    skipped_to = pages.prefix + name + b"0"  # Keys below that child end here.
                    if not is_foreign:
                        continue
                found.append(name.decode("utf-8", "surrogateescape"))
            names += self._valid_names(path, found)
            if is_foreign:  # Keys of a child need not follow its own.
                names = sorted(set(names))
            if page.more:
                pages.was_full(page.kvs[0].key, page.kvs[-1].key)
                start = page.kvs[-1].key + b"\0"
            else:
                start = pages.end_from(start)
            start = max(start, skipped_to)
            if start >= pages.end or (limit is not None and len(names) >= limit):
                return names[:limit]
            if not page.more:
                pages.was_short()
            options: dict[str, Any] = {"range_end": pages.end_from(start), "limit": PAGE_SIZE, "keys_only": True}
            try:
                answer, _ = self._connection.transact((), [get_key(start, revision=revision, **options)])
            except etcd_connection.RevisionCompacted:
                answer, _ = self._connection.transact((), [get_key(start, **options)])
                revision = int(answer.header.revision)
            page = answer.responses[0].response_range

    def sequence(self, path: str) -> int:
        """See MetadataStore.sequence: the number of writes of the node. Source: Etcd64bitIdGenerator."""
        key, parents = self._key(path), self._parent_keys(path)
        while True:
            answer, _ = self._connection.transact(map(is_present, parents[-1:]), [put_key(key, b""), get_key(key)])
            if answer.succeeded:
                return int(first_key(answer.responses[1]).version) - 1
            with contextlib.suppress(errors.AlreadyExists):
                self._create(path.rpartition("/")[0], b"")

    def sequence_position(self, path: str) -> int:
        found = self._read(self._key(path))
        return 0 if found is None else int(found.version)

    def watch(self, path: str, callback: Callable[[], None], *, children: bool = False) -> Callable[[], None]:
        return self._watches.add(path, self._key(path), callback, children)

    def close(self) -> None:
        if not self._connection.begin_close():
            return
        self._held.clear()
        self._watches.close()
        self._connection.close(self.lease_id)


def _first_page(pages: PageRange, start: bytes, limit: int | None = None) -> list[Any]:
    """Return the operations that count the node and read a page of the keys below it, from `start` on."""
    count = PAGE_SIZE if limit is None else min(max(limit, 1), PAGE_SIZE)
    page = get_key(start, range_end=pages.end_from(start), limit=count, keys_only=True)
    return [get_key(pages.key, count_only=True), page]


_UUID: Final = re.compile("[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.ASCII)
_BUCKETS: Final = 0x80
_BUCKET_SHIFT: Final = 56


class EtcdLedgerManager(QualifiedNameLedgerManager):
    """Every ledger at `ledgers/<UUID>`: 128 bits, scope first; Apache's driver always writes scope 0.

    Ids of scope 0 come from 128 buckets, each a key that counts its writes: bucket << 56 | count.
    """

    def __init__(self, store: MetadataStore) -> None:
        super().__init__(store)
        self._bucket = random.randrange(_BUCKETS)

    def _name(self, ledger: LedgerId) -> str:
        text = ledger.qualified_name
        return "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))

    def _ledger(self, name: str) -> LedgerId | None:
        return LedgerId.from_value(int(name.replace("-", ""), 16)) if _UUID.fullmatch(name) else None

    def _names_after(self, name: str, limit: int) -> list[str]:
        return names_in(self.store, LEDGERS, after=name, limit=limit)

    def _new_default_id(self) -> int:
        for _ in range(_BUCKETS):
            self._bucket = bucket = (self._bucket + 1) % _BUCKETS
            number = self.store.sequence(f"buckets/{bucket:03d}") + 1
            if number < 1 << _BUCKET_SHIFT:
                return bucket << _BUCKET_SHIFT | number
        raise errors.IllegalOperation(f"No ledger ids are left in {self.store.name}")

    def id_position(self) -> int:
        """See LedgerManager.id_position: the highest bucket in use, with the count of the fullest one."""
        counts = self.generator_state()
        highest = max((bucket for bucket, count in enumerate(counts) if count), default=None)
        return 0 if highest is None else highest << _BUCKET_SHIFT | max(counts) + 1

    def skip_ids(self, position: int) -> bool:
        if position <= 1:
            return True
        highest, count = position >> _BUCKET_SHIFT, position & ((1 << _BUCKET_SHIFT) - 1)
        return all(
            self.store.advance_sequence(f"buckets/{bucket:03d}", count - 1)
            for bucket in range(min(highest, _BUCKETS - 1) + 1)
        )

    def generator_state(self) -> tuple[int, ...]:
        """See LedgerManager.generator_state: the last number of each bucket."""
        return tuple(self.store.sequence_position(f"buckets/{bucket:03d}") for bucket in range(_BUCKETS))

    def generated_since(self, state: tuple[int, ...]) -> Iterator[LedgerId]:
        """See LedgerManager.generated_since: every id, without a listing, which would pass over whole buckets."""
        for bucket, (before, now) in enumerate(zip(state, self.generator_state(), strict=True)):
            for number in range(before + 1, now + 1):
                yield LedgerId(0, bucket << _BUCKET_SHIFT | number)
