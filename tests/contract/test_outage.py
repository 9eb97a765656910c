"""A server that is killed and comes back, sessions that end, owners that die: nothing is lost or done twice."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
from kazoo.client import KazooClient, TransactionRequest
from kazoo.exceptions import ConnectionLoss
from support.waiting import LIMIT_S, eventually

from bkctl.errors import AlreadyExists, BkctlError, LedgerExists, MetadataVersionConflict, TimedOut, Unreachable
from bkctl.formats.entry import DigestType
from bkctl.formats.metadata import BookieEndpoint, BookieServiceInfo, Fragment, LedgerMetadata
from bkctl.ids import LedgerId
from bkctl.metadata.backends.zookeeper.zookeeper_store import ZooKeeperStore
from bkctl.metadata.cluster import Cluster, open_cluster
from bkctl.metadata.store import NEW, Claim, MetadataStore

METADATA = LedgerMetadata(1, 1, 1, DigestType.CRC32C, b"", (Fragment(0, ("127.0.0.1:3181",)),))
INFO = BookieServiceInfo((BookieEndpoint("bookie", 3181, "127.0.0.1", "bookie-rpc"),), {"ledgerScopes": "1"})


def end_session(store: MetadataStore) -> None:
    """End the store's ZooKeeper session from elsewhere, as the server does after its timeout."""
    assert isinstance(store, ZooKeeperStore)
    twin = KazooClient(store.hosts, client_id=store._connection.client.client_id)
    twin.start(timeout=LIMIT_S)
    twin.stop()
    twin.close()


