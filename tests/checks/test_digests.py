"""Digests of entries: said by V2, by the caller or metadata, or found by trying; what does not match is a finding."""

from __future__ import annotations

import base64
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import golden

from bkctl.checks.digests import DigestChecker, DigestCounts
from bkctl.files.entry_log import EntryLogReader
from bkctl.formats.entry import DigestManager, DigestType
from bkctl.formats.entry_log import write_header
from bkctl.formats.metadata import LedgerMetadata
from bkctl.formats.record import RecordType, read_record
from bkctl.ids import LedgerId

LEDGER, OTHER, SCOPED = LedgerId(0, 5), LedgerId(0, 6), LedgerId(7, 1)
CRC32, HMAC, CRC32C, DUMMY = DigestType
PASSWORD = b"secret"


def body(
    ledger: LedgerId, digest_type: DigestType, entry_id: int = 0, payload: bytes = b"hello", *, spoiled: bool = False
) -> bytes:
    data = DigestManager(ledger, digest_type, PASSWORD).seal(entry_id, entry_id - 1, 5, payload) + payload
    return data[:-1] + bytes((data[-1] ^ 1,)) if spoiled else data


def check(checker: DigestChecker, *bodies: bytes) -> list[tuple[int, int]]:
    """The entries (id, offset) that did not match, those that came out late behind the others."""
    found, offset = [], 1024
    for each in bodies:
        finding = checker.check(read_record(each, 0, len(each), offset), "a.log")
        if finding is not None:
            found.append(finding)
        offset += 4 + len(each)
    return [(finding.entry_id, finding.offset) for finding in [*found, *checker.late_findings()]]


@pytest.mark.parametrize("digest_type", [CRC32, CRC32C, HMAC])
@pytest.mark.parametrize("said", ["caller", "metadata", "nobody", "entry"])
def test_one_flipped_bit_is_one_finding(digest_type: DigestType, said: str) -> None:
    ledger = SCOPED if said == "entry" else LEDGER
    checker = DigestChecker(
        digest_type if said == "caller" else None,
        (lambda _: digest_type) if said == "metadata" else None,
        password=PASSWORD,
    )
    bodies = [body(ledger, digest_type, number, spoiled=number == 1) for number in range(4)]
    assert check(checker, *bodies) == [(1, 1024 + 4 + len(bodies[0]))]
    assert checker.counts() == DigestCounts({digest_type: 3}, 1, 0, 0, 0)
    assert checker.hint() is None


@pytest.mark.parametrize("digest_type", [CRC32, CRC32C])
def test_mismatches_before_the_digest_type_is_known_are_late_findings(digest_type: DigestType) -> None:
    checker = DigestChecker()
    bodies = [body(LEDGER, digest_type, number, spoiled=number < 2) for number in range(3)]
    assert check(checker, *bodies) == [(0, 1024), (1, 1028 + len(bodies[0]))]
    assert checker.counts() == DigestCounts({digest_type: 1}, 2, 0, 0, 0)
    assert list(checker.late_findings()) == []


def test_entries_without_a_matching_digest_are_unknown() -> None:
    checker = DigestChecker()
    assert check(checker, body(LEDGER, HMAC), body(LEDGER, HMAC, 1), body(OTHER, CRC32C), body(OTHER, DUMMY, 1)) == [
        (1, 1024 + 3 * 4 + 2 * len(body(LEDGER, HMAC)) + len(body(OTHER, CRC32C)))
    ]
    assert checker.counts().unknown == 2
    assert "HMAC needs the ledger's own password" in str(checker.hint())


@pytest.mark.parametrize("ledger", [LEDGER, SCOPED])
def test_hmac_without_its_password_is_reported_as_unchecked(ledger: LedgerId) -> None:
    checker = DigestChecker(digest_of=lambda _: HMAC)
    assert check(checker, body(ledger, HMAC), body(ledger, HMAC, 1, spoiled=True)) == []
    assert checker.counts() == DigestCounts({}, 0, 0, 0, 2)
    assert "password" in str(checker.hint())
    knows = DigestChecker(digest_of=lambda _: HMAC, password=b"wrong", password_of=lambda each: PASSWORD)
    assert len(check(knows, body(ledger, HMAC), body(ledger, HMAC, 1, spoiled=True))) == 1
    wrong = DigestChecker(digest_of=lambda _: HMAC, password=b"wrong")
    assert len(check(wrong, body(ledger, HMAC))) == 1


