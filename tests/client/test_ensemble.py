"""Write sets, coverage, ensemble changes and the compare-and-set loop, without any bookie."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bkctl.client.ensemble import (
    RoundRobinDistributionSchedule,
    update_metadata,
    with_fragment,
)
from bkctl.errors import MetadataVersionConflict
from bkctl.formats.entry import DigestType
from bkctl.formats.metadata import BookieServiceInfo, Fragment, LedgerMetadata, LedgerState
from bkctl.ids import LedgerId
from bkctl.metadata.cluster import RegisteredBookie
from bkctl.metadata.ledgers import VersionedMetadata


def bookies(count, *, plain=(), read_only=()):
    def info(i):
        return BookieServiceInfo((), {} if i in plain else {"ledgerScopes": "1"})

    return [RegisteredBookie(f"b{i}", "ro" if i in read_only else "rw", info(i)) for i in range(count)]


def metadata_of(*fragments, **options):
    size = len(fragments[0][1])
    ensembles = tuple(Fragment(*each) for each in fragments)
    return LedgerMetadata(size, size, size, DigestType.CRC32C, b"", ensembles, **options)


SIZES = st.integers(1, 7).flatmap(
    lambda e: st.integers(1, e).flatmap(lambda w: st.integers(1, w).map(lambda a: (e, w, a)))
)


@given(SIZES, st.integers(0, 2**62))
def test_a_write_set_is_the_entry_id_modulo_the_ensemble(sizes, entry_id):
    ensemble, write_quorum, _ = sizes
    found = RoundRobinDistributionSchedule(*sizes).write_set(entry_id)
    assert found == tuple((entry_id + w) % ensemble for w in range(write_quorum))


@given(SIZES, st.data())
def test_covered_means_no_ack_quorum_is_among_the_silent(sizes, data):
    ensemble, write_quorum, ack_quorum = sizes
    answered = data.draw(st.sets(st.integers(0, ensemble - 1)))
    schedule = RoundRobinDistributionSchedule(*sizes)
    possible = any(
        not set(quorum) & answered
        for entry_id in range(ensemble)
        for quorum in itertools.combinations(schedule.write_set(entry_id), ack_quorum)
    )
    assert schedule.covered(answered) is not possible
    assert schedule.missing_count_for_recovery == write_quorum - ack_quorum + 1


def test_an_ack_quorum_of_0_counts_as_1():
    schedule = RoundRobinDistributionSchedule(3, 2, 0)
    assert schedule.covered({0, 1, 2})
    assert not schedule.covered({0, 1})
    assert schedule.missing_count_for_recovery == 2


def test_a_fragment_is_replaced_where_it_starts_and_added_behind():
    metadata = metadata_of((0, ("b0", "b1")), (5, ("b0", "b2")))
    assert with_fragment(metadata, 5, ("b3", "b2")).ensembles == (
        Fragment(0, ("b0", "b1")), Fragment(5, ("b3", "b2"))
    )  # fmt: skip
    assert with_fragment(metadata, 9, ("b3", "b2")).ensembles[1:] == (
        Fragment(5, ("b0", "b2")), Fragment(9, ("b3", "b2"))
    )  # fmt: skip
    with pytest.raises(MetadataVersionConflict):
        with_fragment(metadata, 4, ("b3", "b2"))


class Ledgers:
    """A store of one ledger's metadata that others write to between our read and our write."""

    def __init__(self, metadata, others):
        self.stored = VersionedMetadata(metadata, 0, 12)
        self.others = list(others)
        self.written = []

    def read(self, ledger):
        return self.stored

    def write(self, ledger, metadata, version):
        if self.others:
            self.stored = VersionedMetadata(self.others.pop(0), self.stored.version + 1, 12)
        if version != self.stored.version:
            raise MetadataVersionConflict("changed")
        self.stored = VersionedMetadata(metadata, version + 1, 12)
        self.written.append(metadata)
        return version + 1


def test_update_metadata_reapplies_change_after_conflict():
    metadata = metadata_of((0, ("b0",)))
    others = [metadata._replace(custom_metadata={"n": b"%d" % i}) for i in range(3)]
    ledgers = Ledgers(metadata, others)
    found = update_metadata(
        ledgers, LedgerId(0, 1), ledgers.stored,
        lambda m: None if m.state is LedgerState.IN_RECOVERY else m._replace(state=LedgerState.IN_RECOVERY),
    )  # fmt: skip
    assert found == ledgers.stored
    assert (found.version, found.ctime_ms) == (4, 12)
    assert found.metadata.custom_metadata == {"n": b"2"}
    assert len(ledgers.written) == 1


def test_update_metadata_stops_when_change_is_done_or_gives_up():
    metadata = metadata_of((0, ("b0",)))
    done = metadata._replace(state=LedgerState.CLOSED, last_entry_id=3)
    ledgers = Ledgers(metadata, [done])
    stale = ledgers.stored
    found = update_metadata(ledgers, LedgerId(0, 1), stale, lambda m: None if m.is_closed else m._replace(length=1))
    assert found.metadata == done
    assert ledgers.written == []
    endless = Ledgers(metadata, [metadata] * 1000)
    with pytest.raises(MetadataVersionConflict, match="100 times"):
        update_metadata(endless, LedgerId(0, 1), endless.stored, lambda m: m)
