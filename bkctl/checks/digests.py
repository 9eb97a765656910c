"""Checks of entries against their digests, where only the entries themselves are at hand.

An entry of a scoped ledger (V2) contains its digest type. An entry of scope 0 (V1) does not: the type comes from the
caller, from metadata, or from trying. Source: DigestManager.verifyDigest; BP-35.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass, field
from typing import Final, NamedTuple

from google_crc32c import extend as _crc32c_extend

from bkctl.files.scan import RecordBatch
from bkctl.formats.entry import HEADER_SIZE_V1, HEADER_SIZE_V2, DigestType, digest_function
from bkctl.formats.layout import Buffer
from bkctl.formats.record import Record, RecordType
from bkctl.ids import LedgerId

#: The types to try without a given one, the most likely first.
_TRIED: Final = (DigestType.CRC32C, DigestType.CRC32, DigestType.HMAC)
#: Entries of one ledger that are kept until its digest type is known.
_PENDING_MAX: Final = 1000
_PLACE_OF_PAYLOAD: Final = HEADER_SIZE_V1 + DigestType.CRC32C.code_length
_PASSWORD_HINT: Final = "HMAC needs the ledger's own password: add --password-file"


class DigestMismatchAt(NamedTuple):
    """An entry that does not match its digest. `offset` is the offset of its record in the file `where`."""

    ledger: LedgerId
    entry_id: int
    offset: int
    digest_type: DigestType
    where: str

    def __str__(self) -> str:
        return (
            f"{self.where}: entry {self.entry_id} of ledger {self.ledger} at byte {self.offset} does not match its "
            f"{self.digest_type.name} digest"
        )


class DigestCounts(NamedTuple):
    """Numbers of entries that matched (by digest type), did not match, or could not be checked.

    `unprotected` have no digest (DUMMY, or V2 without), `unknown` are of ledgers with an unknown digest type,
    `without_password` of HMAC ledgers without a given password.
    """

    matched: dict[DigestType, int]
    mismatched: int
    unprotected: int
    unknown: int
    without_password: int


class _Digest(NamedTuple):
    """A digest function; not `certain` for HMAC with the empty password because no other was given."""

    function: Callable[[bytes, Buffer], bytes]
    certain: bool = True


@dataclass(slots=True)
class _Ledger:
    """The state of a ledger of scope 0; `digest_type` is None until it is known."""

    digest_type: DigestType | None
    digest: _Digest | None
    pending: list[tuple[int, int, str]] = field(default_factory=list)
    pending_count: int = 0


@dataclass(eq=False, repr=False)
class DigestChecker:
    """Checks entries against their digests, and finds each ledger's digest type if it is not given.

    `digest_type` holds for all ledgers of scope 0; else `digest_of` (metadata) returns a ledger's type, or None.
    Without either, CRC32C, CRC32 and HMAC are tried. The type that an entry matches becomes its ledger's; any other
    entry of the ledger must match it too. Entries of ledgers without a match are unknown, and do not count as findings.
    `password_of` returns a ledger's password, `password` is the password of all others. Without a password HMAC is
    tried with the empty one; entries that do not match it count as unchecked.
    """

    digest_type: DigestType | None = None
    digest_of: Callable[[LedgerId], DigestType | None] | None = None
    _: KW_ONLY
    password: bytes | None = None
    password_of: Callable[[LedgerId], bytes | None] | None = None

    def __post_init__(self) -> None:
        self._ledgers: dict[LedgerId, _Ledger] = {}
        self._by_id: dict[int, _Ledger] = {}
        self._scoped: dict[tuple[LedgerId, DigestType], _Digest] = {}
        self._matched = dict.fromkeys(DigestType, 0)
        self._mismatched = self._unprotected = self._without_password = 0

    def check(self, record: Record, where: str = "") -> DigestMismatchAt | None:
        """Check one record of the file `where`; return None if it matches, cannot be checked, or is not an entry.

        A ledger's entries before its first match are checked again then: `late_findings` yields their mismatches.
        """
        if record.type is not RecordType.ENTRY:
            return None
        return self._check(record.ledger, record.entry_id, record.offset, record.body, record.digest_type, where)

    def check_batch(self, batch: RecordBatch, where: str = "") -> list[DigestMismatchAt]:
        """Check the records of a batch as `check` does; return the mismatches."""
        if batch.record is not None:
            found = self.check(batch.record, where)
            return [] if found is None else [found]
        findings: list[DigestMismatchAt] = []
        if batch.format_version == 1:
            self._check_v1(batch, where, findings)
            return findings
        columns = zip(batch.ledgers, batch.entry_ids, batch.offsets, batch.bodies(), batch.digest_types, strict=True)
        for ledger, entry_id, offset, body, digest_type in columns:
            found = self._check(ledger, entry_id, offset, body, digest_type, where)
            if found is not None:
                findings.append(found)
        return findings

    def late_findings(self) -> Iterator[DigestMismatchAt]:
        """Yield the mismatches that preceded the discovery of their ledger's digest type. Call it after all checks."""
        for ledger, state in self._ledgers.items():
            if state.digest_type is not None and state.pending:
                self._mismatched += state.pending_count
                for entry_id, offset, where in state.pending:
                    yield DigestMismatchAt(ledger, entry_id, offset, state.digest_type, where)
                state.pending, state.pending_count = [], 0

    def counts(self) -> DigestCounts:
        """Return the numbers so far; they are final after `late_findings`."""
        unknown = sum(state.pending_count for state in self._ledgers.values())
        matched = {digest_type: count for digest_type, count in self._matched.items() if count}
        return DigestCounts(matched, self._mismatched, self._unprotected, unknown, self._without_password)

    def hint(self) -> str | None:
        """Return advice for entries that could not be checked; None if all could."""
        if self._without_password:
            return _PASSWORD_HINT
        if any(state.pending_count for state in self._ledgers.values()):
            return f"perhaps of DUMMY or HMAC ledgers; {_PASSWORD_HINT}"
        return None

    def _check_v1(self, batch: RecordBatch, where: str, findings: list[DigestMismatchAt]) -> None:
        window, crc32c = batch.window, _crc32c_extend
        by_id, to_int = self._by_id, int.from_bytes
        matched = 0
        columns = zip(batch.begins, batch.sizes, batch.ledger_ids, strict=True)
        for index, (begin, size, ledger_id) in enumerate(columns):
            state = by_id.get(ledger_id)
            body = begin + 4
            if state is not None and state.digest_type is DigestType.CRC32C and size >= _PLACE_OF_PAYLOAD:
                digest_at = body + HEADER_SIZE_V1
                crc = crc32c(crc32c(0, window[body:digest_at]), window[digest_at + 4 : body + size])
                if crc == to_int(window[digest_at : digest_at + 4], "big"):
                    matched += 1
                    continue
            ledger = batch.ledgers[index]
            found = self._check(
                ledger, batch.entry_ids[index], batch.offsets[index], window[body : body + size], None, where
            )
            if found is not None:
                findings.append(found)
            elif state is None and ledger in self._ledgers:
                by_id[ledger_id] = self._ledgers[ledger]
        self._matched[DigestType.CRC32C] += matched

    def _check(
        self, ledger: LedgerId, entry_id: int, offset: int, body: bytes, digest_type: DigestType | None, where: str
    ) -> DigestMismatchAt | None:
        if body[0] >= 0x80:
            header_size = HEADER_SIZE_V2
            if digest_type is None:
                self._unprotected += 1
                return None
            key = ledger, digest_type
            digest: _Digest | None = self._scoped.get(key) or self._scoped.setdefault(key, self._digest(*key))
        else:
            header_size = HEADER_SIZE_V1
            state = self._ledgers.get(ledger) or self._new_ledger(ledger)
            if state.digest_type is None:
                return self._try(state, ledger, entry_id, offset, body, where)
            digest_type, digest = state.digest_type, state.digest
        assert digest is not None
        if digest_type is DigestType.DUMMY:
            self._unprotected += 1
        elif _matches(body, header_size, digest_type, digest.function):
            self._matched[digest_type] += 1
        elif not digest.certain:
            self._without_password += 1
        else:
            self._mismatched += 1
            return DigestMismatchAt(ledger, entry_id, offset, digest_type, where)
        return None

    def _try(
        self, state: _Ledger, ledger: LedgerId, entry_id: int, offset: int, body: bytes, where: str
    ) -> DigestMismatchAt | None:
        for digest_type in _TRIED:
            digest = self._digest(ledger, digest_type)
            if _matches(body, HEADER_SIZE_V1, digest_type, digest.function):
                # A match is certain, even with the empty password.
                state.digest_type, state.digest = digest_type, _Digest(digest.function)
                self._matched[digest_type] += 1
                return None
        state.pending_count += 1
        if len(state.pending) < _PENDING_MAX:
            state.pending.append((entry_id, offset, where))
        return None

    def _new_ledger(self, ledger: LedgerId) -> _Ledger:
        digest_type = self.digest_type
        if digest_type is None and self.digest_of is not None:
            digest_type = self.digest_of(ledger)
        state = _Ledger(digest_type, None if digest_type is None else self._digest(ledger, digest_type))
        self._ledgers[ledger] = state
        return state

    def _digest(self, ledger: LedgerId, digest_type: DigestType) -> _Digest:
        if digest_type is not DigestType.HMAC:
            return _Digest(digest_function(digest_type))
        password = None if self.password_of is None else self.password_of(ledger)
        password = self.password if password is None else password
        return _Digest(digest_function(digest_type, password or b""), password is not None)


def _matches(body: bytes, header_size: int, digest_type: DigestType, digest: Callable[[bytes, Buffer], bytes]) -> bool:
    payload_at = header_size + digest_type.code_length
    return len(body) >= payload_at and digest(body[:header_size], body[payload_at:]) == body[header_size:payload_at]
