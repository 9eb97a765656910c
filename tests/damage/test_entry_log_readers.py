"""Every reader of entry logs, on every class of damage: all say the same end of the records and the same error."""

from __future__ import annotations

import json
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import pytest
from support.command_line import CommandLine
from support.source_rows import cuts, rows_of

from bkctl.checks.log_check import check_entry_log
from bkctl.config import BookieConfig
from bkctl.disk import Files
from bkctl.errors import BkctlError
from bkctl.files import scan
from bkctl.files.entry_log import EntryLogReader
from bkctl.files.listing import log_contents
from bkctl.files.scan import ScanState
from bkctl.files.windows import WINDOW_SIZE_BYTES
from bkctl.formats.entry import DigestManager, DigestType
from bkctl.formats.entry_log import write_header, write_ledgers_map
from bkctl.formats.record import record_of
from bkctl.ids import LedgerId
from bkctl.repair.index_contents import RepairFindings, read_log_entries
from bkctl.spark.sources.records import EntryLogSource
from bkctl.storage.compaction import EntryLogCompactor
from bkctl.storage.entry_log_metadata import EntryLogMetadata
from bkctl.storage.entry_logger import EntryLogger
from bkctl.storage.ledger.ledger_storage import LedgerStorage

PLAIN = (LedgerId(0, 1), LedgerId(0, 2**62))
SCOPED = (LedgerId(7, 1), LedgerId(2**64 - 1, 2**64 - 1))


class Seen(NamedTuple):
    """The result of one reader: the entries' offsets, where they end, and the error that says why."""

    offsets: list[int] | None
    good_end: int | None
    error: str | None


class Log(NamedTuple):
    """The bytes of an entry log, and where its records begin."""

    data: bytes
    offsets: list[int]


def make_log(ledgers: Sequence[LedgerId], sizes: Sequence[int], *, closed: bool, tail: bytes = b"") -> Log:
    version = 2 if ledgers[0].is_scoped else 1
    records, lengths, sums = [], dict.fromkeys(ledgers, 0), dict.fromkeys(ledgers, 0)
    for number, size in enumerate(sizes):
        ledger, entry_id = ledgers[number % len(ledgers)], number // len(ledgers)
        payload = bytes((number % 251 + 1,)) * size
        lengths[ledger] += size
        sealed = DigestManager(ledger, DigestType.CRC32C).seal(entry_id, entry_id - 1, lengths[ledger], payload)
        records.append(record_of(sealed + payload))
        sums[ledger] += len(records[-1])
    offsets, at = [], 1024
    for record in records:
        offsets.append(at)
        at += len(record)
    ledgers_map = b"".join(write_ledgers_map(sums, version)) if closed else b""
    header = write_header(version, at, len(sums)) if closed else write_header(version)
    return Log(header + b"".join(records) + ledgers_map + tail, offsets)


#: Small entries; entries at the edges of windows; one larger than a window.
SIZES = {
    "small": [number * 7 % 90 for number in range(60)],
    "windows": [30_000 + number * 13 % 500 for number in range(50)],
    "large": [100, WINDOW_SIZE_BYTES + 5, 40, 500_000, 9],
}


def size_field(value: int) -> Callable[[bytearray, int], None]:
    return lambda data, at: struct.pack_into(">i", data, at, value)


def grown_by(change: int) -> Callable[[bytearray, int], None]:
    return lambda data, at: struct.pack_into(">i", data, at, struct.unpack_from(">i", data, at)[0] + change)


def over_the_next(data: bytearray, at: int) -> None:
    """Make the record end where the record behind the next one begins."""
    (size,) = struct.unpack_from(">i", data, at)
    if at + 8 + size < len(data):
        (following,) = struct.unpack_from(">i", data, at + 4 + size)
        struct.pack_into(">i", data, at, size + 4 + max(0, following))


def put(offset: int, value: bytes) -> Callable[[bytearray, int], None]:
    def do(data: bytearray, at: int) -> None:
        data[at + offset : at + offset + len(value)] = value

    return do


