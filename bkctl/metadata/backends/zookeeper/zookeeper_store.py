"""The metadata store on ZooKeeper, through kazoo: changes of nodes, ephemerals, claims and watches.

Changes recognise an earlier request of theirs whose answer was lost. Many changes are one transaction.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

from kazoo.exceptions import (
    BadVersionError,
    KazooException,
    NoChildrenForEphemeralsError,
    NodeExistsError,
    NoNodeError,
    NotEmptyError,
    RolledBackError,
    RuntimeInconsistency,
)
from kazoo.handlers.threading import KazooTimeoutError

from bkctl import errors
from bkctl.metadata.backends.zookeeper.multi_read import Origin
from bkctl.metadata.backends.zookeeper.zookeeper_connection import (
    LOST,
    UNAUTHORIZED,
    ZooKeeperCall,
    ZooKeeperConnection,
)
from bkctl.metadata.backends.zookeeper.zookeeper_reads import ZooKeeperReads
from bkctl.metadata.store import NEW, NO_CLUSTER_HINT, Claim, check_path, check_size, chunks, map_each, value_of

T = TypeVar("T")
R = TypeVar("R")

#: Changes in one request; the server takes no request above 1 MiB (jute.maxbuffer).
_CHANGES_MAX: Final = 256
_CHANGES_SIZE_BYTES_MAX: Final = 1 << 19
#: A server ends a session at a tick after its timeout, and may have granted a longer timeout than requested.
_EXPIRY_SLACK_S: Final = 5.0
_RESTORE_PAUSE_S: Final = 0.5

#: A full path, and whether its children are watched.
_Place: TypeAlias = tuple[str, bool]


class NewNode(NamedTuple):
    """A node to create at the full path `full`."""

    full: str
    value: bytes
    ephemeral: bool = False
    sequence: bool = False


class ZooKeeperNodes(ZooKeeperReads):
    """The changes of a store's nodes, over `connection`."""

    def _create(
        self, path: str, value: bytes, *, ephemeral: bool = False, sequence: bool = False, repeated: bool = False
    ) -> str:
        """Create the node, together with its missing parents; return its full path. Raises AlreadyExists.

        `repeated`: an earlier request of the caller may have created it.
        """
        connection = self._connection
        node = NewNode(connection.full(path), value, ephemeral, sequence)
        deadline = time.monotonic() + connection.timeout_s
        missing: list[str] = []
        while True:
            call = self._creation_of([*(NewNode(parent, b"") for parent in missing), node])
            call.repeated = repeated and not missing
            try:
                results = connection.answer(call) if missing else [connection.answer(call)]
            except (NodeExistsError, NoNodeError, NoChildrenForEphemeralsError) as error:
                results = [error]
            at, problem = _problem(results)
            if problem is None:
                return str(results[-1])
            if call.repeated and self._is_ours(node):
                return node.full
            if isinstance(problem, NoNodeError):
                missing = [] if missing else self._missing_parents(path)
            elif isinstance(problem, NodeExistsError) and at < len(missing):
                missing = []  # Another client created a parent.
            else:
                raise self._refusal(path or connection.root, node, problem, call.repeated) from problem
            if time.monotonic() > deadline:  # Other clients keep creating and removing the parents.
                raise connection.timed_out()

    def _creation_of(self, nodes: Sequence[NewNode]) -> ZooKeeperCall:
        """Return the call that creates all these nodes, or none; messages name the last one."""

        def add(request: Callable[..., Any], node: NewNode) -> Any:
            return request(node.full, node.value, ephemeral=node.ephemeral, sequence=node.sequence)

        if len(nodes) == 1:
            return ZooKeeperCall(lambda: add(self._connection.client.create_async, nodes[0]), nodes[0].full)
        return self._transaction(nodes, lambda transaction, node: add(transaction.create, node), nodes[-1].full)

    def _refusal(self, name: str, node: NewNode, problem: Exception, repeated: bool) -> errors.BkctlError:
        """Return the error of a creation that ZooKeeper refused."""
        if isinstance(problem, NodeExistsError):
            return errors.AlreadyExists(f"{name} exists in {self.name}")
        if isinstance(problem, NoNodeError):
            return errors.NotFound(f"{name} has no parent in {self.name}")
        if isinstance(problem, NoChildrenForEphemeralsError):
            return errors.Conflict(f"The parent of {name} is ephemeral and cannot have children")
        if isinstance(problem, UNAUTHORIZED):
            return self._connection.unauthorized(node.full, repeated=repeated)
        return errors.BkctlError(f"{name} cannot be created in {self.name}: {problem!r}")

    def _transaction(
        self, items: Sequence[T], add: Callable[[Any, T], object], full: str, *, once: bool = False
    ) -> ZooKeeperCall:
        def request() -> Any:
            transaction = self._connection.client.transaction()
            for item in items:
                add(transaction, item)
            return transaction.commit_async()

        return ZooKeeperCall(request, full, once=once)

    def _is_ours(self, node: NewNode) -> bool:
        """Return whether an earlier request of ours, whose answer was lost, created the present node."""
        try:
            found, stat = self._connection.run(self._connection.client.get_async, node.full)
        except NoNodeError:
            return False
        if node.ephemeral:
            return bool(stat.ephemeralOwner == self._connection.session_id)
        return bool(found == node.value and stat.version == 0)

    def _missing_parents(self, path: str) -> list[str]:
        """Return the full paths of the node's parents that do not exist, from the top.

        Raises NotFound when the root is missing, unless `path` is the root.
        """
        client, root = self._connection.client, self._connection.root
        parts = self._connection.full(path)[1:].split("/")[:-1]
        parents = ["/" + "/".join(parts[:count]) for count in range(1, len(parts) + 1)]
        asked = {parent: client.exists_async(parent) for parent in parents}  # all at once

        def stat(full: str) -> Any:
            return asked.pop(full, None) or client.exists_async(full)

        missing = [parent for parent in parents if self._connection.run(stat, parent) is None]
        if path and root in missing:
            raise errors.NotFound(f"No BookKeeper cluster in {self._connection.name}", hint=NO_CLUSTER_HINT)
        return missing

    def _change_many(
        self,
        items: Sequence[T],
        add: Callable[[Any, T], object],
        result: Callable[[Any], R],
        change_one: Callable[..., R],
        size: Callable[[T], int] = lambda _: 0,
        *,
        once: bool = False,
    ) -> list[R | errors.BkctlError]:
        """Change something for each item: all in one request, and where that fails, one by one.

        `add` adds the item to a transaction; `result` converts its answer to the result of `change_one`, which changes
        a single item and whose `repeated` says whether the transaction may have been executed. With `once` a
        transaction whose answer is lost is not sent again. An item's error comes in its place. Raises only Unreachable.
        """
        results: list[R | errors.BkctlError] = []
        for chunk in chunks(items, _CHANGES_MAX, size, _CHANGES_SIZE_BYTES_MAX):
            call = self._transaction(chunk, add, self._connection.root, once=once)
            if len(chunk) > 1:
                with contextlib.suppress(*LOST, errors.Unauthorized):
                    answers = self._connection.answer(call)
                    if not any(isinstance(answer, Exception) for answer in answers):
                        results += map(result, answers)
                        continue
            results += map_each(partial(change_one, repeated=call.repeated), chunk)
        return results


