"""The contract of every metadata store: a tree of small versioned values, compare-and-set, ephemerals, watches.

Ledgers, registration and cookies are written once above this contract (`ledgers.py`, `cluster.py`). One contract test
runs over every driver. All calls block; every method may be called from any thread.
"""

from __future__ import annotations

import contextlib
import functools
import re
import threading
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, tee
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, ParamSpec, Self, TypeAlias, TypeVar

from bkctl.disk import Closing
from bkctl.errors import AlreadyExists, BkctlError, MetadataVersionConflict, NotFound, Unreachable, UsageError

if TYPE_CHECKING:
    import socket
    import ssl
    from concurrent.futures import Executor, Future

    from bkctl.metadata.refreshed_tls import RefreshedContext

T = TypeVar("T")
R = TypeVar("R")
P = ParamSpec("P")

#: As `expected` version: the node must not exist yet.
NEW: Final = -1
#: The node with the racks of bookies, the only one that is not below the root but beside it: Pulsar's `/bookies` beside
#: `/ledgers`. In SQLite, where nothing is beside the root, it is `bookies`.
RACKS: Final = "../bookies"
#: The largest value a node may hold; ZooKeeper's own bound (jute.maxbuffer) is 1 MiB less some bytes for the frame.
VALUE_SIZE_BYTES_MAX: Final = 1 << 20
PATH_LENGTH_MAX: Final = 1024
SEQUENCE_STEPS_MAX: Final = 100_000
#: Nodes with an invalid name that a store object remembers.
INVALID_NAMES_MAX: Final = 1000
#: Nodes in the first and in later batches of reads, and the bytes of values that end one.
_BATCH_SIZE_MIN: Final = 64
_BATCH_SIZE_MAX: Final = 512
_BATCH_SIZE_BYTES_MAX: Final = 1 << 18
#: Concurrent changes of nodes, where the store has no request for many.
_CONCURRENCY: Final = 8
_RESERVED_NAMES: Final = frozenset(("", ".", ".."))
_UNPRINTABLE: Final = re.compile("[\x00-\x1f\x7f\ud800-\udfff]")
#: The interval at which long-running commands look at TLS files, as Pulsar's bookies do.
TLS_REFRESH_S: Final = 300
NO_CLUSTER_HINT: Final = "check the path at the end of the metadata URI"


class AbsolutePath(str):
    """The path of another program's node, from the top of the store: `/managed-ledgers`. Only for reading.

    It is found without nodes for its parents: in etcd Pulsar writes none. In SQLite the path is below the root.
    Raises UsageError for a path that no node can have.
    """

    __slots__ = ()

    def __new__(cls, path: str) -> Self:
        if (path != "/" and not _RESERVED_NAMES.isdisjoint(path.split("/")[1:])) or _UNPRINTABLE.search(path):
            hint = "its parts are not empty, '.' or '..', and have no control characters"
            raise UsageError(f"Not a path of the metadata store: {path!r}", hint=hint)
        return super().__new__(cls, path)


class Versioned(NamedTuple, Generic[T]):
    """A value with its version, for a conditional write.

    `version` grows with each write of the node: ZooKeeper and SQLite count the node's writes, from 0 at its creation;
    on etcd it is the mod revision, above 0. `ctime_ms` is the node's creation time in ms since 1970, None where the
    store does not keep it (etcd).
    """

    value: T
    version: int
    ctime_ms: int | None


#: The value of a node; None: the node does not exist.
StoredValue: TypeAlias = Versioned[bytes] | BkctlError | None


