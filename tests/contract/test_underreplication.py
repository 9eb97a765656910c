"""Auto-recovery's state over every store, with many at it at once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from support.waiting import LIMIT_S

from bkctl.errors import AlreadyExists, Conflict, Corrupt, MetadataVersionConflict, NotFound, Unsupported, UsageError
from bkctl.ids import I64_MAX, U64_MAX, LedgerId
from bkctl.metadata.store import NEW, MetadataStore
from bkctl.metadata.underreplication import (
    AuditorCheck,
    AuditorElection,
    AutoRecoveryState,
    UnderreplicatedLedger,
    lock_path,
)

IDS = [
    LedgerId(0, 0), LedgerId(0, 65_535), LedgerId(0, 65_536), LedgerId(0, I64_MAX), LedgerId(1, 0), LedgerId(7, 1),
    LedgerId(7, 1 << 40), LedgerId(U64_MAX, U64_MAX),
]  # fmt: skip
MARK = "ledgers/0000/0000/0000/0005/urL0000000005"


@pytest.fixture
def state(store: MetadataStore) -> AutoRecoveryState:
    return AutoRecoveryState(store)


def missing(state: AutoRecoveryState, ledger: LedgerId) -> set[str]:
    found = state.marks.get(ledger)
    assert found is not None
    return set(found.missing_replicas)


def test_marks_are_listed_by_scope_and_removed(state: AutoRecoveryState, store: MetadataStore) -> None:
    assert list(state.marks.list(None)) == []
    assert not state.marks.has_marks()
    for index, ledger in enumerate(IDS[::2] + IDS[1::2]):
        assert state.marks.add(ledger, [f"bookie-{index}"], now_ms=1_700_000_000_000 + index)
    assert [ledger for ledger, _ in state.marks.list(None)] == IDS
    for scope_id in (0, 1, 7, 8, U64_MAX):
        expected = [ledger for ledger in IDS if ledger.scope_id == scope_id]
        assert [ledger for ledger, _ in state.marks.list(scope_id)] == expected
        assert state.marks.has_marks(scope_id) == bool(expected)
    mark_of = state.marks.cursor()
    asked = [LedgerId(each.scope_id, each.ledger_id - 1) for each in IDS[1:4]] + IDS[3:]
    assert [(mark := mark_of(each)) and mark.ledger for each in sorted(asked)] == [
        each if each in IDS else None for each in sorted(asked)
    ]
    first = state.marks.get(IDS[0])
    assert isinstance(first, UnderreplicatedLedger)
    assert (first.missing_replicas, first.ctime_ms) == (("bookie-0",), 1_700_000_000_000)
    assert not state.marks.add(IDS[0], ["bookie-0"])
    assert state.marks.add(IDS[0], ["bookie-0", "bookie-9", "bookie-9"], now_ms=5)
    again = state.marks.get(IDS[0])
    assert again is not None
    assert (again.missing_replicas, again.ctime_ms) == (("bookie-0", "bookie-9"), 5)
    with pytest.raises(MetadataVersionConflict):
        state.marks.remove(IDS[0], first.version)
    state.marks.remove(IDS[0], again.version)
    with pytest.raises(NotFound):
        state.marks.remove(IDS[0])
    for ledger in IDS[1:]:
        state.marks.remove(ledger)
    assert list(state.marks.list(None)) == []
    assert store.children("underreplication/ledgers") == []


def test_concurrent_marks_add_up(store: MetadataStore, backend: Any) -> None:
    states = [AutoRecoveryState(store), AutoRecoveryState(backend.open())]
    problems: list[BaseException] = []

    def run(state: AutoRecoveryState, number: int) -> None:
        try:
            for ledger in (LedgerId(0, 5), LedgerId(7, 5)):
                for index in range(8):
                    state.marks.add(ledger, [f"bookie-{number}-{index}"])
        except BaseException as error:  # noqa: BLE001 - raised below
            problems.append(error)

    threads = [threading.Thread(target=run, args=(states[number % 2], number)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    expected = {f"bookie-{number}-{index}" for number in range(4) for index in range(8)}
    for ledger in (LedgerId(0, 5), LedgerId(7, 5)):
        assert missing(states[0], ledger) == expected


def test_lock_has_one_owner_until_its_session_ends(state: AutoRecoveryState, backend: Any) -> None:
    other_store = backend.open()
    other = AutoRecoveryState(other_store)
    for ledger in (LedgerId(0, 5), LedgerId(7, 5)):
        other.locks.lock(ledger, "other-host")
        with pytest.raises(Conflict, match="by other-host"):
            state.locks.lock(ledger, "our-host")
        lock = state.locks.get(ledger)
        assert lock is not None
        assert (lock.ledger, lock.owner) == (ledger, "other-host")
    assert [lock.ledger for lock in state.locks.list()] == [LedgerId(0, 5), LedgerId(7, 5)]
    assert [lock.ledger for lock in state.locks.list(7)] == [LedgerId(7, 5)]
    other.locks.unlock(LedgerId(0, 5))
    state.locks.lock(LedgerId(0, 5), "our-host")
    other_store.close()
    state.locks.lock(LedgerId(7, 5), "our-host")
    state.locks.unlock(LedgerId(7, 5))
    state.locks.unlock(LedgerId(7, 5))
    assert [(lock.ledger, lock.owner) for lock in state.locks.list()] == [(LedgerId(0, 5), "our-host")]


def test_lock_many_and_unlock_many(state: AutoRecoveryState, backend: Any) -> None:
    other = AutoRecoveryState(backend.open())
    ledgers = [LedgerId(scope, number) for scope in (0, 7) for number in range(30)]
    other.locks.lock(ledgers[40], "other-host")
    locks = state.locks.lock_many(ledgers, "our-host")
    assert [ledger for ledger, lock in zip(ledgers, locks, strict=True) if isinstance(lock, Conflict)] == [ledgers[40]]
    assert "by other-host" in str(locks[40])
    assert other.locks.ledgers() == set(ledgers)
    state.locks.unlock_many(ledgers)
    state.locks.unlock_many(ledgers)
    assert other.locks.ledgers() == {ledgers[40]}


def test_switches_delay_and_clocks(state: AutoRecoveryState) -> None:
    assert state.settings.is_enabled()
    state.settings.disable()
    for call, error in (
        (state.settings.disable, AlreadyExists),
        (state.trigger_audit, Conflict),
        (lambda: state.settings.set_lost_bookie_recovery_delay_s(-1), UsageError),
        (lambda: state.settings.set_lost_bookie_recovery_delay_s(1 << 31), UsageError),
    ):
        with pytest.raises(error):
            call()
    assert not state.settings.is_enabled()
    state.settings.enable()
    with pytest.raises(AlreadyExists):
        state.settings.enable()
    with pytest.raises(NotFound):
        state.trigger_audit()
    assert state.settings.lost_bookie_recovery_delay_s() is None
    for seconds in (300, 0):
        state.settings.set_lost_bookie_recovery_delay_s(seconds)
        assert state.settings.lost_bookie_recovery_delay_s() == seconds
    for index, check in enumerate(AuditorCheck):
        assert state.settings.check_ctime_ms(check) is None
        state.settings.set_check_ctime_ms(check, 1_700_000_000_000 + index)
        assert state.settings.check_ctime_ms(check) == 1_700_000_000_000 + index


def test_votes_count_by_number_and_apart_for_scopes(state: AutoRecoveryState, store: MetadataStore) -> None:
    def vote(place: str, name: str, bookie_id: str) -> None:
        value = f'bookieId: "{bookie_id}"\n'.encode()
        store.ephemeral(f"underreplication/{place}auditorelection/{name}", value)

    vote("", "V_0000000002", "b:2")
    vote("", "V_0000000010", "b:10")
    assert state.election.votes() == ("b:2", "b:10")
    vote("", "V_-2147483648", "b:after-2^31")
    vote("scopes/", "V_0000000000", "b:scopes")
    assert state.election.auditor() == "b:after-2^31"
    assert state.election.auditor(scoped=True) == "b:scopes"
    state.settings.set_lost_bookie_recovery_delay_s(7)
    before = store.get("underreplication/lostBookieRecoveryDelay")
    assert state.trigger_audit() == "b:after-2^31"
    after = store.get("underreplication/lostBookieRecoveryDelay")
    assert before is not None
    assert after is not None
    assert (after.value, after.version > before.version) == (b"7", True)


@pytest.mark.parametrize(
    ("path", "value", "call"),
    [
        (MARK, b"\xff", lambda state: state.marks.get(LedgerId(0, 5))),
        (MARK, b"replica: 5", lambda state: state.marks.add(LedgerId(0, 5), ["b"])),
        ("lostBookieRecoveryDelay", b"soon", lambda state: state.settings.lost_bookie_recovery_delay_s()),
        ("replicascheckctime", b"\xff\xff", lambda state: state.settings.check_ctime_ms(AuditorCheck.REPLICAS)),
        ("auditorelection/V_0000000001", b"\x00", lambda state: state.election.auditor()),
        ("LAYOUT", b"BASIC 1", lambda state: state.settings.disable()),
    ],
    ids=["mark", "mark again", "delay", "clock", "vote", "layout"],
)
def test_damage_is_one_clear_error(
    state: AutoRecoveryState, store: MetadataStore, path: str, value: bytes,
    call: Callable[[AutoRecoveryState], object],
) -> None:  # fmt: skip
    store.put(f"underreplication/{path}", value, None)
    with pytest.raises(Corrupt) as caught:
        call(state)
    assert path in str(caught.value)


def test_damaged_mark_is_listed_as_error_and_foreign_names_skipped(
    state: AutoRecoveryState,
    store: MetadataStore,
) -> None:
    state.marks.add(LedgerId(0, 5), ["b"])
    state.marks.add(LedgerId(0, 7), ["b"])
    store.put("underreplication/ledgers/0000/0000/0000/0006/urL0000000006", b"\xff", None)
    store.put("underreplication/ledgers/0000/0000/0000/0008/urL0000000008", b"", None)
    for name in ("0000/0000/0000/0005/other", "0000/0000/00/urL0000000009", "0000/0000/0000/0009/urL9", "x"):
        store.put(f"underreplication/ledgers/{name}", b"", None)
    found = list(state.marks.list(None))
    assert [ledger.ledger_id for ledger, _ in found] == [5, 6, 7, 8]
    assert [isinstance(each, Corrupt) for _, each in found] == [False, True, False, False]
    last = found[3][1]
    assert isinstance(last, UnderreplicatedLedger)
    assert last.missing_replicas == ()


def test_a_later_layout_is_refused(state: AutoRecoveryState, store: MetadataStore) -> None:
    store.put("underreplication/LAYOUT", b'type: "BASIC"\nversion: 2\n', None)
    for call in (
        lambda: list(state.marks.list()),
        state.settings.disable,
        lambda: state.marks.add(LedgerId(0, 1), ["b"]),
    ):
        with pytest.raises(Unsupported, match="version 2"):
            call()  # type: ignore[operator]


def test_impossible_ids_and_bookies_are_not_marked(state: AutoRecoveryState) -> None:
    for ledger, bookies in ((LedgerId(0, 5), ["not a bookie"]), (LedgerId(0, 1 << 63), ["b"])):
        with pytest.raises(UsageError):
            state.marks.add(ledger, bookies)
    assert list(state.marks.list(None)) == []


def test_unlock_leaves_a_lock_taken_by_another_worker(
    state: AutoRecoveryState, store: MetadataStore, backend: Any
) -> None:
    ledger = LedgerId(7, 5)
    ours = state.locks.lock(ledger, "us")
    assert ours.is_held()
    store.delete(ours.path)  # as the end of a session does
    assert not ours.is_held()
    other = AutoRecoveryState(backend.open())
    theirs = other.locks.lock(ledger, "other-host")
    state.locks.unlock(ledger)
    assert theirs.is_held()
    assert not ours.is_held()
    other.locks.unlock(ledger)
    assert state.locks.get(ledger) is None


def test_damaged_lock_is_one_of_an_unknown_worker(state: AutoRecoveryState, store: MetadataStore) -> None:
    ledger = LedgerId(7, 5)
    store.put(lock_path(ledger), b"\xff", NEW)
    with pytest.raises(Conflict, match=r"is being replicated$"):
        state.locks.lock(ledger, "us")
    assert [(lock.ledger, lock.owner) for lock in state.locks.list()] == [(ledger, None)]


def test_the_first_vote_of_each_election_wins(state: AutoRecoveryState, backend: Any) -> None:
    election = AuditorElection(backend.open())
    assert not state.election.was_held()
    first, second = state.election.vote("b:1"), election.vote("b:2")
    scoped = election.vote("b:2", scoped=True)
    assert state.election.was_held()
    assert state.election.votes() == ("b:1", "b:2")
    assert state.election.vote_paths() == (first.path, second.path)
    assert (state.election.auditor(), state.election.auditor(scoped=True)) == ("b:1", "b:2")
    election.announce("b:2")
    third = state.election.vote("b:1 again".replace(" ", "-"))
    first.release()
    assert state.election.auditor() == "b:2"
    assert election.vote_paths() == (second.path, third.path)
    assert state.election.vote_paths(scoped=True) == (scoped.path,)


def test_damaged_vote_of_a_candidate_does_not_hide_the_auditor(state: AutoRecoveryState, store: MetadataStore) -> None:
    state.election.vote("b:1")
    store.put("underreplication/auditorelection/V_2000000000", b"\xff", NEW)
    assert state.election.auditor() == "b:1"
    first, second = state.election.votes()
    assert first == "b:1"
    assert isinstance(second, Corrupt)
    assert "V_2000000000" in str(second)


def test_marked_ids_are_listed_for_scope_0_and_for_the_others(state: AutoRecoveryState) -> None:
    for ledger in IDS:
        state.marks.add(ledger, ["b"])
    assert list(state.marks.ids(scoped=False)) == [ledger for ledger in IDS if not ledger.is_scoped]
    assert list(state.marks.ids(scoped=True)) == [ledger for ledger in IDS if ledger.is_scoped]


def test_clocks_of_scopes_are_separate(state: AutoRecoveryState) -> None:
    state.settings.set_check_ctime_ms(AuditorCheck.ALL_LEDGERS, 5)
    state.settings.set_check_ctime_ms(AuditorCheck.ALL_LEDGERS, 7, scoped=True)
    clocks = [state.settings.check_ctime_ms(AuditorCheck.ALL_LEDGERS, scoped=scoped) for scoped in (False, True)]
    assert clocks == [5, 7]


def test_delay_is_initialized_once_and_every_write_changes_its_version(state: AutoRecoveryState) -> None:
    assert state.settings.delay_version() is None
    assert state.settings.initialize_lost_bookie_recovery_delay_s(30) == 30
    assert state.settings.initialize_lost_bookie_recovery_delay_s(60) == 30
    versions = [state.settings.delay_version()]
    for _ in range(2):
        state.settings.set_lost_bookie_recovery_delay_s(30)
        versions.append(state.settings.delay_version())
    assert len(set(versions)) == 3


def test_watch_work_reports_marks_unlocks_and_switches(state: AutoRecoveryState, backend: Any) -> None:
    other = AutoRecoveryState(backend.open())
    other.marks.add(LedgerId(0, 5), ["b"])
    told = threading.Event()
    for scoped in (False, True):
        ledger = LedgerId(7 if scoped else 0, 1 << 50)
        cancel = state.marks.watch_work(told.set, scoped=scoped)
        claim = None
        for change in (
            lambda ledger=ledger: other.marks.add(ledger, ["b"]),
            lambda ledger=ledger: other.locks.lock(ledger, "b"),
            lambda ledger=ledger: other.locks.unlock(ledger),
            other.settings.disable,
            other.settings.enable,
        ):
            told.clear()
            claim = change()  # type: ignore[operator]
            assert told.wait(LIMIT_S), change
        cancel()
        del claim
    cancel = state.settings.watch(told.set)
    for change in (lambda: other.settings.set_lost_bookie_recovery_delay_s(7),) * 2 + (other.settings.disable,):
        told.clear()
        change()
        assert told.wait(LIMIT_S)
    cancel()
