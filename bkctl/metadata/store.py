"""What every metadata store does: a tree of small versioned values, compare-and-set, ephemerals, watches.

Ledgers, registration and cookies are written once above this contract (`ledgers.py`, `cluster.py`). One contract test
runs over every driver. All calls block; every method may be called from any thread.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, Generic, NamedTuple, Self, TypeVar

from bkctl.errors import UsageError

T = TypeVar("T")

#: As `expected` version: the node must not exist yet.
NEW: Final = -1
#: The largest value a node may hold; ZooKeeper's own bound (jute.maxbuffer) is 1 MiB less some bytes for the frame.
VALUE_SIZE_BYTES_MAX: Final = 1 << 20
PATH_LENGTH_MAX: Final = 1024
NO_CLUSTER_HINT: Final = "check the path at the end of the metadata URI"


class Versioned(NamedTuple, Generic[T]):
    """A value as it was read, with what a conditional write needs.

    `version` counts the writes of this node (0 just after its creation); `ctime_ms` is when the store created the node,
    in ms since 1970, None where the store does not know.
    """

    value: T
    version: int
    ctime_ms: int | None


def check_path(path: str) -> str:
    """Return `path` if it names a node below the root: "" is the root, else parts joined by "/". Raises UsageError."""
    if path:
        parts = path.split("/")
        if (
            len(path) > PATH_LENGTH_MAX
            or any(part in ("", ".", "..") for part in parts)
            or any(character < " " or character == "\x7f" or "\ud800" <= character <= "\udfff" for character in path)
        ):
            raise UsageError(f"Not a path below the metadata root: {path!r}", hint="write it as 'cookies/BOOKIE'")
    return path


class MetadataStore(ABC):
    """One metadata store, from the cluster's root down. Paths are relative to it, with no leading "/"; "" is the root.

    Every method raises Unreachable when the store cannot be reached and TimedOut (an Unreachable) when it did not
    answer within the `timeout_s` it was opened with; UsageError for a path that is none.
    """

    #: How to name this store in a message: `ZooKeeper at 127.0.0.1:2181`.
    name: str

    @abstractmethod
    def get(self, path: str) -> Versioned[bytes] | None:
        """The value of the node at `path`; None when there is no such node."""

    def get_many(self, paths: Iterable[str]) -> Iterator[Versioned[bytes] | None]:
        """`get` of each path, in the order given; `paths` is consumed as results are taken, a bounded number ahead."""
        return (self.get(path) for path in paths)

    @abstractmethod
    def put(self, path: str, value: bytes, expected: int | None) -> int:
        """Write the node and return its new version.

        `expected` NEW creates it, together with the missing parents (empty values) in one step; a version replaces the
        value only while that is the node's version; None replaces whatever is there, creating the node if need be.
        Raises AlreadyExists (NEW, exists), NotFound (a version, missing), MetadataVersionConflict (another version).
        A write that was applied although its answer was lost is recognised, and succeeds.
        """

    @abstractmethod
    def put_all(self, nodes: Sequence[tuple[str, bytes]]) -> None:
        """Create all these nodes (parents before children) or none. Raises AlreadyExists."""

    @abstractmethod
    def delete(self, path: str, expected: int | None = None, *, prune: int = 0) -> None:
        """Delete the node, only in version `expected` if given; then as many as `prune` of its parents that are empty.

        Pruning is best effort: a parent that got a child meanwhile, or any failure, ends it silently.
        Raises NotFound, MetadataVersionConflict, Conflict when the node has children.
        """

    @abstractmethod
    def children(self, path: str, *, after: str = "", limit: int | None = None) -> list[str] | None:
        """Names of the node's children in ascending order; None when the node does not exist.

        `after` and `limit` narrow the answer to at most `limit` names greater than `after`. What was acknowledged to
        anybody before the call is seen (ZooKeeper: `sync` first).
        """

    def children_many(self, paths: Iterable[str]) -> Iterator[list[str] | None]:
        """`children` of each path, in the order given, a bounded number ahead as `get_many`."""
        return (self.children(path) for path in paths)

    @abstractmethod
    def sequence(self, path: str) -> int:
        """The next number of the sequence kept at `path`: never the same twice, ascending, 0 first."""

    @abstractmethod
    def ephemeral(self, path: str, value: bytes, *, wait_s: float | None = None) -> None:
        """Keep a node at `path` for as long as this store object lives; set its value where we own it already.

        After a lost session the node is created again, until `delete(path)` or `close`. A node that another owner holds
        is waited for: `wait_s` seconds (None: until a dead one's session is over), then AlreadyExists.
        """

    @abstractmethod
    def watch(self, path: str, callback: Callable[[], None], *, children: bool = False) -> Callable[[], None]:
        """Call `callback()` after each change of the node (created, replaced, deleted), or of its set of children.

        Several changes may give one call, and a lost connection gives a call without a change: read again and compare.
        It runs on the store's own thread, one call at a time, and must not block long; when it raises a BkctlError (the
        store is away again, say) it is called once more later. Returns a function that cancels.
        """

    @abstractmethod
    def close(self) -> None:
        """Give up the session: our ephemerals vanish at once, watches end. A second call does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