def client_tls(
    ca: str | None = None,
    certificate: str | None = None,
    key: str | None = None,
    *,
    key_password: str | None = None,
    verify_hostname: bool = True,
    refresh_s: float = 0,
) -> ssl.SSLContext:
    """Return a TLS context for connections to bookies and stores, from PEM files.

    `ca` holds the trusted authorities (None: the system's), `certificate` and `key` our own identity. `verify_hostname`
    also checks the host name in the server's certificate; the chain is always checked. With `refresh_s`, files that
    change are loaded again, see RefreshedContext. Raises UsageError for a file that cannot be read or is not a PEM file
    of its kind.
    """
    import ssl

    if refresh_s:
        from bkctl.metadata.refreshed_tls import RefreshedContext

        make = functools.partial(
            client_tls, ca, certificate, key, key_password=key_password, verify_hostname=verify_hostname
        )
        return RefreshedContext(make, (ca, certificate, key), certificate, refresh_s)
    if key is not None and certificate is None:
        raise UsageError("A TLS key is given without its certificate", hint="give both")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = verify_hostname
    try:
        if ca is None:
            context.load_default_certs()
        else:
            context.load_verify_locations(ca)
        if certificate is not None:
            load_certificate(context, certificate, key, key_password)
    except OSError as error:  # ssl.SSLError is one
        names = ", ".join(name for name in (ca, certificate, key) if name)
        raise UsageError(f"TLS files {names}: {error.strerror or error}", hint="PEM files are needed") from error
    return context


def refusals(
    hosts: Iterable[tuple[str, int]], deadline: float, connect: Callable[[tuple[str, int], float], socket.socket]
) -> str:
    """Return the reasons why no host accepts connections; "" when one accepts, or may: it did not answer in time.

    `connect` gets an address and seconds; the `deadline` is of the monotonic clock.
    """
    import socket

    reasons = []
    for host, port in hosts:
        try:
            connect((host.strip("[]"), port), max(deadline - time.monotonic(), 0.01)).close()
        except TimeoutError:
            return ""
        except socket.gaierror:
            reasons.append(f"the name {host} does not resolve")
        except OSError as error:
            reasons.append(failure_reason(error))
        else:
            return ""
    return ", ".join(dict.fromkeys(reasons))


def failure_reason(error: OSError) -> str:
    """Return the reason of a failed connection, for a message."""
    reason = getattr(error, "verify_message", "") or getattr(error, "reason", "")
    return f"TLS failed: {reason}" if reason else (error.strerror or str(error)).lower()


def load_certificate(context: ssl.SSLContext, certificate: str, key: str | None, password: str | None) -> None:
    """Load a PEM certificate and its private key (None: in the same file) into `context`.

    Raises UsageError for an encrypted key without the right `password`, and never asks on the terminal; OSError as
    `load_cert_chain` for other unusable files.
    """
    import ssl

    is_encrypted = False

    def give() -> str:
        nonlocal is_encrypted
        is_encrypted = True
        return password or ""

    try:
        context.load_cert_chain(certificate, key, give)
    except ssl.SSLError as error:
        if not is_encrypted:
            raise
        problem = "the given password does not open it" if password else "no password is given for it"
        raise UsageError(
            f"The private key in {key or certificate} is encrypted, and {problem}",
            hint="give its password where the settings take one, or a key that is not encrypted and has mode 0600",
        ) from error


