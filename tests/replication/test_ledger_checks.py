"""The auditor's periodic checks of all ledgers."""

from __future__ import annotations

import random

import pytest
from replication.recovering import CONFIG, bookies_of, eventually, marks, running, state_of, write

from bkctl.client.ensemble import RoundRobinDistributionSchedule
from bkctl.errors import BkctlError
from bkctl.formats.availability import Availability, SequenceGroup
from bkctl.ids import LedgerId
from bkctl.metadata.racks import BookieRacks
from bkctl.metadata.underreplication import AuditorCheck, AutoRecoverySettings
from bkctl.replication.auditor import Auditor, _worst_count
from bkctl.replication.fragments import LedgerFragment

HOUR_S = 3600


async def test_check_of_all_ledgers_marks_and_records_its_time(fake_cluster):
    async with fake_cluster(4) as cluster, cluster.client() as client:
        whole, bad, scoped = [await write(client, 9, scope_id=scope_id) for scope_id in (0, 0, 7)]
        for ledger in (bad.ledger, scoped.ledger):
            del bookies_of(cluster, ledger)[0].ledgers[ledger]
        expected = {bookies_of(cluster, bad.ledger)[0].bookie_id}
        state = state_of(cluster)
        config = CONFIG.with_changes(auditor_periodic_check_interval=HOUR_S)
        auditor = Auditor(client, config, scoped=False)
        async with running(auditor.run()):
            await eventually(lambda: state.settings.check_ctime_ms(AuditorCheck.ALL_LEDGERS), "the check is over")
        assert marks(cluster) == {bad.ledger: expected}
        assert auditor.stats.num_ledgers_checked == 2
        assert state.settings.check_ctime_ms(AuditorCheck.ALL_LEDGERS, scoped=True) is None
        # A new auditor keeps to the schedule: the next check is an hour away.
        state.marks.remove(bad.ledger)
        again = Auditor(client, config, scoped=False)
        async with running(again.run()):
            await eventually(lambda: again.stats.audit_count, "it looked for bookies")
            await again._step()
        assert marks(cluster) == {}
        assert again.stats.num_ledgers_checked == 0
        assert whole.ledger not in marks(cluster)
        of_scopes = Auditor(client, config, scoped=True)
        async with running(of_scopes.run()):
            await eventually(lambda: scoped.ledger in marks(cluster), "the scopes have their own schedule")


async def test_replica_and_placement_checks_count_without_marking(fake_cluster):
    async with fake_cluster(3) as cluster, cluster.client() as client:
        shape = {"write_quorum_size": 3, "ack_quorum_size": 2}
        ledgers = [(await write(client, 4, **shape)).ledger for _ in range(4)]
        for ledger, count in zip(ledgers, range(4), strict=True):
            for bookie in cluster.bookies[:count]:
                del bookie.ledgers[ledger].entries[2]
        old = LedgerId(0, 1 << 40)
        state_of(cluster).marks.add(old, ["b0"], now_ms=1)
        config = CONFIG.with_changes(underreplicated_ledger_recovery_grace_period=60)
        auditor = Auditor(client, config, scoped=False)
        await auditor.checks.check_replicas()
        await auditor.checks.check_placement_policy()
        stats = auditor.stats
        assert (
            stats.num_ledgers_having_less_than_wq_replicas_of_an_entry,
            stats.num_ledgers_having_less_than_aq_replicas_of_an_entry,
            stats.num_ledgers_having_no_replica_of_an_entry,
            stats.num_underreplicated_ledgers_elapsed_recovery_grace_period,
            stats.num_ledgers_not_adhering_to_placement_policy,
        ) == (1, 1, 1, 1, 0)
        assert set(marks(cluster)) == {old}
        settings = AutoRecoverySettings(cluster.cluster.store)
        assert settings.check_ctime_ms(AuditorCheck.REPLICAS) is not None
        assert settings.check_ctime_ms(AuditorCheck.PLACEMENT_POLICY) is not None


async def test_placement_check_counts_ledgers_in_one_rack(fake_cluster, monkeypatch):
    monkeypatch.setattr("bkctl.metadata.racks.RACKS_AGE_S", -1)
    async with fake_cluster(3) as cluster, cluster.client() as client:
        for _ in range(2):
            await write(client, 4)
        await write(client, 4, close=False)
        auditor = Auditor(client, CONFIG, scoped=False)
        for racks, count in ((("/a", "/a", "/b"), 2), (("/a", "/c", "/b"), 0)):
            for name, rack in zip(("b0", "b1", "b2"), racks, strict=True):
                BookieRacks(cluster.cluster).set([name], rack)
            await auditor.checks.check_placement_policy()
            assert auditor.stats.num_ledgers_not_adhering_to_placement_policy == count
        assert marks(cluster) == {}
        BookieRacks(cluster.cluster).unset(["b0", "b1", "b2"])
        await auditor.checks.check_placement_policy()
        assert auditor.stats.num_ledgers_not_adhering_to_placement_policy == 0


