"""Contents of bookies by the metadata, and ledgers lost, unwritable or under their quorum if bookies stop."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bkctl.errors import BkctlError, LedgerNotFound, NotFound, UsageError
from bkctl.formats.entry import DigestType
from bkctl.formats.metadata import BookieServiceInfo, Cookie, Fragment, LedgerMetadata, LedgerState
from bkctl.ids import LedgerId
from bkctl.metadata.cluster import Cluster, open_cluster
from bkctl.metadata.store import NEW
from bkctl.metadata.underreplication import LedgerMarks
from bkctl.replication.holdings import (
    HeldLedger,
    Replacements,
    Risk,
    StopProblem,
    StopSets,
    ledgers_on,
    ok_to_stop,
)

SCOPES = BookieServiceInfo((), {"ledgerScopes": "1"})
PLAIN = BookieServiceInfo(())


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """Writable bookies a to e, of which e knows no scopes; f is read-only, g is down."""
    with open_cluster(f"sqlite://{tmp_path / 'metadata.db'}", create=True) as opened:
        for name in "abcd":
            opened.bookies.register(name, SCOPES)
        opened.bookies.register("e", PLAIN)
        opened.bookies.register("f", SCOPES, read_only=True)
        opened.cookies.write("g", Cookie("g", ("/j",), ("/l",), "i"), NEW)
        yield opened


def ledger(
    *fragments: tuple[int, str], last: int | None = None, write_quorum: int = 2, ack_quorum: int = 2, length: int = 0
) -> LedgerMetadata:
    """Metadata; each fragment's ensemble is one letter a bookie; closed with `last`, else open."""
    return LedgerMetadata(
        ensemble_size=len(fragments[0][1]), write_quorum_size=write_quorum, ack_quorum_size=ack_quorum,
        digest_type=DigestType.CRC32C, password=b"",
        ensembles=tuple(Fragment(first, tuple(names)) for first, names in fragments),
        state=LedgerState.OPEN if last is None else LedgerState.CLOSED,
        last_entry_id=-1 if last is None else last, length=length,
    )  # fmt: skip


def held(cluster: Cluster, *bookies: str) -> dict[LedgerId, HeldLedger]:
    found = dict(ledgers_on(cluster, bookies))
    return {each: value for each, value in found.items() if isinstance(value, HeldLedger)}


def risks(cluster: Cluster, *bookies: str, **options: int) -> dict[tuple[LedgerId, Risk], StopProblem]:
    return {(each.ledger, each.risk): each for each in ok_to_stop(cluster, bookies, **options)}


def test_ledgers_on_finds_every_scope_and_fragment(cluster: Cluster) -> None:
    for scope in (0, 7, (1 << 64) - 1):
        cluster.ledgers.create(LedgerId(scope, 1), ledger((0, "abc"), (10, "bcd"), last=29, length=3000))
    cluster.ledgers.create(LedgerId(0, 2), ledger((0, "bcd")))
    found = held(cluster, "a")
    assert list(found) == [LedgerId(0, 1), LedgerId(7, 1), LedgerId((1 << 64) - 1, 1)]
    one = found[LedgerId(7, 1)]
    [fragment] = one.fragments
    # 0, 2, 3, 5, 6, 8, 9: two of three entries.
    assert (fragment.first_entry_id, fragment.last_entry_id, fragment.bookies, fragment.held_count) == (0, 9, ("a",), 7)
    assert (one.holds_entries, one.grows, one.entry_count, one.size_bytes) == (True, False, 7, 7 * (100 + 41 + 4))
    two = held(cluster, "b", "d")[LedgerId(0, 1)]
    assert [(each.bookies, each.held_count) for each in two.fragments] == [(("b",), 7), (("b", "d"), 27)]


def test_open_fragment_grows_and_empty_one_holds_nothing(cluster: Cluster) -> None:
    cluster.ledgers.create(LedgerId(0, 1), ledger((0, "abc"), (5, "abd")))
    cluster.ledgers.create(LedgerId(0, 2), ledger((0, "abc"), last=-1))
    cluster.ledgers.create(LedgerId(0, 3), ledger((0, "abc"), last=0, write_quorum=1, ack_quorum=1))
    cluster.ledgers.create(LedgerId(0, 4), ledger((0, "abc"), (7, "bcd"), last=6))
    on_a, on_b = held(cluster, "a"), held(cluster, "b")
    assert [(each.grows, each.holds_entries) for each in on_a.values()] == [
        (True, True), (False, False), (False, True), (False, True),
    ]  # fmt: skip
    assert not on_a[LedgerId(0, 1)].fragments[1].closed
    assert not on_b[LedgerId(0, 3)].holds_entries
    assert on_b[LedgerId(0, 4)].fragments[1].last_entry_id == 6
    assert not held(cluster, "d")[LedgerId(0, 4)].holds_entries