def _problem(results: Sequence[Any]) -> tuple[int, Exception | None]:
    """Return the place and the error of the result that made its transaction fail: the others were rolled back."""
    for at, result in enumerate(results):
        if isinstance(result, Exception) and not isinstance(result, RolledBackError | RuntimeInconsistency):
            return at, result
    return 0, None


class ZooKeeperStore(ZooKeeperNodes):
    """`MetadataStore` on the ZooKeeper ensemble `hosts` (`HOST:PORT,HOST:PORT`) below the node `root` (`/ledgers`).

    `settings` are StoreConnection's. Raises Unreachable, naming the hosts: at once when each refuses or none resolves,
    else after `connect_timeout_s`.
    """

    def __init__(self, hosts: str, root: str, **settings: Any) -> None:
        self.hosts = hosts
        super().__init__(ZooKeeperConnection(hosts, root, **settings))
        self.name, self.tls = self._connection.name, self._connection.tls
        self._watches = ZooKeeperWatches(self._connection, self._restore_ephemerals)
        with errors.on_error(self.close):
            self._connection.open()

    def change_root(self, root: str) -> None:
        """Use the tree below the node `root` from now on."""
        self._connection.root = root
        self.name = self._connection.name

    def put(self, path: str, value: bytes, expected: int | None, *, repeated: bool = False) -> int:
        """See MetadataStore.put. `repeated`: an earlier request of ours may have written the value."""
        full = self._connection.full(path)
        check_size(path, value, "ZooKeeper")
        client = self._connection.client
        while expected != NEW:
            call = ZooKeeperCall(
                lambda: client.set_async(full, value, -1 if expected is None else expected), full, repeated=repeated
            )
            try:
                return int(self._connection.answer(call).version)
            except NoNodeError as error:
                if expected is not None:
                    raise errors.NotFound(f"No {path} in {self.name}") from error
            except BadVersionError as error:
                found = self.get(path) if call.repeated else None
                next_version = -1 if expected is None else expected + 1
                if found is not None and found[:2] == (value, next_version):
                    return found.version
                is_unsure = call.repeated and (found is None or found.version != next_version)
                raise errors.MetadataVersionConflict(
                    f"{path} changed meanwhile, expected version {expected}", may_be_applied=is_unsure
                ) from error
            with contextlib.suppress(errors.AlreadyExists):  # expected is None, and another client may create the node
                self._create(path, value)
                return 0
        self._create(path, value, repeated=repeated)
        return 0

    def put_many(self, nodes: Sequence[tuple[str, bytes, int]]) -> list[int | errors.BkctlError]:
        """See MetadataStore.put_many: in transactions."""

        def add(transaction: Any, node: tuple[str, bytes, int]) -> None:
            path, value, expected = node
            if expected == NEW:
                transaction.create(self._connection.full(path), value)
            else:
                transaction.set_data(self._connection.full(path), value, expected)

        return self._change_many(
            nodes,
            add,
            lambda answer: 0 if isinstance(answer, str) else int(answer.version),  # a create gives the path
            lambda node, repeated: self.put(*node, repeated=repeated),
            lambda node: len(node[1]),
        )

    def put_all(self, nodes: Sequence[tuple[str, bytes]]) -> None:
        new_nodes = [NewNode(self._connection.full(path), value) for path, value in nodes]
        if any(not path for path, _ in nodes):
            new_nodes = [*(NewNode(parent, b"") for parent in self._missing_parents("")), *new_nodes]
        at, problem = _problem(self._connection.answer(self._creation_of(new_nodes)))
        if problem is not None:
            raise self._refusal(new_nodes[at].full, new_nodes[at], problem, False) from problem

    def delete(self, path: str, expected: int | None = None, *, prune: int = 0) -> None:
        if not path:
            raise errors.UsageError("The root of the metadata store cannot be deleted")
        self._delete_node(path, expected)
        connection = self._connection
        for _ in range(prune):
            path = path.rpartition("/")[0]
            if not path:
                break
            try:
                connection.client.delete_async(connection.full(path)).get(timeout=connection.timeout_s)
            except (KazooException, KazooTimeoutError):
                break

    def delete_root(self) -> None:
        self._delete_node("", None)

    def _delete_node(self, path: str, expected: int | None) -> None:
        full = self._connection.full(path)
        self._held.pop(path, None)
        version = -1 if expected is None else expected
        call = ZooKeeperCall(lambda: self._connection.client.delete_async(full, version), full)
        try:
            self._connection.answer(call)
        except NoNodeError as error:
            if not call.repeated:
                raise errors.NotFound(f"No {path} in {self.name}") from error
        except BadVersionError as error:
            raise errors.MetadataVersionConflict(
                f"{path} changed meanwhile, expected version {expected}", may_be_applied=call.repeated
            ) from error
        except NotEmptyError as error:
            raise errors.Conflict(f"{path} has children in {self.name}") from error

    def sequence(self, path: str) -> int:
        """See MetadataStore.sequence. Source: ZkLedgerIdGenerator."""
        prefix = f"{path}/ID-" if path else "ID-"
        created = self._create(prefix, b"", ephemeral=True, sequence=True)
        number = created[len(self._connection.full(prefix)) :]
        self._connection.client.delete_async(created)  # Ephemeral: a failed delete is made up for by the session's end.
        try:
            return int(number)
        except ValueError as error:
            raise errors.BkctlError(f"ZooKeeper at {self.hosts} gave the sequence number {number!r}") from error

    def sequence_position(self, path: str) -> int:
        """See MetadataStore.sequence_position.

        ZooKeeper numbers by the creations below a node, which `cversion` counts together with the deletions.
        Source: DataNode.copyStat, PrepRequestProcessor.
        """
        try:
            _, stat = self._connection.run(self._connection.client.get_async, self._connection.full(path))
        except NoNodeError:
            return 0
        # `cversion` is 32 bits wide, and twice the creations less the present children.
        return ((int(stat.cversion) + int(stat.numChildren)) & 0xFFFFFFFF) >> 1

    # ephemerals and claims

    def _expiry_s(self, path: str) -> float:
        return self._connection.session_timeout_s + _EXPIRY_SLACK_S

    def _keep_session(self) -> None:
        self._watches.start_thread()

    def _put_ephemeral(self, path: str, value: bytes | None) -> bool:
        connection = self._connection
        full = connection.full(path)
        if value is not None:
            with contextlib.suppress(errors.AlreadyExists):
                self._create(path, value, ephemeral=True)
                return True
        try:
            found, stat = connection.run(connection.client.get_async, full)
            if stat.ephemeralOwner != connection.session_id:
                return False
            if value not in (None, found):
                connection.run(partial(connection.client.set_async, value=value), full)
        except NoNodeError:
            return value is None
        return True

    def claim(self, path: str, value: bytes, *, numbered: bool = False) -> Claim:
        if not numbered:
            return value_of(self.claim_many([path], value)[0])
        full = self._create(path, value, ephemeral=True, sequence=True)
        path = full[len(self._connection.root) + 1 :]
        claim = self._claim_of(path, next(self._origins([path])))
        if claim.mark is not None:
            self._delete_duplicates(full, value)
        return claim

    def claim_many(self, paths: Sequence[str], value: bytes) -> list[Claim | errors.BkctlError]:
        created = self._change_many(
            paths,
            lambda transaction, path: transaction.create(self._connection.full(path), value, ephemeral=True),
            str,
            partial(self._create, value=value, ephemeral=True),
        )
        claimed = [path for path, full in zip(paths, created, strict=True) if not isinstance(full, errors.BkctlError)]
        origins = self._origins(claimed)
        return [
            full if isinstance(full, errors.BkctlError) else self._claim_of(path, next(origins))
            for path, full in zip(paths, created, strict=True)
        ]

    def _claim_of(self, path: str, found: Origin | None) -> Claim:
        """Return the claim on the node that we created at `path`, whose present origin is `found`.

        Our session may have ended since, and another session may have created the present node: that one is not ours.
        """
        return Claim(self, path, found if found and found.session_id == self._connection.session_id else None)

    def _delete_duplicates(self, full: str, value: bytes) -> None:
        """Delete the nodes of requests whose answers were lost: each attempt gets a number of its own."""
        client = self._connection.client
        parent, _, name = full.rpartition("/")
        for sibling in self._connection.run(client.get_children_async, parent):
            if sibling != name and sibling[:-10] == name[:-10]:
                duplicate = f"{parent}/{sibling}"
                with contextlib.suppress(NoNodeError):
                    found, stat = self._connection.run(client.get_async, duplicate)
                    if (stat.ephemeralOwner, found) == (self._connection.session_id, value):
                        self._connection.run(client.delete_async, duplicate)

    def held_many(self, claims: Sequence[Claim]) -> list[bool]:
        origins = self._origins([claim.path for claim in claims])
        return [origin is not None and origin == claim.mark for claim, origin in zip(claims, origins, strict=True)]

    def release_many(self, claims: Sequence[Claim]) -> None:
        results = self._change_many(
            [claim for claim, is_held in zip(claims, self.held_many(claims), strict=True) if is_held],
            lambda transaction, claim: transaction.delete(self._connection.full(claim.path)),
            lambda _: None,
            self._release,
            once=True,
        )
        for error in results:
            value_of(error)

    def _release(self, claim: Claim, *, repeated: bool) -> None:
        def delete(full: str) -> Any:
            # Checked before each attempt: an earlier one may have deleted ours, and another session claimed the place.
            if not claim.is_held():
                raise NoNodeError
            return self._connection.client.delete_async(full)

        with contextlib.suppress(NoNodeError):
            self._connection.run(delete, self._connection.full(claim.path))

    def watch(self, path: str, callback: Callable[[], None], *, children: bool = False) -> Callable[[], None]:
        return self._watches.add(path, callback, children)

    def close(self) -> None:
        if not self._connection.begin_close():
            return
        self._held.clear()
        self._close_many()
        self._watches.close()
        self._connection.close()


