"""The metadata store on ZooKeeper, through kazoo."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from kazoo.exceptions import BadVersionError, KazooException, NodeExistsError, NoNodeError, NotEmptyError
from kazoo.handlers.threading import KazooTimeoutError

from bkctl.errors import AlreadyExists, BkctlError, Conflict, MetadataVersionConflict, NotFound, UsageError
from bkctl.metadata.backends.zookeeper.zookeeper_connection import UNAUTHORIZED, ZooKeeperCall, ZooKeeperConnection
from bkctl.metadata.backends.zookeeper.zookeeper_nodes import NewNode, is_problem
from bkctl.metadata.backends.zookeeper.zookeeper_session import ZooKeeperSession
from bkctl.metadata.backends.zookeeper.zookeeper_watches import ZooKeeperWatches
from bkctl.metadata.store import NEW, check_size


class ZooKeeperStore(ZooKeeperSession):
    """`MetadataStore` on the ZooKeeper ensemble `hosts` (`HOST:PORT,HOST:PORT`) below the node `root` (`/ledgers`).

    `settings` are StoreConnection's. Raises Unreachable, naming the hosts: at once when each refuses or none resolves,
    else after `connect_timeout_s`.
    """

    def __init__(self, hosts: str, root: str, **settings: Any) -> None:
        self.hosts = hosts
        super().__init__(ZooKeeperConnection(hosts, root, **settings))
        self.name, self.tls = self._connection.name, self._connection.tls
        self._watches = ZooKeeperWatches(self._connection, self.ephemerals.restore)
        try:
            self._connection.open()
        except BaseException:
            self.close()
            raise

    def change_root(self, root: str) -> None:
        """Use the tree below the node `root` from now on."""
        self._connection.root = root
        self.name = self._connection.name

    def put(self, path: str, value: bytes, expected: int | None) -> int:
        return self._put(path, value, expected)

    def _put(self, path: str, value: bytes, expected: int | None, *, repeated: bool = False) -> int:
        """`put`; `repeated`: an earlier request of ours may have written the value."""
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
                    raise NotFound(f"No {path} in {self.name}") from error
            except BadVersionError as error:
                found = self.get(path) if call.repeated else None
                next_version = -1 if expected is None else expected + 1
                if found is not None and found[:2] == (value, next_version):
                    return found.version
                is_unsure = call.repeated and (found is None or found.version != next_version)
                raise MetadataVersionConflict(
                    f"{path} changed meanwhile, expected version {expected}", may_be_applied=is_unsure
                ) from error
            with contextlib.suppress(AlreadyExists):  # expected is None, and another client may create the node
                self._create(path, value)
                return 0
        self._create(path, value, repeated=repeated)
        return 0

    def put_many(self, nodes: Sequence[tuple[str, bytes, int]]) -> list[int | BkctlError]:
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
            lambda node, repeated: self._put(*node, repeated=repeated),
            lambda node: len(node[1]),
        )

    def put_all(self, nodes: Sequence[tuple[str, bytes]]) -> None:
        new_nodes = [NewNode(self._connection.full(path), value) for path, value in nodes]
        if any(not path for path, _ in nodes):
            new_nodes = [*(NewNode(parent, b"") for parent in self._missing_parents("")), *new_nodes]
        results = self._connection.answer(self._creation_of(new_nodes))
        for node, result in zip(new_nodes, results, strict=True):
            if is_problem(result):
                if isinstance(result, NodeExistsError):
                    raise AlreadyExists(f"{node.full} exists in {self.name}") from result
                if isinstance(result, NoNodeError):
                    raise NotFound(f"{node.full} has no parent in {self.name}") from result
                if isinstance(result, UNAUTHORIZED):
                    raise self._connection.unauthorized(node.full, repeated=False) from result
                raise BkctlError(f"{node.full} cannot be created in {self.name}: {result!r}") from result

    def delete(self, path: str, expected: int | None = None, *, prune: int = 0) -> None:
        if not path:
            raise UsageError("The root of the metadata store cannot be deleted")
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
        self.ephemerals.forget(path)
        version = -1 if expected is None else expected
        call = ZooKeeperCall(lambda: self._connection.client.delete_async(full, version), full)
        try:
            self._connection.answer(call)
        except NoNodeError as error:
            if not call.repeated:
                raise NotFound(f"No {path} in {self.name}") from error
        except BadVersionError as error:
            raise MetadataVersionConflict(
                f"{path} changed meanwhile, expected version {expected}", may_be_applied=call.repeated
            ) from error
        except NotEmptyError as error:
            raise Conflict(f"{path} has children in {self.name}") from error

    def sequence(self, path: str) -> int:
        """See MetadataStore.sequence. Source: ZkLedgerIdGenerator."""
        prefix = f"{path}/ID-" if path else "ID-"
        created = self._create(prefix, b"", ephemeral=True, sequence=True)
        number = created[len(self._connection.full(prefix)) :]
        self._connection.client.delete_async(created)  # Ephemeral: a failed delete is made up for by the session's end.
        try:
            return int(number)
        except ValueError as error:
            raise BkctlError(f"ZooKeeper at {self.hosts} gave the sequence number {number!r}") from error

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

    def _keep_session(self) -> None:
        self._watches.start_thread()

    def watch(self, path: str, callback: Callable[[], None], *, children: bool = False) -> Callable[[], None]:
        return self._watches.add(path, callback, children)

    def close(self) -> None:
        if not self._connection.begin_close():
            return
        self.ephemerals.clear()
        self._close_many()
        self._watches.close()
        self._connection.close()