def test_ledgers_on_reads_named_ledgers_only(cluster: Cluster) -> None:
    for number in (1, 2):
        cluster.ledgers.create(LedgerId(7, number), ledger((0, "abc"), last=5))
    found = dict(ledgers_on(cluster, ["a"], [LedgerId(7, 2), LedgerId(7, 3)]))
    assert isinstance(found[LedgerId(7, 2)], HeldLedger)
    assert isinstance(found[LedgerId(7, 3)], LedgerNotFound)
    assert LedgerId(7, 1) not in found


def test_ledgers_on_yields_error_of_unreadable_metadata(cluster: Cluster) -> None:
    damaged = LedgerId(0, 5)
    cluster.ledgers.create(damaged, ledger((0, "abc"), last=5))
    value = b"BookieMetadataFormatVersion\t2\nno sense, but bookie-9 is in it"
    cluster.store.put(cluster.ledgers.path(damaged), value, None)
    assert isinstance(dict(ledgers_on(cluster, ["bookie-9"]))[damaged], BkctlError)
    assert dict(ledgers_on(cluster, ["bookie-8"])) == {}
    assert (damaged, Risk.UNREADABLE) in risks(cluster, "bookie-9")


def test_invalid_bookie_ids_are_refused(cluster: Cluster) -> None:
    with pytest.raises(UsageError):
        list(ledgers_on(cluster, ["a b"]))
    with pytest.raises(UsageError):
        list(ok_to_stop(cluster, ["a"], replica_count_min=0))


def test_ledgers_on_raises_without_cluster(tmp_path: Path) -> None:
    with open_cluster(f"sqlite://{tmp_path / 'empty.db'}", create_store=True) as empty, pytest.raises(NotFound):
        list(ok_to_stop(empty, ["a"]))


def test_candidates_are_writable_of_the_scope_and_outside_the_ensemble(cluster: Cluster) -> None:
    bookies = cluster.bookies.list()
    there = Replacements(bookies, {"a"})
    assert there.candidates(("a", "b", "c"), scoped=False) == ("d", "e")
    assert there.candidates(("a", "b", "c"), scoped=True) == ("d",)
    cluster.ledgers.create(LedgerId(7, 1), ledger((0, "abcd"), last=5))
    cluster.ledgers.create(LedgerId(0, 1), ledger((0, "abcd"), last=5))
    cluster.ledgers.create(LedgerId(7, 2), ledger((0, "abcd"), last=-1))
    on_a = held(cluster, "a")
    assert there.problem(on_a[LedgerId(0, 1)]) is None
    assert "with ledger scopes" in str(there.problem(on_a[LedgerId(7, 1)]))
    assert there.problem(on_a[LedgerId(7, 2)]) is None


def test_stopping_last_replicas_is_a_loss(cluster: Cluster) -> None:
    cluster.ledgers.create(LedgerId(7, 1), ledger((0, "abc"), (10, "bcd"), last=29))
    cluster.ledgers.create(LedgerId(0, 2), ledger((0, "a"), last=4, write_quorum=1, ack_quorum=1))
    cluster.ledgers.create(LedgerId(0, 3), ledger((0, "ag"), last=4))
    assert risks(cluster, "d", replica_count_min=1) == {}
    alone = risks(cluster, "a", replica_count_min=1)
    assert set(alone) == {(LedgerId(0, 2), Risk.LOST), (LedgerId(0, 3), Risk.LOST)}
    assert alone[LedgerId(0, 2), Risk.LOST][4:9] == (0, 4, 5, 0, 1)
    assert alone[LedgerId(0, 3), Risk.LOST].message == "No replica would be left: g lacks them, or is down"
    both = risks(cluster, "b", "c", replica_count_min=1)
    # Entries 1, 4, 7 stand on b and c of the first fragment, 12, 15, … 27 of the second.
    problem = both[LedgerId(7, 1), Risk.LOST]
    assert (problem.first_entry_id, problem.last_entry_id, problem.entry_count) == (1, 27, 9)
    assert problem.bookies == ("b", "c")


def test_fewer_replicas_than_required_are_a_risk(cluster: Cluster) -> None:
    cluster.ledgers.create(LedgerId(7, 1), ledger((0, "abc"), last=8, write_quorum=3, ack_quorum=2))
    cluster.ledgers.create(LedgerId(0, 2), ledger((0, "abc"), last=8))
    assert set(risks(cluster, "a")) == {(LedgerId(0, 2), Risk.UNDER_QUORUM)}
    problem = risks(cluster, "a")[LedgerId(0, 2), Risk.UNDER_QUORUM]
    assert (problem.entry_count, problem.replica_count, problem.replica_count_min) == (6, 1, 2)
    assert risks(cluster, "a", replica_count_min=1) == {}
    assert set(risks(cluster, "a", "b")) == {
        (LedgerId(0, 2), Risk.LOST), (LedgerId(0, 2), Risk.UNDER_QUORUM), (LedgerId(7, 1), Risk.UNDER_QUORUM),
    }  # fmt: skip
    for wanted in (3, 9):
        found = risks(cluster, "a", replica_count_min=wanted)
        assert set(found) == {(LedgerId(0, 2), Risk.UNDER_QUORUM), (LedgerId(7, 1), Risk.UNDER_QUORUM)}
        assert {each.replica_count_min for each in found.values()} == {wanted}


