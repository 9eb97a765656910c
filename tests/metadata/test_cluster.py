"""Layouts by URI, new clusters, registration, cookies, scopes that another cluster left."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.waiting import eventually

from bkctl.errors import (
    AlreadyExists,
    Conflict,
    Corrupt,
    LedgerNotFound,
    MetadataVersionConflict,
    NotFound,
    Unreachable,
    Unsupported,
    UsageError,
)
from bkctl.formats.entry import DigestType
from bkctl.formats.metadata import BookieEndpoint, BookieServiceInfo, Cookie, Fragment, LedgerMetadata
from bkctl.ids import LedgerId
from bkctl.metadata.backends.zookeeper.ledger_managers import (
    FlatLedgerManager,
    HierarchicalLedgerManager,
    LegacyHierarchicalLedgerManager,
    LongHierarchicalLedgerManager,
)
from bkctl.metadata.cluster import RegisteredBookie, init_cluster, open_cluster
from bkctl.metadata.store import NEW
from bkctl.metadata.underreplication import AutoRecoveryState

METADATA = LedgerMetadata(1, 1, 1, DigestType.CRC32C, b"", (Fragment(0, ("bookie-1",)),))
INFO = BookieServiceInfo(
    (BookieEndpoint("http", 8080, "10.0.0.1", "http"), BookieEndpoint("bookie", 3181, "10.0.0.1", "bookie-rpc")),
    {"ledgerScopes": "1"},
)
META = "org.apache.bookkeeper.meta."


@pytest.mark.parametrize(
    ("manager", "layout"),
    [
        ("hierarchical", "HierarchicalLedgerManagerFactory"),
        ("null", "HierarchicalLedgerManagerFactory"),
        ("longhierarchical", "LongHierarchicalLedgerManagerFactory"),
        ("longlonghierarchical", "LongHierarchicalLedgerManagerFactory"),
        ("flat", "FlatLedgerManagerFactory"),
    ],
)
def test_a_new_root_gets_a_layout_of_apaches(zookeeper: Any, manager: str, layout: str) -> None:
    uri = zookeeper.metadata_uri(f"{zookeeper.new_root()}/deep/ledgers", manager)
    with pytest.raises(NotFound), open_cluster(uri) as missing:
        missing.layout()
    with open_cluster(uri, create=True) as cluster:
        assert cluster.store.get("LAYOUT")[0] == f"2\n{META}{layout}:1".encode()  # type: ignore[index]
        assert cluster.store.children("") == ["INSTANCEID", "LAYOUT", "available"]
        assert cluster.store.children("available") == ["readonly"]
        assert len(cluster.instance_id()) == 36
        assert not init_cluster(cluster)
        instance_id = cluster.instance_id()
    with open_cluster(uri, create=True) as again:
        assert again.instance_id() == instance_id


RIGHT = {
    "HierarchicalLedgerManagerFactory": ["hierarchical"],
    "LongHierarchicalLedgerManagerFactory": ["longhierarchical", "longlonghierarchical"],
    "LongLongHierarchicalLedgerManagerFactory": ["longlonghierarchical"],
    "FlatLedgerManagerFactory": ["flat"],
    "LegacyHierarchicalLedgerManagerFactory": [],
}


@pytest.mark.parametrize("layout", RIGHT)
def test_a_uri_that_does_not_fit_the_layout_is_refused_with_the_right_one(zookeeper: Any, layout: str) -> None:
    root = zookeeper.new_root()
    with open_cluster(zookeeper.metadata_uri(root), create=True) as cluster:
        cluster.store.put("LAYOUT", f"2\n{META}{layout}:1".encode(), None)
    right = RIGHT[layout]
    for manager in ("hierarchical", "longhierarchical", "longlonghierarchical", "flat", "null"):
        with open_cluster(zookeeper.metadata_uri(root, manager)) as cluster:
            if manager in (*right, "null"):
                assert list(cluster.ledgers.ledgers(None)) == []
                continue
            with pytest.raises(UsageError) as caught:
                _ = cluster.ledgers
            kind = f"zk+{right[0]}" if right else "zk"
            assert f"use {kind}://{zookeeper.connect_string}{root}" in str(caught.value)
            assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("value", "manager"),
    [
        (b"1\nhierarchical:1", HierarchicalLedgerManager),
        (b"1\nflat:1", FlatLedgerManager),
        (f"2\n{META}LegacyHierarchicalLedgerManagerFactory:1".encode(), LegacyHierarchicalLedgerManager),
        (f"2\n{META}LongLongHierarchicalLedgerManagerFactory:1".encode(), LongHierarchicalLedgerManager),
        (f"2\ndlshade.{META}HierarchicalLedgerManagerFactory:1".encode(), HierarchicalLedgerManager),
        (f"2\n{META}HierarchicalLedgerManagerFactory:2".encode(), Unsupported),
        (f"2\n{META}MSLedgerManagerFactory:1".encode(), Unsupported),
        (b"2\norg.example.Other:1", Unsupported),
        (b"2\norg.example.HierarchicalLedgerManagerFactory:1", Unsupported),
        (b"3\nx:1", Unsupported),
        (b"", Corrupt),
        (b"2\n", Corrupt),
        (b"\xff\xfe", Corrupt),
    ],
)
def test_every_layout_opens_its_manager_or_is_refused(zookeeper: Any, value: bytes, manager: type) -> None:
    with open_cluster(zookeeper.metadata_uri(zookeeper.new_root(), "null"), create=True) as cluster:
        cluster.store.put("LAYOUT", value, None)
        if issubclass(manager, Exception):
            with pytest.raises(manager) as caught:
                _ = cluster.ledgers
            assert cluster.store.name in str(caught.value)
        else:
            assert type(cluster.ledgers) is manager
            assert cluster.store.get("LAYOUT")[0] == value  # type: ignore[index]


def test_a_root_without_layout_is_read_as_the_default_and_not_written(zookeeper: Any) -> None:
    with open_cluster(zookeeper.metadata_uri(zookeeper.new_root(), "null"), create=True) as cluster:
        cluster.store.delete("LAYOUT")
        assert type(cluster.ledgers) is HierarchicalLedgerManager
        assert cluster.store.get("LAYOUT") is None


def test_nothing_is_created_below_a_root_that_does_not_exist(zookeeper: Any) -> None:
    root = zookeeper.new_root()
    with open_cluster(zookeeper.metadata_uri(root)) as cluster:
        for call in (
            lambda: cluster.store.put("cookies/bookie-1", b"", NEW),
            lambda: cluster.store.put("cookies/bookie-1", b"", None),
            lambda: cluster.store.sequence("idgen"),
            lambda: cluster.bookies.register("bookie-1", INFO),
            lambda: list(cluster.ledgers.ledgers()),
            cluster.bookies.list,
        ):
            with pytest.raises(NotFound) as caught:
                call()
            assert root in str(caught.value)
        assert cluster.store.get("") is None


@pytest.mark.parametrize("path", ["", "/chroot", "/chroot/ledgers"])
def test_pulsars_uri_finds_its_root(zookeeper_server: Any, path: str) -> None:
    server = zookeeper_server()
    roots = {"": ["/ledgers"], "/chroot": ["/chroot/ledgers"], "/chroot/ledgers": ["/chroot/ledgers/ledgers", path]}
    for root in roots[path]:
        with open_cluster(server.metadata_uri(root), create=True) as cluster:
            instance_id = cluster.instance_id()
        with open_cluster(f"metadata-store:zk:{server.connect_string}{path}") as pulsar:
            assert pulsar.instance_id() == instance_id
            pulsar.store.delete("INSTANCEID")


def test_a_cluster_created_by_pulsars_uri_is_where_pulsar_looks_for_it(zookeeper: Any) -> None:
    """Source: Pulsar's AbstractMetadataDriver: below the chroot, whatever else the path is."""
    path = zookeeper.new_root()
    with open_cluster(f"metadata-store:zk:{zookeeper.connect_string}{path}", create=True) as created:
        instance_id = created.instance_id()
    with open_cluster(zookeeper.metadata_uri(f"{path}/ledgers")) as cluster:
        assert cluster.instance_id() == instance_id


