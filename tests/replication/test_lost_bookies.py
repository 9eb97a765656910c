"""The delay between the loss of a bookie and its audit."""

from __future__ import annotations

from bkctl.replication.lost_bookies import Decision, LostBookies


def test_loss_without_delay_is_audited_at_once():
    lost = LostBookies({"a", "b", "c"}, 0)
    assert lost.bookies_changed({"a", "b", "c"}, 0) is Decision.NOTHING
    assert lost.bookies_changed({"a", "b"}, 0) is Decision.AUDIT
    assert lost.bookies_changed({"a", "b"}, 0) is Decision.NOTHING
    assert lost.bookies_changed({"a", "b", "d"}, 0) is Decision.NOTHING
    assert lost.bookies_changed({"a"}, 0) is Decision.AUDIT
    assert not lost.is_pending


def test_returning_bookie_cancels_delayed_audit():
    lost = LostBookies({"a", "b", "c"}, 60)
    assert lost.bookies_changed({"a", "b"}, 60) is Decision.AUDIT_LATER
    assert lost.bookies_changed({"a", "b"}, 60) is Decision.NOTHING
    assert (lost.is_pending, lost.waiting) == (True, {"c"})
    assert lost.bookies_changed({"a", "b", "c"}, 60) is Decision.CANCEL
    assert (lost.is_pending, lost.delayed_count, lost.cancelled_count) == (False, 1, 1)
    assert lost.bookies_changed({"a", "b"}, 60) is Decision.AUDIT_LATER
    lost.delay_over()
    assert not lost.is_pending
    assert lost.bookies_changed({"a", "b"}, 60) is Decision.NOTHING


def test_several_lost_bookies_are_audited_despite_delay():
    lost = LostBookies({"a", "b", "c", "d"}, 60)
    assert lost.bookies_changed({"a", "b"}, 60) is Decision.AUDIT
    lost = LostBookies({"a", "b", "c", "d"}, 60)
    assert lost.bookies_changed({"a", "b", "c"}, 60) is Decision.AUDIT_LATER
    assert lost.bookies_changed({"a", "b"}, 60) is Decision.AUDIT
    assert not lost.is_pending
    # One returns in the moment in which another one goes.
    lost = LostBookies({"a", "b", "c"}, 60)
    assert lost.bookies_changed({"a", "b"}, 60) is Decision.AUDIT_LATER
    assert lost.bookies_changed({"a", "c"}, 60) is Decision.AUDIT_LATER
    assert lost.waiting == {"b"}


def test_same_or_zero_delay_audits_now_and_new_delay_restarts():
    lost = LostBookies({"a", "b"}, 60)
    assert lost.delay_written(60) is Decision.AUDIT
    assert lost.delay_written(120) is Decision.NOTHING
    assert lost.bookies_changed({"a"}, 120) is Decision.AUDIT_LATER
    assert lost.delay_written(30) is Decision.AUDIT_LATER
    assert (lost.is_pending, lost.delayed_count, lost.cancelled_count) == (True, 2, 1)
    assert lost.delay_written(0) is Decision.AUDIT
    assert not lost.is_pending
    assert lost.bookies_changed({"a"}, 0) is Decision.NOTHING
