"""Our metadata beside Apache's on one ZooKeeper root: each sees what the other wrote, and never our scopes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import servers

from bkctl.errors import LedgerExists, LedgerNotFound, MetadataVersionConflict
from bkctl.formats.entry import DigestType
from bkctl.formats.metadata import BookieEndpoint, BookieServiceInfo, Fragment, LedgerMetadata, LedgerState
from bkctl.ids import I64_MAX, LedgerId
from bkctl.metadata.cluster import Cluster, open_cluster

pytestmark = pytest.mark.java

METADATA = LedgerMetadata(
    2, 2, 1, DigestType.CRC32C, b"secret", (Fragment(0, ("127.0.0.1:3181", "bookie-2")),), custom_metadata={"k": b"v"}
)
SCOPED = [LedgerId(7, 1), LedgerId(7, 1 << 40), LedgerId((1 << 64) - 1, (1 << 64) - 1)]
EDGES = [0, 1, 9999, 10000, (1 << 31) - 2, (1 << 31) - 1, 1 << 40, I64_MAX]
LAYOUTS = ["hierarchical", "longhierarchical", "flat"]

Ask = Callable[..., dict[str, Any]]


@pytest.fixture(params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def uri(zookeeper: Any, layout: str) -> str:
    """A root that we made, and Apache's classes work on."""
    found: str = zookeeper.metadata_uri(f"{zookeeper.new_root()}/ledgers", layout)
    open_cluster(found, create=True).close()
    return found


@pytest.fixture
def cluster(uri: str) -> Iterator[Cluster]:
    with open_cluster(uri) as opened:
        yield opened


@pytest.fixture
def apache(java: Any, uri: str) -> Iterator[Ask]:
    """Apache's metadata classes on the same root: `apache("read", 5)`."""
    with servers.conversation(java, "LedgerMetadataStore", uri) as ask:
        yield ask


def test_apache_and_bkctl_read_each_others_ledgers_and_scopes_stay_hidden(
    cluster: Cluster, apache: Ask, java: Any, uri: str, tmp_path: Path
) -> None:
    layout = cluster.store.get("LAYOUT")
    for index, ledger_id in enumerate(EDGES):
        if index % 2:
            cluster.ledgers.create(LedgerId(0, ledger_id), METADATA)
            with pytest.raises(LedgerExists):
                cluster.ledgers.create(LedgerId(0, ledger_id), METADATA)
            assert apache("create", ledger_id) == {"error": -20}
        else:
            assert apache("create", ledger_id)["version"] == 0
            with pytest.raises(LedgerExists):
                cluster.ledgers.create(LedgerId(0, ledger_id), METADATA)
    for ledger in SCOPED:
        cluster.ledgers.create(ledger, METADATA)

    names = [str(ledger_id) for ledger_id in EDGES]
    assert [str(ledger) for ledger in cluster.ledgers.ledgers()] == names
    assert sorted(apache("list")["ledgerIds"], key=int) == names
    conf = servers.shell_conf(tmp_path / "shell.conf", uri)
    shown = java.shell(conf, "listledgers").stdout
    assert sorted((int(word) for word in _ledger_ids(shown)), key=int) == EDGES
    assert list(cluster.ledgers.ledgers(None)) == [*(LedgerId(0, ledger_id) for ledger_id in EDGES), *SCOPED]

    for ledger_id in EDGES:
        ours, theirs = cluster.ledgers.read(LedgerId(0, ledger_id)), apache("read", ledger_id)
        assert (ours.version, ours.metadata.state.name, ours.ctime_ms) == (
            theirs["version"], theirs["state"], theirs["ctime"],
        )  # fmt: skip
        assert list(ours.metadata.last_fragment.bookies) == theirs["bookies"]

    # A compare-and-set of either is seen by the other.
    assert apache("close", EDGES[1], 0)["version"] == 1
    with pytest.raises(MetadataVersionConflict):
        cluster.ledgers.write(LedgerId(0, EDGES[1]), METADATA, 0)
    found = cluster.ledgers.read(LedgerId(0, EDGES[1]))
    assert (found.metadata.state, found.metadata.last_entry_id, found.metadata.length) == (LedgerState.CLOSED, 7, 70)
    assert found.metadata.custom_metadata == {"k": b"v"}
    assert cluster.ledgers.write(LedgerId(0, EDGES[0]), METADATA, 0) == 1
    assert apache("close", EDGES[0], 0) == {"error": -17}

    apache("remove", EDGES[3])
    with pytest.raises(LedgerNotFound):
        cluster.ledgers.read(LedgerId(0, EDGES[3]))
    cluster.ledgers.remove(LedgerId(0, EDGES[4]))
    assert apache("read", EDGES[4])["error"] == -25
    left = [str(ledger_id) for ledger_id in EDGES if ledger_id not in (EDGES[3], EDGES[4])]
    assert sorted(apache("list")["ledgerIds"], key=int) == [str(one) for one in cluster.ledgers.ledgers()] == left
    assert list(cluster.ledgers.scopes()) == [0, 7, (1 << 64) - 1]
    assert cluster.store.get("LAYOUT") == layout


def test_ids_generated_in_turn_by_apache_and_bkctl_never_repeat(cluster: Cluster, apache: Ask) -> None:
    taken: list[int] = []
    for _ in range(5):
        taken.append(int(apache("id")["ledgerId"]))
        taken.append(cluster.ledgers.new_ledger_id().ledger_id)
    assert len(set(taken)) == 10
    assert taken == sorted(taken)


