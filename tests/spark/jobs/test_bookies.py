"""Owners of directories: by cookies, configurations and words, without Spark."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from support import source_rows  # noqa: F401 (skips where there is no PySpark)

from bkctl.errors import NotFound, UsageError
from bkctl.formats.metadata import Cookie
from bkctl.spark.jobs.bookies import find_bookies


def bookie(directory: Path, bookie_id: str | None, *names: str) -> Path:
    """A bookie's directory with a log or a journal in each of its parts, and its cookie."""
    for name in names or ("journal", "ledgers"):
        current = directory / name / "current"
        current.mkdir(parents=True)
        (current / ("0.log" if name.startswith("ledgers") else "1a.txn")).touch()
        if bookie_id is not None:
            cookie = Cookie(bookie_id, (str(directory / "journal"),), (str(directory / "ledgers"),))
            (current / "VERSION").write_bytes(cookie.serialize())
    return directory


def test_cookies_name_bookies_in_a_cluster_directory(tmp_path: Path) -> None:
    for number in range(3):
        bookie(tmp_path / f"bookie-{number}", f"host:{number + 1}")
    (tmp_path / "notes").mkdir()
    found = find_bookies([tmp_path])
    assert [each.bookie_id for each in found] == ["host:1", "host:2", "host:3"]
    assert found == find_bookies([tmp_path / f"bookie-{number}" for number in range(3)])
    assert found[1].entry_logs() == [str(tmp_path / "bookie-1" / "ledgers" / "current" / "0.log")]
    assert found[1].journals() == [str(tmp_path / "bookie-1" / "journal" / "current" / "1a.txn")]


def test_directories_on_several_disks_make_one_bookie(tmp_path: Path) -> None:
    first = bookie(tmp_path / "disk-1", "host:1", "journal", "ledgers-1")
    second = bookie(tmp_path / "disk-2", "host:1", "ledgers-2")
    (found,) = find_bookies([first / "journal", first / "ledgers-1", second])
    assert len(found.entry_logs()) == 2
    assert len(found.journals()) == 1


def test_copy_of_a_bookie_beside_it_is_refused(tmp_path: Path) -> None:
    # DbLedgerStorage has a log 0 in each directory.
    first, second = (bookie(tmp_path / name, "host:1", "ledgers") for name in ("disk-1", "disk-2"))
    for number, place in enumerate((first, second)):
        (place / "ledgers" / "current" / "0.log").write_bytes(bytes(1024) + bytes([number]) * 60)
    assert len(find_bookies([first, second])[0].entry_logs()) == 2
    copy = shutil.copytree(second, tmp_path / "copy")
    # The bookie went on.
    with open(second / "ledgers" / "current" / "0.log", "ab") as log:
        log.write(bytes(100))
    for places in ([first, second, copy], [tmp_path]):
        with pytest.raises(UsageError, match=r"/0\.log are the same entry log of bookie host:1; give"):
            find_bookies(places)
    assert len(find_bookies([first, copy])[0].entry_logs()) == 2


def test_configuration_names_directories_and_cookie_names_bookie(tmp_path: Path) -> None:
    home = bookie(tmp_path / "home", "host:7")
    conf = tmp_path / "bk_server.conf"
    conf.write_text(f"journalDirectory={home / 'journal'}\nledgerDirectories={home / 'ledgers'}\n")
    (found,) = find_bookies([conf])
    assert found.bookie_id == "host:7"
    assert found.journal_dirs == (str(home / "journal" / "current"),)
    assert found.ledger_dirs == found.index_dirs == (str(home / "ledgers" / "current"),)


def test_files_without_cookie_need_a_bookie_id(tmp_path: Path) -> None:
    place = bookie(tmp_path / "copy", None)
    with pytest.raises(UsageError, match=r"has no cookie \(VERSION\) that names its bookie; give BOOKIE_ID="):
        find_bookies([place])
    (found,) = find_bookies([f"host:9={place}"])
    assert found.bookie_id == "host:9"
    assert len(found.entry_logs()) == 1