@dataclass(frozen=True, slots=True)
class StoreSecurity:
    """TLS, login and ACLs of a connection to a metadata store. The empty value uses none of them.

    `tls` encrypts; `ca` is the PEM file of the authorities that sign the servers' certificates (None: the system's),
    `certificate` and `key` are our own, for servers that ask. `user` and `password` log in: on ZooKeeper by its
    `digest` scheme, or with `sasl` by SASL DIGEST-MD5 (JAAS's DigestLoginModule). `creator_acl` restricts nodes that we
    create on ZooKeeper to our own user (`zkEnableSecurity`, ZkUtils.getACLs); without it every client may change them.
    """

    tls: bool = False
    ca: str | None = None
    certificate: str | None = None
    key: str | None = None
    key_password: str | None = field(default=None, repr=False)
    verify_hostname: bool = True
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    sasl: bool = False
    creator_acl: bool = False

    def __post_init__(self) -> None:
        if not self.tls and (self.ca or self.certificate or self.key):
            raise UsageError(
                "TLS files are given for a metadata store that is not reached by TLS", hint="turn on TLS for it, too"
            )
        if self.key is not None and self.certificate is None:
            raise UsageError("A TLS key is given without its certificate", hint="give both")
        if (self.user is None) != (self.password is None):
            raise UsageError("A user of the metadata store needs a password, and a password its user")
        if self.user is None and self.sasl:
            raise UsageError("SASL needs a user and a password for the metadata store")

    def over(self, other: StoreSecurity | None) -> StoreSecurity:
        """Return this value, with TLS and login from `other` where this one has none."""
        if other is None:
            return self
        merged = self
        if not self.tls:
            names = ("tls", "ca", "certificate", "key", "key_password", "verify_hostname")
            merged = replace(merged, **{name: getattr(other, name) for name in names})
        if self.user is None:
            merged = replace(merged, user=other.user, password=other.password, sasl=other.sasl)
        return merged

    def tls_context(self, refresh_s: float = 0) -> ssl.SSLContext | None:
        """Return the context for connections; None without `tls`. `refresh_s` as in client_tls, which may raise."""
        if not self.tls:
            return None
        return client_tls(
            self.ca, self.certificate, self.key, key_password=self.key_password, verify_hostname=self.verify_hostname,
            refresh_s=refresh_s,
        )  # fmt: skip


NO_SECURITY: Final = StoreSecurity()


class StoreConnection:
    """The settings of a connection to a store over the network.

    `timeout_s` is the longest wait for an answer, `connect_timeout_s` that for the connection (None: as long),
    `session_timeout_s` the time for which the store keeps the ephemerals of a dead client.
    """

    def __init__(
        self,
        *,
        timeout_s: float = 30.0,
        connect_timeout_s: float | None = None,
        session_timeout_s: float = 10.0,  # zkTimeout, which Apache's driver takes for etcd's leases too
        security: StoreSecurity = NO_SECURITY,
    ) -> None:
        self.timeout_s, self.session_timeout_s, self.security = timeout_s, session_timeout_s, security
        self.connect_timeout_s = timeout_s if connect_timeout_s is None else connect_timeout_s
        #: Set by `begin_close`; pauses wait on it.
        self.closed = threading.Event()
        self.threads: dict[str, threading.Thread] = {}
        self._lock = threading.RLock()

    def start_thread(self, name: str, work: Callable[[], None]) -> None:
        """Run `work` on the thread `metadata-store-<name>`, unless it runs or the connection is closed."""
        with self._lock:
            if name not in self.threads and not self.closed.is_set():
                self.threads[name] = threading.Thread(target=work, name=f"metadata-store-{name}", daemon=True)
                self.threads[name].start()

    def begin_close(self) -> bool:
        """Set `closed`: no request or thread starts any more. Return False in a second call."""
        with self._lock:
            was_open = not self.closed.is_set()
            self.closed.set()
            return was_open


def is_path(path: str) -> bool:
    """Return whether `path` names a node: "" is the root, RACKS the racks, else parts below the root joined by "/"."""
    return path in ("", RACKS) or not (
        len(path) > PATH_LENGTH_MAX or not _RESERVED_NAMES.isdisjoint(path.split("/")) or _UNPRINTABLE.search(path)
    )


def check_path(path: str) -> str:
    """Return `path` if it names a node, see `is_path`. Raises UsageError."""
    if isinstance(path, AbsolutePath):
        return path[1:]
    if not is_path(path):
        raise UsageError(f"Not a path below the metadata root: {path!r}", hint="write it as 'cookies/BOOKIE'")
    return path


def full_path(root: str, path: str) -> str:
    """Return the path of the node at `path` in a store where the tree begins above `root`. Raises UsageError."""
    if isinstance(path, AbsolutePath):
        return path
    if path == RACKS:
        return f"{root.rpartition('/')[0]}/bookies"
    return f"{root}/{check_path(path)}" if path else root