async def test_placement_check_judges_by_the_configured_policy(fake_cluster, monkeypatch, caplog):
    monkeypatch.setattr("bkctl.metadata.racks.RACKS_AGE_S", -1)
    policy = "org.apache.bookkeeper.client.ZoneawareEnsemblePlacementPolicy"
    async with fake_cluster(3) as cluster, cluster.client(config=CONFIG) as client:
        writer = await client.create_ledger(write_quorum_size=3)
        await writer.add(b"x")
        await writer.close()
        for bookies, zone in (("b0", "/z1/u1"), ("b1", "/z1/u2"), ("b2", "/z2/u1")):
            BookieRacks(cluster.cluster).set([bookies], zone)
        for least, desired, fail_count, soft_count in ((2, 2, 0, 0), (2, 3, 0, 1), (3, 3, 1, 0)):
            config = CONFIG.with_changes(
                ensemble_placement_policy=policy, min_num_zones_per_write_quorum=least,
                desired_num_zones_per_write_quorum=desired,
            )  # fmt: skip
            async with cluster.client(config=config) as judging:
                auditor = Auditor(judging, config, scoped=False)
                await auditor.checks.check_placement_policy()
            assert auditor.stats.num_ledgers_not_adhering_to_placement_policy == fail_count
            assert auditor.stats.num_ledgers_softly_adhering_to_placement_policy == soft_count
    assert f"Ledger {writer.ledger} is misplaced: from entry 0" in caplog.text
    assert "cannot adhere: the write quorum 3 must be more than minNumZonesPerWriteQuorum=3" in caplog.text


async def test_placement_check_marks_ledgers_only_where_their_repair_is_enabled(fake_cluster, monkeypatch):
    monkeypatch.setattr("bkctl.metadata.racks.RACKS_AGE_S", -1)
    config = CONFIG.with_changes(repaired_placement_policy_not_adhering_bookie_enabled=True)
    async with fake_cluster(3) as cluster, cluster.client() as client:
        closed, scoped = [(await write(client, 4, scope_id=scope_id)).ledger for scope_id in (0, 7)]
        await write(client, 4, close=False)
        BookieRacks(cluster.cluster).set(["b0", "b1"], "/a")
        await Auditor(client, CONFIG, scoped=False).checks.check_placement_policy()
        assert marks(cluster) == {}
        await Auditor(client, config, scoped=False).checks.check_placement_policy()
        assert marks(cluster) == {closed: set()}
        await Auditor(client, config, scoped=True).checks.check_placement_policy()
        assert marks(cluster) == {closed: set(), scoped: set()}


def _fragment(first: int, last: int, ensemble_size: int = 3, write_quorum_size: int = 2) -> LedgerFragment:
    schedule = RoundRobinDistributionSchedule(ensemble_size, write_quorum_size, 1)
    ensemble = tuple(f"b{index}" for index in range(ensemble_size))
    return LedgerFragment(LedgerId(0, 1), first, last, ensemble, True, schedule)


def test_missing_replicas_are_counted_as_entry_by_entry():
    chance = random.Random(7)

    def group() -> SequenceGroup:
        first, size, period = chance.randrange(40), chance.randrange(6), chance.randrange(8)
        return SequenceGroup(first, first + period * chance.randrange(1, 6), size, period)

    found = set()
    for _ in range(3000):
        size = chance.randrange(1, 5)
        quorum = chance.randrange(1, size + 1)
        fragments = []
        for _ in range(chance.randrange(1, 3)):
            first = chance.randrange(30)
            fragments.append(_fragment(first, first + chance.randrange(-1, 60), size, quorum))
        listed = {
            f"b{index}": Availability(group() for _ in range(chance.randrange(4)))
            for index in range(size)
            if chance.random() < 0.8
        }
        counts = [
            sum(
                fragment.has(entry_id, index) and bookie_id in listed and entry_id not in listed[bookie_id]
                for index, bookie_id in enumerate(fragment.ensemble)
            )
            for fragment in fragments
            for entry_id in range(fragment.first_entry_id, fragment.last_entry_id + 1)
        ]
        expected = max(counts, default=0)
        assert _worst_count(fragments, listed, quorum) == expected
        found.add(expected)
    assert found >= {0, 1, 2, 3}


def test_missing_replicas_of_huge_fragments_are_counted_without_a_walk():
    end = 1 << 62
    whole = Availability([SequenceGroup(0, end - 3, 3, 3)])
    striped = Availability([SequenceGroup(0, end - 6, 2, 6)])
    fragment = _fragment(0, end - 1)
    assert _worst_count([fragment], {"b0": whole, "b1": whole, "b2": whole}, 2) == 0
    assert _worst_count([fragment], {"b0": whole, "b1": striped, "b2": whole}, 2) == 1
    assert _worst_count([fragment], {"b0": whole, "b1": striped, "b2": striped}, 2) == 2


def test_lists_with_large_coprime_periods_are_refused():
    periods = (999_983, 999_979, 999_961)
    listed = {
        f"b{index}": Availability([SequenceGroup(0, period * 1_000_000_000_000, period - 1, period)])
        for index, period in enumerate(periods)
    }
    with pytest.raises(BkctlError, match="cannot be compared"):
        _worst_count([_fragment(0, 1 << 59)], listed, 2)
