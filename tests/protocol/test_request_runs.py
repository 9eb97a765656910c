"""Passes over what a connection received say what the decoders say; runs are gathered by ledger, in order."""

from __future__ import annotations

import functools
import itertools
import random
import struct
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from protocol import test_add_runs, test_read_runs
from protocol.test_add_runs import KEYS, PLAIN, SCOPED, SIZE_MAX, add, entry, frame, needs_compiled
from support.mutation import changed, changes

from bkctl.errors import BkctlError
from bkctl.formats.index import ENTRY_ID_MAX
from bkctl.formats.record import record_of
from bkctl.ids import LedgerId
from bkctl.protocol import runs, v2, v3
from bkctl.protocol.messages import (
    LAST_ENTRY,
    AddRequest,
    AddResponse,
    BytesLike,
    ReadRequest,
    Request,
    Status,
)
from bkctl.protocol.runs import RUNS_MAX, AddRun, ReadRun, Taken, take_requests

pytestmark = needs_compiled

protocols = pytest.mark.parametrize("is_v2", [True, False], ids=["v2", "v3"])


def frames_of(requests: list[Any], *, is_v2: bool) -> bytes:
    return b"".join(frame(each, is_v2=is_v2, txn_id=number) for number, each in enumerate(requests))


def taken(
    data: bytes, *, is_v2: bool, size_max: int = SIZE_MAX, adds_max: int = 10_000, count_max: int = 10_000
) -> Taken | None:
    # The received bytes are in the middle of a larger buffer.
    buffer = memoryview(bytearray(b"\xee" * 5 + data + b"\xee" * 20))
    found: Taken | None = take_requests(buffer, 5, 5 + len(data), size_max, adds_max, count_max, is_v2=is_v2)
    return None if found is None else (found[0] - 5, *found[1:])


def single(data: bytes, begin: int, stop: int, *, is_v2: bool) -> list[tuple[int, Request, bytes]]:
    """The requests between two offsets by the decoders: transaction id, request, and the frame of an add's answer."""
    found = []
    while begin < stop:
        end = begin + 4 + int.from_bytes(data[begin : begin + 4], "big")
        out: list[BytesLike] = []
        request: Any
        txn_id = 0
        if is_v2:
            head, request = v2.decode_request(memoryview(data), begin + 4, end)
            assert head in (v2.VERSION << 24 | v2.READ_ENTRY << 16, v2.VERSION << 24 | v2.ADD_ENTRY << 16)
        else:
            call = v3.decode_request(memoryview(data), begin + 4, end)
            assert call is not None
            header, request = call
            assert header == v3.Header(header.txn_id, v3.OPERATIONS[type(request)])
            txn_id = header.txn_id
        if isinstance(request, AddRequest):
            response = AddResponse(Status.EOK, request.ledger, request.entry_id)
            if is_v2:
                v2.encode_response(head, response, out)
            else:
                v3.encode_response(header, response, request.ledger[0], out)
        found.append((txn_id, request, b"".join(out)))
        begin = end
    assert begin == stop
    return found


def check(data: bytes, found: Taken | None, *, is_v2: bool) -> None:
    """Assert that a pass agrees with the decoders on each of its frames."""
    if found is None:
        return
    stop, adds, reads = found
    frames = single(data, 0, stop, is_v2=is_v2)
    for run in adds:
        expected: list[Any] = [
            AddRequest(run.ledger, entry_id, run.master_key, record[4:])
            for entry_id, record in zip(run.entry_ids, run.records, strict=True)
        ]
        mine = [each for each in frames if isinstance(each[1], AddRequest) and each[1].ledger == run.ledger]
        mine = [each for each in mine if each[1][2] == run.master_key]  # type: ignore[misc]
        assert [request for _, request, _ in mine] == expected
        assert [record_of(request.body) for request in expected] == run.records
        assert run.answers == b"".join(answer for _, _, answer in mine)
        assert run.size == sum(map(len, run.records))
        lac_at = 25 if run.ledger.is_scoped else 16
        lacs = [int.from_bytes(request.body[lac_at : lac_at + 8], "big", signed=True) for request in expected]
        assert run.last_add_confirmed == max(-1, *lacs)
        for request in expected:
            assert request.body[0] >= 0xA0 if run.ledger.is_scoped else request.body[0] < 0x80
            ids = struct.unpack_from(">Qq", request.body, 9 if run.ledger.is_scoped else 0)
            assert ids == (run.ledger.ledger_id, request.entry_id)
    for asked in reads:
        of_run = [each for each in frames if isinstance(each[1], ReadRequest) and each[1].ledger == asked.ledger]
        assert [request for _, request, _ in of_run] == [ReadRequest(asked.ledger, each) for each in asked.entry_ids]
        assert asked.txn_ids == ([] if is_v2 else [txn_id for txn_id, _, _ in of_run])
    assert sum(len(run.entry_ids) for run in (*adds, *reads)) == len(frames)