@dataclass(eq=False)
class _Watch:
    path: str
    children: bool
    callback: Callable[[], None]


class ZooKeeperWatches:
    """The watches of one store, armed again after each event, and the thread that serves them.

    The thread also restores the ephemerals in a new session by `restore`; False: it needs another attempt.
    """

    def __init__(self, connection: ZooKeeperConnection, restore: Callable[[], bool]) -> None:
        self._connection = connection
        connection.on_new_session = lambda: self._events.put(None)
        self._restore = restore
        self._lock = threading.Lock()
        self._watches: set[_Watch] = set()
        #: Places that changed; None: restore the ephemerals.
        self._events: queue.Queue[_Place | None] = queue.Queue()
        #: kazoo keeps each callback until its node changes, also of cancelled watches, but equal ones only once.
        self._callbacks: weakref.WeakValueDictionary[_Place, Callable[[object], None]] = weakref.WeakValueDictionary()

    def add(self, path: str, callback: Callable[[], None], children: bool) -> Callable[[], None]:
        """See MetadataStore.watch."""
        watch = _Watch(check_path(path), children, callback)
        self._watches.add(watch)
        self.start_thread()
        cancel = partial(self._watches.discard, watch)
        with errors.on_error(cancel):
            self._arm(watch)
        return cancel

    def _arm(self, watch: _Watch) -> None:
        place = full, _ = self._place(watch)

        def note(_: object) -> None:
            self._events.put(place)

        with self._lock:
            changed = self._callbacks.setdefault(place, note)
        client = self._connection.client
        if watch.children:
            with contextlib.suppress(NoNodeError):
                self._connection.run(partial(client.get_children_async, watch=changed), full)
                return
        self._connection.run(partial(client.exists_async, watch=changed), full)

    def _place(self, watch: _Watch) -> _Place:
        return self._connection.full(watch.path), watch.children

    def start_thread(self) -> None:
        """Start the thread of the watches, unless it runs or the connection is closed."""
        self._connection.start_thread("watches", self._serve)

    def _serve(self) -> None:
        restored = True
        unarmed: set[_Watch] = set()
        while not self._connection.closed.is_set():
            try:
                event = self._events.get(timeout=None if restored and not unarmed else _RESTORE_PAUSE_S)
            except queue.Empty:
                event = ("", False)
            if self._connection.closed.is_set():
                return
            if event is None or not restored:
                restored = self._restore()
            for watch in unarmed | {watch for watch in list(self._watches) if self._place(watch) == event}:
                unarmed.discard(watch)
                try:
                    if watch in self._watches:
                        self._arm(watch)
                    if watch in self._watches:
                        watch.callback()
                except errors.BkctlError:
                    unarmed.add(watch)

    def close(self) -> None:
        """End every watch, after the connection is closed."""
        self._watches.clear()
        self._events.put(None)