def full_paths(root: str, paths: Sequence[str]) -> list[str]:
    """Return the `full_path` of each of `paths`, which are checked together: it takes a fifth of the time."""
    joined = "/".join(paths)
    # An absolute path, the root and the racks have reserved names for parts.
    is_plain = _RESERVED_NAMES.isdisjoint(joined.split("/")) and joined.isprintable()
    if is_plain and max(map(len, paths)) <= PATH_LENGTH_MAX:
        return [f"{root}/{path}" for path in paths]
    return [full_path(root, path) for path in paths]


def check_size(path: str, value: bytes, owner: str = "the store") -> None:
    """Raise UsageError for a value that a node of `owner`, a kind of store, cannot hold."""
    if len(value) > VALUE_SIZE_BYTES_MAX:
        raise UsageError(f"{path}: a value of {len(value)} bytes is above {owner}'s {VALUE_SIZE_BYTES_MAX}")


class Claim(NamedTuple):
    """A node that `MetadataStore.claim` created, and that ends with our session; a lost claim never becomes ours again.

    `path` is its path, `mark` what tells the store our node from a later one there.
    """

    store: MetadataStore
    path: str
    mark: Any

    def is_held(self) -> bool:
        """Return whether the node that we created still exists. Raises Unreachable: unknown."""
        return self.store.held_many([self])[0]

    def release(self) -> None:
        """Delete the node that we created, but no later node at its path. Raises Unreachable."""
        self.store.release_many([self])


