"""The reader of many nodes: what it sends, and that nothing that a server answers brings it down."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.waiting import LIMIT_S

from bkctl.metadata.backends.zookeeper.zookeeper_reader import NO_ANSWER, Reader, ReaderLost
from bkctl.metadata.cluster import open_cluster
from bkctl.metadata.store import NEW, Versioned

SESSION = struct.pack(">iiiqi16s?", 37, 0, 10_000, 77, 16, b"p" * 16, False)
STAT = struct.pack(">qqqqiiiqiiq", 1, 2, 1_700_000_000_123, 4, 5, 6, 7, 0, 9, 10, 11)


def frame(body: bytes) -> bytes:
    return struct.pack(">i", len(body)) + body


def header(xid: int, error: int = 0) -> bytes:
    return struct.pack(">iqi", xid, 99, error)


def result(operation: int, body: bytes) -> bytes:
    return struct.pack(">i?i", operation, False, 0) + body


def refused(error: int) -> bytes:
    return struct.pack(">i?ii", -1, False, error, error)


END = struct.pack(">i?i", -1, True, -1)
SYNCED = frame(header(1) + struct.pack(">i", 2) + b"/r")


def answer(*results: bytes, xid: int = 2) -> bytes:
    return frame(header(xid) + b"".join(results) + END)


def names(*values: bytes) -> bytes:
    return result(8, struct.pack(">i", len(values)) + b"".join(frame(value) for value in values))


@contextlib.contextmanager
def talking(
    *answers: bytes, closing: bool = True, timeout_s: float = LIMIT_S
) -> Iterator[tuple[Reader, socket.socket]]:
    """A reader whose server says `answers`, whatever it is asked, and closes the connection."""
    ours, theirs = socket.socketpair()
    theirs.sendall(SESSION + b"".join(answers))
    if closing:
        theirs.shutdown(socket.SHUT_WR)
    reader = Reader(
        lambda: ours, timeout_s=timeout_s, session_timeout_s=10, last_zxid=42, digest_login=None, sasl_client=None
    )
    with theirs:
        yield reader, theirs
        reader.close()


def test_reader_sends_the_last_zxid_and_one_request_for_many_reads() -> None:
    with talking(SYNCED, answer(result(4, frame(b"value") + STAT), refused(-101), refused(-102))) as (reader, server):
        batch = reader.get(["/r/a", "/r/b", "/r/c"])
        assert reader.answers(batch) == [Versioned(b"value", 5, 1_700_000_000_123), None, NO_ANSWER]
        sent = server.recv(65536)
    connect, rest = sent[:49], sent[49:]
    assert struct.unpack(">iiqiqi16s?", connect) == (45, 0, 42, 10_000, 0, 16, bytes(16), False)
    sync = struct.pack(">iii", 1, 9, 4) + b"/r/a"
    read = struct.pack(">i?ii", 4, False, -1, 4)
    many = struct.pack(">ii", 2, 22) + b"".join(read + path + b"\0" for path in (b"/r/a", b"/r/b", b"/r/c")) + END
    assert rest == frame(sync) + frame(many)


@pytest.mark.parametrize(
    "values",
    [
        (),
        (b"L0002", b"L0001"),
        (b"L0001", b"L00002", b"L3"),
        ("ä".encode(), b"ab", "日".encode()),
        (b"x" * 127, b"y" * 127),
        (b"x" * 128, b"y" * 128),
        (b"x" * 300, b"y" * 255),
        (b"", b"a"),
        (b"abcde", b"ab"),
    ],
)
def test_reader_sorts_names_of_any_length(values: tuple[bytes, ...]) -> None:
    following = names(b"z9999", b"z0000")
    with talking(SYNCED, answer(names(*values), following, names(*values))) as (reader, _):
        expected = sorted(value.decode() for value in values)
        batch = reader.children(["/r/a", "/r/b", "/r/c"])
        assert reader.answers(batch) == [expected, ["z0000", "z9999"], expected]


def test_reader_answers_batches_in_request_order_for_any_waiter() -> None:
    second = frame(header(3) + struct.pack(">i", 0)) + answer(names(b"b"), xid=4)
    with talking(SYNCED, answer(names(b"a")), second) as (reader, _):
        batches = reader.children(["/r/a"]), reader.children(["/r/b"])
        assert reader.answers(batches[1]) == [["b"]]
        assert reader.answers(batches[0]) == [["a"]]


@pytest.mark.parametrize(
    "answers",
    [
        (),
        (SYNCED,),
        (SYNCED, frame(header(2, -6))),
        (SYNCED, answer(names(b"a"), xid=3)),
        (answer(names(b"a")),),
        (SYNCED, answer(result(4, frame(b"value") + STAT))),
        (SYNCED, frame(header(2) + names(b"abcd")[:-2])),
        (SYNCED, answer(result(8, struct.pack(">i", 1 << 30)))),
        (SYNCED, answer(result(8, struct.pack(">ii", 1, -5)))),
        (SYNCED, answer(names(b"\xff\xfe"))),
        (SYNCED, struct.pack(">i", 1 << 30)),
        (SYNCED, struct.pack(">i", -1)),
        (b"\x00\x00",),
    ],
    ids=range(13),
)
def test_malformed_answer_ends_the_reader_and_its_batches(answers: tuple[bytes, ...]) -> None:
    with talking(*answers) as (reader, _):
        batches = reader.children(["/r/a"]), reader.children(["/r/b"])
        for batch in (*batches, batches[0]):
            with pytest.raises(ReaderLost):
                reader.answers(batch)
        with pytest.raises(ReaderLost):
            reader.get(["/r/a"])


@settings(max_examples=300, deadline=None)
@given(data=st.binary(max_size=200) | st.binary(max_size=200).map(lambda data: SYNCED + frame(header(2) + data)))
def test_any_bytes_are_an_answer_or_end_the_reader(data: bytes) -> None:
    for operation in ("get", "children"):
        with talking(data) as (reader, _):
            batch = getattr(reader, operation)(["/r/a", "/r/b"])
            with contextlib.suppress(ReaderLost):
                assert len(reader.answers(batch)) == 2


@pytest.mark.parametrize("session", [b"", b"\x00", SESSION[:20], struct.pack(">iii", 8, 0, 0), frame(b"1")])
def test_refused_session_is_reader_lost(session: bytes) -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        theirs.sendall(session)
        theirs.shutdown(socket.SHUT_WR)
        with pytest.raises(ReaderLost):
            Reader(lambda: ours, timeout_s=5, session_timeout_s=10, last_zxid=0, digest_login=None, sasl_client=None)
    assert ours.fileno() == -1


def test_silent_server_is_reader_lost_with_the_waited_time() -> None:
    with talking(closing=False, timeout_s=0.05) as (reader, _):
        batch = reader.get(["/r/a"])
        with pytest.raises(ReaderLost) as caught:
            reader.answers(batch)
        assert caught.value.waited_s == 0.05


def test_store_reads_through_kazoo_without_multi_read(zookeeper: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with ZooKeepers before 3.6, whose answer is an error, or the end of the connection."""
    import bkctl.metadata.backends.zookeeper.zookeeper_reader as module

    with open_cluster(zookeeper.metadata_uri(zookeeper.new_root()), create=True) as cluster:
        paths = [f"many/{number:04d}" for number in range(200)]
        for path in paths:
            cluster.store.put(path, path.encode(), NEW)
        expected = [path.encode() for path in paths]
        for operation in (1234, 22):
            monkeypatch.setattr(module, "_MULTI_READ", operation)
            cluster.store._reads.no_reader_until_s = 0.0  # type: ignore[attr-defined]
            found = cluster.store.get_many(iter(paths))
            assert [one.value for one in found if one is not None] == expected
            assert (cluster.store._reads.reader is None) == (operation != 22)  # type: ignore[attr-defined]


