"""Reads of many nodes: what they send, and that nothing that a server answers brings them down."""

from __future__ import annotations

import contextlib
import pickle
import struct
import threading
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bkctl.metadata.backends.zookeeper.multi_read import NO_ANSWER, Answers, MultiRead, parse_answers
from bkctl.metadata.cluster import open_cluster
from bkctl.metadata.store import NEW, Versioned

STAT = struct.pack(">qqqqiiiqiiq", 1, 2, 1_700_000_000_123, 4, 5, 6, 7, 0, 9, 10, 11)


def frame(body: bytes) -> bytes:
    return struct.pack(">i", len(body)) + body


def result(operation: int, body: bytes) -> bytes:
    return struct.pack(">i?i", operation, False, 0) + body


def refused(error: int) -> bytes:
    return struct.pack(">i?ii", -1, False, error, error)


END = struct.pack(">i?i", -1, True, -1)


def names(*values: bytes) -> bytes:
    return result(8, struct.pack(">i", len(values)) + b"".join(frame(value) for value in values))


def answers(operation: str, *results: bytes) -> list[Any]:
    return parse_answers(b"header" + b"".join(results) + END, 6, operation, len(results))


def test_one_request_has_many_reads() -> None:
    read = struct.pack(">i?ii", 4, False, -1, 4)
    sent = b"".join(read + path + b"\0" for path in (b"/r/a", b"/r/b", b"/r/c")) + END
    assert MultiRead(4, ["/r/a", "/r/b", "/r/c"]).serialize() == sent


def test_answers_are_values_missing_nodes_and_other_errors() -> None:
    found = answers("get", result(4, frame(b"value") + STAT), refused(-101), refused(-102))
    assert found == [Versioned(b"value", 5, 1_700_000_000_123), None, NO_ANSWER]


def test_a_read_without_an_answer_is_repeated_once_and_only_where_the_store_is() -> None:
    data = result(4, frame(b"value") + STAT) + refused(-102) + refused(-101) + END
    found = Answers("get", 3, (b"header" + data, 6))
    value = Versioned(b"value", 5, 1_700_000_000_123)
    assert list(pickle.loads(pickle.dumps(found))) == [value, NO_ANSWER, None]
    asked: list[tuple[int, float]] = []

    def repeat(index: int, waited_s: float) -> str:
        asked.append((index, waited_s))
        return "again"

    found.repeat, found.waited_s = repeat, 2.0
    assert [list(found), list(found)] == [[value, "again", None]] * 2
    assert asked == [(1, 2.0)]
    assert list(Answers("get", 2, (b"cut short", 0))) == [NO_ANSWER] * 2


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
def test_names_of_any_length_are_sorted(values: tuple[bytes, ...]) -> None:
    following = names(b"z9999", b"z0000")
    expected = sorted(value.decode() for value in values)
    found = answers("children", names(*values), following, names(*values))
    assert found == [expected, ["z0000", "z9999"], expected]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x00\x00",
        result(4, frame(b"value") + STAT),
        names(b"abcd")[:-2],
        result(8, struct.pack(">i", 1 << 30)),
        result(8, struct.pack(">ii", 1, -5)),
        names(b"\xff\xfe"),
    ],
    ids=range(7),
)
def test_malformed_answer_is_refused(data: bytes) -> None:
    with pytest.raises((ValueError, struct.error)):
        parse_answers(data, 0, "children", 1)


@settings(max_examples=300, deadline=None)
@given(data=st.binary(max_size=200), operation=st.sampled_from(("get", "children", "origin")))
def test_any_bytes_are_answers_or_refused(data: bytes, operation: str) -> None:
    with contextlib.suppress(ValueError, struct.error):
        assert len(parse_answers(data, 0, operation, 2)) == 2


def test_store_reads_each_node_without_multi_read(zookeeper: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with ZooKeepers before 3.6, whose answer is an error, or the end of the connection."""
    with open_cluster(zookeeper.metadata_uri(zookeeper.new_root()), create=True) as cluster:
        paths = [f"many/{number:04d}" for number in range(200)]
        for path in paths:
            cluster.store.put(path, path.encode(), NEW)
        expected = [path.encode() for path in paths]
        reads = cluster.store  # type: ignore[attr-defined]
        for operation in (1234, 22):
            monkeypatch.setattr(MultiRead, "type", operation)
            reads.paused_until_s = 0.0
            found = cluster.store.get_many(iter(paths))
            assert [one.value for one in found if one is not None] == expected
            assert (reads.many is not None, reads.paused_until_s == 0.0) == (operation == 22, operation == 22)
            assert cluster.store.get("many/0000") is not None


def test_threads_share_one_session_of_many_reads(zookeeper: Any) -> None:
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