class MetadataStore(Closing):
    """One metadata store, from the cluster's root down. Paths are relative to it, with no leading "/"; "" is the root.

    Every method raises Unreachable when the store cannot be reached and TimedOut (an Unreachable) when it did not
    answer within the `timeout_s` it was opened with; UsageError for a malformed path.
    """

    #: Name of this store in messages: `/ledgers of ZooKeeper at 127.0.0.1:2181`.
    name: str
    #: The TLS of its connections, where certificates are loaded again.
    tls: RefreshedContext | None = None
    _invalid_names: dict[str, None] | None = None

    @abstractmethod
    def get(self, path: str) -> Versioned[bytes] | None:
        """Return the value of the node at `path`, None for a missing node."""

    def get_many(self, paths: Iterable[str]) -> Iterator[Versioned[bytes] | None]:
        """`get` each path, in the order given; `paths` is consumed a bounded number ahead of the results."""
        return (self.get(path) for path in paths)

    def get_batches(self, paths: Iterable[str]) -> Iterator[Collection[StoredValue]]:
        """`get_many` in batches, which a store may read without a look at the values; a batch can be pickled.

        The error of a node comes in its place, a store's behind the values before it.
        """
        return in_batches(self.get_many(paths))

    @abstractmethod
    def put(self, path: str, value: bytes, expected: int | None) -> int:
        """Write the node and return its new version.

        `expected` NEW creates it, together with the missing parents (empty values) in one step; a version replaces the
        value only while the node has that version; None replaces any value, or creates the node.
        Raises AlreadyExists (NEW, exists), NotFound (a version, missing), MetadataVersionConflict (another version).
        A write that was applied although its answer was lost is recognised, and succeeds. It is not recognised where
        another client has written since and the store keeps no history (ZooKeeper; etcd after a compaction): then the
        MetadataVersionConflict has `may_be_applied`.
        """

    def put_many(self, nodes: Sequence[tuple[str, bytes, int]]) -> list[int | BkctlError]:
        """`put` each node in the given version (NEW creates it), independently; a node's error comes in its place.

        Raises only Unreachable: some of the nodes may be written then.
        """
        return map_each(lambda node: self.put(*node), nodes)

    @abstractmethod
    def put_all(self, nodes: Sequence[tuple[str, bytes]]) -> None:
        """Create all these nodes (parents before children), or none of them. Raises AlreadyExists."""

    @abstractmethod
    def delete(self, path: str, expected: int | None = None, *, prune: int = 0) -> None:
        """Delete the node, only in version `expected` if given; then up to `prune` of its parents while they are empty.

        Pruning is best effort: a parent with a new child, or any failure, ends it silently.
        Raises NotFound, MetadataVersionConflict, Conflict when the node has children.
        """

    def delete_root(self) -> None:
        """Delete the root itself, which must be empty; do nothing where the root is the store (SQLite).

        Raises NotFound, and Conflict when it has children.
        """
        return

    @abstractmethod
    def children(self, path: str, *, after: str = "", limit: int | None = None) -> list[str] | None:
        """Return the names of the node's children in ascending order, None for a missing node.

        `after` and `limit` narrow the answer to at most `limit` names greater than `after`. Changes acknowledged to any
        client before the call are included (ZooKeeper: `sync` first). Invalid names are left out: see `invalid_names`.
        """

    def children_many(self, paths: Iterable[str]) -> Iterator[list[str] | None]:
        """Yield the `children` of each path, in the order given; `paths` is consumed as by `get_many`."""
        return (self.children(path) for path in paths)

    @property
    def invalid_names(self) -> list[str]:
        """The nodes that `children` and `children_many` left out so far, because no path can name them.

        Other programs create them: control characters, `..`, bytes that are not UTF-8 (shown as `\\xff`), a path above
        PATH_LENGTH_MAX (cut; below an AbsolutePath a name). The first INVALID_NAMES_MAX of this object, as found.
        """
        return list(self._invalid_names or ())

    def _valid_names(self, path: str, names: list[str]) -> list[str]:
        """Return the `names` of children of the node at `path` that a path can name; note the others.

        Bytes that are not UTF-8 are surrogates in the names (`surrogateescape`).
        """
        is_foreign = isinstance(path, AbsolutePath)
        length_max = PATH_LENGTH_MAX - (0 if is_foreign else len(path) + 1)
        joined = "/".join(names)
        if (
            joined.isprintable()  # much faster than a look at each name
            and joined.count("/") < max(len(names), 1)
            and _RESERVED_NAMES.isdisjoint(names)
            and max(map(len, names), default=0) <= length_max
        ):
            return names
        valid = []
        for name in names:
            child = f"{path}/{name}" if path else name
            if "/" not in name and is_path(f"_/{name}" if is_foreign else child.removeprefix("/")):
                valid.append(name)
                continue
            if self._invalid_names is None:
                self._invalid_names = {}
            if len(self._invalid_names) < INVALID_NAMES_MAX:
                shown = child[:PATH_LENGTH_MAX].encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
                self._invalid_names[shown] = None
        return valid

    @abstractmethod
    def sequence(self, path: str) -> int:
        """Return the next number of the sequence at `path`: ascending from 0, each number once."""

    @abstractmethod
    def sequence_position(self, path: str) -> int:
        """Return the number that `sequence` gives next at `path`; 0 for a new sequence."""

    def advance_sequence(self, path: str, position: int) -> bool:
        """Make `sequence` give `position` or more from now on; return False where that would take too many steps."""
        behind = position - self.sequence_position(path)
        if behind > SEQUENCE_STEPS_MAX:
            return False
        if behind > 0:
            from concurrent.futures import ThreadPoolExecutor

            with ThreadPoolExecutor(16, thread_name_prefix="advance-sequence") as executor:
                for _ in executor.map(self.sequence, [path] * behind):
                    pass
        return True

    @abstractmethod
    def ephemeral(
        self, path: str, value: bytes | None, *, wait_s: float | None = None, needs: str | None = None
    ) -> None:
        """Keep a node at `path` for as long as this store object lives; set the value of a node that we own already.

        After a lost session the node is created again, until `delete(path)` or `close`, and only while there is a node
        at `needs`, if given. While another owner holds the node, wait `wait_s` seconds (None: until the session of a
        dead owner is over), then raise AlreadyExists.
        `value` None: create nothing, and only wait so.
        """

    @abstractmethod
    def usurped_s(self, path: str) -> float:
        """Seconds since another owner was first seen to hold our `ephemeral` at `path`, or since the node that it needs
        was first seen to be gone after a lost session; 0 while we hold it.
        """

    @abstractmethod
    def claim(self, path: str, value: bytes, *, numbered: bool = False) -> Claim:
        """Create an ephemeral node that is not created again: a lost session loses the claim, unlike `ephemeral`.

        With `numbered` ten digits follow `path`, greater than in every earlier node beside it: a client that sees its
        own node also sees every lower one (ZooKeeper's sequential nodes). One session claims a numbered path with the
        same value once. Raises AlreadyExists.
        """

    def claim_many(self, paths: Sequence[str], value: bytes) -> list[Claim | BkctlError]:
        """`claim` each path; AlreadyExists, or another error, comes in its place. Raises only Unreachable."""
        return map_each(lambda path: self.claim(path, value), paths)

    @abstractmethod
    def held_many(self, claims: Sequence[Claim]) -> list[bool]:
        """Return `is_held` of each claim. Raises Unreachable."""

    @abstractmethod
    def release_many(self, claims: Sequence[Claim]) -> None:
        """`release` each claim. Raises Unreachable: some may be left then."""

    @abstractmethod
    def watch(self, path: str, callback: Callable[[], None], *, children: bool = False) -> Callable[[], None]:
        """Call `callback()` after each change of the node (created, replaced, deleted), or of its set of children.

        Several changes may cause one call, and a lost connection causes a call too: read again and compare.
        Calls run on the store's own thread, one at a time, and must not block long; a call that raises a BkctlError
        (the store is down again, say) is repeated later. Returns a function that cancels.
        """

    @abstractmethod
    def close(self) -> None:
        """End the session: our ephemerals vanish at once, watches end. A second call does nothing."""


