"""Runs of plain reads of one ledger, and their answers, encoded at once. `request_runs.py` gathers the runs.

A run is a sequence of reads of entries 0 … I64_MAX of one ledger, without flags or a master key.

`_add_runs.c` has the loops of the answers, compiled. Both are tested against protobuf.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from bkctl.ids import LedgerId
from bkctl.protocol import add_runs, v2, v3, v3_hot
from bkctl.protocol.messages import BytesLike, ReadResponse, Status

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


def answers_v2(ledger_id: int, entry_ids: Sequence[int], bodies: Sequence[BytesLike]) -> bytes:
    """Return the response frames of v2 with these entries, in plain Python."""
    pack, out = v2.RESPONSE.pack, list[BytesLike]()
    for entry_id, body in zip(entry_ids, bodies, strict=True):
        out += (pack(24 + len(body), v2.READ_HEAD, 0, ledger_id, entry_id), body)
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
            v2.encode_response(v2.READ_HEAD, ReadResponse(status, reads.ledger, entry_id), out)
        return b"".join(out)
    for entry_id, txn_id in zip(reads.entry_ids, reads.txn_ids, strict=True):
        header = v3.Header(txn_id, v3.READ_ENTRY, v3.VERSION, 0)
        v3.encode_response(header, ReadResponse(status, reads.ledger, entry_id), reads.ledger[0], out)
    return b"".join(out)


_loops: Any = add_runs.compiled  # type: ignore[attr-defined]
_answers_v2: Callable[..., bytes] = answers_v2 if _loops is None else _loops.answers_v2
_answers_v3: Callable[..., bytes] = answers_v3 if _loops is None else _loops.answers_v3
