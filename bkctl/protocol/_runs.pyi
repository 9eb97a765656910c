from collections.abc import Sequence
from typing import Any

from bkctl.protocol.messages import BytesLike, Request
from bkctl.protocol.runs import Answers, Kinds, Taken

API: int

def take_requests(
    is_v2: bool,
    buffer: memoryview,
    at: int,
    end: int,
    size_max: int,
    adds_max: int,
    count_max: int,
    types: tuple[type[Any], type[Any], type[Any]],
) -> Taken | None: ...
def answer_reads(
    ledger: tuple[int, int],
    entry_ids: Sequence[int],
    txn_ids: Sequence[int] | None,
    bodies: Sequence[BytesLike],
    max_lac: int | None,
) -> bytes: ...
def encode(
    is_v2: bool, operation: int, first_txn_id: int, requests: Sequence[Request], size_max: int
) -> bytes | None: ...
def take_answers(is_v2: bool, buffer: memoryview, at: int, end: int, size_max: int, kinds: Kinds) -> Answers | None: ...