@pytest.mark.parametrize("long", [False, True], ids=["31 bits", "63 bits"])
def test_ids_generated_concurrently_by_apache_and_bkctl_never_repeat(
    cluster: Cluster, apache: Ask, layout: str, long: bool
) -> None:
    if long and layout != "flat":
        for number in (1, 2, 3):  # the older directories are cleaned up while ids are taken
            cluster.store.put(f"idgen-long/HOB-{number:010d}", b"", -1)
    theirs: list[int] = []
    ours: list[int] = []
    workers = [threading.Thread(target=lambda: theirs.extend(int(apache("id")["ledgerId"]) for _ in range(40)))]
    workers += [
        threading.Thread(target=lambda: ours.extend(cluster.ledgers.new_ledger_id().ledger_id for _ in range(20)))
        for _ in range(2)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    taken = sorted(theirs + ours)
    # In a flat layout the sequence also counts the root's other children.
    first = taken[0] if layout == "flat" else 3 << 32 if long else 0
    assert taken == list(range(first, first + 80))


def test_apache_and_bkctl_continue_with_63_bit_ids(cluster: Cluster, apache: Ask, layout: str) -> None:
    if layout == "flat":
        assert cluster.ledgers.new_ledger_id().ledger_id < 1 << 31
        return
    cluster.store.put("idgen-long/HOB-0000000003", b"", -1)
    taken = []
    for _ in range(3):
        taken.append(cluster.ledgers.new_ledger_id().ledger_id)
        taken.append(int(apache("id")["ledgerId"]))
    assert taken == [(3 << 32) + number for number in range(6)]


def test_apache_sees_registrations_of_bkctl(cluster: Cluster, apache: Ask, layout: str) -> None:
    info = BookieServiceInfo((BookieEndpoint("bookie", 3181, "10.0.0.1", "bookie-rpc"),), {"ledgerScopes": "1"})
    cluster.bookies.register("bookie-1", info)
    cluster.bookies.register("127.0.0.1:3182", info)
    cluster.bookies.register("bookie-2", info, read_only=True)
    answer = apache("bookies")
    assert (answer["rw"], answer["ro"]) == (["127.0.0.1:3182", "bookie-1"], ["bookie-2"])
    assert answer["endpoints"]["bookie-1"] == ["bookie-rpc://10.0.0.1:3181"]
    cluster.bookies.register("bookie-1", info, True)
    cluster.bookies.register("bookie-2", info, False)
    answer = apache("bookies")
    assert (answer["rw"], answer["ro"]) == (["127.0.0.1:3182", "bookie-2"], ["bookie-1"])


def test_bkctl_works_on_a_root_created_by_apache(zookeeper: Any, java: Any, layout: str, tmp_path: Path) -> None:
    uri = zookeeper.metadata_uri(zookeeper.new_root(), layout)
    conf = servers.shell_conf(tmp_path / "init.conf", uri)
    java.shell(conf, "initnewcluster", check=True)
    with open_cluster(uri) as cluster:
        before = [cluster.store.get(path) for path in ("LAYOUT", "INSTANCEID")]
        for ledger in (LedgerId(0, 5), LedgerId(7, 5)):
            cluster.ledgers.create(ledger, METADATA)
        assert list(cluster.ledgers.ledgers(None)) == [LedgerId(0, 5), LedgerId(7, 5)]
        cluster.ledgers.remove(LedgerId(0, 5))
        assert cluster.ledgers.new_ledger_id().scope_id == 0
    with open_cluster(uri, create=True) as cluster:
        assert [cluster.store.get(path) for path in ("LAYOUT", "INSTANCEID")] == before
        assert cluster.instance_id() == before[1].value.decode()  # type: ignore[union-attr]


def test_apaches_format_leaves_an_orphaned_scopes_tree(
    cluster: Cluster, java: Any, uri: str, layout: str, tmp_path: Path
) -> None:
    cluster.ledgers.create(LedgerId(7, 1), METADATA)
    cluster.ledgers.create(LedgerId(0, 1), METADATA)
    conf = servers.shell_conf(tmp_path / "shell.conf", uri)
    java.shell(conf, "metaformat", "-nonInteractive", "-force", check=True)
    # Apache's format writes its default layout, whatever the URI says.
    with open_cluster(uri.replace(f"zk+{layout}:", "zk:")) as formatted:
        assert formatted.ledgers.scopes_state() == "foreign"
        assert list(formatted.ledgers.ledgers(None)) == []
        with pytest.raises(LedgerNotFound):
            formatted.ledgers.read(LedgerId(7, 1))
        assert formatted.store.get(cluster.ledgers.path(LedgerId(7, 1))) is not None


def test_bookies_of_apache_are_listed_with_their_endpoints(apache_cluster: Any) -> None:
    with open_cluster(apache_cluster.metadata_uri) as cluster:
        found = {one.bookie_id: one for one in cluster.bookies.list()}
        assert sorted(found) == sorted(bookie.bookie_id for bookie in apache_cluster.bookies)
        for one in found.values():
            assert (one.state, one.ledger_scopes) == ("rw", False)
            assert one.address is not None
            cookie = cluster.cookies.read(one.bookie_id)
            assert cookie is not None
            assert (cookie.value.bookie_id, cookie.value.instance_id) == (one.bookie_id, cluster.instance_id())
        apache_cluster.bookies[0].stop()
        name = apache_cluster.bookies[0].bookie_id
        assert cluster.bookies.get(name).state == "down"  # type: ignore[union-attr]


def _ledger_ids(text: str) -> list[str]:
    """Ids in the answer of `listledgers`: the last word of `ledgerID: 5` and of its later forms."""
    found = []
    for line in text.splitlines():
        word = line.replace("{", " ").replace("}", " ").replace("=", " ").replace(",", " ").split()
        if word and "ledger" in line.lower() and any(each.isdigit() for each in word):
            found.append(next(each for each in word if each.isdigit()))
    return found
