"""Runs of plain adds and of plain reads, by ledger, of all requests that a bookie's connection has received so far.

A broker's requests alternate between ledgers, and between adds and reads. Taken together they have one pass over the
bookie: each ledger's adds are one AddRun, and its reads one ReadRun, in their order. Requests of other kinds end the
pass, and so do entry ids that some storage has no room for; `v2.py` and `v3.py` decode those one by one.

`_add_runs.c` has the same loop, compiled. Both are tested against protobuf.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, Final, TypeAlias

from bkctl.formats.entry import ENTRY_FLAGS_V2, ENTRY_V1, ENTRY_V2, HEADER_SIZE_V1
from bkctl.formats.index import ENTRY_ID_MAX
from bkctl.ids import I64_MAX, LedgerId
from bkctl.protocol import add_runs, v2, v3_hot
from bkctl.protocol.add_runs import AddRun
from bkctl.protocol.messages import AddRequest, AddResponse, BytesLike, ReadRequest, Status
from bkctl.protocol.read_runs import ReadRun

#: Runs of one pass.
RUNS_MAX: Final = 1024

#: The offset behind the requests, and their runs.
Taken: TypeAlias = tuple[int, list[AddRun], list[ReadRun]]

_TYPES: Final = (LedgerId, AddRun, ReadRun)
_LENGTH: Final = struct.Struct(">i")
#: Header, master key, ledger and entry of an add; header, ledger and entry of a read.
_V2_ADD: Final = struct.Struct(">I20sQq")
_V2_READ: Final = struct.Struct(">IQq")
_V2_BODY_AT: Final = 24
_EOK: Final = Status.EOK
_new = tuple.__new__


def take_plain(
    buffer: memoryview, at: int, end: int, size_max: int, adds_max: int, count_max: int, *, is_v2: bool
) -> Taken | None:
    """Return the offset behind the adds and reads that begin at byte `at`, and their runs; None if none begins there.

    They have at most `adds_max` adds and `count_max` frames, each of at most `size_max` bytes (by its length field),
    within `buffer[:end]`. They may end earlier, where they would have more than RUNS_MAX runs.
    """
    decode = _decode_v2 if is_v2 else v3_hot.decode_request
    #: Of each run of adds: entry ids, records, LACs and answers; of reads: entry ids and transaction ids.
    adds: dict[tuple[LedgerId, bytes], tuple[list[int], list[bytes], list[int], list[BytesLike]]] = {}
    reads: dict[LedgerId, tuple[list[int], list[int]]] = {}
    while end - at >= 4 and count_max > 0:
        (size,) = _LENGTH.unpack_from(buffer, at)
        stop = at + 4 + size
        if stop > end or not 0 <= size <= size_max:
            break
        found = decode(buffer, at + 4, stop)
        if found is None:
            break
        txn_id, _, request = found
        if isinstance(request, ReadRequest):
            asked = reads.get(request[0])
            if asked is None:
                if len(adds) + len(reads) == RUNS_MAX:
                    break
                asked = reads[request[0]] = [], []
            asked[0].append(request[1])
            if not is_v2:
                asked[1].append(txn_id)
        else:
            ledger, entry_id, master_key = request[:3]
            body: Any = request[3]
            lac = _lac_of(body, ledger, entry_id)
            if lac is None or adds_max <= 0:
                break
            run = adds.get((ledger, master_key))
            if run is None:
                if len(adds) + len(reads) == RUNS_MAX:
                    break
                run = adds[ledger, master_key] = [], [], [], []
            adds_max -= 1
            run[0].append(entry_id)
            run[1].append(_LENGTH.pack(len(body)) + body)
            run[2].append(lac)
            if is_v2:
                run[3].append(v2.RESPONSE.pack(24, v2.ADD_HEAD, 0, ledger[1], entry_id))
            else:
                v3_hot.encode_add_response(txn_id, _new(AddResponse, (_EOK, ledger, entry_id)), ledger[0], run[3])
        count_max -= 1
        at = stop
    if not adds and not reads:
        return None
    runs = [
        AddRun(ledger, master_key, ids, records, sum(map(len, records)), max(-1, *lacs), b"".join(answers))
        for (ledger, master_key), (ids, records, lacs, answers) in adds.items()
    ]
    return at, runs, [ReadRun(ledger, *fields) for ledger, fields in reads.items()]


def _decode_v2(buffer: memoryview, at: int, end: int) -> tuple[int, int, AddRequest | ReadRequest] | None:
    """Do what `v3_hot.decode_request` does for protocol v2, which has no transaction id."""
    size = end - at
    if size == _V2_READ.size:
        head, ledger_id, entry_id = _V2_READ.unpack_from(buffer, at)
        if head == v2.READ_HEAD and entry_id >= 0:
            ledger = _new(LedgerId, (0, ledger_id))
            return 0, v2.READ_ENTRY, _new(ReadRequest, (ledger, entry_id, None, False, False, None, None, False))
    elif size >= _V2_BODY_AT + HEADER_SIZE_V1:
        head, key, ledger_id, entry_id = _V2_ADD.unpack_from(buffer, at)
        if head == v2.ADD_HEAD:
            ledger, body = _new(LedgerId, (0, ledger_id)), buffer[at + _V2_BODY_AT : end]
            return 0, v2.ADD_ENTRY, _new(AddRequest, (ledger, entry_id, key, body, False, False, False))
    return None


def _lac_of(body: Any, ledger: LedgerId, entry_id: int) -> int | None:
    """Return the LAC in an add's body; None unless the body is that entry, in the format of its scope."""
    try:
        if ledger[0]:
            flags, scope_id, ledger_id, found, lac, _ = ENTRY_V2.unpack_from(body)
            fits = flags in ENTRY_FLAGS_V2 and scope_id == ledger[0]
        else:
            ledger_id, found, lac, _ = ENTRY_V1.unpack_from(body)
            fits = ledger_id <= I64_MAX
    except struct.error:
        return None
    return lac if fits and ledger_id == ledger[1] and found == entry_id and 0 <= entry_id <= ENTRY_ID_MAX else None


def _take_compiled(
    buffer: memoryview, at: int, end: int, size_max: int, adds_max: int, count_max: int, *, is_v2: bool
) -> Taken | None:
    """Do what `take_plain` does, by the compiled loop."""
    take = _loops.take_runs_v2 if is_v2 else _loops.take_runs_v3
    found: Taken | None = take(buffer, at, end, size_max, adds_max, count_max, _TYPES)
    return found


_loops: Any = add_runs.compiled  # type: ignore[attr-defined]
take_runs: Callable[..., Taken | None] = take_plain if _loops is None else _take_compiled