def plain_frame(data: bytes, *, is_v2: bool) -> tuple[type, int] | None:
    """The kind and size of a plain request at the start of `data`, as our encoders write it; None for anything else."""
    size = int.from_bytes(data[:4], "big")
    if not 4 <= size <= len(data) - 4:
        return None
    request: Any
    txn_id = 0
    try:
        if is_v2:
            request = v2.decode_request(memoryview(data), 4, 4 + size).request
        else:
            call = v3.decode_request(memoryview(data), 4, 4 + size)
            if call is None or call.request is None:
                return None
            txn_id, request = call.header.txn_id, call.request
        if frame(request, is_v2=is_v2, txn_id=txn_id) != data[: 4 + size]:
            return None
    except BkctlError:
        return None
    if isinstance(request, ReadRequest):
        is_plain = request == ReadRequest(request.ledger, request.entry_id) and request.entry_id >= 0
        return (ReadRequest, size) if is_plain else None
    if not isinstance(request, AddRequest) or request != AddRequest(*request[:4]):
        return None
    body, ledger = bytes(request.body), request.ledger
    if len(body) < (41 if ledger.is_scoped else 32) or not 0 <= request.entry_id <= ENTRY_ID_MAX:
        return None
    start = bytes((body[0],)) + ledger.scope_id.to_bytes(8, "big") if ledger.is_scoped else b""
    start += struct.pack(">Qq", ledger.ledger_id, request.entry_id)
    is_of_scope = 0xA0 <= body[0] <= 0xA4 if ledger.is_scoped else body[0] < 0x80
    return (AddRequest, size) if is_of_scope and body.startswith(start) and len(request.master_key) == 20 else None


def with_txn(request: Request, varint: bytes) -> bytes:
    """Three frames of v3, the last with a transaction id that is written in another way than the ones before."""
    txn_id = 1 << 7 * (len(varint) - 1)
    one = frame(request, is_v2=False, txn_id=txn_id)
    return one * 2 + one[:11] + varint + one[11 + len(varint) :]


@protocols
def test_pass_equals_single_decoding(is_v2: bool) -> None:
    modules = (test_add_runs, test_read_runs)
    frames = st.one_of(*(module.v2_frames if is_v2 else module.v3_frames for module in modules))

    @given(st.lists(frames, max_size=12).map(b"".join), changes, st.integers(0, 40))
    def compare(data: bytes, where: list[tuple[int, int]], cut: int) -> None:
        data = changed(data, where)[: len(data) - cut if cut < 20 else None]
        check(data, taken(data, is_v2=is_v2), is_v2=is_v2)

    compare()


@protocols
def test_request_that_is_not_plain_ends_a_pass(is_v2: bool) -> None:
    plain = [frame(each(PLAIN[1], number), is_v2=is_v2) for number in range(3) for each in (add, ReadRequest)]
    odd: list[Request] = [
        add(PLAIN[1], 3, recovery_add=True),
        add(PLAIN[1], 3, high_priority=True),
        add(PLAIN[1], ENTRY_ID_MAX + 1),
        AddRequest(PLAIN[1], 3, KEYS[0], entry(PLAIN[1], 3)[:31]),
        *test_read_runs.ODD[:3],
    ]
    if not is_v2:
        odd += [
            add(PLAIN[1], 3, deferred_sync=True),
            AddRequest(PLAIN[1], 4, KEYS[0], entry(PLAIN[1], 3)),
            AddRequest(PLAIN[1], 3, KEYS[0], entry(SCOPED[0], 3)),
            *test_read_runs.ODD[3:],
            *test_read_runs.ODD_V3,
        ]
    for request in odd:
        between = frame(request, is_v2=is_v2)
        found = taken(b"".join((*plain[:4], between, *plain[4:])), is_v2=is_v2)
        assert found is not None
        assert (found[0], [run.entry_ids for run in (*found[1], *found[2])]) == (len(b"".join(plain[:4])), [[0, 1]] * 2)
        assert taken(between + plain[0], is_v2=is_v2) is None
    data = b"".join(plain)
    for end in range(len(data)):
        found = taken(data[:end], is_v2=is_v2)
        assert (0 if found is None else found[0]) == max(
            size for size in (len(b"".join(plain[:count])) for count in range(6)) if size <= end
        )
    for size_max, count in ((len(plain[0]) - 5, 0), (len(plain[0]) - 4, 6)):
        found = taken(data, is_v2=is_v2, size_max=size_max)
        assert (0 if found is None else found[0]) == len(b"".join(plain[:count]))


