"""Auto-recovery's state over every store, with many at it at once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from bkctl.errors import AlreadyExists, Conflict, Corrupt, MetadataVersionConflict, NotFound, Unsupported, UsageError
from bkctl.ids import I64_MAX, U64_MAX, LedgerId
from bkctl.metadata.store import MetadataStore
from bkctl.metadata.underreplication import AuditorCheck, LedgerUnderreplicationManager, UnderreplicatedLedger

IDS = [
    LedgerId(0, 0), LedgerId(0, 65_535), LedgerId(0, 65_536), LedgerId(0, I64_MAX), LedgerId(1, 0), LedgerId(7, 1),
    LedgerId(7, 1 << 40), LedgerId(U64_MAX, U64_MAX),
]  # fmt: skip
MARK = "ledgers/0000/0000/0000/0005/urL0000000005"


@pytest.fixture
def manager(store: MetadataStore) -> LedgerUnderreplicationManager:
    return LedgerUnderreplicationManager(store)


def missing(manager: LedgerUnderreplicationManager, ledger: LedgerId) -> set[str]:
    found = manager.get(ledger)
    assert found is not None
    return set(found.missing_replicas)


def test_marks_are_listed_by_scope_and_removed(manager: LedgerUnderreplicationManager) -> None:
    assert list(manager.list(None)) == []
    assert not manager.any()
    for index, ledger in enumerate(IDS[::2] + IDS[1::2]):
        assert manager.mark(ledger, [f"bookie-{index}"], now_ms=1_700_000_000_000 + index)
    assert [ledger for ledger, _ in manager.list(None)] == IDS
    for scope_id in (0, 1, 7, 8, U64_MAX):
        expected = [ledger for ledger in IDS if ledger.scope_id == scope_id]
        assert [ledger for ledger, _ in manager.list(scope_id)] == expected
        assert manager.any(scope_id) == bool(expected)
    mark_of = manager.beside()
    asked = [LedgerId(each.scope_id, each.ledger_id - 1) for each in IDS[1:4]] + IDS[3:]
    assert [(mark := mark_of(each)) and mark.ledger for each in sorted(asked)] == [
        each if each in IDS else None for each in sorted(asked)
    ]
    first = manager.get(IDS[0])
    assert isinstance(first, UnderreplicatedLedger)
    assert (first.missing_replicas, first.ctime_ms) == (("bookie-0",), 1_700_000_000_000)
    assert not manager.mark(IDS[0], ["bookie-0"])
    assert manager.mark(IDS[0], ["bookie-0", "bookie-9", "bookie-9"], now_ms=5)
    again = manager.get(IDS[0])
    assert again is not None
    assert (again.missing_replicas, again.ctime_ms) == (("bookie-0", "bookie-9"), 5)
    with pytest.raises(MetadataVersionConflict):
        manager.unmark(IDS[0], first.version)
    manager.unmark(IDS[0], again.version)
    with pytest.raises(NotFound):
        manager.unmark(IDS[0])
    for ledger in IDS[1:]:
        manager.unmark(ledger)
    assert list(manager.list(None)) == []
    assert manager.store.children("underreplication/ledgers") == []


def test_concurrent_marks_add_up(store: MetadataStore, backend: Any) -> None:
    managers = [LedgerUnderreplicationManager(store), LedgerUnderreplicationManager(backend.open())]
    problems: list[BaseException] = []

    def run(manager: LedgerUnderreplicationManager, number: int) -> None:
        try:
            for ledger in (LedgerId(0, 5), LedgerId(7, 5)):
                for index in range(8):
                    manager.mark(ledger, [f"bookie-{number}-{index}"])
        except BaseException as error:  # noqa: BLE001 - raised below
            problems.append(error)

    threads = [threading.Thread(target=run, args=(managers[number % 2], number)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    expected = {f"bookie-{number}-{index}" for number in range(4) for index in range(8)}
    for ledger in (LedgerId(0, 5), LedgerId(7, 5)):
        assert missing(managers[0], ledger) == expected


def test_lock_has_one_owner_until_its_session_ends(manager: LedgerUnderreplicationManager, backend: Any) -> None:
    other_store = backend.open()
    other = LedgerUnderreplicationManager(other_store)
    for ledger in (LedgerId(0, 5), LedgerId(7, 5)):
        other.lock(ledger, "other-host")
        with pytest.raises(Conflict, match="by other-host"):
            manager.lock(ledger, "our-host")
        lock = manager.lock_owner(ledger)
        assert lock is not None
        assert (lock.ledger, lock.owner) == (ledger, "other-host")
    assert [lock.ledger for lock in manager.locks()] == [LedgerId(0, 5), LedgerId(7, 5)]
    assert [lock.ledger for lock in manager.locks(7)] == [LedgerId(7, 5)]
    other.unlock(LedgerId(0, 5))
    manager.lock(LedgerId(0, 5), "our-host")
    other_store.close()
    manager.lock(LedgerId(7, 5), "our-host")
    manager.unlock(LedgerId(7, 5))
    manager.unlock(LedgerId(7, 5))
    assert [(lock.ledger, lock.owner) for lock in manager.locks()] == [(LedgerId(0, 5), "our-host")]


def test_lock_many_and_unlock_many(manager: LedgerUnderreplicationManager, backend: Any) -> None:
    other = LedgerUnderreplicationManager(backend.open())
    ledgers = [LedgerId(scope, number) for scope in (0, 7) for number in range(30)]
    other.lock(ledgers[40], "other-host")
    locks = manager.lock_many(ledgers, "our-host")
    assert [ledger for ledger, lock in zip(ledgers, locks, strict=True) if isinstance(lock, Conflict)] == [ledgers[40]]
    assert "by other-host" in str(locks[40])
    assert other.locked() == set(ledgers)
    manager.unlock_many(ledgers)
    manager.unlock_many(ledgers)
    assert other.locked() == {ledgers[40]}


def test_switches_delay_and_clocks(manager: LedgerUnderreplicationManager) -> None:
    assert manager.is_enabled()
    manager.disable()
    for call, error in (
        (manager.disable, AlreadyExists),
        (manager.trigger_audit, Conflict),
        (lambda: manager.set_lost_bookie_recovery_delay_s(-1), UsageError),
        (lambda: manager.set_lost_bookie_recovery_delay_s(1 << 31), UsageError),
    ):
        with pytest.raises(error):
            call()
    assert not manager.is_enabled()
    manager.enable()
    with pytest.raises(AlreadyExists):
        manager.enable()
    with pytest.raises(NotFound):
        manager.trigger_audit()
    assert manager.lost_bookie_recovery_delay_s() is None
    for seconds in (300, 0):
        manager.set_lost_bookie_recovery_delay_s(seconds)
        assert manager.lost_bookie_recovery_delay_s() == seconds
    for index, check in enumerate(AuditorCheck):
        assert manager.check_ctime_ms(check) is None
        manager.set_check_ctime_ms(check, 1_700_000_000_000 + index)
        assert manager.check_ctime_ms(check) == 1_700_000_000_000 + index


def test_votes_count_by_number_and_apart_for_scopes(manager: LedgerUnderreplicationManager) -> None:
    def vote(place: str, name: str, bookie_id: str) -> None:
        value = f'bookieId: "{bookie_id}"\n'.encode()
        manager.store.ephemeral(f"underreplication/{place}auditorelection/{name}", value)

    vote("", "V_0000000002", "b:2")
    vote("", "V_0000000010", "b:10")
    assert manager.votes() == ("b:2", "b:10")
    vote("", "V_-2147483648", "b:after-2^31")
    vote("scopes/", "V_0000000000", "b:scopes")
    assert manager.auditor() == "b:after-2^31"
    assert manager.auditor(scoped=True) == "b:scopes"
    manager.set_lost_bookie_recovery_delay_s(7)
    before = manager.store.get("underreplication/lostBookieRecoveryDelay")
    assert manager.trigger_audit() == "b:after-2^31"
    after = manager.store.get("underreplication/lostBookieRecoveryDelay")
    assert before is not None
    assert after is not None
    assert (after.value, after.version > before.version) == (b"7", True)


@pytest.mark.parametrize(
    ("path", "value", "call"),
    [
        (MARK, b"\xff", lambda manager: manager.get(LedgerId(0, 5))),
        (MARK, b"replica: 5", lambda manager: manager.mark(LedgerId(0, 5), ["b"])),
        ("locks/urL0000000005", b"what", lambda manager: list(manager.locks())),
        ("lostBookieRecoveryDelay", b"soon", lambda manager: manager.lost_bookie_recovery_delay_s()),
        ("replicascheckctime", b"\xff\xff", lambda manager: manager.check_ctime_ms(AuditorCheck.REPLICAS)),
        ("auditorelection/V_0000000001", b"\x00", lambda manager: manager.auditor()),
        ("LAYOUT", b"BASIC 1", lambda manager: manager.disable()),
    ],
    ids=["mark", "mark again", "lock", "delay", "clock", "vote", "layout"],
)
def test_damage_is_one_clear_error(
    manager: LedgerUnderreplicationManager, path: str, value: bytes,
    call: Callable[[LedgerUnderreplicationManager], object],
) -> None:  # fmt: skip
    manager.store.put(f"underreplication/{path}", value, None)
    with pytest.raises(Corrupt) as caught:
        call(manager)
    assert path in str(caught.value)


def test_damaged_mark_is_listed_as_error_and_foreign_names_skipped(
    manager: LedgerUnderreplicationManager,
) -> None:
    manager.mark(LedgerId(0, 5), ["b"])
    manager.mark(LedgerId(0, 7), ["b"])
    manager.store.put("underreplication/ledgers/0000/0000/0000/0006/urL0000000006", b"\xff", None)
    manager.store.put("underreplication/ledgers/0000/0000/0000/0008/urL0000000008", b"", None)
    for name in ("0000/0000/0000/0005/other", "0000/0000/00/urL0000000009", "0000/0000/0000/0009/urL9", "x"):
        manager.store.put(f"underreplication/ledgers/{name}", b"", None)
    found = list(manager.list(None))
    assert [ledger.ledger_id for ledger, _ in found] == [5, 6, 7, 8]
    assert [isinstance(each, Corrupt) for _, each in found] == [False, True, False, False]
    last = found[3][1]
    assert isinstance(last, UnderreplicatedLedger)
    assert last.missing_replicas == ()


def test_a_later_layout_is_refused(manager: LedgerUnderreplicationManager) -> None:
    manager.store.put("underreplication/LAYOUT", b'type: "BASIC"\nversion: 2\n', None)
    for call in (lambda: list(manager.list()), manager.disable, lambda: manager.mark(LedgerId(0, 1), ["b"])):
        with pytest.raises(Unsupported, match="version 2"):
            call()  # type: ignore[operator]


def test_impossible_ids_and_bookies_are_not_marked(manager: LedgerUnderreplicationManager) -> None:
    for ledger, bookies in ((LedgerId(0, 5), ["not a bookie"]), (LedgerId(0, 1 << 63), ["b"])):
        with pytest.raises(UsageError):
            manager.mark(ledger, bookies)
    assert list(manager.list(None)) == []


def test_unlock_leaves_a_lock_taken_by_another_worker(manager: LedgerUnderreplicationManager, backend: Any) -> None:
    ledger = LedgerId(7, 5)
    ours = manager.lock(ledger, "us")
    assert ours.is_held()
    manager.store.delete(ours.path)  # as the end of a session does
    assert not ours.is_held()
    other = LedgerUnderreplicationManager(backend.open())
    theirs = other.lock(ledger, "other-host")
    manager.unlock(ledger)
    assert theirs.is_held()
    assert not ours.is_held()
    other.unlock(ledger)
    assert manager.lock_owner(ledger) is None


def test_the_first_vote_of_each_election_wins(manager: LedgerUnderreplicationManager, backend: Any) -> None:
    other = LedgerUnderreplicationManager(backend.open())
    assert not manager.was_elected()
    first, second = manager.vote("b:1"), other.vote("b:2")
    scoped = other.vote("b:2", scoped=True)
    assert manager.was_elected()
    assert manager.votes() == ("b:1", "b:2")
    assert manager.vote_paths() == (first.path, second.path)
    assert (manager.auditor(), manager.auditor(scoped=True)) == ("b:1", "b:2")
    other.note_auditor("b:2")
    third = manager.vote("b:1 again".replace(" ", "-"))
    first.release()
    assert manager.auditor() == "b:2"
    assert other.vote_paths() == (second.path, third.path)
    assert manager.vote_paths(scoped=True) == (scoped.path,)


def test_marked_ids_are_listed_for_scope_0_and_for_the_others(manager: LedgerUnderreplicationManager) -> None:
    for ledger in IDS:
        manager.mark(ledger, ["b"])
    assert list(manager.marked(scoped=False)) == [ledger for ledger in IDS if not ledger.is_scoped]
    assert list(manager.marked(scoped=True)) == [ledger for ledger in IDS if ledger.is_scoped]


def test_clocks_of_scopes_are_separate(manager: LedgerUnderreplicationManager) -> None:
    manager.set_check_ctime_ms(AuditorCheck.ALL_LEDGERS, 5)
    manager.set_check_ctime_ms(AuditorCheck.ALL_LEDGERS, 7, scoped=True)
    clocks = [manager.check_ctime_ms(AuditorCheck.ALL_LEDGERS, scoped=scoped) for scoped in (False, True)]
    assert clocks == [5, 7]


def test_delay_is_initialized_once_and_every_write_changes_its_version(manager: LedgerUnderreplicationManager) -> None:
    assert manager.delay_version() is None
    assert manager.initialize_lost_bookie_recovery_delay_s(30) == 30
    assert manager.initialize_lost_bookie_recovery_delay_s(60) == 30
    versions = [manager.delay_version()]
    for _ in range(2):
        manager.set_lost_bookie_recovery_delay_s(30)
        versions.append(manager.delay_version())
    assert len(set(versions)) == 3


def test_watch_work_reports_marks_unlocks_and_switches(manager: LedgerUnderreplicationManager, backend: Any) -> None:
    other = LedgerUnderreplicationManager(backend.open())
    other.mark(LedgerId(0, 5), ["b"])
    told = threading.Event()
    for scoped in (False, True):
        ledger = LedgerId(7 if scoped else 0, 1 << 50)
        cancel = manager.watch(told.set, scoped=scoped)
        claim = None
        for change in (
            lambda ledger=ledger: other.mark(ledger, ["b"]),
            lambda ledger=ledger: other.lock(ledger, "b"),
            lambda ledger=ledger: other.unlock(ledger),
            other.disable,
            other.enable,
        ):
            told.clear()
            claim = change()  # type: ignore[operator]
            assert told.wait(30), change
        cancel()
        del claim
    cancel = manager.watch_auditing(told.set)
    for change in (lambda: other.set_lost_bookie_recovery_delay_s(7),) * 2 + (other.disable,):
        told.clear()
        change()
        assert told.wait(30)
    cancel()
