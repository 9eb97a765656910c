"""Damage of journals of each version: what stands before it is printed, then one clear error, in bounded memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from damage import matrix
from support import golden
from support.command_line import CommandLine

from bkctl.checks.journal_check import check_journal
from bkctl.files.journals import journal_statistics
from bkctl.files.scan import ScanState
from bkctl.formats import journal
from bkctl.formats.entry import DigestManager, DigestType, master_key
from bkctl.formats.journal import write_padding
from bkctl.formats.record import record_of
from bkctl.ids import LedgerId

SIZE_MAX = 10_000


class Sample(NamedTuple):
    """A journal as some bookie left it."""

    data: bytes
    rows: list[dict[str, Any]]
    lengths: list[int]


def scoped_journal() -> bytes:
    """A journal of version 7, as our bookie writes it."""
    data = journal.write_header(7)
    for number in range(6):
        ledger = LedgerId(number % 3 << 60, 7 + number)
        digest, key = DigestManager(ledger, DigestType.CRC32C, b""), master_key(b"")
        records = [journal.ledger_key_record(ledger, key)]
        for entry_id in range(10):
            payload = bytes((entry_id,)) * (50 * entry_id)
            records.append(record_of(digest.seal(entry_id, entry_id - 1, entry_id * 100, payload) + payload))
        records += [journal.fence_record(ledger), journal.explicit_lac_record(ledger, digest.seal_lac(5))]
        data += b"".join(records)
        data += write_padding(len(data))
    return data + bytes(2048)


def golden_file(version: int) -> bytes:
    """A part of a real journal of `version`: its first groups, and zeros as they were allocated ahead."""
    if version == 7:
        return scoped_journal()
    found = [path for each in golden.journals() if each.name != "reused" for path in each.journals]
    found += [path for bookie in golden.bookies() if bookie.version == "4.18.0" for path in bookie.journals]
    for path in found:
        data = path.read_bytes()
        header = int.from_bytes(data[4:8], "big") if data.startswith(b"BKLG") else 1
        if header == version and len(data) > 4096:
            return data if len(data) <= SIZE_MAX else data[:SIZE_MAX] + bytes(SIZE_MAX // 8)
    raise AssertionError(version)


_samples: dict[int, Sample] = {}


@pytest.fixture(params=[1, 2, 3, 4, 5, 6, 7], ids=lambda version: f"v{version}")
def sample(request: pytest.FixtureRequest, tmp_path: Path) -> Sample:
    version = request.param
    if version not in _samples:
        path = tmp_path / "1a.txn"
        path.write_bytes(golden_file(version))
        answer = CommandLine(None)("journal", "read", path, "-o", "ndjson")
        rows = [json.loads(line) for line in answer.out.splitlines()]
        assert len(rows) > 10
        # The part was cut anywhere: what is behind its last whole record is left out.
        end = rows[-1]["offset"] + 4 + rows[-1]["recordSize"]
        data = path.read_bytes()[:end]
        if version >= journal.VERSION_PADDING:
            data += write_padding(len(data))
        _samples[version] = Sample(data + bytes(4096), rows, [row["offset"] for row in rows])
        path.unlink()
    return _samples[version]


def shown(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if name != "file"} for row in rows]


@pytest.mark.parametrize("damage", matrix.DAMAGE, ids=str)
def test_a_damaged_journal(sample: Sample, damage: matrix.Damage, tmp_path: Path) -> None:
    path = tmp_path / "1a.txn"
    path.write_bytes(sample.data)
    difference = damage.do(path, sample.lengths)
    removed = not path.exists()
    with matrix.bounded():
        answer = CommandLine(None)("journal", "read", path, "-o", "ndjson")
    rows = shown(matrix.check_answer(answer, path, removed=removed))
    if not removed and damage.place != "start":
        before = shown(matrix.undamaged(sample.rows, difference))
        assert rows[: len(before)] == before

    with matrix.bounded():
        check, counted = check_journal(path), journal_statistics(path)
    if removed:
        assert check is None
        assert counted is None
        return
    assert check is not None
    assert counted is not None
    for error in (check.error, counted.error):
        assert (0 if error is None else error.exit_code) == answer.code
    if answer.code in (0, 7):
        assert check.record_count == counted.record_count == len(rows)
        assert (check.state is ScanState.DAMAGED) == (answer.code == 7)
        assert check.good_end is not None
        assert check.good_end >= (rows[-1]["offset"] + 4 + rows[-1]["recordSize"] if rows else 0)


def test_finds_records_behind_damage(sample: Sample, tmp_path: Path) -> None:
    path = tmp_path / "1a.txn"
    middle = len(sample.rows) // 2
    for length in (-5, 0x7FFFFFF0, 3):
        at = sample.lengths[middle]
        path.write_bytes(sample.data[:at] + length.to_bytes(4, "big", signed=True) + sample.data[at + 4 :])
        answer = CommandLine(None)("journal", "verify", path, "-o", "ndjson")
        (row,) = matrix.check_answer(answer, path)
        assert answer.code == 7
        assert (row["state"], row["goodEnd"], row["recordCount"]) == ("damaged", at, middle)
        behind = sample.rows[middle + 1 :]
        assert row["recordsBehind"] == len(behind)
        assert row["entriesBehind"] == sum(each["type"] == "entry" for each in behind)
        assert row["resumesAt"] == behind[0]["offset"]
        rest = CommandLine(None)("journal", "read", path, "--from-pos", row["resumesAt"], "-o", "ndjson").rows
        assert shown(rest) == shown(behind)