@protocols
def test_any_bytes_are_taken_as_far_as_they_are_plain(is_v2: bool) -> None:
    modules = (test_add_runs, test_read_runs)
    frames = st.one_of(*(module.v2_frames if is_v2 else module.v3_frames for module in modules))

    @given(
        st.lists(st.one_of(frames, frames, st.binary(max_size=60)), max_size=14).map(b"".join),
        changes,
        st.integers(0, 30),
        st.sampled_from((0, 1, 3, 10_000)),
        st.sampled_from((0, 1, 5, 10_000)),
        st.sampled_from((19, 20, 30, 60, 150, SIZE_MAX)),
    )
    @example(with_txn(add(PLAIN[1], 3), b"\x85\x00"), [], 0, 5, 5, SIZE_MAX)
    @example(with_txn(add(PLAIN[1], 3), b"\xff" * 9 + b"\x7f"), [], 0, 5, 5, SIZE_MAX)
    @example(with_txn(ReadRequest(PLAIN[1], 3), b"\x85\x00"), [], 0, 5, 5, SIZE_MAX)
    @example(with_txn(ReadRequest(PLAIN[1], 3), b"\xff" * 9 + b"\x7f"), [], 0, 5, 5, SIZE_MAX)
    @example(b"", [], 0, 5, 5, SIZE_MAX)
    @example(b"\xff" * 100, [], 0, 5, 5, SIZE_MAX)
    def compare(
        data: bytes, where: list[tuple[int, int]], at: int, adds_max: int, count_max: int, size_max: int
    ) -> None:
        buffer = memoryview(changed(data, where) + bytes(20))
        arguments = (buffer, min(at, len(data)), len(data), size_max, adds_max, count_max)
        found = take_requests(*arguments, is_v2=is_v2)
        at, end = arguments[1:3]
        stop, adds, reads = found or (at, [], [])
        check(bytes(buffer[at:end]), None if found is None else (stop - at, adds, reads), is_v2=is_v2)
        for run in (*adds, *reads):
            assert type(run.ledger) is LedgerId
            assert type(run) is (AddRun if hasattr(run, "records") else ReadRun)
        add_count, count = (sum(len(run.entry_ids) for run in of) for of in (adds, (*adds, *reads)))
        assert add_count <= adds_max
        assert count <= count_max
        following = plain_frame(bytes(buffer[stop:end]), is_v2=is_v2)
        if following is not None and count < count_max and following[1] <= size_max:
            assert issubclass(following[0], AddRequest), "a read is left"
            assert add_count == adds_max

    compare()


def test_every_change_of_one_byte_is_taken_as_the_decoders_do() -> None:
    ledger = LedgerId(9, 1 << 40)
    for request in (add(ledger, 70_000, b"payload"), ReadRequest(ledger, 70_000)):
        example_frame = frame(request, is_v2=False, txn_id=300_000)
        for at, value in itertools.product(range(4, min(len(example_frame), 110)), (0, 1, 5, 0x7F, 0x80, 0xFF)):
            data = example_frame[:at] + bytes((value,)) + example_frame[at + 1 :]
            check(data, taken(data, is_v2=False), is_v2=False)


@protocols
def test_compiled_loop_refuses_arguments_that_do_not_fit(is_v2: bool) -> None:
    take = functools.partial(runs.compiled.take_requests, is_v2)
    types = (LedgerId, AddRun, ReadRun)
    for at, end in ((0, 11), (-1, 5)):
        with pytest.raises(ValueError, match="not in the buffer"):
            take(memoryview(bytes(10)), at, end, 100, 100, 100, types)
    for wrong in ((LedgerId, AddRun, list), (LedgerId, 1, ReadRun), (object, AddRun, ReadRun)):
        with pytest.raises(TypeError):
            take(memoryview(bytes(10)), 0, 10, 100, 100, 100, wrong)


