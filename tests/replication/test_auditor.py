"""Election of the auditor, its action upon lost bookies, and its marks."""

from __future__ import annotations

import asyncio

from replication.recovering import CONFIG, come_back, eventually, lose, marks, running, state_of, write

from bkctl.metadata.underreplication import AuditorCheck, AutoRecoverySettings
from bkctl.replication.auditor import Auditor, first_delay_s
from bkctl.replication.marking import audit_bookies

HOUR_S = 3600


def test_first_delay_counts_from_last_check():
    now_ms = 1_700_000_000_000
    assert first_delay_s(100, None, now_ms) == 0
    assert first_delay_s(100, now_ms - 40_000, now_ms) == 60
    assert first_delay_s(100, now_ms - 400_000, now_ms) == 0
    assert first_delay_s(100, now_ms + 400_000, now_ms) == 100


async def test_auditor_marks_losses_before_and_after_its_start(fake_cluster):
    async with fake_cluster(5) as cluster, cluster.client() as client:
        ledgers = [(await write(client, 3, ensemble_size=5)).ledger for _ in range(2)]
        await lose(cluster, cluster.bookies[0])
        auditor = Auditor(client, CONFIG, scoped=False)
        async with running(auditor.run()):
            await eventually(lambda: marks(cluster) == {each: {"b0"} for each in ledgers}, "lost before")
            await lose(cluster, cluster.bookies[1])
            await eventually(lambda: marks(cluster) == {each: {"b0", "b1"} for each in ledgers}, "lost meanwhile")


async def test_delayed_audit_begins_on_request(fake_cluster):
    async with fake_cluster(5) as cluster, cluster.client() as client:
        ledger = (await write(client, 3, ensemble_size=5)).ledger
        settings = AutoRecoverySettings(cluster.cluster.store)
        settings.set_lost_bookie_recovery_delay_s(HOUR_S)
        auditor = Auditor(client, CONFIG, scoped=False)
        async with running(auditor.run()):
            await eventually(lambda: auditor.stats.audit_count, "it looked once")
            await lose(cluster, cluster.bookies[0])
            await eventually(lambda: auditor.stats.num_bookie_audits_delayed, "the delay runs")
            await come_back(cluster, cluster.bookies[0])
            await eventually(lambda: auditor.stats.num_delayed_bookie_audits_cancelled, "it came back")
            await lose(cluster, cluster.bookies[0])
            await eventually(lambda: auditor.stats.num_bookie_audits_delayed == 2, "the delay runs again")
            assert marks(cluster) == {}
            settings.set_lost_bookie_recovery_delay_s(2 * HOUR_S)
            await eventually(lambda: auditor.stats.num_bookie_audits_delayed == 3, "and anew")
            assert marks(cluster) == {}
            settings.set_lost_bookie_recovery_delay_s(2 * HOUR_S)
            await eventually(lambda: marks(cluster) == {ledger: {"b0"}}, "audited as it was asked to")


async def test_auditor_waits_for_one_lost_bookie_not_for_two(fake_cluster):
    async with fake_cluster(5) as cluster, cluster.client() as client:
        ledger = (await write(client, 3, ensemble_size=5, scope_id=7)).ledger
        state_of(cluster).settings.set_lost_bookie_recovery_delay_s(HOUR_S)
        auditor = Auditor(client, CONFIG, scoped=True)
        async with running(auditor.run()):
            await eventually(lambda: auditor.stats.audit_count, "it looked once")
            for bookie in cluster.bookies[:2]:
                await lose(cluster, bookie)
            await eventually(lambda: marks(cluster) == {ledger: {"b0", "b1"}}, "both at once")
            state_of(cluster).settings.set_lost_bookie_recovery_delay_s(1)
            await lose(cluster, cluster.bookies[2])
            await eventually(lambda: marks(cluster) == {ledger: {"b0", "b1", "b2"}}, "after the delay")


async def test_disabled_auto_recovery_postpones_marks(fake_cluster):
    async with fake_cluster(4) as cluster, cluster.client() as client:
        ledger = (await write(client, 3, ensemble_size=4)).ledger
        settings = AutoRecoverySettings(cluster.cluster.store)
        auditor = Auditor(client, CONFIG, scoped=False)
        async with running(auditor.run()):
            await eventually(lambda: auditor.stats.audit_count, "it looked once")
            settings.disable()
            await lose(cluster, cluster.bookies[0])
            await asyncio.to_thread(audit_bookies, cluster.cluster, scoped=False, may_continue=settings.is_enabled)
            assert marks(cluster) == {}
            settings.enable()
            await eventually(lambda: marks(cluster) == {ledger: {"b0"}}, "once it is enabled")


async def test_interrupted_audit_is_repeated(fake_cluster):
    async with fake_cluster(4) as cluster, cluster.client() as client:
        ledger = (await write(client, 3, ensemble_size=4)).ledger
        auditor = Auditor(client, CONFIG, scoped=False)
        settings = AutoRecoverySettings(cluster.cluster.store)
        await lose(cluster, cluster.bookies[0])

        asked = []

        def is_enabled():
            asked.append(None)
            if len(asked) == 2:  # by the audit, before its first step
                settings.disable()
            return settings.is_enabled()

        auditor._settings.is_enabled = is_enabled
        async with running(auditor.run()):
            await eventually(lambda: len(asked) >= 2 and not settings.is_enabled(), "switched off")
            assert marks(cluster) == {}
            settings.enable()
            await eventually(lambda: marks(cluster) == {ledger: {"b0"}}, "done again")


async def test_checks_are_skipped_during_recovery_delay(fake_cluster):
    async with fake_cluster(4) as cluster, cluster.client() as client:
        await write(client, 3, ensemble_size=4)
        settings = AutoRecoverySettings(cluster.cluster.store)
        settings.set_lost_bookie_recovery_delay_s(HOUR_S)
        await lose(cluster, cluster.bookies[0])
        cluster.cluster.store.put("cookies/b0", b"", None)
        config = CONFIG.with_changes(auditor_periodic_check_interval=HOUR_S)
        auditor = Auditor(client, config, scoped=False)
        async with running(auditor.run()):
            await eventually(lambda: auditor.stats.num_skipping_check_task_times == 2, "both are skipped")
        assert marks(cluster) == {}
        assert settings.check_ctime_ms(AuditorCheck.ALL_LEDGERS) is None
