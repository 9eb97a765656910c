"""A cluster in its metadata store: ledgers, registered bookies, cookies, layout, instance id.

Source: ZKRegistrationManager, ZKRegistrationClient, ZkLayoutManager, AbstractZkLedgerManagerFactory.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, NamedTuple

from bkctl.disk import Closing
from bkctl.errors import AlreadyExists, Conflict, Corrupt, NotFound, Unsupported, UsageError, on_error
from bkctl.formats.metadata import BookieEndpoint, BookieServiceInfo, Cookie, LedgerLayout, decoded
from bkctl.ids import check_bookie_id, is_bookie_id
from bkctl.metadata.backends.zookeeper.ledger_managers import (
    FlatLedgerManager,
    HierarchicalLedgerManager,
    LegacyHierarchicalLedgerManager,
    LongHierarchicalLedgerManager,
)
from bkctl.metadata.ledgers import INSTANCE_ID, LEDGERS, LedgerManager, QualifiedNameLedgerManager
from bkctl.metadata.store import (
    NEW,
    NO_CLUSTER_HINT,
    NO_SECURITY,
    MetadataStore,
    StoreSecurity,
    Versioned,
    create_if_missing,
    delete_if_present,
    names_in,
    names_in_each,
    renamed_errors,
    watch_all,
)
from bkctl.metadata.uri import MetadataUri, parse_uri

COOKIES: Final = "cookies"
#: BookieServiceInfo property of a bookie that knows ledger scopes (BP-35): "1". The registration lock: placement for
#: scopes ≠ 0 picks only bookies that registered it, since Apache's bookies ignore the scope and act on scope 0. The
#: connection lock (the READ_LAC probe in `bkctl/protocol/connection.py`) then asks the process behind the address.
LEDGER_SCOPES_PROPERTY: Final = "ledgerScopes"
#: BookieServiceInfo property with the program and its version: "bkctl 0.3.0".
VERSION_PROPERTY: Final = "version"
BOOKIE_RPC_PROTOCOL: Final = "bookie-rpc"
#: The id of the endpoint that a bookie with an HTTP server registers. Source: HttpService.publishInfo.
HTTP_ENDPOINT_ID: Final = "httpserver"
_PACKAGE: Final = "org.apache.bookkeeper.meta."
_APACHE_CLASS: Final = re.compile(r"(?:\w+\.)*org\.apache\.bookkeeper\.meta\.(\w+)", re.ASCII)
_MANAGER_VERSION: Final = 1


class Places(NamedTuple):
    """Paths below the root of the nodes that a cluster has once, by kind of store. Cookies are at `cookies` in each."""

    layout: str = "LAYOUT"
    instance_id: str = INSTANCE_ID
    writable: str = "available"
    read_only: str = "available/readonly"
    #: True if a new cluster has the node `cookies`; else the first cookie creates it.
    has_cookies: bool = False


#: ZooKeeper's, HBase's and SQLite's.
PLACES: Final = Places()
#: Source: EtcdConstants.
ETCD_PLACES: Final = Places("layout", "instanceid", "bookies/writable", "bookies/readonly", True)
#: Nodes that Apache's driver creates beside these. Source: EtcdRegistrationManager.initNewCluster.
_ETCD_MARKERS: Final = ("cookies", "bookies", "ledgers", "buckets", "underreplication")
#: The only LAYOUT of clusters in stores other than ZooKeeper.
_LAYOUTS: Final = {
    "sqlite": LedgerLayout(2, "bkctl.QualifiedNameLedgerManager", _MANAGER_VERSION),
    "etcd": LedgerLayout(2, "org.apache.bookkeeper.metadata.etcd.EtcdLedgerManagerFactory", 0),
    "hbase": LedgerLayout(2, "bkctl.HBaseLedgerManager", _MANAGER_VERSION),
}

#: Simple name of the LAYOUT's class → (URI types that fit it beside `null`, the best first; the manager).
_ZOOKEEPER_LAYOUTS: Final[dict[str, tuple[tuple[str, ...], Callable[[MetadataStore], LedgerManager]]]] = {
    "HierarchicalLedgerManagerFactory": (("hierarchical",), HierarchicalLedgerManager),
    "LongHierarchicalLedgerManagerFactory": (
        ("longhierarchical", "longlonghierarchical"),
        LongHierarchicalLedgerManager,
    ),
    "LongLongHierarchicalLedgerManagerFactory": (("longlonghierarchical",), LongHierarchicalLedgerManager),
    "FlatLedgerManagerFactory": (("flat",), FlatLedgerManager),
    "LegacyHierarchicalLedgerManagerFactory": ((), LegacyHierarchicalLedgerManager),
}
#: URI type → simple class name that a new root gets; never one that Apache's clients lack.
_NEW_LAYOUTS: Final = {
    "null": "HierarchicalLedgerManagerFactory",
    "hierarchical": "HierarchicalLedgerManagerFactory",
    "longhierarchical": "LongHierarchicalLedgerManagerFactory",
    "longlonghierarchical": "LongHierarchicalLedgerManagerFactory",
    "flat": "FlatLedgerManagerFactory",
}


class RegisteredBookie(NamedTuple):
    """A bookie with a registration or a cookie.

    `state` is "rw" or "ro" for a registered bookie, "down" for one that only has a cookie. `info` is its registration;
    None for a bookie that is down, or registered without a readable service info (BookKeeper before 4.11).
    """

    bookie_id: str
    state: str
    info: BookieServiceInfo | None

    @property
    def address(self) -> tuple[str, int] | None:
        """Host and port of its `bookie-rpc` endpoint, else of a bookie id `HOST:PORT`; None without either."""
        for endpoint in self.info.endpoints if self.info else ():
            if endpoint.protocol == BOOKIE_RPC_PROTOCOL:
                return endpoint.host, endpoint.port
        match = re.fullmatch(r"(.+):([0-9]{1,5})", self.bookie_id, re.ASCII)
        return (match[1], int(match[2])) if match and int(match[2]) <= 65535 else None

    @property
    def http_endpoint(self) -> BookieEndpoint | None:
        """The endpoint of its HTTP server; None for a bookie that registered none."""
        endpoints = self.info.endpoints if self.info is not None else ()
        servers = [each for each in endpoints if each.id == HTTP_ENDPOINT_ID or each.protocol in ("http", "https")]
        return min(servers, key=lambda endpoint: endpoint.id != HTTP_ENDPOINT_ID, default=None)

    @property
    def ledger_scopes(self) -> bool:
        """True if placement may pick it for scopes ≠ 0: the registration lock, see LEDGER_SCOPES_PROPERTY."""
        return self.info is not None and self.info.properties.get(LEDGER_SCOPES_PROPERTY) == "1"

    @property
    def version(self) -> str | None:
        """Name and version of its program, None if it did not register them, as Apache's bookies do not."""
        return self.info.properties.get(VERSION_PROPERTY) if self.info is not None else None


