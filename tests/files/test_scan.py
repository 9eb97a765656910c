"""The inner loop of entry logs: the compiled one, the plain one and one record at a time say the same of any bytes."""

from __future__ import annotations

import itertools
import struct
import sys
import tracemalloc
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support import golden

import bkctl.files
from bkctl.errors import BkctlError
from bkctl.files import scan
from bkctl.files.entry_log import EntryLogReader
from bkctl.files.scan import (
    BATCH_ROWS_MAX,
    RecordBatch,
    ScannedFile,
    take_entries,
    take_entries_plainly,
)
from bkctl.files.windows import WINDOW_SIZE_BYTES
from bkctl.formats.entry import DigestManager, DigestType
from bkctl.formats.entry_log import write_header, write_ledgers_map
from bkctl.formats.journal import PADDING_MASK
from bkctl.formats.record import NO_LEDGER
from bkctl.ids import LedgerId

needs_compiled = pytest.mark.compiled
LEDGERS = (LedgerId(0, 0), LedgerId(0, 5), LedgerId(0, 2**63 - 1))
SCOPED = (LedgerId(7, 1), LedgerId(2**64 - 1, 2**64 - 1), LedgerId(1, 2**63))


def entry(ledger: LedgerId, entry_id: int, payload: bytes, digest_type: DigestType = DigestType.CRC32C) -> bytes:
    sealed = DigestManager(ledger, digest_type).seal(entry_id, entry_id - 1, (entry_id + 1) * 70_000, payload)
    return struct.pack(">i", len(sealed) + len(payload)) + sealed + payload


entries = st.builds(
    entry, st.sampled_from(LEDGERS + SCOPED), st.integers(0, 2**40), st.binary(max_size=60), st.sampled_from(DigestType)
)
#: Other bytes of a log: maps, padding, entries cut short, impossible sizes, anything.
others = st.one_of(
    st.binary(max_size=80),
    st.builds(lambda size, body: struct.pack(">i", size) + body, st.integers(-3, 90), st.binary(max_size=90)),
    st.sampled_from((b"".join(write_ledgers_map({LEDGERS[1]: 5})), b"\xf0" * 50, bytes(40))),
    st.builds(lambda body: struct.pack(">i", len(body)) + body, st.binary(min_size=16, max_size=60)),
)
logs = st.lists(st.one_of(entries, entries, entries, others), max_size=20).map(b"".join)


LOG_SOURCES = (ScannedFile.ENTRY_LOG, ScannedFile.ENTRY_LOG_WITH_SHORT)


@needs_compiled
@given(logs, st.integers(0, 60), st.sampled_from((1, 2)), st.sampled_from(LOG_SOURCES))
@example(entry(SCOPED[1], 0, b"")[:44], 0, 2, ScannedFile.ENTRY_LOG)
@example(b"", 5, 1, ScannedFile.ENTRY_LOG)
def test_the_compiled_loop_matches_the_plain_one(window: bytes, begin: int, version: int, source: ScannedFile) -> None:
    begins, flat, stop = take_entries(window, begin, version, source)
    plain_begins, plain_flat, plain_stop = take_entries_plainly(window, begin, version, source)
    assert (list(begins), stop) == (plain_begins, plain_stop)
    one = RecordBatch(window, 1024, begins, flat, version)
    other = RecordBatch(window, 1024, plain_begins, plain_flat, version)
    for name in COLUMNS:
        assert getattr(one, name) == getattr(other, name), name
    assert one.sizes_by_ledger() == other.sizes_by_ledger()
    assert one.bodies() == other.bodies()


padding = st.builds(
    lambda count, filler: struct.pack(">ii", PADDING_MASK, count) + filler, st.integers(-9, 40), st.binary(max_size=40)
)
whole_padding = st.integers(0, 40).map(lambda count: struct.pack(">ii", PADDING_MASK, count) + bytes(count))
journals = st.lists(st.one_of(entries, entries, whole_padding, padding, others), max_size=20).map(b"".join)