def map_each(call: Callable[[T], R], items: Sequence[T]) -> list[R | BkctlError]:
    """Call `call` with each item, several at once; an error comes in its item's place. Raises only Unreachable."""
    if len(items) < 2:
        return [attempt(call, item) for item in items]
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(min(len(items), _CONCURRENCY), thread_name_prefix="change-many") as executor:
        return list(executor.map(lambda item: attempt(call, item), items))


def map_ahead(executor: Executor, call: Callable[[T], R], items: Iterable[T], ahead: int) -> Iterator[R]:
    """Yield what `call` returns for each item, in the order given; up to `ahead` calls are under way."""
    under_way: deque[Future[R]] = deque()
    for item in items:
        under_way.append(executor.submit(call, item))
        while under_way and (len(under_way) >= ahead or under_way[0].done()):
            yield under_way.popleft().result()
    while under_way:
        yield under_way.popleft().result()


def in_batches(values: Iterator[StoredValue]) -> Iterator[list[StoredValue]]:
    """Cut values into lists of up to 64, then more; an error comes behind a list of those before it."""
    size, error = _BATCH_SIZE_MIN, None
    while error is None:
        batch: list[StoredValue] = []
        size_bytes = 0
        try:
            for value in islice(values, size):
                batch.append(value)
                size_bytes += len(value.value) if isinstance(value, Versioned) else 0
                if size_bytes > _BATCH_SIZE_BYTES_MAX:
                    break
        except BkctlError as caught:
            error = caught
        if batch:
            yield batch
        elif error is None:
            return
        size = min(2 * size, _BATCH_SIZE_MAX)
    raise error


def chunks(
    items: Iterable[T], count_max: int, size: Callable[[T], int] = lambda _: 0, size_max: int = 0
) -> Iterator[list[T]]:
    """Cut the items into lists of up to `count_max`, whose sizes add up to `size_max` at most where more than one."""
    chunk: list[T] = []
    total = 0
    for item in items:
        total += size(item)
        if chunk and (len(chunk) == count_max or total > size_max):
            yield chunk
            chunk, total = [], size(item)
        chunk.append(item)
    if chunk:
        yield chunk