class CookieStore:
    """The bookies' cookies in the metadata store. Source: ZKRegistrationManager."""

    def __init__(self, store: MetadataStore, places: Places = PLACES) -> None:
        self.store = store
        self._places = places

    def list(self) -> list[str]:
        """Return the ids of the bookies that have a cookie, ascending. Raises NotFound without a cluster."""
        if self._places.has_cookies:
            return names_in(self.store, COOKIES)
        return self.store.children(COOKIES) or []

    def read(self, bookie_id: str) -> Versioned[Cookie] | None:
        """Return the bookie's cookie, None without one. Raises Corrupt or Unsupported, naming the bookie."""
        found = self.store.get(cookie_path(bookie_id))
        if found is None:
            return None
        cookie = Cookie.parse(found.value, f"cookie of {bookie_id} in {self.store.name}")
        return Versioned(cookie, found.version, found.ctime_ms)

    def write(self, bookie_id: str, cookie: Cookie, expected: int | None) -> int:
        """Store the cookie and return its version; `expected` NEW creates, a version replaces that one, None either.

        Raises AlreadyExists, NotFound, MetadataVersionConflict.
        """
        # NotFound says itself that the cluster is missing, if the cookie may be created.
        missing = None if expected in (NEW, None) else f"Bookie {bookie_id} has no cookie"
        with renamed_errors(missing, _changed(bookie_id), f"Bookie {bookie_id} has a cookie"):
            return self.store.put(cookie_path(bookie_id), cookie.serialize(), expected)

    def remove(self, bookie_id: str, expected: int | None) -> None:
        """Delete the cookie, in version `expected` only if given. Raises NotFound, MetadataVersionConflict."""
        with renamed_errors(f"Bookie {bookie_id} has no cookie", _changed(bookie_id)):
            self.store.delete(cookie_path(bookie_id), expected)


