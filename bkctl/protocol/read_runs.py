"""Runs of plain reads of one ledger, and their answers, encoded at once. `request_runs.py` gathers the runs.

A run is a sequence of adjacent frames that read entries 0 … I64_MAX of one ledger, without flags or a master key.
`v2.py` and `v3.py` decode all other frames one by one.

`_add_runs.c` has the loops of the answers, compiled. Both are tested against protobuf.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

from bkctl.ids import I64_MAX, LedgerId
from bkctl.protocol import add_runs, v2, v3, v3_hot
from bkctl.protocol.add_runs import VARINT, number_of
from bkctl.protocol.messages import BytesLike, ReadResponse, Status

_V2_HEAD: Final = v2.VERSION << 24 | v2.READ_ENTRY << 16
#: Frame length, header, ledger, entry.
_V2_FRAME: Final = struct.Struct(">iIQq")
#: Frame length, header, code, ledger, entry.
_V2_ANSWER: Final = struct.Struct(">iIiQq")
#: A read as in v3_hot.py; the groups are header size, transaction id, nested size, ledger, entry and scope.
_V3_READ: Final = re.compile(
    rb"\x0a(.)\x08\x03\x10\x01\x18%b\xa2\x06%b\x08%b\x10%b(?:\x78%b)?" % ((VARINT,) * 5), re.DOTALL
)
_LENGTH: Final = struct.Struct(">i")

_EOK: Final = Status.EOK
_new = tuple.__new__


class ReadRun(NamedTuple):
    """Plain reads of one ledger. `txn_ids` are the transaction ids of their frames; empty in v2, which has none."""

    ledger: LedgerId
    entry_ids: Sequence[int]
    txn_ids: Sequence[int]

    def part(self, numbers: Sequence[int]) -> ReadRun:
        """Return the reads at these places of the run."""
        txn_ids = self.txn_ids
        return ReadRun(
            self.ledger, [self.entry_ids[at] for at in numbers], [txn_ids[at] for at in numbers] if txn_ids else ()
        )

    def split(self, count: int) -> tuple[ReadRun, ReadRun]:
        """Return the first `count` reads of the run, and the others."""
        ledger, entry_ids, txn_ids = self
        return (
            ReadRun(ledger, entry_ids[:count], txn_ids[:count]),
            ReadRun(ledger, entry_ids[count:], txn_ids[count:]),
        )


#: The offset behind a run, and the fields of its ReadRun, the ledger as a plain tuple.
RunFields: TypeAlias = tuple[int, tuple[int, int], list[int], list[int]]


def take_run(
    buffer: memoryview, at: int, end: int, size_max: int, count_max: int, *, is_v2: bool
) -> tuple[int, ReadRun] | None:
    """Return the offset behind the run of frames that begins at byte `at`, and the run; None without a run there.

    A run has at most `count_max` frames of at most `size_max` bytes (by their length field), within `buffer[:end]`.
    """
    found = (take_v2 if is_v2 else take_v3)(buffer, at, end, size_max, count_max)
    if found is None:
        return None
    stop, ledger, entry_ids, txn_ids = found
    return stop, _new(ReadRun, (_new(LedgerId, ledger), entry_ids, txn_ids))


def take_v2(buffer: memoryview, at: int, end: int, size_max: int, count_max: int) -> RunFields | None:
    """Do what `take_run` does for protocol v2."""
    unpack = _V2_FRAME.unpack_from
    entry_ids: list[int] = []
    run_ledger = -1
    last = end - _V2_FRAME.size
    while at <= last and len(entry_ids) < count_max:
        frame_size, head, ledger_id, entry_id = unpack(buffer, at)
        if head != _V2_HEAD or frame_size != _V2_FRAME.size - 4 or frame_size > size_max or entry_id < 0:
            break
        if ledger_id != run_ledger:
            if entry_ids:
                break
            run_ledger = ledger_id
        entry_ids.append(entry_id)
        at += _V2_FRAME.size
    return (at, (0, run_ledger), entry_ids, []) if entry_ids else None


def take_v3(buffer: memoryview, at: int, end: int, size_max: int, count_max: int) -> RunFields | None:
    """Do what `take_run` does for protocol v3, of any scope."""
    unpack_length, match_read = _LENGTH.unpack_from, _V3_READ.fullmatch
    entry_ids: list[int] = []
    txn_ids: list[int] = []
    run_ledger = (0, 0)
    while end - at >= 4 and len(entry_ids) < count_max:
        (frame_size,) = unpack_length(buffer, at)
        stop = at + 4 + frame_size
        if stop > end or not 0 <= frame_size <= size_max:
            break
        found = match_read(buffer, at + 4, stop)
        if found is None:
            break
        header_size, txn, nested_size, ledger_field, entry_field, scope_field = found.groups()
        entry_id = number_of(entry_field)
        if header_size[0] != 5 + len(txn) or number_of(nested_size) != stop - found.end(3) or entry_id > I64_MAX:
            break
        ledger = 0 if scope_field is None else number_of(scope_field), number_of(ledger_field)
        if not entry_ids:
            run_ledger = ledger
        elif ledger != run_ledger:
            break
        entry_ids.append(entry_id)
        txn_ids.append(v3_hot.read_varint(memoryview(txn + bytes(8)), 0)[0])
        at = stop
    return (at, run_ledger, entry_ids, txn_ids) if entry_ids else None


def answers_v2(ledger_id: int, entry_ids: Sequence[int], bodies: Sequence[BytesLike]) -> bytes:
    """Return the response frames of v2 with these entries, in plain Python."""
    pack, out = _V2_ANSWER.pack, list[BytesLike]()
    for entry_id, body in zip(entry_ids, bodies, strict=True):
        out += (pack(24 + len(body), _V2_HEAD, 0, ledger_id, entry_id), body)
    return b"".join(out)


def answers_v3(
    ledger: tuple[int, int],
    entry_ids: Sequence[int],
    txn_ids: Sequence[int],
    bodies: Sequence[BytesLike],
    max_lac: int | None,
) -> bytes:
    """Return the response frames of v3 with these entries, in plain Python."""
    out: list[BytesLike] = []
    for entry_id, txn_id, body in zip(entry_ids, txn_ids, bodies, strict=True):
        response = ReadResponse(_EOK, _new(LedgerId, ledger), entry_id, body, max_lac)
        v3_hot.encode_read_response(txn_id, response, ledger[0], out)
    return b"".join(out)


def answers(reads: ReadRun, bodies: Sequence[BytesLike], max_lac: int | None, *, is_v2: bool) -> bytes:
    """Return the response frames with the entry of each read; `max_lac` is the bookie's LAC, which only v3 carries."""
    if is_v2:
        return _answers_v2(reads.ledger[1], reads.entry_ids, bodies)
    return _answers_v3(reads.ledger, reads.entry_ids, reads.txn_ids, bodies, max_lac)


def refusals(reads: ReadRun, status: Status, *, is_v2: bool) -> bytes:
    """Return the response frames with `status` in place of the entries."""
    out: list[BytesLike] = []
    if is_v2:
        for entry_id in reads.entry_ids:
            v2.encode_response(_V2_HEAD, ReadResponse(status, reads.ledger, entry_id), out)
        return b"".join(out)
    for entry_id, txn_id in zip(reads.entry_ids, reads.txn_ids, strict=True):
        header = v3.Header(txn_id, v3.READ_ENTRY, v3.VERSION, 0)
        v3.encode_response(header, ReadResponse(status, reads.ledger, entry_id), reads.ledger[0], out)
    return b"".join(out)


_loops: Any = add_runs.compiled  # type: ignore[attr-defined]
_answers_v2: Callable[..., bytes] = answers_v2 if _loops is None else _loops.answers_v2
_answers_v3: Callable[..., bytes] = answers_v3 if _loops is None else _loops.answers_v3