@protocols
def test_alternating_requests_are_runs_by_ledger_in_their_order(is_v2: bool) -> None:
    ledgers = (*PLAIN, *(() if is_v2 else SCOPED))
    requests: list[Request] = []
    for entry_id in (7, 3, 9):
        for ledger in ledgers:
            requests += [add(ledger, entry_id, b"p" * entry_id), ReadRequest(ledger, entry_id)]
            requests += [add(ledger, entry_id, b"other key", KEYS[1])]
    data = frames_of(requests, is_v2=is_v2)
    found = taken(data, is_v2=is_v2)
    assert found is not None
    stop, adds, reads = found
    assert stop == len(data)
    assert [(run.ledger, run.master_key) for run in adds] == [(ledger, key) for ledger in ledgers for key in KEYS]
    for run in adds:
        expected = [each for each in requests if isinstance(each, AddRequest) and each.ledger == run.ledger]
        expected = [each for each in expected if each.master_key == run.master_key]
        assert run.entry_ids == [7, 3, 9]
        assert [record[4:] for record in run.records] == [each.body for each in expected]
        assert run.last_add_confirmed == 8
    assert [(run.ledger, run.entry_ids) for run in reads] == [(ledger, [7, 3, 9]) for ledger in ledgers]
    if not is_v2:
        numbers = sorted(txn_id for run in reads for txn_id in run.txn_ids)
        assert numbers == [number for number, each in enumerate(requests) if isinstance(each, ReadRequest)]


@protocols
def test_pass_ends_at_its_limits_and_at_other_requests(is_v2: bool) -> None:
    requests: list[Request] = [add(PLAIN[1], 0), ReadRequest(PLAIN[1], 0), add(PLAIN[0], 1), ReadRequest(PLAIN[0], 1)]
    size_of = [len(frame(each, is_v2=is_v2)) for each in requests]
    data = frames_of(requests, is_v2=is_v2)
    for adds_max, count_max, count in ((2, 4, 4), (9, 3, 3), (1, 9, 2), (9, 1, 1), (9, 0, 0), (0, 9, 0)):
        found = taken(data, is_v2=is_v2, adds_max=adds_max, count_max=count_max)
        assert (0 if found is None else found[0]) == sum(size_of[:count])
    for odd in (add(PLAIN[1], 3, recovery_add=True), ReadRequest(PLAIN[1], LAST_ENTRY)):
        found = taken(data + frame(odd, is_v2=is_v2) + data, is_v2=is_v2)
        assert found is not None
        assert found[0] == len(data)


@protocols
def test_more_ledgers_than_a_pass_has_runs_take_several(is_v2: bool) -> None:
    """Ledger ids whose hashes meet end a pass of the compiled loop early; nothing is lost or taken twice."""
    numbers = random.Random(5).sample(range(2**62), 1000)
    numbers += [number << 45 for number in range(1500)] + list(range(1, 1500))
    ledgers = [LedgerId(0, number) for number in dict.fromkeys(numbers)]
    requests = [ReadRequest(ledger, 5) if at % 2 else add(ledger, 5) for at, ledger in enumerate(ledgers)]
    data = frames_of(requests, is_v2=is_v2)
    buffer, at, passes = memoryview(data), 0, 0
    seen: list[LedgerId] = []
    while at < len(data):
        found = take_requests(buffer, at, len(data), SIZE_MAX, 10_000, 10_000, is_v2=is_v2)
        assert found is not None
        at, adds, reads = found
        assert 0 < len(adds) + len(reads) <= RUNS_MAX
        seen += [run.ledger for run in (*adds, *reads)]
        passes += 1
    assert sorted(seen) == sorted(ledgers)
    assert passes >= len(ledgers) / RUNS_MAX


def test_pass_keeps_no_view_of_the_receive_buffer() -> None:
    buffer = bytearray(frame(add(PLAIN[1], 1, b"payload"), is_v2=True) + frame(ReadRequest(PLAIN[1], 1), is_v2=True))
    with memoryview(buffer) as view:
        found = take_requests(view, 0, len(buffer), SIZE_MAX, 10, 10, is_v2=True)
    buffer.clear()  # BufferError while a view is left
    assert found is not None
    assert found[1][0].records[0].endswith(b"payload")
