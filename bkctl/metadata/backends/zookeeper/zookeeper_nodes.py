"""Creation of nodes with their parents, and changes of many nodes in one request; both recognise lost answers."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, TypeVar

from kazoo.exceptions import (
    NoChildrenForEphemeralsError,
    NodeExistsError,
    NoNodeError,
    RolledBackError,
    RuntimeInconsistency,
)

from bkctl.errors import AlreadyExists, BkctlError, Conflict, NotFound
from bkctl.metadata.backends.zookeeper.zookeeper_connection import (
    LOST,
    UNAUTHORIZED,
    ZooKeeperCall,
)
from bkctl.metadata.backends.zookeeper.zookeeper_reads import ZooKeeperReads
from bkctl.metadata.store import NO_CLUSTER_HINT, map_each

T = TypeVar("T")
R = TypeVar("R")

#: Changes in one request; the server takes no request above 1 MiB (jute.maxbuffer).
_CHANGES_MAX: Final = 256
_CHANGES_SIZE_BYTES_MAX: Final = 1 << 19


class NewNode(NamedTuple):
    """A node to create at the full path `full`."""

    full: str
    value: bytes
    ephemeral: bool = False
    sequence: bool = False


class ZooKeeperNodes(ZooKeeperReads):
    """The changes of a store's nodes, over `connection`."""

    def _stat(self, full: str) -> Any:
        """Return the stat of the node at a full path, None for a missing node."""
        return self._connection.run(self._connection.client.exists_async, full)

    def _create(
        self, path: str, value: bytes, *, ephemeral: bool = False, sequence: bool = False, repeated: bool = False
    ) -> str:
        """Create the node, together with its missing parents; return its full path. Raises AlreadyExists.

        `repeated`: an earlier request of the caller may have created it.
        """
        connection = self._connection
        node = NewNode(connection.full(path), value, ephemeral, sequence)
        deadline = time.monotonic() + connection.timeout_s
        while True:
            call = ZooKeeperCall(
                lambda: connection.client.create_async(node.full, value, ephemeral=ephemeral, sequence=sequence),
                node.full,
                repeated=repeated,
            )
            try:
                created: str | None = str(connection.answer(call))
            except NodeExistsError as error:
                if call.repeated and self._is_ours(node):
                    return node.full
                raise AlreadyExists(f"{path or connection.root} exists in {connection.name}") from error
            except NoChildrenForEphemeralsError as error:
                raise Conflict(f"The parent of {path} is ephemeral and cannot have children") from error
            except NoNodeError:
                created = self._create_with_parents(path, node)
            if created is not None:
                return created
            if time.monotonic() > deadline:  # Other clients keep creating and removing the parents.
                raise connection.timed_out()

    def _create_with_parents(self, path: str, node: NewNode) -> str | None:
        """Create the node and its missing parents in one step; None when a parent came or went meanwhile."""
        name = self._connection.name
        call = self._creation_of([*(NewNode(parent, b"") for parent in self._missing_parents(path)), node])
        results = self._connection.answer(call)
        problem = next((result for result in results if is_problem(result)), None)
        if problem is None:
            return str(results[-1])
        if call.repeated and self._is_ours(node):
            return node.full
        if problem is results[-1] and isinstance(problem, NodeExistsError):
            raise AlreadyExists(f"{path or self._connection.root} exists in {name}") from problem
        if isinstance(problem, UNAUTHORIZED):
            raise self._connection.unauthorized(node.full, repeated=call.repeated) from problem
        if not isinstance(problem, NodeExistsError | NoNodeError):
            raise BkctlError(f"{path} cannot be created in {name}: {problem!r}") from problem
        return None

    def _creation_of(self, nodes: Sequence[NewNode]) -> ZooKeeperCall:
        """Return the call that creates all these nodes, or none; messages name the last one."""

        def add(request: Any, node: NewNode) -> None:
            request.create(node.full, node.value, ephemeral=node.ephemeral, sequence=node.sequence)

        return self._transaction(nodes, add, nodes[-1].full)

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
            raise NotFound(f"No BookKeeper cluster in {self._connection.name}", hint=NO_CLUSTER_HINT)
        return missing

    def _change_many(
        self,
        items: Sequence[T],
        add: Callable[[Any, T], object],
        result: Callable[[Any], R],
        change_one: Callable[[T, bool], R],
        size: Callable[[T], int] = lambda _: 0,
        *,
        once: bool = False,
    ) -> list[R | BkctlError]:
        """Change something for each item: all in one request, and where that fails, one by one.

        `add` adds the item to a transaction; `result` converts its answer to the result of `change_one`, which changes
        a single item and whose second argument says whether the transaction may have been executed. With `once` a
        transaction whose answer is lost is not sent again. An item's error comes in its place. Raises only Unreachable.
        """
        results: list[R | BkctlError] = []
        for chunk in _chunks(items, size):
            repeated = False
            if len(chunk) > 1:
                answers, repeated = self._transact(chunk, add, once)
                if answers is not None:
                    results += map(result, answers)
                    continue
            results += map_each(lambda item, repeated=repeated: change_one(item, repeated), chunk)  # type: ignore[misc]
        return results

    def _transact(
        self, chunk: list[T], add: Callable[[Any, T], object], once: bool
    ) -> tuple[Sequence[Any] | None, bool]:
        """Return the answers to one transaction, None when it failed; and whether it may have been executed."""
        call = self._transaction(chunk, add, self._connection.root, once=once)
        try:
            answers = self._connection.answer(call)
        except LOST:
            return None, call.repeated
        failed = any(isinstance(answer, Exception) for answer in answers)
        return (None if failed else answers), call.repeated


def _chunks(items: Sequence[T], size: Callable[[T], int]) -> Sequence[list[T]]:
    """Cut the items into lists that fit one request each."""
    chunks: list[list[T]] = []
    waiting = deque(items)
    while waiting:
        chunk = [waiting.popleft()]
        size_bytes = size(chunk[0])
        while waiting and len(chunk) < _CHANGES_MAX and size_bytes + size(waiting[0]) <= _CHANGES_SIZE_BYTES_MAX:
            size_bytes += size(waiting[0])
            chunk.append(waiting.popleft())
        chunks.append(chunk)
    return chunks


def is_problem(result: object) -> bool:
    """Return whether this result made its transaction fail; the others were only rolled back."""
    return isinstance(result, Exception) and not isinstance(result, RolledBackError | RuntimeInconsistency)
