from collections.abc import Sequence

from bkctl.protocol import read_runs
from bkctl.protocol.add_runs import RunFields
from bkctl.protocol.messages import BytesLike

API: int

def take_v2(buffer: memoryview, at: int, end: int, size_max: int, count_max: int, /) -> RunFields | None: ...
def take_v3(buffer: memoryview, at: int, end: int, size_max: int, count_max: int, /) -> RunFields | None: ...
def take_reads_v2(
    buffer: memoryview, at: int, end: int, size_max: int, count_max: int, /
) -> read_runs.RunFields | None: ...
def take_reads_v3(
    buffer: memoryview, at: int, end: int, size_max: int, count_max: int, /
) -> read_runs.RunFields | None: ...
def answers_v2(ledger_id: int, entry_ids: Sequence[int], bodies: Sequence[BytesLike], /) -> bytes: ...
def answers_v3(
    ledger: tuple[int, int],
    entry_ids: Sequence[int],
    txn_ids: Sequence[int],
    bodies: Sequence[BytesLike],
    max_lac: int | None,
    /,
) -> bytes: ...