@needs_compiled
@given(journals, st.integers(0, 60), st.sampled_from((1, 2)), st.booleans())
@example(struct.pack(">i", 40) + bytes(80), 0, 1, True)
@example(struct.pack(">ii", PADDING_MASK, 2**31 - 1) + bytes(80), 0, 1, True)
@example(struct.pack(">ii", PADDING_MASK, 50) + bytes(50) + entry(LEDGERS[0], 0, b""), 0, 1, True)
def test_the_compiled_loop_matches_the_plain_one_for_journals(
    window: bytes, begin: int, version: int, skips_padding: bool
) -> None:
    source = ScannedFile.JOURNAL_OVER_PADDING if skips_padding else ScannedFile.JOURNAL
    begins, flat, stop = take_entries(window, begin, version, source)
    plain = take_entries_plainly(window, begin, version, source)
    assert (list(begins), stop) == (plain[0], plain[2])
    one, other = (RecordBatch(window, 512, begins, fields, version) for fields in (flat, plain[1]))
    for name in COLUMNS:
        assert getattr(one, name) == getattr(other, name), name


COLUMNS = (
    "offsets", "sizes", "scope_ids", "ledger_ids", "ledgers", "entry_ids", "last_add_confirmed", "lengths",
    "digest_types", "type",
)  # fmt: skip


@pytest.mark.parametrize("compiled", [True, False])
@given(logs, st.sampled_from((1, 2)), st.booleans(), st.sampled_from((0, 1100, 1024)), st.none() | st.integers(0, 2000))
def test_batches_match_the_records(
    tmp_path_factory: pytest.TempPathFactory, compiled: bool, log: bytes, version: int, special: bool, start: int,
    end: int | None,
) -> None:  # fmt: skip
    path = tmp_path_factory.getbasetemp() / f"scan-{compiled}.log"
    path.write_bytes(write_header(version) + log)
    with pytest.MonkeyPatch.context() as patch:
        if not compiled:
            patch.setattr(scan, "compiled", None)
        with EntryLogReader.open(path) as reader:
            records, error = drain(reader.records(start, end, special=special))
            batches, batch_error = drain(reader.batches(start, end, special=special))
        assert [record for batch in batches for record in batch.records()] == records
        assert str(batch_error) == str(error)
        for batch in batches:
            rows = list(batch.records())
            assert batch.offsets == [row.offset for row in rows]
            assert batch.sizes == [row.record_size for row in rows]
            assert batch.ledgers == [row.ledger for row in rows]
            assert list(zip(batch.scope_ids, batch.ledger_ids, strict=True)) == batch.ledgers
            assert batch.entry_ids == [row.entry_id for row in rows]
            assert batch.last_add_confirmed == [row.last_add_confirmed for row in rows]
            assert batch.lengths == [row.length for row in rows]
            assert batch.digest_types == [row.digest_type for row in rows]
            assert {batch.format_version} == {row.format_version for row in rows}
            assert [batch.type] * len(batch) == [row.type for row in rows]
            for digest_type in (None, DigestType.CRC32):
                sizes = batch.payload_sizes(digest_type) or [None] * len(batch)
                assert sizes == [row.payload_size(digest_type) for row in rows]
            ledger = rows[0].ledger
            assert list(batch.select(ledger).records()) == [row for row in rows if row.ledger == ledger]
            assert list(batch.select(entry_id=rows[-1].entry_id, scope_id=ledger.scope_id).records()) == [
                row for row in rows if (row.entry_id, row.ledger.scope_id) == (rows[-1].entry_id, ledger.scope_id)
            ]


def drain(rows):
    found, error = [], None
    try:
        found.extend(rows)
    except BkctlError as caught:
        error = caught
    return found, error


