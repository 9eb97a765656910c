"""The share of garbage in an entry log, and compaction of it."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import pytest

from bkctl.checks.garbage import Compaction, LogUse, Thresholds, log_uses
from bkctl.formats import entry_log
from bkctl.formats.entry import DigestManager, DigestType
from bkctl.ids import LedgerId
from bkctl.model import LedgerLiveness

ALIVE, DEAD, UNKNOWN = LedgerLiveness.ALIVE, LedgerLiveness.DEAD, LedgerLiveness.UNKNOWN
ONE, TWO, THREE = LedgerId(0, 1), LedgerId(0, 2), LedgerId(0, 3)
#: An entry with no payload: its size field, header and CRC32C.
RECORD = 4 + 32 + 4


def record(ledger: LedgerId, entry_id: int = 0) -> bytes:
    entry = DigestManager(ledger, DigestType.CRC32C).seal(entry_id, -1, 0, b"")
    return len(entry).to_bytes(4, "big") + entry


def log(path: Path, ledgers: list[LedgerId], *, closed: bool = True) -> Path:
    """A log with an entry for each of `ledgers`."""
    records = b"".join(record(ledger, number) for number, ledger in enumerate(ledgers))
    sizes = {ledger: ledgers.count(ledger) * RECORD for ledger in ledgers}
    end = entry_log.HEADER_SIZE + len(records)
    header = entry_log.write_header(1, end, len(sizes)) if closed else entry_log.write_header(1)
    path.write_bytes(header + records + (b"".join(entry_log.write_ledgers_map(sizes)) if closed else b""))
    return path


class Ledgers:
    """Answers for the store, and notes what it was asked."""

    def __init__(self, **states: LedgerLiveness) -> None:
        self.known = {LedgerId(0, int(name[1:])): state for name, state in states.items()}
        self.asked: list[list[LedgerId]] = []

    def __call__(self, ledgers: Collection[LedgerId]) -> dict[LedgerId, LedgerLiveness]:
        self.asked.append(list(ledgers))
        return {ledger: self.known[ledger] for ledger in ledgers}


def use(path: Path, states: Ledgers) -> LogUse:
    (found,) = log_uses([path], states)
    return found


@pytest.mark.parametrize("closed", [True, False])
def test_the_bytes_of_dead_ledgers_are_garbage(tmp_path: Path, closed: bool) -> None:
    path = log(tmp_path / "1f.log", [ONE, TWO, TWO, THREE], closed=closed)
    found = use(path, Ledgers(L1=ALIVE, L2=DEAD, L3=UNKNOWN))
    assert (found.log_id, found.from_map, found.complete, found.error) == (0x1F, closed, True, None)
    assert found.ledgers == [(ONE, RECORD, ALIVE), (TWO, 2 * RECORD, DEAD), (THREE, RECORD, UNKNOWN)]
    assert found.total_size_bytes == 4 * RECORD
    assert found.garbage_size_bytes == 2 * RECORD
    assert found.remaining_size_bytes == 2 * RECORD
    assert found.usage == 0.5


@pytest.mark.parametrize(
    ("alive", "dead", "expected"),
    [
        (0, 5, Compaction.DELETE),
        (1, 9, Compaction.MINOR),
        (1, 4, Compaction.MAJOR),  # a usage of exactly the threshold is above it, as in Apache's
        (3, 2, Compaction.MAJOR),
        (4, 1, None),
        (5, 0, None),
    ],
)
def test_compaction_by_usage(tmp_path: Path, alive: int, dead: int, expected: Compaction | None) -> None:
    found = use(log(tmp_path / "0.log", [ONE] * alive + [TWO] * dead), Ledgers(L1=ALIVE, L2=DEAD))
    assert found.compaction(Thresholds()) is expected
    assert found.reclaimable_size_bytes(Thresholds()) == (dead * RECORD if expected else 0)


def test_thresholds_that_are_off(tmp_path: Path) -> None:
    found = use(log(tmp_path / "0.log", [ONE, *[TWO] * 9]), Ledgers(L1=ALIVE, L2=DEAD))
    assert found.compaction(Thresholds(-1, -1)) is None
    assert found.compaction(Thresholds(0, 0.5)) is Compaction.MAJOR


def test_ledgers_in_an_unknown_state_are_kept(tmp_path: Path) -> None:
    found = use(log(tmp_path / "0.log", [ONE, TWO]), Ledgers(L1=UNKNOWN, L2=UNKNOWN))
    assert (found.garbage_size_bytes, found.usage, found.compaction(Thresholds())) == (0, 1.0, None)


def test_an_empty_log_has_no_usage(tmp_path: Path) -> None:
    (tmp_path / "0.log").touch()
    found = use(tmp_path / "0.log", Ledgers())
    assert (found.usage, found.compaction(Thresholds()), found.ledgers) == (None, None, [])


def test_a_log_with_a_damaged_map_is_scanned_and_reported(tmp_path: Path) -> None:
    path = log(tmp_path / "0.log", [ONE, TWO])
    data = bytearray(path.read_bytes())
    data[-33] ^= 1  # the count of its ledgers
    path.write_bytes(data)
    found = use(path, Ledgers(L1=ALIVE, L2=DEAD))
    assert (found.from_map, found.complete) == (False, True)
    assert "edgers map" in str(found.error)
    assert found.usage == 0.5


def test_a_log_with_damaged_records_is_never_deletable(tmp_path: Path) -> None:
    path = log(tmp_path / "0.log", [TWO, TWO, ONE], closed=False)
    data = bytearray(path.read_bytes())
    data[1024 + 2 * RECORD : 1024 + 2 * RECORD + 4] = b"\xff\xff\xff\xff"
    path.write_bytes(data)
    found = use(path, Ledgers(L2=DEAD))
    assert (found.complete, found.total_size_bytes) == (False, 2 * RECORD)
    assert f"at byte {1024 + 2 * RECORD}" in str(found.error)
    assert found.compaction(Thresholds()) is None


def test_invalid_and_deleted_logs(tmp_path: Path) -> None:
    (tmp_path / "1.log").write_bytes(b"BKLE" + bytes(1020))
    good = log(tmp_path / "2.log", [ONE])
    states = Ledgers(L1=ALIVE)
    found = list(log_uses([tmp_path / "0.log", tmp_path / "1.log", good], states))
    assert [each.path.name for each in found] == ["1.log", "2.log"]
    assert "BKLO" in str(found[0].error)
    assert not found[0].complete
    assert states.asked == [[ONE]]


def test_a_log_is_read_before_its_ledgers_are_looked_up(tmp_path: Path) -> None:
    first, second = log(tmp_path / "0.log", [ONE]), log(tmp_path / "1.log", [TWO])
    states = Ledgers(L1=ALIVE, L2=DEAD)
    uses = log_uses([first, second], states)
    next(uses)
    log(second, [THREE])
    states.known[THREE] = ALIVE
    assert next(uses).ledgers == [(THREE, RECORD, ALIVE)]