@pytest.mark.parametrize("ledger", [LEDGER, SCOPED])
def test_dummy_protects_nothing(ledger: LedgerId) -> None:
    checker = DigestChecker(DUMMY)
    assert check(checker, body(ledger, DUMMY), body(ledger, DUMMY, 1, spoiled=True)) == []
    assert checker.counts() == DigestCounts({}, 0, 2, 0, 0)


@pytest.mark.parametrize("size", [16, 31, 32, 35, 39])
def test_an_entry_too_short_for_its_digest_does_not_match(size: int) -> None:
    cut = body(LEDGER, CRC32)[:size]
    found = check(DigestChecker(CRC32), cut)
    assert len(found) == 1


def test_special_records_have_no_digest() -> None:
    checker = DigestChecker(CRC32C)
    record = read_record(struct.pack(">Qq", 5, -0x1000) + bytes(24), 0, 40, 0)
    assert record.type is RecordType.LEDGER_KEY
    assert checker.check(record) is None
    assert checker.counts() == DigestCounts({}, 0, 0, 0, 0)


@given(
    st.lists(
        st.tuples(
            st.sampled_from((LEDGER, OTHER, LedgerId(0, 2**63 - 1))), st.sampled_from((CRC32, CRC32C, DUMMY)),
            st.binary(max_size=40), st.booleans(),
        ),
        max_size=30,
    )
)  # fmt: skip
def test_batches_are_checked_as_records_are(tmp_path_factory: pytest.TempPathFactory, entries) -> None:
    path = tmp_path_factory.getbasetemp() / "digests.log"
    bodies = [
        body(ledger, digest_type, number, payload, spoiled=spoiled and bool(payload))
        for number, (ledger, digest_type, payload, spoiled) in enumerate(entries)
    ]
    path.write_bytes(write_header() + b"".join(struct.pack(">i", len(each)) + each for each in bodies))
    by_batch, by_record = DigestChecker(), DigestChecker()
    with EntryLogReader.open(path) as reader:
        found = [each for batch in reader.batches() for each in by_batch.check_batch(batch, "x")]
        expected = [each for record in reader.records() if (each := by_record.check(record, "x")) is not None]
    assert found == expected
    assert list(by_batch.late_findings()) == list(by_record.late_findings())
    assert by_batch.counts() == by_record.counts()


@pytest.mark.parametrize("bookie", golden.bookies(), ids=lambda bookie: f"{bookie.version}-{bookie.name}")
def test_apaches_entries_match_with_and_without_metadata(bookie) -> None:
    ledgers: dict[LedgerId, LedgerMetadata] = {}
    for path, value in golden.zookeeper_nodes(bookie.version).items():
        data = base64.b64decode(value)
        if data.startswith(b"BookieMetadataFormatVersion"):
            digits = "".join(part.removeprefix("L") for part in Path(path).parts if part.removeprefix("L").isdigit())
            ledgers[LedgerId(0, int(digits))] = LedgerMetadata.parse(data)
    told = DigestChecker(
        digest_of=lambda ledger: ledgers[ledger].digest_type if ledger in ledgers else None,
        password_of=lambda ledger: ledgers[ledger].password if ledger in ledgers else None,
    )
    alone = DigestChecker()
    entries = 0
    for log in bookie.entry_logs:
        with EntryLogReader.open(log) as reader:
            for batch in reader.batches():
                entries += len(batch)
                assert told.check_batch(batch) == []
                assert alone.check_batch(batch) == []
    assert list(told.late_findings()) == list(alone.late_findings()) == []
    found = alone.counts()
    assert set(found.matched) >= {CRC32, CRC32C}
    assert sum(found.matched.values()) + found.unknown == entries
    if ledgers:
        known = told.counts()
        assert (known.mismatched, known.without_password) == (0, 0)
        assert sum(known.matched.values()) >= sum(found.matched.values())