@pytest.mark.parametrize("uri", ["metadata-store:etcd:http://127.0.0.1:2379", "zk+ms://127.0.0.1/ledgers", "other://x"])
def test_unknown_stores_are_unsupported(uri: str) -> None:
    with pytest.raises(Unsupported):
        open_cluster(uri)


def test_absent_server_is_unreachable_and_named() -> None:
    with pytest.raises(Unreachable) as caught:
        open_cluster("zk://127.0.0.1:1,no-such-host.invalid:2/ledgers", timeout_s=5)
    assert "127.0.0.1:1,no-such-host.invalid:2" in str(caught.value)
    with pytest.raises(NotFound):
        open_cluster("sqlite:///nowhere/metadata.db")


@pytest.fixture(params=["sqlite", "zookeeper"])
def uri(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite://{tmp_path / 'metadata.db'}"
    zookeeper = request.getfixturevalue("zookeeper")
    found: str = zookeeper.metadata_uri(zookeeper.new_root())
    return found


def test_many_may_create_the_cluster_at_once(uri: str) -> None:
    made: list[tuple[str, str]] = []

    def make() -> None:
        with open_cluster(uri, create=True) as cluster:
            made.append((cluster.instance_id(), cluster.layout().factory_class))

    threads = [threading.Thread(target=make) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 4
    assert len(set(made)) == 1
    assert made[0][0]


def test_registration_follows_bookies_and_their_state(uri: str) -> None:
    cookie = Cookie("bookie-1", ("/journal",), ("/ledgers",), "instance")
    with open_cluster(uri, create=True) as observer:
        with open_cluster(uri) as bookie:
            assert observer.bookies.list() == []
            assert observer.bookies.get("bookie-1") is None
            bookie.bookies.register("bookie-1", INFO)
            assert observer.bookies.list() == [RegisteredBookie("bookie-1", "rw", INFO)]
            assert observer.bookies.get("bookie-1") == RegisteredBookie("bookie-1", "rw", INFO)
            bookie.bookies.register("bookie-1", INFO, True)
            assert observer.bookies.list() == [RegisteredBookie("bookie-1", "ro", INFO)]
            assert observer.store.children("available") == ["readonly"]
            bookie.bookies.register("bookie-1", INFO, False)
            assert observer.bookies.get("bookie-1") == RegisteredBookie("bookie-1", "rw", INFO)
            assert observer.store.children("available/readonly") == []
            bookie.cookies.write("bookie-1", cookie, NEW)
            bookie.cookies.write("bookie-0", cookie, NEW)
            bookie.bookies.register("10.0.0.2:3181", BookieServiceInfo(), read_only=True)
            assert [(one.bookie_id, one.state) for one in observer.bookies.list()] == [
                ("10.0.0.2:3181", "ro"),
                ("bookie-0", "down"),
                ("bookie-1", "rw"),
            ]
            assert [one.bookie_id for one in observer.bookies.list(include_down=False)] == ["10.0.0.2:3181", "bookie-1"]
            bookie.bookies.unregister("10.0.0.2:3181")
            bookie.bookies.unregister("10.0.0.2:3181")
        assert [(one.bookie_id, one.state) for one in observer.bookies.list()] == [
            ("bookie-0", "down"),
            ("bookie-1", "down"),
        ]
        assert observer.bookies.list(include_down=False) == []
        for name in ("readonly", "a b", "a/b", ""):
            with pytest.raises(UsageError):
                observer.bookies.register(name, INFO)


def test_bookie_changing_state_during_a_listing_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_cluster(f"sqlite://{tmp_path}/metadata.db", create=True) as cluster:
        init_cluster(cluster)
        bookies, children_many = cluster.bookies, cluster.store.children_many

        def then(change: Any) -> None:
            def listed(paths: Any) -> Any:
                found = children_many(paths)
                change()
                return found

            monkeypatch.setattr(cluster.store, "children_many", listed)

        bookies.register("bookie-1", INFO)
        for read_only, state in ((True, "ro"), (False, "rw")):
            then(lambda read_only=read_only: bookies.register("bookie-1", INFO, read_only))
            assert bookies.list(include_down=False) == [RegisteredBookie("bookie-1", state, INFO)]
        then(lambda: bookies.unregister("bookie-1"))
        assert bookies.list(include_down=False) == []


def test_a_bookie_of_the_same_id_is_refused_while_the_first_runs(uri: str) -> None:
    with open_cluster(uri, create=True) as first, open_cluster(uri) as second:
        first.bookies.register("bookie-1", INFO)
        with pytest.raises(AlreadyExists) as caught:
            second.bookies.register("bookie-1", BookieServiceInfo(), wait_s=0.2)
        assert "bookie-1" in str(caught.value)
        assert first.bookies.get("bookie-1") == RegisteredBookie("bookie-1", "rw", INFO)


def test_the_address_is_the_rpc_endpoint_else_the_id() -> None:
    assert RegisteredBookie("bookie-1", "rw", INFO).address == ("10.0.0.1", 3181)
    assert RegisteredBookie("10.0.0.9:3182", "rw", None).address == ("10.0.0.9", 3182)
    assert RegisteredBookie("bookie-1", "down", None).address is None
    assert RegisteredBookie("h:99999", "down", None).address is None
    assert RegisteredBookie("bookie-1", "rw", INFO).ledger_scopes
    assert not RegisteredBookie("bookie-1", "rw", None).ledger_scopes
    assert not RegisteredBookie("b", "rw", BookieServiceInfo((), {"ledgerScopes": "0"})).ledger_scopes


def test_a_damaged_registration_does_not_hide_the_others(uri: str) -> None:
    with open_cluster(uri, create=True) as cluster:
        cluster.store.put("available/10.0.0.2:3181", b"\xff\xff\xff", NEW)
        cluster.bookies.register("bookie-1", INFO)
        found = cluster.bookies.list()
        assert [(one.bookie_id, one.state, one.address) for one in found] == [
            ("10.0.0.2:3181", "rw", ("10.0.0.2", 3181)),
            ("bookie-1", "rw", ("10.0.0.1", 3181)),
        ]


def test_cookies_are_written_by_compare_and_set(uri: str) -> None:
    cookie = Cookie("bookie-1", ("/journal",), ("/l1", "/l2"), "instance")
    with open_cluster(uri, create=True) as cluster:
        cookies = cluster.cookies
        assert cookies.list() == []
        assert cookies.read("bookie-1") is None
        assert cookies.write("bookie-1", cookie, NEW) == 0
        with pytest.raises(AlreadyExists):
            cookies.write("bookie-1", cookie, NEW)
        assert cookies.write("bookie-1", cookie, 0) == 1
        with pytest.raises(MetadataVersionConflict):
            cookies.write("bookie-1", cookie, 0)
        with pytest.raises(MetadataVersionConflict):
            cookies.remove("bookie-1", 0)
        found = cookies.read("bookie-1")
        assert found is not None
        assert (found.value, found.version) == (cookie, 1)
        assert cookies.list() == ["bookie-1"]
        cluster.store.put("cookies/bookie-2", b"no cookie", NEW)
        with pytest.raises(Corrupt) as caught:
            cookies.read("bookie-2")
        assert "bookie-2" in str(caught.value)
        cookies.remove("bookie-1", 1)
        with pytest.raises(NotFound):
            cookies.remove("bookie-1", None)
        with pytest.raises(NotFound):
            cookies.write("bookie-1", cookie, 1)


def test_scopes_of_a_formatted_cluster_stay_hidden(zookeeper: Any) -> None:
    uri = zookeeper.metadata_uri(zookeeper.new_root())
    with open_cluster(uri, create=True) as cluster:
        assert cluster.ledgers.scopes_state() == "absent"
        cluster.ledgers.create(LedgerId(7, 1), METADATA)
        cluster.ledgers.create(LedgerId(0, 1), METADATA)
        assert cluster.ledgers.scopes_state() == "ours"
        assert cluster.store.get("scopes")[0] == cluster.instance_id().encode()  # type: ignore[index]
        cluster.store.put("INSTANCEID", b"another", None)
    with open_cluster(uri) as cluster:
        ledgers = cluster.ledgers
        assert ledgers.scopes_state() == "foreign"
        assert list(ledgers.ledgers(None)) == [LedgerId(0, 1)]
        assert list(ledgers.scopes()) == [0]
        with pytest.raises(Conflict):
            list(ledgers.ledgers(7))
        for call in (
            lambda: ledgers.read(LedgerId(7, 1)),
            lambda: ledgers.write(LedgerId(7, 1), METADATA, 0),
            lambda: ledgers.remove(LedgerId(7, 1)),
        ):
            with pytest.raises(LedgerNotFound) as caught:
                call()
            assert "formatted" in str(caught.value)
        with pytest.raises(Conflict):
            ledgers.create(LedgerId(7, 2), METADATA)
        [(_, answer)] = ledgers.read_many([LedgerId(7, 1)])
        assert isinstance(answer, LedgerNotFound)
        assert cluster.store.get("scopes/0000/000000000007/0000/0000/0000/L0001") is not None


def test_a_cluster_without_instance_id_has_scopes_too(zookeeper: Any) -> None:
    with open_cluster(zookeeper.metadata_uri(zookeeper.new_root()), create=True) as cluster:
        cluster.store.delete("INSTANCEID")
        assert cluster.instance_id() == ""
        cluster.ledgers.create(LedgerId(7, 1), METADATA)
        assert cluster.ledgers.scopes_state() == "ours"
        assert list(cluster.ledgers.ledgers(None)) == [LedgerId(7, 1)]


def test_a_bookie_that_stops_is_seen_by_a_watch(uri: str) -> None:
    with open_cluster(uri, create=True) as observer:
        states: list[dict[str, str]] = []
        observer.bookies.watch(lambda: states.append({one.bookie_id: one.state for one in observer.bookies.list()}))
        with open_cluster(uri) as bookie:
            bookie.bookies.register("bookie-1", INFO)
            eventually(lambda: states and states[-1] == {"bookie-1": "rw"})
            bookie.bookies.register("bookie-1", INFO, True)
            eventually(lambda: states[-1] == {"bookie-1": "ro"})
        eventually(lambda: states[-1] == {})


def test_failed_watches_of_several_nodes_leave_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_cluster(f"sqlite://{tmp_path / 'metadata.db'}", create=True) as cluster:
        watch, watched, cancelled = cluster.store.watch, [], []

        def watch_or_fail(path: str, *arguments: Any, **options: Any) -> Any:
            if len(watched) == count:
                raise Unreachable("The store is away")
            watched.append(path)
            cancel = watch(path, *arguments, **options)
            return lambda: (cancel(), cancelled.append(path))

        monkeypatch.setattr(cluster.store, "watch", watch_or_fail)
        state = AutoRecoveryState(cluster.store)
        marks = partial(state.marks.watch_work, scoped=False)
        for start, watch_count in ((cluster.bookies.watch, 2), (state.settings.watch, 2), (marks, 3)):
            for count in range(watch_count + 1):
                if count < watch_count:
                    with pytest.raises(Unreachable):
                        start(lambda: None)
                else:
                    cancel = start(lambda: None)
                    assert (len(watched), cancelled) == (count, [])
                    cancel()
                assert sorted(cancelled) == sorted(watched)
                assert len(cancelled) == count
                watched.clear()
                cancelled.clear()


def test_cookie_for_a_missing_cluster_is_refused_with_the_reason(tmp_path: Path, zookeeper: Any) -> None:
    with open_cluster(zookeeper.metadata_uri(zookeeper.new_root())) as cluster:
        cookie = Cookie("bookie-1", ("/journal",), ("/ledgers",))
        for expected in (NEW, None):
            with pytest.raises(NotFound, match="No BookKeeper cluster"):
                cluster.cookies.write("bookie-1", cookie, expected)