def test_idle_reader_is_replaced_without_a_pause(zookeeper: Any) -> None:
    """A pause would read each node by a request of its own, as after a failure."""
    with open_cluster(zookeeper.metadata_uri(zookeeper.new_root()), create=True) as cluster:
        paths = [f"many/{number:04d}" for number in range(200)]
        for path in paths:
            cluster.store.put(path, path.encode(), NEW)
        reads = cluster.store._reads  # type: ignore[attr-defined]
        assert len(list(cluster.store.get_many(paths))) == len(paths)
        idle = reads.reader
        idle._used_at -= 1000
        assert [found and found.value for found in cluster.store.get_many(paths)] == [path.encode() for path in paths]
        assert reads.reader is not None
        assert reads.reader is not idle
        assert reads.no_reader_until_s < time.monotonic()


def test_threads_share_one_reader(zookeeper: Any) -> None:
    with open_cluster(zookeeper.metadata_uri(zookeeper.new_root()), create=True) as cluster:
        paths = [f"many/{number:04d}" for number in range(300)]
        for path in paths:
            cluster.store.put(path, path.encode(), NEW)
        found: list[list[bytes]] = []

        def read(order: list[str]) -> None:
            values = []
            for index, one in enumerate(cluster.store.get_many(iter(order))):
                assert one is not None
                values.append(one.value)
                if index % 100 == 0:
                    time.sleep(0.01)
            found.append(sorted(values) if values == [path.encode() for path in order] else values)

        threads = [threading.Thread(target=read, args=(paths[start:] + paths[:start],)) for start in range(0, 300, 50)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == [[path.encode() for path in paths]] * len(threads)