class Registration:
    """The registered bookies: ephemeral nodes that vanish with the bookie. Source: ZKRegistrationManager."""

    def __init__(self, store: MetadataStore, places: Places = PLACES) -> None:
        self.store = store
        self._places = places

    def register(
        self, bookie_id: str, info: BookieServiceInfo, read_only: bool = False, *, wait_s: float | None = None,
        needs_cookie: bool = False,
    ) -> None:  # fmt: skip
        """Register the bookie as writable or read-only, until `unregister` or `close`; again after a lost session.

        With `needs_cookie` not again if its cookie is gone by then: it was decommissioned.

        A registered bookie moves to read-only or back: the new node is created, then the old one is deleted.
        While another process holds the registration, wait `wait_s` seconds (None: until the session of a dead process
        is over), then raise AlreadyExists: a bookie of this id is running.
        """
        self._hold(bookie_id, info.serialize(), read_only, wait_s, cookie_path(bookie_id) if needs_cookie else None)
        delete_if_present(self.store, self._path(bookie_id, not read_only))

    def wait_until_free(self, bookie_id: str, *, wait_s: float | None = None) -> None:
        """Wait, as `register` does, until no other process has registered the bookie. Raises AlreadyExists."""
        for read_only in (False, True):
            self._hold(bookie_id, None, read_only, wait_s)

    def _hold(
        self, bookie_id: str, value: bytes | None, read_only: bool, wait_s: float | None, needs: str | None = None
    ) -> None:
        problem = f"Bookie {bookie_id} is registered by another process"
        with renamed_errors(exists=problem, hint="stop that bookie, or give this one another id"):
            self.store.ephemeral(self._path(bookie_id, read_only), value, wait_s=wait_s, needs=needs)

    def usurped_s(self, bookie_id: str, read_only: bool = False) -> float:
        """Return the seconds since the registration that we lost was first seen not to return to us; else 0."""
        return self.store.usurped_s(self._path(bookie_id, read_only))

    def unregister(self, bookie_id: str) -> None:
        """Delete the bookie's registrations; do nothing without one."""
        for read_only in (False, True):
            delete_if_present(self.store, self._path(bookie_id, read_only))

    def list(self, include_down: bool = True) -> list[RegisteredBookie]:
        """Return all bookies by id; with `include_down` also bookies that have a cookie and are not registered.

        Nodes whose names are not bookie ids are left out: ledgers cannot name them. Raises NotFound without a cluster.
        """
        lists = {"rw": self._places.writable, "ro": self._places.read_only}
        cookies = CookieStore(self.store, self._places).list() if include_down else []
        writable, read_only = names_in_each(self.store, tuple(lists.values()))
        states = dict.fromkeys(cookies, "down") | dict.fromkeys(read_only, "ro") | dict.fromkeys(writable, "rw")
        states = {name: state for name, state in states.items() if is_bookie_id(name)}  # `readonly` is not one
        up = sorted(name for name in states if states[name] != "down")
        infos = dict(zip(up, self.store.get_many(f"{lists[states[name]]}/{name}" for name in up), strict=True))
        bookies = []
        for name in sorted(states):
            state, found = states[name], infos.get(name)
            if state != "down" and found is None:
                # Between the two steps it left, or became read-only or writable: do not report it as lost.
                state = "ro" if state == "rw" else "rw"
                found = self.store.get(f"{lists[state]}/{name}")
            if state != "down" and found is None:
                if name not in cookies:
                    continue
                state = "down"
            bookies.append(RegisteredBookie(name, state, _service_info(name, found)))
        return bookies

    def get(self, bookie_id: str) -> RegisteredBookie | None:
        """Return one bookie, also a down one; None without a registration and a cookie."""
        check_bookie_id(bookie_id)
        writable, read_only, cookie = self.store.get_many(
            (f"{self._places.writable}/{bookie_id}", f"{self._places.read_only}/{bookie_id}", f"{COOKIES}/{bookie_id}")
        )
        if writable is not None:
            return RegisteredBookie(bookie_id, "rw", _service_info(bookie_id, writable))
        if read_only is not None:
            return RegisteredBookie(bookie_id, "ro", _service_info(bookie_id, read_only))
        return None if cookie is None else RegisteredBookie(bookie_id, "down", None)

    def check_not_registered(self, bookie_ids: Iterable[str]) -> None:
        """Raise Conflict if one of the bookies is registered: it is running."""
        for bookie_id in bookie_ids:
            if (bookie := self.get(bookie_id)) is not None and bookie.state != "down":
                raise Conflict(f"Bookie {bookie_id} is registered, so it is running", hint="stop it first")

    def watch(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call `callback()` when bookies come, go or change state; see MetadataStore.watch."""
        lists = (self._places.writable, self._places.read_only)
        return watch_all(self.store.watch(path, callback, children=True) for path in lists)

    def _path(self, bookie_id: str, read_only: bool) -> str:
        return f"{self._places.read_only if read_only else self._places.writable}/{check_bookie_id(bookie_id)}"


class Cluster(Closing):
    """One cluster's metadata, open until `close`; a context manager. Created by `open_cluster`."""

    def __init__(self, location: MetadataUri, store: MetadataStore) -> None:
        self.location = location
        self.uri = location.text
        self.store = store
        self.places = ETCD_PLACES if location.driver == "etcd" else PLACES
        self.cookies = CookieStore(store, self.places)
        self.bookies = Registration(store, self.places)
        #: True if `open_cluster` created the cluster.
        self.created = False
        self._ledgers: LedgerManager | None = None
        self._lock = threading.Lock()

    @property
    def identity(self) -> str:
        """The store's URI in the one spelling of `MetadataUri.identity`."""
        return self.location.identity(getattr(self.store, "root", None))

    @property
    def ledgers(self) -> LedgerManager:
        """The ledger manager of the LAYOUT, which is read on first use.

        Raises NotFound without a cluster, UsageError when the URI names another type than LAYOUT, Unsupported for the
        LAYOUT of an unknown manager.
        """
        # Not a cached_property: Python 3.11's has one lock for all clusters, held while a slow store answers.
        with self._lock:
            if self._ledgers is None:
                self._ledgers = self.ledger_manager(self.layout())
            return self._ledgers

    def ledger_manager(self, layout: LedgerLayout) -> LedgerManager:
        """Return a ledger manager of this layout on the store. Raises UsageError and Unsupported as `ledgers`."""
        driver = self.location.driver
        if layout == _LAYOUTS.get(driver):
            if driver == "etcd":
                from bkctl.metadata.backends.etcd.etcd_store import EtcdLedgerManager

                return EtcdLedgerManager(self.store)
            if driver == "hbase":
                from bkctl.metadata.backends.hbase.hbase_store import HBaseLedgerManager

                return HBaseLedgerManager(self.store)
            return QualifiedNameLedgerManager(self.store)
        name = _simple_name(layout)
        entry = _ZOOKEEPER_LAYOUTS.get(name) if driver == "zk" else None
        if entry is None:
            raise Unsupported(
                f"{self.store.name} is laid out by {layout.factory_class}:{layout.manager_version}, "
                "which bkctl does not support there"
            )
        if layout.manager_version != _MANAGER_VERSION:
            raise Unsupported(
                f"{self.store.name} is laid out by {layout.factory_class} version {layout.manager_version}; "
                f"version {_MANAGER_VERSION} is known"
            )
        if not self.fits(layout):
            types = entry[0]
            right = self.location._replace(manager_type=types[0] if types else "null").text
            raise UsageError(
                f"{self.store.name} is laid out by {name}, which zk+{self.location.manager_type}:// does not fit",
                hint=f"use {right}",
            )
        return entry[1](self.store)

    def fits(self, layout: LedgerLayout) -> bool:
        """Return whether the URI allows this layout of Apache's on ZooKeeper."""
        entry = _ZOOKEEPER_LAYOUTS.get(_simple_name(layout)) if self.location.driver == "zk" else None
        return entry is not None and self.location.manager_type in ("null", *entry[0])

    def layout(self) -> LedgerLayout:
        """Return the stored layout, else the default of the URI (Apache's default: hierarchical).

        Raises NotFound without a cluster, Corrupt or Unsupported for a damaged or later LAYOUT.
        """
        found = self.store.get(self.places.layout)
        if found is not None:
            return LedgerLayout.parse(found.value, f"{self.places.layout} in {self.store.name}")
        if self.store.get(self.places.writable) is None and self.store.get(self.places.instance_id) is None:
            # Else any node would look like the root of a cluster without ledgers.
            raise NotFound(f"No BookKeeper cluster in {self.store.name}", hint=NO_CLUSTER_HINT)
        return new_layout(self.location)

    def instance_id(self) -> str:
        """Return the cluster's instance id, "" where none is stored. Raises Corrupt for bytes that are not UTF-8."""
        found = self.store.get(self.places.instance_id)
        return "" if found is None else decoded(found.value, f"{self.places.instance_id} in {self.store.name}")

    def close(self) -> None:
        """End the store's session; a second call does nothing."""
        self.store.close()


def open_cluster(
    uri: str,
    *,
    timeout_s: float = 30.0,
    connect_timeout_s: float | None = None,
    create: bool = False,
    create_store: bool = False,
    session_timeout_s: float = 10.0,
    security: StoreSecurity = NO_SECURITY,
) -> Cluster:
    """Connect to the metadata store that `uri` names.

    `timeout_s` is the longest wait without progress, `connect_timeout_s` that for the connection (None: `timeout_s`),
    `session_timeout_s` the time for which ZooKeeper or etcd keeps the ephemerals of a dead client (`zkTimeout`),
    `security` TLS and login (a SQLite file has file permissions only). With
    `create`, a missing cluster is created as by `init_cluster`; with `create_store` only the SQLite file for one.
    Raises UsageError or Unsupported for the URI, Unreachable within `connect_timeout_s`, Unauthorized for a refused
    login, NotFound for a missing SQLite file.
    """
    location = parse_uri(uri)
    security = security.over(location.security)
    times = {"timeout_s": timeout_s, "connect_timeout_s": connect_timeout_s, "session_timeout_s": session_timeout_s}
    store = _open_store(location, times, create or create_store, security)
    with on_error(store.close):
        cluster = Cluster(location, store)
        if create:
            cluster.created = init_cluster(cluster)
    return cluster


def init_cluster(cluster: Cluster, *, instance_id: str | None = None, layout: LedgerLayout | None = None) -> bool:
    """Create a cluster in the store: root, registration nodes, instance id, LAYOUT; return False if it exists.

    `instance_id` None: a random one, "": none; `layout` None: the default of the URI.
    Several processes may call it at once; an incomplete cluster is completed.
    Source: ZKRegistrationManager.initNewCluster.
    """
    import uuid

    store, places = cluster.store, cluster.places
    if store.get(places.layout) is not None:
        return False
    # On etcd Apache's processes take a root without further nodes for a whole cluster, so create all in one step.
    in_one_step = cluster.location.driver == "etcd"
    root = [] if store.get("") is not None else [("", b"")]
    nodes = [(path, b"") for path in _ETCD_MARKERS] if in_one_step else []
    nodes += [(places.writable, b""), (places.read_only, b"")]
    if instance_id != "":
        nodes.append((places.instance_id, (instance_id or str(uuid.uuid4())).encode()))
    last = (places.layout, (layout or new_layout(cluster.location)).serialize())
    if cluster.location.driver == "hbase":
        create_if_missing(store, LEDGERS, b"")  # the table; without HBase nothing is created
    try:
        store.put_all([*root, *nodes, *([last] if in_one_step else [])])
        if in_one_step:
            return True
    except AlreadyExists:
        for path, value in nodes:
            create_if_missing(store, path, value)
    return create_if_missing(store, *last)


def _simple_name(layout: LedgerLayout) -> str:
    """Return the simple name of an Apache class, also of one shaded into another package; else the whole name."""
    match = _APACHE_CLASS.fullmatch(layout.factory_class)
    return match[1] if match else layout.factory_class


def new_layout(location: MetadataUri, *, long_long: bool = False) -> LedgerLayout:
    """Return the LAYOUT of a new cluster; `long_long`: BP-35's class, on which no Apache process starts.

    Raises UsageError for `long_long` where the URI is not `zk+longlonghierarchical`.
    """
    if long_long:
        if location.manager_type != "longlonghierarchical":
            raise UsageError(
                f"{location.text} has no LongLongHierarchical layout", hint="give a zk+longlonghierarchical:// URI"
            )
        return LedgerLayout(2, f"{_PACKAGE}LongLongHierarchicalLedgerManagerFactory", _MANAGER_VERSION)
    if location.driver in _LAYOUTS:
        return _LAYOUTS[location.driver]
    return LedgerLayout(2, _PACKAGE + _NEW_LAYOUTS[location.manager_type], _MANAGER_VERSION)


def _open_store(
    location: MetadataUri, times: Mapping[str, Any], create: bool, security: StoreSecurity
) -> MetadataStore:
    if location.driver == "sqlite":
        from bkctl.metadata.backends.sqlite import SqliteStore

        return SqliteStore(location.path, timeout_s=times["timeout_s"], create=create)
    if location.driver == "zk":
        from bkctl.metadata.backends.zookeeper.zookeeper_store import ZooKeeperStore

        # Pulsar's PATH is a chroot, with the root at `ledgers` in it; operators also write the path of the root.
        root = f"{location.path.rstrip('/')}/ledgers" if location.pulsar else location.path
        store = ZooKeeperStore(location.connect_string, root, security=security, **times)
        if location.pulsar and location.path != "/" and store.get(INSTANCE_ID) is None:
            store.change_root(location.path)
            if store.get(INSTANCE_ID) is None:  # A new cluster is where Pulsar looks for it.
                store.change_root(root)
        return store
    if location.driver == "hbase":
        from bkctl.metadata.backends.hbase.hbase_store import HBaseStore

        prefix = location.path[1:]
        return HBaseStore(location.connect_string, prefix, znode=location.znode, security=security, **times)
    from bkctl.metadata.backends.etcd.etcd_store import EtcdStore

    return EtcdStore(location.hosts, location.path, security=security, **times)


def _service_info(bookie_id: str, found: Versioned[bytes] | None) -> BookieServiceInfo | None:
    if found is None or not found.value:
        return None
    try:
        return BookieServiceInfo.parse(found.value, f"registration of {bookie_id}")
    except Corrupt:
        return None


def _changed(bookie_id: str) -> str:
    return f"The cookie of bookie {bookie_id} changed meanwhile"


def cookie_path(bookie_id: str) -> str:
    """Return the path of a bookie's cookie in the metadata store."""
    return f"{COOKIES}/{check_bookie_id(bookie_id)}"
