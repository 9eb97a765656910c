from collections.abc import Sequence

from bkctl.protocol.client_runs import Answers, Kinds
from bkctl.protocol.messages import Request

API: int

def encode(
    is_v2: bool, operation: int, first_txn_id: int, requests: Sequence[Request], size_max: int, /
) -> bytes | None: ...
def take(is_v2: bool, buffer: memoryview, at: int, end: int, size_max: int, kinds: Kinds, /) -> Answers | None: ...
