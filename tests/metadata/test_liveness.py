"""Live ledgers: only ledgers that the store reports as absent are dead."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bkctl.errors import Conflict, Corrupt, TimedOut, Unreachable
from bkctl.formats.entry import DigestType
from bkctl.formats.metadata import Cookie, Fragment, LedgerMetadata
from bkctl.ids import LedgerId
from bkctl.metadata.backends.sqlite import SqliteStore
from bkctl.metadata.backends.zookeeper.ledger_managers import HierarchicalLedgerManager
from bkctl.metadata.cluster import open_cluster
from bkctl.metadata.ledgers import LedgerManager, QualifiedNameLedgerManager
from bkctl.metadata.liveness import Liveness, check_instance
from bkctl.model import LedgerLiveness

ALIVE, DEAD, UNKNOWN = LedgerLiveness.ALIVE, LedgerLiveness.DEAD, LedgerLiveness.UNKNOWN
METADATA = LedgerMetadata(1, 1, 1, DigestType.CRC32, b"pw", (Fragment(0, ("bookie-1",)),))
SCOPED = LedgerId(7, 1)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SqliteStore]:
    with SqliteStore(str(tmp_path / "metadata.db"), create=True) as opened:
        opened.put("INSTANCEID", b"instance", None)
        yield opened


@pytest.fixture(params=[HierarchicalLedgerManager, QualifiedNameLedgerManager])
def manager(request: pytest.FixtureRequest, store: SqliteStore) -> LedgerManager:
    made = request.param(store)
    assert isinstance(made, LedgerManager)
    return made


def test_ledgers_with_metadata_are_alive_and_others_dead(manager: LedgerManager) -> None:
    alive, dead = LedgerId(0, 5), LedgerId(0, 6)
    manager.create(alive, METADATA)
    manager.create(SCOPED, METADATA)
    liveness = Liveness(manager)
    gone = LedgerId(7, 2)
    assert liveness.states([alive, dead, SCOPED, gone]) == {alive: ALIVE, dead: DEAD, SCOPED: ALIVE, gone: DEAD}
    assert liveness.problems == []
    assert liveness.states([]) == {}


def test_liveness_is_cached_and_finds_younger_ledgers(manager: LedgerManager) -> None:
    liveness = Liveness(manager)
    one, other = LedgerId(0, 5), LedgerId(0, 6)
    manager.create(one, METADATA)
    assert liveness.states([one]) == {one: ALIVE}
    manager.remove(one)
    manager.create(other, METADATA)
    assert liveness.states([one, other]) == {one: ALIVE, other: ALIVE}


def test_damaged_metadata_is_neither_dead_nor_alive(manager: LedgerManager) -> None:
    ledger = LedgerId(0, 5)
    manager.create(ledger, METADATA)
    manager.store.put(manager.path(ledger), b"BookieMetadataFormatVersion\t3\nrubbish", None)
    liveness = Liveness(manager)
    assert liveness.states([ledger]) == {ledger: UNKNOWN}
    (problem,) = liveness.problems
    assert isinstance(problem, Corrupt)
    assert "ledger 5" in str(problem)


def test_impossible_id_is_not_dead(manager: LedgerManager) -> None:
    impossible = LedgerId(0, 1 << 63)
    assert Liveness(manager).states([impossible]) == {impossible: UNKNOWN}


def test_missing_scopes_tree_leaves_scoped_ledgers_unknown(store: SqliteStore) -> None:
    liveness = Liveness(HierarchicalLedgerManager(store))
    plain = LedgerId(0, 5)
    assert liveness.states([SCOPED, plain]) == {SCOPED: UNKNOWN, plain: DEAD}
    (problem,) = liveness.problems
    assert isinstance(problem, Conflict)
    assert "the scopes tree is missing" in str(problem)


def test_foreign_scopes_tree_leaves_scoped_ledgers_unknown(store: SqliteStore) -> None:
    manager = HierarchicalLedgerManager(store)
    manager.create(SCOPED, METADATA)
    store.put("scopes", b"another", None)
    liveness = Liveness(HierarchicalLedgerManager(store))
    gone = LedgerId(7, 2)
    assert liveness.states([SCOPED, gone]) == {SCOPED: UNKNOWN, gone: UNKNOWN}
    (problem,) = liveness.problems
    assert "formatted" in str(problem)


def test_scopes_tree_vanishing_during_the_look_up_proves_nothing(store: SqliteStore) -> None:
    class Vanishing(HierarchicalLedgerManager):
        looked = False

        def read_many(self, ids):
            yield from super().read_many(ids)
            self.looked = any(ledger.is_scoped for ledger in ids)

        def scopes_state(self):
            return "absent" if self.looked else super().scopes_state()

    HierarchicalLedgerManager(store).create(SCOPED, METADATA)
    gone = LedgerId(7, 2)
    assert Liveness(Vanishing(store)).states([gone]) == {gone: UNKNOWN}


def test_unreachable_store_leaves_ledgers_unknown(store: SqliteStore) -> None:
    class Dropping(HierarchicalLedgerManager):
        calls = 0

        def read_many(self, ids):
            for ledger, answer in super().read_many(ids):
                Dropping.calls += 1
                if Dropping.calls == 2:
                    raise TimedOut("No answer within 30 s")
                yield ledger, answer

    one, other = LedgerId(0, 5), LedgerId(0, 6)
    liveness = Liveness(Dropping(store))
    assert liveness.states([one, other]) == {one: UNKNOWN, other: UNKNOWN}
    assert liveness.states([LedgerId(0, 7)]) == {LedgerId(0, 7): UNKNOWN}
    assert Dropping.calls == 2
    (problem,) = liveness.problems
    assert isinstance(problem, Unreachable)


def test_the_logs_of_another_cluster_are_refused(tmp_path: Path) -> None:
    current = tmp_path / "current"
    (current / "scoped").mkdir(parents=True)
    logs = [current / "0.log", current / "scoped" / "0.log"]
    with open_cluster(f"sqlite://{tmp_path}/metadata.db", create=True) as cluster:
        check_instance(cluster, logs)
        (current / "VERSION").write_bytes(b"rubbish")
        check_instance(cluster, logs)
        cookie = Cookie("bookie:1", ("/j",), ("/l",), cluster.instance_id())
        (current / "VERSION").write_bytes(cookie.serialize())
        check_instance(cluster, logs)
        (current / "VERSION").write_bytes(Cookie("bookie:1", ("/j",), ("/l",), "another").serialize())
        for log in logs:
            with pytest.raises(Conflict, match="VERSION belongs to the cluster another"):
                check_instance(cluster, [log])
