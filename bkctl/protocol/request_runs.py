"""Runs of plain adds and of plain reads, by ledger, of all requests that a bookie's connection has received so far.

A broker's requests alternate between ledgers, and between adds and reads. Taken together they have one pass over the
bookie: each ledger's adds are one AddRun, and its reads one ReadRun, in their order. Requests of other kinds end the
pass; `v2.py` and `v3.py` decode those one by one.

`_add_runs.c` has the same loop, compiled. Both are tested against protobuf.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

from bkctl.ids import LedgerId
from bkctl.protocol import add_runs, read_runs
from bkctl.protocol.add_runs import AddRun
from bkctl.protocol.read_runs import ReadRun

#: Runs of one pass.
RUNS_MAX: Final = 1024

#: The offset behind the requests, and their runs.
Taken: TypeAlias = tuple[int, list[AddRun], list[ReadRun]]

_TYPES: Final = (LedgerId, AddRun, ReadRun)


def take_plain(
    buffer: memoryview, at: int, end: int, size_max: int, adds_max: int, count_max: int, *, is_v2: bool
) -> Taken | None:
    """Return the offset behind the adds and reads that begin at byte `at`, and their runs; None if none begins there.

    They have at most `adds_max` adds and `count_max` frames, each of at most `size_max` bytes (by its length field),
    within `buffer[:end]`. They may end earlier, where they would have more than RUNS_MAX runs.
    """
    adds: dict[tuple[LedgerId, bytes], list[AddRun]] = {}
    reads: dict[LedgerId, list[ReadRun]] = {}
    stop = at
    while True:
        if added := add_runs.take_run(buffer, stop, end, size_max, min(adds_max, count_max), is_v2=is_v2):
            end_of_run, run = added
            key = run.ledger, run.master_key
            if key not in adds and len(adds) + len(reads) == RUNS_MAX:
                break
            adds.setdefault(key, []).append(run)
            adds_max -= len(run.records)
            count_max -= len(run.records)
        elif asked := read_runs.take_run(buffer, stop, end, size_max, count_max, is_v2=is_v2):
            end_of_run, read = asked
            if read.ledger not in reads and len(adds) + len(reads) == RUNS_MAX:
                break
            reads.setdefault(read.ledger, []).append(read)
            count_max -= len(read.entry_ids)
        else:
            break
        stop = end_of_run
    if stop == at:
        return None
    return stop, [_joined_adds(parts) for parts in adds.values()], [_joined_reads(parts) for parts in reads.values()]


def _joined_adds(parts: Sequence[AddRun]) -> AddRun:
    """Return the adds of several runs of one ledger as one run."""
    ledger, master_key, *_ = parts[0]
    return AddRun(
        ledger,
        master_key,
        [entry_id for part in parts for entry_id in part.entry_ids],
        [record for part in parts for record in part.records],
        sum(part.size for part in parts),
        max(part.last_add_confirmed for part in parts),
        b"".join(part.answers for part in parts),
    )


def _joined_reads(parts: Sequence[ReadRun]) -> ReadRun:
    """Return the reads of several runs of one ledger as one run."""
    return ReadRun(
        parts[0].ledger,
        [entry_id for part in parts for entry_id in part.entry_ids],
        [txn_id for part in parts for txn_id in part.txn_ids],
    )


def _take_compiled(
    buffer: memoryview, at: int, end: int, size_max: int, adds_max: int, count_max: int, *, is_v2: bool
) -> Taken | None:
    """Do what `take_plain` does, by the compiled loop."""
    take = _loops.take_runs_v2 if is_v2 else _loops.take_runs_v3
    found: Taken | None = take(buffer, at, end, size_max, adds_max, count_max, _TYPES)
    return found


_loops: Any = add_runs.compiled  # type: ignore[attr-defined]
take_runs: Callable[..., Taken | None] = take_plain if _loops is None else _take_compiled