def test_invalid_places_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No files of bookies"):
        find_bookies([])
    with pytest.raises(NotFound, match="does not exist"):
        find_bookies([tmp_path / "nowhere"])
    with pytest.raises(NotFound, match="has no files of a bookie"):
        find_bookies([tmp_path])
    with pytest.raises(NotFound, match="has no files of a bookie"):
        find_bookies([f"host:9={tmp_path}"])
    (tmp_path / "notes.txt").write_text("zkServers=127.0.0.1\n")
    log = bookie(tmp_path / "home", "host:7") / "ledgers" / "current" / "0.log"
    log.write_bytes(b"BKLO" + bytes(1020))
    for file in (log, tmp_path / "notes.txt"):
        with pytest.raises(UsageError, match=r"is not a configuration of a bookie; give its bk_server\.conf"):
            find_bookies([file])


def test_directories_that_no_cookie_names_are_left_out(tmp_path: Path) -> None:
    place = bookie(tmp_path / "bookie-0", "host:1")
    cookie = Cookie("host:1", ("/data/bookie-0/journal",), ("/data/bookie-0/ledgers",), "instance")
    for name in ("journal", "ledgers"):
        (place / name / "current" / "VERSION").write_bytes(cookie.serialize())
    shutil.copytree(place / "ledgers", place / "ledgers.old")
    (place / "ledgers.old" / "current" / "0.log").rename(place / "ledgers.old" / "current" / "7.log")
    for given in (place, tmp_path, f"host:1={place}"):
        left_out: list[Path] = []
        (found,) = find_bookies([given], left_out)
        assert found.entry_logs() == [str(place / "ledgers" / "current" / "0.log")]
        assert left_out == [place / "ledgers.old"]
    (found,) = find_bookies([place / "ledgers.old"])
    assert found.entry_logs() == [str(place / "ledgers.old" / "current" / "7.log")]


def test_copies_beside_all_ledger_directories_are_left_out_where_the_journal_is_on_another_disk(tmp_path: Path) -> None:
    bookie(tmp_path / "disk", "host:1", "journal")
    place = bookie(tmp_path / "data", None, "ledgers1", "ledgers2", "ledgers.old")
    cookie = Cookie(
        "host:1", (str(tmp_path / "disk" / "journal"),), (str(place / "ledgers1"), str(place / "ledgers2")), "instance"
    )
    for number, name in enumerate(("ledgers1", "ledgers2", "ledgers.old")):
        current = place / name / "current"
        (current / "VERSION").write_bytes(cookie.serialize())
        (current / "0.log").rename(current / f"{number}.log")
    left_out: list[Path] = []
    (found,) = find_bookies([place], left_out)
    assert found.entry_logs() == [str(place / f"ledgers{number + 1}/current/{number}.log") for number in (0, 1)]
    assert left_out == [place / "ledgers.old"]


@pytest.mark.parametrize("renamed", ["ledgers", "journal"])
def test_renamed_directories_beside_named_ones_count(tmp_path: Path, renamed: str) -> None:
    place = bookie(tmp_path / "bookie-0", "host:1")
    (place / renamed).rename(place / "renamed")
    left_out: list[Path] = []
    (found,) = find_bookies([place], left_out)
    assert len(found.entry_logs()) == len(found.journals()) == 1
    assert left_out == []
    log = Path(found.entry_logs()[0])
    log.write_bytes(bytes(1024 + 60))
    shutil.copytree(log.parents[1], place / "copy")
    with pytest.raises(UsageError, match="are the same entry log"):
        find_bookies([place], left_out)


def test_directories_of_one_name_gathered_from_several_disks_count(tmp_path: Path) -> None:
    place = bookie(tmp_path, None, "ledgers", "ledgers-2")
    cookie = Cookie("host:1", ("/disk-1/ledgers",), ("/disk-1/ledgers", "/disk-2/ledgers"))
    for name in ("ledgers", "ledgers-2"):
        (place / name / "current" / "VERSION").write_bytes(cookie.serialize())
    (found,) = find_bookies([place])
    assert len(found.entry_logs()) == 2
