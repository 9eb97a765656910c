"""Runs of plain adds of one ledger, so that many adds share their cost. `request_runs.py` gathers them.

A run is a sequence of adjacent frames of one ledger with one master key, without flags, each with an entry of that
ledger in the format of its scope. `v2.py` and `v3.py` decode all other frames one by one, and entry ids that some
storage has no room for. Entries are copied out of the connection's buffer as records: behind their size, as journals
and entry logs store them.

`_add_runs.c` is the same loop, compiled. Both are tested against protobuf.
"""

from __future__ import annotations

import functools
import re
import struct
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, TypeAlias

from bkctl.formats.entry import ENTRY_FLAGS_V2, ENTRY_V1, ENTRY_V2, HEADER_SIZE_V1
from bkctl.formats.index import ENTRY_ID_MAX
from bkctl.ids import I64_MAX, LedgerId
from bkctl.protocol import v2, v3, v3_hot
from bkctl.protocol.messages import AddResponse, BytesLike, Status

#: Version of `_add_runs` that fits; a module that was built from other sources is not used.
COMPILED_API: Final = 3
try:
    from bkctl.protocol import _add_runs as compiled
except ImportError:  # installed without a compiler
    compiled = None  # type: ignore[assignment]
else:
    if getattr(compiled, "API", None) != COMPILED_API:
        compiled = None  # type: ignore[assignment]

_V2_HEAD: Final = v2.VERSION << 24 | v2.ADD_ENTRY << 16
#: Frame length, header, master key, and the first fields of an entry of scope 0: ledger, entry, LAC.
_V2_FRAME: Final = struct.Struct(">iI20sQqq")
_V2_BODY_AT: Final = 28
_V2_BODY_MIN: Final = HEADER_SIZE_V1
#: A varint of up to 64 bits, as protobuf writes it or longer.
VARINT: Final = rb"([\x80-\xff]{0,8}[\x00-\x7f]|[\x80-\xff]{9}[\x00\x01])"
#: An add as in v3_hot.py, up to its body; the groups are header size, transaction id, nested size,
#: ledger, entry, master key and body size.
_V3_ADD: Final = re.compile(
    rb"\x0a(.)\x08\x03\x10\x02\x18%b\xaa\x06%b\x08%b\x10%b\x1a\x14(.{20})\x22%b" % ((VARINT,) * 5), re.DOTALL
)
_V3_SCOPE: Final = re.compile(b"\x78" + VARINT)
_SCOPE_MAX: Final = 11
#: Frame length, header size, transaction id, nested size, nested message in three parts.
_V3_ANSWER: Final = b"%b\x0a%c\x08\x03\x10\x02\x18%b\x10\x00\xaa\x06%c%b%b%b"
_V2_ANSWER: Final = struct.Struct(">iIiQq")
_LENGTH: Final = struct.Struct(">i")

_new = tuple.__new__


class AddRun(NamedTuple):
    """Plain adds of one ledger. `size` is the bytes of `records`, `last_add_confirmed` the highest one in them.

    `answers` are the response frames for the case that all of them are on disk.
    """

    ledger: LedgerId
    master_key: bytes
    entry_ids: Sequence[int]
    records: Sequence[bytes]
    size: int
    last_add_confirmed: int
    answers: bytes


#: Called with runs and their outcome, until each run has had its own.
AnswerAdds: TypeAlias = Callable[[Sequence[AddRun], Status], None]


#: The offset behind a run, and the fields of its AddRun, the ledger as a plain tuple.
RunFields: TypeAlias = tuple[int, tuple[int, int], bytes, list[int], list[bytes], int, int, bytes]


def take_run(
    buffer: memoryview, at: int, end: int, size_max: int, count_max: int, *, is_v2: bool
) -> tuple[int, AddRun] | None:
    """Return the offset behind the run of frames that begins at byte `at`, and the run; None without a run there.

    A run has at most `count_max` frames of at most `size_max` bytes (by their length field), within `buffer[:end]`.
    """
    found = (take_v2 if is_v2 else take_v3)(buffer, at, end, size_max, count_max)
    if found is None:
        return None
    stop, ledger, *fields = found
    return stop, _new(AddRun, (_new(LedgerId, ledger), *fields))