def cut(keep: int) -> Callable[[bytearray, int], None]:
    def do(data: bytearray, at: int) -> None:
        del data[at + keep :]

    return do


def cut_and_filled(keep: int, tail: bytes) -> Callable[[bytearray, int], None]:
    def do(data: bytearray, at: int) -> None:
        data[at + keep :] = tail

    return do


DAMAGES: dict[str, Callable[[bytearray, int], None]] = {
    **{f"size {value}": size_field(value) for value in (0, -7, -0x100, 1, 15, 16, 40, 3000, 1 << 24, 2**31 - 1)},
    **{f"size {change:+}": grown_by(change) for change in (1, -1, 4, 256, 4096, 65_536, 1 << 20)},
    "size over the next": over_the_next,
    "unknown flags": put(4, b"\x91"),
    "flags of no digest": put(4, b"\xa9"),
    "flags 0xFF": put(4, b"\xff"),
    "negative entry id": put(12, b"\xff" * 8),
    "zero header": put(0, bytes(45)),
    "zero ids": put(4, bytes(41)),
    "zero sector": put(0, bytes(512)),
    "direct padding": put(0, b"\xf0" * 100),
    **{f"cut to {keep}": cut(keep) for keep in (0, 1, 4, 20, 60)},
    "zeros from here": cut_and_filled(0, bytes(5000)),
    "zeros from its size": cut_and_filled(4, bytes(5000)),
    "zeros from its ids": cut_and_filled(20, bytes(5000)),
    "other bytes from here": cut_and_filled(0, b"\x41" * 3000),
}


# --- the readers ----------------------------------------------------------------------------------------------------


def by_reader(path: Path, read: Callable[[EntryLogReader], Iterator[int]]) -> Seen:
    offsets: list[int] = []
    error = None
    with EntryLogReader.open(path) as reader:
        try:
            offsets.extend(read(reader))
        except BkctlError as caught:
            error = str(caught)
        assert (reader.end is ScanState.DAMAGED) == (error is not None)
        return Seen(offsets, reader.position, error)


def by_records(path: Path) -> Seen:
    return by_reader(path, lambda reader: (each.offset for each in reader.records()))


def by_batches(path: Path) -> Seen:
    return by_reader(path, lambda reader: (at for batch in reader.batches() for at in batch.offsets))


def by_batches_in_python(path: Path) -> Seen:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scan, "compiled", None)
        return by_batches(path)


def by_verify(path: Path) -> Seen:
    check = check_entry_log(path)
    assert check is not None
    return Seen(None, check.good_end, None if check.error is None else str(check.error))


def by_command(path: Path, *options: str) -> Seen:
    answer = CommandLine(None)("entrylog", "read", path, "-o", "ndjson", *options)
    error = answer.err.strip().removeprefix("bkctl: ").splitlines() if answer.code else []
    return Seen([json.loads(line)["offset"] for line in answer.out.splitlines()], None, error[0] if error else None)


def by_spark(path: Path) -> Seen:
    rows = rows_of(EntryLogSource, path=path, mode="permissive", borders=cuts(400_000, path))
    damages = [row["damage"] for row in rows if row.get("damage")]
    offsets = [row["offset"] for row in rows if not row.get("damage")]
    assert len(damages) <= 1
    return Seen(offsets, None, damages[0]["reason"] if damages else None)


def by_contents(path: Path) -> Seen:
    with EntryLogReader.open(path) as reader:
        found = log_contents(reader)
        return Seen(
            None, None if found.from_map else reader.position, None if found.error is None else str(found.error)
        )


def by_repair(path: Path) -> Seen:
    findings = RepairFindings()
    offsets = [
        (location & 0xFFFF_FFFF) - 4 for _, _, locations in read_log_entries(path, findings) for location in locations
    ]
    return Seen(offsets, None, str(findings.damage[0].error) if findings.damage else None)