def attempt(call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R | BkctlError:
    """Return what `call` returns, or the BkctlError that it raises. Raises only Unreachable."""
    try:
        return call(*args, **kwargs)
    except Unreachable:
        raise
    except BkctlError as error:
        return error


def value_of(found: R | BkctlError) -> R:
    """Return the result of `attempt`, or raise its error."""
    if isinstance(found, BkctlError):
        raise found
    return found


@contextlib.contextmanager
def renamed_errors(
    missing: str | None = None, changed: str | None = None, exists: str | None = None, *, hint: str | None = None
) -> Iterator[None]:
    """Raise the store's NotFound, MetadataVersionConflict and AlreadyExists with these messages; None: as they are."""
    try:
        yield
    except (NotFound, MetadataVersionConflict, AlreadyExists) as error:
        if isinstance(error, MetadataVersionConflict) and changed is not None:
            raise MetadataVersionConflict(changed, hint=hint, may_be_applied=error.may_be_applied) from error
        kind, message = (NotFound, missing) if isinstance(error, NotFound) else (AlreadyExists, exists)
        if message is None or isinstance(error, MetadataVersionConflict):
            raise
        raise kind(message, hint=hint) from error


def create_if_missing(store: MetadataStore, path: str, value: bytes) -> bool:
    """Create the node with this value; leave an existing node unchanged, and return False."""
    try:
        store.put(path, value, NEW)
    except AlreadyExists:
        return False
    return True


def names_in(store: MetadataStore, path: str, *, after: str = "", limit: int | None = None) -> list[str]:
    """Return the `children` of a node that each cluster has. Raises NotFound: a missing node is not an empty one."""
    return _present(store, path, store.children(path, after=after, limit=limit))


def names_in_each(store: MetadataStore, paths: Sequence[str]) -> list[list[str]]:
    """Return the `names_in` of each path. Raises NotFound."""
    return [_present(store, path, names) for path, names in zip(paths, store.children_many(paths), strict=True)]


def _present(store: MetadataStore, path: str, names: list[str] | None) -> list[str]:
    if names is None:
        node = f"{path}: a node of every cluster is missing" if path else "No BookKeeper cluster"
        raise NotFound(f"{node} in {store.name}", hint=NO_CLUSTER_HINT)
    return names


def delete_if_present(store: MetadataStore, path: str) -> bool:
    """Delete the node; return False for a missing one."""
    try:
        store.delete(path)
    except NotFound:
        return False
    return True


def watch_all(watches: Iterator[Callable[[], None]]) -> Callable[[], None]:
    """Return a function that cancels all of `watches`, which yields what calls of `watch` return.

    If one of these raises, cancel those before it.
    """
    with contextlib.ExitStack() as stack:
        for cancel in watches:
            stack.callback(cancel)
        return stack.pop_all().close


def walk_levels(
    store: MetadataStore, base: str, levels: Sequence[re.Pattern[str]], first: str = ""
) -> Iterator[tuple[str, str, list[str]]]:
    """Yield the lowest directories of a tree below `base`: path, joined names of its directories, children's names.

    Each of `levels` matches the names of directories in that level; other names are passed over. All names of a level
    have the same width, so directories come in ascending order; directories that sort before `first` are left out.
    Several requests are under way in every level at once. Directories deleted meanwhile are passed over.
    """
    directories: Iterator[tuple[str, str]] = iter([(base, "")])
    for level in levels:
        directories = _directories_below(store, directories, level, first)
    yield from _children_of(store, directories)


def _directories_below(
    store: MetadataStore, directories: Iterator[tuple[str, str]], level: re.Pattern[str], first: str
) -> Iterator[tuple[str, str]]:
    for path, digits, names in _children_of(store, directories):
        for name in names:
            joined = digits + name
            if level.fullmatch(name) and joined >= first[: len(joined)]:
                yield f"{path}/{name}" if path else name, joined


def _children_of(store: MetadataStore, directories: Iterator[tuple[str, str]]) -> Iterator[tuple[str, str, list[str]]]:
    directories, asked = tee(directories)
    for (path, digits), names in zip(directories, store.children_many(path for path, _ in asked), strict=True):
        if not path:
            names = _present(store, path, names)
        if names:
            yield path, digits, names
