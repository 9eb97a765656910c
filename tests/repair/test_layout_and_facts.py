"""Parts that repairs share: the layout of a bookie's directories, and facts about its ledgers."""

from __future__ import annotations

from pathlib import Path

import pytest

from bkctl.errors import UsageError
from bkctl.files.directories import BookieDirectories
from bkctl.formats import journal
from bkctl.formats.entry import DigestManager, DigestType, master_key
from bkctl.formats.index import LedgerData
from bkctl.formats.metadata import Cookie
from bkctl.ids import LedgerId
from bkctl.model import LedgerFacts, LedgerLiveness
from bkctl.repair.downgrade import config_of
from bkctl.repair.index_contents import JournalFacts, RepairFindings, decide_ledger_data, later_lac, read_journals
from bkctl.repair.layout import BookieLayout, find_layout

KEY, OTHER_KEY = master_key(b"secret"), master_key(b"other")
A = LedgerId(0, 4)


@pytest.fixture
def directories(tmp_path: Path) -> dict[str, Path]:
    """`current` of the directories j, l1 and l2."""
    found = {name: tmp_path / name / "current" for name in ("j", "l1", "l2")}
    for path in found.values():
        path.mkdir(parents=True)
    (found["j"] / "1.txn").touch()
    return found


def test_roles_of_directories_follow_from_their_files(directories: dict[str, Path], tmp_path: Path) -> None:
    j, l1, l2 = directories.values()
    (l1 / "0.log").touch()
    assert find_layout(BookieDirectories.at(tmp_path / "l2", tmp_path / "l1", j)) == BookieLayout((j,), (l1,), (l1,))
    (j / "lastMark").touch()
    assert find_layout(BookieDirectories.at(j)) == BookieLayout((j,), (j,), (j,))
    assert find_layout(BookieDirectories.at(l2)) == BookieLayout((), (l2,), (l2,))


def test_a_parent_of_a_bookies_directory_is_refused(directories: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "ledgers/current").mkdir(parents=True)
    with pytest.raises(UsageError, match=r"not a bookie's directory.*ledgers"):
        find_layout(BookieDirectories([tmp_path / "j"], [tmp_path]))


def test_the_order_of_directories_comes_from_the_cookie(directories: dict[str, Path], tmp_path: Path) -> None:
    j, l1, l2 = directories.values()
    for each in (l1, l2):
        (each / "0.log").touch()
    with pytest.raises(UsageError, match="--conf"):
        find_layout(BookieDirectories.at(j, l1, l2))
    cookie = Cookie("bookie", (str(tmp_path / "j"),), (str(tmp_path / "l2"), str(tmp_path / "l1")))
    (l1 / "VERSION").write_bytes(cookie.serialize())
    assert find_layout(BookieDirectories.at(l1, l2, j)) == BookieLayout((j,), (l2, l1), (l2, l1))
    for some in ((l1,), (l2,), (l1, j)):
        (l2 / "VERSION").write_bytes(cookie.serialize())
        with pytest.raises(UsageError, match=r"more directories than are given: .*l2"):
            find_layout(BookieDirectories.at(*some))
    assert config_of(BookieDirectories.at(l1, l2, j)).ledger_directories == (str(l2.parent), str(l1.parent))
    with pytest.raises(UsageError, match=f"journal directories are not given: {tmp_path / 'j'}"):
        config_of(BookieDirectories.at(l1, l2))
    (l2 / "VERSION").unlink()
    # The cookie of directories that are elsewhere says nothing of these.
    (l1 / "VERSION").write_bytes(Cookie("bookie", ("/none",), ("/no-1", "/no-2")).serialize())
    with pytest.raises(UsageError):
        find_layout(BookieDirectories.at(l1, l2, j))


def test_a_configuration_gives_roles_and_order(directories: dict[str, Path]) -> None:
    j, l1, l2 = directories.values()
    layout = find_layout(BookieDirectories([j.parent], [l2.parent, l1.parent], [l1.parent]))
    assert layout == BookieLayout((j,), (l2, l1), (l1,))
    assert layout.all == [j, l2, l1]
    with pytest.raises(UsageError, match="2 ledger directories and 1 index"):
        layout.storages()


def test_damaged_journals_give_the_facts_before_the_damage(directories: dict[str, Path]) -> None:
    path = directories["j"] / "1.txn"
    key = journal.ledger_key_record(A, KEY)
    path.write_bytes(journal.write_header(6) + key + b"\x80\0\0\0" + key)
    findings, sizes = RepairFindings(), []
    facts = read_journals([directories["j"]], findings, sizes.append)
    assert facts == {A: JournalFacts(KEY)}
    assert [damage.path for damage in findings.damage] == [path]
    assert sizes == [path.stat().st_size]


ALIVE = LedgerLiveness.ALIVE
OLD = LedgerData(True, False, KEY)


@pytest.mark.parametrize(
    ("old", "facts", "known", "complete", "expected"),
    [
        (None, None, None, True, (True, b"", True)),
        (OLD, None, None, True, (False, KEY, False)),
        (OLD, JournalFacts(fenced=True), None, True, (True, KEY, False)),
        (OLD, None, LedgerFacts(ALIVE, OTHER_KEY, True), True, (True, KEY, False)),
        (LedgerData(True, True, bytes(20)), JournalFacts(KEY), None, True, (True, KEY, False)),
        (None, JournalFacts(KEY), None, True, (False, KEY, False)),
        (None, JournalFacts(KEY), None, False, (True, KEY, True)),
        (None, JournalFacts(), None, True, (True, b"", True)),
        (None, None, LedgerFacts(ALIVE, KEY, False), False, (False, KEY, False)),
        (None, None, LedgerFacts(ALIVE, None, None), False, (True, b"", True)),
        (None, None, LedgerFacts(LedgerLiveness.UNKNOWN), False, (True, b"", True)),
    ],
)
def test_ledger_data_is_decided_from_all_sources(
    old: LedgerData | None,
    facts: JournalFacts | None,
    known: LedgerFacts | None,
    complete: bool,
    expected: tuple[bool, bytes, bool],
) -> None:
    data, guessed = decide_ledger_data(old, facts, known, old_is_complete=complete)
    assert (data.fenced, data.master_key, guessed) == expected


def test_the_higher_lac_counts() -> None:
    digest = DigestManager(A, DigestType.CRC32C)
    low, high = digest.seal_lac(3), digest.seal_lac(9)
    assert later_lac(None, low) == low
    assert later_lac(low, high) == later_lac(high, low) == high
    assert later_lac(low, b"torn") == low
    assert later_lac(b"torn", low) == low