def write_log(path: Path, count: int, payload: bytes, version: int = 1, ledgers=LEDGERS) -> dict[LedgerId, int]:
    sizes: dict[LedgerId, int] = {}
    with path.open("wb") as file:
        file.write(write_header(version))
        for number, ledger in zip(range(count), itertools.cycle(ledgers)):
            record = entry(ledger, number, payload)
            sizes[ledger] = sizes.get(ledger, 0) + len(record)
            file.write(record)
    return sizes


@pytest.mark.parametrize(("version", "ledgers"), [(1, LEDGERS), (2, SCOPED)])
@pytest.mark.parametrize("compiled", [True, False])
def test_batches_are_bounded(
    tmp_path: Path, version: int, ledgers: tuple[LedgerId, ...], compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not compiled:
        monkeypatch.setattr(scan, "compiled", None)
    sizes = write_log(tmp_path / "1.log", 40_000, b"", version, ledgers)
    with EntryLogReader.open(tmp_path / "1.log") as reader:
        batches = list(reader.batches())
        assert max(map(len, batches)) <= BATCH_ROWS_MAX
        assert [each for batch in batches for each in batch.entry_ids] == list(range(40_000))
        assert reader.scan_ledgers() == (sizes, None)
        middle = batches[1].offsets[7]
        assert next(reader.batches(middle)).offsets[0] == middle
        assert [each for batch in reader.batches(0, middle) for each in batch.offsets][-1] < middle
    first = batches[0].first(3)
    assert (len(first), first.entry_ids, first.bodies()[2]) == (3, [0, 1, 2], entry(ledgers[2], 2, b"")[4:])


@needs_compiled
def test_many_ledgers_are_summed_whatever_their_order(tmp_path: Path) -> None:
    ledgers = [LedgerId(0, number * number) for number in range(3000)]
    sizes = write_log(tmp_path / "1.log", 9000, b"x", 1, ledgers)
    with EntryLogReader.open(tmp_path / "1.log") as reader:
        assert reader.scan_ledgers() == (sizes, None)


def test_memory_is_that_of_a_few_windows(tmp_path: Path) -> None:
    write_log(tmp_path / "1.log", 200_000, bytes(90))
    with EntryLogReader.open(tmp_path / "1.log") as reader:
        tracemalloc.start()
        count = sum(len(batch.offsets) for batch in reader.batches() if batch.ledgers and batch.lengths)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert count == 200_000
    assert peak < 10 * WINDOW_SIZE_BYTES


@pytest.mark.parametrize("bookie", golden.bookies(), ids=lambda bookie: f"{bookie.version}-{bookie.name}")
def test_apaches_logs_come_in_batches_too(bookie) -> None:
    for path in bookie.entry_logs:
        with EntryLogReader.open(path) as reader:
            records = list(reader.records(special=True))
            assert [each for batch in reader.batches(special=True) for each in batch.records()] == records
            assert all(record.ledger != NO_LEDGER for batch in reader.batches() for record in batch.records())


@pytest.mark.parametrize("api", [None, scan.COMPILED_API + 1])
def test_a_compiled_loop_of_other_sources_is_not_used(api: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    stale = ModuleType("bkctl.files._scan")
    stale.take_entries = lambda: None  # type: ignore[attr-defined]
    if api is not None:
        stale.API = api  # type: ignore[attr-defined]
    monkeypatch.setattr(bkctl.files, "_scan", stale, raising=False)
    monkeypatch.setitem(sys.modules, "bkctl.files._scan", stale)
    spec = spec_from_file_location("bkctl.files.scan_anew", scan.__file__)
    assert spec is not None
    assert spec.loader is not None
    anew = module_from_spec(spec)
    spec.loader.exec_module(anew)
    assert anew.compiled is None
    assert anew.take_entries(b"", 0, 1) == ([], [], 0)


@needs_compiled
def test_the_compiled_loop_is_of_these_sources() -> None:
    assert scan.compiled.API == scan.COMPILED_API