class _CopiesOnly:
    """Stands for the logger, the storage and the index of a compaction of which every entry is alive."""

    def __init__(self, ledgers: set[LedgerId]) -> None:
        self.directories: list[Path] = []
        self.ledgers = ledgers

    def open_compaction_log(self) -> _CopiesOnly:
        return self

    def add(self, ledger: LedgerId, body: bytes) -> int:
        return 0

    def index_of(self, logger: object) -> _CopiesOnly:
        return self

    def live(self, rows: list[tuple[LedgerId, int, int]]) -> list[bool]:
        return [True] * len(rows)


def by_compaction(path: Path) -> Seen:
    with EntryLogReader.open(path) as reader:
        try:
            ledgers = {each.ledger for each in reader.records()}
        except BkctlError:
            ledgers = set(PLAIN + SCOPED)
    stand_in = _CopiesOnly(ledgers)
    config = BookieConfig(force_allow_compaction=True, compaction_rate=1 << 30, compaction_rate_by_entries=1 << 30)
    compactor = EntryLogCompactor(
        config, cast("LedgerStorage[Any]", stand_in), Files(), checkpoint=lambda: None,
        stopped=threading.Event(), removed=lambda log: None,
    )  # fmt: skip
    error = None
    try:
        compactor.compact(EntryLogMetadata(cast("EntryLogger", stand_in), 0, path, dict.fromkeys(ledgers, 1)))
    except BkctlError as caught:
        error = str(caught)
    target = compactor._target
    copied = [] if target is None else [(move.old & 0xFFFF_FFFF) - 4 for move in target.every_move()]
    return Seen(copied, None, error)


READERS: dict[str, Callable[[Path], Seen]] = {
    "records": by_records,
    "batches in Python": by_batches_in_python,
    "verify": by_verify,
    "entrylog read": by_command,
    "entrylog read, with payloads": lambda path: by_command(path, "--body", "--digest-type", "crc32c"),
    "spark": by_spark,
    "repair": by_repair,
    "compaction": by_compaction,
    "contents": by_contents,
}


@pytest.mark.parametrize("closed", [True, False], ids=["closed", "open"])
@pytest.mark.parametrize(
    ("sizes", "ledgers"),
    [
        *(pytest.param(sizes, SCOPED, id=f"{sizes}-scoped") for sizes in SIZES),
        *(pytest.param(sizes, PLAIN, id=f"{sizes}-plain") for sizes in ("small", "windows")),
        pytest.param("large", PLAIN, id="large-plain", marks=pytest.mark.long),
    ],
)
def test_all_readers_end_at_the_same_byte(
    tmp_path: Path, sizes: str, ledgers: tuple[LedgerId, ...], closed: bool
) -> None:
    whole = make_log(ledgers, SIZES[sizes], closed=closed)
    count = len(whole.offsets)
    border = next((at for at, offset in enumerate(whole.offsets) if offset > 1024 + WINDOW_SIZE_BYTES), count // 2)

    path = tmp_path / "0.log"
    kinds: set[bool] = set()
    damages = DAMAGES if sizes == "small" else {name: DAMAGES[name] for name in DAMAGES if name.startswith("size")}
    for name, damage in damages.items():
        for number in [count // 2, count - 1] if sizes == "small" else [border - 1]:
            data = bytearray(whole.data)
            damage(data, whole.offsets[number])
            path.write_bytes(data)
            expected = by_batches(path)
            assert expected.good_end is not None
            kinds.add(expected.error is None)
            for reader, see in READERS.items():
                seen = see(path)
                where = f"{reader}: {name} of record {number}"
                if reader == "contents" and seen.good_end is None:
                    continue  # the ledgers map is good, so nothing was read
                if reader in ("repair", "compaction"):  # they leave out what is not an entry of a ledger they know
                    assert seen.offsets is not None
                    assert expected.offsets is not None
                    assert set(seen.offsets) <= set(expected.offsets), where
                else:
                    assert seen.offsets in (None, expected.offsets), where
                assert seen.good_end in (None, expected.good_end), where
                if reader != "contents" or expected.error is not None:
                    assert (seen.error is None) == (expected.error is None), where
                if expected.error is not None and reader not in ("verify", "contents"):
                    assert expected.error.partition(", with an entry at byte")[0] in str(seen.error), where
    assert False in kinds
