"""Runs of plain adds and reads on a client's connection: encoded at once, and their answers decoded at once.

Plain are adds and reads without flags, and successful answers to them, in the forms of v2.py and v3_hot.py. The loops
are compiled (`_client_runs.c`). Without them, and for all other messages, a connection encodes and decodes one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

from bkctl.ids import LedgerId
from bkctl.protocol import v2, v3
from bkctl.protocol.messages import AddRequest, AddResponse, ReadRequest, ReadResponse, Request, Status

#: Version of `_client_runs` that fits; a module that was built from other sources is not used.
COMPILED_API: Final = 1
try:
    from bkctl.protocol import _client_runs as compiled

    if getattr(compiled, "API", None) != COMPILED_API:
        raise ImportError
except ImportError:  # installed without a compiler, or built from other sources
    compiled = None  # type: ignore[assignment]

#: The offset behind a run of answers, the key of each (v3: transaction id; v2: `v2.Key`), and its response.
Answers: TypeAlias = tuple[int, list[Any], list[AddResponse | ReadResponse]]
#: The function (buffer, at, end) → the answers that begin at byte `at`; None if the first frame has another form.
AnswerTaker: TypeAlias = Callable[[memoryview, int, int], Answers | None]
#: The classes that `compiled.take` creates, and the status of all its responses.
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


def answer_taker(is_v2: bool, size_max: int) -> AnswerTaker | None:
    """Return a function that takes answers and keeps no view of the buffer; None where it is not compiled.

    `size_max` is the largest size of a frame by its length field.
    """
    if compiled is None:
        return None
    take = compiled.take
    return lambda buffer, at, end: take(is_v2, buffer, at, end, size_max, KINDS)
