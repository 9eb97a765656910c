"""Entry logs of every version, damaged in every way: what stands before is shown, then one error says where."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest
from damage import matrix
from support import golden
from support.command_line import CommandLine

from bkctl.formats import entry_log
from bkctl.formats.entry import DigestManager, DigestType
from bkctl.formats.record import RECORD_SIZE
from bkctl.ids import LedgerId

cli = CommandLine(None)
SCOPED: Final = (LedgerId(7, 1), LedgerId(1 << 63, 2), LedgerId((1 << 64) - 1, (1 << 64) - 1))


class Log(NamedTuple):
    """A sound log: its bytes, and where the size fields of its records are."""

    data: bytes
    offsets: list[int]


def offsets_of(data: bytes, start: int, end: int) -> list[int]:
    """Return the offsets of records by their lengths alone."""
    found = []
    while start < end:
        found.append(start)
        start += 4 + RECORD_SIZE.unpack_from(data, start)[0]
    return found


def apaches(*, closed: bool) -> Log:
    """A log of a real bookie, with or without its ledgers map."""
    for bookie in golden.bookies():
        for path in sorted(bookie.entry_logs):
            data = path.read_bytes()
            if len(data) > 20_000 and bool(entry_log.read_header(data).ledgers_map_offset) is closed:
                end = entry_log.read_header(data).ledgers_map_offset or len(data)
                return Log(data, offsets_of(data, entry_log.HEADER_SIZE, end))
    raise AssertionError("no golden log of this kind")


def of_version_0() -> Log:
    """The same records under the header that bookies wrote before there were ledgers maps."""
    log = apaches(closed=False)
    return Log(entry_log.write_header(0) + log.data[1024:], log.offsets)


def scoped() -> Log:
    """A closed log of version 2."""
    records, sizes = [], dict[LedgerId, int]()
    for entry_id in range(60):
        for ledger in SCOPED:
            payload = f"{ledger}:{entry_id}".encode() * (entry_id % 7)
            body = DigestManager(ledger, DigestType.CRC32C).seal(entry_id, -1, len(payload), payload) + payload
            records.append(RECORD_SIZE.pack(len(body)) + body)
            sizes[ledger] = sizes.get(ledger, 0) + len(records[-1])
    end = entry_log.HEADER_SIZE + sum(map(len, records))
    header = entry_log.write_header(2, end, len(sizes))
    data = header + b"".join(records) + b"".join(entry_log.write_ledgers_map(sizes, 2))
    return Log(data, offsets_of(data, entry_log.HEADER_SIZE, end))


def direct() -> Log:
    """The same records from the direct I/O logger: a filler up to 4096, 0xF0 to the next block, zeros."""
    log = apaches(closed=False)
    records = log.data[1024:]
    filler = RECORD_SIZE.pack(3068) + b"\xff" * 8 + bytes(3060)
    body = records + b"\xf0" * (-len(records) % 4096)
    return Log(entry_log.write_header() + filler + body + bytes(8192), [at + 3072 for at in log.offsets])


def with_damaged_map() -> Log:
    """A closed log whose ledgers map says another count of ledgers than its header."""
    log = apaches(closed=True)
    data = bytearray(log.data)
    data[19] ^= 0x40
    return Log(bytes(data), log.offsets)


LOGS: Final = {
    "v0": of_version_0,
    "v1-closed": lambda: apaches(closed=True),
    "v1-open": lambda: apaches(closed=False),
    "v1-damaged-map": with_damaged_map,
    "v2": scoped,
    "direct": direct,
}


@pytest.fixture(scope="module", params=LOGS, ids=str)
def sound(request: pytest.FixtureRequest) -> tuple[Log, list[dict[str, Any]]]:
    """A log and the rows of its records."""
    log = LOGS[request.param]()
    path = Path(str(request.getfixturevalue("tmp_path_factory").mktemp("sound"))) / "1f.log"
    path.write_bytes(log.data)
    rows = cli("entrylog", "read", path, "-o", "ndjson").rows
    assert [row["offset"] for row in rows] == log.offsets
    assert len(rows) > 50
    return log, rows


def told(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name != "file"}


@pytest.mark.parametrize("damage", matrix.DAMAGE, ids=str)
def test_damaged_log(damage: matrix.Damage, sound: tuple[Log, list[dict[str, Any]]], tmp_path: Path) -> None:
    log, rows = sound
    path = tmp_path / "1f.log"
    path.write_bytes(log.data)
    difference = damage.do(path, log.offsets)
    removed = damage.action == "remove"
    in_header = difference is not None and difference < 20
    # read: all that ends before the damage, then at most one error
    with matrix.bounded():
        answer = cli("entrylog", "read", path, "-o", "ndjson")
    found = matrix.check_answer(answer, path, removed=removed, offset=not in_header)
    before = [] if in_header and answer.code else matrix.undamaged(rows, difference)
    assert list(map(told, found[: len(before)])) == list(map(told, before))
    # show: never more than what can be read, where it counts
    answer = cli("entrylog", "show", path, "-o", "ndjson")
    shares = matrix.check_answer(answer, path, removed=removed, offset=not in_header)
    counted = sum(share["size"] for share in shares if not share["fromLedgersMap"])
    if shares and not shares[0]["fromLedgersMap"]:
        assert counted == sum(4 + row["recordSize"] for row in found)
    if answer.code == 0:
        assert all(share["complete"] for share in shares)
    # list: from the header alone
    answer = cli("entrylog", "list", tmp_path, "-o", "ndjson")
    assert removed == (answer.code == 4)
    assert removed or len(matrix.check_answer(answer, path, offset=not in_header)) == 1


@pytest.mark.parametrize("damage", matrix.DAMAGE, ids=str)
@pytest.mark.parametrize("sound", ["v1-closed", "v1-open", "v2"], ids=str, indirect=True)
def test_extracts_from_a_damaged_log(
    damage: matrix.Damage, sound: tuple[Log, list[dict[str, Any]]], tmp_path: Path
) -> None:
    log, rows = sound
    path = tmp_path / "1f.log"
    path.write_bytes(log.data)
    names = [row["ledgerQualifiedName"] for row in rows]
    ledger = max(set(names), key=names.count)
    difference = damage.do(path, log.offsets)
    answer = cli("entrylog", "extract", tmp_path, "--ledger", ledger, "-f", "-", "--format", "ndjson", "--scan")
    assert answer.code in matrix.CODES_REMOVED, answer.err
    assert "Traceback" not in answer.err
    found = {json.loads(line)["entryId"] for line in answer.out.splitlines()}
    readable = {
        row["entryId"]
        for row in cli_rows("entrylog", "read", tmp_path, "--ledger", ledger)
        if row["type"] == "entry"
    }  # fmt: skip
    assert found >= readable, "extraction resumes behind damage"
    if difference is None or difference >= entry_log.HEADER_SIZE:
        wanted = [row for row in matrix.undamaged(rows, difference) if row["ledgerQualifiedName"] == ledger]
        assert found >= {row["entryId"] for row in wanted}


def cli_rows(*arguments: object) -> list[dict[str, Any]]:
    """The rows of a command that may end with an error."""
    return [json.loads(line) for line in cli(*arguments, "-o", "ndjson").out.splitlines()]
