"""Runs of plain adds and reads, so that many share the cost of a pass over a connection's buffer and of one answer.

Plain are adds and reads without flags, and successful answers to them, in the forms of `_wire.h`. A bookie's connection
takes all that stand in its buffer: each ledger's adds are one AddRun, and its reads one ReadRun, in their order. A
client's connection sends many requests as one piece, and takes their answers together.

The loops are in C (`_runs.c`). Without them, and for all other messages, `v2.py` and `v3.py` go frame by frame.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

from bkctl.ids import LedgerId
from bkctl.protocol import v2, v3
from bkctl.protocol.messages import AddRequest, AddResponse, BytesLike, ReadRequest, ReadResponse, Request, Status

#: Version of `_runs` that fits; a module that was built from other sources is not used.
COMPILED_API: Final = 1
try:
    from bkctl.protocol import _runs as compiled

    if getattr(compiled, "API", None) != COMPILED_API:
        raise ImportError
except ImportError:  # installed without a compiler, or built from other sources
    compiled = None  # type: ignore[assignment]

#: Runs of one pass.
RUNS_MAX: Final = 1024
_LENGTH: Final = struct.Struct(">i")


class AddRun(NamedTuple):
    """Plain adds of one ledger with one master key, each with an entry of that ledger in the format of its scope.

    `records` are the entries behind their sizes, as journals and entry logs store them, and `size` their bytes;
    `last_add_confirmed` is the highest one in them. `answers` are the response frames for the case that all of them are
    on disk.
    """

    ledger: LedgerId
    master_key: bytes
    entry_ids: Sequence[int]
    records: Sequence[bytes]
    size: int
    last_add_confirmed: int
    answers: bytes

    def refusals(self, status: Status, *, is_v2: bool) -> bytes:
        """Return the response frames with `status`, in place of `answers`."""
        out: list[BytesLike] = []
        if is_v2:
            for entry_id in self.entry_ids:
                v2.encode_response(v2.ADD_HEAD, AddResponse(status, self.ledger, entry_id), out)
            return b"".join(out)
        answers = memoryview(self.answers)
        at = 0
        while at < len(answers):
            (size,) = _LENGTH.unpack_from(answers, at)
            txn_id, operation, response, _ = v3.decode_response(answers, at + 4, at + 4 + size)
            assert isinstance(response, AddResponse)
            refusal = AddResponse(status, response.ledger, response.entry_id)
            v3.encode_response(v3.Header(txn_id, operation, v3.VERSION, 0), refusal, self.ledger[0], out)
            at += 4 + size
        return b"".join(out)


#: Called with runs and their outcome, until each run has had its own.
AnswerAdds: TypeAlias = Callable[[Sequence[AddRun], Status], None]


class ReadRun(NamedTuple):
    """Plain reads of entries 0 … I64_MAX of one ledger.

    `txn_ids` are the transaction ids of their frames; empty in v2, which has none.
    """

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

    def answers(self, bodies: Sequence[BytesLike], max_lac: int | None, *, is_v2: bool) -> bytes:
        """Return the response frames with the entries; `max_lac` is the bookie's LAC, which only v3 carries."""
        txn_ids, lac = (None, None) if is_v2 else (self.txn_ids, max_lac)
        return compiled.answer_reads(self.ledger, self.entry_ids, txn_ids, bodies, lac)

    def refusals(self, status: Status, *, is_v2: bool) -> bytes:
        """Return the response frames with `status` in place of the entries."""
        out: list[BytesLike] = []
        for number, entry_id in enumerate(self.entry_ids):
            response = ReadResponse(status, self.ledger, entry_id)
            if is_v2:
                v2.encode_response(v2.READ_HEAD, response, out)
            else:
                header = v3.Header(self.txn_ids[number], v3.READ_ENTRY, v3.VERSION, 0)
                v3.encode_response(header, response, self.ledger[0], out)
        return b"".join(out)


#: The offset behind the requests, and their runs.
Taken: TypeAlias = tuple[int, list[AddRun], list[ReadRun]]
_TYPES: Final = (LedgerId, AddRun, ReadRun)


def take_requests(
    buffer: memoryview, at: int, end: int, size_max: int, adds_max: int, count_max: int, *, is_v2: bool
) -> Taken | None:
    """Return the offset behind the adds and reads that begin at byte `at`, and their runs; None if none begins there.

    They have at most `adds_max` adds and `count_max` frames, each of at most `size_max` bytes (by its length field),
    within `buffer[:end]`. Other requests end them, and so do entry ids that some storage has no room for. They may end
    earlier, where they would have more than RUNS_MAX runs. Where the loops are not compiled, all come frame by frame.
    """
    if compiled is None:
        return None
    return compiled.take_requests(is_v2, buffer, at, end, size_max, adds_max, count_max, _TYPES)


#: The offset behind a run of answers, the key of each (v3: transaction id; v2: `v2.Key`), and its response.
Answers: TypeAlias = tuple[int, list[Any], list[AddResponse | ReadResponse]]
#: The classes that `compiled.take_answers` creates, and the status of all its responses.
Kinds: TypeAlias = tuple[type[AddResponse], type[ReadResponse], type[LedgerId], Status]

KINDS: Final[Kinds] = (AddResponse, ReadResponse, LedgerId, Status.EOK)
#: The response to each plain request.
RESPONSES: Final[dict[type, type]] = {AddRequest: AddResponse, ReadRequest: ReadResponse}
#: The opcode of each plain request in a `v2.Key`.
V2_OPCODES: Final[dict[type, int]] = {AddRequest: v2.ADD_ENTRY, ReadRequest: v2.READ_ENTRY}


def encode_run(is_v2: bool, first_txn_id: int, requests: Sequence[Request], size_max: int) -> bytes | None:
    """Return the frames of `requests`, of one kind, with v3 transaction ids from `first_txn_id` on.

    None unless all of them are plain adds or reads in frames of at most `size_max` bytes.
    """
    kind = type(requests[0])
    if compiled is None or kind not in RESPONSES:
        return None
    return compiled.encode(is_v2, v3.OPERATIONS[kind], first_txn_id, requests, size_max)


def take_answers(is_v2: bool, buffer: memoryview, at: int, end: int, size_max: int) -> Answers | None:
    """Return the answers that begin at byte `at`, without a view of the buffer; None if none of that form does.

    `size_max` is the largest size of a frame by its length field. None where the loops are not compiled.
    """
    if compiled is None:
        return None
    return compiled.take_answers(is_v2, buffer, at, end, size_max, KINDS)
