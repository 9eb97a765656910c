"""Damage of a bookie's small files, marks, cookies, last ids, the kept state: a result, or one clear error."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from damage import matrix
from hypothesis import given
from hypothesis import strategies as st
from support import golden
from support.command_line import CommandLine

from bkctl.errors import Corrupt, Unsupported
from bkctl.formats.journal import LogMark
from bkctl.formats.metadata import Cookie
from bkctl.formats.status import BookieMode, BookieStatus

BOOKIE = next(each for each in golden.bookies() if each.version == "4.18.0" and each.name == "sorted")
CURRENT = BOOKIE.ledger_dir / "current"
FILES = {
    "lastMark": (CURRENT / "lastMark").read_bytes(),
    "VERSION": (CURRENT / "VERSION").read_bytes(),
    "lastId": (CURRENT / "lastId").read_bytes(),
    "BOOKIE_STATUS": b"1,READ_ONLY,1795234090406,true\n",
}


@pytest.mark.parametrize("damage", matrix.DAMAGE, ids=str)
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_small_file(name: str, damage: matrix.Damage, tmp_path: Path) -> None:
    current = tmp_path / "current"
    current.mkdir()
    (current / "1.log").write_bytes((CURRENT / "0.log").read_bytes())
    path = current / name
    path.write_bytes(FILES[name])
    damage.do(path)
    with matrix.bounded():
        answer = CommandLine(None)("bookie", "files", tmp_path, "-o", "ndjson")
    # A cookie is text: what is wrong with it has no one byte.
    rows = matrix.check_answer(answer, path, offset=name != "VERSION")
    assert len(rows) == 1 + path.exists()
    for row in rows:
        assert (row["detail"] is None) == (answer.code != 0 and row["file"] == str(path))
    if name == "lastMark":
        with matrix.bounded():
            answer = CommandLine(None)("journal", "lastmark", tmp_path, "-o", "ndjson")
        rows = matrix.check_answer(answer, path, removed=not path.exists())
        assert len(rows) == (answer.code == 0)


def test_a_damaged_mark_does_not_hide_the_others(tmp_path: Path) -> None:
    for number, data in enumerate((LogMark(5, 512).serialize(), b"short", LogMark(7, 1024).serialize())):
        (tmp_path / f"ledgers-{number}").mkdir()
        (tmp_path / f"ledgers-{number}" / "lastMark").write_bytes(data)
    answer = CommandLine(None)("journal", "lastmark", *sorted(tmp_path.iterdir()), "-o", "ndjson")
    (row,) = matrix.check_answer(answer, tmp_path / "ledgers-1" / "lastMark")
    assert (answer.code, row["journalId"], row["offset"]) == (7, 7, 1024)
    assert "ledgers-1" in answer.err


def problem_of(parse: Callable[[bytes, str], object], data: bytes) -> str | None:
    """Return the damage of `data`; None if it is intact."""
    try:
        parse(data, "file")
    except (Corrupt, Unsupported) as error:
        return str(error)
    return None


@given(st.binary(max_size=64))
def test_any_bytes_parse_as_a_mark_or_raise_one_error(data: bytes) -> None:
    problem = problem_of(LogMark.parse, data)
    assert (problem is None) == (len(data) == 16 and data[0] < 0x80 and data[8] < 0x80)
    assert problem is None or problem.startswith("file: ")


@given(st.binary(max_size=200) | st.binary(max_size=60).map(lambda data: b"1,READ_WRITE," + data))
def test_any_bytes_parse_as_a_status_or_raise_one_error(data: bytes) -> None:
    problem = problem_of(BookieStatus.parse, data)
    if problem is None:
        status = BookieStatus.parse(data)
        assert BookieStatus.parse(status.serialize()) == status
    else:
        assert problem.startswith("file: ")
        assert "\n" not in problem


@given(st.binary(max_size=300) | st.binary(max_size=300).map(lambda data: FILES["VERSION"][:40] + data))
def test_any_bytes_parse_as_a_cookie_or_raise_one_error(data: bytes) -> None:
    problem = problem_of(Cookie.parse, data)
    assert problem is None or problem.startswith("file: ")


@pytest.mark.parametrize(
    ("line", "status"),
    [
        (b"1,READ_ONLY,1795234090406\n", BookieStatus(BookieMode.READ_ONLY, 1795234090406, None)),
        (b"1,READ_WRITE,1795234090406,false\n", BookieStatus(BookieMode.READ_WRITE, 1795234090406, False)),
        (b"1,READ_ONLY, 17 ,TRUE\nmore", BookieStatus(BookieMode.READ_ONLY, 17, True)),
    ],
)
def test_reads_every_status_that_apache_writes(line: bytes, status: BookieStatus) -> None:
    assert BookieStatus.parse(line) == status


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b"", "layout version '' at byte 0"),
        (b"x,READ_ONLY,1", "layout version 'x' at byte 0"),
        (b"1,READ_ONLY", "2 fields, not 3 or 4 at byte 0"),
        (b"1,READONLY,1", "mode 'READONLY' at byte 2"),
        (b"1,READ_ONLY,now", "time 'now' at byte 12"),
        (b"1,READ_ONLY,99999999999999999999", "at byte 12"),
    ],
)
def test_wrong_status_error_names_its_byte(line: bytes, problem: str) -> None:
    with pytest.raises(Corrupt) as caught:
        BookieStatus.parse(line, "BOOKIE_STATUS")
    assert problem in str(caught.value)
    with pytest.raises(Unsupported, match="layout version 2"):
        BookieStatus.parse(b"2,READ_ONLY,1\n")