def test_down_marked_and_unscoped_replicas_do_not_count(cluster: Cluster) -> None:
    cluster.ledgers.create(LedgerId(0, 1), ledger((0, "abc"), last=8, write_quorum=3, ack_quorum=1))
    cluster.ledgers.create(LedgerId(7, 2), ledger((0, "aeg"), last=8, write_quorum=3, ack_quorum=1))
    cluster.ledgers.create(LedgerId(0, 3), ledger((0, "aeg"), last=8, write_quorum=3, ack_quorum=1))
    cluster.ledgers.create(LedgerId(0, 4), ledger((0, "afg"), last=8, write_quorum=3, ack_quorum=1))
    assert set(risks(cluster, "a")) == {(LedgerId(7, 2), Risk.LOST)}
    marks = LedgerMarks(cluster.store)
    marks.add(LedgerId(0, 1), ["b", "c"])
    assert set(risks(cluster, "a")) == {(LedgerId(0, 1), Risk.LOST), (LedgerId(7, 2), Risk.LOST)}


def test_silent_bookies_count_as_down(cluster: Cluster) -> None:
    cluster.ledgers.create(LedgerId(0, 1), ledger((0, "ab"), last=5))
    cluster.ledgers.create(LedgerId(0, 2), ledger((0, "cd")))
    for silent, found in (((), []), (("b",), [Risk.LOST]), (("x",), [])):
        assert [each.risk for each in ok_to_stop(cluster, ["a"], replica_count_min=1, silent=silent)] == found
        assert StopSets(cluster, replica_count_min=1, silent=silent).allows(["a"]) == (not found)
    # A silent bookie neither takes over from others, nor is it to be stopped.
    risks_of_c = [each.risk for each in ok_to_stop(cluster, ["c"], replica_count_min=1, silent="abe")]
    assert Risk.UNWRITABLE in risks_of_c
    assert "b" not in StopSets(cluster, replica_count_min=1, silent=["b"]).largest([], {})


def test_writer_without_other_bookies_is_unwritable(cluster: Cluster) -> None:
    cluster.ledgers.create(LedgerId(7, 1), ledger((0, "abcd"), ack_quorum=2))
    cluster.ledgers.create(LedgerId(0, 2), ledger((0, "abcd"), ack_quorum=2))
    cluster.ledgers.create(LedgerId(0, 3), ledger((0, "bcdg"), ack_quorum=2))
    cluster.ledgers.create(LedgerId(0, 4), ledger((0, "ab"), (5, "cd"), ack_quorum=2))
    assert {each for each in risks(cluster, "a") if each[1] is not Risk.UNDER_QUORUM} == {
        (LedgerId(7, 1), Risk.UNWRITABLE)
    }
    assert "with ledger scopes" in risks(cluster, "a")[LedgerId(7, 1), Risk.UNWRITABLE].message
    # Two bookies have to be replaced then, for g is down already; a and e are there.
    assert (LedgerId(0, 3), Risk.UNWRITABLE) not in risks(cluster, "b")
    cluster.bookies.unregister("e")
    assert (LedgerId(0, 3), Risk.UNWRITABLE) in risks(cluster, "b")
    assert (LedgerId(0, 2), Risk.UNWRITABLE) in risks(cluster, "a")


def test_open_ledger_risk_has_open_end(cluster: Cluster) -> None:
    cluster.ledgers.create(LedgerId(0, 1), ledger((0, "abc")))
    problem = risks(cluster, "a")[LedgerId(0, 1), Risk.UNDER_QUORUM]
    assert (problem.first_entry_id, problem.last_entry_id, problem.entry_count) == (0, None, None)
    assert problem.state is LedgerState.OPEN


@pytest.mark.parametrize("scope", [0, 7])
@pytest.mark.parametrize("state", [LedgerState.OPEN, LedgerState.IN_RECOVERY])
@pytest.mark.parametrize(("write_quorum", "ack_quorum", "may_stop"), [(2, 1, 0), (3, 1, 0), (3, 2, 1), (3, 3, 2)])
def test_unclosed_ledger_needs_answers_to_be_recovered(
    cluster: Cluster, scope: int, state: LedgerState, write_quorum: int, ack_quorum: int, may_stop: int
) -> None:
    names = "abcd"[:write_quorum]
    grows = ledger((0, names), write_quorum=write_quorum, ack_quorum=ack_quorum)
    for name in ("x", "y", "z"):
        cluster.bookies.register(name, SCOPES)
    cluster.ledgers.create(LedgerId(scope, 1), grows._replace(state=state))
    for count in range(1, write_quorum + 1):
        stopping = names[:count]
        found = risks(cluster, *stopping, replica_count_min=1)
        assert ((LedgerId(scope, 1), Risk.UNRECOVERABLE) in found) == (count > may_stop)
        assert StopSets(cluster, replica_count_min=1).allows(stopping) == (count <= may_stop)