def take_v2(buffer: memoryview, at: int, end: int, size_max: int, count_max: int) -> RunFields | None:
    """Do what `take_run` does for protocol v2."""
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


def take_v3(buffer: memoryview, at: int, end: int, size_max: int, count_max: int) -> RunFields | None:
    """Do what `take_run` does for protocol v3, of any scope."""
    unpack_length, match_add, pack_size = _LENGTH.unpack_from, _V3_ADD.match, _LENGTH.pack
    entry_ids: list[int] = []
    records: list[bytes] = []
    answers: list[bytes] = []
    run_key, run_ledger, highest = b"", (0, 0), -1
    size = 0
    while end - at >= 4 and len(records) < count_max:
        (frame_size,) = unpack_length(buffer, at)
        stop = at + 4 + frame_size
        if stop > end or not 0 <= frame_size <= size_max:
            break
        found = match_add(buffer, at + 4, stop)
        if found is None:
            break
        header_size, txn, nested_size, ledger_field, entry_field, key, body_field = found.groups()
        body_at = found.end()
        body_size = number_of(body_field)
        body_end = body_at + body_size
        # `_scope_of` keeps what it is called with, so it gets no more bytes than the field may have.
        scope_id = 0 if body_end == stop else _scope_of(bytes(buffer[body_end : min(stop, body_end + _SCOPE_MAX + 1)]))
        if header_size[0] != 5 + len(txn) or number_of(nested_size) != stop - found.end(3) or scope_id is None:
            break
        ledger = scope_id, number_of(ledger_field)
        body = buffer[body_at:body_end]
        ids = _ids_of(body, ledger)
        if ids is None:
            break
        entry_id, lac = ids
        entry = v3_hot.varint(entry_id)
        if entry_field != entry and number_of(entry_field) != entry_id:
            break
        if not records:
            run_ledger, run_key = ledger, key
            tail = b"\x78" + v3_hot.varint(scope_id) if scope_id else b""
            nested = b"\x08\x00\x10%b\x18" % v3_hot.varint(ledger[1])
            nested_rest = len(nested) + len(tail)
        elif ledger != run_ledger or key != run_key:
            break
        if not txn[-1] and len(txn) > 1:  # a longer form of the number than ours
            txn = v3_hot.varint(number_of(txn))
        sizes = 12 + len(txn) + nested_rest + len(entry), 5 + len(txn), nested_rest + len(entry)
        answers.append(_V3_ANSWER % (pack_size(sizes[0]), sizes[1], txn, sizes[2], nested, entry, tail))
        if lac > highest:
            highest = lac
        entry_ids.append(entry_id)
        records.append(pack_size(body_size) + body)
        size += 4 + body_size
        at = stop
    if not records:
        return None
    return at, run_ledger, run_key, entry_ids, records, size, highest, b"".join(answers)


@functools.lru_cache(1024)
def number_of(field: bytes) -> int:
    """Return the number that a varint stands for; most numbers of a run repeat."""
    return v3_hot.read_varint(memoryview(field + bytes(8)), 0)[0]


@functools.lru_cache(1024)
def _scope_of(tail: bytes) -> int | None:
    """Return the scope that the field behind an add's body says; None for another field, or a body cut short."""
    found = _V3_SCOPE.fullmatch(tail)
    return None if found is None else number_of(found[1])


def _ids_of(body: memoryview, ledger: tuple[int, int]) -> tuple[int, int] | None:
    """Return entry id and LAC of an entry; None for another ledger's, or one not in the format of its scope."""
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


def refusals(adds: AddRun, status: Status, *, is_v2: bool) -> bytes:
    """Return the response frames with `status`, in place of `adds.answers`."""
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
