from collections.abc import Sequence

from bkctl.protocol.messages import BytesLike
from bkctl.protocol.request_runs import Taken

API: int

def take_runs_v2(
    buffer: memoryview, at: int, end: int, size_max: int, adds_max: int, count_max: int, types: tuple[type, ...], /
) -> Taken | None: ...
def take_runs_v3(
    buffer: memoryview, at: int, end: int, size_max: int, adds_max: int, count_max: int, types: tuple[type, ...], /
) -> Taken | None: ...
def answers_v2(ledger_id: int, entry_ids: Sequence[int], bodies: Sequence[BytesLike], /) -> bytes: ...
def answers_v3(
    ledger: tuple[int, int],
    entry_ids: Sequence[int],
    txn_ids: Sequence[int],
    bodies: Sequence[BytesLike],
    max_lac: int | None,
    /,
) -> bytes: ...
