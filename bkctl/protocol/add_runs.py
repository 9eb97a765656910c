"""Runs of plain adds of one ledger, so that many adds share their cost. `request_runs.py` gathers them.

A run is a sequence of adds of one ledger with one master key, without flags, each with an entry of that ledger in the
format of its scope. Entries are copied out of the connection's buffer as records: behind their size, as journals and
entry logs store them.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, TypeAlias

from bkctl.ids import LedgerId
from bkctl.protocol import v2, v3
from bkctl.protocol.messages import AddResponse, BytesLike, Status

#: Version of `_add_runs` that fits; a module that was built from other sources is not used.
COMPILED_API: Final = 3
try:
    from bkctl.protocol import _add_runs as compiled

    if getattr(compiled, "API", None) != COMPILED_API:
        raise ImportError
except ImportError:  # installed without a compiler, or built from other sources
    compiled = None  # type: ignore[assignment]

_LENGTH: Final = struct.Struct(">i")


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


def refusals(adds: AddRun, status: Status, *, is_v2: bool) -> bytes:
    """Return the response frames with `status`, in place of `adds.answers`."""
    out: list[BytesLike] = []
    if is_v2:
        for entry_id in adds.entry_ids:
            v2.encode_response(v2.ADD_HEAD, AddResponse(status, adds.ledger, entry_id), out)
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
