"""Runs of plain adds of one ledger, taken from a bookie's connection at once: what one add costs is shared by many.

A run is frames that stand one behind the other in what arrived, of one ledger with one master key, without flags, each
with an entry of that ledger in the format of its scope. Whatever is not in exactly that form is left to `v2.py` and
`v3.py`, frame by frame; so are entry ids that not every storage has room for. Entries are copied out of the
connection's buffer, as records: behind their size, as journals and entry logs keep them.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, TypeAlias

from bkctl.formats.entry import ENTRY_FLAGS_V2, ENTRY_V1, ENTRY_V2, HEADER_SIZE_V1
from bkctl.formats.index import ENTRY_ID_MAX
from bkctl.formats.record import record_of
from bkctl.ids import I64_MAX, LedgerId
from bkctl.protocol import v2, v3, v3_hot
from bkctl.protocol.messages import AddRequest, AddResponse, BytesLike, Status

#: What `_add_runs` must say of itself: one that was built from other sources, or none at all, is not used.
COMPILED_API: Final = 1
try:
    from bkctl.protocol import _add_runs as compiled
except ImportError:  # installed without a compiler
    compiled = None  # type: ignore[assignment]
else:
    if getattr(compiled, "API", None) != COMPILED_API:
        compiled = None  # type: ignore[assignment]

_V2_HEAD: Final = v2.VERSION << 24 | v2.ADD_ENTRY << 16
#: Frame length, header, master key, and what an entry of scope 0 begins with: ledger, entry, LAC.
_V2_FRAME: Final = struct.Struct(">iI20sQqq")
_V2_BODY_AT: Final = 28
_V2_BODY_MIN: Final = HEADER_SIZE_V1
#: Where the transaction id stands in a v3 frame behind its length.
_V3_TXN_AT: Final = 7
_V2_ANSWER: Final = struct.Struct(">iIiQq")
_LENGTH: Final = struct.Struct(">i")

_new = tuple.__new__


class AddRun(NamedTuple):
    """Plain adds of one ledger. `size` is the bytes of `records`, `last_add_confirmed` the highest that they say.

    `answers` are the frames that tell the client that all of them are on disk.
    """

    ledger: LedgerId
    master_key: bytes
    entry_ids: Sequence[int]
    records: Sequence[bytes]
    size: int
    last_add_confirmed: int
    answers: bytes


#: Called once with what became of a run.
AnswerAdds: TypeAlias = Callable[[Status], None]


#: Where a run ends, and the fields of its AddRun, the ledger as a plain tuple.
Taken: TypeAlias = tuple[int, tuple[int, int], bytes, list[int], list[bytes], int, int, bytes]


def take_run(
    buffer: memoryview, at: int, end: int, size_max: int, count_max: int, *, is_v2: bool
) -> tuple[int, AddRun] | None:
    """The run of frames that begins at byte `at` of `buffer`, and where it ends; None where none begins there.

    Of at most `count_max` frames of at most `size_max` bytes (their length field's), all within `buffer[:end]`.
    """
    found = (_take_v2 if is_v2 else _take_v3)(buffer, at, end, size_max, count_max)
    if found is None:
        return None
    stop, ledger, *fields = found
    return stop, _new(AddRun, (_new(LedgerId, ledger), *fields))


def take_v2(buffer: memoryview, at: int, end: int, size_max: int, count_max: int) -> Taken | None:
    """`take_run` for protocol v2, in plain Python."""
    unpack, pack_size, pack_answer = _V2_FRAME.unpack_from, _LENGTH.pack, _V2_ANSWER.pack
    entry_ids: list[int] = []
    records: list[bytes] = []
    answers: list[bytes] = []
    run_key, run_ledger, highest = b"", -1, -1
    last = end - _V2_FRAME.size
    size = 0
    while at <= last and len(records) < count_max:
        frame_size, head, key, ledger_id, entry_id, lac = unpack(buffer, at)
        stop = at + 4 + frame_size
        if head != _V2_HEAD or stop > end or not _V2_BODY_MIN + 24 <= frame_size <= size_max:
            break
        if ledger_id != run_ledger or key != run_key:
            if records or ledger_id > I64_MAX:
                break
            run_ledger, run_key = ledger_id, key
        if not 0 <= entry_id <= ENTRY_ID_MAX:
            break
        if lac > highest:
            highest = lac
        entry_ids.append(entry_id)
        records.append(pack_size(frame_size - 24) + buffer[at + _V2_BODY_AT : stop])
        answers.append(pack_answer(24, head, 0, ledger_id, entry_id))
        size += frame_size - 20
        at = stop
    if not records:
        return None
    return at, (0, run_ledger), run_key, entry_ids, records, size, highest, b"".join(answers)


def take_v3(buffer: memoryview, at: int, end: int, size_max: int, count_max: int) -> Taken | None:
    """`take_run` for protocol v3, of any scope, in plain Python."""
    entry_ids: list[int] = []
    records: list[bytes] = []
    answers: list[BytesLike] = []
    ledger, key, highest = LedgerId(0, 0), b"", -1
    form: _Form | None = None
    size = 0
    while end - at >= 4 and len(records) < count_max:
        found = None if form is None else form.read(buffer, at, end)
        if form is not None and found is not None:
            entry_id, lac, record, answer = found
            answers.append(answer)
            stop = at + form.size
        else:
            (frame_size,) = _LENGTH.unpack_from(buffer, at)
            stop = at + 4 + frame_size
            if stop > end or not 0 <= frame_size <= size_max:
                break
            call = v3_hot.decode_request(buffer, at + 4, stop)
            if call is None:
                break
            txn_id, _, request = call
            if type(request) is not AddRequest:
                break
            body = request.body
            assert isinstance(body, memoryview)
            ids = _ids_of(body, request.ledger)
            if ids is None or ids[0] != request.entry_id:
                break
            if not records:
                ledger, key = request.ledger, request.master_key
            elif request.ledger != ledger or request.master_key != key:
                break
            elif v3_hot.encode_add(txn_id, request, []) == stop - at:  # no number is written longer than it need be
                form = _Form(buffer, at, stop, txn_id, request)
            entry_id, lac = ids
            record = record_of(body)
            v3_hot.encode_add_response(txn_id, AddResponse(Status.EOK, ledger, entry_id), ledger[0], answers)
        if lac > highest:
            highest = lac
        entry_ids.append(entry_id)
        records.append(record)
        size += len(record)
        at = stop
    if not records:
        return None
    return at, ledger, key, entry_ids, records, size, highest, b"".join(answers)


class _Form:
    """Adds of protocol v3 that are as one that was decoded, but for the bytes of transaction id, entry id and entry."""

    def __init__(self, buffer: memoryview, at: int, stop: int, txn_id: int, request: AddRequest) -> None:
        self.ledger = request.ledger
        body = request.body
        assert isinstance(body, memoryview)
        #: Bytes of a frame; of the body; of the two numbers as varints.
        self.size = stop - at
        self.body_size = len(body)
        self.txn_size, self.entry_size = len(v3_hot.varint(txn_id)), len(v3_hot.varint(request.entry_id))
        scope = b"\x78" + v3_hot.varint(self.ledger[0]) if self.ledger[0] else b""
        #: Where they stand in a frame.
        self.txn_at = 4 + _V3_TXN_AT
        self.body_at = self.size - len(scope) - self.body_size
        self.entry_at = self.body_at - len(v3_hot.varint(self.body_size)) - 23 - self.entry_size
        #: What stands before, between and behind them.
        frame = buffer[at:stop]
        txn_end, entry_end, body_end = (
            self.txn_at + self.txn_size, self.entry_at + self.entry_size, self.body_at + self.body_size
        )  # fmt: skip
        self.fixed = tuple(
            (begin, end, bytes(frame[begin:end]))
            for begin, end in (
                (0, self.txn_at), (txn_end, self.entry_at), (entry_end, self.body_at), (body_end, self.size)
            ) if begin != end
        )  # fmt: skip
        self.txn_mask = int.from_bytes(b"\x80" * self.txn_size, "little")
        self.txn_marks = int.from_bytes(b"\x80" * (self.txn_size - 1), "little")
        self.txn_last_max = 127 if self.txn_size < 10 else 1
        nested = b"\x08\x00\x10%b\x18" % v3_hot.varint(self.ledger[1])
        header_size, nested_size = 5 + self.txn_size, len(nested) + self.entry_size + len(scope)
        self.answer = (
            _LENGTH.pack(2 + header_size + 5 + nested_size) + b"\x0a%c\x08\x03\x10\x02\x18" % header_size,
            b"\x10\x00\xaa\x06%c%b" % (nested_size, nested),
            scope,
        )
        self.size_field = _LENGTH.pack(self.body_size)

    def read(self, buffer: memoryview, at: int, end: int) -> tuple[int, int, bytes, bytes] | None:
        """Entry id, LAC, record and answer of the frame at byte `at`; None where it has another form."""
        if end - at < self.size:
            return None
        for begin, stop, expected in self.fixed:
            if buffer[at + begin : at + stop] != expected:
                return None
        txn_at = at + self.txn_at
        txn = bytes(buffer[txn_at : txn_at + self.txn_size])
        if int.from_bytes(txn, "little") & self.txn_mask != self.txn_marks:
            return None
        if self.txn_size > 1 and not 1 <= txn[-1] <= self.txn_last_max:
            return None
        body_at = at + self.body_at
        body = buffer[body_at : body_at + self.body_size]
        found = _ids_of(body, self.ledger)
        if found is None:
            return None
        entry_id, lac = found
        entry_at = at + self.entry_at
        entry = v3_hot.varint(entry_id)
        if buffer[entry_at : entry_at + self.entry_size] != entry:
            return None
        front, between, scope = self.answer
        return entry_id, lac, self.size_field + body, b"".join((front, txn, between, entry, scope))


def _ids_of(body: memoryview, ledger: LedgerId) -> tuple[int, int] | None:
    """Entry id and LAC of an entry; None where it is none of this ledger in the format of its scope."""
    try:
        if ledger[0]:
            flags, scope_id, ledger_id, entry_id, lac, _ = ENTRY_V2.unpack_from(body)
            fits = flags in ENTRY_FLAGS_V2 and scope_id == ledger[0] and ledger_id == ledger[1]
        else:
            ledger_id, entry_id, lac, _ = ENTRY_V1.unpack_from(body)
            fits = ledger_id == ledger[1] <= I64_MAX
    except struct.error:
        return None
    return (entry_id, lac) if fits and 0 <= entry_id <= ENTRY_ID_MAX else None


_take_v2 = take_v2 if compiled is None else compiled.take_v2
_take_v3 = take_v3 if compiled is None else compiled.take_v3


def refusals(adds: AddRun, status: Status, *, is_v2: bool) -> bytes:
    """The frames that tell the client of `status` instead of `adds.answers`."""
    out: list[BytesLike] = []
    if is_v2:
        for entry_id in adds.entry_ids:
            v2.encode_response(_V2_HEAD, AddResponse(status, adds.ledger, entry_id), out)
        return b"".join(out)
    answers = memoryview(adds.answers)
    at = 0
    while at < len(answers):
        (size,) = _LENGTH.unpack_from(answers, at)
        txn_id, operation, response, _ = v3.decode_response(answers, at + 4, at + 4 + size)
        assert isinstance(response, AddResponse)
        refusal = AddResponse(status, response.ledger, response.entry_id)
        v3.encode_response(v3.Header(txn_id, operation, v3.VERSION, 0), refusal, adds.ledger[0], out)
        at += 4 + size
    return b"".join(out)