class Workers:
    """Threads that work until `finish`, which raises what any of them raised."""

    def __init__(self, *works: Callable[[threading.Event], None]) -> None:
        self._stop = threading.Event()
        self._problems: list[BaseException] = []
        self._threads = [threading.Thread(target=self._run, args=(work,)) for work in works]
        for thread in self._threads:
            thread.start()

    def _run(self, work: Callable[[threading.Event], None]) -> None:
        try:
            work(self._stop)
        except BaseException as error:  # noqa: BLE001 - raised by finish
            self._problems.append(error)

    def finish(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        if self._problems:
            raise self._problems[0]


@pytest.mark.parametrize("metadata_server", ["zookeeper", "etcd", "hbase"], indirect=True)
def test_acknowledged_writes_survive_a_killed_server_once(metadata_server: Callable[[], Any]) -> None:
    server = metadata_server()
    uri = server.metadata_uri()
    with open_cluster(uri, create=True) as cluster, open_cluster(uri) as other:
        cluster.store.put("counter", b"0", NEW)
        counted = [0, 0]
        unsure: list[MetadataVersionConflict] = []
        created: list[LedgerId] = []
        removed: list[LedgerId] = []

        def count(index: int, opened: Cluster) -> Callable[[threading.Event], None]:
            def work(stop: threading.Event) -> None:
                while not stop.is_set():
                    found = opened.store.get("counter")
                    assert found is not None
                    value = b"%d by %d" % (int(found.value.split()[0]) + 1, index)
                    try:
                        opened.store.put("counter", value, found.version)
                    except MetadataVersionConflict as conflict:
                        if conflict.may_be_applied:
                            unsure.append(conflict)
                        continue
                    counted[index] += 1

            return work

        def create(scope_id: int) -> Callable[[threading.Event], None]:
            def work(stop: threading.Event) -> None:
                number = 0
                while not stop.is_set():
                    number += 1
                    ledger = LedgerId(scope_id, number * 5_000)
                    try:
                        cluster.ledgers.create(ledger, METADATA)
                    except LedgerExists:
                        pytest.fail(f"our own create of {ledger} was taken for somebody else's")
                    created.append(ledger)
                    if number % 2:
                        cluster.ledgers.remove(ledger)
                        removed.append(ledger)

            return work

        workers = Workers(count(0, cluster), count(1, other), create(0), create(7))
        try:
            for _ in range(3):
                before = len(created)
                eventually(lambda before=before: len(created) > before + 20)
                server.kill()
                server.start()
            before = len(created)
            eventually(lambda: len(created) > before + 20)
        finally:
            workers.finish()
        found = cluster.store.get("counter")
        assert found is not None
        assert sum(counted) <= int(found.value.split()[0]) <= sum(counted) + len(unsure)
        if uri.startswith("etcd"):  # It keeps the history that tells.
            assert unsure == []
        assert list(cluster.ledgers.ledgers(None)) == sorted(set(created) - set(removed))


def test_listing_survives_a_killed_server(metadata_server: Callable[[], Any]) -> None:
    server = metadata_server()
    with open_cluster(server.metadata_uri(), create=True) as cluster:
        ids = [LedgerId(scope, number * 10_000) for scope in (0, 7) for number in range(30)]
        for ledger in ids:
            cluster.ledgers.create(ledger, METADATA)
        listing = cluster.ledgers.read_many(cluster.ledgers.ledgers(None))
        listed = [next(listing)]
        server.kill()
        starter = threading.Timer(0.5, server.start)
        starter.start()
        listed += listing
        starter.join()
        assert [ledger for ledger, _ in listed] == ids
        assert all(not isinstance(found, Exception) for _, found in listed)


def test_server_that_stays_down_is_a_timeout(
    metadata_server: Callable[[], Any], capfd: pytest.CaptureFixture[str]
) -> None:
    server = metadata_server()
    cluster = open_cluster(server.metadata_uri(), create=True)
    cluster.ledgers.create(LedgerId(0, 1), METADATA)
    cluster.store._connection.timeout_s = 1.0  # type: ignore[attr-defined]

    def read_many() -> list[Any]:
        return list(cluster.store.get_many(f"node-{number}" for number in range(300)))

    server.kill()
    for call in (
        lambda: cluster.ledgers.read(LedgerId(0, 1)),
        lambda: cluster.ledgers.create(LedgerId(0, 2), METADATA),
        lambda: list(cluster.ledgers.ledgers(None)),
        lambda: list(cluster.ledgers.read_many([LedgerId(0, 1)])),
        lambda: cluster.bookies.list(),
        lambda: cluster.bookies.register("bookie-1", INFO),
        read_many,
        read_many,
    ):
        with pytest.raises(TimedOut) as caught:
            call()
        assert server.connect_string in str(caught.value)
    cluster.close()
    with pytest.raises(Unreachable) as refused:
        open_cluster(server.metadata_uri(), timeout_s=5)
    assert server.connect_string in str(refused.value)
    assert "refused" in str(refused.value)
    assert capfd.readouterr().err == ""


def test_registrations_and_watches_outlive_a_session(zookeeper: Any) -> None:
    uri = zookeeper.metadata_uri(zookeeper.new_root())
    with open_cluster(uri, create=True) as bookie, open_cluster(uri) as observer:
        bookie.bookies.register("bookie-1", INFO)
        bookie.bookies.register("bookie-2", INFO, read_only=True)
        bookie.bookies.register("bookie-3", INFO)
        bookie.bookies.unregister("bookie-3")
        changes: list[list[str]] = []
        cancel = bookie.bookies.watch(lambda: changes.append([one.bookie_id for one in bookie.bookies.list()]))
        for _ in range(2):
            end_session(bookie.store)
            eventually(lambda: {one.bookie_id: one.state for one in observer.bookies.list()}
                       == {"bookie-1": "rw", "bookie-2": "ro"})  # fmt: skip
            eventually(lambda: (found := observer.bookies.get("bookie-1")) is not None and found.info == INFO)
        observer.bookies.register("bookie-4", INFO)
        eventually(lambda: changes and "bookie-4" in changes[-1])
        cancel()
        assert observer.bookies.get("bookie-3") is None


def test_usurped_registration_is_reported_after_a_lost_session(zookeeper: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    uri = zookeeper.metadata_uri(zookeeper.new_root())
    with open_cluster(uri, create=True) as bookie, open_cluster(uri) as other:
        bookie.bookies.register("bookie-1", INFO)
        taken = threading.Event()
        hold = bookie.store._put_ephemeral

        def hold_late(*arguments: Any) -> Any:
            taken.wait(LIMIT_S)
            return hold(*arguments)

        monkeypatch.setattr(bookie.store, "_put_ephemeral", hold_late)
        assert bookie.bookies.usurped_s("bookie-1") == 0
        end_session(bookie.store)
        eventually(lambda: other.bookies.get("bookie-1") is None)
        other.bookies.register("bookie-1", INFO)
        taken.set()
        eventually(lambda: bookie.bookies.usurped_s("bookie-1") > 0)
        other.bookies.unregister("bookie-1")
        eventually(lambda: bookie.bookies.usurped_s("bookie-1") == 0)
        assert other.bookies.get("bookie-1") is not None


def test_claim_ends_with_its_session_and_frees_its_place(zookeeper: Any) -> None:
    uri = zookeeper.metadata_uri(zookeeper.new_root())
    with open_cluster(uri, create=True) as owner, open_cluster(uri) as other:
        claims = [owner.store.claim("locks/one", b"us"), owner.store.claim("locks/two", b"us")]
        vote = owner.store.claim("election/V_", b"us", numbered=True)
        end_session(owner.store)
        eventually(lambda: other.store.children("locks") == [])
        theirs = other.store.claim("locks/one", b"them")
        next_vote = other.store.claim("election/V_", b"them", numbered=True)
        assert next_vote.path > vote.path
        for claim in (*claims, vote):
            assert not claim.is_held()
            claim.release()
        assert theirs.is_held()
        assert other.store.children("election") == [next_vote.path.rpartition("/")[2]]
        assert owner.store.claim("locks/two", b"us").is_held()


def test_transaction_of_claims_with_lost_answer_is_recognised(zookeeper: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    uri = zookeeper.metadata_uri(zookeeper.new_root())
    with open_cluster(uri, create=True) as cluster:
        store: Any = cluster.store
        paths = [f"many/{number}" for number in range(5)]
        versions = [store.put(path, b"0", NEW) for path in paths]
        store.claim("locks/before", b"")
        lost: list[None] = []
        commit = TransactionRequest.commit_async

        def commit_and_lose(transaction: TransactionRequest) -> Any:
            answer = commit(transaction)
            if lost:
                return answer
            answer.get(timeout=LIMIT_S)
            lost.append(None)
            failed = store._connection.client.handler.async_result()
            failed.set_exception(ConnectionLoss())
            return failed

        monkeypatch.setattr(TransactionRequest, "commit_async", commit_and_lose)
        nodes = [(path, b"1", version) for path, version in zip(paths, versions, strict=True)]
        assert store.put_many(nodes) == [1] * 5
        lost.clear()
        claims = store.claim_many([f"locks/{number}" for number in range(5)], b"us")
        assert store.held_many(claims) == [True] * 5
        lost.clear()
        store.release_many(claims)
        assert store.children("locks") == ["before"]
        assert lost == [None]


@pytest.mark.parametrize("count", [1, 5, 300])
def test_node_of_the_next_session_is_not_claimed_by_the_former_one(
    zookeeper: Any, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """The session ends between the answer to the create and the question which node it was; another worker claims."""
    uri = zookeeper.metadata_uri(zookeeper.new_root())
    with open_cluster(uri, create=True) as owner, open_cluster(uri) as other:
        store: Any = owner.store
        store.claim("locks/before", b"us")  # makes the parent, so that the next create is a request of its own
        paths = [f"locks/{number}" for number in range(count)]
        theirs: list[Claim | BkctlError] = []

        def answered_too_late(answer: Any) -> Any:
            answer.get(timeout=LIMIT_S)
            if not theirs:
                end_session(store)
                eventually(lambda: other.store.children("locks") == [])
                theirs.extend(other.store.claim_many(paths, b"them"))
            return answer

        create, commit = store._connection.client.create_async, TransactionRequest.commit_async
        monkeypatch.setattr(
            store._connection.client, "create_async", lambda *a, **k: answered_too_late(create(*a, **k))
        )

        def commit_async(transaction: TransactionRequest) -> Any:
            answer = commit(transaction)
            return answered_too_late(answer) if transaction.client is store._connection.client else answer

        monkeypatch.setattr(TransactionRequest, "commit_async", commit_async)
        ours = [store.claim(paths[0], b"us")] if count == 1 else store.claim_many(paths, b"us")
        claims = [each for each in ours if isinstance(each, Claim)]
        held = [each for each in theirs if isinstance(each, Claim)]
        assert len(held) == count
        assert claims
        assert store.held_many(claims) == [claim.is_held() for claim in claims] == [False] * len(claims)
        store.release_many(claims)
        for claim in claims:
            claim.release()
        assert other.store.held_many(held) == [True] * count


@pytest.mark.parametrize("count", [1, 2])
def test_release_with_lost_answer_leaves_the_next_claim(
    zookeeper: Any, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    uri = zookeeper.metadata_uri(zookeeper.new_root())
    with open_cluster(uri, create=True) as owner, open_cluster(uri) as other:
        store: Any = owner.store
        paths = [f"locks/{number}" for number in range(count)]
        ours = [each for each in store.claim_many(paths, b"us") if isinstance(each, Claim)]
        assert len(ours) == count
        theirs: list[Claim | BkctlError] = []

        def applied_but_lost(answer: Any) -> Any:
            if theirs:
                return answer
            answer.get(timeout=LIMIT_S)
            theirs.extend(other.store.claim_many(paths, b"them"))
            failed = store._connection.client.handler.async_result()
            failed.set_exception(ConnectionLoss())
            return failed

        delete, commit = store._connection.client.delete_async, TransactionRequest.commit_async
        monkeypatch.setattr(store._connection.client, "delete_async", lambda *a, **k: applied_but_lost(delete(*a, **k)))

        def commit_async(transaction: TransactionRequest) -> Any:
            answer = commit(transaction)
            return applied_but_lost(answer) if transaction.client is store._connection.client else answer

        monkeypatch.setattr(TransactionRequest, "commit_async", commit_async)
        if count == 1:
            ours[0].release()
        else:
            store.release_many(ours)
        held = [each for each in theirs if isinstance(each, Claim)]
        assert len(held) == count
        assert other.store.held_many(held) == [True] * count


def test_own_node_is_recognised_across_a_lost_connection(zookeeper: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """kazoo names no session while it has no connection, which may be lost after any answer."""
    uri = zookeeper.metadata_uri(zookeeper.new_root())
    with open_cluster(uri, create=True) as cluster:
        store: Any = cluster.store
        store.ephemeral("mine", b"1")
        monkeypatch.setattr(KazooClient, "client_id", None)
        store.ephemeral("mine", b"2")
        assert store.get("mine").value == b"2"


def test_cancelled_watches_do_not_accumulate(zookeeper: Any) -> None:
    uri = zookeeper.metadata_uri(zookeeper.new_root())
    told: list[int] = []
    with open_cluster(uri, create=True) as cluster:
        store: Any = cluster.store
        store.put("node", b"", NEW)
        for number in range(50):
            cancel = store.watch("node", lambda number=number: told.append(number))
            cancel_children = store.watch("", lambda number=number: told.append(number), children=True)
            if number % 10:
                cancel()
                cancel_children()
        kept = store._connection.client._data_watchers, store._connection.client._child_watchers
        assert [len(callbacks) for by_path in kept for callbacks in by_path.values() if callbacks] == [1, 1]
        store.put("node", b"changed", 0)
        eventually(lambda: sorted(told) == [0, 10, 20, 30, 40])
        store.put("another", b"", NEW)
        eventually(lambda: sorted(told) == [0, 0, 10, 10, 20, 20, 30, 30, 40, 40])


def test_registration_is_restored_after_an_outage(metadata_server: Callable[[], Any]) -> None:
    server = metadata_server()
    uri = server.metadata_uri()
    with (
        open_cluster(uri, create=True) as bookie,
        open_cluster(uri) as observer,
    ):
        bookie.bookies.register("bookie-1", INFO)
        told: list[list[str]] = []
        observer.bookies.watch(lambda: told.append([one.bookie_id for one in observer.bookies.list()]))
        server.kill()
        server.start()
        eventually(lambda: [one.bookie_id for one in observer.bookies.list()] == ["bookie-1"])
        bookie.bookies.register("bookie-2", INFO)
        eventually(lambda: told and told[-1] == ["bookie-1", "bookie-2"])


def test_successor_of_a_dead_bookie_registers_after_the_session(zookeeper: Any) -> None:
    uri = zookeeper.metadata_uri(zookeeper.new_root())
    program = (
        "import sys, time\n"
        "from bkctl.formats.metadata import BookieServiceInfo\n"
        "from bkctl.metadata.cluster import Registration\n"
        "from bkctl.metadata.uri import parse_uri\n"
        "from bkctl.metadata.backends.zookeeper.zookeeper_store import ZooKeeperStore\n"
        "uri = parse_uri(sys.argv[1])\n"
        "store = ZooKeeperStore(uri.connect_string, uri.path, session_timeout_s=4)\n"
        "Registration(store).register('bookie-1', BookieServiceInfo())\n"
        "print('registered', flush=True)\n"
        "time.sleep(600)\n"
    )
    with open_cluster(uri, create=True) as cluster:
        with subprocess.Popen([sys.executable, "-c", program, uri], stdout=subprocess.PIPE) as dead:
            assert dead.stdout is not None
            assert dead.stdout.readline() == b"registered\n"
            with pytest.raises(AlreadyExists):
                cluster.bookies.register("bookie-1", INFO, wait_s=0)
            dead.kill()
        cluster.bookies.register("bookie-1", INFO)
        found = cluster.bookies.get("bookie-1")
        assert found is not None
        assert found.info == INFO


def test_successor_waits_for_a_session_longer_than_its_own(zookeeper: Any) -> None:
    uri = zookeeper.metadata_uri(zookeeper.new_root())
    with open_cluster(uri, create=True) as first, open_cluster(uri, session_timeout_s=1) as second:
        first.bookies.register("bookie-1", BookieServiceInfo())
        end = threading.Timer(1.5, first.close)
        end.start()
        second.bookies.register("bookie-1", INFO)
        end.join()
        # So short a session may end on a busy machine; the registration comes back.
        eventually(lambda: (found := second.bookies.get("bookie-1")) is not None and found.info == INFO)


def test_close_does_not_wait_for_a_server_that_is_down(zookeeper_server: Callable[[], Any]) -> None:
    server = zookeeper_server()
    cluster = open_cluster(server.metadata_uri(), create=True)
    cluster.bookies.register("bookie-1", INFO)
    server.kill()
    ended: list[Exception] = []

    def read() -> None:
        try:
            cluster.bookies.list()
        except Unreachable as error:
            ended.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    eventually(lambda: not cluster.store._connection.connected.is_set())  # type: ignore[attr-defined]
    cluster.close()
    reader.join(timeout=LIMIT_S / 2)
    assert not reader.is_alive()
    assert len(ended) == 1
